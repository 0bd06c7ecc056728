"""The best rule for a whole suite: random search of the advice family's numbers on training seeds.

    python -m benchmarks.tune_rules --config configs/suite.yaml --draws 100 --processes 16 --limit 0.05

The family is `baselines.tuned` (lane advice, speed advice, ramp metering and speed harmonisation, env/baselines.py)
with K = env.max_commands, behind the shield as everybody. A candidate's score is its mean S_total over all variants of
env.suite and all training seeds; with --limit, the best one whose mean C_int stays within it is sought as well. The
first candidates are the rules of the configuration; then come random ones, half of them near a known rule, half from
all of `RANGES`, where each part of the rule is left out now and then (run.seed draws others). The best few play on with
other training seeds, which decide. The winners are scored on evaluate.seeds, paired with no control, and printed as
overrides for any command line; so is the best rule of each variant alone, for a warm start that knows the variant.
"""
import copy
import functools
import sys
import tempfile
from dataclasses import asdict

import numpy as np

from benchmarks.arguments import at_least, positive, writable
from benchmarks.report import executor, finish
from configs import ConfigError
from configs.command_line import parse
from configs.traffic import AdviceConfig
from env.score import paired_score
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from controllers import make_controller
from evaluate import parse_seeds, run_jobs
from runtime.ending import run_script
from runtime.resources import usable_cores
from runtime.scores import summarise, table
from train_ddp import USER_ERRORS

RANGES = {"reach_m": (50, 500), "vehicles": (1, 6), "gap_m": (2, 12), "ahead": (0.05, 0.6), "gain": (0.2, 1.5),
          "offset": (-5, 4), "margin": (0, 6), "below": (12, 28), "above": (2, 18), "brake": (0.5, 3),
          "accel": (0, 2), "meter_brake": (0.1, 2), "meter_above": (4, 18), "meter_ahead": (0.05, 0.3),
          "meter_below": (5, 20), "cruise": (20, 29), "cruise_margin": (0.5, 6), "cruise_gain": (0, 0.6),
          "cruise_brake": (0.1, 1.2), "cruise_accel": (0, 0.8), "cruise_lane": (0, 1), "behind_m": (20, 120),
          "hold": (0.3, 4)}
PARTS = ("reach_m", "gap_m", "gain", "above", "meter_brake", "cruise", "behind_m", "hold")  # 0 = this part is left out
KNOWN = ("lane_advice", "speed_advice", "tuned", "harmonise")


def candidates(cfg, draws):
    """The rules of the configuration and so many random ones, AdviceConfig by name."""
    rng, rules = np.random.default_rng(cfg.run.seed), {name: getattr(cfg.baselines, name) for name in KNOWN}
    for draw in range(draws):
        numbers = {name: float(rng.uniform(*limits)) for name, limits in RANGES.items()}
        left_out = {name: 0.0 for name in PARTS if rng.random() < 0.25}
        if rng.random() < 0.5:  # near a known one
            known = asdict(rules[KNOWN[rng.integers(len(KNOWN))]])
            numbers = {name: float(np.clip(known[name] * np.exp(0.4 * rng.standard_normal()), *limits)) if known[name]
                       else 0.0 for name, limits in RANGES.items()}
            left_out = {}
        numbers = {name: round(value, 3) for name, value in {**numbers, **left_out}.items()}
        whole = {"vehicles": max(round(numbers["vehicles"]), 1), "cruise_lane": round(numbers["cruise_lane"])}
        rules[f"draw {draw + 1}"] = AdviceConfig(**{**numbers, **whole})
    return rules


def play(cfg, name, seed, folder):
    """The row of one episode, as evaluate.py has it."""
    with make_pool(cfg, 0, 1, folder) as pool:
        rows, _ = run_jobs(pool, {name: make_controller(cfg, name, {}, 1)}, [(name, seed)], cfg.rollout.restarts,
                           lambda *text: None)
    return rows[0]


class Scorer:
    """Episodes on several processes; those without control are run once and kept."""

    def __init__(self, cfg, executor, folder):
        self.suite = dict(zip(cfg.env.suite, cfg.variants()))
        self.executor, self.folder, self.base = executor, folder, {}

    def rows(self, rules, seeds):
        """For each rule in turn, its scored rows of all variants and seeds."""
        pairs = [(text, seed) for text in self.suite for seed in seeds]
        new = [pair for pair in pairs if pair not in self.base]
        jobs = [(self.suite[text], "none", seed) for text, seed in new]
        for rule in rules:
            for text, seed in pairs:
                cfg = copy.deepcopy(self.suite[text])
                cfg.baselines.tuned = rule
                jobs.append((cfg, "tuned", seed))
        rows = self.executor.map(functools.partial(play, folder=self.folder), *zip(*jobs))
        self.base.update((pair, next(rows)) for pair in new)
        for _ in rules:
            mine = [(pair, next(rows)) for pair in pairs]
            yield [{**row, "variant": pair[0], **paired_score(row, self.base[pair])} for pair, row in mine]


