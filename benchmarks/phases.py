"""A phase that a benchmark trains: its own command, asked to stop and ended as the coordinator's steps are."""
import signal
import sys

from configs import console
from coordinator import ROOT, Stop, run_step
from runtime.resources import threads_per_process

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def train(cfg, name, script, *words):
    """Run `script` with its arguments to its end. A stop request is passed on; SystemExit when it, or a failure, ends
    the training early: nothing is made of a policy that is not finished."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop = Stop()
    try:
        threads = threads_per_process(cfg.run.threads, 1, cfg.rollout.num_workers)
        code = run_step(name, [sys.executable, str(ROOT / script), *words], threads, stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.asked:
        print(f"stopped in {name}; {console.again()}", file=sys.stderr)
        raise SystemExit(130 if stop.at_once else 0)
    if code:
        print(f"{name} failed with exit code {code}; its message stands above", file=sys.stderr)
        raise SystemExit(code if code > 0 else 1)
