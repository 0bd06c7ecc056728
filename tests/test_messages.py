"""Every message that a user can cause says what was found, what was expected and what to do.

The table triggers messages and names the words that each must hold; ELSEWHERE names the tests that trigger the others.
A new `raise` of one of these exceptions must appear in one of the two.
"""
import ast
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import coordinator
import evaluate
import train_ddp
import train_rl
from configs import Config, ConfigError, WriteError, load_config, to_dict
from configs.command_line import parse
from configs.show import show
from data.dataset import BlockSampler
from data.layout import DataError, chunk_offset, read_description, read_json
from data.preprocess import _ranges, destinations, preprocess
from env.launch import SumoError, launch
from env.scenarios import build_scenario
from env.traffic_env import check_scenario
from env.workers import WorkerError
from runtime import checkpoint, distributed, resources, rollout, training
from runtime.checkpoint import CheckpointError
from runtime.storage import SpillError

from data_sets import config, make_data_set

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("configs", "data", "env", "models", "runtime")
ERRORS = (ConfigError, WriteError, DataError, SumoError, CheckpointError, WorkerError, SpillError)
TEAM = distributed.Team(0, 1, 0, 1, torch.device("cpu"))


def yaml_file(folder, text, name="my.yaml"):
    (folder / name).write_text(text)
    return load_config(folder / name)


def scenario(name, folder):
    cfg = Config()
    cfg.env.scenario = name
    build_scenario(cfg, folder)


def a_folder(folder):
    """It was "no such file"."""
    (folder / "of_my_town.sumocfg").mkdir()
    scenario("of_my_town.sumocfg", folder)


def without_processes(monkeypatch):
    """A traceback: "Resource temporarily unavailable"."""
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")
    monkeypatch.setattr("env.launch.subprocess.Popen", refuse)
    launch(["sumo"], None)


def without_network(folder):
    (folder / "my.sumocfg").write_text("<configuration><time><begin value='0'/></time></configuration>")
    scenario(str(folder / "my.sumocfg"), folder)


def with_configuration_to_save(folder):
    (folder / "my.sumocfg").write_text('<configuration><net-file value="n.xml"/><save-configuration value="x"/>'
                                       "</configuration>")
    scenario(str(folder / "my.sumocfg"), folder)


def without_lanes(folder):
    (folder / "n.xml").write_text('<net version="1.20"><location netOffset="0,0" convBoundary="0,0,1,1" '
                                  'origBoundary="0,0,1,1" projParameter="!"/></net>')
    (folder / "my.sumocfg").write_text('<configuration><net-file value="n.xml"/></configuration>')
    check_scenario(load_config("configs/smoke.yaml", [f"env.scenario={folder / 'my.sumocfg'}"]), folder)


def in_folder(folder, name):
    """Build the default scenario below a folder of this name."""
    build_scenario(Config(), folder / name)


def described(folder, name, change):
    """`read_description` of a synthetic data set after `change` of what its file `name` holds."""
    path = make_data_set(folder / "set") / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    read_description(folder / "set")


def chunk(folder, change):
    """Check the first chunk of a synthetic data set after `change(path, chunk)`."""
    meta, _, shape = read_description(make_data_set(folder / "set"))
    facts = dict(meta["chunks"][0])
    path = folder / "set" / facts["file"]
    shape = change(path, facts, shape) or shape
    facts["bytes"] = facts["bytes"] if facts.pop("sized", False) else path.stat().st_size if path.exists() else 0
    chunk_offset(path, facts, shape)


def saved(folder, manifest=lambda m: m, state=lambda data: data):
    """Load a checkpoint of which manifest and file were changed."""
    checkpoint.save(folder, 1, {"weights": torch.ones(3)})
    step = next(folder.glob("step_*"))
    path = step / "state.pt"
    path.write_bytes(state(path.read_bytes()))
    old = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps(manifest(old)))
    return checkpoint.load_step(step)


def lost_all(folder):
    saved_at = folder / "phase1"
    checkpoint.save(saved_at, 1, {"x": 1})
    for path in saved_at.glob("step_*/state.pt"):
        path.write_bytes(b"")
    checkpoint.load(saved_at)


def evaluation(*words):
    options = parse("", words, evaluate.add_options, load=False)
    return evaluate.settings(options)


