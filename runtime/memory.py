"""Memory of a process tree as PSS (shared pages count once, however many processes map them), and what limits it."""
import os
import re
import threading
from collections import Counter
from pathlib import Path

from runtime.resources import control_groups

NO_LIMIT = 2 ** 60  # bytes; what the old kind of control group says where there is none is above it


def numbers(path):
    """{first word: number behind it} of the lines of a file like /proc/meminfo; {} where it cannot be read."""
    try:
        text = Path(path).read_text()
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(r"^(\S+?):?[ \t]+(\d+)\b", text, re.M)}


def process_tree(root=None):
    """Ids of `root` (this process by default) and all its descendants."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    tree, todo = [], [root or os.getpid()]
    while todo:
        tree.append(todo.pop())
        todo += children.get(tree[-1], [])
    return tree


def tree_root():
    """The outermost process of this run: the one that named itself in MEMORY_ROOT, else torchrun, else this one."""
    root = os.environ.get("MEMORY_ROOT", "")
    if root.isdigit() and os.getpid() in process_tree(int(root)):
        return int(root)
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()


def proportional_mb(pid):
    """(PSS, the part of it that is no page of a file) of one process, MB; zeros when it has gone.

    Pages of files come and go with the page cache: reading a large data set would look like a leak.
    """
    kb = numbers(f"/proc/{pid}/smaps_rollup")
    total = kb.get("Pss", 0)  # there is nothing to read of a process that has ended but was not waited for
    return total / 1024, (total - kb.get("Pss_File", 0)) / 1024


def pss_mb(pid):
    """Proportional set size of one process, MB; 0 when it has gone."""
    return proportional_mb(pid)[0]


def component(pid):
    """What a process is, from its command line: simulator, rollout worker, or the script's name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "gone"
    if words[0].endswith("/sumo"):
        return "sumo"
    if "env.worker" in words:
        return "rollout worker"
    if {"torch.distributed.run", "runtime.ranks"} & {*words} or Path(words[min(1, len(words) - 1)]).name == "torchrun":
        return "torchrun"
    scripts = [Path(w).stem for w in words[1:] if w.endswith(".py")]
    modules = [words[i + 1] for i, w in enumerate(words[:-1]) if w == "-m"]
    return (scripts or modules or [Path(words[0]).name or "other"])[0]


def tree_memory(root=None):
    """{component: MB} of a process tree."""
    table = Counter()
    for pid in process_tree(root):
        table[component(pid)] += pss_mb(pid)
    return table


def machine_memory():
    """(MB that somebody needs, all MB) of this machine; what the kernel can free at once is not needed."""
    kb = numbers("/proc/meminfo")
    return (kb["MemTotal"] - kb["MemAvailable"]) / 1024, kb["MemTotal"] / 1024


def cgroup_memory(root="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """[(MB used without pages of files, limit in MB)] of the control groups of this process that have a limit, the
    old and the new kind."""
    found = []
    for folder, old in control_groups("memory", root, own):
        limit, uses = (("memory.limit_in_bytes", ("total_rss", "total_shmem")) if old else
                       ("memory.max", ("anon", "shmem")))
        try:
            most = int((folder / limit).read_text())  # the new kind says "max" where there is none
        except (OSError, ValueError):
            most = NO_LIMIT
        stat = numbers(folder / "memory.stat")
        if stat and most < NO_LIMIT:
            found.append((sum(stat.get(name, 0) for name in uses) / 2 ** 20, most / 2 ** 20))
    return found


def tightest(budgets):
    """(share, MB used, MB allowed, whose limit) of the limit that is nearest: one of `budgets` [(MB used, MB allowed,
    name)], a control group's, or the machine's."""
    limits = [*budgets, (*machine_memory(), "the machine's memory"),
              *((*group, "the control group's limit") for group in cgroup_memory())]
    return max((used / most, used, most, name) for used, most, name in limits)


def oom_kills():
    """How many processes the kernel has killed for want of memory so far; 0 where it does not say."""
    return numbers("/proc/vmstat").get("oom_kill", 0)


class Sampler(threading.Thread):
    """Calls `sample` in the background, at once and every `every_s` seconds, until `done` is set."""

    def __init__(self, every_s):
        super().__init__(daemon=True)
        self.every_s, self.done = every_s, threading.Event()

    def run(self):
        """The thread's work: sample until `end`."""
        self.sample()
        while not self.done.wait(self.every_s):
            self.sample()

    def end(self):
        """Stop sampling and wait until it has."""
        self.done.set()
        if self.is_alive():
            self.join()


class PeakMemory(Sampler):
    """Samples the tree of this process in the background; `at_peak` {component: MB} is the largest table seen."""

    def __init__(self, every_s=2.0):
        super().__init__(every_s)
        self.at_peak = Counter()

    def sample(self):
        """Remember the table of the present if it is the largest."""
        self.at_peak = max(self.at_peak, tree_memory(), key=Counter.total)

    def stop(self):
        """Stop sampling; returns the peak as one line of text."""
        self.done.set()
        parts = ", ".join(f"{name} {mb:.0f}" for name, mb in self.at_peak.most_common() if mb >= 1)
        return f"peak memory of the process tree (PSS): {self.at_peak.total():.0f} MB ({parts})"
