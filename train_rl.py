"""Phase 2: safe reinforcement learning of the controller, a hand-written PPO over rollout processes.

    python train_rl.py                                   # starts its workers, and one learner per GPU
    python train_rl.py --config configs/quick.yaml       # a laptop
    torchrun --nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 train_rl.py

Every learner samples with its own workers and gradients are averaged (decentralised PPO). GNN, world model and shield
are frozen: their features are computed once, at rollout. Interrupt it and start it again: it continues.
"""
import functools
import math
import os
import sys
import time
from pathlib import Path
from runtime.resources import before_torch, claim, share_of_workers, threads_per_process
if __name__ == "__main__":
    before_torch()
from env.launch import die_with_launcher  # before torch, which takes seconds: it notes who our parent is

import numpy as np
import torch

from configs import ConfigError
from configs.command_line import parse
from coordinator import Stop, run_step
from data.settings import traffic_hash
from env.baselines import make_baseline
from env.traffic_env import check_scenario
from env.workers import make_pool
from models.imitation import RuleDriver
from models.losses import PPOLoss
from models.policy import Driver, TrafficModel
from runtime import curriculum
from runtime.checkpoint import seed_random
from runtime.distributed import StopRequest, start_team, wrap
from runtime.ending import run_script
from runtime.guard import MemoryGuard
from runtime.rollout import Collector, note_cut_episodes, summarise
from runtime.schedule import set_learning_rate
from runtime.storage import Kept, Minibatches, SpillError
from runtime.training import Progress, episode_facts, first_weights, mean_logs, rescale_values, run_folder
from train_ddp import TROUBLES, USER_ERRORS, advantages, counted_step, open_records, prepare_model

LEARN = ("scene", "picks", "pick_valid", "u", "lane", "release", "pace", "log_prob", "advantage", "return",
         "cost_return", "price", "lost")
KL_NOISE = 1.5  # one minibatch's KL is noisy: that of the policy is beyond the target when it is so many times that


def phase2(cfg, team, guard):
    """collect -> advantages -> update -> log -> save, `iterations` times."""
    p, folder = cfg.phase2, run_folder(cfg, team)
    check_scenario(cfg, folder / "scenario")
    announce(p, team)
    progress, precision = learner(cfg, team, folder)
    model, optimizer = progress.model, progress.optimizer
    c, metrics = progress.counters, open_records(progress, p.iterations)
    module = wrap(PPOLoss(model, p), team, cfg.ddp)
    workers = share_of_workers(cfg.rollout, team.local_world)
    kept = Kept(folder / f"warm_start-{team.rank}-of-{team.world}", p.imitate_keep, team.device)
    with make_pool(cfg, workers, cfg.rollout.num_envs_per_worker, str(folder / "scenario")) as pool:
        boundary = fewer = True
        while c["epoch"] < p.iterations:
            rule = part_of_rule(p, c["epoch"])
            if fewer:  # workers than before
                span = Span(pool.num_envs, team)
                steps = steps_per_env(p, span, team)
                note_cut_episodes(cfg, team, 2, steps)
            if boundary:
                collector = Collector(pool, None, cfg.run.seed, 2, span.first, folder=folder, spill_mb=p.spill_mb)
                collector.take_turns(len(cfg.env.suite), p.checkpoint_every)
                collector.driver = make_driver(cfg, model, collector, team.device, precision.autocast, rule)
            slower = enter_stage(cfg, c["curriculum"], collector) if p.curriculum.enabled else 1.0
            set_learning_rate(optimizer, imitation_lr(p, c["epoch"]) if rule else p.lr * slower)
            if boundary:  # at a checkpoint all environments begin new episodes, in an uninterrupted run as well
                collector.begin(c["epoch"])
            rollout, facts = collector.collect(steps)
            start = time.perf_counter()
            summary = summarise(team, rollout)
            add_advantages(cfg, team, rollout)
            log = update(cfg, team, span, progress, module, rollout, precision, kept if rule else None)
            rollout = None  # before the next one is collected
            if p.curriculum.enabled:
                summary["curriculum_stage"] = c["curriculum"]["stage"]
                if rule != "drives":  # how far the policy is
                    c["curriculum"] = judge_stage(cfg, team, c["curriculum"], facts)
            c["epoch"], c["env_steps"] = c["epoch"] + 1, c["env_steps"] + steps * span.total
            metrics.record(c["epoch"], p.iterations, **summary, **log, **episode_facts(team, facts), **guard.facts(),
                           env_steps=c["env_steps"], updates=c["updates"], lr=optimizer.param_groups[0]["lr"],
                           imitated=int(rule is not None), time_learn=time.perf_counter() - start)
            if rule == "drives" and c["epoch"] == 1:
                note_silence(p, team, summary["c_int"])
            coming, asked = part_of_rule(p, c["epoch"]), guard.must_stop()
            fewer = guard.give_up_worker(pool)
            boundary = (asked or fewer or coming != rule or c["epoch"] == p.iterations
                        or c["epoch"] % p.checkpoint_every == 0)
            if boundary:
                # The best is the policy that has learned from the rollout with the highest reward of its own.
                value = math.inf if rule == "drives" else -summary["reward"]
                progress.save(value, may_fail=c["epoch"] < p.iterations and not asked)
                kept.trim(0 if progress.failures else c["epoch"])
            if asked and c["epoch"] < p.iterations:
                return guard.leave(f"after iteration {c['epoch']}")
            if boundary and coming is None and not progress.failures:  # the last good checkpoint may need them
                kept.clear()
    team.say(f"phase 2 finished: {folder / 'phase2'}")


