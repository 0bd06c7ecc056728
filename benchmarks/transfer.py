"""Does a policy carry over to demands, roads and shares of ICVs that it was not trained on?

    python -m benchmarks.transfer --checkpoint runs/suite --controllers tuned,policy --json transfer.json

Scores the controllers on the run's own suite, then, with nothing changed but the traffic, on `CORRIDORS`, with other
SHARES of ICVs, and on drawn networks (benchmarks/networks.py), or on random ones instead: --motorways
(benchmarks/motorways.py) and --streets, which have traffic lights or no merge (benchmarks/streets.py). The ratio is
S_total to the mean over the run's own suite. Flagged: a ratio below 0.5; OCR more than 1 % below no control; more
collisions than without control.
"""
import os
import shlex
import sys
from pathlib import Path

from benchmarks.arguments import at_least, writable
from benchmarks.motorways import motorway
from benchmarks.networks import networks
from benchmarks.report import finish
from benchmarks.streets import street
from configs.command_line import parse
from env.traffic_env import check_scenario
from env.workers import WorkerError
from controllers import CONTROLLERS
from evaluate import evaluate_suite, settings
from runtime.ending import run_script
from runtime.scores import summarise, with_interval
from train_ddp import USER_ERRORS

CORRIDORS = ("corridor.main_flow=2400 corridor.ramp_flow=1200", "corridor.main_flow=3000 corridor.ramp_flow=1000",
             "corridor.ramps=3 corridor.ramp_flow=900",
             "corridor.lanes=3 corridor.ramps=3 corridor.main_flow=4400 corridor.ramp_flow=900")
SHARES = "env.icv_share=0.1", "env.icv_share=0.25", "env.icv_share=0.5"


def corridors(scenario):
    """CORRIDORS as variants of a configuration with this scenario, to which their numbers would mean nothing."""
    return [text if scenario == "corridor" else f"env.scenario=corridor {text}" for text in CORRIDORS]


def compare(rows, controller, known):
    """One row per variant of an evaluation's rows; `known` are the variants trained on."""
    table = []
    for text in dict.fromkeys(row["variant"] for row in rows):
        mine, without = ([row for row in rows if (row["variant"], row["controller"]) == (text, name)]
                         for name in (controller, "none"))
        summary = summarise(mine)[controller]
        table.append({"variant": text, "s_total": summary["s_total"], "ocr_change": summary["ocr_change"],
                      "c_int": summary["c_int"]["mean"], "collisions": sum(row["collisions"] for row in mine),
                      "collisions_without_control": sum(row["collisions"] for row in without)})
    inside = sum(row["s_total"]["mean"] for row in table if row["variant"] in known) / len(known)
    for row in table:
        row["ratio"] = row["s_total"]["mean"] / inside if inside > 0 else None
        row["flags"] = [text for text, wrong in (
            ("ratio", row["variant"] not in known and row["ratio"] is not None and row["ratio"] < 0.5),
            ("OCR", row["ocr_change"]["mean"] < -1),
            ("collision", row["collisions"] > row["collisions_without_control"])) if wrong]
    return table


def show(controller, table):
    print(f"\n{controller}\n{'S_total':>16s}{'ratio':>8s}{'OCR change, %':>18s}{'C_int':>8s}{'collisions':>12s}")
    for row in table:
        score, ocr = (with_interval(row[key], ".1f") for key in ("s_total", "ocr_change"))
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        print(f"{score:>16s}{ratio:>8s}{ocr:>18s}{row['c_int']:8.3f}{row['collisions']:12d}  {row['variant']}"
              + "".join(f"  <- {flag}" for flag in row["flags"]))


def add_options(parser):
    parser.set_defaults(config=None, scenario=None, sweep=None)
    parser.add_argument("--checkpoint", help="run folder, phase folder or step folder; needed for `policy`")
    parser.add_argument("--controllers", default="policy", help=f"some of {','.join(CONTROLLERS)}")
    parser.add_argument("--seeds", help="(default: evaluate.seeds)")
    parser.add_argument("--motorways", type=at_least(1), default=0, help="so many random ones instead")
    parser.add_argument("--streets", type=at_least(1), default=0, help="so many random ones instead, or beside these")
    parser.add_argument("--json", type=writable, default="transfer.json", help="where the result goes")


def main():
    options = parse(__doc__, add=add_options, load=False)
    configs, controllers, seeds, models = settings(options)
    cfg = configs[""]
    folder, known = Path(cfg.run.folder) / cfg.run.name / "scenario", cfg.env.suite
    end, place = cfg.env.horizon_s + cfg.env.warmup_s, folder / "drawn"
    roads = [draw(place, number, end) for draw, count in ((motorway, options.motorways), (street, options.streets))
             for number in range(1, count + 1)]
    others, drawn = ([], roads) if roads else ([*corridors(cfg.env.scenario), *SHARES], networks(place, end))
    cfg.env.suite = [*known, *others, *(shlex.quote(f"env.scenario={os.path.relpath(path)}") for path in drawn)]
    check_scenario(cfg, folder)
    rows, _ = evaluate_suite(cfg, controllers, seeds, models, str(folder))
    tables = {name: compare(rows, name, known) for name in controllers}
    for name, table in tables.items():
        show(name, table)
    finish(options.json, seeds=seeds, trained_on=known, tables=tables)


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (WorkerError,)))
