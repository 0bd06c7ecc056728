"""data/collect.py: what a collection with real SUMO holds, how a sample is cut, and what continues or is refused.

One tiny collection (30 samples of 4 episodes) serves all tests that need recorded traffic; each works on a copy.
"""
import json
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_sets import SAMPLES, config, graphs, hashes, raw_samples, silent

from configs import load_config
from configs.files import file_hash
from data.collect import (FIELDS, HEAD, _write_metadata, chunk_names, collect, collect_episode, content_hash,
                          cut_regions)
from data.layout import DataError, Shape, read_json
from data.location import open_data
from data.plan import episode_plan
from data.preprocess import preprocess
from data import settings
from data.settings import processed_folder, raw_settings
from env.graph import SCENE
from env.traffic_env import make_env
from env.workers import WorkerError
from runtime.distributed import Team

EPISODES = 4


def test_collection_has_exactly_the_samples_asked_for(recorded):
    samples, cfg = raw_samples(recorded), config(recorded)
    frames, now = Shape.of(cfg).frames, cfg.data.margin + cfg.data.history - 1
    assert len(samples) == SAMPLES and frames == 35
    times = {}
    for _, s in samples:
        assert 4 <= len(s["ids"]) == len(set(s["ids"])) <= 12
        assert all(s["present"][now])  # chosen among those present at the last step of history
        assert len(s["k"]) == len(s["globals"]) == frames and np.allclose(np.diff(s["time"]), 1.0)
        assert {np.shape(s[name]) for name in ("present", "lead", *FIELDS)} == {(frames, len(s["ids"]))}
        assert np.shape(s["surround"]) == (frames, len(s["ids"]), 14)
        times.setdefault(s["episode"], []).append(s["time"][-1])
    assert any(0 in row for _, s in samples for row in s["present"])  # some vehicles arrive later or leave earlier
    assert sorted(times) == list(range(EPISODES))
    assert all(t == sorted(t) and (t[0], t[-1]) == (frames - 1, cfg.env.horizon_s - 1) for t in times.values())


def test_metadata_describes_the_collection(recorded):
    plan, meta = episode_plan(config(recorded)), read_json(recorded / "raw" / "metadata.json", "metadata")
    assert (meta["sumo_version"], meta["scenarios"]) == (version("eclipse-sumo"), ["corridor"])
    assert meta["settings"]["data"]["samples"] == SAMPLES and meta["settings"]["env"]["icv_share"] == 0.25
    assert {tuple(chunk[key] for key in HEAD) for chunk in meta["chunks"]} == {job[:5] for job in plan}
    assert [job.samples for job in plan] == [8, 8, 8, 6]
    assert [job.controller for job in plan] == config(recorded).data.controllers
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


@pytest.mark.parametrize("restarts", [1, 0])
def test_episode_whose_simulator_dies_begins_again(copy, monkeypatch, restarts):
    """One SUMO that died ended the whole pipeline as "bad input"."""
    cfg, began, before = config(copy, f"rollout.restarts={restarts}"), [], hashes(copy / "raw", "chunk_000_*.json")

    def doomed(*arguments):
        env = make_env(*arguments)
        observe = env._observe

        def dying(*more, **named):
            if env.time == 20 and len(began) == 1:
                env.simulator.process.kill()
            return observe(*more, **named)
        began.append(env)
        env._observe = dying
        return env
    monkeypatch.setattr("data.collect.make_env", doomed)
    if not restarts:
        with pytest.raises(WorkerError, match="exit code -9"):
            collect_episode(cfg, episode_plan(cfg)[0], copy / "raw")
        return
    assert collect_episode(cfg, episode_plan(cfg)[0], copy / "raw") == 8 and len(began) == 2
    assert hashes(copy / "raw", "chunk_000_*.json") == before


def test_stop_while_collecting_keeps_finished_episodes(tmp_path):
    """Phase 1 without data collects first, and did not hear a stop before all of it was done."""
    cfg, asked = config(tmp_path, "data.processes=1"), []

    def must_stop():
        asked.append(len(list((tmp_path / "raw").glob("chunk_*"))))
        return len(asked) == 2
    guard = SimpleNamespace(must_stop=must_stop, leave=lambda where: 0)
    with pytest.raises(SystemExit) as end:
        open_data(cfg, Team(0, 1, 0, 1, torch.device("cpu")), guard)
    kept = len(list((tmp_path / "raw").glob("chunk_*")))
    assert end.value.code == 0 and len(asked) == 2 and asked[0] == 2 and 4 <= kept < 8
    assert not (tmp_path / "raw/metadata.json").exists()


