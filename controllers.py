"""Whom evaluate.py scores: the policy, and the rules of env/baselines.py behind the same shield."""
import math

import numpy as np
import torch

from configs import console
from env.baselines import BASELINES, FAR_M, MERGE_DISTANCE, make_baseline, mean_speed_ahead
from env.ration import Rationed
from models.policy import Driver
from models.presets import PRESETS
from models.risk_gnn import SPEED
from models.safety_shield import CLIPPED, EMERGENCY, REASONS, SafetyShield
from runtime.rollout import action_noise

CONTROLLERS = (*BASELINES, "policy")
# How long errors of the world model count, s; those of whom it has known for so long, s. Of few errors nothing is said,
# of enough the worst is for good: after 45 and 130 s at the built-in demands (a wait of 85 s costs the road there).
# To begin, they must be clearly within the limit: at most that share of it.
SURPRISE_S, KNOWN_S, FEW, ENOUGH, TO_BEGIN = 180.0, 20.0, 300, 4000, 0.9
# Traffic before a merge is as fast as this quantile of its speeds, if there are so many; if slow, that is said when, s.
FASTEST, MERGING, SAID_S = 0.9, 10, 120.0
AHEAD, NOBODY_AHEAD = 0.26, 1e3  # selection `jam`: share of the network looked at; speed where nobody is, m/s
LANES = ("left", "keep", "right")
SHIELD_LOG = ("controller", "seed", "step", "slot", "reason", "commanded_accel", "commanded_lane", "sent_accel",
              "sent_lane")


class PolicyController:
    """The trained model on one environment at a time (so that nothing depends on who else is in the batch)."""

    def __init__(self, cfg, model, num_envs):
        self.k = model.controller.k = cfg.env.max_commands  # need not be that of training: more or fewer picks
        model.controller.accel_limit, model.safety_shield.cfg = cfg.evaluate.accel_limit, cfg.shield
        self.driver = Driver(model, num_envs, cfg.env.max_vehicles, leave_below=cfg.evaluate.leave_below,
                             leave_after=cfg.evaluate.leave_after)
        self.selection, self.sample, self.rng = cfg.evaluate.selection, cfg.evaluate.sample, {}
        self.limit, self.interval = cfg.evaluate.surprise_limit, cfg.env.control_interval
        self.merge_speed, self.fastest = cfg.evaluate.merge_speed, {}
        self.surprise, self.seeds = {}, {}

    def begin(self, env, seed):
        self.driver.forget(env)
        self.rng[env], self.seeds[env] = np.random.default_rng(seed), seed
        self.surprise[env], self.fastest[env] = Surprise(self.interval), Fastest(self.interval)

    @torch.inference_mode()
    def act(self, observation, env):
        """Commands and the shield's reasons for one environment: arrays of length K."""
        self.seen = seen = self.driver.perceive({name: value[None] for name, value in observation.items()}, [env])
        noise = action_noise([self.rng[env]], self.k, self.driver.max_vehicles) if self.sample else None
        choice = self.driver.choose(seen, noise, self.other_scores(observation, seen, env))
        commands = {name: value[0] for name, value in self.driver.commands(seen, choice).items()}
        if self.slow(observation, env) | (self.limit > 0 and self.surprised(observation, seen, env)):  # both must look
            commands["slot"][:], commands["reason"][:] = self.driver.max_vehicles, 0
        self.surprise[env].tell(commands["slot"])
        return commands

    def surprised(self, observation, seen, env):
        """Whether the world model errs by more than `evaluate.surprise_limit`, to begin by more than nine tenths of it,
        so far as is known; said once sure."""
        speed, surprise = seen["observation"]["nodes"][..., SPEED], self.surprise[env]
        predicted, before = self.driver.model.world_model.predict_next(seen["memory"], speed)[0, :, 1], surprise.worst
        error, limit = surprise.look(observation, predicted.numpy()), surprise.share * self.limit
        if before <= limit < surprise.worst:
            console.say(f"policy, seed {self.seeds[env]}: its world model errs by {error:.3g} m/s, more than "
                        f"{limit:.3g} (evaluate.surprise_limit={self.limit:g}): it commands nobody any more in this "
                        "episode")
        if error <= limit:
            surprise.share = 1.0
        return error > limit

    def slow(self, observation, env):
        """Whether traffic before a merge has not been as fast as `evaluate.merge_speed` yet; said once, if for long."""
        fastest = self.fastest[env]
        slow = fastest.speed < self.merge_speed and fastest.look(observation) < self.merge_speed
        if slow and fastest.steps == fastest.said_at:
            console.say(f"policy, seed {self.seeds[env]}: in {SAID_S:g} s no traffic before a merge was as fast as "
                        f"evaluate.merge_speed={self.merge_speed:g} m/s: it commands nobody until some is")
        return slow

    def other_scores(self, observation, seen, env):
        """Scores of the candidates [1, C] that replace the learned ones; None = learned."""
        if self.selection == "learned":
            return None
        by_slot = (self.rng[env].random(len(observation["mask"])) if self.selection == "random"
                   else -np.nan_to_num(mean_speed_ahead(observation, AHEAD), nan=NOBODY_AHEAD))
        return torch.from_numpy(by_slot).float()[seen["slots"]].masked_fill(~seen["valid"], -torch.inf)

    @torch.inference_mode()
    def scores(self):
        """Influence of every ICV in the last observation, as an array."""
        return self.driver.model.controller.influence(self.seen["candidates"])[self.seen["valid"]].numpy()


