"""Controllers that a traffic engineer would write in an afternoon, behind the interface of the policy.

Each is a function (observation of one environment, k, rng) -> (slot, accel, lane, brake), arrays of length k; a slot
outside the observation means "no command".
"""
import numpy as np

from env.graph import NODE, SURROUND
from env.spaces import KEEP, LEFT

SPEED, LANE = NODE.index("speed"), NODE.index("lane")
LEAD_GAP, LEAD_SPEED = SURROUND.index("lead_gap"), SURROUND.index("lead_speed")
HAS_LEFT = SURROUND.index("has_left")
MERGE_DISTANCE, MERGE_VEHICLES = SURROUND.index("merge_distance"), SURROUND.index("merge_vehicles")
MEAN_SPEED = 2  # column of the global metrics


def none(observation, k, rng):
    """Nobody is commanded: SUMO's drivers only."""
    return _commands(observation, k, [])


def random(observation, k, rng):
    """K random ICVs get a uniform acceleration and, one time in ten, a lane change."""
    icvs = np.flatnonzero(observation["icv"])
    chosen = rng.permutation(icvs)[:k]
    lane = np.where(rng.random(len(chosen)) < 0.1, rng.integers(0, 3, len(chosen)), KEEP)
    return _commands(observation, k, chosen, rng.uniform(-3, 2, len(chosen)), lane)


def lane_advice(observation, k, rng, reach=314.0):
    """ICVs in the right lane within `reach` m before a merge with traffic on the joining road move left; their drivers
    keep the speed."""
    near = observation["surround"]
    wants = (observation["icv"] > 0) & (near[:, HAS_LEFT] > 0) & (observation["nodes"][:, LANE] == 0) & (
        near[:, MERGE_DISTANCE] < reach) & (near[:, MERGE_VEHICLES] >= 1)
    chosen = np.flatnonzero(wants)
    chosen = chosen[np.argsort(near[chosen, MERGE_DISTANCE], kind="stable")][:k]
    return _commands(observation, k, chosen, np.full(len(chosen), np.nan), np.full(len(chosen), LEFT))


def follower_stopper(observation, k, rng, floor=15.0):
    """FollowerStopper (Stern et al. 2018): drive at the traffic's mean speed, slower when the gap is short.

    Three gaps (4.5, 5.25, 6 m, each with the braking distance of 1.5, 1 and 0.5 m/s^2) divide the space in front;
    the desired speed is the mean of all vehicles, at least `floor` m/s. The k strongest decelerations are sent.
    """
    v, gap = observation["nodes"][:, SPEED].astype(float), observation["surround"][:, LEAD_GAP].astype(float)
    lead = observation["surround"][:, LEAD_SPEED].astype(float)
    closing = np.minimum(lead - v, 0)
    g1, g2, g3 = (g + closing ** 2 / (2 * d) for g, d in ((4.5, 1.5), (5.25, 1.0), (6.0, 0.5)))
    wanted = max(float(observation["globals"][MEAN_SPEED]), floor)
    follow = np.minimum(np.maximum(lead, 0), wanted)
    target = np.select([gap <= g1, gap <= g2, gap <= g3], [
        0.0, follow * (gap - g1) / (g2 - g1), follow + (wanted - follow) * (gap - g2) / (g3 - g2)], wanted)
    accel = np.clip(target - v, -3, 2)
    chosen = np.flatnonzero((observation["icv"] > 0) & (accel < -0.1))
    chosen = chosen[np.argsort(accel[chosen], kind="stable")][:k]
    return _commands(observation, k, chosen, accel[chosen])


BASELINES = {"none": none, "random": random, "lane_advice": lane_advice, "follower_stopper": follower_stopper}


def _commands(observation, k, slots, accel=(), lane=None):
    count, out = len(slots), (np.full(k, len(observation["mask"])), np.zeros(k), np.full(k, KEEP), np.zeros(k))
    out[0][:count], out[1][:count] = slots, accel
    if lane is not None:
        out[2][:count] = lane
    return out
