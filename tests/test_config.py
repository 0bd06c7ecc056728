"""Configuration: the shipped YAML files, the strict loader (one clear line per mistake), overrides and saving.

Covers configs/schema.py, configs/loader.py and configs/command_line.py. Needs neither SUMO nor torch.
"""
import dataclasses
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from configs import Config, ConfigError, dump_config, from_dict, load_config, to_dict
from configs.command_line import parse
from configs.document import default_yaml

SHIPPED = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))


def write(folder, text, name="my.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def mistakes(*overrides, path="configs/default.yaml"):
    """Lines of the ConfigError that these overrides cause."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).splitlines()


def mistake(*overrides, path="configs/default.yaml"):
    lines = mistakes(*overrides, path=path)
    assert len(lines) == 1, lines
    return lines[0]


def keys(tree, prefix=""):
    """Dotted names of all values in a nested dictionary."""
    for key, value in tree.items():
        yield from keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]


def settings(cls=Config, prefix=""):
    """(dotted name, field) of every setting of the schema."""
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(f.type):
            yield from settings(f.type, f"{prefix}{f.name}.")
        else:
            yield prefix + f.name, f


# ---- shipped files ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_file_loads_from_anywhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_place, by_name = load_config(path), load_config(f"configs/{path.name}")
    assert by_place == by_name == load_config(path.name)
    assert isinstance(by_place, Config)


def test_default_yaml_names_every_key_with_its_default():
    tree = yaml.safe_load(next(p for p in SHIPPED if p.name == "default.yaml").read_text())
    assert "base" not in tree
    assert sorted(keys(tree)) == sorted(keys(to_dict(Config())))
    assert load_config("configs/default.yaml") == Config()


def test_default_yaml_is_written_from_the_schema():
    """The file and the dataclasses say the same: a reader of the YAML sees each key's one-line description."""
    text = next(p for p in SHIPPED if p.name == "default.yaml").read_text()
    assert text == default_yaml()
    assert [name for name, f in settings() if f.metadata["doc"] not in text] == []


def test_every_setting_has_a_meaning_and_a_default_inside_its_range():
    overrides = []
    for name, f in settings():
        assert f.metadata["doc"], name
        overrides.append(f"{name}={yaml.safe_dump(attrgetter(name)(Config()), default_flow_style=True)}")
    expected = Config()
    expected.data.scenarios = ["ring", "figure_eight", "merge", "bottleneck"]  # whose numbers are read then
    assert load_config("configs/smoke.yaml", [*overrides, f"data.scenarios={expected.data.scenarios}"]) == expected


def test_smoke_differs_from_quick_and_default():
    """An ignored `base:` or ignored values would make the files equal."""
    default, quick, smoke = (load_config(f"configs/{n}.yaml") for n in ("default", "quick", "smoke"))
    assert (default.model.preset, quick.model.preset, smoke.model.preset) == ("full", "small", "small")
    assert smoke.run.name == "smoke" and smoke.env.horizon_s < quick.env.horizon_s == default.env.horizon_s
    assert smoke.phase1.loader.num_workers == quick.phase1.loader.num_workers == 0 != default.phase1.loader.num_workers


def test_smoke_evaluates_short_episodes():
    """smoke.yaml inherited evaluate.horizon_s = 900 s: evaluating took 80 of the 108 seconds of a smoke run."""
    smoke = load_config("configs/smoke.yaml")
    assert smoke.evaluate.horizon_s <= 2 * smoke.env.horizon_s


# ---- strictness ------------------------------------------------------------------------------------------------

def test_unknown_key_names_file_key_value_and_closest_key(tmp_path):
    path = write(tmp_path, "phase1: {epochz: 7}")
    line = mistake(path=path)
    assert str(path) in line and "phase1.epochz" in line and "7" in line and "phase1.epochs" in line


def test_unknown_section_and_unknown_key_without_a_close_one(tmp_path):
    assert "did you mean phase1?" in mistake(path=write(tmp_path, "phase_1: {epochs: 7}"))
    line = mistake(path=write(tmp_path, "checkpoint: {qqqqqq: 7}"))
    assert "checkpoint.qqqqqq" in line and "checkpoint.keep_last" in line  # nothing close: all valid keys


@pytest.mark.parametrize("override, expected", [
    *((f"phase1.epochs={v}", "a whole number")
      for v in ("many", "[1]", "1.5", "'1.5'", "true", "", "{a: 1}", ".inf", "1e400")),
    *((f"phase1.lr={v}", "a number")
      for v in ("fast", "false", "null", "[1]", ".nan", ".inf", "-.inf", "nan", "inf", "")),
    *((f"ddp.static_graph={v}", "a switch") for v in ("1", "maybe", "null")),
    *((f"run.name={v}", "a text") for v in ("7", "true", "null", "[a]")),
    *((f"data.vehicles={v}", "a list of") for v in ("5", "[]", "{a: 1}")),
    *((f"data.vehicles=[4, {v}]", "whole number") for v in ("many", "8.5", "true", "[8]")),
    *((f"data.demand_scales=[1, {v}]", "number") for v in ("x", ".nan", "true")),
    ("data.controllers=[none, 3]", "text"), ("data.controllers=none", "a list of")])
def test_wrong_type_names_key_value_and_expected_type(override, expected):
    key, _, value = override.partition("=")
    line = mistake(override)
    assert line.startswith("command line: ") and f"{key}:" in line and expected in line


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/../../b", "/tmp/x"])
def test_a_run_stays_in_its_folder(name):
    """`run.name=../other` wrote beside run.folder."""
    assert "expected the name of a folder below run.folder" in mistake(f"run.name='{name}'")


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400])
@pytest.mark.parametrize("key", ["phase1.lr", "run.seed"])
def test_numbers_beyond_floats_are_one_clear_line(key, value):
    """Python refuses to make a float of an integer with 400 digits: OverflowError reached the user as a traceback."""
    assert key in mistake(f"{key}={value}")


