"""Phase 2's update: minibatches of several ranks, the loss on candidates without padding, reads of the device; and two
learners against one, through the real command line."""
import copy
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_ddp
import train_rl
from configs import Config, load_config
from env.workers import make_pool
from models import objectives
from models.losses import ConstrainedLoss, PPOLoss
from models.policy import Driver
from models.risk_gnn import ICV
from runtime import checkpoint
from runtime.distributed import Team
from runtime.ending import run_script
from runtime.metrics import read_metrics
from runtime.precision import HysteresisScaler, Precision
from runtime.rollout import Collector
from runtime.storage import Minibatches, Rollout

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
ALONE = Team(0, 1, 0, 1, CPU)
T, E, K = 6, 4, 5
UPDATES = 3 * (T * E // 8)


def config():
    cfg = Config()
    cfg.phase2.minibatch_size, cfg.phase2.epochs, cfg.phase2.target_kl = 8, 3, 1e9
    return cfg


def rollout_of(controller, folder=None, spill_mb=0, seed=0):
    """A rollout of random numbers with 0 to 9 candidates a step."""
    rng, rollout = np.random.default_rng(seed), Rollout(T, E, folder, spill_mb)
    for t in range(T):
        many = rng.integers(0, 10, E)
        many[0] = 9 if t == 0 else many[0]
        picks = np.array([np.pad(rng.permutation(n)[:K], (0, K - min(n, K))) for n in many])
        valid = np.arange(K) < many[:, None]
        number = lambda *shape: rng.standard_normal((E, *shape)).astype(np.float32)  # noqa: E731
        rollout.append(t, range(E), {"candidates": number(9, controller.features).astype(np.float16)}, many)
        rollout.put(t, list(range(E)), {
            "scene": number(controller.scene_features).astype(np.float16), "picks": picks, "pick_valid": valid,
            "u": number(K), "lane": np.ones((E, K), int), "release": number(K) > 0, "pace": number(K) > 0,
            "log_prob": number(K) - 3, "lost": np.zeros(E, bool),
            **{name: number() for name in ("advantage", "return", "cost_return", "reward", "cost", "price")}})
    return rollout


# ---- minibatches of all ranks ------------------------------------------------------------------------------------

@pytest.mark.parametrize("own", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
def test_ranks_share_the_minibatches_that_one_learner_has(own):
    """Every control step is in at most one minibatch, and in the same one however environments are spread."""
    spans, cfg, seen = [], config(), []
    for rank, envs in enumerate(own):
        team = SimpleNamespace(rank=rank, gather=lambda _: own)
        spans.append(train_rl.Span(envs, team))
    alone = train_rl.Span(4, SimpleNamespace(rank=0, gather=lambda _: [4]))
    for epoch in range(2):
        expected = train_rl.epoch_rows(cfg, alone, T, 3, epoch)
        parts = [train_rl.epoch_rows(cfg, span, T, 3, epoch) for span in spans]
        assert [len(part) for part in parts] == [len(expected)] * len(own) == [3] * len(own)
        for minibatch, rows in enumerate(expected):
            steps = [divmod(int(row), span.own) for span, part in zip(spans, parts) for row in part[minibatch]]
            firsts = [span.first for span, part in zip(spans, parts) for _ in part[minibatch]]
            assert sorted((t, env + first) for (t, env), first in zip(steps, firsts)) == sorted(
                divmod(int(row), 4) for row in rows)
        seen.append(np.concatenate(expected).tolist())
        assert sorted(seen[-1]) == list(range(T * 4))
    assert seen[0] != seen[1]


# ---- loss without padding ----------------------------------------------------------------------------------------

def padded_loss(controller, rollout, steps, ppo, count):
    """The same loss from padded candidates, term by term."""
    flat = {name: rollout[name].flatten(0, 1)[steps] for name in (*rollout.fixed, "candidates")}
    valid = torch.arange(9) < torch.from_numpy(rollout.count["candidates"].ravel()[steps])[:, None]
    chosen = {"valid": flat["pick_valid"], **{name: flat[name] for name in ("picks", "u", "lane", "release", "pace")}}
    scene = flat["scene"].float()
    log_prob, entropy, effort = controller.evaluate(flat["candidates"].float(), valid, scene, chosen)
    policy, *_ = objectives.ppo_loss(log_prob, flat["log_prob"], flat["advantage"], chosen["valid"], ppo.clip, count)
    policy = policy + (effort * flat["price"]).sum() / count
    return (policy + ppo.value_weight * controller.value.loss(scene, flat["return"], count)
            + ppo.cost_value_weight * controller.cost_value.loss(scene, flat["cost_return"], count)
            - ppo.entropy_weight * entropy.sum() / count)


@pytest.mark.parametrize("steps", [range(T * E), [0], [7, 3, 21, 3]])
def test_loss_without_padding_is_the_loss_with_padding(small, steps):
    rollout, ppo, steps = rollout_of(small.controller), config().phase2, np.array(steps)
    one, other = copy.deepcopy(small), copy.deepcopy(small)
    batch = Minibatches(rollout, train_rl.LEARN, CPU)(steps)
    loss, _ = PPOLoss(one, ppo)(batch, 5.0)
    expected = padded_loss(other.controller, rollout, steps, ppo, 5.0)
    torch.testing.assert_close(loss, expected)
    loss.backward(), expected.backward()
    for (name, ours), theirs in zip(one.controller.named_parameters(), other.controller.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_rank_without_a_step_of_a_minibatch_takes_part(small):
    """Its gradients are zeros, not missing: the others wait for them."""
    model = copy.deepcopy(small)
    model.freeze("risk_gnn", "world_model", "safety_shield")
    batch = Minibatches(rollout_of(model.controller), train_rl.LEARN, CPU)(np.array([], int))
    loss, log = PPOLoss(model, config().phase2)(batch, 4.0)
    loss.backward()
    assert loss == 0 and not any(log.values())
    assert all((p.grad == 0).all() for p in model.controller.parameters())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_autocast_does_not_change_the_loss(small, kind):
    """The rollout decides in float32: with bf16 in the update, KL was 0.1 before the first step."""
    batch = Minibatches(rollout_of(small.controller), train_rl.LEARN, CPU)(np.arange(T * E))
    module = PPOLoss(small, config().phase2)
    expected, log = module(batch, 5.0)
    with torch.autocast("cpu", kind):
        assert module(batch, 5.0)[0] == expected and module(batch, 5.0)[1]["kl"] == log["kl"]


# ---- update ------------------------------------------------------------------------------------------------------

def update(small, scaling=False, parts=1, team=ALONE, target=1e9, updates=UPDATES, **where):
    """(log of an update on a rollout, weights afterwards, whether the rollout was spilled)."""
    model, cfg = copy.deepcopy(small), config()
    cfg.memory.split, cfg.phase2.target_kl = parts, target
    model.freeze("risk_gnn", "world_model", "safety_shield")
    precision, rollout = Precision(cfg.phase2.amp, CPU), rollout_of(model.controller, **where)
    precision.scaler = HysteresisScaler("cpu", cfg.phase2.amp, scaling)
    progress = SimpleNamespace(model=model, counters={"epoch": 0, "updates": 0},
                               optimizer=torch.optim.SGD(model.controller.parameters(), 1e-4))  # Adam reads its steps
    log = train_rl.update(cfg, team, train_rl.Span(E, ALONE), progress, PPOLoss(model, cfg.phase2), rollout, precision)
    assert progress.counters["updates"] == updates and log["kl"] > 0 and np.isfinite(list(log.values())).all()
    return log, model.controller.state_dict(), rollout.spilled


def test_spilling_changes_nothing(small, tmp_path):
    (log, weights, spilled), (other_log, others, other_spilled) = update(small), update(small, folder=tmp_path,
                                                                                        spill_mb=0.01)
    assert not spilled and other_spilled and log == other_log
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def test_minibatches_in_parts_teach_the_same(small):
    (log, weights, _), (other_log, others, _) = update(small), update(small, parts=3)
    assert log == pytest.approx(other_log, rel=1e-3, abs=1e-6)
    torch.testing.assert_close(weights, others, rtol=1e-4, atol=1e-6)


class Reads(TorchDispatchMode):
    """Counts how often a number is taken from a tensor: each time, a GPU would have to be waited for."""
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaling", [False, True])
def test_update_reads_the_device_twice_per_optimiser_step(small, scaling, monkeypatch):
    """Whether the gradients are finite, and the KL of all ranks; losses and norms stay there until the end.
    With loss scaling it was read four times a step."""
    sums, sum_up = [], Team.all_sum
    monkeypatch.setattr(Team, "all_sum", lambda self, values: sums.append(sum_up(self, values)) or sums[-1])
    with Reads() as reads:
        update(small, scaling)
    assert UPDATES <= reads.count <= UPDATES + 8  # and the values' moments, once
    assert len(sums) <= UPDATES + 1 + 8  # and once what is logged


class Farther(Team):
    """A rank beside one whose policy moves by a KL of 9 per pick."""

    def all_sum(self, values):
        values = list(super().all_sum(values))
        return [values[0] + 9 * values[1], 2 * values[1]] if len(values) == 2 else values


def test_no_step_follows_a_minibatch_beyond_the_target_kl(small):
    """The mean of an epoch was compared: on the ring a policy ran away within one, from a KL of 0.02 to 1.6 in twelve
    minibatches, and drove worse than nobody for the rest of the training."""
    minibatches = Minibatches(rollout_of(small.controller), train_rl.LEARN, CPU)
    module, kls = PPOLoss(small, config().phase2), []
    for epoch in range(3):  # the learning rate of `update` is so small that its steps hardly change them
        for rows in train_rl.epoch_rows(config(), train_rl.Span(E, ALONE), T, 0, epoch):
            log = module(minibatches(rows), 8.0)[1]
            kls.append(float(log["kl"] / log["picks"]))
    records = [i for i, kl in enumerate(kls) if kl > max(kls[:i], default=0)]
    for i in records:  # the noise of one minibatch is allowed for
        update(small, target=0.99 * kls[i] / 1.5, updates=i + 1)
    update(small, target=1.01 * max(kls) / 1.5)
    assert records[-1] % 3 and len(records) > 1, "it must matter that an epoch has three"


def test_ranks_stop_together(small):
    """A rank that looked at its own KL alone would leave the others waiting for its gradients."""
    far = Farther(0, 1, 0, 1, CPU)
    kl = update(small, team=far, target=100)[0]["kl"]
    update(small, team=far, target=2 * kl / 1.5, updates=1)
    update(small, target=2 * kl / 1.5)


# ---- two learners ------------------------------------------------------------------------------------------------

LR = 1e-4
WORDS = ["--config", str(ROOT / "configs/smoke.yaml"), "run.threads=1", "rollout.num_workers=2",
         "rollout.num_envs_per_worker=1", "env.horizon_s=25.0", "data.margin=0",
         "phase1.augment.time_shift=0", "phase2.iterations=2", "phase2.checkpoint_every=1",
         "phase2.epochs=2", "phase2.train_batch_size=100", "phase2.fragment_length=25", "phase2.minibatch_size=20",
         f"phase2.lr={LR}"]
LEARNED = 2 * 2 * 100 // 20


def learn(folder, ranks):
    """Phase 2 in `folder` with so many learners, a single one in this process: (its metrics, its weights)."""
    if ranks == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["train_rl.py", *WORDS])
            patch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)  # pytest keeps its own handlers
            assert run_script(train_rl.main, train_ddp.USER_ERRORS) == 0
    else:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *start, str(ROOT / "train_rl.py"), *WORDS], cwd=folder, env=environment,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    state = checkpoint.load(folder / "runs/smoke/phase2")
    return read_metrics(folder / "runs/smoke/metrics.jsonl"), state["weights"]["model"]


