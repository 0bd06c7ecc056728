"""Assembly: the four layers behind one object that turns observations into checked commands, step by step."""
import contextlib

import torch
from torch import nn

from models.controller import DOWNSTREAM, KEEP, Controller, acceleration, downstream_speeds, take
from models.presets import PRESETS
from models.risk_gnn import INPUTS, POSITION, PROGRESS, SPEED, RiskGNN
from models.safety_shield import SafetyShield
from models.world_model import WorldModel

PARTS = ("risk_gnn", "world_model", "controller", "safety_shield")
BUCKET = 16  # vehicles and candidates are padded to a multiple of it


class TrafficModel(nn.Module):
    """risk_gnn, world_model, controller, safety_shield of one preset. `cfg` is a configs.Config."""

    def __init__(self, cfg):
        super().__init__()
        sizes = PRESETS[cfg.model.preset]
        self.preset = cfg.model.preset
        self.risk_gnn = RiskGNN(sizes, cfg.model.gather_above, cfg.model.risk_bias == "learned")
        self.world_model = WorldModel(sizes, cfg.data.future, cfg.env.control_interval)
        self.controller = Controller(sizes, cfg.env.max_commands, cfg.model.lane_room_m)
        self.safety_shield = SafetyShield(sizes, cfg.shield, cfg.env.control_interval)

    def set_statistics(self, statistics):
        """Adopt the data set's statistics (statistics.json): z-scores of speed and of the global metrics."""
        normal, node = self.risk_gnn.normalize, statistics["nodes"]
        normal.mean[SPEED], normal.std[SPEED] = node["mean"][SPEED], node["std"][SPEED]
        self.controller.globals.mean.copy_(torch.tensor(statistics["globals"]["mean"]))
        self.controller.globals.std.copy_(torch.tensor(statistics["globals"]["std"]))

    def parameter_counts(self):
        """{part: number of parameters}, and their total."""
        counts = {part: sum(p.numel() for p in getattr(self, part).parameters()) for part in PARTS}
        return {**counts, "total": sum(counts.values())}

    def describe(self):
        """One line per part: its parameters."""
        counts = [f"  {part:14s} {count / 1e6:7.3f} M" for part, count in self.parameter_counts().items()]
        return "\n".join([f"model preset {self.preset}:", *counts])

    def freeze(self, *parts):
        """Train everything except `parts`. Call before wrapping with DDP: afterwards it is an error there."""
        for part in PARTS:
            getattr(self, part).requires_grad_(part not in parts)

    def features(self, embedding, memory, nodes, surround, globals_, mask, icv):
        """Controller inputs from embeddings [B, N, D] and the world model's memory [B, N, W].

        Returns a dict: candidates [B, C, F], valid [B, C], slots [B, C] (the ICVs, padded), scene [B, S], risk_logit
        [B, C] of the shield.
        """
        flow, risk = (x.detach() for x in self.world_model.latents(memory))  # no policy bends the predictions
        slots, valid = candidate_slots(icv)
        near = take(surround.float(), slots)
        node, picked_flow, picked_risk = (take(x, slots) for x in (nodes, flow, risk))
        downstream = downstream_speeds(node[..., POSITION], nodes[..., POSITION], nodes[..., SPEED], mask)
        candidates = self.controller.candidate_features(take(embedding, slots), picked_flow, picked_risk, downstream,
                                                        self.risk_gnn.normalize(node), near)
        return {"candidates": candidates * valid[..., None], "valid": valid, "slots": slots, "surround": near,
                "scene": self.controller.scene_summary(embedding, flow, risk, mask, globals_),
                "speed": node[..., SPEED].float(),
                "risk_logit": self.safety_shield.risk_logit(picked_flow, picked_risk, near)}


def candidate_slots(icv):
    """Slots of the ICVs, front-packed and padded to a bucket. icv [B, N] bool -> (slots [B, C], valid [B, C])."""
    width = min(bucket(int(icv.sum(1).max())), icv.shape[1])
    order = torch.sort(icv.to(torch.uint8), dim=1, descending=True, stable=True).indices[:, :width]
    return order, icv.gather(1, order)


