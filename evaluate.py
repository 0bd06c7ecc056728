"""Score controllers on held-out seeds, each paired with the same traffic without control.

    python evaluate.py --checkpoint runs/quick                                        # its own configuration and seeds
    python evaluate.py --scenario corridor --controllers none,lane_advice --seeds 1001-1020 --out results.json
    python evaluate.py --scenario my.sumocfg --controllers none,policy --checkpoint runs/quick

A trajectory depends on scenario, seed and controller only: inference runs on one environment at a time and on one
thread, so another selection of seeds or another number of workers gives the same rows.
"""
import csv
import json
import math
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from configs import ConfigError, from_dict, load_config
from configs.command_line import parse
from env.baselines import BASELINES, make_baseline
from env.score import paired_score
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from models.policy import Driver, TrafficModel
from models.presets import PRESETS
from models.risk_gnn import SPEED
from models.safety_shield import CLIPPED, EMERGENCY, REASONS, SafetyShield
from runtime import checkpoint
from runtime.training import run_script, schema
from train_ddp import USER_ERRORS

CONTROLLERS = (*BASELINES, "policy")
LANES = ("left", "keep", "right")
SHIELD_LOG = ("controller", "seed", "step", "slot", "reason", "commanded_accel", "commanded_lane", "sent_accel",
              "sent_lane")
SHOWN = ("s_total", "s_efficiency", "s_stability", "ocr_change", "arrived", "sigma_v", "abs_a", "c_int", "collisions",
         "teleports", "shield_clips", "shield_emergencies")


class PolicyController:
    """The trained model on one environment at a time (so that nothing depends on who else is in the batch)."""

    def __init__(self, cfg, model, num_envs):
        self.driver = Driver(model, num_envs, cfg.env.max_vehicles, shield=cfg.shield.enabled)

    def begin(self, env, seed):
        self.driver.forget(env)

    def act(self, observation, env):
        """Commands and the shield's reasons for one environment: arrays of length K."""
        seen = self.driver.perceive({name: value[None] for name, value in observation.items()}, [env])
        _, commands = self.driver.decide(seen)
        return {name: value[0] for name, value in commands.items()}


class BaselineController:
    """A rule of env/baselines.py behind the same shield as the policy."""

    def __init__(self, cfg, name):
        self.name, self.cfg, self.n, self.rules = name, cfg, cfg.env.max_vehicles, {}
        self.shield = SafetyShield(PRESETS["small"], cfg.shield, cfg.env.control_interval)  # its rules have no weights

    def begin(self, env, seed):
        self.rules[env] = make_baseline(self.name, self.cfg), np.random.default_rng(seed)

    def act(self, observation, env):
        """Commands and the shield's reasons for one environment: arrays of length K."""
        rule, rng = self.rules[env]
        slot, wanted, wanted_lane, _ = rule(observation, self.cfg.env.max_commands, rng)
        row = np.minimum(slot, self.n - 1)
        near = torch.from_numpy(observation["surround"][row]).float()
        speed = torch.from_numpy(observation["nodes"][row, SPEED]).float()
        with torch.no_grad():
            checked = self.shield(torch.tensor(wanted, dtype=torch.float32), torch.tensor(wanted_lane), speed, near)
        accel, lane, brake, reason = (x.numpy() for x in checked)
        return {"slot": slot, "accel": accel, "lane": lane, "brake": brake, "reason": reason * (slot < self.n),
                "wanted": wanted, "wanted_lane": wanted_lane}


class Audit:
    """What the shield changed in one episode: counts for the row, and one line per override for the log."""

    def __init__(self, controller, seed):
        self.controller, self.seed, self.step, self.lines = controller, seed, 0, []
        self.counts = {"shield_clips": 0, "shield_emergencies": 0}

    def add(self, commands):
        """Note one control step's overrides."""
        reason = commands["reason"]
        self.counts["shield_clips"] += int((reason & CLIPPED > 0).sum())
        self.counts["shield_emergencies"] += int((reason & EMERGENCY > 0).sum())
        for i in np.flatnonzero(reason):
            sent = -commands["brake"][i] if commands["brake"][i] > 0 else commands["accel"][i]
            why = " + ".join(text for code, text in REASONS.items() if reason[i] & code)
            self.lines.append((self.controller, self.seed, self.step, int(commands["slot"][i]), why,
                               round(float(commands["wanted"][i]), 3), LANES[commands["wanted_lane"][i]],
                               round(float(sent), 3), LANES[commands["lane"][i]]))
        self.step += 1


