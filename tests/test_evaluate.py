"""evaluate.py: statistics against known values, the lists of seeds, the shield's log, and whom the policy commands."""
import copy
import math
import statistics

import numpy as np
import pytest
import torch

import evaluate
from configs import Config, ConfigError, load_config
from env.baselines import FAR_M, MERGE_DISTANCE, SPEED, mean_speed_ahead
from env.workers import make_pool
from controllers import AHEAD, ENOUGH, FEW, KNOWN_S, LANES, SURPRISE_S, Audit, Fastest, PolicyController, Surprise
from evaluate import parse_seeds, sweep
from models.safety_shield import CLIPPED, EMERGENCY, LANE_VETO, NONE, RISK
from runtime.scores import differences, doubts, mean_ci, paired_lines, student_t, summarise


@pytest.mark.parametrize("freedom, quantile", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262),
                                               (10, 2.2281), (11, 2.2010), (19, 2.0930), (99, 1.9842)])
def test_quantiles_of_students_t(freedom, quantile):
    """Tabulated values. The expansion alone was used from 3 degrees on, up to 2 % too narrow."""
    assert student_t(freedom) == pytest.approx(quantile, rel=2e-4)


def test_interval_of_a_mean_by_hand():
    result = mean_ci([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result["mean"] == 3 and result["ci95"] == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=0.01)
    assert mean_ci([7]) == {"mean": 7.0, "ci95": None} and mean_ci([]) == {"mean": None, "ci95": None}


def test_summary_leaves_missing_values_out():
    rows = [{"controller": "a", "seed": s, "x": s, "min_ttc": t} for s, t in ((1, None), (3, 2.0))]
    assert mean_ci([0.1] * 3)["ci95"] == 0.0  # it was 4e-17, and printed with all its digits
    assert summarise(rows)["a"]["x"]["mean"] == 2 and summarise(rows)["a"]["min_ttc"] == {"mean": 2.0, "ci95": None}


def test_differences_are_paired_by_seed_over_the_variants():
    def rows(name, scores):
        return [{"controller": name, "seed": seed, "variant": v, "s_total": scores[v][seed],
                 "arrived": 10 * scores[v][seed], "c_int": 0.25}
                for v in range(2) for seed in range(3)]
    both = rows("policy", [[1, 2, 3], [3, 4, 5]]) + rows("tuned", [[1, 1, 1], [1, 1, 1]])  # 2, 3, 4 against 1, 1, 1
    pairs = differences(both + rows("none", [[0] * 3] * 2), " k=1")
    assert pairs["policy - tuned k=1"]["s_total"] == mean_ci([1, 2, 3])
    assert paired_lines(pairs) == [
        f"S_total, paired: policy - tuned k=1 +2.00 +- {mean_ci([1, 2, 3])['ci95']:.2f}",
        f"arrived, paired: policy - tuned k=1 +20.0 +- {mean_ci([10, 20, 30])['ci95']:.1f}",
        "C_int, paired: policy - tuned k=1 +0.000 +- 0.000"]
    assert differences(rows("tuned", [[0] * 3] * 2)) == {}


def test_one_seed_leaves_the_interval_open():
    """It was printed as "+- 0.00", which claims to be certain."""
    rows = [{"controller": name, "seed": 1, "s_total": score, "arrived": 5, "c_int": 0.5}
            for name, score in (("policy", 3), ("tuned", 1))]
    assert paired_lines(differences(rows)) == [
        "S_total, paired: policy - tuned +2.00", "arrived, paired: policy - tuned +0.0",
        "C_int, paired: policy - tuned +0.000"]


def test_lists_of_seeds():
    assert parse_seeds("1001-1003,7") == [1001, 1002, 1003, 7]
    for text in ("", "a", "3-1", "1,1", "1-2,2", "1.5", "5,7-6", "3000000000", "1-"):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text)


@pytest.mark.parametrize("words", [
    "--out x.json --tracks x.json", "--out x.json --tracks x.csv", "--out x.json --tracks x.shield.csv",
    "--out x.json --animate x.gif", "--animate x.gif --sweep env.max_commands=1,2", "--out folder/x.json"])
