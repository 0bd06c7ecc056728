"""README's "To change X, open Y" holds: four changes, each of one file and few lines, do what they should.

Each is applied to a copy of the project, which then runs as a user runs it.
"""
import difflib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EPISODE = """
import json
import gymnasium
import env
from configs import load_config
traffic = gymnasium.make("mixed_autonomy/Traffic-v0", cfg=load_config("configs/smoke.yaml"))
traffic.reset(seed=1)
nobody = {"slot": [160] * 5, "accel": [0] * 5, "lane": [1] * 5, "brake": [0] * 5}
for _ in range(40):
    _, reward, _, _, info = traffic.unwrapped.step(nobody)
print(json.dumps({"reward": reward, **info}))
traffic.close()
"""


@pytest.fixture
def project(tmp_path):
    """A copy of what a user has."""
    return shutil.copytree(ROOT, tmp_path / "project", ignore=shutil.ignore_patterns(
        ".*", "__pycache__", "*.egg-info", "runs", "datasets", "tests", "docs", "benchmarks"))


def change(project, file, *replacements):
    """Replace texts of one file, which the README's table must name; at most 30 lines may change."""
    table = (ROOT / "README.md").read_text().split("## To change X, open Y")[1].split("\n## ")[0]
    assert f"`{file}`" in table
    before = after = (project / file).read_text()
    for old, new in replacements:
        assert after.count(old) == 1, f"{file} no longer holds {old!r}"
        after = after.replace(old, new)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    assert 0 < sum(line[0] in "+-" and line[:3] not in ("+++", "---") for line in lines) <= 30
    (project / file).write_text(after)


def run(project, *words):
    """Output of a command of the copy, whose code alone it can import."""
    done = subprocess.run([sys.executable, *words], cwd=project, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_reward(project):
    change(project, "env/score.py", (
        "        return 100 * gain - 100 * loss / self.steps_expected - c.collision_penalty * collisions\n",
        "        return -self.abs_a - c.collision_penalty * collisions  # calm traffic is all that counts\n"))
    last = json.loads(run(project, "-c", EPISODE))
    assert last["reward"] == -last["abs_a"] < 0


def test_the_demand(project):
    """Twice the ramps, a fifth of the demand: fewer vehicles in the first 40 s."""
    change(project, "configs/smoke.yaml", (
        "env: {horizon_s: 60.0, max_vehicles: 160}\n",
        "env: {horizon_s: 60.0, max_vehicles: 160}\ncorridor: {main_flow: 500, ramp_flow: 200, ramps: 4}\n"))
    last = json.loads(run(project, "-c", EPISODE))
    assert last["loaded"] == math.ceil(500 * 40 / 3600) + 4 * math.ceil(200 * 40 / 3600)  # 124 as shipped


def test_the_encoder(project, recorded):
    """Deep sets instead of attention: a vehicle sees itself and the mean of all."""
    old = (project / "models/risk_gnn.py").read_text()
    layers = old[old.index("        self.layers = "):old.index("        self.norm = nn.LayerNorm(sizes.gnn_width)\n\n")]
    change(project, "models/risk_gnn.py", (
        layers, "        self.around = mlp(2 * sizes.gnn_width, sizes.gnn_width, sizes.gnn_width)\n"), (
        "        for layer in self.layers:\n            x = layer(x, where, who, danger, dense)\n",
        "        here = mask[..., None].to(x.dtype)\n"
        "        mean = (x * here).sum(1, keepdim=True) / here.sum(1, keepdim=True).clamp(min=1)\n"
        "        x = x + self.around(torch.cat([x, mean.expand_as(x)], -1))\n"))
    out = run(project, "train_ddp.py", "--phase", "1", "--config", "configs/smoke.yaml", f"data.folder={recorded}",
              "data.samples=30", "data.samples_per_chunk=5", "phase1.epochs=1", "phase1.stage1_epochs=0",
              "phase1.batch_size=22")
    assert "risk_gnn         0.023 M" in out and "phase 1 finished" in out  # 0.161 M with attention


def test_a_baseline_controller(project):
    """Also the YAML knows its name at once: names stood in configs/ a second time."""
    change(project, "env/baselines.py", (
        "BASELINES = {", '''def two_seconds(observation, k, rng):
    """ICVs nearer than two seconds to their leader slow down gently."""
    v, gap, _ = _following(observation)
    return _strongest(observation, k, np.full(len(v), -1.0), gap < 2 * v)


BASELINES = {"two_seconds": two_seconds, '''))
    run(project, "evaluate.py", "--config", "configs/smoke.yaml", "--seeds", "1", "--out", "results.json",
        "evaluate.controllers=[none, two_seconds]", "data.controllers=[two_seconds]", "evaluate.horizon_s=60",
        "evaluate.workers=1")
    none, mine = json.loads((project / "results.json").read_text())["episodes"]
    assert mine["controller"] == "two_seconds" and mine["c_int"] > 0 == none["c_int"]
