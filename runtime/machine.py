"""What the doctor looks at: packages, GPU, memory, limits. Every finding that is not fine says what to do."""
import os
import platform
import resource
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from runtime.memory import cgroup_memory, numbers
from runtime.resources import usable_cores

OK, WARN, FAIL = "ok", "warn", "FAIL"
WSLCONFIG = ("in C:\\Users\\<you>\\.wslconfig, section [wsl2]: memory=14GB and swap=16GB on a host with 16 GB, then "
             "`wsl --shutdown` in PowerShell")
NEEDED = ("torch", "numpy", "PyYAML", "gymnasium", "traci", "eclipse-sumo")


class Finding(NamedTuple):
    """One line of the doctor: OK, WARN or FAIL, what was looked at, what was found, and what to do about it."""
    status: str
    what: str
    found: str
    remedy: str = ""


def judged(fine, what, found, remedy):
    """OK where this is fine, else a warning that says what to do."""
    return Finding(OK, what, found) if fine else Finding(WARN, what, found, remedy)


def installed(names):
    """{name: version, None = not installed} of Python packages."""
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def packages(versions):
    """`versions`: {name: version or None} of NEEDED and libsumo."""
    found = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    missing = [name for name in NEEDED if not versions[name]]
    if missing:
        return Finding(FAIL, "packages", f"missing: {', '.join(missing)}; found {found}", "pip install -e .")
    release = versions["eclipse-sumo"]
    other = [name for name in ("traci", "libsumo") if versions[name] not in (None, release)]
    if other:
        return Finding(FAIL, "packages", f"{found}: not one release of SUMO",
                       "pip install " + " ".join(f"{name}=={release}" for name in other))
    return Finding(OK, "packages", f"Python {platform.python_version()}, {found}")


def gpus(wanted, smi=None):
    """One finding per GPU; `wanted` is run.device, `smi` what nvidia-smi says, "" = no such program or no answer."""
    import torch
    if wanted == "cpu":
        yield Finding(OK, "GPU", "not asked for: run.device=cpu")
        return
    smi, trouble = nvidia_smi() if smi is None else smi, FAIL if wanted == "cuda" else WARN
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            try:
                (torch.ones(64, 64, device=f"cuda:{i}") @ torch.ones(64, 64, device=f"cuda:{i}")).sum().item()
            except RuntimeError as error:  # a full card, or a build without kernels for it
                yield Finding(FAIL, "GPU", f"{p.name} cannot compute: {str(error).splitlines()[0]}", "nvidia-smi shows "
                              f"who uses it; this PyTorch is built for {' '.join(torch.cuda.get_arch_list())}, the GPU "
                              f"is sm_{p.major}{p.minor}")
                continue
            yield Finding(OK, "GPU", f"{p.name}, {p.total_memory / 2**30:.0f} GB, compute capability {p.major}."
                          f"{p.minor}, CUDA {torch.version.cuda}, driver {smi.partition(',')[0] or 'unknown'}")
    elif smi:
        yield Finding(trouble, "GPU", f"driver {smi}, but torch {torch.__version__} does not use it",
                      "this is PyTorch's CPU build: install the CUDA build, see pytorch.org" if not torch.version.cuda
                      else f"update the driver (on WSL2: the one of Windows) to one for CUDA {torch.version.cuda}")
    else:
        yield Finding(trouble, "GPU", "none, everything runs on the CPU",
                      "run.device=auto, and configs/quick.yaml, which is made for the CPU; for a GPU that is there, "
                      "install NVIDIA's driver (on WSL2: in Windows only)")


