"""Networks and configurations of users, in which shield, score or settings once did not see everything."""
import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks.shield import Adversary
from configs import load_config
from configs.schema import Config
from data.settings import scenario_hashes
from env.launch import SumoError
from env.routes import Routes
from env import scenarios
from env.scenarios import build_scenario, check_traffic, own_scale, seconds_of
from env.baselines import SPEED
from env.spaces import speed_change
from env.sumo import ALL_CHECKS, OWN_LANE_CHANGES, SetModes
from env.traffic_env import TrafficEnv, check_scenario

from helpers import FLOWS, episode, only

LIGHT = '<node id="a" x="0" y="0"/><node id="t" x="500" y="0" type="traffic_light"/><node id="z" x="800" y="0"/>'
STRAIGHT = ('<edge id="in" from="a" to="t" numLanes="{0}" speed="30"/>'
            '<edge id="out" from="t" to="z" numLanes="{0}" speed="30"/>')
RED = ('<additional><tlLogic id="t" type="static" programID="m" offset="0"><phase duration="25" state="G"/>'
       '<phase duration="3" state="y"/><phase duration="20" state="r"/></tlLogic></additional>')


# ---- names of folders -------------------------------------------------------------------------------------------

def test_time_of_day_names_a_run(tmp_path):
    """netconvert took what stands before a colon for a computer and its port: run.name=2026-11-23_16:30 ended in
    "change `corridor:` in the configuration"."""
    env = TrafficEnv(load_config("configs/smoke.yaml"), tmp_path / "2026-11-23_16:30 = 5%")
    env.reset(seed=1)
    env.close()


def test_folder_with_an_umlaut_in_a_shell_without_a_locale(tmp_path, monkeypatch):
    """SUMO gave the network's file back under a name in other letters, which was called a lost connection to SUMO."""
    monkeypatch.setenv("LC_ALL", "C")
    env = TrafficEnv(load_config("configs/smoke.yaml"), tmp_path / "für Zoë")
    env.reset(seed=1)
    env.close()


@pytest.mark.parametrize("name, found", [("lr=1,K=5", "','"), ("a%20b", "'%'"), ("${HOME}", r"'\$'")])
@pytest.mark.parametrize("key", ["run.name", "env.scenario"])
def test_folders_that_sumo_reads_otherwise_are_refused(tmp_path, name, found, key):
    """These too were called a mistake in `corridor:`, or SUMO did not find its own files."""
    cfg, folder = Config(), tmp_path / name
    folder.mkdir()
    if key == "env.scenario":
        (folder / "mine.sumocfg").touch()
        cfg.env.scenario = str(folder / "mine.sumocfg")
    with pytest.raises(SumoError, match=f"SUMO finds no files in a folder with {found}.*{key}"):
        build_scenario(cfg, folder)
    assert not list(folder.glob("corridor*"))


# ---- what the shield relies on -----------------------------------------------------------------------------------

def test_signal_without_crossing_traffic(make, road):
    """SUMO's check was off there: an ICV came to a red light at full speed, was stopped at the line, and was hit."""
    flow = '<flow id="f" begin="0" end="140" period="4" departSpeed="max"><route edges="in out"/></flow>'
    env = make(scenario=road(LIGHT, STRAIGHT.format(1), flow, additional=RED), icv_share=1.0, max_commands=200)
    adversary = Adversary(env.cfg, "throttle")
    adversary.begin(0, 1)
    observation, _ = env.reset(seed=1)
    assert env.simulator.special_lanes()["crossing"] == [":t_0_0"]
    for _ in range(150):
        command = adversary.act(observation, 0)
        observation, *_, info = env.command(*(command[name] for name in ("slot", "accel", "lane", "brake")))
    assert info["collisions"] == 0 and info["arrived"] > 15


@pytest.mark.parametrize("option, every", [("", False), ('<lanechange.duration value="3"/>', True),
                                           ('<lateral-resolution value="0.8"/>', True)])
def test_lanes_on_which_somebody_may_be_beside(make, road, option, every):
    """With a lane change that takes time a vehicle is on two lanes at once."""
    flow = '<flow id="f" begin="0" end="10" period="4"><route edges="in out"/></flow>'
    env = make(scenario=road(LIGHT, STRAIGHT.format(2), flow, f"<processing>{option}</processing>"))
    env.reset(seed=1)
    assert ({"in_0", "out_1"} <= set(env.simulator.special_lanes()["crossing"])) == every


