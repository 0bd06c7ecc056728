"""Vehicles in the way that are on another lane: whoever follows does not find them in front.

One has changed lanes just behind a junction, while its tail still blocks the lane from which it came, or the one on
which SUMO has put it since. Another is on a
junction lane that ends where the follower's own junction lane ends. Who comes from the side is nobody's leader at all.
"""
import numpy as np

COMFORT_DECEL, FULL_BRAKING = 4.5, 9.0  # m/s^2


def obstacles(traffic, came):
    """[(vehicle, lane that it blocks, its rear end there in m, edge to which that lane leads)] of an env.road.Traffic.

    `came` [N] is the last lane of each vehicle that was on another edge (-1 = unknown).
    """
    road, found = traffic.road.whole, []
    arriving = set(traffic.lane[traffic.routes[traffic.route_at + 1] < 0].tolist())  # who looks no further than its end
    for j in np.flatnonzero((traffic.rear[:-1] < 0) & (came >= 0)):
        lane, on = came[j], traffic.lane[j]
        inside = road.internal[on]
        edge = road.link_edge[on, 0] if inside else road.lane_edge[on]
        ways = np.flatnonzero(road.link_edge[lane] == edge)
        if not road.internal[lane] and not inside and len(ways):  # it crossed the junction within one control step
            crossed = road.link_lane[lane, ways[0]]
            lane = crossed if road.internal[crossed] else lane
        # Others go where it does not: to another edge, or to another lane of the same.
        elsewhere = (lane in arriving or road.forked[lane]
                     or ((road.link_edge[lane] >= 0) & (road.link_edge[lane] != edge)).any())
        if len(ways) and (elsewhere or not inside and on not in road.link_lane[lane]):
            towards = edge if road.internal[lane] else road.lane_edge[lane]
            found.append((j, lane, road.lane_length[lane] + traffic.rear[j], towards))
        found += [(j, *further) for further in longer_tail(road, lane, road.lane_length[lane] + traffic.rear[j])]
    for j in np.flatnonzero(road.meets[traffic.lane]):
        lane = traffic.lane[j]
        edge, rear = road.lane_edge[road.link_lane[lane, 0]], traffic.rear[j] - road.lane_length[lane]
        found += [(j, other, road.lane_length[other] + rear, edge) for other in road.met_by[lane]]
    return found


def came_from(road, came, before, lane, rear):
    """`came` [N] of `obstacles` after a control step from the lanes `before` to the lanes `lane`; rear ends in m."""
    road = road.whole  # where buses go, too
    came = np.where(road.lane_edge[before] != road.lane_edge[lane], before, came)
    for j in np.flatnonzero((before != lane) & (rear < 0) & (came >= 0)):
        came[j] = moved_tail(road, came[j], before[j], lane[j])
    return came


def moved_tail(road, came, at, lane):
    """Last lane on another edge of a vehicle that got from the lane `at` to `lane`. With each lane that it changes SUMO
    moves its tail to the lane of the edge before that leads to the new one, and leaves it where none does."""
    edge = road.lane_edge[lane]
    while road.lane_edge[at] != edge:  # over the junction
        ways = np.flatnonzero(road.link_edge[at] == edge)
        if not len(ways):
            return came
        at = road.link_lane[at, ways[0]]
    side = np.sign(road.lane_number[lane] - road.lane_number[at])
    while at != lane:
        at = road.edge_lanes[edge, road.lane_number[at] + side]
        leads = (road.link_lane == at).any(1)
        leads |= (leads & road.internal)[road.link_lane].any(1, where=road.link_lane >= 0)
        ways = np.flatnonzero(leads & (road.lane_edge == road.lane_edge[came]))
        came = ways[0] if len(ways) else came
    return came


def longer_tail(road, lane, rear):
    """[(lane, rear end there, edge to which it leads)] of the lanes that lead to `lane`, where a tail that ends at
    `rear` there, below 0, may be."""
    end = rear + road.upstream_m[lane]
    far = (road.upstream_lane[lane] >= 0) & (end < 0)
    return [(before, road.lane_length[before] + end, road.link_edge[before, 0] if road.internal[before] else
             road.lane_edge[before]) for before, end in zip(road.upstream_lane[lane][far], end[far])]


def hold_back(traffic, obstacle, lane, who, gap, speed, aside):
    """Let the vehicles behind the obstacle that would be on `lane` [..., N] follow it where it is nearer than `gap`.
    One on another junction lane must ask for more room to brake: it may be driving past somebody who stands. Whoever
    follows such a one is noted in `aside`."""
    road, (owner, blocked, rear, edge) = traffic.road.whole, obstacle
    leads_here = ((road.link_lane == blocked) & (road.link_edge == edge)).any(1)
    way = np.where(lane == blocked, rear - traffic.pos, np.inf)
    before = (lane >= 0) & leads_here[lane] & (traffic.routes[traffic.route_at + 1] == edge)
    way = np.where(before, road.lane_length[lane] - traffic.pos + rear, way)
    nearer = way < gap
    if road.meets[blocked]:
        room, other = gap + speed ** 2 / (2 * FULL_BRAKING), way + traffic.speed[owner] ** 2 / (2 * FULL_BRAKING)
        nearer = (other < room) & (way < traffic.lookahead)
    nearer = nearer & (way > -traffic.length[owner]) & (traffic.everybody != owner)
    who[nearer], gap[nearer], speed[nearer] = owner, way[nearer], traffic.speed[owner]
    aside[nearer] = traffic.lane[owner] in road.met_by.get(blocked, ())


def meeting_lanes(internal, link_lane):
    """{junction lane: the other junction lanes that end where it ends}, of those that are not alone there."""
    at = {}
    for lane in np.flatnonzero(internal & (link_lane[:, 0] >= 0)):
        at.setdefault(int(link_lane[lane, 0]), []).append(int(lane))
    return {lane: [other for other in group if other != lane] for group in at.values() for lane in group
            if len(group) > 1}


def near(there, way, lane, scene):
    """Whether each vehicle of a SCENE array, on `lane` [N], is on one of the lanes `there` [L], or may be before it
    could stop; `way` [L]: metres from a lane's end to the next of them."""
    return there[lane] | (scene["lane_end"] + way[lane] < stopping_way(scene["speed"]))


def unforeseen(road, lane, scene, persons, overflow, lookahead):
    """Whether each vehicle may meet, before it could stop, whom the shield does not know: who comes from the side, who
    walks among the cars (if there are `persons`), who has no slot (if there is an `overflow`), or whoever stands
    further away than it looks ahead (`lookahead` m); or a lower speed limit, which SUMO's drivers see in time."""
    lower = scene["lane_end"] + road.to_slower[lane] < stopping_way(scene["speed"])
    blind = scene["speed"] ** 2 / (2 * FULL_BRAKING) + scene["speed"] > lookahead
    unknown = near(road.crosses, road.to_crossing, lane, scene) | blind | lower | (overflow > 0)
    return unknown | near(road.walked, road.to_walked, lane, scene) if persons else unknown


def stopping_way(speed):
    """What it takes to stop from `speed` m/s without hurry, m."""
    return speed ** 2 / (2 * COMFORT_DECEL) + 2 * speed + 5
