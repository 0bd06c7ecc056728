"""Augmentation of recorded samples (phase 1): vectorised over a batch, off for validation.

Every random number is a function of (seed, epoch, row of the data set): neither the number of ranks or loader processes
nor an interruption changes what a sample looks like in an epoch.

| option            | what it touches, always consistently within a sample                                            |
|-------------------|-------------------------------------------------------------------------------------------------|
| time_shift        | the window of T + H frames begins up to so many control steps earlier or later in the recorded  |
|                   | margins: everything moves together, inputs, targets and clock, as if recorded at that moment     |
| speed_noise       | the speeds that are seen: the node's own, and the edges' relative speed by the same noise        |
| position_jitter   | one offset along the road for the sample: position, distances to the lane's end and to a merge;  |
|                   | gaps, and the progress of the vehicle's own odometer, do not depend on the road's origin         |
| edge_dropout      | edges of a frame are left out: neighbour -1, features 0                                          |
| node_mask         | the features of a vehicle in a frame are replaced by the data set's means; the vehicle stays     |
|                   | present, keeps its edges, and is a target like any other                                         |

What the world model is asked for (`moved`, `speed`, `conflict`, `present`, `fresh`, `usable`) is never touched.

Phase 2 has no augmentation: PPO's ratio compares probabilities of the same observation. Nor has phase 3: its windows
come fresh from the simulator in every epoch, so a shift in time adds nothing; noise on speeds could not reach the
embeddings that the frozen graph network computed at rollout, and on the rest it would break the ratio as in phase 2.
"""
import numpy as np
import torch
from torch.utils.data import Dataset

from env.graph import EDGE, LANE_END_CAP, NODE, SURROUND

POSITION, SPEED, LANE_END = NODE.index("position"), NODE.index("speed"), NODE.index("lane_end")
RELATIVE_SPEED, MERGE_DISTANCE = EDGE.index("relative_speed"), SURROUND.index("merge_distance")


class AugmentedDataset(Dataset):
    """Batches of a ChunkedDataset, augmented. `options` is a section `augment` of the configuration."""

    def __init__(self, dataset, options, seed):
        self.dataset, self.options, self.seed = dataset, options, seed
        self.means = torch.tensor(dataset.statistics["nodes"]["mean"])

    def __len__(self):
        return len(self.dataset)

    def where(self, row):
        """File and row of a sample, as the data set names them."""
        return self.dataset.where(row)

    def __getitems__(self, batch):
        """The batch of a sampler's (epoch, rows)."""
        epoch, rows = batch
        o, shape = self.options, self.dataset.shape
        nodes, edges = shape.history * shape.vehicles, shape.history * shape.vehicles * shape.k
        numbers = random_numbers(self.seed, epoch, rows, 2 + 2 * nodes + edges)
        shift = (numbers[:, 0] * (2 * o.time_shift + 1)).astype(int) - o.time_shift
        samples = self.dataset.read(rows, shape.margin + shift)
        offset, noise, mask, drop = torch.from_numpy(numbers[:, 1:]).split([1, nodes, nodes, edges], 1)
        add_speed_noise(samples, o.speed_noise * normal(noise).view(samples["nodes"].shape[:3]))
        jitter_position(samples, o.position_jitter * (2 * offset - 1))
        drop_edges(samples, drop.view(samples["neighbours"].shape) < o.edge_dropout)
        mask_nodes(samples, mask.view(samples["nodes"].shape[:3]) < o.node_mask, self.means)
        return samples


def random_numbers(seed, epoch, rows, count):
    """[len(rows), count] float32 in [0, 1), each row's own."""
    numbers = [np.random.default_rng([seed, epoch, row]).random(count, np.float32) for row in rows]
    return np.stack(numbers) if numbers else np.zeros((0, count), np.float32)


def normal(uniform):
    """Standard normal numbers from uniform ones (inverse transform)."""
    return 2 ** 0.5 * torch.erfinv((2 * uniform - 1).clamp(-1 + 1e-6, 1 - 1e-6))


def add_speed_noise(samples, noise):
    """noise [B, T, n] m/s: seen speeds stay above 0, and relative speeds change by exactly what the speeds do."""
    speed, near = samples["nodes"][..., SPEED], samples["neighbours"].long()
    seen = (speed + noise).clamp(min=0) * samples["present"][:, :speed.shape[1]]
    change = seen - speed
    speed.copy_(seen)
    other = change.gather(2, near.clamp(min=0).flatten(2)).view(near.shape)
    samples["edges"][..., RELATIVE_SPEED] += torch.where(near >= 0, other - change[..., None], 0)


def jitter_position(samples, offset):
    """offset [B, 1] m along the road, one for each sample."""
    nodes, present = samples["nodes"], samples["present"][:, :samples["nodes"].shape[1]]
    along, offset = nodes[..., POSITION], offset[..., None]
    moved = (along + offset / samples["extent"][:, :1, None].clamp(min=1)).clamp(0, 1)
    along.copy_(torch.where(present, moved, along))
    for ahead in (nodes[..., LANE_END], samples["surround"][..., MERGE_DISTANCE]):
        known = present & (ahead < LANE_END_CAP)  # at the cap the end, or merge, is out of sight
        ahead.copy_(torch.where(known, (ahead - offset).clamp(0, LANE_END_CAP), ahead))


def drop_edges(samples, dropped):
    """dropped [B, T, n, k] bool."""
    samples["neighbours"].masked_fill_(dropped, -1)
    samples["edges"].mul_(~dropped[..., None])


def mask_nodes(samples, hidden, means):
    """hidden [B, T, n] bool: features of those vehicles become `means` [9]."""
    hidden = hidden & samples["present"][:, :hidden.shape[1]]
    samples["nodes"].copy_(torch.where(hidden[..., None], means, samples["nodes"]))
