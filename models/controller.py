"""Influence-driven controller: who is commanded (Top-K as part of the policy), what, and what that is worth."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from models.presets import Normalizer, mlp
from models.risk_gnn import NODE_FEATURES

ACCEL_CENTRE, ACCEL_RANGE = -0.5, 2.5     # acceleration = centre + range * tanh(u): [-3, 2] m/s^2
LEFT, KEEP, RIGHT = 0, 1, 2
LANE_CHANGE = 5.0                         # effort of a lane-change command; of an acceleration: its size in m/s^2
SURROUND_FEATURES, GLOBAL_FEATURES = 14, 16
FREE_SPEED = 40.0                         # speed of "nobody there", m/s, as in the surroundings
DOWNSTREAM = (0.1, 0.33)                  # how far ahead traffic is summarised, shares of the longest way to the exit
OWN_FEATURES = len(DOWNSTREAM) + NODE_FEATURES + SURROUND_FEATURES
HAS_LEFT, HAS_RIGHT = 10, 11              # columns of a vehicle's surroundings
SURROUND_MEAN = [60, 20, 60, 20, 60, 20, 60, 20, 60, 20, 0, 0, 250, 5]
SURROUND_STD = [60, 10, 60, 10, 60, 10, 60, 10, 60, 10, 1, 1, 200, 5]
SIDE_GAPS = slice(2, 10, 2)               # (front, rear) left, right
GLOBAL_MEAN = [4.5, 3, 18, 6, 5, 0.4, 0.6, 5, 40, 0.2, 0.2, 20, 1, 1, 1, 0.5]
GLOBAL_STD = [1, 1, 8, 4, 6, 0.2, 0.4, 5, 30, 0.2, 0.2, 20, 1.5, 1, 1, 0.4]


def plackett_luce(scores, picks, valid):
    """Log-probability of each pick of an ordered selection without replacement (Plackett 1975, Luce 1959).

    scores [B, C] with -inf where there is no candidate, picks [B, K] indices, valid [B, K] -> [B, K], 0 where invalid.
    Pick j competes with all candidates that picks 0..j-1 left.
    """
    chosen = (picks[..., None] == torch.arange(scores.shape[1], device=picks.device)) & valid[..., None]  # [B, K, C]
    gone = chosen.cumsum(1) > chosen                                                 # taken before pick j
    rest = scores[:, None].masked_fill(gone, -torch.inf).masked_fill(~valid[..., None], 0.0)  # no NaN with nothing left
    return rest.log_softmax(-1).gather(2, picks[..., None])[..., 0].masked_fill(~valid, 0.0)


class ScaledValue(nn.Module):
    """A value network with de-normalised output, so that its loss has unit scale (PopArt, van Hasselt et al. 2016)."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.net = mlp(inputs, hidden, hidden, 1, final_gain=0.1)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(self, scene):
        """[B, S] -> [B] in real units."""
        return self.net(scene).squeeze(-1).float() * self.std + self.mean

    def rescale(self, mean, std):
        """Adopt new moments of the returns without changing any output."""
        last, std = self.net[-1], max(std, 1e-2)
        with torch.no_grad():
            last.weight.mul_(self.std / std)
            last.bias.mul_(self.std / std).add_((self.mean - mean) / std)
            self.mean.fill_(mean), self.std.fill_(std)

    def loss(self, scene, returns, count):
        """Half the squared error in normalised units, over `count` steps."""
        return 0.5 * (((self(scene) - returns) / self.std) ** 2).sum() / count


