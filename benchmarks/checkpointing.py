"""What gradient checkpointing of the world model saves, and what it costs.

    python -m benchmarks.checkpointing --preset full --json checkpointing.json

Activation memory is counted exactly: the distinct tensors that autograd keeps for the backward pass, weights left out,
of the world model's loss over sequences of embeddings (as in phase 3), and of phase 1's loss, where the graph network,
which is not checkpointed, comes on top. Times of forward and backward are medians; with and without alternate.
"""
import time

import torch

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import alternate, finish, load_line
from configs import Config
from models.losses import WorldModelLoss, world_model_loss
from models.policy import TrafficModel
from models.presets import PRESETS
from runtime.batch_size import random_batch


def saved_bytes(run, parameters=()):
    """Bytes of the distinct tensors that autograd keeps for the backward pass of `run()`, without `parameters`, and its
    result."""
    weights, kept = {p.untyped_storage().data_ptr() for p in parameters}, {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    return sum(kept.values()), result


def losses(model, cfg, batch):
    """{name: function of `checkpointing` -> loss}."""
    embedding = torch.randn(*batch["mask"].shape, model.risk_gnn.norm.normalized_shape[0], requires_grad=True)
    world = model.world_model

    def sequences(on):
        state = world.initial_state(len(embedding), embedding.shape[2])
        memory = world.sequence(embedding, state, batch["fresh"], on)
        return world_model_loss(world, memory, batch, 1000.0, checkpointing=on)[0]

    def phase1(on):
        cfg.phase1.checkpointing = on
        return WorldModelLoss(model, 2, cfg.phase1)(batch, 1000.0)[0]
    return {"world model": sequences, "phase 1": phase1}


def timed(loss, on):
    """Seconds of one forward and backward pass."""
    start = time.perf_counter()
    loss(on).backward()
    return time.perf_counter() - start


def main():
    parser = new_parser(__doc__, "checkpointing.json")
    parser.add_argument("--preset", default="full", choices=PRESETS)
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--repeat", type=at_least(1), default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cfg, table = Config(), []
    cfg.model.preset = options.preset
    model, batch = TrafficModel(cfg), random_batch(options.batch, cfg, torch.Generator().manual_seed(0))
    print(f"{load_line(options.repeat)}; {options.preset}, {options.batch} samples of {cfg.data.history} steps and "
          f"{cfg.data.vehicles[1]} vehicles\n{'loss':12s}{'MB plain':>10s}{'saving':>10s}{'less':>7s}{'s plain':>10s}"
          f"{'saving':>10s}")
    for name, loss in losses(model, cfg, batch).items():
        plain, saving = (saved_bytes(lambda on=on: loss(on), model.parameters())[0] / 1e6 for on in (False, True))
        seconds = alternate({on: lambda on=on: timed(loss, on) for on in (False, True)}, options.repeat)[0]
        print(f"{name:12s}{plain:10.1f}{saving:10.1f}{1 - saving / plain:7.0%}{seconds[False]:10.3f}"
              f"{seconds[True]:10.3f}", flush=True)
        table.append({"loss": name, "mb_plain": plain, "mb_saving": saving, "s_plain": seconds[False],
                      "s_saving": seconds[True]})
    finish(options.json, preset=options.preset, batch=options.batch, table=table)


if __name__ == "__main__":
    main()
