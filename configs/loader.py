"""Strict YAML loader: unknown key, wrong type or value out of range is one clear line each, before anything starts.

A YAML file names another one with `base:` and holds only the differences. Command lines add `section.key=value`.
"""
import copy
import dataclasses
import difflib
import os
import reprlib
import shlex
from pathlib import Path

import yaml

from configs.checks import cross_checks
from configs.files import write_whole
from configs.options import checked
from configs.schema import Config

FOLDER = Path(__file__).parent
CLOSED = ("ring", "figure_eight")  # roads that nobody leaves
READ_BY = {name: name for name in ("corridor", *CLOSED, "merge", "bottleneck")} | {"driver": "corridor"}  # by section
VARIED = (*(f"{section}." for section in READ_BY), "reward.", "baselines.", "env.scenario=", "env.demand_scale=",
          "env.icv_share=", "phase2.imitate=")  # what a suite may change


class ConfigError(Exception):
    """The user's configuration is wrong; the message is one line per mistake."""


def load_config(path="configs/default.yaml", overrides=(), source=None):
    """Config from a YAML file (with its bases) and `section.key=value` overrides; `path` may also be a tree as
    `to_dict` gives it, then `source` names where it comes from. A single override needs no list.

    Raises ConfigError listing every mistake as file, dotted key, value, expected type and closest valid key.
    """
    config, errors, overrides = Config(), [], [overrides] if isinstance(overrides, str) else overrides
    for name, tree in [(source, path)] if isinstance(path, dict) else layers(Path(path)):
        _merge(config, tree, name, "", errors)
    for text in overrides:
        _merge(config, override_tree(text, "command line", errors), "command line", "", errors)
    errors = errors or [f"{source or path}: {text}" for text in (*cross_checks(config), *_suite_checks(config))]
    errors = errors or [*_unread(config, overrides, "command line"), *_overruled(config, overrides)]
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def variant(config, text, source="variant"):
    """A copy of `config`, without its suite, changed by `text`: "section.key=value ...", or "same" for no change.

    Raises ConfigError like `load_config`.
    """
    config, errors = copy.deepcopy(config), []
    config.env.suite = ["same"]
    for part in parts_of(text) if text != "same" else ():
        _merge(config, override_tree(part, source, errors), source, "", errors)
    if errors:
        raise ConfigError("\n".join(errors))
    return config


def parts_of(text):
    """["section.key=value"] of a variant; quotes hold a value with spaces together."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"env.suite: {text!r}: {str(error).lower()}: a quotation mark is missing") from None


def to_dict(config):
    """Nested dictionary of plain values, as saved in run folders and checkpoints."""
    return dataclasses.asdict(config)


def from_dict(tree, source="saved config"):
    """Config from `to_dict`'s output; raises ConfigError like `load_config`."""
    return load_config(tree, source=source)


def dump_config(config, path):
    """Write the resolved configuration as YAML, whole or not at all; WriteError when that is impossible."""
    write_whole(path, yaml.safe_dump(to_dict(config), sort_keys=False))


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML silently keeps the last of two equal keys; here that is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} stands twice{node.start_mark}")
        return super().construct_mapping(node, deep)


def layers(path, seen=(), named=None):
    """[(file name, tree)] from the innermost base to `path` itself, which stands in a file as `named`."""
    if not os.path.isfile(path) and (FOLDER / path.name).is_file() and (
            Path(named or path).parent in (Path("."), Path("configs"))):
        path = FOLDER / path.name  # the shipped files are found from any folder, and as bases of any file
    if (real := Path(os.path.realpath(path))) in seen:
        raise ConfigError(f"{path}: `base:` leads back to this file; one of the files on the way must name no base")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        why = f"{error.strerror} (`base:` of {seen[-1]})" if seen else error.strerror
        raise ConfigError(f"{path}: cannot read the configuration: {why}; expected a YAML file of your own or one of "
                          f"configs/: {', '.join(sorted(p.name for p in FOLDER.glob('*.yaml')))}") from None
    except Exception as error:  # PyYAML lets errors of many kinds through: month 13, !!int x, [[[[[...
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())[:300]}") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections such as `env:` at the top level, found {_shown(tree)}")
    base = tree.pop("base", None)
    if base is not None and not (isinstance(base, str) and base.isprintable() and 0 < len(base) < 255):
        raise ConfigError(f"{path}: base: expected the name of a YAML file, found {_shown(base)}")
    below = layers(path.parent / base, (*seen, real), base) if base else []
    return below + [(str(path), tree)]


