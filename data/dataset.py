"""Reading processed chunks while training: memory-mapped, opened lazily in each process, in block-shuffled order."""
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from data.layout import VERSION, DataError, read_json, record_type
from env.graph import GLOBAL, NODE

OPEN_CHUNKS = 3  # LRU of open memory maps per process


class ChunkedDataset(Dataset):
    """Samples of one split ("train" or "held_out"). Raises DataError naming a missing, damaged or foreign file.

    `dataset[i]` is a dictionary of tensors; a list of indices gives a whole batch in one gather per chunk.
    """

    def __init__(self, folder, split):
        self.folder = Path(folder) / "processed"
        self.meta = read_json(self.folder / "metadata.json", "metadata of a processed data set (run data.preprocess)")
        if not isinstance(self.meta, dict) or self.meta.get("version") != VERSION:
            raise DataError(f"{self.folder / 'metadata.json'}: not metadata of a data set of format {VERSION}")
        self.statistics = read_json(self.folder / "statistics.json", "statistics of a processed data set")
        for name, columns in (("nodes", NODE), ("globals", GLOBAL)):
            if [len(column) for column in _columns(self.statistics, name)] != [len(columns)] * 2:
                raise DataError(f"{self.folder / 'statistics.json'}: no mean and std of {len(columns)} {name} features")
        self.chunks = [c for c in self.meta["chunks"] if c["split"] == split]
        self.ends = np.cumsum([c["rows"] for c in self.chunks])
        for chunk in self.chunks:
            self.dtype = self._check(chunk)
        self.open = OrderedDict()

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, index):
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices):
        """A batch as a dictionary of tensors [len(indices), ...]; features come as float32."""
        indices = np.asarray(indices, int)
        if len(indices) and not (-len(self) <= indices.min() and indices.max() < len(self)):
            raise IndexError(f"row {indices.min()} or {indices.max()} of a split with {len(self)} rows")
        indices = indices % len(self)
        which = np.searchsorted(self.ends, indices, "right")
        records = np.empty(len(indices), self.dtype)
        for c in np.unique(which):
            here = np.flatnonzero(which == c)
            records[here] = self._map(int(c))[indices[here] - (self.ends[c] - self.chunks[c]["rows"])]
        return {name: _tensor(records[name]) for name in records.dtype.names}

    def __getstate__(self):
        return {**self.__dict__, "open": OrderedDict()}  # pickling a memory map would copy the data

    def _map(self, c):
        if c in self.open:
            self.open.move_to_end(c)
        else:
            self.open[c] = np.load(self.folder / self.chunks[c]["file"], mmap_mode="r", allow_pickle=False)
            if len(self.open) > OPEN_CHUNKS:
                self.open.popitem(last=False)
        return self.open[c]

    def _check(self, chunk):
        """Compare a file's size and header with the metadata, without reading the data."""
        path = self.folder / chunk["file"]
        if not path.exists():
            raise DataError(f"{path}: missing; run data.preprocess again")
        if path.stat().st_size != chunk["bytes"]:
            raise DataError(f"{path}: {path.stat().st_size} bytes, expected {chunk['bytes']}: truncated or damaged")
        try:
            array = np.lib.format.open_memmap(path, "r")
            sizes = array.dtype["present"].shape[-1], array.dtype["edges"].shape[2]
            expected = record_type(self.meta["history"], self.meta["future"], *sizes)
        except (ValueError, KeyError, IndexError, TypeError, EOFError) as error:
            raise DataError(f"{path}: not a chunk of this data set: {error}") from None
        if array.dtype != expected or array.shape != (chunk["rows"],):
            raise DataError(f"{path}: holds {array.shape} {array.dtype}, expected {chunk['rows']} records {expected}")
        return expected


def _columns(statistics, name):
    """[mean, std] of one kind of features; empty lists where the file is of another kind."""
    part = statistics.get(name) if isinstance(statistics, dict) else None
    return [part.get(key, []) if isinstance(part, dict) else [] for key in ("mean", "std")]


def _tensor(values):
    # A real copy: never a view of the file, and torch refuses the strides of fields in records of odd length.
    return torch.from_numpy(np.array(values, np.float32 if values.dtype == np.float16 else values.dtype, order="C"))


def identity(batch):
    """Collate function for `__getitems__`, which already returns a batch."""
    return batch


class BlockSampler(Sampler):
    """Batches of indices for one rank, block-shuffled; the order depends on (seed, epoch) only.

    Blocks of neighbouring rows are permuted, and rows inside a window of blocks: nearly as random as a full shuffle,
    but a window touches few pages. Every rank takes its slice of each global batch, so no sample is used twice or
    (but for the dropped rest) never in an epoch. Set `epoch` and `skip` (global batches already done) before use.
    """

    def __init__(self, length, batch_size, rank=0, world=1, seed=0, drop_last=True, block=16, window=16):
        self.length, self.batch_size, self.rank, self.world = length, batch_size, rank, world
        self.seed, self.drop_last, self.block, self.window = seed, drop_last, block, window
        self.epoch = self.skip = 0
        if drop_last and length < batch_size * world:
            raise DataError(f"{length} samples do not fill one global batch of {world} ranks x {batch_size}; "
                            "collect more or lower the batch size")

    def order(self):
        """All row numbers in this epoch's order."""
        rng = np.random.default_rng([self.seed, self.epoch])
        blocks = rng.permutation(-(-self.length // self.block))
        parts = []
        for start in range(0, len(blocks), self.window):
            rows = (blocks[start:start + self.window, None] * self.block + np.arange(self.block)).ravel()
            parts.append(rng.permutation(rows[rows < self.length]))
        return np.concatenate(parts)

    def __len__(self):
        size = self.batch_size * self.world
        return self.length // size if self.drop_last else -(-self.length // size)

    def __iter__(self):
        order, size = self.order(), self.batch_size * self.world
        for b in range(self.skip, len(self)):
            yield order[b * size:(b + 1) * size][self.rank::self.world].tolist()


class StreamingDataset(IterableDataset):
    """Micro-batches of sequences fresh from the simulator (phase 3), in a seeded order, several passes.

    `sequences` is a dictionary of tensors with the sequence axis first; memory is that of one epoch's rollout.
    """

    def __init__(self, sequences, batch_size, passes, seed):
        self.sequences, self.batch_size, self.passes, self.seed = sequences, batch_size, passes, seed
        self.count = len(next(iter(sequences.values())))

    def __len__(self):
        return self.passes * (self.count // self.batch_size)

    def __iter__(self):
        for p in range(self.passes):
            order = np.random.default_rng([self.seed, p]).permutation(self.count)
            for b in range(self.count // self.batch_size):
                rows = torch.from_numpy(order[b * self.batch_size:(b + 1) * self.batch_size])
                yield {name: value[rows] for name, value in self.sequences.items()}
