"""Where does gathering neighbours beat the dense attention bias? Sets the default of model.gather_above.

    python -m benchmarks.attention --preset full --json attention.json

Times one attention layer (forward and backward, one thread on CPU) on random graphs; the two ways alternate.
"""
import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from models.presets import PRESETS
from models.risk_gnn import RiskAttention

VEHICLES = (16, 64, 128, 256, 384, 512, 768)
NEIGHBOURS = 16  # graph.k_max


def graph(batch, vehicles, sizes, device):
    """Inputs of one layer: embeddings, neighbours and edge codes of random graphs."""
    x = torch.randn(batch, vehicles, sizes.gnn_width, device=device, requires_grad=True)
    k = min(NEIGHBOURS, vehicles - 1)
    near = torch.rand(batch, vehicles, vehicles, device=device).topk(k, -1).indices
    return x, near, torch.randn(batch, vehicles, k, sizes.edge_width, device=device, requires_grad=True)


def seconds(layer, inputs, dense):
    """Time of one forward and backward pass."""
    finish = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    finish()
    start = time.perf_counter()
    layer(*inputs, dense).square().mean().backward()
    finish()
    return time.perf_counter() - start


def compare(sizes, vehicles, batch, repeat, device):
    """{"dense", "gather"}: median milliseconds over alternating repeats after one warm-up of each."""
    layer = RiskAttention(sizes.gnn_width, sizes.gnn_heads, sizes.edge_width).to(device)
    inputs, times = graph(batch, vehicles, sizes, device), {"dense": [], "gather": []}
    for _ in range(repeat + 1):
        for name in times:
            times[name].append(seconds(layer, inputs, name == "dense"))
    return {name: 1000 * statistics.median(values[1:]) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="full", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", default="attention.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load, table = os.getloadavg()[0], []
    for vehicles in VEHICLES:
        result = compare(PRESETS[options.preset], vehicles, options.batch, options.repeat, options.device)
        table.append({"vehicles": vehicles, **result})
    print(f"{options.preset}, batch {options.batch}, {NEIGHBOURS} neighbours, {options.device}; machine load {load:.1f}"
          f"; median of {options.repeat}, ms forward and backward of one layer")
    print(f"{'vehicles':>9s}{'dense bias':>13s}{'gather':>10s}{'dense/gather':>14s}")
    for row in table:
        print(f"{row['vehicles']:9d}{row['dense']:13.2f}{row['gather']:10.2f}{row['dense'] / row['gather']:14.2f}")
    Path(options.json).write_text(json.dumps({**vars(options), "load": load, "table": table}, indent=1))


if __name__ == "__main__":
    main()