def override_tree(text, source, errors):
    """Nested dictionary of one "section.key=value"; mistakes are appended to `errors`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        errors.append(f"{source}: {text!r}: expected section.key=value")
        return {}
    try:
        value = yaml.safe_load(value) if value else ""
    except Exception:  # PyYAML raises ValueError for a date that does not exist, and more
        errors.append(f"{source}: {key}: {value!r} is not a valid YAML value")
        return {}
    for part in reversed(key.strip().split(".")):
        value = {part: value}
    return value


def _merge(node, tree, source, prefix, errors):
    """Write the values of `tree` into the dataclass `node`, collecting mistakes."""
    fields = {f.name: f for f in dataclasses.fields(node)}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if key not in fields:
            errors.append(f"{source}: {dotted}: unknown key (value {_shown(value)}); "
                          + _suggest(str(key), fields, prefix))
        elif dataclasses.is_dataclass(getattr(node, key)):
            if isinstance(value, dict):
                _merge(getattr(node, key), value, source, dotted + ".", errors)
            else:
                errors.append(f"{source}: {dotted}: {_shown(value)} is not a section; expected keys below it: "
                              + ", ".join(f.name for f in dataclasses.fields(getattr(node, key))[:6]))
        else:
            try:
                setattr(node, key, checked(value, fields[key]))
            except ValueError as error:
                errors.append(f"{source}: {dotted}: {_shown(value)} is not valid; expected {error}")


def _shown(value):
    """A value in a message: short, however large it is (aliases in YAML can stand for gigabytes)."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother = 2, 80, 80
    return brief.repr(value)


def _suggest(key, fields, prefix):
    close = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "valid keys: " + ", ".join(f"{prefix}{name}" for name in fields)


def _unread(config, parts, source):
    """Which of "section.key=value" belong to a built-in scenario that is not simulated: texts."""
    owners = {part: READ_BY.get(part.strip().partition(".")[0]) for part in parts}
    if not any(owners.values()):
        return
    here = {v.env.scenario for v in config.variants()} | set(config.data.scenarios) - {"same"}
    for part, scenario in owners.items():
        if scenario not in (None, *here):
            yield (f"{source}: {part}: only the scenario {scenario} reads that, but here is {', '.join(sorted(here))}; "
                   "leave it out or set env.scenario")


def _overruled(config, overrides):
    """Which "section.key=value" of the command line change nothing, because every element of env.suite sets that key
    or has a scenario that does not read it: texts."""
    if not overrides:  # a variant is a copy of everything
        return
    own = [({part.partition("=")[0] for part in parts_of(text)}, one.env.scenario)
           for text, one in zip(config.env.suite, config.variants())]
    for text in overrides:
        key = text.partition("=")[0].strip()
        key = {"data.scenarios": "env.scenario"}.get(key, key)
        reader = READ_BY.get(key.partition(".")[0])
        heard = [key not in keys for keys, scenario in own if reader in (None, scenario)]
        if heard and not any(heard):
            yield (f"command line: {text}: changes nothing, because every element of env.suite that reads this sets it "
                   "itself; leave it out, or add env.suite=[same]")


def _suite_checks(c):
    """Mistakes in the elements of env.suite: texts."""
    if len(set(c.env.suite)) < len(c.env.suite):
        yield f"env.suite={c.env.suite}: the same element twice"
    for text in c.env.suite:
        try:
            if text != "same" and not ((parts := parts_of(text)) and all(part.startswith(VARIED) for part in parts)):
                raise ConfigError(f"env.suite: {text!r}: expected parts that begin with {', '.join(VARIED)}; a value "
                                  "with spaces stands in quotes")
            stage = variant(c, text, "env.suite")
            yield from _unread(stage, parts_of(text), "env.suite")
            if c.phase2.curriculum.enabled and stage.env.scenario in CLOSED and text != c.env.suite[-1]:
                yield (f"phase2.curriculum.enabled=true: nobody ever arrives on {stage.env.scenario} (env.suite: "
                       f"{text!r}), so that this stage would never end; it may only be the last")
        except ConfigError as error:
            yield from str(error).splitlines()
