"""A cap on C_int in every episode: commands that would cost more are not sent."""
import numpy as np

from env.graph import NODE
from env.spaces import KEEP, LANE_CHANGE

LANE = NODE.index("lane")
CREDIT = 0.5  # share of what the rest of the episode will earn, should as many ICVs stay, that may be spent now


class Rationed:
    """A controller whose C_int is at most `evaluate.c_int_cap` when an episode ends.

    Every ICV earns the cap in every control step; commands are paid for, in the controller's own order, from what has
    been earned and from an advance on the rest of the episode, because a jam is cheaper to prevent than to live with.
    The advance is repaid as long as half of the ICVs stay. Who cannot be paid for is left to SUMO's driver. Nobody is
    told again to change lanes while the driver still follows the same order.
    """

    def __init__(self, controller, cfg):
        self.controller, self.cap, self.budgets = controller, cfg.evaluate.c_int_cap, {}
        self.slots, self.steps = cfg.env.max_vehicles, cfg.env.episode_steps
        self.hold = int(cfg.env.lane_change_hold_s / cfg.env.control_interval + 1e-6)  # 0.6 / 0.2 is below 3
        if hasattr(controller, "scores"):
            self.scores = controller.scores

    def begin(self, env, seed):
        """A new episode in environment number `env`, with a budget of its own."""
        self.controller.begin(env, seed)
        self.budgets[env] = Budget(self.slots, self.hold, self.steps)

    def act(self, observation, env):
        """The controller's commands, without those that are not paid for."""
        commands, budget = self.controller.act(observation, env), self.budgets[env]
        budget.begin_step(observation, self.cap)
        for i in np.flatnonzero(commands["slot"] < self.slots):
            budget.pay(commands, i)
        return commands


class Budget:
    """What commands may still cost in one episode of `steps` control steps, and which lane changes still stand (for
    `hold` steps), by slot. `left` is what has been earned and not spent, below 0 where an advance was taken."""

    def __init__(self, slots, hold, steps=0):
        self.left, self.advance, self.step, self.hold, self.steps = 0.0, 0.0, -1, hold, steps
        self.lane, self.told, self.since = np.zeros(slots), np.full(slots, KEEP), np.zeros(slots, int)

    def begin_step(self, observation, cap):
        """Earn the step's share, and forget the orders of who has left or is on another lane."""
        self.step, share = self.step + 1, cap * float(observation["icv"].sum())
        if self.step:  # C_int counts the ICVs that are there after a step, and none was made before the first command
            self.left += share
        self.advance = CREDIT * share * max(self.steps - self.step, 0)
        lane = observation["nodes"][:, LANE].copy()
        self.told[(observation["fresh"] > 0) | (lane != self.lane)] = KEEP
        self.lane = lane

    def pay(self, commands, i):
        """Pay for command number `i`, without a lane change that still stands; strike it where it is too dear."""
        slot, lane, accel, brake = (commands[name][i] for name in ("slot", "lane", "accel", "brake"))
        if lane == self.told[slot] and self.step < self.since[slot] + self.hold:
            lane = commands["lane"][i] = KEEP
        effort = float(brake if brake > 0 else abs(np.nan_to_num(accel))) + LANE_CHANGE * (lane != KEEP)
        if effort > self.left + self.advance:
            commands["slot"][i], commands["reason"][i] = len(self.told), 0
            return
        self.left -= effort
        if lane != KEEP:
            self.told[slot], self.since[slot] = lane, self.step
