"""A suite: several variants of a scenario in one run. Which one an episode is, that each is what it would be alone, and
how they are scored."""
import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import evaluate
from configs import Config, ConfigError, load_config
from configs.loader import variant
from data.plan import episode_plan, held_out_episodes
from env.traffic_env import SumoError, TrafficEnv, check_scenario
from runtime.ending import run_script
from runtime.scores import beside, mean_ci, save_scores, summarise

from helpers import episode, equal

SUITE = ["same", "corridor.lanes=3 corridor.main_flow=4400", "env.scenario=ring ring.vehicles=30"]


def config(*overrides):
    cfg = load_config("configs/smoke.yaml", overrides)
    cfg.env.suite = SUITE
    return cfg


def same(a, b):
    return equal(a[0], b[0]) and a[1] == b[1]


def test_an_episode_is_the_variant_of_its_seed_and_what_that_would_be_alone(scenarios):
    """Networks change from one episode to the next, forth and back, in one SUMO."""
    cfg, rows = config(), {}
    env = TrafficEnv(cfg, scenarios)
    try:
        for seed in (3, 4, 5, 4, 3):
            rows.setdefault(seed, []).append(episode(env, seed, 12))
    finally:
        env.close()
    assert all(same(a, b) for again in (rows[3], rows[4]) for a, b in zip(*again))
    for seed, alone in zip((3, 4, 5), cfg.variants()):
        assert alone.env.suite == ["same"]
        env = TrafficEnv(alone, scenarios)
        try:
            assert all(same(a, b) for a, b in zip(rows[seed][0], episode(env, seed, 12)))
        finally:
            env.close()


def test_recorded_episodes_are_those_that_are_scored(scenarios):
    """The traffic was that of the seed's variant, the rule's numbers those of the suite's first."""
    cfg = load_config("configs/smoke.yaml", ["env.horizon_s=60"])
    nothing = " ".join(f"baselines.harmonise.{name}=0" for name in ("cruise", "reach_m", "gain", "meter_brake"))
    cfg.env.suite = ["same", nothing]
    for seed, told in ((8, True), (9, False)):
        tracks = evaluate.watch(cfg, ["harmonise"], seed, {}, scenarios, lambda *text: None)["harmonise"]
        assert tracks.column("commanded").any() == told


def test_without_a_suite_the_configuration_is_its_only_variant():
    cfg = Config()
    assert cfg.variants() == [cfg] and cfg.variants()[0] is cfg


def test_variants_change_what_they_name_and_nothing_else():
    cfg = config()
    one, two, three = cfg.variants()
    assert (one.corridor.lanes, two.corridor.lanes, two.corridor.main_flow) == (2, 3, 4400.0)
    assert (three.env.scenario, three.ring.vehicles, cfg.ring.vehicles) == ("ring", 30, 22)
    expected = copy.deepcopy(cfg)
    expected.env.suite, expected.corridor.lanes, expected.corridor.main_flow = ["same"], 3, 4400.0
    assert two == expected


def test_a_path_with_spaces_stands_in_quotes():
    """It was refused, whatever one wrote."""
    suite = "env.suite=[same, 'env.scenario=\"my road/a.sumocfg\" env.icv_share=0.5']"
    cfg = load_config("configs/smoke.yaml", [suite])
    changed = cfg.variants()[1].env
    assert changed.scenario == "my road/a.sumocfg" and changed.icv_share == 0.5


@pytest.mark.parametrize("suite, words", [
    ("[corridor.lane=3]", "corridor.lane: unknown key"), ("[corridor.lanes=x]", "'x' is not valid"),
    ("['corridor.lanes=3 env.max_vehicles=50']", "env.max_vehicles=50': expected parts that begin with"),
    ("['']", "expected parts"), ("[corridor]", "expected parts"),
    ("[same, same]", "the same element twice"), ("[corridor.lanes=]", "corridor.lanes: '' is not valid"),
    ("[env.demand_scale=0]", "env.demand_scale: 0 is not valid"),
    ("['env.scenario=\"my road']", "no closing quotation: a quotation mark is missing"),
    ("['env.scenario=ring driver.sigma=0.2']", "only the scenario corridor reads that, but here is ring")])
def test_mistakes_in_a_suite_are_one_line_each(suite, words):
    with pytest.raises(ConfigError) as error:
        load_config("configs/smoke.yaml", [f"env.suite={suite}"])
    lines = str(error.value).splitlines()
    assert len(lines) == 1 and "env.suite" in lines[0] and words in lines[0]


@pytest.mark.parametrize("config, overrides, words", [
    ("smoke", ["env.scenario=ring", "corridor.lanes=3"], "corridor.lanes=3: only the scenario corridor"),
    ("smoke", ["env.scenario=my.sumocfg", "driver.sigma=0.2"], "driver.sigma=0.2: only the scenario corridor"),
    ("smoke", ["ring.vehicles=30"], "but here is corridor; leave it out"),
    ("scenes", ["corridor.lanes=3"], "but here is bottleneck, figure_eight, merge, ring;")])
