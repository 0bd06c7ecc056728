"""How the cores and folders of a machine are shared out; without torch, for the coordinator too."""
import contextlib
import fcntl
import gc
import os
import signal
from pathlib import Path

from configs import ConfigError, console


def threads_per_process(wanted, ranks, rollout_workers=0):
    """Torch threads of each of `ranks` processes on a machine where `rollout_workers` processes simulate beside them.

    `wanted` (run.threads) counts when it is not 0. Threads that compete with busy simulators wait for each other at
    every operation: one thread of two that has no core of its own halves the speed of inference.
    """
    return wanted or max(1, (usable_cores() - rollout_workers) // ranks)


def usable_cores(root="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """How many processors this process may keep busy: those that it may run on or, where that is less, the share of
    their time that its control groups have (docker --cpus)."""
    cores = len(os.sched_getaffinity(0))
    for folder, old in control_groups("cpu", root, own):
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if old else ("cpu.max",)
        try:
            quota, period = (int(word) for name in files for word in (folder / name).read_text().split())
        except (OSError, ValueError):  # the new kind says "max" where there is none
            continue
        if quota > 0:  # the old kind says -1
            cores = min(cores, quota // period)
    return max(cores, 1)


def control_groups(controller, root="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """[(folder, whether of the old kind, which has a folder for each controller)] of the control groups of this
    process, its own first, then those above it."""
    try:
        lines, found = Path(own).read_text().splitlines(), []
    except OSError:  # a kernel without control groups
        return []
    for _, names, path in (line.split(":", 2) for line in lines):
        if not names or controller in names.split(","):
            top = Path(root) / names
            group = top / path.strip("/")
            found += [(folder, bool(names)) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return found


def spin_briefly(environment=os.environ):
    """Have OpenMP's threads look for work for microseconds, not milliseconds, before they sleep; call before torch is
    imported. Threads that wait by spinning take the cores from whoever else computes here, above all from the thread
    that they wait for. A user's own choice stays."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "1000")


def before_torch():
    """What a script does first, as importing torch takes seconds, a fifth of them the garbage collector's, which finds
    nothing there: until `after_imports`, nothing is collected and Ctrl-C is no traceback; see `spin_briefly`."""
    gc.disable()
    console.hush_ctrl_c()
    spin_briefly()


def after_imports():
    """Undo the first two."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    console.heed_ctrl_c()


ONE_REQUEST_S = 0.5  # `timeout` and systemd ask twice, a process by itself and its group: that is one request


def stop_signals():
    """What asks a command to save and end: Ctrl-C, SIGTERM, and a terminal that closes, which nohup has us ignore."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def share_of_workers(rollout, learners):
    """Rollout processes of each learner of a node, which divide `rollout.num_workers` between them; 0 = in itself."""
    return max(1, rollout.num_workers // learners) if rollout.num_workers else 0


def claim(folder):
    """Keep other processes from writing to `folder` as long as the returned file is open; the kernel lets go of it
    however this process ends. ConfigError when somebody else has it."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "a")  # nothing is emptied, should it be a link
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written to: {error.strerror}") from None
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    file.close()
    raise ConfigError(f"{folder}: another process is working there; wait for it or change run.name")


def claim_phase(folder):
    """`claim` a phase's folder, and the run's around it, whose records and configuration all phases write; below the
    coordinator, which holds that one, the phase's alone."""
    below = "EXIT_CODE_FILE" in os.environ
    return [claim(path) for path in ([folder] if below else [Path(folder).parent, folder])]
