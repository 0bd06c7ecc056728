"""Score controllers on held-out seeds, each paired with the same traffic without control.

    python evaluate.py --checkpoint runs/quick                                        # its own configuration and seeds
    python evaluate.py --scenario corridor --controllers none,lane_advice --seeds 1001-1020 --out results.json
    python evaluate.py --scenario my.sumocfg --controllers none,policy --checkpoint runs/quick
    python evaluate.py --config configs/suite.yaml --controllers none,lane_advice     # each variant, and their mean
    python evaluate.py --checkpoint runs/quick --sweep env.max_commands=0,1,2,5,10,1000
    python evaluate.py --checkpoint runs/quick --controllers policy --sweep evaluate.selection=learned,random,jam
    python evaluate.py --controllers lane_advice --animate drive.gif         # look at one episode instead of scoring
    python evaluate.py --checkpoint runs/quick --controllers policy --gui    # live, in SUMO's own window

A trajectory depends on scenario, seed and controller only: inference runs on one environment at a time and on one
thread, so another selection of seeds or another number of workers gives the same rows.
"""
import json
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from runtime.resources import before_torch
if __name__ == "__main__":
    before_torch()

import torch

from configs import ConfigError, console, from_dict, load_config
from configs.command_line import parse
from controllers import CONTROLLERS, SHIELD_LOG, Audit, make_controller
from env.gui import check_display
from env.score import paired_score
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from models.policy import TrafficModel
from runtime import animation, checkpoint
from runtime.ending import run_script
from runtime.scores import beside, differences, doubts, paired_lines, save_scores, scenarios_of, summarise, table
from runtime.tracks import Recorded, save_tracks
from runtime.training import schema
from train_ddp import TROUBLES, USER_ERRORS

SCORED = ("env.horizon_s", "env.terminate_on_collision")  # of training; scored episodes have their own
COMMANDS_ONLY = ("env.max_commands", "env.speed_mode", "env.lane_change_mode", "evaluate.selection", "evaluate.sample",
                 "evaluate.c_int_cap", "evaluate.leave_", "evaluate.surprise_limit", "evaluate.accel_limit", "shield.",
                 "baselines.")  # they change no traffic without control


def evaluate(cfg, controllers, seeds, models={}, folder=None, say=console.progress, known=(), given_up=None):
    """(rows, shield log) of all (controller, seed) pairs; "none" is always among them, as the pair of every other row.
    A controller is a policy of `models`, {name: TrafficModel}, or a baseline. `known` rows are not simulated again.
    Seeds in the set `given_up`, and those that join it (see run_jobs), have no rows."""
    jobs = [(name, seed) for name in dict.fromkeys(["none", *controllers]) for seed in seeds]
    there = {(row["controller"], row["seed"]) for row in known}
    due = [job for job in jobs if job not in there]
    with make_pool(cfg, min(cfg.evaluate.workers, len(due)), 1, folder) as pool:
        drivers = {name: make_controller(cfg, name, models, pool.num_envs) for name, _ in due}
        rows, log = run_jobs(pool, drivers, due, cfg.rollout.restarts, say, given_up)
    if given_up and given_up.issuperset(seeds):
        raise WorkerError(f"seeds {sorted(given_up)}: none is left to score; what SUMO said stands above")
    return score([*known, *rows], [job for job in jobs if job[1] not in (given_up or ())]), log


def watch(cfg, controllers, seed, models={}, folder=None, say=console.progress):
    """{controller: Tracks} of one episode each, the same as in `evaluate`, simulated in this process: of a suite that
    of the variant whose turn it is with this seed."""
    cfg = cfg.variant_of(seed)
    with make_pool(cfg, 0, 1, folder) as pool:
        environment = pool.environments.envs[0]
        drivers = {name: Recorded(make_controller(cfg, name, models, 1), environment) for name in controllers}
        run_jobs(pool, drivers, [(name, seed) for name in controllers], cfg.rollout.restarts, say)
        return {name: driver.tracks for name, driver in drivers.items()}