def test_lane_closed_to_everybody_is_no_lane(make, road):
    """A lane that allows nobody was taken for one that allows everybody: told to go there, ICVs were charged for it."""
    edge = '<edge id="in" from="a" to="t" speed="30" numLanes="3"><lane index="2" disallow="all"/></edge>'
    flow = '<flow id="f" begin="0" end="10" period="4"><route edges="in"/></flow>'
    env = make(scenario=road(LIGHT, edge + STRAIGHT.split("/>")[1].format(2) + "/>", flow))
    env.reset(seed=1)
    assert env.simulator.special_lanes()["closed"] == ["in_2"]
    lane = env.road.lane_index["in_1"]
    assert not env.road.has_lane(lane, 2) and env.road.has_lane(lane, 0)


@pytest.mark.parametrize("packed", [False, True])
def test_where_drivers_overtake_among_the_oncoming_traffic_nobody_is_commanded(make, road, tmp_path, packed):
    """They count on the others' going on as they are: "erratic" had 20 collisions in 23,460 steps, most of them
    frontal."""
    edges = '<edge id="in" from="a" to="t" speed="30"/><edge id="back" from="t" to="a" speed="30"/>' + STRAIGHT.split(
        "/>")[1].format(1) + "/>"
    flow = '<flow id="f" begin="0" end="10" period="4"><route edges="in out"/></flow>'
    path = road(LIGHT.replace("traffic_light", "priority"), edges, flow, opposites=True)
    if packed:
        (tmp_path / "net.xml").write_bytes(gzip.compress((tmp_path / "net.xml").read_bytes()))
    env = make(scenario=path, icv_share=1.0)
    env.reset(seed=1)
    assert sorted(env.simulator.special_lanes()["oncoming"]) == ["back_0", "in_0"]
    costs = {"in": set(), "out": set()}
    for _ in range(40):
        edge = env.road.lane_edge[env.lane_at[0]]
        cost = env.command(*only(env, np.flatnonzero(env.observation["icv"])[:1], -1.0))[-1]["cost"]
        for name in costs:
            costs[name] |= {cost > 0} if edge == env.road.edge_index[name] and env.observation["icv"][0] else set()
    assert costs == {"in": {False}, "out": {True}}


HABITS = {"slow": ('actionStepLength="1"', 1), "wide": ('minGap="4"', 1), "close": ('tau="0.5"', 1), "quick": ("", 0),
          "bold": ('lcAssertive="2"', 1), "old": ('laneChangeModel="DK2008"', 0),
          "weak": ('emergencyDecel="4"', 1), "fierce": ('decel="10"', 1)}


def test_habits_that_the_shield_does_not_know_keep_the_safe_speed(make, grid):
    """A command reaches who acts seldom too late; with a minGap of 3.5 m there were 49 collisions in 6,181
    vehicle-steps of random commands, with a tau of 0.5 s 3 in 9,738. With an lcAssertive of 2, where lanes end, 5 in
    114,974: it changed lanes into half the gap that it would need without SUMO's check. With an emergencyDecel of
    4 m/s^2 12 in two minutes; commands braked harder than that too. Others hit SUMO's motorcycles, which brake with
    10 m/s^2: once somebody has come who brakes harder than the shield reckons, the check stays on for all."""
    types = "".join(f'<vType id="{kind}" {text}/>' for kind, (text, _) in HABITS.items())
    flows = "".join(f'<vehicle id="{kind}" type="{kind}" depart="{i * 2}"><route edges="A0B0 B0C0"/></vehicle>'
                    for i, kind in enumerate(HABITS))
    env = make(scenario=grid(types + flows), icv_share=1.0)
    episode(env, 1, 13)
    found = {name.decode(): env.routes.checks[slot] for name, slot in env.slots.slot_of.items()}
    assert found == {kind: bit for kind, (_, bit) in HABITS.items() if kind != "fierce"}
    for _ in range(3):
        env.command([], [], [], [])
    assert set(env.routes.checks) == {1}
    hardest = {kind: env.routes.hardest[env.slots.slot_of[kind.encode()]] for kind in ("quick", "weak", "fierce")}
    assert hardest == {"quick": 9, "weak": 4, "fierce": 9}
    slot = env.slots.slot_of[b"weak"]
    cost = env.command([slot], [0.0], [1], [9.0])[-1]["cost"]
    assert cost == pytest.approx(4 / len(HABITS))


