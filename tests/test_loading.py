"""data/loading.py: batches of a DataLoader's processes, stopped, stuck and starting; sequences of phase 3."""
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from data_sets import make_data_set

from configs import load_config
from data import collect
from data.augment import AugmentedDataset
from data.dataset import BlockSampler, ChunkedDataset
from data.layout import DataError
from data.loading import StreamingDataset, make_loader, windows
from env.workers import WorkerError


@pytest.fixture
def made(tmp_path):
    return make_data_set(tmp_path / "made")


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_reads_the_batches_of_the_sampler(made, workers):
    options = load_config("configs/default.yaml", [f"phase1.loader.num_workers={workers}",
                                                   "phase1.augment.time_shift=0"]).phase1
    dataset, sampler = ChunkedDataset(made, "train"), BlockSampler([4, 3, 5, 2, 6], 4, 1, 2, seed=9)
    loader = make_loader(AugmentedDataset(dataset, options.augment, 1), sampler, options.loader, False)
    for sampler.epoch, sampler.done in ((0, 0), (1, 8)):  # persistent processes must see the change
        read = [batch["moved"][:, 0, 0].tolist() for batch in loader]
        assert read == [rows for _, rows in sampler] != []


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_draws_none_of_trainings_random_numbers(made, workers):
    """Each beginning of reading drew one: a run that was interrupted within an epoch went on with other numbers."""
    options = load_config("configs/default.yaml", [f"phase1.loader.num_workers={workers}"]).phase1.loader
    before = torch.get_rng_state()
    assert len(list(make_loader(ChunkedDataset(made, "train"), [[8], [3]], options, False))) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_message_of_a_reading_process_comes_without_its_traceback(made):
    """With phase1.loader.num_workers above 0, as by default, it was the last of twenty lines."""
    options = load_config("configs/default.yaml", ["phase1.loader.num_workers=1"]).phase1.loader
    loader = make_loader(ChunkedDataset(made, "train"), [[8]], options, False)
    (made / "chunk_002.npy").unlink()
    with pytest.raises(DataError) as error:
        list(loader)
    assert str(error.value).startswith(f"{made}/chunk_002.npy: has vanished") and "\n" not in str(error.value)


STOPPED_GROUP = """
import os, signal, sys
from configs import load_config
from data import collect
from data.augment import AugmentedDataset
from data.dataset import BlockSampler, ChunkedDataset
from data.loading import make_loader
from runtime.distributed import StopRequest
stop, phase1 = StopRequest(), load_config("configs/default.yaml", ["phase1.augment.time_shift=0"]).phase1
dataset, options = AugmentedDataset(ChunkedDataset(sys.argv[1], "train"), phase1.augment, 1), phase1.loader
loader = make_loader(dataset, BlockSampler([4, 3, 5, 2, 6], 1, seed=9), options, False)
for n, batch in enumerate(loader):
    if n == 1:
        os.killpg(0, signal.SIGTERM)
print(n, options.num_workers, stop.asked)
"""


def test_sigterm_to_the_whole_group_leaves_the_reading_processes(made):
    """torchrun stops its ranks' groups: the loader's processes died of it, and the rank of their death, unsaved."""
    done = subprocess.run([sys.executable, "-c", STOPPED_GROUP, str(made)], capture_output=True, text=True, timeout=120,
                          start_new_session=True)
    assert done.returncode == 0 and done.stdout.split() == ["19", "2", "True"], done.stdout + done.stderr


STOPPED_START = STOPPED_GROUP.replace("for n, batch in enumerate(loader):\n    if n == 1:\n        os.killpg", """
import threading, time
from data import loading
def slow(worker, leave=loading.leave_group):
    time.sleep(1.5)
    leave(worker)
loading.leave_group = slow
loader = make_loader(dataset, BlockSampler([4, 3, 5, 2, 6], 1, seed=9), options, False)
threading.Timer(0.5, os.killpg, (0, signal.SIGTERM)).start()
for n, batch in enumerate(loading.windows(loader, 1, True)):
    if n < 0:
        os.killpg""")


