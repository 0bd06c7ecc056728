"""Traffic of users, and their settings of SUMO, that once were seen wrongly: routes, saved states, threads, ports."""
import gzip

import numpy as np
import pytest
import torch
from helpers import episode, equal, nobody

from configs import load_config
from env.graph import time_to_collision
from env.road import Road
from env.scenarios import build_scenario, own_scale
from env.tails import came_from
from evaluate import evaluate
from models.presets import PRESETS
from models.safety_shield import SafetyShield


# ---- tails -------------------------------------------------------------------------------------------------------

def test_the_tail_goes_along_with_each_change_of_lane():
    """From acc_2 to acc_1 SUMO moves it to the lane that leads there; acc_0 has none, where it stays. Only the lane
    from which the vehicle had come was blocked: a follower on main_0 saw a free road and hit it at 16 m/s."""
    net = Road([(":J_0_0", 8, [("acc_1", "")]), (":J_0_1", 8, [("acc_2", "")]), (":J_2_0", 8, [("acc_0", "")]),
                ("acc_0", 100, []), ("acc_1", 100, []), ("acc_2", 100, []), ("main_0", 100, [("acc_1", ":J_0_0")]),
                ("main_1", 100, [("acc_2", ":J_0_1")]), ("ramp_0", 50, [("acc_0", ":J_2_0")])])

    def after(came, before, lane, rear=-1.0):
        found, = came_from(net, *(np.array([net.lane_index[name]]) for name in (came, before, lane)), np.array([rear]))
        return list(net.lane_index)[found]
    assert after("main_1", "acc_2", "acc_1") == after("main_1", "acc_2", "acc_0") == "main_0"
    assert after("main_1", "main_1", "acc_0") == after("main_0", "acc_1", "acc_0") == "main_0"  # in one control step
    assert after(":J_0_1", "acc_2", "acc_0") == after(":J_0_1", ":J_0_1", "acc_0") == ":J_0_0"
    assert after("main_1", "acc_2", "acc_2") == after("main_1", "acc_2", "acc_1", rear=1.0) == "main_1"
    assert after("ramp_0", "acc_0", "acc_2") == "ramp_0" and after("ramp_0", "main_1", ":J_0_1") == "main_1"


def test_whose_tail_lies_on_the_followers_lane_is_not_hit(tmp_path, drive):
    """The same with SUMO: A stops behind the merge and moves two lanes to the right, B is told full throttle."""
    network = build_scenario(load_config("configs/smoke.yaml"), tmp_path).replace(".sumocfg", ".net.xml")
    (tmp_path / "two.rou.xml").write_text("""<routes>
        <vType id="car" sigma="0" speedDev="0" accel="0.8" lcStrategic="-1" lcSpeedGain="0" lcKeepRight="0"
               lcCooperative="0"/>
        <route id="r" edges="main0 acc0 main1 acc1 main2"/>
        <vehicle id="A" type="car" route="r" depart="0" departLane="1" departPos="540" departSpeed="8">
            <stop lane="acc0_2" startPos="4" endPos="4.7" until="12"/></vehicle>
        <vehicle id="B" type="car" route="r" depart="11" departLane="0" departPos="440" departSpeed="8"/></routes>""")
    (tmp_path / "two.sumocfg").write_text(f'<configuration><input><net-file value="{network}"/>'
                                          '<route-files value="two.rou.xml"/></input></configuration>')
    env = drive(tmp_path / "two.sumocfg", "env.icv_share=1", "env.terminate_on_collision=false", "env.horizon_s=40")
    shield, names, least = SafetyShield(PRESETS["small"], env.cfg.shield, 1.0), list(env.road.lane_index), np.inf
    for t in range(29):
        slots = env.slots.slot_of
        wanted = {}
        if t > 10:
            wanted[slots[b"A"]] = -3.0, 2 if names[env.lane_at[slots[b"A"]]] in ("acc0_2", "acc0_1") else 1
        if b"B" in slots and t > 13:
            wanted[slots[b"B"]] = 2.0, 1
            least = min(least, env.scene["lead_gap"][env.ids.index(b"B")])
        who, nodes = list(wanted), env.observation["nodes"]
        accel, lane = (torch.tensor([one[i] for one in wanted.values()]) for i in (0, 1))
        accel, lane, brake, _ = shield(accel.float(), lane.long(), torch.tensor(nodes[who, 2]),
                                       torch.tensor(env.observation["surround"][who]))
        env.command(who, accel.numpy(), lane.numpy(), brake.numpy())
    assert env.totals.collisions == 0 and 1 < least < 10


