"""Print the resolved configuration: every value, where it comes from, and what it means.

    python -m configs.show --config configs/quick.yaml
    python -m configs.show --config configs/quick.yaml phase1 rollout.num_workers phase1.lr=1e-3
"""
import dataclasses
import sys
from pathlib import Path

from configs.command_line import parse
from configs.console import exit_code
from configs.loader import FOLDER, ConfigError, layers, load_config, override_tree
from configs.options import leaves
from configs.schema import Config

DEFAULTS = FOLDER / "default.yaml"


def sources(path, overrides):
    """{dotted key: what set it last}: a YAML file of the chain of `base:`, or the command line."""
    trees = layers(Path(path)) + [("command line", override_tree(text, "command line", [])) for text in overrides]
    return {key: source for source, tree in trees if Path(source).resolve() != DEFAULTS for key in _keys(tree)}


def _keys(tree, prefix=""):
    for key, value in tree.items():
        yield from _keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]


def show(path, overrides, wanted=()):
    """Lines of text for the keys and sections in `wanted`, all of them by default."""
    config, set_by = load_config(path, overrides), sources(path, overrides)
    defaults = {key: value for key, value, _ in leaves(Config())}
    unknown = [w for w in wanted if not any(f"{key}.".startswith(f"{w}.") for key in defaults)]
    if unknown:
        raise ConfigError(f"command line: {unknown[0]}: no such key or section; sections: "
                          + ", ".join(f.name for f in dataclasses.fields(Config)))
    for key, value, meta in leaves(config):
        if not wanted or any(f"{key}.".startswith(f"{w}.") for w in wanted):
            source = f"{set_by[key]}, default {defaults[key]}" if key in set_by else "default"
            yield f"{f'{key}={value}':<44s} {f'[{source}]':<36s} {meta['doc']}"


def main(arguments=None):
    options = parse(__doc__, arguments, load=False)
    changes = [word for word in options.overrides if "=" in word]
    wanted = [word for word in options.overrides if word not in changes]
    print("\n".join(show(options.config_file, changes, wanted)))


if __name__ == "__main__":
    sys.exit(exit_code(main, (ConfigError,)))
