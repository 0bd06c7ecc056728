"""env/workers.py and env/block.py: rollout pools with real worker processes and real SUMO, and what happens when one
of them dies, freezes or fails."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import env as env_package
from configs.schema import Config
from env.spaces import KEEP
from env.traffic_env import TrafficEnv
from env import workers as workers_module
from env.workers import SerialPool, WorkerError, WorkerPool, make_pool

ROOT = Path(env_package.__file__).resolve().parent.parent
SEEDS = [11, 12, 13, 14]


@pytest.fixture
def config():
    cfg = Config()
    cfg.env.max_vehicles, cfg.env.horizon_s, cfg.env.terminate_on_collision = 40, 20.0, False
    cfg.rollout.restarts = 0  # the first fault is the last: how they are survived is test_supervision.py's
    return cfg


@pytest.fixture
def pool_of(scenarios, config):
    """pool_of(workers, environments per worker) -> pool, closed after the test; 0 workers = SerialPool."""
    made = []

    def build(workers, per_worker, folder=scenarios):
        made.append(make_pool(config, workers, per_worker, folder))
        return made[-1]
    yield build
    for pool in made:
        pool.close()


def children(pid):
    """Pids of the child processes."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pool, rng, group):
    """Write random commands for ICVs that are there into the pool's block."""
    a, k = pool.arrays, pool.arrays["slot"].shape[1]
    for i in group:
        icvs = rng.permutation(np.flatnonzero(a["icv"][i]))[:k]
        a["slot"][i], a["slot"][i, :len(icvs)] = a["mask"].shape[1], icvs
        a["accel"][i], a["brake"][i], a["lane"][i] = rng.uniform(-3, 2, k), 0.0, rng.integers(0, 3, k)


def snapshot(pool, group=None):
    rows = slice(None) if group is None else list(group)
    return {name: array[rows].copy() for name, array in pool.arrays.items() if name != "seconds"}  # times differ


def equal(first, second):
    return all(np.array_equal(first[name], second[name], equal_nan=first[name].dtype.kind == "f") for name in first)


def run(pool, steps, seeds=SEEDS):
    """What the pool's arrays hold after each step, all environments at once."""
    rng, everybody, rows = np.random.default_rng(0), range(pool.num_envs), []
    pool.reset(seeds)
    rows.append(snapshot(pool))
    for _ in range(steps):
        command(pool, rng, everybody)
        pool.send(everybody)
        assert pool.receive(everybody) == []
        rows.append(snapshot(pool))
    return rows


# ---- the same results, however they are computed ----------------------------------------------------------------

def test_worker_pool_and_serial_pool_give_the_same_arrays(pool_of):
    serial, workers = pool_of(0, 4), pool_of(2, 2)
    assert isinstance(serial, SerialPool) and isinstance(workers, WorkerPool)
    assert (serial.num_envs, serial.groups) == (4, [[0, 1, 2, 3]])
    assert (workers.num_envs, workers.groups) == (4, [[0, 2], [1, 3]])
    rows = run(serial, 15)
    assert all(equal(a, b) for a, b in zip(rows, run(workers, 15)))
    last = rows[-1]
    assert last["mask"].sum(1).min() > 8 and last["cost"].max() > 0  # something has happened
    assert not equal({"nodes": last["nodes"][0]}, {"nodes": last["nodes"][1]})  # by environment


def test_arrays_hold_what_the_environment_returns(pool_of, scenarios, config):
    pool, env = pool_of(1, 1), TrafficEnv(config, scenarios)
    try:
        pool.reset([21])
        observation, _ = env.reset(seed=21)
        for n in range(12):
            command(pool, np.random.default_rng(n), [0])
            a = snapshot(pool, [0])
            pool.send([0])
            pool.receive([0])
            observation, reward, terminated, truncated, info = env.command(
                *(a[name][0] for name in ("slot", "accel", "lane", "brake")))
            for name, value in observation.items():
                stored = pool.arrays[name][0]
                assert np.array_equal(stored, value.astype(stored.dtype)), name
            assert pool.arrays["reward"][0] == np.float32(reward) and pool.arrays["cost"][0] == np.float32(info["cost"])
            assert (pool.arrays["terminated"][0], pool.arrays["truncated"][0]) == (terminated, truncated)
    finally:
        env.close()


