"""Static facts of a road network, read once, and who follows whom on it (vectorised over vehicles).

Axis letters: L lanes (internal junction lanes included), E edges, J links of a lane, N vehicles.
"""
import heapq
from dataclasses import dataclass

import numpy as np

FREE_SPEED = 40.0  # speed reported for "nobody there", m/s
MAX_HOPS = 10      # lanes followed downstream in search of a leader


@dataclass
class Road:
    """lane_length [L] m, lane_edge [L], lane_number [L] from the right, edge_lanes [E, most lanes] (-1 = none),
    link_lane and link_edge [L, J] (next lane, and the normal edge it leads to; -1 = none), coordinate [L]: network
    position of the lane's start, m, growing towards the exits; upstream [L]: [(lane, m between)] that lead here."""
    lane_index: dict
    edge_index: dict
    lane_length: np.ndarray
    lane_edge: np.ndarray
    lane_number: np.ndarray
    edge_lanes: np.ndarray
    link_lane: np.ndarray
    link_edge: np.ndarray
    coordinate: np.ndarray
    extent: float
    upstream: list
    internal: np.ndarray
    joins: list

    @classmethod
    def from_lanes(cls, lanes, reach=600.0):
        """`lanes`: [(lane id, length m, [(next lane id, internal lane id or "")])] as SUMO tells them; followers are
        searched at most `reach` m upstream."""
        index = {lane: i for i, (lane, _, _) in enumerate(lanes)}
        edges = {}
        for lane, _, _ in lanes:
            edges.setdefault(lane.rpartition("_")[0], len(edges))
        edge_of = np.array([edges[lane.rpartition("_")[0]] for lane, _, _ in lanes])
        number = np.array([int(lane.rpartition("_")[2]) for lane, _, _ in lanes])
        edge_lanes = np.full((len(edges), number.max() + 1), -1)
        edge_lanes[edge_of, number] = np.arange(len(lanes))
        width = max(1, max(len(links) for _, _, links in lanes))
        link_lane, link_edge = np.full((len(lanes), width), -1), np.full((len(lanes), width), -1)
        for i, (_, _, links) in enumerate(lanes):
            for j, (following, via) in enumerate(links):
                if following in index:
                    link_lane[i, j] = index.get(via, index[following])
                    link_edge[i, j] = edges[following.rpartition("_")[0]]
        length = np.array([length for _, length, _ in lanes], float)
        internal = np.array([lane.startswith(":") for lane, _, _ in lanes])
        remaining = _distance_to_exit(length, link_lane, edge_of)
        extent = max(float(remaining.max()), 1.0)
        joins = _joining_edges(link_edge, edge_of, internal, len(edges))
        return cls(index, edges, length, edge_of, number, edge_lanes, link_lane, link_edge, extent - remaining, extent,
                   _upstream(length, link_lane, reach), internal, joins)

    def neighbour_lane(self, lane, side):
        """Lane left (side = 1) or right (-1) of each lane, -1 where there is none or inside a junction. [N] -> [N]"""
        number = self.lane_number[lane] + side
        most = self.edge_lanes.shape[1]
        inside = (number >= 0) & (number < most) & ~self.internal[lane]
        return np.where(inside, self.edge_lanes[self.lane_edge[lane], np.clip(number, 0, most - 1)], -1)


