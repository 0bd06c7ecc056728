"""The comparison with other libraries: its command line, its watching of processes, and what the rivals get to see."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from benchmarks import compare_rl
from benchmarks.compare_rl import SETTINGS
from benchmarks.contest import rates
from benchmarks.rival_networks import GraphFeatures
from benchmarks.rivals import NotingTraffic, hidden_width
from configs import ConfigError, load_config
from env.flat import GRAPH, ICVS, LEVELS, SCALE, VEHICLES
from env.spaces import KEEP
from models.risk_gnn import INPUTS
from runtime.memory import component, process_tree

ROOT = Path(__file__).resolve().parent.parent
TINY = ("env.horizon_s=20", "data.margin=0", "phase1.augment.time_shift=0", "phase2.train_batch_size=40",
        "phase2.fragment_length=20", "phase2.minibatch_size=10", "phase2.epochs=1", "phase2.iterations=2")


def compare(*arguments):
    return subprocess.run([sys.executable, "-m", "benchmarks.compare_rl", *map(str, arguments)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)


# ---- command line ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arguments, about", [
    (["--only", "nobody"], "nobody"), (["--repeat", "0"], "--repeat"), (["--repeat", "many"], "--repeat"),
    (["--python", "/no/such/python"], "/no/such/python"), (["--python", "/"], "--python /"),
    (["--json", "/no/such/folder/result.json"], "/no/such/folder"), (["--nonsense"], "--nonsense"),
    (["phase2.nonsense=1"], "nonsense"), (["phase2.train_batch_size=800"], "train_batch_size"),
    (["phase2.iterations=1"], "iterations"), (["rollout.num_envs_per_worker=2"], "num_envs_per_worker")])
def test_nonsense_is_refused_before_anything_starts(arguments, about, tmp_path, monkeypatch, capsys):
    def started():
        pytest.fail("the benchmark started")
    monkeypatch.setattr(compare_rl, "adopt_orphans", started)
    monkeypatch.setattr(sys, "argv", ["compare_rl", "--json", str(tmp_path / "result.json"), *arguments])
    with pytest.raises((ConfigError, SystemExit)) as refused:
        compare_rl.main()
    message = capsys.readouterr().err + str(refused.value)
    assert about in message and list(tmp_path.iterdir()) == []


def test_exit_code_of_bad_input_is_2():
    done = compare("--only", "nobody")
    assert done.returncode == 2 and "nobody" in done.stderr and "Traceback" not in done.stderr


def test_our_side_runs_and_the_others_are_skipped_with_the_command_to_install_them(tmp_path):
    without_extras = tmp_path / "python"
    without_extras.write_text("#!/bin/sh\nexit 1\n")
    without_extras.chmod(0o755)
    done = compare("--python", without_extras, "--only", "ours,sb3,rllib,env", "--repeat", 1, "--json",
                   tmp_path / "result.json", *TINY)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["skipped"]) == {"sb3", "rllib"} and result["failed"] == {}
    assert all('pip install -e ".[compare]"' in why and why in done.stdout for why in result["skipped"].values())
    (ours,), (env,) = result["runs"]["ours"], result["runs"]["env"]
    assert {"benchmarks.rivals", "rollout worker"} <= set(env["at_peak"])  # 80 steps may end between two samples
    assert env["steps_per_s"] > 0
    assert ours["steps_per_s"] > 0 and ours["cpu_ms"] > 0 and ours["left"] == 0
    assert "train_rl" in ours["at_peak"]  # on a busy machine the fullest moment that was seen may be any
    assert ours["peak_mb"] == pytest.approx(sum(ours["at_peak"].values())) and ours["peak_mb"] > 100
    assert sum(result["profile"].values()) == pytest.approx(ours["times"]["iteration"])


def test_a_stopped_comparison_leaves_nobody_running(tmp_path):
    """A background job ignores SIGINT and died of SIGTERM without a word to its contestants."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.compare_rl", "--only", "ours", "--json", os.devnull, *TINY], cwd=ROOT,
        stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    with process:
        while "sumo" not in map(component, tree := process_tree(process.pid)):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    left = [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")]  # torch's own cache
    assert not [pid for pid in tree if Path(f"/proc/{pid}").exists()] and left == []


# ---- watching a contestant ---------------------------------------------------------------------------------------

DAEMON = """
import os, sys, time
block = bytearray(b'x') * (30 << 20)  # 30 MB
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:                       # nobody's child from now on
        own = bytearray(block)               # and 30 MB more
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(2)
"""
WATCH = """
import json, sys
from benchmarks import contest
contest.EVERY_S, contest.GRACE_S = 0.1, 1.0
contest.adopt_orphans()
try:
    print(json.dumps(contest.contest([sys.executable, *sys.argv[2:]], sys.argv[1])))
except contest.ContestantError as error:
    print(json.dumps(str(error)))
print(json.dumps(contest.descendants()))
"""


def watch(folder, *command):
    """What `contest` returns (or its error), and the processes that exist below it afterwards."""
    done = subprocess.run([sys.executable, "-c", WATCH, str(folder), *map(str, command)], cwd=ROOT, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return map(json.loads, done.stdout.splitlines())


def test_daemons_are_counted_and_none_is_left(tmp_path):
    facts, below = watch(tmp_path, "-c", DAEMON, tmp_path / "pid")
    daemon = int((tmp_path / "pid").read_text())
    assert 60 < facts["peak_mb"] < 90  # two blocks of 30 MB, two interpreters
    assert facts["left"] == 1 and below == [] and not Path(f"/proc/{daemon}").exists()
    assert facts["cpu"][-1][1] > 0


def test_a_contestant_that_fails_is_an_error_with_its_last_words(tmp_path):
    error, below = watch(tmp_path, "-c", "print('first'); raise SystemExit('no simulator here')")
    assert "exit code 1" in error and "no simulator here" in error and below == []


def test_contestants_share_no_settings_of_ours(tmp_path):
    watch(tmp_path, "-c", "import os; open('%s', 'w').write(os.environ['HOME'] + os.environ['OMP_NUM_THREADS'])"
          % (tmp_path / "seen"))
    assert (tmp_path / "seen").read_text() == f"{tmp_path}1"


def test_rates_leave_the_first_iteration_out(tmp_path):
    rows = [{"time": 110.0, "env_steps": 50, "time_collect": 9.0, "time_learn": 1.0, "ocr": 0.5},
            {"time": 112.0, "env_steps": 100, "time_collect": 1.0, "time_learn": 0.5},
            {"time": 116.0, "env_steps": 150, "time_collect": 3.0, "time_learn": 0.5, "ocr": 0.7}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"phase": 2, "epoch": 1, **row}) + "\n" for row in rows))
    cpu = [(109.0, 20.0), (111.0, 22.0), (115.0, 30.0), (117.0, 36.0)]  # 21 at 110, 33 at 116
    got = rates(tmp_path, {"begin": 100.0, "cpu": cpu})
    assert got["steps_per_s"] == pytest.approx(100 / 6) and got["cpu_ms"] == pytest.approx(120.0)
    assert got["start_s"] == pytest.approx(10 - 3) and got["ocr"] == pytest.approx(0.6)
    assert got["times"] == {"time_collect": 2.0, "time_learn": 0.5, "iteration": 3.0}


