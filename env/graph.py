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
DISTANCE_STEPS, BLOCK = 2 ** 21, 128
TTC_CAP, THW_CAP, LANE_END_CAP, ACCEL_CAP, GAP_CAP = 20.0, 10.0, 500.0, 5.0, 200.0  # s, s, m, m/s^2, m
SLOW, CONFLICT_TTC, TIME_PERIOD = 5.0, 2.0, 3600.0                                  # m/s, s, s
HARD_BRAKE = -4.0 + 1e-3  # m/s^2; SUMO computes braking with 4, which many types have, a little too weak

# One vehicle of a scene, in physical units; `lead` is the index of its leader in the scene, -1 = none.
SCENE = np.dtype([("x", "f8"), ("y", "f8"), ("angle", "f8"), ("speed", "f8"), ("accel", "f8"), ("lane", "i4"),
                  ("length", "f8"), ("position", "f8"), ("lane_end", "f8"), ("progress", "f8"), ("icv", "?"),
                  ("odometer", "f8"), ("lead", "i4"), ("lead_gap", "f8"), ("lead_speed", "f8"), ("aside", "?")])


def adaptive_k(vehicles, k_min=4, divisor=4, k_max=16):
    """Neighbours per vehicle in a scene of `vehicles`: min(max(k_min, ceil(N / divisor)), k_max)."""
    return min(max(k_min, math.ceil(vehicles / divisor)), k_max)


def time_to_collision(gap, speed, lead_speed):
    """Seconds until the gap is closed at the present speeds, capped at TTC_CAP (also when it opens)."""
    return _capped_time(np.maximum(gap, 0.0), speed - lead_speed)


def _capped_time(gap, closing):
    time = np.full(np.shape(gap), TTC_CAP, np.result_type(gap))
    np.divide(gap, closing, out=time, where=closing > 0.1)
    return np.minimum(time, TTC_CAP, out=time)


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
    n = len(scene)
    take = min(k, n - 1)
    neighbours, features = np.full((n, k), -1), np.zeros((n, k, len(EDGE)), np.float32)
    if take < 1:
        return neighbours, features
    near, valid = _nearest(scene["x"], scene["y"], take, radius)
    lead = scene["lead"]
    missed = np.flatnonzero((lead >= 0) & ~((near == lead[:, None]) & valid).any(1))
    place = np.minimum(valid[missed].sum(1), take - 1)  # behind those within the radius, or instead of the farthest
    near[missed, place], valid[missed, place] = lead[missed], True
    is_lead = (near == lead[:, None]) & valid
    neighbours[:, :take] = np.where(valid, near, -1)
    _edge_features(scene, near, is_lead, features[:, :take])
    features[:, :take] *= valid[..., None]
    return neighbours, features


def _nearest(x, y, count, radius):
    """(indices [N, count] of the nearest others, nearest first; whether they are within `radius` m).

    Distance (in steps of radius / 2^21) and index share one integer, because sorting rows of integers is several times
    faster than numpy's argpartition; equal distances are ordered by index.
    """
    n, (bits, kind) = len(x), (10, np.int32) if len(x) <= 1024 else (32, np.int64)
    x, y = (x - x.mean()).astype(np.float32), (y - y.mean()).astype(np.float32)
    index, nearest = np.arange(n, dtype=kind), np.empty((n, count), int)
    for begin in range(0, n, BLOCK):  # small arrays, changed in place: fresh large ones cost more than the arithmetic
        rows = slice(begin, begin + BLOCK)
        distance, dy = x - x[rows, None], y - y[rows, None]
        distance *= distance
        dy *= dy
        distance += dy
        np.sqrt(distance, out=distance)
        distance *= DISTANCE_STEPS / radius
        distance[index[:len(distance)], index[rows]] = DISTANCE_STEPS
        np.minimum(distance, DISTANCE_STEPS - 1, out=distance)
        key = distance.astype(kind)
        key <<= bits
        key |= index
        key.sort(axis=1)
        nearest[rows] = key[:, :count]
    return nearest & ((1 << bits) - 1), (nearest >> bits) < DISTANCE_STEPS - 1