@pytest.mark.parametrize("key, value, name", [
    ("env.icv_share", "0.5", "env.icv_share"), ("data.history", "11", "data.history"), ("run.seed", "2", "seed"),
    ("corridor.lanes", "3", "scenario.corridor.lanes"), ("graph.k_min", "5", "graph.k_min")])
@pytest.mark.parametrize("step", [collect, preprocess])
def test_other_settings_are_refused_by_name(copy, step, key, value, name):
    """`data.preprocess` alone called a data set of other settings complete, without a word."""
    with pytest.raises(DataError) as error:
        step(config(copy, f"{key}={value}"), silent)
    assert str(copy / "raw") in str(error.value) and f"{name} was" in str(error.value)
    assert f"is {value}" in str(error.value)


def test_what_decides_traffic_and_graphs_is_part_of_their_names(copy, monkeypatch):
    """A data set of another SUMO, of other features or without the shield was taken for the same."""
    before, folder = raw_settings(config(copy)), processed_folder(config(copy))
    assert raw_settings(config(copy, "shield.enabled=false")) != before
    monkeypatch.setattr(settings, "version", lambda name: "9.9.9")
    monkeypatch.setattr(settings.graph, "NODE", ("other",))
    after = raw_settings(config(copy))
    assert after["sumo"] == "9.9.9" and "other" in after["features"] and json.loads(json.dumps(before)) == before
    monkeypatch.setattr(settings.graph, "__file__", settings.__file__)
    assert processed_folder(config(copy)) != folder


def test_settings_of_every_scenario_count(tmp_path):
    """A suite's other scenarios and the files of a user's own did not: old samples were used, or filled up with new."""
    suite = "env.suite=[same, env.scenario=ring]"
    assert [job.scenario for job in episode_plan(config(tmp_path, suite))] == ["corridor", "ring"] * 2
    other = [raw_settings(config(tmp_path, suite, f"ring.vehicles={n}")) for n in (22, 23)]
    assert other[0] != other[1] and sorted(other[0]["scenario"]) == ["corridor", "ring"]
    town = tmp_path / "town.sumocfg"
    town.write_text('<configuration><route-files value="a.rou.xml, b.rou.xml"/></configuration>')
    (tmp_path / "a.rou.xml").write_text("a"), (tmp_path / "b.rou.xml").write_text("b")
    before = raw_settings(config(tmp_path, f"env.scenario={town}"))
    assert sorted(before["scenario"][str(town)]) == ["a.rou.xml", "b.rou.xml", "town.sumocfg"]
    (tmp_path / "b.rou.xml").write_text("other")
    assert raw_settings(config(tmp_path, f"env.scenario={town}")) != before


def test_other_graphs_need_no_other_traffic(copy):
    """graph.radius_m was refused by `data.collect` as well: minutes of simulation again, although no raw sample knows
    it. Graphs of several settings now lie side by side."""
    first = graphs(copy)
    before = hashes(first)
    assert collect(config(copy, "graph.radius_m=20"), silent) == copy / "raw"
    second = preprocess(config(copy, "graph.radius_m=20"), silent)
    assert second != first and hashes(first) == before and hashes(second, "chunk*") != hashes(first, "chunk*")
    assert preprocess(config(copy), silent) == first and hashes(first) == before


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
    seeds = [job.seed for job in episode_plan(cfg)]
    assert len(set(seeds)) == len(seeds) == 400 and not set(seeds) & set(cfg.evaluate.seeds)


def test_large_seeds_reach_every_variant(tmp_path):
    """The seed was cut to its range after it had been moved to its variant: some variants were never simulated."""
    for seed in (1, 20_000, 30_001, 2 ** 31 - 1):
        cfg = load_config("configs/smoke.yaml", [f"run.seed={seed}", "data.samples=96", "data.samples_per_episode=8",
                                                 "env.suite=[same,env.scenario=ring,env.scenario=merge]"])
        plan = episode_plan(cfg)
        assert [job.scenario for job in plan[:3]] == [cfg.variants()[job.seed % 3].env.scenario for job in plan[:3]]
        assert len({job.seed % 3 for job in plan}) == 3 and min(job.seed for job in plan) >= 2_000_000


