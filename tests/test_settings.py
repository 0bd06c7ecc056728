"""Settings that were not heard, or heard otherwise than meant."""
import copy
import math
import os
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coordinator
import train_ddp
import train_rl
from benchmarks import phases
from configs import Config, ConfigError, load_config
from env.sumo import SAFE_SPEED
from env.traffic_env import make_env
from models.presets import PRESETS
from models.risk_gnn import RiskGNN
from runtime import distributed, ending
from runtime.batch_size import memory_share
from runtime.precision import MOST_OVERFLOWS, HysteresisScaler, Precision, compile_gnn
from runtime.rollout import note_cut_episodes
from runtime.training import Progress, mean_logs

ALONE = distributed.Team(0, 1, 0, 1, torch.device("cpu"))


class Square(nn.Module):
    """A loss whose gradient is (2, 4)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self):
        return self.w.square().sum(), {}


def test_no_gradient_norm_limit():
    """clip_norm=0 left every weight as it was, with a healthy gradient norm in the log; elsewhere 0 means "none"."""
    module = Square()
    _, norm, _ = train_ddp.optimiser_step(module, [()], torch.optim.SGD([module.w], 0.1),
                                          Precision(Config().phase1.amp, ALONE.device), 0.0)
    torch.testing.assert_close((norm, module.w.detach()), (torch.tensor(20.0).sqrt(), torch.tensor([0.8, 1.6])))


def test_a_changed_weight_decay_counts_when_a_phase_goes_on(tmp_path):
    """The optimiser's old one came back with its state, under a config.yaml that named the new one."""
    def progress(decay):
        model = Square()
        return Progress(Config(), ALONE, tmp_path / "phase1", model, torch.optim.AdamW([model.w], weight_decay=decay),
                        Precision(Config().phase1.amp, ALONE.device).scaler)
    first = progress(0.01)
    first.save()
    [lock.close() for lock in first.locks]
    again = progress(0.5)
    assert again.resume() and [group["weight_decay"] for group in again.optimizer.param_groups] == [0.5]


def test_a_skipped_step_does_not_hide_the_gradient_norm_of_the_others():
    """One overflow in an epoch made its mean infinite, which the metrics leave out."""
    logs = [{"grad_norm": torch.tensor(x), "loss": torch.tensor(1.0)} for x in (0.5, math.inf, 1.5)]
    assert mean_logs(ALONE, logs) == {"grad_norm": 1.0, "loss": 1.0}
    assert math.isnan(mean_logs(ALONE, logs[1:2])["grad_norm"])  # no step counted
    logs[0]["loss"] = torch.tensor(math.nan)
    assert math.isnan(mean_logs(ALONE, logs)["loss"])  # hidden by nobody


def test_a_frozen_network_can_be_compiled_too():
    """Phase 3 blamed the compiler: "element 0 of tensors does not require grad"."""
    gnn, said = RiskGNN(PRESETS["small"]).requires_grad_(False), []
    compile_gnn(gnn, True, said.append, backend="eager")
    assert said == ["torch.compile: the risk GNN is compiled"] and not any(p.requires_grad for p in gnn.parameters())


