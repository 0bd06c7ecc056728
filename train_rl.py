"""Phase 2: safe reinforcement learning of the controller, a hand-written PPO over rollout processes.

    python train_rl.py                                   # starts its workers, and one learner per GPU
    python train_rl.py --config configs/quick.yaml       # a laptop
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train_rl.py

Every learner samples with its own workers and gradients are averaged (decentralised PPO). GNN, world model and shield
are frozen: their features are computed once, at rollout. Interrupt it and start it again: it continues.
"""
import math
import os
import sys
import time

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from configs import ConfigError
from configs.command_line import parse
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from models.losses import PPOLoss
from models.policy import Driver, TrafficModel
from runtime.distributed import StopRequest, start_team, wrap
from runtime.memory import tree_memory
from runtime.metrics import Metrics
from runtime.precision import Precision
from runtime.rollout import Collector
from runtime.training import (Progress, episode_facts, first_weights, mean_logs, rescale_values, run_folder, run_script,
                              save_config, share_of_workers, to_device)
from train_ddp import USER_ERRORS, advantages, optimiser_step

LEARN = ("candidates", "valid", "scene", "picks", "pick_valid", "u", "lane", "release", "log_prob")


def phase2(cfg, team, stop):
    """collect -> advantages -> update -> log -> save, `iterations` times."""
    p, folder = cfg.phase2, run_folder(cfg)
    check_scenario(cfg, folder / "scenario")
    model = TrafficModel(cfg)
    first_weights(model, cfg, folder, (1,), team.say)
    model.freeze("risk_gnn", "world_model", "safety_shield")
    model.to(team.device)
    team.say(model.describe())
    precision = Precision(p.amp, team.device, team.any)
    team.say(precision.reason)
    optimizer = torch.optim.Adam(model.controller.parameters(), p.lr)
    generator = torch.Generator(team.device).manual_seed(cfg.run.seed * 1000 + 2 * 100 + team.rank)
    progress = Progress(cfg, team, folder / "phase2", model, optimizer, precision.scaler, generator)
    progress.resume()
    if team.is_main:
        save_config(cfg, folder)
    c, metrics = progress.counters, Metrics(folder, 2, team.is_main)
    metrics.drop_after(c["epoch"])
    module = wrap(PPOLoss(model, p), team, cfg.ddp)
    workers = share_of_workers(cfg.rollout, team)
    with make_pool(cfg, workers, cfg.rollout.num_envs_per_worker, str(folder / "scenario")) as pool:
        steps = steps_per_env(p, pool.num_envs, team)
        driver = Driver(model, pool.num_envs, cfg.env.max_vehicles, team.device, autocast=precision.autocast)
        collector = Collector(pool, driver, cfg.run.seed, 2, team.rank * pool.num_envs)
        boundary = True
        while c["epoch"] < p.iterations:
            if boundary:  # at a checkpoint all environments begin new episodes, in an uninterrupted run as well
                collector.begin(c["epoch"])
            batch, facts = collector.collect(steps, generator)
            start = time.perf_counter()
            summary = summarise(team, batch)
            learning = flatten(cfg, team, batch)
            log = update(cfg, team, progress, module, learning, precision, generator)
            c["epoch"], c["env_steps"] = c["epoch"] + 1, c["env_steps"] + steps * pool.num_envs * team.world
            metrics.record(c["epoch"], p.iterations, **summary, **log, **episode_facts(team, facts), lr=p.lr,
                           env_steps=c["env_steps"], updates=c["updates"], time_learn=time.perf_counter() - start,
                           memory_mb=sum(tree_memory().values()))
            asked = team.any(stop.asked)
            boundary = asked or c["epoch"] == p.iterations or c["epoch"] % p.checkpoint_every == 0
            if boundary:
                best = summary["reward"] > -c["best"]  # counters keep the lowest of -reward
                c["best"] = -summary["reward"] if best else c["best"]
                progress.save(best)
            if asked and c["epoch"] < p.iterations:
                return team.say(f"stopped and saved after iteration {c['epoch']}; the same command continues")
    team.say(f"phase 2 finished: {folder / 'phase2'}")


