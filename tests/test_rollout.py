"""runtime/rollout.py: the loop that joins a pool of environments with a driver.

It runs with a pool that counts and a driver that checks what it is shown: their numbers say of which
environment, episode and step they are, so that anything lost, doubled, late or swapped shows as a wrong number.
"""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runtime.rollout import Collector, episode_seed


# ---- rollout -----------------------------------------------------------------------------------------------------

MAX_SLOTS, NOBODY = 20, 20


def code(env, episode, step):
    """One number, exact in float16, for what is seen in `step` of `episode` of `env`."""
    return env * 400 + episode * 20 + step


def length(env, episode):
    return 3 + (2 * env + episode) % 4


def terminates(env, episode):
    return (env + episode) % 2 == 0


class CountingPool:
    """Four environments in two groups. `late` shows a step's results when they are fetched, otherwise at once."""

    num_envs, groups = 4, [[0, 2], [1, 3]]

    def __init__(self, late):
        fields = {"seen": np.float32, "icvs": np.int64}
        rest = {"slot": np.int64, "accel": np.float32, "lane": np.int8, "brake": np.float32}
        self.arrays = {name: np.zeros(4, kind) for name, kind in fields.items()}
        self.arrays.update({name: np.zeros((4, 2), kind) for name, kind in rest.items()})
        self.arrays.update({name: np.full(4, np.nan, np.float32) for name in ("reward", "cost")})
        self.arrays.update({name: np.zeros(4, bool) for name in ("terminated", "truncated")})
        self.final = {name: np.zeros(4, kind) for name, kind in fields.items()}
        self.late, self.where, self.pending, self.seeds = late, [None] * 4, {}, []

    def reset(self, seeds):
        for env, seed in enumerate(seeds):
            self.where[env] = (0, 0)
            self.seeds.append((env, 0, seed))
            self._show(self.arrays, env)

    def _show(self, arrays, env):
        arrays["seen"][env] = code(env, *self.where[env])
        arrays["icvs"][env] = 1 + sum(self.where[env]) % 3

    def send(self, group, next_seeds):
        assert not set(group) & set(self.pending), "a step before the results of the last one were fetched"
        for env, seed in zip(group, next_seeds):
            commands = {name: self.arrays[name][env].copy() for name in ("slot", "accel", "lane", "brake")}
            assert (commands["accel"] == code(env, *self.where[env])).all(), "a command for another observation"
            self.pending[env] = seed
        if not self.late:
            self.ended = {**getattr(self, "ended", {}), **{env: self._step(env, self.pending[env]) for env in group}}

    def receive(self, group):
        steps = {env: self._step(env, self.pending[env]) if self.late else self.ended.pop(env) for env in group}
        for env in group:
            del self.pending[env]
        return [(env, summary) for env, summary in steps.items() if summary]

    def _step(self, env, seed):
        episode, step = self.where[env]
        self.where[env] = (episode, step + 1)
        self.arrays["reward"][env], self.arrays["cost"][env] = code(env, episode, step) + 0.5, env + 0.25
        over = step + 1 == length(env, episode)
        self.arrays["terminated"][env] = over and terminates(env, episode)
        self.arrays["truncated"][env] = over and not terminates(env, episode)
        if over:
            self._show(self.final, env)
            self.where[env] = (episode + 1, 0)
            self.seeds.append((env, episode + 1, seed))
        self._show(self.arrays, env)
        return {"env": env, "episode": episode} if over else None


class CheckingDriver:
    """Its values repeat what it saw; its memory counts, and must agree with the step that it is shown."""

    max_vehicles = MAX_SLOTS

    def __init__(self):
        self.model = SimpleNamespace(controller=SimpleNamespace(values=lambda scene: (scene.float(), scene + 0.125)))
        self.forget()

    def forget(self, env=None):
        if env is None:
            self.memory = [0] * 4
        else:
            self.memory[env] = 0

    def perceive(self, observation, envs, remember=True):
        seen = torch.from_numpy(observation["seen"])
        for env, number in zip(envs, seen.tolist()):
            assert number // 400 == env, "an observation of another environment"
            assert number % 20 == self.memory[env], "an observation lost, doubled or of another episode"
        before = torch.tensor([self.memory[env] for env in envs])
        if remember:
            for env in envs:
                self.memory[env] += 1
        width = int(observation["icvs"].max())
        rows = seen[:, None].repeat(1, width)
        names = ("nodes", "surround", "mask", "icv", "fresh", "moved", "conflict")
        valid = torch.arange(width) < torch.from_numpy(observation["icvs"])[:, None]
        return {"scene": seen.long(), "valid": valid, "candidates": rows[..., None], "embedding": rows[..., None],
                "before": before[:, None, None, None].float(),
                "observation": {**dict.fromkeys(names, rows), "globals": seen}}

    def decide(self, seen, deterministic, generator):
        assert deterministic is False and generator is None
        value, two = seen["scene"].float(), seen["scene"][:, None].repeat(1, 2)
        choice = {**dict.fromkeys(("picks", "u", "lane", "release", "log_prob"), two), "valid": two > 0, "value": value,
                  "cost_value": value + 0.125}
        slot = np.array([[NOBODY, 3]] * len(value))
        commands = {"slot": slot, "accel": two.numpy(), "lane": two.numpy() % 3, "brake": 0 * slot,
                    "reason": np.array([[5, 1]] * len(value))}
        return choice, commands


