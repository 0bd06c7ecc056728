"""How much could a better controller gain? A planner that tries rules out in copies of the running simulation.

    python -m benchmarks.headroom --config configs/suite.yaml --seeds 21-24 --json headroom.json
    python -m benchmarks.headroom --options "none; cruise=0; gain=0.3 offset=-2" --every 10 --ahead 60

Every --every seconds the process, which holds the simulation itself (libsumo), is copied (fork) once for each option:
the rule, and the rule with other numbers of its own, or nobody commanded. In a copy the option drives until the next
decision and then the rule, --ahead seconds in all; the option with the highest return goes on. K, shield and score are
those of evaluate.py.

The planner is no controller: its copies know how each driver is going to dawdle. How much that is worth "chance" tells,
which chooses in the same way among as many options that are the rule itself, but for one second each in which nobody is
commanded. What the planner gains beyond that is what the right rule at the right time is worth. Needs the package
libsumo (pip install -e ".[fast]"); an episode takes as long as (number of options) * ahead / every without a planner.
"""
import os
import struct
import sys
import tempfile
import traceback

import numpy as np

from benchmarks.arguments import at_least, some_of, writable
from benchmarks.report import executor, finish
from benchmarks.tune_rules import KNOWN
from configs import ConfigError
from configs.command_line import parse
from configs.loader import variant
from controllers import Audit, BaselineController
from env.launch import die_with_parent
from env.score import paired_score
from env.traffic_env import check_scenario, make_env
from env.workers import WorkerError
from evaluate import parse_seeds
from runtime.ending import run_script
from runtime.scores import PAIRED, mean_ci, summarise, table, with_interval
from train_ddp import USER_ERRORS

WAYS = ("none", "rule", "chance", "planner")
OPTIONS = "none; cruise=0; cruise=23; cruise=27; reach_m=250; vehicles=3; gain=0"


class Pausing(BaselineController):
    """A rule that commands nobody in step number `pause` of every `every`: as good as the rule, in other traffic."""

    def __init__(self, cfg, name, pause, every):
        super().__init__(cfg, name)
        self.pause, self.every, self.steps = pause, every, 0

    def act(self, observation, env):
        commands = super().act(observation, env)
        if self.steps % self.every == self.pause:
            commands["slot"][:] = self.n
        self.steps += 1
        return commands


def changed(cfg, rule, text):
    """The controller of an option: "none", or numbers of the rule, "key=value ..."."""
    if text == "none":
        return BaselineController(cfg, "none")
    return BaselineController(variant(cfg, " ".join(f"baselines.{rule}.{part}" for part in text.split()), "--options"),
                              rule)


def options_of(cfg, way, rule, texts, every):
    """The controllers that a way of driving chooses among; the first one drives the rest of each copy."""
    if way in ("none", "rule"):
        return [BaselineController(cfg, "none" if way == "none" else rule)]
    if way == "chance":
        return [BaselineController(cfg, rule), *(Pausing(cfg, rule, n, every) for n in range(len(texts)))]
    return [BaselineController(cfg, rule), *(changed(cfg, rule, text) for text in texts)]


def drive(env, observation, controller, audit=None):
    """One control step: (observation, reward, whether the episode ended, info)."""
    chosen = controller.act(observation, 0)
    if audit:
        audit.add(chosen)
    observation, reward, collided, over, info = env.command(*(chosen[x] for x in ("slot", "accel", "lane", "brake")))
    return observation, reward, collided or over, info


def tried(env, observation, option, rule, every, ahead):
    """Return of `ahead` steps, driven in a copy of this process: `every` of them by `option`, the rest by `rule`."""
    reading, writing = os.pipe()
    if child := os.fork():
        os.close(writing)
        answer = os.read(reading, 8)
        os.close(reading)
        os.waitpid(child, 0)
        if len(answer) < 8:
            raise WorkerError("a copy of the simulation ended early; its last words are above")
        return struct.unpack("d", answer)[0]
    try:  # nothing of the parent may be cleaned up here
        die_with_parent()
        total = 0.0
        for step in range(ahead):
            observation, reward, ended, _ = drive(env, observation, option if step < every else rule)
            total += reward
            if ended:
                break
        os.write(writing, struct.pack("d", total))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def episode(cfg, way, seed, folder, rule, texts, every, ahead):
    """The row of one episode, as evaluate.py has it, and the share of the decisions that were not for the rule."""
    env, options = make_env(cfg, folder), options_of(cfg, way, rule, texts, every)
    audit, left = Audit(way, seed), []
    try:
        observation, _ = env.reset(seed=seed)
        for option in options:
            option.begin(0, seed)
        ended = False
        while not ended:
            chosen = int(np.argmax([tried(env, observation, option, options[0], every, ahead) for option in options]
                                   if len(options) > 1 else [0.0]))
            left.append(chosen > 0)
            for _ in range(every):
                observation, _, ended, info = drive(env, observation, options[chosen], audit)
                if ended:
                    break
    finally:
        env.close()
    return {"controller": way, "seed": seed, **info["summary"], **audit.counts, "left_the_rule": float(np.mean(left))}


