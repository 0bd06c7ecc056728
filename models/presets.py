"""Sizes of all parts for the two presets, and the small building blocks they share."""
from types import SimpleNamespace

import torch
from torch import nn

# gnn_* risk GNN, lstm_* world model's memory, latent: flow and risk latent each, *_hidden: width of MLPs.
PRESETS = {
    "small": SimpleNamespace(
        gnn_width=64, gnn_heads=4, gnn_layers=3, edge_width=32, lstm_width=96, lstm_layers=1, latent=32,
        decoder_hidden=96, score_hidden=64, action_hidden=96, value_hidden=96, risk_hidden=64),
    "full": SimpleNamespace(
        gnn_width=256, gnn_heads=8, gnn_layers=3, edge_width=64, lstm_width=512, lstm_layers=2, latent=256,
        decoder_hidden=768, score_hidden=512, action_hidden=512, value_hidden=512, risk_hidden=800)}


def mlp(*widths, final_gain=None):
    """Linear layers with SiLU between them; `final_gain` scales down the last layer's start values."""
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.SiLU())][:-1]
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
