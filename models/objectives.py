"""The equations, as pure functions of tensors: no configuration, no device, no rank. Tests import exactly these."""
import itertools

import torch
import torch.nn.functional as F


def gae(rewards, values, next_values, terminated, ended, gamma, lam):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), all tensors [T, E].

    `next_values[t]` is V of the state that really followed (the last state of an episode, not the first of the next).
    `terminated` cuts the bootstrap; `ended` (terminated or truncated) cuts the sum. Returns (advantages, returns).
    """
    delta = rewards + gamma * next_values * ~terminated - values
    advantages, running = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        running = delta[t] + gamma * lam * running * ~ended[t]
        advantages[t] = running
    return advantages, advantages + values


def ppo_loss(log_prob, old_log_prob, advantage, valid, clip, count):
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with one ratio per pick.

    log_prob, old_log_prob, valid [B, K]; advantage [B]; `count` is the number of steps that the sum is divided by
    (global count / ranks under DDP). Returns (loss, KL estimate (r - 1) - log r, picks whose ratio left the clip range,
    picks), each summed over the picks and divided by `count`.
    """
    log_ratio = torch.where(valid, log_prob - old_log_prob, 0.0)
    ratio, gain = log_ratio.exp(), advantage[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    loss = -torch.where(valid, surrogate, 0.0).sum() / count
    with torch.no_grad():
        outside = (ratio - 1).abs() > clip
        return loss, (ratio - 1 - log_ratio).sum() / count, outside.sum() / count, valid.sum() / count


def normalise(advantage, mean, std):
    """Advantages with the moments of all ranks."""
    return (advantage - mean) / (std + 1e-8)


def rollout_advantages(rollout, gamma, lam):
    """GAE of reward and cost of a rollout ({name: tensor [T, E]}): (advantage, return, cost return).

    A lost step ends its episode as expected: what came before it is worth what the values say, and itself teaches
    nothing.
    """
    lost = rollout["lost"]
    (advantage, returns), (_, cost_returns) = (
        gae(torch.where(lost, rollout[value], rollout[name]), rollout[value], rollout[f"next_{value}"],
            rollout["terminated"] | lost, rollout["ended"], gamma, lam)
        for name, value in (("reward", "value"), ("cost", "cost_value")))
    return advantage, returns, cost_returns


def dual_ascent(multiplier, cost, limit, rate, maximum):
    """One step of the Lagrange multiplier: up while cost > limit, down below it, clamped to [0, maximum]."""
    return min(max(multiplier + rate * (cost - limit), 0.0), maximum)


def pid_multiplier(integral, cost, last_cost, limit, rate, proportional, derivative, maximum):
    """PID control of the Lagrange multiplier (Stooke et al. 2020, alg. 2): (multiplier, integral) in [0, maximum].

    The integral is `dual_ascent`'s multiplier; with `proportional` = `derivative` = 0 nothing else is. A rising cost
    (`last_cost` is that of the epoch before) is answered at once, a falling one is not rewarded.
    """
    integral = dual_ascent(integral, cost, limit, rate, maximum)
    push = proportional * (cost - limit) + derivative * max(cost - last_cost, 0.0)
    return min(max(integral + push, 0.0), maximum), integral


def move_multiplier(counters, cost, icvs, limit, epochs, p):
    """Move counters["multiplier"] by C_int over the last `epochs` epochs, in which each environment drives a whole
    episode: one epoch sees a part of it, in which commands cost more or less than in others, in all environments at
    once. `cost` is the epoch's C_int, effort by ICVs present: so is the episode's, and an epoch counts by the mean
    number of `icvs` in it. `p` is configs.Phase3Config."""
    c = counters
    c["efforts"], c["icvs"] = [*c["efforts"], cost * icvs][-epochs:], [*c["icvs"], icvs][-epochs:]
    mean = sum(c["efforts"]) / (sum(c["icvs"]) or 1.0)
    c["multiplier"], c["integral"] = pid_multiplier(c["integral"], mean, c["last_cost"], limit, p.multiplier_lr,
                                                    p.multiplier_proportional, p.multiplier_derivative,
                                                    p.multiplier_max)
    c["last_cost"] = mean


def limit_at(epoch, start, end, epochs):
    """Curriculum of the cost limit: linear from `start` to `end` over `epochs`, then constant."""
    return start + (end - start) * min(epoch / max(epochs, 1), 1.0)


def motion_targets(moved, speed, present, fresh, conflict, horizon):
    """What the world model should have said, from a series of T + H control steps (H = `horizon`).

    moved (m since the step before), speed (m/s) [B, T + H, N]; present, fresh, conflict bool of the same shape.
    Returns (states [B, T, N, H, 2] displacement and speed, valid [B, T, N, H], conflicts [B, T, N, H] float). A target
    is valid while the same vehicle stays in the slot.
    """
    later = lambda x: x[:, 1:].unfold(1, horizon, 1)  # noqa: E731  [B, T, N, H]: its values in the next H steps
    so_far = lambda x, what: torch.stack(list(itertools.accumulate(later(x).unbind(-1), what)), -1)  # noqa: E731
    valid = so_far(present & ~fresh, torch.logical_and) & present[:, :moved.shape[1] - horizon, :, None]
    return torch.stack([so_far(moved, torch.add), later(speed)], -1), valid, later(conflict).float()


def within_horizon(conflicts, valid):
    """Append "in any of the H steps" to conflicts and valid [..., H] -> both [..., H + 1].

    It is known when all steps are, or as soon as a known one has a conflict.
    """
    any_step = (conflicts * valid).amax(-1, keepdim=True)
    return torch.cat([conflicts, any_step], -1), torch.cat([valid, valid.all(-1, keepdim=True) | (any_step > 0)], -1)


def state_loss(predicted, target, valid, count):
    """Huber loss (delta 1) of displacement m and speed m/s, step h weighted 1/h^2, over `count` valid items.

    Unforeseen accelerations displace by half a h^2: with these weights the first steps count as much as the last.
    predicted, target [..., H, 2], valid [..., H].
    """
    weight = 1.0 / torch.arange(1, target.shape[-2] + 1, device=target.device) ** 2
    loss = F.huber_loss(predicted, target, reduction="none").sum(-1) * weight
    return torch.where(valid, loss, 0.0).sum() / count


def conflict_loss(logits, target, valid, count):
    """Binary cross entropy of conflicts, [..., H], over `count` valid items."""
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    return torch.where(valid, loss, 0.0).sum() / count
