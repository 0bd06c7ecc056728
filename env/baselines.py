"""Controllers that a traffic engineer would write in an afternoon, behind the interface of the policy.

Each is a rule (observation of one environment, k, rng, numbers of `baselines:` in the configuration) -> (slot, accel,
lane, brake), arrays of length k; a slot outside the observation means "no command". `make_baseline` gives the one to
use in an episode.
"""
import functools
import inspect
from collections import deque

import numpy as np

from env.graph import NODE, SURROUND
from env.spaces import ACCEL_HIGH, ACCEL_LOW, KEEP, LEFT

SPEED, LANE, POSITION = NODE.index("speed"), NODE.index("lane"), NODE.index("position")
LEAD_GAP, LEAD_SPEED = SURROUND.index("lead_gap"), SURROUND.index("lead_speed")
LEFT_GAP, LEFT_REAR_GAP = SURROUND.index("left_gap"), SURROUND.index("left_rear_gap")
HAS_LEFT, HAS_RIGHT = SURROUND.index("has_left"), SURROUND.index("has_right")
MERGE_DISTANCE, MERGE_VEHICLES = SURROUND.index("merge_distance"), SURROUND.index("merge_vehicles")
FAR_M = 500.0   # merge distance of a vehicle whose road joins no other
SLOWER = 1.0    # m/s: a leader whose follower will have to brake
CREEPING = 8.0  # m/s: in a jam nobody is to keep the speed
MEAN_SPEED = 2  # column of the global metrics


def none(observation, k, rng):
    """Nobody is commanded: SUMO's drivers only."""
    return commands(observation, k, [])


def random(observation, k, rng):
    """K random ICVs get a uniform acceleration and, one time in ten, a lane change."""
    icvs = np.flatnonzero(observation["icv"])
    chosen = rng.permutation(icvs)[:k]
    lane = np.where(rng.random(len(chosen)) < 0.1, rng.integers(0, 3, len(chosen)), KEEP)
    return commands(observation, k, chosen, rng.uniform(ACCEL_LOW, ACCEL_HIGH, len(chosen)), lane)


def advice(observation, k, rng, reach_m, vehicles, gap_m, ahead, gain, offset, margin, below, above, brake, behind_m,
           hold, accel, meter_brake, meter_above, meter_ahead, meter_below, cruise, cruise_margin, cruise_gain,
           cruise_brake, cruise_accel, cruise_lane):
    """Lane advice: ICVs in the right lane within `reach_m` before a merge with at least `vehicles` on the joining road
    move left; their drivers keep the speed and wait for a gap, or are told once there is one of `gap_m` to both sides.

    Speed advice (gain above 0): where the mean speed m of the traffic up to `ahead` (a share of the network's length)
    in front is between `above` and `below`, an ICV more than `margin` faster takes gain * (m + offset - v), cut to
    [-brake, accel]; not so who has somebody `SLOWER` within `behind_m` in front. Who is less than `hold` slower than m,
    faster than `CREEPING`, and told nothing else keeps the speed instead of accelerating into the next braking.
    Ramp metering (meter_brake above 0): on a joining road of one lane, ICVs faster than `meter_above` brake while the
    traffic behind the merge, up to `meter_ahead` in front, is slower than `meter_below`.
    Speed harmonisation (cruise above 0): any other ICV that is at most `cruise_margin` slower than `cruise` m/s, in
    lane number `cruise_lane` or one to its left, takes cruise_gain * (cruise - v), cut to [-cruise_brake,
    cruise_accel]; who drives behind it keeps that speed too.
    Lane moves go first, the nearest merge first; then the strongest braking; then the longest gap ahead.
    """
    near, icv = observation["surround"], observation["icv"] > 0
    v, distance = (x.astype(float) for x in (observation["nodes"][:, SPEED], near[:, MERGE_DISTANCE]))
    lane = observation["nodes"][:, LANE]
    moves = icv & (near[:, HAS_LEFT] > 0) & (lane == 0) & (distance < reach_m) & (near[:, MERGE_VEHICLES] >= vehicles)
    if gap_m > 0:
        moves &= np.minimum(near[:, LEFT_GAP], near[:, LEFT_REAR_GAP]) > gap_m
    mean = mean_speed_ahead(observation, ahead)
    slows = icv & (v > mean + margin) & (mean > above) & (mean < below) & (gain > 0)
    ramp = icv & (near[:, HAS_LEFT] + near[:, HAS_RIGHT] == 0) & (distance < FAR_M)
    meters = ramp & (v > meter_above) & (meter_brake > 0) & (
        mean_speed_ahead(observation, meter_ahead, distance >= FAR_M) < meter_below)
    wanted = np.fmin(np.where(slows & ~moves, np.clip(gain * (mean + offset - v), -brake, accel), np.nan),
                     np.where(meters, -meter_brake, np.nan))
    others = icv & ~(moves | slows | meters)
    steady = others & (cruise > 0) & (v > cruise - cruise_margin) & (lane >= cruise_lane)
    wanted[steady] = np.clip(cruise_gain * (cruise - v), -cruise_brake, cruise_accel)[steady]
    held = others & ~steady & (hold > 0) & (mean < below) & (v > np.maximum(mean - hold, CREEPING))
    wanted[held] = 0.0
    brakes = (near[:, LEAD_GAP] < behind_m) & (near[:, LEAD_SPEED] < v - SLOWER) & (behind_m > 0)  # by himself
    chosen, gap = np.flatnonzero(moves | slows & ~brakes | meters | steady | held), near[:, LEAD_GAP].astype(float)
    urgency = np.select([moves, steady, held], [distance - 1e6, 1e6 - gap, -1e-3 * gap], wanted)[chosen]
    chosen = chosen[np.argsort(urgency, kind="stable")][:k]
    return commands(observation, k, chosen, wanted[chosen], np.where(moves[chosen], LEFT, KEEP))


