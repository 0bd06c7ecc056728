"""Drills with inputs that are wrong: configurations, data, checkpoints, a missing simulator."""
import json
import shutil

import numpy as np

from benchmarks import fuzz_inputs
from benchmarks.drill_place import SMOKE, promise, refused
from benchmarks.drill_state import cut, first_chunk


def damaged_chunks(place):
    """One chunk of graphs after the other in every way, then a missing one, phase 1 each time."""
    path, said = first_chunk(place), []
    good = path.read_bytes()
    described = (path.parent / "metadata.json").read_text()
    for how, damage in (("cut", cut), ("longer", lambda p: p.write_bytes(good + b"junk")),
                        ("float64", lambda p: rewrite(p, lambda a: a.astype(
                            [(n, "<f8" if n == "speed" else a.dtype[n]) for n in a.dtype.names]))),
                        ("a feature less", lambda p: rewrite(p, lambda a: a[list(a.dtype.names[:-1])].copy())),
                        ("empty", lambda p: rewrite(p, lambda a: a[:0]))):
        damage(path)
        refused(place.run(*place.phase(1)), path.name)
        said.append(how)
        path.write_bytes(good)
        (path.parent / "metadata.json").write_text(described)
    promise(not (place.results / "phase1").exists() or not place.steps(1), "training has begun")
    return f"{', '.join(said)}: each exit code 2 with the file's name, before training"


def rewrite(path, change):
    """A chunk whose size in the metadata is right and whose content is not."""
    np.save(path, change(np.load(path)))
    meta = json.loads((path.parent / "metadata.json").read_text())
    next(c for c in meta["chunks"] if c["file"] == path.name)["bytes"] = path.stat().st_size
    (path.parent / "metadata.json").write_text(json.dumps(meta))


def wrong_yaml(place):
    """Four mistakes in one file are four lines; 1e-4, which YAML reads as text, is a number; two options that exclude
    each other."""
    (place.folder / "mine.yaml").write_text("base: smoke.yaml\nphase1: {epochz: 3, lr: 1e-4, batch_size: -4}\n"
                                            "phase2: {gamma: high}\nrun: 5\n")
    done = place.run("coordinator.py", "--config", "mine.yaml")
    first = refused(done, "mine.yaml", "phase1.epochz", "did you mean phase1.epochs?", "phase1.batch_size", "-4",
                    "phase2.gamma", "'high'", "run: 5")
    promise("phase1.lr" not in done.text, "1e-4 was refused")
    refused(place.run("coordinator.py", *SMOKE, "ddp.static_graph=true", "phase1.accumulation=2"),
            "ddp.static_graph", "phase1.accumulation")
    promise(not (place.folder / "runs").exists(), "something was started")
    return f"five mistakes named at once: {first}"


def no_sumo(place):
    """A package without the real binary, and one that is too old, before the installed one on Python's path."""
    said, old = [], place.folder / "old"
    for name in ("sumo", "old/sumo", "old/eclipse_sumo-1.20.0.dist-info"):
        (place.folder / name).mkdir(parents=True)
    for name in ("sumo", "old/sumo"):
        (place.folder / name / "__init__.py").write_text("")
    (old / "eclipse_sumo-1.20.0.dist-info/METADATA").write_text("Name: eclipse-sumo\nVersion: 1.20.0\n")
    for path, words in ((place.folder, ("SUMO not found", "sumo/bin/")), (old, ("1.20.0", "1.28"))):
        root = place.environment["PYTHONPATH"]
        said.append(refused(place.run(*place.phase(2), PYTHONPATH=f"{path}:{root}"), *words))
    return "; ".join(said)


def foreign_checkpoints(place):
    """Another architecture, another schema, parts missing, hostile pickles: through phase 2, that would continue."""
    own = place.results / "phase2"
    promise(place.run(*place.phase(2, "phase2.iterations=1")).code == 0, "no checkpoint to begin with")
    good, said = shutil.copytree(own, place.folder / "good"), []
    said.append(refused(place.run(*place.phase(2, "model.preset=full")), "runs/smoke/phase2", "preset"))
    refused(place.run(*place.phase(2, "env.max_commands=4")), "max_commands: checkpoint 5, here 4")
    for number in range(3):
        step = next(own.glob("step_*"))

        class Fixed:  # the generator's answer, so that every wrapping has its turn
            integers = staticmethod(lambda *_: number)  # noqa: B023
        fuzz_inputs.hostile(step / "state.pt", Fixed)
        fuzz_inputs.manifest_fits(step)
        refused(place.run(*place.phase(2)), "state.pt", "refused")
        promise(not (place.folder / fuzz_inputs.PAYLOAD).exists(), "code was executed")
        shutil.rmtree(own)
        shutil.copytree(good, own)
    return f"{said[0]}; three hostile pickles refused, nothing executed"
