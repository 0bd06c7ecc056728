"""env/baselines.py: every rule against the same equation written for one vehicle, its numbers, its memory, and K."""
import math
import re

import numpy as np
import pytest

from configs import load_config
from configs.schema import BASELINES as NAMES
from configs.schema import Config
from env import baselines
from env.baselines import BASELINES, PISaturation, make_baseline, mean_speed_ahead
from env.graph import GLOBAL, NODE, SURROUND
from env.spaces import KEEP, LEFT
from controllers import BaselineController, make_controller

from helpers import episode

N = 40


def traffic(seed, n=N):
    """A made-up observation, float16 as in the shared memory of the workers: columns that the rules read are drawn,
    the others are 0."""
    rng = np.random.default_rng(seed)
    o = {"nodes": np.zeros((n, len(NODE)), np.float16), "surround": np.zeros((n, len(SURROUND)), np.float16),
         "globals": np.zeros(len(GLOBAL), np.float16), "mask": rng.random(n) < 0.8, "fresh": np.zeros(n, bool)}
    o["icv"] = o["mask"] & (rng.random(n) < 0.6)
    columns = {"speed": rng.uniform(0, 30, n), "position": rng.random(n), "lane": rng.integers(0, 3, n)}
    for name, values in columns.items():
        o["nodes"][:, NODE.index(name)] = values * o["mask"]
    near = {"lead_gap": rng.uniform(0, 80, n), "lead_speed": rng.uniform(0, 40, n), "has_left": rng.random(n) < 0.5,
            "has_right": rng.random(n) < 0.3, "merge_distance": np.minimum(rng.uniform(0, 900, n), 500),
            "merge_vehicles": rng.integers(0, 6, n), "left_gap": rng.uniform(-5, 60, n),
            "left_rear_gap": rng.uniform(-5, 60, n)}
    for name, values in near.items():
        o["surround"][:, SURROUND.index(name)] = values
    o["globals"][GLOBAL.index("mean_speed")] = o["nodes"][o["mask"], NODE.index("speed")].mean()
    return o


def column(o, name):
    return (o["nodes"][:, NODE.index(name)] if name in NODE else o["surround"][:, SURROUND.index(name)]).tolist()


def sent(commands, n=N):
    """{slot: (acceleration, lane)} of what a rule returns."""
    slot, accel, lane, brake = commands
    assert not brake.any() and len(slot) == len(accel) == len(lane) == len(brake)
    return {int(s): (float(a), int(w)) for s, a, w in zip(slot, accel, lane) if s < n}


def rule(name, *overrides):
    cfg = load_config("configs/default.yaml", overrides)
    return make_baseline(name, cfg)


@pytest.mark.parametrize("found, told", [
    (None, "NoneType"), (([1], [0.5], [1], [0.0]), "(1,), (1,), (1,), (1,)"),
    (([1] * 5, [0.5], [1] * 5, [0] * 5), "(5,), (1,), (5,), (5,)"),
    (([1] * 5, [0.5] * 5, [1] * 5), "(5,), (5,), (5,)]")])
def test_a_rule_that_returns_something_else_is_named(monkeypatch, found, told):
    """What it told beyond K was carried out and recorded, what it forgot was left out; evaluation ended in a traceback
    of numpy's. Lists are as good as arrays."""
    monkeypatch.setitem(BASELINES, "mine", lambda observation, k, rng: found)
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        make_baseline("mine", Config())(traffic(0), 5, None)
    assert "rule 'mine': expected (slot, accel, lane, brake), each of length 5, found" in str(error.value)
    monkeypatch.setitem(BASELINES, "mine", lambda observation, k, rng: [[0] * k] * 4)
    assert [part.tolist() for part in make_baseline("mine", Config())(traffic(0), 5, None)] == [[0] * 5] * 4


def test_names_are_those_of_the_configuration():
    assert tuple(BASELINES) == NAMES


# ---- car following ----------------------------------------------------------------------------------------------

def test_idm_against_the_equation_for_one_vehicle():
    for seed in range(5):
        o, expected = traffic(seed), {}
        for i, (v, gap, lead) in enumerate(zip(column(o, "speed"), column(o, "lead_gap"), column(o, "lead_speed"))):
            wanted = 2 + max(0.0, v * 1 + v * (v - lead) / (2 * math.sqrt(1 * 1.5)))
            accel = 1 * (1 - (v / 30) ** 4 - (wanted / max(gap, 0.1)) ** 2)
            if o["icv"][i]:
                expected[i] = (pytest.approx(min(max(accel, -3), 2), abs=1e-4), KEEP)
        assert sent(rule("idm")(o, N, None)) == expected