def nvidia_smi():
    """"driver version, names" or ""."""
    program = shutil.which("nvidia-smi", path=os.environ.get("PATH", "") + ":/usr/lib/wsl/lib")
    if program is None:
        return ""
    command = [program, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "; ".join(done.stdout.split("\n")).strip("; ") if done.returncode == 0 else ""


def precision(dtypes, capability, native_bf16):
    """`dtypes`: those that the configuration asks for; `capability` (major, minor) of the GPU, None without one."""
    if capability is None:
        return Finding(OK, "precision", "float32 on the CPU, whatever amp.dtype says")
    number = ".".join(map(str, capability))
    if capability < (7, 0):
        return Finding(WARN, "precision", f"compute capability {number} has no tensor cores: fp16 is slow, bf16 is "
                       "emulated", "phase1.amp.dtype=off, likewise phase2 and phase3")
    if native_bf16:
        return Finding(OK, "precision", f"fp16 and bf16 in hardware (compute capability {number})")
    found = f"fp16 in hardware; bf16 only emulated on compute capability {number} (Turing), whatever PyTorch says"
    if "bf16" in dtypes:
        return Finding(WARN, "precision", found, "phase1.amp.dtype=fp16, likewise phase2 and phase3; "
                       "bf16 is replaced by fp16 here")
    return Finding(OK, "precision", found + ": use fp16")


def sockets():
    """SUMO is spoken to through a port of this machine, workers and ranks through sockets."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 5).close()
        for end in socket.socketpair():
            end.close()
    except OSError as error:
        return Finding(FAIL, "sockets", f"no connection within this machine: {error}",
                       "allow 127.0.0.1 in firewall or container; `ip link set lo up`")
    return Finding(OK, "sockets", "a port on 127.0.0.1 and a socket pair")


def meminfo(root="/"):
    """{"total", "available", "swap"} in GB: what the machine, or the container, has."""
    kb = numbers(Path(root) / "proc/meminfo")
    gb = {"total": kb["MemTotal"] / 2**20, "available": kb["MemAvailable"] / 2**20, "swap": kb["SwapTotal"] / 2**20}
    for used, limit in cgroup_memory(Path(root) / "sys/fs/cgroup", Path(root) / "proc/self/cgroup"):
        gb.update(total=min(gb["total"], limit / 1024), available=min(gb["available"], (limit - used) / 1024))
    return gb


def memory(gb, wsl):
    """Two findings from `meminfo`; `wsl`: this is WSL2."""
    found = f"{gb['total']:.1f} GB, {gb['available']:.1f} GB of it available"
    more = WSLCONFIG if wsl else "close other programs"
    if gb["available"] < 2:
        yield Finding(FAIL, "memory", found, f"the smallest runs need 2 GB: {more}")
    else:
        yield judged(gb["available"] >= 12, "memory", found, f"12 GB are planned for: {more}; or --config "
                     "configs/low_memory.yaml (8 GB) or configs/quick.yaml (2 GB)")
    yield judged(gb["swap"] >= 1, "swap", f"{gb['swap']:.1f} GB", "a short peak ends the run: " + (
        WSLCONFIG if wsl else "fallocate -l 8G /swapfile; chmod 600 /swapfile; mkswap /swapfile; swapon /swapfile"))


def space(path, need_gb, what, remedy, closed=WARN, free=None):
    """Free space where `path` is or will be; `closed`: what it is that nobody may write there; `free` in bytes, by
    default asked for."""
    here = Path(os.path.realpath(path))
    place = next(p for p in (here, *here.parents) if os.path.exists(p))  # may be closed
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Finding(closed, what, f"{place} is no folder that can be written to", f"name another {what}")
    gb = (shutil.disk_usage(place).free if free is None else free) / 2**30
    return judged(gb >= need_gb, what, f"{gb:.1f} GB free in {place}", remedy)


def open_files(limit=None):
    """Finding on the limit of open files, by default this process's."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return judged(limit >= 1024, "open files", f"{limit} at once", "ulimit -n 65536")


def wsl2(release=None):
    """(whether this is WSL2, findings) from the kernel's release."""
    release = platform.release() if release is None else release
    if "microsoft" not in release.lower():
        return False, []
    if "WSL2" not in release and "microsoft-standard" not in release:  # WSL1 ends in -Microsoft
        return False, [Finding(FAIL, "WSL", f"kernel {release} is WSL1: no GPU, slow files",
                               "`wsl --set-version <distribution> 2` in PowerShell")]
    return True, [Finding(OK, "WSL2", f"kernel {release}; it gets half of the host's memory unless told otherwise: "
                          f"{WSLCONFIG}")]


def processors(load=None):
    """Finding on processors and the machine's load, by default the present one."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0] if load is None else load
    usable = usable_cores()
    found = f"the time of {usable} of {cores}" if usable < cores else f"{cores}"
    return judged(load <= 0.5 * cores, "processors", f"{found}, load {load:.1f}", "others compute here too: what is "
                  "measured below is too slow; wait or stop them (`top`)")
