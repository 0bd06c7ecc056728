"""data/dataset.py: reading chunks, damaged ones refused, and the order of samples over ranks and epochs."""
import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
import torch
from data_sets import make_data_set

from configs import ConfigError
from data.dataset import BlockSampler, ChunkedDataset, bad_rows
from data.layout import DataError, Shape


# ---- reading ---------------------------------------------------------------------------------------------------

@pytest.fixture
def made(tmp_path):
    return make_data_set(tmp_path / "made")


@pytest.mark.parametrize("vehicles", [4, 3])
def test_batches_equal_single_items_in_the_order_asked_for(tmp_path, vehicles):
    """With 3 vehicles a record has an odd number of bytes: torch refused numpy's strides of a batch of one."""
    made = make_data_set(tmp_path / "made", vehicles)
    dataset = ChunkedDataset(made, "train")
    rows = [19, 0, 7, 3, 4, 19, 12, 6, 13, 11]  # over all chunk borders, one twice
    batch = dataset.__getitems__(rows)
    assert len(dataset) == 20 and batch["moved"][:, 0, 0].tolist() == rows
    for place, row in enumerate(rows):
        item = dataset[row]
        assert set(item) == set(batch) == {*Shape(2, 1, 0, 4, 2).frame().names, "row", "bad"}
        assert all(torch.equal(item[name], batch[name][place]) for name in item)
    assert batch["nodes"].dtype == torch.float32 and batch["present"].dtype == torch.bool
    assert ChunkedDataset(made, "held_out")[0]["moved"][0, 0] == 20
    batch["moved"].fill_(77)  # a copy, never a view of the file
    assert dataset[19]["moved"][0, 0] == 19


def test_row_numbers_outside_are_refused(made):
    """dataset[-1] was the last row of the *first* chunk."""
    dataset = ChunkedDataset(made, "train")
    for wrong in (20, -1, -21):
        with pytest.raises(IndexError):
            dataset[wrong]


def test_empty_batch_can_be_read(made):
    """With drop_last=false the last batch of one rank may be empty, and reading it ended in a traceback."""
    batch = ChunkedDataset(made, "train").__getitems__([])
    assert {name: tuple(value.shape) for name, value in batch.items()}["moved"] == (0, 3, 4)


def test_few_chunks_are_open_at_once_and_pickling_takes_none_along(made):
    dataset = ChunkedDataset(made, "train")
    fresh, opened = len(pickle.dumps(dataset)), []
    assert len(dataset.open.chunks) == 0
    for row in (0, 5, 8, 13, 8, 15, 0):  # chunks 0, 1, 2, 3, 2, 4, 0: using chunk 2 again keeps it
        dataset[row]
        opened.append(list(dataset.open.chunks))
    assert opened[2:] == [[0, 1, 2], [1, 2, 3], [1, 3, 2], [3, 2, 4], [2, 4, 0]]
    mine = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and int(fd) > 2
            and os.path.exists(f"/proc/self/fd/{fd}")]
    assert sum("chunk_" in name for name in mine) == 3
    assert len(pickle.dumps(dataset)) == fresh
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again.open.chunks) == 0 and torch.equal(again[14]["moved"], dataset[14]["moved"])


def test_chunk_that_shrinks_while_it_is_read_is_named(made):
    """A memory map of it would end the process with SIGBUS, without a word."""
    dataset = ChunkedDataset(made, "train")
    dataset[8]
    path = made / "chunk_002.npy"
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(DataError, match=f"{path}: has become shorter"):
        dataset[11]


@pytest.mark.parametrize("cache_mb", [0, 100])
def test_chunk_that_vanishes_while_training_is_named(made, cache_mb):
    """It was a traceback."""
    dataset, path = ChunkedDataset(made, "train", cache_mb=cache_mb), made / "chunk_002.npy"
    path.unlink()
    with pytest.raises(DataError, match=f"{path}: has vanished .* the same command"):
        dataset[8]


def test_copies_in_memory_are_bounded_in_size_and_time(made):
    size = (made / "chunk_002.npy").stat().st_size
    limit, plain = 2.3 * size / 1e6, ChunkedDataset(made, "train")
    dataset = ChunkedDataset(made, "train", 3, cache_mb=limit, cache_timeout_s=3600)
    for row in (0, 5, 8, 13, 8, 15, 0, 4):
        assert torch.equal(dataset[row]["moved"], plain[row]["moved"])
        kept = [copy for copy, _ in dataset.open.chunks.values()]
        assert all(isinstance(copy, bytes) for copy in kept) and sum(map(len, kept)) <= limit * 1e6
    assert len(kept) > 1
    dataset.open.timeout_s = 0.01
    time.sleep(0.02)
    dataset[8]  # whatever else lay there was not used in time
    assert list(dataset.open.chunks) == [2]
    tiny = ChunkedDataset(made, "train", 3, cache_mb=1e-6)
    assert tiny[8]["moved"][0, 0] == 8 and tiny[0]["moved"][0, 0] == 0 and len(tiny.open.chunks) == 1


