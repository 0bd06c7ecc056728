"""Thousands of simulator starts and resets, several at a time: nothing may fail, stay behind or grow.

    python -m benchmarks.soak --json soak.json
"""
import functools
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import finish
from configs import Config
from env.launch import SumoError, die_with_parent
from env.scenarios import build_scenario
from env.traffic_env import make_env
from runtime.memory import process_tree, pss_mb


def zombies():
    """Children of this process that have ended and that nobody has waited for."""
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in process_tree()[1:]
              if Path(f"/proc/{pid}").exists()]
    return states.count("Z")


def own_state():
    """(open descriptors, PSS in MB of this process and its simulator)."""
    return len(os.listdir("/proc/self/fd")), sum(pss_mb(pid) for pid in process_tree())


def begin():
    """A process of the pool: it ends with the main one, which alone answers Ctrl-C."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def soak(folder, jobs):
    """Start and reset simulators in this process; memory is compared with that after the first tenth."""
    launches, resets = jobs
    cfg, failures, before = Config(), 0, None
    cfg.env.recycle_episodes = resets + 1
    env, every = make_env(cfg, folder), max(-(-resets // launches), 1)
    for number in range(launches):
        try:
            env.close()
            for again in range(1 + every):  # the first one starts a process
                env.reset(seed=1 + again)
        except SumoError as error:
            failures += 1
            print(f"start {number}: {error}", flush=True)
        if number == launches // 10:
            before = own_state()
    after = own_state()
    env.close()
    return {"launches": launches, "resets": launches * every, "failures": failures, "zombies": zombies(),
            "descriptors": after[0] - before[0], "pss_before": before[1], "pss_after": after[1]}


def main():
    parser = new_parser(__doc__, None)
    parser.add_argument("--launches", type=at_least(1), default=2000, help="simulators started")
    parser.add_argument("--resets", type=at_least(1), default=5000, help="further episodes in a living simulator")
    parser.add_argument("--parallel", type=at_least(1), default=4, help="processes at a time")
    options = parser.parse_args()
    start, jobs = time.time(), (-(-options.launches // options.parallel), -(-options.resets // options.parallel))
    with tempfile.TemporaryDirectory() as folder:
        build_scenario(Config(), folder)
        with multiprocessing.get_context("spawn").Pool(options.parallel, begin) as pool:
            parts = pool.map(functools.partial(soak, folder), [jobs] * options.parallel)
    total = {name: sum(part[name] for part in parts) for name in parts[0]}
    total["pss_growth"] = total["pss_after"] / total["pss_before"] - 1
    total["zombies"] += zombies()
    print(f"{total['launches']} starts and {total['resets']} resets, {options.parallel} at a time, in "
          f"{time.time() - start:.0f} s: {total['failures']} failures, {total['zombies']} zombies, "
          f"{total['descriptors']} descriptors leaked, memory {total['pss_growth']:+.1%}")
    if options.json:
        finish(options.json, **total)
    return int(bool(total["failures"] or total["zombies"] or total["descriptors"] > 0 or total["pss_growth"] > 0.05))


if __name__ == "__main__":
    raise SystemExit(main())
