"""data/check.py: every kind of damage is found, with file and row; the command line's exit codes."""
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_sets import graphs

from configs.files import file_hash, write_whole
from data.check import check, main
from data.layout import FEATURES

ROOT = Path(__file__).resolve().parent.parent


def checked(folder):
    findings, _ = check(folder)
    return findings


def change_chunk(folder, change):
    """Rewrite chunk_001.npy as `change(array)` gives it, sizes and hash in the metadata kept right."""
    path = graphs(folder) / "chunk_001.npy"
    np.save(path, change(np.load(path)))
    meta = json.loads((graphs(folder) / "metadata.json").read_text())
    entry = next(c for c in meta["chunks"] if c["file"] == path.name)
    entry.update(bytes=path.stat().st_size, sha256=file_hash(path))
    write_whole(graphs(folder) / "metadata.json", json.dumps(meta))


def with_value(field, where, value):
    def change(array):
        array[field][where] = value
        return array
    return change


def narrower(array):
    """The same frames with one node feature less."""
    kinds = [(n, array.dtype[n].base, (12, 8) if n == "nodes" else array.dtype[n].shape) for n in array.dtype.names]
    return np.zeros(array.shape, kinds)


def other_type(array):
    kinds = [(n, "<f8" if n == "speed" else array.dtype[n].base, array.dtype[n].shape) for n in array.dtype.names]
    return np.zeros(array.shape, kinds)


@pytest.mark.parametrize("change, words", [
    (with_value("nodes", (3, 2, 1, 4), np.nan), ["row 3", "nodes", "NaN"]),
    (with_value("edges", (0, 29, 0, 0, 2), -np.inf), ["row 0", "edges", "NaN"]),
    (with_value("speed", (4, 34, 11), np.nan), ["row 4", "speed", "NaN"]),
    (with_value("extent", (2, 7), np.inf), ["row 2", "extent", "NaN"]),
    (with_value("neighbours", (1, 0, 0, 0), 12), ["row 1", "neighbours", "-1 to 11"]),
    (with_value("neighbours", (1, 0, 0, 0), -2), ["row 1", "neighbours", "-1 to 11"]),
    (with_value("present", (2, slice(None), slice(0, 2)), False), ["row 2", "neighbours", "not present"]),
    (narrower, ["nodes is", "(12, 8)", "expected ", "(12, 9)"]), (other_type, ["speed is", "<f8", "<f4"]),
    (lambda array: array[:3], ["(3, 35)", "expected (5, 35)"]), (lambda array: array[:0], ["(0, 35)", "at least 1"]),
    (lambda array: array[:, :15].copy(), ["(5, 15)", "expected (5, 35)"]), (lambda array: array[0], ["(35,)"]),
    (lambda array: np.zeros(5), ["nodes is missing"])])
def test_wrong_content_is_found_with_file_and_row(copy, change, words):
    assert checked(copy) == []
    change_chunk(copy, change)
    findings = checked(copy)
    assert len(findings) == 1 and str(graphs(copy) / "chunk_001.npy") in findings[0]
    assert [word for word in words if word not in findings[0]] == []


@pytest.mark.parametrize("change, words", [
    (lambda c: c[:-7], ["bytes, expected", "truncated"]), (lambda c: c + b"junk", ["bytes, expected"]),
    (lambda c: None, ["missing", "data.preprocess"]), (lambda c: b"", ["0 bytes, expected"]),
    (lambda c: b"x" * len(c), ["not a chunk"]), (lambda c: c[:-2] + bytes([c[-2] ^ 1]) + c[-1:], ["SHA-256"])],
    ids="truncated trailing missing empty garbage flipped".split())
def test_damaged_file_is_found(copy, change, words):
    path = graphs(copy) / "chunk_002.npy"
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    findings = checked(copy)
    assert len(findings) == 1 and str(path) in findings[0] and not [w for w in words if w not in findings[0]]


def change_raw(folder, change):
    path = folder / "raw" / "chunk_001_0.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    meta = json.loads((folder / "raw" / "metadata.json").read_text())
    next(c for c in meta["chunks"] if c["file"] == path.name)["sha256"] = file_hash(path)
    write_whole(folder / "raw" / "metadata.json", json.dumps(meta))