def test_alternating_groups_give_the_same_as_one_after_another(pool_of):
    alternating, plain = pool_of(2, 2), pool_of(2, 2)
    for pool in (alternating, plain):
        pool.reset(SEEDS)
    first, second = alternating.groups
    streams = [np.random.default_rng(g) for g in range(2)]
    command(alternating, streams[0], first)
    alternating.send(first)
    seen = []
    for _ in range(10):  # while one group simulates, the other group's commands are chosen
        command(alternating, streams[1], second)
        alternating.send(second)
        alternating.receive(first)
        seen.append(snapshot(alternating, first))
        command(alternating, streams[0], first)
        alternating.send(first)
        alternating.receive(second)
        seen.append(snapshot(alternating, second))
    alternating.receive(first)
    streams, expected = [np.random.default_rng(g) for g in range(2)], []
    for _ in range(10):
        for g, group in enumerate(plain.groups):
            command(plain, streams[g], group)
            plain.send(group)
            plain.receive(group)
            expected.append(snapshot(plain, group))
    results = ("nodes", "edges", "neighbours", "globals", "mask", "reward", "cost", "moved")
    assert all(equal({name: a[name] for name in results}, b) for a, b in zip(seen, expected))


def test_some_environments_can_be_reset_alone(pool_of):
    pool = pool_of(1, 2)
    pool.reset([11, 12])
    fresh = snapshot(pool)
    for _ in range(5):
        pool.arrays["slot"][:] = 40
        pool.send([0, 1])
        pool.receive([0, 1])
    later = snapshot(pool)
    pool.reset([12], [1])
    assert equal({"nodes": pool.arrays["nodes"][1]}, {"nodes": fresh["nodes"][1]})
    assert equal({"nodes": pool.arrays["nodes"][0]}, {"nodes": later["nodes"][0]}) and later["mask"][0].any()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_that_ends(pool_of, scenarios, config, workers):
    """`final` holds the last observation and `arrays` the first one of the next episode."""
    config.env.horizon_s, config.env.warmup_s = 6.0, 4.0  # so that a first observation is not empty
    pool, env = pool_of(workers, 2), TrafficEnv(config, scenarios)
    pool.reset([31, 32])
    pool.arrays["slot"][:] = 40
    for n in range(1, 7):
        pool.send([0, 1], [41, 42])
        ended = pool.receive([0, 1])
        assert [i for i, _ in ended] == ([0, 1] if n == 6 else [])
    try:
        for (i, summary), seed, following in zip(ended, (31, 32), (41, 42)):
            env.reset(seed=seed)
            for _ in range(6):
                last, *_, info = env.command([40], [0.0], [KEEP], [0.0])
            assert summary == {**info["summary"], "seed": seed} and summary["steps"] == 6
            first, _ = env.reset(seed=following)
            for name in last:
                kind = pool.final[name].dtype
                assert np.array_equal(pool.final[name][i], last[name].astype(kind)), name
                assert np.array_equal(pool.arrays[name][i], first[name].astype(kind)), name
            assert first["mask"].any() and pool.arrays["truncated"][i] and not pool.arrays["terminated"][i]
    finally:
        env.close()
    pool.send([0, 1])  # the next episode goes on
    assert pool.receive([0, 1]) == [] and not pool.arrays["truncated"].any()


@pytest.mark.parametrize("workers", [0, 1])
def test_without_a_next_seed_the_last_observation_stays(pool_of, config, workers):
    config.env.horizon_s = 3.0
    pool = pool_of(workers, 1)
    pool.reset([5])
    pool.arrays["slot"][:] = 40
    for _ in range(3):
        pool.send([0])
        ended = pool.receive([0])
    assert len(ended) == 1
    assert equal({name: pool.final[name] for name in pool.final}, pool.arrays) and pool.arrays["mask"].any()


