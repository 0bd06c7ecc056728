"""Lanes of users' networks: forks, persons on the road, solid lines, lanes for some kinds of vehicles only."""
import time

import numpy as np
import pytest

from benchmarks.shield import Adversary
from env import graph
from env.road import Road
from env.spaces import LEFT, RIGHT

FORK = ('<node id="a" x="0" y="0"/><node id="b" x="500" y="0"/><node id="c" x="600" y="0"/><node id="d" x="700" y="0"/>'
        '<node id="e" x="1000" y="60"/><node id="f" x="1000" y="-60"/>',
        '<edge id="one" from="a" to="b" speed="30"/><edge id="two" from="b" to="c" numLanes="2" speed="30"/>'
        '<edge id="on" from="c" to="d" numLanes="2" speed="30"/><edge id="left" from="d" to="e" speed="30"/>'
        '<edge id="right" from="d" to="f" speed="30"/>')
LINKS = "".join(f'<connection from="{a}" to="{b}" fromLane="{i}" toLane="{j}"/>' for a, b, i, j in (
    ("one", "two", 0, 0), ("one", "two", 0, 1), ("two", "on", 0, 0), ("two", "on", 1, 1), ("on", "left", 1, 0),
    ("on", "right", 0, 0)))
TWO = '<node id="a" x="0" y="0"/><node id="b" x="600" y="0"/><node id="c" x="1200" y="0"/>'
STREET = '<edge id="in" from="a" to="b" speed="20"/><edge id="out" from="b" to="c" speed="20"/>'


def drive(env, adversary, seconds):
    """The info of the last step of an episode in which an adversary commands all ICVs."""
    driver = Adversary(env.cfg, adversary)
    driver.begin(0, 1)
    observation, _ = env.reset(seed=1)
    for _ in range(seconds):
        command = driver.act(observation, 0)
        observation, *_, info = env.command(*(command[name] for name in ("slot", "accel", "lane", "brake")))
    return info


def test_of_a_forks_lanes_that_which_leads_on_is_taken(make, road):
    """The first one whose lane leads on to the edge after the next was: both do here, and the reason to choose lies
    behind it. A vehicle that stood there was nobody's leader."""
    flows = "".join(f'<flow id="{to}" begin="0" end="80" period="{every}" departSpeed="max">'
                    f'<route edges="one two on {to}"/></flow>' for to, every in (("left", 4), ("right", 7)))
    env, told = make(scenario=road(*FORK, flows, connections=LINKS)), 0
    env.reset(seed=1)
    for _ in range(60):
        env.command([], [], [], [])
        for name, row in zip(env.ids, env.scene):
            lane = env.lane[env.ids.index(name)]
            leader = env.simulator.client.vehicle.getLeader(name.decode(), 150.0)
            if lane == env.road.lane_index["one_0"] and leader and leader[1] < 150:
                assert row["lead"] >= 0 and env.ids[row["lead"]].decode() == leader[0], (name, leader)
                told += env.lane[row["lead"]] != lane
    assert told > 5


def test_the_end_of_a_route_is_reached_from_every_lane_of_a_fork():
    """And of lanes that lead equally far the nearest to a better one is taken, else the first."""
    three = [(f"b_{i}", 50, [("c_0", "")] if i == 2 else []) for i in range(3)]
    road = Road([("a_0", 100, [("b_0", ""), ("b_1", "")]), *three, ("c_0", 50, [])])
    edge = road.edge_index
    assert road.fork(0, (edge["b"],)) == 0 and road.fork(0, (edge["b"], edge["c"])) == 1


@pytest.mark.parametrize("persons, free", [(True, False), (False, True)])
def test_persons_who_walk_on_the_road_are_not_run_over(make, road, persons, free):
    """The shield sees vehicles only: "throttle" had 11 collisions with one person on a street without a pavement. Where
    nobody walks SUMO's check stays off."""
    walk = '<person id="p" depart="0" departPos="250"><walk edges="in out" arrivalPos="300"/></person>' * persons
    flow = '<flow id="f" begin="0" end="200" period="4" departSpeed="max"><route edges="in out"/></flow>'
    env = make(scenario=road(TWO, STREET, walk + flow), icv_share=1.0, max_commands=200)
    info = drive(env, "throttle", 100)
    assert info["collisions"] == 0 and bool((env.checked[env.observation["mask"] > 0] == 0).any()) == free


@pytest.mark.parametrize("lane, kind", [('index="0" changeLeft="emergency"', "passenger"),
                                        ('index="1" disallow="truck"', "truck")])
