"""What an episode adds up to, and the reward per control step that follows it.

The score of an episode (see `paired_score`) is linear in three totals: arrivals, the time average of sigma_v and the
time average of abs_a. With reference values for the run without control, one control step contributes

    r = 100 * w_e * d / (ocr_ref * demand_ref) - 100 * w_s * (0.4 * sigma / sigma_ref + 0.6 * a / abs_a_ref) / steps

where d is the distance driven by all vehicles in the step, each as a share of its own route: a dense stand-in for
arrivals whose sum over an episode is the arrivals plus the unfinished share of those still on the road, less 2 to 3 %,
where ways are short more (the way of the step in which a vehicle comes or arrives is not seen).
"""
import math
from collections import Counter

import numpy as np

from env.graph import HARD_BRAKE, mean_and_spread, time_to_collision


class EpisodeTotals:
    """Counters of one episode; every sub-step's departures, arrivals, collisions and teleports are in them."""

    def __init__(self, reward_cfg, interval, horizon_s):
        self.cfg, self.steps_expected = reward_cfg, horizon_s / interval
        self.loaded = self.departed = self.arrived = self.collisions = self.teleports = 0
        self.earlier = None  # vehicles that had gone before the episode
        self.effort = self.commands = self.reward = 0.0
        self.aloft = Counter()  # who is being teleported: carried to its destination, it has not driven there
        self.before_start = 0  # collisions of the warm-up end no episode
        self.forget_averages()

    def forget_averages(self):
        """Start the time averages anew (after the warm-up); counts of vehicles go on."""
        self.steps = self.busy_steps = self.hard_brakes = self.overflow = 0
        self.sigma_sum = self.abs_a_sum = self.icv_sum = self.reward_sum = self.speed_sum = 0.0
        self.min_ttc = math.inf
        self.before_start, self.collisions = self.before_start + self.collisions, 0

    def intervention(self, effort, vehicles):
        """Add the effort (sum |a| + 5 per lane change) and number of vehicles commanded in one control step."""
        self.effort += effort
        self.commands += vehicles

    def step(self, scene, moved, route_length, events, overflow):
        """Add one control step. `moved` m and `route_length` m by vehicle of `scene`; `events` of Sumo.read."""
        before = self.collisions
        self.departed += len(events["departed"])
        # SUMO's own "loaded" counts vehicles that are not due yet as well.
        inserted = events["stats.vehicles.inserted"]
        if self.earlier is None:  # SUMO's counter is that of the state from which a scenario may begin
            self.earlier = inserted - events["stats.vehicles.running"] - len(events["arrived"])
        self.loaded = inserted - self.earlier + events["stats.vehicles.waiting"]
        self.collisions = events["stats.safety.collisions"] - self.before_start
        self.teleports = events["stats.teleports.total"]
        self.aloft.update(events["lifted"])  # counted: in a long step one is lifted and landed, and lifted once more
        self.aloft.subtract(events["landed"])
        self.aloft = +self.aloft
        self.arrivals = sum(name not in self.aloft for name in events["arrived"])  # of this step
        self.arrived += self.arrivals
        self.overflow += overflow
        self.steps += 1
        self.n, self.icvs = len(scene), int(scene["icv"].sum())
        self.icv_sum += self.icvs
        self.sigma = self.abs_a = 0.0
        if self.n:
            mean_speed, self.sigma = mean_and_spread(scene["speed"])
            self.abs_a = float(np.abs(scene["accel"]).sum()) / self.n
            self.busy_steps += 1
            self.sigma_sum += self.sigma
            self.abs_a_sum += self.abs_a
            self.speed_sum += mean_speed
            self.hard_brakes += int((scene["accel"] <= HARD_BRAKE).sum())
            ttc = time_to_collision(scene["lead_gap"], scene["speed"], scene["lead_speed"])
            self.min_ttc = min(self.min_ttc, float(ttc[(scene["lead"] >= 0) & ~scene["aside"]].min(initial=math.inf)))
        self.reward = self._reward(float((moved / route_length).sum()), self.collisions - before)
        self.reward_sum += self.reward

    def _reward(self, progress, collisions):
        c = self.cfg
        gain = c.efficiency_weight * progress / (c.ocr_ref * c.demand_ref)
        loss = c.stability_weight * (0.4 * self.sigma / c.sigma_ref + 0.6 * self.abs_a / c.abs_a_ref)
        return 100 * gain - 100 * loss / self.steps_expected - c.collision_penalty * collisions

    @property
    def ocr(self):
        """Share of the loaded vehicles that have arrived."""
        return self.arrived / self.loaded if self.loaded else 0.0

    @property
    def c_int(self):
        """Intervention cost so far: effort / (control steps * mean number of ICVs present)."""
        return self.effort / self.icv_sum if self.icv_sum else 0.0

    def step_facts(self):
        """What changes every step, for `info`."""
        return {"vehicles": self.n, "icvs": self.icvs, "sigma_v": self.sigma, "abs_a": self.abs_a,
                "loaded": self.loaded, "arrived": self.arrived, "collisions": self.collisions,
                "teleports": self.teleports, "overflow": self.overflow}

    def summary(self):
        """The episode's row of the results, without the scores that need a paired run."""
        busy = max(self.busy_steps, 1)
        return {"loaded": self.loaded, "departed": self.departed, "arrived": self.arrived, "ocr": self.ocr,
                "sigma_v": self.sigma_sum / busy, "abs_a": self.abs_a_sum / busy, "c_int": self.c_int,
                "mean_speed": self.speed_sum / busy, "collisions": self.collisions, "teleports": self.teleports,
                "min_ttc": self.min_ttc if math.isfinite(self.min_ttc) else None, "hard_brakes": self.hard_brakes,
                "controlled_vehicle_steps": int(self.commands), "overflow": self.overflow, "steps": self.steps,
                "return": self.reward_sum, "icvs": self.icv_sum / max(self.steps, 1)}


def paired_score(row, base):
    """Scores of one episode against the run of the same scenario and seed without control, as a dictionary."""
    def gain(key):
        return (base[key] - row[key]) / base[key] if base[key] else 0.0
    ocr_change = (row["ocr"] - base["ocr"]) / base["ocr"] if base["ocr"] else 0.0
    efficiency = 100 * max(0.0, ocr_change)
    stability = 100 * (0.4 * gain("sigma_v") + 0.6 * gain("abs_a"))
    total = (0.7 * efficiency + 0.3 * stability) * math.exp(-0.1 * row["c_int"])
    return {"ocr_change": 100 * ocr_change, "s_efficiency": efficiency, "s_stability": stability, "s_total": total}
