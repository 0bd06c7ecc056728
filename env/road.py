"""Static facts of a road network, read once, and who follows whom on it (vectorised over vehicles).

Axis letters: L lanes (internal junction lanes included), E edges, J links of a lane, N vehicles.
"""
import copy
import functools

import numpy as np

from env.lanes import (distance_to_exit, forked_lanes, joining_edges, lane_beside, link_tables, slower_lanes,
                       taken_link, upstream)
from env.tails import hold_back, meeting_lanes, obstacles

FREE_SPEED = 40.0  # speed reported for "nobody there", m/s
AHEAD = 12  # edges of the route that decide which lane of a fork is taken, within FAR_M


class Road:
    """lane_index, edge_index {id: number}; lane_length [L] m, lane_edge [L], lane_number [L] from the right, lane_count
    [L] of its edge, edge_lanes [E, most lanes] (-1 = none), link_lane and link_edge [L, J] (next lane, and the normal
    edge it leads to; -1 = none), internal [L]: inside a junction; coordinate [L]: network position of the lane's start,
    m, growing towards the exits, extent: the exits', m; upstream_lane and upstream_m [L, U]: lanes that lead here (-1
    = none) and the way between; join_edge, join_with [P]: pairs of edges that lead to the same next edge, joins [E]:
    whether an edge is in one; beside: {1 left, -1 right: [L + 1] lane or -1}; met_by: env.tails.meeting_lanes, meets
    [L]: whether a lane is among them; crosses [L]: somebody may come from the side; to_crossing [L]: way from the
    lane's end to the next such lane, m, inf beyond `reach`; behind [L]: directly behind one; walked, to_walked [L]: the
    same of lanes on which persons walk; to_slower [L]: of lanes with a lower speed limit than before; forked [L]:
    several links lead to the same next edge; closed [L]: not for cars, such as pavements; barred {lane: kinds
    of vehicles}; solid {1 left, -1 right: [L]}: not to be left there; oncoming [L]: drivers overtake among the oncoming
    traffic; driving_number [L]: lane_number without the closed ones to its right; whole: this road with the links that
    cars may not take, too; sublane: several drive beside each other on a lane."""

    def __init__(self, lanes, reach=600.0, crossing=(), closed=(), oncoming=(), walked=(), barred=None, solid=None,
                 limits=None, sublane=False):
        """`lanes`: [(lane id, length m, [(next lane id, internal lane id or "")])] as SUMO tells them; followers are
        searched at most `reach` m upstream. The others: see env.lanes.special_lanes."""
        names = [lane for lane, _, _ in lanes]
        self.lane_index = index = {lane: i for i, lane in enumerate(names)}
        edge_names, _, numbers = zip(*(lane.rpartition("_") for lane in names))
        self.edge_index = edges = {name: i for i, name in enumerate(dict.fromkeys(edge_names))}
        self.lane_edge = edge_of = np.array([edges[name] for name in edge_names])
        self.lane_number = number = np.array(numbers, int)
        self.edge_lanes = edge_lanes = np.full((len(edges), number.max() + 1), -1)
        edge_lanes[edge_of, number] = np.arange(len(lanes))
        self.lane_count = (edge_lanes[edge_of] >= 0).sum(1)
        self._tables = functools.partial(link_tables, lanes, index, edges)
        self.link_lane, self.link_edge = self._tables({index[lane] for lane in closed})
        self.forked = forked_lanes(self.link_edge)
        self.lane_length = np.array([length for _, length, _ in lanes], float)
        self.internal = np.array([lane.startswith(":") for lane in names])
        remaining = distance_to_exit(self.lane_length, self.link_lane, edge_of)
        self.extent = max(float(remaining.max()), 1.0)
        self.coordinate = self.extent - remaining
        self.upstream_lane, self.upstream_m = upstream(self.lane_length, self.link_lane, reach)
        self.join_edge, self.join_with = joining_edges(self.link_edge, edge_of, self.internal)
        self.joins = np.isin(np.arange(len(edges)), self.join_edge)
        self.met_by = meeting_lanes(self.internal, self.link_lane)
        self.meets = np.isin(np.arange(len(lanes)), list(self.met_by))
        self.closed, self.crosses, self.oncoming, self.walked = (
            np.isin(names, list(ids)) for ids in (closed, crossing, oncoming, walked))
        self.barred = {index[lane]: kinds for lane, kinds in (barred or {}).items()}
        self.solid = {side: np.isin(names, list((solid or {}).get(side, ()))) for side in (1, -1)}
        at_once = self.link_lane[~self.internal]  # where no junction lane lies between, two may come together
        at_once = at_once[(at_once >= 0) & ~self.internal[at_once]]
        self.crosses |= np.bincount(at_once, minlength=len(lanes)) > 1
        self.beside = {side: lane_beside(edge_lanes, edge_of, number + side,
                                         self.internal | self.closed | self.solid[side], self.closed)
                       for side in (1, -1)}
        self.to_crossing, self.to_walked = self._way_to(self.crosses), self._way_to(self.walked)
        self.to_slower = self._way_to(slower_lanes(self.link_lane, np.array(limits or [0.0] * len(names))))
        self.behind = np.isin(np.arange(len(lanes)), self.link_lane[self.crosses & self.internal])
        self.fork = functools.lru_cache(10_000)(functools.partial(taken_link, self))
        shut = self.closed[edge_lanes] & (edge_lanes >= 0)
        self.driving_number = number - (shut.cumsum(1) - shut)[edge_of, number]
        self.sublane, self.views = sublane, {"passenger": self}
        self.whole = self.leads("whoever")

    def _way_to(self, there):
        """[L]: metres from each lane's end to the next lane of those that `there` [L] names, inf where none is near."""
        way, before = np.full(len(there), np.inf), self.upstream_lane[there]
        np.minimum.at(way, before, np.where(before >= 0, self.upstream_m[there], np.inf))
        return way

    def leads(self, kind):
        """This road with the links that vehicles of a kind may take: a bus's way does not end where its lane begins."""
        if kind not in self.views:
            shut = {lane for lane, kinds in self.barred.items() if kind in kinds}
            self.views[kind] = view = self if shut == {*np.flatnonzero(self.closed)} else copy.copy(self)
            if view is not self:
                view.link_lane, view.link_edge = self._tables(shut)
                view.forked = forked_lanes(view.link_edge)
                view.fork = functools.lru_cache(10_000)(functools.partial(taken_link, view))
        return self.views[kind]

    def has_lane(self, lane, number, kind="passenger"):
        """Whether the edge of a lane has one with this number, open to cars and to this kind of vehicles, and not
        behind a solid line."""
        if not 0 <= number < self.lane_count[lane] or self.solid[1 if number > self.lane_number[lane] else -1][lane]:
            return False
        target = self.edge_lanes[self.lane_edge[lane], number]
        return not self.closed[target] and kind not in self.barred.get(target, ())

    def between(self, edge, following):
        """Junction lanes that a vehicle drives over from an edge to the next of its route."""
        start = self.edge_lanes[edge][self.edge_lanes[edge] >= 0]
        lane, lanes = self.whole.link_lane[start][self.whole.link_edge[start] == following][:1], []
        while len(lane) and lane[0] >= 0 and self.internal[lane[0]]:
            lanes.append(int(lane[0]))
            lane = self.link_lane[lane[0], :1]
        return lanes


