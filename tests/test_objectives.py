"""models/objectives.py against plain loops: advantages, PPO's surrogate, the multiplier, the world model's losses."""
import math

import pytest
import torch

from configs.phases import Phase3Config
from models import objectives
from models.losses import ConstrainedLoss

BEFORE = {"last_cost": math.inf, "efforts": [], "icvs": []}  # counters of a phase 3 that begins
GAMMA, LAMBDA, CLIP, HORIZON = 0.97, 0.9, 0.2, 3


def rollout(ended_by, steps=9, envs=4):
    """Random rewards and values [T, E]; every environment ends once, at another step, in the way `ended_by` says."""
    torch.manual_seed(0)
    rewards, values, next_values = torch.randn(3, steps, envs)
    hit = torch.zeros(steps, envs, dtype=torch.bool)
    for env in range(envs):
        hit[2 + env, env] = ended_by != "nothing"
    next_values[:-1] = torch.where(hit[:-1], next_values[:-1], values[1:])  # where one ended, another begins
    return rewards, values, next_values, hit & (ended_by == "termination"), hit


def naive_gae(rewards, values, next_values, terminated, ended):
    """The definition: A_t is the sum over l of (gamma lambda)^l delta_(t+l), up to the end of the episode."""
    steps, envs = rewards.shape
    result = torch.zeros(steps, envs)
    for env in range(envs):
        for t in range(steps):
            for later in range(t, steps):
                following = 0.0 if terminated[later, env] else GAMMA * next_values[later, env]
                delta = rewards[later, env] + following - values[later, env]
                result[t, env] += (GAMMA * LAMBDA) ** (later - t) * delta
                if ended[later, env]:
                    break
    return result


@pytest.mark.parametrize("ended_by", ["nothing", "termination", "truncation"])
def test_gae_is_its_definition(ended_by):
    case = rollout(ended_by)
    advantages, returns = objectives.gae(*case, GAMMA, LAMBDA)
    torch.testing.assert_close(advantages, naive_gae(*case))
    torch.testing.assert_close(returns, advantages + case[1])


def test_gae_bootstraps_truncated_episodes_only():
    """One step, reward 1, V = 0, V of the last state = 10."""
    one, no, yes = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool)
    truncated, _ = objectives.gae(one, one * 0, one * 10, no, yes, 0.5, 0.9)
    terminated, _ = objectives.gae(one, one * 0, one * 10, yes, yes, 0.5, 0.9)
    assert truncated.item() == 6.0 and terminated.item() == 1.0


def ppo_case():
    torch.manual_seed(1)
    new = torch.randn(6, 5, requires_grad=True)
    old = new.detach() + 0.4 * torch.randn(6, 5)
    valid = torch.rand(6, 5) > 0.4
    valid[0] = False
    return new, old, torch.randn(6) * 3, valid


def test_ppo_loss_is_its_definition():
    new, old, advantage, valid = ppo_case()
    loss, kl, clipped, many = objectives.ppo_loss(new, old, advantage, valid, CLIP, 7.0)
    total, divergence, outside, picks = 0.0, 0.0, 0, 0
    for b in range(6):
        for k in range(5):
            if valid[b, k]:
                log_ratio = (new[b, k] - old[b, k]).item()
                ratio, gain = math.exp(log_ratio), advantage[b].item()
                total -= min(ratio * gain, min(max(ratio, 1 - CLIP), 1 + CLIP) * gain) / 7.0
                divergence += ratio - 1 - log_ratio
                outside, picks = outside + (abs(ratio - 1) > CLIP), picks + 1
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert kl.item() == pytest.approx(divergence / 7, rel=1e-5) and many.item() == pytest.approx(picks / 7)
    assert clipped.item() == pytest.approx(outside / 7) and 0 < outside < picks < valid.numel()


