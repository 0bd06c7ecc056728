"""Commands to ICVs: what is sent, what it costs, and when SUMO's driver has the vehicle back."""
from collections import Counter

import numpy as np
import pytest

from env import graph
from env.baselines import BASELINES, make_baseline
from env.spaces import KEEP, LEFT, RIGHT

from helpers import episode, equal, nobody, only


# ---- commands and their cost ------------------------------------------------------------------------------------

def test_cost_is_effort_per_icv(make):
    env, rng, effort, icv_steps = make(icv_share=0.5), np.random.default_rng(1), 0.0, 0
    observation, info = env.reset(seed=1)
    for _ in range(60):
        icvs = rng.permutation(np.flatnonzero(observation["icv"]))[:5]
        accel, hard = rng.uniform(-3, 2, len(icvs)), rng.random(len(icvs)) < 0.2
        brake = np.where(hard, rng.uniform(0, 9, len(icvs)), 0)
        side = rng.random(len(icvs)) < 0.3
        has_left = observation["surround"][icvs, graph.SURROUND.index("has_left")] > 0
        lane = np.where(side & has_left, LEFT, KEEP)
        wanted = np.where(brake > 0, brake, np.abs(accel)).sum() + 5 * (lane == LEFT).sum()
        present = info["icvs"]
        observation, _, _, _, info = env.command(*only(env, icvs, accel, lane, brake))
        assert info["cost"] == pytest.approx(wanted / max(present, 1))
        effort, icv_steps = effort + wanted, icv_steps + info["icvs"]
    # SPEC: effort / (control steps * mean number of ICVs present)
    assert env.totals.summary()["c_int"] == pytest.approx(effort / icv_steps)


def test_accelerations_beyond_the_limits_are_cut(make):
    env = make(icv_share=1.0)
    for accel, brake, executed in ((9.0, 0.0, 2.0), (-20.0, 0.0, 3.0), (0.0, 50.0, 9.0)):
        rows = episode(env, 1, 20)
        slot = int(np.argmax(rows[-1][0]["nodes"][:, 2] * rows[-1][0]["icv"]))
        info = env.command(*only(env, [slot], accel, KEEP, brake))[4]
        assert info["cost"] * rows[-1][2]["icvs"] == pytest.approx(executed)


def test_commands_to_humans_empty_slots_and_repeated_slots_are_ignored(make):
    env = make()
    plain = episode(env, 4, 50)

    def to_others(observation):
        humans = np.flatnonzero((observation["mask"] > 0) & (observation["icv"] == 0))[:3]
        return only(env, [*humans, 199, 150], -3.0, LEFT, 9.0)
    ignored = episode(env, 4, 50, to_others)
    assert all(equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(plain, ignored))

    def once(observation):
        return only(env, np.flatnonzero(observation["icv"])[:1], -1.0)

    def twice(observation):
        slots = np.flatnonzero(observation["icv"])[:1].repeat(3)
        return only(env, slots, np.array([-1.0, 2.0, -3.0])[:len(slots)], np.array([KEEP, LEFT, RIGHT])[:len(slots)])
    pairs = zip(episode(env, 4, 50, once), episode(env, 4, 50, twice))
    assert all(equal(a[0], b[0]) and a[1:] == b[1:] for a, b in pairs)


def test_nan_acceleration_is_lane_advice_only(make):
    """The speed mode of commanded vehicles was set with the first lane advice as well: without SUMO's safe-speed check
    a vehicle ignores the speed limit, even if nobody ever commands its speed."""
    env = make()
    plain = episode(env, 4, 50)
    advised = episode(env, 4, 50, lambda o: only(env, np.flatnonzero(o["icv"])[:5], np.nan))
    assert all(equal(a[0], b[0]) for a, b in zip(plain, advised))
    observation = advised[-1][0]
    has_left = observation["surround"][:, graph.SURROUND.index("has_left")] > 0
    slot = np.flatnonzero((observation["icv"] > 0) & has_left)[0]
    info = env.command(*only(env, [slot], np.nan, LEFT))[4]
    assert info["cost"] * advised[-1][2]["icvs"] == pytest.approx(5.0)


def test_a_lane_that_does_not_exist_is_no_command(make):
    env = make(icv_share=1.0)
    rows = episode(env, 4, 30)
    has_right = rows[-1][0]["surround"][:, graph.SURROUND.index("has_right")] > 0
    slot = np.flatnonzero((rows[-1][0]["icv"] > 0) & ~has_right)[0]
    assert env.command(*only(env, [slot], np.nan, RIGHT))[4]["cost"] == 0


def test_odd_lanes_and_slots_are_no_command(make):
    """A lane that is none of left, keep and right was a KeyError, a slot as a float a TypeError."""
    env = make()
    observation = episode(env, 1, 60)[-1][0]
    slot = np.flatnonzero(observation["icv"])[0]
    assert env.command([float(slot)], [np.nan], [7], [0.0])[-1]["cost"] == 0.0
    assert env.command([slot], [np.nan], [-1], [0.0])[-1]["cost"] == 0.0


def test_lane_change_is_carried_out(make, grid):
    env = make(scenario=grid('<vehicle id="a" depart="0" departLane="0" departPos="20" departSpeed="8">'
                             '<route edges="A0B0 B0C0"/></vehicle>', lanes=2), icv_share=1.0)
    env.reset(seed=1)
    env.command(*nobody(env))
    assert env.scene["lane"].tolist() == [0]
    env.command(*only(env, [0], np.nan, LEFT))
    env.command(*nobody(env))
    assert env.scene["lane"].tolist() == [1]