def test_results_that_could_not_be_kept_are_refused_first(words, tmp_path, monkeypatch):
    """Pictures replaced scores; a folder with the name of the CSV was found after all episodes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "x.csv").mkdir(parents=True)
    options = evaluate.parse("", words.split(), evaluate.add_options, load=False)
    with pytest.raises(ConfigError, match="command line: "):
        evaluate.check_output(options)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("words", ["--sweep evaluate.seeds=[1],[2]", "--sweep evaluate.controllers=[none],[random]",
                                   "--scenario corridor --sweep env.scenario=ring,merge"])
def test_sweeps_over_what_the_command_line_decides_are_refused(words):
    """All rows were those of the first value, under the names of the others."""
    options = evaluate.parse("", [*words.split(), "--config", "configs/smoke.yaml"], evaluate.add_options, load=False)
    with pytest.raises(ConfigError, match="--sweep"):
        evaluate.settings(options)


def test_scores_that_mean_little_are_doubted():
    """A table of zeros looked like a result, and so did one of the vehicles for which there was room."""
    empty, good, full, calm = ({"controller": "none", "seed": 7, "loaded": n, "departed": n, "overflow": m,
                                "steps": 10, "sigma_v": s, "abs_a": 0.1, "controlled_vehicle_steps": 0, "arrived": n,
                                "collisions": 0}
                               for n, m, s in ((0, 0, 0), (30, 0, 2), (90, 45, 2), (30, 0, 0.01)))
    assert doubts([empty, good], "my.sumocfg") == []
    nobody, = doubts([empty, empty], "my.sumocfg")
    assert "my.sumocfg: nobody drove" in nobody
    many, = doubts([good, full], "my.sumocfg")
    assert "up to 4.5 vehicles" in many and "env.max_vehicles" in many
    drives = {"controller": "policy", "controlled_vehicle_steps": 1}
    steady, = doubts([good, calm, {**calm, **drives}], "my.sumocfg")
    swept = [{**calm, "controller": f"none max_commands={k}"} for k in (1, 5)]  # these were not looked at
    assert doubts(swept, "my.sumocfg") == [steady]
    assert "seeds [7]: without control speeds hardly differ" in steady
    idle, = doubts([good, {**good, "controller": "policy"}], "my.sumocfg")
    assert "no command was carried out" in idle and doubts([good, {**good, **drives}], "my.sumocfg") == []
    for few in (0, 9):  # S_total was 169 +- 2202 where 2 and 3 had arrived without control
        rare, = doubts([{**good, "arrived": few}, {**good, **drives}], "my.sumocfg")
        assert "seeds [7]: without control fewer than 10 vehicles arrive" in rare and "evaluate.horizon_s" in rare


def test_a_controller_that_keeps_traffic_off_the_road_is_doubted():
    """285 of 1125 vehicles more than without control stood outside, and the mean speed had risen."""
    none, policy = ({"controller": name, "seed": 1, "variant": v, "loaded": 100, "departed": d, "overflow": 0,
                     "steps": 10, "sigma_v": 2.0, "abs_a": 0.2, "controlled_vehicle_steps": 9, "collisions": c,
                     "arrived": 50}
                    for name, v, d, c in (("none", "a", 100, 0), ("policy", "a", 92, 3)))
    kept, = doubts([none, policy, {**none, "variant": "b", "departed": 50}], "my.sumocfg")
    assert "with policy, 8 vehicles" in kept
    assert doubts([none, {**policy, "departed": 96}], "my.sumocfg") == []
    crash, = doubts([{**none, "collisions": 2}, {**policy, "departed": 100}], "my.sumocfg")
    assert "2 collisions in 1 episodes without control" in crash and "env.terminate_on_collision" in crash


def test_references_that_do_not_fit_are_told():
    """On a user's network an arrival weighed half of what it does in the score, and nobody said so."""
    rows, reward = [{"controller": "none", "seed": s, "loaded": 400, "departed": 400, "arrived": 300, "overflow": 0,
                     "steps": 10, "sigma_v": 5.0, "abs_a": 0.4, "controlled_vehicle_steps": 0, "collisions": 0}
                    for s in (1, 2)], Config().reward
    said, = doubts(rows, "my.sumocfg", reward)
    assert said.endswith("reward.demand_ref=400 reward.ocr_ref=0.75 reward.sigma_ref=5.00 reward.abs_a_ref=0.400")
    assert doubts(rows, "corridor", reward) == doubts(rows, "a.sumocfg, b.sumocfg", reward) == []
    reward.demand_ref, reward.ocr_ref = 400.0, 0.7
    assert doubts(rows, "my.sumocfg", reward) == [said]  # sigma_v
    reward.sigma_ref = 6.0
    assert doubts(rows, "my.sumocfg", reward) == []


