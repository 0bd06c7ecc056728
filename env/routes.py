"""Where each vehicle is going: asked once, and again when SUMO sends it another way."""
import numpy as np

from env.sumo import tc


class Routes:
    """By slot: length m, metres (length of the whole route), start (place of its route in `flat`, one array of edge
    numbers in which two -1 end each route)."""

    def __init__(self, road, slots):
        self.road, self.places, self.flat = road, {}, np.array([-1, -1])
        self.known = [None] * slots  # id of the route that the vehicle in the slot had when it was asked
        self.start, self.length, self.metres = np.zeros(slots, int), np.zeros(slots), np.ones(slots)

    def learn(self, simulator, ids, routes, slots, fresh):
        """Ask about vehicles that are new in their slot or have got another route (another route id)."""
        for slot in slots[fresh]:
            self.known[slot] = None
        known = self.known
        news = [(slot, name, route) for slot, name, route in zip(slots.tolist(), ids, routes) if known[slot] != route]
        answers = simulator.get([(v, name) for _, name, _ in news for v in (tc.VAR_EDGES, tc.VAR_LENGTH)])
        for (slot, _, route), edges, length in zip(news, answers[::2], answers[1::2]):
            known[slot] = route
            self.start[slot], self.metres[slot] = self._place(tuple(edges or ()))
            self.length[slot] = length or 5.0

    def _place(self, edges):
        """(place in `flat`, length m) of a sequence of edges."""
        if edges not in self.places:
            numbers = [self.road.edge_index[edge.decode()] for edge in edges]
            metres = self.road.lane_length[self.road.edge_lanes[numbers, 0]].sum() if numbers else 1.0
            self.places[edges] = len(self.flat), max(float(metres), 1.0)
            self.flat = np.concatenate([self.flat, numbers, [-1, -1]]).astype(int)
        return self.places[edges]
