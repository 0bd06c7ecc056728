"""env/road.py: static facts, leaders and followers against naive loops over a small hand-made network."""

import numpy as np
import pytest

from env import graph
from env.road import FREE_SPEED, Road, Traffic
from env.tails import unforeseen

# a (two lanes) leads to b by both lanes and to c by its left lane (a diverge); the ramp m joins b; the left lane of b
# ends, its right lane leads to d. Names with ":" are junction lanes. m_0 comes last: index -1 must never stand for it.
LANES = [(":J_0_0", 5, [("b_0", "")]), (":J_0_1", 5, [("b_1", "")]), (":J_1_0", 8, [("c_0", "")]),
         (":J_2_0", 6, [("b_0", "")]), (":K_0_0", 4, [("d_0", "")]),
         ("a_0", 100, [("b_0", ":J_0_0")]), ("a_1", 100, [("b_1", ":J_0_1"), ("c_0", ":J_1_0")]),
         ("b_0", 80, [("d_0", ":K_0_0")]), ("b_1", 80, []), ("c_0", 60, []), ("d_0", 120, []),
         ("m_0", 50, [("b_0", ":J_2_0")])]
ROUTES = (("a", "b", "d"), ("a", "c"), ("m", "b", "d"))
# (lane, route, place in the route) where a vehicle can be; on a junction lane the route points at the edge before it.
PLACES = [("a_0", 0, 0), ("a_1", 0, 0), ("a_0", 1, 0), ("a_1", 1, 0), ("b_0", 0, 1), ("b_1", 0, 1), ("b_0", 2, 1),
          ("c_0", 1, 1), ("d_0", 0, 2), ("d_0", 2, 2), ("m_0", 2, 0), (":J_0_0", 0, 0), (":J_0_1", 0, 0),
          (":J_1_0", 1, 0), (":J_2_0", 2, 0), (":K_0_0", 0, 1), (":K_0_0", 2, 1)]
MARGIN = 12.0  # longest vehicle, m: so near to the lookahead "nobody there" is right as well
LENGTH = {lane: metres for lane, metres, _ in LANES}
LINKS = {lane: links for lane, _, links in LANES}


def edge(lane):
    return lane.rpartition("_")[0]


class Scene:
    """Vehicles [(lane, pos, speed, length, route, place in the route)] and the Traffic that product code builds."""

    def __init__(self, vehicles, lookahead=200.0, lanes=LANES, routes=ROUTES, came=None):
        self.vehicles, self.routes, self.road, self.lookahead = vehicles, routes, Road(lanes), lookahead
        flat, start = [-1, -1], []
        for route in routes:
            start.append(len(flat))
            flat += [self.road.edge_index[name] for name in route] + [-1, -1]
        column = list(zip(*vehicles)) or [()] * 6
        self.lane = np.array([self.road.lane_index[name] for name in column[0]], int)
        at = np.array([start[r] + place for r, place in zip(column[4], column[5])], int)
        pos, speed, length = (np.array(column[i], float) for i in (1, 2, 3))
        came = came and np.array([self.road.lane_index.get(name, -1) for name in came])
        self.traffic = Traffic(self.road, self.lane, pos, speed, length, at, np.array(flat), lookahead, came)

    def side(self, side):
        """Lane index beside each vehicle: 0 own, 1 left, -1 right."""
        return self.lane if side == 0 else self.road.beside[side][self.lane]


def random_vehicles(rng, count):
    picks = [PLACES[i] for i in rng.integers(0, len(PLACES), count)]
    return [(lane, rng.uniform(0, LENGTH[lane]), rng.uniform(0, 30), rng.uniform(3, 12), route, place)
            for lane, route, place in picks]