def test_shield_log_holds_every_override_with_its_reason():
    audit, keep = Audit("policy", 7), LANES.index("keep")
    nothing = {"reason": np.zeros(3, int), "slot": np.zeros(3, int)}
    audit.add(nothing)
    audit.add({"reason": np.array([0, 1, 6]), "slot": np.array([4, 5, 6]), "wanted": np.array([0.0, 2.0, 1.0]),
               "wanted_lane": np.array([keep, keep, 0]), "accel": np.array([0.0, 0.5, -3.0]),
               "lane": np.array([keep, keep, keep]), "brake": np.array([0.0, 0.0, 4.5])})
    assert audit.counts == {"shield_clips": 1, "shield_vetoes": 0, "shield_emergencies": 1}
    assert audit.lines == [("policy", 7, 1, 5, "clipped", 2.0, "keep", 0.5, "keep"),
                           ("policy", 7, 1, 6, "lane veto + emergency", 1.0, "left", -4.5, "keep")]


def test_every_override_is_counted_once():
    """A lane change that was struck while the speed stayed was in the log and in no count."""
    audit = Audit("policy", 7)
    reasons = [NONE, CLIPPED, LANE_VETO, CLIPPED + LANE_VETO, EMERGENCY + LANE_VETO, RISK, RISK + CLIPPED]
    n = len(reasons)
    audit.add({"reason": np.array(reasons), "slot": np.arange(n), "wanted": np.zeros(n), "accel": np.zeros(n),
               "brake": np.zeros(n), "wanted_lane": np.zeros(n, int), "lane": np.ones(n, int)})
    assert audit.counts == {"shield_clips": 3, "shield_vetoes": 2, "shield_emergencies": 1}
    assert sum(audit.counts.values()) == len(audit.lines) == n - 1


@pytest.fixture(scope="module")
def jam(scenarios):
    """An observation of the corridor with some ICVs."""
    cfg = load_config("configs/smoke.yaml", ["env.icv_share=0.5"])
    with make_pool(cfg, 0, 1, scenarios) as pool:
        pool.reset([3])
        pool.arrays["slot"][:] = cfg.env.max_vehicles
        for _ in range(40):
            pool.send([0])
            pool.receive([0])
        return cfg, {name: pool.arrays[name][0].copy() for name in pool.final}


def told(small, cfg, observation, k, selection, seed=1):
    """(slots in the order of the picks, {slot: (wanted acceleration, wanted lane)}) that the policy commands."""
    cfg.env.max_commands, cfg.evaluate.selection = k, selection
    controller = PolicyController(cfg, small, 1)
    controller.begin(0, seed)
    out = controller.act(observation, 0)
    assert all(len(values) == k for values in out.values())
    slots = [int(slot) for slot in out["slot"] if slot < cfg.env.max_vehicles]
    wish = {int(s): (round(float(a), 4), int(w)) for s, a, w in zip(out["slot"], out["wanted"], out["wanted_lane"])}
    return slots, wish


def command_all(model):
    """Nobody is released, everybody's speed is commanded.

    With the second gate left to chance, an unlucky initialisation told nobody anything and the tests failed.
    """
    model.controller.action[-1].bias.data[4:] = torch.tensor([-10.0, 10.0])


