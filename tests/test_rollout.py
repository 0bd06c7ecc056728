"""runtime/rollout.py: the loop that joins a pool of environments with a driver.

It runs with a pool that counts and a driver that checks what it is shown: their numbers say of which
environment, episode and step they are, so that anything lost, doubled, late or swapped shows as a wrong number.
"""
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs import Config
from env.workers import WorkerError, make_pool
from models.policy import Driver
from runtime.rollout import Collector, episode_seed, take_turn


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

    num_envs = 4

    def __init__(self, late, groups=((0, 2), (1, 3))):
        self.groups = [list(group) for group in groups]
        fields = {"seen": np.float32, "icvs": np.int64}
        rest = {"slot": np.int64, "accel": np.float32, "lane": np.int8, "brake": np.float32}
        self.arrays = {name: np.zeros(4, kind) for name, kind in fields.items()}
        self.arrays.update({name: np.zeros((4, 2), kind) for name, kind in rest.items()})
        self.arrays.update({name: np.full(4, np.nan, np.float32) for name in ("reward", "cost")})
        self.arrays.update({name: np.zeros(4, bool) for name in ("terminated", "truncated", "lost")})
        self.final = {name: np.zeros(4, kind) for name, kind in fields.items()}
        self.late, self.where, self.pending, self.seeds, self.under_way = late, [None] * 4, {}, [], []

    def spent(self, group):
        return {"simulate": 0.25 * len(group), "idle": 0.0}

    def reset(self, seeds):
        for env, seed in enumerate(seeds):
            self.where[env] = (0, 0)
            self.seeds.append((env, 0, seed))
            self._show(self.arrays, env)

    def _show(self, arrays, env):
        arrays["seen"][env] = code(env, *self.where[env])
        arrays["icvs"][env] = 1 + (env // 2 + sum(self.where[env])) % 3  # not the same within a group

    def send(self, group, next_seeds):
        assert not set(group) & set(self.pending), "a step before the results of the last one were fetched"
        for env, seed in zip(group, next_seeds):
            commands = {name: self.arrays[name][env].copy() for name in ("slot", "accel", "lane", "brake")}
            assert (commands["accel"] == code(env, *self.where[env])).all(), "a command for another observation"
            self.pending[env] = seed
        if not self.late:
            self.ended = {**getattr(self, "ended", {}), **{env: self._step(env, self.pending[env]) for env in group}}

    def receive(self, group):
        self.under_way.append(set(self.pending))
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
        self.drawn = {}
        self.forget()

    @staticmethod
    def values(seen):
        return seen["scene"].float(), seen["scene"] + 0.125

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
        names = ("nodes", "surround", "icv", "fresh", "moved", "conflict")
        valid = torch.arange(width) < torch.from_numpy(observation["icvs"])[:, None]
        return {"scene": seen, "valid": valid, "candidates": rows[..., None], "embedding": rows[..., None],
                "before": before[:, None, None, None].expand(-1, width, 1, 2).float(),
                "observation": {**dict.fromkeys(names, rows), "mask": valid, "globals": seen}}

    def decide(self, seen, noise):
        for number, uniform, normal in zip(seen["scene"].tolist(), *noise):
            self.drawn[number] = torch.cat([uniform, normal])
        value, two = seen["scene"].float(), seen["scene"][:, None].repeat(1, 2)
        choice = {**dict.fromkeys(("picks", "u", "lane", "release", "pace", "log_prob"), two), "valid": two > 0,
                  "value": value, "cost_value": value + 0.125}
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
        rollout, facts = collector.collect(10)
        batch, rows = rollout.dense(), expected[10 * fragment:10 * fragment + 10]
        columns = [torch.tensor([[row[i] for row in step] for step in rows]) for i in range(5)]
        for name, column in zip(("value", "reward", "next_value", "terminated", "ended"), columns):
            assert torch.equal(batch[name], column.to(batch[name].dtype)), name
        assert torch.equal(batch["cost_value"], batch["value"] + 0.125)
        assert torch.equal(batch["next_cost_value"], batch["next_value"] + 0.125)
        assert torch.equal(batch["cost"], (torch.arange(4) + 0.25).expand(10, 4))
        for name in ("picks", "u", "lane", "release", "pace", "log_prob"):
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
    """What was observed, for as many candidates or vehicles as there were; and, for sequences, the memory before."""
    stored = ("embedding", "nodes", "moved") if sequences else ("candidates",)
    assert set(stored) <= set(batch) and ("before" in batch) == bool(sequences)
    counts = 1 + (seen // 800 + seen % 400 // 20 + seen % 20) % 3
    there = torch.arange(3) < counts[..., None]  # widths 1 to 3 occur
    for name in stored:
        assert batch[name].shape[:3] == (10, 4, 3) and batch[name].dtype == torch.float16
        assert torch.equal(batch[name].view(10, 4, 3), (seen[..., None] * there).half()), name
    if sequences:
        assert torch.equal(batch["mask"], there)
        width = counts[::5].max()  # of the steps at which sequences start
        before = ((seen[::5] % 20)[..., None] * there[::5])[..., :width, None, None]
        assert torch.equal(batch["before"], before.expand(2, 4, width, 1, 2).half())
    else:
        assert torch.equal(batch["scene"], seen.half())


def test_collector_begins_anew_at_a_boundary():
    """`begin` starts fresh episodes with an empty memory, and with the seeds of the new iteration."""
    pool, driver = CountingPool(late=True), CheckingDriver()
    collector = Collector(pool, driver, run_seed=7, phase=3)
    for iteration in (0, 1):
        collector.begin(iteration)
        rollout, _ = collector.collect(7)
        assert torch.equal(rollout["value"][0], torch.tensor([code(env, 0, 0) for env in range(4)]).float())
    seeds = {seed for _, _, seed in pool.seeds}
    assert len(seeds) == len(pool.seeds) and episode_seed(7, 3, 1, 2, 1) in seeds


def test_an_episode_keeps_its_seed_when_the_curriculum_moves_on():
    """One that had begun in the last step of a collection was taken for one of the next stage, whose rule taught it."""
    pool = CountingPool(late=True)
    collector = Collector(pool, CheckingDriver(), run_seed=7, phase=2)
    collector.begin(0)
    collector.collect(3)
    collector.move_seed = lambda seed: seed + 1
    under_way = {env: seed for env, _, seed in pool.seeds}
    assert pool.where[0] == (1, 0) and collector.seeds == [under_way[env] for env in range(4)]
    collector.collect(30)
    assert collector.seeds == [{env: seed for env, _, seed in pool.seeds}[env] for env in range(4)]


# ---- noise -------------------------------------------------------------------------------------------------------

def draws(groups=((0, 2), (1, 3)), run_seed=7, phase=2, iteration=0, first_env=0):
    """[environment][step]: what the actions were sampled with."""
    driver = CheckingDriver()
    collector = Collector(CountingPool(True, groups), driver, run_seed, phase, first_env)
    collector.begin(iteration)
    collector.collect(12)
    return [[driver.drawn[number] for number in sorted(driver.drawn) if number // 400 == env] for env in range(4)]


def same(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("groups", [[[0], [1], [2], [3]], [[0, 1, 2, 3]], [[3, 1], [0, 2]]])
def test_noise_belongs_to_the_environment_and_not_to_its_group(groups):
    """All ranks once drew from streams of their own, in the order of groups: results depended on the layout."""
    assert all(same(ours, theirs) for ours, theirs in zip(draws(), draws(groups)))


def test_noise_follows_the_number_among_all_ranks():
    """The third environment of one rank draws as the first of a second rank does."""
    one, second = draws(), draws(first_env=2)
    assert same(one[2], second[0]) and same(one[3], second[1])
    flat = torch.cat([torch.stack(env) for env in one])
    assert len(flat.unique(dim=0)) == len(flat) > 40  # never the same twice
    assert flat.shape[1] == 5 * 2 + MAX_SLOTS + 2


@pytest.mark.parametrize("change", [{"run_seed": 8}, {"phase": 3}, {"iteration": 1}])
def test_noise_differs_between_runs_phases_and_iterations(change):
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(draws(), draws(**change)))


# ---- hand-over ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("variants", [3, 4, 6, 12])
def test_episodes_that_begin_at_boundaries_take_turns(variants, every):
    """Of three variants, an environment that began one episode in each iteration saw the same one for ever."""
    begun = [take_turn(episode_seed(1, 2, every * i, 0, 0), variants, every * i, every) for i in range(3 * variants)]
    times = np.bincount(np.array(begun) % variants, minlength=variants)
    assert times.min() > 0 and times.max() <= 5 and len(set(begun)) == len(begun)
    assert take_turn(901400446, 1, every, every) == 901400446  # without a suite nothing moves


def test_a_rollout_in_which_nobody_was_followed_has_following_values():
    """All environments lost in the last step, and no episode that ended before: KeyError instead of a lost fragment."""
    fixed = {"ended": np.array([[False, False], [True, True]]), "value": np.array([[1.0, 2.0], [3.0, 4.0]]),
             "cost_value": np.ones((2, 2))}
    Collector._bootstrap(SimpleNamespace(rollout=SimpleNamespace(fixed=fixed), groups=[[0], [1]]), 1)
    assert fixed["next_value"].tolist() == [[3, 4], [0, 0]] and fixed["next_cost_value"].shape == (2, 2)


@pytest.mark.parametrize("groups, turns, processors", [
    ([[0, 2], [1, 3]], 2, 2), ([[0, 1, 2, 3]], 2, 5), ([[0, 1, 2, 3]], 1, 4), ([[0], [1], [2], [3]], 4, 8)])
def test_one_step_of_each_environment_is_under_way_while_groups_take_turns(groups, turns, processors, monkeypatch):
    """Nothing is queued: at most one step per environment (CountingPool refuses a second), and while one group's
    results are awaited the others simulate. A pool's only group is halved where processors are left to compute on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    pool = CountingPool(True, groups)
    collector = Collector(pool, CheckingDriver(), 7, 2)
    collector.begin(0)
    collector.collect(9)
    assert len(collector.groups) == turns and sorted(sum(collector.groups, [])) == [0, 1, 2, 3]
    assert all(under_way == {0, 1, 2, 3} for under_way in pool.under_way[:8 * turns])
    assert len(pool.under_way) == 9 * turns and pool.pending == {}


def test_worker_that_stops_answering_ends_the_rollout_by_name(scenarios, models, ends_soon):
    """The bound in time: no hand-over waits for ever, and nobody piles up orders meanwhile."""
    cfg = Config()
    cfg.env.max_vehicles, cfg.rollout.restarts = 40, 0
    with make_pool(cfg, 2, 1, scenarios) as pool:
        collector = Collector(pool, Driver(models["small"], 2, 40), 7, 2)
        collector.begin(0)
        pool.patience, pids = 0.5, [process.pid for process in pool.processes]
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match="rollout worker 1 did not answer within"):
            collector.collect(100)
        assert ends_soon(pids)
