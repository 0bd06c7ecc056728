"""env/networks.py: geometry, right of way, demand and drivers of the built-in scenarios, and the published figures."""
import hashlib
import math
import os
import xml.etree.ElementTree as xml
from pathlib import Path

import numpy as np
import pytest

from configs.schema import Config
from env.launch import SumoError
from env.networks import NETWORKS
from env.scenarios import build_scenario
from env.spaces import LEFT

from helpers import episode, equal, nobody, only, random_commands

NEW = ("figure_eight", "merge", "bottleneck")


def network(folder, name, **numbers):
    """(root element of the built network, [(x, y)] of each junction relative to the first one named)."""
    config = Config()
    config.env.scenario = name
    for key, value in numbers.items():
        assert hasattr(getattr(config, name), key)
        setattr(getattr(config, name), key, value)
    return xml.parse(build_scenario(config, folder).replace(".sumocfg", ".net.xml")).getroot()


def lanes(net):
    """{edge: [(length m, speed limit m/s) of its lanes from the right]}, without junction lanes."""
    return {edge.get("id"): [(float(lane.get("length")), float(lane.get("speed"))) for lane in edge.findall("lane")]
            for edge in net.findall("edge") if not edge.get("id").startswith(":")}


def places(net, origin):
    """{junction: (x, y) relative to `origin`, m}."""
    found = {j.get("id"): np.array([float(j.get("x")), float(j.get("y"))]) for j in net.findall("junction")}
    return {name: tuple((place - found[origin]).round(2)) for name, place in found.items() if name[0] != ":"}


def right_of_way(net):
    """{(from edge, lane, to edge, lane): M = has priority, m = yields, Z = zipper}."""
    return {(c.get("from"), int(c.get("fromLane")), c.get("to"), int(c.get("toLane"))): c.get("state")
            for c in net.findall("connection") if c.get("from")[0] != ":"}


# ---- geometry ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("radius", [30.0, 45.0])
def test_figure_eight_is_two_arcs_and_a_crossing(tmp_path, radius):
    net = network(tmp_path, "figure_eight", radius_m=radius)
    arc = pytest.approx(1.5 * math.pi * radius, abs=0.01)
    assert lanes(net) == {**{leg: [(radius, 30)] for leg in ("south_in", "north_out", "east_in", "west_out")},
                          "upper": [(arc, 30)], "lower": [(arc, 30)]}
    assert places(net, "centre") == {"centre": (0, 0), "north": (0, radius), "east": (radius, 0), "west": (-radius, 0),
                                     "south": (0, -radius)}
    offset = np.array([float(x) for x in net.find("location").get("netOffset").split(",")])
    for name, middle, first, last in (("upper", radius, (0, radius), (radius, 0)),
                                      ("lower", -radius, (-radius, 0), (0, -radius))):
        shape = net.find(f"edge[@id='{name}']/lane").get("shape").split()
        points = np.array([[float(x) for x in point.split(",")] for point in shape]) - offset
        assert points[[0, -1]] == pytest.approx(np.array([first, last]), abs=0.2)
        assert np.hypot(*(points - middle).T) == pytest.approx(radius, abs=0.1) and len(points) > 40
        assert np.hypot(*np.diff(points, axis=0).T).sum() == pytest.approx(1.5 * math.pi * radius, rel=0.01)
    ways = right_of_way(net)
    assert ways["south_in", 0, "north_out", 0] == "M" and ways["east_in", 0, "west_out", 0] == "m"
    assert {(a, c): s for (a, _, c, _), s in ways.items() if a[-3:] != "_in"} == {
        ("north_out", "upper"): "M", ("upper", "east_in"): "M", ("west_out", "lower"): "M", ("lower", "south_in"): "M"}


