"""The built-in road networks and their demand, as netconvert's and SUMO's XML.

Each network is a function (configuration, end of the demand in s) -> {file name without .xml: lines of its elements}.
The figure eight, the merge and the bottleneck are the benchmark scenes of Flow (Vinitsky et al. 2018).
"""
import bisect
import itertools
import math

ACCELERATION_LANE_M, STRETCH_M, RAMP_DX, RAMP_DY = 150, 500, 250, 80  # corridor geometry, m
INFLOW_M, MERGE_RADIUS_M = 100, 10                                    # merge
BOTTLENECK_X, ZIPPER_RADIUS_M = (0, 100, 410, 550, 830, 985), 20      # where its edges begin and the last one ends, m
BOTTLENECK_LANES, BOTTLENECK_SPEED = (4, 4, 4, 2, 1), 23              # times `lanes`; m/s
SPEED_LIMIT = 30                                                      # m/s
STAY_ON_LANE = ' lcStrategic="-1" lcSpeedGain="0" lcKeepRight="0" lcCooperative="0"'


def corridor(cfg, end):
    """A mainline with on-ramps: each joins lane 0 of a section with one lane more, which ends after 150 m."""
    c, nodes, edges, links, x = cfg.corridor, [_node("n0", 0, 0)], [], [], 600
    for i in range(c.ramps):
        start = "n0" if i == 0 else f"x{i - 1}"
        nodes += [_node(f"m{i}", x, 0), _node(f"x{i}", x + ACCELERATION_LANE_M, 0),
                  _node(f"r{i}", x - RAMP_DX, -RAMP_DY)]
        edges += [_edge(f"main{i}", start, f"m{i}", c.lanes, SPEED_LIMIT, 2),
                  _edge(f"acc{i}", f"m{i}", f"x{i}", c.lanes + 1, SPEED_LIMIT, 2),
                  _edge(f"ramp{i}", f"r{i}", f"m{i}", 1, 20, 1)]
        links += [_link(f"ramp{i}", f"acc{i}", 0, 0)]
        for lane in range(c.lanes):
            links += [_link(f"main{i}", f"acc{i}", lane, lane + 1), _link(f"acc{i}", f"main{i + 1}", lane + 1, lane)]
        x += ACCELERATION_LANE_M + STRETCH_M
    nodes.append(_node("z", x, 0))
    edges.append(_edge(f"main{c.ramps}", f"x{c.ramps - 1}", "z", c.lanes, SPEED_LIMIT, 2))
    # Two equal types drawn by SUMO keep its random numbers, and so every trajectory, those of the reference inputs;
    # which vehicles are ICVs is drawn by the environment.
    routes = ['<vTypeDistribution id="drivers">', _driver(cfg.driver, "HV", ' probability="0.75"'),
              _driver(cfg.driver, "CV", ' probability="0.25"'), "</vTypeDistribution>"]
    flows = [("main", "main0", c.main_flow)] + [(f"f{i}", f"ramp{i}", c.ramp_flow) for i in range(c.ramps)]
    routes += [_flow(name, "drivers", origin, f"main{c.ramps}", end, flow, 'departLane="best" departSpeed="max"')
               for name, origin, flow in flows]
    return {"nodes": nodes, "edges": edges, "connections": links, "routes": routes}


def ring(cfg, end):
    """One lane in a circle of four arcs; every vehicle drives laps from its own starting place for ever."""
    quarter, radius = cfg.ring.length_m / 4, cfg.ring.length_m / (2 * math.pi)
    nodes, edges = [], []
    for q in range(4):
        x, y = radius * math.cos(q * math.pi / 2), radius * math.sin(q * math.pi / 2)
        nodes.append(_node(f"n{q}", f"{x:.3f}", f"{y:.3f}"))
        arc = [q * math.pi / 2 + i * math.pi / 40 for i in range(21)]
        shape = " ".join(f"{radius * math.cos(a):.3f},{radius * math.sin(a):.3f}" for a in arc)
        edges.append(_edge(f"arc{q}", f"n{q}", f"n{(q + 1) % 4}", 1, SPEED_LIMIT, 1,
                           f' length="{quarter:.3f}" shape="{shape}"'))
    routes = [*_scene_driver(cfg.ring.driver), *_laps([(f"arc{q}", quarter) for q in range(4)], cfg.ring.vehicles)]
    return {"nodes": nodes, "edges": edges, "routes": routes}


