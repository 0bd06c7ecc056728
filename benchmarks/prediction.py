"""Simple predictions of traffic, and scores of predictions. Axis letters: F frames, N vehicles, H horizon.

An episode is a dictionary of tensors: speed and lead [F, N] (slot of the leader, -1 = none), surround [F, N, 14], and
what happened, states [F, N, H, 2] (displacement m, speed m/s) and valid [F, N, H].
"""
import numpy as np
import torch

from env.graph import SURROUND

IDM_RANGES = {"v0": (15, 40), "T": (0.5, 2.5), "a": (0.3, 3), "b": (0.5, 6), "s0": (1, 5)}
LEAD_GAP, LEAD_SPEED = SURROUND.index("lead_gap"), SURROUND.index("lead_speed")


# ---- rules -------------------------------------------------------------------------------------------------------

def constant_acceleration(speed, accel, interval, horizon):
    """Displacement and speed [..., H, 2] at constant acceleration until the vehicle stands."""
    t, speed, accel = interval * torch.arange(1, horizon + 1), speed[..., None], accel[..., None]
    moving = torch.where(accel < 0, torch.minimum(t, speed / (-accel).clamp(min=1e-6)), t)
    return torch.stack([speed * moving + accel * moving ** 2 / 2, (speed + accel * moving).clamp(min=0)], -1)


def idm(episode, p, interval, horizon, parts=4):
    """Displacement and speed [F, N, H, 2] by the Intelligent Driver Model, `parts` steps per control interval. Leaders
    move by the same model; the end of a lane stands still; who has no leader drives freely."""
    v, lead, gap = episode["speed"], episode["lead"], episode["surround"][..., LEAD_GAP]
    follows, x, out = lead >= 0, torch.zeros_like(v), []
    free = ~follows & (episode["surround"][..., LEAD_SPEED] > 0)
    dt, at = interval / parts, lead.clamp(min=0)
    for step in range(1, parts * horizon + 1):
        lead_x, lead_v = (torch.where(follows, y.gather(1, at), 0.0) for y in (x, v))
        wanted = p["s0"] + (v * p["T"] + v * (v - lead_v) / (2 * (p["a"] * p["b"]) ** 0.5)).clamp(min=0)
        interaction = torch.where(free, 0.0, (wanted / (gap + lead_x - x).clamp(min=0.1)) ** 2)
        accel = (p["a"] * (1 - (v / p["v0"]) ** 4 - interaction)).clamp(min=-9)
        faster = (v + accel * dt).clamp(min=0)
        x, v = x + (v + faster) / 2 * dt, faster
        if step % parts == 0:
            out.append(torch.stack([x, v], -1))
    return torch.stack(out, 2)


def fit_idm(episodes, interval, horizon, draws=300):
    """IDM parameters with the smallest position error H steps ahead in dense traffic, by random search."""
    rng, best = np.random.default_rng(0), (np.inf, None)
    some = [{name: x[::10] for name, x in e.items()} for e in episodes]
    for _ in range(draws):
        p = {name: float(np.exp(rng.uniform(*np.log(limits)))) for name, limits in IDM_RANGES.items()}
        error = pool([errors(idm(e, p, interval, horizon), e, e["dense"]) for e in some])[f"position_{horizon}"]
        best = min(best, (error, p), key=lambda pair: pair[0])
    return best[1]


# ---- scores ------------------------------------------------------------------------------------------------------

def errors(predicted, episode, where):
    """{quantity_h: (sum of squares, count)} over the valid targets inside `where` [F, N], after h = 1 to H steps."""
    out = {}
    for h in range(predicted.shape[2]):
        keep = episode["valid"][..., h] & where
        error = (predicted[..., h, :] - episode["states"][..., h, :])[keep].double()
        for i, quantity in enumerate(("position", "speed")):
            out[f"{quantity}_{h + 1}"] = (float(error[:, i].square().sum()), int(keep.sum()))
    return out


def pool(parts):
    """{quantity: root of the mean square over several episodes}."""
    return {name: (sum(p[name][0] for p in parts) / max(sum(p[name][1] for p in parts), 1)) ** 0.5 for name in parts[0]}


def roc_area(score, label):
    """Area under the ROC curve (Mann-Whitney, ties count half); NaN when there is only one class."""
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank, positive = np.cumsum(counts) - (counts - 1) / 2, int(label.sum())
    if not 0 < positive < len(label):
        return float("nan")
    return float((rank[inverse][label].sum() - positive * (positive + 1) / 2) / (positive * (len(label) - positive)))


def calibration_error(probability, label, bins=10):
    """Expected calibration error: mean distance of predicted and observed frequency over equally wide bins."""
    which = np.minimum((probability * bins).astype(int), bins - 1)
    return float(sum(abs(probability[which == b].sum() - label[which == b].sum()) for b in range(bins)) / len(label))


def reliability(probability, label, edges=np.geomspace(1e-4, 1, 13)):
    """[(mean probability, observed frequency, count)] of the predictions between neighbouring edges, which are spaced
    by factors because conflicts are rare."""
    which, points = np.digitize(probability, edges), []
    for b in np.unique(which):
        inside = which == b
        points.append((float(probability[inside].mean()), float(label[inside].mean()), int(inside.sum())))
    return points
