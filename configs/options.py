"""How a setting is declared: default, meaning, limits."""
from dataclasses import field, fields, is_dataclass


def opt(default, doc, low=None, high=None, choices=None, empty=False):
    """A setting with its meaning and its closed range [low, high] or its list of choices; `empty`: a list may be so."""
    meta = {"doc": doc, "low": low, "high": high, "choices": choices, "empty": empty}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


def sub(cls, title="", **changes):
    """A nested section whose defaults differ from those of its class in `changes`; the title stands in default.yaml."""
    return field(default_factory=lambda: cls(**changes), metadata={"title": title})


def leaves(section, prefix=""):
    """(dotted key, value, metadata) of every setting below a section."""
    for setting in fields(section):
        value = getattr(section, setting.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{setting.name}.")
        else:
            yield prefix + setting.name, value, setting.metadata
