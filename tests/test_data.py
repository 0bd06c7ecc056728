"""data/: collecting with real SUMO, preprocessing against a naive rebuild, damaged files, reading order of the samples.

One tiny collection (30 samples of 4 episodes) serves all tests that need recorded traffic; each works on a copy.
"""
import json
import math
from importlib.metadata import version

import numpy as np
import pytest
from data_sets import config, hashes, silent

import data.preprocess as preprocessing
from configs import load_config
from data.collect import FIELDS, _write_metadata, chunk_names, collect, content_hash, cut_sample, episode_plan
from data.dataset import ChunkedDataset
from data.layout import DataError, file_hash, read_json, record_type, write_atomically
from data.preprocess import preprocess
from env.graph import SCENE

EPISODES, SAMPLES = 4, 30  # 8, 8, 8 and 6 samples, in raw chunks of 5, 3, 5, 3, 5, 3, 5 and 1


def raw_samples(folder):
    """[(raw chunk, sample)] of a collection."""
    chunks = sorted((folder / "raw").glob("chunk_*.json"))
    return [(path.name, sample) for path in chunks for sample in json.loads(path.read_text())["samples"]]


# ---- collecting ------------------------------------------------------------------------------------------------

def test_collection_has_exactly_the_samples_asked_for(recorded):
    samples, cfg, frames = raw_samples(recorded), config(recorded), 15
    assert len(samples) == SAMPLES and cfg.data.history + cfg.data.future == frames
    times = {}
    for _, s in samples:
        assert 4 <= len(s["ids"]) == len(set(s["ids"])) <= 12
        assert all(s["present"][cfg.data.history - 1])  # chosen among those present at the last step of history
        assert len(s["k"]) == len(s["globals"]) == frames and np.allclose(np.diff(s["time"]), 1.0)
        assert {np.shape(s[name]) for name in ("present", "lead", *FIELDS)} == {(frames, len(s["ids"]))}
        times.setdefault(s["episode"], []).append(s["time"][-1])
    assert any(0 in row for _, s in samples for row in s["present"])  # some vehicles arrive later or leave earlier
    assert sorted(times) == list(range(EPISODES))
    assert all(t == sorted(t) and (t[0], t[-1]) == (frames - 1, cfg.env.horizon_s - 1) for t in times.values())


def test_metadata_describes_the_collection(recorded):
    plan, meta = episode_plan(config(recorded)), read_json(recorded / "raw" / "metadata.json", "metadata")
    assert (meta["sumo_version"], meta["scenario"]) == (version("eclipse-sumo"), "corridor")
    assert meta["settings"]["data"]["samples"] == SAMPLES and meta["settings"]["env"]["icv_share"] == 0.25
    keys = ("episode", "seed", "controller", "demand_scale")
    assert {tuple(chunk[key] for key in keys) for chunk in meta["chunks"]} == {job[:4] for job in plan}
    assert [job[4] for job in plan] == [8, 8, 8, 6] and [job[2] for job in plan] == config(recorded).data.controllers
    for chunk in meta["chunks"]:
        samples = [s for name, s in raw_samples(recorded) if name == chunk["file"]]
        assert chunk["hashes"] == [content_hash(sample) for sample in samples] != []
        assert chunk["sha256"] == file_hash(recorded / "raw" / chunk["file"])


def test_second_call_does_nothing(copy):
    before, lines = {p: p.stat().st_mtime_ns for p in copy.rglob("chunk_*")}, []
    meta = file_hash(copy / "raw" / "metadata.json")
    collect(config(copy), lines.append)
    preprocess(config(copy), lines.append)
    assert "4 episodes, 4 already there" in lines[0] and "complete" in lines[-1] and len(lines) == 2
    assert {p: p.stat().st_mtime_ns for p in copy.rglob("chunk_*")} == before
    assert file_hash(copy / "raw" / "metadata.json") == meta


def test_removed_chunk_is_collected_again_alike(copy):
    before = hashes(copy / "raw", "*.json")
    (copy / "raw" / "chunk_002_1.json").unlink()
    (copy / "raw" / "metadata.json").unlink()
    collect(config(copy, "data.processes=1", "env.call_timeout_s=60"), silent)
    assert hashes(copy / "raw", "*.json") == before