def test_merge_joins_at_45_degrees_and_the_mainline_yields(tmp_path):
    net = network(tmp_path, "merge", main_length_m=400.0, after_length_m=150.0, ramp_length_m=120.0)
    assert lanes(net) == {"main0": [(100, 30)], "main1": [(400, 30)], "main2": [(150, 30)], "ramp0": [(100, 30)],
                          "ramp1": [(120, 30)]}
    found, far, near = places(net, "join"), 220 * math.sqrt(0.5), 120 * math.sqrt(0.5)
    for name, place in {"begin": (-500, 0), "main": (-400, 0), "end": (150, 0), "ramp_begin": (-far, -far),
                        "ramp": (-near, -near)}.items():
        assert found[name] == pytest.approx(place, abs=0.01)
    ways = {(a, c): s for (a, _, c, _), s in right_of_way(net).items()}
    assert ways == {("main0", "main1"): "M", ("ramp0", "ramp1"): "M", ("main1", "main2"): "m", ("ramp1", "main2"): "M"}


@pytest.mark.parametrize("n", [1, 2])
def test_bottleneck_halves_its_lanes_twice(tmp_path, n):
    net = network(tmp_path, "bottleneck", lanes=n)
    assert lanes(net) == {"e0": [(100, 23)] * 4 * n, "e1": [(310, 23)] * 4 * n, "e2": [(140, 23)] * 4 * n,
                          "e3": [(280, 23)] * 2 * n, "e4": [(155, 23)] * n}
    assert places(net, "n0") == {f"n{i}": (x, 0) for i, x in enumerate((0, 100, 410, 550, 830, 985))}
    ways = right_of_way(net)
    zippers = {way for way, state in ways.items() if state == "Z"}
    assert zippers == {("e2", i, "e3", i // 2) for i in range(4 * n)} | {("e3", i, "e4", i // 2) for i in range(2 * n)}
    assert set(ways) - zippers == {(f"e{e}", i, f"e{e + 1}", i) for e in (0, 1) for i in range(4 * n)}
    radii = {j.get("id"): j.get("radius") for j in net.findall("junction") if j.get("type") == "zipper"}
    assert {name: float(radius) for name, radius in radii.items()} == {"n3": 20, "n4": 20}


@pytest.mark.parametrize("name, digest", [("corridor", "a4a529e330a1"), ("ring", "e6aef114565f")])
def test_corridor_and_ring_have_not_changed_by_a_byte(tmp_path, name, digest):
    """Trajectories, the README's figures and every recorded seed hang on these files."""
    network(tmp_path, name)
    files = sorted(path for path in tmp_path.glob("*/*.xml") if not path.name.endswith(".net.xml"))
    assert hashlib.sha1(b"".join(path.read_bytes() for path in files)).hexdigest()[:12] == digest


# ---- demand and drivers -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, flows", [
    ("merge", {"main": (1250, "main0", 10.0), "ramp": (100, "ramp0", 7.5)}),
    ("bottleneck", {"flow": (2000, "e0", 10.0)})])
def test_demand_arrives_as_configured(make, name, flows):
    env, lanes_used, speeds, seen = make(scenario=name, step_length=0.5, control_interval=0.5), {}, {}, set()
    env.reset(seed=1)
    stock = env.simulator.client.vehicle
    for _ in range(360):
        *_, info = env.command(*nobody(env))
        for name in set(stock.getIDList()) - seen:
            seen.add(name)
            lanes_used.setdefault(name.split(".")[0], set()).add(stock.getLaneID(name))
            speeds.setdefault(name.split(".")[0], []).append(stock.getSpeed(name))
    counts = {flow: sum(name.startswith(flow + ".") for name in seen) for flow in flows}
    assert counts == {flow: pytest.approx(veh_h * 180 / 3600, abs=1.01) for flow, (veh_h, _, _) in flows.items()}
    assert info["loaded"] == sum(counts.values())  # all of them found room
    for flow, (_, edge, speed) in flows.items():
        assert {lane.rpartition("_")[0] for lane in lanes_used[flow]} == {edge}
        assert len(lanes_used[flow]) == (4 if flow == "flow" else 1)
        assert min(speeds[flow]) == speed and max(speeds[flow]) < speed + 2.6 * 0.5 + 0.01  # at most one step later


