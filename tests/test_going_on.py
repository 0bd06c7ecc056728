"""What a phase remembers when it goes on: with other batches, on other data, after a checkpoint that failed."""
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_sets import config
from test_checkpoint import trainee

import train_ddp
import train_rl
from configs import load_config
from configs.files import write_whole
from data.settings import traffic_hash
from env.sumo import free_port
from runtime import checkpoint
from runtime.checkpoint import SaveError
from runtime.distributed import Team
from runtime.schedule import learning_rate
from runtime.training import first_weights

ROOT = Path(__file__).resolve().parent.parent
ALONE = Team(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def train(copy, tmp_path, monkeypatch):
    """train(*overrides, stop=after so many optimiser steps, loss=gives that on held-out data) -> rates of learning."""
    def run(*overrides, stop=None, loss=lambda: 1.0):
        rates, small = [], ["run.device=cpu", "phase1.loader.num_workers=0", f"run.folder={tmp_path}"]
        monkeypatch.setattr(train_ddp, "set_learning_rate", lambda _, rate: rates.append(rate))
        monkeypatch.setattr(train_ddp, "validate", lambda *_: {"loss_held_out": loss()})
        guard = SimpleNamespace(must_stop=lambda: len(rates) == stop, leave=lambda where: 0, facts=dict)
        train_ddp.phase1(config(copy, *small, *overrides), ALONE, guard)
        return rates
    return run


def test_learning_rate_goes_on_where_it_was_with_another_batch_size(train):
    """Its step was the number of updates, done in smaller batches, of a total counted in the larger ones: a run
    that went on with more ranks trained the rest at the lowest rate."""
    expected = [learning_rate(step, 4 * 5, 0.01, 7) for step in range(4 * 5)]
    settings = ["phase1.epochs=4", "phase1.lr=0.01", "phase1.warmup_steps=7"]
    assert train("run.name=whole", *settings, "phase1.batch_size=4") == expected
    assert len(train(*settings, "phase1.batch_size=2", stop=11 + 4)) == 15  # an epoch and 8 samples
    assert train(*settings, "phase1.batch_size=4", stop=1) == expected[5 + 2:5 + 3]
    assert train(*settings, "phase1.batch_size=4") == expected[5 + 3:]


def test_steps_that_an_overflow_skips_do_not_warm_up(train, monkeypatch):
    """fp16 begins with overflows: after five of them the first step that was taken had six tenths of the peak."""
    skips, step = iter([True] * 5 + [False] * 5), train_ddp.optimiser_step
    monkeypatch.setattr(train_ddp, "optimiser_step", lambda *arguments: (*step(*arguments)[:2], next(skips)))
    rates = train("phase1.epochs=2", "phase1.batch_size=4", "phase1.lr=0.01", "phase1.warmup_steps=4")
    assert rates == [learning_rate(step, 10, 0.01, 4) for step in [0] * 6 + [1, 2, 3, 9]]


def test_an_interrupted_epoch_keeps_its_order(train, monkeypatch):
    """The order follows from data.open_chunks, which may be changed at any time: then some samples came twice, others
    never."""
    orders, order = [], train_ddp.BlockSampler.order
    monkeypatch.setattr(train_ddp.BlockSampler, "order", lambda self: orders.append(order(self)) or orders[-1])
    settings = ["phase1.epochs=2", "phase1.batch_size=4"]
    train(*settings, "data.open_chunks=1", stop=2)
    train(*settings, "data.open_chunks=64")
    first, again, second = (list(rows) for rows in orders)
    assert first == again and sorted(second) == sorted(first)
    train("run.name=other", *settings, "data.open_chunks=64")
    assert orders[-1].tolist() == second and orders[-2].tolist() != first


def test_another_data_set_is_told_and_begins_the_search_for_the_best_epoch_anew(train, tmp_path, capsys):
    """Losses on new data were compared with the best one on the old, so that `best` stayed with the old data's weights;
    and a finished phase said "finished" once more, with data in config.yaml that it had never seen."""
    def best(epochs, loss, *more, **stop):
        steps = len(train("phase1.stage1_epochs=0", f"phase1.epochs={epochs}", *more, loss=lambda: loss, **stop))
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NOTE")]
        return checkpoint.load(tmp_path / "smoke/phase1", "best")["epoch"], steps, notes
    other = "graph.radius_m=60"
    assert best(1, 1.0) == (1, 5, []) and best(2, 2.0) == (1, 5, []) and best(3, 2.0, stop=2) == (1, 2, [])
    epoch, steps, (note,) = best(2, 2.0, other)
    assert (epoch, steps) == (1, 0) and "no epoch is left; raise phase1.epochs" in note
    epoch, steps, (note,) = best(3, 3.0, other)
    assert (epoch, steps) == (3, 5) and "the best epoch is looked for anew" in note
    assert best(4, 4.0, other) == (3, 5, [])
    state = checkpoint.load(tmp_path / "smoke/phase1")
    del state["counters"]["data"]  # as those of earlier releases
    checkpoint.save(tmp_path / "smoke/phase1", 99, state)
    assert best(5, 5.0) == (3, 5, [])


def test_a_finished_phase_leaves_the_configuration_with_which_it_was_trained(train, tmp_path):
    """Started once more with other settings, it trained nothing with them, and config.yaml named them all the same."""
    def rate(*overrides):
        train("phase1.batch_size=4", *overrides)
        return load_config(tmp_path / "smoke/config.yaml").phase1.lr
    assert rate("phase1.epochs=1", "phase1.lr=0.01") == rate("phase1.epochs=1", "phase1.lr=0.5") == 0.01
    assert rate("phase1.epochs=2", "phase1.lr=0.5") == 0.5


@pytest.fixture
def first_save_fails(monkeypatch):
    """The disk is full after the first epoch."""
    save = checkpoint.save

    def first_fails(folder, step, state, *more):
        if state["epoch"] == 1:
            raise SaveError("full")
        save(folder, step, state, *more)
    monkeypatch.setattr(checkpoint, "save", first_fails)


def test_best_epoch_that_could_not_be_saved_does_not_raise_the_bar(train, tmp_path, first_save_fails):
    """No later epoch was better than the one that was lost, so that none became `best`."""
    losses = iter((0.5, 0.7, 0.8))
    train("phase1.stage1_epochs=0", "phase1.epochs=3", loss=lambda: next(losses))
    assert checkpoint.load(tmp_path / "smoke/phase1", "best")["epoch"] == 2


def test_nor_does_phase_2s_best_iteration(tmp_path, monkeypatch, first_save_fails):
    rewards = iter((0.8, 0.7, 0.5))
    monkeypatch.setattr(train_rl, "summarise", lambda *_: {"reward": next(rewards)})
    cfg = load_config("configs/smoke.yaml", [
        f"run.folder={tmp_path}", "run.device=cpu", "rollout.num_workers=0", "rollout.num_envs_per_worker=1",
        "phase2.iterations=3", "phase2.imitate_iterations=0", "phase2.train_batch_size=20", "phase2.epochs=1"])
    train_rl.phase2(cfg, ALONE, SimpleNamespace(must_stop=lambda: False, give_up_worker=lambda pool: False, facts=dict))
    assert checkpoint.load(tmp_path / "smoke/phase2", "best")["epoch"] == 2


def test_kept_rollouts_wait_for_the_checkpoint_that_needs_them_no_more(tmp_path, monkeypatch, first_save_fails):
    """Where the save at the end of the warm start failed, they were removed, and the run that went on from the one
    before learned from fewer."""
    cleared, cfg = [], load_config("configs/smoke.yaml", [
        f"run.folder={tmp_path}", "run.device=cpu", "rollout.num_workers=0", "rollout.num_envs_per_worker=1",
        "phase2.iterations=2", "phase2.imitate_iterations=1", "phase2.imitate_corrections=0", "phase2.imitate_keep=2",
        "phase2.train_batch_size=20", "phase2.epochs=1", "phase2.checkpoint_every=1"])
    monkeypatch.setattr(train_rl.Kept, "clear", lambda self: cleared.append(sorted(self.folder.glob("*.pt"))))
    train_rl.phase2(cfg, ALONE, SimpleNamespace(must_stop=lambda: False, give_up_worker=lambda pool: False, facts=dict))
    assert [len(files) for files in cleared] == [1]  # after the second save only


def test_a_phase_says_so_when_it_began_from_something_else(tmp_path, capsys):
    """Phase 1 was trained on, and phase 2 said that it took its weights, although it continued from its own."""
    (first, step), said = trainee(tmp_path / "phase1", 1), []
    step(), first.save()
    for _ in range(2):
        phase2, _ = trainee(tmp_path / "phase2", 2)
        phase2.resume(first_weights(first.model, first.cfg, tmp_path, (1,), said.append))
        phase2.save()
    assert "NOTE" not in capsys.readouterr().out
    assert said == [f"weights: {tmp_path / 'phase1'} (epoch 0)"]
    begun = first_weights(first.model, first.cfg, tmp_path, (1,), said.append)
    trainee(tmp_path / "phase2", 2)[0].resume("phase 1, epoch 5, 50 updates")
    assert "began from phase 1, epoch 0, 1 updates" in (out := capsys.readouterr().out) and "--from-phase 2" in out
    assert len(said) == 1 and begun.startswith("phase 1, epoch 0, 1 updates, weights ")
    # One trained anew looked like the one before, of as many epochs. Older checkpoints do not name the weights.
    for was, told in ((begun[:-1] + "x", 1), ("phase 1, epoch 0, 1 updates", 0), ("phase 1, epoch 0, 11 updates", 1)):
        phase2, _ = trainee(tmp_path / f"other{len(was)}{told}" / "phase2", 2)
        phase2.resume(was), phase2.save(), capsys.readouterr()
        phase2.resume(begun)
        assert capsys.readouterr().out.count("NOTE") == told


def test_a_finished_phase_says_so_when_its_settings_are_others_now(tmp_path, capsys):
    """`train_ddp.py phase1.lr=0.002` on a finished run said "finished", and report and config.yaml named that rate."""
    first, step = trainee(tmp_path / "phase1", 1)
    step(), first.save()
    other, _ = trainee(tmp_path / "phase1", 1)
    other.cfg.phase1.lr, other.cfg.phase1.amp.dtype = 0.002, "bf16"
    other.resume()
    other.note_changes(1)  # an epoch is left: what it learns from now on, it learns with these
    assert "NOTE" not in capsys.readouterr().out
    other.note_changes(0)
    said = capsys.readouterr().out
    assert "phase1 is finished" in said and "--from-phase 1" in said
    assert "phase1.lr was" in said and "is 0.002" in said and "phase1.amp.dtype was 'fp16', is 'bf16'" in said
    first.resume(), capsys.readouterr()
    first.note_changes(0)
    assert capsys.readouterr().out == ""
    heard = ("reward.efficiency_weight", "shield.thw_s", "phase2.epochs")
    second, step = trainee(tmp_path / "phase2", 2)
    step(), second.save()
    for number, key in enumerate((*heard, "phase2.iterations", "phase3.epochs")):  # the length is no way of training
        other, _ = trainee(tmp_path / "phase2", 2)
        section, name = key.split(".")
        setattr(getattr(other.cfg, section), name, 7)
        other.resume(), capsys.readouterr()
        other.note_changes(0)
        assert (f"{key} was" in capsys.readouterr().out) == (number < len(heard))


def test_a_phase_says_so_when_the_traffic_is_another_one(tmp_path, capsys):
    """Phases 2 and 3 were finished, or went on, on a network that they had never seen, without a word."""
    text = '<configuration><input><route-files value="r.xml"/></input></configuration>'
    (tmp_path / "my.sumocfg").write_text(text), (tmp_path / "r.xml").write_text("<routes/>")
    cfg = load_config("configs/smoke.yaml", [f"env.scenario={tmp_path / 'my.sumocfg'}"])
    seen = [traffic_hash(cfg)]
    cfg.env.scenario = os.path.relpath(cfg.env.scenario)  # as it is called is no matter either
    cfg.env.max_vehicles, cfg.corridor.main_flow = 99, 1.0  # no matter there
    seen.append(traffic_hash(cfg))
    for flows in ("<routes> </routes>", "<routes/>"):
        (tmp_path / "r.xml").write_text(flows)
        seen.append(traffic_hash(cfg))
    cfg.env.suite = ["same", "driver.tau=2"]
    assert seen[0] == seen[1] == seen[3] != seen[2] and traffic_hash(cfg) != seen[0]
    for traffic, said in ((seen[0], False), (seen[0], False), (seen[2], True), (seen[2], True)):
        phase, _ = trainee(tmp_path / "phase3", 1)
        phase.resume(None, traffic)
        assert ("--from-phase 3 begins it anew" in capsys.readouterr().out) == said
        phase.save()


def test_best_epoch_is_named_after_a_crash_before_its_name_was_written(tmp_path, monkeypatch):
    """The bar was that epoch's, the name one before it: where no later epoch was better, phase 2 began with that one's
    weights, and the best ones were removed as old."""
    def killed(path, text):
        if path.name == "best":
            raise KeyboardInterrupt
        write_whole(path, text)
    checkpoint.save(tmp_path, 1, {}, best=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, "write_whole", killed)
        checkpoint.save(tmp_path, 2, {"epoch": 2}, best=True)
    assert checkpoint.load(tmp_path, "best") == {"epoch": 2}
    for step in range(3, 9):
        checkpoint.save(tmp_path, step, {})
    assert checkpoint.load(tmp_path, "best") == {"epoch": 2}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_know_that_a_checkpoint_failed(tmp_path, monkeypatch, capsys, rank):
    """Only the first one did: the others would have kept another bar for the best epoch. Then they said only that "the
    first rank could not save", and where they spoke first nobody heard why."""
    def full(*_):
        raise SaveError("full")
    monkeypatch.setattr(checkpoint, "save", full)
    progress, _ = trainee(tmp_path, 1)
    progress.team = SimpleNamespace(is_main=rank == 0, device=ALONE.device, gather=lambda one: [one or "full", one])
    for failures in (1, 2):
        progress.save(may_fail=True)
        assert progress.failures == failures and ("full" in capsys.readouterr().err) == (rank == 0)
    with pytest.raises(SaveError, match="full"):
        progress.save(may_fail=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_ranks_that_never_come_can_be_stopped(number):
    """The wait in C++ heard no signal until ddp.timeout_s was over."""
    code = ("from configs import load_config; from runtime.distributed import StopRequest, start_team; "
            "cfg, stop = load_config('configs/smoke.yaml'), StopRequest(); start_team(cfg.run, cfg.ddp)")
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL,
                          env={**os.environ, **ranks}) as waiting:
        while waiting.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(ranks["MASTER_PORT"]))):
                break
        waiting.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            waiting.wait(20)
        waiting.kill()
    assert waiting.returncode == -number