# ---- routes, states, threads, ports ------------------------------------------------------------------------------

def test_a_vehicle_that_is_sent_another_way_twice_is_followed(road, drive):  # noqa: F811
    """SUMO uses the ids of such routes again; the environment went on along the first."""
    nodes = "".join(f'<node id="n{i}" x="{300 * i}" y="0"/><node id="m{i}" x="{300 * i + 200}" y="-150"/>'
                    for i in range(6))
    edges = "".join(f'<edge id="e{i}" from="n{i}" to="n{i + 1}" speed="20"/><edge id="x{i}" from="n{i}" to="m{i}" '
                    'speed="20"/>' for i in range(5))
    goals = "".join(f'<rerouter id="r{i}" edges="e{i}"><interval begin="0" end="900"><destProbReroute id="{goal}"/>'
                    '</interval></rerouter>' for i, goal in enumerate(("x4", "x3", "e4")))
    env = drive(road(nodes, edges, '<vehicle id="v" depart="0"><route edges="e0 e1 x2"/></vehicle>',
                     additional=f"<additional>{goals}</additional>"), "env.horizon_s=90")
    seen, names = set(), list(env.road.edge_index)
    for _ in range(60):
        env.command(*nobody(env))
        if env.ids:
            at, route = env.routes.start[env.slots.slot_of[b"v"]], []
            while env.routes.flat[at] >= 0:
                route.append(names[env.routes.flat[at]])
                at += 1
            assert tuple(route) == env.simulator.client.vehicle.getRoute("v")
            seen.add((env.simulator.client.vehicle.getRouteID("v"), *route))
    assert len(seen) > len({route_id for route_id, *_ in seen})  # an id was used twice


FLOW = '<flow id="f" begin="0" end="900" period="2" departLane="random"><route edges="in out"/></flow>'
NODES = '<node id="a" x="0" y="0"/><node id="b" x="500" y="0"/><node id="c" x="1000" y="0"/>'
EDGES = ('<edge id="in" from="a" to="b" numLanes="3" speed="30"/>'
         '<edge id="out" from="b" to="c" numLanes="2" speed="30"/>')


def test_several_threads_of_sumo_are_one(road, drive):  # noqa: F811
    """With <threads value="2"/> each of four resets with one seed gave another episode."""
    env = drive(road(NODES, EDGES, FLOW, "<processing><threads value='2'/></processing>"), "env.horizon_s=60")
    assert env.simulator.client.simulation.getOption("threads") == "1"
    first, second = (episode(env, 1, 20)[-1][0] for _ in range(2))
    assert equal(first, second)


def test_what_had_left_before_a_saved_state_is_not_loaded(road, drive, tmp_path):  # noqa: F811
    """SUMO's counter of the state counted them: a share of arrivals of 0.42 that was 0.62, and a queue of 368 vehicles
    before the road where nobody waited."""
    plain = road(NODES, EDGES, FLOW)
    env = drive(plain, "env.horizon_s=200")
    for _ in range(100):
        env.command(*nobody(env))
    state = tmp_path / "state.xml.gz"
    env.simulator.client.simulation.saveState(str(state))
    assert gzip.open(state).read(5) and env.totals.arrived > 10
    later = tmp_path / "later.sumocfg"
    later.write_text((tmp_path / "road.sumocfg").read_text().replace(
        "</input>", f'<load-state value="{state}"/></input><time><begin value="100"/></time>'))
    continued = drive(later, "env.horizon_s=100")
    present = len(continued.ids)
    assert present > 5 and (continued.totals.loaded, continued.totals.arrived) == (present, 0)
    for _ in range(50):
        env.command(*nobody(env))
        continued.command(*nobody(env))
    assert continued.totals.loaded == present + continued.totals.departed > present
    assert continued.observation["globals"][12] == 0  # nobody waits


