"""Settings of the built-in scenarios, their human drivers, and the controllers to compare with."""
import ast
from dataclasses import dataclass
from pathlib import Path

from configs.options import opt, sub


def baseline_names():
    """Names of the controllers: the keys of BASELINES in env/baselines.py. That file is read, not imported (configs
    imports nothing of the project), so that a new controller is one file's change and a mistyped one is refused."""
    source = ast.parse((Path(__file__).parent.parent / "env" / "baselines.py").read_text(encoding="utf-8"))
    tables = {ast.unparse(s.targets[0]): s.value for s in source.body if isinstance(s, ast.Assign)}
    return tuple(key.value for key in tables["BASELINES"].keys)


BASELINES = baseline_names()


@dataclass
class CorridorConfig:
    """Mainline with on-ramps."""
    main_flow: float = opt(2800.0, "mainline demand, veh/h", low=1)
    ramp_flow: float = opt(800.0, "demand of each on-ramp, veh/h", low=1)
    lanes: int = opt(2, "mainline lanes", low=1, high=6)
    ramps: int = opt(2, "on-ramps, each with a 150 m acceleration lane", low=1, high=8)


@dataclass
class DriverConfig:
    """SUMO's car-following model of human drivers."""
    model: str = opt("Krauss", "SUMO car-following model")
    accel: float = opt(0.8, "m/s^2", low=0.1)
    decel: float = opt(4.5, "comfortable braking, m/s^2", low=0.1)
    sigma: float = opt(0.5, "driver imperfection (Krauss; SUMO's IDM has none)", low=0, high=1)
    tau: float = opt(1.0, "desired time headway, s", low=0.1)
    max_speed: float = opt(30.0, "m/s", low=1)


@dataclass
class SceneDriverConfig(DriverConfig):
    """The same for the scenes from the literature."""
    min_gap_m: float = opt(2.5, "gap at standstill, m", low=0)
    speed_dev: float = opt(0.1, "spread of the drivers' desired speeds, share of the speed limit", low=0, high=1)
    impatience: float = opt(0.5, "willingness to make others brake at junctions", low=0, high=1)
    awareness: float = opt(1.0, "below 1 the driver misjudges gaps and speeds (SUMO's driver state device)",
                           low=0.1, high=1)


RESTLESS = {"model": "IDM", "accel": 1.0, "decel": 1.5, "sigma": 0.0, "min_gap_m": 2.0}  # with them, waves form


@dataclass
class RingConfig:
    """One lane in a circle."""
    length_m: float = opt(230.0, "circumference, m", low=60)
    vehicles: int = opt(22, "vehicles on the ring, evenly spaced at the start", low=2, high=200)
    driver: SceneDriverConfig = sub(SceneDriverConfig, awareness=0.7, **RESTLESS)


@dataclass
class FigureEightConfig:
    """Two arcs that cross."""
    radius_m: float = opt(30.0, "radius of the two arcs and length of the four legs, m", low=15)
    vehicles: int = opt(14, "vehicles on the loop, evenly spaced at the start", low=2, high=200)
    driver: SceneDriverConfig = sub(SceneDriverConfig, awareness=0.5, **RESTLESS)


@dataclass
class MergeConfig:
    """A road joins a mainline of one lane."""
    main_flow: float = opt(1250.0, "mainline demand, veh/h (2000 in the literature)", low=1)
    ramp_flow: float = opt(100.0, "demand of the joining road, veh/h", low=1)
    main_length_m: float = opt(500.0, "mainline before the junction, behind 100 m of inflow, m", low=50)
    ramp_length_m: float = opt(100.0, "joining road before the junction, behind 100 m of inflow, m", low=50)
    after_length_m: float = opt(100.0, "road after the junction, m", low=50)
    driver: SceneDriverConfig = sub(SceneDriverConfig, model="IDM", accel=2.6, sigma=0.0)


@dataclass
class BottleneckConfig:
    """Lanes halve twice."""
    flow: float = opt(2000.0, "demand per lane of the exit, veh/h (2500 in the literature)", low=1)
    lanes: int = opt(1, "n, lanes of the exit: 4 n lanes at the entrance, 2 n in between", low=1, high=8)
    driver: SceneDriverConfig = sub(SceneDriverConfig, model="IDM", accel=2.6, sigma=0.0)