def test_who_was_asked_to_stop_does_not_wait_for_ranks_that_have_ended():
    """A signal between the start of a rank and its meeting with the others ended those that had not come so far, and
    the first one waited for them until ddp.timeout_s was over: Ctrl-C left a coordinator that did nothing."""
    code = ("import signal; from configs import load_config; from runtime.distributed import StopRequest, start_team; "
            "cfg, stop = load_config('configs/smoke.yaml'), StopRequest(); signal.raise_signal(signal.SIGTERM); "
            "start_team(cfg.run, cfg.ddp, 0, stop)")
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **ranks}, timeout=60)
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("counters", [
    {"updates": "many"}, {"multiplier": None, "updates": 1}, {"efforts": 7, "updates": 1},
    {"multiplier": float("nan"), "updates": 1}])
def test_counters_of_another_kind_are_refused(tmp_path, counters):
    """Those that only one phase has were a traceback in the middle of it."""
    first, step = trainee(tmp_path, 1)
    step(), first.save()
    checkpoint.save(tmp_path, 2, {**checkpoint.load(tmp_path), "counters": {"epoch": 1, **counters}})
    second, _ = trainee(tmp_path, 2)
    second.counters.update(multiplier=0.0, efforts=[])
    with pytest.raises(checkpoint.CheckpointError, match="counters.*epoch"):
        second.resume()