def run_jobs(pool, drivers, jobs, restarts, say=print, given_up=None):
    """(rows, shield log) of the episodes `jobs`, (name of a driver, seed) each, as they end. The seed of one whose
    simulator is lost every time joins the set `given_up`; without a set that is a WorkerError."""
    rows, waiting, running, audits, log, lost = [], jobs[::-1], {}, {}, [], Counter()
    console.begin("evaluate: episode")
    while waiting or running:
        for env in range(pool.num_envs):  # while one environment simulates, the next one's commands are computed
            for _, summary in pool.receive([env]) if env in running else ():
                name, seed = running.pop(env)
                rows.append({"controller": name, **summary, "seed": seed, **audits[env].counts})
                log += audits[env].lines
                say("evaluate: episode", len(rows), len(jobs),
                    f"{name} seed {seed}: {summary['arrived']} of {summary['loaded']} arrived")
            if env in running and pool.arrays["lost"][env]:
                waiting += try_again(running.pop(env), lost, restarts, given_up)
            while waiting and env not in running:
                name, seed = running[env] = waiting.pop()
                pool.reset([seed], [env], once=given_up is not None)
                if pool.arrays["lost"][env]:
                    waiting += try_again(running.pop(env), lost, restarts, given_up)
                else:
                    drivers[name].begin(env, seed)
                    audits[env] = Audit(name, seed)
            if env in running:
                command(pool, env, drivers[running[env][0]], audits[env])
                pool.send([env])
    return rows, sorted(log)


def try_again(job, lost, restarts, given_up=None):
    """[job] whose simulator crashed or froze, unless that has happened too often: see run_jobs."""
    lost[job] += 1
    if lost[job] <= restarts:
        return [job]
    trouble = (f"{job[0]} with seed {job[1]}: its simulator was lost {lost[job]} times (rollout.restarts={restarts}); "
               "what SUMO said stands above")
    if given_up is None:
        raise WorkerError(f"{trouble}; other seeds may do")
    given_up.add(job[1])
    console.say(f"WARNING: {trouble}; this seed is left out, the others are scored")
    return []


def command(pool, env, controller, audit):
    """Ask a controller for its commands, note what the shield changed, and write them for the pool."""
    commands = controller.act({name: pool.arrays[name][env] for name in pool.final}, env)
    for name in ("slot", "accel", "lane", "brake"):
        pool.arrays[name][env] = commands[name]
    audit.add(commands)


def evaluate_suite(cfg, controllers, seeds, models={}, folder=None, say=console.progress, known=(), of="",
                   given_up=None):
    """`evaluate` on each variant of env.suite in turn; of several, rows and lines of the log end with its name. `of`:
    what tells these scores from others."""
    rows, log = [], []
    for text, variant in zip(cfg.env.suite, cfg.variants()):
        mine, lines = evaluate(variant, controllers, seeds, models, folder, say,
                               [row for row in known if row.get("variant", text) == text], given_up)
        if len(cfg.env.suite) == 1:
            return mine, lines
        console.say("\n".join(["", text + of, table(summarise(mine)), *paired_lines(differences(mine)), ""]))
        rows += [{**row, "variant": text} for row in mine]
        log += [(*line, text) for line in lines]
    return rows, log


def score(rows, jobs):
    """Rows in the order of the jobs, each with its scores against the row without control of the same seed."""
    by_job = {(row["controller"], row["seed"]): row for row in rows}
    return [{**by_job[job], **paired_score(by_job[job], by_job["none", job[1]])} for job in jobs]


def find_checkpoint(path):
    """(state, folder) of a run, a phase folder or a step folder; of a run the latest phase counts."""
    path = Path(path)
    for folder in (*(path / f"phase{n}" for n in (3, 2, 1)), path):
        state = checkpoint.load(folder) if folder.is_dir() else None
        if state is None and (path / "manifest.json").exists():
            state, folder = checkpoint.load_step(path), path
        if state is not None:
            if not isinstance(state.get("config"), dict):
                raise checkpoint.CheckpointError(f"{folder}: not a checkpoint of this program (no configuration)")
            return state, folder
    raise checkpoint.CheckpointError(f"{path}: no checkpoint there; expected a run folder, phaseN in it, or a step")


def load_policy(state, folder):
    """The model as its own checkpoint describes it, whatever the configuration of this evaluation says."""
    trained = from_dict(state["config"], f"{folder}: config")
    model = TrafficModel(trained)
    checkpoint.load_weights(model, state.get("weights"), schema(trained), folder)
    return model.eval(), trained


def parse_seeds(text):
    """"1001-1005,1010" -> [1001, ..., 1005, 1010]; ConfigError when it is no such list."""
    seeds = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            more = range(int(first), int(last if dash else first) + 1)
            if not more or more[-1] >= 2 ** 31 - 1 or len(more) > 100_000:
                raise ValueError
            seeds += more
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"command line: --seeds {text!r}: expected different whole numbers such as 1001-1010,1020")
    return seeds