def test_copies_are_dropped_when_memory_is_short_in_other_processes_too(made):
    dataset, (here, there) = ChunkedDataset(made, "train", 1, cache_mb=100), multiprocessing.Pipe()

    def read(row):
        return dataset[row]["moved"].tolist(), [isinstance(copy, bytes) for copy, _ in dataset.open.chunks.values()]

    def other():
        while (row := there.recv()) is not None:
            there.send(read(row))
    process = multiprocessing.get_context("fork").Process(target=other, daemon=True)  # as the loader's
    process.start()
    ask = lambda row: (here.send(row), here.recv())[1]  # noqa: E731
    before = [read(0), read(8)]
    assert before[1][1] == [True, True] and [ask(0), ask(8)] == before
    dataset.open.drop_copies()
    assert not dataset.open.chunks and read(0) == (before[0][0], [False])
    assert ask(15)[1] == [False] and ask(0) == read(0)
    here.send(None)
    process.join(10)
    assert process.exitcode == 0


@pytest.mark.parametrize("start", [0, 1, 4])
def test_window_begins_where_asked_in_the_margins(tmp_path, start):
    dataset = ChunkedDataset(make_data_set(tmp_path / "made", margin=2), "train")
    batch, middle = dataset.read([3, 17], [start, 2]), dataset[17]
    assert batch["speed"][:, :, 0].tolist() == [[start, start + 1, start + 2], [2, 3, 4]]
    assert batch["nodes"].shape[1] == batch["usable"].shape[1] == 2 and batch["fresh"].shape[1] == 3
    assert batch["fresh"][:, 0].all()  # nobody has a past before the window
    assert all(torch.equal(batch[name][1], middle[name]) for name in middle)


def test_rows_that_are_not_finite_come_back_empty_and_named(made):
    """A NaN went on into the loss, and the run ended in the next step without a word about its origin."""
    path = made / "chunk_002.npy"
    array = np.load(path)
    array["nodes"][3, 1, 2, 4], array["moved"][1, 2, 0], array["extent"][4, 0] = np.nan, np.inf, np.nan
    np.save(path, array)
    dataset = ChunkedDataset(made, "train")
    batch = dataset.__getitems__([7, 8, 10, 0, 11])
    assert batch["bad"].tolist() == [False, True, True, False, True]
    assert bad_rows(dataset, batch) == [f"{path}: row {row}" for row in (1, 3, 4)]
    for name, value in batch.items():
        assert name in ("bad", "row") or (value[[1, 2, 4]] == (-1 if name == "neighbours" else 0)).all()
    assert batch["moved"][0, 0, 0] == 7 and batch["present"][[0, 3]].all()


@pytest.mark.parametrize("change", [
    lambda c: c[:-1], lambda c: c[:40], lambda c: c + b"x", lambda c: b"", lambda c: None, lambda c: b"x" * len(c),
    lambda c: c.replace(b"'present'", b"'prezent'"), lambda c: c.replace(b"'moved'", b"'mooed'"),
    lambda c: c.replace(b"<f4", b"<i4"), lambda c: c.replace(b"(5, 3)", b"(1, 3)"), lambda c: b"PK\x03\x04" + c[4:]],
    ids="truncated header-cut trailing empty missing garbage other-field other-name type length zip".split())
def test_damaged_or_foreign_chunk_is_named(made, change):
    """A structured file of other fields ended in a KeyError, one that begins like a zip file in a BadZipFile."""
    path = made / "chunk_002.npy"
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        ChunkedDataset(made, "train")


@pytest.mark.parametrize("content", [
    None, b"", b'{"version": 2, "chun', b"\x93NUMPY", b"[]", b"{}", b'{"version": 99}', b'{"version": 2, "shape": {}}'])
@pytest.mark.parametrize("name", ["metadata.json", "statistics.json"])
def test_damaged_description_of_a_data_set_is_named(made, name, content):
    path = made / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        ChunkedDataset(made, "train")


# ---- order -----------------------------------------------------------------------------------------------------

