"""What the training scripts share: run folders, the first weights of a phase, resuming, and means for the log."""
import hashlib
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from configs import Config, ConfigError, dump_config, to_dict
from configs.options import differences, leaves
from runtime import checkpoint
from runtime.distributed import check_shared
from runtime.profiler import profile_steps
from runtime.resources import claim_phase


def run_folder(cfg, team):
    """runs/<name>, created; ConfigError when it is not one folder for all nodes."""
    folder = Path(cfg.run.folder) / cfg.run.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: no folder can be made there ({error.strerror}); change run.folder") from None
    check_shared(folder, team)
    return folder


def save_config(cfg, folder):
    """Write config.yaml of a run folder, and print what differs from the defaults."""
    dump_config(cfg, folder / "config.yaml")
    changed = [f"{key}={value}" for (key, value, _), (_, default, _) in zip(leaves(cfg), leaves(Config()))
               if value != default]
    print(f"configuration: {folder / 'config.yaml'}; not default: {', '.join(changed) or 'nothing'}", flush=True)


def schema(cfg):
    """What must be equal for weights to mean the same: checked whenever they move between phases or runs."""
    return {"preset": cfg.model.preset, "features": "nodes9-edges4-globals16-surround14-downstream2",
            "risk_bias": cfg.model.risk_bias, "future": cfg.data.future, "control_interval": cfg.env.control_interval,
            "max_commands": cfg.env.max_commands}


def first_weights(model, cfg, folder, phases, say):
    """Start from the first of `phases` that has a checkpoint (phase 1: its best); say loudly when there is none, unless
    this phase has its own to continue from. Returns what it was, for `Progress.resume`."""
    say = (lambda text: None) if (folder / f"phase{max(phases) + 1}" / "latest").exists() else say
    for phase in phases:
        source = folder / f"phase{phase}"
        state = checkpoint.load(source, "best" if phase == 1 else "latest")
        if state is not None:
            checkpoint.load_weights(model, state.get("weights"), schema(cfg), source)
            config, counters = state.get("config"), state.get("counters")
            if not all(isinstance(x, dict) for x in (config, counters)) or not isinstance(config.get("model"), dict):
                raise checkpoint.CheckpointError(f"{source}: not a checkpoint of this program (no configuration)")
            if phase != phases[0]:
                say(f"NOTE: no checkpoint of phase {phases[0]} in {folder}: what it teaches is missing")
            say(f"weights: {source} (epoch {state.get('epoch')})")
            room = config["model"].get("lane_room_m", cfg.model.lane_room_m)
            if phase > 1 and room != cfg.model.lane_room_m:
                say(f"NOTE: it learned with model.lane_room_m={room} and goes on with {cfg.model.lane_room_m}")
            digest = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in model.state_dict().values()))
            return (f"phase {phase}, epoch {state.get('epoch')}, {counters.get('updates')} updates, weights "
                    + digest.hexdigest()[:8])
    say(f"NOTE: no checkpoint of phase {' or '.join(map(str, phases))} in {folder}: these parts start untrained")
    return "nothing"


def check_moments(optimizer):
    """ValueError where a loaded state is not that of the parameter that it belongs to, or no numbers: PyTorch looks at
    the number of parameters only, and would fail in the first step."""
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if torch.is_tensor(value) and (value.dim() and value.shape != parameter.shape or value.isnan().any()):
                raise ValueError(f"optimizer: {name} {list(value.shape)} for parameter {list(parameter.shape)}, or NaN")


HEARD = {"phase1": (), "phase2": ("reward", "shield", "baselines"), "phase3": ("phase2", "reward", "shield")}  # too
COUNTERS = {"epoch": 0, "updates": 0, "samples": 0, "env_steps": 0, "best": math.inf, "lr_factor": 1.0,
            "plateau_stage": 0, "plateau_best": math.inf, "plateau_wait": 0}  # a phase may have more


