"""What is a policy worth when interventions are rationed? Phase 3 once for each limit of C_int, all from one phase 2.

    python -m benchmarks.pareto --run runs/suite --limits 0.2,0.1,0.05,0.02 --price 3000 --json pareto.json

Each limit is a run of its own beside --run, named after both, with that run's configuration or the one of --config:
the limit holds from the first epoch on. --price adds a run with a constant multiplier instead, for comparison. What is
trained already is not trained again, and refused if its settings were others. Then the policy of phase 2 and those of
all limits drive the same held-out episodes (evaluate.seeds, or --seeds) of each variant of env.suite; with --cap, each
behind evaluate.c_int_cap at its own limit. Flagged: a mean C_int more than 5 % above the limit; OCR more than 1 % below
no control.
"""
import shutil
import sys
from pathlib import Path

import torch

from benchmarks.arguments import positive, writable
from benchmarks.phases import train
from benchmarks.report import finish
from configs import ConfigError, from_dict, load_config
from configs.command_line import parse
from configs.options import leaves
from env.traffic_env import check_scenario
from env.workers import WorkerError
from evaluate import evaluate_suite, find_checkpoint, load_policy, parse_seeds
from runtime import checkpoint
from runtime.ending import run_script
from runtime.scores import summarise, with_interval
from train_ddp import USER_ERRORS

# What a phase 3 does not depend on, but for the keys that it does.
UNHEARD = ("run.", "baselines.", "data.", "ddp.", "rollout.", "phase1.", "phase3.epochs", "profile.", "memory.",
           "checkpoint.", "evaluate.", "coordinator.", "env.backend", "env.call_timeout_s", "env.start_timeout_s")
HEARD = ("run.seed", "evaluate.accel_limit", "evaluate.leave_below", "evaluate.leave_after")


def folder_of(run, name):
    """Where the run of one limit or price lives."""
    return run.parent / f"{run.name}-{name}"


def refuse_others(folder, run, cfg):
    """ConfigError when the phase 3 in `folder`, if there is one, was trained with other settings than `cfg` (but for
    its length), or from another phase 2 than that of `run`."""
    state = checkpoint.load(folder / "phase3") if (folder / "phase3").is_dir() else None
    if state is None:
        return
    before = settings(from_dict(state["config"], f"{folder}: config"))
    for key, value in settings(cfg).items():
        if before[key] != value:
            raise ConfigError(f"{folder}: its phase 3 was trained with {key}={before[key]}, not with {value}; remove "
                              "this folder to train it again")
    if newest(folder / "phase2") != newest(run / "phase2"):
        raise ConfigError(f"{folder}: its phase 3 was trained from another phase 2 than {run / 'phase2'}; remove this "
                          "folder to train it again")


def settings(cfg):
    """{dotted key: value} of what the outcome of a phase 3 depends on."""
    return {key: value for key, value, _ in leaves(cfg) if key in HEARD or not key.startswith(UNHEARD)}


def newest(phase):
    """What the manifest of a phase's newest checkpoint says."""
    return (phase / (phase / "latest").read_text().strip() / "manifest.json").read_text()


def train_limit(cfg, run, name, config, overrides):
    """Phase 3 in the folder `name` beside `run`, from the phase 2 of `run`; returns that folder."""
    folder = folder_of(run, name)
    if not (folder / "phase3" / "latest").exists():  # else it goes on from its own
        shutil.rmtree(folder / "phase2", ignore_errors=True)
        shutil.copytree(run / "phase2", folder / "phase2")
    train(cfg, name, "train_ddp.py", "--phase", "3", "--config", config, f"run.folder={run.parent}",
          f"run.name={folder.name}", *overrides)
    return folder


def score(cfg, models, seeds, folder, caps):
    """Rows of no control and of all models, {name: TrafficModel}; with `caps`, {name: limit}, each behind its own."""
    if not caps:
        return evaluate_suite(cfg, [*models], seeds, models, folder)[0]
    names, rows, own = [], [], cfg.evaluate.c_int_cap
    for name in models:
        names.append(name)
        cfg.evaluate.c_int_cap = caps.get(name, own)  # 0 = none
        rows = evaluate_suite(cfg, names, seeds, models, folder, known=rows)[0]  # those before are not simulated again
    return rows


