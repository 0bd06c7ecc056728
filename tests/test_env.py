"""env/traffic_env.py, env/score.py and env/baselines.py with the real SUMO: the gymnasium contract, counts, commands,
costs, slots, user networks, and faults of SUMO between two episodes."""
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import env as env_package
from configs.schema import Config, RewardConfig
from env import graph, launch
from env.baselines import BASELINES
from env.launch import SumoError
from env.score import EpisodeTotals, paired_score
from env.traffic_env import KEEP, LEFT, RIGHT, TrafficEnv, make_env

ROOT = Path(env_package.__file__).resolve().parent.parent


@pytest.fixture
def make(scenarios):
    """make(**changes of EnvConfig) -> TrafficEnv, closed after the test."""
    made = []

    def build(**changes):
        config = Config()
        for name, value in {"max_vehicles": 200, "terminate_on_collision": False, **changes}.items():
            assert hasattr(config.env, name)
            setattr(config.env, name, value)
        made.append(TrafficEnv(config, scenarios))
        return made[-1]
    yield build
    for one in made:
        one.close()


def nobody(env):
    """The arguments of `command` that command nobody."""
    k = env.env_cfg.max_commands
    return np.full(k, env.env_cfg.max_vehicles), np.zeros(k), np.full(k, KEEP), np.zeros(k)


def only(env, slots, accel=0.0, lane=KEEP, brake=0.0):
    """The arguments of `command` for the given slots (at most K)."""
    out = nobody(env)
    out[0][:len(slots)], out[1][:len(slots)], out[2][:len(slots)], out[3][:len(slots)] = slots, accel, lane, brake
    return out


def random_commands(env, observation, rng):
    icvs = rng.permutation(np.flatnonzero(observation["icv"]))[:env.env_cfg.max_commands]
    return only(env, icvs, rng.uniform(-3, 2, len(icvs)), rng.integers(0, 3, len(icvs)))


def equal(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


def episode(env, seed, steps, command=lambda observation: None):
    """[(observation, reward, info)] of `steps` control steps; `command(observation)` gives arguments, None = nobody."""
    observation, info = env.reset(seed=seed)
    rows = [(observation, 0.0, info)]
    for _ in range(steps):
        observation, reward, _, _, info = env.command(*(command(observation) or nobody(env)))
        rows.append((observation, reward, info))
    return rows


# ---- gymnasium's contract ---------------------------------------------------------------------------------------

def test_gymnasiums_own_checks_pass_without_a_warning(scenarios):
    config = Config()
    config.env.max_vehicles, config.env.horizon_s = 30, 20.0
    spec = gymnasium.envs.registration.EnvSpec("MixedAutonomy-v0", entry_point=TrafficEnv,
                                               kwargs={"cfg": config, "folder": scenarios})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = gymnasium.make(spec, disable_env_checker=True).unwrapped
        check_env(made)
    made.close()


def test_action_space_maps_to_physical_units(make):
    env = make(icv_share=1.0)
    rows = episode(env, 2, 30)
    slots = np.flatnonzero(rows[-1][0]["icv"])[:5]
    action = {"slot": slots, "accel": np.array([-1, 1, 0, 0, 0], np.float32), "lane": np.full(5, KEEP),
              "brake": np.array([0, 0, 0, 1, 0.5], np.float32)}
    before = rows[-1][0]["nodes"][slots, 2].astype(float)
    observation, _, _, _, info = env.step(action)
    change = observation["nodes"][slots, 2] - before
    wanted = [-3.0, 2.0, -0.5, -9.0, -4.5]
    stays = observation["mask"][slots] * (1 - observation["fresh"][slots]) > 0
    assert stays.all()
    assert change[[0, 2, 3, 4]] == pytest.approx(np.maximum(wanted, -before)[[0, 2, 3, 4]], abs=1e-3)
    assert change[1] <= 2.0 + 1e-3  # the maximum speed may cut it
    assert info["cost"] == pytest.approx(np.abs(wanted).sum() / rows[-1][2]["icvs"])


def test_same_seed_same_episode(make):
    env, rng = make(), np.random.default_rng
    first = episode(env, 7, 40, lambda o, r=rng(0): random_commands(env, o, r))
    again = episode(env, 7, 40, lambda o, r=rng(0): random_commands(env, o, r))
    other = episode(env, 8, 40, lambda o, r=rng(0): random_commands(env, o, r))
    fresh_env = make()
    fresh = episode(fresh_env, 7, 40, lambda o, r=rng(0): random_commands(env, o, r))
    for same in (again, fresh):
        assert all(equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(first, same))
    assert not any(a[1] == b[1] for a, b in zip(first[20:], other[20:]))


def test_unseeded_resets_follow_from_the_last_seed(make):
    env, seeds = make(), []
    for _ in range(2):
        env.reset(seed=5)
        seeds.append([env.reset()[1]["seed"] for _ in range(2)])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]


