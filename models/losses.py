"""The training losses of the three phases as modules: DDP wraps them, so that `forward` computes everything.

Calling a method of the wrapped model instead would bypass DDP's hooks and leave gradients unsynchronised.
Every `count` is the global number of valid items divided by the number of ranks, because DDP averages over ranks.
"""
import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from models import objectives
from models.controller import plackett_luce
from models.imitation import with_runners_up
from models.risk_gnn import INPUTS

# What is told of held-out samples: errors of displacement and speed after one step, by the model and by "constant
# velocity" (cv), how many targets are conflicts; in stage 2, displacement after H steps and the loss of conflicts too.
ERRORS = ("loss_held_out", "rmse_position", "rmse_speed", "rmse_position_cv", "rmse_speed_cv", "conflict_rate",
          "rmse_position_h", "rmse_position_h_cv", "loss_conflict")
CONFLICT_WEIGHT = 3.0  # conflicts are rare: unweighted, their part of the shared layers' gradient drowns


class WorldModelLoss(nn.Module):
    """Phase 1. `stage` 1 trains the next state, 2 also the next H states and the conflict probability. `cfg`: settings
    of the phase, read at each call: the memory guard may switch `checkpointing` on."""

    def __init__(self, model, stage, cfg):
        super().__init__()
        self.gnn, self.world_model = model.risk_gnn, model.world_model
        self.stage, self.cfg = stage, cfg

    def forward(self, batch, count):
        """batch: see `prepare`. Returns (loss, dictionary of predictions)."""
        frames = batch["nodes"].shape[:2]  # (B, T)
        flat = [batch[name].flatten(0, 1) for name in INPUTS]
        embedding = self.gnn(*flat).unflatten(0, frames)
        state = self.world_model.initial_state(frames[0], flat[0].shape[1], device=embedding.device)
        memory = self.world_model.sequence(embedding, state, batch["fresh"], self.cfg.checkpointing)
        return world_model_loss(self.world_model, memory, batch, count, self.stage, self.cfg.checkpointing)


def predictions(world_model, memory, speed, stage):
    """What the decoders of a stage say."""
    out = {"next": world_model.predict_next(memory, speed)}
    if stage == 2:
        flow, risk = world_model.latents(memory)
        out["states"], out["conflict"] = world_model.predict_states(flow, speed), world_model.predict_conflict(risk)
    return out


def world_model_loss(world_model, memory, batch, count, stage=2, checkpointing=False):
    """Loss and predictions of the world model from its memory [B, T, N, W]; shared by phases 1 and 3."""
    speed, target, valid = batch["speed"], batch["states"], batch["target_valid"]
    if checkpointing:  # step by step, as the memory itself: only one step's activations exist at a time
        steps = [checkpoint(predictions, world_model, *step, stage, use_reentrant=False)
                 for step in zip(memory.unbind(1), speed.unbind(1))]
        out = {name: torch.stack([step[name] for step in steps], 1) for name in steps[0]}
    else:
        out = predictions(world_model, memory, speed, stage)
    loss = objectives.state_loss(out["next"][..., None, :], target[..., :1, :], valid[..., :1], count)
    if stage == 2:
        conflicts = objectives.within_horizon(batch["conflicts"], valid)
        loss = loss + objectives.state_loss(out["states"], target, valid, count)
        loss = loss + CONFLICT_WEIGHT * objectives.conflict_loss(out["conflict"], *conflicts, count)
    return loss, out


def prepare(samples, horizon):
    """Model inputs and targets from a batch of samples as data.dataset gives them (F = T + H frames)."""
    steps = samples["nodes"].shape[1]
    states, valid, conflicts = objectives.motion_targets(samples["moved"], samples["speed"], samples["present"],
                                                         samples["fresh"], samples["conflict"], horizon)
    graph = {name: samples[name] for name in INPUTS if name != "mask"}
    return {**graph, "mask": samples["present"][:, :steps], "fresh": samples["fresh"][:, :steps],
            "speed": samples["speed"][:, :steps], "states": states, "conflicts": conflicts,
            "target_valid": valid & samples["usable"][..., None]}


def prediction_errors(out, batch, interval, loss, stage):
    """[n, 2] float64 sums over the valid targets, and their numbers, for each of ERRORS that the stage knows."""
    valid, target, speed = batch["target_valid"], batch["states"], batch["speed"]
    square = lambda x, where: ((x[where].double() ** 2).sum(), where.sum())  # noqa: E731
    model, steady = (x - target[..., 0, :] for x in (out["next"], torch.stack([speed * interval, speed], -1)))
    sums = [(loss, valid.sum()), *(square(x[..., i], valid[..., 0]) for x in (model, steady) for i in (0, 1)),
            (batch["conflicts"][valid].sum(), valid.sum())]
    if stage == 2:
        ahead, conflicts = target.shape[-2] * interval, objectives.within_horizon(batch["conflicts"], valid)
        sums += [*(square(x - target[..., -1, 0], valid[..., -1]) for x in (out["states"][..., -1, 0], speed * ahead)),
                 (objectives.conflict_loss(out["conflict"], *conflicts, 1.0), conflicts[1].sum())]
    return torch.tensor(sums, dtype=torch.float64)


