"""The trained policy that comes with the project: it loads in one line, commands, and does no harm."""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLICY, MOST_MB = ROOT / "policies" / "suite", 8


def test_policy_is_scored_by_one_command(tmp_path):
    """Five minutes of one seed. What it is worth is in the README, from many more."""
    command = [sys.executable, str(ROOT / "evaluate.py"), "--config", str(ROOT / "configs" / "suite.yaml"),
               "--checkpoint", str(POLICY), "--controllers", "none,policy", "--seeds", "1", "--out", "scores.json",
               "env.suite=[same]", "evaluate.horizon_s=300"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    none, policy = (next(row for row in json.loads((tmp_path / "scores.json").read_text())["episodes"]
                         if row["controller"] == name) for name in ("none", "policy"))
    assert policy["controlled_vehicle_steps"] > 20 and policy["collisions"] == 0
    assert policy["arrived"] > 0.97 * none["arrived"]


def test_policy_is_small():
    assert sum(path.stat().st_size for path in POLICY.rglob("*")) < MOST_MB * 2 ** 20