@pytest.mark.parametrize("interval, step_length, warmup", [(1.0, 0.1, 0.0), (1.0, 0.5, 7.0), (0.5, 0.5, 0.0)])
def test_truncated_exactly_at_the_horizon(make, interval, step_length, warmup):
    env = make(control_interval=interval, step_length=step_length, warmup_s=warmup, horizon_s=12.0)
    _, info = env.reset(seed=1)
    assert info["time"] == warmup
    for n in range(1, round(12 / interval) + 1):
        _, _, terminated, truncated, info = env.command(*nobody(env))
        assert not terminated and truncated == (n == 12 / interval)
        assert ("episode" in info) == truncated
    assert info["time"] == warmup + 12 and info["episode"]["steps"] == n
    assert info["episode"]["departed"] >= 8


def test_icv_share_is_a_quarter_and_does_not_depend_on_the_controller(make):
    env, seen = make(), []
    for seed, controller in ((3, "none"), (3, "random"), (4, "none")):
        rng, icvs = np.random.default_rng(0), {}

        def command(observation):
            icvs.update({name: bool(observation["icv"][slot]) for name, slot in env.slots.slot_of.items()})
            return BASELINES[controller](observation, 5, rng)
        episode(env, seed, 150, command)
        seen.append(icvs)
    uncontrolled, controlled, other = seen
    common = set(uncontrolled) & set(controlled)
    assert len(common) > 150
    assert all(uncontrolled[name] == controlled[name] for name in common)
    assert any(uncontrolled[name] != other[name] for name in set(uncontrolled) & set(other))
    for icvs in seen:  # 0.25 +- three standard deviations of about 190 draws
        assert abs(np.mean(list(icvs.values())) - 0.25) < 0.095


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_extreme_icv_shares(make, share):
    env = make(icv_share=share)
    rows = episode(env, 1, 20)
    assert rows[-1][0]["icv"].sum() == share * rows[-1][0]["mask"].sum()
    assert rows[-1][2]["cost"] == 0.0


# ---- counts -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("interval, step_length", [(1.0, 0.1), (1.0, 0.5), (10.0, 0.5)])
def test_departures_and_arrivals_of_every_sub_step_are_counted(make, interval, step_length):
    env, rng = make(control_interval=interval, step_length=step_length), np.random.default_rng(0)
    rows = episode(env, 1, round(120 / interval), lambda observation: random_commands(env, observation, rng))
    stats = {name: int(env.simulator.client.simulation.getParameter("", f"stats.vehicles.{name}"))
             for name in ("loaded", "inserted", "running", "waiting")}
    totals, info = env.totals, rows[-1][2]
    assert totals.departed == stats["inserted"] > 100
    assert totals.arrived == stats["inserted"] - stats["running"] > 5
    assert totals.loaded == info["loaded"] == stats["inserted"] + stats["waiting"]
    assert info["vehicles"] == stats["running"] == env.simulator.client.vehicle.getIDCount()
    columns = [graph.GLOBAL.index(name) for name in ("departed", "arrived")]
    per_step = np.array([row[0]["globals"][columns] for row in rows[1:]])
    assert per_step.sum(0).tolist() == [totals.departed, totals.arrived]
    assert info["arrived"] == totals.arrived
    assert totals.summary()["ocr"] == totals.arrived / totals.loaded


def test_events_of_the_last_episode_are_not_counted_in_the_next(make):
    """SUMO's lists of departed and arrived vehicles outlive `load` until the first step."""
    env = make(control_interval=10.0)
    last = episode(env, 1, 12)[-1][0]
    columns = [graph.GLOBAL.index(name) for name in ("departed", "arrived")]
    assert last["globals"][columns].min() > 0
    observation, info = env.reset(seed=2)
    assert observation["globals"][columns].tolist() == [0, 0]
    assert (env.totals.departed, info["arrived"], info["vehicles"]) == (0, 0, 0)