def test_no_order_to_a_lane_that_one_may_not_enter(make, road, lane, kind):
    """Beside a solid line, and of trucks to lanes closed for trucks, such orders cost 5 each and changed nothing."""
    street = (f'<edge id="in" from="a" to="b" numLanes="2" speed="20"><lane {lane}/></edge>'
              '<edge id="out" from="b" to="c" numLanes="2" speed="20"/>')
    flow = (f'<vType id="t" vClass="{kind}"/><flow id="f" type="t" begin="0" end="60" period="5" departLane="0">'
            '<route edges="in out"/></flow>')
    env = make(scenario=road(TWO, street, flow), icv_share=1.0)
    env.reset(seed=1)
    for _ in range(22):
        slots = np.flatnonzero(env.observation["icv"])[:5]
        *_, info = env.command(slots, np.full(len(slots), np.nan), np.full(len(slots), LEFT), np.zeros(len(slots)))
    there = np.flatnonzero(env.observation["mask"])
    assert len(there) > 3 and (env.lane_at[there] == env.road.lane_index["in_0"]).all() and env.totals.effort == 0
    if kind == "passenger":
        assert not env.observation["surround"][there, 10].any()  # no lane to the left
        assert env.road.has_lane(env.road.lane_index["in_1"], 0)  # the line is solid from one side only


def test_forks_behind_forks_are_quickly_decided():
    """Without memory the ways over 12 edges of three lanes, each of which leads to all of the next, took 10 s."""
    lanes = [(f"e{e}_{i}", 50, [(f"e{e + 1}_{j}", "") for j in range(3)] if e < 12 else []) for e in range(13)
             for i in range(3)]
    road, begin = Road(lanes), time.process_time()
    assert road.fork(0, tuple(road.edge_index[f"e{e}"] for e in range(1, 13))) == 0
    assert time.process_time() - begin < 1


def test_who_is_on_a_crossing_with_its_tail_is_left_alone(make, grid):
    """Told to change lanes right behind a crossing, a truck swung its tail into the next stream."""
    flow = ('<vType id="truck" vClass="truck" length="12"/><flow id="f" type="truck" begin="0" end="100" period="6">'
            '<route edges="A0B0 B0C0"/></flow>')
    env, seen = make(scenario=grid(flow, lanes=2), icv_share=1.0), set()
    env.reset(seed=1)
    for _ in range(80):
        slots = np.flatnonzero(env.observation["icv"])
        place = {int(s): env.road.lane_length[env.lane_at[s]] - env.way[s] for s in slots}
        on = {s for s in place if env.lane_at[s] in (env.road.lane_index["B0C0_0"], env.road.lane_index["B0C0_1"])}
        for s in on:
            side = LEFT if env.road.lane_number[env.lane_at[s]] == 0 else RIGHT
            commands, _ = env._commands([s], [np.nan], [side], [0])
            env.orders.forget([s])
            seen.add((place[s] < 12, bool(commands)))
        env.command([], [], [], [])
    assert {allowed for tail, allowed in seen if tail} == {False} and (False, True) in seen


def test_a_vehicle_on_another_lane_of_a_zipper_is_no_conflict():
    """Its gap, which is still to come, was below 0: a third of a calm zipper's conflicts were such cars."""
    scene = np.zeros(2, graph.SCENE)
    scene["length"], scene["speed"], scene["lead"] = 5.0, [10.0, 1.0], [1, -1]
    scene["lead_gap"], scene["lead_speed"] = [-1.2, 200], [1.0, 40]
    assert graph.conflicts(scene).tolist() == [True, False]
    scene["aside"][0] = True
    assert not graph.conflicts(scene).any()


def test_lower_speed_limits_ahead_are_kept(make, road):
    """Nobody saw them: 33 m/s fell by 1 m/s each second where 8 are allowed, and full throttle had 13 % more arrivals
    than drivers who keep to the law. SUMO's check, which sees them, stays on before them."""
    edges = STREET.replace('"b" speed="20"', '"b" speed="33"').replace('"c" speed="20"', '"c" speed="8"')
    flow = '<flow id="f" begin="0" end="90" period="6" departSpeed="max"><route edges="in out"/></flow>'
    env, speeds = make(scenario=road(TWO, edges, flow), icv_share=1.0, max_commands=200), []
    env.reset(seed=1)
    for _ in range(90):
        env.command(range(len(env.slots.names)), np.full(200, 2.0), np.full(200, 1), np.zeros(200))
        speeds += env.scene["speed"][np.array(env.lane) == env.road.lane_index["out_0"]].tolist()
    assert len(speeds) > 100 and max(speeds) < 1.3 * 8  # a driver's speedFactor
    assert np.isfinite(env.road.to_slower[env.road.lane_index["in_0"]])


def test_where_a_sign_may_lower_the_limit_sumos_check_stays_on(make, road):
    """From 25 to 0.5 m/s: SUMO's drivers look back for followers as far as the lane's limit tells them, and cut in
    before some who came at 19 m/s: 3 collisions in four minutes of "lanes"."""
    flow = '<flow id="f" begin="0" end="900" period="3" departLane="random"><route edges="in out"/></flow>'
    sign = '<variableSpeedSign id="v" lanes="out_0 out_1"><step time="0" speed="25"/></variableSpeedSign>'
    env = make(scenario=road(TWO, STREET.replace("speed=", 'numLanes="2" speed='), flow,
                             additional=f"<additional>{sign}</additional>"))
    env.reset(seed=1)
    crosses = env.road.crosses[[env.road.lane_index[name] for name in ("in_0", "in_1", "out_0", "out_1")]]
    assert crosses.tolist() == [False, False, True, True]