def add_options(parser):
    parser.set_defaults(config=None)
    parser.add_argument("--scenario", help="built-in name or a .sumocfg (default: env.scenario and env.suite)")
    parser.add_argument("--controllers", help=f"some of {','.join(CONTROLLERS)} (default: evaluate.controllers)")
    parser.add_argument("--checkpoint", help="run, phase or step folder, for `policy`; without --config its own counts")
    parser.add_argument("--seeds", help="for example 1001-1010 (default: evaluate.seeds)")
    parser.add_argument("--sweep", metavar="KEY=A,B", help="score all with each value of a setting in turn")
    parser.add_argument("--out", help="write results as JSON, and as CSV beside it with the shield's log")
    parser.add_argument("--tracks", metavar="FILE.npz", help="record an episode of none, the best rule, policy")
    parser.add_argument("--animate", metavar="FILE.gif", help="no scores: draw the last controller's first episode")
    parser.add_argument("--gui", action="store_true", help="no scores: show that episode live in sumo-gui")


def sweep(text):
    """{what is added to the controllers' names: overrides} of --sweep KEY=A,B,C; without it, nothing is changed."""
    if not text:
        return {"": []}
    key, given, values = text.partition("=")
    if not given or len(set(values.split(","))) < values.count(",") + 1:
        raise ConfigError(f"command line: --sweep {text}: expected different values, as in KEY=A,B,C")
    return {f" {key.rpartition('.')[2]}={value}": [f"{key}={value}"] for value in values.split(",")}


def configuration(options, changes, state, folder):
    """The configuration of one evaluation; of a checkpoint, its run's own unless a file is named."""
    overrides = [*options.overrides, *changes]
    if options.scenario is not None:
        overrides += [f"env.scenario={json.dumps(options.scenario, ensure_ascii=False)}", "env.suite=[same]"]
    own = options.config_file is None and state is not None
    tree, source = (state["config"], str(folder)) if own else (options.config_file or "configs/default.yaml", None)
    cfg = load_config(tree, overrides, source)
    cfg.env.horizon_s, cfg.env.terminate_on_collision = cfg.evaluate.horizon_s, False
    return cfg


def settings(options):
    """({name of a sweep's value: configuration}, controllers, seeds, models {"policy": ...}) of the command line. torch
    gets one thread: more would wait for processors on which SUMO simulates."""
    torch.set_num_threads(1)
    key, state, folder = (options.sweep or "").partition("=")[0], None, None
    named = ("env.scenario", "env.suite") if options.scenario else ()
    if key in ("evaluate.seeds", "evaluate.controllers", *SCORED, *named):
        raise ConfigError(f"command line: --sweep {options.sweep}: not with these; all values have the same seeds and "
                          "controllers, episodes of evaluate.horizon_s, and --scenario names the only one")
    if any(text.partition("=")[0] in SCORED for text in options.overrides):
        print("NOTE: scored episodes last evaluate.horizon_s and end at no collision, whatever env.* says")
    if options.checkpoint:
        state, folder = find_checkpoint(options.checkpoint)
    configs = {name: configuration(options, changes, state, folder) for name, changes in sweep(options.sweep).items()}
    cfg = next(iter(configs.values()))
    controllers = options.controllers.split(",") if options.controllers is not None else cfg.evaluate.controllers
    wrong = [name for name in controllers if name not in CONTROLLERS]
    if wrong:
        raise ConfigError(f"controllers: unknown {str(wrong)[1:-1]}; expected some of {', '.join(CONTROLLERS)}")
    seeds, models = cfg.evaluate.seeds if options.seeds is None else parse_seeds(options.seeds), {}
    if "policy" in controllers:
        if state is None:
            raise ConfigError("controllers: `policy` needs --checkpoint RUN_OR_FOLDER")
        models["policy"], trained = load_policy(state, folder)
        for cfg in configs.values():
            if cfg.model.lane_room_m != trained.model.lane_room_m:
                raise ConfigError(f"{folder}: trained with model.lane_room_m={trained.model.lane_room_m:g}, cannot be "
                                  f"evaluated with {cfg.model.lane_room_m:g}; without --config it has its own")
            if cfg.env.control_interval != trained.env.control_interval:  # the rest of a schema need not be shared
                raise ConfigError(f"{folder}: trained with {schema(trained)}, cannot be evaluated with {schema(cfg)}; "
                                  "without --config it is evaluated with its own")
        print(f"policy: {folder} (epoch {state.get('epoch')})\n{models['policy'].describe()}")
        if "data" in (state.get("counters") or ()):  # phase 1 alone notes what it learned from
            print(f"NOTE: {folder} is a checkpoint of phase 1: its controller, and so the policy, is untrained")
    return configs, controllers, seeds, models