def announce(p, team):
    """Say how many iterations are the warm start's, and how many PPO's."""
    drives = min(p.imitate_iterations, p.iterations)
    corrects = min(p.imitate_corrections, p.iterations - drives)
    team.say(f"phase 2: of {p.iterations} iterations a rule drives {drives} and corrects the policy in {corrects}; "
             f"{p.iterations - drives - corrects} are PPO")
    if p.curriculum.enabled and drives == p.iterations:
        team.say("NOTE: the policy never drives, so the curriculum never advances; raise phase2.iterations")


def note_silence(p, team, c_int):
    """Say so where the rule to imitate commands nobody: its way of driving says nothing about these roads."""
    if c_int == 0 and p.imitate != "none":
        team.say(f"NOTE: {p.imitate} has commanded nobody, and to command nobody is what is learned from it; name a "
                 "rule that knows these roads (phase2.imitate), or let PPO begin from nothing "
                 "(phase2.imitate_iterations=0 phase2.imitate_corrections=0)")


def learner(cfg, team, folder):
    """(Progress, Precision) of the controller on this rank's device, from the newest checkpoint or from phase 1."""
    model = TrafficModel(cfg)
    begun = first_weights(model, cfg, folder, (1,), team.say)
    model.controller.log_std.data.fill_(math.log(cfg.phase2.exploration))
    model.freeze("risk_gnn", "world_model", "safety_shield")
    model.to(team.device)
    precision = prepare_model(cfg, team, model, cfg.phase2.amp)
    optimizer = torch.optim.Adam(model.controller.parameters(), cfg.phase2.lr)
    progress = Progress(cfg, team, folder / "phase2", model, optimizer, precision.scaler)
    progress.counters["curriculum"] = curriculum.START
    progress.resume(begun, traffic_hash(cfg))
    if cfg.phase2.curriculum.enabled:
        curriculum.check(progress.counters["curriculum"], len(cfg.env.suite), folder / "phase2")
    return progress, precision


def enter_stage(cfg, state, collector):
    """Let the curriculum's state choose the variants of the episodes that begin; returns the learning rate's factor."""
    p = cfg.phase2.curriculum
    collector.move_seed = functools.partial(curriculum.seed_of_stage, stage=state["stage"],
                                            variants=len(cfg.env.suite), replay=p.replay)
    return p.fallback_lr ** state["fallbacks"]


def judge_stage(cfg, team, state, facts):
    """The curriculum's state after the share of arrivals in the ended episodes of its stage, on all ranks."""
    stages = len(cfg.env.suite)
    own = [episode["ocr"] for episode in facts["episodes"] if episode["seed"] % stages == state["stage"]]
    total, count = team.all_sum([sum(own), len(own)])
    return curriculum.after(state, total / count, stages - 1, cfg.phase2.curriculum) if count else state


class Span:
    """This rank's environments among those of all ranks: `own` of `total`, from number `first` on."""

    def __init__(self, envs, team):
        sizes = team.gather(envs)
        self.own, self.total, self.first = envs, sum(sizes), sum(sizes[:team.rank])

    def rows(self, steps):
        """Of control steps t * total + env of all ranks, this rank's as t * own + its own number, in the same order."""
        t, env = np.divmod(steps, self.total)
        mine = (env >= self.first) & (env < self.first + self.own)
        return t[mine] * self.own + env[mine] - self.first


def steps_per_env(p, span, team):
    """Control steps of each environment per iteration: whole fragments, at least train_batch_size in all."""
    fragments = max(1, math.ceil(p.train_batch_size / (span.total * p.fragment_length)))
    steps = fragments * p.fragment_length
    team.say(f"phase 2: {span.total} environments x {fragments} fragments x {p.fragment_length} steps = "
             f"{span.total * steps} (train_batch_size {p.train_batch_size}); {p.epochs} epochs of minibatches of "
             f"{p.minibatch_size} over {team.world} ranks")
    if span.total * steps < p.minibatch_size:
        raise ConfigError(f"phase2.minibatch_size={p.minibatch_size} is larger than an iteration of "
                          f"{span.total * steps} steps; lower it or raise phase2.train_batch_size")
    return steps


def add_advantages(cfg, team, rollout):
    """Advantages, returns and prices of the effort [T, E] of a rollout."""
    found = advantages(cfg, team, rollout, cfg.phase2.cost_weight)
    rollout.fixed.update({name: value.numpy() for name, value in found.items()})