def test_a_scenario_that_waits_for_a_client_does_not_wait_in_libsumo(road, drive):  # noqa: F811
    """It waited at its <remote-port> for ever, without a word."""
    pytest.importorskip("libsumo")
    scenario = road(NODES, EDGES, FLOW, "<processing><remote-port value='9999'/></processing>")
    env = drive(scenario, "env.backend=libsumo", "rollout.num_envs_per_worker=1", "env.horizon_s=60")
    env.reset(seed=2)
    assert env.command(*nobody(env))[4]["time"] == 1


@pytest.mark.parametrize("warmup, workers", [(0, 0), (5, 0), (5, 1)])
def test_a_seed_on_which_sumo_dies_at_once_is_left_out(road, workers, warmup):  # noqa: F811
    """In the first step or in the warm-up it ended the whole evaluation, and the other rows were lost."""
    bad = ('<vType id="t"/><routeDistribution id="d"><route id="ok" edges="in out" probability="0.5"/>'
           '<route id="no" edges="out in" probability="0.5"/></routeDistribution>'
           '<vehicle id="v" type="t" route="d" depart="0"/>')
    cfg = load_config("configs/smoke.yaml", [
        f"env.scenario={road(NODES, EDGES, bad)}", "rollout.restarts=1", f"env.warmup_s={warmup}"])
    cfg.env.horizon_s, cfg.env.terminate_on_collision, cfg.evaluate.workers, given_up = 20.0, False, workers, set()
    rows, _ = evaluate(cfg, ["none"], list(range(1, 9)), say=lambda *text: None, given_up=given_up)
    assert given_up and {row["seed"] for row in rows} == set(range(1, 9)) - given_up


def test_who_overtakes_among_the_oncoming_traffic_drives_on(road, drive):  # noqa: F811
    """SUMO's odometer jumped by the road's length, and then went backwards: rewards of -6 and +7 for a median of 0.4,
    and a world model that learned from ways of 2 km in a second."""
    nodes = '<node id="a" x="0" y="0"/><node id="b" x="2000" y="0"/>'
    edges = '<edge id="in" from="a" to="b" speed="30"/><edge id="out" from="b" to="a" speed="30"/>'
    traffic = ('<vType id="slow" maxSpeed="8"/><vType id="fast" maxSpeed="30" lcOpposite="1"/>'
               '<flow id="s" type="slow" begin="0" end="900" period="20"><route edges="in"/></flow>'
               '<flow id="f" type="fast" begin="5" end="900" period="10"><route edges="in"/></flow>')
    env, overtaking = drive(road(nodes, edges, traffic, opposites=True), "env.horizon_s=150"), 0
    for _ in range(150):
        was = {name: env.scene["odometer"][i] for i, name in enumerate(env.ids)}
        env.command(*nobody(env))
        way = env.observation["moved"][env.observation["mask"] > 0]
        assert (way >= 0).all() and (way < 31).all() and env.observation_space.contains(env.observation)
        assert all(env.scene["odometer"][i] >= was.get(name, 0) - 1e-3 for i, name in enumerate(env.ids))
        overtaking += sum(env.simulator.client.vehicle.getLaneID(name.decode()) == "out_0" for name in env.ids)
    assert overtaking > 20