def naive_ahead(scene, i, lane):
    """(index or -1, gap, speed) by walking lane by lane."""
    _, pos, _, _, route, place = scene.vehicles[i]
    on = lambda name: [(v[1], j) for j, v in enumerate(scene.vehicles) if v[0] == name]  # noqa: E731
    in_front = [(p, j) for p, j in on(lane) if p > pos]
    travelled = -pos
    for _ in range(100):
        if in_front:
            p, j = min(in_front)
            return j, travelled + p - scene.vehicles[j][3], scene.vehicles[j][2]
        travelled += LENGTH[lane]
        wanted = scene.routes[route][place + 1:place + 2]
        if not wanted:
            return -1, scene.lookahead, FREE_SPEED  # the route ends here
        ways = [via or following for following, via in LINKS[lane] if edge(following) == wanted[0]]
        if not ways:
            return -1, travelled, 0.0  # the lane does not lead on: a wall
        lane = ways[0]
        place += not lane.startswith(":")
        in_front = on(lane)
    raise AssertionError("the hand-made network is shorter than that")


def naive_behind(scene, i, lane):
    """(gap, speed) of the nearest vehicle behind, on the lane itself or on any lane that leads to it."""
    _, pos, _, length, _, _ = scene.vehicles[i]
    same = [(pos - length - v[1], v[2]) for v in scene.vehicles if v[0] == lane and v[1] < pos]
    if same:
        return min(same)
    found, todo = [], [(lane, 0.0)]
    while todo:
        current, between = todo.pop()
        for before in (name for name, _, links in LANES if current in [via or to for to, via in links]):
            found += [(pos - length + between + LENGTH[before] - v[1], v[2])
                      for j, v in enumerate(scene.vehicles) if v[0] == before and j != i]
            todo.append((before, between + LENGTH[before]))
    return min(found, default=(scene.lookahead, 0.0))


# ---- static facts ----------------------------------------------------------------------------------------------

def test_links_follow_junction_lanes_and_diverge():
    road = Road(LANES)
    name = {index: lane for lane, index in road.lane_index.items()}
    edges = {index: e for e, index in road.edge_index.items()}
    links = {lane: {(name[n], edges[e]) for n, e in zip(road.link_lane[i], road.link_edge[i]) if n >= 0}
             for lane, i in road.lane_index.items()}
    assert links["a_0"] == {(":J_0_0", "b")}
    assert links["a_1"] == {(":J_0_1", "b"), (":J_1_0", "c")}
    assert links[":J_1_0"] == {("c_0", "c")}
    assert links["b_1"] == links["c_0"] == set()
    assert [lane for lane, i in road.lane_index.items() if road.internal[i]] == [lane for lane, _, _ in LANES[:5]]


def test_coordinate_is_the_distance_to_the_nearest_exit():
    road = Road(LANES)
    # Metres to the exit: d 120, b 80 + 4 + 120 (its ending lane by moving right), a by c (100 + 8 + 60), m 50 + 6 + b.
    remaining = {"d_0": 120, "b_0": 204, "b_1": 204, "c_0": 60, "a_0": 168, "a_1": 168, "m_0": 260, ":J_2_0": 210}
    assert road.extent == 260
    for lane, metres in remaining.items():
        assert road.coordinate[road.lane_index[lane]] == 260 - metres, lane


def test_neighbour_lanes():
    road = Road(LANES)
    lanes = np.arange(len(LANES))
    name = [lane for lane, _, _ in LANES] + ["none"]
    left = dict(zip(name, (name[i] for i in road.beside[1][lanes])))
    right = dict(zip(name, (name[i] for i in road.beside[-1][lanes])))
    assert left.pop("a_0") == "a_1" and left.pop("b_0") == "b_1"
    assert right.pop("a_1") == "a_0" and right.pop("b_1") == "b_0"
    # :J_0_0 and :J_0_1 lie side by side, but nobody changes lane inside a junction.
    assert {*left.values(), *right.values()} == {"none"}


def test_crossings_are_near_from_where_one_may_not_stop_any_more():
    road = Road(LANES, crossing=[":J_1_0"])
    scene = np.zeros(5, graph.SCENE)
    lane = np.array([road.lane_index[name] for name in (":J_1_0", "a_1", "a_1", "a_0", "d_0")])
    scene["speed"], scene["lane_end"] = 18.0, [3, 18 ** 2 / 9 + 36 + 4.9, 18 ** 2 / 9 + 36 + 5.1, 1, 1]
    assert unforeseen(road, lane, scene, 0, 0, 200.0).tolist() == [True, True, False, False, False]