@pytest.mark.parametrize("changes, bit", [({}, 0), ({"tau": 0.5}, 1), ({"tau": 0.6}, 0)])
def test_built_in_drivers_with_such_habits_keep_it_too(changes, bit):
    cfg = Config()
    for name, value in changes.items():
        setattr(cfg.driver, name, value)
    assert set(Routes(None, cfg).checks) == {bit}
    cfg.shield.enabled = False
    assert set(Routes(None, cfg).checks) == {0}


def test_stop_that_comes_later_is_seen(make, grid):
    """Habits were asked at departure only: taxis sent to a customer accelerated without limit, and crashed."""
    env = make(scenario=grid('<vehicle id="a" depart="0"><route edges="A0B0 B0B1"/></vehicle>'), icv_share=1.0)
    episode(env, 1, 3)
    assert env.routes.checks[0] == 0
    env.simulator.client.vehicle.setRoute("a", ["A0B0", "B0C0"])
    env.simulator.client.vehicle.setStop("a", "B0C0", 80.0)
    env.command([], [], [], [])
    assert env.routes.checks[0] == 5
    # With STOPPING a command brakes with 4.5 m/s^2 at most: told 9, one drove into whom the shield had stopped.
    assert (env.routes.bits(0, -4.5), env.routes.bits(0, -4.6)) == (5, 1)


@pytest.mark.parametrize("kind, of_all", [("blue_lights", False), ("decides_seldom", True)])
def test_who_drives_as_commands_do_not_foresee_is_not_commanded(make, grid, kind, of_all):
    """Blue lights: 15 collisions in 7,168 vehicle-steps of random commands. Who decides less often than his headway
    lasts: 27 in 6,609 (0.7 and 0.3 s), with SUMO's check on too; and since only such vehicles were left alone, they
    drove into the others: 261 in 200 s of random commands (2 and 1 s, every second vehicle), 7 without."""
    kinds = ('<vType id="blue_lights" vClass="emergency"><param key="has.bluelight.device" value="true"/></vType>'
             '<vType id="decides_seldom" actionStepLength="1" tau="0.8"/>')
    route = '<route edges="A0B0 B0C0"/></vehicle>'
    flow = f'<vehicle id="first" depart="0">{route}<vehicle id="odd" type="{kind}" depart="5">{route}'
    env = make(scenario=grid(kinds + flow), icv_share=1.0)
    env.reset(seed=1)
    told = {b"first": [], b"odd": []}
    for _ in range(9):
        for name, costs in told.items():
            slot = env.slots.slot_of.get(name, env.cfg.env.max_vehicles)  # there is none: nobody is commanded
            costs.append(env.command(*only(env, [slot], -0.1))[-1]["cost"] > 0)
    assert any(told[b"first"][:2]) and b"odd" in env.slots.slot_of and not any(told[b"odd"])
    assert any(told[b"first"][-3:]) != of_all


# ---- standing still ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("accel, speed, allowed, expected", [
    (-3.0, 20.0, 30.0, (-3.0, 1.0)), (2.0, 20.0, 30.0, (2.0, 1.0)), (2.0, 29.5, 30.0, (0.5, 1.0)),
    (2.0, 40.0, 30.0, (-1.0, 1.0)), (-3.0, 1.5, 30.0, (-1.501, 1.0)), (-1.0, 0.0, 30.0, (-0.001, 1.0)),
    (-9.0, 4.5, 30.0, (-9.0, 0.5)), (-9.0, 20.0, 30.0, (-9.0, 1.0)), (-9.0, 0.05, 30.0, (-0.051, 1.0))])
def test_what_sumo_is_told(accel, speed, allowed, expected):
    assert speed_change(accel, speed, allowed, 1.0, 0.1) == pytest.approx(expected)


def test_braking_to_a_stop_ends_in_standing(make, grid):
    """SUMO's driver accelerated again for the rest of each second: an ICV that was told -3 m/s^2 crept on for ever."""
    env = make(scenario=grid('<vehicle id="a" depart="0"><route edges="A0B0 B0C0"/></vehicle>'), icv_share=1.0)
    env.reset(seed=1)
    speeds = []
    for step in range(14):
        env.command(*only(env, np.flatnonzero(env.observation["icv"]), 1.0 if step < 3 else -3.0))
        speeds.append(float(env.scene["speed"][0]))
    assert speeds[2] > 5 and speeds[9:] == [0.0] * 5