def steps_per_env(p, envs, team):
    """Control steps of each environment per iteration: whole fragments, at least train_batch_size in all."""
    total = envs * team.world
    fragments = max(1, math.ceil(p.train_batch_size / (total * p.fragment_length)))
    team.say(f"phase 2: {total} environments x {fragments} fragments x {p.fragment_length} steps = "
             f"{total * fragments * p.fragment_length} (train_batch_size {p.train_batch_size}); {p.epochs} epochs of "
             f"minibatches of {p.minibatch_size} = {team.world} ranks x {p.minibatch_size // team.world}")
    if fragments * p.fragment_length * envs < p.minibatch_size // team.world:
        raise ConfigError(f"phase2.minibatch_size={p.minibatch_size} is larger than an iteration of "
                          f"{fragments * p.fragment_length * total} steps")
    return fragments * p.fragment_length


def flatten(cfg, team, batch):
    """The rollout [T, E, ...] as steps [T * E, ...] with advantages and returns."""
    advantage, returns, cost_returns = advantages(cfg, team, batch, cfg.phase2.cost_weight)
    flat = {name: batch[name].flatten(0, 1) for name in LEARN}
    flat.update(advantage=advantage.flatten(), cost_return=cost_returns.flatten(), **{"return": returns.flatten()})
    return flat


def update(cfg, team, progress, module, batch, precision, generator):
    """PPO's epochs over one batch; stops early when the KL of all ranks together passes the target."""
    p, logs, size = cfg.phase2, [], max(1, cfg.phase2.minibatch_size // team.world)
    rescale_values(progress.model.controller, team, batch)
    count, passes = len(batch["advantage"]), []
    for _ in range(p.epochs):
        order, this_pass = torch.randperm(count, generator=generator, device=team.device).cpu(), []
        for begin in range(0, count - size + 1, size):
            rows = order[begin:begin + size]
            minibatch = to_device({name: value[rows] for name, value in batch.items()}, team.device)
            log, norm, skipped = optimiser_step(module, [(minibatch, size)], progress.optimizer, precision, p.clip_norm)
            progress.counters["updates"] += not skipped
            this_pass.append({**log, "grad_norm": norm, "overflow_share": torch.tensor(float(skipped))})
        logs += this_pass
        passes.append(mean_logs(team, this_pass)["kl"])  # the same value on every rank: they stop together
        if passes[-1] > p.target_kl:
            break
    return {**mean_logs(team, logs), "kl": passes[-1], "loss_scale": precision.scaler.get_scale()}


def summarise(team, batch):
    """Mean reward, intervention cost and share of released picks over all ranks."""
    active = batch["pick_valid"]
    reward, cost, n, released, picks = team.all_sum([
        float(batch["reward"].sum()), float(batch["cost"].sum()), batch["reward"].numel(),
        float((batch["release"] & active).sum()), float(active.sum())])
    return {"reward": reward / n, "c_int": cost / n, "released": released / max(picks, 1)}


def one_learner_per_gpu(cfg):
    """Start again under torchrun when there are several GPUs and nobody has done so yet."""
    gpus = torch.cuda.device_count() if cfg.run.device != "cpu" else 0
    if gpus > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", *sys.argv]
        os.execv(sys.executable, command)


@record
def main():
    cfg = parse(__doc__).config
    one_learner_per_gpu(cfg)
    stop, team = StopRequest(), start_team(cfg.run, cfg.ddp, cfg.rollout.num_workers)
    try:
        torch.manual_seed(cfg.run.seed)  # first weights, equal on every rank
        phase2(cfg, team, stop)
    finally:
        team.close()


if __name__ == "__main__":
    sys.exit(run_script(main, (*USER_ERRORS, WorkerError)))