@pytest.mark.parametrize("strategy, words", [("static", "may be too high still"), ("dynamic", "not the scale")])
def test_overflows_in_a_row_blame_the_scale_where_it_never_fell(strategy, words):
    amp = copy.deepcopy(Config().phase1.amp)
    amp.strategy, weight = strategy, nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), HysteresisScaler("cpu", amp, True)
    with pytest.raises(FloatingPointError, match=words):
        for _ in range(MOST_OVERFLOWS):
            scaler.scale((weight * math.inf).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("every, stages, words", [(3, False, ""), (2, False, "every 40 control steps, so the rest of"),
                                                  (2, True, "the curriculum never advances")])
def test_episodes_that_no_checkpoint_lets_end_are_told(every, stages, words):
    """With checkpoint_every=1 the default configuration trained on the first 400 of 900 s only, without a word."""
    said, cfg = [], load_config("configs/smoke.yaml", [f"phase2.checkpoint_every={every}", "phase2.iterations=9"])
    cfg.phase2.curriculum.enabled = stages
    note_cut_episodes(cfg, SimpleNamespace(say=said.append), 2, 20)
    assert len(said) == bool(words) and words in "".join(said)


@pytest.mark.parametrize("drives, corrects, words", [
    (3, 0, ["a rule drives 3 and corrects the policy in 0; 6 are PPO"]), (0, 0, ["drives 0 and", "; 9 are PPO"]),
    (6, 5, ["drives 6 and corrects the policy in 3; 0 are PPO"]),
    (12, 5, ["drives 9 and corrects the policy in 0; 0 are PPO", "the curriculum never advances"])])
def test_phase_2_says_how_much_of_it_is_ppo(drives, corrects, words):
    """Most configurations have none, which nothing told; where the rule always drove, the curriculum stood still."""
    said, cfg = [], load_config("configs/smoke.yaml", ["phase2.iterations=9", f"phase2.imitate_iterations={drives}",
                                                       f"phase2.imitate_corrections={corrects}"])
    cfg.phase2.curriculum.enabled = True
    train_rl.announce(cfg.phase2, SimpleNamespace(say=said.append))
    assert all(text in " ".join(said) for text in words) and len(said) == 1 + (drives >= 9)


@pytest.mark.parametrize("rule, c_int, told", [("harmonise", 0.0, 1), ("harmonise", 0.1, 0), ("none", 0.0, 0)])
def test_rule_that_says_nothing_is_told(rule, c_int, told):
    """On a ring `harmonise` is silent, and the policy learned to be, without a word."""
    said, cfg = [], load_config("configs/smoke.yaml", [f"phase2.imitate={rule}"])
    train_rl.note_silence(cfg.phase2, SimpleNamespace(say=said.append), c_int)
    assert len(said) == told and all("harmonise has commanded nobody" in text for text in said)


@pytest.mark.parametrize("workers, ranks, planned, envs", [(3, 2, 2, 4), (4, 2, 4, 8), (1, 2, 2, 4), (0, 2, 0, 4)])
def test_the_plan_counts_the_workers_that_learners_start(monkeypatch, workers, ranks, planned, envs):
    """Three workers of two learners were planned, timed and documented; one of each was started."""
    monkeypatch.setattr(coordinator.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="2"))
    cfg = load_config("configs/smoke.yaml", [f"rollout.num_workers={workers}", "rollout.num_envs_per_worker=2",
                                             "run.device=auto", f"coordinator.nproc={ranks}"])
    for phase in ("phase2", "phase3"):
        plan = coordinator.resource_plan(cfg)[phase]
        assert (plan["rollout_workers"], plan["environments"]) == (planned, envs)


def test_exit_codes_need_no_disk(monkeypatch, tmp_path):
    """A full one was a traceback instead of the message and its code, and half a marker one of the coordinator's."""
    monkeypatch.setenv("EXIT_CODE_FILE", str(tmp_path / "gone/exit-code"))
    assert ending.note(2) == 2
    step = [sys.executable, "-c", "import os, sys; open(os.environ['EXIT_CODE_FILE'], 'w'); sys.exit(3)"]
    assert coordinator.run_step("phase2", step, 1, SimpleNamespace(asked=False, child=None)) == 3


def test_a_probe_that_was_killed_is_one_message(monkeypatch):
    """SIGTERM in the first second: IndexError, as it had said nothing."""
    monkeypatch.setattr(coordinator.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=-15, stderr=""))
    with pytest.raises(ConfigError, match="PyTorch does not start: exit code -15"):
        coordinator.resource_plan(Config())