def full_throttle(env):
    return lambda observation: only(env, np.flatnonzero(observation["icv"])[:env.env_cfg.max_commands], 2.0)


def test_collisions_are_counted_in_every_sub_step(make):
    """SUMO's counter holds one for each pair that collides; its list of colliding vehicles names both, but only in the
    simulation step of the collision: read once per control step it misses most."""
    env, entries = make(icv_share=1.0, max_commands=64), []
    env.reset(seed=1)
    step, read = env.simulator.step, env.simulator.read

    def step_by_step(until, commands=()):
        for tenth in range(1, 11):
            step(until - 1 + tenth / 10, commands if tenth == 1 else ())
            entries.extend(read(until - 1 + tenth / 10)[4]["colliding"])
    env.simulator.step = step_by_step
    observation = env.observation
    for _ in range(70):
        observation, _, terminated, _, info = env.command(*full_throttle(env)(observation))
        assert not terminated
    assert info["collisions"] > 5
    assert len(entries) == 2 * info["collisions"]
    del env.simulator.step  # the class's own again
    env.reset(seed=1)
    assert env.totals.collisions == 0  # the counter begins anew
    rows = episode(env, 1, 70, full_throttle(env))
    assert rows[-1][2]["collisions"] == info["collisions"]
    penalties = np.diff([row[2]["collisions"] for row in rows]) * env.cfg.reward.collision_penalty
    assert penalties.sum() > 0 and all(row[1] < -0.9 * p for row, p in zip(rows[1:], penalties) if p)


def test_a_collision_terminates_an_episode_where_asked(make):
    env = make(icv_share=1.0, max_commands=64, terminate_on_collision=True)
    observation, _ = env.reset(seed=1)
    for _ in range(100):
        observation, _, terminated, truncated, info = env.command(*full_throttle(env)(observation))
        assert terminated == (info["collisions"] > 0) and not truncated
        if terminated:
            break
    assert terminated and info["episode"]["collisions"] == info["collisions"]


def test_overflow_is_counted(make):
    env = make(max_vehicles=6, icv_share=1.0)
    env.reset(seed=1)
    beyond = max(env.simulator.client.vehicle.getIDCount() - 6, 0)
    for _ in range(40):
        observation, _, _, _, info = env.command(*only(env, range(5), 1.0))
        beyond += max(env.simulator.client.vehicle.getIDCount() - 6, 0)
        assert observation["mask"].sum() <= 6 and info["overflow"] == beyond
    assert beyond > 100 and env.totals.summary()["overflow"] == beyond


def test_demand_scale(make):
    half, full = (episode(make(demand_scale=scale), 1, 60)[-1][2]["loaded"] for scale in (0.5, 1.0))
    assert abs(full - 60 * (2800 + 2 * 800) / 3600) <= 3  # vehicles of one minute, the first ones at once
    assert abs(half - full / 2) <= 3


def test_loaded_vehicles_are_those_that_are_due(make, grid):
    """SUMO reads route files 200 s ahead: its counter of loaded vehicles held cars that were still to come, and OCR
    and the number of waiting vehicles were wrong for every scenario with single vehicles instead of flows."""
    routes = [f'<vehicle id="v{i}" depart="{10 * i}"><route edges="A0B0 B0C0"/></vehicle>' for i in range(50)]
    env = make(scenario=grid("".join(routes)))
    observation, _, info = episode(env, 1, 55)[-1]
    assert info["loaded"] == env.totals.departed == 6
    assert observation["globals"][graph.GLOBAL.index("log_waiting")] == 0


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


def test_lane_change_is_carried_out(make, grid):
    env = make(scenario=grid('<vehicle id="a" depart="0" departLane="0" departPos="20" departSpeed="8">'
                             '<route edges="A0B0 B0C0"/></vehicle>', lanes=2), icv_share=1.0)
    env.reset(seed=1)
    env.command(*nobody(env))
    assert env.scene["lane"].tolist() == [0]
    env.command(*only(env, [0], np.nan, LEFT))
    env.command(*nobody(env))
    assert env.scene["lane"].tolist() == [1]