def test_who_needs_more_room_than_the_shield_looks_ahead_keeps_sumos_check():
    """At 62 m/s ICVs ran into standing ones, which came into sight 200 m ahead."""
    road, scene = Road(LANES), np.zeros(2, graph.SCENE)
    scene["speed"], scene["lane_end"] = [51, 53], 1000.0
    assert unforeseen(road, np.full(2, road.lane_index["a_0"]), scene, 0, 0, 200.0).tolist() == [False, True]


def test_way_of_a_car_ends_where_a_bus_lane_begins():
    """It was seen to lead on, so that nobody was seen ahead; then the driver stood still at once, and was hit."""
    road = Road(LANES, closed=["b_0"])
    assert (road.link_lane[road.lane_index["a_0"]] < 0).all()
    assert road.link_edge[road.lane_index["a_1"]].max() >= 0
    assert (Road(LANES, closed=["a_0", "b_0"]).link_lane[road.lane_index["a_0"]] >= 0).any()  # a bus's way


def test_crossings_behind_short_lanes_are_near_too():
    """Only those at the end of the own lane were: an ICV came through a short turning lane at full speed, unchecked."""
    road = Road(LANES, crossing=[":K_0_0"])
    way = {name: road.to_crossing[road.lane_index[name]] for name in ("b_0", ":J_0_0", "a_0", "m_0", "a_1", "d_0")}
    assert way == {"b_0": 0, ":J_0_0": 80, "a_0": 85, "m_0": 86, "a_1": np.inf, "d_0": np.inf}
    scene = np.zeros(2, graph.SCENE)
    scene["speed"], scene["lane_end"] = 30.0, [30 ** 2 / 9 + 65 - 85.1, 30 ** 2 / 9 + 65 - 84.9]
    assert unforeseen(road, np.full(2, road.lane_index["a_0"]), scene, 0, 0, 200.0).tolist() == [True, False]


def ring(quarters=4, metres=50, gap=1):
    """A closed network: edges q0, q1, ... of one lane, joined by junction lanes."""
    lanes = [(f":n{q}_0_0", gap, [(f"q{q}_0", "")]) for q in range(quarters)]
    return lanes + [(f"q{q}_0", metres, [(f"q{(q + 1) % quarters}_0", f":n{(q + 1) % quarters}_0_0")])
                    for q in range(quarters)]


def test_coordinate_of_a_closed_network_grows_around_the_ring_with_one_cut():
    road = Road(ring())
    assert road.extent == pytest.approx(4 * 51)
    place, jumps = 0, []
    for _ in range(8):
        following = road.link_lane[place, 0]
        step = road.coordinate[following] - road.coordinate[place] - road.lane_length[place]
        jumps += [step] if abs(step) > 1e-9 else []
        place = following
    assert jumps == [pytest.approx(-4 * 51)]


# ---- leaders and followers --------------------------------------------------------------------------------------

@pytest.mark.parametrize("lookahead", [60.0, 200.0])
@pytest.mark.parametrize("seed", range(12))
def test_ahead_equals_a_walk_along_the_lanes(seed, lookahead):
    rng = np.random.default_rng(seed)
    scene = Scene(random_vehicles(rng, int(rng.integers(1, 40))), lookahead)
    for side in (0, 1, -1):
        lanes = scene.side(side)
        who, gap, speed = scene.traffic.ahead(lanes)
        for i in np.flatnonzero(lanes >= 0):
            j, metres, v = naive_ahead(scene, i, LANES[lanes[i]][0])
            if metres < lookahead - MARGIN:
                assert (who[i], gap[i], speed[i]) == (j, pytest.approx(metres), v), (side, scene.vehicles[i])
            else:
                assert lookahead - MARGIN <= gap[i] <= lookahead