def main():
    options = parse(__doc__, add=add_options, load=False)
    configs, controllers, seeds, models = settings(options)
    check_output(options)
    first, same = next(iter(configs.values())), (options.sweep or "").startswith(COMMANDS_ONLY)
    folder = str(Path(first.run.folder) / first.run.name / "scenario")
    for cfg in [first] if same else configs.values():
        check_scenario(cfg, folder)
    if options.animate or options.gui:
        return show(first, controllers[-1], seeds[0], models, folder, options)
    rows, log, pairs, given_up = score_all(configs, controllers, seeds, models, folder, same)
    seeds = [seed for seed in seeds if seed not in given_up]
    scenario = scenarios_of(configs.values())
    suite = f", mean of {len(first.env.suite)} variants" if len(first.env.suite) > 1 else ""
    print(f"\n{scenario}{suite}, {len(seeds)} paired seeds, SUMO {version('eclipse-sumo')}: mean +- 95 % interval")
    print("\n".join([table(summarise(rows)), *paired_lines(pairs)]))
    for doubt in doubts(rows, scenario, first.reward):
        console.say(f"WARNING: {doubt}")
    if options.out:
        save_scores(options.out, scenario, seeds, rows, pairs, SHIELD_LOG, log)
    if options.tracks:
        tracks = watch(first, to_record(summarise(rows)), seeds[0], models, folder)
        variant = first.env.suite[seeds[0] % len(first.env.suite)] if suite else ""
        save_tracks(options.tracks, tracks, first.env.control_interval, seeds[0], variant)
    if given_up:
        raise WorkerError(f"seeds {sorted(given_up)}: left out, because a simulator was lost every time (WARNINGS "
                          "above); the scores are of the others")


def score_all(configs, controllers, seeds, models, folder, same):
    """(rows, shield log, `differences`, seeds given up) of all {what tells them apart: configuration}; with `same`
    traffic without control in all."""
    scored, rows, log, known, pairs, given_up = {}, [], [], [], {}, set()
    for name, cfg in configs.items():
        scored[name], lines = evaluate_suite(cfg, controllers, seeds, models, folder, known=known, of=name,
                                             given_up=given_up)
        known = [row for row in scored[name] if row["controller"] == "none"] if same else []
        log += [(line[0] + name, *line[1:]) for line in lines]
    for name, mine in scored.items():
        mine = [row for row in mine if row["seed"] not in given_up]  # some by what came later
        rows += [{**row, "controller": row["controller"] + name} for row in mine]
        pairs.update(differences(mine, name))
    return rows, [line for line in log if line[1] not in given_up], pairs, given_up


def to_record(summary):
    """Whose episode is recorded: without control, the best rule, and the policy."""
    rules = sorted(summary.keys() - {"none", "policy"}, key=lambda name: (summary[name]["s_total"]["mean"], name))
    return ["none", *rules[-1:], *(["policy"] if "policy" in summary else [])]


def check_output(options):
    """ConfigError or SumoError for what this machine cannot show or write, before anything is simulated."""
    if options.sweep and options.tracks:
        raise ConfigError("command line: --tracks with --sweep: which of its settings? Name one as section.key=value")
    if options.out and Path(options.out).suffix == ".csv":
        raise ConfigError(f"command line: --out {options.out}: name the JSON file; the CSV is written beside it")
    if (options.gui or options.animate) and (options.out or options.tracks or options.sweep):
        raise ConfigError("command line: --gui and --animate show one episode; --out, --tracks and --sweep score many")
    scores, drawn, tracks = ([Path(name)] if name else [] for name in (options.out, options.animate, options.tracks))
    files = [*tracks, *scores, *drawn, *(path.with_suffix(".tracks.npz") for path in drawn),
             *(beside(path, kind) for path in scores for kind in (".csv", ".shield.csv"))]
    if len(set(files)) < len(files):
        raise ConfigError(f"command line: --out {options.out} and --tracks {options.tracks} would write the same file; "
                          "name different ones")
    for path in files:
        if (old := path.exists()) and not path.is_file():
            raise ConfigError(f"command line: {path} is no file; name another one")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise ConfigError(f"command line: {path} cannot be written: {error.strerror}; name another file") from None
        if not old:
            path.unlink(missing_ok=True)  # another evaluation may have looked at the same time
    if options.animate:
        animation.check(options.animate)
    if options.gui:
        check_display()


def show(cfg, controller, seed, models, folder, options):
    """One episode in SUMO's window, as an animation, or both."""
    if options.gui:  # one may pause for as long as one likes, and a closed window stays closed
        cfg.env.backend, cfg.env.call_timeout_s, cfg.rollout.restarts = "gui", 1e6, 0
    tracks = watch(cfg, [controller], seed, models, folder)
    if options.animate:
        path = Path(options.animate).with_suffix(".tracks.npz")
        save_tracks(path, tracks, cfg.env.control_interval, seed)
        animation.draw(path, options.animate)


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, TROUBLES))
