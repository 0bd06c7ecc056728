"""Damaged inputs and full disks, as benchmarks.fuzz and benchmarks.drills found them: one message, nothing lost."""
import builtins
import errno
import importlib.metadata
import json
import os
import shutil
import socket
import sys
import threading
from pathlib import Path

import pytest
import torch
from data_sets import config, silent
from test_checkpoint import trainee

import coordinator
from configs import Config, ConfigError, WriteError, dump_config, load_config
from configs.files import write_whole
from data.collect import collect
from data.layout import DataError, read_description
from data.preprocess import build, preprocess
from data.settings import check_settings
from env import launch, scenarios, sumo
from env.traffic_env import check_scenario
from runtime import checkpoint
from runtime.memory import component, process_tree
from runtime.metrics import Metrics, read_metrics
from runtime.precision import HysteresisScaler

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8))


# ---- configurations ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text", [
    "run: {seed: 2024-13-45}", "run: {seed: !!int x}", "run: {seed: !!float x}", "run: {seed: !!timestamp x}",
    "[" * 3000, "run: {seed: " + "7" * 5000 + "}", 'base: "a\\0b"', "base: " + "x" * 5000, "base: .",
    'run: {name: "a\\0b"}', 'data: {folder: "\\ud800"}', "phase1: {epochs: " + "9" * 30 + "}", BOMB + "run: *i",
    "run: &a {seed: *a}", "base: mine.yaml"])
