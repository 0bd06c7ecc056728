"""The largest micro-batch of phase 1 that fits: raised and lowered by the memory that one training step needs."""
import contextlib
import ctypes
import gc
import math

import torch

from configs import ConfigError
from runtime.ending import out_of_memory
from runtime.memory import numbers

ENTITIES = ((8, 128), (16, 64), (24, 32))  # vehicles of a sample up to -> first micro-batch to try; 16 beyond
MOST_TRIALS = 64


def first_batch(vehicles):
    """Where the search begins: the more vehicles a sample has, the smaller."""
    return next((batch for most, batch in ENTITIES if vehicles <= most), 16)


def next_batch(batch, share):
    """Micro-batch to try after `batch` used `share` of the memory (None = out of memory); `batch` itself = keep it."""
    less = 12 if share is None else 8 if share > 0.95 else 4 if share > 0.90 else 0
    if less:
        return max(batch - less - (4 if batch >= 32 else 0), 1)
    return batch + (8 if batch >= 32 else 4) if share < 0.80 else batch


def search(measure, batch, most):
    """(micro-batch, share of memory) at the end of the search; `measure(batch)` gives the share, None = out of memory.

    Ends where the batch is kept, at `most`, or where going on would repeat a trial: then the largest that fits. Raises
    ConfigError when not even one sample fits.
    """
    tried, batch = {}, min(batch, most)
    while batch not in tried and len(tried) < MOST_TRIALS:
        tried[batch] = measure(batch)
        batch = min(next_batch(batch, tried[batch]), most)
    fits = [b for b, share in tried.items() if share is not None and share <= 0.90]
    if not fits and (tried.get(1) or math.inf) <= 1:
        fits = [1]  # tight, but there is no smaller one
    if not fits:
        raise ConfigError(f"not even a micro-batch of {min(tried)} fits into the memory; use model.preset=small, or "
                          "fewer data.vehicles or data.history")
    return max(fits), tried[max(fits)]


def random_batch(samples, cfg, generator):
    """Random inputs and targets of the world model for `samples` samples, as models.losses.prepare gives them."""
    t, n, h, k = cfg.data.history, cfg.data.vehicles[1], cfg.data.future, cfg.graph.k_max + cfg.data.k_vary
    rand = lambda *shape: torch.rand(samples, t, n, *shape, generator=generator)  # noqa: E731
    return {"nodes": rand(9), "surround": rand(14), "edges": rand(k, 4), "neighbours": (rand(k) * n).long(),
            "mask": rand() < 2, "fresh": rand() < 0.01, "speed": 30 * rand(), "states": 10 * rand(h, 2),
            "conflicts": (rand(h) < 0.02).float(), "target_valid": rand(h) < 0.9}


def memory_share(step, batch, device, budget_mb):
    """Share of the memory, the GPU's or on CPU `budget_mb`, at the peak of `step(batch)`; None = out of memory."""
    _reset_peak(device)
    try:
        step({name: value.to(device) for name, value in batch.items()})
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / torch.cuda.get_device_properties(device).total_memory
    return numbers("/proc/self/status")["VmHWM"] / 1024 / budget_mb


def _reset_peak(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc keeps what larger trials have freed
            ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak of the resident set begins anew


def find_batch_size(cfg, team, step, budget_gb):
    """Report the best phase1.batch_size; `step(batch)` is one training step. All ranks try the same ones, and the
    fullest memory decides. `budget_gb` is what all ranks of this machine may use together, without a GPU."""
    budget_mb, generator = 1024 * budget_gb / team.local_world, torch.Generator().manual_seed(0)

    def measure(batch):
        own = memory_share(step, random_batch(batch, cfg, generator), team.device, budget_mb)
        shares = team.gather(own)
        share = None if None in shares else max(shares)
        team.say(f"micro-batch {batch:4d}: {'out of memory' if share is None else f'{share:.0%} of the memory'}")
        return share
    most = max(int(cfg.data.samples * (1 - cfg.data.held_out)) // team.world, 1)
    batch, share = search(measure, first_batch(cfg.data.vehicles[1]), most)
    team.say(f"phase1.batch_size={batch} uses {share:.0%} of the memory"
             + (f"; more would not fill a batch of data.samples={cfg.data.samples}" if batch == most else ""))
