"""Damaged data, checkpoints and networks. Each function damages files below a prepared folder with a random generator
and returns (command line, words of which the refusal must name one)."""
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.fuzz_yaml import configuration
from configs.files import file_hash

SMOKE = ["--config", "configs/smoke.yaml", "run.threads=1", "data.samples=16"]
PREPROCESS, CHECK = ["data.preprocess", *SMOKE], ["data.check", *SMOKE]
PHASE1 = ["train_ddp.py", "--phase", "1", *SMOKE, "run.name=other"]
SCORE = ["evaluate.py", *SMOKE, "--controllers", "policy", "--seeds", "1", "--checkpoint", "runs/smoke/phase2"]
PAYLOAD = "executed"  # the file that hostile content tries to create


# ---- data ------------------------------------------------------------------------------------------------------

def bytes_of(path, rng):
    """Damage any file: cut, lengthen, flip, empty, replace, remove."""
    content = path.read_bytes()
    at = int(rng.integers(1, len(content)))
    damaged = [content[:at], content + b"junk", content[:at] + bytes([content[at] ^ 255]) + content[at + 1:], b"",
               bytes(rng.integers(0, 256, 500, dtype=np.uint8)), None][rng.integers(6)]
    path.unlink() if damaged is None else path.write_bytes(damaged)


def change_json(path, rng, most=40):
    """Replace or remove a value somewhere in a JSON file."""
    tree = json.loads(path.read_text())
    node, parent, key = tree, None, None
    for _ in range(most):
        if not (isinstance(node, (dict, list)) and node) or (parent is not None and rng.random() < 0.2):
            break
        parent, key = node, list(node)[rng.integers(len(node))] if isinstance(node, dict) else int(
            rng.integers(len(node)))
        node = parent[key]
    values = [None, [], {}, "text", -1, 1e300, float("nan"), "../../etc/passwd", True]
    if rng.random() < 0.3:
        del parent[key]
    else:
        parent[key] = values[rng.integers(len(values))]
    path.write_text(json.dumps(tree))


def raw_data(folder, rng):
    """Raw chunks; half of the time with hashes made to fit, so that only the content is wrong."""
    raw = folder / "datasets/smoke/raw"
    shutil.rmtree(folder / "datasets/smoke/processed")
    path = sorted(raw.glob("chunk_*.json"))[rng.integers(len(list(raw.glob("chunk_*.json"))))]
    if rng.random() < 0.4:
        bytes_of(path, rng)
        return [PREPROCESS, CHECK][rng.integers(2)], [path.name]
    chunk = json.loads(path.read_text())
    sample = chunk["samples"][rng.integers(len(chunk["samples"]))]
    name = list(sample)[rng.integers(1, len(sample))]
    wrong = [None, [], "text", {"a": 1}, [[float("nan")]], -5, [[1e400]]]
    sample[name] = wrong[rng.integers(len(wrong))]
    path.write_text(json.dumps(chunk))
    meta = json.loads((raw / "metadata.json").read_text())
    next(c for c in meta["chunks"] if c["file"] == path.name)["sha256"] = file_hash(path)
    (raw / "metadata.json").write_text(json.dumps(meta))
    return [PREPROCESS, CHECK][rng.integers(2)], [path.name]


def description(folder, rng):
    """metadata.json, statistics.json and config.json of the data set."""
    own = next((folder / "datasets/smoke/processed").iterdir())
    path = [own / "metadata.json", own / "statistics.json", folder / "datasets/smoke/raw/config.json",
            folder / "datasets/smoke/raw/metadata.json"][rng.integers(4)]
    bytes_of(path, rng)
    if path.parent == own:
        path.touch()  # a missing one is simply made again
        return PHASE1, [path.name]
    return PREPROCESS, [path.name, "config.json"]