@pytest.mark.parametrize("shield, lane", [(True, 0), (False, 1)])
def test_no_lane_change_just_before_a_junction(make, grid, shield, lane):
    """Whoever changed lanes there braked for the junction in front of a bicycle: 8 collisions in a town where drivers
    alone had 2, in the sublane model 10 instead of 4."""
    env = make(scenario=grid('<vehicle id="a" depart="0" departLane="0" departPos="100" departSpeed="8">'
                             '<route edges="A0B0 B0C0"/></vehicle>', lanes=2), icv_share=1.0)
    env.cfg.shield.enabled = shield
    env.reset(seed=1)
    for _ in range(2):
        env.command(*nobody(env))
    assert (env.command(*only(env, [0], np.nan, LEFT))[4]["cost"] > 0) == (lane == 1)
    env.command(*nobody(env))
    assert env.scene["lane"].tolist() == [lane]


def test_released_vehicle_is_driven_by_sumos_driver_again(make, grid):
    """Speed mode 26 stayed for ever: a vehicle once commanded ignored the speed limit from then on and drove through
    the city at 55 m/s, the maximum of its type."""
    env = make(scenario=grid('<vType id="car" speedDev="0" accel="2.6"/><vehicle id="a" type="car" depart="0" '
                             'departSpeed="10"><route edges="A0B0 B0C0"/></vehicle>'), icv_share=1.0)
    speeds = []
    episode(env, 1, 25, lambda observation: speeds.append(env.scene["speed"].max(initial=0)) or (
        only(env, [0], 0.0) if len(speeds) < 5 else None))
    assert 13 < max(speeds) < 14  # the limit is 13.89 m/s


@pytest.mark.parametrize("shield, near", [(True, 27), (False, 26)])
def test_safe_speed_check_stays_on_at_crossings(make, shield, near):
    """Two ICVs that held their speed met on the crossing: the shield does not see who comes from the side."""
    env = make(scenario="figure_eight", icv_share=1.0, horizon_s=200.0, terminate_on_collision=False)
    env.cfg.shield.enabled, env.cfg.figure_eight.vehicles = shield, 2
    env.reset(seed=1)
    env.command(*nobody(env))
    inside, modes, name = [], [], env.slots.names[0]
    for _ in range(60):
        inside.append(bool(env.road.crosses[env.lane_at[0]]))
        env.command(*only(env, [0], 0.5))
        modes.append(env.driven[name])
    assert set(modes) == {26, near} and any(inside)
    assert {mode for mode, there in zip(modes, inside) if there} == {near}


@pytest.mark.parametrize("backend", ["traci", "libsumo"])
def test_safe_speed_check_stays_on_where_drivers_pass_on_one_lane(make, grid, backend):
    """In SUMO's sublane model somebody moves over in front of an ICV within its lane, and the shield, which thinks in
    lanes, does not see it come: random commands had made 6 collisions in 20 episodes."""
    env = make(backend=backend, icv_share=1.0, scenario=grid(
        '<vehicle id="a" depart="0" departSpeed="10"><route edges="A0B0 B0C0"/></vehicle>',
        more='<processing><lateral-resolution value="0.8"/></processing>'))
    env.reset(seed=1)
    env.command(*nobody(env))
    env.command(*only(env, [0], 0.0))
    assert env.driven == {b"a": 27} and not env.road.internal[env.lane_at[0]]


def test_commanded_vehicle_stops_at_a_red_light(make, grid):
    env = make(scenario=grid('<vehicle id="a" depart="0" departSpeed="10"><route edges="A0B0 B0C0"/></vehicle>'),
               icv_share=1.0)
    env.reset(seed=1)
    lights = env.simulator.client.trafficlight
    lights.setRedYellowGreenState("B0", "r" * len(lights.getRedYellowGreenState("B0")))
    for _ in range(40):
        env.command(*only(env, [0], 0.5))
    assert env.simulator.client.vehicle.getLaneID("a") == "A0B0_0"
    assert env.scene["speed"][0] < 0.1 and env.totals.collisions == 0


def test_baselines_command_icvs_only_within_the_limits(make):
    env, rng = make(icv_share=0.5), np.random.default_rng(0)
    commanded = Counter()
    for name in BASELINES:
        controller = make_baseline(name, env.cfg)

        def command(observation):
            slot, accel, lane, brake = controller(observation, 5, rng)
            used = slot[slot < 200]
            assert all(len(part) == 5 for part in (slot, accel, lane, brake))
            assert len(set(used)) == len(used) and observation["icv"][used].all()
            assert (np.isnan(accel) | ((accel >= -3) & (accel <= 2))).all() and set(lane) <= {LEFT, KEEP, RIGHT}
            commanded[name] += len(used)
            return slot, accel, lane, brake
        episode(env, 2, 100, command)
    assert commanded["none"] == 0 and min(commanded[name] for name in BASELINES if name != "none") > 0


def test_executed_acceleration_is_what_sumo_made_of_the_command(make):
    """SUMO's drivers accelerate at 0.8 m/s^2 at most, so a command of 2 is executed as less; braking is exact."""
    env = make(icv_share=1.0)
    observation, _ = env.reset(seed=1)
    for _ in range(40):
        observation, *_ = env.command(*nobody(env))
    near, speed = observation["surround"], observation["nodes"][:, 2]
    slot = int(np.flatnonzero(observation["mask"] & (speed > 20) & (near[:, 0] > 60))[0])
    executed = [env.command(*only(env, [slot], [accel]))[-1]["executed"] for accel in (-2.0, -2.0, 2.0)]
    assert [list(step) for step in executed] == [[slot]] * 3
    assert [step[slot] for step in executed] == pytest.approx([-2, -2, 0.8], abs=0.01)