def test_idm_stands_still_at_equilibrium_and_its_numbers_count():
    """Closed form: at speed v behind a leader of that speed, (s0 + v T) / sqrt(1 - (v / v0)^4) is the gap of rest."""
    numbers = {"desired_speed": 24.0, "headway": 1.4, "accel": 0.7, "decel": 1.1, "exponent": 2.0, "min_gap_m": 3.0}
    follow = rule("idm", *(f"baselines.idm.{key}={value}" for key, value in numbers.items()))
    o, v = traffic(0), 12.0
    o["nodes"][:, NODE.index("speed")] = o["surround"][:, SURROUND.index("lead_speed")] = v
    o["surround"][:, SURROUND.index("lead_gap")] = (3 + v * 1.4) / math.sqrt(1 - (v / 24) ** 2)
    commands = sent(follow(o, N, None))
    assert len(commands) == o["icv"].sum() and all(abs(a) < 1e-3 for a, _ in commands.values())
    o["nodes"][:, NODE.index("speed")], o["surround"][:, SURROUND.index("lead_gap")] = 0.0, 6e4
    o["surround"][:, SURROUND.index("lead_speed")] = 0.0
    assert all(a == pytest.approx(0.7) for a, _ in sent(follow(o, N, None)).values())


def test_follower_stopper_keeps_at_least_its_floor():
    o = traffic(3)
    o["nodes"][:, NODE.index("speed")] = o["surround"][:, SURROUND.index("lead_speed")] = 12.0
    o["surround"][:, SURROUND.index("lead_gap")] = 100.0
    o["globals"][GLOBAL.index("mean_speed")] = 4.0
    assert sent(rule("follower_stopper")(o, N, None)) == {}  # nobody is faster than 15 m/s
    slower = sent(rule("follower_stopper", "baselines.follower_stopper.floor=10.5")(o, N, None))
    assert set(slower) == set(np.flatnonzero(o["icv"])) and set(slower.values()) == {(-1.5, KEEP)}


def test_the_k_strongest_brakings_are_sent():
    o = traffic(1)
    for name in ("idm", "follower_stopper", "pi_saturation"):
        everybody = sent(rule(name)(o, N, None))
        order = sorted(everybody.values())
        few = rule(name)(o, 4, None)
        assert sorted(sent(few).values()) == order[:4] and few[0].tolist() == list(sent(few))
        assert len(sent(rule(name)(o, 1000, None))) == len(everybody) >= 8


# ---- PI with saturation -----------------------------------------------------------------------------------------

class OneVehicle:
    """The controller for a single vehicle, with Python lists."""

    def __init__(self, length):
        self.length, self.speeds, self.command = length, [], None

    def accel(self, v, gap, lead, interval):
        self.speeds = [*self.speeds, v][-self.length:]
        target = sum(self.speeds) / len(self.speeds) + 1.0 * min(max((gap - 7) / (30 - 7), 0), 1)
        alpha = min(max((gap - max(2 * (lead - v), 4)) / 2, 0), 1)
        beta = 1 - 0.5 * alpha
        before = v if self.command is None else self.command
        self.command = beta * (alpha * target + (1 - alpha) * lead) + (1 - beta) * before
        return min(max((self.command - v) / interval, -3), 2)


@pytest.mark.parametrize("interval, length", [(1.0, 38), (0.5, 76), (10.0, 4)])
def test_pi_saturation_against_one_vehicle_at_a_time(interval, length):
    """100 steps in which vehicles leave and others take their slots: a newcomer starts without a memory."""
    act, singles = rule("pi_saturation", f"env.control_interval={interval}", "phase2.fragment_length=10",
                        "env.horizon_s=2000"), {}
    rng = np.random.default_rng(5)
    for step in range(100):
        o = traffic(step)
        o["mask"][:], o["icv"][:] = True, True
        o["fresh"][:] = (rng.random(N) < 0.02) | (step == 0)
        expected = {}
        for i, (v, gap, lead) in enumerate(zip(column(o, "speed"), column(o, "lead_gap"), column(o, "lead_speed"))):
            if o["fresh"][i]:
                singles[i] = OneVehicle(length)
            expected[i] = (pytest.approx(singles[i].accel(v, gap, lead, interval), abs=1e-4), KEEP)
        assert sent(act(o, N, None)) == expected
    assert len(singles[0].speeds) > 0