def test_whatever_is_wrong_with_a_file_is_one_short_message(tmp_path, text):
    """PyYAML let ValueError, AttributeError and RecursionError through, a zero byte in `base:` ended in pathlib, one in
    a name in the kernel; numbers of 30 digits were taken; the message about a bomb of aliases had gigabytes."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="mine.yaml") as error:
        load_config(path)
    assert len(str(error.value)) < 20_000


# ---- full disks --------------------------------------------------------------------------------------------------

@pytest.fixture
def full(monkeypatch):
    """Let every flush to disk fail, as on a full disk; returns what makes room again."""
    def fail(descriptor):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", fail)
    return monkeypatch.undo


def test_training_goes_on_past_a_full_disk(tmp_path, full, capsys):
    """A full disk ended training in a traceback at the next checkpoint."""
    progress, step = trainee(tmp_path, 1)
    step(), progress.save(may_fail=True)
    assert "WARNING" in capsys.readouterr().err and checkpoint.load(tmp_path) is None
    full()
    step(), progress.save(may_fail=True)
    assert checkpoint.load(tmp_path)["counters"]["updates"] == 2 and progress.failures == 0
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.parametrize("may_fail, saves", [(True, 3), (False, 1)])
def test_a_disk_that_stays_full_ends_training_with_the_old_checkpoint_intact(tmp_path, full, may_fail, saves):
    """And "stopped and saved" is never said when it is not so."""
    full()
    progress, step = trainee(tmp_path, 1)
    step(), progress.save()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", lambda state, file: file.write(b"half") and os.write(-1, b""))
        for _ in range(saves - 1):
            step(), progress.save(may_fail=may_fail)
        step()
        with pytest.raises(checkpoint.SaveError, match="could not be saved"):
            progress.save(may_fail=may_fail)
    assert step_in_updates(tmp_path) == 1 and not list(tmp_path.glob(".step*"))


def step_in_updates(folder):
    return checkpoint.load(folder)["counters"]["updates"]


def test_disk_that_may_only_be_read_names_the_file_and_not_the_temporary_one(tmp_path, monkeypatch):
    """To unlink what is not there is an error on such a disk, and took the place of the message: a traceback."""
    def closed(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
    with monkeypatch.context() as patch:
        for owner, name in ((builtins, "open"), (Path, "unlink"), (Path, "mkdir")):
            patch.setattr(owner, name, closed)
        with pytest.raises(WriteError, match="a.json: could not be written: Read-only file system; name another place"):
            write_whole(tmp_path / "a.json", "{}")
        with pytest.raises(WriteError, match="new/settings.json: could not be written: Read-only"):
            check_settings(tmp_path / "new" / "settings.json", {}, "")
        with pytest.raises(WriteError, match="processed: could not be written: Read-only"):
            build(config(tmp_path), {}, tmp_path / "processed", silent, lambda: None)
        with pytest.raises(launch.SumoError, match="work/corridor.* .run.*, data.folder or .*: Read-only"):
            scenarios.build_scenario(config(tmp_path), tmp_path / "work")


def test_a_run_folder_whose_disk_is_gone_is_a_checkpoint_that_could_not_be_saved(tmp_path, monkeypatch):
    """To tell how much room there is failed too, with a traceback, and training did not go on until the third time."""
    def gone(*_, **__):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", gone)
        with pytest.raises(checkpoint.SaveError, match=r"could not be saved \(No such file or directory\)"):
            checkpoint.save(tmp_path / "gone", 1, {})


def test_full_disk_while_preprocessing_is_one_message_and_the_same_command_continues(raw, full):
    """It was a traceback, and its temporary file stayed on the full disk."""
    with pytest.raises(WriteError, match="could not be written: No space left"):
        preprocess(config(raw), silent)
    assert not [path for path in raw.rglob(".*") if path.name != ".lock"]
    full()
    assert (preprocess(config(raw), silent) / "metadata.json").exists()


def test_half_written_file_of_a_full_disk_is_removed(tmp_path, full):
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(WriteError, match="a.json"):
        write_whole(tmp_path / "a.json", json.dumps("new"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "old"


def test_full_disk_while_records_are_dropped_keeps_them(tmp_path, full):
    """A resumed phase ended in a traceback, and left a temporary file."""
    metrics = Metrics(tmp_path, 1)
    for epoch in (1, 2):
        metrics.record(epoch, 3, loss=1.0)
    with pytest.raises(WriteError, match="metrics.jsonl: could not be written: No space left"):
        metrics.drop_after(1)
    assert len(read_metrics(metrics.path)) == 2 and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_full_disk_while_the_configuration_is_written_keeps_the_old_one(tmp_path, full):
    """A config.yaml that ends anywhere reads as one whose other values are the defaults."""
    (tmp_path / "config.yaml").write_text("old")
    with pytest.raises(WriteError, match="config.yaml: could not be written"):
        dump_config(Config(), tmp_path / "config.yaml")
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"] and (tmp_path / "config.yaml").read_text() == "old"


def test_full_disk_ends_the_coordinator_with_one_message(tmp_path, full, monkeypatch, capsys):
    """It was a traceback, and state.json went on saying "running"."""
    monkeypatch.setattr(sys, "argv", ["coordinator.py", "--config", "configs/smoke.yaml", f"run.folder={tmp_path}"])
    monkeypatch.setattr(coordinator, "resource_plan", lambda cfg: {})  # asks a process that imports PyTorch
    assert coordinator.main() == 1
    assert "error: " in (told := capsys.readouterr().err) and "state.json: could not be written" in told


def test_a_record_that_does_not_fit_on_the_disk_is_left_out_whole(tmp_path, capsys):
    """Half a line swallowed the next record."""
    import resource
    import signal
    metrics = Metrics(tmp_path, 1)
    metrics.record(1, 3, loss=1.0)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.path.stat().st_size + 9, soft[1]))
        metrics.record(2, 3, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
        signal.signal(signal.SIGXFSZ, handler)
    assert "could not be written" in capsys.readouterr().err
    metrics.record(3, 3, loss=1.0)
    assert [row["epoch"] for row in read_metrics(metrics.path)] == [1, 3] and metrics.path.read_text().count("\n") == 2


# ---- checkpoints and data ----------------------------------------------------------------------------------------

def test_weights_that_are_no_tensors_are_named(tmp_path):
    """A text among the weights was an AttributeError."""
    model = torch.nn.Linear(2, 1)
    weights = {"schema": {}, "model": {**model.state_dict(), "bias": "text"}}
    with pytest.raises(checkpoint.CheckpointError, match="bias: shape of 'text', here"):
        checkpoint.load_weights(model, weights, {}, tmp_path)


@pytest.mark.parametrize("wrong", [float("nan"), 0, "x"])
def test_statistics_that_nothing_can_be_normalised_with_are_refused(copy, wrong):
    """data.check found nothing wrong with them; training ended in a traceback."""
    folder = next((copy / "processed").iterdir())
    numbers = json.loads((folder / "statistics.json").read_text())
    numbers["nodes"]["std"][2] = wrong
    (folder / "statistics.json").write_text(json.dumps(numbers))
    with pytest.raises(DataError, match="statistics.json: no finite mean and positive std of 9 nodes features"):
        read_description(folder)


def test_missing_statistics_are_made_again(copy):
    """Preprocessing called the data set complete, and phase 1 told the user to run preprocessing."""
    path = next((copy / "processed").iterdir()) / "statistics.json"
    before = path.read_bytes()
    path.unlink()
    preprocess(config(copy), silent)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["{}", "[]", "null"])
def test_descriptions_of_another_kind_are_refused_by_preprocessing_too(copy, content):
    """A KeyError or TypeError of the look whether the data set is complete."""
    (next((copy / "processed").iterdir()) / "metadata.json").write_text(content)
    with pytest.raises(DataError, match="metadata.json: .*not metadata of a "):
        preprocess(config(copy), silent)


def test_chunks_without_their_settings_are_refused(raw):
    """config.json was written anew, so that a data set of other settings counted as one of these. Then it was refused
    for good, although metadata.json has the same settings; the advice about a damaged one is to remove it."""
    (raw / "raw/config.json").unlink()
    for step in (collect, preprocess):
        step(config(raw), silent)
        with pytest.raises(DataError, match="made with other settings .seed was 1, is 5"):
            step(config(raw, "data.seed=5"), silent)
    (raw / "raw/metadata.json").unlink()
    with pytest.raises(DataError, match="config.json: missing, although"):
        collect(config(raw, "data.seed=5"), silent)


def test_numbers_of_rules_that_were_not_recorded_do_not_matter(raw):
    """With another number of `harmonise`, or a new rule that has numbers, the recordings of others were refused."""
    collect(config(raw, "baselines.harmonise.cruise=24"), silent)
    path = raw / "raw/config.json"
    content = json.loads(path.read_text())
    content["baselines"]["harmonise"] = {"cruise": 20.0}  # as older ones have
    path.write_text(json.dumps(content))
    collect(config(raw), silent)
    with pytest.raises(DataError, match="baselines.lane_advice.margin was"):
        collect(config(raw, "baselines.lane_advice.margin=0.7"), silent)


@pytest.mark.parametrize("content", ["[]", "null", "3"])
def test_settings_of_another_kind_are_refused(raw, content):
    (raw / "raw/config.json").write_text(content)
    with pytest.raises(DataError, match="config.json: damaged or half written, not the settings"):
        preprocess(config(raw), silent)


def test_gradients_that_always_overflow_end_training(monkeypatch):
    """At the lowest loss scale every step was skipped for ever, without a word."""
    amp = Config().phase1.amp
    amp.init_scale = amp.min_scale = 1.0
    scaler, weight = HysteresisScaler("cpu", amp, True), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.1)
    with pytest.raises(FloatingPointError, match="100 optimiser steps in a row overflowed"):
        for _ in range(110):
            scaler.scale((weight * float("inf")).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert weight == 1


def test_sumo_of_an_older_release_is_refused(monkeypatch):
    """It was started, and failed later or gave other results."""
    launch.check_release()
    launch.check_release.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.20.0")
    with pytest.raises(launch.SumoError, match="SUMO 1.20.0 in .* is too old, 1.28"):
        launch.find_binary("sumo")
    launch.check_release.cache_clear()


def test_libraries_that_the_system_lacks_are_named_with_their_packages(tmp_path, monkeypatch):
    """On a bare server SUMO's wheel needs more than Python; the loader's words alone did not say what to install."""
    alone = shutil.copy(launch.find_binary("sumo"), tmp_path)  # without the libraries beside it
    monkeypatch.setattr(sumo, "find_binary", lambda name: alone)
    with pytest.raises(launch.SumoError, match=r"libxerces[^:]*: cannot open shared object file.*\n.*apt-get install"):
        sumo.Sumo(["-c", "any.sumocfg"])


@pytest.mark.parametrize("backend, name", [  # of a network libsumo says "Process Error", and its words to the terminal
    ("traci", "ring.net.xml"), ("traci", "routes.xml"), ("traci", "ring.sumocfg"), ("libsumo", "routes.xml"),
    ("libsumo", "ring.sumocfg")])
def test_what_to_do_about_a_damaged_file_that_was_generated_is_said(tmp_path, backend, name):
    """A power cut may leave it empty; SUMO's words named it, but nobody said that it can be made again."""
    pytest.importorskip(backend)
    cfg = load_config("configs/smoke.yaml", ["env.scenario=ring", f"env.backend={backend}",
                                             "rollout.num_envs_per_worker=1"])
    path = Path(scenarios.build_scenario(cfg, tmp_path)).parent / name
    path.write_text("")
    with pytest.raises(launch.SumoError, match=f"(?s){name}.*remove {path.parent}: it is generated anew"):
        check_scenario(cfg, tmp_path)
    shutil.rmtree(path.parent)
    check_scenario(cfg, tmp_path)


