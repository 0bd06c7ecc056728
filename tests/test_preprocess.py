"""data/preprocess.py: records against a naive rebuild, statistics, int8, duplicates, damage, interruption.

The fixtures' tiny collection (30 samples of 4 episodes) serves all; each test that changes something works on a copy.
"""
import errno
import json
import math

import numpy as np
import pytest
import torch
from data_sets import SAMPLES, config, graphs, hashes, raw_samples, silent

import data.preprocess as preprocessing
from configs.files import file_hash, write_whole
from data.collect import FIELDS, collect, content_hash
from data.dataset import ChunkedDataset
from data.layout import DataError, Shape, read_json
from data.preprocess import preprocess
from data.storage import features


def naive_record(s, cfg, k_shift=0):
    """The record of a raw sample, written down vehicle by vehicle."""
    record = np.zeros(Shape.of(cfg).frames, Shape.of(cfg).frame())
    record["neighbours"], record["extent"] = -1, s["extent"]
    for f, time in enumerate(s["time"]):
        here = [v for v in range(len(s["ids"])) if s["present"][f][v]]
        for v in here:
            own = {name: s[name][f][v] for name in FIELDS}
            fresh = f == 0 or not s["present"][f - 1][v] or s["fresh"][f][v]
            closing = own["speed"] - own["lead_speed"]
            ttc = min(max(own["lead_gap"], 0) / closing, 20) if closing > 0.1 else 20
            record["present"][f, v], record["fresh"][f, v], record["speed"][f, v] = True, fresh, own["speed"]
            record["moved"][f, v] = 0 if fresh else own["odometer"] - s["odometer"][f - 1][v]
            record["conflict"][f, v] = ttc < 2 or own["accel"] <= -3.999
            turn, lead = 2 * math.pi * time / 3600, s["lead"][f][v]
            record["nodes"][f, v] = [
                min(max(own["position"] / s["extent"], 0), 1), own["lane"], own["speed"], min(max(own["accel"], -5), 5),
                min(own["lane_end"], 500), min(max(own["progress"], 0), 1), own["icv"], math.sin(turn), math.cos(turn)]
            record["usable"][f, v], record["surround"][f, v] = lead != -2, s["surround"][f][v]
            far = {o: math.hypot(s["x"][f][o] - own["x"], s["y"][f][o] - own["y"]) for o in here if o != v}
            near = sorted(far, key=far.get)[:s["k"][f] + k_shift]
            if lead >= 0 and lead not in near:
                near[-1] = lead
            near = [o if far[o] <= cfg.graph.radius_m or o == lead else -1 for o in near]
            record["neighbours"][f, v, :len(near)] = near
        record["globals"][f] = s["globals"][f]
    return record


def processed(folder):
    """{motion of a record, by which a raw sample finds it: (record, split)} of a processed data set."""
    meta = read_json(graphs(folder) / "metadata.json", "metadata")
    rows = [(row, chunk["split"]) for chunk in meta["chunks"] for row in np.load(graphs(folder) / chunk["file"])]
    found = {row["speed"].tobytes() + row["moved"].tobytes(): (row, split) for row, split in rows}
    assert len(found) == len(rows) == SAMPLES
    return found


@pytest.fixture(scope="module")
def rebuilt(recorded):
    """[(raw sample, its naive record, the product's record, split)] of all samples."""
    cfg, found, result = config(recorded), processed(recorded), []
    for _, sample in raw_samples(recorded):
        naive = naive_record(sample, cfg)
        record, split = found[naive["speed"].tobytes() + naive["moved"].tobytes()]
        shift = int(content_hash(sample), 16) % 5 - 2 if split == "train" else 0
        result.append((sample, naive_record(sample, cfg, shift), record, split))
    return result


