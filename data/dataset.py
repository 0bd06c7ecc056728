"""Reading processed chunks while training: memory-mapped, opened lazily in each process, in block-shuffled order."""
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from configs import ConfigError
from data.layout import FEATURES, GRAPH, DataError, chunk_offset, read_description
from data.location import hold
from data.storage import ZERO, scale_and_offset

NUMBERS = (*FEATURES, "moved", "speed", "extent")  # the fields that could hold NaN


class ChunkedDataset(Dataset):
    """Samples of one split ("train" or "held_out"). Raises DataError naming a missing, damaged or foreign file.

    `dataset[i]` is a dictionary of tensors: the fields of a frame (data.layout) with the axis of the T + H frames of a
    window before them (T for those in GRAPH), features as float32, and two more: `row` is i, and `bad` says that the
    window held NaN or infinite values; it is then given back empty, without any vehicle. A list of indices gives a
    whole batch in one gather per chunk.
    """

    def __init__(self, folder, split, open_chunks=3, cache_mb=0.0, cache_timeout_s=60.0):
        self.folder = Path(folder)
        meta, self.statistics, self.shape = read_description(self.folder)
        self.ranges, self.dtype = meta["ranges"], self.shape.frame()
        self.chunks = [c for c in meta["chunks"] if c["split"] == split]
        self.offsets = [chunk_offset(self.folder / c["file"], c, self.shape) for c in self.chunks]
        self.sizes = np.array([c["rows"] for c in self.chunks])
        self.ends = np.cumsum(self.sizes)
        self.open = OpenChunks(open_chunks, cache_mb, cache_timeout_s)
        self.hold = hold(self.folder)

    def __len__(self):
        return int(self.ends[-1])

    def __getstate__(self):
        return {**self.__dict__, "hold": None}

    def __getitem__(self, index):
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, rows):
        """A batch as a dictionary of tensors [len(rows), ...], each sample in the middle of its margins."""
        return self.read(rows, np.full(len(rows), self.shape.margin))

    def read(self, rows, start):
        """A batch whose windows begin at the frames `start` of their records, 0 to 2 M. Sorted rows are read faster."""
        rows, start = np.asarray(rows, int), np.asarray(start, int)
        if len(rows) and not (0 <= rows.min() and rows.max() < len(self)):
            raise IndexError(f"row {rows.min()} or {rows.max()} of a split with {len(self)} rows")
        if (np.diff(rows) < 0).any():
            order = np.argsort(rows, kind="stable")
            return {name: value[np.argsort(order)] for name, value in self.read(rows[order], start[order]).items()}
        windows, batch = self._gather(rows, start), {"row": torch.from_numpy(rows)}
        for name in self.dtype.names:
            values = torch.from_numpy(windows[name][:, :self.shape.history] if name in GRAPH else windows[name])
            batch[name] = self._decode(name, values) if name in FEATURES else values.contiguous()
        batch["fresh"][:, 0] |= batch["present"][:, 0]  # nobody has a past before the window
        return empty_bad_rows(batch)

    def where(self, row):
        """File and row in it of a row of this split."""
        c = int(np.searchsorted(self.ends, row, "right"))
        return f"{self.folder / self.chunks[c]['file']}: row {row - self.ends[c] + self.sizes[c]}"

    def _gather(self, rows, start):
        """The windows [B, T + H] of sorted rows as stored: one copy from each chunk."""
        shape, which = self.shape, np.searchsorted(self.ends, rows, "right")
        windows = np.empty((len(rows), shape.window), self.dtype)
        for c in np.unique(which):
            begin, end = np.searchsorted(which, [c, c + 1])
            first = (rows[begin:end] - self.ends[c] + self.sizes[c]) * shape.frames + start[begin:end]
            frames = self.open.get(self.folder / self.chunks[c]["file"], self.dtype, self.offsets[c],
                                   self.sizes[c] * shape.frames)
            np.take(frames, first[:, None] + np.arange(shape.window), out=windows[begin:end], mode="clip")
        return windows

    def _decode(self, name, values):
        if not self.ranges:
            return values.float()
        scale, offset = map(torch.from_numpy, scale_and_offset(*self.ranges[name]))
        return torch.addcmul(offset, values.float(), scale).masked_fill_(values == ZERO, 0)


