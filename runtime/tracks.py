"""Tracks: where every vehicle was in each control step of an episode, how fast, and whether it was commanded.

    <name>.tracks.npz   "<controller>/<column>" for every column of COLUMNS, one entry per vehicle and step;
                        "<controller>/influence" [steps, RANKS]: the policy's highest scores, NaN elsewhere;
                        "lanes/xy" [P, 2] m and "lanes/first" [L]: the lanes' shapes, one after the other;
                        "interval", "seed"; of a suite "variant", which one

`along` is the way from the start of the main road, m, NaN for vehicles on other roads. The main road is the route on
whose edges most vehicles were seen in all episodes of the file.
"""
import zlib
from zipfile import BadZipFile

import numpy as np

from configs.files import whole

COLUMNS = {"step": np.int32, "vehicle": np.int32, "x": np.float32, "y": np.float32, "along": np.float32,
           "speed": np.float16, "gap": np.float16, "icv": np.bool_, "commanded": np.bool_}
RANKS = 10
# What numpy and zipfile raise for a damaged .npz; NotImplementedError for a flipped bit in the method of compression,
# TypeError for one array alone, an .npy.
DAMAGES = (BadZipFile, zlib.error, EOFError, ValueError, KeyError, TypeError, NotImplementedError, OSError)


class DamagedFile(ValueError):
    """A result is cut or half written; the message names the file."""


class Tracks:
    """One episode; `environment` is an env.traffic_env.TrafficEnv that has been reset."""

    def __init__(self, environment):
        self.environment, self.shapes = environment, environment.simulator.lane_shapes()
        self.road, self.routes = environment.road, environment.routes.places
        self.numbers, self.rows, self.influence = {}, [], []

    def add(self, slots, scores):
        """Note the present control step: `slots` of the vehicles commanded in it, `scores` of all ICVs in any order.

        Returns the names of the commanded vehicles."""
        env, scene, step = self.environment, self.environment.scene, len(self.rows)
        names = {env.slots.names[slot] for slot in slots if slot < len(env.slots.names)}
        self.rows.append({
            "step": np.full(len(scene), step), "x": scene["x"], "y": scene["y"], "speed": scene["speed"],
            "vehicle": [self.numbers.setdefault(name, len(self.numbers)) for name in env.ids],
            "gap": scene["lead_gap"], "icv": scene["icv"], "commanded": [name in names for name in env.ids],
            "edge": self.road.lane_edge[env.lane], "position": self.road.lane_length[env.lane] - scene["lane_end"]})
        best = np.sort(np.asarray(scores, np.float32))[::-1][:RANKS]
        self.influence.append(np.append(best, np.full(RANKS - len(best), np.nan)))
        return names

    def column(self, name):
        """One column over all steps, [rows]."""
        return np.concatenate([np.asarray(row[name]) for row in self.rows])


class Recorded:
    """A controller whose episode in the environment of a SerialPool is recorded, and painted in SUMO's window."""

    def __init__(self, controller, environment):
        self.controller, self.environment, self.tracks = controller, environment, None

    def begin(self, env, seed):
        """A new episode, of which only the last is kept."""
        self.tracks = Tracks(self.environment)
        self.controller.begin(env, seed)

    def act(self, observation, env):
        """The controller's commands, unchanged."""
        commands = self.controller.act(observation, env)
        scores = self.controller.scores() if hasattr(self.controller, "scores") else []  # rules have none
        commanded = self.tracks.add(commands["slot"], scores)
        if self.environment.env_cfg.backend == "gui":
            names = np.array(self.environment.ids, object)
            self.environment.simulator.paint(names[self.environment.scene["icv"]], commanded)
        return commands


def save_tracks(path, episodes, interval, seed, variant=""):
    """Write {controller: Tracks} of one seed; `interval` is the control interval, s; `variant` of a suite."""
    first = next(iter(episodes.values()))
    road, routes = first.road, dict.fromkeys(route for tracks in episodes.values() for route in tracks.routes)
    seen = sum(np.bincount(tracks.column("edge"), minlength=len(road.edge_index)) for tracks in episodes.values())
    start = main_road(road, [[road.edge_index[edge.decode()] for edge in route] for route in routes], seen)
    out = {"interval": np.float32(interval), "seed": np.int64(seed), **({"variant": variant} if variant else {}),
           "lanes/xy": np.concatenate([np.array(shape, np.float32) for shape in first.shapes]),
           "lanes/first": np.cumsum([0, *(len(shape) for shape in first.shapes[:-1])])}
    for controller, tracks in episodes.items():
        values = {"along": start[tracks.column("edge")] + tracks.column("position")}
        for name, kind in COLUMNS.items():
            out[f"{controller}/{name}"] = (values[name] if name in values else tracks.column(name)).astype(kind)
        out[f"{controller}/influence"] = np.array(tracks.influence, np.float16)
    with whole(path) as file:
        np.savez_compressed(file, **out)


def load_tracks(path):
    """({controller: {column: array}}, {"interval", "seed", "lanes/xy", "lanes/first"}) of a tracks file. DamagedFile
    names a damaged one."""
    episodes, facts = {}, {}
    try:
        with np.load(path) as file:
            found = dict(file)
    except FileNotFoundError:
        raise DamagedFile(f"{path}: no such file; evaluate.py --tracks writes one") from None
    except DAMAGES as error:
        raise DamagedFile(f"{path}: damaged ({error}); run evaluate.py --tracks again") from None
    for name, value in found.items():
        controller, _, column = name.partition("/")
        if column in COLUMNS or column == "influence":
            episodes.setdefault(controller, {})[column] = value
        else:
            facts[name] = value
    if not episodes or "interval" not in facts or any(len(one) <= len(COLUMNS) for one in episodes.values()):
        raise DamagedFile(f"{path}: holds no tracks; evaluate.py --tracks writes some")
    return episodes, facts


def main_road(road, routes, seen):
    """Distance from the start of the main road to the start of each edge [E], m, NaN for edges beside it.

    `routes`: lists of edge numbers; `seen` [E]: how often a vehicle was on the edge. Junctions in between count.
    """
    start, at = np.full(len(road.edge_index), np.nan), 0.0
    route = max((list(dict.fromkeys(r)) for r in routes), key=lambda r: seen[r].sum(), default=[])
    for edge, following in zip(route, [*route[1:], *route[:1]]):
        start[edge], at = at, at + road.lane_length[road.edge_lanes[edge, 0]]
        for lane in road.between(edge, following):
            start[road.lane_edge[lane]], at = at, at + road.lane_length[lane]
    return start
