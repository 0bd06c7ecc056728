"""Checkpoints: complete or absent, checksummed, plain tensors and values only.

    <folder>/step_000012/{state.pt, manifest.json}, latest, best      the last two hold the name of a complete step

A step is written under a temporary name, flushed to disk, and renamed; only then `latest` moves and old ones go.
"""
import contextlib
import json
import os
import random
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from configs.console import first_rank
from configs.files import WriteError, file_hash, whole, write_whole

FORMAT = 1


_told = set()  # folders of which was said that older checkpoints go


class CheckpointError(Exception):
    """No usable checkpoint, or one of another model; the message names the file."""


class SaveError(CheckpointError):
    """A checkpoint could not be written; the older ones are as they were."""


def save(folder, step, state, keep_last=3, best=False):
    """Write `state` (nested dictionaries of tensors and plain values) as the checkpoint of `step`, and remove what is
    older than the last `keep_last` but for the best, saying so the first time.

    SaveError when the disk is full or cannot be written to: nothing half-written is left, and older ones stay."""
    folder = Path(folder)
    _put_back(folder)
    final, work = folder / f"step_{step:06d}", folder / f".step_{step:06d}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        with whole(work / "state.pt") as file:
            torch.save(state, file)
        facts = {"bytes": (work / "state.pt").stat().st_size, "sha256": file_hash(work / "state.pt")}
        manifest = {"format": FORMAT, "step": step, "best": best, "versions": versions(), "files": {"state.pt": facts}}
        write_whole(work / "manifest.json", json.dumps(manifest, indent=1))
        if final.exists():  # the same step again, after a resume: never two halves under one name
            old = folder / f".old_{final.name}"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        work.rename(final)
        _sync_folder(folder)
        write_whole(folder / "latest", final.name)
        if best:
            write_whole(folder / "best", final.name)
    except (OSError, RuntimeError, WriteError) as error:  # torch reports a full disk as RuntimeError
        why = getattr(error.__cause__ or error.__context__ or error, "strerror", None) or str(error).split("\n")[0]
        with contextlib.suppress(OSError):  # the disk may be gone
            why += f"; {shutil.disk_usage(folder).free >> 20} MB free"
        raise SaveError(f"{final}: could not be saved ({why})") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _prune(folder, keep_last, final)
    return final


def load(folder, which="latest"):
    """The state of the newest complete checkpoint ("latest") or of "best"; None when the folder holds no checkpoint.

    A damaged one is named on standard output and the one before it is used; CheckpointError when all are damaged.
    """
    folder = Path(folder)
    _put_back(folder)
    steps = _steps(folder)[::-1]
    if not steps:
        if (folder / "latest").exists():
            raise CheckpointError(f"{folder / 'latest'} names a checkpoint, but {folder} holds none; remove the folder "
                                  "to begin this phase anew")
        return None
    if which == "best" and (first := _best(folder, steps)):
        steps = [first] + [s for s in steps if s != first]
    damages = []
    for step in steps:
        try:
            return load_step(step)
        except CheckpointError as error:
            damages.append(str(error))
            print(f"DAMAGED CHECKPOINT: {error}; trying the one before it", flush=True)
    raise CheckpointError(f"{folder}: no usable checkpoint left; remove it to begin this phase anew:\n  "
                          + "\n  ".join(damages))


