"""env/traffic_env.py on real SUMO: gymnasium's contract, counts, slots."""
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from configs.schema import Config
from env import graph
from env.baselines import make_baseline
from env.spaces import KEEP
from env.traffic_env import TrafficEnv

from helpers import episode, equal, nobody, only, random_commands


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


def test_commands_of_unequal_lengths_are_refused(make):
    """They were cut to the shortest: of five accelerations for six slots the last vehicle had none, without a word."""
    env = make(icv_share=1.0)
    rows = episode(env, 2, 10)
    slots = np.flatnonzero(rows[-1][0]["icv"])[:3]
    with pytest.raises(ValueError, match="shorter"):
        env.command(slots, [-1.0], [KEEP] * len(slots), [0.0] * len(slots))


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


def test_a_warm_up_that_ends_within_a_control_step_shortens_no_episode(make):
    """The horizon was counted from within that step, so that an episode could have one less than env.episode_steps."""
    env, truncated, steps = make(control_interval=4.0, warmup_s=1.0, horizon_s=11.0), False, 0
    env.reset(seed=1)
    while not truncated:
        *_, truncated, _ = env.command([], [], [], [])
        steps += 1
    assert steps == env.env_cfg.episode_steps == 3


@pytest.mark.parametrize("interval, step_length, warmup", [(1.0, 0.1, 0.0), (1.0, 0.5, 7.0), (0.5, 0.5, 0.0)])
def test_truncated_exactly_at_the_horizon(make, interval, step_length, warmup):
    env = make(control_interval=interval, step_length=step_length, warmup_s=warmup, horizon_s=12.0)
    observation, info = env.reset(seed=1)
    assert info["time"] == warmup
    # after a warm-up, only who came in its last step was new: an episode's traffic became the sequel of the one before
    assert (observation["fresh"] == observation["mask"]).all() and (observation["mask"].sum() > 1) == (warmup > 0)
    for n in range(1, round(12 / interval) + 1):
        _, _, terminated, truncated, info = env.command(*nobody(env))
        assert not terminated and truncated == (n == 12 / interval)
        assert ("summary" in info) == truncated
    assert info["time"] == warmup + 12 and info["summary"]["steps"] == n
    assert info["summary"]["departed"] >= 8


@pytest.mark.parametrize("interval, steps", [(0.7, 18), (1.1, 11)])
def test_an_episode_has_the_steps_that_its_configuration_says(make, interval, steps):
    """Each reader of the configuration rounded by itself: collection and the cap on C_int counted 17 of the 18."""
    env, truncated, taken = make(control_interval=interval, horizon_s=12.0 if steps == 18 else 12.1), False, 0
    env.reset(seed=1)
    while not truncated:
        taken, truncated = taken + 1, env.command(*nobody(env))[3]
    assert taken == steps == env.env_cfg.episode_steps


def test_icv_share_is_a_quarter_and_does_not_depend_on_the_controller(make):
    env, seen = make(), []
    for seed, controller in ((3, "none"), (3, "random"), (4, "none")):
        rng, icvs, act = np.random.default_rng(0), {}, make_baseline(controller, env.cfg)

        def command(observation):
            icvs.update({name: bool(observation["icv"][slot]) for name, slot in env.slots.slot_of.items()})
            return act(observation, 5, rng)
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
    assert terminated and info["summary"]["collisions"] == info["collisions"]


def test_overflow_is_counted(make):
    env = make(max_vehicles=6, icv_share=1.0)
    env.reset(seed=1)
    beyond = max(env.simulator.client.vehicle.getIDCount() - 6, 0)
    for _ in range(40):
        observation, _, _, _, info = env.command(*only(env, range(5), 1.0))
        beyond += max(env.simulator.client.vehicle.getIDCount() - 6, 0)
        assert observation["mask"].sum() <= 6 and info["overflow"] == beyond
    # the shield does not see who has no slot: full throttle for all drove into them (9 collisions in 4000 steps)
    assert env.driven and all(env.simulator.client.vehicle.getSpeedMode(name.decode()) & 1 for name in env.driven)
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
