"""One HTML file about a run that needs no network: time-space diagrams, scores, learning curves, versions.

    python -m runtime.report runs/quick
"""
import argparse
import html
import json
import math
import sys
from pathlib import Path
from runtime.resources import after_imports, before_torch
if __name__ == "__main__":
    before_torch()

import numpy as np

from configs import WriteError
from configs.console import exit_code
from configs.files import write_whole
from runtime.checkpoint import versions
from runtime.metrics import VOCABULARY, read_metrics
from runtime.pictures import grid, intervals, lines, stacked
from runtime.report_traffic import COLOURS, influence_section, own, shield_section, time_space, traffic_section
from runtime.scores import PAIRED
from runtime.tracks import DamagedFile, load_tracks

STYLE = Path(__file__).with_name("report.css")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # no browser may load anything else for it
SCORES = {"s_total": "S_total: the score", "s_efficiency": "S_efficiency", "s_stability": "S_stability",
          "ocr_change": "change of OCR, %", "loaded": "vehicles loaded: due to depart",
          "departed": "vehicles that came onto the road", "arrived": "vehicles arrived",
          "mean_speed": "mean speed, m/s", "sigma_v": "sigma_v: spread of speeds, m/s",
          "abs_a": "mean |acceleration|, m/s²", "c_int": "C_int: cost of intervening", "collisions": "collisions",
          "teleports": "teleports", "overflow": "vehicles without a slot, times steps",
          "min_ttc": "smallest time to collision, s", "hard_brakes": "hard brakes",
          "shield_clips": "commands weakened by the shield",
          "shield_vetoes": "lane changes alone that it struck, and what its risk head struck",
          "shield_emergencies": "emergency brakings of the shield"}
TILES = {"s_total": "S_total, against no control", "ocr_change": "change of vehicles arrived, %", "c_int": "C_int",
         "collisions": "collisions an episode"}
CURVES = {1: {"Error of the predicted position": ("rmse_position", "rmse_position_cv"),
              "Error of the predicted speed": ("rmse_speed", "rmse_speed_cv"), "Held-out loss": ("loss_held_out",)},
          2: {"Return of an episode": ("return",), "Vehicles that arrive": ("ocr",), "Cost of intervening": ("c_int",)},
          3: {"Cost of intervening and its limit": ("c_int", "limit"), "Lagrange multiplier": ("multiplier",),
              "Return of an episode": ("return",)}}
STEP_TIME = {"time_infer": "inference", "time_store": "storing", "time_wait": "waiting for SUMO",
             "time_learn": "learning"}


def build_report(folder):
    """Write report.html into a run folder; returns its path. Parts whose files are missing are left out; DamagedFile
    names a file that is not what it should be, or a folder without any."""
    folder = Path(folder)
    tracks, scores, shield = (folder / f"evaluation.{kind}" for kind in ("tracks.npz", "json", "shield.csv"))
    records, state = folder / "metrics.jsonl", folder / "state.json"
    if not any(path.exists() for path in (tracks, scores, records)):
        raise DamagedFile(f"{folder}: no results there; name the folder of a run, for example runs/quick")
    result = blame(scores, lambda: json.loads(scores.read_bytes())) if scores.exists() else None
    scored = blame(scores, lambda: (headline(result), score_section(result))) if scores.exists() else ([], [])
    seen = blame(tracks, lambda: traffic_sections(*load_tracks(tracks))) if tracks.exists() else ([], [])
    events = blame(shield, lambda: shield_section(shield, result)) if result and shield.exists() else []
    rows = blame(records, lambda: read_metrics(records)) if records.exists() else []
    curves = blame(records, lambda: curve_sections(rows) + resource_section(rows)) if rows else []
    origin = blame(state, lambda: origin_section(folder, result))
    parts = [*scored[0], *seen[0], *scored[1], *seen[1], *events, *curves, *origin]
    title, style = f"{folder.resolve().name}: mixed-autonomy traffic", STYLE.read_text(encoding="utf-8")
    page = ("<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<meta http-equiv=Content-Security-Policy content=\"{POLICY}\">"
            f"<link rel=icon href='data:,'><title>{html.escape(title)}</title><style>{style}</style>"
            f"<h1>{html.escape(folder.resolve().name)}</h1>" + "\n".join(filter(None, parts)) + "</html>")
    write_whole(folder / "report.html", page)
    return folder / "report.html"


def blame(path, read):
    """What `read()` returns; what goes wrong in it is the fault of this file."""
    try:
        return read()
    except DamagedFile:  # that names it already
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, OSError, RecursionError) as error:
        raise DamagedFile(f"{path}: damaged or half written ({type(error).__name__}: {error}); remove it and run the "
                          "step that wrote it again") from None


def traffic_sections(episodes, facts):
    """(time-space diagrams, the rest) of a tracks file; somebody must have been on the road."""
    episodes = {name: track for name, track in episodes.items() if len(track["step"])}
    if not episodes:
        return [], []
    return time_space(episodes, facts), traffic_section(episodes, facts) + influence_section(episodes, facts)


# ---- scores ----------------------------------------------------------------------------------------------------

def headline(result):
    """The controller that this run is about, in four numbers."""
    mine = own(result)[0]
    tiles = "".join(f"<div class=tile><b>{cell(result['summary'][mine].get(key))}</b><span>{text}</span></div>"
                    for key, text in TILES.items())
    return [f"<p class=soft>{html.escape(mine)} on {html.escape(result['scenario'])}: mean ± 95 % interval, "
            f"{len(result['seeds'])} held-out seeds, each paired with the same traffic without control</p>"
            f"<div class=tiles>{tiles}</div>"]