def evaluate(cfg, controllers, seeds, model=None, folder=None, say=print):
    """(rows, shield log) of all (controller, seed) pairs; "none" is always run, as the pair of every other row."""
    jobs = [(name, seed) for name in dict.fromkeys(["none", *controllers]) for seed in seeds]
    with make_pool(cfg, min(cfg.evaluate.workers, len(jobs)), 1, folder) as pool:
        drivers = {name: BaselineController(cfg, name) for name, _ in jobs if name != "policy"}
        if model is not None:
            drivers["policy"] = PolicyController(cfg, model, pool.num_envs)
        rows, log = run_jobs(pool, drivers, jobs, cfg.rollout.restarts, say)
    return score(rows, jobs), log


def run_jobs(pool, drivers, jobs, restarts, say=print):
    """(rows, shield log) of the episodes `jobs`, (name of a driver, seed) each, as they end."""
    rows, waiting, running, audits, log, lost = [], jobs[::-1], {}, {}, [], Counter()
    while waiting or running:
        for env in range(pool.num_envs):  # while one environment simulates, the next one's commands are computed
            for _, summary in pool.receive([env]) if env in running else ():
                name, seed = running.pop(env)
                rows.append({"controller": name, **summary, "seed": seed, **audits[env].counts})
                log += audits[env].lines
                say(f"evaluate: {len(rows)}/{len(jobs)} {name} seed {seed}: "
                    f"{summary['arrived']} of {summary['loaded']} arrived")
            if env in running and pool.arrays["lost"][env]:
                waiting.append(try_again(running.pop(env), lost, restarts))
            if waiting and env not in running:
                name, seed = running[env] = waiting.pop()
                pool.reset([seed], [env])
                drivers[name].begin(env, seed)
                audits[env] = Audit(name, seed)
            if env in running:
                command(pool, env, drivers[running[env][0]], audits[env])
                pool.send([env])
    return rows, sorted(log)


def try_again(job, lost, restarts):
    """The job whose simulator crashed or froze, unless that has happened too often: then WorkerError."""
    lost[job] += 1
    if lost[job] > restarts:
        raise WorkerError(f"{job[0]} with seed {job[1]}: its simulator was lost {lost[job]} times")
    return job


def command(pool, env, controller, audit):
    """Ask a controller for its commands, note what the shield changed, and write them for the pool."""
    commands = controller.act({name: pool.arrays[name][env] for name in pool.final}, env)
    for name in ("slot", "accel", "lane", "brake"):
        pool.arrays[name][env] = commands[name]
    audit.add(commands)


def score(rows, jobs):
    """Rows in the order of the jobs, each with its scores against the row without control of the same seed."""
    by_job = {(row["controller"], row["seed"]): row for row in rows}
    return [{**by_job[job], **paired_score(by_job[job], by_job["none", job[1]])} for job in jobs]


def summarise(rows):
    """{controller: {metric: {"mean", "ci95"}}}; ci95 is the half width of the mean's 95 % interval (Student's t)."""
    summary = {}
    for name in dict.fromkeys(row["controller"] for row in rows):
        mine = [row for row in rows if row["controller"] == name]
        metrics = [key for key in mine[0] if key not in ("controller", "seed")]
        summary[name] = {key: mean_ci([row[key] for row in mine if row[key] is not None]) for key in metrics}
    return summary


def mean_ci(values):
    """{"mean", "ci95"} of a list of numbers; None where there are too few."""
    n = len(values)
    if not n:
        return {"mean": None, "ci95": None}
    spread = np.std(values, ddof=1) if n > 1 else None
    return {"mean": float(np.mean(values)), "ci95": None if n < 2 else float(student_t(n - 1) * spread / math.sqrt(n))}