class Surprise:
    """How far the world model misjudges the traffic of an episode: do these vehicles drive as those of its training?"""

    def __init__(self, interval):
        self.interval, self.keep, self.expected = interval, math.exp(-interval / SURPRISE_S), np.zeros(0)
        self.total = self.count = self.age = self.worst = 0.0
        self.share = TO_BEGIN  # of the limit, that the error may reach now

    def look(self, observation, predicted):
        """The median error of the speeds predicted a control step before, m/s, in the mean of late: infinite while few
        are known, and of enough the worst so far. Of vehicles that the memory has known for a while; a median, because
        a few have to evade whom we command. `predicted` [slots in use] are the speeds of the next step."""
        n, stays = len(self.expected), (observation["mask"] > 0) & (observation["fresh"] == 0)
        self.age = np.where(stays, self.age + self.interval, 0.0)
        judged = (self.age[:n] > KNOWN_S) & np.isfinite(self.expected)
        errors = np.abs(self.expected - observation["nodes"][:n, SPEED])[judged]
        self.count = self.keep * self.count + len(errors)
        self.total = self.keep * self.total + len(errors) * (float(np.median(errors)) if len(errors) else 0.0)
        self.expected = predicted.copy()
        error = self.total / self.count if self.count > FEW else math.inf
        if self.count > ENOUGH:
            self.worst = max(self.worst, error)
        return self.worst or error

    def tell(self, slots):
        """What the vehicles in these slots do now was commanded: nobody could foresee it."""
        self.expected[slots[slots < len(self.expected)]] = np.nan


class Fastest:
    """How fast traffic before a merge has been in an episode: is the road one of those that the policy learned on? On
    streets, before traffic lights and on roads without a merge it brakes for nothing."""

    def __init__(self, interval):
        self.speed, self.steps, self.said_at = 0.0, 0, max(1, round(SAID_S / interval))

    def look(self, observation):
        """The highest speed so far, m/s, of the fastest tenth of ten or more vehicles within 500 m of a merge."""
        self.steps += 1
        near = (observation["mask"] > 0) & (observation["surround"][:, MERGE_DISTANCE] < FAR_M)
        if near.sum() >= MERGING:
            self.speed = max(self.speed, float(np.quantile(observation["nodes"][near, SPEED].astype(float), FASTEST)))
        return self.speed


class BaselineController:
    """A rule of env/baselines.py behind the same shield as the policy."""

    def __init__(self, cfg, name):
        self.name, self.cfg, self.n, self.rules = name, cfg, cfg.env.max_vehicles, {}
        self.shield = SafetyShield(PRESETS["small"], cfg.shield, cfg.env.control_interval)  # its rules have no weights

    def begin(self, env, seed):
        self.rules[env] = make_baseline(self.name, self.cfg), np.random.default_rng(seed)

    def act(self, observation, env):
        """Commands and the shield's reasons for one environment: arrays of length K."""
        rule, rng = self.rules[env]
        slot, wanted, wanted_lane, hard = rule(observation, self.cfg.env.max_commands, rng)
        slot, wanted = np.where(slot < 0, self.n, slot), np.where(hard > 0, -hard, wanted)
        row = np.minimum(slot, self.n - 1)
        near = torch.from_numpy(observation["surround"][row]).float()
        speed = torch.from_numpy(observation["nodes"][row, SPEED]).float()
        with torch.no_grad():
            checked = self.shield(torch.tensor(wanted, dtype=torch.float32), torch.tensor(wanted_lane), speed, near)
        accel, lane, brake, reason = (x.numpy() for x in checked)
        brake = brake if self.cfg.shield.enabled else hard
        return {"slot": slot, "accel": accel, "lane": lane, "brake": brake, "reason": reason * (slot < self.n),
                "wanted": wanted, "wanted_lane": wanted_lane}


class Audit:
    """What the shield changed in one episode: counts for the row, and one line per override for the log."""

    def __init__(self, controller, seed):
        self.controller, self.seed, self.step, self.lines = controller, seed, 0, []
        self.counts = {"shield_clips": 0, "shield_vetoes": 0, "shield_emergencies": 0}

    def add(self, commands):
        """Note one control step's overrides."""
        reason = commands["reason"]
        self.counts["shield_clips"] += int((reason & CLIPPED > 0).sum())
        self.counts["shield_emergencies"] += int((reason & EMERGENCY > 0).sum())
        self.counts["shield_vetoes"] += int(((reason > 0) & (reason & (CLIPPED | EMERGENCY) == 0)).sum())
        for i in np.flatnonzero(reason):
            sent = -commands["brake"][i] if commands["brake"][i] > 0 else commands["accel"][i]
            why = " + ".join(text for code, text in REASONS.items() if reason[i] & code)
            self.lines.append((self.controller, self.seed, self.step, int(commands["slot"][i]), why,
                               round(float(commands["wanted"][i]), 3), LANES[commands["wanted_lane"][i]],
                               round(float(sent), 3), LANES[commands["lane"][i]]))
        self.step += 1


def make_controller(cfg, name, models, num_envs):
    """The controller of this name, for the environments of one pool: a policy of `models`, {name: TrafficModel}, or a
    baseline."""
    chosen = PolicyController(cfg, models[name], num_envs) if name in models else BaselineController(cfg, name)
    return Rationed(chosen, cfg) if cfg.evaluate.c_int_cap else chosen
