"""Turn raw JSON chunks into chunks of graphs: parse, build graphs, deduplicate, shuffle over episodes, write .npy.

    python -m data.preprocess --config configs/quick.yaml

Resumable: a progress file lists the raw chunks already built in, and the same command continues. Features stay in
physical units; their statistics go to statistics.json, and the models normalise with them. The result lies in
processed/KEY/, KEY being a hash of the raw samples and of every setting that matters: going back to earlier settings
finds the earlier graphs again, and data.location keeps the folder below data.disk_gb.
"""
import contextlib
import json
import sys
from pathlib import Path
from configs import ConfigError, WriteError, console
if __name__ == "__main__":
    console.hush_ctrl_c()

import numpy as np

from configs.files import file_hash, may_write, write_whole
from data.layout import FEATURES, VERSION, DataError, Shape, only_writer, read_description, read_json, write_array
from data.location import make_room, mark_used
from data.records import build_record
from data.settings import check_settings, processed_folder, raw_settings, traffic_seed
from data.storage import encode, features, largest_error, value_ranges
from env import graph

META = {"sumo_version", "scenarios", "held_out_episodes", "chunks"}  # of raw/metadata.json, as read here


def preprocess(cfg, report=print, meanwhile=lambda: None):
    """Build this configuration's graphs from raw/; returns their folder. DataError names a missing or damaged file.
    `meanwhile` is called after every raw chunk, and while another process prepares these data; what it raises ends the
    work, to be continued."""
    raw = Path(cfg.data.folder) / "raw"
    with only_writer(cfg.data.folder, report, meanwhile):
        meta = read_json(raw / "metadata.json", "metadata of a finished collection (run data.collect first)")
        if not META <= meta.keys():
            raise DataError(f"{raw / 'metadata.json'}: no metadata of a collection; remove it and run data.collect "
                            "again")
        check_settings(raw / "config.json", raw_settings(cfg), "name another data.folder or remove this one")
        out = processed_folder(cfg)
        if is_complete(out):
            report(f"preprocess: {out} is complete")
        else:
            build(cfg, meta, out, report, meanwhile)
        with contextlib.suppress(OSError):  # not there any more, or on a disk that may only be read
            (out / "progress.json").unlink()
        mark_used(out)
        make_room(out, cfg.data.disk_gb, report)
    return out


def is_complete(out):
    """Whether metadata.json, the statistics and all chunks that it names are there."""
    if not all((out / name).exists() for name in ("metadata.json", "statistics.json")):
        return False
    meta, *_ = read_description(out)
    return all((out / c["file"]).exists() for c in meta["chunks"])


def build(cfg, meta, out, report, meanwhile):
    """Write all files of a processed data set that are not there yet."""
    raw, shape = Path(cfg.data.folder) / "raw", Shape.of(cfg)
    with may_write(out):
        out.mkdir(parents=True, exist_ok=True)
    plan = destinations(meta, cfg.data.samples_per_chunk, traffic_seed(cfg))
    _fill_chunks(cfg, raw, out, meta, plan, shape, meanwhile)
    ranges = _ranges(out, plan) if shape.storage == "int8" else None
    chunks = [_finish_chunk(out, name, plan, shape, ranges) for name in plan["sizes"]]
    statistics = compute_statistics(out, [c for c in chunks if c["split"] == "train"], ranges)
    write_whole(out / "statistics.json", json.dumps(statistics, indent=1))
    write_whole(out / "metadata.json", json.dumps({
        "version": VERSION, "sumo_version": meta["sumo_version"], "scenarios": meta["scenarios"],
        "shape": shape._asdict(), "interval": cfg.env.control_interval, "features": FEATURES, "ranges": ranges,
        "largest_error": ranges and largest_error(ranges), "raw_sha256": file_hash(raw / "metadata.json"),
        "duplicates": plan["duplicates"], "chunks": chunks}, indent=1))
    report(f"preprocess: {sum(c['rows'] for c in chunks)} samples in {len(chunks)} chunks, "
           f"{sum(c['bytes'] for c in chunks) / 1e6:.0f} MB, {plan['duplicates']} duplicates dropped, in {out}")
    if sum(plan["sizes"].values()) < cfg.data.samples:
        report(f"NOTE: data.samples={cfg.data.samples} asks for more; an episode gives data.regions of them in each "
               f"control step from its {shape.frames}th on, and none while fewer than {cfg.data.vehicles[0]} drive")
    if meta.get("graph", now := file_hash(graph.__file__)) != now:
        report(f"NOTE: {raw} was recorded with another env/graph.py, and what it worked out then (conflict, surround, "
               "globals) stays; name another data.folder to record anew")
    if ranges:
        worst = largest_error(ranges)
        report(f"preprocess: int8 is wrong by at most {worst['nodes']['speed']:.2g} m/s of speed, "
               f"{worst['edges']['gap']:.2g} m of gap, {worst['edges']['ttc']:.2g} s of TTC (all: metadata.json)")


