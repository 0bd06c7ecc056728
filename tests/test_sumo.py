"""env/sumo.py, env/launch.py and env/scenarios.py against the real SUMO: readings, commands, resets and faults."""
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from configs.schema import Config
from env import launch, sumo, wire
from env.launch import SumoError
from env.road import Road, Traffic
from env.scenarios import build_scenario
from env.sumo import Sumo, SumoTimeout

# An L-shaped road of two edges, almost empty: what one vehicle does is no accident there.
NODES = '<nodes><node id="p" x="0" y="0"/><node id="q" x="2000" y="0"/><node id="r" x="2000" y="500"/></nodes>'
EDGES = ('<edges><edge id="long" from="p" to="q" numLanes="2" speed="30"/>'
         '<edge id="short" from="q" to="r" numLanes="2" speed="30"/></edges>')


def arguments(config, seed=1, *more):
    """The command line of the environment, in short."""
    return ["-c", str(config), "--seed", str(seed), "--step-length", "0.1", "--no-step-log", "--no-warnings",
            "--xml-validation", "never", "--collision.action", "warn", *more]


@pytest.fixture
def start():
    """start(arguments, ...) -> Sumo; every process is ended after the test."""
    started = []

    def begin(*args, **options):
        started.append(Sumo(*args, **options))
        return started[-1]
    yield begin
    for simulator in started:
        simulator.close()


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """road(routes) -> path of a .sumocfg of the L-shaped road with the text of a routes file."""
    folder = tmp_path_factory.mktemp("road")
    (folder / "nodes.xml").write_text(NODES)
    (folder / "edges.xml").write_text(EDGES)
    command = [launch.find_binary("netconvert"), f"-n={folder / 'nodes.xml'}", f"-e={folder / 'edges.xml'}",
               f"-o={folder / 'road.net.xml'}", "--xml-validation", "never"]
    assert launch.launch(command, None).wait(60) == 0

    def write(routes):
        name = f"config{len(list(folder.iterdir()))}"
        (folder / f"{name}.rou.xml").write_text(f"<routes>{routes}</routes>")
        path = folder / f"{name}.sumocfg"
        path.write_text(f'<configuration><input><net-file value="road.net.xml"/><route-files value="{name}.rou.xml"/>'
                        "</input></configuration>")
        return path
    return write


def vehicle(name, depart=0.0, more='departLane="0" departPos="100" departSpeed="20"', edges="long short"):
    return f'<vehicle id="{name}" depart="{depart}" {more}><route edges="{edges}"/></vehicle>'


def speed_of(simulator, name, now):
    ids, records, *_ = simulator.read(now)
    return float(records["speed"][ids.index(name)])


# ---- readings ---------------------------------------------------------------------------------------------------

def test_bulk_readings_equal_the_stock_getters(start, corridor):
    simulator = start(arguments(corridor))
    simulator.step(80.0)
    ids, records, lanes, _, events = simulator.read(80.0)
    stock, simulation = simulator.client.vehicle, simulator.client.simulation
    getters = {"xy": stock.getPosition, "angle": stock.getAngle, "speed": stock.getSpeed,
               "accel": stock.getAcceleration, "pos": stock.getLanePosition, "odometer": stock.getDistance,
               "route_index": stock.getRouteIndex, "allowed": stock.getAllowedSpeed,
               "length": stock.getLength}
    assert set(getters) == {name for _, name, _ in wire.READINGS}
    names = [name.decode() for name in ids]
    assert len(names) > 50 and set(names) == set(stock.getIDList())
    assert [lane.decode() for lane in lanes] == [stock.getLaneID(name) for name in names]
    for field, getter in getters.items():
        assert records[field].tolist() == np.array([getter(name) for name in names]).tolist(), field
    assert [name.decode() for name in events["departed"]] == list(simulation.getDepartedIDList()) != []
    assert [name.decode() for name in events["arrived"]] == list(simulation.getArrivedIDList()) != []
    assert events["colliding"] == []
    counters = [name for name in events if name.startswith("stats.")]
    assert len(counters) >= 3
    for name in counters:
        assert events[name] == int(simulation.getParameter("", name)), name


def test_reading_an_empty_road(start, road):
    simulator = start(arguments(road(vehicle("late", 100.0))))
    for until in (0.0, 1.0):
        ids, records, lanes, _, events = simulator.read(until)
        assert (len(ids), len(records), len(lanes), events["departed"]) == (0, 0, 0, [])
        simulator.step(until + 1.0)


def test_routes_in_order_and_nothing_for_strangers(start, road):
    simulator = start(arguments(road(vehicle("a"))))
    simulator.step(1.0)
    assert simulator.routes_of([b"a", b"nobody", b"a"]) == [[b"long", b"short"], [], [b"long", b"short"]]
    assert simulator.read(1.0)[0] == [b"a"]  # the refusal leaves the connection in step