@pytest.fixture(scope="module")
def learners(tmp_path_factory):
    """One learner with two workers, and two learners with one worker each."""
    return [learn(tmp_path_factory.mktemp(f"ranks{ranks}"), ranks) for ranks in (1, 2)]


def test_phase3_learns_about_those_whom_it_could_pick(scenarios, models):
    """With evaluate.leave_below: candidates as in the rollout (the first ratio is 1), but a price per ICV of all. The
    price is what C_int, effort by the mean number of ICVs, rises by: it was by the number in the step, so that commands
    of an episode's first minutes, when jams are prevented, cost up to six times those in a jam."""
    cfg = load_config("configs/smoke.yaml", ["env.icv_share=0.5", "phase3.sequence_length=5"])
    cfg.env.horizon_s = cfg.env.warmup_s = 20.0
    model = models["small"]
    with make_pool(cfg, 0, 2, scenarios) as pool:
        driver = Driver(model, pool.num_envs, cfg.env.max_vehicles, leave_below=24.0)
        collector = Collector(pool, driver, 7, 3, keep_sequences=5)
        collector.begin(0)
        rollout, _ = collector.collect(20)
    team = Team(0, 1, 0, 1, torch.device("cpu"))
    sequences, _ = train_ddp.make_sequences(cfg, team, rollout.dense(), 1.0)
    icvs = sequences["nodes"][..., ICV].float().sum(-1)  # [environments x parts of a sequence's length, steps of one]
    assert 0.1 < float(sequences["icv"].sum() / icvs.sum()) < 0.9 and icvs.std() > 1
    worth = sequences["price"].unflatten(0, (2, -1)) * icvs.unflatten(0, (2, -1)).mean((1, 2), keepdim=True)
    torch.testing.assert_close(worth, worth[:1, :1, :1].expand_as(worth))
    batch = {name: x.float() if x.dtype == torch.float16 else x for name, x in sequences.items()}
    _, log = ConstrainedLoss(model, cfg.phase2, cfg.phase3)(batch, [1.0, 1.0, 1.0])
    assert abs(float(log["kl"])) < 1e-4 and log["clip_share"] == 0