def test_where_libsumo_names_a_damaged_network_is_said(tmp_path, capfd):
    """All that was said was "SUMO failed: Process Error"; the file's name stood alone, some lines above."""
    pytest.importorskip("libsumo")
    made = Path(scenarios.build_scenario(load_config("configs/smoke.yaml", ["env.scenario=ring"]), tmp_path))
    net = made.with_name("ring.net.xml")
    net.write_bytes(net.read_bytes()[:3000])
    cfg = load_config("configs/smoke.yaml", [f"env.scenario={made}", "env.backend=libsumo",
                                             "rollout.num_envs_per_worker=1"])
    with pytest.raises(launch.SumoError, match=f"scenario {made}: SUMO failed: Process Error; .* standard error"):
        check_scenario(cfg, tmp_path)
    assert str(net) in capfd.readouterr().err


def test_strange_bytes_on_the_port_of_sumo_are_a_failed_start(monkeypatch):
    """Another program may take the port before SUMO does; what it answered ended in struct's or a codec's traceback,
    and the simulator was left running."""
    answers = [b"\0\0\0\x06\xff\xff", b"\0\0\0\x10\7\xab\0" + b"\0\0\0\5\xff\xff\xff\xff\xff"]  # no int; no UTF-8
    for answer in answers:
        with socket.create_server(("127.0.0.1", 0)) as server:
            monkeypatch.setattr(sumo, "free_port", lambda: server.getsockname()[1])
            thread = threading.Thread(target=lambda: answer_once(server, answer))
            thread.start()
            with pytest.raises(launch.SumoError, match="SUMO refused its input: "):
                sumo.Sumo(["--no-step-log"])
            thread.join()
    assert [pid for pid in process_tree() if component(pid) == "sumo"] == []


