"""Reading processed chunks while training: opened lazily in each process, in block-shuffled order."""
import os
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from configs import ConfigError
from data.layout import FEATURES, GRAPH, DataError, chunk_offset, read_description
from data.location import hold
from data.storage import scale_and_zero

NUMBERS = (*FEATURES, "moved", "speed", "extent")  # the fields that could hold NaN


class ChunkedDataset(Dataset):
    """Samples of one split ("train" or "held_out"). Raises DataError naming a missing, damaged or foreign file.

    `dataset[i]` is a dictionary of tensors: the fields of a frame (data.layout) with the axis of the T + H frames of a
    window before them (T for those in GRAPH), features as float32, and two more: `row` is i, and `bad` says that the
    window held NaN or infinite values; it is then given back empty, without any vehicle. A list of indices gives a
    whole batch at once.
    """

    def __init__(self, folder, split, open_chunks=3, cache_mb=0.0, cache_timeout_s=60.0):
        self.folder = Path(folder)
        meta, self.statistics, self.shape = read_description(self.folder)
        self.dtype = self.shape.frame()
        self.codes = {name: self._tiles(name, meta["ranges"][name]) for name in FEATURES if meta["ranges"]}
        self.chunks = [c for c in meta["chunks"] if c["split"] == split]
        files = [self.folder / chunk["file"] for chunk in self.chunks]
        offsets = [chunk_offset(path, chunk, self.shape) for path, chunk in zip(files, self.chunks)]
        self.sizes = np.array([c["rows"] for c in self.chunks])
        self.ends = np.cumsum(self.sizes)
        self.open = OpenChunks(list(zip(files, offsets)), open_chunks, cache_mb, cache_timeout_s)
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
        """The windows [B, T + H] of sorted rows as stored."""
        which, size = np.searchsorted(self.ends, rows, "right"), self.dtype.itemsize
        windows = np.empty((len(rows), self.shape.window), self.dtype)
        first = ((rows - self.ends[which] + self.sizes[which]) * self.shape.frames + start) * size
        into, length = memoryview(windows.reshape(-1).view(np.uint8)), self.shape.window * size
        for c in np.unique(which):
            begin, end = np.searchsorted(which, [c, c + 1])
            self.open.read(c, first[begin:end].tolist(), into[begin * length:end * length])
        return windows

    def _decode(self, name, values):
        if not self.codes:
            return values.float()
        scale, zero = self.codes[name]
        return values.float().sub_(zero).mul_(scale)

    def _tiles(self, name, bounds):
        """Scale and zero of one part as tensors of its whole size in a frame: torch is slow at repeating 4 numbers."""
        shape = self.dtype[name].shape
        return [torch.from_numpy(values).expand(shape).contiguous() for values in scale_and_zero(*bounds)]


class OpenChunks:
    """The chunks that a process used last: `count` open files or, with `cache_mb` > 0, copies in memory that together
    stay below that size (a single larger one is held alone) and are dropped after `timeout_s` seconds without use
    (looked at whenever a chunk is read).

    Windows are copied straight from the system's page cache (pread). That is faster than memory maps, of which every
    page must be mapped anew; memory does not seem to grow; and a file that shrinks is an error instead of a SIGBUS.
    """

    def __init__(self, files, count, cache_mb, timeout_s):
        self.files, self.count = files, count  # [(path, offset of the frames)], headers checked
        self.timeout_s, self.cache_bytes = timeout_s, torch.tensor(cache_mb * 1e6).share_memory_()
        self.chunks = OrderedDict()  # number: (file or bytes, time of the last use), least recently used first

    def __getstate__(self):
        return {**self.__dict__, "chunks": OrderedDict()}  # every process opens its own

    def drop_copies(self):
        """Read the files from now on; the loader's processes drop their copies as they open other chunks."""
        self.cache_bytes.zero_()
        self.chunks.clear()

    def read(self, c, places, into):
        """Fill the memoryview `into` with parts of equal size from the given places (bytes) in chunk number `c`."""
        source, (path, offset), length = self._get(c), self.files[c], len(into) // len(places)
        for i, place in enumerate(places):
            part, begin = into[i * length:(i + 1) * length], offset + place
            if isinstance(source, bytes):
                found = memoryview(source)[begin:begin + length]
                part[:len(found)], count = found, len(found)
            else:
                count = os.preadv(source.fileno(), [part], begin)
            if count != length:
                raise DataError(f"{path}: has become shorter while it was read; run data.check")

    def _get(self, c):
        source, _ = self.chunks.pop(c, (None, 0))
        if source is None:
            path = self.files[c][0]
            try:
                source = path.read_bytes() if self.cache_bytes else open(path, "rb", buffering=0)
            except FileNotFoundError:
                raise DataError(f"{path}: has vanished since training began; the same command prepares the data again "
                                "and continues") from None
        self.chunks[c] = source, time.monotonic()
        while len(self.chunks) > 1 and self._oldest_must_go():
            self.chunks.popitem(last=False)
        return source

    def _oldest_must_go(self):
        if not self.cache_bytes:
            return len(self.chunks) > self.count
        _, used = next(iter(self.chunks.values()))
        return (sum(len(copy) for copy, _ in self.chunks.values()) > self.cache_bytes
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
            raise ConfigError(f"phase1.loader.rank_weights={list(weights)}: expected one for each of {world} ranks, "
                              "or one number for equal shares")
        self.weights = np.array(weights if len(weights) == world else [1.0] * world)
        if np.diff(self._cuts(self.size)).min() < 1:
            raise ConfigError(f"phase1.loader.rank_weights={list(weights)}: a rank gets none of {self.size} samples; "
                              "raise its weight or phase1.batch_size")
        if drop_last and self.length < self.size:
            raise DataError(f"{self.length} samples do not fill one global batch of {world} ranks x {batch_size}; "
                            "raise data.samples or lower phase1.batch_size")

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
