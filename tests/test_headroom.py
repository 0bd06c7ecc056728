"""benchmarks/headroom.py: a copy of the simulation drives what the original would drive, and leaves it alone."""
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import headroom
from benchmarks.headroom import Pausing, Planner, changed, options_of, play, tell
from configs import ConfigError, load_config
from controllers import Audit, BaselineController
from env.launch import SumoError
from env.workers import WorkerError, make_pool
from evaluate import command, evaluate
from runtime.ending import run_script
from runtime.scores import PAIRED, SHOWN
from train_ddp import USER_ERRORS

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "benchmarks.headroom", "--config", "configs/smoke.yaml", *arguments],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture
def config():
    return load_config("configs/smoke.yaml", ["env.backend=libsumo", "rollout.num_envs_per_worker=1"])


@pytest.fixture
def pool(config, scenarios):
    with make_pool(config, 0, 1, scenarios) as pool:
        pool.reset([5])
        yield pool


def started(config, name="harmonise"):
    controller = BaselineController(config, name)
    controller.begin(0, 0)
    return controller


def drive(pool, controller, steps):
    """Sum of the rewards."""
    total = 0.0
    for _ in range(steps):
        command(pool, 0, controller, Audit("", 0))
        pool.send([0])
        pool.receive([0])
        total += float(pool.arrays["reward"][0])
    return total


def test_a_copy_drives_what_the_original_then_drives(pool, config):
    """To the bit, with the same random numbers; another option in another copy in between changes nothing."""
    rule, nobody = started(config), started(config, "none")
    drive(pool, rule, 30)
    seen = bytes(pool.buffer)
    promised = Planner(pool, [rule], 5, 10).promised(rule)
    other = Planner(pool, [rule], 10, 10).promised(nobody)
    assert bytes(pool.buffer) == seen
    assert drive(pool, rule, 10) == promised != other


def test_a_copy_ends_with_the_episode(pool, config):
    rule, steps = started(config), round(config.env.horizon_s / config.env.control_interval)
    assert Planner(pool, [rule], 5, steps).promised(rule) == Planner(pool, [rule], 5, 10 * steps).promised(rule)


def test_a_copy_that_fails_is_told(pool, config, capfd):
    class Broken(BaselineController):
        def act(self, observation, env):
            raise ArithmeticError("broken")
    with pytest.raises(WorkerError, match="a copy of the simulation ended early"):
        Planner(pool, [started(config)], 5, 10).promised(Broken(config, "none"))
    assert "ArithmeticError: broken" in capfd.readouterr().err


def test_a_copy_whose_simulator_is_lost_promises_nothing(pool, config, monkeypatch):
    def step(*arguments):
        raise SumoError("it is gone")
    monkeypatch.setattr(pool.environments.envs[0].simulator, "step", step)
    with pytest.raises(WorkerError, match="a copy of the simulation ended early"):
        Planner(pool, [started(config)], 5, 10).promised(started(config))


