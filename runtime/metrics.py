"""Metrics with a fixed vocabulary: one JSON line per record in metrics.jsonl, one line on the console, TensorBoard's
events where it is installed, and warnings about what looks wrong."""
import contextlib
import functools
import json
import math
import statistics
import sys
import threading
import time
from pathlib import Path

from configs import console
from configs.files import write_whole

# Name -> meaning. A name outside this table is refused; the README's glossary is compared with it by a test.
VOCABULARY = {
    "phase": "1, 2 or 3",
    "epoch": "pass over the data (phase 1), collect-and-learn round (phases 2 and 3)",
    "time": "seconds since 1970",
    "curriculum_stage": "stage of phase 2's curriculum, from 0",
    "imitated": "1 where phase 2 learned a rule's choices (warm start), 0 where its own",
    "stage": "stage of phase 1: 1 = next state, 2 = next H states and conflicts",
    "loss": "training loss; of an epoch that was stopped and continued, that of its rest",
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
    "loss_value": "half the squared error of the value head, in its normalised units",
    "loss_cost_value": "half the squared error of the cost-value head, likewise",
    "loss_world_model": "auxiliary world-model loss of phase 3",
    "loss_risk": "cross entropy of the shield's risk head",
    "entropy": "entropy of the policy per control step",
    "kl": "estimated KL divergence from the policy that sampled, per pick, mean of the steps",
    "divergence": "KL divergence from the policy of phase 2, per control step (phase3.anchor)",
    "clip_share": "share of picks whose ratio left the clip range",
    "updates": "optimiser steps so far",
    "lr": "learning rate",
    "grad_norm": "mean gradient norm before clipping",
    "loss_scale": "loss scale of mixed precision (1 = off)",
    "not_finite": "training rows with NaN or infinite values that were left out (data.on_bad_row)",
    "overflow_share": "share of optimiser steps skipped because of an overflow",
    "return": "reward summed over an episode, mean over the episodes that ended in this record",
    "return_per_icv": "return divided by the mean number of ICVs present, over ended episodes",
    "mean_speed": "mean speed of all vehicles, m/s, over ended episodes",
    "reward": "mean reward per control step",
    "c_int": "intervention cost per control step and ICV, mean",
    "icvs": "connected vehicles present, mean",
    "episodes": "episodes that ended in this record",
    "ocr": "mean share of loaded vehicles that arrived, over ended episodes",
    "collisions": "collisions in ended episodes",
    "overflow_vehicles": "vehicle-steps beyond env.max_vehicles",
    "lost_steps": "control steps lost to simulators or workers that crashed or froze",
    "shield_clips": "accelerations weakened by level 1 of the shield, share of the commands",
    "shield_emergencies": "emergency brakings by level 2 of the shield, share of the commands",
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
    "gpu_use": "share of time in which the first rank's GPU computed, sampled after learning (needs nvidia-ml-py)",
    "memory_mb": "memory of all processes of the run on this machine (PSS), MB",
    "memory_learner_mb": "of it the learners' and their data loaders', MB",
    "memory_worker_mb": "of it the rollout workers', MB",
    "memory_sumo_mb": "of it the simulators', MB",
    "memory_other_mb": "of it the rest's: coordinator, torchrun, MB",
    "memory_share": "memory in use, without pages of files, as share of the tightest limit (memory.budget_gb)",
    "gpu_allocated_mb": "tensors of the first learner on its GPU, MB",
    "gpu_reserved_mb": "what PyTorch keeps there for them, MB",
    "gpu_peak_mb": "the most of `gpu_allocated_mb` since the record before, MB",
}
# On the console, what matters most first: a terminal cuts the line.
SHOWN = ("stage", "loss_held_out", "return", "c_int", "rmse_position", "rmse_position_cv", "reward", "loss",
         "multiplier", "limit", "ocr", "released", "kl", "env_steps_per_s", "samples_per_s", "memory_mb")
RECENT = 10  # records
# Metric, sign of what is worse, for the divergence check.
DIVERGING = (("loss_held_out", 1), ("return", -1))


