"""runtime/checkpoint.py and Progress: complete or absent, checked, resumed bit for bit."""
import json
import os
import random
import shutil
import struct

import numpy as np
import pytest
import torch
from torch import nn

from configs import Config
from runtime import checkpoint
from runtime.checkpoint import CheckpointError
from runtime.distributed import Team
from runtime.precision import HysteresisScaler
from runtime.training import Progress, first_weights

CPU = torch.device("cpu")
ALONE = Team(0, 1, 0, 1, CPU)
AMP = Config().phase1.amp


# ---- checkpoints -------------------------------------------------------------------------------------------------

def state_of(step):
    return {"weights": torch.full((3,), float(step)), "counters": {"step": step, "names": ["a", None, 1.5, True]}}


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of steps 1 to 3."""
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state_of(step))
    return tmp_path


def step_in(folder, which="latest"):
    return checkpoint.load(folder, which)["counters"]["step"]


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_checkpoint_round_trip(saved):
    state = checkpoint.load(saved)
    assert torch.equal(state["weights"], torch.full((3,), 3.0)) and state["counters"] == state_of(3)["counters"]
    assert (saved / "latest").read_text() == "step_000003"
    manifest = json.loads((saved / "step_000003" / "manifest.json").read_text())
    assert manifest["step"] == 3 and set(manifest["versions"]) == {"torch", "numpy", "eclipse-sumo", "traci"}


def test_other_versions_are_noted(saved, capsys):
    """They were written and never read: after an update of SUMO results differ, without a word."""
    checkpoint.load(saved)
    assert capsys.readouterr().out == ""
    path = saved / "step_000003" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"].update({"eclipse-sumo": "1.20.0", "numpy": "1.0"})
    path.write_text(json.dumps(manifest))
    checkpoint.load(saved)
    said = capsys.readouterr().out
    assert "NOTE" in said and "eclipse-sumo 1.20.0 (here 1." in said and "torch" not in said


def test_nothing_saved_is_none(tmp_path):
    assert checkpoint.load(tmp_path) is None and checkpoint.load(tmp_path / "absent") is None


def test_random_states_continue_after_a_round_trip(tmp_path):
    """All three generators; the odd normal draws leave half a pair behind in two of them."""
    random.gauss(0, 1), np.random.randn()
    checkpoint.save(tmp_path, 1, {"random": checkpoint.random_state(CPU)})
    expected = draws()
    for seed in (0, 1):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        assert draws() != expected
        checkpoint.restore_random_state(checkpoint.load(tmp_path)["random"], CPU)
        assert draws() == expected


def test_equal_seeds_begin_equal_random_numbers():
    """Python's and numpy's began anywhere: no two checkpoints of equal runs, or of a resumed one, were equal."""
    first, second = ((checkpoint.seed_random(3), draws()) for _ in range(2))
    assert first == second


def test_pruning_keeps_the_last_and_the_best(tmp_path, capsys):
    for step in range(1, 8):
        checkpoint.save(tmp_path, step, state_of(step), keep_last=2, best=step == 2)
    assert names(tmp_path) == ["best", "latest", "step_000002", "step_000006", "step_000007"]
    told, = capsys.readouterr().out.splitlines()  # once
    assert told.startswith(f"{tmp_path}: the last 2 checkpoints and the best are kept, older ones removed")
    assert step_in(tmp_path, "best") == 2 and step_in(tmp_path) == 7


def test_pruning_keeps_the_newest_beyond_a_million_steps(tmp_path):
    """Names were sorted as texts: "step_1000000" came before "step_999999", so that the newest was deleted at once."""
    for step in (999998, 999999, 1000000, 1000001):
        checkpoint.save(tmp_path, step, state_of(step), keep_last=2)
        assert step_in(tmp_path) == step


def test_pruning_keeps_what_was_just_written(saved):
    """After a damaged step 3 training went on from 2; the next checkpoint was removed at once, the damaged one kept."""
    (saved / "step_000003" / "state.pt").write_bytes(b"junk")
    shutil.rmtree(saved / "step_000002")
    checkpoint.save(saved, 2, state_of(2), keep_last=1)
    assert step_in(saved) == 2 and not (saved / "step_000001").exists()


def test_copies_beside_the_checkpoints_are_none_of_them(saved):
    """A folder step_000003.bak ended every command: ValueError."""
    shutil.copytree(saved / "step_000003", saved / "step_000003.bak")
    checkpoint.save(saved, 4, state_of(4), keep_last=1)
    assert step_in(saved) == 4 and names(saved) == ["latest", "step_000003.bak", "step_000004"]


def test_best_is_the_newest_where_none_was_named(saved):
    assert step_in(saved, "best") == 3


def test_the_same_step_may_be_saved_again(saved):
    checkpoint.save(saved, 3, {"counters": {"step": 33}})
    assert step_in(saved) == 33 and names(saved) == ["latest", "step_000001", "step_000002", "step_000003"]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flip_weight(step):
    """One bit of a weight: every structure of the file stays valid, only the checksum tells."""
    data = (step / "state.pt").read_bytes()
    flip(step / "state.pt", data.index(struct.pack("<3f", *[float(step.name[-1])] * 3)))


DAMAGES = {
    "flipped bit of a weight": flip_weight,
    "flipped byte": lambda step: flip(step / "state.pt", 200),
    "truncated": lambda step: os.truncate(step / "state.pt", 100),
    "empty": lambda step: os.truncate(step / "state.pt", 0),
    "no state": lambda step: (step / "state.pt").unlink(),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "half a manifest": lambda step: os.truncate(step / "manifest.json", 30),
    "other manifest": lambda step: (step / "manifest.json").write_text("[]"),
    "empty folder": lambda step: [p.unlink() for p in step.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_is_named_and_the_one_before_it_used(saved, damage, capsys):
    DAMAGES[damage](saved / "step_000003")
    assert step_in(saved) == 2
    assert "DAMAGED" in (out := capsys.readouterr().out) and str(saved / "step_000003") in out


def test_damaged_best_is_named_and_the_newest_used(tmp_path, capsys):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, state_of(step), best=step == 1)
    DAMAGES["flipped byte"](tmp_path / "step_000001")
    assert step_in(tmp_path, "best") == 3 and "step_000001" in capsys.readouterr().out


def test_any_changed_byte_of_the_manifest_is_harmless(saved):
    """One changed letter in "bytes" or "sha256" once ended in a KeyError instead of the checkpoint before it."""
    path = saved / "step_000003" / "manifest.json"
    good = path.read_bytes()
    for at in range(len(good)):
        flip(path, at)
        try:
            assert checkpoint.load_step(path.parent)["counters"]["step"] == 3
        except CheckpointError as error:
            assert "step_000003" in str(error)
        path.write_bytes(good)


def test_all_damaged_is_an_error_that_names_every_file(saved):
    for step in (1, 2, 3):
        DAMAGES["flipped byte"](saved / f"step_{step:06d}")
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(saved)
    for step in (1, 2, 3):
        assert str(saved / f"step_{step:06d}" / "state.pt") in str(error.value)


def test_a_folder_that_lost_its_checkpoints_is_an_error(saved):
    """Never a silent start from scratch: `latest` says that there was one."""
    for step in saved.glob("step_*"):
        shutil.rmtree(step)
    with pytest.raises(CheckpointError, match="latest"):
        checkpoint.load(saved)


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_hostile_pickle_is_refused_and_not_run(tmp_path, capsys):
    """Its size and checksum fit the manifest, so only loading without code stops it."""
    checkpoint.save(tmp_path, 1, state_of(1))
    checkpoint.save(tmp_path, 2, {"weights": Hostile(tmp_path / "proof")})
    torch.load(tmp_path / "step_000002" / "state.pt", weights_only=False)
    assert (tmp_path / "proof").exists()  # it would work
    (tmp_path / "proof").unlink()
    assert step_in(tmp_path) == 1 and "refused" in capsys.readouterr().out
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("weights", [None, [], {"schema": "text", "model": {}}, {"schema": {}, "model": [1]}])
def test_weights_of_other_kinds_are_refused(weights):
    """A checkpoint with a right checksum and a text for its schema ended in a traceback."""
    with pytest.raises(checkpoint.CheckpointError, match="runs/x: not a checkpoint of this program"):
        checkpoint.load_weights(torch.nn.Linear(2, 3), weights, {}, "runs/x")


def test_leftovers_of_a_crash_are_ignored_and_cleaned(saved):
    """Crashes between the files of steps 4 and 9, and one between the two renames of step 3."""
    for step in (4, 9):
        (saved / f".step_{step:06d}.tmp").mkdir()
        (saved / f".step_{step:06d}.tmp" / "state.pt").write_bytes(b"half")
    (saved / ".old_step_000003").mkdir()
    assert step_in(saved) == 3
    checkpoint.save(saved, 4, state_of(4))
    assert names(saved) == ["latest", "step_000002", "step_000003", "step_000004"] and step_in(saved) == 4


def test_crash_before_latest_moved(saved):
    """The renamed folder is complete: it counts, whatever `latest` says."""
    (saved / "latest").write_text("step_000002")
    assert step_in(saved) == 3


@pytest.mark.parametrize("damage", [b"\xf3tep_000002", b"step_000009", None])
def test_damaged_name_of_the_best_is_told_and_the_newest_used(saved, damage, capsys):
    """One flipped bit was a traceback, after every further checkpoint too; a wrong name was passed over in silence."""
    (saved / "best").unlink(missing_ok=True)
    (saved / "best").mkdir() if damage is None else (saved / "best").write_bytes(damage)
    assert step_in(saved, "best") == 3
    assert f"DAMAGED CHECKPOINT: {saved / 'best'}: names no checkpoint" in capsys.readouterr().out
    checkpoint.save(saved, 4, state_of(4))
    assert step_in(saved) == 4


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 704 vs 598")])
def test_full_disk_leaves_the_old_ones_intact(saved, monkeypatch, error):
    """torch reports a full disk as RuntimeError; then the half-written file once stayed on the full disk."""
    def full(state, file):
        file.write(b"half")
        raise error
    before = names(saved)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(checkpoint.SaveError, match="step_000004: could not be saved"):
            checkpoint.save(saved, 4, state_of(4))
    assert names(saved) == before and step_in(saved) == 3


SCHEMA = {"preset": "small", "features": "nodes9"}


def test_weights_travel_by_name():
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpoint.load_weights(target, {"model": source.state_dict(), "schema": dict(SCHEMA)}, SCHEMA, "here")
    assert torch.equal(target.weight, source.weight)


def test_another_architecture_is_refused_with_every_difference():
    target = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    before = target[0].weight.clone()
    weights = {"model": other.state_dict(), "schema": {**SCHEMA, "preset": "full"}}
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_weights(target, weights, SCHEMA, "run/phase1")
    for part in ("run/phase1", "preset: checkpoint 'full', here 'small'", "missing: 1.weight", "unexpected: 2.bias",
                 "0.weight: shape (4, 3), here (2, 3)"):
        assert part in str(error.value)
    assert torch.equal(target[0].weight, before)


@pytest.mark.parametrize("change, named", [
    ({"schema": {"preset": "full"}}, "preset"), ({"schema": {}}, "preset"),
    ({"model": {"more": torch.ones(1)}}, "unexpected: more"), ({"model": {"weight": None}}, "missing: weight"),
    ({"model": {"weight": torch.ones(4, 3)}}, "weight: shape")])
def test_any_single_difference_is_refused(change, named):
    model, schema = nn.Linear(3, 2), {"preset": "small"}
    weights = {"model": dict(model.state_dict()), "schema": change.get("schema", schema)}
    weights["model"].update(change.get("model", {}))
    weights["model"] = {name: value for name, value in weights["model"].items() if value is not None}
    with pytest.raises(CheckpointError, match=named):
        checkpoint.load_weights(model, weights, schema, "here")


def test_all_differences_are_listed():
    """Twelve were, "and 28 more"."""
    target = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_weights(target, {"model": {}, "schema": SCHEMA}, SCHEMA, "here")
    assert str(error.value).count("missing") == 40


# ---- progress ----------------------------------------------------------------------------------------------------

def trainee(folder, seed):
    """A tiny training whose every step depends on the optimiser's memory and on two random generators."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    progress = Progress(Config(), ALONE, folder, model, torch.optim.AdamW(model.parameters(), 0.1),
                        HysteresisScaler("cpu", AMP, False))

    def step():
        loss = (model(torch.randn(8, 4)) - torch.from_numpy(np.random.rand(8, 1))).square().mean()
        loss.backward()
        progress.optimizer.step(), progress.optimizer.zero_grad()
        progress.counters["updates"] += 1
    return progress, step


