"""The environment as any single-agent library takes it: a flat observation and a MultiDiscrete action.

The same TrafficEnv does the same work in every step; only its two ends differ. Observation: the chosen arrays of the
graph for all slots, and the global metrics, as one vector. Action, for each of the K commands: which of the ICVs
present (beyond their number: none), lane, and acceleration in steps of 0.5 m/s^2. Reward: what phase 2 maximises; over
an episode its sum is the return - cost_weight * C_int (mean cost of a step). No shield stands in between: see
models/safety_shield.py.
"""
import gymnasium
import numpy as np
from gymnasium import spaces

from env.spaces import ACCEL_HIGH, ACCEL_LOW, observation_space
from env.traffic_env import make_env

# What an MLP sees of every vehicle. Neighbours and edges follow from it, and would make the vector 4 times as long.
VEHICLES = ("nodes", "surround", "icv", "mask")
GRAPH = (*VEHICLES, "edges", "neighbours")  # what a graph network needs
ICVS = 64                                   # so many ICVs (in slot order) can be picked; the corridor holds fewer
LEVELS = np.linspace(ACCEL_LOW, ACCEL_HIGH, 11)
SCALE = 0.01                                # metres, m/s and slots up to 1000 become at most 10, as an MLP needs it


def layout(cfg, arrays):
    """{name: shape} of what the flat observation consists of, in order."""
    shapes = observation_space(cfg.env.max_vehicles, cfg.graph.k_max)
    return {name: shapes[name].shape for name in (*arrays, "globals")}


def flatten(*arrays):
    """Physical units -> one float32 vector of numbers within +-10."""
    return np.clip(np.concatenate([a.ravel() for a in arrays], dtype=np.float32) * np.float32(SCALE), -10, 10)


class FlatTraffic(gymnasium.Env):
    """TrafficEnv of a configs.Config as Box [W] and MultiDiscrete [65, 3, 11] * K; `folder` as there."""

    def __init__(self, cfg=None, folder=None, arrays=VEHICLES, render_mode=None):
        self.env = make_env(cfg, folder)
        self.cfg, self.arrays = cfg, layout(cfg, arrays)
        self.price = cfg.phase2.cost_weight * cfg.env.control_interval / cfg.env.horizon_s
        width = sum(int(np.prod(shape)) for shape in self.arrays.values())
        self.observation_space = spaces.Box(-10.0, 10.0, (width,), np.float32)
        self.action_space = spaces.MultiDiscrete([ICVS + 1, 3, len(LEVELS)] * cfg.env.max_commands)

    def reset(self, *, seed=None, options=None):
        """Begin an episode: (observation [W], info of TrafficEnv)."""
        super().reset(seed=seed)
        observation, info = self.env.reset(seed=int(self.np_random.integers(2 ** 31 - 1)))
        return self._flat(observation), info

    def step(self, action):
        """Command the picked ICVs for one control interval; reward in points of the score, minus the priced cost."""
        pick, lane, level = np.asarray(action).reshape(-1, 3).T
        icvs = np.flatnonzero(self.env.observation.get("icv", []))[:ICVS]
        slots = np.full(ICVS + 1, self.cfg.env.max_vehicles)
        slots[:len(icvs)] = icvs
        observation, reward, terminated, truncated, info = self.env.command(
            slots[pick], LEVELS[level], lane, np.zeros(len(pick)))
        return self._flat(observation), float(reward - self.price * info["cost"]), terminated, truncated, info

    def close(self):
        """End SUMO."""
        self.env.close()

    def _flat(self, observation):
        return flatten(*(observation[name] for name in self.arrays))
