"""Does the shield keep the traffic safe from controllers that want the worst?

    python -m benchmarks.shield --json shield.json
    python -m benchmarks.shield --config configs/quick.yaml --scenarios corridor,my.sumocfg --seeds 1-5

In every control step four adversaries command all ICVs: "throttle" accelerates fully, "lanes" changes to another lane
again and again, "wander" does so too and leaves the speed to the driver, "erratic" does anything at random. Each drives
with and without the shield, and with and without SUMO's own safe-speed check (bit 0 of env.speed_mode). Collisions are
SUMO's, of every simulation step, counted as pairs. Without both they must happen, or the adversaries would show
nothing. Exit code 1: one happened with the shield, or nothing was shown.
"""
import sys
import tempfile

import numpy as np

from benchmarks.arguments import some_of, writable
from benchmarks.report import finish
from configs.command_line import parse
from controllers import BaselineController
from data.settings import of_scenario
from env.baselines import HAS_LEFT, commands
from env.networks import NETWORKS
from env.spaces import ACCEL_HIGH, ACCEL_LOW, KEEP, LEFT, RIGHT
from env.sumo import SAFE_SPEED
from env.traffic_env import check_scenario
from env.workers import WorkerError, make_pool
from evaluate import parse_seeds, run_jobs
from runtime.ending import run_script
from train_ddp import USER_ERRORS

GUARDS = {"shield": (True, False), "shield and SUMO": (True, True), "SUMO": (False, True), "none": (False, False)}
COLUMNS = ("controlled_vehicle_steps", "collisions", "overrides")


def throttle(observation, k, rng):
    icvs = np.flatnonzero(observation["icv"])[:k]
    return commands(observation, k, icvs, np.full(len(icvs), ACCEL_HIGH))


def lanes(observation, k, rng):
    """To the left or to the right wherever there is a lane; both at random where there are two."""
    icvs = np.flatnonzero(observation["icv"])[:k]
    left, right = observation["surround"][icvs, HAS_LEFT:HAS_LEFT + 2].T > 0
    wish = np.where(left & (~right | (rng.random(len(icvs)) < 0.5)), LEFT, np.where(right, RIGHT, KEEP))
    return commands(observation, k, icvs, np.zeros(len(icvs)), wish)


def wander(observation, k, rng):
    slot, _, lane, brake = lanes(observation, k, rng)
    return slot, np.full(k, np.nan), lane, brake


def erratic(observation, k, rng):
    icvs = np.flatnonzero(observation["icv"])[:k]
    return commands(observation, k, icvs, rng.uniform(ACCEL_LOW, ACCEL_HIGH, len(icvs)), rng.integers(0, 3, len(icvs)))


ADVERSARIES = {"throttle": throttle, "lanes": lanes, "wander": wander, "erratic": erratic}


class Adversary(BaselineController):
    """An adversary behind the same shield as policy and rules; counts what it asks for: the environment may leave
    somebody alone whom it commands."""

    asked = 0

    def begin(self, env, seed):
        self.rules[env] = ADVERSARIES[self.name], np.random.default_rng(seed)

    def act(self, observation, env):
        commands = super().act(observation, env)
        self.asked += int((commands["slot"] < self.n).sum())
        return commands


def attack(cfg, scenario, guard, seeds, folder):
    """{adversary: {column: sum over the seeds}} in one scenario."""
    cfg, (shield, check) = of_scenario(cfg, scenario), GUARDS[guard]
    cfg.env.suite = ["same"]
    cfg.env.max_commands, cfg.env.terminate_on_collision = cfg.env.max_vehicles, False
    cfg.env.speed_mode, cfg.shield.enabled = cfg.env.speed_mode & ~SAFE_SPEED | SAFE_SPEED * check, shield
    jobs = [(name, seed) for name in ADVERSARIES for seed in seeds]
    adversaries = {name: Adversary(cfg, name) for name in ADVERSARIES}
    with make_pool(cfg, min(cfg.evaluate.workers, len(jobs)), 1, folder) as pool:
        rows, log = run_jobs(pool, adversaries, jobs, cfg.rollout.restarts, lambda *text: None)
    for row in rows:
        row["overrides"] = sum(line[:2] == (row["controller"], row["seed"]) for line in log)
    return {name: {"commands": adversary.asked,
                   **{key: sum(row[key] for row in rows if row["controller"] == name) for key in COLUMNS}}
            for name, adversary in adversaries.items()}


def objections(table):
    """What speaks against "the shield keeps traffic safe" in the rows of a table: texts."""
    for guard in dict.fromkeys(row["guard"] for row in table):
        rows = [row for row in table if row["guard"] == guard]
        crashes = sum(row["collisions"] for row in rows)
        if GUARDS[guard][0] and crashes:
            yield f"guard {guard}: {crashes} collisions"
        if guard == "none" and not crashes:
            yield "guard none: no collision either, so that the others show nothing"
        driven = {row["scenario"] for row in rows if row["controlled_vehicle_steps"]}
        for scenario in sorted({row["scenario"] for row in rows} - driven):
            yield f"guard {guard}, {scenario}: nobody was commanded, which shows nothing"


def main():
    def add(parser):
        parser.add_argument("--scenarios", default=",".join(NETWORKS), help="(default: %(default)s)")
        parser.add_argument("--guards", type=some_of(GUARDS), default=",".join(GUARDS), help="some of %(default)s")
        parser.add_argument("--seeds", default="1-3")
        parser.add_argument("--json", type=writable, default="shield.json", help="where the result goes")
    options = parse(__doc__, add=add)
    seeds, guards, table = parse_seeds(options.seeds), options.guards.split(","), []
    scenarios = options.scenarios.split(",")
    wide = max(15, *map(len, scenarios))  # a path may be long
    print(f"{'scenario':{wide}s} {'guard':18s}{'adversary':12s}{'vehicle-steps':>14s}{'collisions':>12s}"
          f"{'overridden':>12s}")
    with tempfile.TemporaryDirectory() as folder:
        for scenario in scenarios:
            check_scenario(of_scenario(options.config, scenario), folder)
        for scenario in scenarios:
            for guard in guards:
                for name, row in attack(options.config, scenario, guard, seeds, folder).items():
                    print(f"{scenario:{wide}s} {guard:18s}{name:12s}{row['controlled_vehicle_steps']:14d}"
                          f"{row['collisions']:12d}{row['overrides'] / max(row['commands'], 1):12.1%}", flush=True)
                    table.append({"scenario": scenario, "guard": guard, "adversary": name, **row})
    for guard in guards:
        steps, collisions = (sum(row[key] for row in table if row["guard"] == guard) for key in COLUMNS[:2])
        print(f"guard {guard}: {collisions} collisions in {steps} controlled vehicle-steps")
    finish(options.json, seeds=seeds, table=table)
    for text in (found := list(objections(table))):
        print(f"FAIL  {text}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(run_script(main, USER_ERRORS, (WorkerError,)))