def test_ppo_loss_at_the_old_policy():
    """Ratio 1: the loss is minus the advantage per valid pick, its gradient -A / count, and nothing is clipped."""
    new, _, advantage, valid = ppo_case()
    loss, kl, clipped, _ = objectives.ppo_loss(new, new.detach(), advantage, valid, CLIP, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(-(advantage * valid.sum(1)).sum().item() / 2, rel=1e-5)
    torch.testing.assert_close(new.grad, -advantage[:, None] * valid / 2)
    assert kl == 0 and clipped == 0


@pytest.mark.parametrize("junk", [math.inf, -math.inf, math.nan, 1e30])
def test_invalid_picks_contribute_nothing(junk):
    """Whatever stands in the entries of nobody, loss, KL, clip count and gradients stay as they are."""
    new, old, advantage, valid = ppo_case()
    expected = objectives.ppo_loss(new, old, advantage, valid, CLIP, 7.0)
    expected[0].backward()
    dirty = new.detach().masked_fill(~valid, 3.0).requires_grad_()
    result = objectives.ppo_loss(dirty, old.masked_fill(~valid, junk), advantage, valid, CLIP, 7.0)
    result[0].backward()
    for ours, theirs in zip(result, expected):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(dirty.grad, new.grad)


def test_nobody_picked_gives_zeros():
    new = torch.randn(3, 2, requires_grad=True)
    nobody = torch.zeros(3, 2, dtype=torch.bool)
    loss, *others = objectives.ppo_loss(new, torch.randn(3, 2), torch.ones(3), nobody, CLIP, 1.0)
    loss.backward()
    assert loss == 0 and not any(others) and (new.grad == 0).all()


def test_clipped_picks_get_no_gradient_beyond_the_clip_and_full_gradient_back():
    """A > 0 and ratio above 1 + clip: no gradient. A < 0 at the same ratio: the gradient pulls it back."""
    new = torch.tensor([[0.5], [0.5]], requires_grad=True)
    valid, gain = torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, -1.0])
    loss, *_ = objectives.ppo_loss(new, torch.zeros(2, 1), gain, valid, CLIP, 1.0)
    loss.backward()
    assert new.grad[0] == 0 and new.grad[1].item() == pytest.approx(math.exp(0.5))


def test_normalise():
    reward = torch.tensor([1.0, 2.0, 4.0])
    torch.testing.assert_close(objectives.normalise(reward, 2.0, 0.5), torch.tensor([-2.0, 0.0, 4.0]))
    assert torch.isfinite(objectives.normalise(torch.ones(3), 1.0, 0.0)).all()


def test_dual_ascent_follows_the_cost_and_stays_in_its_range():
    up = objectives.dual_ascent(1.0, 0.3, 0.1, 5.0, 20.0)
    down = objectives.dual_ascent(1.0, 0.05, 0.1, 5.0, 20.0)
    assert up == pytest.approx(2.0) and down == pytest.approx(0.75)
    assert objectives.dual_ascent(1.0, 0.1, 0.1, 5.0, 20.0) == 1.0
    assert objectives.dual_ascent(0.1, 0.0, 0.5, 5.0, 20.0) == 0.0
    assert objectives.dual_ascent(19.9, 9.0, 0.1, 5.0, 20.0) == 20.0


def test_pid_without_its_gains_is_dual_ascent_and_with_them_answers_at_once():
    costs, plain, integral, last = [0.3, 0.2, 0.25, 0.05, 0.0, 0.4], 1.0, 1.0, math.inf
    for cost in costs:
        multiplier, integral = objectives.pid_multiplier(integral, cost, last, 0.1, 5.0, 0.0, 0.0, 20.0)
        plain, last = objectives.dual_ascent(plain, cost, 0.1, 5.0, 20.0), cost
        assert multiplier == integral == plain
    assert objectives.pid_multiplier(1.0, 0.3, 0.2, 0.1, 5.0, 4.0, 7.0, 20.0) == pytest.approx((2.0 + 0.8 + 0.7, 2.0))
    assert objectives.pid_multiplier(1.0, 0.3, 0.4, 0.1, 5.0, 4.0, 7.0, 20.0) == pytest.approx((2.8, 2.0))  # no reward
    assert objectives.pid_multiplier(1.0, 0.3, math.inf, 0.1, 5.0, 0.0, 7.0, 20.0) == pytest.approx((2.0, 2.0))
    assert objectives.pid_multiplier(0.1, 0.0, 0.0, 0.5, 5.0, 4.0, 7.0, 20.0) == (0.0, 0.0)
    assert objectives.pid_multiplier(19.0, 9.0, 0.0, 0.1, 5.0, 4.0, 7.0, 20.0) == (20.0, 20.0)