def history(steps):
    """[T][E] of (code seen, reward, code of the state that followed, terminated, ended), from the rules alone."""
    rows = [[None] * 4 for _ in range(steps)]
    for env in range(4):
        episode = step = 0
        for t in range(steps):
            over = step + 1 == length(env, episode)
            rows[t][env] = (code(env, episode, step), code(env, episode, step) + 0.5, code(env, episode, step + 1),
                            over and terminates(env, episode), over)
            episode, step = (episode + 1, 0) if over else (episode, step + 1)
    return rows


@pytest.mark.parametrize("sequences", [0, 5])
@pytest.mark.parametrize("late", [True, False])
def test_collector_neither_loses_nor_doubles_nor_swaps_a_step(late, sequences):
    """Three fragments in a row over episodes of 3 to 6 steps, by both kinds of ends, in two alternating groups."""
    pool, driver = CountingPool(late), CheckingDriver()
    collector = Collector(pool, driver, run_seed=7, phase=2, first_env=100, keep_sequences=sequences)
    collector.begin(3)
    expected, episodes = history(30), []
    for fragment in range(3):
        batch, facts = collector.collect(10)
        rows = expected[10 * fragment:10 * fragment + 10]
        columns = [torch.tensor([[row[i] for row in step] for step in rows]) for i in range(5)]
        for name, column in zip(("value", "reward", "next_value", "terminated", "ended"), columns):
            assert torch.equal(batch[name], column.to(batch[name].dtype)), name
        assert torch.equal(batch["cost_value"], batch["value"] + 0.125)
        assert torch.equal(batch["next_cost_value"], batch["next_value"] + 0.125)
        assert torch.equal(batch["cost"], (torch.arange(4) + 0.25).expand(10, 4))
        for name in ("picks", "u", "lane", "release", "log_prob"):
            assert torch.equal(batch[name], columns[0][..., None].expand(10, 4, 2)), name
        assert facts["steps"] == 40 and facts["commands"] == 40 and facts["clips"] == 80 and facts["emergencies"] == 40
        episodes += [(e["env"], e["episode"]) for e in facts["episodes"]]
        check_features(batch, columns[0], sequences)
    ended = [(seen // 400, seen % 400 // 20) for step in expected for seen, *_, over in step if over]
    assert sorted(episodes) == sorted(ended) and len(set(ended)) == len(ended) > 20
    starts = [(env, number, episode_seed(7, 2, 3, 100 + env, number)) for env, number, _ in pool.seeds]
    assert pool.seeds == starts and {(e, n) for e, n, _ in pool.seeds} == {(e, 0) for e in range(4)} | {
        (e, n + 1) for e, n in ended}


def check_features(batch, seen, sequences):
    """What was observed, padded to the widest step; and, for sequences, the memory before each of them."""
    stored = ("embedding", "nodes", "moved") if sequences else ("candidates", "valid", "scene")
    assert set(stored) <= set(batch) and ("before" in batch) == bool(sequences)
    first = batch[stored[0]]
    assert first.shape[:3] == (10, 4, 3) and first.dtype == torch.float16  # widths 1 to 3 occur
    assert torch.equal(first[:, :, 0, 0].long(), seen)
    padded = first[..., 0] != first[:, :, :1, 0]
    assert (first[..., 0][padded] == 0).all() and padded.any()
    if sequences:
        assert torch.equal(batch["before"].flatten(1).long(), seen[::5] % 20)
    else:
        assert torch.equal(batch["scene"], seen)
        assert torch.equal(batch["valid"].sum(-1), 1 + (seen % 400 // 20 + seen % 20) % 3)


def test_collector_begins_anew_at_a_boundary():
    """`begin` starts fresh episodes with an empty memory, and with the seeds of the new iteration."""
    pool, driver = CountingPool(late=True), CheckingDriver()
    collector = Collector(pool, driver, run_seed=7, phase=3)
    for iteration in (0, 1):
        collector.begin(iteration)
        batch, _ = collector.collect(7)
        assert torch.equal(batch["value"][0], torch.tensor([code(env, 0, 0) for env in range(4)]).float())
    seeds = {seed for _, _, seed in pool.seeds}
    assert len(seeds) == len(pool.seeds) and episode_seed(7, 3, 1, 2, 1) in seeds