class Progress:
    """Everything a phase must save to continue: model, optimiser, scaler, counters, random states of all ranks."""
    patience = 3  # checkpoints in a row that may fail

    def __init__(self, cfg, team, folder, model, optimizer, scaler, anchor=None):
        self.anchor = anchor  # a module that the loss compares with, or None
        self.cfg, self.team, self.folder = cfg, team, folder
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.counters, self.failures, self.trained_with = dict(COUNTERS), 0, None
        if team.is_main:
            self.locks = claim_phase(folder)  # held until this process ends
            profile_steps(optimizer, cfg.profile, folder)

    def resume(self, begun=None, traffic=None):
        """Continue from the newest complete checkpoint; False when there is none. What the phase would begin with now:
        weights `begun` (`first_weights`), `traffic` (data.settings.traffic_hash)."""
        self.counters.update(begun=begun, traffic=traffic)
        state = checkpoint.load(self.folder)
        counters = (state or {}).get("counters")
        seen = self.team.gather(str(counters.get("updates")) if isinstance(counters, dict) else None)
        if len(set(seen)) > 1:  # a network file system may show a node an older moment
            raise checkpoint.CheckpointError(f"{self.folder}: the ranks see different checkpoints (updates {seen}); "
                                             "start again")
        if state is None:
            return False
        checkpoint.load_weights(self.model, state.get("weights"), schema(self.cfg), self.folder)
        decay = [group["weight_decay"] for group in self.optimizer.param_groups]  # may have been changed since
        try:
            self.optimizer.load_state_dict(state["optimizer"])
            for group, own in zip(self.optimizer.param_groups, decay):
                group["weight_decay"] = own
            check_moments(self.optimizer)
            self.scaler.load_state_dict(state["scaler"])
            if self.anchor is not None and "anchor" in state:
                self.anchor.load_state_dict(state["anchor"])
            kinds = {name: (int, float) if isinstance(own, (int, float)) else type(own)
                     for name, own in self.counters.items() if name in counters and name not in ("begun", "traffic")}
            if (not all(isinstance(counters[name], kind) and counters[name] == counters[name]  # no NaN
                        for name, kind in kinds.items()) or not isinstance(counters["updates"], int)):
                raise ValueError(f"counters {counters}")
            self.counters.update(counters, epoch=int(counters["epoch"]))
            ranks = [rank["random"] for rank in state["ranks"]]
            if len(ranks) == self.team.world:
                checkpoint.restore_random_state(ranks[self.team.rank], self.team.device)
            else:
                self.team.say(f"NOTE: saved by {len(ranks)} ranks, resumed by {self.team.world}: random states start "
                              "anew")
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise checkpoint.CheckpointError(f"{self.folder}: cannot be continued from, incomplete or of another "
                                             f"program: {type(error).__name__} {error}") from None
        self.team.say(f"resumed from {self.folder} (epoch {counters['epoch']}, {counters['updates']} updates)")
        c, anew = self.counters, f"; coordinator.py --from-phase {self.folder.name[-1]} begins it anew"
        if c["begun"] is not None and not str(begun).startswith(c["begun"]):  # older ones do not name the weights
            self.team.say(f"NOTE: {self.folder} began from {c['begun']}, not from what is there now, {begun}{anew}")
        if traffic != c["traffic"] is not None:
            self.team.say(f"NOTE: {self.folder} began with another scenario, or its files, demand or drivers{anew}")
        self.trained_with = state.get("config")
        return True

    def note_changes(self, epochs):
        """Say so where the phase, of so many epochs, is over, and was trained with other settings than those of now."""
        name, before, changed = self.folder.name, self.trained_with, []
        if self.counters["epoch"] < epochs or not isinstance(before, dict):
            return
        for section in (name, *HEARD[name]):
            now, length = asdict(getattr(self.cfg, section)), "iterations" if section == "phase2" else "epochs"
            changed += [text for text in differences({**now, **before.get(section, {})}, now, f"{section}.")
                        if not text.startswith(f"{section}.{length} ")]  # fewer of them is no other way of training
        if changed:
            self.team.say(f"NOTE: {self.folder} is finished, and was trained otherwise: {'; '.join(changed[:5])}; "
                          f"coordinator.py --from-phase {name[-1]} begins it anew")

    def begin_data(self, name, epochs):
        """Note which data set is learned from. On another one than before, an epoch begins anew and so does the search
        for the best one: losses on different data do not compare."""
        c, told = self.counters, f"NOTE: {self.folder} was trained on other data than these (processed/{name})"
        if c.setdefault("data", name) == name:
            return
        c.update(data=name, samples=0, best=math.inf, plateau_stage=0)
        self.team.say(f"{told}: the best epoch is looked for anew" if c["epoch"] < epochs else
                      f"{told}, and nothing is learned from these: no epoch is left; raise phase1.epochs, or name "
                      "another run.name")

    def save(self, value=math.inf, may_fail=False):
        """All ranks call this at the same step; the first writes. A `value` lower than any before makes it the best
        one. With `may_fail` a full disk is a warning, unless it is the third one in a row, counted in `failures`;
        otherwise it is a SaveError on all ranks."""
        c, bar, error = self.counters, self.counters["best"], None
        c["best"] = min(bar, value)
        state = self._state()
        try:
            if self.team.is_main:
                checkpoint.save(self.folder, c["updates"], state, self.cfg.checkpoint.keep_last, value < bar)
        except checkpoint.SaveError as caught:
            error = caught
        said = next(filter(None, self.team.gather(error and str(error))), None)  # waits for the first rank
        self.failures = self.failures + 1 if said else 0
        c["best"] = bar if self.failures else c["best"]
        if self.failures and (not may_fail or self.failures == self.patience):
            raise error or checkpoint.SaveError(said)
        if error:
            print(f"WARNING: {error}; older ones are intact, training goes on", file=sys.stderr, flush=True)

    def _state(self):
        """What a checkpoint holds; all ranks call this."""
        ranks = self.team.gather({"random": checkpoint.random_state(self.team.device)})
        return {"weights": {"model": self.model.state_dict(), "schema": schema(self.cfg)},
                "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(),
                "counters": self.counters, "epoch": self.counters["epoch"], "ranks": ranks,
                "config": to_dict(self.cfg), **({} if self.anchor is None else {"anchor": self.anchor.state_dict()})}


