"""Random streets and roads without a merge for benchmarks.transfer: traffic lights, a lane that ends, a lower limit.

Everything follows from a road's number: one to three lanes, 14 to 33 m/s, two to five sections of 250 to 600 m, one or
two of four kinds of drivers. Number n has, by n modulo 5: traffic lights with a street that crosses at each (twice),
one lane less in its last section, half the limit there, or nothing.
"""
import numpy as np

from benchmarks.networks import drawn

DRIVERS = ('carFollowModel="Krauss" accel="0.8"', 'carFollowModel="Krauss" accel="2.6"', 'carFollowModel="IDM"',
           'carFollowModel="EIDM"')
KINDS = ("lights", "lights", "narrow", "limit", "plain")
LIMITS = (13.9, 16.7, 20.0, 22.2, 25.0, 27.8, 30.0, 33.3)
SIDE_M, SIDE_SPEED = 250.0, 13.9


class Street:
    """Nodes, edges and flows of one, from the west to the east; with traffic lights it has both directions."""

    def __init__(self, number, end):
        rng = self.rng = np.random.default_rng(number)
        self.kind, self.end = KINDS[number % len(KINDS)], end
        self.lanes, self.limit = int(rng.integers(1, 4)), float(rng.choice(LIMITS))
        self.lanes = max(self.lanes, 1 + (self.kind == "narrow"))  # one of them ends
        self.nodes, self.edges, self.flows = [], [], []
        sections = int(rng.integers(2, 6))
        for i, x in enumerate(np.cumsum([0.0, *rng.uniform(250, 600, sections)])):
            crossed = self.kind == "lights" and 0 < i < sections
            kind = "traffic_light" if crossed else "priority"
            self.nodes.append(f'<node id="n{i}" x="{x:.0f}" y="0" type="{kind}"/>')
            if crossed:
                self.crossing(i, x, sections - 1)
        for i in range(sections):
            self.section(i, last=i == sections - 1)
        self.through(sections - 1)

    def edge(self, name, begin, end, lanes, limit):
        self.edges.append(f'<edge id="{name}" from="{begin}" to="{end}" numLanes="{lanes}" speed="{limit:.1f}" '
                          f'priority="{2 if begin[0] == end[0] else 1}"/>')

    def flow(self, begin, end, rate):
        self.flows.append(f'<flow id="{begin}_{end}" type="mix" from="{begin}" to="{end}" begin="0" end="{self.end}" '
                          f'vehsPerHour="{rate:.1f}" departLane="best" departSpeed="max"/>')

    def crossing(self, i, x, last):
        """A street from the south, of which some turn right into the road, and some turn off the road."""
        self.nodes += [f'<node id="{side}{i}" x="{x:.0f}" y="{y}"/>' for side, y in (("s", -SIDE_M), ("t", SIDE_M))]
        self.edge(f"from{i}", f"s{i}", f"n{i}", 1, SIDE_SPEED)
        self.edge(f"to{i}", f"n{i}", f"t{i}", 1, SIDE_SPEED)
        rate = self.rng.uniform(60, 250)
        self.flow(f"from{i}", f"to{i}", rate)
        self.flow(f"from{i}", f"east{last}", rate / 2)
        self.flow("east0", f"to{i}", rate / 2)

    def section(self, i, last):
        lanes = self.lanes - (last and self.kind == "narrow")
        limit = self.limit / 2 if last and self.kind == "limit" else self.limit
        self.edge(f"east{i}", f"n{i}", f"n{i + 1}", lanes, limit)
        if self.kind == "lights":
            self.edge(f"west{i}", f"n{i + 1}", f"n{i}", lanes, limit)

    def through(self, last):
        """Traffic from end to end; where a lane or the limit ends, as much as the last section can nearly take."""
        lane = {"lights": (350, 750), "narrow": (800, 1100), "limit": (1000, 1400), "plain": (1000, 1600)}[self.kind]
        rate = self.lanes * self.rng.uniform(*lane)
        self.flow("east0", f"east{last}", rate)
        if self.kind == "lights":
            self.flow(f"west{last}", "west0", rate * self.rng.uniform(0.5, 1))

    def demand(self):
        """<routes>: cars with one or two kinds of drivers."""
        first, second = self.rng.choice(DRIVERS, 2)
        share = self.rng.uniform(0.3, 0.9)
        types = [f'<vType id="one" {first} probability="{share:.3f}"/>',
                 f'<vType id="two" {second} probability="{1 - share:.3f}"/>']
        return f'<routes><vTypeDistribution id="mix">{"".join(types)}</vTypeDistribution>{"".join(self.flows)}</routes>'


def street(folder, number, end):
    """Draw street `number` and its demand until `end` s into `folder`: path of its .sumocfg."""
    road = Street(number, end)
    return drawn(folder, f"street{number}", {"nodes": road.nodes, "edges": road.edges}, road.demand())
