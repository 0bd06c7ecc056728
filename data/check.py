"""Scan a whole data set and name everything that is wrong with it: file, row, what was expected and what was found.

    python -m data.check --config configs/quick.yaml

Looks at every value of the raw samples and of all processed graphs below data.folder: missing, truncated, overlong or
changed files, chunks of another schema, and rows with NaN, infinite or impossible values. Exit code 0 and one line
when all is well, 2 otherwise.
"""
import sys
from pathlib import Path
from configs import ConfigError, console
if __name__ == "__main__":
    console.hush_ctrl_c()

import numpy as np

from configs.files import file_hash
from data.layout import DataError, Shape, chunk_offset, read_description, read_json
from data.preprocess import compute_statistics
from data.records import not_finite, parse

SHOWN = 100  # findings printed at most


def check(folder):
    """(findings, facts): lists of lines of text about the data set below `folder`."""
    folder = Path(folder)
    raw = folder / "raw" / "metadata.json"
    if not raw.exists():
        return [f"{raw}: no such file; run data.collect first"], []
    findings, count = check_raw(raw.parent)
    facts = [f"{count} raw chunks"]
    for processed in sorted(path for path in (folder / "processed").glob("*") if path.is_dir()):
        if (processed / "metadata.json").exists():
            more, count = check_processed(processed)
            findings += more
            facts.append(f"{count} chunks in {processed.name}")
        else:
            facts.append(f"{processed.name} (half built, not looked at: data.preprocess continues it)")
    return findings, facts


def check_raw(folder):
    """(findings, number of chunks) of raw/."""
    try:
        meta = read_json(folder / "metadata.json", "metadata of a collection")
        if (settings := folder / "config.json").exists():  # else metadata.json has them
            read_json(settings, "the settings of this data set")
        data, graph = meta["settings"]["data"], meta["settings"]["graph"]
        shape = Shape(data["history"], data["future"], data["margin"], data["vehicles"][1], graph["k_max"])
        chunks = [(folder / c["file"], c["sha256"], len(c["hashes"])) for c in meta["chunks"]]
    except (DataError, KeyError, TypeError, IndexError) as error:
        return [str(error) if isinstance(error, DataError) else f"{folder / 'metadata.json'}: damaged: {error}"], 0
    findings = [finding for chunk in chunks for finding in _raw_chunk(*chunk, shape)]
    return findings + strangers(folder, "chunk_*.json", meta), len(chunks)


def strangers(folder, pattern, meta):
    """Findings: chunks that the metadata do not name."""
    named = {chunk["file"] for chunk in meta["chunks"]}
    return [f"{path}: metadata.json does not name it; remove it" for path in sorted(folder.glob(pattern))
            if path.name not in named]


def _raw_chunk(path, sha256, count, shape):
    if not path.exists():
        return [f"{path}: missing"]
    findings = [] if file_hash(path) == sha256 else [f"{path}: its SHA-256 is not that of metadata.json"]
    try:
        samples = list(read_json(path, "a raw chunk")["samples"])
    except (DataError, KeyError, TypeError) as error:
        return findings + [f"{path}: not a raw chunk: {error}"]
    if len(samples) != count:
        findings.append(f"{path}: {len(samples)} samples, expected {count}")
    for row, sample in enumerate(samples):
        try:
            parse(sample, shape)
        except ValueError as error:
            findings.append(f"{path}: row {row}: {error}")
    return findings


def check_processed(folder):
    """(findings, number of chunks) of one folder of graphs."""
    try:
        meta, statistics, shape = read_description(folder)
    except DataError as error:
        return [str(error)], 0
    chunks = meta["chunks"]
    findings = [finding for chunk in chunks for finding in _processed_chunk(folder / chunk["file"], chunk, shape)]
    train = [chunk for chunk in chunks if chunk["split"] == "train"]
    if not findings and compute_statistics(folder, train, meta["ranges"]) != statistics:
        findings.append(f"{folder / 'statistics.json'}: not the mean and std of the training chunks; remove {folder} "
                        "and run data.preprocess again")
    return findings + strangers(folder, "chunk_*.npy", meta), len(chunks)


def _processed_chunk(path, chunk, shape):
    try:
        offset = chunk_offset(path, chunk, shape)
    except DataError as error:
        return [str(error)]
    records = np.memmap(path, shape.frame(), "r", offset, (chunk["rows"], shape.frames))
    findings = [f"{path}: row {row}: {name}: NaN or infinite" for row, name in not_finite(records)]
    findings += [f"{path}: row {row}: {text}" for row, text in impossible(records)]
    if file_hash(path) != chunk["sha256"]:
        findings.append(f"{path}: its SHA-256 is not that of metadata.json")
    return findings


def impossible(records):
    """[(row, what is wrong)]: neighbours that do not exist."""
    near, present = records["neighbours"].astype(int), records["present"]
    n = present.shape[2]
    inside = (near >= -1) & (near < n)
    there = np.append(present, np.ones_like(present[..., :1]), -1)  # -1 stands for nobody
    known = np.take_along_axis(there[:, :, None, :], np.where(inside, near, -1) % (n + 1), 3)
    asked = (inside, f"an index outside -1 to {n - 1}"), (known, "a vehicle that is not present")
    return [(int(row), f"neighbours: {wrong}") for fine, wrong in asked
            for row in np.flatnonzero(~fine.all((1, 2, 3)))]


def main(arguments=None):
    from configs.command_line import parse as parse_command
    folder = parse_command(__doc__, arguments).config.data.folder
    findings, facts = check(folder)
    for line in findings[:SHOWN]:
        print(line, file=sys.stderr)
    if findings:
        count = f"{len(findings)} finding" + "s" * (len(findings) > 1)
        print(f"error: {folder}: {count}" + (f", {SHOWN} shown" if len(findings) > SHOWN else ""),
              file=sys.stderr)
        return 2
    print(f"{folder}: nothing wrong in {', '.join(facts)}")
    return 0


if __name__ == "__main__":
    sys.exit(console.exit_code(main, (ConfigError,)))
