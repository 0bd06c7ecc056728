"""Where vehicles are going. A route is asked once: a vehicle that SUMO sends another way gets another route id."""
import numpy as np


class Routes:
    """By slot: metres (length of the whole route) and start (place of the route in `flat`, one array of edge numbers
    in which two -1 end each route)."""

    def __init__(self, road, slots):
        self.road, self.known, self.places, self.flat = road, {}, {}, np.array([-1, -1])
        self.of_slot = [None] * slots  # route ids
        self.start, self.metres = np.zeros(slots, int), np.ones(slots)

    def follow(self, simulator, ids, routes, slots):
        """Take over the route ids of the vehicles in `slots`, asking SUMO for the edges of unknown ones."""
        of_slot = self.of_slot
        changed = [(slot, name, route) for slot, name, route in zip(slots.tolist(), ids, routes)
                   if of_slot[slot] != route]
        unknown = {route: name for _, name, route in changed if route not in self.known}
        for route, edges in zip(unknown, simulator.routes_of(list(unknown.values()))):
            self.known[route] = self._place(tuple(edges))
        for slot, _, route in changed:
            of_slot[slot] = route
            self.start[slot], self.metres[slot] = self.known[route]

    def _place(self, edges):
        """(place in `flat`, length m) of a sequence of edges; several route ids may share one."""
        if edges not in self.places:
            numbers = [self.road.edge_index[edge.decode()] for edge in edges]
            metres = self.road.lane_length[self.road.edge_lanes[numbers, 0]].sum() if numbers else 1.0
            self.places[edges] = len(self.flat), max(float(metres), 1.0)
            self.flat = np.concatenate([self.flat, numbers, [-1, -1]]).astype(int)
        return self.places[edges]
