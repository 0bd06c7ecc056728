"""Turn raw JSON chunks into chunks of graphs: parse, build graphs, deduplicate, shuffle over episodes, write .npy.

    python -m data.preprocess --config configs/quick.yaml

Resumable: a progress file lists the raw chunks already built in, and the same command continues. Features stay in
physical units; their statistics go to statistics.json, and the models normalise with them.
"""
import json
import sys
from pathlib import Path

import numpy as np

from configs import ConfigError
from data.layout import (VERSION, DataError, check_settings, data_settings, file_hash, read_json, record_type,
                         write_atomically)
from env.graph import EDGE, GLOBAL, NODE, SCENE, conflicts, neighbour_graph, node_features


def preprocess(cfg, report=print):
    """Build processed/ from raw/; returns its path. Raises DataError naming a missing or damaged file."""
    root = Path(cfg.data.folder)
    raw, out = root / "raw", root / "processed"
    meta = read_json(raw / "metadata.json", "metadata of a finished collection (run data.collect first)")
    check_settings(out / "config.json", {**data_settings(cfg), "raw": file_hash(raw / "metadata.json")},
                   f"remove {out} or name another data.folder")
    if (out / "metadata.json").exists():
        chunks = read_json(out / "metadata.json", "metadata of a processed data set")["chunks"]
        if all((out / c["file"]).exists() for c in chunks):
            report(f"preprocess: {out} is complete")
            return out
    plan = destinations(meta, cfg.data.samples_per_chunk, cfg.run.seed)
    dtype = record_type(cfg.data.history, cfg.data.future, cfg.data.vehicles[1], cfg.graph.k_max)
    _fill_chunks(cfg, raw, out, meta, plan, dtype, report)
    chunks = _finish_chunks(out, plan)
    statistics = compute_statistics(out, [c for c in chunks if c["split"] == "train"])
    write_atomically(out / "statistics.json", json.dumps(statistics, indent=1))
    write_atomically(out / "metadata.json", json.dumps({
        "version": VERSION, "sumo_version": meta["sumo_version"], "scenario": meta["scenario"],
        "history": cfg.data.history, "future": cfg.data.future, "interval": cfg.env.control_interval,
        "nodes": NODE, "edges": EDGE, "globals": GLOBAL, "raw_sha256": file_hash(raw / "metadata.json"),
        "duplicates": plan["duplicates"], "chunks": chunks}, indent=1))
    (out / "progress.json").unlink(missing_ok=True)
    report(f"preprocess: {sum(c['rows'] for c in chunks)} samples in {len(chunks)} chunks, "
           f"{plan['duplicates']} duplicates dropped, in {out}")
    return out


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
    rows, sizes, splits = {}, {}, {}
    for split, members in split_rows.items():
        if not members:
            raise DataError(f"the {split} split is empty: collect more episodes (data.samples_per_episode)")
        order, first = np.random.default_rng([seed, len(members)]).permutation(len(members)), len(splits)
        for place, member in enumerate(order):
            name = f"chunk_{first + place // per_chunk:03d}.npy"
            splits[name], sizes[name] = split, place % per_chunk + 1
            rows[members[member]] = (name, place % per_chunk)
    return {"rows": rows, "sizes": sizes, "splits": splits, "duplicates": duplicates}


def _fill_chunks(cfg, raw, out, meta, plan, dtype, report):
    """Build the records of every raw chunk that progress.json does not list yet into half-built chunks."""
    progress = out / "progress.json"
    done = read_json(progress, "a list of chunks") if progress.exists() else []
    for name, size in plan["sizes"].items():
        if not (out / name).exists() and not (out / f"{name}.part").exists():
            with open(out / f"{name}.part", "wb") as file:
                np.lib.format.write_array(file, np.zeros(size, dtype), allow_pickle=False)
            done = []
    for number, chunk in enumerate(meta["chunks"], 1):
        if chunk["file"] in done:
            continue
        if not (raw / chunk["file"]).exists() or file_hash(raw / chunk["file"]) != chunk["sha256"]:
            raise DataError(f"{raw / chunk['file']}: missing, damaged or half written (its SHA-256 is not that of "
                            "metadata.json); remove the file and run data.collect again")
        targets = {}
        for index, sample in enumerate(read_json(raw / chunk["file"], "a raw chunk")["samples"]):
            name, row = plan["rows"].get((chunk["file"], index), (None, None))
            if name:
                targets.setdefault(name, []).append((row, build_record(sample, cfg, dtype)))
        for name, records in targets.items():
            if (out / name).exists():
                continue  # finished earlier: never written in place
            array = np.lib.format.open_memmap(out / f"{name}.part", "r+")
            for row, record in records:
                array[row] = record
            array.flush()
            del array
        done.append(chunk["file"])
        write_atomically(progress, json.dumps(done))
        if number % 10 == 0 or number == len(meta["chunks"]):
            report(f"preprocess: {number}/{len(meta['chunks'])} raw chunks")


