"""Users' networks with lanes, turns and speed limits for some kinds of vehicles only, trains among them."""
import numpy as np
import pytest
from helpers import nobody

from env.lanes import restricted
from env.road import FREE_SPEED, Road, Traffic
from env.slots import Odometer
from env.tails import obstacles

LANES = [("a_0", 100, [("b_0", ":J_0_0")]), ("a_1", 100, [("b_1", ":J_0_1")]), (":J_0_0", 5, [("b_0", "")]),
         (":J_0_1", 5, [("b_1", "")]), ("b_0", 80, []), ("b_1", 80, [])]
BUSES = {"b_0": ["passenger", "truck"], ":J_0_0": ["passenger", "truck"]}  # what is barred there
NODES = '<node id="a" x="0" y="0"/><node id="x" x="500" y="0"/><node id="b" x="1000" y="0"/>'
ON = '<edge id="in" from="a" to="x" numLanes="2" speed="20"/><edge id="out" from="x" to="b" numLanes="2" speed="20">'
TRAFFIC = ('<vType id="bus" vClass="bus"/><flow id="b" type="bus" begin="0" end="90" period="30" departLane="0" '
           'departSpeed="max"><route edges="in out"/></flow><flow id="c" begin="0" end="90" period="10" departLane="1" '
           'departSpeed="max"><route edges="in out"/></flow>')


@pytest.mark.parametrize("kind, free", [("bus", True), ("passenger", False), ("truck", False)])
@pytest.mark.parametrize("shut", [["b_0", ":J_0_0"], [":J_0_0"]])
def test_a_way_ends_for_those_who_may_not_go_on(kind, free, shut):
    """A bus saw a wall where its own lane began, and stood there for ever. Of a turn for buses only, over which a lane
    leads that is open to all, nothing was seen: a car was stopped at its end at 33 m/s, and was hit."""
    barred = {lane: BUSES[lane] for lane in shut}
    road = Road(LANES, closed=shut, barred=barred)
    routes = np.array([-1, -1, road.edge_index["a"], road.edge_index["b"], -1, -1])
    one = Traffic(road, *(np.array([x]) for x in (road.lane_index["a_0"], 90.0, 10.0, 5.0, 2)), routes, 200.0,
                  views=[(road.leads(kind), np.array([True]))])
    seen = [x[0] for x in one.ahead(one.lane)]
    assert seen == ([-1, 200, FREE_SPEED] if free else [-1, 10, 0])
    assert [x[0] for x in one.ahead(one.lane + 1)] == [-1, 200, FREE_SPEED]


def test_each_sees_the_way_of_its_own_kind():
    """With the way of the other kind behind it, a bus stands, or a car is told to drive into a lane's end."""
    road = Road(LANES, closed=list(BUSES), barred=BUSES)
    routes = np.array([-1, -1, road.edge_index["a"], road.edge_index["b"], -1, -1])
    lane, bus = np.full(3, road.lane_index["a_0"]), np.array([False, True, False])
    three = Traffic(road, lane, np.array([20.0, 90.0, 50.0]), *np.full((2, 3), 5.0), np.full(3, 2), routes, 200.0,
                    views=[(road, ~bus), (road.leads("bus"), bus)])
    beside = [x.tolist() for x in three.ahead(lane)]
    assert beside == [[2, -1, 1], [25, 200, 35], [5, FREE_SPEED, 5]]
    assert road.leads("truck") is road and road.leads("passenger") is road and road.leads("bus") is not road


