"""Every way in which a long training dies, tried on the real command lines: what was done, what was promised, what
happened.

    python -m benchmarks.drills                          all of them, with configs/smoke.yaml; under half an hour
    python -m benchmarks.drills --only 1,2,12 --json drills.json

Exit code 1 when a promise was broken.
"""
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks import drill_inputs as inputs
from benchmarks import drill_processes as processes
from benchmarks import drill_state as state
from benchmarks.arguments import new_parser, some_of
from benchmarks.drill_place import ROOT, SMOKE, Broken, Place, ended_well
from benchmarks.report import finish, load_line


def memory_pressure(place):
    """benchmarks/balloon.py is a drill of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.balloon", "--json", str(place.folder / "balloon.json")],
                          cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Broken(done.stdout[-1500:] + done.stderr[-500:])
    return "; ".join(" ".join(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("pass"))


DRILLS = [  # number, what is done, what is promised, by which function
    (1, "SIGKILL one SUMO in a rollout", "its fragment is lost and counted, another SUMO, nothing left",
     processes.killed_sumo),
    (2, "SIGSTOP one SUMO", "seen within the deadline (here 2 s), killed, replaced", processes.frozen_sumo),
    (3, "SIGKILL a rollout worker", "its SUMO goes with it, both are replaced", processes.killed_worker),
    (4, "a network that SUMO refuses", "a bounded number of tries, SUMO's own words, the file's name",
     processes.sumo_that_never_starts),
    (5, "SIGKILL the program, and torchrun's agent", "no process and no shared memory left after 5 s",
     processes.killed_program),
    (6, "SIGTERM to two ranks in an epoch", "both save the same step once, exit code 0, the next command continues",
     processes.terminated_ranks),
    (7, "SIGKILL phase 1 at 20 random moments", "always continues from a complete checkpoint, an epoch lost at most",
     processes.killed_anywhere),
    (8, "resume phases 1 and 3", "bit for bit what an uninterrupted run gives", state.exact_ddp),
    (9, "resume phase 2", "bit for bit what an uninterrupted run gives", state.exact_rl),
    (10, "2 ranks, then 1, then 2", "the position in the epoch is kept, a notice about random states",
     state.other_world_size),
    (11, "flip a bit of the newest checkpoint, cut it, cut all", "named, the one before it used; never from scratch",
     state.damaged_checkpoint),
    (12, "disk full in checkpoint, metrics and preprocessing", "training goes on, or one message; the old ones intact",
     state.full_disk),
    (13, "a NaN row in the data of one of two ranks", "file and row named; both ranks stop, or both go on without it",
     state.nan_row),
    (14, "gradients overflow in every step", "the scale backs off, no step is taken, a diagnosis ends it",
     state.overflows),
    (15, "one of two ranks raises", "the other one leaves too, the original traceback is shown",
     processes.failing_rank),
    (16, "chunks cut, longer, of other types, empty", "refused with the file's name before training, exit code 2",
     inputs.damaged_chunks),
    (17, "cut a chunk while phase 1 reads it", "an error with the file's name, no SIGBUS", state.shortened_chunk),
    (18, "a YAML file with five mistakes", "one line for each: key, value, remedy; nothing started", inputs.wrong_yaml),
    (19, "SUMO without its binary, and too old", "one line: where it was looked for, which release is needed",
     inputs.no_sumo),
    (20, "checkpoints of another model, hostile pickles", "refused, differences listed, no code executed",
     inputs.foreign_checkpoints),
    (21, "memory pressure to 80, 90, 96 %", "log, fewer workers, saved clean stop", memory_pressure),
    (22, "a port that a stranger's SUMO has", "another port; never talks to the stranger", processes.strangers_port),
    (23, "no ICVs, an empty road, more vehicles than slots", "finite losses, overflow counted", state.nobody_there),
    (24, "two runs side by side", "equal results; told when it is the same run folder, unless its owner is dead",
     processes.side_by_side)]


def prepared(folder):
    """A data set that all drills copy."""
    place = Place(folder)
    place.folder.mkdir()
    for module in ("data.collect", "data.preprocess"):
        ended_well(place.run(module, *SMOKE))
    return place.folder


def one(drill, base, folder):
    """Run one drill in a place of its own; returns its row."""
    number, done, promised, function = drill
    start, place = time.monotonic(), Place(folder, base)
    try:
        happened, result = function(place), "pass"
        result = "skip" if happened.startswith("SKIPPED") else result
    except Exception as error:  # whatever it is, the other drills take place
        happened, result = str(error) if isinstance(error, Broken) else traceback.format_exc(), "FAIL"
    place.tidy()
    shutil.rmtree(folder, ignore_errors=True)
    return {"drill": number, "done": done, "promised": promised, "happened": " ".join(happened.split()),
            "result": result, "seconds": round(time.monotonic() - start, 1)}


def main():
    parser = new_parser(__doc__, None)
    parser.add_argument("--only", type=some_of([drill[0] for drill in DRILLS]),
                        help="numbers of single drills, for example 1,2,12")
    options = parser.parse_args()
    wanted = [int(n) for n in options.only.split(",")] if options.only else [drill[0] for drill in DRILLS]
    start, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        base = prepared(Path(folder) / "base")
        for drill in DRILLS:
            if drill[0] in wanted:
                rows.append(one(drill, base, Path(folder) / f"drill{drill[0]}"))
                print("{drill:2d} | {done} | {promised} | {happened} | {result} | {seconds} s".format(**rows[-1]),
                      flush=True)
    failed = [row["drill"] for row in rows if row["result"] == "FAIL"]
    print(f"{len(rows)} drills in {(time.monotonic() - start) / 60:.1f} minutes, failed: {failed or 'none'}; "
          + load_line(1))
    if options.json:
        finish(options.json, rows=rows)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
