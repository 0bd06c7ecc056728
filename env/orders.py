"""Which orders to change lanes are given: not those whose danger neither shield nor driver sees in time."""
import numpy as np

from env.tails import stopping_way

ABREAST_M = 15.0  # who is nearer than that may be in the way of somebody who comes to the same lane


class Orders:
    """Orders to change lanes on a Road that stand, by slot, each for `hold_s` seconds."""

    def __init__(self, road, slots, hold_s):
        self.road, self.hold_s = road, hold_s
        self.target, self.until = np.full(slots, -1), np.zeros(slots)

    def give(self, slot, number, following, lane, way, speed, now):
        """Whether the vehicle in `slot` may be told, at `now` s, to change to lane `number` of its edge; it is noted.
        `following`: the next edge of its route, -1 = none. By slot: `lane`, `way` m to its end, `speed` m/s."""
        road, on = self.road, lane[slot]
        edge = road.lane_edge[on]
        target = road.edge_lanes[edge, number]
        # SUMO's driver notices the end of a lane when it is there, and stands still at once.
        ends = following >= 0 and following not in road.link_edge[target]
        if ends and way[slot] < self.hold_s * speed[slot] + stopping_way(speed[slot]):
            return False
        # Nobody sees who comes from the lane beyond. From the own lane, one follows the other.
        beyond = (road.lane_edge[lane] == edge) & (lane != on) & (lane != target)
        if (beyond & (self.target == target) & (self.until > now) & (np.abs(way - way[slot]) < ABREAST_M)).any():
            return False
        self.target[slot], self.until[slot] = target, now + self.hold_s
        return True
