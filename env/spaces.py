"""Observation and action space of the environment, and the units of an action."""
import numpy as np
from gymnasium import spaces

from env import graph

LEFT, KEEP, RIGHT = 0, 1, 2
MAX_BRAKE = 9.0  # m/s^2, what the shield may ask for
LANE_CHANGE = 5.0  # what commanding one costs; an acceleration costs its size in m/s^2
ACCEL_LOW, ACCEL_HIGH = -3.0, 2.0  # m/s^2


def observation_space(max_vehicles, k_max):
    """Graph of one control step, by slot. A slot belongs to one vehicle until that leaves; `fresh` marks a new one."""
    n = max_vehicles
    box = lambda *shape: spaces.Box(-1000.0, 1000.0, shape, np.float32)  # noqa: E731
    return spaces.Dict({
        "nodes": box(n, len(graph.NODE)), "edges": box(n, k_max, len(graph.EDGE)),
        "neighbours": spaces.Box(-1, n - 1, (n, k_max), np.int16), "globals": box(len(graph.GLOBAL)),
        "surround": box(n, len(graph.SURROUND)), "moved": box(n), "mask": spaces.MultiBinary(n),
        "icv": spaces.MultiBinary(n), "fresh": spaces.MultiBinary(n), "conflict": spaces.MultiBinary(n)})


def action_space(max_vehicles, k):
    """Commands to at most k ICVs: slot (max_vehicles = no command, SUMO drives), accel (-1 = -3, 1 = +2 m/s^2), lane
    (0 left, 1 keep, 2 right) and brake (1 = 9 m/s^2; above 0 it replaces accel: the shield's emergency braking)."""
    return spaces.Dict({
        "slot": spaces.MultiDiscrete([max_vehicles + 1] * k), "lane": spaces.MultiDiscrete([3] * k),
        "accel": spaces.Box(-1, 1, (k,), np.float32), "brake": spaces.Box(0, 1, (k,), np.float32)})


def write_observation(out, slots, rows, globals_):
    """Scatter the rows of the vehicles present into arrays [max_vehicles, ...], whatever these hold. `rows`: {name:
    [N, ...]}; neighbours and edges may be narrower than the arrays. Empty slots hold zeros and neighbours -1."""
    for name, value in rows.items():
        array = out[name]
        array.fill(-1 if name == "neighbours" else 0)
        if array.ndim > 1:
            array[slots, :value.shape[1]] = value
        else:
            array[slots] = value
    out["globals"][:] = globals_


def speed_change(accel, speed, allowed, interval, step_length):
    """(acceleration m/s^2, duration s) that SUMO is told for a command: not beyond the speed limit `allowed`, which
    SUMO ignores without its safe-speed check.

    Who must stand before the interval is over does so at its end, else its driver would start again; after emergency
    braking it does so at once, because SUMO spreads a change of speed over the duration.
    """
    accel = min(accel, max((float(allowed) - float(speed)) / interval, -1.0))
    if accel < ACCEL_LOW and speed > 0.1:
        return accel, min(interval, max(float(speed) / -accel, step_length))
    return max(accel, -float(speed) / interval - 1e-3), interval
