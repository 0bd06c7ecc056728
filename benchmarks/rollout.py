"""What does inference cost a rollout, and do two workers do twice the work of one?

    python -m benchmarks.rollout --json rollout.json

Control steps (1 s) per second, all environments together, in the default corridor after 150 s of warm-up, learner on
one CPU thread. Both sides send the same random commands, so that they simulate the same traffic: one does nothing else,
the other lets the Collector run model and shield and store what PPO needs. The third side is the untrained policy with
its own commands, in the traffic that they make. Sides alternate; medians of the repetitions are compared.
"""
import statistics
import tempfile
import time

import numpy as np
import torch

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import finish, load_line
from configs import Config
from env.workers import make_pool
from models.policy import Driver, TrafficModel
from runtime.rollout import Collector, alternating

LAYOUTS = ((1, 1), (2, 1), (1, 2))  # workers, environments of each
STEPS, WARMUP, SEED = 100, 150.0, 1  # every environment has the same seed: equal work
PARTS = ("infer", "store", "wait", "simulate", "read", "graph", "idle")  # of the learner, then of a worker


def settings(preset):
    cfg = Config()
    cfg.model.preset, cfg.env.warmup_s, cfg.env.terminate_on_collision = preset, WARMUP, False
    return cfg


class RandomCommands:
    """Commands for up to K ICVs drawn at random, one stream per environment; None stands for a slot beyond the last."""

    def __init__(self, envs, k, nobody):
        self.rngs, self.k, self.nobody = [np.random.default_rng(e) for e in range(envs)], k, nobody

    def __call__(self, env, icvs):
        rng, k = self.rngs[env], self.k
        slot, picks = np.full(k, self.nobody), rng.permutation(icvs)[:k]
        slot[:len(picks)] = picks
        return {"slot": slot, "accel": rng.uniform(-3, 2, k), "lane": rng.integers(0, 3, k), "brake": np.zeros(k)}


class SameTraffic(Driver):
    """Computes everything and then sends random commands."""

    def perceive(self, observation, envs, remember=True):
        self.envs, self.icv = envs, observation["icv"]
        return super().perceive(observation, envs, remember)

    def decide(self, seen, noise=None):
        choice, commands = super().decide(seen, noise)
        for row, env in enumerate(self.envs):
            for name, value in self.random(env, np.flatnonzero(self.icv[row])).items():
                commands[name][row] = value
        return choice, commands


def random_steps(pool, commands):
    """Seconds of STEPS control steps with random commands and nothing else; groups alternate as in the Collector."""
    start, arrays = time.perf_counter(), pool.arrays
    for t in range(STEPS):
        for group in alternating(pool.groups):
            if t:
                pool.receive(group)
            for env in group:
                for name, value in commands(env, np.flatnonzero(arrays["icv"][env])).items():
                    arrays[name][env] = value
            pool.send(group)
    for group in alternating(pool.groups):
        pool.receive(group)
    return {"seconds": time.perf_counter() - start}


def run(side, cfg, model, pool):
    """One measurement: {"seconds", "vehicles", and where they went}."""
    n, envs = cfg.env.max_vehicles, pool.num_envs
    commands = RandomCommands(envs, cfg.env.max_commands, n)
    if side == "random":
        pool.reset([SEED] * envs)
        result = random_steps(pool, commands)
    else:
        driver = (SameTraffic if side == "inference" else Driver)(model, envs, n)
        driver.random = commands
        collector = Collector(pool, driver, SEED, 2)
        collector._seed = lambda env, number: SEED
        collector.begin(0)
        _, facts = collector.collect(STEPS)
        result = {"seconds": facts["time_collect"], **{name: facts[f"time_{name}"] for name in PARTS}}
    return {**result, "vehicles": float(pool.arrays["mask"].sum(1).mean())}


def summarise(runs, envs):
    """Medians: control steps per second, vehicles at the end, and milliseconds per step and environment."""
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    per_step = {name: 1000 * middle[name] / STEPS / envs for name in PARTS if name in middle}
    return {"steps_per_s": STEPS * envs / middle["seconds"], "vehicles": middle["vehicles"], **per_step}


def measure(cfg, repeat):
    """{(workers, environments, side): [measurements]}."""
    torch.manual_seed(0)
    model, sides, runs = TrafficModel(cfg), ("random", "inference", "policy"), {}
    with tempfile.TemporaryDirectory() as folder:
        pools = {layout: make_pool(cfg, *layout, folder) for layout in LAYOUTS}
        try:
            for _ in range(repeat):
                for layout, pool in pools.items():
                    for side in sides:
                        runs.setdefault((*layout, side), []).append(run(side, cfg, model, pool))
        finally:
            for pool in pools.values():
                pool.close()
    return runs


def main():
    parser = new_parser(__doc__, "rollout.json")
    parser.add_argument("--repeat", type=at_least(1), default=5)
    parser.add_argument("--preset", default="small", choices=("small", "full"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = measure(settings(options.preset), options.repeat)
    rows = {key: summarise(value, key[0] * key[1]) for key, value in runs.items()}
    print(load_line(options.repeat))
    print(f"{'workers x environments':24s}{'side':12s}{'steps/s':>8s}{'of random':>10s}{'vehicles':>9s}"
          + "".join(f"{name + ' ms':>12s}" for name in PARTS))
    for (workers, envs, side), row in rows.items():
        row["of_random"] = row["steps_per_s"] / rows[workers, envs, "random"]["steps_per_s"]
        times = "".join(f"{row[name]:12.2f}" for name in PARTS if name in row)
        print(f"{f'{workers} x {envs}':24s}{side:12s}{row['steps_per_s']:8.0f}{row['of_random']:10.2f}"
              f"{row['vehicles']:9.0f}{times}")
    scaling = rows[2, 1, "random"]["steps_per_s"] / rows[1, 1, "random"]["steps_per_s"]
    print(f"two workers against one, random commands: {scaling:.2f}")
    finish(options.json, rows=[dict(zip(("workers", "envs", "side"), key), **row) for key, row in rows.items()],
           two_workers_against_one=scaling)


if __name__ == "__main__":
    main()