def test_lost_steps_count_for_nothing(scenarios, models):
    """They were steps with reward 0 and cost 0: half of them lost halved what the best iteration is chosen by, and the
    cost that moves the multiplier."""
    cfg = load_config("configs/smoke.yaml", ["phase3.sequence_length=5"])
    cfg.env.horizon_s = cfg.env.warmup_s = 20.0
    with make_pool(cfg, 0, 2, scenarios) as pool:
        driver = Driver(models["small"], pool.num_envs, cfg.env.max_vehicles)
        collector = Collector(pool, driver, 7, 3, keep_sequences=5)
        collector.begin(0)
        rollout, _ = collector.collect(10)
    team, fixed = Team(0, 1, 0, 1, torch.device("cpu")), rollout.fixed
    for name, value in (("reward", -0.3), ("cost", 0.2)):
        fixed[name][:] = value
        fixed[name][5:, 0] = 0
    facts = {"reward": pytest.approx(-0.3), "c_int": pytest.approx(0.2)}
    fixed["lost"][5:, 0] = True
    for _ in range(2):
        found = train_rl.summarise(team, rollout), train_ddp.make_sequences(cfg, team, rollout.dense(), 1.0)[1]
        assert [{name: one[name] for name in facts} for one in found] == [facts] * 2
        for name in ("reward", "cost", "lost"):  # and an environment that was lost altogether
            fixed[name][:, 0] = name == "lost"


