"""Our PPO iteration beside those of Stable-Baselines3 and Ray RLlib: speed, memory, and where our time goes.

    python3.11 -m venv .venv-compare && .venv-compare/bin/pip install -e ".[compare]"
    python -m benchmarks.compare_rl --python .venv-compare/bin/python --json compare_rl.json
    python -m benchmarks.compare_rl --only memory          # ours alone at full size, 6 workers x 2 environments

Every contestant is a process of its own, started in turn: ours is `train_rl.py`, the others benchmarks/rivals.py.

Equal: the environment (TrafficEnv on SUMO, corridor, whole episodes of 384 steps of 1 s, collisions counted but ending
nothing), 2 worker processes with one environment each, 768 steps per iteration in 60 minibatches of 128 (10 epochs, no
early stop), the objective, the learning rate, one torch thread, no GPU, no checkpoints between the iterations. The
first iteration is the warm-up; starting is reported by itself. Traffic and policies differ, so `ocr` (share of vehicles
that arrived) tells whether everybody simulated about the same load.

Not equal: what is computed. `ours` evaluates graph network, memory, candidates and shield in every step and trains the
controller on what it stored of them. `sb3` and `rllib` have one MLP each for policy and value on the flattened vehicles
(env/flat.py), of as many parameters as ours altogether but far fewer operations. `sb3_gnn` and `rllib_gnn`
have our frozen graph network before the MLPs, again with as many parameters; no memory, candidates or shield. The
libraries do not know that it is frozen and compute it anew in every epoch. `env` is our pool of environments alone,
commanded at random: what the simulation leaves at most to any learner.

`cpu ms` is CPU time of all processes per environment step: less exact, but hardly touched by other load. The times
of RLlib are its own running means. PSS counts every process below the contestant, SUMO and Ray's daemons included.
"""
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.arguments import at_least, writable
from benchmarks.contest import ContestantError, adopt_orphans, contest, rates
from configs import ConfigError, load_config
from configs.command_line import parse
from models.policy import TrafficModel

PACKAGES = {"sb3": "stable_baselines3", "sb3_gnn": "stable_baselines3", "rllib": "ray", "rllib_gnn": "ray"}
SIDES = ("ours", *PACKAGES, "env")
TARGETS = {"sb3": {"speed": 2.0}, "rllib": {"speed": 3.0, "memory": 3.0}, "memory_mb": 2000.0}
PPO = ["phase2.imitate_iterations=0", "phase2.imitate_corrections=0"]  # from the start
SETTINGS = [
    *PPO,
    "run.device=cpu", "run.threads=1", "env.horizon_s=384", "env.max_vehicles=200", "env.terminate_on_collision=false",
    "model.preset=small", "rollout.num_workers=2", "rollout.num_envs_per_worker=1", "phase2.iterations=4",
    "phase2.train_batch_size=768", "phase2.fragment_length=384", "phase2.minibatch_size=128", "phase2.epochs=10",
    "phase2.target_kl=1e9", "phase2.checkpoint_every=1000"]
# The default configuration (full size, 6 x 2, batches of 4800 steps). The second iteration holds both batches; more
# epochs over them take time, not memory.
MEMORY = [*PPO, "run.device=cpu", "rollout.num_workers=6", "rollout.num_envs_per_worker=2", "phase2.iterations=2",
          "phase2.epochs=1"]


# ---- what is asked for -------------------------------------------------------------------------------------------

def arguments():
    def add(parser):
        parser.add_argument("--python", default=sys.executable, help="interpreter that has the extra `compare`")
        parser.add_argument("--only", default=",".join((*SIDES, "memory")), help="of %(default)s")
        parser.add_argument("--repeat", type=at_least(1), default=5, help="runs of each side (default: %(default)s)")
        parser.add_argument("--json", type=writable, default="compare_rl.json", help="where the result goes")
    options = parse(__doc__, add=add, load=False)
    options.only = options.only.split(",")
    strange = sorted(set(options.only) - {*SIDES, "memory"})
    if strange:
        raise ConfigError(f"--only {strange[0]}: expected some of {', '.join((*SIDES, 'memory'))}")
    if not os.access(options.python, os.X_OK) or Path(options.python).is_dir():
        raise ConfigError(f"--python {options.python}: not a program; expected the interpreter of an environment with "
                          'the extra `compare`: pip install -e ".[compare]"')
    return options