def test_multiplier_follows_the_cost_of_whole_episodes():
    """It followed that of the last epoch: where three epochs make an episode and its middle third is the dearest, the
    multiplier of a policy exactly at the limit swung by a third of what it is worth, with the clock alone."""
    p, c = Phase3Config(multiplier_lr=1000.0), dict(multiplier=500.0, integral=500.0, **BEFORE)
    multipliers = []
    for cost in [0.1, 0.3, 0.2] * 4:
        objectives.move_multiplier(c, cost, 30.0, 0.2, 3, p)
        multipliers.append(c["multiplier"])
    assert multipliers[2:] == pytest.approx([400.0] * 10) and c["last_cost"] == pytest.approx(0.2)
    objectives.move_multiplier(c, 0.5, 30.0, 0.2, 1, p)
    assert c["multiplier"] == pytest.approx(700.0) and c["icvs"] == [30.0]  # an epoch that holds whole episodes


def test_the_cost_of_an_episode_is_its_effort_by_its_icvs_not_the_mean_of_its_parts():
    """Of an episode that jams, driven in three epochs, it was half as high again as C_int: parts with few ICVs counted
    as much as those with many."""
    p, c = Phase3Config(multiplier_lr=1000.0), dict(multiplier=0.0, integral=0.0, **BEFORE)
    for effort, icvs in ((30.0, 20.0), (10.0, 40.0), (0.0, 60.0)):  # of a step, in each part of the episode
        objectives.move_multiplier(c, effort / icvs, icvs, 0.2, 3, p)
    assert c["last_cost"] == pytest.approx(40 / 120) and (1.5 + 0.25) / 3 > 1.5 * c["last_cost"]
    objectives.move_multiplier(c, 0.0, 0.0, 0.2, 1, p)  # nobody is connected
    assert c["last_cost"] == 0.0


def test_limit_falls_linearly_and_then_stays():
    limits = [objectives.limit_at(epoch, 0.2, 0.05, 60) for epoch in range(101)]
    assert limits[0] == 0.2 and limits[30] == pytest.approx(0.125)
    assert limits[60:] == pytest.approx([0.05] * 41)
    assert limits[:61] == sorted(limits[:61], reverse=True)
    assert objectives.limit_at(0, 0.2, 0.05, 0) == 0.2  # no division by zero


# Who sits in which slot: steps downwards, slots across, 0 = nobody. Slot 0 keeps its vehicle; in slot 1 vehicle 2
# leaves and comes back; in slot 2 vehicle 3 is replaced at once by 4; in slot 3 vehicle 5 appears late; slot 4 stays
# empty.
WHO = torch.tensor([[1, 2, 3, 0, 0],
                    [1, 2, 3, 0, 0],
                    [1, 0, 3, 0, 0],
                    [1, 2, 4, 5, 0],
                    [1, 2, 4, 5, 0],
                    [1, 2, 4, 5, 0],
                    [1, 2, 0, 5, 0],
                    [1, 2, 6, 5, 0]])


def series():
    """The slots' series as the environment reports it, and each vehicle's true position [steps, vehicle]."""
    torch.manual_seed(2)
    position = torch.rand(len(WHO), 7).cumsum(0) * 10
    speed, conflict = torch.rand(1, *WHO.shape) * 20, torch.rand(1, *WHO.shape) > 0.5
    present, before = WHO > 0, torch.cat([torch.zeros_like(WHO[:1]), WHO[:-1]])
    fresh = present & (WHO != before)
    moved = position.gather(1, WHO) - torch.cat([position[:1], position[:-1]]).gather(1, WHO)
    moved[fresh | ~present] = 0.0
    return position, moved[None], speed, present[None], fresh[None], conflict


