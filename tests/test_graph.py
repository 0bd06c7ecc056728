"""env/graph.py: the neighbour graph against a naive loop, and the bounds of all features."""
import math

import numpy as np
import pytest

from env import graph


# ---- the neighbour graph ----------------------------------------------------------------------------------------

def random_scene(rng, n):
    scene = np.zeros(n, graph.SCENE)
    for name, low, high in (("x", 0, 400), ("y", 0, 30), ("angle", 0, 360), ("speed", 0, 30), ("length", 3, 12),
                            ("lead_gap", -3, 200), ("accel", -9, 3)):
        scene[name] = rng.uniform(low, high, n)
    others = [[j for j in range(n) if j != i] for i in range(n)]
    scene["lead"] = [rng.choice(some) if rng.random() < 0.7 else -1 for some in others]
    return scene


def naive_edge(scene, i, j, lead):
    """(gap, relative speed, TTC, THW) of the pair, from the definitions."""
    me, other, heading = scene[i], scene[j], math.radians(scene[i]["angle"])  # angle: clockwise from north
    dx, dy = other["x"] - me["x"], other["y"] - me["y"]
    along = dx * math.sin(heading) + dy * math.cos(heading)
    across = abs(dx * math.cos(heading) - dy * math.sin(heading))
    ahead = lead or along >= 0
    front, rear = (other, me) if ahead else (me, other)
    gap = me["lead_gap"] if lead else max(abs(along) - front["length"], 0.0)
    closing = rear["speed"] - front["speed"]
    on_course = (lead or across < 2.0) and closing > 0.1
    ttc = min(max(gap, 0) / closing, 20) if on_course else 20
    thw = min(max(gap, 0) / max(rear["speed"], 0.5), 10)
    return [min(gap, 200) if ahead else -min(gap, 200), other["speed"] - me["speed"], ttc, thw]


@pytest.mark.parametrize("seed", range(12))
def test_neighbour_graph_equals_a_loop_over_all_pairs(seed):
    rng = np.random.default_rng(seed)
    n, k, radius = int(rng.integers(2, 40)), int(rng.integers(1, 12)), float(rng.choice([30, 200]))
    scene = random_scene(rng, n)
    neighbours, edges = graph.neighbour_graph(scene, k, radius)
    assert neighbours.shape == (n, k) and edges.shape == (n, k, 4)
    for i in range(n):
        distance = np.hypot(scene["x"] - scene["x"][i], scene["y"] - scene["y"][i])
        nearest = [j for j in np.argsort(distance) if j != i][:k]
        lead = scene["lead"][i]
        if lead >= 0 and lead not in nearest:
            nearest[-1] = lead  # in place of the farthest
        expected = [j for j in nearest if distance[j] <= radius or j == lead]
        places = np.flatnonzero(neighbours[i] >= 0)
        assert neighbours[i][places].tolist() == expected
        for place in places:
            j = neighbours[i, place]
            assert edges[i, place] == pytest.approx(naive_edge(scene, i, j, j == lead), rel=1e-5, abs=1e-4)  # float32
        assert not edges[i][neighbours[i] < 0].any()


def test_edge_features_of_two_vehicles_in_a_row():
    scene = np.zeros(2, graph.SCENE)
    scene["x"], scene["angle"], scene["speed"], scene["length"], scene["lead"] = [0, 30], 90, [20, 10], 5, -1
    neighbours, edges = graph.neighbour_graph(scene, 4, 200.0)
    assert neighbours.tolist() == [[1, -1, -1, -1], [0, -1, -1, -1]]
    assert edges[0, 0].tolist() == [25, -10, 2.5, 1.25]
    assert edges[1, 0].tolist() == [-25, 10, 2.5, 1.25]  # the same danger seen from the front


def test_leader_is_a_neighbour_however_many_are_nearer():
    scene = np.zeros(10, graph.SCENE)
    scene["x"], scene["angle"], scene["length"], scene["lead"] = np.arange(10) * 3.0, 90, 5, -1
    scene["x"][9], scene["lead"][0], scene["lead_gap"][0] = 900, 9, 150  # a detour: near by road, far through the air
    neighbours, edges = graph.neighbour_graph(scene, 4, 200.0)
    assert neighbours[0].tolist() == [1, 2, 3, 9]
    assert edges[0, 3, 0] == 150


def test_leader_beyond_the_radius_stands_behind_those_within():
    """It stood at a place that followed from its number, with holes before it, when the radius had room for others."""
    for lead in (2, 8):
        scene = np.zeros(9, graph.SCENE)
        scene["x"], scene["angle"], scene["length"], scene["lead"] = np.arange(9) * 300.0, 90, 5, -1
        scene["x"][5], scene["lead"][0], scene["lead_gap"][0] = 50, lead, 190
        neighbours, edges = graph.neighbour_graph(scene, 6, 200.0)
        assert neighbours[0].tolist() == [5, lead, -1, -1, -1, -1] and edges[0, 1, 0] == 190