def test_records_equal_a_naive_rebuild(rebuilt):
    for _, naive, record, _ in rebuilt:
        assert record.dtype == naive.dtype
        for name in ("present", "fresh", "conflict", "usable", "neighbours", "surround"):
            assert np.array_equal(record[name], naive[name]), name
        for name in ("nodes", "globals"):
            assert np.allclose(record[name].astype(float), naive[name].astype(float), rtol=2e-3, atol=1e-6), name
        nobody = record["neighbours"] < 0
        assert (record["nodes"][~record["present"]] == 0).all() and (record["edges"][nobody] == 0).all()
        assert (record["edges"][~nobody] != 0).any(-1).all()
    both = [np.array([record[name] for _, _, record, _ in rebuilt]) for name in ("conflict", "fresh", "usable")]
    assert all(values.any() and not values.all() for values in both)  # the comparison saw both values


def test_only_training_samples_vary_in_their_neighbours(rebuilt):
    """k = min(max(4, ceil(N/4)), 16) +- 2 while training, exactly k in evaluation (held-out samples)."""
    wide = {True: set(), False: set()}
    for sample, _, record, split in rebuilt:
        for f, near in enumerate(record["neighbours"]):
            place, k = np.array(sample["x"][f]) + 1j * np.array(sample["y"][f]), sample["k"][f]
            for v in np.flatnonzero(record["present"][f]):
                others = record["present"][f].nonzero()[0]
                if (np.abs(place[others] - place[v]) < 190).sum() > k + 2:  # itself and more than k + 1 others
                    wide[split == "train"].add(int((near[v] >= 0).sum()) - k)
    assert wide[False] <= {0} and {-2, 2} & wide[True] and wide[True] <= {-2, -1, 0, 1, 2}


def test_no_episode_is_in_both_splits_and_chunks_mix_episodes(recorded, rebuilt):
    splits, episode_of = {}, {}
    for sample, _, record, split in rebuilt:
        splits.setdefault(sample["episode"], set()).add(split)
        episode_of[record.tobytes()] = sample["episode"]
    held_out = read_json(recorded / "raw" / "metadata.json", "metadata")["held_out_episodes"]
    assert splits == {e: {"held_out" if e in held_out else "train"} for e in range(4)} and len(held_out) == 1
    order = [episode_of[row.tobytes()] for row, split in processed(recorded).values() if split == "train"]
    assert order != sorted(order)  # a chunk of one episode would make a batch of one traffic jam


def test_statistics_are_those_of_present_vehicles_of_the_training_split(recorded):
    rows, given = processed(recorded).values(), read_json(graphs(recorded) / "statistics.json", "statistics")

    def moments(part, splits):
        frames = [(row, f) for row, split in rows if split in splits for f in range(35)]
        values = [row["globals"][f] for row, f in frames] if part == "globals" else [
            row["nodes"][f, v] for row, f in frames for v in range(12) if row["present"][f, v]]
        return np.mean(np.array(values, float), 0), np.std(np.array(values, float), 0)
    for part in ("nodes", "globals"):
        mean, std = moments(part, ["train"])
        assert np.allclose(given[part]["mean"], mean, rtol=1e-9, atol=1e-9)
        assert np.allclose(given[part]["std"], np.where(std > 1e-3, std, 1), rtol=1e-5)
        assert not np.allclose(mean, moments(part, ["train", "held_out"])[0], rtol=1e-9)  # held-out samples would show


def test_int8_is_wrong_by_half_a_step_at_most(copy, recorded):
    """Every value of the training and held-out chunks against the float16 data set; 0 stays exactly 0."""
    out, cfg = preprocess(config(copy, "data.storage=int8"), silent), config(copy)
    meta = read_json(out / "metadata.json", "metadata")
    assert out != graphs(recorded) and Shape(**meta["shape"]) == Shape.of(cfg)._replace(storage="int8")
    for chunk in meta["chunks"]:
        coded, exact = np.load(out / chunk["file"]), np.load(graphs(recorded) / chunk["file"])
        assert coded["edges"].dtype == np.int8 and coded.itemsize < 0.62 * exact.itemsize
        for name in ("present", "fresh", "conflict", "moved", "speed", "neighbours", "usable", "extent"):
            assert np.array_equal(coded[name], exact[name])
        for name in ("nodes", "edges", "globals"):
            values, true = features(coded, name, meta["ranges"]), features(exact, name, None)
            error, allowed = np.abs(values - true), np.array(list(meta["largest_error"][name].values()))
            assert (error <= allowed * 1.001 + 1e-5).all() and (values[true == 0] == 0).all()
            assert (error.reshape(-1, error.shape[-1]).max(0) >= 0.5 * allowed)[allowed > 1e-2].all()
    batch = ChunkedDataset(out, "train").__getitems__([3, 0])
    exact = ChunkedDataset(graphs(recorded), "train").__getitems__([3, 0])
    for name in ("nodes", "edges", "globals"):
        allowed = torch.tensor(list(meta["largest_error"][name].values())) * 1.001 + 1e-5
        assert ((batch[name] - exact[name]).abs() <= allowed).all() and (batch[name][exact[name] == 0] == 0).all()


