"""Weak scaling of a phase 1 training step: two gloo ranks against one, the same samples per rank.

    python -m benchmarks.scaling --json scaling.json

Needs as many idle cores as ranks: every rank computes on one thread. The step is that of train_ddp.py (forward,
backward, all-reduce, clipping, AdamW) on random graphs; one and two ranks alternate. Efficiency = time of one rank / of
two.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import ROOT, alternate, finish, load_line
from configs import Config
from models.losses import WorldModelLoss
from models.policy import TrafficModel
from models.presets import PRESETS
from runtime.batch_size import random_batch
from runtime.distributed import start_team, wrap
from runtime.precision import Precision
from train_ddp import optimiser_step

STEPS, WARM_UP = 12, 3


def measure(preset, samples, accumulation):
    """On each rank: median seconds of an optimiser step; the first rank prints it."""
    cfg = Config()
    cfg.run.device, cfg.run.threads, cfg.model.preset = "cpu", 1, preset
    with start_team(cfg.run, cfg.ddp) as team:
        team.say(json.dumps(seconds_per_step(team, cfg, samples, accumulation)))


def seconds_per_step(team, cfg, samples, accumulation):
    """Median over the steps, after a warm-up."""
    torch.manual_seed(0)
    model = TrafficModel(cfg)
    model.freeze("controller", "safety_shield")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)
    precision = Precision(cfg.phase1.amp, team.device, team.any)
    module = wrap(WorldModelLoss(model, 2, cfg.phase1), team, cfg.ddp)
    batch = random_batch(samples, cfg, torch.Generator().manual_seed(team.rank))
    window, times = [(batch, float(batch["target_valid"].sum()))] * accumulation, []
    for _ in range(WARM_UP + STEPS):
        team.barrier()
        start = time.perf_counter()
        optimiser_step(module, window, optimizer, precision, 1.0)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def run(ranks, options, accumulation):
    """Seconds per step of `ranks` processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m",
               "benchmarks.scaling", "--measure", "--preset", options.preset, "--samples", str(options.samples),
               "--accumulation", str(accumulation)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    parser = new_parser(__doc__, "scaling.json")
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--samples", type=at_least(1), default=8, help="samples per rank and micro-batch")
    parser.add_argument("--accumulation", type=at_least(1), default=1, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=at_least(1), default=2)
    parser.add_argument("--repeat", type=at_least(1), default=5)
    options = parser.parse_args()
    if options.measure:
        return measure(options.preset, options.samples, options.accumulation)
    ways = {(accumulation, ranks): lambda a=accumulation, r=ranks: run(r, options, a)
            for accumulation in (1, 4) for ranks in (1, options.ranks)}
    print(f"{load_line(options.repeat)}; {options.preset}, {options.samples} samples per rank and micro-batch, median "
          f"of {STEPS} steps\n{'accumulation':>13s}{'1 rank, ms':>12s}{f'{options.ranks} ranks, ms':>14s}"
          f"{'efficiency':>12s}")
    medians, seconds = alternate(ways, options.repeat)
    for a in (1, 4):
        one, many = medians[a, 1], medians[a, options.ranks]
        print(f"{a:13d}{1000 * one:12.1f}{1000 * many:14.1f}{one / many:12.2f}")
    finish(options.json, preset=options.preset, samples=options.samples, ranks=options.ranks,
           seconds={f"accumulation {a}, ranks {r}": values for (a, r), values in seconds.items()},
           efficiency={a: medians[a, 1] / medians[a, options.ranks] for a in (1, 4)})


if __name__ == "__main__":
    main()
