"""Sizes of all parts for the two presets, and the small building blocks they share."""
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Sizes:
    """gnn_* risk GNN, lstm_* world model's memory, latent: flow and risk latent each, *_hidden: width of MLPs."""
    gnn_width: int
    gnn_heads: int
    gnn_layers: int
    edge_width: int
    lstm_width: int
    lstm_layers: int
    latent: int
    decoder_hidden: int
    score_hidden: int
    action_hidden: int
    value_hidden: int
    risk_hidden: int


PRESETS = {
    "small": Sizes(64, 4, 3, 32, 96, 1, 32, 96, 64, 96, 96, 64),
    "full": Sizes(256, 8, 3, 64, 512, 2, 256, 768, 512, 512, 512, 800),
}
# Parameters of each part at full size, in millions (SPEC's table).
FULL_RANGES = {"risk_gnn": (2, 3), "world_model": (5, 8), "controller": (3, 5), "safety_shield": (1, 2),
               "total": (11, 18)}


def mlp(*widths, final_gain=None):
    """Linear layers with SiLU between them; `final_gain` scales down the last layer's start values."""
    layers = []
    for i, (a, b) in enumerate(zip(widths[:-1], widths[1:])):
        layers += [nn.Linear(a, b)] + ([nn.SiLU()] if i < len(widths) - 2 else [])
    if final_gain is not None:
        nn.init.orthogonal_(layers[-1].weight, final_gain)
        nn.init.zeros_(layers[-1].bias)
    return nn.Sequential(*layers)


class Normalizer(nn.Module):
    """(x - mean) / std in float32. The statistics are buffers: they travel in every checkpoint."""

    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32))

    def forward(self, x):
        """x [..., F] in physical units -> [..., F] within +-10."""
        return ((x.float() - self.mean) / self.std).clamp(-10, 10)  # fp16 holds whatever follows
