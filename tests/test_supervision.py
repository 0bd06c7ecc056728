"""Simulators and workers that crash or freeze while sampling: only their episodes are lost, and the loss is shown."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_workers import ROOT, command, equal, processes, snapshot

import evaluate as evaluation
from configs import Config
from env.launch import SumoError
from env.sumo import Sumo
from env.traffic_env import make_env
from env.worker import _answer, claim
from env.workers import WorkerError, make_pool
from evaluate import evaluate
from models import objectives
from models.policy import Driver
from runtime.memory import component, process_tree
from runtime.rollout import Collector, episode_seed
from train_ddp import advantages

SEEDS = [11, 12, 13, 14]
KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture
def cfg():
    cfg = Config()
    cfg.env.max_vehicles, cfg.env.horizon_s, cfg.env.terminate_on_collision = 40, 20.0, False
    cfg.env.call_timeout_s, cfg.rollout.restarts = 2.0, 2
    return cfg


def steps(pool, count, disturb=None, at=3):
    """Arrays after each of `count` steps, all groups in turn; `disturb()` acts before step `at`."""
    rngs, rows = [np.random.default_rng(i) for i in range(pool.num_envs)], []
    pool.reset(SEEDS[:pool.num_envs])
    for t in range(count):
        if disturb and t == at:
            disturb()
        for group in pool.groups:
            for env in group:
                command(pool, rngs[env], [env])
            pool.send(group, [100 + env for env in group])
        for group in pool.groups:
            assert pool.receive(group) == []
        rows.append(snapshot(pool))
    return rows


def of(env, row):
    return {name: array[env] for name, array in row.items()}


# ---- pool --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sign", [KILL, FREEZE])
@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_episode_of_a_lost_simulator_is_lost(cfg, scenarios, ends_soon, sign, workers):
    with make_pool(cfg, workers, 1 if workers else 2, scenarios) as pool:
        expected = steps(pool, 6)
        if workers:
            old = processes(pool)[1]
        else:
            old = [env.simulator.process.pid for env in pool.environments.envs.values()]
        rows = steps(pool, 6, lambda: os.kill(old[1], sign))
        assert [row["lost"].tolist() for row in rows] == [[False, t == 3] for t in range(6)]
        assert all(equal(of(0, row), of(0, other)) for row, other in zip(rows, expected))
        assert ends_soon([old[1]])
        lost = of(1, rows[3])
        assert lost["reward"] == lost["cost"] == 0 and not lost["terminated"] and not lost["truncated"]
        pool.reset([101], [1])  # the episode that took its place is the one that was asked for
        assert all(np.array_equal(lost[name], pool.arrays[name][1]) for name in pool.final)


@pytest.mark.parametrize("sign", [KILL, FREEZE])
def test_only_the_episodes_of_a_lost_worker_are_lost(cfg, scenarios, ends_soon, sign):
    """Both its environments: the one whose step was awaited, and the one of the other group."""
    with make_pool(cfg, 2, 2, scenarios) as pool:
        expected = steps(pool, 6)
        pool.patience = 5.0
        workers, sumos = processes(pool)
        rows = steps(pool, 6, lambda: os.kill(workers[0], sign))
        assert [row["lost"].tolist() for row in rows] == [[t == 3] * 2 + [False] * 2 for t in range(6)]
        for env in (2, 3):
            assert all(equal(of(env, row), of(env, other)) for row, other in zip(rows, expected))
        assert ends_soon([workers[0], *sumos[:2]])
        assert processes(pool)[0][1] == workers[1] and len(processes(pool)[1]) == 4


def test_a_worker_lost_in_every_step_ends_the_run(cfg, scenarios):
    """What it answered when it was asked again counted as a good step: such a phase 2 "finished", with nothing learned
    but lost steps. So did the reset at each checkpoint."""
    with make_pool(cfg, 1, 1, scenarios) as pool, pytest.raises(WorkerError, match="worker 0 has gone"):
        pool.arrays["slot"][:] = 40
        for t in range(cfg.rollout.restarts + 1):
            pool.reset([t])
            os.kill(pool.processes[0].pid, KILL)
            pool.send([0], [t])
            pool.receive([0])
            assert pool.arrays["lost"][0] and pool.failures == [t + 1]


def test_patience_is_with_each_order_and_its_warm_up(cfg, scenarios):
    """A worker that did one order of many resets, each with a warm-up, was killed as frozen."""
    cfg.env.warmup_s = 10.0
    with make_pool(cfg, 1, 3, scenarios) as pool:
        waited, poll = [], pool.pipes[0].poll
        pool.pipes[0] = Mock(wraps=pool.pipes[0], poll=lambda timeout: waited.append(timeout) or poll(timeout))
        pool.reset(SEEDS[:3])
        one = cfg.env.start_timeout_s + 2 * cfg.env.call_timeout_s + 10.0 + 30
        pool.arrays["slot"][:] = 40
        pool.send([1])
        pool.receive([1])
        assert waited == [3 * one, one]


def test_worker_lost_between_two_steps_of_another_group(cfg, scenarios):
    """It dies after it has answered one group: the observations handed out are of an episode that is no more."""
    with make_pool(cfg, 1, 2, scenarios) as pool:
        pool.reset(SEEDS[:2])
        pool.arrays["slot"][:] = 40
        pool.send([0], [1])
        pool.receive([0])
        os.kill(pool.processes[0].pid, KILL)
        lost = []
        pool.arrays["reward"][:] = pool.arrays["truncated"][:] = 1
        for group in ([1], [0], [1], [0]):
            pool.send(group, [1])
            pool.receive(group)
            lost.append(bool(pool.arrays["lost"][group[0]]))
            if lost[-1]:  # they once kept what the step before had left there
                assert pool.arrays["reward"][group[0]] == 0 and not pool.arrays["truncated"][group[0]]
        assert lost == [True, True, False, False]


@pytest.mark.parametrize("question", ["time", "road_lanes"])
def test_simulator_that_dies_during_a_rare_question_is_an_error_of_its_own_kind(cfg, scenarios, ends_soon, question):
    """The stock client's exceptions came through: killed in the middle of a reset, SUMO was not replaced but ended the
    run."""
    env = make_env(cfg, scenarios)
    env.reset(seed=1)
    pid = env.simulator.process.pid
    os.kill(pid, KILL)
    with pytest.raises(SumoError, match=r"connection to SUMO lost.*exit code -9"):
        getattr(env.simulator, question)()
    assert ends_soon([pid]) and not env.simulator.alive
    env.reset(seed=1)  # in a new process
    env.close()


def test_simulator_that_never_comes_up_again_is_an_error_in_its_own_words(cfg, scenarios, tmp_path, capfd):
    """They stood below the traceback of a worker."""
    with make_pool(cfg, 1, 1, str(tmp_path)) as pool:
        pool.reset([7])
        next(tmp_path.glob("corridor-*/corridor.sumocfg")).unlink()
        os.kill(processes(pool)[1][0], KILL)
        pool.arrays["slot"][:] = 40
        pool.send([0], [8])
        with pytest.raises(WorkerError, match="(?s)environment 0.*Could not access configuration") as error:
            pool.receive([0])
    assert "Traceback" not in str(error.value)
    assert capfd.readouterr().err.count("its episode is lost, SUMO starts anew") == cfg.rollout.restarts


@pytest.mark.parametrize("error, traced", [(SumoError("gone"), False), (KeyError("a bug"), True)])
def test_what_a_worker_says_holds_a_traceback_where_the_program_is_at_fault(error, traced):
    broken = SimpleNamespace(run=Mock(side_effect=error), envs={3: SimpleNamespace(seed=5)})
    said = _answer(broken, [(3, "step", None)])
    assert said.startswith("environment 3 seed 5") and str(error) in said and ("Traceback" in said) == traced


def test_worker_that_dies_again_and_again_is_an_error(cfg, scenarios, capfd):
    with make_pool(cfg, 1, 1, scenarios) as pool:
        pool.reset([7])
        start = pool._start_worker

        def start_and_kill(w):
            start(w)
            pool.processes[w].kill()
            pool.processes[w].wait()
        pool._start_worker = start_and_kill
        pool.processes[0].kill()
        pool.send([0], [8])
        with pytest.raises(WorkerError, match=r"rollout worker 0 has gone \(exit code -9\)"):
            pool.receive([0])
    assert capfd.readouterr().err.count("it starts anew") == cfg.rollout.restarts


# ---- learner -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("phase", [2, 3])
def test_rollout_marks_lost_steps_and_goes_on(cfg, scenarios, models, phase):
    with make_pool(cfg, 2, 1, scenarios) as pool:
        collector = Collector(pool, Driver(models["small"], 2, 40), 7, phase, keep_sequences=5 if phase == 3 else 0)
        collector.begin(0)
        send, sent = pool.send, []

        def send_and_kill(group, seeds):
            if len(sent) == 6:
                os.kill(processes(pool)[1][0], KILL)
            sent.append(group)
            send(group, seeds)
        pool.send = send_and_kill
        rollout, facts = collector.collect(10)
    lost = rollout["lost"]
    assert facts["lost_steps"] == int(lost.sum()) == 1 and lost[:, 0].any()
    assert not rollout["pick_valid"][lost].any() and bool(rollout["ended"][lost].all())
    assert collector.begun == [1, 0] and facts["episodes"] == []
    seed = episode_seed(7, phase, 0, 0, 1)
    assert seed == collector._seed(0, 1)
    assert all(np.isfinite(value).all() for name, value in rollout.fixed.items())


def test_a_lost_step_teaches_nothing_and_ends_the_episode_as_expected(cfg):
    """What came before it is worth what the value of its state says."""
    rng, shape = np.random.default_rng(0), (6, 2)
    number = lambda: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))  # noqa: E731
    batch = {name: number() for name in ("reward", "cost", "value", "cost_value", "next_value", "next_cost_value")}
    batch.update({name: torch.zeros(shape, dtype=torch.bool) for name in ("terminated", "ended", "lost")})
    batch["lost"][3, 0] = batch["ended"][3, 0] = True
    batch["reward"][3] = batch["cost"][3] = 0
    batch["next_value"][2, 0], batch["next_cost_value"][2, 0] = batch["value"][3, 0], batch["cost_value"][3, 0]
    team, batch["icvs"] = SimpleNamespace(moments=lambda values: (0.0, 1.0)), torch.full(shape, 4)
    found = advantages(cfg, team, batch, 9.0)
    advantage, returns, cost_returns, price = map(found.get, ("advantage", "return", "cost_return", "price"))
    torch.testing.assert_close(price, torch.full(shape, 9.0 * cfg.env.control_interval / cfg.env.horizon_s / 4))
    assert advantage[3, 0] == 0 and returns[3, 0] == batch["value"][3, 0]
    assert cost_returns[3, 0] == batch["cost_value"][3, 0]
    cut = {name: value[:3, :1].clone() for name, value in batch.items()}  # the episode as a fragment that ends before
    cut["ended"][2] = True
    before = advantages(cfg, team, cut, 0.0)["advantage"]
    torch.testing.assert_close(advantage[:3, :1], before, atol=1e-6, rtol=1e-5)
    p = cfg.phase2
    whole, _ = objectives.gae(batch["reward"], batch["value"], batch["next_value"], batch["terminated"],
                              batch["ended"], p.gamma, p.gae_lambda)
    torch.testing.assert_close(advantage[:, 1], whole[:, 1], atol=1e-6, rtol=1e-5)


def test_evaluation_repeats_an_episode_that_was_lost(cfg, scenarios):
    cfg.evaluate.workers = 1
    expected, _ = evaluate(cfg, ["none"], [5, 6], folder=scenarios, say=lambda *text: None)
    killed = []

    def kill_once(*text):
        if not killed:  # the first episode has ended: the second one's SUMO will not live long
            killed.extend(pid for pid in process_tree() if component(pid) == "sumo")
            threading.Timer(0.02, lambda: [os.kill(pid, KILL) for pid in killed]).start()
    rows, _ = evaluate(cfg, ["none"], [5, 6], folder=scenarios, say=kill_once)
    assert killed and rows == expected


def test_evaluation_goes_on_without_a_seed_whose_simulator_dies_every_time(cfg, scenarios, monkeypatch):
    """It used to end the whole evaluation, and the finished rows were lost with it."""
    cfg.evaluate.workers, cfg.rollout.restarts, given_up = 0, 1, set()  # in this process
    expected, _ = evaluate(cfg, ["random"], [5], folder=scenarios, say=lambda *text: None)
    step = Sumo.step

    def dies(self, until, commands=()):
        if until > 3 and "6" in self.process.args[self.process.args.index("--seed"):][:2]:
            self.process.kill()
        step(self, until, commands)
    monkeypatch.setattr(Sumo, "step", dies)
    monkeypatch.setattr(Sumo, "load", lambda self, arguments: (self.close(), self._start(arguments)))
    rows, _ = evaluate(cfg, ["random"], [5, 6], folder=scenarios, say=lambda *text: None, given_up=given_up)
    assert rows == expected and given_up == {6}
    with pytest.raises(WorkerError, match="random with seed 6|none with seed 6"):
        evaluate(cfg, ["random"], [5, 6], folder=scenarios, say=lambda *text: None)
    with pytest.raises(WorkerError, match="none is left to score"):
        evaluate(cfg, ["random"], [6], folder=scenarios, say=lambda *text: None, given_up=set())


def test_what_could_be_scored_is_written_before_the_failure_is_told(tmp_path, monkeypatch):
    run_jobs = evaluation.run_jobs

    def gives_up_6(*arguments):
        arguments[-1].add(6)
        return run_jobs(*arguments)
    monkeypatch.setattr(evaluation, "run_jobs", gives_up_6)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *f"""--config configs/smoke.yaml --controllers random --seeds 5,6
        --out {tmp_path}/scores.json run.folder={tmp_path} env.suite=[same,driver.sigma=0.1]
        evaluate.horizon_s=40""".split()])
    with pytest.raises(WorkerError, match=r"seeds \[6\]: left out"):
        evaluation.main()
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["seeds"] == [5] and [row["seed"] for row in scores["episodes"]] == [5] * 4
    assert {line.split(",")[1] for line in (tmp_path / "scores.shield.csv").read_text().splitlines()[1:]} == {"5"}


def test_training_survives_killed_simulators_and_workers(tmp_path):
    """Through the real command line, with a SUMO or a worker killed every half second."""
    words = ["--config", str(ROOT / "configs/smoke.yaml"), "phase2.iterations=4", "phase2.train_batch_size=120",
             "phase2.fragment_length=60", "env.horizon_s=60", "rollout.num_envs_per_worker=1", "rollout.restarts=10",
             "run.threads=1"]
    process = subprocess.Popen([sys.executable, str(ROOT / "train_rl.py"), *words], cwd=tmp_path, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics, rng, kills = tmp_path / "runs/smoke/metrics.jsonl", np.random.default_rng(0), 0
    started = lambda: [pid for pid in process_tree(process.pid)  # noqa: E731
                       if component(pid) in ("sumo", "rollout worker")]
    while process.poll() is None and not metrics.exists():  # from now on everybody simulates
        time.sleep(0.02)
    while process.poll() is None and kills < 4:
        time.sleep(0.5)
        if victims := started():
            try:
                os.kill(int(rng.choice(victims)), KILL)
                kills += 1
            except ProcessLookupError:
                continue
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4] and kills > 1
    assert 1 <= sum(row["lost_steps"] for row in rows) <= 2 * kills and "lost" in err
    assert all(np.isfinite(row["loss"]) for row in rows)


def test_of_two_programs_only_one_keeps_its_worker_on_a_processor():
    """Each kept its first worker on the first processor: seventeen programs at once shared one of sixteen, and an
    episode took twenty times as long."""
    first = claim("of a test")
    assert first is not None and claim("of a test") is None
    first.close()
    claim("of a test").close()
    pools = [make_pool(Config(), 1, 1) for _ in range(2)]
    try:
        for pool in pools:
            pool.reset([1])
        kept = [len(os.sched_getaffinity(pool.processes[0].pid)) == 1 for pool in pools]
    finally:
        for pool in pools:
            pool.close()
    assert sum(kept) <= (len(os.sched_getaffinity(0)) > 1)  # none where a program beside the tests has them