def test_numbers_of_a_scenario_that_is_not_there_are_refused(config, overrides, words):
    """They changed nothing, without a word: who set the drivers of another network believed in them."""
    with pytest.raises(ConfigError, match=f"^command line: .*{words}"):
        load_config(f"configs/{config}.yaml", overrides)


@pytest.mark.parametrize("config, override, key", [
    ("suite", "corridor.main_flow=1000", "corridor.main_flow"),
    ("suite", "corridor.ramp_flow = 500", "corridor.ramp_flow"),
    ("roads_train", "corridor.main_flow=1000", "corridor.main_flow"),  # one of the twelve is a town
    ("scenes", "env.scenario=corridor", "env.scenario"), ("scenes", "data.scenarios=[corridor]", "data.scenarios")])
def test_what_every_element_of_a_suite_sets_is_refused_on_the_command_line(config, override, key):
    """It changed nothing, without a word: a sweep over the demand was a table of equal columns."""
    with pytest.raises(ConfigError, match=rf"^command line: {key}.*env.suite=\[same\]"):
        load_config(f"configs/{config}.yaml", [override])
    assert load_config(f"configs/{config}.yaml", [override, "env.suite=[same]"]).env.suite == ["same"]
    load_config("configs/roads_train.yaml", ["env.icv_share=0.1", "corridor.ramps=3"])  # some set them, not all


@pytest.mark.parametrize("config, overrides", [
    ("scenes", ["ring.vehicles=30"]), ("world_model", ["merge.ramp_flow=300"]),
    ("smoke", ["env.suite=[same, env.scenario=ring]", "ring.vehicles=30", "driver.sigma=0.2"])])
def test_numbers_of_any_scenario_of_a_suite_or_a_collection_are_taken(config, overrides):
    cfg = load_config(f"configs/{config}.yaml", overrides)
    assert cfg.ring.vehicles == 30 or cfg.merge.ramp_flow == 300


def test_a_named_scenario_reads_its_own_numbers_only(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--config", "configs/smoke.yaml", "--scenario", "ring",
                                      "corridor.lanes=3"])
    with pytest.raises(ConfigError, match="corridor.lanes=3: only the scenario corridor reads that, but here is ring"):
        evaluate.main()


def test_a_variant_that_sumo_refuses_is_found_before_anything_starts(scenarios):
    cfg = config()
    cfg.env.suite = ["same", "env.scenario=gone.sumocfg"]
    with pytest.raises(SumoError, match="gone.sumocfg"):
        check_scenario(cfg, scenarios)


def test_collection_combines_variants_with_controllers():
    """Both have four elements here; in step with each other, every variant would meet one controller only."""
    cfg = load_config("configs/suite.yaml", ["data.samples=800", "data.samples_per_episode=50"])
    plan = [(job.seed % 4, job.controller) for job in episode_plan(cfg)]
    assert len(plan) == len(set(plan)) == 16 and [variant for variant, _ in plan] == [0, 1, 2, 3] * 4


@pytest.mark.parametrize("name", ["default", "quick", "suite", "scenes", "world_model", "prod"])
def test_few_episodes_have_every_demand_and_both_splits_too(name):
    """Demands turned slowest: with configs/suite.yaml the highest one was never collected, and hardly a held-out split
    had all demands and controllers."""
    cfg = load_config(f"configs/{name}.yaml")
    plan, variants = episode_plan(cfg), len(cfg.env.suite)
    held_out = held_out_episodes(plan, cfg.data.held_out, variants)
    splits = [[plan[e] for e in held_out], [job for job in plan if job.episode not in held_out]]
    for part in splits:
        assert {job.demand_scale for job in part} == set(cfg.data.demand_scales)
        assert {job.controller for job in part} == set(cfg.data.controllers)
        assert {job.seed % variants for job in part} == set(range(variants))


def test_the_only_episode_of_a_kind_is_trained_on():
    plan = [job._replace(demand_scale=3.0 if job.episode == 2 else 1.0)
            for job in episode_plan(load_config("configs/quick.yaml"))]
    assert all(2 not in held_out_episodes(plan, share) for share in (0.1, 0.2, 0.5))
    assert len(held_out_episodes(plan, 0.9)) == 18


def test_mean_over_variants_is_taken_seed_by_seed():
    rows = [{"controller": "a", "seed": s, "variant": v, "x": x, "min_ttc": t} for s, v, x, t in (
        (1, "p", 1, None), (2, "p", 3, 2.0), (1, "q", 5, None), (2, "q", 9, None))]
    summary = summarise(rows)["a"]
    assert list(summary) == ["x", "min_ttc"] and summary["min_ttc"] == {"mean": 2.0, "ci95": None}
    assert summary["x"] == mean_ci([3.0, 6.0])