def bucket(count):
    """`count` rounded up to a multiple of BUCKET, at least one."""
    return max(-(-count // BUCKET), 1) * BUCKET


class Driver:
    """Runs a TrafficModel on groups of environments, keeping the world model's memory by environment and slot.

    `leave_below`: only ICVs may be picked that drive at least that many m/s, as the third of the road before them and
    the third behind them do in the mean; `leave_after`: nor those beyond that share of their way.
    """

    def __init__(self, model, num_envs, max_vehicles, device="cpu", autocast=contextlib.nullcontext,
                 leave_below=0.0, leave_after=1.0):
        self.model, self.device, self.max_vehicles = model, device, max_vehicles
        self.autocast, self.leave_below, self.leave_after = autocast, leave_below, leave_after
        self.num_envs = num_envs
        self.state = model.world_model.initial_state(num_envs, max_vehicles, device=device)

    def forget(self, env=None):
        """Empty the memory of one environment (a new episode), or of all."""
        self.state[... if env is None else env] = 0

    @torch.inference_mode()
    def perceive(self, observation, envs, remember=True):
        """Observation arrays [len(envs), slots, ...] -> controller inputs. Advances the memory unless told not to."""
        rows = torch.as_tensor(envs, device=self.device)
        obs = to_tensors(observation, self.device)
        n = obs["mask"].shape[1]
        if self.leave_below:  # a jam that is there is not prevented any more, and who has left it makes room
            place, speed = obs["nodes"][..., POSITION], obs["nodes"][..., SPEED]
            around = [downstream_speeds(x, x, speed, obs["mask"], DOWNSTREAM[-1:]) for x in (place, -place)]
            obs["icv"] &= torch.cat([speed[..., None], *around], -1).amin(-1) >= self.leave_below
        if self.leave_after < 1:
            obs["icv"] &= obs["nodes"][..., PROGRESS] <= self.leave_after
        with self.autocast():
            embedding = self.model.risk_gnn(*(obs[name] for name in INPUTS))
            before = self.state[rows, :n]
            memory, after = self.model.world_model.step(embedding, before, obs["fresh"])
            if remember:
                self.state[rows, :n] = after
            features = self.model.features(embedding, memory, obs["nodes"], obs["surround"], obs["globals"],
                                           obs["mask"], obs["icv"])
        for name in ("candidates", "scene"):  # decide on what is stored: the first PPO ratio is then exactly 1
            features[name] = features[name].half().float()
        return {**features, "embedding": embedding, "memory": memory, "before": before, "observation": obs}

    @torch.inference_mode()
    def decide(self, seen, noise=None):
        """A choice and the shield's verdict: (choice, commands) with commands as arrays for the pool.

        `noise` as in Controller.select; without it the choice is deterministic.
        """
        choice = self.choose(seen, noise)
        choice["value"], choice["cost_value"] = self.values(seen)
        return choice, self.commands(seen, choice)

    def choose(self, seen, noise, scores=None):
        """The controller's choice (Controller.select)."""
        noise = noise if noise is None else [x.to(self.device) for x in noise]
        return self.model.controller.select(seen["candidates"], seen["valid"], seen["scene"], noise, scores)

    @torch.inference_mode()
    def values(self, seen):
        """(value, cost value) of the scenes that `perceive` returned, each [B]."""
        return self.model.controller.values(seen["scene"])

    def commands(self, seen, choice):
        """Slots, accelerations, lanes and brakes [B, K] after the shield, as numpy arrays, and its reasons."""
        picks = choice["picks"]
        active = choice["valid"] & ~choice["release"] & (choice["pace"] | (choice["lane"] != KEEP))
        at = lambda x: x.gather(1, picks)  # noqa: E731
        wanted = acceleration(choice["u"], self.model.controller.accel_limit)
        wanted = torch.where(choice["pace"], wanted, torch.nan)  # NaN: the driver keeps the speed
        accel, lane, brake, reason = self.model.safety_shield(wanted, choice["lane"], at(seen["speed"]),
                                                              take(seen["surround"], picks), at(seen["risk_logit"]))
        slot = torch.where(active, at(seen["slots"]), self.max_vehicles)
        out = {"slot": slot, "accel": accel, "lane": lane, "brake": brake, "reason": reason * active, "wanted": wanted,
               "wanted_lane": choice["lane"]}
        return {name: value.cpu().numpy() for name, value in out.items()}


def to_tensors(observation, device):
    """Cut observation arrays (numpy, by slot) to the slots in use and make tensors of them, features in float32."""
    used = observation["mask"].any(0)
    n = min(bucket(int(used.nonzero()[0].max(initial=0)) + 1), observation["mask"].shape[1])
    out = {}
    for name, value in observation.items():
        tensor = torch.from_numpy(value if name == "globals" else value[:, :n].copy()).to(device)
        out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out