def test_resumed_training_is_identical(tmp_path):
    whole, step = trainee(tmp_path / "a", 1)
    assert whole.resume() is False
    for _ in range(6):
        step()
        if whole.counters["updates"] == 3:
            whole.save()
    second, step = trainee(tmp_path / "a", 99)
    assert second.resume() is True and second.counters["updates"] == 3
    for _ in range(3):
        step()
    assert torch.equal(second.model.weight, whole.model.weight)


def test_what_the_loss_compares_with_continues_too(tmp_path):
    """Phase 3 built its anchor anew from what lay in phase2/, which may have been removed or trained on meanwhile."""
    first, second = (Progress(Config(), ALONE, tmp_path / "a", model, torch.optim.SGD(model.parameters(), 0.1),
                              HysteresisScaler("cpu", AMP, False), anchor)
                     for model, anchor in ((nn.Linear(4, 1), nn.Linear(4, 1)) for _ in range(2)))
    first.save()
    assert second.resume() and torch.equal(second.anchor.weight, first.anchor.weight)


def test_moments_of_another_shape_are_refused(tmp_path):
    """They were taken over, and the first step ended in a traceback."""
    first, step = trainee(tmp_path, 1)
    step(), first.save()
    state = checkpoint.load(tmp_path)
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3, 5)
    checkpoint.save(tmp_path, 2, state)
    with pytest.raises(CheckpointError, match=r"exp_avg \[3, 5\] for parameter \["):
        trainee(tmp_path, 2)[0].resume()