def chunks_of(length, size=50):
    return [size] * (length // size) + [length % size] * (length % size > 0)


def sampler_of(length, batch, rank=0, world=1, seed=3, epoch=0, done=0, **more):
    sampler = BlockSampler(chunks_of(length), batch, rank, world, seed, **more)
    sampler.epoch, sampler.done = epoch, done
    return sampler


def batches_of(length, batch, world, **more):
    """Batches of all ranks: [[rows]] by rank."""
    return [[rows for _, rows in sampler_of(length, batch, rank, world, **more)] for rank in range(world)]


CASES = [(7, 2, 1), (64, 4, 2), (1000, 32, 3), (33, 16, 2)]


@pytest.mark.parametrize("length, batch, world", [*CASES, (5, 8, 2)])
def test_every_row_exactly_once_per_epoch_without_drop(length, batch, world):
    ranks = batches_of(length, batch, world, drop_last=False)
    assert sorted(row for batches in ranks for rows in batches for row in rows) == list(range(length))
    assert {len(batches) for batches in ranks} == {-(-length // (batch * world))}  # else ranks wait for each other


@pytest.mark.parametrize("length, batch, world", CASES)
def test_no_row_twice_with_drop_last(length, batch, world):
    ranks = batches_of(length, batch, world)
    seen = [row for batches in ranks for rows in batches for row in rows]
    assert len(seen) == len(set(seen)) == length // (batch * world) * batch * world
    assert set(seen) <= set(range(length))
    assert all(len(rows) == batch for batches in ranks for rows in batches)
    assert [len(batches) for batches in ranks] == [len(sampler_of(length, batch, 0, world))] * world


def test_order_depends_on_seed_and_epoch_only():
    def order(batch=4, **more):
        return sampler_of(500, batch, **more).order().tolist()
    first = order()
    assert sorted(first) == list(range(500)) != first
    assert all(order(**other) == first for other in ({}, {"batch": 7}, {"rank": 1, "world": 2}, {"done": 3}))
    assert len({tuple(order(seed=s, epoch=e)) for s in (1, 2) for e in (0, 1, 2)}) == 6
    alone, shared = batches_of(500, 8, 1)[0], batches_of(500, 4, 2)  # the same global batch, however many share it
    assert [set(rows) for rows in alone] == [set(a) | set(b) for a, b in zip(*shared)]


def test_chunks_are_opened_one_window_after_the_other():
    """The order went over 16 chunks at once while 3 were kept open: every batch opened nearly all of its chunks."""
    order = sampler_of(1000, 4).order() // 50
    windows = [set(order[i:i + 150]) for i in range(0, 1000, 150)]
    assert all(len(window) == 3 for window in windows[:-1]) and len(set().union(*windows)) == 20
    assert all(len(set(order[i:i + 60])) == 3 for i in range(0, 900, 150))  # mixed inside a window


def test_done_continues_where_the_epoch_was_left():
    whole = list(sampler_of(100, 8, 1, 2, epoch=4))
    assert list(sampler_of(100, 8, 1, 2, epoch=4, done=64)) == whole[4:] != [] and len(whole) == 6
    assert {epoch for epoch, _ in whole} == {4}


@pytest.mark.parametrize("steps", [[(2, 1, 3), (1, 8, 1), (2, 4, 99)], [(1, 4, 1), (2, 8, 2), (3, 2, 99)],
                                   [(2, 8, 2), (1, 8, 1), (2, 8, 1), (1, 4, 99)]])
def test_no_sample_lost_or_repeated_when_the_number_of_ranks_changes(steps):
    """Ranks, batch size and global batches of each part of one epoch. The position was kept as a number of the present
    global batches: going on with more ranks rounded it down, and samples were used twice."""
    seen, order = [], sampler_of(203, 1, epoch=2).order().tolist()
    for world, batch, many in steps:
        ranks = [list(sampler_of(203, batch, rank, world, epoch=2, done=len(seen)))[:many] for rank in range(world)]
        seen += [row for step in zip(*ranks) for _, rows in step for row in rows]
        assert set(seen) == set(order[:len(seen)])
    assert len(set(seen)) == len(seen) and len(order) - len(seen) < world * batch


def test_too_few_samples_for_one_global_batch():
    with pytest.raises(DataError, match="15 samples .* 2 ranks x 8"):
        sampler_of(15, 8, 0, 2)
    assert len(sampler_of(16, 8, 0, 2)) == len(sampler_of(15, 8, 0, 2, drop_last=False)) == 1


def test_unequal_gpus_share_each_global_batch_by_their_weights():
    ranks = batches_of(1000, 32, 3, weights=[2.0, 1.0, 1.0], drop_last=False)
    assert {tuple(map(len, step)) for step in zip(*ranks)} == {(48, 24, 24), (20, 10, 10)}  # 1000 = 10 * 96 + 40
    assert sorted(row for batches in ranks for rows in batches for row in rows) == list(range(1000))
    equal = batches_of(1000, 32, 3, drop_last=False)
    together = [[sorted(sum(step, [])) for step in zip(*case)] for case in (ranks, equal)]
    assert together[0] == together[1]  # the global batches do not depend on the weights


@pytest.mark.parametrize("weights, world", [([1.0, 1.0], 3), ([1.0, 1.0], 1), ([1000.0, 1.0], 2)])
def test_wrong_weights_are_refused(weights, world):
    with pytest.raises(ConfigError, match="phase1.loader.rank_weights"):
        sampler_of(100, 4, 0, world, weights=weights)