def test_scores_of_a_suite(tmp_path, scenarios):
    """Each variant's rows are those that it gets alone; the file keeps its keys."""
    cfg = config("evaluate.workers=1")
    cfg.env.suite, cfg.env.horizon_s = ["same", "env.scenario=ring"], 15.0
    rows, log = evaluate.evaluate_suite(cfg, ["random"], [7], folder=scenarios, say=lambda *text: None)
    alone, _ = evaluate.evaluate(variant(cfg, "env.scenario=ring"), ["random"], [7], {}, scenarios,
                                 lambda *text: None)
    assert rows[2:] == [{**row, "variant": "env.scenario=ring"} for row in alone]
    assert len(rows) == 4 and {line[-1] for line in log} <= set(cfg.env.suite)
    said, known = [], [row for row in rows if row["controller"] == "none"]
    again, _ = evaluate.evaluate_suite(cfg, ["random"], [7], {}, scenarios, lambda *text: said.append(text), known)
    assert again == rows and len(said) == 2  # only "random" was simulated again
    save_scores(tmp_path / "r.json", evaluate.scenarios_of([cfg]), [7], rows, {}, evaluate.SHIELD_LOG, log)
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["scenario"] == "corridor, ring"  # only that of the first variant was named
    assert set(result) == {"scenario", "sumo_version", "seeds", "episodes", "summary", "variants"}
    means = [result["variants"][text]["random"]["ocr"]["mean"] for text in cfg.env.suite]
    assert result["summary"]["random"]["ocr"]["mean"] == pytest.approx(np.mean(means))
    assert Path(tmp_path / "r.shield.csv").read_text().splitlines()[0].endswith(",variant")


def test_files_beside_a_name_with_dots():
    """`--out d.lr0.1` and `--out d.lr0.2` wrote the same d.lr0.csv."""
    assert [beside(Path("a") / name, ".csv").name for name in ("r.json", "d.lr0.1", "d.lr0.2", "r")] == [
        "r.csv", "d.lr0.1.csv", "d.lr0.2.csv", "r.csv"]


@pytest.mark.parametrize("words, says", [
    (["--sweep", "env.max_commands=1,5", "--sweep", "env.icv_share=0.1,0.5"], "there is one already"),
    (["--seeds", "1001", "--seeds", "1002"], "there is one already"),
    (["--config", "configs/quick.yaml"], "there is one already"),
    (["--sweep", "env.horizon_s=60,90"], "episodes of evaluate.horizon_s")])
def test_sweeps_that_would_not_be_done_are_refused(words, says, monkeypatch, capsys):
    """Of two the first one was forgotten; of two horizons both columns were those of evaluate.horizon_s."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--config", "configs/smoke.yaml", *words])
    assert run_script(evaluate.main, evaluate.USER_ERRORS) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--checkpoint", "--scenario", "--out", "--tracks", "--animate", "--sweep"])
def test_options_with_nothing_behind_them_are_refused(option, monkeypatch, capsys):
    """`--out "$RESULTS"` with that variable not set scored for an hour and kept nothing, and `--config "$MINE"` scored
    configs/default.yaml."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--controllers", "nobody", option, ""])
    assert run_script(evaluate.main, evaluate.USER_ERRORS) == 2
    assert f"{option} '': expected a value" in capsys.readouterr().err


def test_help_says_whose_configuration_counts(monkeypatch, capsys):
    """Beside --config stands "default: configs/default.yaml", which is not so with --checkpoint."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--help"])
    assert run_script(evaluate.main, evaluate.USER_ERRORS) == 0
    assert "without --config its own counts" in " ".join(capsys.readouterr().out.split())


def test_horizon_of_training_is_said_to_be_none_of_the_score(monkeypatch, capsys):
    """`evaluate.py env.horizon_s=60` scored evaluate.horizon_s without a word."""
    words = ["--controllers", "nobody", "env.horizon_s=60"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--config", "configs/smoke.yaml", *words])
    assert run_script(evaluate.main, evaluate.USER_ERRORS) == 2
    assert "NOTE: scored episodes last evaluate.horizon_s" in capsys.readouterr().out


def test_sweeps_that_simulate_the_traffic_without_control_once(scenarios):
    """All that COMMANDS_ONLY names; whatever they are, nobody who is not commanded notices."""
    def rows(*changes):
        cfg = load_config("configs/smoke.yaml", changes)
        assert not changes or cfg != load_config("configs/smoke.yaml")
        cfg.evaluate.workers, cfg.env.horizon_s = 0, 40.0
        return evaluate.evaluate(cfg, ["none"], [7], {}, scenarios, lambda *text: None)[0]
    changes = ("env.max_commands=1", "env.speed_mode=31", "env.lane_change_mode=512", "evaluate.selection=jam",
               "evaluate.sample=true", "evaluate.accel_limit=1", "evaluate.leave_below=5",
               "evaluate.leave_after=0.9", "evaluate.surprise_limit=0.1", "evaluate.c_int_cap=0.1",
               "shield.enabled=false", "baselines.tuned.gain=0")
    assert all(any(one.startswith(name) for one in changes) for name in evaluate.COMMANDS_ONLY)
    first = rows()
    assert first[0]["controlled_vehicle_steps"] == 0 and first[0]["departed"] > 5
    assert [change for change in changes if rows(change) != first] == []