class Traffic:
    """Vehicles sorted by lane and position, for finding who is in front and behind.

    lane, route_at [N] int; pos (front bumper on the lane, m), speed, length [N] float. `route_at` points at the
    vehicle's current edge in `routes`, one flat array of edge numbers in which -1 ends each route. "Nobody" is vehicle
    number N and "no lane" is lane -1: the arrays here have one more entry for them, so that no case is special. `came`
    [N]: the last lane on another edge, for env.tails. `views`: [(Road.leads, whose it is [N], None = everybody's)].
    """

    def __init__(self, road, lane, pos, speed, length, route_at, routes, lookahead, came=None, views=None):
        self.road, self.lane, self.pos, self.speed, self.length = road, lane, pos, speed, length
        self.route_at, self.routes, self.lookahead, self.n = route_at, routes, lookahead, len(lane)
        key = lane * 1e6 + pos  # one lane is shorter than 1000 km
        order = key.argsort(kind="stable")
        self.key, self.order, self.rank = key[order], np.append(order, self.n), np.empty(self.n, int)
        self.everybody, self.views = np.arange(self.n), views or [(road, None)]
        self.rank[order] = self.everybody
        self.end = np.append(np.cumsum(np.bincount(lane, minlength=len(road.lane_length))), 0)
        self.first = np.append(0, self.end[:-1])  # lane's vehicles are order[first:end]
        self.first[-1] = self.n
        self.rear = np.append(pos - length, np.inf)
        self.obstacles = [] if came is None else obstacles(self, came)

    def ahead(self, lane):
        """Who each vehicle would follow if it were on `lane` [..., N]: (index or -1, gap m, speed m/s), each [..., N].

        Follows the vehicle's own route over lane ends and junctions. The end of a lane that does not lead on along
        the route is an obstacle that stands still (index -1, speed 0). `aside` [..., N]: whether one would follow
        somebody on another junction lane that ends where one's own does, and so is no danger yet.
        """
        # On another lane a vehicle exactly abreast is in front (and behind: see `behind`), so the gap is negative.
        place = np.where(lane == self.lane, self.rank + 1, self.key.searchsorted(lane * 1e6 + self.pos, "left"))
        same = place < self.end[lane]
        who = self.order[np.where(same, place, self.n)]
        while self.road.sublane and (beside := (lane == self.lane) & same & (self.rear[who] < self.pos)).any():
            place = place + beside
            same = place < self.end[lane]
            who = self.order[np.where(same, place, self.n)]
        gap, speed = self.rear[who] - self.pos, np.append(self.speed, FREE_SPEED)[who]
        first = np.flatnonzero(~same & (lane >= 0))
        for view, mine in self.views:
            rest = first if mine is None else first[mine[first % self.n]]
            self._search_downstream(view, lane.ravel(), rest, who.ravel(), gap.ravel(), speed.ravel())
        who[who == self.n] = -1
        far = (gap >= self.lookahead) | (who == self.everybody)  # alone on a closed road one would follow oneself
        who[far], gap[far], speed[far] = -1, self.lookahead, FREE_SPEED
        self.aside = np.zeros(who.shape, bool)
        for obstacle in self.obstacles:
            hold_back(self, obstacle, lane, who, gap, speed, self.aside)
        return who, gap, speed

    def _search_downstream(self, road, lane, rest, who, gap, speed):
        """Fill who, gap and speed of the entries `rest`, which are the first on their lane, in place."""
        vehicle = rest % self.n
        current, at = lane[rest], self.route_at[vehicle]
        travelled = road.lane_length[current] - self.pos[vehicle]
        while len(near := np.flatnonzero(travelled < self.lookahead)):
            rest, current, at, travelled = rest[near], current[near], at[near], travelled[near]
            target = self.routes[at + 1]
            fits = (road.link_edge[current] == target[:, None]) & (target >= 0)[:, None]  # -1 also fills unused links
            leads_on = fits.any(1)
            wall = ~leads_on & (target >= 0)
            gap[rest[wall]], speed[rest[wall]] = travelled[wall], 0.0
            following = road.link_lane[current, self._link(road, current, at, fits)]
            taken = leads_on & (self.first[following] < self.end[following])
            found, here = self.order[self.first[following[taken]]], rest[taken]
            who[here], speed[here], gap[here] = found, self.speed[found], travelled[taken] + self.rear[found]
            go = leads_on & ~taken
            rest, current, travelled = rest[go], following[go], travelled[go] + road.lane_length[following[go]]
            at = at[go] + ~road.internal[current]  # on a junction lane the route still points at the edge before it

    def _link(self, road, current, at, fits):
        """Which of the fitting links [N, J] of lanes `current` is taken by who goes on over the routes from `at`."""
        link = fits.argmax(1)
        for i in np.flatnonzero(road.forked[current] & (fits.sum(1) > 1)):
            edges = self.routes[at[i] + 1:at[i] + 1 + AHEAD].tolist()
            link[i] = road.fork(int(current[i]), tuple(edges[:edges.index(-1)] if -1 in edges else edges))
        return link

    def behind(self, lane):
        """Who would follow each vehicle if it were on `lane` [..., N]: (gap m, speed m/s), each [..., N]."""
        place = np.where(lane == self.lane, self.rank, self.key.searchsorted(lane * 1e6 + self.pos, "right")) - 1
        same = place >= self.first[lane]
        who = self.order[np.where(same, place, self.n)]
        gap = self.rear[:-1] - np.append(self.pos, -np.inf)[who]
        speed = np.append(self.speed, 0.0)[who]
        rest = np.flatnonzero(~same & (lane >= 0) & (self.pos < self.lookahead))
        self._search_upstream(lane.ravel(), rest, gap.ravel(), speed.ravel())
        far = gap >= self.lookahead
        gap[far], speed[far] = self.lookahead, 0.0
        return gap, speed

    def _search_upstream(self, lane, rest, gap, speed):
        """Fill gap and speed of the entries `rest`, which are the last on their lane, in place."""
        road, me = self.road, rest % self.n
        lanes = road.upstream_lane[lane[rest]]
        taken = self.end[lanes] > self.first[lanes]
        last = self.order[np.where(taken, self.end[lanes] - 1, self.n)]  # the foremost on each upstream lane
        way = self.rear[me][:, None] + road.upstream_m[lane[rest]] + road.lane_length[lanes]
        distance = np.where(taken & (last != me[:, None]), way - np.append(self.pos, 0.0)[last], np.inf)
        row, nearest = np.arange(len(rest)), distance.argmin(1)
        distance, last = distance[row, nearest], last[row, nearest]
        found = distance < gap[rest]
        gap[rest[found]], speed[rest[found]] = distance[found], self.speed[last[found]]

    def merging(self):
        """(distance to the lane end where other edges join, m; vehicles on those edges), each [N]."""
        road, edge = self.road, self.road.lane_edge[self.lane]
        count = np.bincount(edge, minlength=len(road.joins))
        waiting = np.bincount(road.join_edge, count[road.join_with], len(count))
        distance = np.where(road.joins[edge], road.lane_length[self.lane] - self.pos, 500.0)
        return np.minimum(distance, 500.0), waiting[edge]
