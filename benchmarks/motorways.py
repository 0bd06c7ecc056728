"""Random motorways for benchmarks.transfer: two to four lanes, ramps, weaving sections, lane drops, other drivers.

Everything follows from a motorway's number. Sections of 400 to 800 m lie between two to four elements, each 250 m long:
an on-ramp from the right or the left, an off-ramp, both in one (weaving), or the end of a lane.
"""
import numpy as np

from benchmarks.networks import configuration, run

DRIVERS = ('carFollowModel="Krauss" accel="0.8"', 'carFollowModel="Krauss" accel="2.6"', 'carFollowModel="IDM"',
           'carFollowModel="EIDM"', 'carFollowModel="ACC"', 'carFollowModel="W99"')
ELEMENTS = ("on right", "on left", "off", "weaving", "drop right", "drop left")
AUX_M, RAMP_M = 250.0, 300.0


class Motorway:
    """Nodes, edges, connections and ends of one, drawn element by element from the west."""

    def __init__(self, number):
        rng = self.rng = np.random.default_rng(number)
        self.lanes, self.limit, self.x = int(rng.integers(2, 5)), rng.uniform(25, 33), 0.0
        self.nodes, self.edges, self.links, self.exits, self.last = [], [], [], [], None
        self.sources = {"main0": self.lanes * rng.uniform(1000, 1600)}  # veh/h by the edge where they start
        self.node("start")
        for i, element in enumerate(rng.choice(ELEMENTS, rng.integers(2, 5))):
            self.main(i)
            drop = element.startswith("drop")
            if drop and self.lanes == 2:
                element, drop = "on right", False
            self.drop(i, element) if drop else self.ramps(i, element)
        self.main(i + 1)
        self.exits.append((self.x, f"main{i + 1}", 1.0))

    def node(self, name, y=0.0):
        self.nodes.append(f'<node id="{name}" x="{self.x:.1f}" y="{y}"/>')
        return name

    def edge(self, name, begin, end, lanes, limit):
        self.edges.append(f'<edge id="{name}" from="{begin}" to="{end}" numLanes="{lanes}" speed="{limit:.1f}" '
                          'priority="2"/>')

    def link(self, begin, end, lanes, begin_shift=0, end_shift=0):
        self.links += [f'<connection from="{begin}" to="{end}" fromLane="{j + begin_shift}" toLane="{j + end_shift}"/>'
                       for j in range(lanes)]

    def main(self, i):
        """A section of motorway, continued from the element before it, if any."""
        begin = "start" if not i else f"b{i - 1}"
        self.x += self.rng.uniform(400, 800)
        self.edge(f"main{i}", begin, self.node(f"a{i}"), self.lanes, self.limit)
        if self.last:
            self.link(*self.last[:1], f"main{i}", self.lanes, self.last[1])

    def drop(self, i, element):
        """The right or the left lane ends."""
        self.x += AUX_M
        self.edge(f"aux{i}", f"a{i}", self.node(f"b{i}"), self.lanes, self.limit)
        self.link(f"main{i}", f"aux{i}", self.lanes)
        self.lanes, self.last = self.lanes - 1, (f"aux{i}", int(element == "drop right"))

    def ramps(self, i, element):
        """One more lane for 250 m, with an on-ramp at its begin, an off-ramp at its end, or both."""
        right, far = element != "on left", -150.0 if element != "on left" else 150.0
        outer, begin = (0 if right else self.lanes), f"a{i}"
        if element != "off":
            self.x -= RAMP_M
            source = self.node(f"r{i}", far)
            self.x += RAMP_M
            self.edge(f"ramp{i}", source, begin, 1, 20.0)
            self.link(f"ramp{i}", f"aux{i}", 1, 0, outer)
            self.sources[f"ramp{i}"] = self.rng.uniform(300, 900)
        else:
            self.link(f"main{i}", f"aux{i}", 1)  # onto the lane that leaves
        self.link(f"main{i}", f"aux{i}", self.lanes, 0, int(right))
        self.x += AUX_M
        self.edge(f"aux{i}", begin, self.node(f"b{i}"), self.lanes + 1, self.limit)
        self.last = (f"aux{i}", int(right))
        if element in ("off", "weaving"):
            self.x += RAMP_M
            self.edge(f"off{i}", f"b{i}", self.node(f"o{i}", far), 1, 20.0)
            self.x -= RAMP_M
            self.link(f"aux{i}", f"off{i}", 1)
            self.exits.append((self.x, f"off{i}", self.rng.uniform(0.1, 0.25)))

    def demand(self, end):
        """<routes>: cars of two kinds of drivers and trucks; of who passes an off-ramp, a tenth to a quarter leave."""
        first, second = self.rng.choice(DRIVERS, 2, replace=False)
        share, trucks = self.rng.uniform(0.3, 0.7), self.rng.uniform(0.0, 0.2)
        types = [f'<vType id="one" {first} probability="{(1 - trucks) * share:.3f}"/>',
                 f'<vType id="two" {second} probability="{(1 - trucks) * (1 - share):.3f}"/>',
                 f'<vType id="truck" vClass="truck" probability="{trucks:.3f}"/>']
        flows = []
        for source, rate in self.sources.items():
            for at, (_, exit_, leave) in enumerate(self.exits):
                if int(source[4:]) <= int(exit_.lstrip("mainof")):
                    flows.append(f'<flow id="{source}_{exit_}" type="mix" from="{source}" to="{exit_}" begin="0" '
                                 f'end="{end}" vehsPerHour="{rate * leave:.1f}" departLane="best" departSpeed="max"/>')
                    rate *= 1 - leave
        return f'<routes><vTypeDistribution id="mix">{"".join(types)}</vTypeDistribution>{"".join(flows)}</routes>'


def motorway(folder, number, end):
    """Draw motorway `number` and its demand until `end` s into `folder`: path of its .sumocfg."""
    folder.mkdir(parents=True, exist_ok=True)
    road, name = Motorway(number), f"motorway{number}"
    for kind, items in (("nodes", road.nodes), ("edges", road.edges), ("connections", road.links)):
        (folder / f"{name}.{kind}.xml").write_text(f"<{kind}>{''.join(items)}</{kind}>")
    run("netconvert", "-n", folder / f"{name}.nodes.xml", "-e", folder / f"{name}.edges.xml", "-x",
        folder / f"{name}.connections.xml", "-o", folder / f"{name}.net.xml", "--no-turnarounds", "true")
    (folder / f"{name}.rou.xml").write_text(road.demand(end))
    return configuration(folder, name)