def graphs(folder, rng):
    """Chunks of graphs: bytes, NaN, other types, fewer features, other sizes."""
    own = next((folder / "datasets/smoke/processed").iterdir())
    path = sorted(own.glob("chunk_*.npy"))[rng.integers(len(list(own.glob("chunk_*.npy"))))]
    array, how = np.load(path), rng.integers(6)
    if how == 0:
        size = path.stat().st_size
        os.truncate(path, int(rng.integers(0, size)) if rng.random() < 0.5 else size + 7)
        return PHASE1, [path.name]
    if how == 1:
        array["nodes"][rng.integers(len(array)), :, :, rng.integers(9)] = [np.nan, np.inf][rng.integers(2)]
    elif how == 2:
        array["neighbours"][rng.integers(len(array))] = 120
    elif how == 3:
        array = array[:-1] if len(array) > 1 else array[:0]
    elif how == 4:
        array = array.astype([(n, "<f8" if n == "speed" else array.dtype[n]) for n in array.dtype.names])
    else:
        array = np.array([{"a": 1}], object)
    np.save(path, array, allow_pickle=True)
    meta = json.loads((own / "metadata.json").read_text())
    chunk = next(c for c in meta["chunks"] if c["file"] == path.name)
    chunk.update(bytes=path.stat().st_size, sha256=file_hash(path))
    (own / "metadata.json").write_text(json.dumps(meta))
    return CHECK if how in (1, 2) else PHASE1, [path.name]


# ---- checkpoints -----------------------------------------------------------------------------------------------

class Hostile:
    """Unpickling this would create a file."""

    def __reduce__(self):
        return os.system, (f"touch {PAYLOAD}",)


def manifest_fits(step):
    """Make size and checksum fit, as somebody with bad intentions would."""
    manifest = json.loads((step / "manifest.json").read_text())
    path = step / "state.pt"
    manifest["files"]["state.pt"] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    (step / "manifest.json").write_text(json.dumps(manifest))


def saved(folder, rng):
    """The only checkpoint of phase 2."""
    step, how = next((folder / "runs/smoke/phase2").glob("step_*")), rng.integers(8)
    path, words = step / "state.pt", ["runs/smoke/phase2"]
    if how == 0:
        bytes_of(path, rng)
        return SCORE, ["state.pt"]
    if how == 1:
        bytes_of(step / "manifest.json", rng)
        return SCORE, ["manifest.json", "state.pt"]
    if how == 2:
        change_json(step / "manifest.json", rng)
        if json.loads((step / "manifest.json").read_text()).get("files", {}) and _still_right(step):
            (step / "manifest.json").write_text("{}")
        return SCORE, [step.name]
    if how == 3:
        manifest = json.loads((step / "manifest.json").read_text())
        manifest["files"] = {"../../../../outside.pt": manifest["files"]["state.pt"]}
        (step / "manifest.json").write_text(json.dumps(manifest))
        return SCORE, ["manifest.json"]
    if how == 4:
        hostile(path, rng)
    else:
        state = torch.load(path, weights_only=True)
        damage_state(state, rng, how)
        torch.save(state, path)
    manifest_fits(step)
    return (SCORE if rng.random() < 0.7 and how != 6 or how == 7 else ["train_rl.py", *SMOKE]), words


def _still_right(step):
    facts = json.loads((step / "manifest.json").read_text())
    try:
        return facts["files"]["state.pt"]["sha256"] == file_hash(step / "state.pt") and facts["format"] == 1 and (
            facts["files"]["state.pt"]["bytes"] == (step / "state.pt").stat().st_size)
    except (KeyError, TypeError):
        return False


def hostile(path, rng):
    """A pickle whose loading would run a command, in one of three wrappings."""
    how = rng.integers(3)
    if how == 0:
        path.write_bytes(pickle.dumps(Hostile()))
    elif how == 1:
        torch.save({"weights": Hostile()}, path)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Hostile()))
            archive.writestr("archive/version", "3\n")