@pytest.mark.parametrize("field, wrong", [("speed", float("nan")), ("x", float("inf")), ("globals", float("nan"))])
def test_raw_values_that_are_not_finite_are_named(raw, field, wrong):
    """They went into the graphs, and the first loss was NaN."""
    path, meta = raw / "raw" / "chunk_001_0.json", read_json(raw / "raw" / "metadata.json", "metadata")
    content = read_json(path, "chunk")
    content["samples"][3][field][2][1] = wrong
    write_whole(path, json.dumps(content))
    next(c for c in meta["chunks"] if c["file"] == path.name)["sha256"] = file_hash(path)
    write_whole(raw / "raw" / "metadata.json", json.dumps(meta))
    with pytest.raises(DataError, match=f"{path.name}: sample 3: {field}: NaN or infinite"):
        preprocess(config(raw), silent)


def test_repeated_sample_is_dropped_and_counted(raw):
    path, meta = raw / "raw" / "chunk_001_0.json", read_json(raw / "raw" / "metadata.json", "metadata")
    content = read_json(path, "chunk")
    for name in ("samples", "hashes"):
        content[name] += [content[name][0], content[name][2]]
    write_whole(path, json.dumps(content))
    next(c for c in meta["chunks"] if c["file"] == path.name).update(hashes=content["hashes"], sha256=file_hash(path))
    write_whole(raw / "raw" / "metadata.json", json.dumps(meta))
    meta = read_json(preprocess(config(raw), silent) / "metadata.json", "metadata")
    assert meta["duplicates"] == 2 and sum(c["rows"] for c in meta["chunks"]) == SAMPLES == len(processed(raw))


class Killed(BaseException):
    """Stands for a kill: no handler of the product catches it."""


