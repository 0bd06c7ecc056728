"""Limits of the machine: open files, processes, room. Not the user's mistake, and no traceback either."""
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import Config, ConfigError, console
from data import collect
from env.launch import SumoError
from env.scenarios import build_scenario
from runtime.ending import run_script
from runtime.resources import claim

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("words", [["-m", "data.collect"], [str(ROOT / "train_rl.py")],
                                   [str(ROOT / "evaluate.py"), "--controllers", "none"]])
def test_too_few_open_files_are_one_message(words, tmp_path):
    """Tracebacks, and 2 as for a wrong configuration where the scenario could not be built."""
    done = subprocess.run(["bash", "-c", 'ulimit -n 7; exec "$0" "$@"', sys.executable, *words, "--config",
                           "configs/smoke.yaml", "run.tensorboard=false"], cwd=tmp_path, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, timeout=300)
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(told) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "raise the limit on open files (ulimit -n)" in told[0]


@pytest.mark.parametrize("ending", [console.exit_code, run_script])
@pytest.mark.parametrize("error, remedy", [
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "close other programs"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "'runs/x'; make room")])
def test_every_limit_has_its_remedy_and_no_traceback(ending, error, remedy, monkeypatch, capsys):
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)

    def work():
        raise error
    assert ending(work, (ConfigError,)) == 1
    assert remedy in capsys.readouterr().err


def test_a_full_disk_while_a_scenario_is_built_is_no_mistake_of_the_user(tmp_path, monkeypatch, capsys):
    """It ended with 2, after which the coordinator does not try again; another process in the folder is still one."""
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")
    held = claim(tmp_path)
    pid = os.fork()
    if not pid:  # a lock is a process's
        os._exit(console.exit_code(lambda: claim(tmp_path), (ConfigError,)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    held.close()
    monkeypatch.setattr(Path, "write_text", full)
    assert console.exit_code(lambda: build_scenario(Config(), tmp_path), (SumoError,)) == 1
    told = capsys.readouterr().err
    assert "could not be written: No space left on device; make room" in told and told.count(console.ROOM) == 1


def test_processes_that_do_not_start_for_want_of_files_do_not_ask_for_room(monkeypatch, tmp_path):
    """The message was about /dev/shm."""
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(collect, "ProcessPoolExecutor", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        collect.run_episodes(Config(), [None], tmp_path, None)


def test_a_folder_in_a_files_place_is_one_message(tmp_path, capsys):
    """A metrics.jsonl that is one was a traceback."""
    assert console.exit_code(tmp_path.read_text, ()) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_a_worker_that_somebody_starts_by_hand_says_what_it_is():
    """`python -m env.worker --help` was a ValueError."""
    done = subprocess.run([sys.executable, "-m", "env.worker", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "rollout worker" in done.stderr and "Traceback" not in done.stderr