def test_tail_of_a_bus_that_goes_where_cars_may_not():
    """It turned into its own street: the link was not known, so that its tail was in nobody's way."""
    lanes = [*LANES[:2], ("c_0", 80, []), (":J_1_0", 5, [("c_0", "")]), *LANES[2:]]
    lanes[0] = ("a_0", 100, [("b_0", ":J_0_0"), ("c_0", ":J_1_0")])
    road = Road(lanes, closed=list(BUSES), barred=BUSES)
    routes = np.array([-1, -1, road.edge_index["a"], road.edge_index["b"], -1, -1])
    bus = Traffic(road, *(np.array([x]) for x in (road.lane_index[":J_0_0"], 4.0, 3.0, 12.0, 2)), routes, 200.0)
    found = [(j, lane, rear) for j, lane, rear, _ in obstacles(bus, np.array([road.lane_index["a_0"]]))]
    assert (0, road.lane_index["a_0"], 92.0) in found


@pytest.mark.parametrize("more, connections", [
    ('<lane index="0" allow="bus"/>', None),
    ("", '<connection from="in" to="out" fromLane="0" toLane="0" allow="bus"/>'
         '<connection from="in" to="out" fromLane="1" toLane="1"/>')])
def test_buses_drive_into_their_lane(drive, road, more, connections):
    """Told what the shield lets pass, every connected bus stopped before it."""
    env = drive(road(NODES, f"{ON}{more}</edge>", TRAFFIC, connections=connections), "env.icv_share=1",
                "env.horizon_s=120")
    walls = {b"b": set(), b"c": set()}
    for _ in range(60):
        env.command(*nobody(env))
        for name, vehicle, lane in zip(env.ids, env.scene, env.lane):
            if lane == env.road.lane_index["in_0"] and vehicle["lead"] < 0 and vehicle["lane_end"] < 100:
                walls[name[:1]].add(vehicle["lead_speed"] == 0)
    assert walls[b"b"] == {False} and walls[b"c"] <= {True}


@pytest.mark.parametrize("sublane, seen", [(True, [3, 3, 0, -1]), (False, [1, 3, 0, -1])])
def test_who_drives_beside_on_the_same_lane_is_not_followed(sublane, seen):
    """In the sublane model a bicycle beside a car was its leader, at a negative gap, and the car was braked hard."""
    road = Road(LANES, sublane=sublane)
    lane, routes = np.full(4, road.lane_index["b_0"]), np.array([-1, -1, road.edge_index["b"], -1, -1])
    four = Traffic(road, lane, np.array([20.0, 22.0, 9.0, 60.0]), np.full(4, 5.0), np.array([5.0, 5.0, 1.6, 5.0]),
                   np.full(4, 2), routes, 200.0)
    who, gap, _ = four.ahead(lane)
    assert who.tolist() == seen and (gap[who >= 0] > 0).all() == sublane
    assert gap[0] == (35 if sublane else -3)


def test_speed_limit_of_one_class_of_vehicles(drive, road, tmp_path):
    """A van's limit of 8 m/s behind a road of 25 was seen when it was there: it came at 25."""
    scenario = road(NODES, ON + "</edge>", TRAFFIC)
    net, slow = tmp_path / "net.xml", '<type id="slow"><restriction vClass="bus" speed="9"/></type><edge id="in" '
    assert restricted(net.read_bytes()) == {}
    text = net.read_text().replace('<edge id="in" ', slow, 1).replace('<edge id="out" ', '<edge id="out" type="slow" ')
    net.write_text(text)
    assert restricted(net.read_bytes()) == {"out": 9}
    network = drive(scenario).road
    assert network.to_slower[network.lane_index["in_0"]] < 1


def test_train_that_turns_back_has_not_driven_its_length():
    """SUMO's odometer jumped by 280 m in one second, which counted as progress."""
    odometer, one, known = Odometer(1), np.array([0]), np.array([False])
    odometer.read(np.array([500.0]), one, ~known, np.array([0.0]), known)
    way, total = odometer.read(np.array([781.0]), one, known, np.array([1.5]), known)
    assert way[0] == 1.5 and total[0] == 501.5
    way, total = odometer.read(np.array([789.0]), one, known, np.array([7.0]), known)
    assert way[0] == 8 and total[0] == 509.5