def _finish_chunks(out, plan):
    chunks = []
    for name, size in plan["sizes"].items():
        part = out / f"{name}.part"
        if part.exists():
            part.rename(out / name)
        chunks.append({"file": name, "rows": size, "split": plan["splits"][name], "bytes": (out / name).stat().st_size,
                       "sha256": file_hash(out / name)})
    return chunks


def build_record(sample, cfg, dtype):
    """One record of `dtype` from a raw sample (see data.collect.cut_sample)."""
    record = np.zeros((), dtype)
    record["neighbours"] = -1
    present = np.array(sample["present"], bool)
    n, before = present.shape[1], np.zeros(present.shape[1], bool)
    odometer = np.zeros(n)
    for f, here in enumerate(present):
        scene = _scene(sample, f)
        fresh, members = here & ~before, np.flatnonzero(here)
        record["present"][f, :n], record["fresh"][f, :n] = here, fresh
        record["speed"][f, :n], record["conflict"][f, :n] = scene["speed"], conflicts(scene) & here
        record["moved"][f, :n] = np.where(here & ~fresh, scene["odometer"] - odometer, 0)
        before, odometer = here, scene["odometer"]
        if f < cfg.data.history:
            _graph_of_frame(record, f, scene, members, sample, cfg)
    return record


def _scene(sample, f):
    scene = np.zeros(len(sample["ids"]), SCENE)
    for name in SCENE.names:
        scene[name] = sample[name][f]
    return scene


def _graph_of_frame(record, f, scene, members, sample, cfg):
    """Fill nodes, neighbours and edges of frame f; absent vehicles have none and are nobody's neighbour."""
    compact = np.full(len(scene) + 1, -1)  # index in the sample -> index among the members; -1 stays -1
    compact[members] = np.arange(len(members))
    inside = scene[members]
    record["surround"][f, members] = np.array(sample["surround"][f])[members]
    record["usable"][f, members] = inside["lead"] != -2
    inside["lead"] = np.where(inside["lead"] >= 0, compact[inside["lead"]], -1)
    near, edges = neighbour_graph(inside, min(sample["k"][f], cfg.graph.k_max), cfg.graph.radius_m)
    record["nodes"][f, members] = node_features(inside, sample["extent"], sample["time"][f])
    record["neighbours"][f, members, :near.shape[1]] = np.append(members, -1)[near]
    record["edges"][f, members, :near.shape[1]] = edges
    record["globals"][f] = sample["globals"][f]


def compute_statistics(out, chunks):
    """Mean and standard deviation of node and global features over the vehicles present in the training split."""
    sums = {"nodes": np.zeros((3, len(NODE))), "globals": np.zeros((3, len(GLOBAL)))}
    for chunk in chunks:
        array = np.load(out / chunk["file"], mmap_mode="r")
        present = array["present"][:, :array["nodes"].shape[1]]
        parts = {"nodes": array["nodes"][present], "globals": array["globals"].reshape(-1, len(GLOBAL))}
        for name, values in parts.items():
            values = values.astype(np.float64)
            sums[name] += [values.sum(0), (values ** 2).sum(0), np.full(values.shape[1], len(values))]
    result = {}
    for name, (total, squares, count) in sums.items():
        mean = total / count
        std = np.sqrt(np.maximum(squares / count - mean ** 2, 0))
        result[name] = {"mean": mean.tolist(), "std": np.where(std > 1e-3, std, 1.0).tolist()}
    return result


def main(arguments=None):
    from configs.command_line import parse
    try:
        preprocess(parse(__doc__, arguments).config)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