def test_released_vehicle_is_driven_by_sumos_driver_again(make, grid):
    """Speed mode 26 stayed for ever: a vehicle once commanded ignored the speed limit from then on and drove through
    the city at 55 m/s, the maximum of its type."""
    env = make(scenario=grid('<vType id="car" speedDev="0" accel="2.6"/><vehicle id="a" type="car" depart="0" '
                             'departSpeed="10"><route edges="A0B0 B0C0"/></vehicle>'), icv_share=1.0)
    speeds = []
    episode(env, 1, 25, lambda observation: speeds.append(env.scene["speed"].max(initial=0)) or (
        only(env, [0], 0.0) if len(speeds) < 5 else None))
    assert 13 < max(speeds) < 14  # the limit is 13.89 m/s


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
    for name, controller in BASELINES.items():
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


# ---- slots ------------------------------------------------------------------------------------------------------

def test_slots_fresh_and_moved(make):
    """A vehicle keeps its slot; `fresh` marks its first step there only; `moved` adds up to SUMO's odometer."""
    env, rng = make(max_vehicles=80), np.random.default_rng(0)
    observation, _ = env.reset(seed=1)
    slot_of, begin, driven, owners = {}, {}, {}, {}
    for _ in range(110):
        observation, *_ = env.command(*random_commands(env, observation, rng))
        odometer = env.simulator.client.vehicle.getDistance
        for name, slot in env.slots.slot_of.items():
            new = name not in slot_of
            assert observation["mask"][slot] and observation["fresh"][slot] == new
            slot_of.setdefault(name, slot)
            assert slot_of[name] == slot
            begin.setdefault(name, odometer(name.decode()))
            driven[name] = driven.get(name, 0.0) + float(observation["moved"][slot])
            assert driven[name] == pytest.approx(odometer(name.decode()) - begin[name], abs=0.02)
            assert not (new and observation["moved"][slot])
            owners.setdefault(slot, set()).add(name)
        assert observation["mask"].sum() == len(env.slots.slot_of) == len(set(env.slots.slot_of.values()))
        empty = observation["mask"] == 0
        assert not observation["nodes"][empty].any() and (observation["neighbours"][empty] == -1).all()
        assert not observation["icv"][empty].any()
    assert max(len(names) for names in owners.values()) > 1  # slots were used again


def test_neighbours_are_slots_of_vehicles_that_are_there(make):
    env = make(max_vehicles=80)

    def check(observation):
        neighbours, mask = observation["neighbours"], observation["mask"] > 0
        k = graph.adaptive_k(int(mask.sum()))
        assert (neighbours[:, k:] == -1).all()
        used = neighbours[mask]
        assert mask[used[used >= 0]].all() and not (used == np.flatnonzero(mask)[:, None]).any()
        lead = env.scene["lead"]
        own = np.array([env.slots.slot_of[name] for name in env.ids], int)
        for i in np.flatnonzero(lead >= 0):
            assert own[lead[i]] in neighbours[own[i]]
        return nobody(env)
    episode(env, 3, 100, check)
    assert len(env.ids) > 60


# ---- other scenarios --------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """grid(text of a routes file, lanes=1, more="") -> path of a .sumocfg: 3 x 3 crossings with traffic lights."""
    folder = tmp_path_factory.mktemp("grid")
    for lanes in (1, 2):
        command = [launch.find_binary("netgenerate"), "--grid", "--grid.number", "3", "--grid.length", "150",
                   "--default.lanenumber", str(lanes), "--default-junction-type", "traffic_light", "--no-turnarounds",
                   "true", "--seed", "1", "-o", str(folder / f"grid{lanes}.net.xml")]
        subprocess.run(command, check=True, capture_output=True, env=launch.sumo_environment())

    def write(routes, lanes=1, more=""):
        name = f"case{len(list(folder.iterdir()))}"
        (folder / f"{name}.rou.xml").write_text(f"<routes>{routes}</routes>")
        path = folder / f"{name}.sumocfg"
        path.write_text(f'<configuration><input><net-file value="grid{lanes}.net.xml"/>'
                        f'<route-files value="{name}.rou.xml"/></input>{more}</configuration>')
        return str(path)
    return write


TYPES = '<vType id="passenger" vClass="passenger"/><vType id="bus" vClass="bus"/>'
TRIPS = (("car", "passenger", "A0B0", "C2B2", 5), ("taxi", "passenger", "C2B2", "A1A0", 5),
         ("bus", "bus", "A1B1", "C1C0", 6), ("coach", "bus", "C0C1", "A1A2", 6))
