"""The memory guard: what is short is given up step by step, caches, rollout workers, at last the run itself, saved.

One process on each machine samples the whole process tree, every learner asks at its step boundaries, and all ranks
decide together:

    guard = MemoryGuard(cfg, team, stop)
    if guard.must_stop():                       # collective; a stop request counts as well
        progress.save()
        return guard.leave("after epoch 3")     # exit code 0, or 3 when memory is the reason
"""
import atexit
import gc
import signal
import threading
import time

import torch

from configs import console
from runtime.ending import note_stop
from runtime.memory import Sampler, component, process_tree, proportional_mb, tightest, tree_root

MOST_PARTS = 64  # into which a micro-batch is cut
ROLES = {"train_ddp": "learner", "train_rl": "learner", "rollout worker": "worker", "sumo": "sumo"}
ACTIONS = ("", "dropping caches", "giving up rollout workers", "saving and stopping at the next boundary")


def next_level(level, share, marks, hysteresis):
    """The level, 0 to 3, after `share` of the memory: up as soon as a mark is reached, down `hysteresis` below it."""
    reached = sum(share >= mark for mark in marks)
    held = sum(share >= mark - hysteresis for mark in marks)
    return max(reached, min(level, held))


def split(micro_batches, parts):
    """Cut each micro-batch (dictionary of tensors [B, ...], further arguments of the loss) into `parts` whose gradients
    add up to the same: every loss is a sum divided by the count of the whole step."""
    if parts == 1:
        return micro_batches
    return [(dict(zip(batch, part)), *rest) for batch, *rest in micro_batches
            for part in zip(*(value.chunk(parts) for value in batch.values()))]


def table(processes, largest=5):
    """Who uses what, as text: components, then the largest processes. `processes`: [(MB, component, pid)]."""
    rows = []
    for name in sorted({name for _, name, _ in processes}):
        own = [mb for mb, other, _ in processes if other == name]
        rows.append((sum(own), f"  {name:24s} {len(own):4d} processes {sum(own):8.0f} MB"))
    lines = [text for _, text in sorted(rows, reverse=True)]
    top = ", ".join(f"{name} (pid {pid}) {mb:.0f} MB" for mb, name, pid in sorted(processes, reverse=True)[:largest])
    return "\n".join([*lines, f"  largest: {top}"])


def budgets(settings, processes):
    """[(MB used, MB allowed, key)] of all processes and of each role that has a budget of its own. `processes`:
    [(MB, component)]."""
    found = [(sum(mb for mb, _ in processes), 1024 * settings.budget_gb, "memory.budget_gb")]
    for role in sorted(set(ROLES.values())):
        if gb := getattr(settings, f"{role}_gb"):
            used = sum(mb for mb, name in processes if ROLES.get(name) == role)
            found.append((used, 1024 * gb, f"memory.{role}_gb"))
    return found


def gpu_facts(device):
    """What this learner holds of its GPU, for the metrics; the peak is that since the last call."""
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated")
    found = [getattr(torch.cuda, name)(device) / 2 ** 20 for name in names]
    torch.cuda.reset_peak_memory_stats(device)
    return dict(zip(("gpu_allocated_mb", "gpu_reserved_mb", "gpu_peak_mb"), found))


