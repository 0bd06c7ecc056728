"""benchmarks/tune_rules.py: candidates, the limit, and that no episode without control is run twice."""
import dataclasses
from types import SimpleNamespace

import pytest

from benchmarks import tune_rules
from benchmarks.tune_rules import Scorer, candidates, play, search, winners
from configs import load_config
from configs.traffic import AdviceConfig
from env.baselines import make_baseline
from evaluate import evaluate

TWO = "env.suite=[same, corridor.lanes=3]"


def test_candidates_are_rules_that_the_configuration_allows():
    rules = list(candidates(load_config("configs/smoke.yaml"), 200).values())
    assert len({str(rule) for rule in rules}) == 204 and rules[2].meter_brake == 0.31
    for setting in dataclasses.fields(AdviceConfig):
        values, low, high = [getattr(r, setting.name) for r in rules], *(setting.metadata[x] for x in ("low", "high"))
        assert (low is None or min(values) >= low) and (high is None or max(values) <= high)
        assert all(isinstance(value, setting.type) for value in values)
    assert 20 < sum(rule.gain == 0 for rule in rules) < 90  # some rules without speed advice


@pytest.mark.parametrize("path", ["configs/default.yaml", "configs/suite.yaml", "configs/roads_train.yaml"])
def test_the_search_covers_the_rules_that_are_known(path):
    """The best rule's `above` lay outside, so that every candidate near it was another rule."""
    baselines = load_config(path).baselines
    for name in tune_rules.KNOWN:
        for key, value in dataclasses.asdict(getattr(baselines, name)).items():
            assert not value or tune_rules.RANGES[key][0] <= value <= tune_rules.RANGES[key][1], (name, key)


def test_best_rule_with_and_without_a_limit():
    results = [{"s_total": s, "c_int": c, "by_variant": [s, -s]} for s, c in ((1, 0.01), (3, 0.2), (2, 0.05))]
    assert winners(results, 0.05, 2) == {"best": [1, 2, 0], "best with C_int <= 0.05": [2, 0],
                                         "best of variant 1": [1, 2, 0], "best of variant 2": [0, 2, 1]}
    assert winners(results, 0.001, 0)["best with C_int <= 0.001"] == []


def test_episodes_without_control_are_run_once(monkeypatch):
    """Every row is paired with the one of the same variant and seed."""
    played = []

    def row(cfg, name, seed, folder):
        played.append((cfg.corridor.lanes, name, seed))
        ocr = 0.01 * (10 * seed + cfg.corridor.lanes) * (1 + (cfg.baselines.tuned.gain if name == "tuned" else 0))
        return {"controller": name, "seed": seed, "ocr": ocr, "sigma_v": 1.0, "abs_a": 1.0, "c_int": 0.0}
    monkeypatch.setattr(tune_rules, "play", row)
    cfg = load_config("configs/smoke.yaml", [TWO])
    scorer = Scorer(cfg, SimpleNamespace(map=map), None)
    rules = {"one": AdviceConfig(gain=0.1), "two": AdviceConfig(gain=0.3)}
    results = search(scorer, rules, [1, 2], lambda *_, **__: None)
    assert [r["s_total"] for r in results] == [pytest.approx(7), pytest.approx(21)]
    assert results[0]["by_variant"] == [pytest.approx(7), pytest.approx(7)] and cfg.baselines.tuned.gain == 1.04
    list(scorer.rows([rules["one"]], [2, 3]))
    assert len(played) == len(set(played)) + 2 + 4  # of "tuned" only: the same numbers twice, and other numbers
    assert sorted(p for p in played if p[1] == "none") == [(n, "none", s) for n in (2, 3) for s in (1, 2, 3)]


def test_an_episode_is_that_of_evaluation(scenarios):
    cfg = load_config("configs/smoke.yaml", ["evaluate.workers=1", "data.margin=0", "phase1.augment.time_shift=0"])
    cfg.env.horizon_s, cfg.env.terminate_on_collision = 20.0, False
    rows, _ = evaluate(cfg, ["tuned"], [3], folder=scenarios, say=lambda *text: None)
    row = play(cfg, "tuned", 3, scenarios)
    assert row == {name: rows[1][name] for name in row} and row["steps"] == 20
    assert make_baseline("tuned", cfg).keywords["meter_brake"] == 0.31
