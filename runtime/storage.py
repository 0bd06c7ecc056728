"""Where a rollout waits until it has been learned from: float16, without padding, in memory or spilled to a file."""
import mmap
import os
import shutil
import tempfile
from pickle import UnpicklingError

import numpy as np
import torch

from runtime.checkpoint import CheckpointError

STEP = 1 << 20  # bytes by which a table grows at least


class SpillError(Exception):
    """The disk is full; the message names the folder and what was to be written there."""


class Rows:
    """A table [n, ...] that grows at its end without being copied: in memory, or in a file once `spill` was called."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.used, self.file = shape, np.dtype(dtype), 0, None
        self.width = int(np.prod(shape, dtype=int)) * self.dtype.itemsize  # bytes of a row
        self.map = mmap.mmap(-1, STEP, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @property
    def bytes(self):
        """Size of the rows in use."""
        return self.used * self.width

    def append(self, rows):
        """Copy `rows` [m, ...] to the end; returns the number of the first."""
        begin, self.used = self.used, self.used + len(rows)
        if self.bytes > len(self.map):
            size = max(self.bytes + STEP, len(self.map) * 3 // 2)
            if self.file is not None:
                self._reserve(size)
            self.map.resize(size)  # moves pages, not bytes
        self.array()[begin:] = rows
        return begin

    def array(self):
        """What was appended, as a view; drop it before appending more."""
        return np.frombuffer(self.map, self.dtype, self.bytes // self.dtype.itemsize).reshape(self.used, *self.shape)

    def spill(self, folder):
        """Move to a file in `folder` that has no name, so that nothing is left of it however this process ends."""
        self.file, self.folder, memory = tempfile.TemporaryFile(dir=folder), folder, self.map
        self._reserve(len(memory))
        self.map = mmap.mmap(self.file.fileno(), len(memory))
        np.frombuffer(self.map, np.uint8)[:] = np.frombuffer(memory, np.uint8)

    def _reserve(self, size):
        """Claim the blocks now: writing to a map of a full disk would kill the process without a word."""
        try:
            os.posix_fallocate(self.file.fileno(), 0, size)
        except OSError as error:
            raise SpillError(f"{self.folder}: no room to spill a rollout (a table of {size >> 20} MB): "
                             f"{error.strerror}; free some space, or raise or switch off phase2.spill_mb") from None


class Rollout:
    """T control steps of E environments.

    `put` keeps what every step has once, [T, E, ...]; `append` what it has once per candidate or vehicle, in tables
    without padding. Beyond `spill_mb` MB (0 = never) the tables move to files in `folder`. Afterwards
    `rollout["reward"]` is a tensor [T, E, ...]; a table comes padded with zeros to the most rows of a step.
    """

    def __init__(self, steps, envs, folder=None, spill_mb=0):
        self.steps, self.envs, self.folder, self.limit = steps, envs, folder, spill_mb * 2 ** 20
        self.fixed, self.tables, self.begin, self.count, self.spilled = {}, {}, {}, {}, False

    def put(self, t, envs, values):
        """{name: array [len(envs), ...]} of control step t."""
        for name, value in values.items():
            if name not in self.fixed:
                self.fixed[name] = np.zeros((self.steps, self.envs, *value.shape[1:]), value.dtype)
            self.fixed[name][t, envs] = value

    def append(self, t, envs, values, counts):
        """{name: array [len(envs), most, ...]} of control step t, of which environment i has the first counts[i]."""
        kept = np.arange(counts.max()) < counts[:, None]
        for name, value in values.items():
            if name not in self.tables:
                self._new_table(name, value)
            first = self.tables[name].append(value[:, :kept.shape[1]][kept])
            self.begin[name][t, envs] = first + counts.cumsum() - counts
            self.count[name][t, envs] = counts
        self.spilled |= 0 < self.limit < sum(table.bytes for table in self.tables.values())
        for table in self.tables.values():
            if self.spilled and table.file is None:
                table.spill(self.folder)

    def _new_table(self, name, value):
        table = self.tables[name] = Rows(value.shape[2:], value.dtype)
        table.append(np.zeros((1, *value.shape[2:]), value.dtype))  # row 0 is nobody's: what padding reads
        self.begin[name] = np.full((self.steps, self.envs), -1)
        self.count[name] = np.zeros((self.steps, self.envs), int)

    def __getitem__(self, name):
        if name in self.fixed:
            return torch.from_numpy(self.fixed[name])
        kept = self.begin[name][:, 0] >= 0  # some things are kept at some control steps only
        rows = row_numbers(self.begin[name][kept].ravel(), self.count[name][kept].ravel())
        return torch.from_numpy(self.tables[name].array()[rows]).unflatten(0, (-1, self.envs))

    def dense(self):
        """{name: tensor [T, E, ...]} of everything, padded (phase 3, whose sequences are cut from it)."""
        return {name: self[name] for name in (*self.fixed, *self.tables)}


def row_numbers(begin, count):
    """[S, most]: the numbers begin[s], begin[s] + 1, ... of count[s] rows, then 0, which is nobody's row."""
    place = np.arange(max(count.max(initial=0), 1))
    return np.where(place < count[:, None], begin[:, None] + place, 0)


