"""Drills with what is saved: resuming, damaged checkpoints and data, full disks, numbers that are not finite."""
import json
import os
import shutil
import signal
import subprocess

import numpy as np
import torch

from benchmarks.drill_place import SMOKE, difference, ended_well, promise, refused


def interrupted(place, phase, name, *more):
    """Start a phase, press Ctrl-C after its first record, start it again to the end; returns where it stopped."""
    words = place.phase(phase, f"run.name={name}", *more)
    run = place.start(*words)
    place.until_record(run, phase, name=name)
    os.killpg(run.pid, signal.SIGINT)
    ended_well(place.end(run), "stopped and saved")
    epoch = place.checkpoint(phase, name)["epoch"]
    ended_well(place.run(*words), f"(epoch {epoch},")
    return epoch


def exact(place, phases, *more):
    """Compare an interrupted run with one that nobody disturbed, everything saved bit for bit."""
    stops = []
    for phase in phases:
        ended_well(place.run(*place.phase(phase, f"run.name=whole{phase}", *more)))
        stops.append(f"phase {phase} stopped in epoch {interrupted(place, phase, f'cut{phase}', *more)}")
        one, other = (place.checkpoint(phase, f"{kind}{phase}") for kind in ("whole", "cut"))
        where = difference(one, other)
        promise(where is None, f"phase {phase}: not the same: {where}")
    return f"{', '.join(stops)}: weights, optimiser, scaler, counters equal"


def exact_ddp(place):
    return exact(place, (1, 3), "phase1.epochs=8", "phase3.epochs=4")


def exact_rl(place):
    return exact(place, (2,), "phase2.iterations=5")


def other_world_size(place):
    seen = []
    for ranks in (2, 1, 2):
        run = place.start("coordinator.py", *SMOKE, "--only", "phase1", f"coordinator.nproc={ranks}",
                          "phase1.epochs=60")
        had = len(place.rows(1))
        place.until(run, lambda: len(place.rows(1)) > had)
        run.send_signal(signal.SIGTERM)
        done, state = place.end(run), place.checkpoint(1)
        promise(done.code == 0 and "stopped and saved" in done.text, f"exit code {done.code}: {done.text[-500:]}")
        promise(not seen or "NOTE: saved by" in done.text, "no notice about the random states")
        seen.append(len(state["ranks"]))
    epochs = [row["epoch"] for row in place.rows(1)]
    promise(seen == [2, 1, 2] and epochs == list(range(1, len(epochs) + 1)), f"ranks {seen}, epochs {epochs}")
    return (f"ranks {seen}, epochs 1 to {len(epochs)} each once, {state['counters']['samples']} samples into the next; "
            "notice given")


def damaged_checkpoint(place):
    ended_well(place.run(*place.phase(1, "phase1.epochs=3")))
    for number, damage in ((3, flip), (4, cut)):
        newest = place.results / "phase1" / (place.results / "phase1/latest").read_text()
        damage(newest / "state.pt")
        done = ended_well(place.run(*place.phase(1, f"phase1.epochs={number + 1}")), "DAMAGED CHECKPOINT")
        promise(str(newest.name) in done.text and "resumed from" in done.text, "not named, or started anew")
    for step in place.steps(1):
        cut(place.results / "phase1" / step / "state.pt")
    message = refused(place.run(*place.phase(1, "phase1.epochs=9")), *place.steps(1))
    return f"flipped and cut: named, the one before it used; all cut: {message}"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


# ---- full disk -------------------------------------------------------------------------------------------------

def small_disk(place, name, megabytes):
    """Mount a small file system below the folder, or None where that is not allowed."""
    path = place.folder / name
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(path)], capture_output=True)
    return None if done.returncode else path


def full_disk(place):
    if os.geteuid() or not (disk := small_disk(place, "runs", 64)):
        return "SKIPPED: mounting a small file system needs root"
    try:
        return full_while_training(place, disk) + "; " + full_while_preprocessing(place)
    finally:
        for name in ("runs", "datasets/full"):
            subprocess.run(["umount", "-l", str(place.folder / name)], capture_output=True)


def fill(disk, leave):
    """Leave so many bytes free; returns the file to remove."""
    with open(disk / "balloon", "ab") as file:
        while (free := shutil.disk_usage(disk).free) > leave:
            try:
                os.posix_fallocate(file.fileno(), file.tell(), free - leave)
            except OSError:  # the training was faster
                continue
            file.seek(0, os.SEEK_END)
    return disk / "balloon"


