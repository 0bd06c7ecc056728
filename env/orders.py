"""Which orders to change lanes are given: no order again that still stands, and none whose danger neither shield nor
driver sees in time."""
import numpy as np

from env.tails import stopping_way

HASTE = 3.0  # m/s^2, more than most drivers accelerate
ABREAST_M = 15.0  # who is nearer than that may be in the way of somebody who comes to the same lane


class Orders:
    """Orders to change lanes on a Road that stand, by slot, each for `env.lane_change_hold_s`, or until a junction lane
    that others cross: SUMO would carry it out there, in front of who waits. Without the shield every new order is
    given, for the whole time."""

    def __init__(self, road, cfg):
        self.road, self.guarded = road, cfg.shield.enabled
        self.hold_s, self.interval = cfg.env.lane_change_hold_s, cfg.env.control_interval
        self.target = np.full(cfg.env.max_vehicles, -1)
        self.until = np.full(cfg.env.max_vehicles, -np.inf)

    def forget(self, slots):
        """Other vehicles have these slots now."""
        self.until[slots] = -np.inf

    def give(self, slot, number, following, lane, way, speed, now):
        """Whether the vehicle in `slot` is told, at `now` s, to change to lane `number` of its edge; it is noted. Not
        told again is who follows the same order until the next step.
        `following`: the next edge of its route, -1 = none. By slot: `lane`, `way` m to its end, `speed` m/s."""
        target = self.road.edge_lanes[self.road.lane_edge[lane[slot]], number]
        if self.target[slot] == target and self.until[slot] >= now + self.interval - 1e-6:
            return False
        if self.guarded and self._dangerous(slot, target, following, lane, way, speed, now):
            return False
        lasts = self._time_to_crossing(lane[slot], way[slot], speed[slot]) if self.guarded else np.inf
        self.target[slot], self.until[slot] = target, now + min(self.hold_s, lasts)
        return True

    def _time_to_crossing(self, lane, way, speed):
        """How long it takes at least to the next lane that others cross, s; inf where none is near."""
        return (np.sqrt(speed ** 2 + 2 * HASTE * (way + self.road.to_crossing[lane])) - speed) / HASTE

    def _dangerous(self, slot, target, following, lane, way, speed, now):
        road, on = self.road, lane[slot]
        # SUMO's driver notices the end of a lane when it is there, and stands still at once.
        ends = following >= 0 and following not in road.link_edge[target]
        if ends and way[slot] < self.hold_s * speed[slot] + stopping_way(speed[slot]):
            return True
        # Nobody sees who comes from the lane beyond. From the own lane, one follows the other.
        beyond = (road.lane_edge[lane] == road.lane_edge[on]) & (lane != on) & (lane != target)
        return (beyond & (self.target == target) & (self.until > now) & (np.abs(way - way[slot]) < ABREAST_M)).any()