@pytest.mark.parametrize("key, value, name", [
    ("env.icv_share", "0.5", "env.icv_share"), ("data.history", "11", "data.history"), ("run.seed", "2", "seed"),
    ("corridor.lanes", "3", "scenario.lanes"), ("graph.radius_m", "50.0", "graph.radius_m")])
@pytest.mark.parametrize("step, place", [(collect, "raw"), (preprocess, "processed")])
def test_other_settings_are_refused_by_name(copy, step, place, key, value, name):
    """`data.preprocess` alone called a data set of other settings complete, without a word."""
    with pytest.raises(DataError) as error:
        step(config(copy, f"{key}={value}"), silent)
    assert str(copy / place) in str(error.value) and f"{name} was" in str(error.value)
    assert f"is {value}" in str(error.value)


def test_refused_scenario_leaves_nothing_behind(tmp_path):
    """config.json was written before the scenario was looked at: after correcting a mistyped path, the command was
    refused because "this data set was made with other settings"."""
    with pytest.raises(Exception, match="typo.sumocfg"):
        collect(config(tmp_path / "set", f"env.scenario={tmp_path}/typo.sumocfg"), silent)
    assert not list((tmp_path / "set").rglob("*.json"))


@pytest.mark.parametrize("run_seed", [0, 1, 2])
def test_collection_never_uses_the_seeds_of_evaluation(run_seed):
    """With run.seed=0 the seeds were 1, 8, ... 1002: three held-out seeds of evaluation were among them."""
    cfg = load_config("configs/default.yaml", [f"run.seed={run_seed}", "data.samples=20000"])
    seeds = [seed for _, seed, *_ in episode_plan(cfg)]
    assert len(set(seeds)) == len(seeds) == 400 and not set(seeds) & set(cfg.evaluate.seeds)


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.4, 0.6, 0.9])
def test_held_out_share_is_kept_and_mixed(tmp_path, share):
    """Every n-th episode was held out: from 0.4 on always the half, and with 0.25 only those of one controller."""
    cfg = config(tmp_path, "data.samples=160", "data.samples_per_chunk=50", f"data.held_out={share}")
    plan = episode_plan(cfg)
    for *head, count in plan:
        content = dict(zip(("episode", "seed", "controller", "demand_scale"), head), hashes=[], samples=[])
        (tmp_path / chunk_names(head[0], count, 50)[0]).write_text(json.dumps(content))
    _write_metadata(cfg, tmp_path, plan)
    held_out = read_json(tmp_path / "metadata.json", "metadata")["held_out_episodes"]
    assert abs(len(held_out) - share * len(plan)) <= 1 and len({plan[e][2] for e in held_out}) > 1


def crowd(places, leads):
    scene = np.zeros(len(places), SCENE)
    scene["x"], scene["lead"], scene["speed"] = places, leads, np.arange(len(places)) + 1 / 3
    return scene


@pytest.mark.parametrize("seed", range(8))
def test_sample_is_one_vehicle_and_its_nearest(seed):
    """Vehicles a..d stand at 0, 10, 21 and 1000 m, each led by the next; e comes and b goes in the last frame."""
    data, rng = config("x", "data.vehicles=[3, 3]", "data.history=2", "data.future=1").data, np.random.default_rng(seed)
    now = ([b"a", b"b", b"c", b"d"], crowd([0, 10, 21, 1000], [1, 2, 3, -1]), np.zeros(16), 4, 7.0)
    later = ([b"a", b"e", b"c", b"d"], crowd([5, 12, 30, 1000], [1, 2, 3, -1]), np.zeros(16), 4, 8.0)
    sample, places = cut_sample([now, now, later], data, 2000.0, rng), dict(zip("abcd", (0, 10, 21, 1000)))
    inside = sample["ids"]
    assert inside == sorted(places, key=lambda n: abs(places[n] - places[inside[0]]))[:3]
    assert sample["time"] == [7, 7, 8]
    leader = {"a": "b", "b": "c", "c": "d", "d": None}
    code = [-1 if leader[n] is None else inside.index(leader[n]) if leader[n] in inside else -2 for n in inside]
    assert sample["lead"][0] == sample["lead"][1] == code
    assert sample["present"] == [[1, 1, 1], [1, 1, 1], [int(n != "b") for n in inside]]
    for i, name in enumerate(inside):
        assert sample["speed"][0][i] == round("abcd".index(name) + 1 / 3, 4)
        assert name != "b" or (sample["speed"][2][i], sample["lead"][2][i]) == (0, -1)
        assert name != "a" or sample["lead"][2][i] == -2  # behind e, who is no member
    alone = ([b"a"], crowd([0], [-1]), np.zeros(16), 4, 7.0)
    assert cut_sample([alone] * 3, data, 2000.0, rng) is None  # too few vehicles


