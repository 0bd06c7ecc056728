"""env/tails.py and env/lanes.py: who is in the way on another lane, and which lanes lead on."""
import numpy as np
import pytest

from benchmarks.shield import wander
from configs import load_config
from env.lanes import links_of
from env.orders import Orders
from env.road import FREE_SPEED, Road
from test_road import Scene

FORK = [(":J_0_0", 5, [("b_0", "")]), (":J_0_1", 5, [("b_1", "")]),
        ("a_0", 100, [("b_0", ":J_0_0"), ("b_1", ":J_0_1")]), ("b_0", 80, [("d_0", "")]), ("b_1", 80, [("c_0", "")]),
        ("c_0", 100, []), ("d_0", 100, [])]


@pytest.mark.parametrize("route, leader", [(("a", "b", "c"), "b_1"), (("a", "b", "d"), "b_0"), (("a", "b"), "b_0")])
def test_where_one_lane_becomes_two_the_one_that_leads_on_is_followed(route, leader):
    """Always the first was: its end was a wall to those of another way, and their leader on the second not there."""
    alone = Scene([("a_0", 90, 10, 5, 0, 0)], lanes=FORK, routes=(route,))
    assert [x[0] for x in alone.traffic.ahead(alone.lane)] == [-1, 200, FREE_SPEED]
    two = Scene([("a_0", 90, 10, 5, 0, 0), (leader, 10, 3, 5, 0, 1)], lanes=FORK, routes=(route,))
    assert [x[0] for x in two.traffic.ahead(two.lane)] == [1, 10 + 5 + 10 - 5, 3]


def test_pavements_lead_nowhere():
    """The way out of a two-way road went over them, so that oncoming traffic was "ahead"."""
    known = {"b_0", ":J_w0_0", ":J_c1_0", ":J_0_0"}
    assert links_of("a_0", [("b_0", ":J_0_0"), (":J_w0_0", "")], known) == [("b_0", ":J_0_0")]
    assert links_of(":J_w0_0", [("b_0", "")], known) == links_of(":J_c1_0", [(":J_w0_0", "")], known) == []
    lanes = [("e_0", 500, [(":X_w0_0", "")]), ("-e_0", 500, [(":Y_w0_0", "")]),
             (":X_w0_0", 2, [("-e_0", "")]), (":Y_w0_0", 2, [("e_0", "")])]
    assert Road(lanes).extent == 500


def test_pavements_are_no_lanes_to_change_to():
    """A car on a one-lane road was told to change to the pavement, every second, and it was charged."""
    lanes = [("e_0", 100, []), ("e_1", 100, []), ("e_2", 100, []), ("f_0", 100, []), ("f_1", 100, [])]
    road = Road(lanes, closed=["e_0", "f_0"])
    assert road.driving_number.tolist() == [0, 0, 1, 0, 0] and road.lane_number.tolist() == [0, 1, 2, 0, 1]
    assert road.beside[-1][np.arange(5)].tolist() == [-1, -1, 1, -1, -1]
    assert road.beside[1][np.arange(5)].tolist() == [-1, 2, -1, -1, -1]
    assert [road.has_lane(1, number) for number in (-1, 0, 1, 2, 3)] == [False, False, True, True, False]


@pytest.mark.parametrize("speed, leader", [(9.5, 1), (0.0, 2)])
def test_who_stands_is_not_hidden_by_who_drives_past(speed, leader):
    """Vehicle 1 stands on the junction, 2 on the lane that joins it is a little nearer. The shield drove into 1."""
    scene = Scene([("a_0", 97, 2, 5, 0, 0), (":J_0_0", 4, 0, 3, 0, 0), (":J_2_0", 5.9, speed, 5, 2, 0)],
                  came=["", "", ""])
    assert scene.traffic.ahead(scene.lane)[0][0] == leader


