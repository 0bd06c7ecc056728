"""Warm start: a rule's commands as choices of the policy, and what the controller learns of them."""
import contextlib
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_ppo import ALONE, CPU, E, config, rollout_of

import train_rl
from configs import Config, load_config
from env.baselines import BASELINES, LEFT_GAP, LEFT_REAR_GAP, make_baseline
from env.workers import make_pool
from models.controller import acceleration, plackett_luce
from models.imitation import RuleDriver, follow, pre_squash, with_room, with_runners_up
from models.losses import PPOLoss, stored_choice
from models.policy import TrafficModel
from runtime.checkpoint import CheckpointError
from runtime.precision import Precision
from runtime.storage import Kept, Minibatches, SpillError

K, NOBODY = 5, 99


def choice_of(picks):
    """What the policy chose: `picks`, padded."""
    valid = torch.arange(K) < len(picks)
    return {"picks": torch.tensor(picks + [0] * (K - len(picks))), "valid": valid, "release": torch.rand(K) < 0.5,
            "pace": torch.rand(K) < 0.5, "u": torch.randn(K), "lane": torch.ones(K, dtype=torch.long)}


@pytest.mark.parametrize("own, slots, expected", [
    ([], range(10, 16), []),
    ([12, 15], range(10, 16), [2, 5]),
    ([15, 14, 13, 12, 11], range(10, 16), [5, 4, 3, 2, 1]),
    ([11], [10, 11], [1]),                                     # fewer ICVs than K
    ([], [], [])])
def test_choice_is_the_rules(own, slots, expected):
    pad = K - len(own)
    accel = np.array([-2.0, np.nan, -2.0, -2.0, -2.0][:len(own)] + [0.0] * pad)  # NaN: the driver keeps the speed
    wanted = (np.array(own + [NOBODY] * pad), accel, np.array([0] * len(own) + [1] * pad), np.zeros(K))
    choice = choice_of([])
    follow(choice, wanted, torch.tensor(list(slots), dtype=torch.long))
    assert choice["picks"][choice["valid"]].tolist() == expected
    assert not choice["release"].any()
    assert choice["lane"][:len(own)].tolist() == [0] * len(own)
    paced = choice["pace"][:len(own)]
    assert paced.tolist() == [True, False, True, True, True][:len(own)]
    assert acceleration(choice["u"][:len(own)])[paced].tolist() == pytest.approx([-2.0] * int(paced.sum()))


def test_a_rules_braking_is_learned_too():
    """`brake`, which replaces the acceleration, was not looked at: 0 m/s^2 was learned instead of a braking."""
    wanted = (np.array([11] + [NOBODY] * 4), np.zeros(K), np.ones(K, int), np.array([1.5] + [0.0] * 4))
    choice = choice_of([])
    follow(choice, wanted, torch.arange(10, 16))
    assert float(acceleration(choice["u"][0])) == pytest.approx(-1.5)


