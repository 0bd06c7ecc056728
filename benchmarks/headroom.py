"""How much could a better controller gain? A planner that tries rules out in copies of the running simulation.

    python -m benchmarks.headroom --config configs/suite.yaml --seeds 21-24 --json headroom.json
    python -m benchmarks.headroom --options "none; cruise=0; gain=0.3 offset=-2" --every 10 --ahead 60

Every --every control steps the process, which holds the simulation itself (libsumo), is copied (fork) once for each
option: the rule, and the rule with other numbers of its own, or nobody commanded. In a copy the option drives until the
next decision and then the rule, --ahead steps in all; the option with the highest return goes on. K, shield and score
are those of evaluate.py.

The planner is no controller: its copies know how each driver is going to dawdle. How much that is worth "chance" tells,
which chooses in the same way among as many options that are the rule itself, but for one step each in which nobody is
commanded. What the planner gains beyond that is what the right rule at the right time is worth. Needs the package
libsumo (pip install -e ".[fast]"); an episode takes as long as (number of options) * ahead / every without a planner.
"""
import itertools
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
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from evaluate import command, parse_seeds, run_jobs, score
from runtime.ending import run_script
from runtime.resources import usable_cores
from runtime.scores import differences, paired_lines, summarise, table
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
    """The controllers that a way of driving chooses among."""
    if way in ("none", "rule"):
        return [BaselineController(cfg, "none" if way == "none" else rule)]
    if way == "chance":
        return [BaselineController(cfg, rule), *(Pausing(cfg, rule, n, every) for n in range(len(texts)))]
    return [BaselineController(cfg, rule), *(changed(cfg, rule, text) for text in texts)]


class Planner:
    """The option of which a copy of the simulation promises most, chosen anew every `every` steps: a controller for the
    environment of a SerialPool. The first option drives the rest of each copy."""

    def __init__(self, pool, options, every, ahead):
        self.pool, self.options, self.every, self.ahead = pool, options, every, ahead

    def begin(self, env, seed):
        self.steps = 0
        for option in self.options:
            option.begin(env, seed)

    def act(self, observation, env):
        """Commands and the shield's reasons, as of BaselineController."""
        if self.steps % self.every == 0:
            self.chosen = self.options[int(np.argmax([self.promised(option) for option in self.options]))]
        self.steps += 1
        return self.chosen.act(observation, env)

    def promised(self, option):
        """Return of the next `ahead` steps, driven in a copy of this process."""
        reading, writing = os.pipe()
        if not (child := os.fork()):
            self.try_out(option, writing)
        os.close(writing)
        answer = os.read(reading, 8)
        os.close(reading)
        os.waitpid(child, 0)
        if len(answer) < 8:
            raise WorkerError("a copy of the simulation ended early; its last words are above")
        return struct.unpack("d", answer)[0]

    def try_out(self, option, writing):
        """What the copy does: it ends here, without cleaning up anything of the original's."""
        try:
            die_with_parent()
            total, audit = 0.0, Audit("", 0)
            for step in range(self.ahead):
                command(self.pool, 0, option if step < self.every else self.options[0], audit)
                self.pool.send([0])
                ended = self.pool.receive([0])
                total += float(self.pool.arrays["reward"][0])
                if ended:
                    break
            if not self.pool.arrays["lost"][0]:
                os.write(writing, struct.pack("d", total))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


def play(cfg, way, seed, folder, rule, texts, every, ahead):
    """The row of one episode, as evaluate.py has it."""
    with make_pool(cfg, 0, 1, folder) as pool:
        options = options_of(cfg, way, rule, texts, every)
        driver = Planner(pool, options, every, ahead) if len(options) > 1 else options[0]
        rows, _ = run_jobs(pool, {way: driver}, [(way, seed)], cfg.rollout.restarts, lambda *text: None)
    return rows[0]


def tell(name, rows):
    """Print the table of these rows and what each choice among options gains: {"table", "gains"}."""
    summary, without = summarise(rows), [row for row in rows if row["controller"] != "planner"]
    pairs = {**differences(without, whom="chance"), **differences(rows, whom="planner")}
    print("\n".join(["", f"{name}: mean +- 95 % interval", table(summary), *paired_lines(pairs)]), flush=True)
    return {"table": summary, "gains": pairs}


def add_options(parser):
    parser.add_argument("--rule", choices=KNOWN, default="harmonise", help="drives, and after each option "
                                                                           "(default: %(default)s)")
    parser.add_argument("--options", default=OPTIONS, help="what else is tried, ; in between (default: %(default)s)")
    parser.add_argument("--ways", type=some_of(WAYS), default=",".join(WAYS), help="(default: %(default)s)")
    parser.add_argument("--every", type=at_least(1), default=20, help="control steps between decisions (%(default)s)")
    parser.add_argument("--ahead", type=at_least(1), default=120, help="control steps tried out (%(default)s)")
    parser.add_argument("--seeds", default="21-22", help="training seeds (default: %(default)s)")
    parser.add_argument("--processes", type=at_least(1), default=usable_cores(), help="(default: %(default)s)")
    parser.add_argument("--json", type=writable, default="headroom.json", help="where the result goes")


def run(cfg, options, ways, texts, seeds, folder, pool):
    """{variant or "mean": what `tell` returns}; the longest episodes begin first."""
    suite = dict(zip(cfg.env.suite, cfg.variants()))
    futures = {(text, way, seed): pool.submit(play, suite[text], way, seed, folder, options.rule, texts, options.every,
                                              options.ahead)
               for way in reversed(ways) for text in suite for seed in seeds}
    rows = {text: [] for text in suite}
    for (text, way, seed), future in futures.items():
        rows[text].append(future.result())
        print(f"{text} seed {seed} {way}: return {rows[text][-1]['return']:.1f}", flush=True)
    rows = {text: score(of_variant, list(itertools.product(ways, seeds))) for text, of_variant in rows.items()}
    results = {text: tell(text, of_variant) for text, of_variant in rows.items()}
    return {**results, "mean": tell("mean of all", sum(rows.values(), []))} if len(rows) > 1 else results


def main():
    options = parse(__doc__, add=add_options)
    cfg, seeds, texts = options.config, parse_seeds(options.seeds), [t.strip() for t in options.options.split(";")]
    if set(seeds) & set(cfg.evaluate.seeds):
        raise ConfigError(f"--seeds {options.seeds}: some are held-out ones, evaluate.seeds={cfg.evaluate.seeds}")
    if options.every < len(texts):
        raise ConfigError(f"--every {options.every}, {len(texts)} --options: chance needs a step for each option, in "
                          "which nobody is commanded")
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