def scored(rows):
    """The rows of one variant with their scores, each paired with the episode of its seed without control."""
    base = {row["seed"]: row for row in rows if row["controller"] == "none"}
    return [{**row, **paired_score(row, base[row["seed"]])} for row in rows]


def gains(rows, of, over):
    """{metric of PAIRED: mean_ci} of `of` less `over`, seed by seed, of several variants their mean."""
    value = {way: {} for way in (of, over)}
    for row in rows:
        if row["controller"] in value:
            value[row["controller"]].setdefault(row["seed"], []).append([row[key] for key in PAIRED])
    differences = [np.mean(value[of][seed], 0) - np.mean(value[over][seed], 0) for seed in value[of]]
    return {key: mean_ci(list(gain)) for key, gain in zip(PAIRED, np.transpose(differences))}


def tell(name, rows, ways, say=print):
    """Print the table of these rows and what each choice among options gains: {"table", "gains"}."""
    summary = summarise(rows)
    pairs = [(of, over) for of, over in (("chance", "rule"), ("planner", "rule"), ("planner", "chance"))
             if of in ways and over in ways]
    result = {"table": summary, "gains": {f"{of} - {over}": gains(rows, of, over) for of, over in pairs}}
    say(f"\n{name}: mean +- 95 % interval\n{table(summary)}")
    for pair, gain in result["gains"].items():
        say(f"{pair}, paired: " + ", ".join(f"{title} {with_interval(gain[key], form)}"
                                            for key, (title, form) in PAIRED.items()), flush=True)
    return result


def add_options(parser):
    parser.add_argument("--rule", choices=KNOWN, default="harmonise", help="drives, and after each option "
                                                                           "(default: %(default)s)")
    parser.add_argument("--options", default=OPTIONS, help="what else is tried, ; in between (default: %(default)s)")
    parser.add_argument("--ways", type=some_of(WAYS), default=",".join(WAYS), help="(default: %(default)s)")
    parser.add_argument("--every", type=at_least(1), default=20, help="control steps between decisions (%(default)s)")
    parser.add_argument("--ahead", type=at_least(1), default=120, help="control steps tried out (%(default)s)")
    parser.add_argument("--seeds", default="21-22", help="training seeds (default: %(default)s)")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), help="(default: %(default)s)")
    parser.add_argument("--json", type=writable, default="headroom.json", help="where the result goes")


def run(cfg, options, ways, texts, seeds, folder, pool):
    """{variant or "mean": what `tell` returns}; the longest episodes begin first."""
    suite = dict(zip(cfg.env.suite, cfg.variants()))
    jobs = [(text, way, seed) for way in reversed(ways) for text in suite for seed in seeds]
    futures = [pool.submit(episode, suite[text], way, seed, folder, options.rule, texts, options.every, options.ahead)
               for text, way, seed in jobs]
    rows = {text: [] for text in suite}
    for (text, way, seed), future in zip(jobs, futures):
        rows[text].append(future.result())
        print(f"{text} seed {seed} {way}: return {rows[text][-1]['return']:.1f}", flush=True)
    rows = {text: scored(of_variant[::-1]) for text, of_variant in rows.items()}  # as in WAYS again
    results = {text: tell(text, of_variant, ways) for text, of_variant in rows.items()}
    return {**results, "mean": tell("mean of all", sum(rows.values(), []), ways)} if len(rows) > 1 else results


def main():
    options = parse(__doc__, add=add_options)
    cfg, seeds, texts = options.config, parse_seeds(options.seeds), [t.strip() for t in options.options.split(";")]
    if set(seeds) & set(cfg.evaluate.seeds):
        raise ConfigError(f"--seeds {options.seeds}: some are held-out ones, evaluate.seeds={cfg.evaluate.seeds}")
    if options.ahead < options.every:
        raise ConfigError(f"--ahead {options.ahead} --every {options.every}: an option is tried for at least as long "
                          "as it drives")
    cfg.env.backend, cfg.rollout.num_envs_per_worker = "libsumo", 1
    cfg.env.horizon_s, cfg.env.terminate_on_collision = cfg.evaluate.horizon_s, False
    ways = [way for way in WAYS if way in ("none", *options.ways.split(","))]  # scores need the run without control
    options_of(cfg, "planner", options.rule, texts, options.every)  # a wrong one is refused before hours are spent
    with tempfile.TemporaryDirectory() as folder, executor(options.processes) as pool:
        check_scenario(cfg, folder)
        results = run(cfg, options, ways, texts, seeds, folder, pool)
    finish(options.json, suite=cfg.env.suite, k=cfg.env.max_commands, rule=options.rule, options=texts,
           every=options.every, ahead=options.ahead, seeds=seeds, results=results)


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (WorkerError,)))
