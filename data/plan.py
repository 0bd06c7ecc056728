"""Which traffic is recorded: the episodes of a collection, and which of them are kept for validation."""
import math
from typing import NamedTuple

import numpy as np

from data.settings import scenarios_by_variant, traffic_seed


class Episode(NamedTuple):
    """One job of a collection."""
    episode: int
    seed: int
    scenario: str
    controller: str
    demand_scale: float
    samples: int


def episode_plan(cfg):
    """The episodes of the whole collection: variants of a suite, scenarios, controllers and demands take turns, the
    last two together, so that few episodes have all of each."""
    d, plan, left, names = cfg.data, [], cfg.data.samples, scenarios_by_variant(cfg)
    while left > 0:
        e = len(plan)
        seed = 2_000_000 + (traffic_seed(cfg) * 100_003 + 7 * e) % 1_990_000_000  # far from the seeds of evaluation
        turn, variant = divmod(e, len(cfg.env.suite))
        seed += (variant - seed) % len(cfg.env.suite)  # an environment's variant is that of its seed
        turn, scenario = divmod(turn, len(names))
        controller, scale = d.controllers[turn % len(d.controllers)], len(d.demand_scales)
        scale = d.demand_scales[(turn + turn // math.lcm(len(d.controllers), scale)) % scale]  # in the end all pairs
        plan.append(Episode(e, seed, names[scenario][variant], controller, scale, min(left, d.samples_per_episode)))
        left -= d.samples_per_episode
    return plan


def held_out_episodes(plan, share, variants=1):
    """Numbers of the episodes kept for validation, as mixed as the plan: one after the other that of whose variant,
    scenario, controller and demand the smallest share is kept, none of them whole if it can be helped; of equals that
    which the golden ratio puts first."""
    facts = zip(*((job.seed % variants, job.scenario, job.controller, job.demand_scale) for job in plan))
    levels = [np.unique(values, return_inverse=True)[1] for values in facts]
    totals = [np.bincount(level) for level in levels]
    kept = [np.zeros(len(total)) for total in totals]
    spread, chosen = np.arange(len(plan)) * 0.6180339887 % 1 / 1e6, []
    for _ in range(min(max(round(share * len(plan)), 1), max(len(plan) - 1, 1))):
        shares = sum(((count + (total == 1)) / total)[level] for count, total, level in zip(kept, totals, levels))
        chosen.append(int(np.argmin(shares + spread)))
        spread[chosen[-1]] = np.inf
        for count, level in zip(kept, levels):
            count[level[chosen[-1]]] += 1
    return sorted(chosen)
