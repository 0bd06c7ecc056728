"""Small functions that several test files of the environment share."""
import numpy as np

from env.spaces import KEEP

TYPES = '<vType id="passenger" vClass="passenger"/><vType id="bus" vClass="bus"/>'
TRIPS = (("car", "passenger", "A0B0", "C2B2", 5), ("taxi", "passenger", "C2B2", "A1A0", 5),
         ("bus", "bus", "A1B1", "C1C0", 6), ("coach", "bus", "C0C1", "A1A2", 6))
FLOWS = TYPES + "".join(
    f'<flow id="{name}" type="{kind}" from="{begin}" to="{end}" begin="0" end="900" period="{period}" '
    'departLane="best" departSpeed="max"/>' for name, kind, begin, end, period in TRIPS)


def nobody(env):
    """The arguments of `command` that command nobody."""
    k = env.env_cfg.max_commands
    return np.full(k, env.env_cfg.max_vehicles), np.zeros(k), np.full(k, KEEP), np.zeros(k)


def only(env, slots, accel=0.0, lane=KEEP, brake=0.0):
    """The arguments of `command` for the given slots (at most K)."""
    out = nobody(env)
    out[0][:len(slots)], out[1][:len(slots)], out[2][:len(slots)], out[3][:len(slots)] = slots, accel, lane, brake
    return out


def random_commands(env, observation, rng):
    icvs = rng.permutation(np.flatnonzero(observation["icv"]))[:env.env_cfg.max_commands]
    return only(env, icvs, rng.uniform(-3, 2, len(icvs)), rng.integers(0, 3, len(icvs)))


def equal(first, second):
    return all(np.array_equal(first[name], second[name]) for name in first)


def episode(env, seed, steps, command=lambda observation: None):
    """[(observation, reward, info)] of `steps` control steps; `command(observation)` gives arguments, None = nobody."""
    observation, info = env.reset(seed=seed)
    rows = [(observation, 0.0, info)]
    for _ in range(steps):
        observation, reward, _, _, info = env.command(*(command(observation) or nobody(env)))
        rows.append((observation, reward, info))
    return rows