def test_seed_that_torch_cannot_hold_is_refused():
    """run.seed had no upper limit: 10^20 passed the loader, then torch.manual_seed ended each phase in a traceback."""
    assert "run.seed" in mistake("run.seed=100000000000000000000")


@pytest.mark.parametrize("override", [
    "phase1.epochs=0", "phase1.epochs=-3", "env.icv_share=1.01", "env.icv_share=-0.01", "phase2.gamma=1.5",
    "env.max_commands=1001", "env.step_length=0", "run.seed=-1"])
def test_out_of_range_names_the_range(override):
    assert override.partition("=")[0] in mistake(override) and " from " in mistake(override)


@pytest.mark.parametrize("override", ["env.icv_share=0", "env.icv_share=1", "env.max_commands=1000", "phase1.epochs=1"])
def test_ends_of_a_range_are_inside(override):
    load_config("configs/smoke.yaml", [override, "phase1.stage1_epochs=0"])


def test_wrong_choice_lists_the_choices_and_suggests_one():
    line = mistake("model.preset=smal")
    assert "model.preset" in line and "small, full" in line and "did you mean small?" in line
    line = mistake("ddp.backend=mpi")
    assert "auto, nccl, gloo" in line and "did you mean" not in line


@pytest.mark.parametrize("override", [
    "data.controllers=[none, lane_advise]", "evaluate.controllers=[none, polizy]", "data.demand_scales=[1, -1]",
    "data.demand_scales=[0]", "evaluate.seeds=[-1]", "evaluate.seeds=[7, 7]", "ddp.nccl_env=[NCCL_DEBUG]"])
def test_wrong_elements_of_lists_are_refused_before_anything_starts(override):
    """Elements had a type but no limits: a wrong evaluate.controllers showed after phase 3."""
    assert override.partition("=")[0] in mistake(override)


def test_section_given_as_a_value_and_value_given_as_a_section(tmp_path):
    line = mistake(path=write(tmp_path, "phase1: 3"))
    assert "phase1: 3 is not a section" in line and "epochs" in line
    assert "phase1.loader" in mistake("phase1.loader=2")
    assert "run.seed" in mistake("run.seed.x=2") and "a whole number" in mistake("run.seed.x=2")
    assert "phase1" in mistake(path=write(tmp_path, "phase1:"))  # an empty section is no section


