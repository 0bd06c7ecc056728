"""Built-in scenarios, generated from numbers by netconvert, and user networks given as a .sumocfg.

`build_scenario` is the only entry: it returns the path of a .sumocfg that SUMO can run.
"""
import hashlib
import json
import math
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path

from env.launch import SumoError, find_binary, sumo_environment

ACCELERATION_LANE_M, STRETCH_M, RAMP_DX, RAMP_DY = 150, 500, 250, 80  # corridor geometry, m
BUILT_IN = ("corridor", "ring")


def build_scenario(cfg, folder):
    """Path of the .sumocfg of `cfg.env.scenario`; built-in ones are generated once below `folder`.

    The folder's name holds a hash of every number that went in, so several demands live side by side.
    Raises SumoError (with SUMO's own words) for a missing file or a network that netconvert refuses.
    """
    name = cfg.env.scenario
    if name not in BUILT_IN:
        return _user_scenario(name)
    numbers = json.dumps([asdict(getattr(cfg, name)), asdict(cfg.driver), cfg.env.horizon_s, cfg.env.warmup_s])
    target = Path(folder) / f"{name}-{hashlib.sha1(numbers.encode()).hexdigest()[:8]}"
    config = target / f"{name}.sumocfg"
    if not config.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        try:
            {"corridor": _corridor, "ring": _ring}[name](cfg, work)
            _netconvert(work, name)
            os.replace(work, target)
        except OSError:  # another process was first
            if not config.exists():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return str(config)


def _user_scenario(name):
    path = Path(name)
    if path.suffix != ".sumocfg":
        raise SumoError(f"env.scenario: {name!r} is neither built in ({', '.join(BUILT_IN)}) nor a .sumocfg file")
    if not path.is_file():
        raise SumoError(f"env.scenario: {path}: no such file")
    return str(path.resolve())


def _netconvert(work, name):
    parts = [f"-n={work / 'nodes.xml'}", f"-e={work / 'edges.xml'}", f"-o={work / (name + '.net.xml')}"]
    if (work / "connections.xml").exists():
        parts.append(f"-x={work / 'connections.xml'}")
    command = [find_binary("netconvert"), *parts, "--no-turnarounds", "true", "--xml-validation", "never"]
    done = subprocess.run(command, capture_output=True, text=True, env=sumo_environment())
    if done.returncode:
        raise SumoError(f"netconvert refused the network of scenario {name!r}:\n{done.stderr.strip()}")
    (work / f"{name}.sumocfg").write_text(_xml("configuration", [
        f'<input><net-file value="{name}.net.xml"/><route-files value="routes.xml"/></input>']))


def _xml(root, lines):
    return f"<{root}>\n" + "\n".join("    " + line for line in lines) + f"\n</{root}>\n"


def _driver(cfg, name="driver", more=""):
    d = cfg.driver
    return (f'<vType id="{name}" carFollowModel="{d.model}" accel="{d.accel}" decel="{d.decel}" sigma="{d.sigma}" '
            f'tau="{d.tau}" maxSpeed="{d.max_speed}"{more}/>')


