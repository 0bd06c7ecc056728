"""Warm start of phase 2: a rule drives, and the controller learns to choose and to command as the rule does."""
import torch

from models.controller import ACCEL_CENTRE, ACCEL_RANGE, KEEP, take
from models.policy import Driver


class RuleDriver(Driver):
    """A Driver that asks a rule instead of the controller. Its choices are the rule's in the policy's terms. With
    `corrects` the policy itself drives, without noise, and the choices are what the rule would have done where that
    leads (DAgger, Ross et al. 2011).

    `make_rule(env)` gives the rule of an environment's episode when its first choice is due: (observation, k) -> (slot,
    accel, lane, brake), arrays of length k.
    """

    def __init__(self, make_rule, *args, corrects=False, **options):
        super().__init__(*args, **options)
        self.make_rule, self.rules, self.corrects = make_rule, {}, corrects

    def forget(self, env=None):
        """A new episode in one environment, or in all."""
        super().forget(env)
        for e in range(self.num_envs) if env is None else [env]:
            self.rules.pop(e, None)

    def perceive(self, observation, envs, remember=True):
        """As in Driver; the arrays go with the result, because rules read those."""
        return {**super().perceive(observation, envs, remember), "arrays": observation, "envs": envs}

    def commands(self, seen, choice):
        """As in Driver: those of the rule's choice, or of the policy's own while the rule corrects it."""
        return super().commands(seen, super().choose(seen, None) if self.corrects else choice)

    def choose(self, seen, noise):
        """The rule's choice; `log_prob` stays that of the policy's own, which nobody learns from."""
        choice = super().choose(seen, noise)
        choice = {name: value.cpu() for name, value in choice.items()}  # a GPU would be waited for at every small step
        slots, valid = seen["slots"].cpu(), seen["valid"].cpu()
        for row, env in enumerate(seen["envs"]):
            rule = self.rules[env] = self.rules.get(env) or self.make_rule(env)
            observation = {name: value[row] for name, value in seen["arrays"].items()}
            wanted = rule(observation, choice["picks"].shape[1])
            follow({name: value[row] for name, value in choice.items()}, wanted, slots[row][valid[row]])
        choice = {name: value.to(self.device) for name, value in choice.items()}
        return with_room(choice, self.model.controller.lane_choices(take(seen["candidates"], choice["picks"])))


def follow(choice, wanted, slots):
    """Overwrite one environment's choice (tensors [K], see Controller.select) with a rule's commands `wanted` (slot,
    accel, lane, brake), in its order; `slots` are those of the candidates, others are no command."""
    place = {slot: i for i, slot in enumerate(slots.tolist())}
    own = [j for j, slot in enumerate(wanted[0]) if int(slot) in place]
    n, (accel, brake) = len(own), (torch.as_tensor(wanted[i][own], dtype=torch.float32) for i in (1, 3))
    accel = torch.where(brake > 0, -brake, accel)
    choice["valid"][:], choice["release"][:] = torch.arange(len(choice["valid"])) < n, False
    choice["picks"][:n] = torch.tensor([place[int(wanted[0][j])] for j in own], dtype=torch.long)
    choice["pace"][:n], choice["u"][:n] = ~accel.isnan(), pre_squash(accel.nan_to_num(0.0))
    choice["lane"][:n] = torch.as_tensor(wanted[2][own])


def with_room(choice, lanes):
    """A choice without the lane changes that the policy cannot make, `lanes` [B, K, 3]; whom it tells nothing else is
    released."""
    there = lanes.gather(-1, choice["lane"][..., None])[..., 0]
    return {**choice, "lane": choice["lane"].masked_fill(~there, KEEP),
            "release": choice["release"] | ~(there | choice["pace"])}


def with_runners_up(scores, chosen):
    """A rule's stored choices [B, K] with the picks that it left free: the candidates that `scores` [B, C] put next,
    released.

    They are those whom the controller itself would command beside or instead of the rule's, as it is now: the ones
    from whom it has most to learn. They come last, so that everybody whom the rule commands is to outrank them.
    """
    first = (chosen["release"] | ~chosen["valid"]).byte().argsort(dim=1, stable=True)
    chosen = {name: value.gather(1, first) for name, value in chosen.items()}
    told = chosen["valid"] & ~chosen["release"]
    place, columns = (~told).cumsum(1) - 1, torch.arange(scores.shape[1], device=scores.device)
    taken = ((chosen["picks"][..., None] == columns) & told[..., None]).any(1)
    top, others = scores.detach().masked_fill(taken, -torch.inf).topk(min(told.shape[1], len(columns)), -1)
    free = ~told & (place < others.shape[1])
    place = place.clamp(0, others.shape[1] - 1)
    free = free & torch.isfinite(top.gather(1, place))
    picks = torch.where(free, others.gather(1, place), chosen["picks"] * told)
    return {**chosen, "picks": picks, "valid": told | free, "release": ~told}


def pre_squash(accel):
    """Inverse of controller.acceleration, m/s^2 -> u, a little inside the limits."""
    share = (accel - ACCEL_CENTRE) / ACCEL_RANGE
    return torch.atanh(share.clamp(-0.95, 0.95))