@pytest.mark.parametrize("route", [0, 1])
def test_who_arrives_at_a_lanes_end_sees_the_tail_there(route):
    """Who drives on looks beyond the end; whose route ends there saw nobody, was told to accelerate and hit the tail of
    one who was turning slowly."""
    lanes = [(":J_0_0", 3, [("b_0", "")]), ("a_0", 100, [("b_0", ":J_0_0")]), ("b_0", 80, [])]
    both, routes = [("a_0", 88, 8, 5, route, 0), (":J_0_0", 1.5, 3, 5, 1, 0)], (("a",), ("a", "b"))
    scene = Scene(both, lanes=lanes, routes=routes, came=["", "a_0"])
    assert [x[0] for x in scene.traffic.ahead(scene.lane)] == [1, pytest.approx(100 + 1.5 - 5 - 88), 3]


def stand(road, slots, interval=1.0, shield=True):
    """Orders that stand 4.5 s."""
    cfg = load_config("configs/smoke.yaml")
    cfg.env.max_vehicles, cfg.env.control_interval, cfg.shield.enabled = slots, interval, shield
    return Orders(road, cfg)


@pytest.mark.parametrize("number, way, may", [(0, 70, False), (0, 90, True), (1, 5, True)])
def test_no_order_to_a_lane_that_ends_before_one_could_stop(number, way, may):
    """At 10 m/s an order of 4.5 s lasts 45 m, and to stop takes 36 m more. Lane 1 leads on to the route's next edge."""
    road = Road([("a_0", 100, []), ("a_1", 100, [("b_0", "")]), ("b_0", 50, [])])
    orders = stand(road, 1)
    by_slot = np.array([road.lane_index["a_1"]]), np.array([way]), np.array([10.0])
    assert orders.give(0, number, road.edge_index["b"], *by_slot, now=0.0) == may
    assert orders.give(0, number, -1, *by_slot, now=9.0)  # the route ends on this edge
    assert stand(road, 1, shield=False).give(0, number, road.edge_index["b"], *by_slot, now=0.0)


@pytest.mark.parametrize("way, shield, lasts", [(90, True, 4.5), (22.5, True, 1.78), (0, True, 0), (22.5, False, 4.5)])
def test_an_order_ends_before_a_crossing(way, shield, lasts):
    """SUMO carried orders out on the junction, and drove one into a car that waited there to turn: 1 in 108,000
    vehicle-steps of "wander" on a grid with traffic lights. With 3 m/s^2 22.5 m take 1.78 s from 10 m/s on, at the end
    of which it drives 15.3 m/s."""
    road = Road([("a_0", 100, [("b_0", ":x_0")]), ("a_1", 100, [("b_1", ":x_1")]), (":x_0", 20, [("b_0", "")]),
                 (":x_1", 20, [("b_1", "")]), ("b_0", 50, []), ("b_1", 50, [])], crossing=[":x_0", ":x_1"])
    orders, by_slot = stand(road, 1, shield=shield), [np.array([x]) for x in (road.lane_index["a_0"], way, 10.0)]
    assert orders.give(0, 1, -1, *by_slot, now=3.0)
    assert orders.until[0] - 3.0 == pytest.approx(lasts, abs=0.01)


def test_of_two_abreast_only_one_is_ordered_to_the_lane_between():
    """Both came there at once, one behind the other, and the one behind had been told to accelerate: SUMO counted a
    collision in 230,000 vehicle-steps of the adversary "erratic"."""
    road = Road([(f"a_{i}", 100, []) for i in range(3)] + [("b_0", 100, [])])
    lane, way, speed = np.array([0, 2, 2, 0]), np.array([50.0, 40.0, 20.0, 45.0]), np.zeros(4)

    def give(slot, now):
        return orders.give(slot, 1, -1, lane, way, speed, now)
    orders = stand(road, 4)
    assert give(0, 0.0) and not give(1, 1.0) and give(2, 1.0)  # the third is far away
    assert give(3, 1.0)  # follows the first
    assert give(1, 6.0)  # both orders have ended
    lane[1] = 3  # it has driven on
    assert give(0, 7.0)
    lane[1] = 1
    orders.forget([0])  # its own order stands
    assert give(0, 8.0)  # the other is there, where everybody sees it


