"""Metrics with a fixed vocabulary: one JSON line per record in metrics.jsonl and one aligned line on the console."""
import json
import math
import os
import sys
import time
from pathlib import Path

# Name -> meaning. A name outside this table is refused; the README's glossary is compared with it by a test.
VOCABULARY = {
    "phase": "1, 2 or 3",
    "epoch": "pass over the data (phase 1), collect-and-learn round (phases 2 and 3)",
    "time": "seconds since 1970",
    "stage": "stage of phase 1: 1 = next state, 2 = next H states and conflicts",
    "loss": "training loss",
    "loss_held_out": "world-model loss on held-out episodes",
    "rmse_position": "held-out RMSE of the displacement after one control step, m",
    "rmse_speed": "held-out RMSE of the speed after one control step, m/s",
    "rmse_position_cv": "the same displacement error of 'constant velocity', m",
    "rmse_speed_cv": "the same speed error of 'constant velocity', m/s",
    "rmse_position_h": "held-out RMSE of the displacement after H control steps, m",
    "rmse_position_h_cv": "the same of 'constant velocity', m",
    "conflict_rate": "share of held-out targets with a conflict",
    "loss_conflict": "held-out cross entropy of the conflict probability",
    "loss_policy": "PPO's clipped surrogate; of the warm start, minus the log-likelihood of the rule's choices",
    "loss_value": "squared error of the value head",
    "loss_cost_value": "squared error of the cost-value head",
    "loss_world_model": "auxiliary world-model loss of phase 3",
    "loss_risk": "cross entropy of the shield's risk head",
    "entropy": "entropy of the policy per control step",
    "kl": "estimated KL divergence from the policy that sampled, per pick",
    "clip_share": "share of picks whose ratio left the clip range",
    "updates": "optimiser steps so far",
    "lr": "learning rate",
    "grad_norm": "mean gradient norm before clipping",
    "loss_scale": "loss scale of mixed precision (1 = off)",
    "overflow_share": "share of optimiser steps skipped because of an overflow",
    "return": "reward summed over an episode, mean over the episodes that ended in this record",
    "reward": "mean reward per control step",
    "c_int": "intervention cost per control step and ICV, mean",
    "episodes": "episodes that ended in this record",
    "ocr": "mean share of loaded vehicles that arrived, over ended episodes",
    "collisions": "collisions in ended episodes",
    "overflow_vehicles": "vehicle-steps beyond env.max_vehicles",
    "lost_steps": "control steps lost to simulators or workers that crashed or froze",
    "shield_clips": "commands weakened by level 1 of the shield, share",
    "shield_emergencies": "emergency brakings by level 2 of the shield, share",
    "released": "share of picks that were released (no command)",
    "multiplier": "Lagrange multiplier (price of intervention cost)",
    "limit": "present limit of C_int",
    "env_steps": "environment control steps so far, all ranks",
    "env_steps_per_s": "environment control steps per second while collecting, all ranks",
    "samples_per_s": "training samples per second, all ranks",
    "time_collect": "seconds spent collecting",
    "time_infer": "seconds of it spent in inference",
    "time_wait": "seconds of it spent waiting for the workers",
    "time_store": "seconds of it spent storing the rollout, while the workers simulate",
    "time_simulate": "seconds of a worker (mean) in which its SUMO simulated",
    "time_read": "seconds of a worker reading SUMO",
    "time_graph": "seconds of a worker building observations",
    "time_idle": "seconds of a worker waiting for orders",
    "time_learn": "seconds spent learning",
    "memory_mb": "memory of this process and its children (PSS), MB",
}
SHOWN = ("stage", "loss", "loss_held_out", "rmse_position", "rmse_position_cv", "return", "reward", "c_int",
         "multiplier", "limit", "ocr", "released", "kl", "env_steps_per_s", "samples_per_s", "memory_mb")


class Metrics:
    """`record` appends to <folder>/metrics.jsonl and prints; a rank that is not the first does neither."""

    def __init__(self, folder, phase, active=True):
        self.path, self.phase, self.active = Path(folder) / "metrics.jsonl", phase, active

    def record(self, epoch, total, **values):
        """Write one record; `epoch` of `total`. Unknown names are a programming error (KeyError)."""
        unknown = sorted(set(values) - set(VOCABULARY))
        if unknown:
            raise KeyError(f"metrics not in runtime.metrics.VOCABULARY: {unknown}")
        if not self.active:
            return
        row = {"phase": self.phase, "epoch": epoch, "time": round(time.time(), 2),
               **{k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in values.items()}}
        self._append(json.dumps(row) + "\n")
        shown = "  ".join(f"{name} {_short(row[name])}" for name in SHOWN if row.get(name) is not None)
        print(f"phase {self.phase}  {epoch:>4d}/{total}  {shown}", flush=True)

    def _append(self, line):
        """Add a line, whole or not at all: a full disk costs the record, not the training."""
        with open(self.path, "ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(line.encode()) == len(line.encode()):
                    return
                problem = "no space left"
            except OSError as error:
                problem = error.strerror
            file.truncate(end)
        print(f"WARNING: {self.path}: this record could not be written: {problem}", file=sys.stderr, flush=True)

    def drop_after(self, epoch):
        """Forget this phase's records after `epoch`: a resumed run writes them again."""
        if not self.active or not self.path.exists():
            return
        rows = read_metrics(self.path)
        kept = [r for r in rows if r["phase"] != self.phase or r["epoch"] <= epoch]
        if len(kept) != len(rows) or not self.path.read_text().endswith("\n"):  # half a line swallows the next
            temporary = self.path.with_name(f".{self.path.name}.tmp")
            temporary.write_text("".join(json.dumps(r) + "\n" for r in kept))
            os.replace(temporary, self.path)


def read_metrics(path):
    """All complete records of a metrics.jsonl."""
    rows = []
    for line in Path(path).read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # the last line of a run that was killed while writing
            continue
    return rows


def _short(value):
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"
