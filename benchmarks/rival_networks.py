"""Our graph network as the first layers of a rival's policy."""
import math

import torch
from torch import nn

from env.flat import GRAPH, SCALE, layout
from models.controller import GLOBAL_MEAN, GLOBAL_STD
from models.policy import bucket
from models.presets import PRESETS, Normalizer
from models.risk_gnn import RiskGNN


class GraphFeatures(nn.Module):
    """Flat observation [B, W] -> summary of the scene [B, 2 * D + 16] by the frozen RiskGNN of the preset.

    As in our own phase 2 the graph network is not trained; a library that knows nothing of that computes it again in
    every epoch. Memory, candidates and shield are left out: what remains is less work per step than ours.
    """

    def __init__(self, cfg):
        super().__init__()
        self.arrays, sizes = layout(cfg, GRAPH), PRESETS[cfg.model.preset]
        self.gnn = RiskGNN(sizes, cfg.model.gather_above).requires_grad_(False)
        self.globals = Normalizer(GLOBAL_MEAN, GLOBAL_STD)
        self.width = 2 * sizes.gnn_width + len(GLOBAL_MEAN)

    def forward(self, flat):
        with torch.no_grad():
            obs = self._unflatten(flat)
            mask = obs["mask"] > 0.5
            x = self.gnn(obs["nodes"], obs["surround"], obs["edges"], obs["neighbours"].round(), mask)
            mean = x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            top = x.masked_fill(~mask[..., None], -10).amax(1)
            return torch.cat([mean, top, self.globals(obs["globals"])], -1)

    def _unflatten(self, flat):
        """{name: [B, slots in use, ...]} in physical units."""
        parts = flat.split([math.prod(shape) for shape in self.arrays.values()], -1)
        obs = {name: part.unflatten(-1, shape) / SCALE for (name, shape), part in zip(self.arrays.items(), parts)}
        used = (obs["mask"] > 0.5).any(0).nonzero()
        n = bucket(int(used[-1]) + 1 if len(used) else 1)
        return {name: value if name == "globals" else value[:, :n] for name, value in obs.items()}
