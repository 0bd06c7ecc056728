"""Does PPO learn? Train phase 2 with several seeds; compare the mean returns of its first and last tenth of iterations.

    python -m benchmarks.learning --config configs/ring.yaml --seeds 1-5 --json learning.json phase2.iterations=40

Every seed trains in runs/<name>-seed<N>, from the phase 1 checkpoint of runs/<name> when there is one. With
matplotlib installed, the curves are drawn beside the JSON file.
"""
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from benchmarks.arguments import writable
from benchmarks.phases import train
from configs import ConfigError
from configs.command_line import parse
from evaluate import parse_seeds
from runtime.ending import run_script
from runtime.metrics import read_metrics
from runtime.scores import mean_ci, with_interval


def train_seed(cfg, options, seed):
    """Run phase 2 with one seed (or continue it); returns its records."""
    source, name = Path(cfg.run.folder) / cfg.run.name, f"{cfg.run.name}-seed{seed}"
    target = Path(cfg.run.folder) / name
    if (source / "phase1").is_dir() and not (target / "phase1").exists():
        shutil.copytree(source / "phase1", target / "phase1")
    train(cfg, name, "train_rl.py", "--config", options.config_file, *options.overrides, f"run.name={name}",
          f"run.seed={seed}")
    return [row for row in read_metrics(target / "metrics.jsonl") if row["phase"] == 2]


def compare(rows, key="return"):
    """(mean of the first tenth, mean of the last tenth) of PPO's iterations, at least one each. In those of a warm
    start a rule drives, and then corrects: what differs between them is no learning."""
    values = [row[key] for row in rows if row.get(key) is not None and not row.get("imitated")]
    tenth = max(1, len(values) // 10)
    return float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))


def draw(curves, minutes, path):
    """One line per seed, named with its wall-clock time, and their mean; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture: matplotlib is not installed (extra `viz`)")
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for seed, values in curves.items():
        axes.plot(range(1, len(values) + 1), values, alpha=0.4, label=f"seed {seed}, {minutes[seed]:.0f} min")
    shortest = min(map(len, curves.values()))
    axes.plot(range(1, shortest + 1), np.mean([v[:shortest] for v in curves.values()], 0), "k", label="mean")
    axes.set(xlabel="iteration", ylabel="mean return of the iteration's episodes")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"curves: {path}")


def main():
    def add(parser):
        parser.add_argument("--seeds", default="1-5")
        parser.add_argument("--json", type=writable, default="learning.json", help="where the result goes")
    options = parse(__doc__, add=add)
    p, (seeds, curves, minutes, table) = options.config.phase2, (parse_seeds(options.seeds), {}, {}, [])
    if p.imitate_iterations + p.imitate_corrections >= p.iterations:
        raise ConfigError(f"{options.config_file}: the warm start takes all of phase2.iterations={p.iterations}; raise "
                          "it, or set phase2.imitate_iterations=0 phase2.imitate_corrections=0")
    for seed in seeds:
        rows = train_seed(options.config, options, seed)
        curves[seed] = [row["return"] for row in rows if row.get("return") is not None]
        minutes[seed] = sum(row["time_collect"] + row["time_learn"] for row in rows) / 60
        first, last = compare(rows)
        table.append({"seed": seed, "first_tenth": first, "last_tenth": last, "gain": last - first})
    gain = mean_ci([row["gain"] for row in table])
    print(f"{'seed':>6s}{'first tenth':>14s}{'last tenth':>14s}{'gain':>10s}")
    for row in table:
        print(f"{row['seed']:6d}{row['first_tenth']:14.3f}{row['last_tenth']:14.3f}{row['gain']:10.3f}")
    print(f"gain of the mean return: {with_interval(gain)} (95 % interval, {len(seeds)} seeds)")
    result = {"table": table, "gain": gain, "curves": curves, "minutes": minutes}
    Path(options.json).write_text(json.dumps(result, indent=1))
    draw(curves, minutes, Path(options.json).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, (ConfigError,)))
