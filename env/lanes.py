"""What follows from a network's lanes and links alone: ways out and upstream, joining traffic, lanes side by side."""
import gzip
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from env.launch import SumoError, put_in
from env.scenarios import as_unicode, seconds_of

WALKING = re.compile(r":.*_[wc]\d+_\d+$")  # SUMO's names of walking areas and pedestrian crossings


def links_of(lane, links, known):
    """The links [(next lane, internal lane)] of a lane that vehicles take to a known lane."""
    return [] if WALKING.match(lane) else [(following, via) for following, via in links
                                           if following in known and not WALKING.match(following)]


def link_tables(lanes, index, edges, shut):
    """link_lane and link_edge of env.road.Road, [L, J], without what leads from elsewhere to the lanes (numbers) that
    are `shut`, or over them: a car's way ends where a bus lane begins."""
    width = max(1, max(len(links) for _, _, links in lanes))
    link_lane, link_edge = np.full((2, len(lanes), width), -1)
    for i, (lane, _, links) in enumerate(lanes):
        for j, (following, via) in enumerate(links_of(lane, links, index)):
            if i in shut or not {index[following], index.get(via)} & shut:
                link_lane[i, j] = index.get(via, index[following])
                link_edge[i, j] = edges[following.rpartition("_")[0]]
    return link_lane, link_edge


def network_of(client):
    """The bytes of the .net.xml that a simulation has loaded."""
    path = put_in(client.simulation.getOption("net-file"))
    data = Path(os.fsdecode(path.encode(errors="surrogateescape"))).read_bytes()  # SUMO's names are UTF-8
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def oncoming_lanes(network):
    """Ids of the lanes of a .net.xml on whose edges drivers of the other direction may overtake, and these on the
    other: TraCI does not tell."""
    edges = ElementTree.fromstring(as_unicode(network)).iter("edge") if b"<neigh " in network else ()
    return [lane.get("id") for edge in edges if edge.find("lane/neigh") is not None for lane in edge.iter("lane")]


def restricted(network):
    """{edge id: the lowest speed, m/s, that its type allows some class of vehicles}: TraCI does not tell."""
    root = ElementTree.fromstring(as_unicode(network)) if b"<restriction " in network else ElementTree.Element("net")
    lowest = {kind.get("id"): min(speeds) for kind in root.iter("type")
              if (speeds := [float(one.get("speed")) for one in kind.iter("restriction")])}
    return {edge.get("id"): lowest[edge.get("type")] for edge in root.iter("edge") if edge.get("type") in lowest}


OTHER_MOTION = ("lateral-resolution", "lanechange.duration", "default.action-step-length")  # options of SUMO's
TRUE = ("1", "yes", "true", "on", "x", "t")  # as SUMO reads it
FAR_M = 1000.0  # how far drivers look along their route when they choose a lane of a fork
SLOWER = 1.0  # by so much lower is a speed limit for which drivers brake, m/s
LONGEST_STEP_S = 0.2  # SUMO's step for which the shield alone prevents collisions; at 0.25 s some touch who stops


def special_lanes(client):
    """{part of env.road.Road: ids of lanes, or what is said of them}. crossing: junction lanes that cross or meet
    others, or that a light closes; all, where one may be beside another on a lane (sublane model) or on two at once
    (lane changes that take time), and where vehicles move otherwise than the shield reckons (ballistic integration,
    which an action step length for all brings too; steps so long that a leader's stop is seen too late), and those
    whose speed limit may fall at any time. limits: speed limits for whom they are lowest, m/s. closed: not for
    passenger cars. walked: where persons walk among these. barred: the kinds of vehicles for which a lane is closed.
    solid: lanes that passenger cars may not leave to the left (1), to the right (-1). oncoming: oncoming_lanes.
    sublane: whether that is the model. SumoError where there is no lane."""
    lane, ids, tls, option = client.lane, client.lane.getIDList(), client.trafficlight, client.simulation.getOption
    unsure = (any(seconds_of(option(name)) > 0 for name in OTHER_MOTION)
              or option("step-method.ballistic").lower() in TRUE or seconds_of(option("step-length")) > LONGEST_STEP_S)
    special = {via or to for name in tls.getIDList() for links in tls.getControlledLinks(name) for _, to, via in links}
    special |= {i for sign in client.variablespeedsign.getIDList() for i in client.variablespeedsign.getLanes(sign)}
    crossing = [i for i in ids if unsure or i in special or (i.startswith(":") and lane.getInternalFoes(i))]
    barred, network = {i: kinds for i in ids if (kinds := lane.getDisallowed(i))}, network_of(client)
    if not ids:
        raise SumoError("its network has no lanes; expected a road to drive on")
    slow = restricted(network)
    lines = ids if b" changeLeft=" in network or b" changeRight=" in network else ()  # two questions for every lane
    return {"crossing": crossing, "barred": barred, "oncoming": oncoming_lanes(network),
            "sublane": seconds_of(option("lateral-resolution")) > 0,
            "limits": [min(lane.getMaxSpeed(i), slow.get(i.rpartition("_")[0], np.inf)) for i in ids],
            "closed": [i for i in ids if "passenger" in barred.get(i, ())],
            "walked": [i for i in ids if i[0] != ":" and not {"pedestrian", "passenger"} & {*barred.get(i, ())}],
            "solid": {side: [i for i in lines if "passenger" not in lane.getChangePermissions(i, side)]
                      for side in (1, -1)}}


