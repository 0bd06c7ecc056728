"""Collecting experience: the loop that joins a pool of environments with a driver (model), group by group.

There is no queue between simulators and learner that could grow. Each environment hands over one observation, in its
own place of the pool's block of shared memory, and waits for the command that answers it; groups take turns, so at most
one step of each is under way: that is all that is ever prefetched. A worker that does not answer in time is replaced,
and after some times a WorkerError that names it (env/workers.py). The steps that it lost are kept, marked as `lost`.
"""
import math
import time

import numpy as np
import torch

from configs import ConfigError, console
from runtime.resources import usable_cores
from runtime.storage import Rollout

STORED = ("picks", "u", "lane", "release", "pace", "log_prob", "value", "cost_value")
FACTOR, MODULUS = 1_000_003, 1_999_999_973  # of seeds
SEQUENCE = ("nodes", "surround", "mask", "icv", "fresh", "moved", "conflict")  # what phase 3 needs of the observation


def note_cut_episodes(cfg, team, phase, steps):
    """Say so where episodes, which begin anew at every checkpoint, never reach their end; `steps` of an iteration."""
    p, horizon = cfg.phase2 if phase == 2 else cfg.phase3, cfg.env.episode_steps
    between = steps * min(p.checkpoint_every, p.iterations if phase == 2 else p.epochs)
    if between < horizon:
        also = ", and the curriculum never advances" if phase == 2 and p.curriculum.enabled else ""
        team.say(f"NOTE: phase{phase}.checkpoint_every={p.checkpoint_every}: episodes begin anew every {between} "
                 f"control steps, so the rest of their {horizon} is never seen{also}")


