"""Two nodes on one machine: phases 1, 2 and 3 under two torchrun launchers, which die or are asked to stop.

    python -m benchmarks.nodes --json nodes.json

Undisturbed first; then with the second launcher killed (SIGKILL) in the middle of each phase and started again; then the
first one, which hosts the meeting point, killed and both started again; then SIGTERM to one of them and both started again.
The weights must be those of the undisturbed run bit for bit, and nothing may live on below a killed launcher.
"""
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.leftovers import marked_environment, survivors
from benchmarks.report import finish, load_line
from benchmarks.resume import equal
from configs import ConfigError
from configs.command_line import parse
from env.sumo import _free_port
from runtime import checkpoint
from runtime.metrics import read_metrics
from runtime.training import run_script

ROOT = Path(__file__).resolve().parent.parent
LONGER = ["run.threads=1", "phase1.epochs=6", "phase2.iterations=6", "phase3.epochs=6", "rollout.num_workers=1"]
SCRIPT = {1: ["train_ddp.py", "--phase", "1"], 2: ["train_rl.py"], 3: ["train_ddp.py", "--phase", "3"]}


class Node:
    """A torchrun launcher with one rank."""

    def __init__(self, folder, port, log, words, restarts=2):
        self.command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
                        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
                        f"--max-restarts={restarts}", str(ROOT / words[0]), *map(str, words[1:])]
        self.folder, self.log = folder, log
        self.word, self.environment = marked_environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="",
                                                         OMP_NUM_THREADS="1")
        self.start()

    def start(self):
        with open(self.log, "a") as out:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment, stdout=out, stderr=out)

    def kill(self):
        """SIGKILL to the launcher alone; returns what of it lives on."""
        self.process.kill()
        self.process.wait()
        return survivors(self.word, 5.0)


def nodes(folder, name, words):
    """Both launchers, the first of which hosts the meeting point."""
    port, first = _free_port(), None
    for number in (1, 2):
        log = folder / f"{name}-node{number}.txt"
        first, second = first or Node(folder, port, log, words), None if number == 1 else Node(folder, port, log, words)
        time.sleep(1.0 if number == 1 else 0.0)
    return first, second


def begun(folder, name, phase, node):
    """Wait until the phase has its first record, or the launcher has ended."""
    metrics = folder / "runs" / name / "metrics.jsonl"
    while node.process.poll() is None and not (
            metrics.exists() and any(row["phase"] == phase for row in read_metrics(metrics))):
        time.sleep(0.02)


def disturbed(folder, name, phase, pair, way):
    """Do to the pair what `way` says, in the middle of a phase; returns what lives on of it."""
    first, second = pair
    begun(folder, name, phase, first)
    if way == "second killed":
        left = second.kill()
        second.start()
        return left
    if way == "first killed":
        left = first.kill()
        first.process.wait()
        second.process.wait()  # it has lost the meeting point
    else:
        second.process.send_signal(signal.SIGTERM)
        first.process.wait(), second.process.wait()
        left = survivors(first.word, 5.0) + survivors(second.word, 5.0)
    first.start()
    time.sleep(1.0)
    second.start()
    return left
