"""Dual-mode safety shield: every command is checked before it is sent, for all vehicles at once.

Level 1 clips the acceleration (a limit that falls with speed, a bound that keeps a safe distance over the whole control
interval even if the leader brakes fully, and the same bound, but no braking, for who may cut in) and vetoes lane
changes that would cut a gap (without a commanded speed, SUMO's driver waits for one). Level 2 brakes hard when the time
to collision or the time headway is too short. A learned risk head, trained in phase 3, forbids acceleration and lane
changes where it foresees a conflict. Who comes from the side is not seen here: near crossings, SUMO's own safe-speed
check stays on (env/tails.py).
"""
import torch
from torch import nn

from models.controller import HAS_LEFT, HAS_RIGHT, KEEP, LEFT, SURROUND_FEATURES, SURROUND_MEAN, SURROUND_STD
from models.presets import Normalizer, mlp

NONE, CLIPPED, LANE_VETO, EMERGENCY, RISK = 0, 1, 2, 4, 8  # reasons; several add up
REASONS = {CLIPPED: "clipped", LANE_VETO: "lane veto", EMERGENCY: "emergency", RISK: "risk"}
LEAD_GAP, LEAD_SPEED = 0, 1                                # columns of the surroundings
LEFT_SIDE, RIGHT_SIDE = slice(2, 6), slice(6, 10)          # gap and speed in front, gap and speed behind


def safe_next_speed(gap, speed, lead_speed, interval, own_decel, leader_decel):
    """Highest speed at the end of the control interval from which the vehicle can still stop behind its leader.

    Assumes that the leader brakes at `leader_decel` from now on (Gipps 1981, Krauss 1998; with the mean of present
    and next speed over the interval): v' solves  (v + v')/2 * dt + v'^2 / (2 b) = gap + v_l^2 / (2 b_l).
    All arguments in m, m/s, s and m/s^2; returns m/s, never below 0.
    """
    room = gap + lead_speed ** 2 / (2 * leader_decel) - speed * interval / 2
    half = own_decel * interval / 2
    return (torch.sqrt((half ** 2 + 2 * own_decel * room).clamp(min=0)) - half).clamp(min=0)