class Metrics:
    """`record` appends to <folder>/metrics.jsonl, to <folder>/tensorboard if `board`, and prints; a rank that is not
    the first does nothing."""

    def __init__(self, folder, phase, active=True, board=False):
        self.path, self.phase, self.active = Path(folder) / "metrics.jsonl", phase, active
        self.board, self.writer = board, None

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
        console.progress(f"phase {self.phase}", epoch, total, shown)
        try:
            self._draw(epoch, row)
        except (OSError, RuntimeError) as error:  # a full disk, no more threads: the curves end, not the training
            self.board, self.writer = False, None
            why = getattr(error, "strerror", None) or error
            console.say(f"WARNING: {self.path.parent / 'tensorboard'}: {why}; no more is drawn")
        rows = [r for r in read_metrics(self.path) if r["phase"] == self.phase] if self.path.exists() else []
        known = findings(rows[:-1])
        for kind, text in findings(rows).items():
            if kind not in known:  # said when it begins
                console.say(f"WARNING: {text}")

    def _draw(self, epoch, row):
        if self.board and self.writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter  # an extra
            except ImportError:
                self.board = False
                return
            threading.excepthook = functools.partial(_leave_to_record, otherwise=threading.excepthook)
            folder = self.path.parent / "tensorboard" / f"phase{self.phase}"
            self.writer = SummaryWriter(str(folder), purge_step=epoch)  # a resumed run draws these again
        if self.writer is not None:
            for name in [name for name, value in row.items() if value is not None and name not in ("phase", "time")]:
                self.writer.add_scalar(name, row[name], epoch, row["time"])
            self.writer.flush()

    def _append(self, line):
        """Add a line, whole or not at all: a full disk costs the record, not the training."""
        problem = "no space left"
        try:
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(line.encode()) == len(line.encode()):
                    return
                file.truncate(end)
        except OSError as error:
            problem = error.strerror
        print(f"WARNING: {self.path}: this record could not be written: {problem}", file=sys.stderr, flush=True)

    def drop_after(self, epoch):
        """Forget this phase's records after `epoch`: a resumed run writes them again."""
        console.begin(f"phase {self.phase}", epoch)
        if not self.active or not self.path.exists():
            return
        rows = read_metrics(self.path)
        kept = [r for r in rows if r["phase"] != self.phase or isinstance(r["epoch"], int) and r["epoch"] <= epoch]
        if len(kept) != len(rows) or not self.path.read_bytes().endswith(b"\n"):  # half a line swallows the next
            write_whole(self.path, "".join(json.dumps(r) + "\n" for r in kept))


def _leave_to_record(about, otherwise):
    """TensorBoard writes in a thread, which would print a traceback of what its next call raises in ours as well."""
    if not isinstance(about.exc_value, OSError) or "tensorboard" not in type(about.thread).__module__:
        otherwise(about)


def read_metrics(path):
    """All complete records of a metrics.jsonl."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):  # the last line of a run that was killed while writing
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and {"phase", "epoch", "time"} <= row.keys()]


def findings(rows):
    """{kind: what looks wrong and what to do} in the records of a phase; the last ones decide."""
    # Losses and gradients of stage 1 are small, those of the warm start large; other ones follow.
    rows = [row for row in rows if row.get("stage") != 1 and not row.get("imitated")]
    found, recent = {}, {name: _values(rows, name)[-RECENT:] for name in ("grad_norm", "overflow_share")}
    norm, share = (statistics.fmean(values) if len(values) == RECENT else None for values in recent.values())
    if norm is not None and not 0.1 <= norm <= 10:
        found["grad_norm"] = (f"gradient norm {norm:.3g} (mean of the last {RECENT} records), usual are 0.1 to 10: "
                              + ("lower lr, or look for outliers in the data" if norm > 10 else
                                 "little is learned any more: fine at the end, else raise lr"))
    if share is not None and share > 0.01:
        found["overflow_share"] = (f"{share:.1%} of the last optimiser steps overflowed: lower amp.init_scale, raise "
                                   "amp.growth_interval, or set amp.dtype=off")
    for name, sign in DIVERGING:
        values = _values(rows, name)
        before, last = values[:-RECENT], values[-RECENT:]
        if (len(before) >= RECENT and statistics.pstdev(last) > 2 * statistics.pstdev(before)
                and sign * statistics.fmean(last) > sign * statistics.fmean(before)):
            found[name] = (f"{name} diverges: its last {RECENT} values spread {statistics.pstdev(last):.3g}, those "
                           f"before {statistics.pstdev(before):.3g}, and they got worse; lower lr or clip_norm and "
                           "begin the phase again")
    return found


def _values(rows, name):
    return [row[name] for row in rows if row.get(name) is not None]


def _short(value):
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"