def test_the_best_option_goes_on(config, monkeypatch):
    """What the copies promise decides, and every option drives for as long as between two decisions."""
    driven = []

    class Noted:
        def __init__(self, name):
            self.name = name

        def begin(self, env, seed):
            driven.clear()

        def act(self, observation, env):
            driven.append(self.name)
    promises = {"a": [1.0, 0.0, 3.0], "b": [2.0, -1.0, 3.0]}
    monkeypatch.setattr(Planner, "promised", lambda self, option: promises[option.name][self.steps // 5])
    planner = Planner(None, [Noted("a"), Noted("b")], 5, 10)
    planner.begin(0, 3)
    for _ in range(15):
        planner.act(None, 0)
    assert driven == ["b"] * 5 + ["a"] * 10


def test_chance_chooses_among_copies_of_the_rule(config):
    observation = {"icv": np.ones(4), "mask": np.ones(4), "surround": np.zeros((4, 14)), "nodes": np.zeros((4, 9))}
    observation["nodes"][:, 2] = 25.0  # m/s: harmonise holds all of them
    config.env.max_vehicles = 4
    pausing = Pausing(config, "harmonise", 2, 5)
    pausing.begin(0, 0)
    commanded = [(pausing.act(observation, 0)["slot"] < 4).any() for _ in range(10)]
    assert commanded == [True, True, False, True, True] * 2
    options = options_of(config, "chance", "harmonise", ["none", "gain=0"], 5)
    assert [type(option) for option in options] == [BaselineController, Pausing, Pausing]
    assert {option.name for option in options} == {"harmonise"}


def test_an_option_changes_numbers_of_its_rule(config):
    option = changed(config, "tuned", "gain=0 brake=1.5")
    assert (option.cfg.baselines.tuned.gain, option.cfg.baselines.tuned.brake) == (0, 1.5) != (
        config.baselines.tuned.gain, config.baselines.tuned.brake)
    with pytest.raises(ConfigError, match="--options: .*gian"):
        changed(config, "tuned", "gian=0")


def test_gains_are_paired_seed_by_seed():
    rows = [{"controller": way, "seed": seed, "ocr": ocr, "sigma_v": 2.0, "abs_a": 0.5, **dict.fromkeys(
        (*SHOWN, *PAIRED), 0.0), "arrived": 100 * ocr} for way, ocrs in (
        ("none", (0.5, 0.8)), ("rule", (0.6, 0.8)), ("chance", (0.5, 1.2)), ("planner", (0.6, 1.0)))
        for seed, ocr in enumerate(ocrs)]
    gains = tell("all", rows)["gains"]
    assert {pair: gain["arrived"]["mean"] for pair, gain in gains.items()} == {
        "chance - rule": pytest.approx(15), "planner - chance": pytest.approx(-5), "planner - rule": pytest.approx(10)}


def test_an_episode_is_that_of_evaluation(config, scenarios):
    """Its own loop read observations in single precision, evaluate.py in half: no row was the same."""
    config.env.horizon_s, config.env.terminate_on_collision, config.evaluate.workers = 20.0, False, 1
    row = play(config, "rule", 3, scenarios, "tuned", [], 5, 10)
    same = play(config, "planner", 3, scenarios, "tuned", [""], 5, 10)  # nothing but the rule to choose from
    config.env.backend = "traci"
    expected = evaluate(config, ["tuned"], [3], folder=scenarios, say=lambda *text: None)[0][1]
    assert {**row, "controller": "tuned"} == {name: expected[name] for name in row} and row["steps"] == 20
    assert same == {**row, "controller": "planner"}


def test_command_line(tmp_path):
    done = run("--seeds", "3", "--every", "10", "--ahead", "30", "--options", "none; cruise=0", "--json",
               str(tmp_path / "headroom.json"), "evaluate.horizon_s=30", "env.suite=[same, corridor.lanes=3]")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "headroom.json").read_text())["results"]
    assert list(results) == ["same", "corridor.lanes=3", "mean"] and "S_total, paired: planner - chance" in done.stdout
    assert all(list(result["table"]) == ["none", "rule", "chance", "planner"] for result in results.values())
    returns = {way: metrics["return"]["mean"] for way, metrics in results["same"]["table"].items()}
    assert returns["planner"] >= returns["rule"]  # the copies see the whole rest of the episode, and one is the rule


def test_ctrl_c_ends_it_at_once():
    """It used to wait until all episodes in the queue had been driven."""
    arguments = [sys.executable, "-m", "benchmarks.headroom", "--config", "configs/smoke.yaml", "--seeds", "3-900",
                 "--ways", "rule", "--processes", "1", "--json", "/dev/null"]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert "seed 3 rule: return" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        told, error = process.communicate(timeout=30)
        assert process.returncode == 130 and "interrupted" in error and told.count("seed") < 10


@pytest.mark.parametrize("arguments, told", [
    (["--seeds", "1001"], "some are held-out ones"), (["--every", "30", "--ahead", "20"], "at least as long"),
    (["--every", "6"], "a step for each option"), (["--options", "none; gian=0"], "gain"),
    (["--rule", "idm"], "invalid choice"), (["--ways", "luck"], "'luck'")])
def test_wrong_arguments_are_refused(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["headroom.py", "--config", "configs/smoke.yaml", *arguments,
                                      "evaluate.seeds=[1001]"])
    assert run_script(headroom.main, USER_ERRORS) == 2
    assert told in capsys.readouterr().err