def test_values_that_yaml_reads_as_text_become_numbers(tmp_path):
    """PyYAML reads 3e-4 and 1e6 as strings; without a cast they reach the optimiser as text."""
    path = write(tmp_path, "phase1: {lr: 3e-4, warmup_steps: 1e2}\nphase3: {amp: {max_scale: 1e6}}")
    cfg = load_config(path, ["phase2.lr=1e-5"])
    assert (cfg.phase1.lr, cfg.phase1.warmup_steps, cfg.phase3.amp.max_scale, cfg.phase2.lr) == (3e-4, 100, 1e6, 1e-5)
    assert [type(v) for v in (cfg.phase1.lr, cfg.phase1.warmup_steps, cfg.phase3.amp.max_scale)] == [float, int, float]
    whole = load_config("configs/default.yaml", ["phase1.lr=1", "phase1.epochs=2e1", "data.vehicles=[4.0, 8]"])
    assert isinstance(whole.phase1.lr, float) and type(whole.phase1.epochs) is int and whole.data.vehicles == [4, 8]


def test_every_mistake_gets_its_own_line(tmp_path):
    path = write(tmp_path, "phase1: {epochs: 0, lr: fast}\nrnu: {seed: 1}\nmodel: {preset: medium}")
    lines = mistakes("env.horizon_s=-1", "phase1.epochz=2", path=path)
    assert len(lines) == 6
    expected = ("phase1.epochs", "phase1.lr", "rnu", "model.preset", "env.horizon_s", "phase1.epochz")
    assert [f": {key}: " in line for line, key in zip(lines, expected)] == [True] * 6
    assert [line.startswith(str(path)) for line in lines] == [True] * 4 + [False] * 2


def test_a_refused_load_changes_nothing_for_the_next_one():
    """Defaults are copied: lists and nested sections of one Config must not be those of the next."""
    mistake("data.vehicles=[3, x]")
    changed = load_config("configs/default.yaml", ["data.vehicles=[3, 4]", "phase1.amp.init_scale=2"])
    changed.data.controllers.append("x")
    assert load_config("configs/default.yaml") == Config() != changed


def test_the_same_key_twice_is_refused(tmp_path):
    """PyYAML keeps the last of two equal keys silently: a whole section written twice lost its first half."""
    line = mistake(path=write(tmp_path, "phase1: {epochs: 3}\nphase2: {iterations: 3}\nphase1: {lr: 0.1}\n"))
    assert "phase1" in line and "my.yaml" in line


# ---- files and bases -------------------------------------------------------------------------------------------

def test_base_chain_applies_from_the_inside_out(tmp_path):
    write(tmp_path, "run: {name: one, seed: 11}\nphase1: {epochs: 11, lr: 0.5}", "one.yaml")
    (tmp_path / "sub").mkdir()
    write(tmp_path, "base: ../one.yaml\nphase1: {epochs: 22}\nrun: {name: two}", "sub/two.yaml")
    top = write(tmp_path, "base: sub/two.yaml\nrun: {name: three}", "three.yaml")
    cfg = load_config(top, ["phase1.epochs=33"])
    assert (cfg.run.name, cfg.run.seed, cfg.phase1.epochs, cfg.phase1.lr) == ("three", 11, 33, 0.5)
    assert cfg.phase2 == Config().phase2


def test_own_file_may_build_on_a_shipped_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "base: smoke.yaml\nrun: {name: mine}")
    assert load_config("my.yaml").env == load_config("configs/smoke.yaml").env


def test_own_file_may_build_on_a_shipped_one_from_another_folder(tmp_path):
    """`--config my.yaml` found `base: smoke.yaml`, the same file by its full path did not."""
    mine = load_config(write(tmp_path, "base: smoke.yaml\nrun: {name: mine}"))
    assert mine.env == load_config("configs/smoke.yaml").env


def test_a_base_in_another_folder_is_no_shipped_file_of_that_name(tmp_path):
    """A team's own quick.yaml that was not there any more became the shipped one, and the run began."""
    for text in ("quick.yaml", "configs/quick.yaml"):
        assert load_config(write(tmp_path, f"base: {text}")) == load_config("configs/quick.yaml")
    with pytest.raises(ConfigError, match="team/quick.yaml: cannot read"):
        load_config(write(tmp_path, "base: ../team/quick.yaml"))


def test_mistake_in_a_base_names_the_base(tmp_path):
    below = write(tmp_path, "phase1: {epochz: 2}", "below.yaml")
    assert mistake(path=write(tmp_path, "base: below.yaml")).startswith(str(below))


