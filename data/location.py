"""Where data lie while training: graphs on disk below a size limit, or copied to memory; slow drives are named."""
import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from configs.console import LIMITS
from data.layout import DataError
from data.settings import processed_folder
from env.workers import WorkerError

MEMORY = "/dev/shm"


def open_data(cfg, team, guard=None):
    """The folder to read graphs from, on every rank. The first rank collects and preprocesses what is missing; with
    `data.tmpfs` one rank of each machine copies the graphs to memory. When `guard` (runtime.guard) stops the ranks
    meanwhile, SystemExit."""
    prepare(cfg, team, guard)
    raw = Path(cfg.data.folder) / "raw" / "metadata.json"
    seen = team.gather((socket.gethostname(), raw.exists()))
    if blind := sorted({host for host, sees in seen if not sees}):
        raise DataError(f"{raw}: not to be seen on {', '.join(blind)}; every node needs the same data.folder")
    folder = processed_folder(cfg)
    if on_windows_drive(folder):
        team.say(f"WARNING: {folder.resolve()} lies on a Windows drive, which WSL2 reads several times slower than its "
                 "own disk; set data.folder to a path below your Linux home, or data.tmpfs=true")
    if not cfg.data.tmpfs:
        return folder
    own = copy_to_memory(folder) if team.local_rank == 0 else None
    copies = team.gather((socket.gethostname(), own and str(own)))
    folder = next(Path(path) for host, path in copies if path and host == socket.gethostname())
    team.say(f"data.tmpfs: reading a copy of the graphs in {folder}")
    return folder


def prepare(cfg, team, guard):
    """Collect and preprocess on the first rank. The ranks meet after every episode and every chunk, so that none waits
    longer than collectives may and a stop is heard by all."""
    from data.collect import collect
    from data.preprocess import preprocess

    def meet(done=False):
        if guard is not None and guard.must_stop():
            raise SystemExit(guard.leave("while the data were prepared: what was finished is there"))
        return team.any(done)
    if team.is_main:
        collect(cfg, meanwhile=meet)
        preprocess(cfg, meanwhile=meet)
    while not meet(done=team.is_main):
        pass


def cannot_share(what, remedy, error=None):
    """WorkerError about processes that share data or locks in memory, which may be full; `error` itself where that
    tells of another limit."""
    if getattr(error, "errno", None) in LIMITS.keys() - {errno.ENOSPC}:
        raise error
    room = f"{shutil.disk_usage(MEMORY).free >> 20} MB are" if os.path.isdir(MEMORY) else "nothing is"
    raise WorkerError(f"{what}; what they share lies in {MEMORY}, where {room} free: make room there (docker run "
                      f"--shm-size); {remedy}") from None


def on_windows_drive(path):
    """Whether a path lies below /mnt/<letter>, where WSL2 shows Windows' drives."""
    return re.match(r"/mnt/[a-z](/|$)", os.path.realpath(path)) is not None


def copy_to_memory(folder, place=MEMORY):
    """Copy a processed data set to `place`. It vanishes with this process, however that ends: a shell waits for the
    end of a pipe that only this process holds, and then removes the copy."""
    need, free = size_of(folder), shutil.disk_usage(place).free
    if need > 0.8 * free:
        raise DataError(f"data.tmpfs=true: {folder} has {need / 1e6:.0f} MB, too much for the {free / 1e6:.0f} MB that "
                        f"are free in {place}; set data.tmpfs=false")
    copy = tempfile.mkdtemp(prefix="mixed-autonomy-", dir=place)
    subprocess.Popen(["sh", "-c", 'cat >/dev/null; rm -rf "$1"', "remove-at-exit", copy], stdin=subprocess.PIPE,
                     start_new_session=True)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    return Path(copy)


def size_of(folder):
    """Bytes in a folder's files."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


# ---- the graphs of several settings side by side ---------------------------------------------------------------

def mark_used(folder):
    """Note that a data set was used now."""
    with contextlib.suppress(OSError):  # a data set of somebody else
        os.utime(folder / "metadata.json")


def make_room(newest, limit_gb, report):
    """Remove the least recently used data sets beside `newest` until all together fit `limit_gb`. Those that some
    process has open for reading (`hold`) stay."""
    others = [path for path in newest.parent.iterdir() if path.is_dir() and path != newest]
    used = lambda path: max(p.stat().st_mtime for p in (path, path / "metadata.json") if p.exists())  # noqa: E731
    total = size_of(newest.parent)
    for path in sorted(others, key=used):
        if total <= limit_gb * 1e9:
            return
        if not in_use(path):
            size = size_of(path)
            try:
                shutil.rmtree(path)
            except OSError as error:  # on a disk that may only be read
                report(f"NOTE: {path} is to be removed (data.disk_gb={limit_gb}), and cannot be: {error}")
                continue
            total -= size
            report(f"removed {path} ({size / 1e6:.0f} MB, the least recently used graphs): data.disk_gb={limit_gb}")
    if total > limit_gb * 1e9:
        report(f"NOTE: {newest.parent} has {total / 1e9:.2f} GB, above data.disk_gb={limit_gb}: nothing else to remove")


def hold(folder):
    """An open file that keeps `make_room` from removing a data set, until it is closed."""
    file = open(Path(folder) / "metadata.json", "rb")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def in_use(folder):
    """Whether some process has a data set open for reading (`hold`)."""
    with contextlib.suppress(FileNotFoundError), open(folder / "metadata.json", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held; or nobody can tell, as on NFS, which locks only what is open for writing
            return True
    return False