class PPOLoss(nn.Module):
    """Phase 2: the clipped surrogate, both value losses and the entropy bonus, on stored features.

    In float32 under autocast too, because the rollout decides in float32: the first ratio must be exactly 1.
    """

    def __init__(self, model, ppo):
        super().__init__()
        self.controller, self.ppo = model.controller, ppo

    def forward(self, batch, count, imitate=False):
        """batch: one of runtime.storage.Minibatches, candidates as rows [R, F] and their `place` [B, C], 0 = none.
        Returns (loss, sums for the log). `imitate`: the batch holds a rule's choices, all of them worth learning."""
        with torch.autocast(batch["scene"].device.type, enabled=False):
            return self._loss(batch, count, imitate)

    def _loss(self, batch, count, imitate):
        candidates, place, scene = batch["candidates"].float(), batch["place"], batch["scene"].float()
        scores = self.controller.influence(candidates)[place].masked_fill(place == 0, -torch.inf)
        chosen = stored_choice(batch)
        if imitate:
            chosen = with_runners_up(scores, chosen)
            chosen["valid"] = chosen["valid"] & ~batch["lost"][:, None]  # whose simulator died teaches nothing
        picked = candidates[place.gather(1, chosen["picks"])]
        evaluated = self.controller.evaluate_picked(scores, picked, scene, chosen)
        if not imitate:
            return ppo_terms(self.controller, evaluated, scene, batch, self.ppo, count)
        # The log-likelihood takes the surrogate's place: all of the rule's picks, of the others the release.
        batch = {**batch, "log_prob": evaluated[0].detach(), "advantage": torch.zeros_like(batch["advantage"]),
                 "price": torch.zeros_like(batch["price"]), "pick_valid": chosen["valid"]}
        loss, log = ppo_terms(self.controller, evaluated, scene, batch, self.ppo, count)
        order = plackett_luce(scores, chosen["picks"], chosen["valid"]).masked_fill(~chosen["release"], 0.0)
        likelihood = (evaluated[0] - order).sum() / count
        return loss - likelihood, {**log, "loss_policy": -likelihood.detach()}


def stored_choice(batch):
    """What the policy chose, under the names of Controller.select."""
    return {**{name: batch[name] for name in ("picks", "u", "lane", "release", "pace")}, "valid": batch["pick_valid"]}


def ppo_terms(controller, evaluated, scene, batch, ppo, count):
    """PPO's loss from what Controller.evaluate returned and scene features; shared by phases 2 and 3."""
    log_prob, entropy, effort = evaluated
    policy, kl, clipped, picks = objectives.ppo_loss(log_prob, batch["log_prob"], batch["advantage"],
                                                     batch["pick_valid"], ppo.clip, count)
    value = controller.value.loss(scene, batch["return"], count)
    cost_value = controller.cost_value.loss(scene, batch["cost_return"], count)
    bonus = entropy.sum() / count
    # Commands are priced as expected, not as drawn: in advantages, their price drowns in the traffic's noise.
    priced = (effort * batch["price"]).sum() / count
    loss = policy + priced + ppo.value_weight * value + ppo.cost_value_weight * cost_value - ppo.entropy_weight * bonus
    return loss, {"loss_policy": policy.detach(), "loss_value": value.detach(), "loss_cost_value": cost_value.detach(),
                  "entropy": bonus.detach(), "kl": kl, "clip_share": clipped, "picks": picks}


class ConstrainedLoss(nn.Module):
    """Phase 3: PPO on the Lagrangian's advantage, auxiliary world-model loss and the shield's risk head.

    The world model runs over whole sequences (gradient checkpointing); the controller sees its memory detached, so
    that the policy's gradient does not bend the predictions.
    """

    def __init__(self, model, ppo, phase3):
        super().__init__()
        self.model, self.ppo, self.cfg = model, ppo, phase3
        self.reference = copy.deepcopy(model.controller).requires_grad_(False) if phase3.anchor else None

    @staticmethod
    def counts(batch):
        """What the three parts of the loss are averaged over: control steps, predictions, ICVs with a known future."""
        known = batch["target_valid"]
        _, horizon = objectives.within_horizon(batch["conflicts"], known)
        return batch["advantage"].numel(), known.sum(), (horizon[..., -1] & batch["icv"]).sum()

    def forward(self, batch, counts):
        """batch: tensors [B, L, ...] of sequences (see train_ddp.make_sequences); counts: global ones of `counts` over
        ranks. Returns (loss, values for the log)."""
        model, cfg, (count, target_count, risk_count) = self.model, self.cfg, counts
        embedding = batch["embedding"].float()
        memory = model.world_model.sequence(embedding, batch["before"].float(), batch["fresh"], cfg.checkpointing)
        flat = {name: batch[name].flatten(0, 1) for name in batch if name != "before"}
        seen = model.features(flat["embedding"].float(), memory.detach().flatten(0, 1), flat["nodes"], flat["surround"],
                              flat["globals"], flat["mask"], flat["icv"])
        with torch.autocast(embedding.device.type, enabled=False):  # as PPOLoss
            loss, log = self._policy_loss(seen, flat, count)
        ahead, known = (x[..., -1].gather(1, seen["slots"])
                        for x in objectives.within_horizon(flat["conflicts"], flat["target_valid"]))
        known = known & seen["valid"]
        risk = objectives.conflict_loss(seen["risk_logit"], ahead, known, risk_count)
        loss, log = loss + cfg.risk_weight * risk, {**log, "loss_risk": risk.detach()}
        if not cfg.world_model_weight:
            return loss, log
        aux, _ = world_model_loss(model.world_model, memory, batch, target_count, checkpointing=cfg.checkpointing)
        return loss + cfg.world_model_weight * aux, {**log, "loss_world_model": aux.detach()}

    def _policy_loss(self, seen, flat, count):
        controller, chosen = self.model.controller, stored_choice(flat)
        inputs = seen["candidates"].float(), seen["valid"], seen["scene"].float()
        loss, log = ppo_terms(controller, controller.evaluate(*inputs, chosen), inputs[-1], flat, self.ppo, count)
        if self.reference is None:
            return loss, log
        far = controller.divergence(self.reference, *inputs, chosen).sum() / count
        return loss + self.cfg.anchor * far, {**log, "divergence": far.detach()}