@pytest.mark.parametrize("n", [0, 1])
def test_graph_of_nobody_and_of_one(n):
    scene = np.zeros(n, graph.SCENE)
    scene["lead"] = -1
    neighbours, edges = graph.neighbour_graph(scene, 4, 200.0)
    assert neighbours.shape == (n, 4) and (neighbours == -1).all()
    assert edges.shape == (n, 4, 4) and not edges.any()
    counts = {"waiting": 0, "departed": 0, "arrived": 0, "ocr": 0.0}
    assert np.isfinite(graph.global_features(scene, counts, 1.0)).all()
    assert graph.node_features(scene, 100.0, 0.0).shape == (n, 9)


@pytest.mark.parametrize("vehicles, k", [(0, 4), (1, 4), (16, 4), (17, 5), (40, 10), (60, 15), (61, 16), (600, 16)])
def test_adaptive_k(vehicles, k):
    assert graph.adaptive_k(vehicles) == k


# ---- bounds -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("gap, speed, lead_speed, ttc", [
    (20, 20, 10, 2.0), (20, 10, 20, 20.0), (20, 10, 10, 20.0), (-1, 20, 10, 0.0), (0, 20, 10, 0.0), (1e6, 20, 10, 20.0),
    (0, 10.05, 10, 20.0)])
def test_time_to_collision(gap, speed, lead_speed, ttc):
    assert graph.time_to_collision(np.array([gap]), np.array([speed]), np.array([lead_speed])) == ttc


def test_conflicts_are_short_times_or_hard_brakes():
    scene = np.zeros(4, graph.SCENE)
    scene["lead_gap"], scene["speed"], scene["lead_speed"] = [19, 21, 200, 200], 20, [10, 10, 20, 20]
    scene["accel"] = [0, 0, -4.0, -3.9]
    assert graph.conflicts(scene).tolist() == [True, False, True, False]


def test_features_are_bounded_and_finite_in_half_precision():
    rng = np.random.default_rng(0)
    scene = random_scene(rng, 50)
    wild = {"position": (-50, 1e6), "lane_end": (0, 1e6), "progress": (-1, 1e4), "accel": (-500, 500), "x": (-1e6, 1e6),
            "lead_gap": (-30, 1e6), "length": (0, 30), "speed": (0, 70), "lead_speed": (0, 70)}
    for name, extremes in wild.items():
        scene[name] = rng.choice(extremes, 50)
    counts = {"waiting": 100_000, "departed": 900, "arrived": 900, "ocr": 1.0}
    neighbours, edges = graph.neighbour_graph(scene, 16, 200.0)
    nodes = graph.node_features(scene, 260.0, 12_345.0)
    for features in (nodes, edges, graph.global_features(scene, counts, 0.1)):
        half = features.astype(np.float16)
        assert np.isfinite(half).all() and np.abs(half).max() <= 1000
    assert np.abs(nodes[:, 3]).max() <= 5 and nodes[:, [0, 5]].min() >= 0 and nodes[:, [0, 5]].max() <= 1
    assert nodes[:, 4].max() <= 500 and np.abs(edges[..., 0]).max() <= 200
    assert edges[..., 2:].min() >= 0 and edges[..., 2].max() <= 20 and edges[..., 3].max() <= 10
    assert nodes[:, 7] ** 2 + nodes[:, 8] ** 2 == pytest.approx(1)


def test_features_of_one_scene_by_hand():
    scene = np.zeros(4, graph.SCENE)
    scene["speed"], scene["accel"], scene["icv"] = [2, 10, 12, 20], [-2, -1, 0, 3], [1, 0, 0, 0]
    scene["lead"], scene["lead_gap"], scene["position"], scene["lane_end"] = -1, [50, 100, 150, 500], 250, 80
    facts = graph.global_features(scene, {"waiting": 3, "departed": 2, "arrived": 1, "ocr": 0.5}, 2.0)
    facts = dict(zip(graph.GLOBAL, facts.tolist()))
    expected = {"log_vehicles": math.log(5), "log_icvs": math.log(2), "mean_speed": 11, "std_speed": 6.4031,
                "min_speed": 2, "mean_abs_accel": 1.5, "std_accel": 1.8708, "mean_gap": 125, "share_slow": 0.25,
                "share_braking": 0.25, "density": 2, "log_waiting": math.log(4), "departed": 2, "arrived": 1,
                "ocr": 0.5}
    assert {name: facts[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    nodes = graph.node_features(scene, 1000.0, graph.TIME_PERIOD / 4)
    assert nodes[1].tolist() == pytest.approx([0.25, 0, 10, -1, 80, 0, 0, 1, 0], abs=1e-6)  # a quarter: sin 1, cos 0