def answer_once(server, answer):
    connection, _ = server.accept()
    with connection:
        connection.recv(1024)
        connection.sendall(answer)
        connection.recv(1024)


COUNTS = {"epoch": 1, "updates": 1}


@pytest.mark.parametrize("key, value", [
    ("optimizer", None), ("counters", []), ("ranks", [{}, {}]), ("scaler", 5), ("counters", {**COUNTS, "updates": []}),
    ("counters", {**COUNTS, "epoch": float("inf")}), ("counters", {**COUNTS, "updates": 1.5})])
def test_checkpoint_with_a_wrong_part_is_refused(tmp_path, key, value):
    """It was a traceback, or with empty counters a silent start from scratch; weights and checksums were right."""
    progress, step = trainee(tmp_path, 1)
    step(), progress.save()
    checkpoint.save(tmp_path, 2, {**checkpoint.load(tmp_path), key: value})
    with pytest.raises(checkpoint.CheckpointError, match="cannot be continued from"):
        trainee(tmp_path, 2)[0].resume()


def test_moments_that_are_no_numbers_are_refused(tmp_path):
    """After a step that made the weights NaN, the gradients were said to be at fault, with a traceback."""
    progress, step = trainee(tmp_path, 1)
    step(), progress.save()
    state = checkpoint.load(tmp_path)
    next(iter(state["optimizer"]["state"].values()))["exp_avg"].fill_(float("nan"))
    checkpoint.save(tmp_path, 2, state)
    with pytest.raises(checkpoint.CheckpointError, match="exp_avg .*, or NaN"):
        trainee(tmp_path, 2)[0].resume()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = torch.nn.Linear(2, 1)
    weights = {"schema": {}, "model": {**model.state_dict(), "bias": torch.tensor([float("nan")])}}
    with pytest.raises(checkpoint.CheckpointError, match="bias: NaN or infinite"):
        checkpoint.load_weights(model, weights, {}, tmp_path)