class Controller(nn.Module):
    """Heads on frozen features of the candidates [B, C, F] and of the scene [B, S]. `room_m`: see lane_choices."""

    def __init__(self, sizes, max_commands, room_m=0.0):
        super().__init__()
        self.room = (room_m - SURROUND_MEAN[2]) / SURROUND_STD[2] if room_m else -math.inf
        self.k, self.accel_limit, own = max_commands, math.inf, OWN_FEATURES  # nobody is told to accelerate more
        d, z = sizes.gnn_width, sizes.latent
        self.d, self.features, self.scene_features = d, d + 2 * z + own, 2 * d + 2 * z + GLOBAL_FEATURES
        self.surround, self.globals = Normalizer(SURROUND_MEAN, SURROUND_STD), Normalizer(GLOBAL_MEAN, GLOBAL_STD)
        self.importance = mlp(d + own, sizes.score_hidden, sizes.score_hidden, 1, final_gain=0.1)
        self.impact = mlp(2 * z + own, sizes.score_hidden, sizes.score_hidden, 1, final_gain=0.1)
        self.alpha, self.beta = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.trunk = mlp(self.features + self.scene_features, sizes.action_hidden, sizes.action_hidden)
        self.action = mlp(sizes.action_hidden, sizes.action_hidden, 6, final_gain=0.01)  # accel, 3 lanes, 2 gates
        self.log_std = nn.Parameter(torch.full((), -0.7))
        self.value = ScaledValue(self.scene_features, sizes.value_hidden)
        self.cost_value = ScaledValue(self.scene_features, sizes.value_hidden)

    def candidate_features(self, embedding, flow, risk, downstream, node, surround):
        """Each [..., width of the part] -> [..., F]; `downstream` of `downstream_speeds`, `node` normalised, `surround`
        as observed."""
        return torch.cat([embedding.float(), flow.float(), risk.float(), downstream / 10 - 2, node,
                          self.surround(surround)], -1)

    def scene_summary(self, embedding, flow, risk, mask, globals_):
        """Mean and maximum over the vehicles inside `mask` [..., N], and the global metrics -> [..., S]."""
        weight = mask[..., None].float()
        count = weight.sum(-2).clamp(min=1)
        means = [(x.float() * weight).sum(-2) / count for x in (embedding, flow, risk)]
        top = embedding.float().masked_fill(~mask[..., None], -10).amax(-2).clamp(min=-10)
        return torch.cat([*means, top, self.globals(globals_)], -1)

    def influence(self, candidates):
        """alpha * importance (GNN) + beta * predicted impact (world model) of candidates [..., F] -> [...]"""
        own = candidates[..., -OWN_FEATURES:]
        importance = self.importance(torch.cat([candidates[..., :self.d], own], -1))
        impact = self.impact(candidates[..., self.d:])
        return (self.alpha * importance + self.beta * impact).squeeze(-1).float()

    def scores(self, candidates, valid):
        """Influence of each candidate [B, C, F] -> [B, C], -inf where there is none."""
        return self.influence(candidates).masked_fill(~valid, -torch.inf)

    def heads(self, candidates, scene, lanes):
        """Action parameters of picked candidates [B, K, F]; lanes [B, K, 3] says which changes exist.

        Returns (mean of u [B, K], lane log-probabilities [B, K, 3], logits [B, K, 2] of release and of commanding the
        speed too).
        """
        x = self.trunk(torch.cat([candidates, scene[:, None].expand(-1, candidates.shape[1], -1)], -1))
        out = self.action(F.silu(x)).float()
        mean = out[..., 0] * 10 + math.atanh(-ACCEL_CENTRE / ACCEL_RANGE)  # starts at 0 m/s^2
        keep_bias = out.new_tensor([0.0, 2.0, 0.0])                       # lane changes start rare
        return mean, (out[..., 1:4] * 10 + keep_bias).masked_fill(~lanes, -1e4).log_softmax(-1), out[..., 4:] * 10

    def lane_choices(self, candidates):
        """Candidate features [..., F] -> [..., 3] which of left, keep, right exist and, with `room_m`, have gaps longer
        than that to both sides. (A driver told without room waits for a gap, and may be told again meanwhile.)"""
        surround = candidates[..., -SURROUND_FEATURES:]  # both flags are 0 or 1 after normalisation too
        gap = surround[..., SIDE_GAPS].half().unflatten(-1, (2, 2)).amin(-1)  # rounded as what is stored
        left, right = ((surround[..., HAS_LEFT:HAS_RIGHT + 1] > 0.5) & (gap > self.room)).unbind(-1)
        return torch.stack([left, torch.ones_like(left), right], -1)

    def values(self, scene):
        """(value, cost value), each [B], in units of reward and of cost."""
        return self.value(scene), self.cost_value(scene)

    def select(self, candidates, valid, scene, noise=None, scores=None):
        """Choose and command. Returns a dict of [B, K] tensors: picks, valid, u, lane, release, pace, log_prob.

        A released pick gets no command; one without `pace` a lane only, its driver keeps the speed. `noise` is (uniform
        [B, 5 * K + C or more], standard normal [B, K]); without it the choice is deterministic. `scores` [B, C], -inf
        where there is no candidate, replace the learned ones.
        """
        scores, k = self.scores(candidates, valid) if scores is None else scores, min(self.k, candidates.shape[1])
        if noise is not None:
            uniform, normal = noise
            lane_noise, gate, pick_noise = uniform.split([3 * self.k, 2 * self.k, uniform.shape[1] - 5 * self.k], 1)
        noisy = scores if noise is None else scores + gumbel(pick_noise[:, :scores.shape[1]])
        top, picks = noisy.topk(k, -1)  # Gumbel Top-K is a Plackett-Luce sample (Kool et al. 2019)
        pad, there = (0, self.k - k), torch.isfinite(top)
        chosen = {"picks": F.pad(picks * there, pad), "valid": F.pad(there, pad)}
        picked = take(candidates, chosen["picks"])
        mean, lane_logp, gates = self.heads(picked, scene, self.lane_choices(picked))
        if noise is None:
            chosen.update(u=mean, lane=lane_logp.argmax(-1))
            opened = gates > 0
        else:
            chosen.update(u=mean + self.log_std.exp() * normal,
                          lane=(lane_logp + gumbel(lane_noise).view_as(lane_logp)).argmax(-1))
            opened = gate.view_as(gates) < gates.sigmoid()
        chosen["release"], chosen["pace"] = opened.unbind(-1)
        chosen["log_prob"] = self._log_prob(scores, chosen, mean, lane_logp, gates)
        return chosen

    def evaluate(self, candidates, valid, scene, chosen):
        """(log-probability of each pick [B, K], entropy [B], expected effort [B]) of a stored choice under the present
        parameters."""
        return self.evaluate_picked(self.scores(candidates, valid), take(candidates, chosen["picks"]), scene, chosen)

    def evaluate_picked(self, scores, picked, scene, chosen):
        """The same from the scores [B, C] and the picked candidates [B, K, F]."""
        mean, lane_logp, gates = self.heads(picked, scene, self.lane_choices(picked))
        log_prob = self._log_prob(scores, chosen, mean, lane_logp, gates)
        entropy = self._entropy(scores, chosen["valid"], lane_logp, gates)
        return log_prob, entropy, self._effort(chosen["valid"], mean, lane_logp, gates)

    def divergence(self, reference, candidates, valid, scene, chosen):
        """KL(reference || self) of the first pick and of what the picks are told, [B]; no gradient in `reference`."""
        picked = take(candidates, chosen["picks"])
        lanes, scores = self.lane_choices(picked), self.scores(candidates, valid)
        mean, lane, gates = self.heads(picked, scene, lanes)
        with torch.no_grad():
            scores0, (mean0, lane0, gates0) = reference.scores(candidates, valid), reference.heads(picked, scene, lanes)
            released, pace = (open0 := gates0.sigmoid()).unbind(-1)
        gate, steady = ((F.binary_cross_entropy_with_logits(x, open0, reduction="none")) for x in (gates, gates0))
        release, speed = (gate - steady).unbind(-1)
        wider, there = self.log_std - reference.log_std, (mean - mean0) / self.log_std.exp()
        speed = speed + pace * (wider + 0.5 * ((-2 * wider).exp() + there ** 2 - 1))
        told = release + (1 - released) * (speed + (lane0.exp() * (lane0 - lane)).sum(-1))
        pick, pick0 = (x.masked_fill(~valid, -1e4).log_softmax(-1) for x in (scores, scores0))
        return (pick0.exp() * (pick0 - pick)).sum(-1) + torch.where(chosen["valid"], told, 0.0).sum(-1)

    def _log_prob(self, scores, chosen, mean, lane_logp, gates):
        """One log-probability per pick: being picked, released or not, and if not, the lane, and the speed or not."""
        release, pace = gates.unbind(-1)
        speed = torch.where(chosen["pace"], F.logsigmoid(pace) + _normal_log_prob(chosen["u"], mean, self.log_std),
                            F.logsigmoid(-pace))
        keep = F.logsigmoid(-release) + lane_logp.gather(-1, chosen["lane"][..., None])[..., 0] + speed
        action = torch.where(chosen["release"], F.logsigmoid(release), keep)
        return torch.where(chosen["valid"], plackett_luce(scores, chosen["picks"], chosen["valid"]) + action, 0.0)

    def _effort(self, valid, mean, lane_logp, gates):
        """Mean of |acceleration| + LANE_CHANGE per lane change over what the picks could be told, [B], m/s^2, with the
        accelerations in the centre of their distribution: a cost without noise (Ciosek and Whiteson 2018). Lane changes
        that still stand count too, not so in the environment. Its gradient closes gates and keeps lanes, but leaves the
        accelerations alone: weaker ones would be cheaper, down to holding the speed, which is in everybody's way."""
        released, pace = gates.sigmoid().unbind(-1)
        each = pace * acceleration(mean, self.accel_limit).detach().abs() - LANE_CHANGE * lane_logp[..., KEEP].expm1()
        return torch.where(valid, (1 - released) * each, 0.0).sum(-1)

    def _entropy(self, scores, valid, lane_logp, gates):
        """Entropy of the first pick plus the mean entropy of the picks' actions, [B]."""
        pick = torch.where(torch.isfinite(scores), scores, torch.full_like(scores, -1e4)).log_softmax(-1)
        first = -(pick.exp() * pick).sum(-1) * valid.any(-1)
        released, pace = gates.sigmoid().unbind(-1)
        gate, speed = F.binary_cross_entropy_with_logits(gates, gates.sigmoid(), reduction="none").unbind(-1)
        speed = speed + pace * (self.log_std + 0.5 * math.log(2 * math.pi * math.e))
        each = torch.where(valid, gate + (1 - released) * (speed - (lane_logp.exp() * lane_logp).sum(-1)), 0.0)
        return first + each.sum(-1) / valid.sum(-1).clamp(min=1)