def test_motion_targets_follow_one_vehicle():
    position, moved, speed, present, fresh, conflict = series()
    states, valid, conflicts = objectives.motion_targets(moved, speed, present, fresh, conflict, HORIZON)
    steps, slots = len(WHO) - HORIZON, WHO.shape[1]
    assert states.shape == (1, steps, slots, HORIZON, 2)
    counted = 0
    for t in range(steps):
        for slot in range(slots):
            who = WHO[t, slot]
            for h in range(1, HORIZON + 1):
                stays = bool(who > 0) and all(WHO[t + i, slot] == who for i in range(1, h + 1))
                assert bool(valid[0, t, slot, h - 1]) == stays, (t, slot, h)
                if stays:
                    counted += 1
                    expected = torch.stack([position[t + h, who] - position[t, who], speed[0, t + h, slot]])
                    torch.testing.assert_close(states[0, t, slot, h - 1], expected)
                    assert conflicts[0, t, slot, h - 1] == conflict[0, t + h, slot]
    assert 20 < counted < steps * slots * HORIZON  # the case has both


def test_motion_targets_separate_the_samples_of_a_batch():
    _, *one = series()
    other = [x.flip(2) for x in one]
    both = objectives.motion_targets(*(torch.cat(pair) for pair in zip(one, other)), HORIZON)
    for whole, alone in zip(both, objectives.motion_targets(*other, HORIZON)):
        torch.testing.assert_close(whole[1:], alone)


def huber(x):
    return 0.5 * x * x if abs(x) <= 1 else abs(x) - 0.5


def test_state_loss_is_its_definition():
    torch.manual_seed(3)
    predicted, target = 3 * torch.randn(2, 4, HORIZON, 2), torch.randn(2, 4, HORIZON, 2)
    valid = torch.rand(2, 4, HORIZON) > 0.5
    expected = sum(huber((predicted - target)[b, n, h, c].item()) / (h + 1) ** 2 for b in range(2) for n in range(4)
                   for h in range(HORIZON) for c in range(2) if valid[b, n, h])
    assert objectives.state_loss(predicted, target, valid, 5.0).item() == pytest.approx(expected / 5, rel=1e-5)


def test_conflict_loss_is_its_definition():
    torch.manual_seed(4)
    logits, target = 3 * torch.randn(2, 4, HORIZON), (torch.rand(2, 4, HORIZON) > 0.5).float()
    valid = torch.rand(2, 4, HORIZON) > 0.5
    expected = 0.0
    for index in valid.nonzero().tolist():
        p = 1 / (1 + math.exp(-logits[tuple(index)].item()))
        expected -= math.log(p if target[tuple(index)] else 1 - p)
    assert objectives.conflict_loss(logits, target, valid, 5.0).item() == pytest.approx(expected / 5, rel=1e-5)


def test_losses_ignore_the_targets_of_nobody():
    """Not even infinite targets outside the mask reach the loss or a gradient."""
    predicted = torch.randn(4, HORIZON, 2, requires_grad=True)
    logits = torch.randn(4, HORIZON, requires_grad=True)
    valid = torch.zeros(4, HORIZON, dtype=torch.bool)
    loss = objectives.state_loss(predicted, torch.full((4, HORIZON, 2), 1e30), valid, 1.0) + objectives.conflict_loss(
        logits, torch.full((4, HORIZON), 1e30), valid, 1.0)
    loss.backward()
    assert loss == 0 and (predicted.grad == 0).all() and (logits.grad == 0).all()


def test_only_icvs_whose_whole_horizon_is_known_teach_the_risk_head():
    """One known step without a conflict counted as "no conflict in any"; a known conflict is enough."""
    known = torch.tensor([[[[True, True], [True, False], [True, False], [False, False]]]])
    conflicts = torch.tensor([[[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]])
    batch = {"advantage": torch.zeros(1, 1), "target_valid": known, "conflicts": conflicts,
             "icv": torch.ones(1, 1, 4, dtype=torch.bool)}
    assert [int(n) for n in ConstrainedLoss.counts(batch)] == [1, 4, 2]
