"""GPU memory of one training step of phases 1 and 3, on random batches of the shapes that the configuration gives.

    python -m benchmarks.gpu_memory --json gpu_memory.json

Peak of what PyTorch allocates (and reserves) for weights, gradients, AdamW and activations, with autocast; the CUDA
context, some hundred MB, comes on top. Needs a GPU, no SUMO and no data.
"""
import sys

import torch

from benchmarks.arguments import new_parser
from benchmarks.report import finish
from configs import load_config
from models.losses import ConstrainedLoss, WorldModelLoss
from models.policy import TrafficModel
from runtime.batch_size import random_batch
from runtime.precision import TYPES

BATCHES, VEHICLES, MB = (32, 64, 128), (112, 240, 608), 2 ** 20


def random_sequences(cfg, model, vehicles, device):
    """Sequences as train_ddp.make_sequences gives them, a quarter of the vehicles ICVs."""
    p, k, h = cfg.phase3, cfg.env.max_commands, cfg.data.future
    size, width = (p.batch_size, p.sequence_length), model.risk_gnn.norm.normalized_shape[0]
    rand = lambda *shape: torch.rand(*size, *shape, device=device)  # noqa: E731
    icv = (torch.arange(vehicles, device=device) < vehicles // 4).expand(*size, vehicles)
    step = {name: rand() for name in ("advantage", "return", "cost_return", "price")}
    return {**step, "embedding": rand(vehicles, width), "nodes": rand(vehicles, 9), "surround": rand(vehicles, 14),
            "globals": rand(16), "mask": rand(vehicles) < 2, "icv": icv, "fresh": rand(vehicles) < 0.01,
            "speed": 30 * rand(vehicles), "picks": torch.arange(k, device=device).expand(*size, k),
            "pick_valid": rand(k) < 2, "u": rand(k), "lane": (3 * rand(k)).long(), "release": rand(k) < 0.5,
            "pace": rand(k) < 0.5, "log_prob": -rand(k), "states": rand(vehicles, h, 2),
            "target_valid": rand(vehicles, h) < 0.9, "conflicts": (rand(vehicles, h) < 0.02).float(),
            "before": model.world_model.initial_state(p.batch_size, vehicles, device=device)}


def cases(cfg, device):
    """(name, loss module, its arguments) of every row of the table."""
    for batch in BATCHES:
        model = TrafficModel(cfg).to(device)
        model.freeze("controller", "safety_shield")
        data = random_batch(batch, cfg, torch.Generator().manual_seed(0))
        yield (f"phase 1, {batch} samples", WorldModelLoss(model, 2, cfg.phase1),
               ({name: value.to(device) for name, value in data.items()}, 1e3))
    for vehicles in VEHICLES:
        for cfg.phase3.checkpointing in (True, False):
            model = TrafficModel(cfg).to(device)
            model.freeze("risk_gnn")
            how = "checkpointing" if cfg.phase3.checkpointing else "without"
            yield (f"phase 3, {cfg.phase3.batch_size} sequences, {vehicles} vehicles, {how}",
                   ConstrainedLoss(model, cfg.phase2, cfg.phase3),
                   (random_sequences(cfg, model, vehicles, device), (240.0, 1e5, 1e3)))


def peak(module, arguments, kind):
    """(allocated, reserved) MB at the peak of three optimiser steps."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=kind == torch.float16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        with torch.autocast("cuda", kind, enabled=kind is not None):
            loss, _ = module(*arguments)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated() / MB, torch.cuda.max_memory_reserved() / MB


def main():
    parser = new_parser(__doc__, "gpu_memory.json")
    parser.add_argument("--config", default="configs/default.yaml")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU here; this benchmark measures one", file=sys.stderr)
        return 2
    cfg, table = load_config(options.config), []
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, preset {cfg.model.preset}, autocast "
          f"{cfg.phase1.amp.dtype}\n{'one step':60s}{'allocated MB':>14s}{'reserved MB':>14s}")
    for name, module, arguments in cases(cfg, torch.device("cuda")):
        used = peak(module, arguments, TYPES.get(cfg.phase1.amp.dtype))
        print(f"{name:60s}{used[0]:14.0f}{used[1]:14.0f}", flush=True)
        table.append({"step": name, "allocated_mb": used[0], "reserved_mb": used[1]})
        del module, arguments
    finish(options.json, preset=cfg.model.preset, table=table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
