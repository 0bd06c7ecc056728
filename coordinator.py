"""The whole pipeline: collect -> preprocess -> phase 1 -> phase 2 -> phase 3 -> evaluate -> report.

    python coordinator.py --config configs/quick.yaml              # laptop, 2 cores, no GPU
    python coordinator.py                                          # the target machine, 2 GPUs
    python coordinator.py --config configs/quick.yaml --from-phase 2        (again from phase 2 on)
    python coordinator.py --config configs/quick.yaml --only evaluate

Each step is its own process, so memory and GPUs are free in between. The same command continues where it stopped.
"""
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from runtime.resources import after_imports, before_torch
if __name__ == "__main__":
    before_torch()

from configs import ConfigError, WriteError, console, to_dict
from configs.command_line import parse
from configs.console import BAD_INPUT, MEMORY_STOP, OUT_OF_MEMORY
from configs.files import next_name, write_whole
from data.settings import scenario_hashes
from env.launch import OUT_OF_THE_WAY, ROOT, python_environment
from runtime.memory import PeakMemory, component, machine_memory, oom_kills, process_tree
from runtime.resources import ONE_REQUEST_S, claim, share_of_workers, spin_briefly, stop_signals, usable_cores
from runtime.resources import threads_per_process as threads

STEPS = ("collect", "preprocess", "phase1", "phase2", "phase3", "evaluate", "report")
RESULTS = {"evaluate": "evaluation.json", "report": "report.html"}
LEAVES = {"phase1": "phase1/latest", "phase2": "phase2/latest", "phase3": "phase3/latest", **RESULTS}  # in its folder
RANKS = ("train_ddp", "train_rl")
INTERRUPTED = (-signal.SIGTERM, 128 + signal.SIGTERM, 130)  # how a step ends that is no phase and was asked to stop
MOST_PARTS = 16  # into which a micro-batch is cut after it ran out of memory


class Stop:
    """Passes `stop_signals` on to the running step, once, as SIGTERM; a later one kills it, but for SIGHUP, of which a
    closing terminal may send several."""

    def __init__(self):
        self.asked, self.at_once, self.since, self.child = False, False, 0.0, None
        for number in stop_signals():
            signal.signal(number, self._handle)

    def _handle(self, number, frame):
        if self.asked and (number == signal.SIGHUP or time.monotonic() - self.since < ONE_REQUEST_S):
            return
        self.at_once, self.asked, self.since = self.asked, True, time.monotonic()
        if self.child is not None and self.child.poll() is None:
            self._kill() if self.at_once else self.child.send_signal(signal.SIGTERM)

    def _kill(self):
        """The step dies and its children with it, but for ranks that have not come to say so yet."""
        tree = process_tree(self.child.pid)
        self.child.kill()
        for pid in filter(lambda pid: component(pid) in RANKS, tree):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def resource_plan(cfg):
    """{step: {"processes", "threads", "rollout_workers", "environments", "gpus"}} for this machine."""
    question = "import torch; print(torch.cuda.device_count())"  # in a process of its own: this one stays small
    probe = subprocess.run([sys.executable, "-P", "-c", question], capture_output=True, text=True, **OUT_OF_THE_WAY)
    if probe.returncode:
        said = probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"]
        raise ConfigError(f"PyTorch does not start: {said[-1]}")
    gpus = int(probe.stdout) if cfg.run.device != "cpu" else 0
    ranks, learners, scorers = cfg.coordinator.nproc or max(gpus, 1), max(gpus, 1), cfg.evaluate.workers
    alone = {"processes": 1, "threads": 1}

    def training(processes):
        simulators = processes * share_of_workers(cfg.rollout, processes)
        return {"processes": processes, "threads": threads(cfg.run.threads, processes, simulators), "gpus": gpus,
                "rollout_workers": simulators,
                "environments": max(simulators, processes) * cfg.rollout.num_envs_per_worker}
    plan = {"collect": {"processes": cfg.data.processes, "threads": 1}, "preprocess": alone,
            "phase1": {"processes": ranks, "threads": threads(cfg.run.threads, ranks), "gpus": gpus},
            "phase2": training(learners), "phase3": training(ranks),
            "evaluate": {**alone, "rollout_workers": scorers, "environments": scorers}, "report": alone}
    columns = ("processes", "threads", "gpus", "rollout_workers", "environments")
    print(f"resource plan ({usable_cores()} cores, {gpus} GPUs, {machine_memory()[1] / 1024:.1f} GB; "
          f"phases 1 to 3 may need {cfg.memory.budget_gb:g} GB):")
    print(f"  {'step':12s}" + "".join(f"{c:>17s}" for c in columns))
    for step, row in plan.items():
        print(f"  {step:12s}" + "".join(f"{row.get(c, '-'):>17}" for c in columns))
    return plan


