"""runtime/ in one process: loss scaling, checkpoints, metrics, memory, the learning rate, and the rollout loop.

The rollout loop runs with a pool that counts and a driver that checks what it is shown: their numbers say of which
environment, episode and step they are, so that anything lost, doubled, late or swapped shows as a wrong number.
"""
import copy
import json
import math
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from configs import Config
from runtime import checkpoint
from runtime.checkpoint import CheckpointError
from runtime.distributed import StopRequest, Team
from runtime.memory import PeakMemory, component, process_tree, pss_mb, tree_memory
from runtime.metrics import Metrics, read_metrics
from runtime.precision import HysteresisScaler, Precision
from runtime.rollout import Collector, episode_seed
from runtime.training import Progress, first_weights, learning_rate, rescale_values

CPU = torch.device("cpu")
ALONE = Team(0, 1, 0, 1, CPU)
AMP = Config().phase1.amp


# ---- loss scaling ------------------------------------------------------------------------------------------------

class Scaled:
    """One parameter trained with loss = parameter, so that its gradient is 1; an overflow is put in by hand."""

    def __init__(self, agree=bool, **amp):
        self.p = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.p], 1.0)
        amp = replace(AMP, **{"init_scale": 64.0, "growth_interval": 3, "hysteresis": 2, **amp})
        self.scaler = HysteresisScaler("cpu", amp, True, agree)

    def step(self, overflow=False):
        """Returns (whether the scaler says skipped, the scale afterwards, steps the parameter has moved in all)."""
        self.scaler.scale(self.p.sum()).backward()
        if overflow:
            self.p.grad.fill_(math.inf)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        skipped = self.scaler.update()
        self.optimizer.zero_grad()
        return skipped, self.scaler.get_scale(), -self.p.item()

    def run(self, sequence):
        """"o" is an overflow, "." a good step. Returns the scales after each."""
        return [self.step(c == "o")[1] for c in sequence]


def test_one_overflow_skips_the_step_and_keeps_the_scale():
    one = Scaled()
    assert one.step() == (False, 64.0, 1.0)
    assert one.step(overflow=True) == (True, 64.0, 1.0)
    assert one.step() == (False, 64.0, 2.0)


def test_scale_by_hand():
    """Two overflows in a row halve it, a good step in between forgives, three good steps double it."""
    assert Scaled().run("o.o.oo") == [64, 64, 64, 64, 64, 32]
    assert Scaled().run("oooo") == [64, 32, 32, 16]
    assert Scaled().run("......") == [64, 64, 128, 128, 128, 256]
    assert Scaled().run("..o...") == [64, 64, 64, 64, 64, 128]  # an overflow starts the count anew
    assert Scaled(hysteresis=1).run("oo.") == [32, 16, 16]
    assert Scaled(growth_factor=4.0, backoff_factor=0.25).run("...oo") == [64, 64, 256, 256, 64]


def test_scale_keeps_its_limits_and_static_never_moves():
    assert Scaled(min_scale=20.0).run("oooooo") == [64, 32, 32, 20, 20, 20]
    assert Scaled(max_scale=100.0).run("......") == [64, 64, 100, 100, 100, 100]
    static = Scaled(strategy="static")
    assert static.run("oooo......") == [64] * 10
    assert static.step(overflow=True) == (True, 64.0, 6.0) and static.scaler.overflows == 5


def test_overflow_of_another_rank_counts_here():
    """`agree` decides: without an overflow of its own, this rank's scale moves with the others'."""
    flags, asked = [True, True, False], []
    one = Scaled(agree=lambda flag: asked.append(flag) or flags[len(asked) - 1])
    assert [one.step() for _ in flags] == [(True, 64.0, 1.0), (True, 32.0, 2.0), (False, 32.0, 3.0)]
    assert asked == [False] * 3


