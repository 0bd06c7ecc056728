"""SIGKILL while collecting and preprocessing: the same command goes on and ends with the same files.

Preprocessing dies at the n-th of all its file operations, collecting when so many of its files have appeared.
"""
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_sets import SAMPLES, config, graphs, hashes, silent

from data.collect import as_they_end, collect
from data.preprocess import preprocess
from env.workers import WorkerError

ROOT = Path(__file__).resolve().parent.parent
OPERATIONS = ((os, "fsync"), (os, "replace"), (os, "rename"), (os, "unlink"), (np.memmap, "flush"))


def preprocess_and_die(cfg, moment):
    """Run in a forked process: SIGKILL instead of the `moment`-th file operation; 0 only counts, into the exit code."""
    done = 0

    def deadly(real):
        def operation(*args, **kwargs):
            nonlocal done
            done += 1
            if done == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return operation
    for owner, name in OPERATIONS:
        setattr(owner, name, deadly(getattr(owner, name)))
    preprocess(cfg, silent)
    os._exit(min(done, 255))


def killed_at(cfg, moment):
    process = multiprocessing.get_context("fork").Process(target=preprocess_and_die, args=(cfg, moment))
    process.start()
    process.join(120)
    return process.exitcode


def remove_graphs(folder):
    for path in sorted((folder / "processed").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_preprocessing_survives_a_kill_at_any_file_operation(raw):
    cfg = config(raw, "data.storage=int8")  # in two passes
    (raw / "processed").mkdir()
    operations = killed_at(cfg, 0)
    expected = hashes(graphs(raw))
    assert operations > 50 and len(expected) >= 9 and "progress.json" not in expected
    for moment in sorted({1, 2, 3, operations // 5, operations // 3, operations // 2, operations - 9, operations - 5,
                          operations - 3, operations - 2, operations - 1, operations}):
        remove_graphs(raw)
        assert killed_at(cfg, moment) == -signal.SIGKILL
        assert hashes(preprocess(cfg, silent)) == expected, f"killed at operation {moment} of {operations}"


def test_preprocessing_survives_one_kill_after_the_other(raw):
    """However short each life is, the work gets done."""
    cfg = config(raw)
    (raw / "processed").mkdir()
    assert killed_at(cfg, 0) > 0
    expected = hashes(graphs(raw))
    remove_graphs(raw)
    lives = 0
    while killed_at(cfg, 25) == -signal.SIGKILL:
        lives += 1
        assert lives < 40
    assert lives > 1 and hashes(graphs(raw)) == expected


def test_a_lost_half_built_chunk_is_built_again_however_often_it_dies(raw, monkeypatch):
    """The list of what it held was forgotten in memory only: after one more kill its zeros were training samples."""
    def die(*_):
        raise KeyboardInterrupt
    cfg = config(raw)
    expected = hashes(preprocess(cfg, silent))
    remove_graphs(raw)
    for function, lost in (("_finish_chunk", ()), ("build_record", ("*/chunk_000.npy.part", "*/*/chunk_000.npy.part"))):
        for path in [path for pattern in lost for path in (raw / "processed").glob(pattern)]:
            path.unlink()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"data.preprocess.{function}", die)
            preprocess(cfg, silent)
    assert hashes(preprocess(cfg, silent)) == expected