# ---- lean workers -----------------------------------------------------------------------------------------------

def test_workers_never_import_torch_and_share_anonymous_memory_only(pool_of, monkeypatch):
    import torch  # noqa: F401  the learner has it, the workers must not
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    pool = pool_of(2, 1)
    pool.reset([1, 2])
    for process in pool.processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/numpy/" in maps and "/torch/" not in maps
        assert "/memfd:rollout" in maps  # it has no name in the file system: nothing can be left in /dev/shm
        assert "/dev/shm" not in maps
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert {b"OMP_NUM_THREADS=1", b"OPENBLAS_NUM_THREADS=1", b"CUDA_VISIBLE_DEVICES="} <= set(environment)


# ---- faults -----------------------------------------------------------------------------------------------------

def processes(pool):
    """(pids of the workers, pids of their SUMOs)."""
    workers = [process.pid for process in pool.processes]
    return workers, [sumo for worker in workers for sumo in children(worker)]


def step(pool, group):
    pool.arrays["slot"][:] = 40
    pool.send(group)
    return pool.receive(group)


def test_killed_sumo_reaches_the_parent_as_worker_error(pool_of, ends_soon):
    pool = pool_of(2, 1)
    pool.reset([101, 102])
    workers, sumos = processes(pool)
    assert len(sumos) == 2
    os.kill(sumos[1], signal.SIGKILL)
    with pytest.raises(WorkerError) as error:
        step(pool, [0, 1])
    message = str(error.value)
    for words in ("worker 1", "environment 1", "seed 102", "connection to SUMO lost", "exit code -9"):
        assert words in message
    assert "Traceback" not in message  # SUMO's end is no fault of the program's
    assert ends_soon(workers + sumos)


@pytest.mark.parametrize("workers", [0, 1])
def test_sumos_own_words_reach_the_parent(pool_of, config, tmp_path, workers):
    """The next episode's error was the stock client's "Connection closed by SUMO", without the reason."""
    config.env.horizon_s = 2.0
    pool = pool_of(workers, 1, str(tmp_path))
    pool.reset([7])
    scenario, = tmp_path.glob("corridor-*/corridor.sumocfg")
    scenario.unlink()
    with pytest.raises(WorkerError, match="(?s)environment 0.*seed 8.*Could not access configuration") as error:
        for _ in range(2):
            pool.arrays["slot"][:] = 40
            pool.send([0], [8])
            pool.receive([0])
    assert str(scenario) in str(error.value)