@pytest.mark.parametrize("share", [0.1, 0.2, 0.25, 0.4, 0.6, 0.9])
def test_held_out_share_is_kept_and_mixed(tmp_path, share):
    """Every n-th episode was held out: from 0.4 on always the half, and with 0.25 only those of one controller."""
    cfg = config(tmp_path, "data.samples=160", "data.samples_per_chunk=50", f"data.held_out={share}")
    plan = episode_plan(cfg)
    for job in plan:
        content = {**job._asdict(), "hashes": [], "samples": []}
        (tmp_path / chunk_names(job, 50)[0]).write_text(json.dumps(content))
    _write_metadata(cfg, tmp_path, plan)
    held_out = read_json(tmp_path / "metadata.json", "metadata")["held_out_episodes"]
    assert abs(len(held_out) - share * len(plan)) <= 1 and len({plan[e].controller for e in held_out}) > 1


def test_scenarios_controllers_and_demands_take_turns():
    cfg = load_config("configs/default.yaml", [
        "data.scenarios=[same, ring, a/b.sumocfg]", "data.controllers=[none, random]", "data.demand_scales=[0.5, 1.5]",
        "data.samples=600", "data.samples_per_episode=25"])
    plan = episode_plan(cfg)
    cases = {(job.scenario, job.controller, job.demand_scale) for job in plan[:12]}
    assert len(cases) == 12 and {case[0] for case in cases} == {"corridor", "ring", "a/b.sumocfg"}
    assert [job.scenario for job in plan] == ["corridor", "ring", "a/b.sumocfg"] * 8


def test_collection_over_several_scenarios(tmp_path):
    """Each sample knows the size of its road; both splits and the statistics mix the scenarios."""
    small = ["data.scenarios=[corridor, ring]", "data.samples=24", "data.samples_per_episode=4", "data.held_out=0.34"]
    cfg = config(tmp_path / "set", *small, "data.controllers=[none, random]", "data.demand_scales=[0.6, 1.3]")
    collect(cfg, silent)
    meta = read_json(tmp_path / "set" / "raw" / "metadata.json", "metadata")
    assert meta["scenarios"] == ["corridor", "ring"] and set(meta["settings"]["scenario"]) == {"corridor", "ring"}
    extents = {"corridor": set(), "ring": set()}
    for chunk in meta["chunks"]:
        content = read_json(tmp_path / "set" / "raw" / chunk["file"], "chunk")
        assert content["scenario"] == chunk["scenario"] and len(content["samples"]) == 4
        extents[chunk["scenario"]] |= {sample["extent"] for sample in content["samples"]}
    assert {name: len(found) for name, found in extents.items()} == {"corridor": 1, "ring": 1}
    assert {meta["chunks"][e]["scenario"] for e in meta["held_out_episodes"]} == {"corridor", "ring"}
    out = preprocess(cfg, silent)
    rows = np.concatenate([np.load(path)["extent"].ravel() for path in sorted(out.glob("chunk*"))])
    assert set(rows) == {np.float32(e) for found in extents.values() for e in found}


def test_unknown_scenario_is_refused_before_any_simulation(tmp_path):
    with pytest.raises(Exception, match="data.scenarios=.*'rign'"):
        collect(config(tmp_path / "set", "data.scenarios=[corridor, rign]"), silent)
    assert not list((tmp_path / "set").rglob("*.json"))


def crowd(places, leads):
    scene = np.zeros(len(places), SCENE)
    scene["x"], scene["lead"], scene["speed"] = places, leads, np.arange(len(places)) + 1 / 3
    return scene


def seen(around, fresh=()):
    """What an observation says of vehicles with these surroundings, of whom some are `fresh`."""
    return {"surround": around, "fresh": np.isin(np.arange(len(around)), fresh).astype(np.int8),
            "conflict": np.zeros(len(around), np.int8)}