def test_scaler_state_continues_where_it_stopped():
    whole, first, second = Scaled(), Scaled(), Scaled()
    expected = whole.run("..o.o" + "o..." + "o")
    begin = first.run("..o.o")
    state = first.scaler.state_dict()
    saved = copy.deepcopy(state)
    second.scaler.load_state_dict(state)
    assert begin + second.run("o..." + "o") == expected and expected[5] == 32.0
    assert second.scaler.overflows == 4
    assert state == saved, "loading changed the caller's dictionary"


def test_scaler_accepts_the_state_of_a_run_without_one():
    """A checkpoint from a CPU, where scaling is off, holds no scale: continuing it on a GPU once ended in a
    RuntimeError about an empty state. The scale starts at its first value."""
    off = HysteresisScaler("cpu", AMP, False)
    one = Scaled()
    one.scaler.load_state_dict(off.state_dict())
    assert one.step() == (False, 64.0, 1.0)
    off.load_state_dict(one.scaler.state_dict())  # and the other way round
    assert off.update() is False and off.get_scale() == 1.0


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "off"])
def test_precision_on_a_cpu_is_float32(dtype):
    precision = Precision(replace(AMP, dtype=dtype), CPU)
    assert "float32" in precision.reason and not precision.scaler.is_enabled()
    with precision.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
    loss = torch.ones((), requires_grad=True) * 3
    assert precision.scaler.scale(loss) is loss


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


def test_pruning_keeps_the_last_and_the_best(tmp_path):
    for step in range(1, 8):
        checkpoint.save(tmp_path, step, state_of(step), keep_last=2, best=step == 2)
    assert names(tmp_path) == ["best", "latest", "step_000002", "step_000006", "step_000007"]
    assert step_in(tmp_path, "best") == 2 and step_in(tmp_path) == 7


def test_pruning_keeps_the_newest_beyond_a_million_steps(tmp_path):
    """Names were sorted as texts: "step_1000000" came before "step_999999", so that the newest was deleted at once."""
    for step in (999998, 999999, 1000000, 1000001):
        checkpoint.save(tmp_path, step, state_of(step), keep_last=2)
        assert step_in(tmp_path) == step


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


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 704 vs 598")])
def test_full_disk_leaves_the_old_ones_intact(saved, monkeypatch, error):
    """torch reports a full disk as RuntimeError; then the half-written file once stayed on the full disk."""
    def full(state, file):
        file.write(b"half")
        raise error
    before = names(saved)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(type(error)):
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


def test_only_the_first_differences_are_listed():
    target = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load_weights(target, {"model": {}, "schema": SCHEMA}, SCHEMA, "here")
    assert str(error.value).count("missing") == 12 and "28 more" in str(error.value)


# ---- progress ----------------------------------------------------------------------------------------------------

