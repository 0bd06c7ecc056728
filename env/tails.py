"""Vehicles that changed lanes just behind a junction, while their tail still blocks the lane from which they came.

Whoever follows on that lane does not find them in front: it leads to another lane than theirs.
"""
import numpy as np


def hanging(traffic, came):
    """[(vehicle, lane, rear end on that lane, m)] of an env.road.Traffic; `came` [N] is the last lane of each vehicle
    that was on another edge (-1 = unknown)."""
    road, found = traffic.road, []
    for j in np.flatnonzero((traffic.rear[:-1] < 0) & (came >= 0)):
        lane = came[j]
        ways = np.flatnonzero(road.link_edge[lane] == road.lane_edge[traffic.lane[j]])
        if not road.internal[lane] and len(ways):  # it crossed the junction within one control step
            crossed = road.link_lane[lane, ways[0]]
            lane = crossed if road.internal[crossed] else lane
        if len(ways) and traffic.lane[j] not in road.link_lane[lane]:  # else it is found in the ordinary way
            found.append((j, lane, road.lane_length[lane] + traffic.rear[j]))
    return found


def hold_back(traffic, tail, lane, who, gap, speed):
    """Let the vehicles that would be on `lane` [..., N] follow the owner of the tail where it is nearer than `gap`."""
    road, (owner, blocked, rear) = traffic.road, tail
    target = road.lane_edge[traffic.lane[owner]]
    leads_here = ((road.link_lane == blocked) & (road.link_edge == target)).any(1)
    way = np.where(lane == blocked, rear - traffic.pos, np.inf)
    before = (lane >= 0) & leads_here[lane] & (traffic.routes[traffic.route_at + 1] == target)
    way = np.where(before, road.lane_length[lane] - traffic.pos + rear, way)
    nearer = (way < gap) & (traffic.everybody != owner)
    who[nearer], gap[nearer], speed[nearer] = owner, way[nearer], traffic.speed[owner]
