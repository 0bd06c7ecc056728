"""Where a drill takes place: a folder of its own, the real command lines, and who is left afterwards."""
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.leftovers import leaked_memory, living, marked_environment, survivors
from env.launch import ROOT, die_with_parent
from runtime import checkpoint
from runtime.memory import component, process_tree
from runtime.metrics import read_metrics

SMOKE = ["--config", "configs/smoke.yaml", "run.threads=1", "coordinator.nproc=1", "phase2.imitate_iterations=0"]
PHASE = {1: ["train_ddp.py", "--phase", "1"], 2: ["train_rl.py"], 3: ["train_ddp.py", "--phase", "3"]}
DEADLINE = 600  # s for a command; generous, because machines are busy
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node=2"]


class Broken(Exception):
    """A promise was not kept."""


def promise(kept, what):
    if not kept:
        raise Broken(what)


class Place:
    """A folder with a data set; `run` runs a command line to its end, `start` begins one."""

    def __init__(self, folder, prepared=None):
        self.folder, self.results, self.number = Path(folder), Path(folder) / "runs/smoke", 0
        if prepared:
            shutil.copytree(prepared, folder, symlinks=True)
        self.word, self.environment = marked_environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="",
                                                         OMP_NUM_THREADS="1")
        self.shared = set(os.listdir("/dev/shm"))

    def start(self, *words, **environment):
        """A command line with everything it prints in `.log`."""
        script = [str(ROOT / words[0])] if words[0].endswith(".py") else ["-m", words[0]]
        words = [str(ROOT / w if w in ("train_ddp.py", "train_rl.py") else w) for w in words[1:]]
        self.number += 1
        log = self.folder / f"log{self.number}.txt"
        with open(log, "w") as out:
            process = subprocess.Popen([sys.executable, *script, *words], cwd=self.folder, stdout=out, stderr=out,
                                       env={**self.environment, **environment}, start_new_session=True,
                                       preexec_fn=die_with_parent)
        process.log = log
        return process

    def end(self, process):
        """Wait: SimpleNamespace(code, text)."""
        try:
            code = process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Broken(f"hangs: {process.log.read_text()[-500:]}") from None
        return SimpleNamespace(code=code, text=process.log.read_text())

    def run(self, *words, **environment):
        return self.end(self.start(*words, **environment))

    def phase(self, number, *more):
        """Command line of a phase with the smoke configuration."""
        return [*PHASE[number], *SMOKE, *more]

    def rows(self, phase=None, name="smoke"):
        path = self.folder / "runs" / name / "metrics.jsonl"
        return [r for r in (read_metrics(path) if path.exists() else []) if phase in (None, r["phase"])]

    def until(self, process, condition, what="the moment never came", every=0.01):
        """Wait until `condition()`; Broken when the process ends before."""
        end = time.monotonic() + DEADLINE
        while not (found := condition()):
            promise(process.poll() is None and time.monotonic() < end, f"{what}: {process.log.read_text()[-500:]}")
            time.sleep(every)
        return found

    def until_record(self, process, phase, count=1, name="smoke"):
        self.until(process, lambda: len(self.rows(phase, name)) >= count)

    def checkpoint(self, phase, name="smoke"):
        return checkpoint.load(self.folder / "runs" / name / f"phase{phase}")

    def steps(self, phase, name="smoke"):
        """Names of the complete checkpoints."""
        return sorted(p.name for p in (self.folder / "runs" / name / f"phase{phase}").glob("step_*"))

    def nobody_left(self, patience=5.0):
        left = survivors(self.word, patience)
        promise(not left, f"still there after {patience:.0f} s: {left}")
        promise(not (leak := leaked_memory(self.shared)), f"left in /dev/shm: {leak}")
        return "nobody left"

    def tidy(self):
        """After a broken drill."""
        for pid in living(self.word):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def of_kind(process, kind):
    """Ids of the `sumo` or `rollout worker` processes below a process."""
    return [pid for pid in process_tree(process.pid) if component(pid) == kind]


def ended_well(done, text=""):
    promise(done.code == 0 and "Traceback" not in done.text, f"exit code {done.code}: {done.text[-600:]}")
    promise(text in done.text, f"not said: {text!r}")
    return done


def refused(done, *words, code=2):
    """This exit code, one message, all words in it."""
    errors = [line for line in done.text.splitlines() if line.startswith("error:")]
    promise(done.code == code and len(errors) == 1 and "Traceback" not in done.text,
            f"exit code {done.code}, {len(errors)} messages: {done.text[-600:]}")
    missing = [word for word in words if word not in done.text]
    promise(not missing, f"not named: {missing}: {errors}")
    return errors[0][:150]


LEARNED = ("weights", "optimizer", "scaler", "counters")  # of a checkpoint


def difference(one, other, at=""):
    """Where two nested values differ first, bit for bit, or None. Of checkpoints what is learned is compared: `config`
    holds the run's name, and nothing that is learned depends on the global random generators that `ranks` hold."""
    if not at:
        one, other = ({name: state[name] for name in LEARNED} for state in (one, other))
    if isinstance(one, torch.Tensor):
        return None if one.dtype == other.dtype and torch.equal(one, other) else at
    if isinstance(one, dict) and list(one) == list(other):
        return next(filter(None, (difference(one[k], other[k], f"{at}.{k}") for k in one)), None)
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return next(filter(None, (difference(a, b, f"{at}.{i}") for i, (a, b) in enumerate(zip(one, other)))), None)
    return None if one == other else at