class MemoryGuard(Sampler):
    """See above. Functions in `caches` are called to drop what can be read again. `phase`: settings of the phase that
    learns, in which gradient checkpointing may be switched on."""

    def __init__(self, cfg, team, stop):
        super().__init__(cfg.memory.every_s)
        m = self.settings = cfg.memory
        self.team, self.stop, self.root, self.caches = team, stop, tree_root(), []
        self.level = self.worst = self.exit_code = 0  # worst: since the last question
        self.fewer_workers, self.may_split = False, not cfg.ddp.static_graph
        self.gpu = team.device if team.device.type == "cuda" else None
        if self.gpu and m.gpu_fraction:
            torch.cuda.set_per_process_memory_fraction(m.gpu_fraction, self.gpu)
        self.gpu_pause, self.memory, self.table, self.phase = 0.0, {}, "", None
        self.lock = threading.Lock()
        if team.local_rank == 0:
            self.start()
            atexit.register(self.end)  # a thread that prints while Python shuts down would abort it

    def sample(self):
        """Measure the tree; say who uses what whenever the level rises."""
        with self.lock:  # `facts` samples as well
            self._sample()

    def _sample(self):
        m, tree = self.settings, process_tree(self.root)
        found = [row for row in ((*proportional_mb(pid), component(pid), pid) for pid in tree) if row[0]]
        share, used, most, whose = tightest(budgets(m, [(own, name) for _, own, name, _ in found]))
        level = next_level(self.level, share, (m.soft, m.high, m.hard), m.hysteresis)
        self.memory = {"memory_mb": sum(pss for pss, *_ in found), "memory_share": share}
        for role in (*sorted(set(ROLES.values())), "other"):
            self.memory[f"memory_{role}_mb"] = sum(pss for pss, _, name, _ in found if ROLES.get(name, "other") == role)
        if level > self.level:
            self.table = (f"memory: {used:.0f} of {most:.0f} MB ({share:.0%}) of {whose}: {ACTIONS[level]}\n"
                          + table([(own, name, pid) for _, own, name, pid in found]))
            print(self.table.split("\n")[0] if level == 3 else self.table, flush=True)  # `leave` shows the last one
        self.level, self.worst = level, max(self.worst, level)

    def must_stop(self):
        """Whether all ranks save and leave now; all call it at the same step. Takes the smaller measures itself."""
        worst, self.worst = self.worst, 0  # without a new sample there is nothing new to do
        if self.gpu:
            self._mind_gpu()
        asked, soft, high, hard = (count > 0 for count in self.team.all_sum(
            [self.stop.asked, worst >= 1, worst >= 2, worst >= 3]))
        if soft:
            for drop in self.caches:
                drop()
            gc.collect()
        self.fewer_workers = high
        self.exit_code = console.MEMORY_STOP if hard and not asked else 0
        return asked or hard

    def give_up_worker(self, pool):
        """At an iteration's end, after `must_stop`: whether any rank's pool is smaller now, so that all begin anew."""
        fewer = self.fewer_workers and self.team.any(pool.retire_worker())
        if fewer:
            self.team.say(f"memory: {pool.num_workers} rollout workers left of each learner; a new start has all again")
        return fewer

    def _mind_gpu(self):
        """Empty the cache above the first threshold, learn with less above the second; then wait and see."""
        m, reserved = self.settings, torch.cuda.memory_reserved(self.gpu) / 2 ** 30  # GB that PyTorch keeps
        if reserved <= m.gpu_soft_gb or time.monotonic() < self.gpu_pause:
            return
        news, self.gpu_pause = not self.gpu_pause, time.monotonic() + m.every_s
        news |= reserved > m.gpu_hard_gb and self._learn_with_less()
        torch.cuda.empty_cache()
        if news:  # not every few seconds where nothing more can be done
            recomputed = ", activations recomputed" * getattr(self.phase, "checkpointing", False)
            print(f"rank {self.team.rank}: {reserved:.1f} GB of GPU memory reserved: cache emptied, micro-batches in "
                  f"{m.split} parts{recomputed}", flush=True)

    def _learn_with_less(self):
        """Cut micro-batches in two, then recompute activations, then cut again, all in the settings that who learns
        reads. Returns whether there was anything left to do."""
        m, recomputed = self.settings, getattr(self.phase, "checkpointing", True)
        if self.may_split and m.split < MOST_PARTS and (m.split == 1 or recomputed):
            m.split *= 2
        elif not recomputed:
            self.phase.checkpointing = True
        else:
            return False
        return True

    def facts(self):
        """Memory for the metrics, now."""
        if self.team.local_rank == 0:
            self.sample()
        return {**self.memory, **(gpu_facts(self.gpu) if self.gpu else {})}

    def leave(self, where):
        """Last words of a phase that stopped early; returns its exit code."""
        if self.exit_code:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to those who leave a moment later
            if self.table:
                print(self.table, flush=True)
        else:
            note_stop()
        self.team.say(f"stopped and saved {where}; {console.again()}")
        return self.exit_code