class Minibatches:
    """Minibatches from a finished Rollout. They live on the learner's device, or, when spilled, on the disk.

    Candidates are not padded: those of all control steps of a minibatch follow each other as rows, and `place` [B, C]
    says which row is the c-th candidate of step b, 0 = none. So a minibatch drawn at random from the whole rollout,
    as PPO wants it, costs what its own candidates cost, however many there were in the most crowded step; sorting
    steps by size would keep padding small too, but minibatches would then differ in what traffic they hold.
    """

    def __init__(self, rollout, names, device):
        home = "cpu" if rollout.spilled else device
        self.device, self.fixed = device, {name: rollout[name].flatten(0, 1).to(home) for name in names}
        self.table = torch.from_numpy(rollout.tables["candidates"].array()).to(home)
        self.begin, self.count = (x["candidates"].ravel() for x in (rollout.begin, rollout.count))

    def save(self, path):
        """Write everything to a file. Raises SpillError when there is no room."""
        places = {name: torch.from_numpy(getattr(self, name)) for name in ("begin", "count")}
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.save({"fixed": self.fixed, "table": self.table, **places}, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
            path.with_suffix(".part").unlink(missing_ok=True)
            raise SpillError(f"{path}: a rollout of the warm start could not be kept: {error}; free some space, or "
                             "lower phase2.imitate_keep") from None

    @classmethod
    def load(cls, path, device):
        """Those of `save`, which stay on the disk: only what a minibatch needs is read. CheckpointError where there is
        nothing to read."""
        try:
            kept = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
            fixed, table, begin, count = (kept[name] for name in ("fixed", "table", "begin", "count"))
        except (OSError, RuntimeError, UnpicklingError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: a kept rollout of the warm start cannot be read: {error}; remove the "
                                  "file, the others are enough to go on") from None
        self = cls.__new__(cls)
        self.device, self.fixed, self.table = device, fixed, table
        self.begin, self.count = begin.numpy(), count.numpy()
        return self

    def __call__(self, steps):
        """The control steps t * E + env of an array, possibly none, as {name: tensor} on the learner's device."""
        rows = row_numbers(self.begin[steps], self.count[steps])
        there = rows > 0
        place = np.where(there, there.cumsum().reshape(there.shape), 0)
        home = self.table.device
        index, picked = (torch.from_numpy(x).to(home) for x in (steps, np.append(0, rows[there])))
        batch = {name: value[index] for name, value in self.fixed.items()}
        batch.update(candidates=self.table[picked], place=torch.from_numpy(place))
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}


class Kept:
    """Minibatches of the last `most` iterations of the warm start in a folder, to be learned from again."""

    def __init__(self, folder, most, device):
        self.folder, self.most, self.device = folder, most, device

    def add(self, iteration, minibatches):
        """Keep those of an iteration."""
        if self.most:
            minibatches.save(self._path(iteration))

    def trim(self, iteration):
        """Forget what nobody needs who goes on from a checkpoint before this iteration."""
        for path in self.folder.glob("*.pt"):
            if int(path.stem) < iteration - self.most:
                path.unlink(missing_ok=True)

    def before(self, iteration, steps):
        """[Minibatches] of earlier iterations with so many control steps (fewer, when a worker was given up)."""
        paths = [self._path(i) for i in range(iteration - self.most, iteration)]
        kept = [Minibatches.load(path, self.device) for path in paths if path.exists()]
        return [one for one in kept if len(one.begin) == steps]

    def clear(self):
        """Nothing is left of them, nor of those of other ranks or of another number of ranks."""
        for folder in self.folder.parent.glob(f"{self.folder.name.partition('-')[0]}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _path(self, iteration):
        return self.folder / f"{iteration:05d}.pt"