def test_other_number_of_ranks_is_said_and_resumed(tmp_path, capsys):
    first, step = trainee(tmp_path, 1)
    step(), first.save()
    state = checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, 2, {**state, "ranks": state["ranks"] * 2})
    second, _ = trainee(tmp_path, 2)
    assert second.resume() and torch.equal(second.model.weight, first.model.weight)
    out = capsys.readouterr().out
    assert "saved by 2 ranks" in out and "random states start anew" in out


def test_first_weights_come_from_the_nearest_phase_or_are_missed_loudly(tmp_path):
    said, folder = [], tmp_path / "run"
    model = nn.Linear(4, 1)
    first_weights(model, Config(), folder, (2, 1), said.append)
    assert "untrained" in said[-1] and "2 or 1" in said[-1]
    for phase in (1, 2):
        progress, step = trainee(folder / f"phase{phase}", phase)
        step(), progress.save()
        first_weights(model, Config(), folder, (2, 1), said.append)
        assert torch.equal(model.weight, progress.model.weight) and f"phase{phase}" in said[-1]
        assert ("phase 2" in said[-2]) == (phase == 1)  # of a phase 2 that was gone nothing was said
    other = Config()
    other.model.lane_room_m = 7.0  # phase 3 went on with other lane changes than phase 2 had learned, in silence
    first_weights(model, other, folder, (2, 1), said.append)
    assert "lane_room_m=0.0 and goes on with 7.0" in said[-1]


def test_a_phase_with_its_own_checkpoint_does_not_start_untrained(tmp_path):
    """It said so, although it continued a moment later."""
    said = []
    progress, step = trainee(tmp_path / "phase3", 1)
    step(), progress.save()
    first_weights(nn.Linear(4, 1), Config(), tmp_path, (2, 1), said.append)
    assert said == []
