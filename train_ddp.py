"""Phases 1 and 3 under DDP.

Phase 1 pretrains the risk GNN and the world model on recorded traffic, first the next state, then the next H states
and conflicts. Phase 3 improves the controller on live SUMO under a limit on the intervention cost, with the world
model (auxiliary loss) and the shield's risk head.

    python train_ddp.py --phase 1 --config configs/quick.yaml                           # one process
    torchrun --nproc_per_node=2 train_ddp.py --phase 1                                  # two GPUs, or two CPU ranks
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train_ddp.py --phase 3

Interrupt it (Ctrl-C) and start it again with the same command: it continues.
"""
import contextlib
import math
import sys
import time
from runtime.resources import before_torch, share_of_workers
if __name__ == "__main__":
    before_torch()
from env.launch import SumoError, die_with_launcher  # before torch, which takes seconds: it notes who our parent is

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from configs import ConfigError, WriteError, console
from configs.command_line import parse
from data.augment import AugmentedDataset
from data.dataset import BlockSampler, ChunkedDataset, bad_rows
from data.layout import DataError
from data.loading import StreamingDataset, make_loader, windows
from data.location import open_data
from data.settings import processed_folder, traffic_hash
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from models import objectives, risk_gnn
from models.losses import ERRORS, ConstrainedLoss, WorldModelLoss, prediction_errors, prepare
from models.policy import Driver, TrafficModel
from runtime.batch_size import find_batch_size
from runtime.checkpoint import CheckpointError, SaveError, seed_random
from runtime.distributed import StopRequest, start_team, wrap
from runtime.ending import run_script
from runtime.guard import MemoryGuard, split
from runtime.metrics import Metrics
from runtime.precision import Precision, compile_gnn, require_finite
from runtime.rollout import Collector, check_collection, mean_icvs, summarise
from runtime.schedule import learning_rate, reduce_on_plateau, set_learning_rate
from runtime.training import (Progress, episode_facts, first_weights, mean_logs, rescale_values, run_folder,
                              save_config, to_device)

USER_ERRORS, TROUBLES = (ConfigError, DataError, SumoError, CheckpointError), (WorkerError, SaveError, WriteError)


def optimiser_step(module, micro_batches, optimizer, precision, clip_norm):
    """One optimiser step from several micro-batches: [(arguments of module.forward)], gradients summed.

    All but the last forward and backward run under `no_sync`, so there is one gradient all-reduce per step. The device
    is waited for once, to see whether the gradients are finite. Returns (logged values of the whole step, gradient
    norm, whether the step was skipped because of an overflow), the first two still on the device.
    """
    logs, last = [], len(micro_batches) - 1
    for i, arguments in enumerate(micro_batches):
        silent = isinstance(module, DistributedDataParallel) and i != last
        with module.no_sync() if silent else contextlib.nullcontext():
            with precision.autocast():
                loss, log = module(*arguments)
            precision.scaler.scale(loss).backward()
        logs.append({"loss": loss.detach(), **{k: v.detach() for k, v in log.items() if v.dim() == 0}})
    precision.scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf)
    if not precision.scaler.is_enabled():
        require_finite(norm, module, logs[-1])
    precision.scaler.step(optimizer)
    skipped = precision.scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return {name: sum(log[name] for log in logs) for name in logs[0]}, norm, skipped  # each is a part of a sum


def counted_step(progress, module, micro_batches, precision, clip_norm):
    """`optimiser_step` of a phase, whose `updates` count it unless it was skipped; returns its log."""
    log, norm, skipped = optimiser_step(module, micro_batches, progress.optimizer, precision, clip_norm)
    progress.counters["updates"] += not skipped
    return {**log, "grad_norm": norm, "overflow_share": torch.tensor(float(skipped))}


def prepare_model(cfg, team, model, amp):
    """Say what a phase trains and how exactly, and compile it where asked; returns the phase's Precision."""
    precision = Precision(amp, team.device, team.any)
    team.say(model.describe())
    compile_gnn(model.risk_gnn, cfg.model.compile, team.say)
    team.say(precision.reason)
    return precision


