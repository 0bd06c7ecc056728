"""The learning rate over a training."""
import math


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
    if 0 < p.plateau_epochs <= c["plateau_wait"]:
        c.update(plateau_wait=0, lr_factor=c["lr_factor"] * p.plateau_factor)


def set_learning_rate(optimizer, value):
    """The same rate for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = value