def test_a_probe_imports_nothing_of_the_current_folder(monkeypatch, tmp_path):
    """PyTorch did not start where somebody had a random.py of his own."""
    (tmp_path / "random.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    assert coordinator.resource_plan(load_config("configs/smoke.yaml", "run.device=cpu"))["phase2"]["gpus"] == 0


def test_what_a_larger_trial_has_freed_does_not_count():
    """glibc keeps it: after one trial that was too large, none of the smaller ones fitted any more."""
    last = []

    def step(batch):
        blocks = [bytearray(100_000) for _ in range(len(batch["x"]))]
        last[:] = blocks[-1:]  # at the end of the heap, so that it cannot shrink by itself
    share = {n: memory_share(step, {"x": torch.ones(n)}, torch.device("cpu"), 1000) for n in (5000, 10)}
    assert share[10] < share[5000] - 0.4


def test_a_stop_of_the_step_itself_is_no_end_of_it(monkeypatch, tmp_path):
    """SIGTERM to train_rl.py, not to the coordinator: half trained, it counted as done and the next phase began."""
    stop = SimpleNamespace(asked=False, child=None)
    with monkeypatch.context() as patch:  # the step's last words, noted here: importing PyTorch takes it seconds
        patch.setenv("EXIT_CODE_FILE", str(tmp_path / "exit-code"))
        ending.note_stop()
        ending.note(0)
    words = f"shutil.copytree({str(tmp_path)!r}, os.path.dirname(os.environ['EXIT_CODE_FILE']), dirs_exist_ok=True)"
    step = [sys.executable, "-c", f"import os, shutil; {words}"]
    assert coordinator.run_step("phase2", step, 1, stop) == 0 and stop.asked


@pytest.mark.parametrize("code, asked, expected", [(3, True, 3), (-2, True, 130), (-9, True, 130), (-9, False, 137)])
def test_one_command_for_several_gpus_keeps_its_exit_codes(monkeypatch, tmp_path, code, asked, expected):
    """`python train_rl.py` became torchrun, which ends with 1 whatever its ranks say. Ctrl-C was 241 or 247."""
    calls, cfg = [], load_config("configs/smoke.yaml", ["run.device=auto", f"run.folder={tmp_path}"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(train_rl, "Stop", lambda: SimpleNamespace(asked=asked))
    monkeypatch.setattr(train_rl, "run_step", lambda step, command, *_: calls.append(command) or code)
    monkeypatch.setattr(os, "execv", lambda program, command: calls.append(command))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)
    assert train_rl.one_learner_per_gpu(cfg) == expected and "--nproc_per_node=2" in calls[0]
    monkeypatch.setenv("RANK", "0")
    assert train_rl.one_learner_per_gpu(cfg) is None and len(calls) == 1


@pytest.mark.parametrize("interval, shield, checked", [(1, "true", False), (2, "true", True), (2, "false", False)])
def test_above_one_second_sumos_own_check_stays_on(scenarios, interval, shield, checked):
    """Every 2 s, 75 collisions in 160,000 vehicle-steps with the shield: somebody cuts in before it is asked again."""
    cfg = load_config("configs/smoke.yaml", [f"env.control_interval={interval}", f"shield.enabled={shield}",
                                             "env.icv_share=1", "env.horizon_s=120"])
    env = make_env(cfg, str(scenarios))
    try:
        observation, _ = env.reset(seed=1)
        while not observation["icv"].any():
            observation = env.command([], [], [], [])[0]
        slot = int(observation["icv"].argmax())
        env.command([slot], [-0.5], [1], [0.0])
        assert list(env.driven) and all(bool(mode & SAFE_SPEED) == checked for mode in env.driven.values())
    finally:
        env.close()


@pytest.mark.parametrize("code, asked, expected", [(0, False, None), (3, False, 3), (-9, False, 1), (0, True, 0)])
def test_a_benchmark_makes_nothing_of_an_unfinished_phase(monkeypatch, code, asked, expected):
    """Phase 3 that was asked to stop after 3 of 12 epochs was scored as a policy at its limit; Ctrl-C killed it."""
    def run_step(name, command, threads, stop):
        stop.asked = asked
        return code
    monkeypatch.setattr(phases, "run_step", run_step)
    before, ended = signal.getsignal(signal.SIGTERM), None
    try:
        phases.train(load_config("configs/smoke.yaml"), "limit", "train_ddp.py")
    except SystemExit as end:
        ended = end.code
    assert ended == expected and signal.getsignal(signal.SIGTERM) == before


def test_an_episode_is_as_long_as_its_fragment_also_where_floats_miss_it():
    """55 / 1.1 is a little below 50 for a computer: refused."""
    words = ["env.horizon_s=55", "env.control_interval=1.1", "phase2.fragment_length="]
    assert load_config("configs/default.yaml", [*words[:2], words[2] + "50"]).phase2.fragment_length == 50
    with pytest.raises(ConfigError, match="51 is longer than an episode of 50 control steps"):
        load_config("configs/default.yaml", [*words[:2], words[2] + "51"])