# ---- score and settings ------------------------------------------------------------------------------------------

def test_nobody_leaves_the_score_unseen(make, grid):
    """Who was removed for standing counted as arrived, and who waited too long outside not at all."""
    more = ('<processing><time-to-teleport.remove value="true"/><max-depart-delay value="5"/>'
            '</processing>')
    stop = '<stop lane="B0C0_0" endPos="80" duration="300"/>'
    blocked = f'<vehicle id="a" depart="0"><route edges="A0B0 B0C0"/>{stop}</vehicle>{FLOWS}'
    plain, strict = (episode(make(scenario=grid(blocked, more=text), teleport_s=10.0), 1, 100)[-1][2]
                     for text in ("", more))
    for name in ("loaded", "arrived", "teleports", "vehicles"):
        assert plain[name] == strict[name], name
    assert plain["teleports"] > 0


@pytest.mark.parametrize("backend, place, landed", [("traci", "out_0", 0), ("libsumo", "out_0", 0),
                                                    ("traci", "in_0", 4)])
def test_who_is_teleported_to_its_destination_has_not_arrived(make, road, backend, place, landed):
    """SUMO carries on whoever finds no room, to its end if need be, and lists it as arrived: a controller that blocked
    the road twice as well had twice the arrivals. Beyond a block on `in` they land on `out` and drive to its end."""
    block = f'<vehicle id="block" depart="0"><route edges="in out"/><stop lane="{place}" endPos="100" duration="900"/>'
    env = make(scenario=road(LIGHT.replace("traffic_light", "priority"), STRAIGHT.format(1),
                             block + "</vehicle>" + FLOW.format("f", 5, 200)), teleport_s=20.0, backend=backend)
    info = episode(env, 1, 150)[-1][2]
    env.close()
    assert (info["teleports"] > 3, info["arrived"] >= landed, info["arrived"] == 0) == (True, True, not landed)


@pytest.mark.parametrize("text, expected", [
    ('<scale value="0.5"/>', 0.5), ("<scale value='0.5'/>", 0.5), ('<scale v="5e-1"/>', 0.5),
    ('<!-- <scale value="3"/> -->', 1.0), ('<scale value="much"/>', 1.0), ("<not-closed>", 1.0)])
def test_scale_of_a_configuration_as_sumo_reads_it(tmp_path, text, expected):
    """A regular expression obeyed comments and did not see single quotes: twice the demand, or a third."""
    path = tmp_path / "a.sumocfg"
    path.write_text(f"<configuration><processing>{text}</processing></configuration>")
    assert own_scale(path) == expected


