"""Does a policy carry over to demands, roads and shares of ICVs that it was not trained on?

    python -m benchmarks.transfer --checkpoint runs/suite --controllers tuned,policy --json transfer.json

Scores the controllers on the run's own suite, then, with nothing changed but the traffic, on `CORRIDORS` and on drawn
networks: crossings with traffic lights, a signalled main road, a roundabout, each with cars, trucks, buses and
motorcycles. The ratio is S_total to the mean over the run's own suite. Flagged: a ratio below 0.5; OCR more than 1 %
below no control; more collisions than without control.
"""
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

from benchmarks.arguments import writable
from benchmarks.report import finish
from configs.command_line import parse
from env.launch import SumoError, find_binary, sumo_environment
from env.traffic_env import check_scenario
from env.workers import WorkerError
from controllers import CONTROLLERS
from evaluate import evaluate_suite, settings
from runtime.ending import run_script
from runtime.scores import summarise, with_interval
from train_ddp import USER_ERRORS

CORRIDORS = ("corridor.main_flow=2400 corridor.ramp_flow=1200", "corridor.main_flow=3000 corridor.ramp_flow=1000",
             "corridor.ramps=3 corridor.ramp_flow=900",
             "corridor.lanes=3 corridor.ramps=3 corridor.main_flow=4400 corridor.ramp_flow=900",
             "env.icv_share=0.1", "env.icv_share=0.25", "env.icv_share=0.5")
TYPES = """<vTypeDistribution id="mix">
  <vType id="car" probability="0.7"/>
  <vType id="truck" vClass="truck" probability="0.12"/>
  <vType id="bus" vClass="bus" probability="0.08"/>
  <vType id="motorcycle" vClass="motorcycle" probability="0.1"/>
</vTypeDistribution>"""
GRID = ("--grid", "--grid.length", "200", "--grid.attach-length", "200", "--default.lanenumber", "2",
        "--default-junction-type", "traffic_light", "--tls.layout", "incoming", "--no-turnarounds", "true")


def networks(folder, end):
    """Draw the networks and their demand until `end` s into `folder`: paths of their .sumocfg files."""
    folder.mkdir(parents=True, exist_ok=True)
    run("netgenerate", *GRID, "--grid.x-number", "3", "--grid.y-number", "3", "-o", folder / "lights.net.xml")
    run("netgenerate", *GRID, "--grid.x-number", "5", "--grid.y-number", "1", "-o", folder / "main_road.net.xml")
    sides = [f"{side}{i}" for i in range(3) for side in ("left", "right", "top", "bottom")]
    crossings = {"left": lambda i: f"A{i}", "right": lambda i: f"C{i}", "top": lambda i: f"{'ABC'[i]}2",
                 "bottom": lambda i: f"{'ABC'[i]}0"}
    arms = {side: crossings[side[:-1]](int(side[-1])) for side in sides}
    road = {"left0": "A0", "right0": "E0", **{f"{s}{i}": f"{'ABCDE'[i]}0" for s in ("top", "bottom") for i in range(5)}}
    round_nodes, round_edges, ends = roundabout()
    (folder / "nodes.xml").write_text(round_nodes)
    (folder / "edges.xml").write_text(round_edges)
    run("netconvert", "-n", folder / "nodes.xml", "-e", folder / "edges.xml", "-o", folder / "roundabout.net.xml",
        "--no-turnarounds", "true")
    both = {"left0": 700.0, "right0": 700.0}
    return [scenario(folder, "lights", end, arms, dict.fromkeys(sides, 450.0)),
            scenario(folder, "main_road", end, road, {**dict.fromkeys(road, 120.0), **both}),
            scenario(folder, "roundabout", end, ends, dict.fromkeys(ends, 550.0))]


def roundabout():
    """(nodes, edges, {arm: its node on the ring}) of a roundabout of 25 m with four arms of 200 m. Who is on the ring
    has right of way."""
    places = {"e": (1, 0), "n": (0, 1), "w": (-1, 0), "s": (0, -1)}
    nodes = [f'<node id="{name}{part}" x="{x * far}" y="{y * far}"/>'
             for name, (x, y) in places.items() for part, far in (("", 225), ("r", 25))]
    names = list(places)
    pairs = [(f"{a}r", f"{b}r") for a, b in zip(names, names[1:] + names[:1])]
    pairs += [pair for name in names for pair in ((name, f"{name}r"), (f"{name}r", name))]
    kind = {True: 'speed="8" priority="2"', False: 'speed="14" priority="1"'}  # on the ring, to or from it
    edges = [f'<edge id="{a}{b}" from="{a}" to="{b}" numLanes="1" {kind[bool(a[1:] and b[1:])]}/>' for a, b in pairs]
    arms = {name: f"{name}r" for name in names}
    return f"<nodes>{''.join(nodes)}</nodes>", f"<edges>{''.join(edges)}</edges>", arms


def scenario(folder, name, end, arms, demand):
    """Path of a .sumocfg: from each arm `demand` veh/h, evenly to all others. An arm's edges are arm + node and node +
    arm."""
    flows = [f'<flow id="{a}_{b}" type="mix" from="{a}{arms[a]}" to="{arms[b]}{b}" begin="0" end="{end}" '
             f'vehsPerHour="{demand[a] / (len(arms) - 1):.1f}" departLane="best" departSpeed="max"/>'
             for a, b in permutations(arms, 2)]
    (folder / f"{name}.rou.xml").write_text(f"<routes>{TYPES}{''.join(flows)}</routes>")
    path = folder / f"{name}.sumocfg"
    path.write_text(f'<configuration><input><net-file value="{name}.net.xml"/><route-files value="{name}.rou.xml"/>'
                    "</input></configuration>")
    return path


def run(program, *arguments):
    done = subprocess.run([find_binary(program), *map(str, arguments)], capture_output=True, text=True,
                          env=sumo_environment())
    if done.returncode:
        raise SumoError(f"{program}: {done.stderr.strip()}")


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
    parser.add_argument("--json", type=writable, default="transfer.json", help="where the result goes")


def main():
    options = parse(__doc__, add=add_options, load=False)
    configs, controllers, seeds, models = settings(options)
    cfg = configs[""]
    folder, known = Path(cfg.run.folder) / cfg.run.name / "scenario", cfg.env.suite
    drawn = networks(folder / "drawn", cfg.env.horizon_s + cfg.env.warmup_s)
    cfg.env.suite = [*known, *CORRIDORS, *(f"env.scenario={os.path.relpath(path)}" for path in drawn)]
    check_scenario(cfg, folder)
    rows, _ = evaluate_suite(cfg, controllers, seeds, models, str(folder))
    tables = {name: compare(rows, name, known) for name in controllers}
    for name, table in tables.items():
        show(name, table)
    finish(options.json, seeds=seeds, trained_on=known, tables=tables)


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (WorkerError,)))