def break_at(patch, owner, name, call):
    """Let the `call`-th call of a function die (0: none); returns the list of its calls."""
    calls, real = [], getattr(owner, name)

    def breaking(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            raise Killed
        return real(*args, **kwargs)
    patch.setattr(owner, name, breaking)
    return calls


@pytest.mark.parametrize("name, call, again", [
    ("build_record", 1, 30), ("build_record", 17, 14), ("build_record", 30, 1), ("write_whole", 4, 17),
    ("write_array", 1, 30), ("compute_statistics", 1, 0)])
def test_interrupted_preprocessing_continues_to_the_same_files(raw, recorded, monkeypatch, name, call, again):
    """The samples of finished raw chunks are not built `again`."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, preprocessing, name, call)
        preprocess(config(raw), silent)
    built = break_at(monkeypatch, preprocessing, "build_record", 0)
    assert hashes(preprocess(config(raw), silent)) == hashes(graphs(recorded)) and len(built) == again


@pytest.mark.parametrize("content", ["5", "null", "{}"])
def test_a_list_of_finished_chunks_of_another_kind_is_refused(raw, monkeypatch, content):
    """It was a traceback."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, preprocessing, "build_record", 17)
        preprocess(config(raw), silent)
    [progress] = raw.glob("processed/*/progress.json")
    progress.write_text(content)
    with pytest.raises(DataError, match="progress.json: damaged or half written, not a list of chunks: found"):
        preprocess(config(raw), silent)


@pytest.mark.parametrize("call", [1, 3])
def test_killed_while_creating_chunks_continues(raw, recorded, monkeypatch, call):
    """A half-written .part file was taken for a finished one: numpy refused it for ever, with a traceback."""
    real, calls = np.lib.format.write_array, []

    def half(file, array, **more):
        calls.append(file)
        real(file, array, **more)
        if len(calls) == call:
            file.truncate(file.tell() // 2)
            raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(np.lib.format, "write_array", half)
        preprocess(config(raw), silent)
    assert hashes(preprocess(config(raw), silent)) == hashes(graphs(recorded))


def damage(path, how):
    content = path.read_bytes()
    digit = content.index(b'"speed": [[') + 11  # still valid JSON afterwards
    flipped = content[:digit] + bytes([content[digit] ^ 1]) + content[digit + 1:]
    path.write_bytes({"truncated": content[:-200], "flipped": flipped, "trailing": content + b" ", "empty": b""}[how])


@pytest.mark.parametrize("how", ["truncated", "flipped", "trailing", "empty"])
def test_damaged_raw_chunk_is_named_and_collected_again(raw, recorded, how):
    path = raw / "raw" / "chunk_002_0.json"
    damage(path, how)
    with pytest.raises(DataError, match=str(path)):
        preprocess(config(raw), silent)
    assert not list(raw.glob("processed/*/metadata.json"))
    if how == "truncated":
        path.unlink()  # what the message says: remove the file and collect again
        collect(config(raw), silent)
        assert hashes(preprocess(config(raw), silent)) == hashes(graphs(recorded))


def test_collecting_again_does_not_bless_a_damaged_chunk(raw):
    """`collect` wrote metadata.json anew from whatever lay there, so that phase 1 trained on flipped bytes."""
    path = raw / "raw" / "chunk_002_0.json"
    before = file_hash(path)
    damage(path, "flipped")
    try:
        collect(config(raw), silent)
        preprocess(config(raw), silent)
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert file_hash(path) == before


def test_remedy_for_a_missing_chunk_works(copy):
    """The message said "run data.preprocess again", and data.preprocess said that the data set was complete."""
    before = hashes(graphs(copy))
    (graphs(copy) / "chunk_001.npy").unlink()
    with pytest.raises(DataError, match="chunk_001.npy.*run data.preprocess again"):
        ChunkedDataset(graphs(copy), "train")
    preprocess(config(copy), silent)
    assert hashes(graphs(copy)) == before


def test_labels_of_another_graph_module_and_missing_samples_are_told(raw, tmp_path, monkeypatch):
    """After a change of env/graph.py the graphs were made anew, the conflict labels were the old ones; and a collection
    of a fourth of data.samples said nothing."""
    def notes(*overrides):
        said = []
        preprocess(config(raw, *overrides), said.append)
        return [line for line in said if line.startswith("NOTE")]
    assert notes() == []
    changed = tmp_path / "graph.py"
    changed.write_text("# other labels\n")
    monkeypatch.setattr("env.graph.__file__", str(changed))
    note, = notes()
    assert "another env/graph.py" in note and "another data.folder" in note
    path = raw / "raw/metadata.json"
    meta = json.loads(path.read_text())
    del meta["graph"], meta["chunks"][0]["hashes"][0]  # an older collection; one sample fewer
    write_whole(path, json.dumps(meta))
    note, = notes("graph.radius_m=20")
    assert f"data.samples={SAMPLES} asks for more" in note


def test_equal_traffic_is_a_duplicate_whenever_it_happened(copy):
    """The hash included episode and time, so that no duplicate could ever be found across episodes."""
    _, sample = raw_samples(copy)[0]
    assert content_hash({**sample, "episode": 99, "time": [0.0]}) == content_hash(sample)
    assert content_hash({**sample, "extent": 1.0}) != content_hash(sample)


def test_finished_data_on_a_disk_that_may_only_be_read(copy, monkeypatch):
    """There even the removal of a file that is not there is refused: a traceback in every phase."""
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")
    cfg = config(copy)
    expected = preprocess(cfg, silent)
    monkeypatch.setattr(preprocessing.Path, "unlink", refuse)
    assert preprocess(cfg, silent) == expected
