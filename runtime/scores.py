"""Means and intervals of evaluated episodes, and the files that hold them."""
import csv
import io
import json
import math
from importlib.metadata import version
from pathlib import Path

import numpy as np

from configs.files import write_whole

NAMES = {"controller", "seed", "variant"}  # what a row says besides metrics
SHOWN = ("s_total", "s_efficiency", "s_stability", "ocr_change", "loaded", "departed", "arrived", "mean_speed",
         "sigma_v", "abs_a", "c_int", "collisions", "teleports", "shield_clips", "shield_vetoes", "shield_emergencies")
PAIRED = {"s_total": ("S_total", "+.2f"), "arrived": ("arrived", "+.1f"), "c_int": ("C_int", "+.3f")}
CALM = 0.02  # sigma_v, m/s, or abs_a, m/s^2, of which a share says nothing
RARE = 10    # arrivals: of one more, S_efficiency makes 10 points or more
OUTSIDE, MISFIT = 0.05, 1.5  # more of the loaded kept off the road; a reference that many times too high or low
FEW = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)  # t, 1 to 10 degrees


def summarise(rows):
    """{controller: {metric: {"mean", "ci95"}}}; ci95 is the half width of the mean's 95 % interval (Student's t).

    Rows of several variants: the mean over the variants is taken first, seed by seed.
    """
    values = {}
    for row in rows:
        for key in row.keys() - NAMES:
            by_seed = values.setdefault(row["controller"], {name: {} for name in row if name not in NAMES})[key]
            by_seed.setdefault(row["seed"], []).extend([row[key]] if row[key] is not None else [])
    return {name: {key: mean_ci([np.mean(of_seed) for of_seed in by_seed.values() if of_seed])
                   for key, by_seed in metrics.items()} for name, metrics in values.items()}


def differences(rows, of="", whom="policy"):
    """{"policy - RULE" + `of`: {metric of PAIRED: mean_ci}} of `whom` and every other controller of the rows, seed by
    seed, of several variants their mean; empty without it."""
    values, pairs = {}, {}
    for row in rows:
        values.setdefault(row["controller"], {}).setdefault(row["seed"], []).append([row[key] for key in PAIRED])
    mine = values.pop(whom, None)
    for rule in sorted(values.keys() - {"none"}) if mine else ():
        gains = [np.mean(mine[seed], 0) - np.mean(of_seed, 0) for seed, of_seed in values[rule].items()]
        pairs[f"{whom} - {rule}{of}"] = {key: mean_ci(list(gain)) for key, gain in zip(PAIRED, np.transpose(gains))}
    return pairs


def paired_lines(pairs):
    """`differences` as lines of text."""
    return [f"{name}, paired: {pair} {with_interval(gains[key], form)}"
            for key, (name, form) in PAIRED.items() for pair, gains in pairs.items()]


def mean_ci(values):
    """{"mean", "ci95"} of a list of numbers; None where there are too few."""
    n = len(values)
    spread = np.std(values, ddof=1) if n > 1 and np.ptp(values) else 0.0  # of equal ones numpy's is no exact 0
    half = float(student_t(n - 1) * spread / math.sqrt(n)) if n > 1 else None
    return {"mean": float(np.mean(values)) if n else None, "ci95": half}


def with_interval(value, form=".3f"):
    """"mean +- ci95" of a `mean_ci`; the mean alone where one value leaves the interval open."""
    spread = "" if value["ci95"] is None else f" +- {value['ci95']:{form.lstrip('+')}}"
    return f"{value['mean']:{form}}{spread}"


def student_t(freedom, z=1.959964):
    """97.5 % quantile of Student's t (from 11 degrees of freedom on the Cornish-Fisher expansion, right to 1e-4)."""
    if freedom <= len(FEW):
        return FEW[freedom - 1]
    return (z + (z ** 3 + z) / (4 * freedom) + (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * freedom ** 2)
            + (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384 * freedom ** 3))


def table(summary):
    """The summary as text: one line per metric, one column per controller, mean +- 95 % interval."""
    width = max(22, 2 + max(map(len, summary)))
    rows = {"": summary, **{key: [with_interval(one[key]) for one in summary.values()] for key in SHOWN}}
    return "\n".join(f"{name:20s}" + "".join(f"{cell:>{width}s}" for cell in cells) for name, cells in rows.items())


def scenarios_of(configs):
    """Names of the scenarios of all variants of the configurations, each once."""
    return ", ".join(dict.fromkeys(variant.env.scenario for cfg in configs for variant in cfg.variants()))