@pytest.mark.parametrize("name", ["v" * 300, "Zürich", "a"])
def test_any_vehicle_name(start, road, name):
    """Names make messages longer than the 255 bytes that the short header of TraCI can tell."""
    simulator, key = start(arguments(road(vehicle(name)))), name.encode()
    simulator.step(1.0)
    before = speed_of(simulator, key, 1.0)
    simulator.step(2.0, [sumo.SetModes(key, 26, 1621), sumo.Accelerate(key, -3.0, 1.0)])
    assert speed_of(simulator, key, 2.0) == pytest.approx(before - 3.0)
    assert simulator.routes_of([key]) == [[b"long", b"short"]]


def test_events_of_one_long_step_cover_all_simulation_steps(start, corridor):
    simulator = start(arguments(corridor))
    simulator.step(120.0)
    ids, _, _, _, events = simulator.read(120.0)
    departed, arrived = events["departed"], events["arrived"]
    inserted = int(simulator.client.simulation.getParameter("", "stats.vehicles.inserted"))
    assert len(departed) == len(set(departed)) == inserted
    assert set(departed) - set(arrived) == set(ids) and len(arrived) > 5


# ---- leaders against SUMO's own ---------------------------------------------------------------------------------

def test_leaders_agree_with_sumo(start, corridor):
    """Vehicles on the last edge followed a phantom: the first vehicle of the network's last lane.

    SUMO's gap leaves out minGap (2.5 m). A few exceptions are allowed: vehicles that SUMO holds in two lanes while
    they change, and leaders at the very end of the look-ahead.
    """
    simulator = start(arguments(corridor))
    network, routes, begin, agree, total = Road(simulator.road_lanes()), [-1, -1], {}, 0, 0
    leader_of, route_of = simulator.client.vehicle.getLeader, simulator.client.vehicle.getRoute
    for now in range(60, 500, 55):
        simulator.step(float(now))
        ids, records, lanes, *_ = simulator.read(float(now))
        lane = np.array([network.lane_index[name.decode()] for name in lanes])
        for name in ids:
            if name not in begin:
                begin[name] = len(routes)
                routes += [network.edge_index[e] for e in route_of(name.decode())] + [-1, -1]
        at = np.array([begin[name] for name in ids]) + records["route_index"]
        traffic = Traffic(network, lane, records["pos"].astype(float), records["speed"].astype(float),
                          np.full(len(ids), 5.0), at, np.array(routes), 200.0)
        who, gap, _ = traffic.ahead(lane)
        for i in np.flatnonzero(~network.internal[lane]):
            name, sumos_gap = leader_of(ids[i].decode(), 200.0) or ("", 0.0)
            sumos = (name, sumos_gap + 2.5) if name and sumos_gap + 2.5 < 199 else None
            ours = (ids[who[i]].decode(), gap[i]) if who[i] >= 0 and gap[i] < 199 else None
            agree += ours == (sumos and (sumos[0], pytest.approx(sumos[1], abs=0.01)))
            total += 1
    assert total > 500 and agree / total >= 0.99


# ---- the reference figures --------------------------------------------------------------------------------------

def test_corridor_reproduces_the_reference_figures(start, corridor):
    """Without control, seeds 1 to 6: 879 of the 1100 vehicles loaded in 900 s have arrived (SUMO 1.28)."""
    simulators = [start(arguments(corridor, seed), 120.0) for seed in (1, 2)]

    def episodes(simulator, seeds):
        for seed in seeds:
            simulator.load(arguments(corridor, seed))
            simulator.step(900.0)
            events = simulator.read(900.0)[4]
            loaded = int(simulator.client.simulation.getParameter("", "stats.vehicles.loaded"))
            yield len(events["arrived"]), loaded, events["stats.safety.collisions"]

    with ThreadPoolExecutor(2) as pool:  # two SUMO processes at once
        rows = [row for part in pool.map(lambda s, seeds: list(episodes(s, seeds)), simulators, [(1, 2, 3), (4, 5, 6)])
                for row in part]
    arrived, loaded, collisions = zip(*rows)
    assert abs(np.mean(arrived) - 879) <= 3
    assert set(loaded) == {1100} and set(collisions) == {0}


def test_load_gives_bit_identical_trajectories(start, corridor):
    def trajectory(simulator):
        parts = []
        for now in range(10, 100, 10):
            simulator.step(float(now))
            ids, records, lanes, _, events = simulator.read(float(now))
            parts.append((ids, records.tobytes(), lanes, events))
        return parts
    fresh = trajectory(start(arguments(corridor, 3)))
    used = start(arguments(corridor, 5))
    used.step(42.0)
    used.load(arguments(corridor, 3))
    assert trajectory(used) == fresh
    used.load(arguments(corridor, 4))
    assert trajectory(used) != fresh


