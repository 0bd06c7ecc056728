"""runtime/ in one process: loss scaling, metrics, memory, the learning rate, seeds, values, signals."""
import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from configs import Config, ConfigError
from data.layout import Shape
from models.presets import PRESETS
from models.risk_gnn import RiskGNN
from runtime import batch_size
from runtime.batch_size import first_batch, next_batch, search
from runtime.distributed import StopRequest, Team
from runtime.memory import PeakMemory, component, process_tree, pss_mb, tree_memory
from runtime.metrics import Metrics, read_metrics
from runtime.precision import HysteresisScaler, Precision, compile_gnn, set_numerics
from runtime.resources import claim
from runtime.rollout import episode_seed
from runtime.schedule import learning_rate, reduce_on_plateau
from runtime.training import rescale_values

ROOT = Path(__file__).resolve().parent.parent
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
    """`agree` decides: without an overflow of its own, this rank skips the step as the others do, and its scale moves
    with theirs. It once took the step that they skipped."""
    flags, asked = [True, True, False], []
    one = Scaled(agree=lambda flag: asked.append(flag) or flags[len(asked) - 1])
    assert [one.step() for _ in flags] == [(True, 64.0, 0.0), (True, 32.0, 0.0), (False, 32.0, 1.0)]
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
    halved, third = Scaled(), Scaled()
    halved.run("oo")
    third.scaler.load_state_dict(halved.scaler.state_dict())
    assert third.scaler.get_scale() == 32.0 and third.run("oo") == [32.0, 16.0]


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
    assert sampler.at_peak.total() > 80 and sampler.at_peak["hog"] > 80
    assert f"{sampler.at_peak.total():.0f} MB" in text and "hog" in text and not sampler.is_alive()