@dataclass
class AdviceConfig:
    """Lane and speed advice."""
    reach_m: float = opt(314.0, "ICVs in the right lane this near to a merge move left, m", low=0, high=500)
    vehicles: int = opt(1, "if so many vehicles are on the joining road", low=0)
    gap_m: float = opt(0.0, "and the gaps to the left in front and behind are so long, m, 0 = drivers find one", low=0)
    ahead: float = opt(0.26, "speed advice looks so far ahead, share of the network's length", low=0, high=1)
    gain: float = opt(0.0, "m/s^2 per m/s of difference to the mean speed ahead, 0 = no speed advice", low=0)
    offset: float = opt(0.0, "added to the mean speed ahead, m/s")
    margin: float = opt(0.0, "only for ICVs so much faster than the mean ahead, m/s", low=0)
    below: float = opt(20.0, "only where the mean ahead is lower, m/s", low=0)
    above: float = opt(0.0, "and higher than this, m/s: in a jam that is there advice only costs", low=0)
    brake: float = opt(1.5, "strongest braking of the speed advice, m/s^2", low=0, high=3)
    behind_m: float = opt(0.0, "not for ICVs that have somebody 1 m/s slower so near in front, m: they will brake "
                               "anyway; 0 = for them too", low=0, high=200)
    hold: float = opt(0.0, "and those less than this slower than the mean ahead keep their speed, m/s: not in "
                           "a jam; 0 = nobody", low=0)
    accel: float = opt(1.0, "strongest acceleration of the speed advice, m/s^2", low=0, high=2)
    meter_brake: float = opt(0.0, "braking of ICVs on a ramp, m/s^2, 0 = no ramp metering", low=0, high=3)
    meter_above: float = opt(8.9, "only of those that are faster, m/s", low=0)
    meter_ahead: float = opt(0.14, "ramp metering looks so far ahead, share of the network's length", low=0, high=1)
    meter_below: float = opt(11.5, "only where the mean speed behind the merge is lower, m/s", low=0)
    cruise: float = opt(0.0, "with picks that are left, ICVs keep to this speed, m/s, 0 = no such advice", low=0)
    cruise_margin: float = opt(2.6, "those at most so much slower, m/s", low=0)
    cruise_gain: float = opt(0.3, "m/s^2 per m/s of difference to that speed", low=0)
    cruise_brake: float = opt(0.75, "strongest braking to it, m/s^2", low=0, high=3)
    cruise_accel: float = opt(0.3, "strongest acceleration to it, m/s^2", low=0, high=2)
    cruise_lane: int = opt(0, "only in this lane and those to its left, 0 = the right lane", low=0)


@dataclass
class FollowerStopperConfig:
    """FollowerStopper."""
    floor: float = opt(15.0, "least desired speed, m/s", low=0)


@dataclass
class IDMConfig:
    """Intelligent Driver Model."""
    desired_speed: float = opt(30.0, "m/s", low=1)
    headway: float = opt(1.0, "desired time gap, s", low=0)
    accel: float = opt(1.0, "m/s^2", low=0.1)
    decel: float = opt(1.5, "comfortable braking, m/s^2", low=0.1)
    exponent: float = opt(4.0, "of the free-road term", low=1)
    min_gap_m: float = opt(2.0, "desired gap at standstill, m", low=0)


@dataclass
class PISaturationConfig:
    """PI controller with saturation."""
    history_s: float = opt(38.0, "the mean speed is taken over so long, s", low=0)
    gap_low_m: float = opt(7.0, "gap from which on the vehicle catches up, m", low=0)
    gap_high_m: float = opt(30.0, "gap at which it does so fully, m", low=0)
    catch_up: float = opt(1.0, "m/s above the mean speed", low=0)
    gamma_m: float = opt(2.0, "gap over which it passes from the leader's speed to its own, m", low=0.01)
    min_gap_m: float = opt(4.0, "smallest gap, m", low=0)
    min_gap_s: float = opt(2.0, "the same, s times the leader's excess of speed", low=0)


TUNED = {"reach_m": 259.0, "vehicles": 3, "gain": 1.04, "offset": -0.35, "margin": 0.7, "below": 20.1, "brake": 1.76}


@dataclass
class BaselinesConfig:
    """Numbers of the controllers in env/baselines.py, by name."""
    lane_advice: AdviceConfig = sub(AdviceConfig)
    speed_advice: AdviceConfig = sub(AdviceConfig, **TUNED)
    tuned: AdviceConfig = sub(AdviceConfig, **TUNED, meter_brake=0.31)
    harmonise: AdviceConfig = sub(AdviceConfig, reach_m=136.0, ahead=0.33, gain=0.85, offset=-3.7, margin=1.0,
                                  below=19.8, above=17.0, brake=2.7, cruise=25.0)
    follower_stopper: FollowerStopperConfig = sub(FollowerStopperConfig)
    idm: IDMConfig = sub(IDMConfig)
    pi_saturation: PISaturationConfig = sub(PISaturationConfig)
