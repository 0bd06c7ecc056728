"""From what SUMO reports to the graph that the models see: vectorised over vehicles, numpy only.

Features are in physical units, bounded so that float16 holds them; the models normalise them with statistics that
travel in the checkpoint. Axis letters: N vehicles, k neighbours.
"""
import math

import numpy as np

NODE = ("position", "lane", "speed", "acceleration", "lane_end", "progress", "is_icv", "sin_time", "cos_time")
EDGE = ("gap", "relative_speed", "ttc", "thw")
GLOBAL = ("log_vehicles", "log_icvs", "mean_speed", "std_speed", "min_speed", "mean_abs_accel", "std_accel", "min_ttc",
          "mean_gap", "share_slow", "share_braking", "density", "log_waiting", "departed", "arrived", "ocr")
# Front = where the vehicle would find itself following somebody; "no lane" shows as gap 0.
SURROUND = ("lead_gap", "lead_speed",
            "left_gap", "left_speed", "left_rear_gap", "left_rear_speed",
            "right_gap", "right_speed", "right_rear_gap", "right_rear_speed",
            "has_left", "has_right", "merge_distance", "merge_vehicles")
TTC_CAP, THW_CAP, LANE_END_CAP, ACCEL_CAP, GAP_CAP = 20.0, 10.0, 500.0, 5.0, 200.0  # s, s, m, m/s^2, m
SLOW, CONFLICT_TTC, HARD_BRAKE, TIME_PERIOD = 5.0, 2.0, 4.0, 3600.0                 # m/s, s, m/s^2, s

# One vehicle of a scene, in physical units; `lead` is the index of its leader in the scene, -1 = none.
SCENE = np.dtype([("x", "f8"), ("y", "f8"), ("angle", "f8"), ("speed", "f8"), ("accel", "f8"), ("lane", "i4"),
                  ("length", "f8"), ("position", "f8"), ("lane_end", "f8"), ("progress", "f8"), ("icv", "?"),
                  ("odometer", "f8"), ("lead", "i4"), ("lead_gap", "f8"), ("lead_speed", "f8")])


def adaptive_k(vehicles, k_min=4, divisor=4, k_max=16):
    """Neighbours per vehicle in a scene of `vehicles`: min(max(k_min, ceil(N / divisor)), k_max)."""
    return min(max(k_min, math.ceil(vehicles / divisor)), k_max)


def time_to_collision(gap, speed, lead_speed):
    """Seconds until the gap is closed at the present speeds, capped at TTC_CAP (also when it opens)."""
    closing = speed - lead_speed
    with np.errstate(divide="ignore", invalid="ignore"):
        ttc = np.where(closing > 0.1, np.maximum(gap, 0.0) / closing, TTC_CAP)
    return np.minimum(ttc, TTC_CAP)


def node_features(scene, extent, time_s):
    """[N, 9] NODE features of a SCENE array; `extent` is the length of the network's longest way out, m."""
    out = np.empty((len(scene), len(NODE)), np.float32)
    angle = 2 * math.pi * time_s / TIME_PERIOD
    out[:, 0] = np.clip(scene["position"] / extent, 0, 1)
    out[:, 1], out[:, 2] = scene["lane"], scene["speed"]
    out[:, 3] = np.clip(scene["accel"], -ACCEL_CAP, ACCEL_CAP)
    out[:, 4], out[:, 5] = np.minimum(scene["lane_end"], LANE_END_CAP), np.clip(scene["progress"], 0, 1)
    out[:, 6], out[:, 7], out[:, 8] = scene["icv"], math.sin(angle), math.cos(angle)
    return out