FLOWS = TYPES + "".join(
    f'<flow id="{name}" type="{kind}" from="{begin}" to="{end}" begin="0" end="900" period="{period}" '
    'departLane="best" departSpeed="max"/>' for name, kind, begin, end, period in TRIPS)


def test_ring_has_22_vehicles_and_no_exits(make):
    env = make(scenario="ring")
    rows = episode(env, 1, 60)
    assert [row[2]["vehicles"] for row in rows[1:]] == [22] * 60
    observation, _, info = rows[-1]
    assert info["arrived"] == 0 and info["collisions"] == 0 and info["loaded"] == 22
    assert sorted(env.scene["lead"]) == list(range(22))  # everybody leads somebody
    circumference = (env.scene["lead_gap"] + env.scene["length"]).sum()
    assert circumference == pytest.approx(env.road.lane_length.sum(), abs=0.1) == pytest.approx(230, abs=1)
    assert info["sigma_v"] < 3 and observation["globals"][graph.GLOBAL.index("mean_speed")] > 1


def test_user_network_with_lights_and_several_types(make, grid):
    env, rng = make(scenario=grid(FLOWS, lanes=2)), np.random.default_rng(0)
    icvs = {}

    def command(observation):
        icvs.update({name: bool(observation["icv"][slot]) for name, slot in env.slots.slot_of.items()})
        return random_commands(env, observation, rng)
    rows = episode(env, 1, 250, command)
    info = rows[-1][2]
    assert info["arrived"] > 50 and info["vehicles"] > 20 and np.isfinite([row[1] for row in rows]).all()
    length = dict(zip(env.ids, env.scene["length"]))
    for kinds, metres in (((b"car", b"taxi"), 5), ((b"bus", b"coach"), 12)):
        share = [icv for name, icv in icvs.items() if name.startswith(kinds)]
        assert len(share) > 70 and abs(np.mean(share) - 0.25) < 3 * (0.25 * 0.75 / len(share)) ** 0.5
        assert {length[name] for name in length if name.startswith(kinds)} == {metres}
    stats = {name: int(env.simulator.client.simulation.getParameter("", f"stats.vehicles.{name}"))
             for name in ("inserted", "running")}
    assert env.totals.departed == stats["inserted"] and info["arrived"] == stats["inserted"] - stats["running"]


def test_parked_and_teleporting_vehicles_are_on_no_lane(make, grid):
    """SUMO reports a vehicle that parks beside the road with an empty lane name: KeyError."""
    stop = '<stop lane="A0B0_0" endPos="80" duration="30" parking="true"/>'
    env = make(scenario=grid(f'<vehicle id="a" depart="0"><route edges="A0B0 B0C0"/>{stop}</vehicle><vehicle id="b" '
                             f'depart="8"><route edges="A0B0 B0C0"/></vehicle>{FLOWS}'), teleport_s=4.0, icv_share=1.0)
    episode(env, 1, 10)
    stock, parked = env.simulator.client.vehicle, 0
    for _ in range(60):
        observation, _, _, _, info = env.command(*only(env, np.flatnonzero(env.observation["icv"])[:5], np.nan))
        on_lane = {name for name in stock.getIDList() if stock.getLaneID(name)}
        assert {name.decode() for name in env.slots.slot_of} == on_lane
        assert info["vehicles"] == observation["mask"].sum() == len(on_lane)
        parked += "a" in stock.getIDList() and stock.isStoppedParking("a")
    assert info["teleports"] > 0 and parked > 20


@pytest.mark.parametrize("rerouted", [False, True])
def test_no_walls_where_every_lane_leads_on(make, grid, rerouted):
    """Routes were read once, at departure. A vehicle rerouted since then was shown a wall (an obstacle that stands
    still) at the end of its lane; in this network of single lanes every lane leads on along every route."""
    more = ('<routing><device.rerouting.probability value="1"/><device.rerouting.period value="5"/>'
            '<device.rerouting.adaptation-interval value="1"/></routing>')
    env = make(scenario=grid(FLOWS, more=more if rerouted else ""))
    first, changed, walls = {}, set(), []

    def look(observation):
        walls.extend(np.array(env.ids)[(env.scene["lead"] < 0) & (env.scene["lead_speed"] == 0)])
        for name in env.ids:
            route = env.simulator.client.vehicle.getRoute(name.decode())
            changed.update({name} if first.setdefault(name, route) != route else ())
    episode(env, 3, 120, look)
    assert bool(changed) == rerouted
    assert not walls


