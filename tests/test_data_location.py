"""data/location.py: graphs of several settings below a size limit, copies in memory that vanish, slow drives."""
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data_sets import config, graphs, hashes, make_data_set, silent

import data.location as location
from data.dataset import ChunkedDataset
from data.layout import DataError, only_writer
from data.location import copy_to_memory, make_room, on_windows_drive, open_data, size_of
from data.preprocess import preprocess
from data.settings import processed_folder
from runtime.distributed import Team

ROOT = Path(__file__).resolve().parent.parent
ALONE = Team(0, 1, 0, 1, torch.device("cpu"))


# ---- graphs of several settings --------------------------------------------------------------------------------

@pytest.fixture
def three(tmp_path):
    """Three data sets below processed/, last used 300, 200 and 100 s ago."""
    folders = [make_data_set(tmp_path / "processed" / name) for name in "abc"]
    for age, folder in zip((300, 200, 100), folders):
        for path in (folder, folder / "metadata.json"):
            os.utime(path, (time.time() - age, time.time() - age))
    return folders


@pytest.mark.parametrize("room, left", [(3.1, "abc"), (2.1, "bc"), (1.1, "c"), (0.1, "c")])
def test_least_recently_used_graphs_make_room_with_a_message(three, room, left):
    lines, size = [], size_of(three[0])
    make_room(three[2], room * size / 1e9, lines.append)
    assert "".join(sorted(path.name for path in three[0].parent.iterdir())) == left
    removed = [str(folder) for folder in three if folder.name not in left]
    assert [line.split()[1] for line in lines if line.startswith("removed")] == removed
    assert all("data.disk_gb" in line for line in lines)
    assert (room < 1) == (lines != [] and lines[-1].startswith("NOTE"))


def test_graphs_that_cannot_be_removed_are_said_and_stay(three, monkeypatch):
    """A finished data set on a disk that may only be read ended in an error, with more graphs than data.disk_gb."""
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))
    lines = []
    monkeypatch.setattr("data.location.shutil.rmtree", closed)
    make_room(three[2], 0.0, lines.append)
    assert all(folder.exists() for folder in three) and "Permission denied" in lines[0] and len(lines) == 3


def test_graphs_that_somebody_reads_are_not_removed(three):
    dataset = ChunkedDataset(three[0], "train")
    make_room(three[2], 0.0, silent)
    assert [folder.exists() for folder in three] == [True, False, True]
    assert dataset[0]["moved"][0, 0] == 0
    del dataset
    make_room(three[2], 0.0, silent)
    assert [folder.exists() for folder in three] == [False, False, True]


def test_graphs_of_which_nobody_can_tell_are_not_removed(three, monkeypatch):
    """NFS locks no file that is open for reading only, and making room there ended in a traceback."""
    def nfs(file, how):
        raise OSError(errno.EBADF, "Bad file descriptor")
    monkeypatch.setattr(location.fcntl, "flock", nfs)
    make_room(three[2], 0.0, silent)
    assert all(folder.exists() for folder in three)


def test_using_graphs_again_keeps_them(copy):
    """Settings A, then B, then A again: with room for two, C pushes out B."""
    sets, lines = {}, []
    limit = 2.6 * size_of(graphs(copy)) / 1e9
    for name, radius in (("A", 200.0), ("B", 100.0), ("A", 200.0), ("C", 50.0)):
        sets[name] = preprocess(config(copy, f"graph.radius_m={radius}", f"data.disk_gb={limit}"), lines.append)
        time.sleep(0.02)
    assert [sets[name].exists() for name in "ABC"] == [True, False, True]
    assert any(line.startswith(f"removed {sets['B']}") for line in lines)
    half_built = sets["A"].parent / "0123456789ab"
    half_built.mkdir()
    (half_built / "chunk_000.npy.part").write_bytes(bytes(10 ** 6))
    os.utime(half_built, (1, 1))
    preprocess(config(copy, f"data.disk_gb={0.8 * limit}"), lines.append)
    assert not half_built.exists() and sets["A"].exists()