def checked(config_file, changes):
    """The configuration of the contest; refused where the libraries could not do the same with it."""
    cfg = load_config(config_file, changes)
    p, workers = cfg.phase2, cfg.rollout.num_workers
    if workers < 1 or cfg.rollout.num_envs_per_worker != 1:
        raise ConfigError("the comparison needs rollout.num_workers >= 1 and rollout.num_envs_per_worker=1")
    if p.train_batch_size % (workers * p.fragment_length) or p.train_batch_size % p.minibatch_size:
        raise ConfigError(f"phase2.train_batch_size={p.train_batch_size}: expected a multiple of rollout.num_workers * "
                          f"phase2.fragment_length = {workers * p.fragment_length} and of phase2.minibatch_size = "
                          f"{p.minibatch_size}, so that everybody makes the same updates")
    if p.iterations < 2:
        raise ConfigError(f"phase2.iterations={p.iterations}: expected at least 2, the first is the warm-up")
    return cfg


def missing(python, side):
    """Why a side cannot run, or None."""
    if side in PACKAGES:
        probe = f"import sys, importlib.util as u; sys.exit(u.find_spec({PACKAGES[side]!r}) is None)"
        if subprocess.run([python, "-c", probe]).returncode:
            return (f"{PACKAGES[side]} is not installed in {python}: "
                    'python3.11 -m venv .venv-compare && .venv-compare/bin/pip install -e ".[compare]"')


# ---- one run -----------------------------------------------------------------------------------------------------

def run(side, options, changes, folder, sizes):
    """One run of one side in an empty folder: everything measured about it."""
    config = str(Path(options.config_file).resolve())
    if side == "ours":
        place = [f"run.folder={Path(folder).parent}", f"run.name={Path(folder).name}"]
        command = [sys.executable, "train_rl.py", "--config", config, *changes, *place]
    else:
        python = options.python if side in PACKAGES else sys.executable
        command = [python, "-m", "benchmarks.rivals", side, folder, str(sizes["parameters"]), config, *changes]
    load = os.getloadavg()[0]
    facts = contest(command, folder)
    built = Path(folder) / "facts.json"
    about = json.loads(built.read_text()) if built.exists() else sizes
    return {**facts, **rates(folder, facts), **about, "load": load}


def contests(options, sides, cfg, changes, sizes):
    """{side: [facts of each run]} of all repetitions, and {side: why it failed}; the first in turn changes."""
    runs, failed = {side: [] for side in sides}, {}
    for repeat in range(options.repeat):
        for side in sides[repeat % len(sides):] + sides[:repeat % len(sides)]:
            if side in failed:
                continue
            with tempfile.TemporaryDirectory(prefix="compare-") as folder:
                try:
                    facts = run(side, options, [*changes, f"run.seed={cfg.run.seed + repeat}"], folder, sizes)
                except ContestantError as error:
                    failed[side] = str(error)
                    print(f"{side}: FAILED, {error}", flush=True)
                    continue
            runs[side].append(facts)
            print(f"repeat {repeat + 1}/{options.repeat}  {side:10s}{facts['steps_per_s']:8.1f} env steps/s"
                  f"{facts['peak_mb']:8.0f} MB{facts['cpu_ms']:8.1f} CPU ms/step  (load before {facts['load']:.1f})",
                  flush=True)
    return runs, failed


# ---- what it shows -----------------------------------------------------------------------------------------------

def middle(runs, key):
    return statistics.median(run[key] for run in runs)


def ratios(first, second, key):
    """(median, least, most) of first / second over the repetitions."""
    each = [a[key] / b[key] for a, b in zip(first, second)]
    return statistics.median(each), min(each), max(each)


def table(runs):
    """One row per side. `ours/x`: how much faster ours is; `x/ours`: how much less memory ours needs."""
    head = ("side", "steps/s", "ours/x", "(min-max)", "cpu ms", "start s", "collect s", "learn s", "PSS MB", "x/ours",
            "params", "trained", "ocr", "left")
    print(("{:10s}" + "{:>9s}" * 2 + "{:>12s}" + "{:>10s}" * 10).format(*head))
    for side, rows in runs.items():
        if not rows:
            continue
        text = [f"{side:10s}{middle(rows, 'steps_per_s'):9.1f}"]
        speed = ratios(runs["ours"], rows, "steps_per_s") if runs.get("ours") else (float("nan"),) * 3
        memory = ratios(rows, runs["ours"], "peak_mb")[0] if runs.get("ours") else float("nan")
        times = {key: statistics.median(row["times"][key] for row in rows) for key in ("time_collect", "time_learn")}
        text.append(f"{speed[0]:9.2f}" + f"{speed[1]:.2f}-{speed[2]:.2f}".rjust(12))
        text += [f"{value:10.1f}" for value in (middle(rows, "cpu_ms"), middle(rows, "start_s"), *times.values())]
        text += [f"{middle(rows, 'peak_mb'):10.0f}{memory:10.2f}{rows[0]['parameters']:10d}{rows[0]['trained']:10d}"]
        text += ["-".rjust(10) if rows[0]["ocr"] is None else f"{middle(rows, 'ocr'):10.2f}"]
        text += [f"{max(row['left'] for row in rows):10d}"]
        print("".join(text))