def trainee(folder, seed):
    """A tiny training whose every step depends on the optimiser's memory and on two random generators."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    progress = Progress(Config(), ALONE, folder, model, torch.optim.AdamW(model.parameters(), 0.1),
                        HysteresisScaler("cpu", AMP, False), torch.Generator().manual_seed(seed))

    def step():
        loss = (model(torch.randn(8, 4)) - torch.rand(8, 1, generator=progress.generator)).square().mean()
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


# ---- metrics -----------------------------------------------------------------------------------------------------

def test_metrics_refuse_unknown_names(tmp_path):
    for active in (True, False):
        with pytest.raises(KeyError, match="los_held_out"):
            Metrics(tmp_path, 1, active).record(1, 2, los_held_out=1.0)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_metrics_are_plain_json_and_only_the_first_rank_writes(tmp_path, capsys):
    """NaN and infinity are not JSON: they become null."""
    Metrics(tmp_path, 1, active=False).record(1, 2, loss=1.0)
    assert not (tmp_path / "metrics.jsonl").exists() and capsys.readouterr().out == ""
    Metrics(tmp_path, 1).record(1, 2, loss=math.nan, loss_held_out=math.inf, updates=3)
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["phase"], row["epoch"], row["loss"], row["loss_held_out"], row["updates"]) == (1, 1, None, None, 3)
    assert "1/2" in capsys.readouterr().out


def test_metrics_after_the_checkpoint_are_dropped(tmp_path):
    for phase in (1, 2):
        for epoch in (1, 2, 3):
            Metrics(tmp_path, phase).record(epoch, 3, loss=float(epoch))
    Metrics(tmp_path, 2, active=False).drop_after(0)
    Metrics(tmp_path, 2).drop_after(1)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["phase"], r["epoch"]) for r in rows] == [(1, 1), (1, 2), (1, 3), (2, 1)]


def test_half_written_line_is_ignored(tmp_path):
    metrics = Metrics(tmp_path, 1)
    metrics.record(1, 3, loss=1.0)
    with open(metrics.path, "a") as file:
        file.write('{"phase": 1, "epo')
    assert [r["epoch"] for r in read_metrics(metrics.path)] == [1]


def test_half_written_line_does_not_swallow_the_next_record(tmp_path):
    """A resumed run once appended to the half line of the run that was killed: both were unreadable."""
    metrics = Metrics(tmp_path, 1)
    metrics.record(1, 3, loss=1.0)
    with open(metrics.path, "a") as file:
        file.write('{"phase": 1, "epo')
    resumed = Metrics(tmp_path, 1)
    resumed.drop_after(1)
    resumed.record(2, 3, loss=2.0)
    assert [r["epoch"] for r in read_metrics(metrics.path)] == [1, 2]


# ---- memory ------------------------------------------------------------------------------------------------------

HOG = """import subprocess, sys, time
sizes = sys.argv[1:]
child = subprocess.Popen([sys.executable, *sys.argv[:1], *sizes[1:]]) if len(sizes) > 1 else None
block = b"x" * (int(sizes[0]) << 20)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hogs(tmp_path):
    """A process of this one with 30 MB and a child of its own with 50 MB, both running hog.py."""
    script = tmp_path / "hog.py"
    script.write_text(HOG)
    command = [sys.executable, str(script), "30", "50"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        for _ in range(2):
            assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_memory_counts_children_and_grandchildren(hogs):
    tree = process_tree(hogs.pid)
    assert len(tree) == 2 and set(tree) < set(process_tree())
    table = tree_memory()
    assert 80 < table["hog"] < 160
    assert tree_memory(hogs.pid).keys() == {"hog"}
    assert sum(table.values()) > table["hog"] + 20  # this process itself


def test_peak_memory_names_the_components(hogs):
    sampler = PeakMemory(every_s=0.01)
    sampler.start()
    for _ in range(1000):
        if sampler.at_peak:
            break
        time.sleep(0.01)
    text = sampler.stop()
    sampler.join(10)
    assert sampler.peak > 80 and sampler.at_peak["hog"] > 80
    assert f"{sampler.peak:.0f} MB" in text and "hog" in text and not sampler.is_alive()


@pytest.mark.parametrize("command, name", [
    (["/opt/wheel/bin/sumo", "60"], "sumo"), (["python", "-m", "env.workers", "3"], "rollout worker"),
    (["python", "-u", "/x/train_rl.py", "--config", "a.yaml"], "train_rl"),
    (["python", "-m", "data.collect"], "data.collect")])
def test_components_are_told_by_the_command_line(command, name):
    process = subprocess.Popen([command[0], "-c", "echo; read line", *command], executable="/bin/sh",
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert component(process.pid) == name
    finally:
        process.communicate(b"\n")
    assert component(process.pid) == "gone" and pss_mb(process.pid) == 0.0


# ---- learning rate, seeds, values, signals -----------------------------------------------------------------------

def test_learning_rate_warms_up_and_decays():
    rate = [learning_rate(step, 110, 2.0, 10) for step in range(130)]
    assert rate[0] == pytest.approx(0.2) and rate[9] == pytest.approx(2.0) == pytest.approx(rate[10])
    assert rate[60] == pytest.approx(2.0 * (0.05 + 0.95 / 2))  # half-way of the cosine
    assert rate[110:] == pytest.approx([0.1] * 20)
    assert rate[:10] == sorted(rate[:10]) and rate[10:] == sorted(rate[10:], reverse=True)
    assert learning_rate(0, 100, 2.0, 0) == 2.0 and learning_rate(5, 5, 2.0, 10) == pytest.approx(1.2)


def test_episode_seeds_differ_and_stay():
    """No two episodes of a run share their traffic, nor do neighbouring runs; SUMO takes 31 bits. The fixed number
    guards resumed runs: another formula would give them other traffic."""
    seeds = [episode_seed(run, phase, iteration, env, number) for run in (1, 2) for phase in (2, 3)
             for iteration in range(40) for env in range(24) for number in range(6)]
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) and max(seeds) < 2 ** 31
    assert episode_seed(1, 2, 3, 4, 5) == 901400446


class Net(nn.Module):
    mean, std = torch.tensor(0.0), torch.tensor(1.0)

    def rescale(self, mean, std):
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)