def test_k_of_an_evaluation_is_free(small, jam):
    """The first k of all picks, and the same commands: a model trained with five was refused any other number."""
    small = copy.deepcopy(small)
    command_all(small)
    everybody, wish = told(small, *jam, 1000, "learned")
    assert sorted(everybody) == np.flatnonzero(jam[1]["icv"]).tolist() and len(everybody) > 8
    for k in (0, 1, 2, 7):
        slots, some = told(small, *jam, k, "learned")
        assert slots == everybody[:k] and all(some[slot] == wish[slot] for slot in slots)


def test_selection_by_chance_and_by_the_jam(small, jam):
    """Others choose who is commanded; what they are told stays the policy's."""
    small = copy.deepcopy(small)
    command_all(small)
    learned, wish = told(small, *jam, 1000, "learned")
    by_chance, same = told(small, *jam, 1000, "random")
    assert by_chance != learned and sorted(by_chance) == sorted(learned) and same == wish
    assert by_chance[:4] == told(small, *jam, 4, "random")[0] != told(small, *jam, 4, "random", seed=2)[0]
    slow, _ = told(small, *jam, 1000, "jam")
    ahead = np.nan_to_num(mean_speed_ahead(jam[1], AHEAD), nan=1e3)[slow]
    assert sorted(slow) == sorted(learned) and (np.diff(ahead) >= 0).all() and ahead[0] < ahead[-1]


def test_a_policy_can_sample(small, jam):
    """Drawn actions follow from the episode's seed, and are others than the likeliest."""
    small, cfg = copy.deepcopy(small), copy.deepcopy(jam[0])
    command_all(small)
    likeliest = told(small, cfg, jam[1], 5, "learned")
    cfg.evaluate.sample = True
    drawn, again, other = (told(small, cfg, jam[1], 5, "learned", seed) for seed in (1, 1, 2))
    assert drawn == again and drawn != other and likeliest not in (drawn, other)


def test_sweep_names_its_rows_and_wants_different_values():
    """The same value twice was simulated twice."""
    with pytest.raises(ConfigError, match="expected different values"):
        sweep("env.icv_share=0.1,0.5,0.1")
    with pytest.raises(ConfigError, match="--sweep env.icv_share: expected .* KEY=A,B,C"):
        sweep("env.icv_share")
    assert sweep(None) == {"": []}
    assert sweep("env.icv_share=0.1,0.5") == {" icv_share=0.1": ["env.icv_share=0.1"],
                                              " icv_share=0.5": ["env.icv_share=0.5"]}


def test_surprise_is_the_median_error_of_the_speeds_that_were_expected():
    """Against a loop over vehicles: newcomers, who has left and who was commanded do not count; of few nothing is said,
    of some what they say now, of enough the worst stays."""
    rng, surprise, total, count, before, said, age = np.random.default_rng(0), Surprise(2.0), 0.0, 0.0, None, [], {}
    for step in range(160):
        speed, mask, fresh = rng.uniform(0, 30, 200), rng.random(200) < 0.99, rng.random(200) < 0.02
        nodes = np.zeros((200, 9), np.float16)
        nodes[:, SPEED] = speed / (1 if step < 80 else 10)  # the second half is judged better
        expected, told = rng.uniform(0, 3, rng.integers(150, 201)).astype(np.float32), rng.integers(0, 210, 5)
        age = {i: age.get(i, 0) + 2 for i in range(200) if mask[i] and not fresh[i]}
        errors = [abs(before[0][i] - float(nodes[i, SPEED])) for i in range(len(before[0]))
                  if age.get(i, 0) > KNOWN_S and i not in before[1]] if before else []
        keep = math.exp(-2 / SURPRISE_S)
        count = keep * count + len(errors)
        total = keep * total + len(errors) * (statistics.median(errors) if errors else 0)
        look = surprise.look({"nodes": nodes, "mask": mask, "fresh": fresh}, expected)
        said.append((count, total / max(count, 1)))
        sure = [now for known, now in said if known > ENOUGH]
        assert look == pytest.approx(max(sure) if sure else said[-1][1] if count > FEW else math.inf, rel=1e-3)
        assert surprise.worst == (look if sure else 0.0)
        surprise.tell(told)
        before = expected, told
    assert look > 1.1 * said[-1][1] > 0 and sum(FEW < known < ENOUGH for known, _ in said) > 5


