"""Run one contestant as a process of its own and watch its whole process tree: memory, CPU time, what it leaves behind.

Orphans (daemons that outlive the process that started them) are adopted by this process, so no child of a contestant
escapes: the tree is everything below this process.
"""
import ctypes
import functools
import os
import signal
import subprocess
import time
from pathlib import Path

from env.launch import ROOT, die_with_parent
from runtime.memory import component, process_tree, pss_mb
from runtime.metrics import read_metrics

EVERY_S, GRACE_S, LIMIT_S = 0.5, 10.0, 7200.0  # between two samples; for a clean end; for a whole run
PR_SET_CHILD_SUBREAPER = 36
TICKS, PAGE_MB = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGESIZE") / 2 ** 20


class ContestantError(Exception):
    """A contestant failed; the message ends with the last lines of its log."""


def adopt_orphans():
    """Linux: processes below this one whose parent dies become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants():
    return [pid for pid in process_tree() if pid != os.getpid()]


def cpu_seconds(pid):
    """User and system time of a process and of the children that it has waited for; 0 when it has gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def resident_mb(pid):
    """Resident memory of a process, MB, shared pages in full; 0 when it has gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
    except OSError:
        return 0.0


def contest(command, folder):
    """Run `command` to its end. Returns a dict: peak_mb (PSS of the tree), at_peak {component: MB}, cpu [(seconds since
    1970, CPU seconds)], begin, sampling (CPU time of this watching per second), left (processes that outlived it).

    Every contestant has a home in `folder`, one torch thread, and no settings of ours in its environment.
    """
    environment = {**os.environ, "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    facts = {"begin": time.time(), "resident_mb": 0.0, "peak_mb": 0.0, "at_peak": {}, "cpu": []}
    log, own = Path(folder) / "log.txt", time.process_time()
    with open(log, "w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   preexec_fn=functools.partial(die_with_parent, os.getpid()))
        try:
            while _wait(process, EVERY_S) is None and time.time() < facts["begin"] + LIMIT_S:
                _sample(facts)
        finally:
            facts["left"] = _end(process)
    facts["sampling"] = (time.process_time() - own) / (time.time() - facts["begin"])
    if process.returncode:
        raise ContestantError(f"exit code {process.returncode}: " + " | ".join(log.read_text().splitlines()[-5:]))
    return facts


def _wait(process, seconds):
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _sample(facts):
    """Reading the PSS of a large process stops it for milliseconds, so it is read only while the tree grows: whenever
    its resident memory exceeds the highest so far by half a percent."""
    pids = descendants()
    facts["cpu"].append((time.time(), sum(map(cpu_seconds, pids))))
    resident = sum(map(resident_mb, pids))
    if resident > 1.005 * facts["resident_mb"]:
        facts["resident_mb"], table = resident, {}
        for pid in pids:
            name = component(pid)
            table[name] = table.get(name, 0.0) + pss_mb(pid)
        if sum(table.values()) > facts["peak_mb"]:
            facts["peak_mb"], facts["at_peak"] = sum(table.values()), table


def _end(process):
    """Wait until nothing is left below this process; kill what does not go by itself and return how many those were."""
    deadline = time.monotonic() + (GRACE_S if process.poll() is not None else 0)
    while _reap(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    stubborn = _reap(process)
    while alive := _reap(process):
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    process.wait()
    return len(stubborn)


def _reap(process):
    """Bury dead orphans; returns the living descendants."""
    process.poll()
    for pid in descendants():
        if pid != process.pid:
            try:
                os.waitpid(pid, os.WNOHANG)
            except OSError:  # not our own child: its parent does it
                pass
    return descendants()


def rates(folder, facts):
    """What FOLDER/metrics.jsonl says about the iterations after the first, and what they cost.

    Returns steps_per_s (collecting and learning), cpu_ms (CPU time of the tree per environment step), start_s (from
    launch to the first one's end, less one regular iteration), times {name: seconds per iteration} and ocr.
    """
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    if len(rows) < 2:
        raise ContestantError("left fewer than two iterations")
    first, last = rows[0], rows[-1]
    steps, seconds = last["env_steps"] - first["env_steps"], last["time"] - first["time"]
    cpu = _at(facts["cpu"], last["time"]) - _at(facts["cpu"], first["time"])
    each = seconds / (len(rows) - 1)
    times = {name: sum(row[name] for row in rows[1:]) / (len(rows) - 1)
             for name in ("time_collect", "time_wait", "time_infer", "time_learn") if name in last}
    return {"steps_per_s": steps / seconds, "cpu_ms": 1000 * cpu / steps, "ocr": _ocr(folder, rows),
            "start_s": first["time"] - facts["begin"] - each, "times": {**times, "iteration": each}}


def _ocr(folder, rows):
    """Mean share of arrived vehicles in the episodes that ended; None when none did."""
    episodes = Path(folder) / "episodes.jsonl"  # of the flat environments; our own training has it in its metrics
    shares = [row["ocr"] for row in (read_metrics(episodes) if episodes.exists() else rows) if "ocr" in row]
    return sum(shares) / len(shares) if shares else None


def _at(samples, when):
    """CPU seconds at a moment, interpolated between two samples."""
    before = max((s for s in samples if s[0] <= when), default=samples[0])
    after = min((s for s in samples if s[0] > when), default=samples[-1])
    share = (when - before[0]) / max(after[0] - before[0], 1e-9)
    return before[1] + min(max(share, 0.0), 1.0) * (after[1] - before[1])
