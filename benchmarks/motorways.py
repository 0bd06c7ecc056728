"""Random motorways for benchmarks.transfer: two to four lanes, ramps, weaving sections, lane drops, other drivers.

Everything follows from a motorway's number. Sections of 400 to 800 m lie between two to four elements, each 250 m long:
an on-ramp from the right or the left, an off-ramp, both in one (weaving), or the end of a lane.
"""
import numpy as np

from benchmarks.networks import drawn

DRIVERS = ('carFollowModel="Krauss" accel="0.8"', 'carFollowModel="Krauss" accel="2.6"', 'carFollowModel="IDM"',
           'carFollowModel="EIDM"', 'carFollowModel="ACC"', 'carFollowModel="W99"')
DROPS = ("drop right", "drop left")
ELEMENTS = ("on right", "on left", "off", "weaving", *DROPS)
AUX_M, RAMP_M = 250.0, 300.0


class Motorway:
    """Nodes, edges and connections of one, drawn from the west; where traffic comes from and goes to."""

    def __init__(self, number):
        rng = self.rng = np.random.default_rng(number)
        self.lanes, self.limit, self.x = int(rng.integers(2, 5)), rng.uniform(25, 33), 0.0
        self.nodes, self.edges, self.links = [], [], []
        self.sources = {"main0": (0, self.lanes * rng.uniform(1000, 1600))}  # section where it joins, veh/h; by edge
        self.exits = {}  # section where it leaves, share of the traffic that does; by edge
        begin = self.node("start")
        for i, element in enumerate(rng.choice(ELEMENTS, rng.integers(2, 5))):
            self.section(i, begin)
            begin = self.ramps(i, element) if self.lanes == 2 or element not in DROPS else self.drop(i, element)
        self.section(i + 1, begin)
        self.exits[f"main{i + 1}"] = i + 1, 1.0

    def node(self, name, ahead=0.0, y=0.0):
        self.nodes.append(f'<node id="{name}" x="{self.x + ahead:.1f}" y="{y}"/>')
        return name

    def edge(self, name, begin, end, lanes, limit):
        self.edges.append(f'<edge id="{name}" from="{begin}" to="{end}" numLanes="{lanes}" speed="{limit:.1f}" '
                          'priority="2"/>')

    def link(self, begin, end, lanes, begin_shift=0, end_shift=0):
        self.links += [f'<connection from="{begin}" to="{end}" fromLane="{j + begin_shift}" toLane="{j + end_shift}"/>'
                       for j in range(lanes)]

    def section(self, i, begin):
        self.x += self.rng.uniform(400, 800)
        self.edge(f"main{i}", begin, self.node(f"a{i}"), self.lanes, self.limit)

    def auxiliary(self, i, lanes, after, shift):
        """The edge of element `i`, of which `after` lanes from number `shift` on lead to the next section."""
        self.x += AUX_M
        self.edge(f"aux{i}", f"a{i}", self.node(f"b{i}"), lanes, self.limit)
        self.link(f"aux{i}", f"main{i + 1}", after, shift)
        return f"b{i}"

    def drop(self, i, element):
        """The right or the left lane ends."""
        self.link(f"main{i}", f"aux{i}", self.lanes)
        self.lanes -= 1
        return self.auxiliary(i, self.lanes + 1, self.lanes, int(element == "drop right"))

    def ramps(self, i, element):
        """One more lane, with an on-ramp at its begin, an off-ramp at its end, or both; where a lane cannot end, an
        on-ramp from the right."""
        right = element != "on left"
        y = -150.0 if right else 150.0
        if element != "off":
            self.edge(f"ramp{i}", self.node(f"r{i}", -RAMP_M, y), f"a{i}", 1, 20.0)
            self.link(f"ramp{i}", f"aux{i}", 1, 0, 0 if right else self.lanes)
            self.sources[f"ramp{i}"] = i, self.rng.uniform(300, 900)
        else:
            self.link(f"main{i}", f"aux{i}", 1)  # onto the lane that leaves
        self.link(f"main{i}", f"aux{i}", self.lanes, 0, int(right))
        end = self.auxiliary(i, self.lanes + 1, self.lanes, int(right))
        if element in ("off", "weaving"):
            self.edge(f"off{i}", end, self.node(f"o{i}", RAMP_M, y), 1, 20.0)
            self.link(f"aux{i}", f"off{i}", 1)
            self.exits[f"off{i}"] = i, self.rng.uniform(0.1, 0.25)
        return end

    def demand(self, end):
        """<routes>: cars of two kinds of drivers and trucks; of who passes an off-ramp, a tenth to a quarter leave."""
        first, second = self.rng.choice(DRIVERS, 2, replace=False)
        share, trucks = self.rng.uniform(0.3, 0.7), self.rng.uniform(0.0, 0.2)
        types = [f'<vType id="one" {first} probability="{(1 - trucks) * share:.3f}"/>',
                 f'<vType id="two" {second} probability="{(1 - trucks) * (1 - share):.3f}"/>',
                 f'<vType id="truck" vClass="truck" probability="{trucks:.3f}"/>']
        flows = []
        for source, (joins, rate) in self.sources.items():
            for exit_, (leaves, part) in self.exits.items():
                if joins <= leaves:
                    flows.append(f'<flow id="{source}_{exit_}" type="mix" from="{source}" to="{exit_}" begin="0" '
                                 f'end="{end}" vehsPerHour="{rate * part:.1f}" departLane="best" departSpeed="max"/>')
                    rate *= 1 - part
        return f'<routes><vTypeDistribution id="mix">{"".join(types)}</vTypeDistribution>{"".join(flows)}</routes>'


def motorway(folder, number, end):
    """Draw motorway `number` and its demand until `end` s into `folder`: path of its .sumocfg."""
    road = Motorway(number)
    parts = {"nodes": road.nodes, "edges": road.edges, "connections": road.links}
    return drawn(folder, f"motorway{number}", parts, road.demand(end))