# ---- commands ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("acceleration, mode, change",
                         [(-3.0, 26, -3.0), (-9.0, 26, -9.0), (-9.0, 31, -4.5), (2.0, 26, 2.0)])
@pytest.mark.parametrize("step_length", ["0.1", "0.5"])
def test_acceleration_of_one_second_changes_the_speed(start, road, step_length, acceleration, mode, change):
    """Mode 26 lifts the comfort limit of braking (4.5), mode 31 does not."""
    driver = '<vType id="quick" accel="2.6" decel="4.5" maxSpeed="30" speedDev="0"/>'
    one = vehicle("a", more='type="quick" departLane="0" departPos="100" departSpeed="20"')
    simulator = start(["-c", str(road(driver + one)), "--step-length", step_length, "--no-warnings"])
    simulator.step(1.0)
    before = speed_of(simulator, b"a", 1.0)
    simulator.step(2.0, [sumo.SetModes(b"a", mode, 1621), sumo.Accelerate(b"a", acceleration, 1.0)])
    assert speed_of(simulator, b"a", 2.0) == pytest.approx(before + change, abs=1e-6)
    simulator.step(4.0)
    assert speed_of(simulator, b"a", 4.0) > before + change  # the driver has the speed again and wants 30 m/s


def test_lane_change_is_held_and_then_released(start, road):
    simulator = start(arguments(road(vehicle("a"))))
    simulator.step(1.0)
    assert simulator.read(1.0)[2] == [b"long_0"]
    simulator.step(2.0, [sumo.ChangeLane(b"a", 1, 5.0)])
    for now in range(2, 7):
        assert simulator.read(float(now))[2] == [b"long_1"], now
        simulator.step(now + 1.0)
    simulator.step(30.0)
    assert simulator.read(30.0)[2] == [b"long_0"]  # SUMO's driver keeps right


def test_commands_for_strangers_are_dropped_and_the_connection_stays_in_step(start, road):
    simulator = start(arguments(road(vehicle("a"))))
    simulator.step(1.0)
    simulator.step(2.0, [sumo.Accelerate(b"nobody", -3.0, 1.0), sumo.SetModes(b"nobody", 26, 1621),
                         sumo.ChangeLane(b"a", 7, 1.0), sumo.Accelerate(b"a", -3.0, 1.0)])
    ids, records, lanes, *_ = simulator.read(2.0)
    assert ids == [b"a"] and lanes == [b"long_0"]
    assert records["accel"][0] == pytest.approx(-3.0)


# ---- faults -----------------------------------------------------------------------------------------------------

def test_missing_configuration(tmp_path):
    with pytest.raises(SumoError) as error:
        Sumo(arguments(tmp_path / "missing.sumocfg"))
    assert "Could not access configuration" in str(error.value)
    assert str(tmp_path / "missing.sumocfg") in str(error.value)


@pytest.mark.parametrize("text, words", [
    ("no network", "invalid document structure"),
    ('<net version="1.20"><edge id="a" from="x" to="y"/></net>', "Unknown from-node")])
def test_refused_network_comes_with_sumos_own_words(tmp_path, text, words):
    path = tmp_path / "broken.net.xml"
    path.write_text(text)
    with pytest.raises(SumoError, match=words):
        Sumo(["-n", str(path)])
    with pytest.raises(SumoError, match=f"{tmp_path / 'nothing.net.xml'}' is not accessible"):
        Sumo(["-n", str(tmp_path / "nothing.net.xml")])


def test_impossible_route_is_reported_when_it_departs(start, road):
    simulator = start(arguments(road(vehicle("fine") + vehicle("lost", 5.0, "", "short long"))))
    simulator.step(4.0)
    with pytest.raises(SumoError, match="'lost' has no valid route. No connection between edge 'short' and edge"):
        simulator.step(6.0)


def test_load_of_a_missing_configuration(start, corridor, tmp_path):
    """SUMO answers `load` before it opens the files: the next call at the latest must tell."""
    simulator = start(arguments(corridor))
    with pytest.raises(SumoError, match="Could not access configuration"):
        simulator.load(arguments(tmp_path / "missing.sumocfg"))
        simulator.step(1.0)


def test_missing_package(monkeypatch, corridor):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SumoError, match="SUMO not found.*pip install eclipse-sumo"):
        Sumo(arguments(corridor))


def test_missing_binary(monkeypatch, corridor, tmp_path):
    elsewhere = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: elsewhere)
    with pytest.raises(SumoError, match=f"SUMO not found: {tmp_path / 'bin' / 'sumo'} does not exist"):
        Sumo(arguments(corridor))