def _edge_features(scene, near, is_lead, out):
    """Write the EDGE features of the pairs (vehicle, near[vehicle, :]) into out [N, k, 4]."""
    place, heading = scene["x"] + 1j * scene["y"], np.radians(scene["angle"])  # clockwise from north
    way = (place.take(near) - place[:, None]) * (np.sin(heading) - 1j * np.cos(heading))[:, None]
    along, across = way.real, np.abs(way.imag)
    column = {name: scene[name][:, None] for name in ("speed", "length", "lead_gap")}
    other = {name: column[name].take(near) for name in ("speed", "length")}
    ahead = (along >= 0) | is_lead
    length = np.where(ahead, other["length"], column["length"])
    gap = np.where(is_lead, column["lead_gap"], np.maximum(np.abs(along) - length, 0))
    relative = other["speed"] - column["speed"]
    follower = np.where(ahead, column["speed"], other["speed"])
    free = np.maximum(gap, 0)
    out[..., 0] = np.clip(np.where(ahead, gap, -gap), -GAP_CAP, GAP_CAP)
    out[..., 1] = relative
    out[..., 2] = np.where((across < 2.0) | is_lead, _capped_time(free, np.where(ahead, -relative, relative)), TTC_CAP)
    out[..., 3] = np.minimum(free / np.maximum(follower, 0.5), THW_CAP)


def global_features(scene, counts, lane_km):
    """[16] GLOBAL features. `counts`: waiting, departed and arrived in this step, ocr so far; `lane_km`: road, km."""
    out = np.zeros(len(GLOBAL), np.float32)
    out[12:] = math.log1p(counts["waiting"]), counts["departed"], counts["arrived"], counts["ocr"]
    if not len(scene):
        return out
    n, speed, accel, lead_gap = len(scene), scene["speed"], np.clip(scene["accel"], -9, 9), scene["lead_gap"]
    ttc = time_to_collision(lead_gap, speed, scene["lead_speed"])
    out[:12] = (math.log1p(n), math.log1p(scene["icv"].sum()), *mean_and_spread(speed), speed.min(),
                np.abs(accel).sum() / n, mean_and_spread(accel)[1], ttc.min(), np.minimum(lead_gap, GAP_CAP).sum() / n,
                (speed < SLOW).sum() / n, (accel < -1.0).sum() / n, min(n / lane_km, 500.0))
    return out


def mean_and_spread(values):
    """Mean and standard deviation of a vector (numpy's own take four times as long for a hundred values)."""
    mean = values.sum() / len(values)
    rest = values - mean
    return float(mean), math.sqrt(rest.dot(rest) / len(values))


def surround_features(traffic, scene):
    """[N, 14] SURROUND features; fills `lead`, `lead_gap`, `lead_speed` and `aside` of `scene` in place."""
    out = np.empty((len(scene), len(SURROUND)), np.float32)
    sides = np.stack([traffic.road.beside[side][traffic.lane] for side in (1, -1)])
    who, gap, speed = traffic.ahead(np.concatenate([traffic.lane[None], sides]))
    rear_gap, rear_speed = traffic.behind(sides)
    scene["lead"], scene["lead_gap"], scene["lead_speed"], scene["aside"] = who[0], gap[0], speed[0], traffic.aside[0]
    out[:, 0], out[:, 1] = gap[0], speed[0]
    exists = sides >= 0
    for column, values in enumerate((gap[1:], speed[1:], rear_gap, rear_speed)):
        out[:, 2 + column], out[:, 6 + column] = values * exists
    out[:, 10], out[:, 11] = exists
    out[:, 12], out[:, 13] = traffic.merging()
    return np.clip(out, -GAP_CAP, LANE_END_CAP, out=out)


def conflicts(scene):
    """[N] bool: time to collision with the leader, or the end of the lane, below 2 s, or braking at 4 m/s^2 or
    harder. Of a leader on another junction lane (`aside` of env.road.Traffic) the gap is still to come, and may be
    below 0."""
    ttc = time_to_collision(scene["lead_gap"], scene["speed"], scene["lead_speed"])
    return (ttc < CONFLICT_TTC) & ~scene["aside"] | (scene["accel"] <= HARD_BRAKE)
