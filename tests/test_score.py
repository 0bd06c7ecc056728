"""env/score.py against numbers worked out by hand."""

import numpy as np
import pytest

from configs.schema import RewardConfig
from env import graph
from env.score import EpisodeTotals, paired_score


def test_paired_score_by_hand():
    base = {"ocr": 0.8, "sigma_v": 8.0, "abs_a": 0.4, "c_int": 0.0}
    row = {"ocr": 0.88, "sigma_v": 6.0, "abs_a": 0.38, "c_int": 0.5}
    score = paired_score(row, base)
    assert score["ocr_change"] == pytest.approx(10.0) and score["s_efficiency"] == pytest.approx(10.0)
    assert score["s_stability"] == pytest.approx(0.4 * 25 + 0.6 * 5)  # 13
    assert score["s_total"] == pytest.approx((0.7 * 10 + 0.3 * 13) * np.exp(-0.05))
    worse = paired_score({**row, "ocr": 0.6, "sigma_v": 10.0}, base)
    assert worse["ocr_change"] == pytest.approx(-25.0) and worse["s_efficiency"] == 0.0
    assert worse["s_total"] == pytest.approx(0.3 * (0.4 * -25 + 0.6 * 5) * np.exp(-0.05))
    assert paired_score(base, base) == {"ocr_change": 0.0, "s_efficiency": 0.0, "s_stability": 0.0, "s_total": 0.0}


def test_paired_score_against_a_run_without_arrivals():
    nothing = {"ocr": 0.0, "sigma_v": 0.0, "abs_a": 0.0, "c_int": 0.0}
    score = paired_score({"ocr": 0.5, "sigma_v": 3.0, "abs_a": 0.2, "c_int": 0.1}, nothing)
    assert set(score.values()) == {0.0}


def scene_of(speeds, accels, icvs=()):
    scene = np.zeros(len(speeds), graph.SCENE)
    scene["speed"], scene["accel"], scene["lead"], scene["lead_gap"] = speeds, accels, -1, 200
    scene["icv"][list(icvs)] = True
    return scene


def events(loaded=0, departed=(), arrived=(), collisions=0, teleports=0):
    """What Sumo.read reports; `loaded` vehicles are due, all of them inserted."""
    return {"departed": list(departed), "arrived": list(arrived), "colliding": [], "lifted": [], "landed": [],
            "stats.vehicles.loaded": loaded, "stats.vehicles.running": loaded,
            "stats.vehicles.inserted": loaded, "stats.vehicles.waiting": 0,
            "stats.safety.collisions": collisions, "stats.teleports.total": teleports}


def test_episode_totals_average_over_the_steps_with_vehicles():
    totals, metres = EpisodeTotals(RewardConfig(), 1.0, 4.0), np.full(2, 1000.0)
    totals.intervention(7.0, 2)
    totals.step(scene_of([], []), np.zeros(0), np.zeros(0), events(), 0)
    totals.step(scene_of([10, 20], [1, -2], [0]), np.array([10.0, 20.0]), metres, events(4, [b"a", b"b"]), 1)
    totals.step(scene_of([10, 10], [0, -4], [0, 1]), np.full(2, 10.0), metres, events(5, [b"c"], [b"a"], 2, 1), 2)
    out = totals.summary()
    assert out["steps"] == 3 and out["overflow"] == 3 and out["controlled_vehicle_steps"] == 2
    assert (out["loaded"], out["departed"], out["arrived"], out["ocr"]) == (5, 3, 1, 0.2)
    assert (out["collisions"], out["teleports"], out["hard_brakes"]) == (2, 1, 1)
    # Averages over the two steps with vehicles: standard deviations 5 and 0, mean |a| 1.5 and 2.
    assert (out["sigma_v"], out["abs_a"], out["mean_speed"]) == (2.5, 1.75, 12.5)
    assert out["icvs"] == 1.0 and out["c_int"] == 7.0 / 3 and out["min_ttc"] is None


def test_braking_with_exactly_four_is_hard_whatever_sumo_rounds():
    """Of many trucks whose comfortable braking is 4 m/s^2 some counted, by the last bit of SUMO's sum."""
    accels = [-4.0000000000000036, -4.0, -3.999999999999999, -3.99]
    totals = EpisodeTotals(RewardConfig(), 1.0, 1.0)
    totals.step(scene := scene_of([10] * 4, accels), np.full(4, 10.0), np.full(4, 1000.0), events(4), 0)
    assert totals.summary()["hard_brakes"] == 3 and graph.conflicts(scene).tolist() == [True] * 3 + [False]


def test_warm_up_is_forgotten_in_averages_but_not_in_counts():
    totals = EpisodeTotals(RewardConfig(), 1.0, 4.0)
    totals.step(scene_of([0, 30], [5, 5], [0, 1]), np.zeros(2), np.ones(2), events(2, [b"a", b"b"]), 0)
    totals.forget_averages()
    totals.step(scene_of([10], [1], [0]), np.zeros(1), np.ones(1), events(2, (), [b"a"]), 0)
    out = totals.summary()
    assert (out["steps"], out["sigma_v"], out["abs_a"], out["mean_speed"]) == (1, 0.0, 1.0, 10.0)
    assert (out["departed"], out["arrived"]) == (2, 1)