def test_runners_up_are_whom_the_controller_would_pick_next():
    """Once, the idle picks sampled while collecting were learned from: when the controller had learned whom to prefer,
    it had never been told to leave the next best alone, and commanded 0.8 too many for each right one."""
    nobody = -torch.inf
    scores = torch.tensor([[0.1, 5.0, 3.0, 4.0, 2.0, 1.0], [1.0, 2.0, nobody, nobody, 0.0, nobody],
                           [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    chosen = {"picks": torch.tensor([[2, 0, 0, 0, 0], [4, 0, 0, 0, 0], [5, 3, 1, 0, 2]]),
              "valid": torch.tensor([[True] + [False] * 4, [True] + [False] * 4, [True] * 5]),
              "release": torch.zeros(3, 5, dtype=torch.bool)}
    filled = with_runners_up(scores, chosen)
    assert [row[there].tolist() for row, there in zip(filled["picks"], filled["valid"])] == [
        [2, 1, 3, 4, 5], [4, 1, 0], [5, 3, 1, 0, 2]]
    assert filled["release"].tolist() == [[False] + [True] * 4, [False] + [True] * 4, [False] * 5]
    few = with_runners_up(scores[1:2, :2], {name: x[1:2] & False for name, x in chosen.items()})  # fewer than K
    assert few["picks"][few["valid"]].tolist() == [1, 0] and few["release"].all()


def test_everybody_whom_the_rule_commands_outranks_the_runners_up():
    """A lane change without room, which comes first in the rule's order, is released; its place went to the strongest
    candidate beside the rule's, whom the picks after it did not have to outrank then."""
    chosen = {"picks": torch.tensor([[0, 3, 1]]), "valid": torch.ones(1, 3, dtype=torch.bool),
              "release": torch.tensor([[True, False, False]]), "u": torch.tensor([[9.0, 0.3, 0.1]])}
    filled = with_runners_up(torch.tensor([[1.0, 0.0, 5.0, -1.0]]), chosen)
    assert filled["picks"].tolist() == [[3, 1, 2]] and filled["release"].tolist() == [[False, False, True]]
    torch.testing.assert_close(filled["u"][:, :2], torch.tensor([[0.3, 0.1]]))


def test_accelerations_survive_the_squashing():
    wanted = torch.tensor([-2.5, -1.0, 0.0, 1.8])
    torch.testing.assert_close(acceleration(pre_squash(wanted)), wanted)
    assert torch.isfinite(pre_squash(torch.tensor([-3.0, 2.0, -50.0]))).all()


@pytest.mark.parametrize("name", ["lane_advice", "follower_stopper"])
def test_rule_drives_through_the_policys_interface(name, scenarios):
    cfg = Config()
    cfg.model.preset, cfg.env.warmup_s, cfg.env.max_vehicles, cfg.shield.enabled = "small", 120.0, 200, False
    with make_pool(cfg, 0, 2, scenarios) as pool:
        pool.reset([1, 2])
        cfg.phase2.imitate, cfg.model.lane_room_m = name, 5.0
        driver = RuleDriver(lambda env: train_rl.imitated(cfg, env), TrafficModel(cfg), 2, 200)
        observation = {key: pool.arrays[key].copy() for key in pool.final}
        choice, commands = driver.decide(driver.perceive(observation, [0, 1]))
        for row in range(2):
            slot, accel, lane, _ = make_baseline(name, cfg)(
                {key: value[row] for key, value in observation.items()}, K, np.random.default_rng(row))
            near = observation["surround"][row][np.minimum(slot, 199)]
            waits = (lane == 0) & (np.minimum(near[:, LEFT_GAP], near[:, LEFT_REAR_GAP]) <= 5)  # told without room
            assert choice["valid"][row].sum() == (slot < 200).sum() > 0 and (~waits & (slot < 200)).any()
            rule, sent = (slot < 200) & ~waits, commands["slot"][row] < 200
            np.testing.assert_array_equal(commands["slot"][row][sent], slot[rule])
            np.testing.assert_array_equal(commands["lane"][row][sent], lane[rule])
            limited = np.clip(accel[rule], -2.875, 1.875)  # the ends of the squashing
            np.testing.assert_allclose(commands["accel"][row][sent], limited, atol=1e-3)


def test_lane_changes_that_the_policy_cannot_make_are_not_learned():
    """One with room, one without, one without but with a speed, one that keeps its lane."""
    choice = {"lane": torch.tensor([[0, 0, 2, 1]]), "pace": torch.tensor([[False, False, True, False]]),
              "release": torch.zeros(1, 4, dtype=torch.bool)}
    lanes = torch.tensor([[[True, True, True], [False, True, True], [True, True, False], [False, True, False]]])
    made = with_room(choice, lanes)
    assert made["lane"].tolist() == [[0, 1, 1, 1]] and made["release"].tolist() == [[False, True, False, False]]


def test_each_variant_may_have_its_own_rule():
    cfg = load_config(overrides=[
        "phase2.imitate=idm", "env.suite=['env.scenario=ring baselines.idm.headway=3', "
                              "'env.scenario=merge phase2.imitate=follower_stopper']"])
    rules = [train_rl.imitated(cfg, seed) for seed in (4, 5)]
    assert [rule.args[1] for rule in rules] == [BASELINES["idm"], BASELINES["follower_stopper"]]
    assert rules[0].keywords["headway"] == 3


def test_who_is_corrected_drives_itself(scenarios):
    """The commands are the policy's without noise, whatever noise is given; the choices stay the rule's."""
    cfg = Config()
    cfg.model.preset, cfg.env.warmup_s, cfg.env.max_vehicles = "small", 120.0, 200
    cfg.phase2.imitate_iterations, cfg.phase2.imitate_corrections = 2, 3
    model = TrafficModel(cfg)
    with make_pool(cfg, 0, 2, scenarios) as pool:
        pool.reset([1, 2])
        collector = SimpleNamespace(pool=pool, seeds=range(pool.num_envs))
        drivers = [train_rl.make_driver(cfg, model, collector, CPU, contextlib.nullcontext,
                                        train_rl.part_of_rule(cfg.phase2, i)) for i in range(6)]
        observation = {key: pool.arrays[key].copy() for key in pool.final}
        noise = torch.rand(2, 5 * K + 200), torch.randn(2, K)
        (ruled, by_rule), (labelled, by_policy) = (
            driver.decide(driver.perceive(observation, [0, 1]), noise) for driver in (drivers[1], drivers[2]))
        _, alone = drivers[5].decide(drivers[5].perceive(observation, [0, 1]))
    assert [(type(d).__name__, getattr(d, "corrects", None)) for d in drivers] == (
        [("RuleDriver", False)] * 2 + [("RuleDriver", True)] * 3 + [("Driver", None)])
    for name, value in ruled.items():
        torch.testing.assert_close(labelled[name], value)
    for name, value in by_policy.items():
        np.testing.assert_array_equal(value, alone[name])
    assert not np.array_equal(by_policy["slot"], by_rule["slot"])


# ---- learning ----------------------------------------------------------------------------------------------------

def likelihood(controller, rollout):
    """Log-likelihood of all stored picks, and of the release of those next in line."""
    batch = Minibatches(rollout, train_rl.LEARN, CPU)(np.arange(rollout.steps * E))
    candidates, place = batch["candidates"].float(), batch["place"]
    scores = controller.influence(candidates)[place].masked_fill(place == 0, -torch.inf)
    chosen = with_runners_up(scores, stored_choice(batch))
    picked = candidates[place.gather(1, chosen["picks"])]
    each = controller.evaluate_picked(scores, picked, batch["scene"].float(), chosen)[0]
    return each.sum() - plackett_luce(scores, chosen["picks"], chosen["valid"])[chosen["release"]].sum()


def test_gradient_of_imitation_is_that_of_the_likelihood(small):
    """Advantages and old probabilities, which are not the rule's, must not matter."""
    ppo, rollout = config().phase2, rollout_of(small.controller)
    ppo.value_weight = ppo.cost_value_weight = ppo.entropy_weight = 0.0
    one, other = copy.deepcopy(small), copy.deepcopy(small)
    loss, log = PPOLoss(one, ppo)(Minibatches(rollout, train_rl.LEARN, CPU)(np.arange(rollout.steps * E)), 4.0, True)
    expected = -likelihood(other.controller, rollout) / 4.0
    loss.backward(), expected.backward()
    torch.testing.assert_close(loss, expected)
    assert log["loss_policy"] == loss and log["kl"] == 0 and log["clip_share"] == 0
    for (name, ours), theirs in zip(one.controller.named_parameters(), other.controller.parameters()):
        if theirs.grad is not None:  # the values' networks
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_lost_step_teaches_nothing(small):
    """Nothing was commanded there, so that all were taught to be released."""
    rollout, ppo = rollout_of(small.controller), config().phase2
    rollout.fixed["lost"][:], rollout.fixed["pick_valid"][:] = True, False
    loss, log = PPOLoss(small, ppo)(Minibatches(rollout, train_rl.LEARN, CPU)(np.arange(rollout.steps * E)), 4.0, True)
    assert log["loss_policy"] == 0 and log["picks"] == 0


def test_imitation_learns_the_choices_and_keeps_exploring(small, tmp_path):
    model, cfg = copy.deepcopy(small), config()
    model.freeze("risk_gnn", "world_model", "safety_shield")
    rollout, span = rollout_of(model.controller), train_rl.Span(E, ALONE)
    before, explore = likelihood(model.controller, rollout).item(), model.controller.log_std.item()
    progress = SimpleNamespace(model=model, counters={"epoch": 0, "updates": 0},
                               optimizer=torch.optim.Adam(model.controller.parameters(), 1e-3))
    for _ in range(5):
        train_rl.update(cfg, ALONE, span, progress, PPOLoss(model, cfg.phase2), rollout,
                        Precision(cfg.phase2.amp, CPU), Kept(tmp_path, 0, CPU))
    assert likelihood(model.controller, rollout).item() > before + 5
    assert model.controller.log_std.item() == explore


# ---- rollouts kept -------------------------------------------------------------------------------------------------

def test_kept_rollouts_come_back_and_the_oldest_go(small, tmp_path):
    """Those of a run that went on with another number of ranks stayed for ever."""
    kept, rollout = Kept(tmp_path / "kept-0-of-1", 2, CPU), rollout_of(small.controller)
    minibatches, steps = Minibatches(rollout, train_rl.LEARN, CPU), rollout.steps * E
    for iteration in range(4):
        assert len(kept.before(iteration, steps)) == min(iteration, 2)
        kept.add(iteration, minibatches)
    assert len(kept.before(2, steps)) == 2  # whoever continues from a checkpoint there finds what was there
    kept.trim(4)
    assert len(list(tmp_path.rglob("*.pt"))) == 2 and kept.before(4, steps + 1) == []
    rows = np.array([3, 0, 5])
    again, first = kept.before(4, steps)[0](rows), minibatches(rows)
    assert again.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(again[name], value), name
    Kept(tmp_path / "kept-1-of-2", 2, CPU).add(0, minibatches)
    (tmp_path / "phase2").mkdir()
    kept.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["phase2"]


def test_what_cannot_be_kept_or_read_is_named(small, tmp_path, monkeypatch):
    kept, minibatches = Kept(tmp_path, 1, CPU), Minibatches(rollout_of(small.controller), train_rl.LEARN, CPU)
    kept.add(0, minibatches)
    path, = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="00000.pt: a kept rollout .* cannot be read: .*remove the file"):
        kept.before(1, 1)

    def full(content, path):
        path.write_bytes(b"part")
        raise RuntimeError("no space left")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SpillError, match="00007.pt: .* could not be kept: no space left; free some space, or lower"):
        kept.add(7, minibatches)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_each_step_learns_from_an_earlier_rollout_too(small, tmp_path):
    """From the newest alone, the policy was now too meek, now too bold: what traffic without jams taught it, it had
    forgotten after an iteration with jams."""
    rollouts, learned = [rollout_of(small.controller, seed=seed) for seed in (1, 2, 2, 2)], []
    for most in (0, 3):
        cfg, model, kept = config(), copy.deepcopy(small), Kept(tmp_path, most, CPU)
        model.freeze("risk_gnn", "world_model", "safety_shield")
        optimizer = torch.optim.Adam(model.controller.parameters(), 1e-3)
        for epoch, rollout in enumerate(rollouts):
            progress = SimpleNamespace(model=model, counters={"epoch": epoch, "updates": 0}, optimizer=optimizer)
            train_rl.update(cfg, ALONE, train_rl.Span(E, ALONE), progress, PPOLoss(model, cfg.phase2), rollout,
                            Precision(cfg.phase2.amp, CPU), kept)
        learned.append(likelihood(model.controller, rollouts[0]).item())
    assert learned[1] > learned[0] + 1


def test_a_step_from_two_rollouts_is_their_mean(small, tmp_path, monkeypatch):
    shares, step = [], train_rl.counted_step
    monkeypatch.setattr(train_rl, "counted_step", lambda p, m, parts, *rest: shares.append(
        [share / sum(len(one["scene"]) for one, _, _ in parts) for _, share, _ in parts]) or step(p, m, parts, *rest))
    model, kept = copy.deepcopy(small), Kept(tmp_path, 1, CPU)
    model.freeze("risk_gnn", "world_model", "safety_shield")
    for epoch in range(2):
        progress = SimpleNamespace(model=model, counters={"epoch": epoch, "updates": 0},
                                   optimizer=torch.optim.SGD(model.controller.parameters(), 1e-4))
        train_rl.update(config(), ALONE, train_rl.Span(E, ALONE), progress, PPOLoss(model, config().phase2),
                        rollout_of(model.controller), Precision(config().phase2.amp, CPU), kept)
    assert shares[0] == [1.0] and shares[-1] == [1.0, 1.0]  # a sum over all control steps, divided by their number


def test_phase_2_begins_with_the_exploration_asked_for(tmp_path):
    cfg = load_config("configs/smoke.yaml", ["run.device=cpu", f"run.folder={tmp_path}", "phase2.exploration=0.3"])
    progress, _ = train_rl.learner(cfg, ALONE, tmp_path)
    assert progress.model.controller.log_std.exp().item() == pytest.approx(0.3)