def test_pi_saturation_with_a_wide_gap_settles_at_its_own_mean_speed_plus_the_catch_up():
    """Closed form: alpha = 1 and beta = 1/2; at constant speed the command converges to v + catch_up."""
    act, o = PISaturation(1.0, 38.0, 7.0, 30.0, 1.5, 2.0, 4.0, 2.0), traffic(2)
    o["nodes"][:, NODE.index("speed")] = o["surround"][:, SURROUND.index("lead_speed")] = 10.0
    o["surround"][:, SURROUND.index("lead_gap")] = 100.0
    accels = []
    for step in range(12):
        o["fresh"][:] = step == 0
        accels.append([a for a, _ in sent(act(o, N, None)).values()])
    assert set(accels[0]) == {0.75} and set(accels[1]) == {1.125} and len(accels[0]) > 8
    assert accels[-1] == pytest.approx([1.5] * len(accels[0]), abs=1e-3)


def test_every_environment_has_a_memory_of_its_own():
    cfg = Config()
    cfg.env.max_vehicles = cfg.env.max_commands = N

    def wanted(envs):
        """Accelerations by environment: each sees its own traffic, in turn with the others."""
        controller, out = BaselineController(cfg, "pi_saturation"), {env: [] for env in envs}
        for env in envs:
            controller.begin(env, 1)
        for step in range(4):
            for env in envs:
                o = traffic(10 * env + step)
                o["icv"][:], o["fresh"][:] = True, step == 0
                out[env].append(controller.act(o, env)["wanted"].tolist())
        return out
    assert wanted([0, 1]) == {**wanted([0]), **wanted([1])}


# ---- rules of one's own -----------------------------------------------------------------------------------------

class Remembering:
    """Brakes as often as it was asked, for the vehicle in slot 0; its other commands are none."""

    def __init__(self, interval=None):
        self.interval, self.asked = interval, 0

    def __call__(self, observation, k, rng):
        self.asked += 1
        slot, accel, lane, brake = baselines.commands(observation, k, [0, -1, -500], 0.0)
        brake[:] = self.asked
        return slot, accel, lane, brake


class WithoutInterval(Remembering):
    """As above, and the control interval is nothing to it."""

    def __init__(self):
        super().__init__()


@pytest.mark.parametrize("kind, interval", [(Remembering, 0.5), (WithoutInterval, None)])
def test_a_class_is_one_instance_for_each_episode(monkeypatch, kind, interval):
    """Only `pi_saturation` was made an instance: another class of one's own was called as if it were a function."""
    monkeypatch.setitem(BASELINES, "mine", kind)
    one, other = [rule("mine", "env.control_interval=0.5") for _ in range(2)]
    one(traffic(0), 4, None)
    one, other = one.args[1], other.args[1]
    assert (one.interval, one.asked, other.asked) == (interval, 1, 0)


@pytest.mark.parametrize("shielded", [True, False])
def test_brake_of_a_rule_is_sent_and_negative_slots_are_no_command(monkeypatch, shielded):
    """A rule's `brake` was dropped, and slot -1 counted as an override of the shield and was paid for under a cap."""
    monkeypatch.setitem(BASELINES, "mine", Remembering)
    cfg = load_config("configs/default.yaml", [f"env.max_vehicles={N}", "env.max_commands=4", "evaluate.c_int_cap=9",
                                               f"shield.enabled={shielded}"])
    capped, o = make_controller(cfg, "mine", {}, 1), traffic(0)
    o["surround"][:, SURROUND.index("lead_gap")] = np.where(np.arange(N) < N - 1, 500, 0)  # danger for the last slot
    o["nodes"][:, NODE.index("speed")] = o["surround"][:, SURROUND.index("lead_speed")] = 20.0
    capped.begin(0, 1)
    for asked in range(1, 6):
        sent = capped.act(o, 0)
        deceleration = np.where(sent["brake"] > 0, sent["brake"], -sent["accel"])
        assert sent["slot"].tolist() == [0, N, N, N] and deceleration[0] == asked == -sent["wanted"][0]
        assert not sent["reason"].any()
    earned = 4 * 9 * o["icv"].sum()  # C_int counts no step yet in the first one
    assert capped.budgets[0].left == pytest.approx(earned - 15)


# ---- advice -----------------------------------------------------------------------------------------------------

