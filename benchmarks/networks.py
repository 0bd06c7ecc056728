"""Networks drawn for benchmarks.transfer: crossings with traffic lights, a signalled main road, a roundabout, each with
cars, trucks, buses and motorcycles."""
import subprocess
from itertools import permutations

from env.launch import SumoError, find_binary, sumo_environment

TYPES = """<vTypeDistribution id="mix">
  <vType id="car" probability="0.7"/>
  <vType id="truck" vClass="truck" probability="0.12"/>
  <vType id="bus" vClass="bus" probability="0.08"/>
  <vType id="motorcycle" vClass="motorcycle" probability="0.1"/>
</vTypeDistribution>"""
GRID = ("--grid", "--grid.length", "200", "--grid.attach-length", "200", "--default.lanenumber", "2",
        "--default-junction-type", "traffic_light", "--tls.layout", "incoming", "--no-turnarounds", "true")


def networks(folder, end):
    """Draw the networks and their demand until `end` s into `folder`: paths of their .sumocfg files."""
    folder.mkdir(parents=True, exist_ok=True)
    run("netgenerate", *GRID, "--grid.x-number", "3", "--grid.y-number", "3", "-o", folder / "lights.net.xml")
    run("netgenerate", *GRID, "--grid.x-number", "5", "--grid.y-number", "1", "-o", folder / "main_road.net.xml")
    sides = [f"{side}{i}" for i in range(3) for side in ("left", "right", "top", "bottom")]
    crossings = {"left": lambda i: f"A{i}", "right": lambda i: f"C{i}", "top": lambda i: f"{'ABC'[i]}2",
                 "bottom": lambda i: f"{'ABC'[i]}0"}
    arms = {side: crossings[side[:-1]](int(side[-1])) for side in sides}
    road = {"left0": "A0", "right0": "E0", **{f"{s}{i}": f"{'ABCDE'[i]}0" for s in ("top", "bottom") for i in range(5)}}
    round_nodes, round_edges, ends = roundabout()
    (folder / "nodes.xml").write_text(round_nodes)
    (folder / "edges.xml").write_text(round_edges)
    run("netconvert", "-n", folder / "nodes.xml", "-e", folder / "edges.xml", "-o", folder / "roundabout.net.xml",
        "--no-turnarounds", "true")
    both = {"left0": 700.0, "right0": 700.0}
    return [scenario(folder, "lights", end, arms, dict.fromkeys(sides, 450.0)),
            scenario(folder, "main_road", end, road, {**dict.fromkeys(road, 120.0), **both}),
            scenario(folder, "roundabout", end, ends, dict.fromkeys(ends, 550.0))]


def roundabout():
    """(nodes, edges, {arm: its node on the ring}) of a roundabout of 25 m with four arms of 200 m. Who is on the ring
    has right of way."""
    places = {"e": (1, 0), "n": (0, 1), "w": (-1, 0), "s": (0, -1)}
    nodes = [f'<node id="{name}{part}" x="{x * far}" y="{y * far}"/>'
             for name, (x, y) in places.items() for part, far in (("", 225), ("r", 25))]
    names = list(places)
    pairs = [(f"{a}r", f"{b}r") for a, b in zip(names, names[1:] + names[:1])]
    pairs += [pair for name in names for pair in ((name, f"{name}r"), (f"{name}r", name))]
    kind = {True: 'speed="8" priority="2"', False: 'speed="14" priority="1"'}  # on the ring, to or from it
    edges = [f'<edge id="{a}{b}" from="{a}" to="{b}" numLanes="1" {kind[bool(a[1:] and b[1:])]}/>' for a, b in pairs]
    arms = {name: f"{name}r" for name in names}
    return f"<nodes>{''.join(nodes)}</nodes>", f"<edges>{''.join(edges)}</edges>", arms


def scenario(folder, name, end, arms, demand):
    """Path of a .sumocfg: from each arm `demand` veh/h, evenly to all others. An arm's edges are arm + node and node +
    arm."""
    flows = [f'<flow id="{a}_{b}" type="mix" from="{a}{arms[a]}" to="{arms[b]}{b}" begin="0" end="{end}" '
             f'vehsPerHour="{demand[a] / (len(arms) - 1):.1f}" departLane="best" departSpeed="max"/>'
             for a, b in permutations(arms, 2)]
    (folder / f"{name}.rou.xml").write_text(f"<routes>{TYPES}{''.join(flows)}</routes>")
    return configuration(folder, name)


def drawn(folder, name, parts, routes):
    """Path of a .sumocfg: a network of parts ({"nodes": [...], "edges": [...]}, perhaps "connections") and <routes>."""
    folder.mkdir(parents=True, exist_ok=True)
    options = []
    for kind, items in parts.items():
        path = folder / f"{name}.{kind}.xml"
        path.write_text(f"<{kind}>{''.join(items)}</{kind}>")
        options += [f"--{kind[:-1]}-files", path]
    run("netconvert", *options, "-o", folder / f"{name}.net.xml", "--no-turnarounds", "true")
    (folder / f"{name}.rou.xml").write_text(routes)
    return configuration(folder, name)


def configuration(folder, name):
    """Path of the .sumocfg, written here, of the network and the routes of that name."""
    path = folder / f"{name}.sumocfg"
    path.write_text(f'<configuration><input><net-file value="{name}.net.xml"/><route-files value="{name}.rou.xml"/>'
                    "</input></configuration>")
    return path


def run(program, *arguments):
    done = subprocess.run([find_binary(program), *map(str, arguments)], capture_output=True, text=True,
                          env=sumo_environment())
    if done.returncode:
        raise SumoError(f"{program}: {done.stderr.strip()}")