def _corridor(cfg, work):
    """A mainline with on-ramps: each joins lane 0 of a section with one lane more, which ends after 150 m."""
    c, nodes, edges, links, x = cfg.corridor, ['<node id="n0" x="0" y="0" type="priority"/>'], [], [], 600
    for i in range(c.ramps):
        start = "n0" if i == 0 else f"x{i - 1}"
        nodes += [f'<node id="m{i}" x="{x}" y="0" type="priority"/>',
                  f'<node id="x{i}" x="{x + ACCELERATION_LANE_M}" y="0" type="priority"/>',
                  f'<node id="r{i}" x="{x - RAMP_DX}" y="-{RAMP_DY}" type="priority"/>']
        edges += [_edge(f"main{i}", start, f"m{i}", c.lanes, 30, 2),
                  _edge(f"acc{i}", f"m{i}", f"x{i}", c.lanes + 1, 30, 2),
                  _edge(f"ramp{i}", f"r{i}", f"m{i}", 1, 20, 1)]
        links += [_link(f"ramp{i}", f"acc{i}", 0, 0)]
        for lane in range(c.lanes):
            links += [_link(f"main{i}", f"acc{i}", lane, lane + 1), _link(f"acc{i}", f"main{i + 1}", lane + 1, lane)]
        x += ACCELERATION_LANE_M + STRETCH_M
    nodes.append(f'<node id="z" x="{x}" y="0" type="priority"/>')
    edges.append(_edge(f"main{c.ramps}", f"x{c.ramps - 1}", "z", c.lanes, 30, 2))
    end = cfg.env.horizon_s + cfg.env.warmup_s
    flows = [("main", "main0", c.main_flow)] + [(f"f{i}", f"ramp{i}", c.ramp_flow) for i in range(c.ramps)]
    # Two equal types drawn by SUMO keep its random numbers, and so every trajectory, those of the reference inputs;
    # which vehicles are ICVs is drawn by the environment.
    routes = ['<vTypeDistribution id="drivers">', _driver(cfg, "HV", ' probability="0.75"'),
              _driver(cfg, "CV", ' probability="0.25"'), "</vTypeDistribution>"] + [
        f'<flow id="{name}" type="drivers" from="{origin}" to="main{c.ramps}" begin="0" end="{end}" '
        f'vehsPerHour="{flow}" departLane="best" departSpeed="max"/>' for name, origin, flow in flows]
    for file, root, lines in (("nodes.xml", "nodes", nodes), ("edges.xml", "edges", edges),
                              ("connections.xml", "connections", links), ("routes.xml", "routes", routes)):
        (work / file).write_text(_xml(root, lines))


def _ring(cfg, work):
    """One lane in a circle of four arcs; every vehicle drives laps from its own starting place for ever."""
    quarter, radius, count = cfg.ring.length_m / 4, cfg.ring.length_m / (2 * math.pi), cfg.ring.vehicles
    nodes, edges, routes = [], [], [_driver(cfg)]
    for q in range(4):
        x, y = radius * math.cos(q * math.pi / 2), radius * math.sin(q * math.pi / 2)
        nodes.append(f'<node id="n{q}" x="{x:.3f}" y="{y:.3f}" type="priority"/>')
        arc = [q * math.pi / 2 + i * math.pi / 40 for i in range(21)]
        shape = " ".join(f"{radius * math.cos(a):.3f},{radius * math.sin(a):.3f}" for a in arc)
        edges.append(_edge(f"arc{q}", f"n{q}", f"n{(q + 1) % 4}", 1, 30, 1, f' length="{quarter:.3f}" shape="{shape}"'))
        order = " ".join(f"arc{(q + i) % 4}" for i in range(4))
        routes.append(f'<route id="laps{q}" edges="{order}" repeat="1000"/>')
    for i in range(count):
        place = i * cfg.ring.length_m / count
        q = int(place // quarter)
        routes.append(f'<vehicle id="car{i}" type="driver" route="laps{q}" depart="0" departLane="0" '
                      f'departPos="{place - q * quarter:.3f}" departSpeed="0"/>')
    for file, root, lines in (("nodes.xml", "nodes", nodes), ("edges.xml", "edges", edges),
                              ("routes.xml", "routes", routes)):
        (work / file).write_text(_xml(root, lines))


def _edge(name, start, end, lanes, speed, priority, more=""):
    return (f'<edge id="{name}" from="{start}" to="{end}" numLanes="{lanes}" speed="{speed}" '
            f'priority="{priority}"{more}/>')


def _link(start, end, lane, to_lane):
    return f'<connection from="{start}" to="{end}" fromLane="{lane}" toLane="{to_lane}"/>'