def mean_speed_ahead(observation, ahead, among=True):
    """[n] mean speed of the vehicles at most `ahead` (share of the network's length) nearer to the exit, m/s, of those
    `among`; NaN where there is nobody. Observations may be float16: sums need more."""
    here = (observation["mask"] > 0) & among
    place = np.where(here, observation["nodes"][:, POSITION], -np.inf).astype(float)
    order = np.argsort(place, kind="stable")
    speeds = np.concatenate([[0.0], observation["nodes"][order, SPEED].astype(float).cumsum()])
    own = observation["nodes"][:, POSITION].astype(float)
    first, last = (np.searchsorted(place[order], own + reach, "right") for reach in (0.0, ahead))
    with np.errstate(invalid="ignore"):
        return (speeds[last] - speeds[first]) / (last - first)


def follower_stopper(observation, k, rng, floor):
    """FollowerStopper (Stern et al. 2018): drive at the traffic's mean speed, slower when the gap is short.

    Three gaps (4.5, 5.25, 6 m, each with the braking distance of 1.5, 1 and 0.5 m/s^2) divide the space in front;
    the desired speed is the mean of all vehicles, at least `floor` m/s. The k strongest decelerations are sent.
    """
    v, gap, lead = _following(observation)
    closing = np.minimum(lead - v, 0)
    g1, g2, g3 = (g + closing ** 2 / (2 * d) for g, d in ((4.5, 1.5), (5.25, 1.0), (6.0, 0.5)))
    wanted = max(float(observation["globals"][MEAN_SPEED]), floor)
    follow = np.minimum(np.maximum(lead, 0), wanted)
    target = np.select([gap <= g1, gap <= g2, gap <= g3], [
        0.0, follow * (gap - g1) / (g2 - g1), follow + (wanted - follow) * (gap - g2) / (g3 - g2)], wanted)
    accel = np.clip(target - v, ACCEL_LOW, ACCEL_HIGH)
    return _strongest(observation, k, accel, accel < -0.1)


def idm(observation, k, rng, desired_speed, headway, accel, decel, exponent, min_gap_m):
    """Intelligent Driver Model (Treiber, Hennecke and Helbing 2000): the k ICVs that it brakes most, or accelerates
    least, follow it."""
    v, gap, lead = _following(observation)
    wanted_gap = min_gap_m + np.maximum(0, v * headway + v * (v - lead) / (2 * np.sqrt(accel * decel)))
    free, interaction = (v / desired_speed) ** exponent, (wanted_gap / np.maximum(gap, 0.1)) ** 2
    return _strongest(observation, k, np.clip(accel * (1 - free - interaction), ACCEL_LOW, ACCEL_HIGH))