def test_c_int_that_phases_tell_is_that_of_the_score(scenarios, models):
    """Phase 2 told the mean of effort per ICV, which is high while there are few: where `random` drives the corridor
    with seed 1001 that is 0.204, and C_int as scores and phase 3 have it 0.166."""
    cfg = load_config("configs/smoke.yaml", ["phase3.sequence_length=5", "env.icv_share=0.6"])
    with make_pool(cfg, 0, 2, scenarios) as pool:
        collector = Collector(pool, Driver(models["small"], 2, cfg.env.max_vehicles), 7, 3, keep_sequences=5)
        collector.begin(0)
        rollout, _ = collector.collect(40)
        totals = [env.totals for env in pool.environments.envs.values()]
        icvs = [one.icv_sum - one.icvs for one in totals]  # before each step, that is without those after the last one
    team, cost = Team(0, 1, 0, 1, torch.device("cpu")), np.mean([one.effort / n for one, n in zip(totals, icvs)])
    assert rollout["icvs"].sum(0).tolist() == icvs and abs(float(rollout["cost"].mean()) / cost - 1) > 0.03
    assert train_rl.summarise(team, rollout)["c_int"] == pytest.approx(cost)
    assert train_ddp.make_sequences(cfg, team, rollout.dense(), 1.0)[1]["c_int"] == pytest.approx(cost)


