"""Collecting experience: the loop that joins a pool of environments with a driver (model), group by group."""
import time

import torch
import torch.nn.functional as F

STORED = ("picks", "u", "lane", "release", "log_prob", "value", "cost_value")
POLICY = ("candidates", "valid", "scene")                                  # what phase 2 needs of the observation
SEQUENCE = ("nodes", "surround", "globals", "mask", "icv", "fresh", "moved", "conflict")  # what phase 3 needs


def episode_seed(run_seed, phase, iteration, env, number):
    """Seed of the `number`-th episode that an environment begins in an iteration: nothing else enters, so a resumed
    run continues with the same traffic."""
    x = run_seed
    for part in (phase, iteration, env, number):
        x = (x * 1_000_003 + part + 1) % 1_999_999_973
    return x


class Collector:
    """Steps a pool with a Driver and keeps what learning needs.

    `keep_sequences` stores embeddings and the memory at sequence starts as well (phase 3). `first_env` numbers this
    rank's environments among all ranks.
    """

    def __init__(self, pool, driver, run_seed, phase, first_env=0, keep_sequences=0):
        self.pool, self.driver = pool, driver
        self.run_seed, self.phase, self.first_env, self.every = run_seed, phase, first_env, keep_sequences
        self.iteration, self.begun = 0, [0] * pool.num_envs

    def begin(self, iteration):
        """Fresh episodes in every environment: the start of a run and every checkpoint boundary."""
        self.iteration, self.begun = iteration, [0] * self.pool.num_envs
        self.driver.forget()
        self.pool.reset([self._seed(e, 0) for e in range(self.pool.num_envs)])

    def _seed(self, env, number):
        return episode_seed(self.run_seed, self.phase, self.iteration, self.first_env + env, number)

    def collect(self, steps, generator=None):
        """`steps` control steps in every environment. Returns (batch, facts): tensors [T, E, ...] on the CPU, and
        ended episodes, shield counts and times."""
        pool, start = self.pool, time.perf_counter()
        self.steps = [[None] * pool.num_envs for _ in range(steps)]
        self.facts = {"episodes": [], "clips": 0, "emergencies": 0, "commands": 0, "time_infer": 0.0, "time_wait": 0.0,
                      "steps": steps * pool.num_envs}
        for t in range(steps):
            for group in pool.groups:
                if t:
                    self._finish(group, t - 1)
                self._act(group, t, generator)
        for group in pool.groups:
            self._finish(group, steps - 1)
        self._bootstrap(steps - 1)
        self.facts["time_collect"] = time.perf_counter() - start
        return self._stack(), self.facts

    def _act(self, group, t, generator):
        start = time.perf_counter()
        observation = {name: self.pool.arrays[name][group] for name in self.pool.final}
        seen = self.driver.perceive(observation, group)
        choice, commands = self.driver.decide(seen, False, generator)
        for name in ("slot", "accel", "lane", "brake"):
            self.pool.arrays[name][group] = commands[name]
        self.facts["commands"] += int((commands["slot"] < self.driver.max_vehicles).sum())
        self.facts["clips"] += int((commands["reason"] & 1 > 0).sum())
        self.facts["emergencies"] += int((commands["reason"] & 4 > 0).sum())
        self._store(group, t, seen, choice)
        self.facts["time_infer"] += time.perf_counter() - start
        self.pool.send(group, [self._seed(e, self.begun[e] + 1) for e in group])

    def _store(self, group, t, seen, choice):
        """Keep one control step of a group, float16 where it is bulky."""
        keep = {name: choice[name].cpu() for name in STORED}
        keep["pick_valid"] = choice["valid"].cpu()
        if self.every:
            keep["embedding"] = seen["embedding"].half().cpu()
            keep.update({name: _compact(seen["observation"][name]) for name in SEQUENCE})
            if t % self.every == 0:
                keep["before"] = seen["before"].cpu()
        else:
            keep.update({name: _compact(seen[name]) for name in POLICY})
        for row, env in enumerate(group):
            self.steps[t][env] = {name: value[row] for name, value in keep.items()}

    def _finish(self, group, t):
        """Wait for the group's step t: rewards, ends, and the values of the states in which episodes ended."""
        start, arrays = time.perf_counter(), self.pool.arrays
        ended = dict(self.pool.receive(group))
        self.facts["time_wait"] += time.perf_counter() - start
        for env in group:
            row = self.steps[t][env]
            row["reward"], row["cost"] = torch.tensor(arrays["reward"][env]), torch.tensor(arrays["cost"][env])
            row["terminated"] = torch.tensor(bool(arrays["terminated"][env]))
            row["ended"] = row["terminated"] | bool(arrays["truncated"][env])
            if env in ended:
                self.facts["episodes"].append(ended[env])
                self._set_next_values([env], t, {name: self.pool.final[name][[env]] for name in self.pool.final})
                self.driver.forget(env)
                self.begun[env] += 1

    def _bootstrap(self, t):
        """Values of the states after the last step, and of the following states of all other steps."""
        for group in self.pool.groups:
            going = [e for e in group if not bool(self.steps[t][e]["ended"])]
            if going:
                self._set_next_values(going, t, {name: self.pool.arrays[name][going] for name in self.pool.final})
        for now, later in zip(self.steps[:-1], self.steps[1:]):
            for row, after in zip(now, later):
                row.setdefault("next_value", after["value"])
                row.setdefault("next_cost_value", after["cost_value"])

    def _set_next_values(self, envs, t, observation):
        seen = self.driver.perceive(observation, envs, remember=False)
        with torch.no_grad():
            values = [v.cpu() for v in self.driver.model.controller.values(seen["scene"])]
        for row, env in enumerate(envs):
            self.steps[t][env]["next_value"], self.steps[t][env]["next_cost_value"] = values[0][row], values[1][row]

    def _stack(self):
        """{name: tensor [T, E, ...]}, vehicles and candidates padded to the most that occurred."""
        batch = {}
        for name in self.steps[0][0]:
            rows = [row[name] for step in self.steps for row in step if name in row]
            envs = self.pool.num_envs
            batch[name] = _pad(rows).unflatten(0, (len(rows) // envs, envs))
        return batch


def _compact(tensor):
    return tensor.half().cpu() if tensor.is_floating_point() else tensor.cpu()


def _pad(rows):
    """Stack tensors whose first axis differs in length, padding with zeros."""
    longest = max((row.shape[0] for row in rows if row.dim()), default=0)
    return torch.stack([F.pad(row, (0, 0) * (row.dim() - 1) + (0, longest - row.shape[0]))
                        if row.dim() and row.shape[0] < longest else row for row in rows])