def full_while_training(place, disk):
    """Full for one checkpoint: training goes on. Full to the end: one message, and the same command continues."""
    run = place.start(*place.phase(1, "phase1.epochs=400"))
    place.until_record(run, 1, 2)
    balloon = fill(disk, 500_000)
    place.until(run, lambda: "could not be saved" in run.log.read_text(), "no warning", 0.001)
    balloon.unlink()
    before = len(place.rows(1))
    place.until(run, lambda: len(place.rows(1)) > before + 1, "training has not gone on")
    fill(disk, 0)
    done = place.end(run)
    saved = place.checkpoint(1)["epoch"]
    promise(done.code == 1 and "Traceback" not in done.text and "error:" in done.text, done.text[-500:])
    left = [p.name for p in place.results.rglob(".*") if p.name != ".lock"]
    promise(not left and "DAMAGED" not in done.text, f"left: {left}")
    (disk / "balloon").unlink()
    ended_well(place.run(*place.phase(1, f"phase1.epochs={saved + 2}")), f"(epoch {saved},")
    epochs = [r["epoch"] for r in place.rows(1)]
    promise(epochs[-1] == saved + 2 and len(set(epochs)) == len(epochs), f"epochs {epochs}")
    return f"training went on past a full disk, ended with one message when it stayed full, continued at epoch {saved}"


def full_while_preprocessing(place):
    disk = small_disk(place, "datasets/full", 64)
    shutil.copytree(place.folder / "datasets/smoke/raw", disk / "raw")
    words = ["data.preprocess", *SMOKE[:2], "data.folder=datasets/full"]
    balloon = fill(disk, 1_000_000)
    message = refused(place.run(*words), "datasets/full", code=1)
    left = [p.name for p in disk.rglob(".*") if p.name != ".lock"]
    promise(not left, f"left: {left}")
    balloon.unlink()
    ended_well(place.run(*words), "samples in")
    return f"preprocessing: {message}, then continued"


# ---- numbers that are not finite -------------------------------------------------------------------------------

def first_chunk(place, split="train"):
    own = next((place.folder / "datasets/smoke/processed").iterdir())
    chunk = next(c for c in json.loads((own / "metadata.json").read_text())["chunks"] if c["split"] == split)
    return own / chunk["file"]


def nan_row(place):
    path = first_chunk(place)
    array = np.load(path, mmap_mode="r+")
    array["nodes"][0, :, :, 2] = np.nan
    array.flush()
    words = ["coordinator.py", *SMOKE, "--only", "phase1", "coordinator.nproc=2"]
    done = place.run(*words)
    promise(done.code == 2 and f"{path.name}: row 0" in done.text, done.text[-400:])
    skipped = ended_well(place.run(*words, "data.on_bad_row=skip"), "left out, NaN or infinite values: ")
    promise(f"{path.name}: row 0" in skipped.text, "row not named")
    finite = all(torch.isfinite(v).all() for v in place.checkpoint(1)["weights"]["model"].values())
    promise(finite, "weights are not finite")
    return f"stop: exit code 2 for both ranks, {path.name} row 0 named; skip: both go on, weights finite"


def overflows(place):
    """In this process, the scaler of mixed precision on the CPU: gradients overflow in every step."""
    from configs import Config
    from runtime.precision import HysteresisScaler
    from train_ddp import optimiser_step
    amp = Config().phase1.amp
    amp.init_scale, amp.hysteresis, amp.min_scale = 8.0, 2, 1.0
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], 0.1)
    scaler, scales = HysteresisScaler("cpu", amp, True), []

    class Precision:
        autocast = staticmethod(torch.enable_grad)
    Precision.scaler = scaler

    class Loss(torch.nn.Module):
        def forward(self):
            return (weight * float("inf")).sum(), {}
    try:
        for _ in range(200):
            skipped = optimiser_step(Loss(), [()], optimizer, Precision, 1.0)[2]
            scales.append(scaler.get_scale())
            promise(skipped and torch.equal(weight.data, torch.ones(3)), "a step was taken")
    except FloatingPointError as error:
        promise(scales[:6] == [8, 4, 4, 2, 2, 1], f"scales {scales}")
        return f"scale {scales[0]:g} to {scales[-1]:g}, {len(scales)} steps skipped and counted, then: {error}"
    promise(False, f"no end after {len(scales)} skipped steps, scale {scales[-1]}")


def shortened_chunk(place):
    path = first_chunk(place)
    run = place.start(*place.phase(1, "phase1.epochs=1000"))
    place.until_record(run, 1)
    cut(path)
    return refused(place.end(run), path.name, "has become shorter")


def nobody_there(place):
    """No ICV at all; hardly a vehicle; and far more vehicles than slots."""
    said = []
    for name, more in (("no ICV", ["env.icv_share=0"]), ("empty road", ["env.demand_scale=0.01"]),
                       ("12 slots", ["env.max_vehicles=12", "phase2.train_batch_size=240", "phase2.fragment_length=60",
                                     "phase3.fragment_length=60"])):  # whole episodes
        run = f"run.name={name.replace(' ', '-')}"
        for phase in (2, 3):
            ended_well(place.run(*place.phase(phase, run, *more)))
        rows = place.rows(name=name.replace(" ", "-"))
        bad = [(r["epoch"], k) for r in rows for k in ("loss", "reward", "kl", "grad_norm") if k in r and r[k] is None]
        promise(rows and not bad, f"{name}: not finite: {bad}")
        said.append(f"{name}: losses finite")
        if name == "12 slots":
            over = sum(row.get("overflow_vehicles", 0) for row in rows)
            promise(over > 0, "overflow is not counted")
            said[-1] += f", {over} vehicle-steps counted as overflow"
    return "; ".join(said)