def open_records(progress, epochs):
    """Write the run's config.yaml, unless the phase has done its `epochs` with another one; returns its Metrics."""
    cfg, team, folder, epoch = progress.cfg, progress.team, progress.folder, progress.counters["epoch"]
    progress.note_changes(epochs)
    if team.is_main and epoch < epochs:
        save_config(cfg, folder.parent)
    metrics = Metrics(folder.parent, int(folder.name[-1]), team.is_main, cfg.run.tensorboard)
    metrics.drop_after(epoch)
    return metrics


# ---- phase 1: world model on recorded traffic ------------------------------------------------------------------

def phase1(cfg, team, guard):
    """Train risk GNN and world model; controller and shield stay frozen."""
    p, folder = cfg.phase1, run_folder(cfg, team)
    data, options = open_data(cfg, team, guard), (cfg.data.open_chunks, cfg.data.cache_mb, cfg.data.cache_timeout_s)
    train, held_out = (ChunkedDataset(data, split, *options) for split in ("train", "held_out"))
    sampler = BlockSampler(train.sizes, p.batch_size, team.rank, team.world, cfg.run.seed, p.loader.drop_last,
                           cfg.data.open_chunks, p.loader.rank_weights)
    per_epoch = (len(sampler) if p.loader.drop_last else len(sampler) + p.accumulation - 1) // p.accumulation
    if not per_epoch:
        raise DataError(f"{cfg.data.folder}: {len(train)} training samples do not fill one step of {team.world} "
                        f"ranks x {p.batch_size} x accumulation {p.accumulation}; collect more or lower one of them")
    team.say(f"phase 1: {len(train)} training and {len(held_out)} held-out samples; global batch {team.world} ranks x "
             f"{p.batch_size} x accumulation {p.accumulation} = {team.world * p.batch_size * p.accumulation}")
    model = TrafficModel(cfg).to(team.device)
    model.set_statistics(train.statistics)
    model.freeze("controller", "safety_shield")
    precision = prepare_model(cfg, team, model, p.amp)
    optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], p.lr, weight_decay=p.weight_decay)
    progress = Progress(cfg, team, folder / "phase1", model, optimizer, precision.scaler)
    progress.resume()
    progress.begin_data(processed_folder(cfg).name, p.epochs)
    c, metrics, stage = progress.counters, open_records(progress, p.epochs), None
    augmented = AugmentedDataset(train, p.augment, cfg.run.seed)
    loader = make_loader(augmented, sampler, p.loader, pin_memory=team.device.type == "cuda")
    guard.phase, guard.caches = p, [train.open.drop_copies, held_out.open.drop_copies]
    while c["epoch"] < p.epochs:
        before, stage = stage, 1 if c["epoch"] < p.stage1_epochs else 2
        if stage != before:
            for q in model.world_model.stage2_parameters():
                q.requires_grad_(stage == 2)  # DDP must not wait for parameters that this stage does not use
            module = wrap(WorldModelLoss(model, stage, p), team, cfg.ddp)
        # The position is kept in samples of all ranks together, so another number of ranks continues at the same one.
        if not c["samples"]:
            c["window"] = cfg.data.open_chunks  # the order of an epoch depends on it; an interrupted one keeps its own
        sampler.epoch, sampler.done, sampler.window = c["epoch"], c["samples"], c.get("window", cfg.data.open_chunks)
        start, log = time.perf_counter(), train_epoch(cfg, team, guard, progress, module, loader, precision, per_epoch)
        if log is None:
            return guard.leave(f"in epoch {c['epoch'] + 1}")
        facts = validate(cfg, team, module, held_out, stage)
        c["epoch"], c["samples"] = c["epoch"] + 1, 0
        reduce_on_plateau(c, stage, facts["loss_held_out"], p)
        metrics.record(c["epoch"], p.epochs, stage=stage, **log, **facts, updates=c["updates"],
                       **guard.facts(), time_learn=time.perf_counter() - start)
        progress.save(facts["loss_held_out"] if stage == 2 else math.inf, may_fail=c["epoch"] < p.epochs)
    team.say(f"phase 1 finished: {folder / 'phase1'}")