def figure_eight(cfg, end):
    """Two arcs of 270 degrees joined by two straight roads that cross; the one from south to north has priority.

    The literature runs 14 vehicles for 150 s in steps of 0.1 s; uncontrolled 4.7 m/s (mean speed, SUMO 1.28).
    """
    c, r = cfg.figure_eight, cfg.figure_eight.radius_m
    nodes = [_node("centre", 0, 0), _node("north", 0, r), _node("east", r, 0), _node("west", -r, 0),
             _node("south", 0, -r)]
    turn = [1.5 * math.pi * i / 60 for i in range(61)]
    upper = [(r * (1 - math.cos(t)), r * (1 + math.sin(t))) for t in turn]
    lower = [(-y, -x) for x, y in upper]
    # Edge, from, to, priority, length, shape.
    roads = [("south_in", "south", "centre", 2, r, ()), ("north_out", "centre", "north", 2, r, ()),
             ("upper", "north", "east", 1, 1.5 * math.pi * r, upper),
             ("east_in", "east", "centre", 1, r, ()), ("west_out", "centre", "west", 1, r, ()),
             ("lower", "west", "south", 1, 1.5 * math.pi * r, lower)]
    edges = [_edge(name, start, to, 1, SPEED_LIMIT, priority, _centred(length, shape))
             for name, start, to, priority, length, shape in roads]
    links = [_link("south_in", "north_out", 0, 0), _link("east_in", "west_out", 0, 0)]
    # Half a gap from the start of the loop on: else two of 14 cars would stand on the crossing, in each other's way.
    routes = [*_scene_driver(c.driver), *_laps([(name, length) for name, _, _, _, length, _ in roads], c.vehicles, 0.5)]
    return {"nodes": nodes, "edges": edges, "connections": links, "routes": routes}


def merge(cfg, end):
    """A road of one lane joined by another at 45 degrees without an acceleration lane. Neither has priority: right goes
    before left, so the mainline yields.

    The literature runs 2000 and 100 veh/h for 750 s in steps of 0.5 s; uncontrolled 5.32 m/s (mean speed, SUMO 1.28).
    """
    c, slope = cfg.merge, math.sqrt(0.5)
    x, far = c.main_length_m, c.ramp_length_m + INFLOW_M
    nodes = [_node("begin", -INFLOW_M, 0), _node("main", 0, 0), _node("join", x, 0, f' radius="{MERGE_RADIUS_M}"'),
             _node("end", x + c.after_length_m, 0),
             _node("ramp_begin", f"{x - far * slope:.3f}", f"{-far * slope:.3f}"),
             _node("ramp", f"{x - c.ramp_length_m * slope:.3f}", f"{-c.ramp_length_m * slope:.3f}")]
    edges = [_edge(name, start, to, 1, SPEED_LIMIT, 1, _centred(length)) for name, start, to, length in (
        ("main0", "begin", "main", INFLOW_M), ("main1", "main", "join", c.main_length_m),
        ("main2", "join", "end", c.after_length_m),
        ("ramp0", "ramp_begin", "ramp", INFLOW_M), ("ramp1", "ramp", "join", c.ramp_length_m))]
    routes = [*_scene_driver(c.driver),
              _flow("main", "driver", "main0", "main2", end, c.main_flow, 'departLane="free" departSpeed="10"'),
              _flow("ramp", "driver", "ramp0", "main2", end, c.ramp_flow, 'departLane="free" departSpeed="7.5"')]
    return {"nodes": nodes, "edges": edges, "routes": routes}