@pytest.mark.parametrize("change, words", [
    (lambda c: c["samples"][2]["accel"][4].__setitem__(1, float("nan")), ["row 2", "accel", "NaN"]),
    (lambda c: c["samples"][0]["globals"][4].pop(), ["row 0", "globals"]),
    (lambda c: c["samples"][4]["x"].pop(), ["row 4", "x", "expected (35,"]),
    (lambda c: c["samples"][1].pop("lead"), ["row 1", "lead"]),
    (lambda c: c["samples"].__setitem__(3, 7), ["row 3", "not a sample"]),
    (lambda c: c["samples"].pop(), ["4 samples, expected 5"]),
    (lambda c: c.update(samples=3), ["not a raw chunk"]), (lambda c: c.clear(), ["not a raw chunk"])])
def test_wrong_raw_sample_is_found_with_file_and_row(copy, change, words):
    change_raw(copy, change)
    findings = checked(copy)
    assert len(findings) == 1 and str(copy / "raw" / "chunk_001_0.json") in findings[0]
    assert [word for word in words if word not in findings[0]] == []


def test_damaged_settings_are_found(copy):
    """"Nothing wrong", but data.collect and data.preprocess refused it."""
    (copy / "raw" / "config.json").write_text('{"version": 4,')
    finding, = checked(copy)
    assert "config.json: damaged or half written" in finding and "remove it" in finding


@pytest.mark.parametrize("name", ["raw/metadata.json", "metadata.json", "statistics.json"])
def test_damaged_description_is_found(copy, name):
    path = copy / name if "raw" in name else graphs(copy) / name
    path.write_bytes(path.read_bytes()[:50])
    assert len(checked(copy)) == 1 and str(path) in checked(copy)[0]
    if "raw" in name:
        path.unlink()
        assert len(checked(copy)) == 1 and str(path) in checked(copy)[0]


def test_every_finding_is_named_and_the_list_is_bounded(copy, capsys):
    def spoil(array):
        array["nodes"][[0, 2, 4], 7], array["speed"][2] = np.nan, np.inf
        return array
    change_chunk(copy, spoil)
    assert [line.split(": ")[1:3] for line in checked(copy)] == [
        ["row 0", "nodes"], ["row 2", "nodes"], ["row 2", "speed"], ["row 4", "nodes"]]
    import data.check
    shown, data.check.SHOWN = data.check.SHOWN, 2
    try:
        assert main(["--config", "configs/smoke.yaml", f"data.folder={copy}"]) == 2
    finally:
        data.check.SHOWN = shown
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_command_line(copy, tmp_path):
    def run(*words):
        return subprocess.run([sys.executable, "-m", "data.check", "--config", "configs/smoke.yaml", *words],
                              cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    fine = run(f"data.folder={copy}")
    assert fine.returncode == 0 and len(fine.stdout.splitlines()) == 1 and "nothing wrong" in fine.stdout
    assert "8 raw chunks" in fine.stdout and fine.stderr == ""
    change_chunk(copy, with_value("globals", (0, 0, 0), np.nan))
    bad = run(f"data.folder={copy}")
    assert bad.returncode == 2 and "row 0: globals: NaN" in bad.stderr and "1 finding\n" in bad.stderr
    assert run("data.folder=nowhere").returncode == 2 and "Traceback" not in bad.stderr
    assert run("data.foldr=x").returncode == 2


def test_features_are_those_of_the_environment():
    assert [len(names) for names in FEATURES.values()] == [9, 4, 14, 16]


def test_what_is_not_looked_at_is_not_called_right(copy):
    """Chunks of a half-built folder, and some that belong to no data set, counted as "nothing wrong"."""
    facts = check(copy)[1]
    (graphs(copy) / "chunk_099.npy").write_text("x")
    (copy / "raw" / "chunk_099_0.json").write_text("x")
    assert [line.split(": ")[1] for line in checked(copy)] == ["metadata.json does not name it; remove it"] * 2
    assert check(copy)[1] == facts
    (graphs(copy) / "metadata.json").unlink()
    assert "half built, not looked at" in check(copy)[1][1]


def test_other_statistics_and_every_change_are_found(copy):
    """Models normalise with statistics.json, which nothing protected; a NaN hid that the file had been changed."""
    path = graphs(copy) / "statistics.json"
    statistics = json.loads(path.read_text())
    statistics["nodes"]["mean"][2] += 5
    path.write_text(json.dumps(statistics))
    assert len(checked(copy)) == 1 and str(path) in checked(copy)[0]
    chunk = graphs(copy) / "chunk_001.npy"
    array = np.load(chunk)
    array["nodes"][3, 2, 1, 4] = np.nan
    np.save(chunk, array)
    assert "row 3" in checked(copy)[0] and "SHA-256" in checked(copy)[1]