def load_step(step):
    """The state of one checkpoint folder; CheckpointError names the file that is missing, damaged or refused."""
    try:
        manifest = json.loads((step / "manifest.json").read_bytes())
        size, digest = (manifest["files"]["state.pt"][key] for key in ("bytes", "sha256"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{step / 'manifest.json'}: missing or damaged: {error}") from None
    path = step / "state.pt"
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{step}: format {manifest.get('format')}, expected {FORMAT}: written by another version "
                              "of this program")
    if not path.exists() or path.stat().st_size != size or file_hash(path) != digest:
        raise CheckpointError(f"{path}: size or SHA-256 differs from the manifest; take another step folder")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a hostile or foreign file
        raise CheckpointError(f"{path}: refused: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: refused: holds a {type(state).__name__}, not the state of a run")
    theirs = manifest.get("versions")
    theirs = theirs if isinstance(theirs, dict) else {}
    other = [f"{name} {theirs[name]} (here {version(name)})" for name in ("torch", "eclipse-sumo")
             if name in theirs and str(theirs[name]).partition("+")[0] != version(name).partition("+")[0]]
    if other and first_rank():
        print(f"NOTE: {step} was written with {', '.join(other)}: results may differ", flush=True)
    return state


def load_weights(model, weights, schema, source):
    """Copy weights into `model` by name; CheckpointError lists every missing, unexpected or misshapen key.

    `schema` are the feature names and sizes this program works with; they must equal the checkpoint's.
    """
    if not isinstance(weights, dict) or not all(isinstance(weights.get(key), dict) for key in ("schema", "model")):
        raise CheckpointError(f"{source}: not a checkpoint of this program (no weights with a schema)")
    theirs = weights["schema"]
    problems = [f"{key}: checkpoint {theirs.get(key)!r}, here {value!r}" for key, value in schema.items()
                if theirs.get(key) != value]
    own = model.state_dict()
    problems += [f"missing: {key}" for key in own if key not in weights["model"]]
    problems += [f"unexpected: {key}" for key in weights["model"] if key not in own]
    dense = lambda x: isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta  # noqa: E731
    shape = lambda value: tuple(value.shape) if dense(value) else f"of {value!r:.40}"  # noqa: E731
    problems += [f"{key}: shape {shape(value)}, here {shape(own[key])}"
                 for key, value in weights["model"].items() if key in own and shape(value) != shape(own[key])]
    problems += [f"{key}: NaN or infinite" for key, value in weights["model"].items()
                 if dense(value) and not torch.isfinite(value).all()]
    if problems:
        raise CheckpointError(f"{source} does not fit this model (train with another run.name, or use the "
                              "configuration and code it was trained with):\n  " + "\n  ".join(problems))
    model.load_state_dict(weights["model"])


def seed_random(seed):
    """Begin all random numbers of this process anew: checkpoints of equal runs are then equal, these included."""
    for begin in (random.seed, np.random.seed, torch.manual_seed):
        begin(seed)


def random_state(device):
    """State of all random generators of this process, as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)]}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state, device):
    """Undo of `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def versions():
    """Versions that decide whether results can be compared."""
    return {name: version(name) for name in ("torch", "numpy", "eclipse-sumo", "traci")}


def _put_back(folder):
    """A crash while a step was being replaced leaves the old one under its waiting name: give it its name again."""
    for old in folder.glob(".old_step_*"):
        final = folder / old.name.removeprefix(".old_")
        with contextlib.suppress(OSError):  # another rank was first, or nobody may write here
            if not final.exists():
                old.rename(final)
    _name_best(folder)


def _name_best(folder):
    """A crash between a best step and its name leaves an older one named, while the bar for those that follow is the
    best one's: its manifest says so too."""
    for newest in _steps(folder)[-1:]:
        path = folder / "best"
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError, WriteError):
            best = json.loads((newest / "manifest.json").read_bytes())["best"]
            if best is True and not (path.is_file() and path.read_bytes() == newest.name.encode()):
                write_whole(path, newest.name)


def _steps(folder):
    """Checkpoint folders, oldest first; by number, since step_1000000 comes before step_999999 as text."""
    steps = {p: p.name.removeprefix("step_") for p in folder.glob("step_*") if p.is_dir()}
    return sorted((p for p, number in steps.items() if number.isdecimal()), key=lambda p: int(steps[p]))


def _best(folder, steps):
    """Which of the step folders `best` names; None, and said, when it names none of them."""
    path = folder / "best"
    if not path.exists():
        return None
    named = path.read_text(errors="replace").strip() if path.is_file() else "no file"
    if (step := folder / named) in steps:
        return step
    print(f"DAMAGED CHECKPOINT: {path}: names no checkpoint there ({named[:40]!r}); the newest is used", flush=True)
    return None


def _prune(folder, keep_last, newest):
    """Remove what is older than the last `keep_last` checkpoints, except the best; and half-written leftovers. Damaged
    ones, which were not continued from, may have higher numbers than the newest."""
    steps = [*(step for step in _steps(folder) if step != newest), newest]
    best = _best(folder, steps)
    older = [old for old in steps[:-keep_last] if old != best]
    for old in [*older, *folder.glob(".step_*.tmp"), *folder.glob(".old_*")]:
        shutil.rmtree(old, ignore_errors=True)
    if older and folder not in _told:
        _told.add(folder)
        print(f"{folder}: the last {keep_last} checkpoints and the best are kept, older ones removed from now on",
              flush=True)


def _sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