def damage_state(state, rng, how):
    """Another architecture, missing parts, or parts of another type, inside a file that loads well."""
    weights, names = state["weights"]["model"], list(state["weights"]["model"])
    name = names[rng.integers(len(names))]
    if how == 5:
        parts = [lambda: weights.pop(name), lambda: weights.update({name: torch.zeros(3, 5, 7)}),
                 lambda: weights.update(stranger=torch.zeros(2)), lambda: weights.update({name: "text"}),
                 lambda: weights.update({name: torch.full_like(weights[name].float(), float("nan"))})]
        parts[rng.integers(len(parts))]()
    elif how == 6:
        key = ["weights", "optimizer", "counters", "ranks"][rng.integers(4)]
        state[key] = [None, [], "text", 5][rng.integers(4)]
    else:
        tree = [state["config"], state["config"]["model"], state["weights"]["schema"]][rng.integers(3)]
        tree["preset"] = ["nowhere", 5, None][rng.integers(3)]


# ---- networks --------------------------------------------------------------------------------------------------

SUMOCFG = "<configuration><input>{}</input></configuration>"
FILES = '<net-file value="a.net.xml"/><route-files value="a.rou.xml"/>'
ROUTE = '<vType id="car"/><route id="r" edges="in"/><vehicle id="v" type="car" route="r" depart="0"/>'


def network(folder, rng):
    """A user's .sumocfg with its network and route files; what lies in `folder` is right."""
    net = (folder / "a.net.xml").read_text()
    cut = int(rng.integers(1, len(net) - 20))
    first = net.index('<edge id="') + len('<edge id="')
    edge = net[first:net.index('"', first)]
    route = ROUTE.replace('"in"', f'"{edge}"')
    (folder / "a.rou.xml").write_text(f"<routes>{route}</routes>")
    (folder / "a.sumocfg").write_text(SUMOCFG.format(FILES))
    binary = bytes(rng.integers(0, 256, 300, dtype=np.uint8))
    damages = [
        ("a.sumocfg", SUMOCFG.format(FILES)[:60]), ("a.sumocfg", binary), ("a.sumocfg", b""), ("a.sumocfg", None),
        ("a.sumocfg", "<routes/>"), ("a.sumocfg", SUMOCFG.format('<net-file value="gone.net.xml"/>')),
        ("a.sumocfg", SUMOCFG.format(FILES + '<no-such-option value="1"/>')), ("a.sumocfg", SUMOCFG.format("")),
        ("a.sumocfg", SUMOCFG.format(FILES.replace("a.rou", "gone.rou"))),
        ("a.net.xml", net[:cut]), ("a.net.xml", binary), ("a.net.xml", b""), ("a.net.xml", None),
        ("a.net.xml", net.replace('speed="', 'speed="fast')), ("a.net.xml", "<routes/>"),
        ("a.net.xml", net.replace("<net ", "<cobweb ").replace("</net>", "</cobweb>")),
        ("a.net.xml", net.replace('shape="', 'shape="x')), ("a.net.xml", net.replace('length="', 'length="-')),
        ("a.rou.xml", f"<routes>{route}"), ("a.rou.xml", binary), ("a.rou.xml", b""), ("a.rou.xml", None),
        ("a.rou.xml", f"<routes>{route.replace('type=' + chr(34) + 'car', 'type=' + chr(34) + 'ufo')}</routes>"),
        ("a.rou.xml", f"<routes>{route.replace(edge, 'nowhere')}</routes>"), ("a.rou.xml", "<routes"),
        ("a.rou.xml", f"<routes>{route.replace('depart=' + chr(34) + '0', 'depart=' + chr(34) + 'soon')}</routes>")]
    name, content = damages[rng.integers(len(damages))]
    path = Path(folder / name)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return ["evaluate.py", *SMOKE, "--controllers", "none", "--seeds", "1", "--scenario", "a.sumocfg"], ["a.sumocfg"]


KINDS = {"configuration": configuration, "raw chunk": raw_data, "description": description, "chunk of graphs": graphs,
         "checkpoint": saved, "network": network}