def test_values_adopt_the_first_moments_and_half_of_later_ones():
    controller = SimpleNamespace(value=Net(), cost_value=Net())
    batch = {"return": torch.tensor([8.0, 12.0]), "cost_return": torch.tensor([1.0, 5.0])}
    rescale_values(controller, ALONE, batch)
    assert (float(controller.value.mean), float(controller.value.std)) == (10.0, 2.0)
    assert (float(controller.cost_value.mean), float(controller.cost_value.std)) == (3.0, 2.0)
    rescale_values(controller, ALONE, {name: 2 * x for name, x in batch.items()})
    assert (float(controller.value.mean), float(controller.value.std)) == (15.0, 3.0)


def test_first_signal_asks_and_second_leaves_at_once(monkeypatch):
    before, codes = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], []
    monkeypatch.setattr(os, "_exit", codes.append)
    try:
        stop = StopRequest()
        assert not stop.asked
        signal.raise_signal(signal.SIGINT)
        assert stop.asked and codes == []
        signal.raise_signal(signal.SIGTERM)
        assert codes == [128 + signal.SIGTERM]
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(number, handler)


# ---- rollout -----------------------------------------------------------------------------------------------------

MAX_SLOTS, NOBODY = 20, 20


def code(env, episode, step):
    """One number, exact in float16, for what is seen in `step` of `episode` of `env`."""
    return env * 400 + episode * 20 + step


def length(env, episode):
    return 3 + (2 * env + episode) % 4


def terminates(env, episode):
    return (env + episode) % 2 == 0


