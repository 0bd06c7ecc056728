"""Write default.yaml anew from the schema, after a setting has been added or changed there.

    python -m configs.document
"""
import dataclasses
import sys
from pathlib import Path

import yaml

from configs.schema import Config

WIDTH = 120
HEAD = """\
# The target machine: 2x RTX 2080 Ti (22 GB), 32 threads, 16 GB RAM. Every key, its default and its meaning.
# Other files name this one with `base:` and hold only the differences; the command line adds section.key=value.
# Written by `python -m configs.document`."""


def default_yaml():
    """The text of default.yaml."""
    return "\n".join([HEAD, *document(Config())]) + "\n"


def document(section, indent=""):
    """Lines of YAML with every key, its default and its meaning."""
    for setting in dataclasses.fields(section):
        value = getattr(section, setting.name)
        if dataclasses.is_dataclass(value):
            if not indent:
                yield from ("", f"# {setting.metadata['title']}")
            yield f"{indent}{setting.name}:"
            yield from document(value, indent + "  ")
        else:
            text = yaml.safe_dump([value], default_flow_style=True, width=10 ** 6).strip()[1:-1]
            yield from _key(f"{indent}{setting.name}: {text}", setting.metadata, indent)


def _key(text, meta, indent):
    meaning = meta["doc"]
    if meta["choices"] and not any(text in meaning for text in ("auto =", "env/baselines.py")):
        meaning += f" ({', '.join(meta['choices'])})"
    line = f"{text:<40s} # {meaning}"
    return [line] if len(line) <= WIDTH else [f"{indent}# {meaning}", text]


if __name__ == "__main__":
    if sys.argv[1:]:
        print("usage: python -m configs.document (no arguments)", file=sys.stderr)
        sys.exit(2)
    path = Path(__file__).with_name("default.yaml")
    path.write_text(default_yaml(), encoding="utf-8")
    print(f"written: {path}")
