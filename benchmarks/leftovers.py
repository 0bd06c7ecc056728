"""What a killed program leaves behind: living processes, found by a word in their environment, and shared memory."""
import os
import time
import uuid
from pathlib import Path


def marked_environment(**more):
    """(word, environment): whatever is started with this environment, and whatever that starts, is found by it."""
    word = f"marked-{uuid.uuid4().hex}"
    return word, {**os.environ, **more, "PROCESS_MARK": word}


def living(word):
    """{pid: command line} of the living processes with this word in their environment."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended, or is not ours
    return found


def survivors(word, patience=20.0):
    """Command lines of those that still live `patience` seconds later.

    Python's resource tracker ends by itself when its parent has ended, but a moment later.
    """
    end = time.monotonic() + patience
    while (found := living(word)) and time.monotonic() < end:
        time.sleep(0.05)
    return list(found.values())


def leaked_memory(before, patience=5.0):
    """Names in /dev/shm that are not in `before` and that no living process maps: segments whose owners died. Those of
    programs that live on go within the `patience` s: one may end between the two looks."""
    end, found = time.monotonic() + patience, unmapped(before)
    while found and time.monotonic() < end:
        time.sleep(0.2)
        found &= unmapped(before)
    return sorted(found)


def unmapped(before):
    """Such names at this moment."""
    new, used = set(os.listdir("/dev/shm")) - before, ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            used += maps.read_text()
        except OSError:
            continue
    return {name for name in new if f"/dev/shm/{name}" not in used}