@pytest.mark.parametrize("change", [lambda one: one.to_sparse(), lambda one: one.to("meta")])
def test_weights_without_their_numbers_are_refused(change):
    weights = {name: change(value) for name, value in torch.nn.Linear(4, 1).state_dict().items()}
    with pytest.raises(checkpoint.CheckpointError, match="weight: shape of"):
        checkpoint.load_weights(torch.nn.Linear(4, 1), {"schema": {}, "model": weights}, {}, "x")


def test_what_does_not_improve_is_learned_more_slowly(train):
    words = ["phase1.epochs=4", "phase1.stage1_epochs=0", "phase1.warmup_steps=0", "phase1.plateau_factor=0.5"]
    plain = train(*words, "run.name=plain", "phase1.plateau_epochs=0")
    slower, each = train(*words, "run.name=slower", "phase1.plateau_epochs=1"), len(plain) // 4
    factors = [b / a for a, b in zip(plain, slower)]
    assert factors == pytest.approx([1.0] * 2 * each + [0.5] * each + [0.25] * each)


def test_the_best_is_one_of_stage_2_and_holds_the_data_sets_statistics(train, tmp_path):
    losses = iter([0.1, 0.9, 0.8])
    train("phase1.epochs=3", "phase1.stage1_epochs=1", loss=lambda: next(losses))
    state = checkpoint.load(next(tmp_path.glob("*/phase1")), "best")
    assert state["epoch"] == 3 and state["counters"]["best"] == 0.8
    path, = [p for p in Path(tmp_path).rglob("statistics.json")]
    mean, std = (json.loads(path.read_text())["nodes"][name][2] for name in ("mean", "std"))
    assert [float(state["weights"]["model"][f"risk_gnn.normalize.{name}"][2]) for name in ("mean", "std")] == (
        pytest.approx([mean, std]))