def advised(o, reach, vehicles, ahead, gain, offset, margin, below, brake, accel, meter=0.0, faster=8.9, slower=11.5,
            room=None, above=0.0, cruise=None, lane=0, behind_m=0.0, hold=0.0):
    """[(urgency, slot, acceleration or None, moves)] of the advice, one vehicle at a time."""
    out = []
    for i in np.flatnonzero(o["icv"]):
        near, v = dict(zip(SURROUND, o["surround"][i].tolist())), column(o, "speed")[i]
        here = column(o, "position")[i]
        front = {j: column(o, "position")[j] - here for j in np.flatnonzero(o["mask"])}
        mean, behind = (sum(column(o, "speed")[j] for j in some) / len(some) if some else math.inf for some in (
            [j for j, d in front.items() if 0 < d <= ahead],
            [j for j, d in front.items() if 0 < d <= 0.14 and column(o, "merge_distance")[j] == 500]))
        moves = (near["has_left"] and column(o, "lane")[i] == 0 and near["merge_distance"] < reach
                 and near["merge_vehicles"] >= vehicles)
        if room is not None:
            moves = moves and near["left_gap"] > room and near["left_rear_gap"] > room
        slows = gain > 0 and v > mean + margin and above < mean < below
        slows = slows and not moves  # who moves over keeps the driver's speed
        wanted = min(max(gain * (mean + offset - v), -brake), accel) if slows else None
        told = moves or slows and not (near["lead_gap"] < behind_m and near["lead_speed"] < v - 1)
        if meter and not near["has_left"] and not near["has_right"] and near["merge_distance"] < 500 and (
                v > faster and behind < slower):
            wanted, slows, told = min(-meter, 99 if wanted is None else wanted), True, True
        if not (moves or slows) and cruise is not None and v > cruise - 2.6 and column(o, "lane")[i] >= lane:
            out.append(((2, -near["lead_gap"]), int(i), min(max(0.3 * (cruise - v), -0.75), 0.3), False))
        elif not (moves or slows) and hold > 0 and mean - hold < v and mean < below and v > 8:
            out.append(((True, -1e-3 * near["lead_gap"]), int(i), 0.0, False))
        if told:
            out.append(((not moves, near["merge_distance"] if moves else wanted), int(i), wanted, bool(moves)))
    return sorted(out)


HARMONISE = (136, 1, 0.33, 0.85, -3.7, 1, 19.8, 2.7, 1, 0, 8.9, 11.5, None, 17, 25)


@pytest.mark.parametrize("name, numbers", [("lane_advice", (314, 1, 0.26, 0, 0, 0, 20, 1.5, 1)),
                                           ("speed_advice", (259, 3, 0.26, 1.04, -0.35, 0.7, 20.1, 1.76, 1)),
                                           ("tuned", (259, 3, 0.26, 1.04, -0.35, 0.7, 20.1, 1.76, 1, 0.31)),
                                           ("harmonise", HARMONISE)])
@pytest.mark.parametrize("k", [3, N])
def test_advice_against_the_rule_for_one_vehicle(name, numbers, k):
    moved = slowed = metered = eased = 0
    for seed in range(8):
        o = traffic(seed)
        expected = advised(o, *numbers)[:k]
        slot, accel, lane, _ = rule(name)(o, k, None)
        assert slot[slot < N].tolist() == [i for _, i, _, _ in expected]
        for (_, _, wanted, moves), a, side in zip(expected, accel, lane):
            assert side == (LEFT if moves else KEEP)
            assert np.isnan(a) if wanted is None else a == pytest.approx(wanted, abs=1e-3)
            moved, slowed = moved + moves, slowed + (wanted is not None)
            metered, eased = metered + (wanted == -0.31), eased + (wanted == -0.75)
    assert (eased > 0) == (name == "harmonise")
    assert moved > 3 and (slowed > 0) == (name != "lane_advice") and (metered > 0) == (name == "tuned" and k == N)


@pytest.mark.parametrize("name, numbers, setting, without, limit", [
    ("lane_advice", (314, 1, 0.26, 0, 0, 0, 20, 1.5, 1), "gap_m=20", "gap_m=0", {"room": 20}),
    ("speed_advice", (259, 3, 0.26, 1.04, -0.35, 0.7, 20.1, 1.76, 1), "above=13", "above=0", {"above": 13}),
    ("harmonise", HARMONISE, "cruise_lane=1", "cruise_lane=0", {"lane": 1}),
    ("harmonise", HARMONISE, "behind_m=60", "behind_m=0", {"behind_m": 60})],
    ids=["waits_for_a_gap", "leaves_a_jam_alone", "leaves_the_right_lane_alone", "leaves_who_brakes_anyway_alone"])
