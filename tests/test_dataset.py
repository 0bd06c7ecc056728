"""data/dataset.py: reading chunks, damaged ones refused, and the order of samples over ranks and epochs."""
import json
import pickle

import numpy as np
import pytest
import torch

from configs import load_config
from data.dataset import OPEN_CHUNKS, BlockSampler, ChunkedDataset, StreamingDataset
from data.layout import VERSION, DataError, file_hash, record_type, write_atomically
from env.graph import GLOBAL, NODE
from runtime.distributed import Team
from train_ddp import make_loader

EPISODES, SAMPLES = 4, 30  # 8, 8, 8 and 6 samples, in raw chunks of 5, 3, 5, 3, 5, 3, 5 and 1


def raw_samples(folder):
    """[(raw chunk, sample)] of a collection."""
    chunks = sorted((folder / "raw").glob("chunk_*.json"))
    return [(path.name, sample) for path in chunks for sample in json.loads(path.read_text())["samples"]]


# ---- reading ---------------------------------------------------------------------------------------------------

def make_data_set(folder, vehicles=4, sizes=(4, 3, 5, 2, 6, 1)):
    """A synthetic data set: `moved` of row i is i everywhere; the last chunk is held out."""
    out, dtype, row, chunks = folder / "processed", record_type(2, 1, vehicles, 2), 0, []
    out.mkdir(parents=True)
    for c, size in enumerate(sizes):
        array, path = np.zeros(size, dtype), out / f"chunk_{c:03d}.npy"
        array["moved"], array["nodes"] = np.arange(row, row + size)[:, None, None], 0.5
        np.save(path, array)
        chunks.append({"file": path.name, "rows": size, "split": "held_out" if c == len(sizes) - 1 else "train",
                       "bytes": path.stat().st_size, "sha256": file_hash(path)})
        row += size
    meta = {"version": VERSION, "history": 2, "future": 1, "chunks": chunks}
    write_atomically(out / "metadata.json", json.dumps(meta))
    part = {name: {"mean": [0.0] * n, "std": [1.0] * n} for name, n in (("nodes", len(NODE)), ("globals", len(GLOBAL)))}
    write_atomically(out / "statistics.json", json.dumps(part))
    return folder


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
        assert set(item) == set(batch) == set(record_type(2, 1, 4, 2).names)
        assert all(torch.equal(item[name], batch[name][place]) for name in item)
    assert batch["nodes"].dtype == torch.float32 and batch["present"].dtype == torch.bool
    assert ChunkedDataset(made, "held_out")[0]["moved"][0, 0] == 20
    batch["moved"].fill_(77)  # a copy, never a view of the file
    assert dataset[19]["moved"][0, 0] == 19


def test_row_numbers_outside_are_refused(made):
    """dataset[-1] was the last row of the *first* chunk."""
    dataset = ChunkedDataset(made, "train")
    for wrong in (20, -21):
        with pytest.raises(IndexError):
            dataset[wrong]
    try:
        last = dataset[-1]["moved"][0, 0]
    except IndexError:
        return
    assert last == 19


def test_empty_batch_can_be_read(made):
    """With drop_last=false the last batch of one rank may be empty, and reading it ended in a traceback."""
    batch = ChunkedDataset(made, "train").__getitems__([])
    assert {name: tuple(value.shape) for name, value in batch.items()}["moved"] == (0, 3, 4)


def test_few_chunks_are_open_at_once_and_pickling_copies_no_data(made):
    dataset = ChunkedDataset(made, "train")
    fresh, opened = len(pickle.dumps(dataset)), []
    assert len(dataset.open) == 0
    for row in (0, 5, 8, 13, 8, 15, 0):  # chunks 0, 1, 2, 3, 2, 4, 0: using chunk 2 again keeps it
        dataset[row]
        opened.append(list(dataset.open))
    assert opened[2:] == [[0, 1, 2], [1, 2, 3], [1, 3, 2], [3, 2, 4], [2, 4, 0]] and OPEN_CHUNKS == 3
    assert len(pickle.dumps(dataset)) == fresh
    again = pickle.loads(pickle.dumps(dataset))
    assert len(again.open) == 0 and torch.equal(again[14]["moved"], dataset[14]["moved"])


