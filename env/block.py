"""The block of shared memory between learner and workers, and the environments on the worker's side of it."""
import gc
import sys

import numpy as np

from env.launch import SumoError
from env.spaces import observation_space
from env.traffic_env import make_env

SECONDS = ("simulate", "read", "graph", "idle")  # where a worker's time went in the last step of each environment


def block_layout(cfg):
    """({name: (shape, dtype)} of one environment's observation, the same of everything else that is shared)."""
    half = {np.dtype(np.float32): np.float16, np.dtype(np.int8): np.bool_}
    space = observation_space(cfg.env.max_vehicles, cfg.graph.k_max)
    observation = {name: (box.shape, np.dtype(half.get(box.dtype, box.dtype))) for name, box in space.items()}
    k = (cfg.env.max_commands,)
    rest = {"slot": (k, np.int16), "accel": (k, np.float32), "lane": (k, np.int8), "brake": (k, np.float32),
            "reward": ((), np.float32), "cost": ((), np.float32), "terminated": ((), np.bool_),
            "truncated": ((), np.bool_), "lost": ((), np.bool_), "seconds": ((len(SECONDS),), np.float32)}
    return observation, {name: (shape, np.dtype(dtype)) for name, (shape, dtype) in rest.items()}


def map_block(buffer, cfg, envs):
    """(arrays, final): views [envs, ...] into the shared buffer; with buffer None returns its size in bytes."""
    observation, rest = block_layout(cfg)
    at, views = 0, ({}, {})
    for part, names in ((views[0], {**observation, **rest}), (views[1], observation)):
        for name, (shape, dtype) in names.items():
            count = envs * int(np.prod(shape, dtype=int))
            if buffer is not None:
                part[name] = np.frombuffer(buffer, dtype, count, at).reshape(envs, *shape)
            at += -(-count * dtype.itemsize // 64) * 64  # every array starts on its own cache line
    return at if buffer is None else views


class Environments:
    """The environments of one worker and their place in the block: used in workers and by the serial pool.

    A simulator that crashed or froze costs its episode only: the step is marked in `lost`, and the next episode begins
    in a new SUMO process. After `rollout.restarts` of them without one good step in between, the error is raised.
    """

    def __init__(self, cfg, indices, arrays, final, folder):
        self.arrays, self.final, self.restarts = arrays, final, cfg.rollout.restarts
        self.envs = {index: make_env(cfg, folder) for index in indices}
        self.failures = dict.fromkeys(indices, 0)
        self.idle = 0.0  # how long the worker has waited for orders

    def run(self, orders):
        """Carry out [(environment, what, seed or None)]; returns [(environment, summary)] of ends. `what` is "step",
        "reset", or "try": a reset that is lost when it fails, and no error however often."""
        return [(index, summary) for index, what, seed in orders
                for summary in [self._run_one(index, what, seed)] if summary is not None]

    def _run_one(self, index, what, seed):
        summary, lost = None, what == "step" and self.envs[index].simulator is None  # this worker is a new one
        if what == "step" and not lost:
            try:
                summary = self._step(index)
                self.failures[index] = 0
            except SumoError as error:
                self._replace(index, error)
                lost = True
        for name in ("reward", "cost", "terminated", "truncated", "seconds") if lost else ():
            self.arrays[name][index] = 0
        if what == "try":
            lost = not self._try(index, seed)
        elif seed is not None and (what == "reset" or summary or lost):
            self._reset(index, seed)
        self.arrays["lost"][index] = lost
        return summary

    def _step(self, index):
        """One control step; returns the summary of the episode if it ended."""
        env, a = self.envs[index], self.arrays
        views = {name: a[name][index] for name in self.final}
        _, a["reward"][index], a["terminated"][index], a["truncated"][index], info = env.command(
            a["slot"][index], a["accel"][index], a["lane"][index], a["brake"][index], views)
        a["cost"][index] = info["cost"]
        a["seconds"][index] = *env.seconds, self.idle
        self.idle = 0.0
        if "summary" not in info:
            return None
        self._write(self.final, index, views)
        return {**info["summary"], "seed": info["seed"]}

    def _reset(self, index, seed):
        gc.collect()  # workers do not collect in between
        while True:
            try:
                return self._write(self.arrays, index, self.envs[index].reset(seed=seed)[0])
            except SumoError as error:
                self._replace(index, error)

    def _try(self, index, seed):
        """Whether a reset succeeds; failures are counted by who asks."""
        self.failures[index] = 0
        try:
            self._write(self.arrays, index, self.envs[index].reset(seed=seed)[0])
        except SumoError as error:
            self._tell(index, error)
            return False
        return True

    def _replace(self, index, error):
        """Note that the simulator has gone (the next reset starts another); too often in a row is an error."""
        self.failures[index] += 1
        if self.failures[index] > self.restarts:
            raise error
        self._tell(index, error)

    def _tell(self, index, error):
        print(f"environment {index} (seed {self.envs[index].seed}): {error}\n... its episode is lost, SUMO starts anew",
              file=sys.stderr, flush=True)

    @staticmethod
    def _write(arrays, index, observation):
        for name, value in observation.items():
            arrays[name][index] = value

    def close(self):
        """End every SUMO."""
        for env in self.envs.values():
            env.close()