def show(rows, limits):
    """Print one line per policy: means over the suite with intervals, then S_total and C_int by variant."""
    rows = [{"variant": "", **row} for row in rows]  # a suite of one has no names
    variants, summary = list(dict.fromkeys(row["variant"] for row in rows)), summarise(rows)
    print(f"\n{'':18s}{'S_total':>14s}{'OCR change, %':>16s}{'C_int':>16s}   S_total, C_int by variant")
    for name, mean in summary.items():
        cells = [with_interval(mean[key], f".{digits}f")
                 for key, digits in (("s_total", 1), ("ocr_change", 1), ("c_int", 3))]
        parts = [summarise([row for row in rows if row["variant"] == text])[name] for text in variants]
        by_variant = "  ".join(f"{part['s_total']['mean']:5.1f} {part['c_int']['mean']:.3f}" for part in parts)
        flags = ["C_int"] if mean["c_int"]["mean"] > 1.05 * limits.get(name, float("inf")) else []
        flags += ["OCR"] if min(part["ocr_change"]["mean"] for part in parts) < -1 else []
        print(f"{name:18s}{cells[0]:>14s}{cells[1]:>16s}{cells[2]:>16s}   {by_variant}"
              + "".join(f"  <- {flag}" for flag in flags))


def parse_limits(text):
    """"0.2,0.05" -> {"limit-0.2": 0.2, "limit-0.05": 0.05}; ConfigError when it is no such list."""
    try:
        return {f"limit-{part}": float(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(f"command line: --limits {text!r}: expected numbers such as 0.2,0.05") from None


def add_options(parser):
    parser.set_defaults(config=None)  # that of the run
    parser.add_argument("--run", required=True, help="run folder with phase 2 finished")
    parser.add_argument("--limits", default="0.2,0.1,0.05,0.02", help="(default: %(default)s)")
    parser.add_argument("--price", type=positive, help="add a run with this constant multiplier")
    parser.add_argument("--cap", action="store_true", help="send no command that would take an episode above the limit")
    parser.add_argument("--seeds", help="(default: evaluate.seeds)")
    parser.add_argument("--json", type=writable, default="pareto.json", help="where the result goes")


def main():
    options = parse(__doc__, add=add_options, load=False)
    run = Path(options.run)
    if not (run / "phase2").is_dir() or not (run / "config.yaml").is_file():
        raise ConfigError(f"--run {run}: no run folder with a phase 2; train one with train_rl.py first")
    config = options.config_file or str(run / "config.yaml")
    cfg = load_config(config, options.overrides)
    seeds = parse_seeds(options.seeds) if options.seeds else cfg.evaluate.seeds
    limits = parse_limits(options.limits)
    if options.cap and min(limits.values()) <= 0:
        raise ConfigError(f"command line: --limits {options.limits} with --cap: a cap is above 0")
    wanted = {name: [f"phase3.limit_end={limit}", f"phase3.limit_start={limit}"] for name, limit in limits.items()}
    if options.price is not None:
        wanted[f"price-{options.price:g}"] = [f"phase3.multiplier_init={options.price}", "phase3.multiplier_lr=0",
                                              f"phase3.multiplier_max={max(options.price, cfg.phase3.multiplier_max)}"]
    for name, words in wanted.items():  # before anything is trained
        refuse_others(folder_of(run, name), run, load_config(config, [*options.overrides, *words]))
    folders = {"phase 2": run / "phase2"}
    for name, words in wanted.items():
        folders[name] = train_limit(cfg, run, name, config, [*options.overrides, *words]) / "phase3"
    torch.set_num_threads(1)
    models = {name: load_policy(*find_checkpoint(folder))[0] for name, folder in folders.items()}
    cfg.env.horizon_s, cfg.env.terminate_on_collision = cfg.evaluate.horizon_s, False
    check_scenario(cfg, run / "scenario")
    rows = score(cfg, models, seeds, str(run / "scenario"), limits if options.cap else {})
    show(rows, limits)
    finish(options.json, seeds=seeds, limits=limits, summary=summarise(rows), rows=rows)


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (WorkerError,)))
