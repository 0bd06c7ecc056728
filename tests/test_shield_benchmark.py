"""benchmarks/shield.py: adversaries, and its command line."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.shield import ADVERSARIES, objections
from env.graph import SURROUND
from env.spaces import LEFT, RIGHT

ROOT = Path(__file__).resolve().parent.parent


def test_adversaries_command_every_icv_and_change_only_where_there_are_lanes():
    n, rng = 12, np.random.default_rng(0)
    observation = {"icv": np.arange(n) % 3 < 2, "mask": np.ones(n), "surround": np.zeros((n, len(SURROUND)))}
    observation["surround"][:6, SURROUND.index("has_left")] = 1
    observation["surround"][3:9, SURROUND.index("has_right")] = 1
    for rule in ADVERSARIES.values():
        slot, accel, lane, brake = rule(observation, n, rng)
        assert slot.tolist() == [0, 1, 3, 4, 6, 7, 9, 10, n, n, n, n]
        assert not ((accel[:8] < -3) | (accel[:8] > 2) | brake[:8].any()).any()  # NaN: the driver keeps the speed
    wishes = np.array([ADVERSARIES["lanes"](observation, n, rng)[2][:8] for _ in range(50)])
    assert set(wishes[:, 0]) == {LEFT} and set(wishes[:, 2]) == {LEFT, RIGHT} and set(wishes[:, 5]) == {RIGHT}
    assert (ADVERSARIES["throttle"](observation, n, rng)[1][:8] == 2).all()


def test_shield_keeps_traffic_safe_and_without_it_nobody_does(tmp_path):
    """In the town 105 % of the commands used to be overridden: of vehicle-steps, those that are left alone not counted.
    """
    done = subprocess.run([sys.executable, "-m", "benchmarks.shield", "--config", "configs/smoke.yaml", "--scenarios",
                           "ring,configs/town/town.sumocfg", "--seeds", "1", "--guards", "shield,none", "--json",
                           str(tmp_path / "shield.json")],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "shield.json").read_text())["table"]
    count = {guard: sum(row["collisions"] for row in rows if row["guard"] == guard) for guard in ("shield", "none")}
    assert count["shield"] == 0 < count["none"] and all(row["controlled_vehicle_steps"] > 200 for row in rows)
    assert "guard shield: 0 collisions in" in done.stdout
    assert all(row["overrides"] <= row["commands"] for row in rows) and any(
        row["commands"] > row["controlled_vehicle_steps"] for row in rows)


def test_what_shows_nothing_is_no_success():
    """Without ICVs it said "0 collisions in 0 controlled vehicle-steps", exit code 0."""
    def found(*rows):
        names = ("scenario", "guard", "controlled_vehicle_steps", "collisions")
        return " ".join(objections([dict(zip(names, row)) for row in rows]))
    assert not found(("ring", "shield", 9, 0), ("ring", "SUMO", 9, 1), ("ring", "none", 9, 1), ("town", "none", 9, 0))
    assert "guard shield: 2 collisions" == found(("ring", "shield", 9, 2), ("ring", "none", 9, 1))
    assert "no collision either" in found(("ring", "shield", 9, 0), ("ring", "none", 9, 0))
    assert "shield, town: nobody" in found(("ring", "shield", 9, 0), ("town", "shield", 0, 0))
