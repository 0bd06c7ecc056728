"""Batches for a training loop: a DataLoader over chunks (phase 1), and sequences fresh from the simulator (phase 3)."""
import itertools
import os

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from env.launch import die_with_parent


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
    """Lists of `size` batches, one for each optimiser step; the last one may be shorter unless `drop_last`."""
    batches = iter(batches)
    while window := list(itertools.islice(batches, size)):
        if len(window) == size or not drop_last:
            yield window


def make_loader(dataset, sampler, options, pin_memory):
    """DataLoader with the options of the configuration; `dataset.__getitems__` gives whole batches."""
    more = {}
    if options.num_workers:
        more = {"prefetch_factor": options.prefetch_factor, "persistent_workers": options.persistent_workers,
                "multiprocessing_context": "fork", "worker_init_fn": leave_group}
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=lambda batch: batch, num_workers=options.num_workers,
                      pin_memory=options.pin_memory and pin_memory, **more)


def leave_group(_):
    """A reading process of its own group: SIGTERM to the whole group (torchrun's way to stop) must not kill it before
    its rank has finished the step. It dies with its rank instead."""
    os.setpgid(0, 0)
    die_with_parent(os.getppid())
