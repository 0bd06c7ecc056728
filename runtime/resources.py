"""How the cores of a machine are shared out; without torch, for the coordinator too."""
import os


def threads_per_process(wanted, ranks, rollout_workers=0):
    """Torch threads of each of `ranks` processes on a machine where `rollout_workers` processes simulate beside them.

    `wanted` (run.threads) counts when it is not 0. Threads that compete with busy simulators wait for each other at
    every operation: one thread of two that has no core of its own halves the speed of inference.
    """
    cores = len(os.sched_getaffinity(0))
    return wanted or max(1, (cores - rollout_workers) // ranks)
