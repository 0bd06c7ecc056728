"""Names, shapes and types of everything on disk, and how files are written and checked.

    <folder>/raw/config.json, chunk_EEE_P.json, metadata.json          what SUMO did (episode E, part P)
    <folder>/processed/KEY/chunk_NNN.npy, metadata.json, statistics.json     graphs; KEY is a hash of their settings

A processed chunk is a structured array [samples, F] of frames. Axis letters: T history, H future, M margin (room for
the time shift of augmentation on either side), F = M + T + H + M frames of a sample; n vehicles of it (padded), k
neighbours (padded). Any T + H frames in a row are a window to train on: they lie together and are read in one piece.
"""
import contextlib
import fcntl
import itertools
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.files import whole
from env.graph import EDGE, GLOBAL, NODE, SURROUND

VERSION = 4
AGAIN = "remove it and run data.preprocess again"  # what repairs a damaged chunk
FEATURES = {"nodes": NODE, "edges": EDGE, "surround": SURROUND, "globals": GLOBAL}  # stored as float16 or int8
GRAPH = (*FEATURES, "neighbours", "usable")  # fields that only the T frames of history need


class DataError(Exception):
    """A data file is missing, damaged or of another kind; the message names it."""

    def __init__(self, text):  # a DataLoader's process hands it on behind its whole traceback
        super().__init__(text.rpartition("data.layout.DataError: ")[2].strip())


class Shape(NamedTuple):
    """The sizes of a sample: T, H, M, n, k, and how features are stored ("float16" or "int8")."""
    history: int
    future: int
    margin: int
    vehicles: int
    k: int
    storage: str = "float16"

    @classmethod
    def of(cls, cfg):
        """The shape that a configs.Config asks for."""
        d = cfg.data
        return cls(d.history, d.future, d.margin, d.vehicles[1], cfg.graph.k_max + d.k_vary, d.storage)

    @property
    def window(self):
        """Control steps of history and future together."""
        return self.history + self.future

    @property
    def frames(self):
        """Control steps on disk: the window and its margins."""
        return self.window + 2 * self.margin

    def frame(self):
        """The dtype of one frame of a sample."""
        n, k, number = self.vehicles, self.k, {"float16": "<f2", "int8": "i1"}[self.storage]
        return np.dtype([
            ("nodes", number, (n, len(NODE))), ("edges", number, (n, k, len(EDGE))),
            ("surround", number, (n, len(SURROUND))),
            ("neighbours", "i1" if n < 128 else "<i2", (n, k)), ("globals", number, (len(GLOBAL),)),
            ("usable", "?", (n,)),  # the leader is inside the sample, or there is none
            ("present", "?", (n,)), ("fresh", "?", (n,)), ("conflict", "?", (n,)), ("moved", "<f4", (n,)),
            ("speed", "<f4", (n,)), ("extent", "<f4")], align=True)  # aligned: torch takes no odd strides


# ---- files -----------------------------------------------------------------------------------------------------

def write_array(path, array):
    """Write an array as .npy, whole or not at all; WriteError when the disk is full."""
    with whole(path) as file:
        np.lib.format.write_array(file, array, allow_pickle=False)


def read_json(path, what, kind=dict):
    """Parsed JSON file of this kind, or DataError that names the file and `what` it should be."""
    try:
        content = json.loads(Path(path).read_bytes())
        if not isinstance(content, kind):
            raise ValueError(f"found {str(content)[:40]!r}")
        return content
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged or half written, not {what}: {error}; remove it and run the step that "
                        "wrote it again") from None


@contextlib.contextmanager
def only_writer(folder, report=print, meanwhile=lambda: None):
    """One process at a time prepares a data set; the kernel lets go of the lock however the process ends. Removes the
    temporary files of writers that were killed. `meanwhile` is called every second of waiting; what it raises ends it.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")
    except OSError:  # a data set that may only be read has no writers
        yield
        return
    with lock:
        for tries in itertools.count():
            try:  # never blocked: ranks must meet, and a stop be heard
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not tries:
                    report(f"{folder}: waiting for another process that prepares this data set")
                meanwhile()
                time.sleep(1.0)
        for left in [*folder.glob("raw/.*.json.*"), *folder.glob("processed/*/.*.*")]:
            left.unlink()
        yield


# ---- descriptions ----------------------------------------------------------------------------------------------

def read_description(folder):
    """(metadata, statistics, Shape) of a processed data set."""
    meta = read_json(folder / "metadata.json", "metadata of a processed data set (run data.preprocess)")
    try:
        shape, version = Shape(**meta["shape"]), meta["version"]
        shape.frame(), meta["ranges"], meta["chunks"][0]
        [chunk[key] for chunk in meta["chunks"] for key in ("file", "split", "rows", "bytes", "sha256")]
    except (KeyError, TypeError, IndexError):
        shape, version = None, None
    if version != VERSION:
        raise DataError(f"{folder / 'metadata.json'}: not metadata of a data set of format {VERSION}; remove "
                        f"{folder} and run data.preprocess again")
    statistics = read_json(folder / "statistics.json", "statistics of a processed data set")
    for name in ("nodes", "globals"):
        part = statistics.get(name)
        columns = [part.get(key, []) if isinstance(part, dict) else [] for key in ("mean", "std")]
        numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for column in columns for x in column)
        if [len(column) for column in columns] != [len(FEATURES[name])] * 2 or not numbers or min(columns[1]) <= 0:
            raise DataError(f"{folder / 'statistics.json'}: no finite mean and positive std of {len(FEATURES[name])} "
                            f"{name} features; remove {folder} and run data.preprocess again")
    return meta, statistics, shape


def chunk_offset(path, chunk, shape):
    """Where the frames of a processed chunk begin, bytes, after comparing size and header with the metadata; the data
    are not read. DataError says what was expected and what was found."""
    if not path.exists():
        raise DataError(f"{path}: missing; run data.preprocess again")
    if path.stat().st_size != chunk["bytes"]:
        raise DataError(f"{path}: {path.stat().st_size} bytes, expected {chunk['bytes']}: truncated or damaged; "
                        f"{AGAIN}")
    try:
        array = np.lib.format.open_memmap(path, "r")
    except (ValueError, KeyError, IndexError, TypeError, EOFError, SyntaxError) as error:
        raise DataError(f"{path}: not a chunk of this data set: {error}; {AGAIN}") from None
    dtype, found = shape.frame(), array.dtype.fields or {}
    if array.dtype != dtype:
        wrong = [f"{name} is {found[name][0] if name in found else 'missing'}, expected {dtype[name]}"
                 for name in dtype.names if name not in found or found[name][0] != dtype[name]]
        raise DataError(f"{path}: frames of another kind: {'; '.join(wrong[:3]) or 'more or other fields'}; {AGAIN}")
    if array.shape != (chunk["rows"], shape.frames) or not chunk["rows"]:
        raise DataError(f"{path}: holds {array.shape} frames, expected {(chunk['rows'], shape.frames)}, at least 1 "
                        f"row; {AGAIN}")
    return array.offset
