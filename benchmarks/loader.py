"""How fast are recorded samples read, compared with the same data in memory and with a plain data set?

    python -m benchmarks.loader --json loader.json

Rows per second of one process without loader processes, batches of 32, page cache warm; a synthetic data set of the
default sizes, in the format of data.preprocess. "in-RAM gather" is the bound: all frames in one array, rows in a fully
random order. "plain" is a map-style data set with PyTorch's default collate over the same files, which opens the
chunk for every sample or keeps all of them open. "cold": the system's page cache forgets the files before each
repetition. The ways alternate in every repetition; medians are compared.

Then another process, whose anonymous memory is limited to 300 MB more than its libraries need, reads twice that much.
"""
import argparse
import functools
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import finish
from configs import Config
from configs.files import file_hash, write_whole
from configs.phases import LoaderConfig
from data.augment import AugmentedDataset
from data.dataset import BlockSampler, ChunkedDataset
from data.loading import make_loader
from data.layout import FEATURES, GRAPH, VERSION, Shape, write_array
from data.storage import encode, value_ranges

BATCH, BATCHES, PER_CHUNK, LIMIT_MB = 32, 40, 50, 300


# ---- the data set ----------------------------------------------------------------------------------------------

def write_data_set(folder, shape, rows, source=None):
    """A processed data set of `rows` random samples, all for training; or those of `source` in int8. Returns it."""
    rng, chunks, ranges = np.random.default_rng(0), [], None
    folder.mkdir()
    if source:
        ranges = value_ranges(np.load(path, mmap_mode="r") for path in sorted(source.glob("chunk*")))
    for c in range(rows // PER_CHUNK):
        name = f"chunk_{c:03d}.npy"
        frames = np.load(source / name) if source else random_frames(shape, rng)
        if source:
            coded = np.empty(frames.shape, shape.frame())
            for field in frames.dtype.names:
                coded[field] = encode(frames[field], *ranges[field]) if field in ranges else frames[field]
            frames = coded
        write_array(folder / name, frames)
        chunks.append({"file": name, "rows": PER_CHUNK, "split": "train", "bytes": (folder / name).stat().st_size,
                       "sha256": file_hash(folder / name)})
    write_whole(folder / "metadata.json", json.dumps(
        {"version": VERSION, "shape": shape._asdict(), "ranges": ranges, "chunks": chunks}))
    moments = {name: {"mean": [0.0] * len(FEATURES[name]), "std": [1.0] * len(FEATURES[name])} for name in FEATURES}
    write_whole(folder / "statistics.json", json.dumps(moments))
    return folder


def random_frames(shape, rng):
    frames = np.zeros((PER_CHUNK, shape.frames), shape.frame())
    for name in FEATURES:
        frames[name] = rng.normal(size=frames[name].shape)
    frames["neighbours"] = rng.integers(-1, shape.vehicles, frames["neighbours"].shape)
    frames["present"], frames["extent"] = True, 1000
    return frames


# ---- ways to read it -------------------------------------------------------------------------------------------

class Plain(Dataset):
    """What one writes first: an item is a dictionary of tensors, the loader stacks items."""

    def __init__(self, dataset, keep_open):
        self.files = [dataset.folder / chunk["file"] for chunk in dataset.chunks]
        self.shape, self.open = dataset.shape, [np.load(f, mmap_mode="r") for f in self.files] if keep_open else None

    def __getitem__(self, row):
        c, m = row // PER_CHUNK, self.shape.margin
        chunk = self.open[c] if self.open else np.load(self.files[c], mmap_mode="r")
        frames, item = chunk[row % PER_CHUNK], {}
        for name in frames.dtype.names:
            values = frames[name][m:m + (self.shape.history if name in GRAPH else self.shape.window)]
            item[name] = torch.tensor(np.array(values), dtype=torch.float32 if values.dtype == np.float16 else None)
        return item


class Mapped(ChunkedDataset):
    """Memory maps instead of reads, the last three chunks kept open."""

    def _gather(self, rows, start):
        which, windows = rows // PER_CHUNK, np.empty((len(rows), self.shape.window), self.dtype)
        first = (rows % PER_CHUNK * self.shape.frames + start)[:, None] + np.arange(self.shape.window)
        for c in np.unique(which):
            begin, end = np.searchsorted(which, [c, c + 1])
            self._map(c).take(first[begin:end], out=windows[begin:end], mode="clip")
        return windows

    @functools.lru_cache(3)
    def _map(self, c):
        path, offset = self.open.files[c]
        return np.memmap(path, self.dtype, "r", offset).view(np.ndarray)


class InMemory(ChunkedDataset):
    """The bound: the same windows from one array in memory."""

    def __init__(self, folder):
        super().__init__(folder, "train")
        self.frames = np.concatenate([np.load(folder / chunk["file"]).ravel() for chunk in self.chunks])

    def _gather(self, rows, start):
        return self.frames.take((rows * self.shape.frames + start)[:, None] + np.arange(self.shape.window))


def read_all(dataset, window=3):
    """A function that reads BATCHES batches and returns the number of rows; the next ones at the next call."""
    sampler = BlockSampler([PER_CHUNK] * (len(dataset) // PER_CHUNK), BATCH, seed=1, window=window)
    keys = itertools.cycle(sampler)  # of one epoch, over and over

    def run():
        for key in itertools.islice(keys, BATCHES):
            dataset.__getitems__(key if isinstance(dataset, AugmentedDataset) else key[1])
        return BATCHES * BATCH
    return run


def forget_files(dataset):
    """Let the page cache forget the files of a data set."""
    for path, _ in dataset.open.files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plain(plain, rows):
    rng = np.random.default_rng(0)

    def run():
        for _ in range(BATCHES // 8):
            default_collate([plain[int(row)] for row in rng.choice(rows, BATCH, replace=False)])
        return BATCHES // 8 * BATCH
    return run


def read_with_processes(dataset):
    """Through two loader processes, as phase 1 does by default: a whole epoch."""
    loader = make_loader(dataset, BlockSampler(dataset.dataset.sizes, BATCH, seed=1), LoaderConfig(), False)
    return lambda: sum(len(batch["row"]) for batch in loader)


def ways(folder, rows):
    """{name: (function that reads some batches and returns how many rows, data set whose files are cold)}."""
    shape, augment = Shape.of(Config()), Config().phase1.augment
    float16 = write_data_set(folder / "float16", shape, rows)
    int8 = write_data_set(folder / "int8", shape._replace(storage="int8"), rows, float16)
    forgotten = shutil.copytree(float16, folder / "forgotten")
    chunked, cold = ChunkedDataset(float16, "train"), ChunkedDataset(forgotten, "train")
    everything, copies = InMemory(float16), ChunkedDataset(forgotten, "train", cache_mb=1e4)
    return {"in-RAM gather": (read_all(everything, window=rows), None), "this project": (read_all(chunked), None),
            "memory maps instead": (read_all(Mapped(float16, "train")), None),
            "this, int8": (read_all(ChunkedDataset(int8, "train")), None),
            "this, augmented": (read_all(AugmentedDataset(chunked, augment, 1)), None),
            "this, augmented, 2 processes": (read_with_processes(AugmentedDataset(chunked, augment, 1)), None),
            "plain, chunks kept open": (read_plain(Plain(chunked, True), rows), None),
            "plain, opens the chunk": (read_plain(Plain(chunked, False), rows), None),
            "this, cold": (read_all(cold), cold), "this, copies in memory": (read_all(copies), copies)}


def measure(folder, rows, repeat):
    """{way: [rows per second of each repetition]}; the first, uncounted one warms the page cache."""
    sides, rates = ways(folder, rows), {}
    for turn in range(repeat + 1):
        for name, (run, cold) in sides.items():
            if cold:
                forget_files(cold)
            start = time.perf_counter()
            count = run()
            if turn:
                rates.setdefault(name, []).append(count / (time.perf_counter() - start))
    return rates


# ---- memory ----------------------------------------------------------------------------------------------------

def status_mb(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) / 1024


def read_in_limit(folder):
    """Read a whole epoch, augmented, under the limit; print the growth of anonymous and of file-backed memory, MB."""
    dataset = AugmentedDataset(ChunkedDataset(folder, "train"), Config().phase1.augment, 1)
    before = {key: status_mb(key) for key in ("RssAnon", "RssFile", "VmData")}
    resource.setrlimit(resource.RLIMIT_DATA, (int((before["VmData"] + LIMIT_MB) * 2 ** 20), resource.RLIM_INFINITY))
    most = dict(before)
    for number, key in enumerate(BlockSampler(dataset.dataset.sizes, BATCH, seed=1)):
        dataset.__getitems__(key)
        if number % 10 == 0:
            most = {name: max(value, status_mb(name)) for name, value in most.items()}
    print(json.dumps({name: round(most[name] - before[name], 1) for name in before}))


def memory_growth(folder):
    """{size of the data set, growth by kind of memory} of a process of its own, MB."""
    shape = Shape.of(Config())
    rows = int(2 * LIMIT_MB * 2 ** 20 / (shape.frame().itemsize * shape.frames)) // PER_CHUNK * PER_CHUNK + PER_CHUNK
    write_data_set(folder / "large", shape, rows)
    out = subprocess.run([sys.executable, "-m", "benchmarks.loader", "--read", str(folder / "large")], check=True,
                         capture_output=True, text=True).stdout
    size = sum(path.stat().st_size for path in (folder / "large").iterdir()) / 2 ** 20
    return {"data_mb": round(size), "limit_mb": LIMIT_MB, **json.loads(out)}


def main():
    parser = new_parser(__doc__, "loader.json")
    parser.add_argument("--repeat", type=at_least(1), default=7)
    parser.add_argument("--rows", type=at_least(50), default=2000, help="samples of the data set (%(default)s)")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rows -= options.rows % PER_CHUNK  # whole chunks
    torch.set_num_threads(1)
    if options.read:
        return read_in_limit(Path(options.read))
    with tempfile.TemporaryDirectory() as folder:
        rates, memory = measure(Path(folder), options.rows, options.repeat), memory_growth(Path(folder))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"machine load {os.getloadavg()[0]:.1f}; median of {options.repeat}")
    print(f"{'way':32s}{'rows/s':>12s}{'of in-RAM gather':>20s}")
    for name, rate in medians.items():
        print(f"{name:32s}{rate:12.0f}{rate / medians['in-RAM gather']:20.2f}")
    ratio = [medians["this project"] / medians[f"plain, {kind}"] for kind in ("opens the chunk", "chunks kept open")]
    print(f"this project: {ratio[0]:.1f} times plain that opens the chunk, {ratio[1]:.1f} times plain with open chunks")
    print(f"reading {memory['data_mb']} MB under a limit of {LIMIT_MB} MB: anonymous memory grew by "
          f"{memory['RssAnon']} MB (file-backed {memory['RssFile']} MB)")
    finish(options.json, rates=medians, all=rates, memory=memory)


if __name__ == "__main__":
    main()