def test_sigterm_to_the_whole_group_leaves_processes_that_only_begin_to_read(made):
    """They were in the rank's group until they had left it: phase 1 ended with a traceback, and nothing was saved."""
    done = subprocess.run([sys.executable, "-c", STOPPED_START, str(made)], capture_output=True, text=True, timeout=120,
                          start_new_session=True)
    assert done.returncode == 0 and done.stdout.split() == ["19", "2", "True"], done.stdout + done.stderr


class Stuck:
    """A data set of which only the first batch can be read."""
    def __getitems__(self, rows):
        time.sleep(3600 * (rows != [0]))
        return rows


def test_a_reading_process_that_is_stuck_is_an_error_and_no_wait_for_ever():
    """With a full /dev/shm it kept its rank waiting, and the others for half an hour."""
    options = load_config("configs/default.yaml", ["phase1.loader.num_workers=1", "phase1.loader.timeout_s=2"])
    read = windows(make_loader(Stuck(), [[0], [1]], options.phase1.loader, False), 1, True)
    assert next(read) == [[0]]
    process = multiprocessing.active_children()[-1]
    with pytest.raises(WorkerError, match="timed out after 2.*stuck.*/dev/shm, where .* free.*num_workers=0"):
        list(read)
    process.join(5)
    assert process.exitcode == -signal.SIGKILL  # Python itself would wait for it, too


def test_a_process_that_stops_between_two_epochs_is_an_error_too():
    """Persistent processes fetch the first batches when an epoch begins: a traceback, and a wait for ever."""
    options = load_config("configs/default.yaml", ["phase1.loader.num_workers=1", "phase1.loader.timeout_s=2"])
    loader = make_loader(Stuck(), [[0]], options.phase1.loader, False)
    assert list(windows(loader, 1, True)) == [[[0]]]
    process = multiprocessing.active_children()[-1]
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match="timed out after 2.*stuck"):
        list(windows(loader, 1, True))
    process.join(5)
    assert process.exitcode == -signal.SIGKILL


def test_no_room_for_the_locks_of_processes_is_one_message(monkeypatch, made, tmp_path):
    """The traceback said "No space left on device", and nothing of /dev/shm. Without anything to collect nobody needs
    processes."""
    def full(*_, **__):
        raise OSError(28, "No space left on device")
    with pytest.raises(WorkerError, match="phase 1: .*do not start .No space left.*/dev/shm.*num_workers=0"):
        list(windows(Full(), 1, True))
    monkeypatch.setattr(collect, "ProcessPoolExecutor", full)
    collect.run_episodes(load_config("configs/smoke.yaml"), [], tmp_path, None)
    with pytest.raises(WorkerError, match="collect: its processes do not start .No space left.*/dev/shm"):
        collect.run_episodes(load_config("configs/smoke.yaml"), [None], tmp_path, None)


class Full:
    """A loader whose processes find no room."""
    def __iter__(self):
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("count, batch", [(12, 4), (12, 5), (3, 3)])
def test_stream_gives_each_sequence_once_per_pass(count, batch):
    sequences, per_pass = {"id": torch.arange(count), "double": 2 * torch.arange(count)[:, None]}, count // batch
    stream = StreamingDataset(sequences, batch, 3, seed=4)
    batches = list(stream)
    assert len(batches) == len(stream) == 3 * per_pass
    assert all(torch.equal(b["double"][:, 0], 2 * b["id"]) and len(b["id"]) == batch for b in batches)
    order = [b["id"].tolist() for b in batches]
    passes = [sum(order[p * per_pass:(p + 1) * per_pass], []) for p in range(3)]
    assert all(len(set(rows)) == len(rows) == per_pass * batch and set(rows) <= set(range(count)) for rows in passes)
    assert count == 3 or len({tuple(rows) for rows in passes}) == 3
    assert [b["id"].tolist() for b in StreamingDataset(sequences, batch, 3, seed=4)] == order


@pytest.mark.parametrize("drop_last, rest", [(True, []), (False, [[6, 7]])])
def test_last_optimiser_step_of_an_epoch(drop_last, rest):
    """With drop_last=false and accumulation the last samples of every epoch were read and not learned from."""
    assert list(windows(range(8), 3, drop_last)) == [[0, 1, 2], [3, 4, 5], *rest]
    assert list(windows(range(6), 3, drop_last)) == [[0, 1, 2], [3, 4, 5]]