# ---- preprocessing ---------------------------------------------------------------------------------------------

def naive_record(s, cfg, dtype):
    """The record of a raw sample, written down vehicle by vehicle."""
    record = np.zeros((), dtype)
    record["neighbours"] = -1
    for f, time in enumerate(s["time"]):
        here = [v for v in range(len(s["ids"])) if s["present"][f][v]]
        for v in here:
            own, fresh = {name: s[name][f][v] for name in FIELDS}, f == 0 or not s["present"][f - 1][v]
            closing = own["speed"] - own["lead_speed"]
            ttc = min(max(own["lead_gap"], 0) / closing, 20) if closing > 0.1 else 20
            record["present"][f, v], record["fresh"][f, v], record["speed"][f, v] = True, fresh, own["speed"]
            record["moved"][f, v] = 0 if fresh else own["odometer"] - s["odometer"][f - 1][v]
            record["conflict"][f, v] = ttc < 2 or own["accel"] <= -4
            if f >= cfg.data.history:
                continue
            turn, lead = 2 * math.pi * time / 3600, s["lead"][f][v]
            record["nodes"][f, v] = [
                min(max(own["position"] / s["extent"], 0), 1), own["lane"], own["speed"], min(max(own["accel"], -5), 5),
                min(own["lane_end"], 500), min(max(own["progress"], 0), 1), own["icv"], math.sin(turn), math.cos(turn)]
            record["usable"][f, v] = lead != -2
            far = {o: math.hypot(s["x"][f][o] - own["x"], s["y"][f][o] - own["y"]) for o in here if o != v}
            near = sorted(far, key=far.get)[:min(s["k"][f], cfg.graph.k_max)]
            if lead >= 0 and lead not in near:
                near[-1] = lead
            near = [o if far[o] <= cfg.graph.radius_m or o == lead else -1 for o in near]
            record["neighbours"][f, v, :len(near)] = near
        if f < cfg.data.history:
            record["globals"][f] = s["globals"][f]
    return record


def processed(folder):
    """{motion of a record, by which a raw sample finds it: (record, split)} of a processed data set."""
    meta = read_json(folder / "processed" / "metadata.json", "metadata")
    rows = [(row, chunk["split"]) for chunk in meta["chunks"] for row in np.load(folder / "processed" / chunk["file"])]
    found = {row["speed"].tobytes() + row["moved"].tobytes(): (row, split) for row, split in rows}
    assert len(found) == len(rows) == SAMPLES
    return found


@pytest.fixture(scope="module")
def rebuilt(recorded):
    """[(raw sample, its naive record, the product's record, split)] of all samples."""
    cfg, found = config(recorded), processed(recorded)
    dtype = record_type(cfg.data.history, cfg.data.future, 12, cfg.graph.k_max)
    pairs = [(sample, naive_record(sample, cfg, dtype)) for _, sample in raw_samples(recorded)]
    return [(sample, naive, *found[naive["speed"].tobytes() + naive["moved"].tobytes()]) for sample, naive in pairs]


def test_records_equal_a_naive_rebuild(rebuilt):
    for _, naive, record, _ in rebuilt:
        assert record.dtype == naive.dtype
        for name in ("present", "fresh", "conflict", "usable", "neighbours"):
            assert np.array_equal(record[name], naive[name]), name
        for name in ("nodes", "globals"):
            assert np.allclose(record[name].astype(float), naive[name].astype(float), rtol=2e-3, atol=1e-6), name
        nobody = record["neighbours"] < 0
        assert (record["nodes"][~record["present"][:10]] == 0).all() and (record["edges"][nobody] == 0).all()
        assert (record["edges"][~nobody] != 0).any(-1).all()
    both = [np.array([record[name] for _, _, record, _ in rebuilt]) for name in ("conflict", "fresh", "usable")]
    assert all(values.any() and not values.all() for values in both)  # the comparison saw both values