def test_phase3_trains_with_the_limits_that_are_scored(tmp_path, monkeypatch):
    made = []

    class Noted(Driver):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(train_ddp, "Driver", Noted)
    monkeypatch.setattr(train_ddp.Collector, "begin", lambda self, epoch: 1 / 0)  # that is far enough
    with pytest.raises(ZeroDivisionError):
        train_ddp.phase3(load_config("configs/smoke.yaml", [f"run.folder={tmp_path}", "evaluate.leave_below=7",
                                                            "evaluate.leave_after=0.8",
                                                            "evaluate.accel_limit=0.5",
                                                            "phase3.world_model_weight=0",
                                                            "phase3.risk_weight=0"]),
                         Team(0, 1, 0, 1, torch.device("cpu")), SimpleNamespace())
    assert not any(p.requires_grad for p in made[0].model.world_model.parameters())  # DDP would wait for gradients
    assert not made[0].model.safety_shield.risk_trained  # nor does a head that nothing is taught strike commands
    # Continued with a higher weight: what was loaded, a head that nobody had taught, silenced it for good.
    monkeypatch.setattr(train_ddp.Progress, "resume",
                        lambda self, begun, traffic: self.model.safety_shield.risk_trained.fill_(False))
    with pytest.raises(ZeroDivisionError):
        train_ddp.phase3(load_config("configs/smoke.yaml", [f"run.folder={tmp_path}", "evaluate.leave_below=7",
                                                            "evaluate.leave_after=0.8",
                                                            "evaluate.accel_limit=0.5"]),
                         Team(0, 1, 0, 1, torch.device("cpu")), SimpleNamespace())
    assert made[1].model.safety_shield.risk_trained
    assert [(driver.leave_below, driver.leave_after, driver.model.controller.accel_limit)
            for driver in made] == [(7, 0.8, 0.5)] * 2


@pytest.mark.parametrize("skipped, moves", [(1.0, 0), (0.5, 1)])
def test_an_epoch_without_a_step_does_not_move_the_price(tmp_path, monkeypatch, skipped, moves):
    """After an overflow in every step the policy had not heard the price yet, and it rose all the same."""
    calls = []
    monkeypatch.setattr(train_ddp, "learn_constrained", lambda *_: {"overflow_share": skipped})
    monkeypatch.setattr(train_ddp.objectives, "move_multiplier", lambda *arguments: calls.append(arguments))
    guard = SimpleNamespace(facts=dict, must_stop=lambda: False, give_up_worker=lambda pool: False)
    train_ddp.phase3(load_config("configs/smoke.yaml", [f"run.folder={tmp_path}", "phase3.epochs=1"]),
                     Team(0, 1, 0, 1, torch.device("cpu")), guard)
    assert len(calls) == moves


def test_two_learners_see_the_same_traffic_and_command_the_same(learners):
    """Seeds and sampled actions belong to the environment's number among all. Each rank once drew from a stream of its
    own, and every learner's permutation was its own."""
    (one, _), (two, _) = learners
    for name in ("reward", "c_int", "released", "episodes", "env_steps", "updates", "return", "ocr", "shield_clips"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-6), name
    assert one[0]["episodes"] == 4 and one[1]["updates"] == LEARNED and one[0]["c_int"] > 0


def test_two_learners_learn_what_one_learns(learners):
    """Same minibatches, advantages normalised over both, losses over the global count: the same weights apart from the
    order of sums. The last biases of the scores have no gradient but rounding, which Adam blows up to full steps."""
    (one, alone), (two, both) = learners
    for name in ("loss", "loss_policy", "loss_value", "loss_cost_value", "entropy", "kl", "clip_share", "grad_norm"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-3, abs=1e-6), name
    for name, value in alone.items():
        if name not in ("controller.importance.4.bias", "controller.impact.4.bias"):
            assert float((value.float() - both[name].float()).abs().max()) < 0.01 * LR * LEARNED, name