@pytest.mark.parametrize("files", [(1, 2, 4)])
def test_collection_survives_kills(recorded, tmp_path, files):
    """Killed as soon as so many of the 8 files are there; workers and their SUMOs end with it.

    It used to wait a second after the first file and for the sixth one: a fast machine was done by then."""
    folder = tmp_path / "set"
    words = [f"data.folder={folder}", f"data.samples={SAMPLES}", "data.samples_per_chunk=5", "data.processes=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLLECTION_TEST": str(folder)}
    for count in files:
        process = subprocess.Popen([sys.executable, "-m", "data.collect", "--config", "configs/smoke.yaml", *words],
                                   cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while len(list(folder.glob("raw/*.json"))) < count and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL and not (folder / "raw" / "metadata.json").exists()
    assert gone(str(folder).encode())
    (folder / "raw" / ".chunk_003_0.json.4711").write_text('{"episode": 3, "se')  # what a kill while writing leaves
    collect(config(folder), silent)
    assert hashes(folder / "raw") == hashes(recorded / "raw")


@pytest.fixture(params=[signal.SIG_DFL, signal.SIG_IGN])
def on_sigterm(request):
    """What this process, and so its children, does at SIGTERM."""
    before = signal.signal(signal.SIGTERM, request.param)
    yield
    signal.signal(signal.SIGTERM, before)


def ignores_sigterm(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("SigIgn:")[1].split()[0], 16) >> signal.SIGTERM - 1 & 1


def test_killed_process_ends_the_collection(tmp_path, on_sigterm):
    """The others ignored SIGTERM, with which the pool ends them, and it waited for ever; later only where the parent
    ignored it too."""
    cfg, seen = config(tmp_path / "set"), []

    def kill_one():
        if not seen:
            seen.append(multiprocessing.active_children())
            end = time.monotonic() + 20
            while any(map(ignores_sigterm, seen[0])) and time.monotonic() < end:  # one may be starting still
                time.sleep(0.05)
            assert not any(map(ignores_sigterm, seen[0]))
            os.kill(seen[0][0].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed"):
        collect(cfg, silent, kill_one)
    assert len(seen[0]) > 1
    end = time.monotonic() + 30
    while any(process.is_alive() for process in seen[0]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(process.is_alive() for process in seen[0])


def test_frozen_processes_end_the_collection(tmp_path, monkeypatch, ends_soon):
    """They were waited for without limit, and again, with SIGTERM that they do not hear, when it ended."""
    seen = []
    monkeypatch.setattr("data.collect.as_they_end", lambda futures, mine, _: as_they_end(futures, mine, 3.0))

    def freeze():
        seen.extend(multiprocessing.active_children())
        for process in seen:
            os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="stuck, none has computed for 3 s; finished episodes are kept"):
        collect(config(tmp_path / "set"), silent, freeze)
    assert seen and ends_soon([process.pid for process in seen])
    collect(config(tmp_path / "set"), silent)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signal_ends_a_collection_and_not_only_its_output(tmp_path, number, code):
    """It said "stopped", and went on to the end of all running episodes. A second Ctrl-C: "Exception ignored in". Of
    SIGTERM, as which the coordinator passes Ctrl-C on: "resource_tracker: There appear to be 5 leaked semaphores";
    and on a busy machine a Ctrl-C a moment later met Python's own end, with a traceback and that signal's code."""
    folder = tmp_path / "set"
    process = subprocess.Popen([sys.executable, "-m", "data.collect", "--config", "configs/quick.yaml",
                                f"data.folder={folder}"], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env={**os.environ, "COLLECTION_TEST": str(folder)}, start_new_session=True)
    end = time.monotonic() + 60
    while not list(folder.glob("raw/scenario/*/*.sumocfg")) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(3)  # the episodes, which take much longer than 10 s, run
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        said = process.communicate(timeout=10)[1].decode()
    finally:
        process.kill()
    assert process.returncode == code
    assert said.startswith("stopped; ") and said.count("\n") == 1 if number == signal.SIGINT else said == ""
    assert gone(str(folder).encode())


def gone(mark):
    """Whether, within some seconds, no process has `mark` in its environment any more."""
    def living():
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                    yield entry.name
            except OSError:
                continue
    end = time.monotonic() + 10
    while list(living()) and time.monotonic() < end:
        time.sleep(0.05)
    return not list(living())


SCRIPT_WITH_TORCH = """
import multiprocessing, sys
from pathlib import Path
import torch
from configs import load_config
from data.collect import collect

def look():
    maps = [Path(f"/proc/{child.pid}/maps").read_text() for child in multiprocessing.active_children()]
    print("seen", [("libtorch" in text, "numpy" in text) for text in maps])

if __name__ == "__main__":
    collect(load_config("configs/smoke.yaml", sys.argv[1:]), meanwhile=look)
    assert sys.modules["__main__"].look is look
"""


def test_processes_that_collect_for_a_script_do_not_load_its_pytorch(tmp_path):
    """Phase 1 that collects its own data had PyTorch in each of them: 1 GB more in six processes."""
    (tmp_path / "script.py").write_text(SCRIPT_WITH_TORCH)
    words = [f"data.folder={tmp_path}/data", "data.samples=3", "data.samples_per_episode=2", "data.processes=1"]
    done = subprocess.run([sys.executable, str(tmp_path / "script.py"), *words], cwd=ROOT, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0 and "seen [(False, True)]" in done.stdout, done.stderr