# ---- what the rivals see and do ----------------------------------------------------------------------------------

@pytest.fixture
def flat(tmp_path):
    """flat(arrays) -> NotingTraffic with episodes of 20 steps, closed after the test."""
    made = []

    def build(arrays=VEHICLES):
        cfg = load_config(ROOT / "configs" / "default.yaml", [*SETTINGS, *TINY])
        made.append(NotingTraffic(cfg, tmp_path, arrays))
        return made[-1]
    yield build
    for env in made:
        env.close()


def test_flat_environment_keeps_gymnasiums_contract(flat):
    check_env(flat(), skip_render_check=True)


def test_flat_action_commands_the_picked_icvs(flat):
    env = flat()
    env.reset(seed=3)
    action = np.tile([ICVS, KEEP, 0], (5, 1))
    while env.env.observation["icv"].sum() < 2:
        assert env.step(action.ravel())[1] == pytest.approx(env.env.totals.reward)  # nobody picked: no cost
    icvs = np.flatnonzero(env.env.observation["icv"])
    action[3] = 1, KEEP, len(LEVELS) - 1
    objective = env.step(action.ravel())[1]
    assert env.env.slots.names[icvs[1]] in env.env.driven and len(env.env.driven) == 1
    assert objective == pytest.approx(env.env.totals.reward - env.price * 2.0 / len(icvs)) and env.price > 0


def test_flat_observation_holds_the_graph_and_its_network_reads_it(flat, tmp_path):
    env = flat(GRAPH)
    first, _ = env.reset(seed=3)
    for _ in range(15):
        vector = env.step(np.zeros(15, int))[0]
    observation, features = env.env.observation, GraphFeatures(env.cfg)
    read = features._unflatten(torch.from_numpy(np.stack([first, vector])))
    used = read["mask"].shape[1]
    assert used < len(observation["mask"]) and not observation["mask"][used:].any()
    for name in env.arrays:
        wanted = observation[name] if name == "globals" else observation[name][:used]
        assert np.allclose(read[name][1].numpy(), wanted, rtol=1e-5, atol=1e-4), name
    assert np.abs(vector).max() <= 10 and np.abs(observation["edges"]).max() * SCALE <= 10
    embedding = features.gnn(*(torch.as_tensor(observation[name][None]) for name in INPUTS[:-1]),
                             torch.as_tensor(observation["mask"][None] > 0))[0, observation["mask"] > 0]
    got = features(torch.from_numpy(vector)[None])[0]
    assert torch.allclose(got[:64], embedding.mean(0), atol=1e-4)
    assert torch.allclose(got[64:128], embedding.amax(0), atol=1e-4)
    assert not any(p.requires_grad for p in features.parameters())


def test_every_ended_episode_is_noted(flat, tmp_path):
    env, done = flat(), False
    env.reset(seed=1)
    while not done:
        _, _, terminated, truncated, _ = env.step(np.zeros(15, int))
        done = terminated or truncated
    (line,) = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["loaded"] > 0 and json.loads(line)["time"] <= time.time()


@pytest.mark.parametrize("inputs, outputs, wanted", [(5016, 395, 404_587), (144, 395, 245_000)])
def test_rivals_networks_have_about_as_many_parameters(inputs, outputs, wanted):
    h = hidden_width(inputs, outputs, wanted)
    mlps = [torch.nn.Sequential(torch.nn.Linear(inputs, h), torch.nn.Linear(h, h), torch.nn.Linear(h, out))
            for out in (outputs, 1)]
    count = sum(p.numel() for mlp in mlps for p in mlp.parameters())
    assert abs(count - wanted) < 0.02 * wanted
