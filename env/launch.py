"""Finding and starting SUMO's real binaries from the eclipse-sumo wheel, without SUMO_HOME."""
import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1
WORKER_GOES, SIMULATOR_GOES = 300, 600  # who is killed first when memory ends: these can be replaced
PARENT = os.getppid()  # as it was when this program began: a little later it may have died already
OLDEST, REMEDY = (1, 28), "install it with `pip install eclipse-sumo==1.28.*`"
OURS = "--mesosim", "false", "--num-clients", "1"  # SUMO's options: vehicles on lanes, nobody else who commands
SYSTEM = "libgl1 libxrender1 libxext6 libatomic1 libexpat1"  # not in its wheel; desktops have them
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class SumoError(Exception):
    """SUMO is missing, refused its input, died or froze; the message holds SUMO's own words."""


def sumo_home():
    """Folder of SUMO inside the eclipse-sumo wheel; raises SumoError when it is not installed."""
    spec = importlib.util.find_spec("sumo")
    if spec is None or not spec.origin:
        raise SumoError(f"SUMO not found: no Python package `sumo`; {REMEDY}")
    return Path(spec.origin).parent


@functools.cache
def check_release():
    """Raise SumoError when the installed eclipse-sumo is older than the release that this program works with."""
    found = importlib.metadata.version("eclipse-sumo")
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        raise SumoError(f"SUMO {found} in {sumo_home()} is too old, 1.28 is the oldest that works; {REMEDY}")


def find_binary(name):
    """Path of the real binary `name` (the `sumo` command of the wheel is only a wrapper around it)."""
    path = sumo_home() / "bin" / name
    check_release()
    if not path.is_file():
        raise SumoError(f"SUMO not found: {path} does not exist; reinstall eclipse-sumo")
    return str(path)


def explained(words):
    """SUMO's own words, and what to do where a library of the system is missing (a slim container, a bare server), or
    where a file is meant that `build_scenario` has made (a power cut leaves it empty)."""
    if "cannot open shared object file" in words:
        return f"{words}\nSUMO needs libraries of the system; Debian, Ubuntu: apt-get install {SYSTEM}"
    if made := re.search(r"'([^']*/(\w+)-[0-9a-f]{8})/(routes\.xml|\2\.net\.xml|\2\.sumocfg)'", words):
        return f"{words}\nIf that file is damaged, remove {made[1]}: it is generated anew"
    return words


def sumo_environment():
    """Environment of a SUMO process: its own data folder and no stranger's settings. In another character set it would
    change the letters of file names that it returns."""
    return {**os.environ, "SUMO_HOME": str(sumo_home()), "LC_ALL": "C.UTF-8"}


def python_environment(threads):
    """Environment of a Python process that finds this project's modules, and no `data` or `env` of the current folder.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(threads)}


def put_in(name):
    """A file name of a .sumocfg with the values of its ${VARIABLES}, as SUMO reads it."""
    return re.sub(r"\$\{([^}]*)\}", lambda found: sumo_environment().get(found[1], ""), name)


def die_with_parent(parent=None):
    """Ask the kernel to kill this process when its parent dies (Linux). `parent`: the pid it must still have."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it died before we could ask
        os._exit(1)


OUT_OF_THE_WAY = {"process_group": 0, "preexec_fn": die_with_parent}  # of a child for which Ctrl-C is not


@contextlib.contextmanager
def without_main():
    """Processes that are spawned meanwhile do not import the script that spawns them: train_ddp.py would bring PyTorch,
    170 MB in each."""
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def first_to_go(score):
    """Raise the kernel's readiness to kill this process, and what it starts, when memory ends (0 to 1000)."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        file.write(str(max(score, int(file.read()))))  # no Linux, or not allowed: the kernel chooses by size alone


def _prepare_simulator(parent):
    die_with_parent(parent)
    first_to_go(SIMULATOR_GOES)


def die_with_launcher():
    """Under torchrun: end with the process that started this one. A rank whose launcher was killed would train on by
    itself, hold the run folder's lock, and wait for its peers until the time-out."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(PARENT)


def launch(command, stderr):
    """Start `command` in its own process group, so that Ctrl-C reaches it only through us, and tied to our life.

    The process is killed with the *thread* that starts it, so call this from one that lives as long as it is needed.
    SumoError where no further process may be started.
    """
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                                env=sumo_environment(), process_group=0,
                                preexec_fn=functools.partial(_prepare_simulator, os.getpid()))
    except OSError as error:
        raise SumoError(f"SUMO's process does not start ({error.strerror}): raise the limit on processes or open files "
                        "(ulimit -u, ulimit -n, a container's pids), or lower rollout.num_workers") from None
