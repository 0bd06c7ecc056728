"""How a setting is declared, with default, meaning and limits, and how a value for it is checked."""
import contextlib
import difflib
import math
import types
import typing
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


def checked(value, field):
    """`value` cast to the field's type and inside its range, or ValueError that says what was expected."""
    if value is False and "off" in (field.metadata.get("choices") or ()):  # YAML reads off as false
        value = "off"
    if value == [] and not field.metadata.get("empty"):
        raise ValueError(_name(field.type))
    value = _cast(value, field.type)
    for element in value if isinstance(value, list) else [value]:
        _check_limits(element, field)
    return value


def _check_limits(value, field):
    choices, low, high = (field.metadata.get(name) for name in ("choices", "low", "high"))
    if choices and value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        raise ValueError("one of " + ", ".join(choices) + (f"; did you mean {close[0]}?" if close else ""))
    if (low is not None and value < low) or (high is not None and value > high):
        raise ValueError(f"{_name(field.type)} from {low} to {'any' if high is None else high}")


def _cast(value, kind):
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list):
            raise ValueError(_name(kind))
        return [_cast(v, typing.get_args(kind)[0]) for v in value]
    if kind in (int, float) and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)  # PyYAML reads 3e-4 as a string
            if math.isfinite(number) and (kind is float or number.is_integer() and abs(number) < 2 ** 31):
                return kind(number)
    elif kind in (str, bool) and isinstance(value, kind) and (kind is bool or value.isprintable()):
        return value  # no file system takes a zero byte or half a surrogate
    raise ValueError(_name(kind))


def _name(kind):
    if isinstance(kind, types.GenericAlias):
        return f"a list of {_name(typing.get_args(kind)[0]).split(' ', 1)[1]}s"
    return {int: "a whole number", float: "a number", bool: "a switch (true or false)", str: "a text"}[kind]


def differences(old, new, prefix=""):
    """What two nested dictionaries of settings differ in: texts."""
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key} was {a!r}, is {b!r}"
