"""Where vehicles are going. A route is asked once: a vehicle that SUMO sends another way gets another route id."""
import numpy as np

from env.sumo import SAFE_SPEED

# Bits of SUMO's speed mode. With a stop ahead, however far, SUMO ignores commands without regard for the maximum
# deceleration (4), and without its safe-speed check (1) it then accelerates without any limit.
STOPPING = 5
LONGEST_S = 1.0  # control interval for which the shield alone prevents collisions; at 2 s some drive into who cuts in


class Routes:
    """By slot: metres (length of the whole route), on_edges (without its junctions, which the observation's progress
    leaves out: policies learned so), and start (place of the route in `flat`, one array of edge numbers in which two -1
    end each route); checks: bits of SUMO's speed mode that stay on for who had a stop ahead when it
    came, or acts less often than SUMO's steps, which is asked in users' scenarios; for everybody where the shield,
    which knows one step's leaders, is asked less often than it was proven for."""

    def __init__(self, road, cfg):
        e, slots = cfg.env, cfg.env.max_vehicles
        self.step = e.step_length if e.scenario.endswith(".sumocfg") else None  # built-in vehicles have no such habits
        self.always = SAFE_SPEED * (cfg.shield.enabled and e.control_interval > LONGEST_S)
        self.checks = np.full(slots, self.always)
        self.road, self.known, self.places, self.flat = road, {}, {}, np.array([-1, -1])
        self.of_slot = [None] * slots  # route ids
        self.start, self.metres, self.on_edges = np.zeros(slots, int), np.ones(slots), np.ones(slots)
        self.junctions = {}  # {(edge, next edge): metres between them}

    def follow(self, simulator, ids, routes, slots, new_icvs):
        """Take over the route ids of the vehicles in `slots`, asking SUMO for the edges of unknown ones, and for the
        habits of `new_icvs` [N]: a question each, because only who is commanded matters."""
        for i in np.flatnonzero(new_icvs) if self.step else ():
            stops, acts_every = simulator.habits(ids[i])  # to who acts seldom, a command comes late
            self.checks[slots[i]] = STOPPING * stops | SAFE_SPEED * (acts_every > self.step + 1e-6) | self.always
        of_slot = self.of_slot
        changed = [(slot, name, route) for slot, name, route in zip(slots.tolist(), ids, routes)
                   if of_slot[slot] != route]
        unknown = {route: name for _, name, route in changed if route not in self.known}
        for route, edges in zip(unknown, simulator.routes_of(list(unknown.values()))):
            self.known[route] = self._place(tuple(edges))
        for slot, _, route in changed:
            of_slot[slot] = route
            self.start[slot], self.metres[slot], self.on_edges[slot] = self.known[route]

    def _place(self, edges):
        """(place in `flat`, metres, metres on edges) of a sequence of edges; several route ids may share one."""
        if edges not in self.places:
            numbers = [self.road.edge_index[edge.decode()] for edge in edges]
            metres = float(self.road.lane_length[self.road.edge_lanes[numbers, 0]].sum()) if numbers else 1.0
            whole = metres + sum(self._junction(*pair) for pair in zip(numbers, numbers[1:]))
            self.places[edges] = len(self.flat), max(whole, 1.0), max(metres, 1.0)
            self.flat = np.concatenate([self.flat, numbers, [-1, -1]]).astype(int)
        return self.places[edges]

    def _junction(self, *edges):
        if edges not in self.junctions:
            self.junctions[edges] = float(self.road.lane_length[self.road.between(*edges)].sum())
        return self.junctions[edges]
