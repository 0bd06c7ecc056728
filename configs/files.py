"""Files that are whole or not there at all, what is said when the disk is full, and checksums."""
import contextlib
import errno
import glob
import hashlib
import os
from pathlib import Path

from configs.console import ROOM

PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR)  # what more room does not cure


class WriteError(Exception):
    """A file could not be written: the disk is full, or cannot be written to. The message names the file."""


@contextlib.contextmanager
def whole(path):
    """A binary file to write, which takes `path`'s place at the end. WriteError when that fails: nothing half-written
    is left, an older file stays as it was."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with may_write(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # gone, or the disk may only be read
            temporary.unlink()


@contextlib.contextmanager
def may_write(path):
    """WriteError, which names `path`, for what keeps from writing in this block."""
    try:
        yield
    except OSError as error:
        way = "name another place" if error.errno in PLACE else ROOM
        why = error.strerror or f"no space left? {error}"  # NumPy tells how much it wrote
        raise WriteError(f"{path}: could not be written: {why}; {way}") from error


def write_whole(path, text):
    """Write a text file, whole or not at all; WriteError when that fails."""
    with whole(path) as file:
        file.write(text.encode("utf-8", "surrogateescape"))


def file_hash(path):
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def next_name(stem, keep, suffix=""):
    """(the next of the paths stem + number + suffix, those that are older than the last `keep` with it)."""
    names = (path.name.removeprefix(stem.name).removesuffix(suffix)
             for path in stem.parent.glob(f"{glob.escape(stem.name)}*{suffix}"))
    numbers = sorted(int(name) for name in names if name.isdecimal())
    *older, new = (stem.with_name(f"{stem.name}{n}{suffix}") for n in (*numbers, max(numbers, default=0) + 1))
    return new, older[:max(len(older) + 1 - keep, 0)]