def neighbour_graph(scene, k, radius):
    """The k nearest vehicles within `radius` m of each vehicle, its leader always among them.

    Returns (neighbours [N, k] int, nearest first, -1 = none; edges [N, k, 4] EDGE features, 0 where none). A gap is
    positive to a vehicle ahead and negative to one behind; for the leader it is the gap along the road.
    """
    n, dx, dy = len(scene), scene["x"][None] - scene["x"][:, None], scene["y"][None] - scene["y"][:, None]
    distance = dx * dx + dy * dy
    np.fill_diagonal(distance, np.inf)
    take = min(k, n - 1)
    if take < 1:
        return np.full((n, k), -1), np.zeros((n, k, len(EDGE)), np.float32)
    near = np.argpartition(distance, take - 1, axis=1)[:, :take]
    near = np.take_along_axis(near, np.argsort(np.take_along_axis(distance, near, 1), 1, kind="stable"), 1)
    lead = scene["lead"]
    missed = (lead >= 0) & ~(near == lead[:, None]).any(1)
    near[missed, -1] = lead[missed]
    rows = np.arange(n)[:, None]
    is_lead = near == lead[:, None]
    valid = (distance[rows, near] <= radius * radius) | is_lead
    edges = _edge_features(scene, near, dx[rows, near], dy[rows, near], is_lead)
    neighbours, features = np.full((n, k), -1), np.zeros((n, k, len(EDGE)), np.float32)
    neighbours[:, :take] = np.where(valid, near, -1)
    features[:, :take] = np.where(valid[..., None], edges, 0)
    return neighbours, features


def _edge_features(scene, near, dx, dy, is_lead):
    """[N, k, 4] features of the pairs (vehicle, near[vehicle, :]); dx, dy point to the neighbour, m."""
    heading = np.radians(scene["angle"])[:, None]
    along = dx * np.sin(heading) + dy * np.cos(heading)
    across = np.abs(dx * np.cos(heading) - dy * np.sin(heading))
    ahead = (along >= 0) | is_lead
    own, other = scene["speed"][:, None], scene["speed"][near]
    front_length = np.where(ahead, scene["length"][near], scene["length"][:, None])
    gap = np.where(is_lead, scene["lead_gap"][:, None], np.maximum(np.abs(along) - front_length, 0))
    follower, leader = np.where(ahead, own, other), np.where(ahead, other, own)
    ttc = np.where((across < 2.0) | is_lead, time_to_collision(gap, follower, leader), TTC_CAP)
    thw = np.minimum(np.maximum(gap, 0) / np.maximum(follower, 0.5), THW_CAP)
    return np.stack([np.clip(np.where(ahead, gap, -gap), -GAP_CAP, GAP_CAP), other - own, ttc, thw], -1)


def global_features(scene, counts, lane_km):
    """[16] GLOBAL features. `counts`: waiting, departed and arrived in this step, ocr so far; `lane_km`: road, km."""
    out = np.zeros(len(GLOBAL), np.float32)
    out[12:] = math.log1p(counts["waiting"]), counts["departed"], counts["arrived"], counts["ocr"]
    if not len(scene):
        return out
    speed, accel = scene["speed"], np.clip(scene["accel"], -9, 9)
    ttc = time_to_collision(scene["lead_gap"], speed, scene["lead_speed"])
    out[:12] = (math.log1p(len(scene)), math.log1p(scene["icv"].sum()), speed.mean(), speed.std(), speed.min(),
                np.abs(accel).mean(), accel.std(), ttc.min(), np.minimum(scene["lead_gap"], GAP_CAP).mean(),
                (speed < SLOW).mean(), (accel < -1.0).mean(), min(len(scene) / lane_km, 500.0))
    return out


def surround_features(traffic, scene):
    """[N, 14] SURROUND features; fills `lead`, `lead_gap` and `lead_speed` of `scene` in place."""
    out = np.zeros((len(scene), len(SURROUND)), np.float32)
    scene["lead"], out[:, 0], out[:, 1] = traffic.ahead(traffic.lane)
    scene["lead_gap"], scene["lead_speed"] = out[:, 0], out[:, 1]
    for column, side in ((2, 1), (6, -1)):
        lane = traffic.road.neighbour_lane(traffic.lane, side)
        exists = lane >= 0
        _, gap, speed = traffic.ahead(lane)
        rear_gap, rear_speed = traffic.behind(lane)
        out[:, column:column + 4] = np.where(exists[:, None], np.stack([gap, speed, rear_gap, rear_speed], 1), 0)
        out[:, 10 if side == 1 else 11] = exists
    out[:, 12], out[:, 13] = traffic.merging()
    return np.clip(out, -GAP_CAP, LANE_END_CAP)


def conflicts(scene):
    """[N] bool: time to collision with the leader below 2 s, or braking at 4 m/s^2 or harder."""
    ttc = time_to_collision(scene["lead_gap"], scene["speed"], scene["lead_speed"])
    return (ttc < CONFLICT_TTC) | (scene["accel"] <= -HARD_BRAKE)