class CountingPool:
    """Four environments in two groups. `late` shows a step's results when they are fetched, otherwise at once."""

    num_envs, groups = 4, [[0, 2], [1, 3]]

    def __init__(self, late):
        fields = {"seen": np.float32, "icvs": np.int64}
        rest = {"slot": np.int64, "accel": np.float32, "lane": np.int8, "brake": np.float32}
        self.arrays = {name: np.zeros(4, kind) for name, kind in fields.items()}
        self.arrays.update({name: np.zeros((4, 2), kind) for name, kind in rest.items()})
        self.arrays.update({name: np.full(4, np.nan, np.float32) for name in ("reward", "cost")})
        self.arrays.update({name: np.zeros(4, bool) for name in ("terminated", "truncated")})
        self.final = {name: np.zeros(4, kind) for name, kind in fields.items()}
        self.late, self.where, self.pending, self.seeds = late, [None] * 4, {}, []

    def reset(self, seeds):
        for env, seed in enumerate(seeds):
            self.where[env] = (0, 0)
            self.seeds.append((env, 0, seed))
            self._show(self.arrays, env)

    def _show(self, arrays, env):
        arrays["seen"][env] = code(env, *self.where[env])
        arrays["icvs"][env] = 1 + sum(self.where[env]) % 3

    def send(self, group, next_seeds):
        assert not set(group) & set(self.pending), "a step before the results of the last one were fetched"
        for env, seed in zip(group, next_seeds):
            commands = {name: self.arrays[name][env].copy() for name in ("slot", "accel", "lane", "brake")}
            assert (commands["accel"] == code(env, *self.where[env])).all(), "a command for another observation"
            self.pending[env] = seed
        if not self.late:
            self.ended = {**getattr(self, "ended", {}), **{env: self._step(env, self.pending[env]) for env in group}}

    def receive(self, group):
        steps = {env: self._step(env, self.pending[env]) if self.late else self.ended.pop(env) for env in group}
        for env in group:
            del self.pending[env]
        return [(env, summary) for env, summary in steps.items() if summary]

    def _step(self, env, seed):
        episode, step = self.where[env]
        self.where[env] = (episode, step + 1)
        self.arrays["reward"][env], self.arrays["cost"][env] = code(env, episode, step) + 0.5, env + 0.25
        over = step + 1 == length(env, episode)
        self.arrays["terminated"][env] = over and terminates(env, episode)
        self.arrays["truncated"][env] = over and not terminates(env, episode)
        if over:
            self._show(self.final, env)
            self.where[env] = (episode + 1, 0)
            self.seeds.append((env, episode + 1, seed))
        self._show(self.arrays, env)
        return {"env": env, "episode": episode} if over else None


class CheckingDriver:
    """Its values repeat what it saw; its memory counts, and must agree with the step that it is shown."""

    max_vehicles = MAX_SLOTS

    def __init__(self):
        self.model = SimpleNamespace(controller=SimpleNamespace(values=lambda scene: (scene.float(), scene + 0.125)))
        self.forget()

    def forget(self, env=None):
        if env is None:
            self.memory = [0] * 4
        else:
            self.memory[env] = 0

    def perceive(self, observation, envs, remember=True):
        seen = torch.from_numpy(observation["seen"])
        for env, number in zip(envs, seen.tolist()):
            assert number // 400 == env, "an observation of another environment"
            assert number % 20 == self.memory[env], "an observation lost, doubled or of another episode"
        before = torch.tensor([self.memory[env] for env in envs])
        if remember:
            for env in envs:
                self.memory[env] += 1
        width = int(observation["icvs"].max())
        rows = seen[:, None].repeat(1, width)
        names = ("nodes", "surround", "mask", "icv", "fresh", "moved", "conflict")
        valid = torch.arange(width) < torch.from_numpy(observation["icvs"])[:, None]
        return {"scene": seen.long(), "valid": valid, "candidates": rows[..., None], "embedding": rows[..., None],
                "before": before[:, None, None, None].float(),
                "observation": {**dict.fromkeys(names, rows), "globals": seen}}

    def decide(self, seen, deterministic, generator):
        assert deterministic is False and generator is None
        value, two = seen["scene"].float(), seen["scene"][:, None].repeat(1, 2)
        choice = {**dict.fromkeys(("picks", "u", "lane", "release", "log_prob"), two), "valid": two > 0, "value": value,
                  "cost_value": value + 0.125}
        slot = np.array([[NOBODY, 3]] * len(value))
        commands = {"slot": slot, "accel": two.numpy(), "lane": two.numpy() % 3, "brake": 0 * slot,
                    "reason": np.array([[5, 1]] * len(value))}
        return choice, commands


def history(steps):
    """[T][E] of (code seen, reward, code of the state that followed, terminated, ended), from the rules alone."""
    rows = [[None] * 4 for _ in range(steps)]
    for env in range(4):
        episode = step = 0
        for t in range(steps):
            over = step + 1 == length(env, episode)
            rows[t][env] = (code(env, episode, step), code(env, episode, step) + 0.5, code(env, episode, step + 1),
                            over and terminates(env, episode), over)
            episode, step = (episode + 1, 0) if over else (episode, step + 1)
    return rows