def test_no_episode_is_in_both_splits_and_chunks_mix_episodes(recorded, rebuilt):
    splits, episode_of = {}, {}
    for sample, _, record, split in rebuilt:
        splits.setdefault(sample["episode"], set()).add(split)
        episode_of[record.tobytes()] = sample["episode"]
    held_out = read_json(recorded / "raw" / "metadata.json", "metadata")["held_out_episodes"]
    assert splits == {e: {"held_out" if e in held_out else "train"} for e in range(EPISODES)} and len(held_out) == 1
    order = [episode_of[row.tobytes()] for row, split in processed(recorded).values() if split == "train"]
    assert order != sorted(order)  # a chunk of one episode would make a batch of one traffic jam


def test_statistics_are_those_of_present_vehicles_of_the_training_split(recorded):
    rows, given = processed(recorded).values(), read_json(recorded / "processed" / "statistics.json", "statistics")

    def moments(part, splits):
        frames = [(row, f) for row, split in rows if split in splits for f in range(10)]
        values = [row["globals"][f] for row, f in frames] if part == "globals" else [
            row["nodes"][f, v] for row, f in frames for v in range(12) if row["present"][f, v]]
        return np.mean(np.array(values, float), 0), np.std(np.array(values, float), 0)
    for part in ("nodes", "globals"):
        mean, std = moments(part, ["train"])
        assert np.allclose(given[part]["mean"], mean, rtol=1e-9, atol=1e-9)
        assert np.allclose(given[part]["std"], np.where(std > 1e-3, std, 1), rtol=1e-5)
        assert not np.allclose(mean, moments(part, ["train", "held_out"])[0], rtol=1e-9)  # held-out samples would show


def test_repeated_sample_is_dropped_and_counted(raw):
    path, meta = raw / "raw" / "chunk_001_0.json", read_json(raw / "raw" / "metadata.json", "metadata")
    content = read_json(path, "chunk")
    for name in ("samples", "hashes"):
        content[name] += [content[name][0], content[name][2]]
    write_atomically(path, json.dumps(content))
    next(c for c in meta["chunks"] if c["file"] == path.name).update(hashes=content["hashes"], sha256=file_hash(path))
    write_atomically(raw / "raw" / "metadata.json", json.dumps(meta))
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
    ("build_record", 1, 30), ("build_record", 17, 14), ("build_record", 30, 1), ("write_atomically", 4, 17),
    ("compute_statistics", 1, 0)])
def test_interrupted_preprocessing_continues_to_the_same_files(raw, recorded, monkeypatch, name, call, again):
    """The samples of finished raw chunks are not built `again`."""
    with monkeypatch.context() as patch, pytest.raises(Killed):
        break_at(patch, preprocessing, name, call)
        preprocess(config(raw), silent)
    built = break_at(monkeypatch, preprocessing, "build_record", 0)
    assert hashes(preprocess(config(raw), silent)) == hashes(recorded / "processed") and len(built) == again


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
    assert hashes(preprocess(config(raw), silent)) == hashes(recorded / "processed")


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
    assert not (raw / "processed" / "metadata.json").exists()
    if how == "truncated":
        path.unlink()  # what the message says: remove the file and collect again
        collect(config(raw), silent)
        assert hashes(preprocess(config(raw), silent)) == hashes(recorded / "processed")


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
    before = hashes(copy / "processed")
    (copy / "processed" / "chunk_001.npy").unlink()
    with pytest.raises(DataError, match="chunk_001.npy.*run data.preprocess again"):
        ChunkedDataset(copy, "train")
    preprocess(config(copy), silent)
    assert hashes(copy / "processed") == before


def test_equal_traffic_is_a_duplicate_whenever_it_happened(copy):
    """The hash included episode and time, so that no duplicate could ever be found across episodes."""
    _, sample = raw_samples(copy)[0]
    assert content_hash({**sample, "episode": 99, "time": [0.0]}) == content_hash(sample)
    assert content_hash({**sample, "extent": 1.0}) != content_hash(sample)
