"""benchmarks/headroom.py: a copy of the simulation drives what the original would drive, and leaves it alone."""
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.headroom import Pausing, changed, drive, episode, gains, options_of, scored, tried
from configs import ConfigError, load_config
from controllers import BaselineController
from env.traffic_env import TrafficEnv
from env.workers import WorkerError

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "benchmarks.headroom", "--config", "configs/smoke.yaml", *arguments],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture
def config():
    return load_config("configs/smoke.yaml", ["env.backend=libsumo", "rollout.num_envs_per_worker=1"])


@pytest.fixture
def env(config, scenarios):
    env = TrafficEnv(config, scenarios)
    yield env
    env.close()


def started(config, name="harmonise"):
    controller = BaselineController(config, name)
    controller.begin(0, 0)
    return controller


def test_a_copy_drives_what_the_original_then_drives(env, config):
    """To the bit, with the same random numbers; another option in another copy in between changes nothing."""
    observation, _ = env.reset(seed=5)
    rule, nobody = started(config), started(config, "none")
    for _ in range(30):
        observation, *_ = drive(env, observation, rule)
    seen = {name: value.copy() for name, value in observation.items()}
    promised = tried(env, observation, rule, rule, 5, 10)
    other = tried(env, observation, nobody, rule, 10, 10)
    assert all((observation[name] == value).all() for name, value in seen.items())
    total = 0.0
    for _ in range(10):
        observation, reward, *_ = drive(env, observation, rule)
        total += reward
    assert total == promised != other


def test_a_copy_ends_with_the_episode(env, config):
    observation, _ = env.reset(seed=5)
    rule, steps = started(config), round(config.env.horizon_s / config.env.control_interval)
    assert tried(env, observation, rule, rule, 5, steps) == tried(env, observation, rule, rule, 5, 10 * steps)


def test_a_copy_that_fails_is_told(env, config, capfd):
    class Broken(BaselineController):
        def act(self, observation, env):
            raise ArithmeticError("broken")
    observation, _ = env.reset(seed=5)
    with pytest.raises(WorkerError, match="a copy of the simulation ended early"):
        tried(env, observation, Broken(config, "none"), started(config), 5, 10)
    assert "ArithmeticError: broken" in capfd.readouterr().err


def test_the_best_option_goes_on(config, scenarios, monkeypatch):
    """What the copies promise decides, and every option drives for as long as between two decisions."""
    driven = []

    class Noted(BaselineController):
        def act(self, observation, env):
            driven.append(self.name)
            return super().act(observation, env)
    monkeypatch.setattr("benchmarks.headroom.BaselineController", Noted)
    promises = iter([1.0, 2.0, 3.0, 0.0] * 50)
    monkeypatch.setattr("benchmarks.headroom.tried", lambda *arguments: next(promises))
    config.env.horizon_s = 20.0
    row = episode(config, "planner", 3, scenarios, "tuned", ["none"], 5, 10)
    assert driven == (["none"] * 5 + ["tuned"] * 5) * 2 and row["left_the_rule"] == 0.5 and row["steps"] == 20


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
    rows = [{"controller": way, "seed": seed, "ocr": ocr, "arrived": 100 * ocr, "sigma_v": 2.0, "abs_a": 0.5,
             "c_int": 0.0} for way, ocrs in (("none", (0.5, 0.8)), ("rule", (0.6, 0.8)), ("planner", (0.6, 1.0)))
            for seed, ocr in enumerate(ocrs)]
    gain = gains(scored(rows), "planner", "rule")
    assert gain["s_total"]["mean"] == pytest.approx(0.7 * 25 / 2) and gain["arrived"]["mean"] == pytest.approx(10)


def test_command_line(tmp_path):
    done = command("--seeds", "3", "--every", "10", "--ahead", "30", "--options", "none; cruise=0", "--json",
                   str(tmp_path / "headroom.json"), "evaluate.horizon_s=30", "env.suite=[same, corridor.lanes=3]")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "headroom.json").read_text())["results"]
    assert list(results) == ["same", "corridor.lanes=3", "mean"] and "planner - chance, paired: S_total" in done.stdout
    assert all(list(result["table"]) == ["none", "rule", "chance", "planner"] for result in results.values())
    returns = {way: metrics["return"]["mean"] for way, metrics in results["same"]["table"].items()}
    assert returns["planner"] >= returns["rule"]  # the copies see the whole rest of the episode, and one is the rule


def test_ctrl_c_ends_it_at_once():
    """It used to wait until all episodes in the queue had been driven."""
    arguments = [sys.executable, "-m", "benchmarks.headroom", "--config", "configs/smoke.yaml", "--seeds", "3-900",
                 "--ways", "rule", "--processes", "1", "--json", "/dev/null"]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "seed 3 rule: return" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert "interrupted" in process.stderr.read()


@pytest.mark.parametrize("arguments, told", [
    (["--seeds", "1001"], "some are held-out ones"), (["--every", "30", "--ahead", "20"], "at least as long"),
    (["--options", "none; gian=0"], "gain"), (["--rule", "idm"], "invalid choice"), (["--ways", "luck"], "'luck'")])
def test_wrong_arguments_are_refused(arguments, told):
    done = command(*arguments, "evaluate.seeds=[1001]")
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