def test_frozen_sumo_reaches_the_parent_as_worker_error(pool_of, config, ends_soon):
    config.env.call_timeout_s = 1.0
    pool = pool_of(1, 1)
    pool.reset([5])
    workers, sumos = processes(pool)
    os.kill(sumos[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match="(?s)worker 0.*seed 5.*did not answer within 1.0 s"):
        step(pool, [0])
    assert ends_soon(workers + sumos)


def test_wrong_scenario_is_named(pool_of, config):
    config.env.scenario = "nothing.sumocfg"
    with pytest.raises(WorkerError, match="(?s)worker 0.*nothing.sumocfg: no such file"):
        pool_of(1, 1).reset([1])


def test_error_in_the_serial_pool_names_environment_and_seed(pool_of, ends_soon):
    pool = pool_of(0, 2)
    pool.reset([101, 102])
    sumos = [env.simulator.process.pid for env in pool.environments.envs.values()]
    os.kill(sumos[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"(?s)environment 1 \(seed 102\).*connection to SUMO lost"):
        step(pool, [0, 1])
    assert ends_soon(sumos)


def test_killed_worker_is_an_error_and_nothing_is_left(pool_of, ends_soon):
    pool = pool_of(2, 2)
    pool.reset(SEEDS)
    workers, sumos = processes(pool)
    assert len(sumos) == 4
    os.kill(workers[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 0 has gone \(exit code -9\)"):
        step(pool, [0, 2])
    assert ends_soon(workers + sumos)
    pool.close()


def test_worker_that_does_not_answer_is_an_error(pool_of, ends_soon):
    pool = pool_of(1, 1)
    pool.reset([1])
    workers, sumos = processes(pool)
    pool.patience = 0.5
    os.kill(workers[0], signal.SIGSTOP)
    with pytest.raises(WorkerError, match="worker 0 did not answer"):
        step(pool, [0])
    assert ends_soon(workers + sumos)


def test_close_ends_everything_even_in_the_middle_of_a_step(pool_of, ends_soon):
    pool = pool_of(2, 1)
    pool.reset([1, 2])
    workers, sumos = processes(pool)
    pool.arrays["slot"][:] = 40
    pool.send([0, 1])
    pool.close()
    assert ends_soon(workers + sumos)
    pool.close()


def test_workers_leave_interrupts_to_the_parent(pool_of):
    """Ctrl-C and torchrun's SIGTERM go to the whole process group: the learner finishes its step, with its workers."""
    pool = pool_of(1, 1)
    pool.reset([1])
    for sign in (signal.SIGINT, signal.SIGTERM):
        pool.processes[0].send_signal(sign)
    assert step(pool, [0]) == [] and pool.processes[0].poll() is None


PARENT = """
import sys, time
from configs.schema import Config
from env.workers import WorkerPool
config = Config()
config.env.max_vehicles = 40
pool = WorkerPool(config, 2, 1, sys.argv[1])
pool.reset([1, 2])
print(*[process.pid for process in pool.processes], flush=True)
while True:
    pool.arrays["slot"][:] = 40
    pool.send([0, 1])
    pool.receive([0, 1])
"""


def test_nothing_survives_a_killed_parent(scenarios, ends_soon):
    """One SUMO is frozen, so that it and its worker can be ended by the kernel only, not by a closed connection."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, scenarios], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        sumos = [pid for worker in workers for pid in children(worker)]
        assert len(workers) == len(sumos) == 2
        time.sleep(0.2)  # in the middle of an episode
        os.kill(sumos[0], signal.SIGSTOP)
        time.sleep(0.2)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    gone = ends_soon(workers + sumos)
    for pid in () if gone else workers + sumos:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    assert gone


def test_pool_says_where_its_workers_time_went(pool_of):
    pool = pool_of(2, 1)
    rows = run(pool, 3)
    assert len(rows) == 4
    start = time.perf_counter()
    command(pool, np.random.default_rng(0), range(2))
    time.sleep(0.2)
    pool.send(range(2))
    pool.receive(range(2))
    spent, wall = pool.spent([0, 1]), time.perf_counter() - start
    assert set(spent) == {"simulate", "read", "graph", "idle"} and all(seconds > 0 for seconds in spent.values())
    assert spent["idle"] > 0.19 and spent["simulate"] > spent["graph"] / 10 and sum(spent.values()) < wall + 0.05


@pytest.mark.parametrize("processors, rank, learners, workers, places", [
    (8, 0, 1, 2, [0, 4]), (8, 1, 2, 2, [4, 6]), (32, 0, 1, 6, [0, 5, 10, 16, 21, 26]), (2, 0, 1, 1, [0]),
    (2, 0, 1, 2, [None, None]), (4, 1, 2, 2, [None, None])])
def test_workers_are_spread_over_processors_and_leave_some(monkeypatch, processors, rank, learners, workers, places):
    """As many workers as processors were each kept on one of them: the learner had to share with some and not with
    others, and collecting took a third longer."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(learners))
    assert [workers_module._processor(w, workers) for w in range(workers)] == places


def test_workers_are_those_of_this_program(pool_of, monkeypatch, tmp_path):
    """Python looked for them in the current folder first."""
    (tmp_path / "env.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    pool_of(1, 1).reset([1])