def other_model(monkeypatch, *trained_with):
    """Evaluate with a configuration what was trained with another."""
    trained = load_config("configs/smoke.yaml", trained_with)
    monkeypatch.setattr(evaluate, "find_checkpoint", lambda path: ({"config": to_dict(trained)}, path))
    monkeypatch.setattr(evaluate, "load_policy", lambda state, folder: (None, trained))
    evaluation("--checkpoint", "runs/x", "--config", "configs/smoke.yaml", "--controllers", "policy")


def python_of_theirs(folder, monkeypatch):
    """A Python whose torch does not start."""
    (folder / "python").write_text("#!/bin/sh\necho 'ImportError: libtorch.so' >&2\nexit 1\n")
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    coordinator.resource_plan(Config())


def find_batch_size(monkeypatch):
    monkeypatch.setattr(train_ddp, "StopRequest", object)
    monkeypatch.setattr(sys, "argv", ["train_ddp.py", "--phase", "3", "--find-batch-size"])
    train_ddp.main()


def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    distributed.start_team(load_config("configs/smoke.yaml", ["run.device=cuda"]).run, Config().ddp)


def too_few(recorded, *overrides):
    train_ddp.phase1(config(recorded, *overrides), TEAM, None)


# (fragment of the message's source, what triggers it: function of t = a folder, m = monkeypatch, r = a data set; words
# that the message must hold)
CASES = [
    ("leads back to this file", lambda t, m, r: yaml_file(t, "base: my.yaml"),
     ["my.yaml", "base", "must name no base"]),
    ("cannot read the configuration", lambda t, m, r: load_config(t / "no.yaml"), ["no.yaml", "No such", "quick.yaml"]),
    ("not valid YAML", lambda t, m, r: yaml_file(t, "a: ["), ["my.yaml", "line 1", "expected"]),
    ("expected sections such as", lambda t, m, r: yaml_file(t, "7"), ["my.yaml", "found 7", "`env:`"]),
    ("expected the name of a YAML file", lambda t, m, r: yaml_file(t, "base: 7"),
     ["my.yaml", "found 7", "name of a YAML"]),
    ("neither built in", lambda t, m, r: scenario("rign", t), ["env.scenario", "rign", "ring", ".sumocfg"]),
    ("expected a .sumocfg, its path", lambda t, m, r: scenario("typo.sumocfg", t),
     ["typo.sumocfg: no such file", "relative to", "/"]),
    ("expected a .sumocfg", lambda t, m, r: a_folder(t), ["of_my_town.sumocfg: a folder; expected"]),
    ("SUMO's process does not start", lambda t, m, r: without_processes(m),
     ["Resource temporarily unavailable", "ulimit -u", "rollout.num_workers"]),
    (", with which SUMO writes a file and ends", lambda t, m, r: with_configuration_to_save(t),
     ["my.sumocfg", "save-configuration", "remove it"]),
    ("its network has no lanes; expected", lambda t, m, r: without_lanes(t),
     ["my.sumocfg", "no lanes", "a road to drive"]),
    ("names no network; expected", lambda t, m, r: without_network(t),
     ["my.sumocfg", "names no network", "net-file"]),
    ("finds no files in a folder", lambda t, m, r: in_folder(t, "lr=1e-3,K=5"),
     ["lr=1e-3,K=5", "','", "rename", "run.name"]),
    ("or one number for equal shares", lambda t, m, r: BlockSampler([9], 2, 0, 2, weights=(1, 2, 3)),
     ["rank_weights=[1, 2, 3]", "2 ranks", "equal shares"]),
    ("a rank gets none", lambda t, m, r: BlockSampler([99], 1, 0, 2, weights=(1, 99)),
     ["rank_weights=[1, 99]", "2 samples", "raise its weight"]),
    ("do not fill one global batch", lambda t, m, r: BlockSampler([7], 8, 0, 2),
     ["7 samples", "2 ranks x 8", "data.samples"]),
    ("no such file; expected {what}", lambda t, m, r: read_json(t / "x.json", "metadata (run data.collect)"),
     ["x.json", "metadata", "run data.collect"]),
    ("run the step that ", lambda t, m, r: read_json(_written(t / "x.json", '{"a'), "metadata"),
     ["x.json", "metadata", "Unterminated", "remove it and run"]),
    ("not metadata of a data set of format",
     lambda t, m, r: described(t, "metadata.json", lambda d: {**d, "version": 1}),
     ["metadata.json", "format 4", "data.preprocess"]),
    ("no finite mean and positive std of", lambda t, m, r: described(t, "statistics.json", lambda d: {}),
     ["statistics.json", "9 nodes", "data.preprocess"]),
    ("missing; run data.preprocess again", lambda t, m, r: chunk(t, lambda p, c, s: p.unlink()),
     ["chunk_000.npy", "missing", "data.preprocess"]),
    ("truncated or damaged", lambda t, m, r: chunk(t, lambda p, c, s: c.update(bytes=7, sized=True)),
     ["chunk_000.npy", "bytes, expected 7", "remove it"]),
    ("not a chunk of this data set", lambda t, m, r: chunk(t, lambda p, c, s: p.write_bytes(b"x" * 99) and None),
     ["chunk_000.npy", "magic", "remove it"]),
    ("frames of another kind", lambda t, m, r: chunk(t, lambda p, c, s: s._replace(vehicles=9)),
     ["chunk_000.npy", "nodes is", "expected", "remove it"]),
    ("at least 1 ", lambda t, m, r: chunk(t, lambda p, c, s: c.update(rows=99)),
     ["chunk_000.npy", "(4, 3)", "(99, 3)"]),
    ("hold no sample", lambda t, m, r: destinations({"chunks": [
        {"file": "a.json", "episode": 0, "hashes": []}], "held_out_episodes": []}, 4, 0),
     ["1 raw chunks", "data.vehicles"]),
    ("split is empty", lambda t, m, r: destinations({"chunks": [
        {"file": "a", "episode": 0, "hashes": ["1"]}], "held_out_episodes": []}, 5, 0),
     ["held_out", "1 raw chunks", "data.samples_per_episode"]),
    ("although chunks beside", lambda t, m, r: _ranges(_written(t / "c.npy", "").parent, {"sizes": {"c.npy": 1}}),
     ["ranges.json", "missing", "remove"]),
    ("training samples do not fill one step", lambda t, m, r: too_few(r, "phase1.accumulation=50"),
     ["22 training samples", "1 ranks x 4 x accumulation 50", "collect more"]),
    ("do not fill one optimiser step of ", lambda t, m, r: rollout.check_collection(
        load_config("configs/smoke.yaml", ["phase3.accumulation=9"]), TEAM, 1),
     ["4 sequences x 1 passes", "accumulation=9", "raise phase3.fragment_length"]),
    ("--find-batch-size {budget}", lambda t, m, r: find_batch_size(m), ["--phase 1", "live SUMO"]),
    ("is larger than an iteration of ", lambda t, m, r: train_rl.steps_per_env(
        load_config("configs/smoke.yaml", ["phase2.minibatch_size=999"]).phase2, SimpleNamespace(total=2), TEAM),
     ["minibatch_size=999", "of 40 steps", "lower it"]),
    ("names a checkpoint, but", lambda t, m, r: checkpoint.load(_written(t / "latest", "step_1").parent),
     ["latest", "holds none", "remove the folder"]),
    ("no usable checkpoint left", lambda t, m, r: lost_all(t), ["phase1", "SHA-256", "remove it"]),
    ("missing or damaged: {error}", lambda t, m, r: saved(t, lambda old: {}), ["manifest.json", "'files'"]),
    ("written by another version", lambda t, m, r: saved(t, lambda old: {**old, "format": 99}),
     ["step_", "format 99", "expected"]),
    ("differs from the manifest", lambda t, m, r: saved(t, state=lambda data: data[:-1]),
     ["state.pt", "SHA-256", "another step"]),
    ("refused: holds a", lambda t, m, r: checkpoint.load_step(checkpoint.save(t, 1, [1])), ["state.pt", "list"]),
    ("not a checkpoint of this program", lambda t, m, r: checkpoint.load_weights(None, {}, {}, "runs/x"),
     ["runs/x", "no weights with a schema"]),
    ("does not fit this model", lambda t, m, r: checkpoint.load_weights(
        torch.nn.Linear(2, 3), {"schema": {}, "model": {"weight": torch.ones(3, 3), "more": 1}}, {}, "runs/x"),
     ["runs/x", "missing: bias", "unexpected: more", "(3, 3), here (3, 2)", "another run.name"]),
    ("start several ranks", lambda t, m, r: distributed.ranks_of({"WORLD_SIZE": "2", "RANK": "x"}), ["RANK=x"]),
    ("start several ranks", lambda t, m, r: distributed.ranks_of({"WORLD_SIZE": "4", "RANK": "0"}),
     ["no MASTER_ADDR, no MASTER_PORT with WORLD_SIZE=4", "torchrun", "without"]),
    ("run.device=cuda, but", lambda t, m, r: no_gpu(m), ["run.device=cuda", "no GPU", "use run.device=cpu"]),
    ("PyTorch does not start", lambda t, m, r: python_of_theirs(t, m), ["ImportError: libtorch.so"]),
    ("damaged ({error}); remove it", lambda t, m, r: coordinator.load_state(_written(t / "state.json", "{"), Config()),
     ["state.json", "remove it"]),
    ("damaged ({error}); remove it", lambda t, m, r: coordinator.load_state(_written(
        t / "state.json", '{"steps": {"collect": {"status": "done", "seconds": null}}}'), Config()),  # was a TypeError
     ["state.json", "NoneType", "remove it"]),
    ("different whole numbers such as", lambda t, m, r: evaluate.parse_seeds("1-3,2"),
     ["--seeds", "1-3,2", "1001-1010"]),
    ("controllers: unknown", lambda t, m, r: evaluation("--controllers", "none,nobody"),
     ["nobody", "lane_advice", "policy"]),
    ("name the JSON file", lambda t, m, r: evaluate.check_output(
        SimpleNamespace(sweep=None, tracks=None, out="a.csv", animate=None, gui=False)), ["--out a.csv", "JSON"]),
    ("no folder can be made there", lambda t, m, r: training.run_folder(load_config("configs/smoke.yaml", [
        f"run.folder={_written(t / 'file', '')}"]), TEAM), ["file/smoke", "Not a directory", "run.folder"]),
    ("no metadata of a collection", lambda t, m, r: preprocess(config(
        _written(t / "raw/metadata.json", "{}").parents[1]), str), ["metadata.json", "run data.collect"]),
    ("--tracks with --sweep", lambda t, m, r: evaluate.check_output(
        SimpleNamespace(sweep="a=1,2", tracks="x.npz", out=None, animate=None, gui=False)), ["--tracks", "--sweep"]),
    ("cannot be written: {error", lambda t, m, r: evaluate.check_output(SimpleNamespace(
        sweep=None, tracks=None, out=_written(t / "file", "") / "scores.json", animate=None, gui=False)),
     ["file/scores.json", "File exists", "name another file"]),
    ("`policy` needs --checkpoint", lambda t, m, r: evaluation("--controllers", "policy"),
     ["policy", "--checkpoint RUN"]),
    ("no checkpoint there; expected", lambda t, m, r: evaluation("--checkpoint", str(t)),
     ["expected a run folder", "phaseN"]),
    ("unequal numbers", lambda t, m, r: rollout.check_collection(load_config("configs/smoke.yaml"), SimpleNamespace(
        gather=lambda envs: [envs, 3]), 2),
     ["[2, 3]", "by rank", "as many ranks on each node"]),
    ("cannot be written to: {error", lambda t, m, r: resources.claim(_written(t / "file", "") / "run"),
     ["file/run", "cannot be written to", "Not a directory"]),
    ("no such key or section", lambda t, m, r: list(show("configs/smoke.yaml", [], ["phasex"])),
     ["phasex", "sections", "phase1"]),
    ("cannot be evaluated with", lambda t, m, r: other_model(m, "env.control_interval=0.5"),
     ["runs/x", "'control_interval': 0.5", "'control_interval': 1.0", "without --config"]),
    ("evaluated with {cfg.model", lambda t, m, r: other_model(m, "model.lane_room_m=2"),
     ["runs/x", "lane_room_m=2", "with 0", "without --config"]),
    ("other seeds may do", lambda t, m, r: evaluate.try_again(("none", 7), {("none", 7): 3}, 3),
     ["none with seed 7", "4 times", "rollout.restarts=3", "SUMO said"]),
]
# (fragment, test file that triggers it)
ELSEWHERE = [
    ("or let TMPDIR name", "test_locales.py"),
    ("none is left to score", "test_supervision.py"), ("left out, because", "test_supervision.py"),
    ("not with these; all values", "test_evaluate.py"), ("expected different values", "test_evaluate.py"),
    ("is no file; name another", "test_evaluate.py"), ("show one episode", "test_evaluate.py"),
    ("would write the same file", "test_evaluate.py"), ("one of its processes was killed", "test_data_killed.py"),
    ("one of its processes is stuck", "test_data_killed.py"),
    ("collect: episode {job.episode}", "test_data.py"),
    ("the curriculum of", "test_curriculum.py"), ("what they share lies in", "test_loading.py"),
    (".join(errors)", "test_config.py"), ("env.suite: {text!r}", "test_suite.py"),
    ("a quotation mark is missing", "test_suite.py"),
    ("could not be kept", "test_imitation.py"), ("cannot be read: {error}; remove", "test_imitation.py"),
    ("could not be written", "test_damaged_inputs.py"), ("missing, although", "test_damaged_inputs.py"),
    ("not to be seen", "test_nodes.py"), ("is too old", "test_damaged_inputs.py"),
    ("not the same folder", "test_nodes.py"), ("see different checkpoints", "test_nodes.py"),
    ("cannot be continued from", "test_damaged_inputs.py"),
    ("SUMO ends before the episode", "test_users_networks.py"),
    ("netconvert refused", "test_sumo.py"), ("sumo-gui needs a display", "test_report.py"),
    ("expected a file that ends in", "test_report.py"), ("there is no folder", "test_report.py"),
    ("a picture needs", "test_report.py"), ("no episode of", "test_report.py"),
    ("no Python package `sumo`", "test_sumo.py"), ("does not exist; reinstall", "test_sumo.py"),
    ("failed: {error}", "test_supervision.py"), ("failed: {answer}", "test_workers.py"),
    ("rollout worker {w} {trouble}", "test_workers.py"), ("has one already", "test_backends.py"),
    ("SUMO failed: {explained(", "test_backends.py"), ("needs the package libsumo", "test_backends.py"),
    ("scenario {env.env_cfg.scenario}", "test_pipeline.py"), ("{named}{error}", "test_data.py"),
    ("has become shorter", "test_dataset.py"), ("has vanished", "test_dataset.py"),
    ("sample {index}: {error}", "test_preprocess.py"),
    ("missing, damaged or half written", "test_preprocess.py"),
    ("made with other settings", "test_data.py"), ("data.tmpfs=true", "test_data_location.py"),
    ("another process is working there", "test_runtime.py"), ("no room to spill", "test_storage.py"),
    ("not even a micro-batch", "test_runtime.py"), ("refused: {' '", "test_checkpoint.py"),
    ("ddp.backend=nccl needs a GPU", "test_distributed.py"),
    ("NaN or infinite values; data.check", "test_data_ranks.py")]
