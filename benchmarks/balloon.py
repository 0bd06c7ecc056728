"""Drill of the memory guard: a balloon takes a real phase 2 to 80, 90 and 96 % of a small budget.

    python -m benchmarks.balloon [--json FILE] [section.key=value ...]

This program is the root of the process tree, and the balloon its child, so the guard of train_rl.py counts the balloon.
One line per promise; exit code 1 when one is not kept. Takes some minutes and memory.budget_gb (3 GB) of memory.
"""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import new_parser
from benchmarks.report import ROOT, finish
from runtime.memory import component, process_tree, proportional_mb
from runtime.metrics import read_metrics

BUDGET_MB, PATIENCE_S = 3 * 1024, 300
WORDS = ["--config", str(ROOT / "configs/smoke.yaml"), "run.name=balloon", "run.threads=1", "run.device=cpu",
         f"memory.budget_gb={BUDGET_MB // 1024}", "memory.every_s=1", "rollout.num_workers=4",
         "rollout.num_envs_per_worker=1", "phase2.iterations=100000", "phase2.checkpoint_every=10"]
BALLOON = """
import mmap, sys
blocks, mb = [], bytes([1]) * 2 ** 20
for line in sys.stdin:
    del blocks[int(line):]  # unmapped: the memory is free at once
    while len(blocks) < int(line):
        blocks.append(mmap.mmap(-1, len(mb)))
        blocks[-1].write(mb)
    print(flush=True)
"""


class Run:
    """train_rl.py, from its start to its end, beside the balloon."""

    def __init__(self, folder, words):
        self.folder, self.log = folder, folder / "log.txt"
        environment = {**os.environ, "MEMORY_ROOT": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        with open(self.log, "a") as out:
            self.begin = out.tell()
            self.process = subprocess.Popen([sys.executable, str(ROOT / "train_rl.py"), *WORDS, *words], cwd=folder,
                                            env=environment, stdout=out, stderr=out)

    def said(self):
        return self.log.read_text()[self.begin:]

    def iterations(self):
        path = self.folder / "runs/balloon/metrics.jsonl"
        return read_metrics(path)[-1]["epoch"] if path.exists() and path.stat().st_size else 0

    def workers(self):
        return sum(component(pid) == "rollout worker" for pid in process_tree(self.process.pid))

    def wait(self, condition):
        """Whether the condition came true before the run ended or patience did."""
        end = time.monotonic() + PATIENCE_S
        while not (true := condition()) and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        return bool(true or condition())

    def goes_on(self, iterations=3):
        return self.wait(lambda start=self.iterations(): self.iterations() >= start + iterations)


class Balloon:
    """A child that holds as much memory as is missing to a share of the budget."""

    def __init__(self, folder):
        self.size, program = 0, folder / "balloon.py"  # a file, so that the guard's table calls it by its name
        program.write_text(BALLOON)
        self.process = subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def fill(self, share):
        """Let the whole tree need this share of the budget."""
        for _ in range(2):  # the rest of the tree moves meanwhile
            tree = sum(proportional_mb(pid)[1] for pid in process_tree())
            self.size = max(0, self.size + round(share * BUDGET_MB - tree))
            self.process.stdin.write(f"{self.size}\n")
            self.process.stdin.flush()
            self.process.stdout.readline()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def drill(folder, words, check):
    """All promises in turn; `check(promise, whether it was kept, what happened)`."""
    run, balloon = Run(folder, words), Balloon(folder)
    check("a run with enough memory says nothing of it",
          run.wait(lambda: run.iterations() >= 2) and "memory:" not in run.said(), f"{run.workers()} workers")
    balloon.fill(0.84)
    check("at 80 %: a log of who uses what", run.wait(lambda: "dropping caches\n  " in run.said()), "")
    check("... and the run goes on with all workers", run.goes_on() and run.workers() == 4, f"{run.workers()} workers")
    balloon.fill(0.93)
    check("at 90 %: fewer workers", run.wait(lambda: "3 rollout workers left" in run.said()), "")
    balloon.fill(0.82)
    run.goes_on(2)  # what was measured before may cost one more
    left = run.workers()
    check("below it again: no more are given up, the run goes on", run.goes_on() and run.workers() == left > 1,
          f"{left} workers")
    numbers = [int(number) for number in re.findall(r"(\d+) rollout workers left", run.said())]
    check("... and it was one at a time", numbers == list(range(3, left - 1, -1)), f"4, then {numbers}")
    balloon.fill(1.0)
    run.wait(lambda: run.process.poll() is not None)
    code, said, last = run.process.wait(), run.said(), run.iterations()
    check("at 96 %: a clean stop with exit code 3", code == 3 and "Traceback" not in said, f"exit code {code}")
    table = said[said.rfind("memory: "):]
    names = ("  balloon ", "  train_rl ", "  sumo ", "largest")
    check("... and a table of who used what", all(name in table for name in names), "\n" + table.strip())
    check("... everything saved", bool(re.search(rf"stopped and saved after iteration {last};", said)),
          f"iteration {last}")
    check("... and nobody left", len(process_tree()) == 2, f"{len(process_tree()) - 2} processes")
    balloon.fill(0)
    again = Run(folder, words)
    check("the same command continues there, with all workers",
          again.wait(lambda: again.iterations() > last) and f"(epoch {last}," in again.said() and again.workers() == 4,
          f"{again.workers()} workers, iteration {again.iterations()}")
    again.process.send_signal(signal.SIGTERM)
    check("... and stops when asked", again.process.wait(PATIENCE_S) == 0, f"exit code {again.process.returncode}")
    balloon.end()


def main():
    parser = new_parser(__doc__, "balloon.json")
    options, words = parser.parse_known_args()
    rows = []

    def check(promise, kept, happened):
        rows.append({"promise": promise, "kept": bool(kept), "happened": happened})
        print(f"{'pass' if kept else 'FAIL'}  {promise:60s} {happened}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        drill(Path(folder), words, check)
        if not all(row["kept"] for row in rows):
            print((Path(folder) / "log.txt").read_text())
    finish(options.json, rows=rows)
    return int(not all(row["kept"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
