"""Drills with processes: simulators, workers, ranks and whole programs that are killed or frozen, and strangers."""
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.drill_place import ROOT, SMOKE, TORCHRUN, difference, ended_well, of_kind, promise, refused

KILL, FREEZE, TERM = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM


def hit(place, kind, sign, *more):
    """Phase 2 in which one process of a kind gets a signal; returns what happened."""
    run = place.start(*place.phase(2, "phase2.iterations=999", "phase2.train_batch_size=240",
                                   "phase2.fragment_length=60", "phase2.epochs=1", "env.call_timeout_s=2", *more))
    place.until_record(run, 2)
    hits, seconds = 0, []
    while not (lost := sum(row["lost_steps"] for row in place.rows(2))):  # one that dies while nobody steps costs none
        had, hits = len(place.rows(2)), hits + 1
        time.sleep(random.random())
        victim = of_kind(run, kind)[0]
        below = [pid for pid in of_kind(run, "sumo") if kind != "sumo" and parent(pid) == victim]
        number, start = len(of_kind(run, kind)), time.monotonic()
        os.kill(victim, sign)
        place.until(run, lambda: victim not in (now := of_kind(run, kind)) and len(now) >= number, "not replaced")
        seconds.append(time.monotonic() - start)
        end = time.monotonic() + 10
        while (left := [pid for pid in below if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
            time.sleep(0.01)
        promise(not left, "the worker's SUMO lives on")
        place.until(run, lambda: len(place.rows(2)) > had)
    run.send_signal(TERM)
    promise("starts anew" in ended_well(place.end(run), "stopped and saved").text, "nothing was said")
    promise(lost <= 4 * hits, f"{lost} lost steps")
    return (f"{lost} of {len(place.rows(2)) * 240} steps lost and counted, replaced after {max(seconds):.1f} s, "
            f"training went on, {place.nobody_left()}")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def killed_sumo(place):
    return hit(place, "sumo", KILL)


def frozen_sumo(place):
    return hit(place, "sumo", FREEZE)


def killed_worker(place):
    return hit(place, "rollout worker", KILL)


def sumo_that_never_starts(place):
    (place.folder / "bad.sumocfg").write_text(
        '<configuration><input><net-file value="bad.net.xml"/></input></configuration>')
    (place.folder / "bad.net.xml").write_text("<routes/>")  # worse ones make SUMO 1.28 end without a word
    message = refused(place.run(*place.phase(2, "env.scenario=bad.sumocfg")), "bad.sumocfg", "SUMO said: Error")
    return f"exit code 2: {message}"


def killed_program(place):
    for words in (place.phase(2), [*TORCHRUN, *place.phase(2, "run.name=ranks")]):
        run = place.start(*words, "phase2.iterations=1000")
        place.until_record(run, 2, name="smoke" if words[0] != TORCHRUN[0] else "ranks")
        run.kill()
        run.wait()
        left = place.nobody_left()
    return f"python train_rl.py and torchrun's agent: {left} within 5 s"


def terminated_ranks(place):
    words = ["coordinator.py", *SMOKE, "--only", "phase1", "coordinator.nproc=2", "phase1.epochs=40"]
    run = place.start(*words)
    place.until_record(run, 1)
    start = time.monotonic()
    run.send_signal(TERM)
    done = place.end(run)  # torchrun adds a traceback of its own
    promise(done.code == 0, f"exit code {done.code}: {done.text[-500:]}")
    seconds, state = time.monotonic() - start, place.checkpoint(1)
    promise(len(state["ranks"]) == 2 and done.text.count("stopped and saved") == 1, "not saved once for both ranks")
    before = state["counters"]["updates"]
    last = f"phase1.epochs={state['epoch'] + 1}"
    again = ended_well(place.run(*words[:-1], last), f"{before} updates)")
    promise("resumed" in again.text and place.checkpoint(1)["counters"]["updates"] > before, "does not continue")
    return f"exit code 0 after {seconds:.1f} s, both ranks at update {before}, continued from it"


def killed_anywhere(place, kills=20):
    """Phase 1, a checkpoint each epoch: random moments after the first checkpoint, every third one while saving."""
    words, rng, folder = place.phase(1, "phase1.epochs=60"), random.Random(1), place.results / "phase1"
    worst, while_saving = 0, 0
    for number in range(kills):
        run, had = place.start(*words), len(place.rows(1))
        place.until(run, lambda: len(place.rows(1)) > had or not number and folder.exists(), every=0.002)
        if number % 3 == 2:
            place.until(run, lambda: list(folder.glob(".step_*.tmp")), "never saved", every=0.0002)
            while_saving += 1
        time.sleep(rng.random() * 0.3 if number % 3 != 2 else 0)
        run.kill()
        run.wait()
        promise("DAMAGED" not in run.log.read_text(), "a damaged checkpoint")
        saved = place.checkpoint(1)
        worst = max(worst, len(place.rows(1)) - (saved["epoch"] if saved else 0))
        had = saved["epoch"] if saved else 0
    done = ended_well(place.run(*place.phase(1, f"phase1.epochs={had + 1}")), "resumed from")
    promise(worst <= 1 and "DAMAGED" not in done.text, f"{worst} epochs lost at once")
    epochs = [row["epoch"] for row in place.rows(1)]
    promise(epochs == list(range(1, had + 2)), f"epochs recorded: {epochs}")
    return f"{kills} kills, {while_saving} while saving: at most {worst} epoch repeated, never a damaged checkpoint"


FAILING = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
import train_ddp
from runtime.ending import run_script
real, calls = train_ddp.optimiser_step, []
def step(*arguments):
    calls.append(0)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        raise RuntimeError("the failure that everybody should see")
    return real(*arguments)
train_ddp.optimiser_step = step
sys.exit(run_script(train_ddp.main, train_ddp.USER_ERRORS))
"""


def failing_rank(place):
    (place.folder / "failing.py").write_text(FAILING)
    words = [*TORCHRUN, "failing.py", ROOT, *place.phase(1, "ddp.timeout_s=60")[1:]]
    start, done = time.monotonic(), place.run(*words)
    promise(done.code not in (0, 2) and "the failure that everybody should see" in done.text, done.text[-400:])
    left = place.nobody_left()
    ended_well(place.run(*TORCHRUN, *place.phase(1)), "phase 1 finished")
    return f"both ranks gone after {time.monotonic() - start:.0f} s with the original traceback, {left}; continues"


def strangers_port(place):
    """In this process: the first port that the product is given belongs to somebody else's SUMO."""
    from configs import load_config
    from env import sumo
    from env.launch import find_binary, sumo_environment
    from env.scenarios import build_scenario
    from env.workers import make_pool
    cfg = load_config("configs/smoke.yaml", ["env.start_timeout_s=20"])
    road, real, taken = build_scenario(cfg, place.folder / "roads"), sumo.free_port, []
    taken.append(real())
    stranger = subprocess.Popen([find_binary("sumo"), "-c", road, "--remote-port", str(taken[0])],
                                env=sumo_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(2)
        offered = list(taken)
        sumo.free_port = lambda: offered.pop() if offered else real()
        with make_pool(cfg, 0, 1, str(place.folder / "roads")) as pool:
            pool.reset([1])
            simulator = pool.environments.envs[0].simulator
            port = simulator.client._socket.getpeername()[1]
            promise(port != taken[0] and simulator.time() >= 0, "talks to a stranger")
    finally:
        sumo.free_port = real
        stranger.kill()
        stranger.wait()
    return f"port {taken[0]} refused, port {port} taken"


def side_by_side(place):
    """Phase 2 twice at once under two names; then a second one in the folder of a living run, and after a kill."""
    pair = [place.start(*place.phase(2, f"run.name={name}")) for name in ("a", "b")]
    for run in pair:
        ended_well(place.end(run), "phase 2 finished")
    where = difference(place.checkpoint(2, "a"), place.checkpoint(2, "b"))
    promise(where is None, f"they disturbed each other: {where}")
    run = place.start(*place.phase(2, "run.name=c", "phase2.iterations=1000"))
    place.until_record(run, 2, name="c")
    second = refused(place.run(*place.phase(2, "run.name=c")), "runs/c: another process", "run.name")
    ranks = place.run(*TORCHRUN, *place.phase(2, "run.name=c"))
    promise(ranks.code and "runs/c: another process" in ranks.text, ranks.text[-300:])
    promise(run.poll() is None, "the first one was disturbed")
    run.kill()
    run.wait()
    place.nobody_left()
    done = len(place.rows(2, "c"))
    ended_well(place.run(*place.phase(2, "run.name=c", f"phase2.iterations={done + 1}")), "resumed from")
    return f"equal weights; the second in one folder, torchrun too: {second}; a dead owner's lock does not block"