@pytest.mark.parametrize("interval, again", [
    (1.0, [0, 4, 8]), (0.5, [0, 4.5, 9]), (3.0, [0, 3, 6, 9]), (5.0, [0, 5, 10])])
def test_an_order_that_stands_is_not_given_again(interval, again):
    """It was sent, and counted in C_int, in every second until the driver had found a gap. Between two orders none is
    missing: it is told again before it ends."""
    road = Road([(f"a_{i}", 100, []) for i in range(3)] + [("b_0", 100, [])])
    by_slot = np.array([0, 1]), np.array([50.0, 50.0]), np.zeros(2)
    for shield in (True, False):
        orders = stand(road, 2, interval, shield)
        assert [t for t in np.arange(0, 11, interval) if orders.give(0, 1, -1, *by_slot, now=t)] == again
    orders = stand(road, 2)
    assert [orders.give(1, number, -1, *by_slot, now=0.0) for number in (2, 2, 0, 2)] == [True, False, True, True]
    orders.forget([1])
    assert orders.give(1, 2, -1, *by_slot, now=0.0)  # another vehicle


def test_orders_at_the_end_of_the_acceleration_lane_are_ignored(make):
    """A vehicle told to move there half a metre before its end stood still at once, in front of another: SUMO counted a
    collision in one of 24 episodes of the adversary "wander"."""
    env = make(icv_share=0.25, max_vehicles=320, horizon_s=110.0, max_commands=320)
    observation, rng = env.reset(seed=4)[0], np.random.default_rng(4)
    done, refused, give = False, [], env.orders.give

    def noted(slot, number, following, lane, way, speed, now):
        place = env.ids.index(env.slots.names[slot])
        assert now == env.time and way[slot] == pytest.approx(env.scene["lane_end"][place])
        refused.extend([] if (given := give(slot, number, following, lane, way, speed, now)) else [way[slot]])
        return given
    env.orders.give = noted
    while not done:
        observation, _, terminated, done, _ = env.command(*wander(observation, 320, rng))
    assert env.totals.collisions == 0 and len(refused) > 20 and min(refused) < 20


@pytest.mark.parametrize("route", [0, 1])
def test_a_tail_that_turns_elsewhere_is_in_the_way(route):
    """Of a bus turning left, whose rear still stands on the lane that others leave straight on."""
    scene = Scene([("a_1", 80, 10, 5, route, 0), (":J_1_0", 5, 1, 12, 1, 0)], came=["", "a_1"])
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert (who[0], gap[0], speed[0]) == (1, pytest.approx(13), 1) and np.isfinite(gap).all()


def test_a_tail_on_the_other_way_of_a_fork_is_in_the_way():
    """Where one lane becomes two of the same edge: who went to one was not seen by who followed to the other."""
    scene = Scene([("a_0", 90, 5, 5, 1, 0), (":J_0_0", 2, 0, 5, 0, 0)], lanes=FORK, came=["", "a_0"],
                  routes=(("a", "b", "d"), ("a", "b", "c")))
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert (who[0], gap[0], speed[0]) == (1, 10 + 2 - 5, 0)


def test_a_long_tail_is_in_the_way_on_all_lanes_that_it_is_on():
    """Beyond the lane that it came from, here a turning lane of 4 m, it was not seen by who turns elsewhere."""
    lanes = [(":J_0_0", 5, [("s_0", "")]), (":J_0_1", 5, [("s_1", "")]), (":K_0_0", 6, [("b_0", "")]),
             (":K_1_0", 6, [("c_0", "")]), ("a_0", 100, [("s_0", ":J_0_0"), ("s_1", ":J_0_1")]),
             ("s_0", 4, [("b_0", ":K_0_0")]), ("s_1", 4, [("c_0", ":K_1_0")]), ("b_0", 80, []), ("c_0", 80, [])]
    scene = Scene([("a_0", 90, 5, 5, 0, 0), (":K_1_0", 1, 2, 12, 1, 1)], lanes=lanes, came=["", "s_1"],
                  routes=(("a", "s", "b"), ("a", "s", "c")))
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert (who[0], gap[0], speed[0]) == (1, 8, 2)  # its rear is 2 m before the end of a_0