def test_advice_to_fewer(name, numbers, setting, without, limit):
    """With the setting some of those advised without it are left out, and nobody is new. (Half of the gaps that
    `traffic` draws are shorter than 20 m.)"""
    fewer = 0
    for seed in range(8):
        o = traffic(seed)
        some, all_of_them = (sent(rule(name, f"baselines.{name}.{text}")(o, N, None)) for text in (setting, without))
        assert list(some) == [i for _, i, _, _ in advised(o, *numbers, **limit)] and set(some) <= set(all_of_them)
        fewer += 0 < len(some) < len(all_of_them)
    assert fewer > 0


def test_who_is_hardly_slower_than_the_traffic_ahead_holds_the_speed():
    held = 0
    for seed in range(8):
        o = traffic(seed)
        expected = advised(o, *HARMONISE, hold=4)
        slot, accel, _, _ = rule("harmonise", "baselines.harmonise.hold=4")(o, N, None)
        assert slot[slot < N].tolist() == [i for _, i, _, _ in expected]
        held += sum(a == wanted == 0 for a, (_, _, wanted, _) in zip(accel, expected))
    assert held > 3


def test_mean_speed_ahead_of_nobody_is_not_a_number():
    o = traffic(0)
    o["mask"][:] = False
    o["mask"][[3, 7, 9]] = True
    o["nodes"][:, NODE.index("position")] = np.linspace(0.9, 0.1, N)
    o["nodes"][:, NODE.index("speed")] = np.arange(N)
    mean = mean_speed_ahead(o, 0.05)
    assert np.isnan(mean[3]) and (mean[9], np.isnan(mean[7])) == (7, True)
    assert mean_speed_ahead(o, 0.2)[9] == 5.0  # slots 3 and 7


# ---- on real traffic --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scenario, name", [("merge", "idm"), ("bottleneck", "pi_saturation"),
                                            ("figure_eight", "idm"), ("ring", "pi_saturation")])
def test_every_icv_can_be_commanded_at_once(make, scenario, name):
    """K = env.max_vehicles: all ICVs."""
    env, commanded = make(scenario=scenario, icv_share=0.5, max_commands=200), 0
    act = make_baseline(name, env.cfg)

    def command(observation):
        nonlocal commanded
        commands = act(observation, 200, None)
        assert sorted(sent(commands, 200)) == np.flatnonzero(observation["icv"]).tolist()
        commanded += observation["icv"].sum()
        return commands
    info = episode(env, 1, 60, command)[-1][2]
    assert env.totals.commands == commanded > 150 and info["teleports"] == 0


def test_wrong_numbers_of_a_controller_are_refused():
    with pytest.raises(Exception, match="baselines.idm.headwax"):
        load_config("configs/default.yaml", ["baselines.idm.headwax=1"])
    assert baselines.make_baseline("none", Config())(traffic(0), 3, None)[0].tolist() == [N] * 3


def test_follower_stopper_against_the_rule_for_one_vehicle():
    seen = set()
    for seed in range(20):
        o, expected = traffic(seed), {}
        mean = max(float(o["globals"][GLOBAL.index("mean_speed")]), 15.0)
        for i, (v, gap, lead) in enumerate(zip(column(o, "speed"), column(o, "lead_gap"), column(o, "lead_speed"))):
            g1, g2, g3 = (g + min(lead - v, 0) ** 2 / (2 * d) for g, d in ((4.5, 1.5), (5.25, 1.0), (6.0, 0.5)))
            slow = min(max(lead, 0), mean)
            zone = sum(gap > g for g in (g1, g2, g3))
            target = [0.0, slow * (gap - g1) / (g2 - g1), slow + (mean - slow) * (gap - g2) / (g3 - g2), mean][zone]
            if o["icv"][i] and target - v < -0.1:
                expected[i] = (pytest.approx(max(target - v, -3), abs=1e-3), 1)
                seen.add((zone, target - v > -3))
        assert sent(rule("follower_stopper")(o, N, None)) == expected
    assert {zone for zone, _ in seen} == {0, 1, 2, 3}


def test_random_changes_lanes_one_time_in_fifteen():
    rng, act, lanes = np.random.default_rng(0), rule("random"), []
    for seed in range(300):
        slot, accel, lane, _ = act(traffic(seed), 5, rng)
        lanes += lane[slot < N].tolist()
    assert sum(lane != 1 for lane in lanes) / len(lanes) == pytest.approx(0.1 * 2 / 3, abs=0.02)
