"""How much traffic does a scenario carry? Demand against outflow, arrivals and mean speed, without control.

    python -m benchmarks.capacity --scenario bottleneck --json capacity.json
    python -m benchmarks.capacity --scenario merge --scales 0.4,0.5,0.6,0.7 --seeds 1-10 env.step_length=0.5

Open roads: the demand is multiplied by each scale; the outflow is that of the last 500 s of the episode. Closed roads
(nobody arrives): the number of vehicles is multiplied, and the outflow is the flow past a point, vehicles * mean speed
/ length of the road. A demand below capacity makes every controller tie with no control, one far above it leaves
little to gain; choose 1.05 to 1.2 times the capacity. With matplotlib installed, the curves are drawn beside the JSON
file.
"""
import copy
import json
import math
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.arguments import writable
from configs import ConfigError
from configs.command_line import parse
from configs.loader import CLOSED
from env.spaces import KEEP
from env.traffic_env import SumoError, make_env
from evaluate import parse_seeds
from runtime.ending import run_script
from runtime.resources import usable_cores
from runtime.scores import mean_ci, with_interval

WINDOW_S, READ_EVERY_S = 500.0, 10.0
SCALES = "0.4,0.5,0.6,0.7,0.8,0.9,1,1.1,1.2"
COLUMNS = {"demand": "", "outflow": "outflow veh/h", "arrived": "arrived", "ocr": "OCR",
           "mean_speed": "mean speed m/s", "present": "present at end", "waiting": "waiting outside"}


def demand_title(scenario):
    return "vehicles" if scenario in CLOSED else "demand veh/h"


def scaled(cfg, scale):
    """The configuration with `scale` times the demand (on closed roads: vehicles), read every 10 s."""
    cfg = copy.deepcopy(cfg)
    cfg.env.control_interval, cfg.env.terminate_on_collision = READ_EVERY_S, False
    cfg.env.call_timeout_s *= READ_EVERY_S  # every answer stands for ten of the usual ones
    if cfg.env.scenario in CLOSED:
        scene = getattr(cfg, cfg.env.scenario)
        scene.vehicles = round(scene.vehicles * scale)
    else:
        cfg.env.demand_scale *= scale
    return cfg


def measure(cfg, seed, folder):
    """One episode without control: {column: value}, and its collisions and teleports."""
    env, k, n = make_env(cfg, folder), cfg.env.max_commands, cfg.env.max_vehicles
    nobody = np.full(k, n), np.zeros(k), np.full(k, KEEP), np.zeros(k)
    try:
        env.reset(seed=seed)
        arrived, ended = [], False
        while not ended:
            *_, ended, info = env.command(*nobody)
            arrived.append(info["arrived"])
        metres = env.road.lane_length.sum()
    finally:
        env.close()
    total = info["summary"]
    if cfg.env.scenario in CLOSED:
        demand, outflow = info["vehicles"], info["vehicles"] * total["mean_speed"] / metres * 3600
    else:
        steps = min(round(WINDOW_S / READ_EVERY_S), len(arrived) - 1)
        demand = total["loaded"] / (cfg.env.horizon_s + cfg.env.warmup_s) * 3600
        outflow = (arrived[-1] - arrived[-1 - steps]) / (steps * READ_EVERY_S) * 3600
    return {"demand": demand, "outflow": outflow, "present": info["vehicles"],
            "waiting": total["loaded"] - total["departed"],
            **{name: total[name] for name in ("arrived", "ocr", "mean_speed", "collisions", "teleports")}}


