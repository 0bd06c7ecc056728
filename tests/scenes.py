"""Models and random scenes that several test files share."""
import torch
import torch.nn.functional as F

from configs import Config
from models.controller import GLOBAL_FEATURES, HAS_LEFT, HAS_RIGHT, NODE_FEATURES, SURROUND_FEATURES
from models.policy import TrafficModel


def build(preset, seed=0):
    cfg = Config()
    cfg.model.preset = preset
    torch.manual_seed(seed)
    return TrafficModel(cfg)


def scene(vehicles, slots, seed=0, batch=2, k=5):
    """Observations in physical units: `vehicles` in the first of `slots`, ICVs among them, some neighbours missing."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    scale = torch.tensor([1, 3, 30, 10, 500, 1, 1, 2, 2.0])
    near = torch.stack([torch.stack([torch.randperm(vehicles - 1, generator=g)[:k] for _ in range(vehicles)])
                        for _ in range(batch)])
    near += near >= torch.arange(vehicles)[:, None]  # nobody is their own neighbour
    near[rand(near.shape) < 0.3] = -1
    edges = rand(batch, vehicles, k, 4) * torch.tensor([100, 20, 20, 10.0]) - torch.tensor([50, 10, 0, 0.0])
    surround = rand(batch, vehicles, SURROUND_FEATURES) * torch.tensor([200, 30] * 5 + [1, 1, 500, 10.0])
    surround[..., HAS_LEFT:HAS_RIGHT + 1] = surround[..., HAS_LEFT:HAS_RIGHT + 1].round()
    icv = rand(batch, vehicles) < 0.5
    icv[:, :6] = True
    out = {"nodes": rand(batch, vehicles, NODE_FEATURES) * scale, "edges": edges * (near >= 0)[..., None],
           "neighbours": near, "surround": surround, "icv": icv, "mask": torch.ones(batch, vehicles, dtype=torch.bool)}
    out = {name: F.pad(x, (0, 0) * (x.dim() - 2) + (0, slots - vehicles), value=-1 if name == "neighbours" else 0)
           for name, x in out.items()}
    return {**out, "globals": rand(batch, GLOBAL_FEATURES) * 20}


def noise(candidates, seed, k=5):
    """What Controller.select samples with, for candidates [B, C, F]."""
    g, (batch, width) = torch.Generator().manual_seed(seed), candidates.shape[:2]
    return torch.rand(batch, 5 * k + width, generator=g), torch.randn(batch, k, generator=g)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