def student_t(freedom, z=1.959964):
    """97.5 % quantile of Student's t (Cornish-Fisher expansion, within 2 % from 3 degrees of freedom on)."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}[freedom]
    return (z + (z ** 3 + z) / (4 * freedom) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * freedom ** 2)
            + (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384 * freedom ** 3))


def table(summary):
    """The summary as text: one line per metric, one column per controller, mean +- 95 % interval."""
    lines = ["".join([f"{'':20s}", *(f"{name:>22s}" for name in summary)])]
    for key in SHOWN:
        cells = [f"{c[key]['mean']:.3f}" + (f" +- {c[key]['ci95']:.3f}" if c[key]["ci95"] is not None else "")
                 for c in summary.values()]
        lines.append("".join([f"{key:20s}", *(f"{cell:>22s}" for cell in cells)]))
    return "\n".join(lines)


def write(path, scenario, seeds, rows, log):
    """Results as JSON; beside it the rows as CSV and the shield's log, one line per override, as .shield.csv."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"scenario": scenario, "sumo_version": version("eclipse-sumo"), "seeds": seeds, "episodes": rows,
              "summary": summarise(rows)}
    path.write_text(json.dumps(result, indent=1))
    with open(path.with_suffix(".csv"), "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    with open(path.with_suffix(".shield.csv"), "w", newline="") as file:
        csv.writer(file).writerows([SHIELD_LOG, *log])


def find_checkpoint(path):
    """(state, folder) of a run, a phase folder or a step folder; of a run the latest phase counts."""
    path = Path(path)
    for folder in (*(path / f"phase{n}" for n in (3, 2, 1)), path):
        state = checkpoint.load(folder) if folder.is_dir() else None
        if state is None and (path / "manifest.json").exists():
            state, folder = checkpoint.load_step(path), path
        if state is not None:
            if not isinstance(state, dict) or not isinstance(state.get("config"), dict):
                raise checkpoint.CheckpointError(f"{folder}: not a checkpoint of this program (no configuration)")
            return state, folder
    raise checkpoint.CheckpointError(f"{path}: no checkpoint there; expected a run folder, phaseN in it, or a step")


def load_policy(state, folder):
    """The model as its own checkpoint describes it, whatever the configuration of this evaluation says."""
    trained = from_dict(state["config"], f"{folder}: config")
    model = TrafficModel(trained)
    checkpoint.load_weights(model, state["weights"], schema(trained), folder)
    return model.eval(), trained


def parse_seeds(text):
    """"1001-1005,1010" -> [1001, ..., 1005, 1010]; ConfigError when it is no such list."""
    seeds = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"command line: --seeds {text!r}: expected different whole numbers such as 1001-1010,1020")
    return seeds


def add_options(parser):
    parser.set_defaults(config=None)
    parser.add_argument("--scenario", help="built-in name or a .sumocfg (default: env.scenario)")
    parser.add_argument("--controllers", help=f"some of {','.join(CONTROLLERS)} (default: evaluate.controllers)")
    parser.add_argument("--checkpoint", help="run folder, phase folder or step folder; needed for `policy`")
    parser.add_argument("--seeds", help="for example 1001-1010 (default: evaluate.seeds)")
    parser.add_argument("--out", help="write results as JSON, and as CSV beside it with the shield's log")


def settings(options):
    """(configuration, controllers, seeds, model or None) from the command line."""
    state = folder = None
    if options.checkpoint:
        state, folder = find_checkpoint(options.checkpoint)
    if options.config_file is None and state is not None:  # the run's own configuration
        cfg = load_config(state["config"], options.overrides, source=str(folder))
    else:
        cfg = load_config(options.config_file or "configs/default.yaml", options.overrides)
    cfg.env.scenario = options.scenario or cfg.env.scenario
    cfg.env.horizon_s, cfg.env.terminate_on_collision = cfg.evaluate.horizon_s, False
    controllers = options.controllers.split(",") if options.controllers else cfg.evaluate.controllers
    wrong = [name for name in controllers if name not in CONTROLLERS]
    if wrong:
        raise ConfigError(f"controllers: unknown {', '.join(wrong)}; expected some of {', '.join(CONTROLLERS)}")
    model = None
    if "policy" in controllers:
        if state is None:
            raise ConfigError("controllers: `policy` needs --checkpoint RUN_OR_FOLDER")
        model, trained = load_policy(state, folder)
        if schema(trained) != {**schema(cfg), "preset": trained.model.preset, "future": trained.data.future}:
            raise ConfigError(f"{folder}: trained with {schema(trained)}, cannot be evaluated with {schema(cfg)}")
        print(f"policy: {folder} (epoch {state['epoch']})\n{model.describe()}")
    return cfg, controllers, parse_seeds(options.seeds) if options.seeds else cfg.evaluate.seeds, model


def main():
    options = parse(__doc__, add=add_options, load=False)
    cfg, controllers, seeds, model = settings(options)
    torch.set_num_threads(1)
    folder = str(Path(cfg.run.folder) / cfg.run.name / "scenario")
    check_scenario(cfg, folder)
    rows, log = evaluate(cfg, controllers, seeds, model, folder)
    print(f"\n{cfg.env.scenario}, {len(seeds)} paired seeds, SUMO {version('eclipse-sumo')}: mean +- 95 % interval")
    print(table(summarise(rows)))
    if options.out:
        write(options.out, cfg.env.scenario, seeds, rows, log)


if __name__ == "__main__":
    sys.exit(run_script(main, (*USER_ERRORS, WorkerError)))