def bottleneck(cfg, end):
    """4 n lanes become 2 n at x = 550 m and n at x = 830 m, two into one by zipper; drivers stay on their lane.

    The literature runs 2500 n veh/h in steps of 0.5 s, 20 s of warm-up and 500 to 750 s; uncontrolled, 1541 veh/h
    arrive in the last 500 s (n = 1, SUMO 1.28).
    """
    c, x, last = cfg.bottleneck, BOTTLENECK_X, len(BOTTLENECK_LANES) - 1
    nodes = [_node(f"n{i}", x[i], 0, f' radius="{ZIPPER_RADIUS_M}"', "zipper") if i in (last - 1, last)
             else _node(f"n{i}", x[i], 0) for i in range(len(x))]
    edges = [_edge(f"e{i}", f"n{i}", f"n{i + 1}", lanes * c.lanes, BOTTLENECK_SPEED, 1, _centred(x[i + 1] - x[i]))
             for i, lanes in enumerate(BOTTLENECK_LANES)]
    links = [_link(f"e{i}", f"e{i + 1}", lane, lane // 2)
             for i in (last - 2, last - 1) for lane in range(BOTTLENECK_LANES[i] * c.lanes)]
    routes = [*_scene_driver(c.driver, STAY_ON_LANE), _flow(
        "flow", "driver", "e0", f"e{last}", end, c.flow * c.lanes, 'departLane="random" departSpeed="10"')]
    return {"nodes": nodes, "edges": edges, "connections": links, "routes": routes}


NETWORKS = {"corridor": corridor, "ring": ring, "figure_eight": figure_eight, "merge": merge, "bottleneck": bottleneck}


def _laps(loop, count, first=0.0):
    """Routes and `count` vehicles evenly spaced, at rest, on a closed road of [(edge, length m)]; laps without end. The
    first car stands `first` of a gap from the beginning."""
    names, begins = [name for name, _ in loop], [0.0, *itertools.accumulate(length for _, length in loop)]
    lines = [f'<route id="laps{q}" edges="{" ".join(names[q:] + names[:q])}" repeat="1000"/>' for q in range(len(loop))]
    for i in range(count):
        place = (i + first) * begins[-1] / count
        q = bisect.bisect(begins, place) - 1
        lines.append(f'<vehicle id="car{i}" type="driver" route="laps{q}" depart="0" departLane="0" '
                     f'departPos="{place - begins[q]:.3f}" departSpeed="0"/>')
    return lines


def _driver(d, name="driver", more=""):
    return (f'<vType id="{name}" carFollowModel="{d.model}" accel="{d.accel}" decel="{d.decel}" sigma="{d.sigma}" '
            f'tau="{d.tau}" maxSpeed="{d.max_speed}"{more}/>')


def _scene_driver(d, more=""):
    """A driver with all numbers of a SceneDriverConfig; below full awareness SUMO adds errors of perception."""
    opening = _driver(d, more=f' minGap="{d.min_gap_m}" speedDev="{d.speed_dev}" impatience="{d.impatience}"{more}')
    if d.awareness == 1:
        return [opening]
    return [opening.replace("/>", ">"), '    <param key="has.driverstate.device" value="true"/>',
            f'    <param key="device.driverstate.initialAwareness" value="{d.awareness}"/>', "</vType>"]


def _flow(name, kind, origin, destination, end, flow, departure):
    return (f'<flow id="{name}" type="{kind}" from="{origin}" to="{destination}" begin="0" end="{end}" '
            f'vehsPerHour="{flow}" {departure}/>')


def _node(name, x, y, more="", kind="priority"):
    return f'<node id="{name}" x="{x}" y="{y}" type="{kind}"{more}/>'


def _edge(name, start, end, lanes, speed, priority, more=""):
    return (f'<edge id="{name}" from="{start}" to="{end}" numLanes="{lanes}" speed="{speed}" '
            f'priority="{priority}"{more}/>')


def _centred(length, shape=()):
    """Of an edge: its lanes lie on the line between its nodes (or on `shape`, [(x, y)] m) and count as `length` m."""
    points = " ".join(f"{x:.3f},{y:.3f}" for x, y in shape)
    return f' spreadType="center" length="{length:.3f}"' + (f' shape="{points}"' if shape else "")


def _link(start, end, lane, to_lane):
    return f'<connection from="{start}" to="{end}" fromLane="{lane}" toLane="{to_lane}"/>'