@pytest.mark.parametrize("lookahead", [60.0, 200.0])
@pytest.mark.parametrize("seed", range(12))
def test_behind_equals_a_search_over_all_lanes_that_lead_here(seed, lookahead):
    rng = np.random.default_rng(100 + seed)
    scene = Scene(random_vehicles(rng, int(rng.integers(1, 40))), lookahead)
    for side in (0, 1, -1):
        lanes = scene.side(side)
        gap, speed = scene.traffic.behind(lanes)
        for i in np.flatnonzero(lanes >= 0):
            metres, v = naive_behind(scene, i, LANES[lanes[i]][0])
            if metres < lookahead - MARGIN:
                assert (gap[i], speed[i]) == (pytest.approx(metres), v), (side, scene.vehicles[i])
            else:
                assert gap[i] >= lookahead - MARGIN


def test_leader_across_a_junction_lane():
    scene = Scene([("a_0", 90, 20, 5, 0, 0), ("b_0", 30, 8, 4, 0, 1)])
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert (who[0], gap[0], speed[0]) == (1, 10 + 5 + 30 - 4, 8)


def test_leader_on_the_junction_lane_whose_tail_is_still_on_the_lane_before():
    scene = Scene([("a_0", 98, 20, 5, 0, 0), (":J_0_0", 2, 3, 12, 0, 0)])
    who, gap, _ = scene.traffic.ahead(scene.lane)
    assert who[0] == 1 and gap[0] == 2 + 2 - 12


def test_each_vehicle_follows_its_own_route_at_a_diverge():
    scene = Scene([("a_1", 90, 20, 5, 0, 0), ("a_1", 95, 21, 5, 1, 0),
                   ("b_1", 10, 7, 5, 0, 1), ("c_0", 10, 9, 5, 1, 1)])
    who, _, speed = scene.traffic.ahead(scene.lane)
    assert who[0] == 1
    assert (who[1], speed[1]) == (3, 9)
    alone = Scene([scene.vehicles[0], *scene.vehicles[2:]])
    who, gap, speed = alone.traffic.ahead(alone.lane)
    assert (who[0], gap[0], speed[0]) == (1, 10 + 5 + 10 - 5, 7)


def test_dead_end_lane_is_a_standing_obstacle():
    scene = Scene([("b_1", 30, 20, 5, 0, 1), ("a_0", 70, 20, 5, 1, 0)])
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert who.tolist() == [-1, -1] and speed.tolist() == [0, 0]
    assert gap.tolist() == [50, 30]  # the second is on a lane that does not lead to its route's next edge


@pytest.mark.parametrize("lane, route, place", [("d_0", 0, 2), ("c_0", 1, 1)])
def test_nobody_is_ahead_where_the_route_ends(lane, route, place):
    """The -1 that ends a route matched the -1 that pads the links of a lane without successors: vehicles near their
    exit followed the first vehicle of the network's last lane, hundreds of metres away."""
    scene = Scene([(lane, 50, 20, 5, route, place), ("m_0", 25, 3, 5, 2, 0)])
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert (who[0], gap[0], speed[0]) == (-1, 200, FREE_SPEED)


def test_two_vehicles_exactly_abreast_see_each_other_from_the_next_lane():
    """Equal positions were neither ahead nor behind: a lane change into the vehicle beside looked free."""
    scene = Scene([("a_0", 50, 20, 5, 0, 0), ("a_1", 50, 15, 5, 1, 0)])
    left = scene.side(1)
    _, gap, _ = scene.traffic.ahead(left)
    rear_gap, _ = scene.traffic.behind(left)
    assert min(gap[0], rear_gap[0]) < 0


def test_nobody_follows_itself_around_a_ring():
    lanes = ring()
    scene = Scene([("q1_0", 10, 5, 5, 0, 1)], 300.0, lanes, [tuple(f"q{i % 4}" for i in range(12))])
    who, _, speed = scene.traffic.ahead(scene.lane)
    gap, _ = scene.traffic.behind(scene.lane)
    assert (who[0], speed[0]) == (-1, FREE_SPEED) and gap[0] == 300


def test_gaps_and_lengths_add_up_around_a_ring():
    lanes, rng = ring(), np.random.default_rng(0)
    laps = [tuple(f"q{(start + i) % 4}" for i in range(12)) for start in range(4)]
    vehicles = [(f"q{q}_0", pos, 5.0, 5.0, q, 0) for q in range(4) for pos in np.sort(rng.uniform(0, 50, 3))]
    scene = Scene(vehicles, 200.0, lanes, laps)
    who, gap, _ = scene.traffic.ahead(scene.lane)
    assert sorted(who) == list(range(12))
    assert (gap + 5).sum() == pytest.approx(4 * 51)
    assert sorted(scene.traffic.behind(scene.lane)[0]) == pytest.approx(sorted(gap))