def search(scorer, rules, seeds, say=print):
    """[{"rule", "s_total", "c_int", "by_variant"}] of all candidates, `rules` by name."""
    results = []
    for (name, rule), rows in zip(rules.items(), scorer.rows(rules.values(), seeds)):
        mean = {key: float(np.mean([row[key] for row in rows])) for key in ("s_total", "ocr_change", "c_int")}
        by_variant = [float(np.mean([row["s_total"] for row in rows if row["variant"] == text]))
                      for text in scorer.suite]
        results.append({"rule": asdict(rule), **mean, "by_variant": by_variant})
        say(f"{name:14s}S_total {mean['s_total']:6.2f}  C_int "
            f"{mean['c_int']:.3f}  OCR {mean['ocr_change']:+5.1f} %  by variant "
            + " ".join(f"{score:5.1f}" for score in by_variant), flush=True)
    return results


def ranked(results, limit=None, variant=None):
    """Places in `results`, the highest S_total (of all variants or of one) first; only those within the limit."""
    value = lambda result: result["s_total"] if variant is None else result["by_variant"][variant]  # noqa: E731
    within = [i for i, result in enumerate(results) if limit is None or result["c_int"] <= limit]
    return sorted(within, key=lambda i: -value(results[i]))


def winners(results, limit, variants):
    """{what it wins: place in `results`}: of the whole suite, of it within the limit, and of each variant."""
    kinds = {"best": {}, **{f"best of variant {v + 1}": {"variant": v} for v in range(variants)}}
    if limit is not None:
        kinds[f"best with C_int <= {limit:g}"] = {"limit": limit}
    return {name: ranked(results, **kind) for name, kind in kinds.items()}


def held_out(scorer, winners, seeds, say=print):
    """{name: {variant or "mean": summary}} of the winners on seeds that the search has not seen."""
    summaries = {}
    rules = [AdviceConfig(**result["rule"]) for result in winners.values()]
    for (name, result), rows in zip(winners.items(), scorer.rows(rules, seeds)):
        by_text = {text: summarise([{**row, "controller": text} for row in rows if row["variant"] == text])[text]
                   for text in scorer.suite}
        summaries[name] = {**by_text, "mean": summarise(rows)["tuned"]}
        say(f"\n{name}, {len(seeds)} held-out seeds, paired with no control: mean +- 95 % interval\n"
            + table({f"variant {i}" if i <= len(by_text) else "mean": summary
                     for i, summary in enumerate(summaries[name].values(), 1)}))
        say(" ".join(f"baselines.tuned.{key}={value}" for key, value in result["rule"].items()), flush=True)
    return summaries


def add_options(parser):
    parser.add_argument("--draws", type=at_least(1), default=100)
    parser.add_argument("--seeds", default="1-3", help="training seeds (default: %(default)s)")
    parser.add_argument("--finalists", type=at_least(1), default=6, help="of each kind so many play on (%(default)s)")
    parser.add_argument("--final-seeds", default="4-9", help="training seeds that decide (default: %(default)s)")
    parser.add_argument("--no-held-out", dest="held_out", action="store_false", help="leave out the held-out seeds")
    parser.add_argument("--limit", type=positive, help="also the best rule whose C_int is not above it")
    parser.add_argument("--processes", type=at_least(1), default=usable_cores(), help="(default: %(default)s)")
    parser.add_argument("--json", type=writable, default="rules.json", help="where the result goes")


def main():
    options = parse(__doc__, add=add_options)
    cfg, seeds = options.config, parse_seeds(options.seeds)
    cfg.env.horizon_s, cfg.env.terminate_on_collision = cfg.evaluate.horizon_s, False
    if set(seeds + parse_seeds(options.final_seeds)) & set(cfg.evaluate.seeds):
        raise ConfigError(f"--seeds {options.seeds} --final-seeds {options.final_seeds}: some are held-out ones, "
                          f"evaluate.seeds={cfg.evaluate.seeds}")
    with tempfile.TemporaryDirectory() as folder, executor(options.processes) as pool:
        check_scenario(cfg, folder)
        scorer = Scorer(cfg, pool, folder)
        rules = candidates(cfg, options.draws)
        results = search(scorer, rules, seeds)
        places = winners(results, options.limit, len(cfg.env.suite))
        finals = {list(rules)[place] for order in places.values() for place in order[:options.finalists]}
        print(f"\n{len(finals)} finalists on seeds {options.final_seeds}:")
        results = search(scorer, {name: rule for name, rule in rules.items() if name in finals},
                         parse_seeds(options.final_seeds))
        won = {name: results[order[0]] for name, order in winners(results, options.limit, len(cfg.env.suite)).items()
               if order}
        for name, result in won.items():
            print(f"{name}: " + " ".join(f"baselines.tuned.{key}={value}" for key, value in result["rule"].items()))
        scored = {name: result for name, result in won.items() if "variant" not in name}
        summaries = held_out(scorer, scored, cfg.evaluate.seeds) if options.held_out else {}
    finish(options.json, suite=cfg.env.suite, k=cfg.env.max_commands, seeds=seeds, held_out_seeds=cfg.evaluate.seeds,
           results=results, winners=won, held_out=summaries)


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (WorkerError,)))