def train_epoch(cfg, team, guard, progress, module, loader, precision, per_epoch):
    """The rest of one epoch. Returns its means, or None when it must stop and everything is saved."""
    p, c, logs, start, seen, left_out = cfg.phase1, progress.counters, [], time.perf_counter(), 0, 0
    size = team.world * p.batch_size * p.accumulation  # samples of an optimiser step
    for batches in windows(loader, p.accumulation, p.loader.drop_last):
        bad = sum((bad_rows(loader.dataset, one) for one in batches if one["bad"].any()), [])
        window = [prepare(to_device(one, team.device), cfg.data.future) for one in batches]
        count, anywhere, read = team.all_sum([sum(int(w["target_valid"].sum()) for w in window), len(bad),
                                              sum(len(one["bad"]) for one in batches)])
        seen, left_out = seen + read, left_out + int(anywhere)
        if anywhere:
            leave_out(cfg, team, bad)
        step = c["epoch"] * per_epoch + c["samples"] // size  # in steps of now: those of `updates` may have been others
        if c["updates"] < p.warmup_steps:
            step = min(step, c["updates"])  # steps that an overflow skipped do not warm up
        rate = learning_rate(step, p.epochs * per_epoch, p.lr, p.warmup_steps)
        set_learning_rate(progress.optimizer, rate * c["lr_factor"])
        share = max(count, 1) / team.world  # DDP averages over ranks
        micro_batches = split([(w, share) for w in window], cfg.memory.split)
        logs.append(counted_step(progress, module, micro_batches, precision, p.clip_norm))
        c["samples"] += size * len(window) // p.accumulation
        console.progress(f"epoch {c['epoch'] + 1}: sample", c["samples"], per_epoch * size, always=False)
        if guard.must_stop():
            return progress.save()
    if not logs:  # stopped exactly at the end of this epoch
        return {}
    return {**mean_logs(team, logs), "samples_per_s": seen / (time.perf_counter() - start), "not_finite": left_out,
            "loss_scale": precision.scaler.get_scale(), "lr": progress.optimizer.param_groups[0]["lr"]}


def validate(cfg, team, module, held_out, stage):
    """Held-out losses and errors against "constant velocity"; every rank takes its share of the samples."""
    inner, names, bad = getattr(module, "module", module), ERRORS[:6] if stage == 1 else ERRORS, []
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for begin in range(team.rank * 32, len(held_out), team.world * 32):
        samples = held_out.__getitems__(range(begin, min(begin + 32, len(held_out))))
        bad += bad_rows(held_out, samples)
        batch = prepare(to_device(samples, team.device), cfg.data.future)
        with torch.no_grad():
            loss, out = inner(batch, 1.0)
        sums += prediction_errors(out, batch, cfg.env.control_interval, loss, stage)
    *sums, anywhere = team.all_sum([*sums.flatten().tolist(), len(bad)])
    if anywhere:
        leave_out(cfg, team, bad)
    return {name: (total / max(count, 1)) ** (0.5 if name.startswith("rmse") else 1)
            for name, total, count in zip(names, sums[::2], sums[1::2])}


def leave_out(cfg, team, bad):
    """Rows with NaN or infinite values, found on any rank: all ranks stop, or all go on without them (they come without
    vehicles, so that they count as no target)."""
    named = "; ".join(sum(team.gather(bad), []))
    if cfg.data.on_bad_row == "stop":
        raise DataError(f"{named}: NaN or infinite values; data.check lists all, data.on_bad_row=skip leaves them out")
    team.say(f"left out, NaN or infinite values: {named}")


# ---- phase 3: constrained optimisation on live SUMO ------------------------------------------------------------