def test_demand_lasts_until_the_end_and_scales(make):
    for name, flow in (("merge", 1350), ("bottleneck", 4000)):
        env = make(scenario=name, horizon_s=300.0, warmup_s=60.0, demand_scale=0.5, control_interval=10.0)
        env.cfg.bottleneck.lanes = 2
        info = episode(env, 1, 30)[-1][2]
        assert info["loaded"] == pytest.approx(0.5 * flow * 360 / 3600, abs=2.01)


@pytest.mark.parametrize("count", [14, 9])
def test_figure_eight_is_closed_and_evenly_filled(make, count):
    env = make(scenario="figure_eight")
    env.cfg.figure_eight.vehicles = count
    observation, info = env.reset(seed=1)
    env.command(*nobody(env))
    assert not env.road.internal[env.lane].any()  # two of 14 cars once stood on the crossing, in each other's way
    gaps = env.scene["lead_gap"] + env.scene["length"]
    assert sorted(env.scene["lead"]) == list(range(count))  # everybody leads somebody, through the crossing too
    assert gaps.sum() == pytest.approx(env.road.lane_length.sum(), abs=0.1)
    assert gaps.min() > 402.7 / count - 1 and gaps.max() < 402.7 / count + 20  # two junctions of 9.4 m on the way
    info = episode(env, 1, 60)[-1][2]
    assert (info["vehicles"], info["loaded"], info["arrived"]) == (count, count, 0)


def test_drivers_have_the_configured_numbers(make):
    env = make(scenario="merge")
    d = env.cfg.merge.driver
    d.accel, d.decel, d.tau, d.max_speed, d.min_gap_m, d.speed_dev, d.impatience = 1.1, 2.2, 1.3, 27.0, 1.7, 0.03, 0.4
    env.reset(seed=1)
    stock = env.simulator.client.vehicletype
    assert [stock.getAccel("driver"), stock.getDecel("driver"), stock.getTau("driver"), stock.getMaxSpeed("driver"),
            stock.getMinGap("driver"), stock.getSpeedDeviation("driver")] == [1.1, 2.2, 1.3, 27.0, 1.7, 0.03]
    routes = xml.parse(Path(env.scenario).with_name("routes.xml")).getroot()
    assert routes.find("vType").get("carFollowModel") == "IDM" and routes.find("vType").get("impatience") == "0.4"


def test_awareness_below_one_adds_errors_of_perception(make):
    """SUMO's IDM has no noise: without it the episodes of all seeds of the figure eight were nearly the same."""
    speeds = {}
    for awareness in (1.0, 0.5):
        env = make(scenario="figure_eight")
        env.cfg.figure_eight.driver.awareness, env.cfg.figure_eight.driver.speed_dev = awareness, 0.0
        speeds[awareness] = [episode(env, seed, 60)[-1][0]["nodes"][:14, 2] for seed in (1, 2)]
    assert np.array_equal(*speeds[1.0])
    assert np.abs(np.subtract(*speeds[0.5])).max() > 0.05


def test_drivers_of_the_bottleneck_stay_on_their_lane_but_icvs_obey(make):
    env, before = make(scenario="bottleneck"), {}
    env.cfg.bottleneck.flow = 3000.0
    env.reset(seed=1)
    for _ in range(120):
        env.command(*nobody(env))
        now = {name: (env.road.lane_edge[lane], env.road.lane_number[lane]) for name, lane in zip(env.ids, env.lane)}
        assert all(now[name] == before[name] for name in now.keys() & before.keys() if now[name][0] == before[name][0])
        before = now
    env = make(scenario="bottleneck", icv_share=1.0)
    rows = episode(env, 1, 15)
    slot = int(np.flatnonzero((rows[-1][0]["icv"] > 0) & (rows[-1][0]["nodes"][:, 1] < 3))[0])
    before = rows[-1][0]["nodes"][slot, 1]
    for _ in range(3):
        observation, *_ = env.command(*only(env, [slot], np.nan, LEFT))
    assert observation["nodes"][slot, 1] > before