def destinations(meta, per_chunk, seed):
    """Where each raw sample goes: {"rows": {(raw file, index): (chunk, row)}, "sizes": {chunk: rows}, "splits", ...}.

    Whole episodes are held out; inside a split, samples of all episodes are shuffled over the chunks.
    """
    seen, split_rows, duplicates = set(), {"train": [], "held_out": []}, 0
    for chunk in meta["chunks"]:
        split = "held_out" if chunk["episode"] in meta["held_out_episodes"] else "train"
        for index, digest in enumerate(chunk["hashes"]):
            duplicates += digest in seen
            if digest not in seen:
                split_rows[split].append((chunk["file"], index))
            seen.add(digest)
    if not seen:
        raise DataError(f"the {len(meta['chunks'])} raw chunks hold no sample: there were never as many vehicles at "
                        "once as data.vehicles asks for; lower its first number, raise the demand, or, if nobody drove "
                        "at all, see whether the scenario's `begin` and departures fit together")
    rows, sizes, splits = {}, {}, {}
    for split, members in split_rows.items():
        if not members:
            raise DataError(f"the {split} split is empty ({len(meta['chunks'])} raw chunks): collect more episodes "
                            "(raise data.samples or lower data.samples_per_episode)")
        order, first = np.random.default_rng([seed, len(members)]).permutation(len(members)), len(splits)
        for place, member in enumerate(order):
            name = f"chunk_{first + place // per_chunk:03d}.npy"
            splits[name], sizes[name] = split, place % per_chunk + 1
            rows[members[member]] = (name, place % per_chunk)
    return {"rows": rows, "sizes": sizes, "splits": splits, "duplicates": duplicates}


def _fill_chunks(cfg, raw, out, meta, plan, shape, meanwhile):
    """Build the records of every raw chunk that progress.json does not list yet into half-built float16 chunks."""
    progress, dtype = out / "progress.json", shape._replace(storage="float16").frame()
    done = read_json(progress, "a list of chunks", list) if progress.exists() else []
    for name, size in plan["sizes"].items():
        if not (out / name).exists() and not (out / f"{name}.part").exists():
            progress.unlink(missing_ok=True)  # first: the next call would take the zeros for samples
            write_array(out / f"{name}.part", np.zeros((size, shape.frames), dtype))
            done = []
    console.begin("preprocess: raw chunk", len(done))
    for number, chunk in enumerate(meta["chunks"], 1):
        if chunk["file"] in done:
            continue
        targets = {}
        for index, sample in enumerate(_raw_samples(raw, chunk)):
            name, row = plan["rows"].get((chunk["file"], index), (None, None))
            if name and not (out / name).exists():  # finished earlier: never written in place
                k_shift = _k_shift(cfg, chunk["hashes"][index]) if plan["splits"][name] == "train" else 0
                try:
                    record = build_record(sample, shape, cfg.graph.radius_m, k_shift)
                except ValueError as error:
                    raise DataError(f"{raw / chunk['file']}: sample {index}: {error}; remove data.folder and run "
                                    "data.collect again") from None
                targets.setdefault(name, []).append((row, record))
        for name, records in targets.items():
            array = np.lib.format.open_memmap(out / f"{name}.part", "r+")
            for row, record in records:
                array[row] = record
            array.flush()
        done.append(chunk["file"])
        write_whole(progress, json.dumps(done))
        console.progress("preprocess: raw chunk", number, len(meta["chunks"]), always=number == len(meta["chunks"]))
        meanwhile()


def _raw_samples(raw, chunk):
    if not (raw / chunk["file"]).exists() or file_hash(raw / chunk["file"]) != chunk["sha256"]:
        raise DataError(f"{raw / chunk['file']}: missing, damaged or half written (its SHA-256 is not that of "
                        "metadata.json); remove the file and run data.collect again")
    return read_json(raw / chunk["file"], "a raw chunk")["samples"]


def _k_shift(cfg, digest):
    """How many neighbours more than the scene's k a training sample has: a fair die from the sample's hash."""
    return int(digest, 16) % (2 * cfg.data.k_vary + 1) - cfg.data.k_vary


def _ranges(out, plan):
    """Value ranges of all features, found once from the float16 chunks and kept: codes of other ranges mean other
    values."""
    path = out / "ranges.json"
    if not path.exists():
        if any((out / name).exists() for name in plan["sizes"]):
            raise DataError(f"{path}: missing, although chunks beside it are encoded; remove {out}")
        parts = (np.load(out / f"{name}.part", mmap_mode="r") for name in plan["sizes"])
        slices = (part[i:i + 16] for part in parts for i in range(0, len(part), 16))
        write_whole(path, json.dumps(value_ranges(slices)))
    return read_json(path, "value ranges of the features")


def _finish_chunk(out, name, plan, shape, ranges):
    """Give a filled chunk its final form and name; returns its entry in the metadata."""
    part = out / f"{name}.part"
    if part.exists() and not ranges:
        part.rename(out / name)
    elif not (out / name).exists():
        filled, final = np.load(part, mmap_mode="r"), np.zeros((plan["sizes"][name], shape.frames), shape.frame())
        for field in final.dtype.names:
            final[field] = encode(filled[field], *ranges[field]) if field in ranges else filled[field]
        write_array(out / name, final)
    part.unlink(missing_ok=True)
    return {"file": name, "rows": plan["sizes"][name], "split": plan["splits"][name],
            "bytes": (out / name).stat().st_size, "sha256": file_hash(out / name)}


def compute_statistics(out, chunks, ranges):
    """Mean and standard deviation of node and global features over the vehicles present in the training split."""
    sums = {name: np.zeros((3, len(FEATURES[name]))) for name in ("nodes", "globals")}
    for chunk in chunks:
        array = np.load(out / chunk["file"], mmap_mode="r")
        nodes = features(array, "nodes", ranges)[array["present"]]
        for name, values in (("nodes", nodes), ("globals", features(array, "globals", ranges))):
            values = values.reshape(-1, len(FEATURES[name])).astype(np.float64)
            sums[name] += [values.sum(0), (values ** 2).sum(0), np.full(values.shape[1], len(values))]
    result = {}
    for name, (total, squares, count) in sums.items():
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean ** 2, 0))
        result[name] = {"mean": mean.tolist(), "std": np.where(std > 1e-3, std, 1.0).tolist()}
    return result


def main():
    from configs.command_line import parse
    preprocess(parse(__doc__).config)


if __name__ == "__main__":
    sys.exit(console.exit_code(main, (ConfigError, DataError), "finished chunks are kept, ", (WriteError,)))
