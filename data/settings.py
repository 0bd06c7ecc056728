"""What a data set was made with: compared before anything is added to it, or found again by it."""
import copy
import gzip
import hashlib
import json
import os
import re
import zlib
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from configs.files import file_hash, may_write, write_whole
from configs.options import differences
from data.layout import VERSION, DataError, read_json
from env import graph
from env.scenarios import options_of, path_of

# Keys of the section `data` that change how a data set is read, or only how graphs are built from raw samples.
READING = ("folder", "seed", "processes", "on_bad_row", "open_chunks", "cache_mb", "cache_timeout_s", "disk_gb",
           "tmpfs")
BUILDING = ("storage", "k_vary")
# SUMO's options, with their short names, that name files which traffic follows from. Others name what it writes.
INPUTS = ("net-file", "net", "n", "route-files", "routes", "r", "additional-files", "additional", "a", "weight-files",
          "weights", "w", "load-state")


def raw_settings(cfg):
    """What determines the raw samples: two collections with equal settings give equal files."""
    data = {k: v for k, v in asdict(cfg.data).items() if k not in READING + BUILDING}
    no_matter = ("scenario", "backend", "recycle_episodes", "speed_mode", "terminate_on_collision")
    env = {k: v for k, v in asdict(cfg.env).items() if not k.endswith("timeout_s") and k not in no_matter}
    near = {k: v for k, v in asdict(cfg.graph).items() if k != "radius_m"}
    sections = scenario_settings(cfg, set(sum(scenarios_by_variant(cfg), [])))
    rules = {name: asdict(getattr(cfg.baselines, name)) for name in data["controllers"] if hasattr(cfg.baselines, name)}
    return {"version": VERSION, "sumo": version("eclipse-sumo"), "seed": traffic_seed(cfg),
            "features": [*graph.NODE, *graph.EDGE, *graph.GLOBAL, *graph.SURROUND],
            "env": env, "shield": cfg.shield.enabled, "scenario": sections,
            "driver": asdict(cfg.driver), "baselines": rules, "graph": near,
            "data": {**data, "scenarios": scenarios(cfg)}}


def scenario_settings(cfg, names):
    """{name of a scenario: its section of the configuration, or the hashes of a user's files}."""
    return {name: asdict(getattr(cfg, name)) if hasattr(cfg, name) else scenario_hashes(name) for name in sorted(names)}


def traffic_hash(cfg):
    """Of all that decides which traffic phases 2 and 3 meet, for `Progress.resume`."""
    content = [[*scenario_settings(one, [one.env.scenario]).values(), asdict(one.driver), one.env.demand_scale,
                one.env.icv_share] for one in cfg.variants()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def scenario_hashes(config):
    """{name: SHA-256} of a user's .sumocfg, of the files beside it that it names and what they include; {} when there
    is none."""
    config = path_of(config)
    if not config.is_file():
        return {}
    named = [value for name, value in options_of(config).items() if name in INPUTS]
    files = [config, *(config.parent / name.strip() for text in named for name in text.split(","))]
    for path in files:  # grows meanwhile
        if path.is_file() and path.suffix in (".xml", ".gz"):
            inside = re.findall(rb"<include[^>]+href=[\"']([^\"']+)", unpacked(path))
            files += [more for name in inside if (more := path.parent / os.fsdecode(name)) not in files]
    return {os.path.relpath(path, config.parent): file_hash(path) for path in files if path.is_file()}


def unpacked(path):
    """The bytes of a file, of a .gz those inside; none where it is damaged: SUMO will say so."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error):
        return b""


def traffic_seed(cfg):
    """What the recorded episodes derive from."""
    return cfg.data.seed or cfg.run.seed


def scenarios(cfg):
    """The scenarios to collect from; "same" stands for env.scenario."""
    return [cfg.env.scenario if name == "same" else name for name in cfg.data.scenarios]


def of_scenario(cfg, scenario):
    """A copy of the configuration with another scenario."""
    cfg = copy.deepcopy(cfg)
    cfg.env.scenario = scenario
    return cfg


def scenarios_by_variant(cfg):
    """For each of `scenarios`, the scenario of every element of env.suite, which may have its own: [[name]]."""
    return [[variant.env.scenario for variant in of_scenario(cfg, name).variants()] for name in scenarios(cfg)]


def processed_folder(cfg):
    """Where the graphs of this configuration lie; the folder's name is a hash of all that determines them."""
    raw = Path(cfg.data.folder) / "raw" / "metadata.json"
    read_json(raw, "metadata of a finished collection (run data.collect first)")
    content = [VERSION, file_hash(raw), file_hash(graph.__file__), asdict(cfg.graph),
               *(getattr(cfg.data, name) for name in BUILDING)]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]
    return Path(cfg.data.folder) / "processed" / key


def check_settings(path, settings, remedy):
    """Write `settings` to `path`, or compare with what is there: DataError lists the first differences. Where it was
    lost, metadata.json beside it says the same of a finished collection."""
    settings, finished = json.loads(json.dumps(settings)), path.with_name("metadata.json")
    if path.exists():
        old = read_json(path, "the settings of this data set")
    elif finished.exists():
        old = read_json(finished, "metadata of a collection").get("settings", {})
    elif any(path.parent.glob("chunk_*")):
        raise DataError(f"{path}: missing, although there are chunks that it should describe; {remedy}")
    else:
        with may_write(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return write_whole(path, json.dumps(settings, indent=1))
    if isinstance(rules := old.get("baselines"), dict):  # older ones have those that were not recorded, too
        old["baselines"] = {name: value for name, value in rules.items() if name in settings.get("baselines", ())}
    if old != settings:
        changed = list(differences(old, settings))[:5]
        raise DataError(f"{path}: this data set was made with other settings ({'; '.join(changed)}); {remedy}")