@pytest.mark.parametrize("change", [
    lambda c: c[:-1], lambda c: c[:40], lambda c: c + b"x", lambda c: b"", lambda c: None, lambda c: b"x" * len(c),
    lambda c: c.replace(b"'present'", b"'prezent'"), lambda c: c.replace(b"'moved'", b"'mooed'"),
    lambda c: c.replace(b"<f4", b"<i4"), lambda c: c.replace(b"(5,)", b"(1,)"), lambda c: b"PK\x03\x04" + c[4:]],
    ids="truncated header-cut trailing empty missing garbage other-field other-name type length zip".split())
def test_damaged_or_foreign_chunk_is_named(made, change):
    """A structured file of other fields ended in a KeyError, one that begins like a zip file in a BadZipFile."""
    path = made / "processed" / "chunk_002.npy"
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        ChunkedDataset(made, "train")


@pytest.mark.parametrize("content", [
    None, b"", b'{"version": 1, "chun', b"\x93NUMPY", b"[]", b"{}", b'{"version": 99}'])
@pytest.mark.parametrize("name", ["metadata.json", "statistics.json"])
def test_damaged_description_of_a_data_set_is_named(made, name, content):
    path = made / "processed" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        ChunkedDataset(made, "train")


# ---- order -----------------------------------------------------------------------------------------------------

def batches_of(length, batch, world, **more):
    """Batches of all ranks: [[rows]] by rank."""
    return [list(BlockSampler(length, batch, rank, world, seed=3, **more)) for rank in range(world)]


@pytest.mark.parametrize("length, batch, world", [(7, 2, 1), (64, 4, 2), (1000, 32, 3), (33, 16, 2), (5, 8, 2)])
def test_every_row_exactly_once_per_epoch_without_drop(length, batch, world):
    ranks = batches_of(length, batch, world, drop_last=False)
    assert sorted(row for batches in ranks for rows in batches for row in rows) == list(range(length))
    assert {len(batches) for batches in ranks} == {-(-length // (batch * world))}  # else ranks wait for each other


@pytest.mark.parametrize("length, batch, world", [(7, 2, 1), (64, 4, 2), (1000, 32, 3), (33, 16, 2)])
def test_no_row_twice_with_drop_last(length, batch, world):
    ranks = batches_of(length, batch, world)
    seen = [row for batches in ranks for rows in batches for row in rows]
    assert len(seen) == len(set(seen)) == length // (batch * world) * batch * world
    assert set(seen) <= set(range(length))
    assert all(len(rows) == batch for batches in ranks for rows in batches)
    assert [len(batches) for batches in ranks] == [len(BlockSampler(length, batch, 0, world))] * world


def test_order_depends_on_seed_and_epoch_only():
    def order(batch=4, rank=0, world=1, seed=1, epoch=0, skip=0):
        sampler = BlockSampler(500, batch, rank, world, seed)
        sampler.epoch, sampler.skip = epoch, skip
        return sampler.order().tolist()
    first = order()
    assert sorted(first) == list(range(500)) != first
    assert all(order(**other) == first for other in ({}, {"batch": 7}, {"rank": 1, "world": 2}, {"skip": 3}))
    assert len({tuple(order(seed=s, epoch=e)) for s in (1, 2) for e in (0, 1, 2)}) == 6
    alone, shared = batches_of(500, 8, 1)[0], batches_of(500, 4, 2)  # the same global batch, however many share it
    assert [set(rows) for rows in alone] == [set(a) | set(b) for a, b in zip(*shared)]


def test_skip_continues_where_the_epoch_was_left():
    whole, rest = BlockSampler(100, 8, 1, 2, seed=5), BlockSampler(100, 8, 1, 2, seed=5)
    whole.epoch = rest.epoch = rest.skip = 4
    assert list(rest) == list(whole)[4:] != [] and len(whole) == 6


def test_too_few_samples_for_one_global_batch():
    with pytest.raises(DataError, match="15 samples .* 2 ranks x 8"):
        BlockSampler(15, 8, 0, 2)
    assert len(BlockSampler(16, 8, 0, 2)) == len(BlockSampler(15, 8, 0, 2, drop_last=False)) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_reads_the_batches_of_the_sampler(made, workers):
    dataset, sampler = ChunkedDataset(made, "train"), BlockSampler(20, 4, 1, 2, seed=9)
    options = load_config("configs/default.yaml", [f"phase1.loader.num_workers={workers}"]).phase1.loader
    loader = make_loader(dataset, sampler, options, Team(0, 1, 0, 1, torch.device("cpu")))
    for sampler.epoch, sampler.skip in ((0, 0), (1, 1)):  # persistent processes must see the change
        assert [b["moved"][:, 0, 0].tolist() for b in loader] == list(sampler) != []


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