def test_who_drives_beside_on_a_junction_is_no_collision_to_come(drive):
    """The shield lets the second of two that will come together follow the first; their "gap" was the time to collision
    too: 0 s of cars 25 m apart. Those apart that count are leaders to SUMO, too."""
    env, least, beside = drive("configs/town/town.sumocfg", "env.horizon_s=200"), np.inf, 0
    for _ in range(200):
        env.command(*nobody(env))
        scene, led, aside = env.scene, env.scene["lead"] >= 0, env.scene["aside"]
        apart = np.hypot(*(scene[axis][scene["lead"]] - scene[axis] for axis in "xy"))
        far = led & (apart > scene["lead_gap"] + scene["length"][scene["lead"]] + 5)
        for i in np.flatnonzero(far & ~aside):
            leader, _ = env.simulator.client.vehicle.getLeader(env.ids[i].decode(), 200)
            assert leader == env.ids[scene["lead"][i]].decode()
        ttc = time_to_collision(scene["lead_gap"], scene["speed"], scene["lead_speed"])
        least, beside = min(least, ttc[led & ~aside].min(initial=np.inf)), beside + (far & aside).sum()
    assert env.totals.min_ttc >= least > 0 and beside


def test_name_of_a_route_that_comes_back_within_a_step_is_another_way(make, grid):
    """A dispatcher sends a taxi twice in a step: SUMO had the old name for the new way, and the environment read
    another vehicle's route, or beyond the last one (an IndexError)."""
    env = make(scenario=grid('<vehicle id="a" depart="0"><route edges="A0B0 B0B1"/></vehicle>'), icv_share=1.0)
    episode(env, 1, 3)
    vehicle, names = env.simulator.client.vehicle, []
    for ways in ([["A0B0", "B0C0"]], [["A0B0", "B0B1"], ["A0B0", "B0B1", "B1B2", "B2C2"]]):
        for way in ways:
            vehicle.setRoute("a", way)
        vehicle.setStop("a", ways[-1][-1], 80.0) if len(ways) > 1 else None
        env.command([], [], [], [])
        names.append(env.routes.of_slot[0])
        begin = env.routes.start[0]
        assert env.routes.flat[begin:begin + len(way)].tolist() == [env.road.edge_index[edge] for edge in way]
    assert names[0] == names[1] and env.routes.checks[0] == 5


@pytest.mark.parametrize("encoding, scale", [("GB2312", 2.5), ("Shift_JIS", 2.5), ("utf-8", 2.5), ("none", 1.0)])
def test_encodings_that_pythons_parser_does_not_know(tmp_path, encoding, scale):
    """A traceback, "multi-byte encodings are not supported"; SUMO reads them (and says so where it does not)."""
    text = f'<?xml version="1.0" encoding="{encoding}"?><configuration><scale value="2.5"/><!-- 交通 --></configuration>'
    (tmp_path / "my.sumocfg").write_bytes(text.encode("utf-8" if encoding == "none" else encoding))
    assert own_scale(str(tmp_path / "my.sumocfg")) == scale


def test_what_a_configuration_lets_sumo_write_is_not_written(road, drive, tmp_path, monkeypatch):
    """It wrote over the user's own results, half of them when it was closed; and refused where the folder was missing,
    in which it writes nothing now. States lay in the current folder, and a file for each vehicle that has an SSM."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fcd.xml").write_text("mine")
    outputs = "".join(f'<{name} value="{value}"/>' for name, value in (
        ("fcd-output", "fcd.xml"), ("tripinfo-output", "missing/trips.xml"), ("summary", "summary.xml"),
        ("emission-output", "emission.xml"), ("log", "log.txt"), ("save-state.period", "2"),
        ("save-state.times", "3"), ("save-state.files", "third.xml"), ("device.rerouting.output", "rerouted.xml"),
        ("device.rerouting.probability", "1"), ("device.ssm.probability", "1")))
    env = drive(road(NODES, EDGES, FLOW, f"<output>{outputs}</output>"), "env.horizon_s=60")
    for _ in range(10):
        env.command(*nobody(env))
    env.close()
    assert (tmp_path / "fcd.xml").read_text() == "mine"
    written = ("missing", "summary.xml", "emission.xml", "log.txt", "state", "mixed-autonomy", "third.xml", "rerouted",
               "ssm")
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(written)]