def test_second_writer_waits_for_the_first(copy):
    """Two runs that start at once on one data set built the same files at the same time."""
    program = ("import sys; from data_sets import config; from data.preprocess import preprocess; "
               "preprocess(config(sys.argv[1], 'data.storage=int8'), lambda line: print(line, flush=True))")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with only_writer(copy, silent):
        other = subprocess.Popen([sys.executable, "-c", program, str(copy)], stdout=subprocess.PIPE, text=True,
                                 env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT)
        assert "waiting for another process" in other.stdout.readline()
        assert not processed_folder(config(copy, "data.storage=int8")).exists()
    assert "samples in" in other.communicate(timeout=120)[0] and other.returncode == 0


def test_stop_is_heard_while_another_process_prepares_the_data(copy):
    """The wait took no end before the other's: a SIGTERM did nothing, and the other ranks ran into ddp.timeout_s."""
    asked, other = iter([False, True]), open(copy / ".lock", "w")
    fcntl.flock(other, fcntl.LOCK_EX)
    timer = threading.Timer(10, other.close)  # else this test would take no end either
    timer.start()
    with pytest.raises(SystemExit):
        open_data(config(copy), ALONE, SimpleNamespace(must_stop=lambda: next(asked), leave=lambda where: 0))
    timer.cancel()
    other.close()


# ---- copies in memory ------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from data.location import copy_to_memory
print(copy_to_memory(Path(sys.argv[1])), flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """holder("wait" or "end") -> (process that holds a copy, the copy); killed after the test."""
    made, started = make_data_set(tmp_path / "made"), []

    def start(what):
        process = subprocess.Popen([sys.executable, "-c", HOLDER, str(made), what], stdout=subprocess.PIPE, text=True,
                                   env={**os.environ, "PYTHONPATH": str(ROOT)},
                                   preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        started.append(process)
        return process, Path(process.stdout.readline().strip()), made
    yield start
    for process in started:
        process.kill()


def vanishes(path):
    end = time.monotonic() + 30
    while path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not path.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_copy_in_memory_vanishes_with_its_process(holder, number):
    process, copy, made = holder("wait")
    assert copy.parent == Path("/dev/shm") and hashes(copy) == hashes(made)
    assert len(ChunkedDataset(copy, "train")) == 20
    process.send_signal(number)
    assert vanishes(copy)


def test_copy_in_memory_vanishes_at_the_end(holder):
    process, copy, _ = holder("end")
    assert process.wait(30) == 0 and vanishes(copy)


def test_copy_that_does_not_fit_is_refused_with_numbers(tmp_path, monkeypatch):
    made = make_data_set(tmp_path / "made")
    monkeypatch.setattr(location.shutil, "disk_usage", lambda place: SimpleNamespace(free=2000))
    with pytest.raises(DataError, match=r"data.tmpfs=true: .*made has 0 MB, too much for the 0 MB .* data.tmpfs=false"):
        copy_to_memory(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_training_reads_the_copy(copy, capsys):
    folder = open_data(config(copy, "data.tmpfs=true"), ALONE)
    assert folder.parent == Path("/dev/shm") and hashes(folder) == hashes(graphs(copy))
    assert str(folder) in capsys.readouterr().out
    shutil.rmtree(folder)
    assert open_data(config(copy), ALONE) == graphs(copy)


# ---- slow drives -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path, slow", [("/mnt/c/data/set", True), ("/mnt/d", True), ("/mnt/wsl/set", False),
                                        ("/mnt/data", False), ("/home/mnt/c/set", False), ("datasets/x", False)])
def test_windows_drives_are_known_by_their_path(path, slow):
    assert on_windows_drive(path) == slow


def test_data_on_a_windows_drive_are_warned_about(copy, monkeypatch, capsys):
    open_data(config(copy), ALONE)
    assert "WARNING" not in capsys.readouterr().out
    monkeypatch.setattr(location, "on_windows_drive", lambda path: True)
    open_data(config(copy), ALONE)
    warning = capsys.readouterr().out
    assert "WARNING" in warning and str(graphs(copy)) in warning and "data.folder" in warning


def test_link_to_a_windows_drive_is_one(tmp_path):
    (tmp_path / "set").symlink_to("/mnt/c/somewhere")
    assert on_windows_drive(tmp_path / "set" / "processed")