def score_section(result):
    """The score table: mean ± 95 % interval by controller."""
    summary = result["summary"]
    names = own(result)
    rows = [[text, *(cell(summary[n].get(key)) for n in names)] for key, text in SCORES.items()]
    scores = {n: (summary[n]["s_total"]["mean"], summary[n]["s_total"]["ci95"]) for n in names}
    return ["<h2>Scores</h2>", "<div class=beside>", grid(["", *names], rows, mine=1),
            intervals("S_total, mean and 95 % interval", scores, {"none": "--c0", **COLOURS}), "</div>",
            f"<p class=soft>Held-out seeds {listed(result['seeds'])}, SUMO {result['sumo_version']}. "
            "S_total = (0.7 S_efficiency + 0.3 S_stability) exp(-0.1 C_int); no control scores 0.</p>",
            *variant_table(result.get("variants") or {}, names), *paired_table(result.get("paired") or {})]


def variant_table(variants, names):
    """S_total by variant of the suite, of which the other tables have the mean."""
    rows = [[text, *(cell(summary[n]["s_total"]) for n in names)] for text, summary in variants.items()]
    return [grid(["S_total by variant", *names], rows, mine=1)] if rows else []


def paired_table(pairs):
    """The policy against each rule on the same traffic, which says more than their means side by side."""
    rows = [[pair, *(cell(gains.get(key)) for key in PAIRED)] for pair, gains in pairs.items()]
    return [grid(["the same traffic, paired", *(SCORES[key] for key in PAIRED)], rows)] if rows else []


def cell(value):
    """The mean with as many digits as its interval allows: two of those."""
    if not value or value["mean"] is None:
        return "–"
    mean, half = value["mean"], value["ci95"]
    if not mean and not half:
        return "0"
    decimals = max(1 - math.floor(math.log10(half or abs(mean) / 10)), 0)
    return f"{mean:.{decimals}f}" + ("" if half is None else f" ± {half:.{decimals}f}" if half else " ± 0")


def listed(values):
    """A list as text, a long one by its ends."""
    return ", ".join(map(str, values)) if len(values) < 8 else f"{values[0]} to {values[-1]} ({len(values)})"


# ---- training --------------------------------------------------------------------------------------------------

def curve_sections(rows):
    """Learning curves of each phase."""
    parts = []
    for phase, groups in CURVES.items():
        mine = [r for r in rows if r["phase"] == phase]
        mine = [r for r in mine if r.get("stage") == mine[-1].get("stage")]  # a stage has its own loss
        if mine:
            curves = [curve(mine, title, names) for title, names in groups.items()]
            parts += [f"<h2>Phase {phase}</h2><div class=row>", *curves, "</div>"]
    return parts


def curve(rows, title, names):
    """Some metrics over epochs, with their meaning below."""
    series = {n: [(r["epoch"], r[n]) for r in rows if r.get(n) is not None] for n in names}
    about = "; ".join(f"{n}: {VOCABULARY[n]}" for n in names)
    return lines(title, series, "epoch", zero=len(names) > 1, about=html.escape(about))


def resource_section(rows):
    """Memory over the run, and where the time of a control step goes."""
    begin = rows[0]["time"]
    memory = {f"phase {p}": [((r["time"] - begin) / 60, r["memory_mb"]) for r in rows
                             if r["phase"] == p and r.get("memory_mb")] for p in (1, 2, 3)}
    parts = [lines("Memory of all processes", memory, "minutes since the first record; MB (PSS)", zero=True)]
    for phase in (2, 3):
        mine = [r for r in rows if r["phase"] == phase and r.get("env_steps")]
        done = np.diff([0, *(r["env_steps"] for r in mine)])
        mine = [(r, n) for r, n in zip(mine, done) if n > 0]
        if len(mine) > 1:
            split = {text: [1000 * r.get(name, 0) / n for r, n in mine] for name, text in STEP_TIME.items()}
            parts.append(stacked(f"Time of a control step, phase {phase}", [r["epoch"] for r, _ in mine], split,
                                 "epoch; ms per environment step"))
    return ["<h2>Memory and time</h2><div class=row>", *parts, "</div>"]


# ---- origin ----------------------------------------------------------------------------------------------------

def origin_section(folder, result):
    """What made these numbers: steps, command line, revision, versions, seeds, configuration."""
    parts, facts = ["<h2>How it was made</h2>"], {**versions(), "python": sys.version.split()[0]}
    if (folder / "state.json").exists():
        state = json.loads((folder / "state.json").read_bytes())
        facts = {"command": state["command"], "git revision": state.get("revision", "unknown"), **facts}
        parts.append(grid(["step", "status", "seconds"], [
            [name, s["status"], f"{s['seconds']:.0f}"] for name, s in state["steps"].items() if "seconds" in s]))
    facts = {**facts, "held-out seeds": listed(result["seeds"])} if result else facts
    items = [f"<li>{name}: <code>{html.escape(str(text))}</code></li>" for name, text in facts.items()]
    parts += ["<ul>", *items, "</ul>"]
    if (folder / "config.yaml").exists():
        text = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
        parts += ["<details><summary>Configuration</summary><pre>", html.escape(text), "</pre></details>"]
    return parts


def main():
    after_imports()
    parser = argparse.ArgumentParser(prog="python -m runtime.report", description="Write the report.html of a run.")
    parser.add_argument("folder", metavar="RUN_FOLDER", help="for example runs/quick")
    print(f"report: {build_report(parser.parse_args().folder)}")


if __name__ == "__main__":
    sys.exit(exit_code(main, (DamagedFile, OSError), troubles=(WriteError,)))
