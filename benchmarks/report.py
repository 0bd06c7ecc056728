"""What the benchmarks share: repeating ways in turn, processes for whole episodes, and saying on what machine."""
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import statistics
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from env.launch import die_with_parent
from env.worker import settle


ROOT = Path(__file__).resolve().parent.parent


def alternate(ways, repeat):
    """Run {name: function that returns seconds} in turn, `repeat` times: (medians, all seconds), each by name."""
    seconds = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            seconds[name].append(way())
    return {name: statistics.median(values) for name, values in seconds.items()}, seconds


def settled(way):
    """The way in a process like a pool worker's."""
    def run():
        processors = os.sched_getaffinity(0)
        settle(min(processors))
        try:
            return way()
        finally:
            os.sched_setaffinity(0, processors)
            gc.enable()
    return run


@contextlib.contextmanager
def executor(processes):
    """A ProcessPoolExecutor for whole episodes; what ends the benchmark, a Ctrl-C too, ends its processes at once."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _begin, (os.getpid(),)) as pool:
        try:
            yield pool
        except BaseException:  # what is in the queue may take hours
            threading.excepthook = lambda failure: None  # the pool's thread may trip over what has been cancelled
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _begin(parent):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says it, and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # also where the parent ignores it
    die_with_parent(parent)


def load_line(repeat):
    """The machine's load, for the reader to judge the figures by."""
    return f"machine load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; medians of {repeat}, sides in turn"


def finish(path, **results):
    """Write the results as JSON."""
    Path(path).write_text(json.dumps({**results, "load": os.getloadavg()}, indent=1))
    print(f"written to {path}")