# ---- episodes ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("interval, step_length", [(1.0, 0.1), (0.5, 0.5)])
def test_environment_runs_and_seeds_reproduce(make, name, interval, step_length):
    env = make(scenario=name, control_interval=interval, step_length=step_length)

    def sixty(seed):
        rng = np.random.default_rng(seed)
        return episode(env, seed, 60, lambda observation: random_commands(env, observation, rng))
    rows, other, again = sixty(1), sixty(2), sixty(1)
    assert all(equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(rows, again))
    assert not equal(rows[-1][0], other[-1][0])
    assert np.isfinite([row[1] for row in rows]).all()
    assert all(np.isfinite(part).all() for part in rows[-1][0].values())
    assert env.observation_space.contains(rows[-1][0]) and rows[-1][2]["vehicles"] >= 8


@pytest.mark.parametrize("step_length", [0.1, 0.5])
@pytest.mark.parametrize("name", ("ring", *NEW))
def test_no_collisions_and_no_teleports_without_control(make, name, step_length):
    env = make(scenario=name, control_interval=10.0, step_length=step_length, max_vehicles=400)
    info = episode(env, 7, 60)[-1][2]
    assert (info["collisions"], info["teleports"], info["overflow"]) == (0, 0, 0) and info["vehicles"] > 10


@pytest.mark.parametrize("seed", [1, 2])
def test_merge_has_the_published_mean_speed(make, seed):
    """5.32 +- 0.05 m/s on SUMO 1.28: 2000 and 100 veh/h, 750 s, step 0.5 s."""
    env = make(scenario="merge", step_length=0.5, horizon_s=750.0)
    env.cfg.merge.main_flow = 2000.0
    total = episode(env, seed, 750)[-1][2]["summary"]
    assert total["mean_speed"] == pytest.approx(5.32, abs=0.12)


def test_bottleneck_has_the_published_congested_outflow(make):
    """1541 +- 4 veh/h on SUMO 1.28 at 2000 to 2500 veh/h: the last 500 of 1000 s, step 0.5 s."""
    env = make(scenario="bottleneck", step_length=0.5, horizon_s=1000.0, control_interval=10.0)
    rows = episode(env, 1, 100)
    assert (rows[-1][2]["arrived"] - rows[-51][2]["arrived"]) * 3600 / 500 == pytest.approx(1541, abs=12)


def test_mean_speeds_of_the_closed_roads(make):
    """22 drivers on the ring, 14 on the figure eight, 300 s; measured on SUMO 1.28."""
    for name, expected in (("ring", 2.6), ("figure_eight", 4.4)):
        total = episode(make(scenario=name, horizon_s=300.0), 1, 300)[-1][2]["summary"]
        assert total["mean_speed"] == pytest.approx(expected, abs=0.5)
        assert total["sigma_v"] > 1  # waves to remove; on the ring there once were none, 0.013 m/s


def test_every_network_has_a_section_of_the_configuration():
    assert all(hasattr(Config(), name) for name in NETWORKS)


def test_another_network_of_the_same_numbers_is_not_taken_for_this_one(tmp_path, monkeypatch):
    """The folder was named after the configuration's numbers alone: in an old run folder, a newer program drove on the
    network that an older one had made of them."""
    config = Config()
    old, files = build_scenario(config, tmp_path), NETWORKS["corridor"](config, 60.0)
    monkeypatch.setitem(NETWORKS, "corridor", lambda *_: {**files, "routes": [*files["routes"], "<!-- newer -->"]})
    new = build_scenario(config, tmp_path)
    assert new != old and "newer" in Path(new).with_name("routes.xml").read_text()
    monkeypatch.setattr("env.scenarios.version", lambda _: "1.99")  # another netconvert
    assert build_scenario(config, tmp_path) not in (old, new)


def test_ctrl_c_is_not_for_netconvert(tmp_path, monkeypatch):
    """The terminal sends it to the whole process group: netconvert died, and the configuration was blamed."""
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\nread -r _ _ _ _ group rest < /proc/$$/stat\necho group $group >&2\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setattr("env.scenarios.find_binary", lambda name: str(tool))
    with pytest.raises(SumoError, match=r"group \d+") as error:
        build_scenario(Config(), tmp_path / "work")
    assert f"group {os.getpgrp()}" not in str(error.value)