@pytest.mark.parametrize("limit, commands", [(0.0, True), (1e-6, False), (1e3, True)])
def test_who_is_surprised_commands_nobody(limit, commands, small, jam, capsys):
    small, (cfg, observation) = copy.deepcopy(small), copy.deepcopy(jam)
    command_all(small)
    cfg.evaluate.surprise_limit = limit
    controller = PolicyController(cfg, small, 1)
    controller.begin(0, 1)
    acts = [controller.act({**observation, "fresh": observation["fresh"] * 0}, 0) for _ in range(250)]
    sent = [bool((act["slot"] < cfg.env.max_vehicles).any()) for act in acts]
    assert sent[0] == (not limit) and sent[-1] == commands  # with a limit it waits until it knows its errors
    assert sent == sorted(sent) and (commands or not any(act["reason"].any() for act in acts))
    assert capsys.readouterr().out.count("commands nobody any more") == (not commands)  # said once


def test_who_is_nearly_surprised_does_not_begin(small, jam, monkeypatch):
    """On motorways whose drivers the world model misjudged by nearly the limit, the policy began in the first minute
    and stopped in the third. Once begun, it goes on up to the limit."""
    errors = [math.inf, 0.95, 0.89, 0.95, 1.01, 0.95, 0.89]
    monkeypatch.setattr(Surprise, "look", lambda self, *_: errors.pop(0))
    small, (cfg, observation) = copy.deepcopy(small), copy.deepcopy(jam)
    command_all(small)
    cfg.evaluate.surprise_limit = 1.0
    controller = PolicyController(cfg, small, 1)
    controller.begin(0, 1)
    sent = [bool((controller.act(observation, 0)["slot"] < cfg.env.max_vehicles).any()) for _ in range(7)]
    assert sent == [False, False, True, True, False, True, True]


def test_how_fast_traffic_is_before_a_merge():
    """Against sorted speeds: the value nine tenths up, of ten or more with a merge ahead; the episode's highest."""
    rng, fastest, highest = np.random.default_rng(0), Fastest(1.0), 0.0
    assert fastest.speed == 0
    for _ in range(60):
        nodes, surround = np.zeros((40, 9), np.float16), np.zeros((40, 14), np.float16)
        nodes[:, SPEED], mask = rng.uniform(0, 35, 40), rng.random(40) < 0.5
        surround[:, MERGE_DISTANCE] = np.where(rng.random(40) < 0.5, rng.uniform(0, 499, 40), FAR_M)
        near = mask & (surround[:, MERGE_DISTANCE] < FAR_M)
        near = sorted(float(speed) for speed in nodes[near, SPEED])
        if len(near) >= 10:
            place = 0.9 * (len(near) - 1)
            lower = near[int(place)]
            highest = max(highest, lower + (place % 1) * (near[min(int(place) + 1, len(near) - 1)] - lower))
        assert fastest.look({"nodes": nodes, "mask": mask, "surround": surround}) == pytest.approx(highest)
    assert highest > 20


@pytest.mark.parametrize("speed, distance", [(20.0, 100.0), (30.0, FAR_M)])
def test_on_slow_roads_and_without_a_merge_nobody_is_commanded(speed, distance, small, jam, capsys):
    """Before a traffic light on a road of 20 m/s, and on a single lane without any merge, the policy of the suite
    braked for nothing: mean speed -7 %, S_total down to -18. Who has seen a fast merge goes on when it is slow."""
    small, (cfg, observation) = copy.deepcopy(small), copy.deepcopy(jam)
    command_all(small)
    cfg.evaluate.merge_speed = 25.0
    controller = PolicyController(cfg, small, 1)
    controller.begin(0, 1)

    def commands(speed, distance):
        observation["nodes"][:, SPEED], observation["surround"][:, MERGE_DISTANCE] = speed, distance
        return (controller.act(observation, 0)["slot"] < cfg.env.max_vehicles).any()

    assert not any(commands(speed, distance) for _ in range(150))
    assert capsys.readouterr().out.count("it commands nobody until some is") == 1
    assert commands(30.0, 100.0) and commands(speed, distance) and not capsys.readouterr().out
    controller.begin(0, 2)
    assert not commands(speed, distance)
