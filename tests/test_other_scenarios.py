"""The ring, user networks with traffic lights and several vehicle types, faults of SUMO, imports without SUMO."""
import os
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import env as env_package
from configs.schema import Config
from env import graph
from env.flat import FlatTraffic
from env.launch import SumoError
from env.traffic_env import TrafficEnv, make_env

from helpers import FLOWS, episode, equal, nobody, only, random_commands

ROOT = Path(env_package.__file__).resolve().parent.parent


# ---- other scenarios --------------------------------------------------------------------------------------------

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


def test_who_arrives_has_driven_just_the_whole_route(make, grid):
    """The length of a route left out its junctions: on `bottleneck` the reward counted 5 % more than those who arrived,
    on a grid with blocks of 60 m a third more."""
    for scenario in ("bottleneck", grid(FLOWS, lanes=2)):
        env, share, left = make(scenario=scenario), {}, []
        env.reset(seed=1)
        for _ in range(150):
            env.command(*nobody(env))
            slots = [env.slots.slot_of[name] for name in env.ids]
            left += [share[name] for name in share.keys() - env.ids]
            share = dict(zip(env.ids, env.scene["odometer"] / env.routes.metres[slots]))
        assert len(left) > 10 and 0.9 < np.mean(left) and max(left) < 1.001


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


def test_who_is_teleported_is_somebody_new(make):
    """Lifted and set down between two readings it kept slot and memory, and the jump was a way that it had driven."""
    env, both = make(scenario="figure_eight", teleport_s=5.0), 0
    env.reset(seed=4)
    read = env.simulator.read
    seen = {}
    env.simulator.read = lambda now: (answer := read(now), seen.update(answer[4]))[0]
    for _ in range(60):
        before = env.observation["nodes"][:, 2].copy()
        env.command(*only(env, np.flatnonzero(env.observation["icv"]), -3.0))
        now, known = env.observation["nodes"][:, 2], (env.observation["mask"] > 0) & (env.observation["fresh"] == 0)
        assert (env.observation["moved"] <= np.where(known, np.maximum(before, now) + 5, 0)).all()
        jumped = set(seen["lifted"]) & set(seen["landed"]) & set(env.ids)
        assert all(env.observation["fresh"][env.slots.slot_of[name]] for name in jumped)
        both += len(jumped)
    assert both > 3


def test_vehicle_with_a_stop_ahead_obeys(make, grid):
    """SUMO ignored its commands and, without the safe-speed check, let it accelerate without limit, into others."""
    stop = '<stop lane="B0C0_0" endPos="100" duration="5"/>'
    env = make(scenario=grid(f'<vehicle id="a" depart="0"><route edges="A0B0 B0C0"/>{stop}</vehicle>'), icv_share=1.0)
    env.reset(seed=1)
    speeds = []
    for step in range(14):
        env.command(*only(env, np.flatnonzero(env.observation["icv"]), 2.0 if step < 5 else -1.0))
        speeds.append(env.simulator.client.vehicle.getSpeed("a"))
    assert speeds[4] > 5 and max(speeds) < 17 and speeds[-1] < speeds[5] - 2  # it is on a junction meanwhile


def test_parked_vehicle_drives_on_with_all_checks(make, grid):
    """Who parked under command kept the mode without SUMO's checks for ever: 50 m/s in a street of 14."""
    stop = '<stop lane="A0B0_0" endPos="80" duration="5" parking="true"/>'
    env = make(scenario=grid(f'<vehicle id="a" depart="0"><route edges="A0B0 B0C0"/>{stop}</vehicle>'), icv_share=1.0)
    env.reset(seed=1)
    stock = env.simulator.client.vehicle
    while not stock.isStoppedParking("a"):
        env.command(*only(env, np.flatnonzero(env.observation["icv"]), 0.5))
    env.command(*nobody(env))
    assert stock.getSpeedMode("a") == 31 and not env.driven


def test_seed_and_scale_of_a_users_configuration(make, grid):
    """<random/> won over the seed of the episode; env.demand_scale took the place of the file's own scale."""
    flow = '<flow id="f" begin="0" end="60" period="2"><route edges="A0B0 B0C0"/></flow>'
    more = '<random_number><random value="true"/></random_number><processing><scale value="0.5"/></processing>'
    env = make(scenario=grid(flow, more=more))
    rows = [episode(env, 5, 60)[-1] for _ in range(2)]
    assert equal(rows[0][0], rows[1][0])
    loaded = [row[2]["loaded"] for row in rows]
    double = episode(make(scenario=grid(flow, more=more), demand_scale=2.0), 5, 60)[-1][2]["loaded"]
    assert loaded[0] == loaded[1] and 12 <= loaded[0] <= 18 and 26 <= double <= 34


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


def test_closed_environment_can_be_reset():
    """Its folder was gone, and SUMO was started with a file in it."""
    env = make_env(Config())
    for _ in range(2):
        env.reset(seed=1)
        env.close()
    assert not Path(env.folder).exists()


def test_relative_folder_outlives_a_change_of_directory(tmp_path, monkeypatch):
    """SUMO was started with a path that meant something else by then."""
    monkeypatch.chdir(tmp_path)
    env = make_env(Config(), "scenarios")
    env.reset(seed=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    env.close()
    env.reset(seed=1)
    env.close()


@pytest.mark.parametrize("kind", [make_env, FlatTraffic])
def test_step_of_an_environment_without_traffic_says_what_is_missing(kind):
    """It was an AttributeError of None, before the first reset and after close; of FlatTraffic it still was."""
    env = kind(Config())
    action = env.action_space.sample()
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        env.step(action)
    env.reset(seed=1)
    env.close()
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        env.step(action)


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
