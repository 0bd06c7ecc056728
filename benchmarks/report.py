"""What the benchmarks share: repeating ways in turn, and saying on what machine."""
import gc
import json
import os
import statistics
from pathlib import Path

from env.workers import settle


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


def load_line(repeat):
    """The machine's load, for the reader to judge the figures by."""
    return f"machine load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors; medians of {repeat}, sides in turn"


def finish(path, **results):
    """Write the results as JSON."""
    Path(path).write_text(json.dumps({**results, "load": os.getloadavg()}, indent=1))
    print(f"written to {path}")
