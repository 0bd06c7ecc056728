"""Types of command-line arguments that argparse refuses in one line, before hours are spent."""
import argparse
import math
import os
import sys
from pathlib import Path


def writable(text):
    """A file that can be written."""
    path = Path(text).absolute()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name a file in an existing folder")
    return text


def at_least(least):
    """A whole number from `least` on."""
    def number(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} on")
        return int(text)
    return number


def positive(text):
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0")
    return number


def some_of(names):
    """Some of these names, with commas in between, as they were typed."""
    def chosen(text):
        wrong = [part for part in text.split(",") if part not in map(str, names)]
        if wrong:
            raise argparse.ArgumentTypeError(f"{','.join(wrong)!r}: expected some of {','.join(map(str, names))}")
        return text
    return chosen


def new_parser(doc, results):
    """A parser with --json, the file that the results go to; without it to `results`, None = nowhere. From now on
    Ctrl-C ends the benchmark with one line."""
    sys.excepthook = _say_what_ended
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=writable, default=results,
                        help="where the results go (default: %(default)s)")
    return parser


def _say_what_ended(kind, error, traceback):
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted; what was measured stands above", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)