class SafetyShield(nn.Module):
    """`cfg` is configs.ShieldConfig; `interval` the control interval, s."""

    def __init__(self, sizes, cfg, interval=1.0):
        super().__init__()
        self.cfg, self.interval = cfg, interval
        self.surround = Normalizer(SURROUND_MEAN, SURROUND_STD)
        hidden = sizes.risk_hidden
        self.risk_head = mlp(2 * sizes.latent + SURROUND_FEATURES, hidden, hidden, 1, final_gain=0.1)
        self.register_buffer("risk_trained", torch.zeros((), dtype=torch.bool))  # the head is silent until phase 3

    def risk_logit(self, flow, risk, surround):
        """Logit that a conflict follows within the horizon. Latents [..., latent], surround [..., 14] -> [...]"""
        return self.risk_head(torch.cat([flow.float(), risk.float(), self.surround(surround)], -1)).squeeze(-1).float()

    def forward(self, accel, lane, speed, surround, risk_logit=None):
        """Commands [..., K] (m/s^2, NaN = SUMO's driver keeps the speed; lane 0 left, 1 keep, 2 right), speed [..., K]
        m/s, surround [..., K, 14].

        Returns (acceleration, lane, brake, reason): brake above 0 (m/s^2) replaces the acceleration where even the
        strongest ordinary braking would not do; reason is a sum of the codes above.
        """
        if not self.cfg.enabled:
            return accel, lane, torch.zeros_like(accel), torch.zeros_like(lane)
        limit, danger = self.limits(speed, surround)
        danger = danger & ~torch.isnan(accel)
        there = torch.where(lane == LEFT, surround[..., HAS_LEFT], surround[..., HAS_RIGHT]) > 0.5
        side = torch.where((lane == LEFT)[..., None], surround[..., LEFT_SIDE], surround[..., RIGHT_SIDE])
        behind_new = self.follow(speed, *side[..., :2].unbind(-1))  # as on its own lane: it will have to brake for both
        # A driver whose speed is not commanded keeps SUMO's checks and changes lane when the gaps are safe.
        free = (behind_new >= -3.0) & self.room_behind(speed, side) & ~danger
        allowed = (lane == KEEP) | there & (torch.isnan(accel) | free)
        limit = torch.where(allowed & (lane != KEEP), torch.minimum(limit, behind_new), limit)
        safe = torch.minimum(accel, limit)
        safe = torch.where(danger, safe.clamp(max=-self.cfg.emergency_decel), safe)
        reason = CLIPPED * ((safe < accel - 1e-6) & ~danger) + EMERGENCY * danger + LANE_VETO * ~allowed
        if risk_logit is not None and bool(self.risk_trained):
            risky = risk_logit.sigmoid() > self.cfg.risk_threshold
            reason = reason + RISK * (risky & ((safe > 0) | (allowed & (lane != KEEP))))
            safe, allowed = torch.where(risky, safe.clamp(max=0.0), safe), allowed & ~risky
        safe = safe.clamp(min=-self.cfg.own_decel)
        brake = torch.where(safe < -3.0, -safe, torch.zeros_like(safe))
        return safe.clamp(min=-3.0), torch.where(allowed, lane, torch.full_like(lane, KEEP)), brake, reason

    def limits(self, speed, surround):
        """(highest acceleration that level 1 allows, whether level 2 acts), each shaped as `speed`."""
        c, gap, lead_speed = self.cfg, surround[..., LEAD_GAP], surround[..., LEAD_SPEED]
        by_speed = c.comfort_accel * (1 - speed / c.max_speed).clamp(min=0)
        highest = torch.minimum(self.follow(speed, gap, lead_speed), by_speed)
        for side, exists in ((LEFT_SIDE, HAS_LEFT), (RIGHT_SIDE, HAS_RIGHT)):
            # Who drives in front on a lane beside may move over and does not expect to be accelerated at meanwhile.
            cut_in = self.follow(speed, *surround[..., side].unbind(-1)[:2]).clamp(min=0)
            there = surround[..., exists] > 0.5
            if side == RIGHT_SIDE:  # of two exactly abreast the left one goes first, or both would wait for ever
                there = there & ~(surround[..., side][..., ::2] < 0).all(-1)
            highest = torch.where(there, torch.minimum(highest, cut_in), highest)
        closing, open_gap = speed - lead_speed, gap.clamp(min=0)
        danger = ((closing > 0.1) & (open_gap < c.ttc_s * closing)) | (open_gap < c.thw_s * speed)
        return highest, danger

    def follow(self, speed, gap, lead_speed):
        """Highest acceleration over the control interval that is safe behind a leader, m/s^2."""
        c, free = self.cfg, gap - self.cfg.min_gap_m
        target = safe_next_speed(free, speed, lead_speed, self.interval, c.own_decel, c.leader_decel)
        # Where the vehicle must stand before the interval is over, reaching 0 at its end would be too late.
        way = (free + lead_speed ** 2 / (2 * c.leader_decel)).clamp(min=1e-3)
        return torch.where(way < speed * self.interval / 2, -speed ** 2 / (2 * way), (target - speed) / self.interval)

    def room_behind(self, speed, side):
        """Whether the follower on the target lane, which reacts after lane_gap_s and then brakes, has room enough."""
        c, rear_gap, rear_speed = self.cfg, side[..., 2], side[..., 3]
        closing = (rear_speed - speed).clamp(min=0)
        needed = c.min_gap_m + c.lane_gap_s * closing + closing ** 2 / (2 * c.emergency_decel) + rear_speed / 2
        return rear_gap >= needed
