"""benchmarks/transfer.py: ratios and flags by hand; the drawn networks carry their traffic."""
from pathlib import Path

import pytest

from benchmarks.motorways import Motorway, motorway
from benchmarks.networks import networks
from benchmarks.streets import KINDS, Street, street
from benchmarks.transfer import CORRIDORS, compare, corridors
from configs import Config, load_config
from env.traffic_env import TrafficEnv

from helpers import episode

ROOT = Path(__file__).resolve().parent.parent


def rows(variant, scores, ocr_change=0.0, collisions=0, controller="policy"):
    return [{"controller": controller, "seed": seed, "variant": variant, "s_total": score, "ocr_change": ocr_change,
             "c_int": 0.1, "collisions": collisions} for seed, score in enumerate(scores)]


def test_ratio_to_the_mean_of_the_known_and_flags():
    table = compare([*rows("a", [2, 6]), *rows("b", [26, 26]), *rows("c", [6, 8]), *rows("d", [15, 15], -1.1, 1),
                     *rows("e", [7.5, 7.5], -0.9, 1), *rows("e", [0, 0], 0, 1, "none")], "policy", ["a", "b"])
    assert [row["ratio"] for row in table] == [pytest.approx(x) for x in (4 / 15, 26 / 15, 7 / 15, 1, 0.5)]
    assert [row["flags"] for row in table] == [[], [], ["ratio"], ["OCR", "collision"], []]
    assert table[3]["collisions"] == 2
    assert compare(rows("a", [-1, -2]), "policy", ["a"])[0]["ratio"] is None  # nothing to compare with


def test_corridors_are_corridors_whatever_the_policy_was_trained_on():
    """Of a policy for a grid the four corridors were the grid again, four times the same numbers."""
    assert corridors("corridor") == list(CORRIDORS)
    cfg = load_config("configs/smoke.yaml", ["env.scenario=ring", f"env.suite=[same, {', '.join(corridors('ring'))}]"])
    assert [one.env.scenario for one in cfg.variants()] == ["ring", *["corridor"] * len(CORRIDORS)]


def test_networks_carry_traffic_of_several_types(tmp_path):
    """On the roundabout, who entered had right of way before who was on it: all stood still after two minutes."""
    paths = networks(tmp_path / "drawn", 900)
    assert [Path(path).stem for path in paths] == ["lights", "main_road", "roundabout"]
    for path in (*paths, ROOT / "configs" / "town" / "town.sumocfg"):
        cfg = Config()
        cfg.env.scenario, cfg.env.max_vehicles, cfg.env.control_interval = str(path), 200, 10.0
        env = TrafficEnv(cfg, tmp_path)
        try:
            info = episode(env, 1001, 36)[-1][2]
            lengths = {round(float(x), 1) for x in env.scene["length"]}
        finally:
            env.close()
        assert info["arrived"] > 0.35 * info["loaded"] and info["collisions"] == 0 and len(lengths) >= 3


@pytest.mark.parametrize("draw, number", [(motorway, 2), (motorway, 12), (street, 2), (street, 5)])
def test_random_roads_are_as_drawn_and_carry_traffic(tmp_path, draw, number):
    cfg = Config()
    cfg.env.scenario, cfg.env.max_vehicles, cfg.env.control_interval = str(draw(tmp_path, number, 600)), 600, 10.0
    env = TrafficEnv(cfg, tmp_path)
    try:
        info = episode(env, 1001, 36)[-1][2]
    finally:
        env.close()
    assert info["arrived"] > 0.3 * info["loaded"] > 60 and info["teleports"] == 0


def test_a_motorways_number_says_all_and_every_element_is_drawn():
    roads = [Motorway(number) for number in range(1, 15)]
    assert Motorway(3).edges == roads[2].edges and Motorway(3).demand(60) == Motorway(3).demand(60)
    names = " ".join(sum((road.edges for road in roads), []))
    assert all(f'id="{kind}' in names for kind in ("ramp", "off", "aux")) and 'numLanes="5"' in names
    assert {road.lanes for road in roads} >= {2, 3, 4} and any(len(road.exits) > 2 for road in roads)


def test_a_streets_number_says_all_and_every_kind_is_drawn():
    roads = [Street(number, 60) for number in range(1, 21)]
    assert Street(3, 60).edges == roads[2].edges and Street(3, 60).demand() == Street(3, 60).demand()
    assert {road.kind for road in roads} == set(KINDS) and {road.lanes for road in roads} == {1, 2, 3}
    assert all(("traffic_light" in "".join(road.nodes)) == (road.kind == "lights") for road in roads)