@pytest.mark.parametrize("seed", range(8))
def test_sample_is_one_vehicle_and_its_nearest(seed):
    """Vehicles a..d stand at 0, 10, 21 and 1000 m, each led by the next; e comes and b goes in the last frame."""
    data, rng = config("x", "data.vehicles=[3, 3]", "data.history=2", "data.future=1", "data.margin=0",
                       "phase1.augment.time_shift=0").data, np.random.default_rng(seed)
    around = np.arange(4)[:, None] + np.arange(14) / 3
    now = ([b"a", b"b", b"c", b"d"], crowd([0, 10, 21, 1000], [1, 2, 3, -1]), np.zeros(16), 4, 7.0, seen(around))
    later = ([b"a", b"e", b"c", b"d"], crowd([5, 12, 30, 1000], [1, 2, 3, -1]), np.zeros(16), 4, 8.0,
             seen(around, [1, 2]))
    (sample,), places = cut_regions([now, now, later], data, 2000.0, rng), dict(zip("abcd", (0, 10, 21, 1000)))
    inside = sample["ids"]
    assert inside == sorted(places, key=lambda n: abs(places[n] - places[inside[0]]))[:3]
    assert sample["time"] == [7, 7, 8]
    leader = {"a": "b", "b": "c", "c": "d", "d": None}
    code = [-1 if leader[n] is None else inside.index(leader[n]) if leader[n] in inside else -2 for n in inside]
    assert sample["lead"][0] == sample["lead"][1] == code
    assert sample["present"] == [[1, 1, 1], [1, 1, 1], [int(n != "b") for n in inside]]
    assert sample["fresh"] == [[0, 0, 0], [0, 0, 0], [int(n == "c") for n in inside]]  # b's place has another vehicle
    for i, name in enumerate(inside):
        assert sample["speed"][0][i] == round("abcd".index(name) + 1 / 3, 4)
        assert sample["surround"][0][i] == ("abcd".index(name) + np.arange(14) / 3).round(2).tolist()
        assert name != "b" or (sample["speed"][2][i], sample["lead"][2][i], any(sample["surround"][2][i])) == (0, -1, 0)
        assert name != "a" or sample["lead"][2][i] == -2  # behind e, who is no member
    alone = ([b"a"], crowd([0], [-1]), np.zeros(16), 4, 7.0, seen(around[:1]))
    assert cut_regions([alone] * 3, data, 2000.0, rng) == []  # too few vehicles


@pytest.mark.parametrize("regions", [1, 4, 7])
def test_regions_split_a_large_scene_without_overlapping_centres(regions):
    """60 vehicles in a row, samples of 10: no vehicle is the centre of two samples as long as some are in none."""
    data = config("x", "data.vehicles=[10, 10]", f"data.regions={regions}").data
    ids = [f"v{i}".encode() for i in range(60)]
    frame = (ids, crowd(np.arange(60) * 30.0, np.full(60, -1)), np.zeros(16), 16, 0.0, seen(np.zeros((60, 14))))
    samples = cut_regions([frame] * 35, data, 2000.0, np.random.default_rng(1))
    held = set()
    for sample in samples:
        assert len(sample["ids"]) == 10 and sample["ids"][0] not in held
        held |= set(sample["ids"])
    assert len(samples) == regions and len(held) >= min(6 * regions, 36)


def test_small_scene_can_be_kept_whole():
    """With data.vehicles=[2, N] scenes of far fewer than N vehicles are one sample: no leader is outside."""
    data, rng = config("x", "data.vehicles=[2, 150]").data, np.random.default_rng(0)
    frame = ([b"a", b"b", b"c"], crowd([0, 10, 400], [1, 2, -1]), np.zeros(16), 4, 7.0, seen(np.zeros((3, 14))))
    samples = [cut_regions([frame] * 35, data, 2000.0, rng)[0] for _ in range(50)]
    whole = [sample for sample in samples if len(sample["ids"]) == 3]
    assert len(whole) > 40 and all(min(min(sample["lead"])) == -1 for sample in whole)


def test_variants_of_a_suite_do_not_cancel_the_demand_scale(tmp_path):
    """The environment applied the variant's `env.demand_scale` again: episodes "x0.5" and "x1.5" were the same."""
    found = []
    for scale in (0.5, 1.5):
        cfg = config(tmp_path / str(scale), "env.suite=[env.demand_scale=0.9, env.demand_scale=1.1]",
                     f"data.demand_scales=[{scale}]")
        (tmp_path / str(scale) / "raw").mkdir(parents=True)
        collect_episode(cfg, episode_plan(cfg)[0], tmp_path / str(scale) / "raw")
        found.append({content_hash(sample) for _, sample in raw_samples(tmp_path / str(scale))})
    assert found[0] and found[1] and not found[0] & found[1]


def test_moments_that_were_postponed_are_not_all_the_same(tmp_path):
    """As soon as there were enough vehicles, every overdue moment was cut from the same frames: duplicates."""
    cfg = config(tmp_path, "data.samples=16", "data.samples_per_episode=8", "env.demand_scale=0.5",
                 "data.vehicles=[14,15]")
    (tmp_path / "raw").mkdir(parents=True)
    assert collect_episode(cfg, episode_plan(cfg)[0], tmp_path / "raw") == 8
    times = [sample["time"][0] for _, sample in raw_samples(tmp_path)]
    assert len(set(times)) == 8 and times[1] - times[0] == 1  # made up for at the next step
