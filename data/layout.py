"""Names, shapes and types of everything on disk, and how files are written and checked.

    <folder>/raw/config.json, chunk_EEE_P.json, metadata.json     what SUMO did (episode E, part P)
    <folder>/processed/chunk_NNN.npy, metadata.json, statistics.json

A processed chunk is a structured array, one record per sample. Axis letters: T history, F = T + H history and
future, n vehicles of the sample (padded), k neighbours (padded).
"""
import hashlib
import json
import os
from pathlib import Path

import numpy as np

from env.graph import EDGE, GLOBAL, NODE, SURROUND

VERSION = 1


class DataError(Exception):
    """A data file is missing, damaged or of another kind; the message names it."""


def record_type(history, future, vehicles, k):
    """The dtype of one sample: T = history, F = history + future, n = most vehicles, k = most neighbours."""
    frames = history + future
    return np.dtype([
        ("nodes", "<f2", (history, vehicles, len(NODE))), ("edges", "<f2", (history, vehicles, k, len(EDGE))),
        ("neighbours", "<i2", (history, vehicles, k)), ("globals", "<f2", (history, len(GLOBAL))),
        ("surround", "<f2", (history, vehicles, len(SURROUND))),
        ("usable", "?", (history, vehicles)),  # the leader is inside the sample, or there is none
        ("present", "?", (frames, vehicles)), ("fresh", "?", (frames, vehicles)), ("conflict", "?", (frames, vehicles)),
        ("moved", "<f4", (frames, vehicles)), ("speed", "<f4", (frames, vehicles))])


def write_atomically(path, data):
    """Write bytes or text to a temporary file beside `path`, flush it to disk, then rename it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_json(path, what):
    """Parsed JSON file, or DataError that names the file and `what` it should be."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged or half written, not {what}: {error}") from None


def file_hash(path):
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_settings(cfg):
    """What determines the content of a data set: two runs with equal settings give equal files."""
    from dataclasses import asdict
    data = {k: v for k, v in asdict(cfg.data).items() if k not in ("folder", "processes")}
    env = {k: v for k, v in asdict(cfg.env).items() if not k.endswith("timeout_s") and k != "recycle_episodes"}
    scenario = asdict(getattr(cfg, cfg.env.scenario)) if hasattr(cfg, cfg.env.scenario) else {}
    return {"version": VERSION, "seed": cfg.run.seed, "env": env, "scenario": scenario, "driver": asdict(cfg.driver),
            "graph": asdict(cfg.graph), "data": data}


def check_settings(path, settings, remedy):
    """Write `settings` to `path`, or compare with what is there: DataError lists the first differences."""
    path = Path(path)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1))
        return
    old = read_json(path, "the settings of this data set")
    if old != json.loads(json.dumps(settings)):
        differences = list(_differences(old, settings))[:5]
        raise DataError(f"{path}: this data set was made with other settings ({'; '.join(differences)}); {remedy}")


def _differences(old, new, prefix=""):
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key} was {a!r}, is {b!r}"
