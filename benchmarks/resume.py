"""Kill the whole pipeline at random moments and start it again: the end must be that of a run that nobody disturbed.

    python -m benchmarks.resume --kills 20 --json resume.json

One run of `coordinator.py --config configs/smoke.yaml` is left alone. Then the same command runs elsewhere and its
process group gets SIGKILL at a random moment, every third time while a checkpoint is being written; launchers, ranks,
workers and simulators, which are in other groups, must go by themselves. The same command continues, until it has
finished; then the next run begins, until there were enough kills. All checkpoints of the three phases (weights,
optimisers, counters, random states of torch) and all scores must be equal bit for bit.
"""
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import at_least, writable
from benchmarks.drill_place import difference
from benchmarks.leftovers import leaked_memory, living, marked_environment, survivors
from benchmarks.report import ROOT, finish, load_line
from configs import ConfigError
from configs.command_line import parse
from runtime import checkpoint
from runtime.ending import run_script
from runtime.metrics import read_metrics

LONGER = ["run.threads=1", "phase1.epochs=6", "phase2.iterations=4", "phase3.epochs=4"]
PATIENCE = 10.0  # s until nothing may be left of a killed run


class Run:
    """A run of the pipeline in a folder of its own, killed and continued."""

    def __init__(self, options, folder):
        folder.mkdir()
        self.folder, self.lives, self.results = folder, 0, folder / "runs" / options.config.run.name
        config = Path(options.config_file).resolve() if Path(options.config_file).exists() else options.config_file
        self.command = [sys.executable, str(ROOT / "coordinator.py"), "--config", str(config), *LONGER,
                        *options.overrides]
        self.word, self.environment = marked_environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")

    def start(self):
        self.lives, self.begun = self.lives + 1, time.time()
        self.log = self.folder / f"life{self.lives}.txt"
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment, stdout=out, stderr=out,
                                            start_new_session=True)

    def kill(self, delay, saving):
        """SIGKILL after `delay` seconds, or when a checkpoint is being written after that. Returns what was running
        and how long the last process outlived it, or None when the pipeline had ended before."""
        end = time.monotonic() + delay
        while self.process.poll() is None and (time.monotonic() < end or saving and not self.half_written()
                                               and time.monotonic() < end + 30):
            time.sleep(0.001 if saving else 0.02)
        if self.process.poll() is not None:
            return None
        running, half, count = self.running(), self.half_written(), len(living(self.word))
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        begun = time.monotonic()
        left = survivors(self.word, PATIENCE)
        return {"running": running + (" (saving)" if half else ""), "processes": count, "left": left,
                "gone_after_s": round(time.monotonic() - begun, 2)}

    def half_written(self):
        """Whether a checkpoint is being written in this life."""
        try:
            return any(path.stat().st_mtime > self.begun for path in self.results.glob("phase?/.step_*.tmp"))
        except FileNotFoundError:  # it is complete by now
            return False

    def running(self):
        """Step and newest checkpoint, for the reader."""
        try:
            steps = json.loads((self.results / "state.json").read_text())["steps"]
        except (OSError, ValueError):
            return "start"
        name = next((name for name, facts in steps.items() if facts["status"] != "done"), "between two steps")
        steps = sorted(path.name for path in self.results.glob(f"{name}/step_*"))
        return f"{name} after {steps[-1]}" if steps else name

    def continued(self):
        """What the present life said it continued from."""
        text = self.log.read_text()
        step = re.search(r"^==== (\w+):", text, re.M)
        resumed = re.search(r"resumed from .*?(phase\d) \((epoch \d+, \d+ updates)\)", text)
        named = resumed and step and resumed.group(1) == step.group(1)
        return (step.group(1) if step else "start") + (f", {resumed.group(2)}" if named else "")


def comparable(state):
    """A checkpoint without the random states of Python and numpy, which nothing uses and nobody seeds."""
    return {**state, "ranks": [rank["random"]["torch"] for rank in state["ranks"]]}


def differences(run, reference):
    """What a finished run has that differs from the undisturbed one; [] is the promise."""
    found = []
    for phase in (1, 2, 3):
        for which in ("latest", "best"):
            one, other = (comparable(checkpoint.load(r.results / f"phase{phase}", which)) for r in (run, reference))
            found += filter(None, (difference(one[key], other[key], f"phase{phase}/{which}: {key}") for key in other))
    one, other = (json.loads((r.results / "evaluation.json").read_text())["episodes"] for r in (run, reference))
    rows, expected = ([(row["phase"], row["epoch"]) for row in read_metrics(r.results / "metrics.jsonl")]
                      for r in (run, reference))
    return found + (["evaluation.json"] if one != other else []) + (["metrics.jsonl"] if rows != expected else [])


def disturb(options, place, reference, seconds):
    """Runs that are killed `options.kills` times in all: (a record of each kill, differences of each finished run)."""
    rng, kills, verdicts = random.Random(options.seed), [], []
    while len(kills) < options.kills:
        run, last = Run(options, place / f"killed{len(verdicts) + 1}"), None
        while True:
            run.start()
            delay = rng.uniform(0.5, seconds / 2) if len(kills) < options.kills else math.inf
            facts = run.kill(delay, saving=len(kills) % 3 == 2)
            if last:
                show(last, run.continued())
            if facts is None:
                break
            last = {"number": len(kills) + 1, "run": run.folder.name, **facts}
            kills.append(last)
        code = run.process.returncode
        verdicts.append([f"exit code {code}: {run.log.read_text()[-2000:]}"] if code else differences(run, reference))
        print(f"{run.folder.name}: {run.lives} lives, " + ("; ".join(verdicts[-1]) or "equal bit for bit"), flush=True)
    return kills, verdicts


def show(kill, continued):
    kill["continued"] = continued
    print(f"kill {kill['number']:2d}: {kill['running']}; {kill['processes']} processes, the last gone after "
          f"{kill['gone_after_s']:.2f} s{', LEFT: ' + str(kill['left']) if kill['left'] else ''}; continued in "
          f"{continued}", flush=True)


def main():
    def add(parser):
        parser.add_argument("--kills", type=at_least(1), default=20)
        parser.add_argument("--seed", type=at_least(0), default=0, help="of the moments")
        parser.add_argument("--json", type=writable, default="resume.json", help="where the result goes")
        parser.set_defaults(config="configs/smoke.yaml")
    options = parse(__doc__, add=add)
    print(load_line(1))
    with tempfile.TemporaryDirectory(prefix="resume-") as place:
        shared, begun, reference = set(os.listdir("/dev/shm")), time.monotonic(), Run(options, Path(place) / "alone")
        reference.start()
        if reference.process.wait():
            raise ConfigError(f"the undisturbed run failed:\n{reference.log.read_text()[-3000:]}")
        seconds = time.monotonic() - begun
        print(f"undisturbed: {seconds:.0f} s", flush=True)
        kills, verdicts = disturb(options, Path(place), reference, seconds)
        leaked = leaked_memory(shared)
    good = not any(verdicts) and not leaked and not any(kill["left"] for kill in kills)
    print(f"{len(kills)} kills, {len(verdicts)} finished runs: {'pass' if good else 'FAIL'}"
          + (f"; left in /dev/shm: {leaked}" if leaked else ""))
    finish(options.json, kills=kills, differences=verdicts, leaked=leaked, undisturbed_s=seconds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(run_script(main, (ConfigError,)))