def taken_link(road, lane, edges):
    """Number of the link that SUMO's drivers take from a lane that forks, to go on over `edges`: to the lane that leads
    farthest without another change of lanes; else to the one nearest to such a lane; else the first."""
    links = np.flatnonzero(road.link_edge[lane] == edges[0])
    known = {}
    ways = {int(one): straight_on(road, one, edges[1:], known) for one in road.edge_lanes[edges[0]] if one >= 0}
    best = [one for one, way in ways.items() if way == max(ways.values())]

    def merit(link):
        one = int(behind_junction(road, road.link_lane[lane, link]))
        return ways[one], -min(abs(road.lane_number[one] - road.lane_number[other]) for other in best)
    return max(links, key=merit)


def straight_on(road, lane, edges, known, left=FAR_M):
    """How far `lane` leads along the `edges` behind its own without a change of lanes, m; FAR_M to the route's end.
    `known` keeps the answers: where every lane forks there are too many ways."""
    if not edges or left <= 0:
        return FAR_M
    if (key := (int(lane), len(edges), left)) not in known:
        following = [behind_junction(road, one) for one in road.link_lane[lane][road.link_edge[lane] == edges[0]]]
        rest = left - road.lane_length[lane]
        known[key] = road.lane_length[lane] + max((straight_on(road, one, edges[1:], known, rest) for one in following),
                                                  default=0.0)
    return known[key]


def slower_lanes(link_lane, limits):
    """Whether a lane's speed limit is clearly lower than that of one which leads to it, [L]."""
    lower = (link_lane >= 0) & (limits[link_lane] < limits[:, None] - SLOWER)
    return np.isin(np.arange(len(limits)), link_lane[lower])


def behind_junction(road, lane):
    """The lane to which a link leads at last, over junction lanes."""
    while road.internal[lane]:
        lane = road.link_lane[lane, 0]
    return lane


def forked_lanes(link_edge):
    """Whether several links of a lane lead to the same next edge: where one lane becomes two, [L]."""
    edges = np.sort(link_edge, 1)
    return ((edges[:, 1:] == edges[:, :-1]) & (edges[:, 1:] >= 0)).any(1)


def lane_beside(edge_lanes, edge_of, number, internal, closed):
    """Lane with the given number on the same edge [L + 1], -1 where there is none; the last entry is for "no lane"."""
    inside = (number >= 0) & (number < edge_lanes.shape[1]) & ~internal
    lane = np.where(inside, edge_lanes[edge_of, np.where(inside, number, 0)], -1)
    return np.append(np.where((lane >= 0) & closed[lane], -1, lane), -1)


def distance_to_exit(length, link_lane, edge_of):
    """Shortest way from each lane's start to an exit (a lane that leads nowhere), m [L]; sideways moves are free.

    A network without exits is cut open at its first edge.
    """
    following = np.where(link_lane >= 0, edge_of[link_lane], -1)  # edges
    leads_on = np.zeros(edge_of.max() + 1, bool)
    np.logical_or.at(leads_on, edge_of, (link_lane >= 0).any(1))
    exits = edge_of == edge_of[0] if leads_on.all() else ~leads_on[edge_of]
    best, before = np.full(len(leads_on) + 1, np.inf), None  # by edge; the last entry is for "no link"
    while before is None or (best != before).any():  # each turn finds the ways that are one edge longer
        before = best.copy()
        np.minimum.at(best, edge_of, length + np.where(exits, 0.0, before[following].min(1)))
    return np.where(np.isfinite(best), best, 0.0)[edge_of]


def upstream(length, link_lane, reach):
    """Lanes that lead to each lane within `reach` m, and the metres between their end and its start, each [L, U]."""
    before, result = [[] for _ in length], []
    for lane, link in np.argwhere(link_lane >= 0):
        before[link_lane[lane, link]].append(lane)
    for lane in range(len(length)):
        found, todo = {}, [(lane, 0.0)]
        while todo:
            current, between = todo.pop()
            for b in before[current]:
                if between < found.get(b, reach):
                    found[b] = between
                    todo.append((b, between + length[b]))
        result.append(sorted(found.items(), key=lambda item: item[1]))
    width = max(1, max(len(found) for found in result))
    padded = np.array([found + [(-1, 0.0)] * (width - len(found)) for found in result])
    return padded[..., 0].astype(int), padded[..., 1]


def joining_edges(link_edge, edge_of, internal):
    """Pairs of different edges that lead to the same next edge, where traffic merges: (edge [P], other [P])."""
    into = {}
    for lane, targets in enumerate(link_edge):
        if not internal[lane]:
            for target in targets[targets >= 0]:
                into.setdefault(target, set()).add(edge_of[lane])
    pairs = {(edge, other) for sources in into.values() for edge in sources for other in sources if edge != other}
    return np.array(sorted(pairs), int).reshape(-1, 2).T