def phase3(cfg, team, guard):
    """Maximise reward subject to C_int <= limit; the GNN stays frozen, its embeddings come from the rollout."""
    p, r, folder = cfg.phase3, cfg.rollout, run_folder(cfg, team)
    guard.phase = p
    check_scenario(cfg, folder / "scenario")
    model = TrafficModel(cfg).to(team.device)
    begun = first_weights(model, cfg, folder, (2, 1), team.say)
    model.freeze("risk_gnn")
    precision = prepare_model(cfg, team, model, p.amp)
    model.controller.accel_limit = cfg.evaluate.accel_limit
    objective = ConstrainedLoss(model, cfg.phase2, p)  # its anchor is phase 2's policy, or that of the checkpoint
    optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], p.lr, weight_decay=p.weight_decay)
    model.freeze("risk_gnn", *["world_model"] * (not p.world_model_weight))  # known to the optimiser: that may change
    progress = Progress(cfg, team, folder / "phase3", model, optimizer, precision.scaler, objective.reference)
    per_episode = math.ceil(cfg.env.episode_steps / p.fragment_length)  # epochs
    (c := progress.counters).update(multiplier=p.multiplier_init, integral=p.multiplier_init, last_cost=math.inf,
                                    efforts=[], icvs=[])
    progress.resume(begun, traffic_hash(cfg))
    if p.risk_weight:
        model.safety_shield.risk_trained.fill_(True)  # from now on it has a say
    metrics, module = open_records(progress, p.epochs), wrap(objective, team, cfg.ddp)
    with make_pool(cfg, share_of_workers(r, team.local_world), r.num_envs_per_worker, str(folder / "scenario")) as pool:
        check_collection(cfg, team, pool.num_envs)
        boundary = True
        while c["epoch"] < p.epochs:
            if boundary:
                driver = Driver(model, pool.num_envs, cfg.env.max_vehicles, team.device, autocast=precision.autocast,
                                leave_below=cfg.evaluate.leave_below, leave_after=cfg.evaluate.leave_after)
                collector = Collector(pool, driver, cfg.run.seed, 3, team.rank * pool.num_envs, p.sequence_length)
                collector.take_turns(len(cfg.env.suite), p.checkpoint_every)
                collector.begin(c["epoch"])
            batch, facts = collector.collect(p.fragment_length)
            start = time.perf_counter()
            limit = objectives.limit_at(c["epoch"], p.limit_start, p.limit_end, p.limit_epochs)
            sequences, summary = make_sequences(cfg, team, batch.dense(), c["multiplier"])
            log = learn_constrained(cfg, team, progress, module, sequences, precision)
            c["epoch"] += 1
            c["env_steps"] += team.world * pool.num_envs * p.fragment_length
            metrics.record(c["epoch"], p.epochs, limit=limit, multiplier=c["multiplier"], **summary, **log,
                           **episode_facts(team, facts), env_steps=int(c["env_steps"]), updates=c["updates"],
                           time_learn=time.perf_counter() - start, **guard.facts())
            if log["overflow_share"] < 1:  # else no step was taken at the price as it is
                objectives.move_multiplier(c, summary["c_int"], summary["icvs"], limit, per_episode, p)
            asked = guard.must_stop()
            spare = p.passes * max(len(sequences["before"]) // 2 // p.batch_size, 1) >= p.accumulation  # half would do
            fewer = spare and guard.give_up_worker(pool)
            boundary = asked or fewer or c["epoch"] == p.epochs or c["epoch"] % p.checkpoint_every == 0
            if boundary:
                progress.save(-c["epoch"], may_fail=c["epoch"] < p.epochs and not asked)  # the last is the best
            if asked and c["epoch"] < p.epochs:
                return guard.leave(f"after epoch {c['epoch']}")
    team.say(f"phase 3 finished: {folder / 'phase3'}")


def advantages(cfg, team, batch, price):
    """{"advantage", "return", "cost_return", "price" of effort}, each [T, E]. The first is that of the reward alone,
    normalised over all ranks; `price` per unit of C_int, of which an effort is 1 / mean_icvs(batch) at any time, is in
    its unit."""
    ppo, per_step = cfg.phase2, price * cfg.env.control_interval / cfg.env.horizon_s
    advantage, returns, cost_returns = objectives.rollout_advantages(batch, ppo.gamma, ppo.gae_lambda)
    mean, std = team.moments(advantage)
    return {"advantage": objectives.normalise(advantage, mean, std), "return": returns, "cost_return": cost_returns,
            "price": (per_step / (std + 1e-8) / mean_icvs(batch)).repeat(len(advantage), 1)}


def make_sequences(cfg, team, batch, multiplier):
    """Cut a rollout [T, E, ...] into training sequences [S, L, ...] with targets; and its facts, over all ranks."""
    p, steps = cfg.phase3, len(batch["reward"])
    by_env = {name: value.transpose(0, 1) for name, value in batch.items()}  # [E, T, ...]
    # After the last step nobody is present, so nothing beyond it is a target.
    pad = lambda x: torch.cat([x, torch.zeros_like(x[:, :cfg.data.future])], 1)  # noqa: E731
    speed, icv = (by_env["nodes"][..., column].float() for column in (risk_gnn.SPEED, risk_gnn.ICV))
    states, valid, conflicts = objectives.motion_targets(pad(by_env["moved"].float()), pad(speed), pad(by_env["mask"]),
                                                         pad(by_env["fresh"]), pad(by_env["conflict"]), cfg.data.future)
    batch = {**batch, "icvs": icv.sum(-1).T}  # with those whom the policy leaves alone
    by_env.update(states=states.half(), target_valid=valid, conflicts=conflicts, speed=speed,
                  **{name: value.T for name, value in advantages(cfg, team, batch, multiplier).items()})
    names = ("embedding", "nodes", "surround", "globals", "mask", "icv", "fresh", "picks", "pick_valid", "u", "lane",
             "release", "pace", "log_prob", "advantage", "return", "cost_return", "price", "states", "target_valid",
             "conflicts", "speed")
    sequences = {name: by_env[name].unflatten(1, (steps // p.sequence_length, p.sequence_length)).flatten(0, 1)
                 for name in names}
    before = by_env["before"].flatten(0, 1)
    sequences["before"] = F.pad(before, (0, 0, 0, 0, 0, by_env["mask"].shape[2] - before.shape[1]))
    return sequences, summarise(team, batch)


def learn_constrained(cfg, team, progress, module, sequences, precision):
    """Several passes over the epoch's sequences; returns the means for the log."""
    p, c, logs = cfg.phase3, progress.counters, []
    rescale_values(progress.model.controller, team, sequences)
    stream = StreamingDataset(sequences, min(p.batch_size, len(sequences["before"])), p.passes,
                              cfg.run.seed * 1000 + c["epoch"] * 10 + team.rank)
    for batches in windows(stream, p.accumulation, drop_last=True):
        window = [to_device(batch, team.device) for batch in batches]
        set_learning_rate(progress.optimizer, learning_rate(c["updates"], 10 ** 9, p.lr, p.warmup_steps))
        own = [sum(int(n) for n in numbers) for numbers in zip(*(ConstrainedLoss.counts(w) for w in window))]
        share = [max(n, 1) / team.world for n in team.all_sum(own)]
        micro_batches = split([(w, share) for w in window], cfg.memory.split)
        logs.append(counted_step(progress, module, micro_batches, precision, p.clip_norm))
    return {**mean_logs(team, logs), "loss_scale": precision.scaler.get_scale()}


def add_options(parser):
    parser.add_argument("--phase", type=int, choices=(1, 3), required=True)
    parser.add_argument("--find-batch-size", type=float, metavar="GB", nargs="?", const=12.0, help="for phase 1 only")


def try_batches(cfg, team, budget_gb):
    """Find phase1.batch_size for the second, larger stage. Ranks do not meet in a step: one that runs out of memory
    must not leave the others waiting."""
    p, model = cfg.phase1, TrafficModel(cfg).to(team.device)
    model.freeze("controller", "safety_shield")
    optimizer, precision = torch.optim.AdamW(model.parameters()), Precision(p.amp, team.device)
    module = WorldModelLoss(model, 2, p)
    step = lambda batch: optimiser_step(module, [(batch, 1e3)], optimizer, precision, p.clip_norm)  # noqa: E731
    find_batch_size(cfg, team, step, budget_gb)


def main():
    die_with_launcher()
    options = parse(__doc__, add=add_options)
    cfg, stop = options.config, StopRequest()
    if (budget := options.find_batch_size) is not None and (options.phase != 1 or not 0 < budget < math.inf):
        raise ConfigError(f"command line: --find-batch-size {budget}: expected GB above 0, and --phase 1: the batches "
                          "of phase 3 come from live SUMO")
    with start_team(cfg.run, cfg.ddp, cfg.rollout.num_workers if options.phase == 3 else 0, stop) as team:
        seed_random(cfg.run.seed)  # first weights, equal on every rank
        if budget:
            return try_batches(cfg, team, budget)
        return {1: phase1, 3: phase3}[options.phase](cfg, team, MemoryGuard(cfg, team, stop))


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, TROUBLES))