def update(cfg, team, span, progress, module, rollout, precision, kept=None):
    """PPO's epochs over one rollout; stops where a minibatch's KL of all ranks together is beyond the target: the mean
    of an epoch notices too late when the policy runs away within it.

    With `kept`, the rollouts of the warm start before this one, the controller learns a rule's choices: everything but
    how much to explore.
    """
    p, c, logs, log_std = cfg.phase2, progress.counters, [], progress.model.controller.log_std
    before = log_std.detach().clone()
    rescale_values(progress.model.controller, team, rollout)
    minibatches = Minibatches(rollout, LEARN, team.device)
    earlier = kept.before(c["epoch"], len(minibatches.begin)) if kept else []
    if kept and team.all_sum([bool(earlier)])[0] < team.world:
        earlier = []  # some rank has none, and all must take equal steps
    for epoch in range(p.epochs):
        rng = np.random.default_rng([cfg.run.seed, 2, c["epoch"], epoch, 2])
        for rows in epoch_rows(cfg, span, rollout.steps, c["epoch"], epoch):
            # What was learned from another iteration's traffic is soon forgotten: it gets half of each step.
            sources = [minibatches, *(earlier[rng.integers(len(earlier))] for _ in earlier[:1])]
            share = p.minibatch_size / team.world * len(sources)  # DDP averages over ranks
            parts = [(source(part), share, kept is not None) for source in sources
                     for part in np.array_split(rows, cfg.memory.split)]
            logs.append(counted_step(progress, module, parts, precision, p.clip_norm))
            if far := not kept and kl_per_pick(team, logs[-1]) > KL_NOISE * p.target_kl:
                break
        if far:
            break
    if kept:
        log_std.data.copy_(before)
        kept.add(c["epoch"], minibatches)
    return {**mean_logs(team, logs), "loss_scale": precision.scaler.get_scale()}


def kl_per_pick(team, log):
    """What one optimiser step logged of all ranks' KL, the same number on every rank: they stop together."""
    kl, picks = team.all_sum(torch.stack([log["kl"], log["picks"]]))
    return kl / max(picks, 1e-9)


def epoch_rows(cfg, span, steps, iteration, epoch):
    """This rank's rows of every minibatch of one pass.

    One permutation of the control steps of all ranks is cut into minibatches, of which each rank takes the steps that
    it has: every rank does as many minibatches, and they do not depend on how environments are spread over ranks.
    """
    size = cfg.phase2.minibatch_size
    order = np.random.default_rng([cfg.run.seed, 2, iteration, epoch, 1]).permutation(steps * span.total)
    return [span.rows(order[begin:begin + size]) for begin in range(0, len(order) - size + 1, size)]


def part_of_rule(p, iteration):
    """What the rule of the warm start does in this iteration: it "drives", it "corrects" the policy, or None."""
    if iteration < p.imitate_iterations:
        return "drives"
    return "corrects" if iteration < p.imitate_iterations + p.imitate_corrections else None


def imitation_lr(p, iteration):
    """The learning rate of the warm start, which falls to 0 at its end."""
    return p.imitate_lr * (1 - iteration / (p.imitate_iterations + p.imitate_corrections))


def make_driver(cfg, model, collector, device, autocast, rule):
    """Who commands the ICVs of a collector: the rule that is imitated, the policy corrected by it, the policy."""
    kind = Driver if rule is None else functools.partial(
        RuleDriver, lambda env: imitated(cfg, collector.seeds[env]), corrects=rule == "corrects")
    return kind(model, collector.pool.num_envs, cfg.env.max_vehicles, device, autocast=autocast)


def imitated(cfg, seed):
    """The rule of the warm start for the episode with this seed: (observation, k) -> commands."""
    variant = cfg.variant_of(seed)  # may have a rule of its own, or numbers for it
    return functools.partial(make_baseline(variant.phase2.imitate, variant), rng=np.random.default_rng(seed))


def one_learner_per_gpu(cfg):
    """Exit code of the same command under torchrun when there are several GPUs; None when there are not, or somebody
    has started several learners already. torchrun itself knows success and failure only: the coordinator's way of
    running a step knows more."""
    gpus = torch.cuda.device_count() if cfg.run.device != "cpu" else 0
    if gpus > 1 and "RANK" not in os.environ:
        command = [sys.executable, "-m", "runtime.ranks", "--standalone", f"--nproc_per_node={gpus}", *sys.argv]
        if "EXIT_CODE_FILE" in os.environ:  # below the coordinator
            os.execv(sys.executable, command)
        threads = threads_per_process(cfg.run.threads, gpus, cfg.rollout.num_workers)
        with claim(Path(cfg.run.folder) / cfg.run.name):  # in the coordinator's place
            code = run_step("phase 2", command, threads, stop := Stop())
        return code if code >= 0 else 130 if stop.asked else 128 - code  # ended by a signal: as a shell says it


def main():
    die_with_launcher()
    cfg = parse(__doc__).config
    if (code := one_learner_per_gpu(cfg)) is not None:
        return code
    stop = StopRequest()
    with start_team(cfg.run, cfg.ddp, cfg.rollout.num_workers, stop) as team:
        seed_random(cfg.run.seed)  # first weights, equal on every rank
        return phase2(cfg, team, MemoryGuard(cfg, team, stop))


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (*TROUBLES, SpillError)))