def test_who_is_lifted_twice_in_a_step_is_still_aloft():
    """Lifted, landed and lifted again within a control step of 5 s, one was carried to its destination later and had
    arrived: 12 of 149 in a jam of which SUMO moves whoever stands for 2 s."""
    totals, many = EpisodeTotals(RewardConfig(), 5.0, 10.0), [b"a", b"b"]
    lifted = {**events(2, many), "lifted": [b"a", b"b", b"a"], "landed": [b"a", b"b"]}
    totals.step(scene_of([10], [0]), np.array([10.0]), np.full(1, 1000.0), lifted, 0)
    totals.step(scene_of([], []), np.zeros(0), np.zeros(0), events(2, (), many), 0)
    assert (totals.arrivals, totals.arrived) == (1, 1)


def test_who_is_aloft_when_an_episode_begins_is_loaded():
    """In a saved state SUMO was carrying one over a jam, who was on no lane: it had left, and arrived all the same."""
    totals = EpisodeTotals(RewardConfig(), 1.0, 4.0)
    state = {**events(), "stats.vehicles.inserted": 10, "stats.vehicles.running": 3}
    totals.step(scene_of([10, 0], [0, 0]), np.zeros(2), np.ones(2), state, 0)
    assert totals.loaded == 3


def test_reward_of_one_step_by_hand():
    totals, c = EpisodeTotals(RewardConfig(), 0.5, 5.0), RewardConfig()
    totals.step(scene_of([10, 20], [1, -2]), np.array([100.0, 50.0]), np.array([1000.0, 200.0]), events(2), 0)
    gain = 0.7 * (0.1 + 0.25) / (c.ocr_ref * c.demand_ref)
    loss = 0.3 * (0.4 * 5 / c.sigma_ref + 0.6 * 1.5 / c.abs_a_ref)
    assert totals.reward == pytest.approx(100 * gain - 100 * loss / 10)
    calm = totals.reward
    crash = events(2, collisions=2)
    totals.step(scene_of([10, 20], [1, -2]), np.array([100.0, 50.0]), np.array([1000.0, 200.0]), crash, 0)
    assert totals.reward == pytest.approx(calm - 2 * c.collision_penalty)
    assert totals.summary()["return"] == pytest.approx(2 * calm - 2 * c.collision_penalty)


def test_shortest_time_to_collision_counts_leaders_only():
    totals, scene = EpisodeTotals(RewardConfig(), 1.0, 4.0), scene_of([20, 10], [0, 0])
    scene["lead"], scene["lead_gap"], scene["lead_speed"] = [1, -1], [30, 5], [10, 0]  # the second sees a wall
    totals.step(scene, np.zeros(2), np.ones(2), events(2), 0)
    assert totals.summary()["min_ttc"] == 3.0


def test_collisions_before_an_episode_begins_are_not_its_own():
    """They end no episode and count in no score, however often averages begin anew."""
    totals, metres = EpisodeTotals(RewardConfig(), 1.0, 4.0), np.full(1, 1000.0)
    for collisions in (3, 4):
        totals.step(scene_of([10], [0]), np.array([10.0]), metres, events(1, collisions=collisions), 0)
        totals.forget_averages()
    totals.step(scene_of([10], [0]), np.array([10.0]), metres, events(1, collisions=6), 0)
    assert totals.summary()["collisions"] == 2


def test_who_waits_outside_is_loaded():
    totals = EpisodeTotals(RewardConfig(), 1.0, 4.0)
    due = {**events(2, [b"a", b"b"]), "stats.vehicles.waiting": 3}
    totals.step(scene_of([10, 10], [0, 0]), np.zeros(2), np.ones(2), due, 0)
    totals.step(scene_of([10], [0]), np.zeros(1), np.ones(1), {**events(2, (), [b"a"]), "stats.vehicles.running": 1,
                                                               "stats.vehicles.waiting": 3}, 0)
    assert totals.loaded == 5 and totals.ocr == 0.2


def test_warm_up_leaves_nothing_in_averages_and_extremes():
    totals, metres = EpisodeTotals(RewardConfig(), 1.0, 4.0), np.full(2, 1000.0)
    scene = scene_of([20, 10], [-5, 0], [0, 1])
    scene["lead"], scene["lead_gap"], scene["lead_speed"] = [1, -1], [5, 200], [10, 10]
    totals.step(scene, np.zeros(2), metres, events(2), 3)
    totals.forget_averages()
    totals.intervention(6.0, 1)
    totals.step(scene_of([10, 10], [0, 0], [0]), np.zeros(2), metres, events(2), 0)
    out = totals.summary()
    assert (out["hard_brakes"], out["min_ttc"], out["overflow"], out["icvs"], out["c_int"]) == (0, None, 0, 1.0, 6.0)
    assert out["return"] == totals.reward


def test_who_would_be_met_beside_has_no_time_to_collision():
    totals, scene = EpisodeTotals(RewardConfig(), 1.0, 4.0), scene_of([20, 10, 20], [0] * 3)
    scene["lead"], scene["lead_gap"], scene["lead_speed"] = [1, -1, 1], [5, 200, 60], [10, 0, 10]
    scene["aside"][0] = True
    totals.step(scene, np.zeros(3), np.ones(3), events(3), 0)
    assert totals.summary()["min_ttc"] == 6.0