class Traffic:
    """Vehicles sorted by lane and position, for finding who is in front and behind.

    lane, route_at [N] int; pos (front bumper on the lane, m), speed, length [N] float. `route_at` points at the
    vehicle's current edge in `routes`, one flat array of edge numbers in which -1 ends each route.
    """

    def __init__(self, road, lane, pos, speed, length, route_at, routes, lookahead):
        self.road, self.lane, self.pos, self.speed, self.length = road, lane, pos, speed, length
        self.route_at, self.routes, self.lookahead = route_at, routes, lookahead
        self.order = np.lexsort((pos, lane))
        self.key = lane[self.order] * 1e6 + pos[self.order]  # sorted; one lane is shorter than 1000 km
        lanes = np.arange(len(road.lane_length))
        self.first = np.searchsorted(lane[self.order], lanes, "left")
        self.end = np.searchsorted(lane[self.order], lanes, "right")

    def ahead(self, lane):
        """Who each vehicle would follow if it were on `lane` [N]: (index or -1, gap m, speed m/s), each [N].

        Follows the vehicle's own route over lane ends and junctions. The end of a lane that does not lead on along
        the route is an obstacle that stands still (index -1, speed 0).
        """
        n, here = len(lane), lane >= 0
        # On another lane a vehicle exactly abreast is in front (and behind: see `behind`), so the gap is negative.
        key = lane * 1e6 + self.pos
        place = np.where(lane == self.lane, np.searchsorted(self.key, key, "right"),
                         np.searchsorted(self.key, key, "left"))
        same = here & (place < self.end[lane])
        who = np.where(same, self.order[np.minimum(place, n - 1)], -1)
        gap = np.where(same, self.pos[who] - self.length[who] - self.pos, self.lookahead)
        speed = np.where(same, self.speed[who], FREE_SPEED)
        self._search_downstream(lane, np.flatnonzero(here & ~same), who, gap, speed)
        far = (gap >= self.lookahead) | (who == np.arange(n))  # alone on a closed road one would follow oneself
        return np.where(far, -1, who), np.where(far, self.lookahead, gap), np.where(far, FREE_SPEED, speed)

    def _search_downstream(self, lane, rest, who, gap, speed):
        """Fill who, gap and speed of the vehicles `rest`, which are the first on their lane, in place."""
        road, current, at = self.road, lane[rest], self.route_at[rest]
        travelled = road.lane_length[current] - self.pos[rest]
        for _ in range(MAX_HOPS):
            near = travelled < self.lookahead
            rest, current, at, travelled = rest[near], current[near], at[near], travelled[near]
            if not len(rest):
                return
            target = self.routes[at + 1]
            fits = (road.link_edge[current] == target[:, None]) & (target >= 0)[:, None]  # -1 also fills unused links
            leads_on, ends_here = fits.any(1), target < 0
            wall = ~leads_on & ~ends_here
            gap[rest[wall]], speed[rest[wall]] = travelled[wall], 0.0
            following = road.link_lane[current, fits.argmax(1)]
            taken = leads_on & (self.first[following] < self.end[following])
            found = self.order[np.minimum(self.first[following], len(self.order) - 1)][taken]
            who[rest[taken]], speed[rest[taken]] = found, self.speed[found]
            gap[rest[taken]] = travelled[taken] + self.pos[found] - self.length[found]
            go = leads_on & ~taken
            rest, current, travelled = rest[go], following[go], travelled[go] + road.lane_length[following[go]]
            at = at[go] + ~road.internal[current]  # on a junction lane the route still points at the edge before it

    def behind(self, lane):
        """Who would follow each vehicle if it were on `lane` [N]: (gap m, speed m/s), each [N]."""
        key = lane * 1e6 + self.pos
        place = np.where(lane == self.lane, np.searchsorted(self.key, key, "left"),
                         np.searchsorted(self.key, key, "right")) - 1
        same = (lane >= 0) & (place >= self.first[lane])
        who = self.order[np.maximum(place, 0)]
        gap = np.where(same, self.pos - self.length - self.pos[who], self.lookahead)
        speed = np.where(same, self.speed[who], 0.0)
        for i in np.flatnonzero((lane >= 0) & ~same & (self.pos < self.lookahead)):  # the last on their lane: few
            for upstream, between in self.road.upstream[lane[i]]:
                if self.end[upstream] > self.first[upstream]:
                    j = self.order[self.end[upstream] - 1]
                    distance = (self.pos[i] - self.length[i] + between + self.road.lane_length[upstream] - self.pos[j])
                    if j != i and distance < gap[i]:
                        gap[i], speed[i] = distance, self.speed[j]
        far = gap >= self.lookahead
        return np.where(far, self.lookahead, gap), np.where(far, 0.0, speed)

    def merging(self):
        """(distance to the lane end where other edges join, m; vehicles on those edges), each [N]."""
        edge = self.road.lane_edge[self.lane]
        count = np.bincount(edge, minlength=len(self.road.joins))
        waiting = np.array([count[list(others)].sum() if others else -1 for others in self.road.joins])[edge]
        distance = np.where(waiting >= 0, self.road.lane_length[self.lane] - self.pos, 500.0)
        return np.minimum(distance, 500.0), np.maximum(waiting, 0)


def _distance_to_exit(length, link_lane, edge_of):
    """Shortest way from each lane's start to an exit (a lane that leads nowhere), m [L]; sideways moves are free.

    A network without exits is cut open at its first edge.
    """
    count, before = len(length), [[] for _ in length]
    for i, links in enumerate(link_lane):
        for j in links[links >= 0]:
            before[j].append(i)
    leads_on = np.zeros(edge_of.max() + 1, bool)
    np.logical_or.at(leads_on, edge_of, (link_lane >= 0).any(1))
    exits = np.flatnonzero(~leads_on[edge_of])
    exits = exits if len(exits) else np.flatnonzero(edge_of == edge_of[0])
    best = np.full(count, np.inf)
    heap = [(length[i], int(i)) for i in exits]
    siblings = {e: np.flatnonzero(edge_of == e) for e in set(edge_of.tolist())}
    while heap:
        distance, i = heapq.heappop(heap)
        if distance >= best[i]:
            continue
        for s in siblings[edge_of[i]]:
            best[s] = min(best[s], distance)
            for b in before[s]:
                heapq.heappush(heap, (distance + length[b], b))
    return np.where(np.isfinite(best), best, 0.0)


def _upstream(length, link_lane, reach):
    """For each lane [(upstream lane, metres between its end and this lane's start)] within `reach` m."""
    before = [[] for _ in length]
    for i, links in enumerate(link_lane):
        for j in links[links >= 0]:
            before[j].append(i)
    result = []
    for lane in range(len(length)):
        found, todo = {}, [(lane, 0.0)]
        while todo:
            current, between = todo.pop()
            for b in before[current]:
                if between < found.get(b, reach):
                    found[b] = between
                    todo.append((b, between + length[b]))
        result.append(sorted(found.items(), key=lambda item: item[1]))
    return result


def _joining_edges(link_edge, edge_of, internal, count):
    """For each edge the other edges that lead to the same next edges: where traffic merges. [E] sets"""
    into = {}
    for lane, targets in enumerate(link_edge):
        if not internal[lane]:
            for target in targets[targets >= 0]:
                into.setdefault(target, set()).add(edge_of[lane])
    joins = [set() for _ in range(count)]
    for sources in into.values():
        for edge in sources:
            joins[edge] |= sources - {edge}
    return joins
