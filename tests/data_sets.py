"""A small data set's configuration and hashes, for the tests of data/."""
import json

import numpy as np

from configs import load_config
from configs.files import file_hash, write_whole
from data.layout import FEATURES, VERSION, Shape, write_array

SAMPLES = 30  # of 4 episodes: 8, 8, 8 and 6 samples, in raw chunks of 5, 3, 5, 3, 5, 3, 5 and 1


def config(folder, *overrides):
    small = [f"data.folder={folder}", f"data.samples={SAMPLES}", "data.samples_per_chunk=5"]
    return load_config("configs/smoke.yaml", [*small, *overrides])


def silent(_):
    pass


def graphs(folder):
    """The one processed data set below a data folder."""
    return next((folder / "processed").iterdir())


def raw_samples(folder):
    """[(raw chunk, sample)] of a collection."""
    chunks = sorted((folder / "raw").glob("chunk_*.json"))
    return [(path.name, sample) for path in chunks for sample in json.loads(path.read_text())["samples"]]


def hashes(folder, pattern="*"):
    return {p.name: file_hash(p) for p in folder.glob(pattern) if p.is_file()}


def make_data_set(folder, vehicles=4, sizes=(4, 3, 5, 2, 6, 1), margin=0, rng=None):
    """A synthetic processed data set: `moved` of row i is i everywhere, the last chunk is held out. Frames can be told
    apart: `speed` is the frame's number in the record. With `rng`, features and edges are random."""
    shape, row, chunks = Shape(2, 1, margin, vehicles, 2), 0, []
    folder.mkdir(parents=True)
    for c, size in enumerate(sizes):
        array, path = np.zeros((size, shape.frames), shape.frame()), folder / f"chunk_{c:03d}.npy"
        array["moved"], array["nodes"] = np.arange(row, row + size)[:, None, None], 0.5
        array["speed"], array["extent"], array["present"] = np.arange(shape.frames)[:, None], 1000, True
        if rng:
            fill_with_noise(array, rng)
        write_array(path, array)
        chunks.append({"file": path.name, "rows": size, "split": "held_out" if c == len(sizes) - 1 else "train",
                       "bytes": path.stat().st_size, "sha256": file_hash(path)})
        row += size
    meta = {"version": VERSION, "shape": shape._asdict(), "ranges": None, "chunks": chunks}
    write_whole(folder / "metadata.json", json.dumps(meta))
    part = {name: {"mean": [0.25] * len(FEATURES[name]), "std": [1.0] * len(FEATURES[name])}
            for name in ("nodes", "globals")}
    write_whole(folder / "statistics.json", json.dumps(part))
    return folder


def fill_with_noise(array, rng):
    """Random vehicles, features and neighbours; who is absent has neither."""
    here = array["present"] = rng.random(array["present"].shape) < 0.9
    size, frames, n = here.shape
    array["nodes"] = rng.uniform(0.2, 0.8, array["nodes"].shape) * here[..., None]
    near = rng.integers(-1, n, array["neighbours"].shape)
    known = np.take_along_axis(np.append(here, np.zeros((size, frames, 1), bool), 2)[:, :, None], near % (n + 1), 3)
    array["neighbours"] = np.where(known & here[..., None], near, -1)
    array["edges"] = rng.uniform(1, 9, array["edges"].shape) * (array["neighbours"] >= 0)[..., None]
    array["conflict"], array["fresh"] = rng.random((2, *array["conflict"].shape)) < 0.3
    array["usable"] = rng.random(array["usable"].shape) < 0.8