@pytest.mark.parametrize("loop", [{"a.yaml": "a.yaml"}, {"a.yaml": "b.yaml", "b.yaml": "c.yaml", "c.yaml": "a.yaml"}])
def test_base_loop_is_named(tmp_path, loop):
    for name, base in loop.items():
        write(tmp_path, f"base: {base}", name)
    assert "leads back" in mistake(path=tmp_path / "a.yaml") and "a.yaml" in mistake(path=tmp_path / "a.yaml")


def test_missing_files_are_named(tmp_path):
    assert f"{tmp_path / 'none.yaml'}: cannot read" in mistake(path=tmp_path / "none.yaml")
    assert "gone.yaml: cannot read" in mistake(path=write(tmp_path, "base: gone.yaml"))
    assert "cannot read" in mistake(path=tmp_path)  # a folder


@pytest.mark.parametrize("text, words", [
    *((text, "not valid YAML") for text in ("phase1: [3", "a: b: c", "\t- x")),
    *((text, "expected sections") for text in ("- 1\n- 2", "hello", "7", "[]", "false", "0", "''")),
    ("base: [a, b]", "base"), ("base: 3", "base")])
def test_file_that_is_no_configuration_is_one_line(tmp_path, text, words):
    line = mistake(path=write(tmp_path, text))
    assert line.startswith(str(tmp_path / "my.yaml")) and words in line


def test_binary_file_is_one_line(tmp_path):
    (tmp_path / "my.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "not valid YAML" in mistake(path=tmp_path / "my.yaml")


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}", "---\n"])
def test_empty_file_means_the_defaults(tmp_path, text):
    assert load_config(write(tmp_path, text)) == Config()


# ---- cross checks ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("overrides, words", [
    (["env.control_interval=1.05"], ["env.control_interval=1.05", "env.step_length=0.1"]),
    (["env.control_interval=0.1", "env.step_length=0.5"], ["env.control_interval=0.1", "env.step_length=0.5"]),
    (["env.step_length=0.0125"], ["env.step_length=0.0125", "milliseconds"]),  # SUMO refused the subscription
    (["ddp.static_graph=true"], ["ddp.static_graph", "phase3.accumulation=2"]),
    (["phase2.amp.min_scale=100", "phase2.amp.max_scale=10"], ["phase2.amp", "min_scale=100", "max_scale=10"]),
    (["ddp.static_graph=true", "phase3.accumulation=1", "phase1.accumulation=4"], ["phase1.accumulation=4"]),
    (["ddp.static_graph=true", "phase3.accumulation=1", "phase2.imitate_keep=2", "phase2.imitate_corrections=1"],
     ["ddp.static_graph", "phase2.imitate_keep=2"]),
    (["phase3.fragment_length=4", "phase3.sequence_length=2"], ["phase3.fragment_length=4", "data.future=5"]),
    *(([f"data.vehicles={v}"], [f"data.vehicles={v}"]) for v in ([20, 10], [1, 10], [10], [4, 8, 9])),
    (["data.vehicles=[10, 20]", "env.max_vehicles=15"], ["data.vehicles", "env.max_vehicles=15"]),
    (["phase3.sequence_length=7"], ["phase3.fragment_length=200", "phase3.sequence_length=7"]),
    (["phase3.multiplier_init=9", "phase3.multiplier_max=5"], ["phase3.multiplier_init=9.0"]),  # held for one epoch
    (["data.samples=50"], ["data.samples=50", "data.samples_per_episode=50", "nothing to train on"]),
    (["phase2.fragment_length=901"], ["phase2.fragment_length=901", "900 control steps"]),
    (["phase1.augment.time_shift=11"], ["phase1.augment.time_shift=11", "data.margin=10"]),
    (["env.horizon_s=34", "phase2.fragment_length=20"], ["env.horizon_s=34", "data.margin=10"]),
    (["baselines.pi_saturation.gap_high_m=7"], ["gap_low_m=7.0", "gap_high_m=7.0"]),  # a command of NaN for good
    (["graph.k_min=9", "graph.k_max=8"], ["graph.k_min=9", "graph.k_max=8"])])
def test_settings_that_contradict_each_other(overrides, words):
    line = mistake(*overrides)
    assert line.startswith("configs/default.yaml: ") and all(word in line for word in words)


@pytest.mark.parametrize("override", ["phase1.amp.growth_factor=1", "phase3.amp.backoff_factor=1",
                                      "phase2.amp.init_scale=1e39"])