# ---- faults of SUMO ---------------------------------------------------------------------------------------------

def test_next_episode_runs_after_sumo_died(make):
    """`reset` tried to load into the dead process, in vain and for ever: a crash of SUMO ended the environment."""
    env = make()
    expected = episode(env, 6, 15)
    for sign in (signal.SIGKILL, signal.SIGSEGV):
        env.reset(seed=5)
        os.kill(env.simulator.process.pid, sign)
        with pytest.raises(SumoError, match="exit code"):
            env.command(*nobody(env))
        again = episode(env, 6, 15)
        assert all(equal(a[0], b[0]) for a, b in zip(expected, again))


def test_sumo_that_died_between_two_episodes(make):
    env = make()
    env.reset(seed=5)
    os.kill(env.simulator.process.pid, signal.SIGKILL)
    env.simulator.process.wait()
    try:
        env.reset(seed=6)
    except SumoError:
        env.reset(seed=6)  # an error once is fine, a useless environment is not
    assert env.command(*nobody(env))[4]["seed"] == 6


def test_scenario_deleted_between_two_episodes(make, tmp_path):
    """The stock client's FatalTraCIError came out, without SUMO's own words."""
    config = Config()
    env = TrafficEnv(config, tmp_path)
    try:
        env.reset(seed=1)
        Path(env.scenario).unlink()
        with pytest.raises(SumoError, match="Could not access configuration") as error:
            env.reset(seed=2)
        assert env.scenario in str(error.value)
    finally:
        env.close()


def test_sumo_process_is_used_again_and_recycled(make):
    env, pids, reference = make(recycle_episodes=2), [], None
    for _ in range(4):
        rows = episode(env, 9, 8)
        reference = reference or rows
        assert all(equal(a[0], b[0]) for a, b in zip(rows, reference))
        pids.append(env.simulator.process.pid)
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_close_ends_sumo_and_the_folder(ends_soon):
    env = make_env(Config())
    env.reset(seed=1)
    pid, folder = env.simulator.process.pid, Path(env.folder)
    assert folder.is_dir()
    env.close()
    env.close()
    assert ends_soon([pid]) and not folder.exists()


# ---- imports ----------------------------------------------------------------------------------------------------

def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_environment_can_be_built_without_sumo():
    out = python("import sys; sys.modules['sumo'] = None\n"  # as if eclipse-sumo were not installed
                 "from configs.schema import Config\n"
                 "from env.traffic_env import make_env, SumoError\n"
                 "env = make_env(Config())\n"
                 "assert env.observation_space['nodes'].shape == (600, 9)\n"
                 "try:\n    env.reset(seed=1)\nexcept SumoError as error:\n    print(error)\nenv.close()")
    assert "SUMO not found" in out and "pip install eclipse-sumo" in out


def test_no_module_of_the_package_imports_torch():
    out = python("import sys, pkgutil, importlib, env\n"
                 "names = ['env.' + m.name for m in pkgutil.iter_modules(env.__path__)]\n"
                 "[importlib.import_module(name) for name in names]\n"
                 "print(len(names), 'torch' in sys.modules)")
    count, torch = out.split()
    assert int(count) >= 8 and torch == "False"


# ---- scores -----------------------------------------------------------------------------------------------------

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
    return {"departed": list(departed), "arrived": list(arrived), "colliding": [], "stats.vehicles.loaded": loaded,
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
    assert out["c_int"] == 7.0 / 3 and out["min_ttc"] is None


def test_warm_up_is_forgotten_in_averages_but_not_in_counts():
    totals = EpisodeTotals(RewardConfig(), 1.0, 4.0)
    totals.step(scene_of([0, 30], [5, 5], [0, 1]), np.zeros(2), np.ones(2), events(2, [b"a", b"b"]), 0)
    totals.forget_averages()
    totals.step(scene_of([10], [1], [0]), np.zeros(1), np.ones(1), events(2, (), [b"a"]), 0)
    out = totals.summary()
    assert (out["steps"], out["sigma_v"], out["abs_a"], out["mean_speed"]) == (1, 0.0, 1.0, 10.0)
    assert (out["departed"], out["arrived"]) == (2, 1)


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
