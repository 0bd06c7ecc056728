"""Both ways to SUMO: bulk readings against the stock client's getters over whole episodes, libsumo against TraCI."""
import gc
import signal
import subprocess
import sys
from pathlib import Path

import libsumo
import numpy as np
import pytest
from traci.exceptions import FatalTraCIError

import env as env_package
import train_ddp
import train_rl
from env.baselines import make_baseline
from env.inprocess import LibSumo
from env.launch import SumoError
from env.wire import Accelerate, ChangeLane, SetModes
from runtime.ending import run_script

from helpers import FLOWS, episode, equal, random_commands

ROOT = Path(env_package.__file__).resolve().parent.parent
GETTERS = {"xy": "getPosition", "angle": "getAngle", "speed": "getSpeed", "accel": "getAcceleration",
           "pos": "getLanePosition", "odometer": "getDistance", "allowed": "getAllowedSpeed", "length": "getLength",
           "route_index": "getRouteIndex"}
STEPS = 300


@pytest.fixture
def networks(corridor, grid):
    return {"corridor": "corridor", "grid": grid(FLOWS, lanes=2)}  # with traffic lights, buses and several types


@pytest.mark.parametrize("network", ["corridor", "grid"])
def test_every_reading_of_300_steps_equals_the_stock_getters(make, networks, network):
    """Vehicle by vehicle and value by value, in each tenth of them, while ICVs are commanded."""
    env, rng, compared = make(scenario=networks[network], max_vehicles=600), np.random.default_rng(0), 0
    observation, _ = env.reset(seed=1)
    stock, advise = env.simulator.client.vehicle, make_baseline("lane_advice", env.cfg)
    for step in range(STEPS):
        observation, *_ = env.command(*advise(observation, 5, rng))
        if step % 10:  # the stock client takes a hundred times as long
            continue
        ids, records, lanes, routes, _ = env.simulator.read(env.time)
        names = [name.decode() for name in ids]
        assert names == sorted(stock.getIDList())
        assert [lane.decode() for lane in lanes] == [stock.getLaneID(name) for name in names]
        assert [route.decode() for route in routes] == [stock.getRouteID(name) for name in names]
        for field, getter in GETTERS.items():
            assert records[field].tolist() == np.array([getattr(stock, getter)(name) for name in names]).tolist(), field
        assert np.array_equal(env.scene["speed"], records["speed"]) and env.ids == ids
        compared += len(ids)
    assert compared > 2 * STEPS


@pytest.mark.parametrize("network, seed", [("corridor", 1), ("grid", 1)])
def test_libsumo_gives_the_same_episode_as_traci(make, networks, network, seed):
    rows = {}
    for backend in ("traci", "libsumo"):
        env, rng = make(scenario=networks[network], backend=backend), np.random.default_rng(seed)
        rows[backend] = episode(env, seed, STEPS, lambda o: random_commands(env, o, rng))
        again = episode(env, seed, 20)  # a second episode in the same simulation
        rows[backend] += again
        env.close()
    assert len(rows["traci"]) == STEPS + 22
    for ours, theirs in zip(rows["traci"], rows["libsumo"]):
        assert equal(ours[0], theirs[0]) and ours[1:] == theirs[1:]
    assert rows["traci"][STEPS][2]["vehicles"] > 20


def test_libsumo_holds_one_simulation_and_says_so(make):
    first, second = make(backend="libsumo"), make(backend="libsumo")
    first.reset(seed=1)
    with pytest.raises(SumoError, match="one simulation per process"):
        second.reset(seed=1)
    assert first.command(*random_commands(first, first.observation, np.random.default_rng(0)))[4]["time"] == 1.0
    first.close()
    second.reset(seed=1)  # the place is free again


def test_libsumo_that_nobody_closes_leaves_its_place(make):
    """The next environment of the process was refused for good."""
    env = make(backend="libsumo")
    env.reset(seed=1)
    env.simulator = None  # as when the environment is forgotten
    gc.collect()
    assert not libsumo.isLoaded()
    env.reset(seed=1)


def test_libsumo_drops_commands_for_vehicles_that_have_gone(corridor):
    simulator = LibSumo(["-c", corridor, "--step-length", "0.1"])
    simulator.step(5.0, [SetModes(b"nobody", 26, 1621), Accelerate(b"nobody", -3.0, 1.0),
                         ChangeLane(b"nobody", 1, 1.0)])
    ids, records, *_ = simulator.read(5.0)
    assert simulator.time() == 5.0 and len(ids) == len(records) > 3
    assert simulator.routes_of([ids[0], b"nobody"])[1] == []
    simulator.close()
    simulator.close()


def test_libsumo_reads_an_empty_road(grid):
    simulator = LibSumo(["-c", grid('<vehicle id="late" depart="100"><route edges="A0B0 B0C0"/></vehicle>')])
    simulator.step(1.0)
    ids, records, lanes, routes, events = simulator.read(1.0)
    assert (ids, len(records), lanes, routes, events["departed"]) == ([], 0, [], [], [])
    simulator.close()


def test_libsumo_names_what_sumo_refuses(tmp_path):
    """After a start that failed the next one must find the process free."""
    broken = tmp_path / "broken.sumocfg"
    broken.write_text('<configuration><input><net-file value="missing.net.xml"/></input></configuration>')
    for _ in range(2):
        with pytest.raises(SumoError, match="SUMO failed"):
            LibSumo(["-c", str(broken)])
    assert not libsumo.isLoaded()


def test_missing_libsumo_is_one_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "libsumo", None)
    with pytest.raises(SumoError, match=r"pip install 'libsumo==1\.28\.\*'"):
        LibSumo([])


def test_two_environments_per_worker_are_refused_with_libsumo(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_rl.py", "--config", "configs/smoke.yaml", "env.backend=libsumo",
                                      "rollout.num_envs_per_worker=2"])
    assert run_script(train_rl.main, train_ddp.USER_ERRORS) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "env.backend=libsumo with rollout.num_envs_per_worker=2" in told


def test_environment_with_traci_does_not_import_libsumo():
    code = ("import sys; from configs import Config; from env.traffic_env import make_env; e = make_env(Config()); "
            "e.reset(seed=1); e.close(); assert 'libsumo' not in sys.modules")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_crash_in_load_is_tried_again_with_a_new_process(make, monkeypatch):
    """SUMO crashes on some networks when it has run another one: a suite of two that run alone could not start."""
    env = make()
    env.reset(seed=1)
    process = env.simulator.process

    def crash(_):
        process.send_signal(signal.SIGSEGV)
        raise FatalTraCIError("connection closed by SUMO")
    monkeypatch.setattr(env.simulator.client, "load", crash)
    observation, _ = env.reset(seed=2)
    assert process.returncode == -signal.SIGSEGV and env.simulator.process.pid != process.pid
    assert equal(observation, make().reset(seed=2)[0])