def test_loss_scales_that_pytorch_refuses(override):
    """A traceback on a GPU, after the data had been prepared."""
    assert "is not valid; expected a number from" in mistake(override)


def test_settings_that_go_together_pass():
    assert load_config("configs/default.yaml", ["ddp.nccl_env=[]"]).ddp.nccl_env == []  # others must not be empty
    load_config("configs/default.yaml", ["env.step_length=0.5", "env.control_interval=1.5"])
    load_config("configs/default.yaml", ["ddp.static_graph=true", "phase3.accumulation=1"])
    load_config("configs/default.yaml", ["graph.k_min=8", "graph.k_max=8", "data.vehicles=[600, 600]"])


def test_an_episode_too_short_for_one_sample_is_refused():
    """Episodes shorter than history + future gave no samples, which only preprocessing noticed ("split is empty")."""
    overrides = ["env.horizon_s=60", "phase2.fragment_length=20", "data.history=60", "data.future=10"]
    assert "data.history" in mistake(*overrides, path="configs/smoke.yaml")


# ---- overrides and the command line ----------------------------------------------------------------------------

def test_overrides_win_in_their_order():
    overrides = ["run.seed=5", "phase1.loader.drop_last=false", "run.seed=6", "run.name=a=b"]
    cfg = load_config("configs/smoke.yaml", overrides)
    assert (cfg.run.seed, cfg.phase1.loader.drop_last, cfg.run.name) == (6, False, "a=b")


def test_wrong_overrides_name_the_command_line():
    assert mistake("phase1.epochz=3").startswith("command line: phase1.epochz: unknown key")
    assert "did you mean phase1.epochs?" in mistake("phase1.epochz=3")
    assert "expected section.key=value" in mistake("phase1.epochs")
    assert "expected section.key=value" in mistake("=3")
    assert mistake("phase1.epochs=[").startswith("command line: phase1.epochs")


def test_command_line_takes_overrides_between_options():
    options = parse("doc", ["run.seed=3", "--config", "configs/smoke.yaml", "phase1.epochs=9"])
    assert (options.config.run.name, options.config.run.seed, options.config.phase1.epochs) == ("smoke", 3, 9)
    assert options.overrides == ["run.seed=3", "phase1.epochs=9"]
    assert parse("doc", []).config == Config()


def test_command_line_refuses_what_it_does_not_know(capsys):
    with pytest.raises(ConfigError, match="expected section.key=value"):
        parse("doc", ["--config", "configs/smoke.yaml", "epochs"])
    with pytest.raises(SystemExit) as ended:
        parse("doc", ["--confg", "configs/smoke.yaml"])
    assert ended.value.code == 2 and "--confg" in capsys.readouterr().err


# ---- saving ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_dictionary_and_yaml_round_trip(path, tmp_path):
    cfg = load_config(path, ["run.seed=77", "phase1.lr=1e-7", "data.vehicles=[4, 9]"])
    assert from_dict(to_dict(cfg)) == cfg
    dump_config(cfg, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == cfg
    assert type(load_config(tmp_path / "saved.yaml").phase1.lr) is float


def test_dictionary_is_a_copy_of_plain_values():
    cfg = Config()
    tree = to_dict(cfg)
    tree["data"]["vehicles"].append(3)
    tree["phase1"]["amp"]["init_scale"] = 1.0
    assert cfg == Config()
    assert yaml.safe_load(yaml.safe_dump(to_dict(cfg))) == to_dict(cfg)


def test_wrong_dictionary_names_its_source():
    tree = to_dict(Config())
    tree["phase1"]["epochz"] = tree["phase1"].pop("epochs")
    with pytest.raises(ConfigError, match=r"^runs/x: phase1.epochz: unknown key"):
        from_dict(tree, "runs/x")
    tree = to_dict(Config())
    tree["graph"]["k_min"] = 60
    with pytest.raises(ConfigError, match=r"^runs/x: graph.k_min=60"):
        from_dict(tree, "runs/x")


def test_off_is_a_value_like_others():
    """`phase1.amp.dtype=off` was refused ("False is not valid"): YAML reads off as false."""
    assert load_config("configs/smoke.yaml", ["phase1.amp.dtype=off"]).phase1.amp.dtype == "off"
    with pytest.raises(ConfigError, match="env.backend: False is not valid"):
        load_config("configs/smoke.yaml", ["env.backend=off"])
