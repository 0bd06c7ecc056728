"""The benchmark of the world model: its command line, the truth it compares with, calibration points, its picture."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import prediction, world_model
from configs import load_config
from env.launch import SumoError

ROOT = Path(__file__).resolve().parent.parent
TINY = ("data.processes=1", "data.samples=8", "data.samples_per_episode=4", "data.margin=0", "env.horizon_s=40",
        "phase1.augment.time_shift=0", "phase1.epochs=1", "phase1.stage1_epochs=0", "phase1.batch_size=2",
        "run.threads=1")


def test_benchmark_trains_compares_and_draws(tmp_path):
    """Two training seeds on one data set; every number of the table is in the JSON file."""
    own = [f"run.folder={tmp_path}", f"data.folder={tmp_path}/data", "data.seed=5"]
    plot = ["--plot", str(tmp_path / "out.png")] if has_matplotlib() else []
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.world_model", "--config", "configs/smoke.yaml", "--seeds", "1-2", "--scenes",
         "merge:1.0", "--episodes", "1", "--json", str(tmp_path / "out.json"), *plot, *own, *TINY], cwd=ROOT,
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["scenes"]) == ["merge:1.0"]
    facts = result["scenes"]["merge:1.0"]
    assert set(facts["rules"]) == {"velocity", "accel", "idm"} and len(facts["seeds"]) == 2
    first, second = (row["position_5"] for row in facts["seeds"])
    assert first != second and facts["model"]["position_5"]["mean"] == pytest.approx((first + second) / 2)
    assert f"{facts['model']['position_5']['mean']:.3f}" in done.stdout
    assert {f"{q}_{h}" for q in ("position", "speed") for h in range(1, 6)} <= facts["rules"]["idm"].keys()
    assert [path.name for path in tmp_path.glob("data*")] == ["data"]
    assert not plot or (tmp_path / "out.png").stat().st_size > 10_000


def has_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def test_an_unknown_scene_is_refused(tmp_path):
    with pytest.raises(SumoError, match="neither built in"):
        world_model.record(load_config("configs/smoke.yaml"), "nowhere:1.0", "none", 1, str(tmp_path))


def test_truth_by_following_every_vehicle():
    """Displacement is summed, conflicts within the horizon are seen or not, and nothing is known beyond a change of
    vehicle in the slot."""
    rng, frames, horizon = np.random.default_rng(0), 12, 3
    mask, fresh = rng.random((frames, 4)) < 0.85, rng.random((frames, 4)) < 0.15
    moved, speed = rng.random((frames, 4)), rng.random((frames, 4)) * 10
    conflict = (rng.random((frames, 4)) < 0.3) & mask
    nodes, surround = np.zeros((frames, 4, 9)), np.full((frames, 4, 14), 30.0)
    nodes[..., 2] = speed
    e = {name: torch.from_numpy(x) for name, x in dict(
        mask=mask, fresh=fresh, moved=moved, conflict=conflict, nodes=nodes, surround=surround,
        lead=rng.integers(-1, 4, (frames, 4))).items()}
    out = world_model.with_truth(e, 1.0, horizon)
    for t in range(frames - horizon):
        for i in range(4):
            alive, distance, seen = mask[t, i], 0.0, False
            for h in range(1, horizon + 1):
                alive = alive and mask[t + h, i] and not fresh[t + h, i]
                distance += moved[t + h, i]
                seen = seen or (alive and conflict[t + h, i])
                assert out["valid"][t, i, h - 1] == alive
                if alive:
                    assert out["states"][t, i, h - 1].tolist() == pytest.approx([distance, speed[t + h, i]])
            assert out["conflict_known"][t, i] == (alive or seen) and out["conflict"][t, i] == seen
            assert out["dense"][t, i] == (e["lead"][t, i] >= 0)
            assert out["accel"][t, i] == pytest.approx(0 if t == 0 or fresh[t, i] else speed[t, i] - speed[t - 1, i])


def test_reliability_by_counting():
    rng = np.random.default_rng(1)
    probability = 10 ** -rng.uniform(0, 5, 400)
    label = rng.random(400) < probability
    points = prediction.reliability(probability, label, np.array([1e-3, 0.1]))
    parts = [probability < 1e-3, (probability >= 1e-3) & (probability < 0.1), probability >= 0.1]
    assert [count for *_, count in points] == [part.sum() for part in parts]
    for (mean, seen, _), part in zip(points, parts):
        assert mean == pytest.approx(sum(probability[part]) / part.sum())
        assert seen == pytest.approx(sum(label[part]) / part.sum())
