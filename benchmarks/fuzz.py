"""Damaged inputs by the hundred: each must be refused with exit code 2 and one message that names what is wrong.

    python -m benchmarks.fuzz --count 200 --json fuzz.json

No traceback, nothing started but SUMO where a network must be tried, no file of the user changed, no code from a file
executed. Cases run in forked processes as the scripts that they are; every tenth through a real command line.
"""
import contextlib
import importlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from benchmarks.arguments import at_least, new_parser, some_of
from benchmarks.fuzz_inputs import KINDS, PAYLOAD, SMOKE
from benchmarks.report import ROOT, finish
from configs.files import file_hash

DEADLINE = 120  # s
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(words):
    """The real command line of [script or module, arguments]."""
    script = [str(ROOT / words[0])] if words[0].endswith(".py") else ["-m", words[0]]
    return [sys.executable, *script, *words[1:]]


def prepare(folder):
    """A small data set, a checkpoint of phase 2 and a network, made by the real command lines."""
    for script in ("data.collect", "data.preprocess", "train_rl.py"):
        subprocess.run(command([script, *SMOKE, "phase2.iterations=1"]), cwd=folder, env=ENVIRONMENT, check=True,
                       capture_output=True)
    shutil.copy(next(folder.glob("runs/smoke/scenario/*/corridor.net.xml")), folder / "a.net.xml")
    shutil.rmtree(folder / "runs/smoke/scenario")
    return folder


def hashes(folder):
    return {str(path.relative_to(folder)): file_hash(path) for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in (".lock", "said.txt")}


def forked(words, folder):
    """(exit code, output) of a script's `main` in a forked process, which also says what else it started."""
    child = os.fork()
    if not child:
        os.chdir(folder)
        out = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os._exit(in_child(words))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(DEADLINE)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(0)
    return code, (folder / "said.txt").read_text(errors="replace")


def in_child(words):
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
    sys.argv, started = words, []
    sys.addaudithook(lambda event, about: started.append(about[0]) if event == "subprocess.Popen" else None)
    code = 1
    try:
        runpy.run_module(words[0].removesuffix(".py"), run_name="__main__")
    except SystemExit as error:
        code = error.code
    except BaseException:  # what Python itself would show
        sys.excepthook(*sys.exc_info())
    strange = [path for path in map(str, started) if Path(path).name not in ("sumo", "netconvert")]
    if strange:
        print(f"STARTED {strange}")
    return code


def judge(code, said, names, before, after, executed):
    """What is wrong with a refusal, or None."""
    errors = [line for line in said.splitlines() if line.startswith(("error:", "usage:"))]
    changed = [path for path, digest in before.items() if after.get(path) != digest]
    checks = [("a file's code was executed", executed), ("traceback", "Traceback" in said),
              (f"exit code {code}", code != 2), (f"{len(errors)} messages", len(errors) != 1),
              (f"none of {names} is named", not any(name in said for name in names)),
              (f"message of {len(said)} characters", len(said) > 20_000),
              ("something was started", "STARTED" in said), (f"changed: {changed}", changed)]
    return next((text for text, wrong in checks if wrong), None)


def one_case(number, seed, base, place, real):
    """Damage, run and judge; returns {"number", "kind", "command", "problem", "said"}."""
    kind = list(KINDS)[number % len(KINDS)]
    folder = Path(place) / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    words, names = KINDS[kind](folder, np.random.default_rng([seed, number]))
    before = hashes(folder)
    if real:
        done = subprocess.run(command(words), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
                              timeout=DEADLINE, errors="replace")
        code, said = done.returncode, done.stdout + done.stderr
    else:
        code, said = forked(words, folder)
    problem = judge(code, said, names, before, hashes(folder), (folder / PAYLOAD).exists())
    return {"number": number, "kind": kind, "command": " ".join(words), "problem": problem, "said": said}


def main():
    parser = new_parser(__doc__, None)
    parser.add_argument("--count", type=at_least(1), default=200, help="damaged inputs (default: %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--only", type=some_of(range(10_000)), help="numbers of single cases, for example 3,17")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("data.preprocess", "data.check", "train_ddp", "train_rl", "evaluate"):
        importlib.import_module(name)  # once, not in every forked process
    numbers, rows = [int(n) for n in options.only.split(",")] if options.only else range(options.count), []
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        base = Path(place) / "base"
        base.mkdir()
        prepare(base)
        for number in numbers:
            rows.append(one_case(number, options.seed, base, place, number % 10 == 9))
            if rows[-1]["problem"]:
                print(json.dumps({**rows[-1], "said": rows[-1]["said"][-1500:]}, indent=1), flush=True)
    kinds, wrong = Counter(row["kind"] for row in rows), [row for row in rows if row["problem"]]
    print(f"{len(rows)} damaged inputs ({', '.join(f'{n} x {kind}' for kind, n in kinds.items())}): "
          f"{len(rows) - len(wrong)} refused clearly, {len(wrong)} not")
    if options.json:
        finish(options.json, seed=options.seed, kinds=kinds, wrong=wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