def test_sumo_is_found_without_sumo_home(monkeypatch, start, road):
    monkeypatch.delenv("SUMO_HOME", raising=False)
    simulator = start(arguments(road(vehicle("a"))))
    assert simulator.process.args[0].endswith("/sumo/bin/sumo")  # the real binary, not the wheel's Python wrapper
    assert "SUMO 1.28" in simulator.client.getVersion()[1]


def test_sumo_runs_in_its_own_process_group(start, road):
    """Ctrl-C in a terminal goes to the whole group: SUMO must not get it before we have finished."""
    simulator = start(arguments(road(vehicle("a"))))
    assert os.getpgid(simulator.process.pid) == simulator.process.pid != os.getpgid(0)


def test_killed_sumo_is_an_error_at_once(start, corridor, ends_soon):
    simulator = start(arguments(corridor))
    pid = simulator.process.pid
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(SumoError, match=r"connection to SUMO lost.*exit code -9") as error:
        simulator.step(1.0)
    assert not isinstance(error.value, SumoTimeout)
    assert time.monotonic() - begin < 5 and ends_soon([pid])


def test_frozen_sumo_is_a_timeout_and_is_ended(start, corridor, ends_soon):
    simulator = start(arguments(corridor), call_timeout_s=0.5)
    pid = simulator.process.pid
    os.kill(pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(SumoTimeout, match="did not answer within 0.5 s"):
        simulator.step(1.0)
    assert 0.5 <= time.monotonic() - begin < 10 and ends_soon([pid])


def test_frozen_sumo_is_an_error_in_load_too(start, corridor, ends_soon):
    simulator = start(arguments(corridor), start_timeout_s=20.0)
    pid, simulator.start_timeout_s = simulator.process.pid, 0.5
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SumoError):
        simulator.load(arguments(corridor))
    assert ends_soon([pid])


def test_closing_twice_and_using_a_closed_one(start, corridor, ends_soon):
    simulator = start(arguments(corridor))
    pid = simulator.process.pid
    simulator.close()
    assert ends_soon([pid])
    simulator.close()
    for call in (lambda: simulator.step(1.0), lambda: simulator.read(1.0), lambda: simulator.load(arguments(corridor))):
        with pytest.raises(SumoError):
            call()


def test_simulators_do_not_disturb_each_other(start, road):
    first, second = (start(arguments(road(vehicle(name)))) for name in "ab")
    first.step(1.0)
    second.step(1.0)
    assert (first.read(1.0)[0], second.read(1.0)[0]) == ([b"a"], [b"b"])
    first.close()
    second.step(2.0)
    assert second.read(2.0)[0] == [b"b"]


# ---- scenario files ---------------------------------------------------------------------------------------------

def test_scenarios_are_generated_once_and_by_their_numbers(tmp_path):
    config = Config()
    path = build_scenario(config, tmp_path)
    stamp = os.stat(path).st_mtime_ns
    assert build_scenario(config, tmp_path) == path and os.stat(path).st_mtime_ns == stamp
    config.corridor.main_flow = 3200.0
    assert build_scenario(config, tmp_path) != path
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".building")]


def test_two_processes_may_generate_the_same_scenario(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build_scenario(Config(), tmp_path), range(4)))
    assert len(paths) == 1 and len(os.listdir(tmp_path)) == 1


def test_corridor_of_any_shape_can_be_built(start, tmp_path):
    config = Config()
    config.corridor.lanes, config.corridor.ramps = 3, 3
    simulator = start(arguments(build_scenario(config, tmp_path)))
    lanes = {lane for lane, _, _ in simulator.road_lanes() if not lane.startswith(":")}
    count = {name: sum(lane.startswith(name) for lane in lanes) for name in ("main0", "acc2", "main3", "ramp2")}
    assert count == {"main0": 3, "acc2": 4, "main3": 3, "ramp2": 1}


@pytest.mark.parametrize("name, words", [("nothing.sumocfg", "no such file"), ("corridoor", "neither built in")])
def test_unknown_scenario(tmp_path, name, words):
    config = Config()
    config.env.scenario = name
    with pytest.raises(SumoError, match=words) as error:
        build_scenario(config, tmp_path)
    assert name in str(error.value)


def test_refused_numbers_come_with_netconverts_words(tmp_path, monkeypatch):
    wrong = '<connection from="nowhere" to="main0" fromLane="0" toLane="0"/>'
    monkeypatch.setattr("env.networks._link", lambda *_: wrong)
    with pytest.raises(SumoError, match="(?s)netconvert refused the network of scenario 'corridor'.*nowhere"):
        build_scenario(Config(), tmp_path)
    assert os.listdir(tmp_path) == []