def check_collection(cfg, team, envs):
    """Before phase 3 begins: what an epoch is; ConfigError where ranks have unequal numbers of environments, and would
    do unequal numbers of steps, or where an epoch does not fill one."""
    p, sequences = cfg.phase3, envs * cfg.phase3.fragment_length // cfg.phase3.sequence_length
    if len(set(team.gather(envs))) > 1:
        raise ConfigError(f"phase 3: unequal numbers of environments, {team.gather(envs)} by rank: start as many ranks "
                          "on each node")
    if p.passes * (sequences // min(p.batch_size, sequences)) < p.accumulation:
        raise ConfigError(f"phase3: {sequences} sequences x {p.passes} passes do not fill one optimiser step of "
                          f"phase3.accumulation={p.accumulation} micro-batches of phase3.batch_size={p.batch_size}; "
                          "lower one of them or raise phase3.fragment_length")
    team.say(f"phase 3: {team.world} ranks x {envs} environments x {p.fragment_length} steps an epoch, batch "
             f"{p.batch_size} x accumulation {p.accumulation} sequences of {p.sequence_length} steps each")
    note_cut_episodes(cfg, team, 3, p.fragment_length)


def episode_seed(run_seed, phase, iteration, env, number):
    """Seed of the `number`-th episode that an environment begins in an iteration: nothing else enters, so a resumed
    run continues with the same traffic."""
    x = run_seed
    for part in (phase, iteration, env, number):
        x = (x * FACTOR + part + 1) % MODULUS
    return x


def take_turn(seed, variants, iteration, every):
    """The seed moved so that an environment, which begins anew every so many iterations, sees all variants of the suite
    (its own is seed % variants): the seeds of such iterations differ by a multiple of FACTOR^2, and where that shares a
    factor with the number of variants, the same few would come back for ever."""
    shared = math.gcd(every * (FACTOR ** 2 % MODULUS), variants)
    return seed - seed % variants + (seed + iteration * shared // (every * variants) % shared) % variants


def action_noise(generators, k, n):
    """What k picks of n vehicles are sampled with (Controller.select); each environment has a numpy generator."""
    uniform = np.stack([rng.random(5 * k + n, np.float32) for rng in generators])
    normal = np.stack([rng.standard_normal(k, np.float32) for rng in generators])
    return torch.from_numpy(uniform), torch.from_numpy(normal)


class Collector:
    """Steps a pool with a Driver and keeps what learning needs.

    `keep_sequences` stores embeddings and the memory at sequence starts as well (phase 3). `first_env` numbers this
    rank's environments among all ranks: traffic and sampled actions of an environment follow from that number alone,
    however environments are spread over groups, workers and ranks. `folder`, `spill_mb`: see Rollout.
    """

    def __init__(self, pool, driver, run_seed, phase, first_env=0, keep_sequences=0, folder=None, spill_mb=0):
        self.pool, self.driver, self.groups = pool, driver, alternating(pool.groups)
        self.run_seed, self.phase, self.first_env, self.every = run_seed, phase, first_env, keep_sequences
        self.folder, self.spill_mb = folder, spill_mb
        self.move_seed = lambda seed: seed  # to a variant of the suite

    def take_turns(self, variants, every):
        """Environments begin anew every so many iterations, and are to see all variants of the suite: see take_turn."""
        self.move_seed = lambda seed: take_turn(seed, variants, self.iteration, every)

    def begin(self, iteration):
        """Fresh episodes in every environment: the start of a run and every checkpoint boundary."""
        envs = range(self.pool.num_envs)
        self.iteration, self.begun = iteration, [0 for _ in envs]
        self.noise = [np.random.default_rng([self.run_seed, self.phase, iteration, self.first_env + e]) for e in envs]
        self.driver.forget()
        self.seeds = [self._seed(e, 0) for e in envs]  # of the episodes under way
        self.pool.reset(self.seeds)

    def _seed(self, env, number):
        return self.move_seed(episode_seed(self.run_seed, self.phase, self.iteration, self.first_env + env, number))

    def collect(self, steps):
        """`steps` control steps in every environment. Returns (Rollout, facts): facts are ended episodes, shield
        counts and times."""
        envs, start = self.pool.num_envs, time.perf_counter()
        self.rollout = Rollout(steps, envs, self.folder, self.spill_mb)
        self.facts = {"episodes": [], "clips": 0, "emergencies": 0, "commands": 0, "time_infer": 0.0, "time_wait": 0.0,
                      "time_store": 0.0, "steps": steps * envs, "lost_steps": 0}
        console.begin("collect: step")
        for t in range(steps):
            console.progress("collect: step", t, steps, always=False)
            for group in self.groups:
                if t:
                    self._finish(group, t - 1)
                self._act(group, t)
        for group in self.groups:
            self._finish(group, steps - 1)
        self._bootstrap(steps - 1)
        self.facts["time_collect"] = time.perf_counter() - start
        rollout, self.rollout = self.rollout, None  # its memory belongs to the caller
        return rollout, self.facts

    def _act(self, group, t):
        """Command the group's environments; they simulate while the step is stored and another group's turn comes."""
        start = time.perf_counter()
        seen = self.driver.perceive({name: self.pool.arrays[name][group] for name in self.pool.final}, group)
        k, generators = self.pool.arrays["slot"].shape[1], [self.noise[env] for env in group]
        choice, commands = self.driver.decide(seen, action_noise(generators, k, self.driver.max_vehicles))
        for name in ("slot", "accel", "lane", "brake"):
            self.pool.arrays[name][group] = commands[name]
        self.pool.send(group, [self._seed(e, self.begun[e] + 1) for e in group])
        acted = time.perf_counter()
        self.facts["commands"] += int((commands["slot"] < self.driver.max_vehicles).sum())
        self.facts["clips"] += int((commands["reason"] & 1 > 0).sum())
        self.facts["emergencies"] += int((commands["reason"] & 4 > 0).sum())
        self._store(group, t, seen, choice)
        self.facts["time_infer"] += acted - start
        self.facts["time_store"] += time.perf_counter() - acted

    def _store(self, group, t, seen, choice):
        """Keep one control step of a group, float16 where it is bulky."""
        keep = {name: _compact(choice[name]) for name in STORED}
        icvs = _compact(seen["observation"]["icv"]).sum(1)  # in phase 3 without those whom it leaves alone
        self.rollout.put(t, group, {**keep, "pick_valid": _compact(choice["valid"]), "icvs": icvs})
        if not self.every:
            self.rollout.put(t, group, {"scene": _compact(seen["scene"], half=True)})
            return self.rollout.append(t, group, {"candidates": _compact(seen["candidates"], half=True)},
                                       _compact(seen["valid"]).sum(1))
        self.rollout.put(t, group, {"globals": _compact(seen["observation"]["globals"], half=True)})
        tables = {name: _compact(seen["observation"][name], half=True) for name in SEQUENCE}
        tables["embedding"] = _compact(seen["embedding"], half=True)
        if t % self.every == 0:
            tables["before"] = _compact(seen["before"], half=True)
        used = tables["mask"] * np.arange(1, tables["mask"].shape[1] + 1)
        self.rollout.append(t, group, tables, used.max(1))

    def _finish(self, group, t):
        """Wait for the group's step t: rewards, ends, and the values of the states in which episodes ended."""
        start, arrays = time.perf_counter(), self.pool.arrays
        ended = dict(self.pool.receive(group))
        self.facts["time_wait"] += time.perf_counter() - start
        for part, seconds in self.pool.spent(group).items():
            self.facts[f"time_{part}"] = self.facts.get(f"time_{part}", 0.0) + seconds
        lost = arrays["lost"][group]
        over = arrays["terminated"][group] | arrays["truncated"][group] | lost
        self.rollout.put(t, group, {**{name: arrays[name][group] for name in ("reward", "cost", "terminated", "lost")},
                                    "ended": over})
        for env in ended:
            self.facts["episodes"].append(ended[env])
            self._set_next_values([env], t, self.pool.final)
        gone = [env for env, is_lost in zip(group, lost) if is_lost]
        self.rollout.fixed["pick_valid"][t, gone] = False  # what was commanded there has not happened
        self.facts["lost_steps"] += len(gone)
        for env in (*ended, *gone):
            self.driver.forget(env)
            self.begun[env] += 1
            self.seeds[env] = self._seed(env, self.begun[env])  # now: `move_seed` may change between collections

    def _bootstrap(self, t):
        """Values of the states after the last step, and of the following states of all other steps."""
        kept = self.rollout.fixed
        for group in self.groups:
            going = [e for e in group if not kept["ended"][t, e]]
            if going:
                self._set_next_values(going, t, self.pool.arrays)
        for name in ("value", "cost_value"):
            following = kept.setdefault(f"next_{name}", np.zeros_like(kept[name]))[:-1]  # none when all were lost
            np.copyto(following, kept[name][1:], where=~kept["ended"][:-1])

    def _set_next_values(self, envs, t, arrays):
        seen = self.driver.perceive({name: arrays[name][envs] for name in self.pool.final}, envs, remember=False)
        value, cost_value = self.driver.values(seen)
        self.rollout.put(t, envs, {"next_value": _compact(value), "next_cost_value": _compact(cost_value)})


def summarise(team, batch):
    """Mean reward, C_int, number of ICVs and share of released picks of a rollout over all ranks; lost steps count as
    none. C_int is that of a score, by environment: the sum of the effort by that of the ICVs present. (The mean of
    "cost", effort per ICV, is higher while there are few.)"""
    active, real = batch["pick_valid"], ~batch["lost"]
    icvs = batch["icvs"] * real
    costs = (batch["cost"] * icvs).sum(0) / icvs.sum(0).clamp(min=1)
    reward, n, cost, envs, present, released, picks = team.all_sum([float(x.sum()) for x in (
        batch["reward"], real, costs, real.any(0), icvs, batch["release"] & active, active)])
    return {"reward": reward / max(n, 1), "c_int": cost / max(envs, 1), "icvs": present / max(n, 1),
            "released": released / max(picks, 1)}


def mean_icvs(batch):
    """Mean number of ICVs in each environment of a rollout over its steps, lost ones not counted, at least 1; [E]."""
    real = ~batch["lost"]
    return ((batch["icvs"] * real).sum(0) / real.sum(0).clamp(min=1)).clamp(min=1.0)


def alternating(groups):
    """The pool's groups; one group is halved, so that half of it simulates while the other half's turn is computed.

    Not where its simulators keep all processors busy: one larger batch then costs less than two.
    """
    if len(groups) > 1 or not 1 < len(groups[0]) < usable_cores():
        return groups
    return [groups[0][::2], groups[0][1::2]]


def _compact(tensor, half=False):
    return (tensor.half() if half and tensor.is_floating_point() else tensor).cpu().numpy()
