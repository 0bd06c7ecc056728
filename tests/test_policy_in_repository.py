"""The trained policies that come with the project: they load in one line, command, and do no harm."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import load_config
from evaluate import find_checkpoint

ROOT = Path(__file__).resolve().parent.parent
MOST_MB = 8


@pytest.mark.parametrize("name, suite, scenario, seconds, helps", [
    ("suite", "suite", "corridor", 400, lambda policy, none: policy["arrived"] > none["arrived"]),
    ("scenes", "scenes", "ring", 200, lambda policy, none: policy["sigma_v"] < 0.8 * none["sigma_v"])])
def test_policy_is_scored_by_one_command(name, suite, scenario, seconds, helps, tmp_path):
    """A few minutes of one seed. What it is worth is in the README, from many more."""
    command = [sys.executable, str(ROOT / "evaluate.py"), "--config", str(ROOT / "configs" / f"{suite}.yaml"),
               "--checkpoint", str(ROOT / "policies" / name), "--controllers", "none,policy", "--seeds", "1", "--out",
               "scores.json", "env.suite=[same]", f"env.scenario={scenario}", f"evaluate.horizon_s={seconds}"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    none, policy = (next(row for row in json.loads((tmp_path / "scores.json").read_text())["episodes"]
                         if row["controller"] == name) for name in ("none", "policy"))
    assert policy["controlled_vehicle_steps"] > 20 and policy["collisions"] == 0
    assert helps(policy, none)


@pytest.mark.parametrize("name", ["suite", "scenes"])
def test_policy_is_small(name):
    assert sum(path.stat().st_size for path in (ROOT / "policies" / name).rglob("*")) < MOST_MB * 2 ** 20


def test_policy_drives_as_its_suite_says():
    """Without --config too: what the checkpoint says about evaluation is what the README's tables were made with."""
    state, folder = find_checkpoint(ROOT / "policies/suite")
    own, suite = load_config(state["config"], source=str(folder)), load_config(ROOT / "configs/suite.yaml")
    own.evaluate.controllers = suite.evaluate.controllers
    assert own.evaluate == suite.evaluate and own.evaluate.leave_below == 10 and own.evaluate.accel_limit == 0