def revision():
    """The git commit of this program, with "-dirty" when files differ from it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def command_of(step, options, folder, plan):
    """The command line of one step."""
    shared, ranks = ["--config", options.config_file, *options.overrides], plan[step]["processes"]
    launcher = ["-m", "runtime.ranks", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    ddp = [*launcher, str(ROOT / "train_ddp.py"), "--phase", step[-1], *shared]
    words = {"collect": ["-m", "data.collect", *shared], "preprocess": ["-m", "data.preprocess", *shared],
             "phase1": ddp, "phase2": [str(ROOT / "train_rl.py"), *shared], "phase3": ddp,
             "evaluate": [str(ROOT / "evaluate.py"), *shared, "--checkpoint", str(folder), "--out",
                          str(folder / "evaluation.json"), "--tracks", str(folder / "evaluation.tracks.npz")],
             "report": ["-m", "runtime.report", str(folder)]}
    return [sys.executable, *words[step]]


def run_step(step, command, threads, stop):
    """Run one step in a process group of its own; returns its exit code."""
    environment = {**python_environment(threads), "PYTHONUNBUFFERED": "1"}
    print(f"\n==== {step}: {shlex.join(command)}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        marker, killed = Path(place) / "exit-code", oom_kills()
        environment["EXIT_CODE_FILE"] = str(marker)
        environment.setdefault("MEMORY_ROOT", str(os.getpid()))
        spin_briefly(environment)
        environment.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # an epoch may take longer than torchrun's 30 s
        stop.child = subprocess.Popen(command, env=environment, **OUT_OF_THE_WAY)
        if stop.asked:  # while it was started
            stop.child.send_signal(signal.SIGTERM)
        code = stop.child.wait()
        stop.child = None
        if marker.with_name("stopped").exists():  # the signal may have been sent to the step itself
            stop.asked = True
        said = int(marker.read_text() or code) if marker.exists() else None  # empty: the disk is full
        if code == 1 and stop.asked and not said:  # so torchrun ends after a signal; None: its ranks had not begun
            return INTERRUPTED[0] if said is None else 0
        if code and said not in (None, 0, 1):
            return said
        return OUT_OF_MEMORY if code and oom_kills() > killed else code


def with_retries(step, command, threads, cfg, stop, state, folder):
    """`run_step`, again after a failure that is neither bad input nor a stop; every phase resumes by itself.

    A phase that ran out of memory goes on with half the micro-batch and twice the accumulation, now and later:
    `state["parts"]` remembers in how many parts it works through a micro-batch (memory.split).
    """
    attempt, retries, parts = 0, cfg.coordinator.retries, state["parts"]
    while True:
        split = [f"memory.split={parts[step]}"] if step in parts else []
        code = run_step(step, [*command, *split], threads, stop)
        if code in (0, BAD_INPUT, MEMORY_STOP) or stop.asked:
            return code
        cut = 2 * parts.get(step, cfg.memory.split)
        may_cut = step.startswith("phase") and cut <= MOST_PARTS and not cfg.ddp.static_graph
        if code == OUT_OF_MEMORY and may_cut:
            parts[step] = cut
            save_state(folder, state)
            print(f"{step} ran out of memory: it goes on from its last checkpoint, each micro-batch in {cut} parts",
                  flush=True)
        elif attempt < retries:
            attempt += 1
            print(f"{step} failed with exit code {code}: trying again ({attempt}/{retries})", flush=True)
        else:
            return code


def load_state(path, cfg):
    """What earlier calls did. After a change of the configuration no step counts as done: each looks for itself what
    there is to continue."""
    try:
        state = json.loads(path.read_text()) if path.exists() else {}
        done = {step: dict(facts) for step, facts in state.get("steps", {}).items()}
        parts = {step: int(number) for step, number in state.get("parts", {}).items()}
        [float(facts.get("seconds", 0)) for facts in done.values()]
    except (ValueError, AttributeError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged ({error}); remove it, every step finds its own work again") from None
    names = sorted({variant.env.scenario for variant in cfg.variants()} | set(cfg.data.scenarios))
    files = [scenario_hashes(name) for name in names]  # a user's networks and routes
    digest = hashlib.sha1(json.dumps([to_dict(cfg), files]).encode()).hexdigest()
    if state.get("configuration") != digest:
        if done:
            print("the configuration or a scenario has changed: every step is run again and continues what it finds")
        done, parts = {}, {}
        state.pop("repeating", None)
    return {**state, "configuration": digest, "steps": done, "parts": parts}


def steps_to_run(options, state, folder, keep):
    """The steps that this call must run; forgets what `--from-phase` and `--only` ask to repeat."""
    if options.only:
        return [options.only]
    if options.from_phase and state.get("repeating") != options.from_phase:
        state["repeating"] = options.from_phase  # until it is done: the same command continues
        first = STEPS.index(f"phase{options.from_phase}")
        for step in STEPS[first:]:
            state["steps"].pop(step, None)
            set_aside(folder / step, keep)
            set_aside(folder / "tensorboard" / step, keep)  # its curves, too: metrics.jsonl forgets them
    done = [state["steps"].get(step, {}).get("status") == "done" and (step not in RESULTS or made(folder, step))
            for step in STEPS] + [False]
    first = done.index(False)  # whatever follows a repeated step is repeated too
    while first and not made(folder, STEPS[first - 1]):  # what it begins with has been removed
        first -= 1
    return list(STEPS[first:])


def made(folder, step):
    """Whether what a step leaves in the run folder is there."""
    return step not in LEAVES or (folder / LEAVES[step]).exists()


def set_aside(path, keep):
    """Rename an old phase folder, so that the phase starts again and nothing is lost; the last `keep` stay."""
    if path.is_dir():
        new, older = next_name(path.with_name(f"{path.name}.old"), keep)
        path.rename(new)
        print(f"kept the old {path} as {new.name}")
        for old in older:
            shutil.rmtree(old, ignore_errors=True)
            print(f"removed {old}: the last {keep} are kept (checkpoint.keep_last)")


def save_state(folder, state):
    write_whole(folder / "state.json", json.dumps(state, indent=1))


def add_options(parser):
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--from-phase", type=int, choices=(1, 2, 3), help="run this phase and all that follows again")
    one.add_argument("--only", choices=STEPS, help="run one step only")


def pipeline(options, stop):
    """Run what is missing; returns the exit code."""
    cfg = options.config
    folder = Path(cfg.run.folder) / cfg.run.name
    lock = claim(folder)  # noqa: F841  held until this process ends
    state = load_state(folder / "state.json", cfg)
    plan, begun = resource_plan(cfg), time.monotonic()
    state.update(command=shlex.join(sys.argv), plan=plan, revision=revision())
    for step in steps_to_run(options, state, folder, cfg.checkpoint.keep_last):
        if stop.asked:
            print(f"\nstopped before {step}; everything is saved; {console.again()}")
            return 0
        start = time.monotonic()
        state["steps"][step] = {"status": "running"}
        save_state(folder, state)
        command = command_of(step, options, folder, plan)
        code = with_retries(step, command, plan[step]["threads"], cfg, stop, state, folder)
        stopped = code == MEMORY_STOP or stop.asked and code in (0, *INTERRUPTED)
        status = "stopped" if stopped else "failed" if code else "done"
        state["steps"][step] = {"status": status, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
        save_state(folder, state)
        if stop.at_once:
            print(f"\nended {step} at once; the same command continues from what it had saved", file=sys.stderr)
            return 130
        if stopped:
            saved = ("everything before it is" if step == "evaluate" else  # which begins anew
                     "what it had finished is" if code in INTERRUPTED else "everything is")
            print(f"\nstopped in {step}; {saved} saved; {console.again()}")
            return MEMORY_STOP if code == MEMORY_STOP else 0
        if code:
            first = "correct what its message says first; then " if code == BAD_INPUT else ""
            print(f"\n{step} failed with exit code {code}; {first}{console.again()}", file=sys.stderr)
            return code
    if not options.only:
        state.pop("repeating", None)
    save_state(folder, state)
    print("\n" + "\n".join(f"  {step:12s} {facts.get('seconds', 0):8.1f} s  {facts['status']}"
                           for step, facts in state["steps"].items()))
    results = [str(path) for path in map(folder.joinpath, RESULTS.values()) if path.exists()]
    print(f"done in {time.monotonic() - begun:.0f} s{': ' if results else ''}{', '.join(results)}")
    return 0


def run():
    options = parse(__doc__, add=add_options)
    memory = PeakMemory()
    memory.start()
    try:
        return pipeline(options, Stop())
    finally:
        peak = memory.stop()
        if memory.at_peak:  # else it was refused at once
            print(peak, flush=True)


def main():
    after_imports()
    return console.exit_code(run, (ConfigError,), troubles=(WriteError,))


if __name__ == "__main__":
    sys.exit(main())