def test_what_sumo_writes_is_no_setting_of_a_data_set(tmp_path, monkeypatch):
    """Its outputs lay beside the network and counted as inputs: no data set could be used a second time. What
    variables name, and what a compressed file includes, did not count."""
    for name in ("net.xml", "a.rou.xml", "b.rou.xml", "trips.xml", "log.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "a.rou.xml").write_text('<routes><include href="more.xml"/></routes>')  # once followed by nobody
    (tmp_path / "more.xml").write_text("<routes><include href='a.rou.xml'/></routes>")
    (tmp_path / "b.rou.xml.gz").write_bytes(gzip.compress(b'<routes><include href="less.xml"/></routes>'))
    (tmp_path / "c.rou.xml.gz").write_bytes(b"no gzip")
    (tmp_path / "less.xml").write_text("<routes/>")
    monkeypatch.setenv("WHERE", str(tmp_path))
    config = tmp_path / "town.sumocfg"
    config.write_text("<configuration><n v='net.xml'/><route-files value=\"a.rou.xml, "
                      "${WHERE}/b.rou.xml.gz, c.rou.xml.gz\"/><output>"
                      '<tripinfo-output value="trips.xml"/></output><log value="log.txt"/></configuration>')
    assert set(scenario_hashes(config)) == {"town.sumocfg", "net.xml", "a.rou.xml", "b.rou.xml.gz", "c.rou.xml.gz",
                                            "more.xml", "less.xml"}
    assert Config().env.scenario == "corridor" and scenario_hashes("corridor") == {}


FLOW = '<flow id="{0}" begin="{1}" end="{2}" vehsPerHour="900"><route edges="in out"/></flow>'


@pytest.mark.parametrize("begins, lost", [((0, 60, 30), True), ((0, 30, 60), False)])
@pytest.mark.parametrize("more", ["", '<lateral-resolution value="0.8"/>'])
def test_traffic_that_sumo_leaves_out_is_told(road, capfd, tmp_path, begins, lost, more):
    """SUMO ignores what is not sorted by departure, and its warning was switched off: another demand was scored. With
    the sublane model, which is never mesoscopic, it still was."""
    flows = "".join(FLOW.format(i, begin, begin + 20) for i, begin in enumerate(begins))
    path = road(LIGHT, STRAIGHT.format(1), flows, f'<time><begin value="0:00:00"/></time>{more}')
    check_scenario(load_config("configs/smoke.yaml", [f"env.scenario={path}", "env.horizon_s=100"]), tmp_path)
    told = capfd.readouterr().err
    assert ("sorted by departure" in told and path in told) == lost and bool(told) == lost


def test_configuration_as_sumo_reads_it(road, tmp_path, monkeypatch, capfd):
    """Beside a link, not beside its target, stand the files that it names: other traffic was driven. A variable in the
    network's name was a lost connection, and a port for another client 20 s of waiting for it, and then no warning."""
    monkeypatch.setenv("NET", "net")
    flows = FLOW.format("late", 60, 80) + FLOW.format("f", 0, 30)
    path = Path(road(LIGHT, STRAIGHT.format(1), flows, '<remote-port value="8813"/>'))
    (tmp_path / "store").mkdir()
    target = tmp_path / "store" / "abc"
    target.write_text(path.read_text().replace("net.xml", "${NET}.xml"))
    path.unlink()
    path.symlink_to(target)
    check_scenario(load_config("configs/smoke.yaml", [f"env.scenario={path}", "env.horizon_s=100"]), tmp_path)
    assert "sorted by departure" in capfd.readouterr().err


@pytest.mark.parametrize("text, seconds", [("60", 60), ("0.5", 0.5), ("1:02:03", 3723), ("2:01:00:00", 176400)])
def test_times_as_sumo_writes_them(text, seconds):
    """A day had 60 hours."""
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("warmup, horizon", [(0, 100), (600, 100)])
def test_routes_that_sumo_will_refuse_later_are_refused_at_once(road, tmp_path, warmup, horizon):
    """A route over edges that do not meet: "not all of its traffic will be there", then four lost episodes and exit
    code 1, in each of which SUMO had ended when that vehicle was to depart."""
    path = road(LIGHT, STRAIGHT.format(1), FLOW.format("f", 0, 30) + f'<vehicle id="lost" depart="{warmup + 60}">'
                '<route edges="out in"/></vehicle>')
    with pytest.raises(SumoError, match="(?s)SUMO ends before the episode does.*lost.*no valid route"):
        check_scenario(load_config("configs/smoke.yaml", [f"env.scenario={path}", f"env.horizon_s={horizon}",
                                                          f"env.warmup_s={warmup}"]), tmp_path)


def test_what_only_the_mesoscopic_model_refuses_is_not_told(road, capfd, monkeypatch):
    """A bicycle that drives to its end was named as missing, and who really was left out was not."""
    path = road(LIGHT, STRAIGHT.format(1), FLOW.format("f", 0, 30))
    says = iter([(True, ["Error: bicycle"]), (False, ["c3: sorted by departure"]), (True, ["Error"]), (False, [])])
    monkeypatch.setattr(scenarios, "_dry_run", lambda words: next(says))
    arguments = ["-c", path, "--mesosim", "false"]
    check_traffic(path, arguments, 100.0)
    told = capfd.readouterr().err
    assert "c3" in told and "bicycle" not in told
    check_traffic(path, arguments, 100.0)
    assert capfd.readouterr().err == ""


MERGING = ('<node id="a" x="0" y="0"/><node id="b" x="0" y="300"/><node id="t" x="500" y="0" type="priority"/>'
           '<node id="z" x="900" y="0"/>', '<edge id="in" from="a" to="t"/><edge id="side" from="b" to="t"/>'
           '<edge id="out" from="t" to="z"/>')


@pytest.mark.parametrize("option, unsure", [
    ("", []), ('<no-internal-links value="true"/>', ["out_0"]), ('<step-method.ballistic value="true"/>', "all"),
    ('<step-method.ballistic value="Yes"/>', "all"), ('<step-method.ballistic value="0"/>', []),
    ('<lanechange.duration value="0:00:03"/>', "all"), ('<default.action-step-length value="1"/>', "all")])
def test_where_the_shield_is_unsure_sumos_check_stays_on(make, road, option, unsure):
    """Collisions behind the shield, up to 6 an episode: without junction lanes two came onto one edge at once; with
    ballistic integration vehicles do not move as the shield reckons. "yes" was none, and a time of day a traceback."""
    env = make(scenario=road(*MERGING, FLOW.format("f", 0, 30), f"<processing>{option}</processing>"))
    env.reset(seed=1)
    crosses = env.road.crosses
    names = [name for name, crossing in zip(env.road.lane_index, crosses) if crossing and not name.startswith(":")]
    assert crosses.all() if unsure == "all" else names == unsure


@pytest.mark.parametrize("step, every", [(0.2, False), (0.25, True), (1.0, True)])
def test_long_steps_keep_sumos_check_everywhere(make, road, step, every):
    """With steps of 1 s ICVs touched a leader who had stopped, and with 0.25 s too."""
    env = make(scenario=road(*MERGING, FLOW.format("f", 0, 30)), step_length=step)
    env.reset(seed=1)
    assert env.road.crosses.all() == every


def test_who_is_on_a_junction_is_left_alone(make, grid):
    """Told to brake there, an ICV was still in the way when the next one came, who had counted on its leaving."""
    for scenario, ignored in ((grid(FLOWS), True), ("figure_eight", False)):
        env = make(scenario=scenario, icv_share=1.0)
        env.reset(seed=1)
        crossing = np.flatnonzero(env.road.crosses & env.road.internal)
        assert len(crossing) and all(bool(env.routes.left_alone(0, lane, 5.0, 0.0)) == ignored for lane in crossing)
        assert not any(env.routes.left_alone(0, lane, 5.0, 0.0) for lane in np.flatnonzero(~env.road.internal))


def test_who_is_teleported_while_commanded_gets_its_checks_back(make, road):
    """It was forgotten while it was on no lane, and drove on without SUMO's checks, beyond the speed limit, for up to
    400 steps."""
    env = make(scenario=road(*MERGING, FLOW.format("f", 0, 30)))
    env.reset(seed=1)
    env.driven = {b"away": 26}
    assert env._commands([], [], [], [])[0] == [] and env.driven == {b"away": 26}
    env.present = {b"away"}
    assert env._commands([], [], [], [])[0] == [SetModes(b"away", ALL_CHECKS, OWN_LANE_CHANGES)]
    assert env.driven == {}


def test_shipped_networks_are_found_from_any_folder(tmp_path, monkeypatch):
    """configs/roads_train.yaml worked in the project's folder only."""
    cfg = load_config("configs/roads_train.yaml").variants()[-1]
    monkeypatch.chdir(tmp_path)
    assert cfg.env.scenario == "configs/town/town.sumocfg" and Path(build_scenario(cfg, tmp_path)).is_file()
    assert "town.net.xml" in scenario_hashes(cfg.env.scenario)
    with pytest.raises(SumoError, match="no such file"):
        build_scenario(load_config("configs/smoke.yaml", ["env.scenario=configs/village.sumocfg"]), tmp_path)


def test_mesoscopic_configurations_are_simulated_vehicle_by_vehicle(road):
    """Nobody was on a lane: all speeds were 0, and nobody could be commanded."""
    path = road(LIGHT, STRAIGHT.format(1), FLOW.format("f", 0, 30),
                '<mesoscopic><mesosim value="true"/></mesoscopic><traci_server><num-clients value="2"/></traci_server>')
    env = TrafficEnv(load_config("configs/smoke.yaml", [f"env.scenario={path}"]))
    try:
        env.reset(seed=1)
        speeds = [env.command([], [], [], [])[0]["nodes"][:, SPEED].max() for _ in range(15)]
    finally:
        env.close()
    assert max(speeds) > 5