def doubts(rows, scenario, reward=None):
    """What makes the scores of rows worth less than they look, or the `reward` section of a configuration unfit to
    train there, a sentence each."""
    if not any(row["loaded"] for row in rows):
        return [f"{scenario}: nobody drove in any episode; do its `begin` and departures fit together?"]
    found, unseen = [], max(row["overflow"] / max(row["steps"], 1) for row in rows)
    if unseen:
        found.append(f"{scenario}: up to {unseen:.1f} vehicles, mean of an episode, had no slot: but for arrivals "
                     "nobody saw, commanded or counted them; raise env.max_vehicles")
    calm = sorted({row["seed"] for row in rows if row["controller"].split()[0] == "none" and row["loaded"]
                   and (row["sigma_v"] < CALM or row["abs_a"] < CALM)})
    if calm:
        found.append(f"{scenario}, seeds {calm}: without control speeds hardly differ or change (sigma_v or abs_a "
                     f"below {CALM:g}); S_stability and S_total divide by that: look at sigma_v and abs_a themselves")
    alone, driven = ([row for row in rows if (row["controller"].split()[0] == "none") == free] for free in (1, 0))
    if rare := sorted({row["seed"] for row in alone if row["loaded"] and row["arrived"] < RARE}):
        found.append(f"{scenario}, seeds {rare}: without control fewer than {RARE} vehicles arrive; S_efficiency "
                     "divides by that, and is 0 where nobody arrives (as on a closed road): look at arrived, mean_speed"
                     " and S_stability, or raise evaluate.horizon_s")
    found += kept_outside(alone, driven, scenario)
    if crashes := sum(row["collisions"] for row in alone):
        found.append(f"{scenario}: {crashes} collisions in {len(alone)} episodes without control: SUMO's own drivers "
                     "collide here. In training a collision ends the episode and costs reward: "
                     "env.terminate_on_collision=false reward.collision_penalty=0 leave them be")
    found += misfits(alone, scenario, reward)
    if driven and not any(row["controlled_vehicle_steps"] for row in driven):
        found.append(f"{scenario}: no command was carried out in any episode; if some were given, docs/results.md "
                     "(Shield) says whom they do not reach")
    return found


def kept_outside(alone, driven, scenario):
    """[a sentence] of each controller of the `driven` rows that lets fewer vehicles onto the road than come in the
    paired rows `alone`, without control."""
    def traffic(row):  # the last: what a sweep has changed
        return row["seed"], row.get("variant"), row["controller"].partition(" ")[2]
    came, kept = {traffic(row): row["departed"] for row in alone}, {}
    for row in driven:
        kept.setdefault(row["controller"], []).append((came.get(traffic(row), 0) - row["departed"], row["loaded"]))
    means = {name: np.mean(numbers, 0) for name, numbers in kept.items()}
    return [f"{scenario}: with {name}, {outside:.0f} vehicles an episode more than without control wait outside at its "
            "end; mean_speed, sigma_v and abs_a do not see them, only arrived does"
            for name, (outside, loaded) in means.items() if outside > OUTSIDE * loaded]


def misfits(rows, scenario, reward):
    """[what to set `reward` to, for training on a user's scenario] where its reference values are far from what the
    rows without control show; [] where they are near, or there are several kinds of traffic."""
    if not (reward and scenario.endswith(".sumocfg") and "," not in scenario
            and len({row["controller"] for row in rows}) == 1):
        return []
    loaded, arrived, sigma_v, abs_a = (float(np.mean([row[name] for row in rows]))
                                       for name in ("loaded", "arrived", "sigma_v", "abs_a"))
    pairs = ((reward.ocr_ref * reward.demand_ref, arrived), (reward.sigma_ref, sigma_v), (reward.abs_a_ref, abs_a))
    if not loaded or min(arrived, sigma_v, abs_a) <= 0 or all(1 / MISFIT < a / b < MISFIT for a, b in pairs):
        return []
    return [f"{scenario}: the reward of a training there would weigh its parts otherwise than the score does; what "
            f"`none` shows is reward.demand_ref={loaded:.0f} reward.ocr_ref={arrived / loaded:.2f} "
            f"reward.sigma_ref={sigma_v:.2f} reward.abs_a_ref={abs_a:.3f}"]


def save_scores(path, scenario, seeds, rows, pairs, columns, log):
    """Results as JSON, with the `differences`, if any, as "paired"; beside it the rows as CSV and the shield's log, one
    line of `columns` per override, as .shield.csv. Of a suite, "summary" is the mean over its variants and "variants"
    the summary of each."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {"scenario": scenario, "sumo_version": version("eclipse-sumo"), "seeds": seeds, "episodes": rows,
              "summary": summarise(rows), **({"paired": pairs} if pairs else {})}
    variants = list(dict.fromkeys(row["variant"] for row in rows if "variant" in row))
    if variants:
        result["variants"] = {text: summarise([row for row in rows if row["variant"] == text]) for text in variants}
    write_whole(path, json.dumps(result, indent=1))
    _write_csv(beside(path, ".csv"), [list(rows[0]), *([row[name] for name in rows[0]] for row in rows)])
    _write_csv(beside(path, ".shield.csv"), [(*columns, "variant") if variants else columns, *log])


def beside(path, ending):
    """The file next to NAME.json, or NAME, that belongs to it; NAME may hold dots."""
    return path.with_name(path.name.removesuffix(".json") + ending)


def _write_csv(path, lines):
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    write_whole(path, text.getvalue())
