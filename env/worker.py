"""A rollout worker's own process, on the other side of a WorkerPool (env/workers.py): `python -m env.worker`."""
import gc
import mmap
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback

from env.block import Environments, map_block
from env.launch import SumoError


def settle(processor=None):
    """Make this process a simulator's companion: on one processor, and without Python's garbage collector looking for
    cycles in every step (environments make none; each reset collects)."""
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    gc.freeze()
    gc.disable()


def claim(processor):
    """A socket by whose name others see that this processor has its worker, for as long as it is open; None where it
    has one already: the workers of two programs would wait for each other while other processors idle."""
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0mixed-autonomy-processor-{processor}")  # a name without a file, gone with its process
        return place
    except OSError:
        place.close()


def worker_main(pipe_fd, memory_fd):
    """Serve orders until the pipe closes."""
    pipe = multiprocessing.connection.Connection(pipe_fd)
    cfg, indices, folder, processor = pipe.recv()
    place = claim(processor) if processor is not None else None  # kept until this process ends
    settle(processor if place else None)
    arrays, final = map_block(mmap.mmap(memory_fd, 0), cfg)
    environments = Environments(cfg, indices, arrays, final, folder)
    try:
        while True:
            start = time.perf_counter()
            orders = pipe.recv()
            environments.idle = time.perf_counter() - start
            pipe.send(_answer(environments, orders))
    except (EOFError, ConnectionError):
        pass  # the pool was closed
    finally:
        environments.close()


def _answer(environments, orders):
    try:
        return environments.run(orders)
    except Exception as error:  # whatever it is, the parent must hear of it
        about = ", ".join(f"environment {i} seed {environments.envs[i].seed}" for i, _, _ in orders)
        return f"{about}: {error}" if isinstance(error, (SumoError, OSError)) else f"{about}\n{traceback.format_exc()}"


if __name__ == "__main__":
    if len(sys.argv) != 3:  # somebody is curious
        sys.exit(__doc__)
    worker_main(int(sys.argv[1]), int(sys.argv[2]))