class OpenChunks:
    """The chunks that a process used last: `count` memory maps or, with `cache_mb` > 0, copies in memory that together
    stay below that size and are dropped after `timeout_s` seconds without use (looked at whenever a chunk is read).

    Pickling leaves them behind: it would copy the data.
    """

    def __init__(self, count, cache_mb=0.0, timeout_s=60.0):
        self.count, self.cache_bytes, self.timeout_s = count, cache_mb * 1e6, timeout_s
        self.chunks = OrderedDict()  # path: (array, time of the last use), least recently used first

    def __getstate__(self):
        return {**self.__dict__, "chunks": OrderedDict()}

    def get(self, path, dtype, offset, frames):
        """All frames of a chunk whose header has been checked, one sample after the other."""
        array, _ = self.chunks.pop(path, (None, 0))
        if array is None:
            array = np.memmap(path, dtype, "r", offset, (int(frames),)).view(np.ndarray)  # memmap's indexing is slow
            array = array.copy() if self.cache_bytes else array
        self.chunks[path] = array, time.monotonic()
        while len(self.chunks) > 1 and self._oldest_must_go():
            self.chunks.popitem(last=False)
        return array

    def _oldest_must_go(self):
        if not self.cache_bytes:
            return len(self.chunks) > self.count
        _, used = next(iter(self.chunks.values()))
        return (sum(array.nbytes for array, _ in self.chunks.values()) > self.cache_bytes
                or time.monotonic() - used > self.timeout_s)


def empty_bad_rows(batch):
    """Mark the samples with NaN or infinite values in `bad`, and empty them: no vehicle, so no target, no edge."""
    batch["bad"], numbers = torch.zeros_like(batch["row"], dtype=torch.bool), [batch[name] for name in NUMBERS]
    if not torch.isfinite(sum(values.sum() for values in numbers)):
        batch["bad"] = ~torch.isfinite(sum(values.flatten(1).sum(1) for values in numbers))
        for name, value in batch.items():
            if name not in ("bad", "row"):
                value[batch["bad"]] = -1 if name == "neighbours" else 0
    return batch


def bad_rows(dataset, batch):
    """Names (file and row) of the samples of a batch that were emptied."""
    return [dataset.where(int(row)) for row in batch["row"][batch["bad"]]]


class BlockSampler(Sampler):
    """Batches (epoch, rows) for one rank, block-shuffled; the order of an epoch depends on (seed, epoch) only.

    The chunks are permuted, and the rows inside a window of `window` chunks: nearly as random as a full shuffle,
    because the writer has shuffled samples over the chunks, and each chunk is opened once. Every rank takes its share
    of each global batch, so no sample is used twice or (but for a dropped rest) never in an epoch. Set `epoch` and
    `done` before use: `done` samples of the epoch's order have been used already, by however many ranks.

    `weights`: relative size of each rank's share; one number means equal shares of `batch_size`.
    """

    def __init__(self, sizes, batch_size, rank=0, world=1, seed=0, drop_last=True, window=3, weights=(1.0,)):
        self.sizes, self.size, self.rank, self.seed = np.asarray(sizes), batch_size * world, rank, seed
        self.drop_last, self.window, self.length = drop_last, window, int(np.sum(sizes))
        self.epoch = self.done = 0
        if len(weights) not in (1, world):
            raise ConfigError(f"phase1.loader.rank_weights={list(weights)}: expected one for each of {world} ranks")
        self.weights = np.array(weights if len(weights) == world else [1.0] * world)
        if np.diff(self._cuts(self.size)).min() < 1:
            raise ConfigError(f"phase1.loader.rank_weights={list(weights)}: a rank gets none of {self.size} samples")
        if drop_last and self.length < self.size:
            raise DataError(f"{self.length} samples do not fill one global batch of {world} ranks x {batch_size}; "
                            "collect more or lower the batch size")

    def order(self):
        """All row numbers in this epoch's order."""
        rng, first = np.random.default_rng([self.seed, self.epoch]), np.cumsum(self.sizes) - self.sizes
        chunks, parts = rng.permutation(len(self.sizes)), []
        for start in range(0, len(chunks), self.window):
            rows = [first[c] + np.arange(self.sizes[c]) for c in chunks[start:start + self.window]]
            parts.append(rng.permutation(np.concatenate(rows)))
        return np.concatenate(parts)

    def __len__(self):
        """Global batches of a whole epoch."""
        return self.length // self.size if self.drop_last else -(-self.length // self.size)

    def __iter__(self):
        order = self.order()[self.done:]
        for begin in range(0, len(order), self.size):
            batch = order[begin:begin + self.size]
            if len(batch) == self.size or not self.drop_last:
                cuts = self._cuts(len(batch))
                yield self.epoch, sorted(batch[cuts[self.rank]:cuts[self.rank + 1]].tolist())

    def _cuts(self, count):
        """Where the ranks' shares of a global batch of `count` samples begin and end."""
        return np.rint(np.append(0, np.cumsum(self.weights)) / self.weights.sum() * count).astype(int)


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


def make_loader(dataset, sampler, options, pin_memory):
    """DataLoader with the options of the configuration; `dataset.__getitems__` gives whole batches."""
    more = {}
    if options.num_workers:
        more = {"prefetch_factor": options.prefetch_factor, "persistent_workers": options.persistent_workers}
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=identity, num_workers=options.num_workers,
                      pin_memory=options.pin_memory and pin_memory, **more)


def identity(batch):
    """Collate function for `__getitems__`, which already returns a batch."""
    return batch
