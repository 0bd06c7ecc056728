"""Learning rates and the Lagrange multiplier over a training."""
import math

from models.objectives import pid_multiplier


def learning_rate(step, total, peak, warmup, floor=0.05):
    """Linear warm-up over `warmup` steps, then cosine decay to `floor` of the peak at `total`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min((step - warmup) / max(total - warmup, 1), 1.0)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))


def reduce_on_plateau(counters, stage, loss, p):
    """Multiply counters["lr_factor"] when the loss of this stage has not improved for p.plateau_epochs epochs.

    `counters` remember the best loss of the stage and the epochs since; `p` is configs.Phase1Config.
    """
    c = counters
    if stage != c["plateau_stage"] or loss < c["plateau_best"]:
        c.update(plateau_stage=stage, plateau_best=loss, plateau_wait=0)
        return
    c["plateau_wait"] += 1
    if c["plateau_wait"] == p.plateau_epochs:
        c.update(plateau_wait=0, lr_factor=c["lr_factor"] * p.plateau_factor)


def move_multiplier(counters, cost, limit, epochs, p):
    """Move counters["multiplier"] by the mean `cost` of the last `epochs` epochs, over which each environment drives a
    whole episode: one epoch sees a part of it, in which commands cost more or less than in others, in all environments
    at once. `p` is configs.Phase3Config."""
    c = counters
    c["costs"] = [*c["costs"], cost][-epochs:]
    mean = sum(c["costs"]) / len(c["costs"])
    c["multiplier"], c["integral"] = pid_multiplier(c["integral"], mean, c["last_cost"], limit, p.multiplier_lr,
                                                    p.multiplier_proportional, p.multiplier_derivative,
                                                    p.multiplier_max)
    c["last_cost"] = mean


def set_learning_rate(optimizer, value):
    """The same rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = value