def test_leader_beyond_the_lookahead_is_nobody():
    """On the own lane a vehicle 900 m ahead was reported as one at the end of the lookahead, with its own speed."""
    scene = Scene([("x_0", 50, 20, 5, 0, 0), ("x_0", 955, 3, 5, 0, 0)], 200.0, [("x_0", 1000, [])], [("x",)])
    who, gap, speed = scene.traffic.ahead(scene.lane)
    assert (who[0], gap[0], speed[0]) == (-1, 200, FREE_SPEED)
    rear_gap, rear_speed = scene.traffic.behind(scene.lane)
    assert (rear_gap[1], rear_speed[1]) == (200, 0)


def test_followers_are_searched_as_far_as_leaders():
    """Followers were searched over 200 m of lanes, whatever `graph.lookahead_m` said."""
    lanes = [(f"s{i}_0", 150, [(f"s{i + 1}_0", "")] if i < 4 else []) for i in range(5)]
    route = ("s0", "s1", "s2", "s3", "s4")
    scene = Scene([("s4_0", 10, 9, 5, 0, 4), ("s1_0", 100, 20, 5, 0, 1)], 500.0, lanes, [route])
    metres = 50 + 150 + 150 + 10 - 5
    who, gap, _ = scene.traffic.ahead(scene.lane)
    assert (who[1], gap[1]) == (0, metres)
    gap, speed = scene.traffic.behind(scene.lane)
    assert (gap[0], speed[0]) == (metres, 20)


@pytest.mark.parametrize("seed", range(5))
def test_merging_counts_the_vehicles_on_edges_that_join(seed):
    rng = np.random.default_rng(seed)
    scene = Scene(random_vehicles(rng, 25))
    distance, waiting = scene.traffic.merging()
    joins = {"a": "m", "m": "a"}  # both lead to b; c, b and d are entered from one edge only
    for i, (lane, pos, *_) in enumerate(scene.vehicles):
        other = joins.get(edge(lane))
        assert waiting[i] == sum(edge(v[0]) == other for v in scene.vehicles)
        assert distance[i] == pytest.approx(LENGTH[lane] - pos if other else 500.0)


def test_no_vehicles():
    scene = Scene([])
    assert [len(x) for x in (*scene.traffic.ahead(scene.lane), *scene.traffic.behind(scene.lane))] == [0] * 5
    assert [len(x) for x in scene.traffic.merging()] == [0, 0]
    assert graph.surround_features(scene.traffic, np.zeros(0, graph.SCENE)).shape == (0, len(graph.SURROUND))


def test_surround_features_hold_leaders_and_show_missing_lanes_as_zero():
    scene = Scene([("a_0", 40, 20, 5, 0, 0), ("a_0", 80, 10, 5, 0, 0),
                   ("a_1", 60, 12, 5, 1, 0), ("a_1", 20, 9, 5, 1, 0)])
    facts = np.zeros(4, graph.SCENE)
    out = {name: value for name, value in zip(graph.SURROUND, graph.surround_features(scene.traffic, facts).T)}
    assert (facts["lead"][0], facts["lead_gap"][0], facts["lead_speed"][0]) == (1, 35, 10)
    assert [out[name][0] for name in graph.SURROUND[:6]] == [35, 10, 15, 12, 15, 9]
    assert out["has_left"].tolist() == [1, 1, 0, 0] and out["has_right"].tolist() == [0, 0, 1, 1]
    assert [out[name][0] for name in graph.SURROUND[6:10]] == [0] * 4
    assert out["merge_distance"][0] == 60 and out["merge_vehicles"][0] == 0