@pytest.mark.parametrize("sequences", [0, 5])
@pytest.mark.parametrize("late", [True, False])
def test_collector_neither_loses_nor_doubles_nor_swaps_a_step(late, sequences):
    """Three fragments in a row over episodes of 3 to 6 steps, by both kinds of ends, in two alternating groups."""
    pool, driver = CountingPool(late), CheckingDriver()
    collector = Collector(pool, driver, run_seed=7, phase=2, first_env=100, keep_sequences=sequences)
    collector.begin(3)
    expected, episodes = history(30), []
    for fragment in range(3):
        batch, facts = collector.collect(10)
        rows = expected[10 * fragment:10 * fragment + 10]
        columns = [torch.tensor([[row[i] for row in step] for step in rows]) for i in range(5)]
        for name, column in zip(("value", "reward", "next_value", "terminated", "ended"), columns):
            assert torch.equal(batch[name], column.to(batch[name].dtype)), name
        assert torch.equal(batch["cost_value"], batch["value"] + 0.125)
        assert torch.equal(batch["next_cost_value"], batch["next_value"] + 0.125)
        assert torch.equal(batch["cost"], (torch.arange(4) + 0.25).expand(10, 4))
        for name in ("picks", "u", "lane", "release", "log_prob"):
            assert torch.equal(batch[name], columns[0][..., None].expand(10, 4, 2)), name
        assert facts["steps"] == 40 and facts["commands"] == 40 and facts["clips"] == 80 and facts["emergencies"] == 40
        episodes += [(e["env"], e["episode"]) for e in facts["episodes"]]
        check_features(batch, columns[0], sequences)
    ended = [(seen // 400, seen % 400 // 20) for step in expected for seen, *_, over in step if over]
    assert sorted(episodes) == sorted(ended) and len(set(ended)) == len(ended) > 20
    starts = [(env, number, episode_seed(7, 2, 3, 100 + env, number)) for env, number, _ in pool.seeds]
    assert pool.seeds == starts and {(e, n) for e, n, _ in pool.seeds} == {(e, 0) for e in range(4)} | {
        (e, n + 1) for e, n in ended}


def check_features(batch, seen, sequences):
    """What was observed, padded to the widest step; and, for sequences, the memory before each of them."""
    stored = ("embedding", "nodes", "moved") if sequences else ("candidates", "valid", "scene")
    assert set(stored) <= set(batch) and ("before" in batch) == bool(sequences)
    first = batch[stored[0]]
    assert first.shape[:3] == (10, 4, 3) and first.dtype == torch.float16  # widths 1 to 3 occur
    assert torch.equal(first[:, :, 0, 0].long(), seen)
    padded = first[..., 0] != first[:, :, :1, 0]
    assert (first[..., 0][padded] == 0).all() and padded.any()
    if sequences:
        assert torch.equal(batch["before"].flatten(1).long(), seen[::5] % 20)
    else:
        assert torch.equal(batch["scene"], seen)
        assert torch.equal(batch["valid"].sum(-1), 1 + (seen % 400 // 20 + seen % 20) % 3)


def test_collector_begins_anew_at_a_boundary():
    """`begin` starts fresh episodes with an empty memory, and with the seeds of the new iteration."""
    pool, driver = CountingPool(late=True), CheckingDriver()
    collector = Collector(pool, driver, run_seed=7, phase=3)
    for iteration in (0, 1):
        collector.begin(iteration)
        batch, _ = collector.collect(7)
        assert torch.equal(batch["value"][0], torch.tensor([code(env, 0, 0) for env in range(4)]).float())
    seeds = {seed for _, _, seed in pool.seeds}
    assert len(seeds) == len(pool.seeds) and episode_seed(7, 3, 1, 2, 1) in seeds