# What no input of a user leads to: SUMO broke TraCI's protocol, or a stranger took the port in the same moment.
PROTOCOL = ["refused the context subscription", "SUMO announced", "somebody else's SUMO"]


def _written(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("fragment, trigger, words", CASES, ids=[case[0] for case in CASES])
def test_message_names_what_was_found_expected_and_what_to_do(fragment, trigger, words, tmp_path, monkeypatch,
                                                              recorded):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ERRORS) as error:
        trigger(tmp_path, monkeypatch, recorded)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


def test_every_message_is_triggered_by_a_test():
    names = {error.__name__ for error in ERRORS}
    sources = [*ROOT.glob("*.py"), *(path for folder in PACKAGES for path in (ROOT / folder).glob("*.py"))]
    raised = [ast.unparse(node) for path in sources for node in ast.walk(ast.parse(path.read_text()))
              if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
              and ast.unparse(node.exc.func).split(".")[-1] in names]
    assert len(raised) > 50
    known = [*(case[0] for case in CASES), *(fragment for fragment, _ in ELSEWHERE), *PROTOCOL]
    plain = [text.replace("\\'", "'").replace('\\"', '"') for text in raised]
    assert [text for text in plain if not any(fragment in text for fragment in known)] == []
    assert [fragment for fragment in known if not any(fragment in text for text in plain)] == []  # none is out of date
    assert [file for _, file in ELSEWHERE if not (ROOT / "tests" / file).exists()] == []