@pytest.mark.parametrize("command, name", [
    (["/opt/wheel/bin/sumo", "60"], "sumo"), (["python", "-m", "env.worker", "3"], "rollout worker"),
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
    stop, codes = StopRequest(), []
    monkeypatch.setattr(os, "_exit", codes.append)
    assert not stop.asked
    for number in (signal.SIGINT, signal.SIGTERM):  # one request that came twice, and nothing was saved
        signal.raise_signal(number)
    assert stop.asked and codes == []
    stop.since -= 1.0
    signal.raise_signal(signal.SIGTERM)
    assert codes == [128 + signal.SIGTERM]


def test_a_folder_belongs_to_one_process_at_a_time(tmp_path):
    """Two runs with the same name wrote into each other's checkpoints."""
    lock = claim(tmp_path / "run")
    code = f"from runtime.resources import claim; claim({str(tmp_path / 'run')!r})"
    second = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert second.returncode and "another process is working there" in second.stderr
    lock.close()
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---- switches, plateau, batch size, compilation --------------------------------------------------------------------

def test_numerical_switches_reach_pytorch(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    read = lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32,  # noqa: E731
                    torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(),
                    torch.is_anomaly_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
    try:
        set_numerics(Config().run)
        assert read() == (True, False, "highest", False, False, None)
        set_numerics(replace(Config().run, deterministic=True, matmul_precision="high", detect_anomaly=True))
        assert read() == (False, True, "high", True, True, ":4096:8")
    finally:
        set_numerics(Config().run)


def test_learning_rate_falls_on_a_plateau():
    """Two epochs without a better loss halve it; a better loss and a new stage, whose loss is another, start anew."""
    p, c = replace(Config().phase1, plateau_epochs=2), {"plateau_stage": 0, "plateau_best": math.inf, "lr_factor": 1.0}
    factors = []
    for stage, loss in [(1, 5), (1, 5), (1, 4), (1, 4.5), (1, 4.5), (1, 4.1), (1, 4), (2, 9), (2, 9), (2, 8), (2, 8)]:
        reduce_on_plateau(c, stage, loss, p)
        factors.append(c["lr_factor"])
    assert factors == [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]
    for _ in range(9):
        reduce_on_plateau(c, 2, 9.0, replace(p, plateau_epochs=0))
    assert c["lr_factor"] == 0.25
    reduce_on_plateau(c, 2, 9.0, p)  # switched on by who continues: it had waited for longer, and never fell any more
    assert c["lr_factor"] == 0.125


def test_batch_size_moves_by_the_memory_in_use():
    """The table of the requirements: under 80 % + 4 to 8, to 90 % keep, to 95 % - 4 to 8, above - 8 to 12, out of
    memory - 12 to 16; the larger step for larger batches."""
    for batch, share, expected in [
            (16, 0.5, 20), (32, 0.79, 40), (16, 0.8, 16), (64, 0.9, 64), (16, 0.91, 12), (64, 0.95, 56), (16, 0.96, 8),
            (64, 0.99, 52), (16, None, 4), (64, None, 48), (4, None, 1), (1, 0.99, 1)]:
        assert next_batch(batch, share) == expected, (batch, share)
    assert [first_batch(n) for n in (5, 8, 9, 16, 17, 24, 25, 600)] == [128, 128, 64, 64, 32, 32, 16, 16]


@pytest.mark.parametrize("capacity, start, most, expected", [
    (100, 16, 1000, 80), (100, 128, 1000, 84), (100, 32, 60, 60), (10, 32, 1000, 8), (1000, 16, 24, 24)])
def test_search_ends_at_a_batch_that_fits(capacity, start, most, expected):
    tried = []

    def measure(batch):
        tried.append(batch)
        return None if batch > capacity else batch / capacity
    batch, share = search(measure, start, most)
    assert batch == expected and share == batch / capacity <= 0.9
    assert len(set(tried)) == len(tried) and max(tried) <= most


def test_search_says_when_nothing_fits():
    with pytest.raises(ConfigError, match="micro-batch of 1"):
        search(lambda batch: None, 32, 100)
    assert search(lambda batch: 0.95 * batch, 4, 100) == (1, 0.95)  # tight, but "not even 1 fits" was wrong


@pytest.mark.parametrize("fails_at, expected", [(math.inf, 40), (40, 32)])
def test_the_rank_with_the_fullest_memory_decides_the_batch_size(fails_at, expected, monkeypatch):
    cfg, seen = Config(), []
    monkeypatch.setattr(batch_size, "memory_share", lambda step, batch, device, budget: seen.append(
        batch["edges"].shape[3]) or len(batch["mask"]) / 100)
    said, other = [], lambda own: None if 100 * own >= fails_at else 2 * own
    team = SimpleNamespace(world=2, local_world=2, device=CPU, say=said.append, gather=lambda own: [own, other(own)])
    batch_size.find_batch_size(cfg, team, None, 8.0)
    assert set(seen) == {Shape.of(cfg).k}  # an eighth fewer neighbours were tried than are trained on
    assert said[-1].startswith(f"phase1.batch_size={expected} uses {2 * expected}% "), said


def test_compilation_is_tried_first_and_gives_the_same(capsys):
    """A compiler that does not work ends in one message; the model computes as before either way."""
    torch.manual_seed(0)
    gnn, said, compiled = RiskGNN(PRESETS["small"]), [], []
    g = torch.Generator().manual_seed(0)
    inputs = (torch.rand(2, 6, 9, generator=g), torch.rand(2, 6, 14, generator=g), torch.rand(2, 6, 3, 4, generator=g),
              torch.randint(-1, 6, (2, 6, 3), generator=g), torch.ones(2, 6, dtype=torch.bool))
    expected = gnn(*inputs)

    def broken(graph, example):
        raise RuntimeError("no compiler\nhere")
    compile_gnn(gnn, False, said.append)
    compile_gnn(gnn, True, said.append, backend=broken)
    assert len(said) == 1 and "model.compile" in said[0] and "no compiler" in said[0] and "\n" not in said[0]
    assert torch.equal(gnn(*inputs), expected)
    compile_gnn(gnn, True, said.append, backend=lambda graph, example: compiled.append(1) or graph.forward)
    torch.testing.assert_close(gnn(*inputs), expected)
    assert len(said) == 2 and len(compiled) >= 2 and all(p.grad is None for p in gnn.parameters())
