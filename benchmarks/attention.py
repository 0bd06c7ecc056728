"""Where does gathering neighbours beat the dense attention bias? Sets the default of model.gather_above.

    python -m benchmarks.attention --preset full --json attention.json

Times one attention layer (forward and backward, one thread on CPU) on random graphs; the two ways alternate.
"""
import time

import torch

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import alternate, finish, load_line
from models.presets import PRESETS
from models.risk_gnn import RiskAttention

VEHICLES = (16, 64, 128, 256, 384, 512, 768)
DEVICES = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
NEIGHBOURS = 16  # graph.k_max


def graph(batch, vehicles, sizes, device):
    """Inputs of one layer: embeddings, neighbours, edge codes and dangers of random graphs."""
    x = torch.randn(batch, vehicles, sizes.gnn_width, device=device, requires_grad=True)
    k = min(NEIGHBOURS, vehicles - 1)
    near = torch.rand(batch, vehicles, vehicles, device=device).topk(k, -1).indices
    code = torch.randn(batch, vehicles, k, sizes.edge_width, device=device, requires_grad=True)
    return x, near, code, torch.rand(batch, vehicles, k, 2, device=device)


def seconds(layer, inputs, dense):
    """Time of one forward and backward pass."""
    finish = torch.cuda.synchronize if inputs[0].is_cuda else lambda: None
    finish()
    start = time.perf_counter()
    layer(*inputs, dense).square().mean().backward()
    finish()
    return time.perf_counter() - start


def compare(sizes, vehicles, batch, repeat, device):
    """{"dense", "gather"}: median milliseconds, after one warm-up of each."""
    layer = RiskAttention(sizes.gnn_width, sizes.gnn_heads, sizes.edge_width).to(device)
    inputs = graph(batch, vehicles, sizes, device)
    ways = {name: lambda dense=name == "dense": seconds(layer, inputs, dense) for name in ("dense", "gather")}
    alternate(ways, 1)
    return {name: 1000 * median for name, median in alternate(ways, repeat)[0].items()}


def main():
    parser = new_parser(__doc__, "attention.json")
    parser.add_argument("--preset", default="full", choices=PRESETS)
    parser.add_argument("--batch", type=at_least(1), default=4)
    parser.add_argument("--repeat", type=at_least(1), default=7)
    parser.add_argument("--device", default=DEVICES[0], choices=DEVICES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = []
    print(f"{load_line(options.repeat)}; {options.preset}, batch {options.batch}, {NEIGHBOURS} neighbours, "
          f"{options.device}; ms forward and backward of one layer\n{'vehicles':>9s}{'dense bias':>13s}{'gather':>10s}"
          f"{'dense/gather':>14s}")
    for n in VEHICLES:
        row = compare(PRESETS[options.preset], n, options.batch, options.repeat, options.device)
        print(f"{n:9d}{row['dense']:13.2f}{row['gather']:10.2f}{row['dense'] / row['gather']:14.2f}", flush=True)
        table.append({"vehicles": n, **row})
    finish(options.json, preset=options.preset, batch=options.batch, device=options.device, table=table)


if __name__ == "__main__":
    main()
