"""What do cached features save PPO's update against computing GNN and world model again in every epoch?

    python -m benchmarks.ppo_update --json ppo_update.json

Both sides take the same optimiser steps on the same minibatches of 128 control steps of a real rollout (default
corridor, 2 environments x 256 steps after 150 s). One reads the candidate and scene features that the rollout stored;
the other reads stored observations and memories and runs the frozen parts again, as every epoch would have to without
the cache. Seconds per optimiser step on one CPU thread; sides alternate; medians of the repetitions are compared.
"""
import copy
import tempfile
import time

import numpy as np
import torch
from torch import nn

from benchmarks.arguments import at_least, new_parser, some_of
from benchmarks.report import alternate, finish, load_line
from configs import Config
from env.workers import make_pool
from models.losses import PPOLoss, ppo_terms, stored_choice
from models.policy import Driver, TrafficModel, bucket
from models.presets import PRESETS
from models.risk_gnn import INPUTS
from runtime.distributed import Team
from runtime.precision import Precision
from runtime.rollout import Collector
from runtime.storage import Minibatches, Rollout, row_numbers
from train_ddp import optimiser_step
from train_rl import LEARN, Span, add_advantages, epoch_rows

ENVS, STEPS, WARMUP = 2, 256, 150.0
OBSERVED = ("nodes", "edges", "neighbours", "surround", "mask", "icv", "fresh")
ALONE = Team(0, 1, 0, 1, torch.device("cpu"))


class RecordingDriver(Driver):
    """Keeps the observations and the memory before each step as well: what computing again needs."""

    def perceive(self, observation, envs, remember=True):
        seen = super().perceive(observation, envs, remember)
        if remember:
            t, self.taken[envs[0]] = self.taken[envs[0]], self.taken[envs[0]] + 1
            tables = {name: seen["observation"][name] for name in OBSERVED} | {"before": seen["before"]}
            tables = {name: (x.half() if x.is_floating_point() else x).numpy() for name, x in tables.items()}
            self.kept.append(t, envs, tables, np.full(len(envs), tables["mask"].shape[1]))
            self.kept.put(t, envs, {"globals": seen["observation"]["globals"].half().numpy()})
        return seen


class AgainLoss(nn.Module):
    """PPOLoss on observations: frozen parts first, without gradients."""

    def __init__(self, model, ppo):
        super().__init__()
        self.model, self.controller, self.ppo = model, model.controller, ppo

    def forward(self, batch, count):
        with torch.no_grad():
            embedding = self.model.risk_gnn(*(batch[name] for name in INPUTS))
            memory, _ = self.model.world_model.step(embedding, batch["before"], batch["fresh"])
            seen = self.model.features(embedding, memory, *(batch[name] for name in ("nodes", "surround", "globals",
                                                                                     "mask", "icv")))
        chosen = stored_choice(batch)
        evaluated = self.controller.evaluate(seen["candidates"], seen["valid"], seen["scene"], chosen)
        return ppo_terms(self.controller, evaluated, seen["scene"], batch, self.ppo, count)


def collect(cfg, model, folder):
    """(the rollout with features and advantages, the same control steps as observations)."""
    with make_pool(cfg, ENVS, 1, folder) as pool:
        driver = RecordingDriver(model, ENVS, cfg.env.max_vehicles)
        driver.taken, driver.kept = [0] * ENVS, Rollout(STEPS, ENVS)
        collector = Collector(pool, driver, cfg.run.seed, 2)
        collector.begin(0)
        rollout, _ = collector.collect(STEPS)
    add_advantages(cfg, ALONE, rollout)
    return rollout, driver.kept


def observations(kept, rollout, steps):
    """A minibatch of observations, padded to its own most vehicles."""
    batch = {name: rollout[name].flatten(0, 1)[steps] for name in LEARN}
    batch["globals"] = kept["globals"].flatten(0, 1)[steps].float()
    for name in kept.tables:
        rows = row_numbers(kept.begin[name].ravel()[steps], kept.count[name].ravel()[steps])
        rows = np.pad(rows, ((0, 0), (0, bucket(rows.shape[1]) - rows.shape[1])))
        batch[name] = torch.from_numpy(kept.tables[name].array()[rows])
        batch[name] = batch[name].float() if batch[name].is_floating_point() else batch[name]
    batch["neighbours"][~batch["mask"]] = -1
    return batch


def sides(cfg, model, rollout, kept):
    """{name: (loss module, function from steps to its minibatch)}, each with a controller of its own."""
    cached, again = copy.deepcopy(model), copy.deepcopy(model)
    minibatches = Minibatches(rollout, LEARN, ALONE.device)
    return {"cached": (PPOLoss(cached, cfg.phase2), minibatches),
            "again": (AgainLoss(again, cfg.phase2), lambda steps: observations(kept, rollout, steps))}


def one_pass(cfg, module, minibatch, batches):
    """A function that trains on all minibatches once and returns the seconds of an optimiser step."""
    precision = Precision(cfg.phase2.amp, ALONE.device)
    optimizer = torch.optim.Adam(module.controller.parameters(), cfg.phase2.lr)

    def run():
        start = time.perf_counter()
        for steps in batches:
            optimiser_step(module, [(minibatch(steps), cfg.phase2.minibatch_size)], optimizer, precision, 1.0)
        return (time.perf_counter() - start) / len(batches)
    return run


def measure(preset, repeat):
    """One row of the table, with all times."""
    cfg = Config()
    cfg.model.preset, cfg.env.warmup_s, cfg.env.terminate_on_collision = preset, WARMUP, False
    torch.manual_seed(0)
    model = TrafficModel(cfg)
    model.freeze("risk_gnn", "world_model", "safety_shield")
    with tempfile.TemporaryDirectory() as folder:
        rollout, kept = collect(cfg, model, folder)
    both, batches = sides(cfg, model, rollout, kept), epoch_rows(cfg, Span(ENVS, ALONE), STEPS, 0, 0)
    losses = [float(module(minibatch(batches[0]), 128.0)[0].detach()) for module, minibatch in both.values()]
    assert abs(losses[0] - losses[1]) < 0.01 * abs(losses[0]) + 0.01, losses  # the same task
    medians, seconds = alternate({name: one_pass(cfg, *side, batches) for name, side in both.items()}, repeat)
    counts = rollout.count["candidates"]
    return {"preset": preset, **medians, "speedup": medians["again"] / medians["cached"], "seconds": seconds,
            "candidates": float(counts.mean()), "most_candidates": int(counts.max())}


def main():
    parser = new_parser(__doc__, "ppo_update.json")
    parser.add_argument("--repeat", type=at_least(1), default=5)
    parser.add_argument("--presets", type=some_of(PRESETS), default="small,full")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(preset, options.repeat) for preset in options.presets.split(",")]
    print(load_line(options.repeat))
    print(f"{'preset':8s}{'cached ms':>12s}{'again ms':>12s}{'speed-up':>10s}{'candidates per step (most)':>30s}")
    for row in rows:
        candidates = f"{row['candidates']:.1f} ({row['most_candidates']})"
        print(f"{row['preset']:8s}{1000 * row['cached']:12.1f}{1000 * row['again']:12.1f}{row['speedup']:10.1f}"
              f"{candidates:>30s}")
    finish(options.json, rows=rows)


if __name__ == "__main__":
    main()