def sweep(cfg, scales, seeds, folder, say=print):
    """[{"scale", column: {"mean", "ci95"}, "collisions", "teleports", "episodes"}], one row per scale."""
    rows = []
    titles = {**COLUMNS, "demand": demand_title(cfg.env.scenario)}
    say("".join([f"{'scale':>6s}", *(f"{title:>20s}" for title in titles.values()), f"{'collisions':>12s}",
                 f"{'teleports':>12s}"]))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for scale in scales:
            episodes = list(pool.map(lambda seed: measure(scaled(cfg, scale), seed, folder), seeds))
            row = {"scale": scale, **{name: mean_ci([e[name] for e in episodes]) for name in COLUMNS},
                   **{name: sum(e[name] for e in episodes) for name in ("collisions", "teleports")},
                   "episodes": episodes}
            rows.append(row)
            cells = [with_interval(row[name], ".4g") for name in COLUMNS]
            say("".join([f"{scale:6.2f}", *(f"{cell:>20s}" for cell in cells), f"{row['collisions']:12d}",
                         f"{row['teleports']:12d}"]))
    return rows


def capacity(rows):
    """(highest mean outflow, veh/h; outflow at the highest demand, veh/h; the scale of the former)."""
    best = max(rows, key=lambda row: row["outflow"]["mean"])
    return best["outflow"]["mean"], rows[-1]["outflow"]["mean"], best["scale"]


def draw(rows, scenario, path):
    """Outflow and mean speed against demand; needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return print("no picture: matplotlib is not installed (extra `viz`)")
    xs, figure = [row["demand"]["mean"] for row in rows], Figure(figsize=(10, 4))
    both = figure.subplots(1, 2)
    for axes, name in zip(both, ("outflow", "mean_speed")):
        axes.errorbar(xs, [row[name]["mean"] for row in rows], [row[name]["ci95"] or 0 for row in rows], capsize=3)
        axes.set(xlabel=demand_title(scenario), ylabel=COLUMNS[name], title=scenario)
    if scenario not in CLOSED:
        both[0].plot(xs, xs, "k:", label="outflow = demand")
        both[0].legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"curves: {path}")


def parse_scales(text):
    """"0.5,1,1.5" -> [0.5, 1.0, 1.5], ascending; ConfigError when it is no such list."""
    try:
        scales = sorted(float(part) for part in text.split(","))
    except ValueError:
        scales = []
    if not scales or not all(0 < scale < math.inf for scale in scales):
        raise ConfigError(f"command line: --scales {text!r}: expected positive numbers such as 0.5,1,1.2")
    return scales


def main():
    def add(parser):
        parser.add_argument("--scenario", help="built-in name or a .sumocfg (default: env.scenario)")
        parser.add_argument("--scales", default=SCALES, help="factors of the demand")
        parser.add_argument("--seeds", default="1-5")
        parser.add_argument("--json", type=writable, default="capacity.json", help="where the result goes")
    options = parse(__doc__, add=add)
    cfg, scales, seeds = options.config, parse_scales(options.scales), parse_seeds(options.seeds)
    if options.scenario:
        cfg.env.scenario, cfg.env.suite = options.scenario, ["same"]
    if cfg.env.suite != ["same"]:
        raise ConfigError(f"env.suite={cfg.env.suite}: one capacity for all of them means nothing; name one --scenario")
    print(f"{cfg.env.scenario}: {len(seeds)} seeds, {cfg.env.horizon_s:.0f} s, step {cfg.env.step_length} s, mean +- "
          f"95 % interval; machine load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep(cfg, scales, seeds, folder)
    most, congested, scale = capacity(rows)
    print(f"highest outflow {most:.0f} veh/h, at scale {scale:g}; outflow at the highest demand {congested:.0f} veh/h")
    if cfg.env.scenario not in CLOSED:
        print(f"1.05 to 1.2 times the highest outflow is a demand of {1.05 * most:.0f} to {1.2 * most:.0f} veh/h")
    Path(options.json).write_text(json.dumps({"scenario": cfg.env.scenario, "step_length": cfg.env.step_length,
                                              "seeds": seeds, "capacity": most, "congested": congested, "rows": rows},
                                             indent=1))
    draw(rows, cfg.env.scenario, Path(options.json).with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, (ConfigError, SumoError)))