def test_surround_features_are_bounded():
    lanes = [("x_0", 90_000, []), ("x_1", 90_000, [])]
    vehicles = [(f"x_{i % 2}", pos, 30.0, 20.0, 0, 0) for i, pos in enumerate(np.linspace(1, 80_000, 30))]
    scene = Scene(vehicles, 1000.0, lanes, [("x",)])
    half = graph.surround_features(scene.traffic, np.zeros(30, graph.SCENE)).astype(np.float16)
    assert np.isfinite(half).all() and np.abs(half).max() <= 1000


# ---- tails -------------------------------------------------------------------------------------------------------

FROM_RAMP = [("b_1", 2.0, 3.0, 6.0, 2, 1), (":J_2_0", 1.0, 5.0, 4.0, 2, 0), ("m_0", 45.0, 6.0, 4.0, 2, 0),
             ("a_0", 95.0, 7.0, 4.0, 0, 0), ("b_0", 30.0, 8.0, 4.0, 0, 1)]


@pytest.mark.parametrize("came", [":J_2_0", "m_0"])
def test_tail_of_who_changed_lanes_behind_a_junction_is_in_front(came):
    """From the ramp onto b_0 and at once to b_1, with the rear end still 4 m before the end of the junction lane: who
    came behind saw an empty road, and drove into it."""
    traffic = Scene(FROM_RAMP, came=[came, "m_0", "", "", "a_0"]).traffic
    who, gap, speed = traffic.ahead(traffic.lane)
    assert who.tolist() == [-1, 0, 1, 1, -1]
    np.testing.assert_allclose(gap[:3], [78.0, 6 + 2 - 6 - 1.0, 5 + 1.0 - 4])
    assert speed[1] == 3.0
    alone = Scene([FROM_RAMP[0], *FROM_RAMP[2:]], came=[came, "", "", "a_0"]).traffic  # nobody in between
    who, gap, _ = alone.ahead(alone.lane)
    assert who.tolist() == [-1, 0, 3, -1] and gap[1] == pytest.approx(50 - 45 + 6 + 2 - 6)


@pytest.mark.parametrize("came", [["", "m_0", "", "", "a_0"], ["a_1", "m_0", "", "", "a_0"],
                                  ["c_0", "m_0", "", "", "a_0"]])
def test_tail_is_on_no_other_lane(came):
    """Unknown, in the lane that leads to its own, or from nowhere near."""
    traffic = Scene(FROM_RAMP, came=came).traffic
    assert 0 not in [owner for owner, *_ in traffic.obstacles]
    assert traffic.ahead(traffic.lane)[0].tolist() == [-1, 4, 1, 1, -1]


def test_vehicle_that_has_passed_has_no_tail():
    traffic = Scene([("b_1", 6.5, 3.0, 6.0, 2, 1), *FROM_RAMP[1:]], came=[":J_2_0", "m_0", "", "", "a_0"]).traffic
    assert 0 not in [owner for owner, *_ in traffic.obstacles]


# ---- junction lanes that meet ------------------------------------------------------------------------------------

def test_who_is_nearer_to_the_point_where_junction_lanes_meet_is_in_front():
    """:J_0_0 (5 m, from a) and :J_2_0 (6 m, from the ramp) both end where b_0 begins: with SUMO's right of way alone,
    an ICV drove into the side of one on the other lane."""
    vehicles = [(":J_0_0", 4.0, 3.0, 4.0, 0, 0), (":J_2_0", 2.0, 5.0, 4.0, 2, 0), ("m_0", 40.0, 6.0, 4.0, 2, 0),
                ("a_0", 90.0, 7.0, 4.0, 0, 0), ("b_0", 70.0, 8.0, 4.0, 0, 1), ("a_1", 95.0, 9.0, 4.0, 1, 0)]
    traffic = Scene(vehicles, came=[""] * 6).traffic
    who, gap, speed = traffic.ahead(traffic.lane)
    assert who.tolist() == [4, 0, 1, 1, -1, -1]  # to c, over another junction lane, nobody is in the way
    np.testing.assert_allclose(gap[1:4], [(6 - 2) - (5 - 4) - 4, 50 - 40 + 2 - 4, 100 - 90 + 5 - (6 - 2) - 4])
    assert speed[1] == 3.0 and sorted(traffic.road.met_by) == sorted(traffic.road.lane_index[n] for n in (
        ":J_0_0", ":J_2_0"))
