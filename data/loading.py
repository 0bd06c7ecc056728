"""Batches for a training loop: a DataLoader over chunks (phase 1), and sequences fresh from the simulator (phase 3)."""
import itertools
import multiprocessing
import os
import signal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.location import cannot_share
from env.launch import die_with_parent

READS_ITSELF = "phase1.loader.num_workers=0 reads in the training process itself"


class StreamingDataset(IterableDataset):
    """Micro-batches of sequences fresh from the simulator (phase 3), in a seeded order, several passes.

    `sequences` is a dictionary of tensors with the sequence axis first; memory is that of one epoch's rollout.
    """

    def __init__(self, sequences, batch_size, passes, seed):
        self.sequences, self.batch_size, self.passes, self.seed = sequences, batch_size, passes, seed
        self.count = len(next(iter(sequences.values())))

    def __len__(self):
        return self.passes * (self.count // self.batch_size)

    def __iter__(self):
        for p in range(self.passes):
            order = np.random.default_rng([self.seed, p]).permutation(self.count)
            for b in range(self.count // self.batch_size):
                rows = torch.from_numpy(order[b * self.batch_size:(b + 1) * self.batch_size])
                yield {name: value[rows] for name, value in self.sequences.items()}


def windows(batches, size, drop_last):
    """Lists of `size` batches, one for each optimiser step; the last one may be shorter unless `drop_last`. WorkerError
    when processes that read do not start, or are stuck."""
    try:
        batches = begin_reading(batches)
        while window := list(itertools.islice(batches, size)):
            if len(window) == size or not drop_last:
                yield window
    except RuntimeError as error:  # also at the beginning: persistent processes fetch an epoch's first batches at once
        end_stuck(error)


def begin_reading(batches):
    """The batches' iterator. A loader's processes begin here, in the rank's group: see `leave_group`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        return iter(batches)
    except OSError as error:
        cannot_share(f"phase 1: the processes that read do not start ({error.strerror})", READS_ITSELF, error)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def end_stuck(error):
    """WorkerError, if that is what the loader's `error` means, and the end of its processes; else `error`."""
    if "DataLoader timed out" not in str(error):
        raise error
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler says that one was killed
    for process in multiprocessing.active_children():  # Python would wait for them before it ends
        process.kill()
    cannot_share(f"phase 1: {error}: a process that reads is stuck", READS_ITSELF)


def make_loader(dataset, sampler, options, pin_memory):
    """DataLoader with the options of the configuration; `dataset.__getitems__` gives whole batches."""
    more = {}
    if options.num_workers:
        more = {"prefetch_factor": options.prefetch_factor, "persistent_workers": options.persistent_workers,
                "multiprocessing_context": "fork", "worker_init_fn": leave_group, "timeout": options.timeout_s}
    # A generator of its own: each beginning draws a number, which is not to be one of the training's.
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=lambda batch: batch, num_workers=options.num_workers,
                      pin_memory=options.pin_memory and pin_memory, generator=torch.Generator(), **more)


def leave_group(_):
    """A reading process of its own group: SIGTERM to the whole group (torchrun's way to stop) must not kill it before
    its rank has finished the step, not even while it starts. It dies with its rank instead."""
    os.setpgid(0, 0)
    signal.sigtimedwait({signal.SIGTERM}, 0)  # what came to the group before is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    die_with_parent(os.getppid())
