"""The same names with and without torchrun: who am I, how many are we, and decisions that all ranks take together."""
import contextlib
import inspect
import os
import signal
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from configs import ConfigError
from configs.console import say
from runtime.precision import set_numerics
from runtime.resources import ONE_REQUEST_S, stop_signals, threads_per_process


@dataclass
class Team(contextlib.AbstractContextManager):
    """rank of world on this device; local_rank of local_world on this machine."""
    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def is_main(self):
        """Whether this is the first rank."""
        return self.rank == 0

    def say(self, text):
        """Print on the first rank only."""
        if self.is_main:
            say(text)

    def all_sum(self, values):
        """Sum over ranks of a list of numbers or a tensor [n], in float64. Waits for the device once."""
        total = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(total)
        return total.tolist()

    def any(self, flag):
        """Whether the flag is set on any rank: the way to decide anything that changes the number of collectives."""
        return self.all_sum(torch.as_tensor(flag).reshape(1))[0] > 0

    def moments(self, values):
        """(mean, standard deviation) of a tensor's entries over all ranks."""
        x = values.double()
        total, squares, count = self.all_sum(torch.stack([x.sum(), (x * x).sum(), torch.ones_like(x).sum()]))
        mean = total / max(count, 1)
        return mean, max(squares / max(count, 1) - mean * mean, 0.0) ** 0.5

    def gather(self, value):
        """List of every rank's picklable value, on every rank."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self):
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()

    def __exit__(self, kind, *_):
        """Leave the process group, but not for an error of this rank: NCCL would wait for the others before anybody
        hears of it (`runtime.ending.run_script` ends the process instead)."""
        if dist.is_initialized() and (kind is None or kind is SystemExit):
            dist.destroy_process_group()


def ranks_of(environment):
    """(rank, world, local rank, local world) that torchrun has left there; ConfigError where that is half of it."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    texts = {name: environment.get(name, default) for name, default in names.items()}
    wrong = [f"{name}={text}" for name, text in texts.items() if not text.isdigit()]
    if not wrong and int(texts["WORLD_SIZE"]) > 1:
        wrong = [f"no {name}" for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if wrong:
        raise ConfigError(f"environment: {', '.join(wrong)} with WORLD_SIZE={texts['WORLD_SIZE']}: start several ranks "
                          "with torchrun, and a single one without these variables")
    return tuple(map(int, texts.values()))


def start_team(run, ddp, rollout_workers=0, stop=None):
    """Join the process group that torchrun describes, or be a team of one.

    `run` and `ddp` are sections of the configuration; `rollout_workers` processes simulate on this machine meanwhile;
    `stop` is the rank's StopRequest.
    """
    rank, world, local_rank, local_world = ranks_of(os.environ)
    gpus = torch.cuda.device_count() if run.device != "cpu" else 0
    if run.device == "cuda" and not gpus:
        raise ConfigError("run.device=cuda, but PyTorch finds no GPU; use run.device=cpu or auto")
    if world > 1 and ddp.backend == "nccl" and gpus < local_world:
        raise ConfigError(f"ddp.backend=nccl needs a GPU for each of the {local_world} ranks on this machine, there "
                          f"are {gpus}; use ddp.backend=gloo or auto")
    device = torch.device(f"cuda:{local_rank % gpus}" if gpus else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    set_numerics(run)
    torch.set_num_threads(threads_per_process(run.threads, local_world, rollout_workers))
    if world > 1:
        for setting in ddp.nccl_env:
            name, _, value = setting.partition("=")
            os.environ.setdefault(name, value)
        backend = ddp.backend if ddp.backend != "auto" else ("nccl" if gpus >= local_world else "gloo")
        before = [(number, signal.signal(number, signal.SIG_DFL)) for number in stop_signals()]
        if stop and stop.asked:  # the others may have ended already, and nothing is there to be saved
            signal.raise_signal(stop.number)
        timeout = timedelta(seconds=ddp.timeout_s)  # for ranks that may never come
        store = attempts_store(rank, world, timeout) if world == local_world else None
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
        for number, handler in before:
            signal.signal(number, handler)
    return Team(rank, world, local_rank, local_world, device)


def attempts_store(rank, world, timeout):
    """Where the ranks of one node meet, for this attempt: torchrun's store outlives its restarts (--max-restarts), with
    the addresses of ranks that have died. (The launchers of several nodes need not agree on the attempt's number.)"""
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def check_shared(folder, team):
    """ConfigError on every rank when a node has another `folder` of this name: the first rank writes checkpoints, and
    all ranks read them, so a node with its own disk would continue from something else, or from nothing."""
    if team.world == team.local_world:
        return
    token = folder / f".shared-{team.gather(uuid.uuid4().hex)[0]}"  # a name that no node can have cached
    if team.is_main:
        token.touch()
    team.barrier()
    blind = sorted({host for host, sees in team.gather((socket.gethostname(), token.exists())) if not sees})
    if team.is_main:
        token.unlink()
    if blind:
        raise ConfigError(f"{folder}: not the same folder on every node ({', '.join(blind)}): mount one file system on "
                          "all nodes and let run.folder and data.folder lie in it")


def wrap(module, team, ddp):
    """DistributedDataParallel with the options of the configuration; the module itself in a team of one.

    Freeze parameters before: changing `requires_grad` afterwards fails on the second step.
    """
    if team.world == 1:
        return module
    # Buffers are equal on all ranks and change only between steps; the option's name differs between PyTorch releases.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast = {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
    wrapped = DistributedDataParallel(
        module, device_ids=[team.device.index] if team.device.type == "cuda" else None, bucket_cap_mb=ddp.bucket_cap_mb,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view, find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph, **no_broadcast)
    if ddp.fp16_compression:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


class StopRequest:
    """`stop_signals` ask for a stop at the next step boundary; a later one leaves at once, but for SIGHUP: a closing
    terminal may send several.

    The handler only sets a flag; MemoryGuard.must_stop turns it into a decision of all ranks.
    """

    def __init__(self):
        self.asked, self.since, self.number = False, 0.0, None  # the signal that did
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        if self.asked and time.monotonic() - self.since < ONE_REQUEST_S:
            return
        if self.asked and number != signal.SIGHUP:
            os._exit(128 + number)
        self.asked, self.since, self.number = True, time.monotonic(), number
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, b"stop requested: finishing the step and saving (again to leave at once)\n")
