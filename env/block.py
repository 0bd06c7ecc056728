"""The block of shared memory between learner and workers, and the environments on the worker's side of it."""
import gc
import sys

import numpy as np

from env.launch import SumoError
from env.spaces import observation_space
from env.traffic_env import make_env

SECONDS = ("simulate", "read", "graph", "idle")  # where a worker's time went in the last step of each environment


def block_type(cfg):
    """The dtype of one environment's part of the block: its observation, commands and results; `final` is another
    observation."""
    half = {np.dtype(np.float32): np.float16, np.dtype(np.int8): np.bool_}
    space, k = observation_space(cfg.env.max_vehicles, cfg.graph.k_max), (cfg.env.max_commands,)
    observation = [(name, half.get(box.dtype, box.dtype), box.shape) for name, box in space.items()]
    return np.dtype([
        *observation, ("slot", np.int16, k), ("accel", np.float32, k), ("lane", np.int8, k), ("brake", np.float32, k),
        ("reward", np.float32), ("cost", np.float32), ("terminated", np.bool_), ("truncated", np.bool_),
        ("lost", np.bool_), ("seconds", np.float32, len(SECONDS)), ("final", np.dtype(observation, align=True))],
        align=True)


def map_block(buffer, cfg):
    """(arrays, final): views [envs, ...] into the shared buffer, which holds a `block_type` of each environment."""
    block = np.frombuffer(buffer, block_type(cfg))
    arrays = {name: block[name] for name in block.dtype.names if name != "final"}
    return arrays, {name: block["final"][name] for name in block["final"].dtype.names}


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
        if seed is not None and (what != "step" or summary or lost):
            lost |= self._reset(index, seed, once=what == "try")
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

    def _reset(self, index, seed, once):
        """Begin an episode; returns whether that failed, if it is tried `once`: then who asks counts failures."""
        gc.collect()  # workers do not collect in between
        if once:
            self.failures[index] = 0
        while True:
            try:
                self._write(self.arrays, index, self.envs[index].reset(seed=seed)[0])
                return False
            except SumoError as error:
                if once:
                    self._tell(index, error)
                    return True
                self._replace(index, error)

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
