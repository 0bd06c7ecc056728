"""What does a new episode cost, in time and in memory?

    python -m benchmarks.reset --json reset.json

Time: `reset` of a warm environment (SUMO's `load`, no new process), its first observation included, against ending SUMO
and starting it again with the stock client. Memory: PSS of this process and its SUMO over 500 resets with ten control
steps each, and processes replaced every `env.recycle_episodes` episodes as in training; growth from the 50th reset on,
when every process has been replaced or warmed up once.
"""
import os
import signal
import subprocess
import tempfile
import time

import traci

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import alternate, finish, load_line, settled
from configs import Config
from env.launch import find_binary
from env.spaces import KEEP
from env.traffic_env import make_env
from runtime.memory import process_tree, tree_memory


def warm(env):
    """Seconds of one reset."""
    start = time.perf_counter()
    env.reset(seed=1)
    return time.perf_counter() - start


def stock(arguments):
    """Seconds of the stock client's way to a new episode."""
    start = time.perf_counter()
    traci.close()
    stock_start(arguments)
    return time.perf_counter() - start


def stock_start(arguments):
    """SUMO with the stock client; one that a Ctrl-C leaves unconnected would wait for it for ever."""
    try:
        traci.start([find_binary("sumo"), *arguments], stdout=subprocess.DEVNULL)
    except KeyboardInterrupt:
        for pid in process_tree()[1:]:
            os.kill(pid, signal.SIGKILL)
        raise


def memory(env, resets, every):
    """PSS in MB after every so many resets."""
    nobody, sizes = ([env.env_cfg.max_vehicles], [0.0], [KEEP], [0.0]), []
    for number in range(1, resets + 1):
        env.reset(seed=number)
        for _ in range(10):
            env.command(*nobody)
        if number % every == 0:
            sizes.append(sum(tree_memory().values()))
    return sizes


def main():
    parser = new_parser(__doc__, "reset.json")
    parser.add_argument("--repeat", type=at_least(1), default=9)
    parser.add_argument("--resets", type=at_least(10), default=500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        env = make_env(Config(), folder)
        env.reset(seed=1)
        stock_start(env.arguments(1))
        medians, seconds = alternate({"reset, warm": settled(lambda: warm(env)),
                                      "close and start, stock": lambda: stock(env.arguments(1))}, options.repeat)
        traci.close()
        sizes = memory(env, options.resets, 10)
        env.close()
    print(load_line(options.repeat))
    for name, value in medians.items():
        print(f"{name:26s}{value * 1000:10.1f} ms")
    print(f"ratio {medians['close and start, stock'] / medians['reset, warm']:.0f}")
    begin = sizes[min(4, len(sizes) - 1)]
    print(f"PSS {begin:.1f} MB after 50 resets, {sizes[-1]:.1f} MB after {options.resets}: "
          f"{100 * (sizes[-1] / begin - 1):+.1f} %, highest {max(sizes):.1f} MB")
    finish(options.json, seconds=seconds, pss_mb=sizes)


if __name__ == "__main__":
    main()