class PISaturation:
    """PI controller with saturation (Stern et al. 2018): drive at one's own mean speed of the last `history_s`, up to
    `catch_up` faster when the gap grows from `gap_low_m` to `gap_high_m`, and at the leader's speed when it is short.

    The only rule with a memory, by slot: one instance is one episode.
    """

    def __init__(self, interval, history_s, gap_low_m, gap_high_m, catch_up, gamma_m, min_gap_m, min_gap_s):
        self.interval, self.past, self.command = interval, deque(maxlen=max(1, round(history_s / interval))), 0.0
        self.gap_low, self.gap_high, self.catch_up = gap_low_m, gap_high_m, catch_up
        self.gamma, self.min_gap_m, self.min_gap_s = gamma_m, min_gap_m, min_gap_s

    def __call__(self, observation, k, rng):
        v, gap, lead = _following(observation)
        new = observation["fresh"] > 0
        for speeds in self.past:
            speeds[new] = np.nan  # those of the slot's vehicle before
        self.past.append(v)
        wanted = np.nanmean(self.past, 0) + self.catch_up * np.clip(
            (gap - self.gap_low) / (self.gap_high - self.gap_low), 0, 1)
        least = np.maximum(self.min_gap_s * (lead - v), self.min_gap_m)
        alpha = np.clip((gap - least) / self.gamma, 0, 1)
        beta = 1 - alpha / 2
        before = np.where(new, v, self.command)
        self.command = beta * (alpha * wanted + (1 - alpha) * lead) + (1 - beta) * before
        return _strongest(observation, k, np.clip((self.command - v) / self.interval, ACCEL_LOW, ACCEL_HIGH))


BASELINES = {"none": none, "random": random, "lane_advice": advice, "speed_advice": advice, "tuned": advice,
             "harmonise": advice, "follower_stopper": follower_stopper, "idm": idm, "pi_saturation": PISaturation}


def make_baseline(name, cfg):
    """Controller `name` with its numbers of the configuration, for one episode: (observation, k, rng) -> commands. Of a
    class it is a new instance; one that takes an `interval` is given the control interval, s."""
    rule, numbers = BASELINES[name], dict(vars(getattr(cfg.baselines, name))) if hasattr(cfg.baselines, name) else {}
    if not inspect.isclass(rule):
        return functools.partial(_answer, name, rule, **numbers)
    if "interval" in inspect.signature(rule).parameters:
        numbers["interval"] = cfg.env.control_interval
    return functools.partial(_answer, name, rule(**numbers))


def _answer(name, rule, observation, k, rng, **numbers):
    """What a rule returns, as arrays; ValueError names one that does not keep to the interface."""
    found = rule(observation, k, rng, **numbers)
    arrays = tuple(map(np.asarray, found)) if isinstance(found, (tuple, list)) else ()
    if [array.shape for array in arrays] != [(k,)] * 4:
        shapes = [array.shape for array in arrays] or type(found).__name__
        raise ValueError(f"rule {name!r}: expected (slot, accel, lane, brake), each of length {k}, found {shapes}; "
                         "env.baselines.commands makes it of a list of slots")
    return arrays


def _following(observation):
    """(speed m/s, gap to the leader m, speed of the leader m/s), each [n]."""
    near = observation["surround"]
    return (x.astype(float) for x in (observation["nodes"][:, SPEED], near[:, LEAD_GAP], near[:, LEAD_SPEED]))


def _strongest(observation, k, accel, among=True):
    """Commands to the k ICVs with the lowest accelerations [n] of those `among`."""
    chosen = np.flatnonzero((observation["icv"] > 0) & among)
    chosen = chosen[np.argsort(accel[chosen], kind="stable")][:k]
    return commands(observation, k, chosen, accel[chosen])


def commands(observation, k, slots, accel=(), lane=KEEP):
    """What a rule returns: the given accelerations (m/s^2) and lanes for the vehicles in `slots`, at most k."""
    count, out = len(slots), (np.full(k, len(observation["mask"])), np.zeros(k), np.full(k, KEEP), np.zeros(k))
    out[0][:count], out[1][:count], out[2][:count] = slots, accel, lane
    return out