def rescale_values(controller, team, batch):
    """Let both value networks adopt the moments of this round's returns (half old, half new after the first)."""
    for net, name in ((controller.value, "return"), (controller.cost_value, "cost_return")):
        mean, std = team.moments(batch[name])
        first = float(net.mean) == 0.0 and float(net.std) == 1.0
        keep = 0.0 if first else 0.5
        net.rescale(keep * float(net.mean) + (1 - keep) * mean, keep * float(net.std) + (1 - keep) * std)


def mean_logs(team, logs):
    """Means of scalar tensors over optimiser steps [{name: tensor}] and ranks, as numbers; the only read of them.

    What PPO sums over picks comes back as a mean over all picks, however they are spread over steps and ranks.
    """
    columns = {name: torch.stack([log[name] for log in logs]).double() for name in logs[0]}
    norms = columns["grad_norm"]  # not of steps that overflowed, and were skipped
    columns["grad_norm"] = norms.where(norms.isfinite(), math.nan).nanmean()
    local = [values.mean().to(team.device) for values in columns.values()]
    means = {name: total / team.world for name, total in zip(logs[0], team.all_sum(torch.stack(local)))}
    picks = max(means.pop("picks", 0.0), 1e-9)
    means = {name: mean / picks if name in ("kl", "clip_share") else mean for name, mean in means.items()}
    return {**means, **gpu_use(team.device)}


def gpu_use(device):
    """{"gpu_use": share of its time in which the GPU computed of late}, empty where nobody can tell."""
    if device.type != "cuda":
        return {}
    try:
        return {"gpu_use": torch.cuda.utilization(device) / 100}
    except Exception:  # no nvidia-ml-py, or a driver (WSL2) that does not say
        return {}


def episode_facts(team, facts):
    """Means over the episodes that ended on all ranks, shield shares, rates and times of one collection."""
    own = {"episodes": len(facts["episodes"]), **{k: v for k, v in facts.items() if k != "episodes"}}
    for key in ("return", "ocr", "collisions", "overflow", "mean_speed"):
        own[key] = sum(episode[key] for episode in facts["episodes"])
    own["return_per_icv"] = sum(episode["return"] / max(episode["icvs"], 1) for episode in facts["episodes"])
    f = dict(zip(own, team.all_sum(list(own.values()))))
    result = {"episodes": int(f["episodes"]), "shield_clips": f["clips"] / max(f["commands"], 1),
              "shield_emergencies": f["emergencies"] / max(f["commands"], 1),
              "lost_steps": int(f["lost_steps"]),
              "env_steps_per_s": f["steps"] * team.world / max(f["time_collect"], 1e-9),
              **{key: f[key] / team.world for key in f if key.startswith("time_")}}
    if f["episodes"]:
        result.update({**{key: f[key] / f["episodes"] for key in ("return", "return_per_icv", "ocr", "mean_speed")},
                       "collisions": int(f["collisions"]), "overflow_vehicles": int(f["overflow"])})
    return result


def to_device(batch, device):
    """Move a dictionary of tensors; what is stored in float16 becomes float32 there."""
    moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    return {name: value.float() if value.dtype == torch.float16 else value for name, value in moved.items()}