def downstream_speeds(place, position, speed, mask, reaches=DOWNSTREAM):
    """Mean speed of the vehicles that are up to each share of `reaches` nearer to the exit than `place` [B, C], m/s,
    FREE_SPEED where there is nobody -> [B, C, reaches]. position (0 to 1), speed (m/s), mask [B, N].

    The nearest neighbours, of which the graph consists, do not reach as far as a jam can be felt.
    """
    ahead = position[:, None].float() - place[..., None].float()                           # [B, C, N]
    means = []
    for reach in reaches:
        among = ((ahead > 0) & (ahead <= reach) & mask[:, None]).float()
        count = among.sum(-1)
        total = (among * speed[:, None].float()).sum(-1)
        means.append(torch.where(count > 0, total / count.clamp(min=1), FREE_SPEED))
    return torch.stack(means, -1)


def acceleration(u, limit=math.inf):
    """Pre-squash action -> m/s^2 in [-3, 2], at most `limit`."""
    return (ACCEL_CENTRE + ACCEL_RANGE * torch.tanh(u)).clamp(max=limit)


def take(candidates, picks):
    """Those picked [B, K, F] of candidates, or of anything else by number, [B, C, F]."""
    return candidates.gather(1, picks[..., None].expand(-1, -1, candidates.shape[-1]))


def _normal_log_prob(u, mean, log_std):
    # The Jacobian of tanh is the same under the old and the new policy, so the ratio does not need it.
    return -0.5 * ((u - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)


def gumbel(uniform):
    """Standard Gumbel numbers from uniform ones."""
    return uniform.clamp(1e-9, 1 - 1e-7).log_().neg_().log_().neg_()
