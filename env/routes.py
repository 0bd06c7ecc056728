"""Where vehicles are going. A route is asked once: a vehicle that SUMO sends another way gets another route id, which
may be one that it has had before, on another way."""
import functools
import math

import numpy as np

from env.spaces import MAX_BRAKE
from env.sumo import SAFE_SPEED

# Bits of SUMO's speed mode. With a stop ahead, however far, SUMO ignores commands without regard for the maximum
# deceleration (4), and without its safe-speed check (1) it then accelerates without any limit.
STOPPING = 5
REUSED = b"!var#"  # in the id of a route on which SUMO has sent a vehicle
LONGEST_S = 1.0  # control interval for which the shield alone prevents collisions; at 2 s some drive into who cuts in
SHORTEST_S = 0.6  # the same of drivers' tau: with 0.5 s they creep up to whom the shield has stopped, and touch them
SPARE_M = 0.5  # of shield.min_gap_m: SUMO calls it a collision when the gap is below the vehicle's own minGap


class Routes:
    """By slot: metres (length of the whole route), on_edges (without its junctions, which the observation's progress
    leaves out: policies learned so), and start (place of the route in `flat`, one array of edge numbers in which two -1
    end each route); checks: bits of SUMO's speed mode that stay on for vehicles whose habits the shield does not know
    (asked in users' scenarios), and for everybody where it is asked less often than it was proven for, or somebody
    brakes harder than it reckons; alone: who has blue lights, with which SUMO drives as commands do not foresee; nobody
    is commanded once anybody has come whose headway is shorter than the time between two decisions of his: he drives
    into whom a command slows down, or another driver does; kind: SUMO's vehicle class; ordinary: its driver's
    deceleration, and hardest: the strongest braking that a command may ask for, m/s^2: SUMO would brake harder than the
    vehicle could."""

    def __init__(self, road, cfg):
        e, slots = cfg.env, cfg.env.max_vehicles
        self.step = e.step_length if e.scenario.endswith(".sumocfg") else None  # built-in vehicles have no such habits
        self.least_gap, self.own_decel = cfg.shield.min_gap_m - SPARE_M, cfg.shield.own_decel
        self.leader_decel = cfg.shield.leader_decel
        driver = getattr(getattr(cfg, e.scenario, None), "driver", cfg.driver)  # of a built-in scenario
        odd = not self.step and self._odd(0.0, getattr(driver, "min_gap_m", 0.0), driver.tau)
        self.always = SAFE_SPEED * (cfg.shield.enabled and (odd or e.control_interval > LONGEST_S))
        self.checks, self.alone, self.nobody = np.full(slots, self.always), np.zeros(slots, bool), False
        self.road, self.known, self.places, self.flat = road, {}, {}, np.array([-1, -1])
        self.of_slot, self.kind = [None] * slots, ["passenger"] * slots  # route ids, vehicle classes
        self.leads = {}  # Road.leads by slot, of those who may go where cars may not
        self.ordinary, self.hardest = np.full((2, slots), MAX_BRAKE)
        self.start, self.metres, self.on_edges = np.zeros(slots, int), np.ones(slots), np.ones(slots)
        self.junction = functools.cache(lambda *edges: float(road.lane_length[road.between(*edges)].sum()))  # metres

    def left_alone(self, slot, lane, length, way):
        """Whether commands to this slot, on this lane with `way` m to its end, are ignored: `nobody`, blue lights, who
        may overtake among the oncoming traffic, and in users' networks who is on a junction, be it with its tail
        (`length` m), which others count on its leaving soon: with a change of lanes the tail swings into their way."""
        road = self.road
        across = road.crosses[lane] and road.internal[lane] or (
            road.behind[lane] and road.lane_length[lane] - way < length)
        return self.nobody or self.alone[slot] or road.oncoming[lane] or self.step and across

    def follow(self, simulator, ids, routes, slots, fresh, icv):
        """Take over the route ids of the vehicles in `slots`, asking SUMO for the edges of unknown ones, and for the
        habits of ICVs that are `fresh` [N] or sent another way, perhaps to a stop: only who is commanded matters."""
        changed = [i for i, (slot, new, route) in enumerate(zip(slots.tolist(), fresh.tolist(), routes))
                   if new or self.of_slot[slot] != route or REUSED in route]  # perhaps left and taken again meanwhile
        unknown = {routes[i]: ids[i] for i in changed if routes[i] not in self.known or REUSED in routes[i]}
        for route, edges in zip(unknown, simulator.routes_of(list(unknown.values()))):
            self.known[route] = self._place(tuple(edges))
        new = [ids[i] for i in changed if fresh[i]] if self.step and not self.nobody else ()
        hardest, spare = simulator.extremes(new) if new else (0.0, 0.0)
        self.nobody |= spare < -1e-6
        if hardest > self.leader_decel + 1e-6:  # SUMO's motorcycles: may lead anybody
            self.always, self.checks = SAFE_SPEED, self.checks | SAFE_SPEED
        for i in changed:
            slot, way = int(slots[i]), self.known[routes[i]]
            if fresh[i]:
                self.leads.pop(slot, None)
            other = fresh[i] or (self.of_slot[slot], self.start[slot]) != (routes[i], way[0])
            self.of_slot[slot], (self.start[slot], self.metres[slot], self.on_edges[slot]) = routes[i], way
            if self.step and icv[i] and (other or self.kind[slot] == "taxi"):  # that has its stops from others
                self._ask(simulator, ids[i], slot, self.always if fresh[i] else self.checks[slot])

    def bits(self, slot, accel):
        """`checks` of a vehicle that is told `accel` m/s^2. Who has a stop ahead would brake with the ordinary
        deceleration at most: to brake harder is left to its driver, who ignores what he is told then."""
        return self.checks[slot] & (SAFE_SPEED if accel < -self.ordinary[slot] - 1e-6 else STOPPING)

    def _ask(self, simulator, name, slot, checks):
        stops, lights, acts_every, min_gap, tau, boldness, self.kind[slot], *brakes = simulator.habits(name)
        odd = self._odd(acts_every, min_gap, tau, boldness, *brakes)
        self.ordinary[slot], self.hardest[slot] = brakes[0], min(brakes[1], MAX_BRAKE)
        self.checks[slot] = checks | STOPPING * stops | SAFE_SPEED * odd
        self.alone[slot] = lights
        if (view := self.road.leads(self.kind[slot])) is not self.road:
            self.leads[slot] = view

    def views(self, slots):
        """Of Traffic, for the vehicles in these slots [N]; None where all may go where cars may."""
        own = [self.leads.get(slot, self.road) for slot in slots.tolist()] if self.leads else ()
        return [(view, np.array([one is view for one in own])) for view in {self.road, *own}] if own else None

    def _odd(self, acts_every, min_gap, tau, boldness=1.0, decel=0.0, hardest=math.inf):
        """Whether the shield's assumptions fail: to who acts less often than SUMO's steps, a command comes late; who
        changes lanes boldly, unasked too, counts on braking hard at once; who brakes worse than the shield reckons
        comes too close, and who brakes harder does so on his own account."""
        return (acts_every > (self.step or 0) + 1e-6 or min_gap > self.least_gap + 1e-6 or tau < SHORTEST_S - 1e-6
                or boldness > 1 + 1e-6 or not decel - 1e-6 < self.own_decel < hardest + 1e-6)

    def _place(self, edges):
        """(place in `flat`, metres, metres on edges) of a sequence of edges; several route ids may share one."""
        if edges not in self.places:
            numbers = [self.road.edge_index[edge.decode()] for edge in edges]
            metres = float(self.road.lane_length[self.road.edge_lanes[numbers, 0]].sum())
            whole = metres + sum(map(self.junction, numbers, numbers[1:]))
            self.places[edges] = len(self.flat), max(whole, 1.0), max(metres, 1.0)
            self.flat = np.concatenate([self.flat, numbers, [-1, -1]]).astype(int)
        return self.places[edges]