def profile(rows):
    """Seconds of one of our iterations, by what they went into."""
    times = {key: statistics.median(row["times"][key] for row in rows) for key in rows[0]["times"]}
    whole, collect = times["iteration"], times["time_collect"]
    parts = {"waiting for the simulators": times["time_wait"], "inference": times["time_infer"],
             "the rest of collecting": collect - times["time_wait"] - times["time_infer"],
             "learning": times["time_learn"], "the rest": whole - collect - times["time_learn"]}
    print(f"\none iteration of ours, {whole:.2f} s: "
          + ", ".join(f"{name} {seconds:.2f} s ({seconds / whole:.0%})" for name, seconds in parts.items()))
    return parts


def verdicts(runs):
    """{claim: (measured, target)}, printed."""
    out = {}
    for side in ("sb3", "sb3_gnn", "rllib", "rllib_gnn"):
        for what, target in TARGETS[side.removesuffix("_gnn")].items():
            if runs.get("ours") and runs.get(side):
                mine, theirs = runs["ours"], runs[side]
                value = (ratios(mine, theirs, "steps_per_s") if what == "speed" else ratios(theirs, mine, "peak_mb"))[0]
                out[f"{what}, {side}"] = value, target
                print(f"{what:8s}against {side:10s}{value:6.2f}  target {target:.1f}  "
                      f"{'reached' if value >= target else 'MISSED'}")
    return out


def memory_row(options):
    """Peak PSS of the default configuration's phase 2, on the CPU unless the command line says otherwise."""
    changes = [*MEMORY, *options.overrides]
    cfg = load_config(options.config_file, changes)
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        facts = run("ours", options, changes, folder, {})
    peak, by_size = facts["peak_mb"], sorted(facts["at_peak"].items(), key=lambda item: -item[1])
    print(f"\nours, full size, {cfg.rollout.num_workers} workers x {cfg.rollout.num_envs_per_worker} environments, "
          f"{cfg.run.device}: {peak:.0f} MB  target below {TARGETS['memory_mb']:.0f}  "
          f"{'reached' if peak < TARGETS['memory_mb'] else 'MISSED'}  "
          f"({', '.join(f'{name} {mb:.0f}' for name, mb in by_size)})")
    return facts


def main():
    options = arguments()
    changes = [*SETTINGS, *options.overrides]
    cfg = checked(options.config_file, changes)
    counts = TrafficModel(cfg).parameter_counts()
    sizes = {"parameters": counts["total"], "trained": counts["controller"],
             "version": f"torch {importlib.metadata.version('torch')}", "threads": cfg.run.threads}
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):  # also when started in the background: nobody is left running
        signal.signal(number, signal.default_int_handler)
    skipped = {side: why for side in SIDES if side in options.only and (why := missing(options.python, side))}
    for side, why in skipped.items():
        print(f"{side}: skipped, {why}")
    sides = [side for side in SIDES if side in options.only and side not in skipped]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.repeat} runs of {', '.join(sides) or '-'}",
          flush=True)
    runs, failed = contests(options, sides, cfg, changes, sizes) if sides else ({}, {})
    result = {"settings": changes, "cores": os.cpu_count(), "skipped": skipped, "failed": failed, "runs": runs}
    if any(runs.values()):
        print()
        table(runs)
        result["profile"] = profile(runs["ours"]) if runs.get("ours") else None
        result["verdicts"] = verdicts(runs)
    if "memory" in options.only:
        result["memory"] = memory_row(options)
    print(f"load {os.getloadavg()[0]:.1f}; result: {options.json}")
    Path(options.json).write_text(json.dumps(result, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, ContestantError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
