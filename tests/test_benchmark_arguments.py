"""What is typed wrongly for a benchmark is one line and exit code 2, before anything runs; and what some conclude."""
import importlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import chaos, learning
from benchmarks.simulator import Bench
from configs import ConfigError

BENCHMARKS = ("attention", "balloon", "capacity", "chaos", "checkpointing", "compare_rl", "drills", "fuzz",
              "gpu_memory", "learning", "loader", "nodes", "ppo_update", "reset", "resume", "rollout", "scaling",
              "shield", "simulator", "size", "soak", "transfer", "tune_rules", "world_model")
WRONG = [
    "attention --batch 0", "attention --repeat -1", "attention --device nonsense", "checkpointing --repeat 0",
    "scaling --repeat 0", "reset --resets 3", "rollout --repeat 0", "ppo_update --presets nope", "loader --rows 49",
    "drills --only x", "drills --only 99", "fuzz --only x", "soak --parallel 0", "soak --launches 0",
    "transfer --motorways 0", "transfer --streets 0",
    "tune_rules --processes 0", "tune_rules --finalists 0", "tune_rules --limit -1",
    "shield --guards nope", "world_model --scenes ring:x",
    "world_model --scenes nope:1", "world_model --controllers nope", "world_model --episodes 0", "chaos --minutes nan",
    "chaos --every 0", "resume --kills -1", *(f"{name} --json no/such/folder.json" for name in BENCHMARKS)]


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_are_refused_at_once(line, monkeypatch, capsys, tmp_path):
    """They were tracebacks, tables of nothing, or lost results after hours."""
    monkeypatch.chdir(tmp_path)
    name, option, value = line.split()
    monkeypatch.setattr(sys, "argv", [name, option, value])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    assert end.value.code == 2 and f"argument {option}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words, code", [(["--help"], 0), (["env"], 2)])
def test_rivals_say_how_they_are_called(words, code, monkeypatch, capsys):
    """A traceback about values to unpack."""
    monkeypatch.setattr(sys, "argv", ["rivals", *words])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("benchmarks.rivals").main()
    assert end.value.code == code and "SIDE FOLDER PARAMETERS" in capsys.readouterr().out


def test_simulator_benchmark_runs(tmp_path):
    """It asked a fresh environment for its command line: AttributeError with any arguments."""
    assert Bench(str(tmp_path), 2).bare() > -1


def test_ctrl_c_leaves_no_simulator_of_the_stock_client_behind():
    """Python ended at once, and a SUMO to which it had not connected yet waited for it for ever."""
    code = ("import signal, time; time.sleep = lambda seconds: signal.raise_signal(signal.SIGINT)\n"  # before a retry
            "from benchmarks.reset import stock_start; stock_start(['-n', 'any.net.xml'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20)  # it had our standard error
    assert done.returncode == -signal.SIGINT and b"KeyboardInterrupt" in done.stderr


def test_ctrl_c_ends_a_benchmark_with_one_line():
    """Nine of them answered with a traceback."""
    code = ("import signal, sys, time; sys.argv = ['attention']; from benchmarks import attention\n"
            "time.perf_counter = lambda: signal.raise_signal(signal.SIGINT)\nattention.main()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.split("\n") == ["", "interrupted; what was measured stands above", ""]


def test_ppo_is_not_compared_with_the_rule_of_its_warm_start(monkeypatch):
    """The first tenth was the rule's, and "does phase 2 learn?" was answered with how far the policy is below it."""
    rows = [{"return": value, "imitated": int(n < 20)} for n, value in enumerate([60] * 20 + [40, 41, 42, 43, 50])]
    assert learning.compare(rows) == (40, 50)
    monkeypatch.setattr(sys, "argv", ["learning", "--config", "configs/quick.yaml", "--seeds", "1"])
    with pytest.raises(ConfigError, match="the warm start takes all of phase2.iterations=20"):
        learning.main()


@pytest.mark.parametrize("loss, kept", [(0.5, True), (4.0, False)])
def test_a_policy_that_learns_less_while_disturbed_is_found(loss, kept):
    """A mean loss of 4 points of return in 52 iterations, seven standard errors, was "learns the same"."""
    rng = np.random.default_rng(0)
    facts = {"lost_steps": 0, "steps": 1, "exit_code": 0, "iterations": 52, "left": []}
    alone, disturbed, other = ({**facts, "returns": (60 - less + rng.normal(0, 3.4, 52)).tolist()}
                               for less in (0, loss, 0))
    assert chaos.judge(alone, disturbed, other)["learns the same"][1] is kept
