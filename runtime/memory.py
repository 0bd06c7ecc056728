"""Memory of a process tree as PSS: shared pages count once, however many processes map them."""
import os
import threading
from pathlib import Path


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


def pss_mb(pid):
    """Proportional set size of one process, MB; 0 when it has gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


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
    scripts = [Path(w).stem for w in words[1:] if w.endswith(".py")]
    modules = [words[i + 1] for i, w in enumerate(words[:-1]) if w == "-m"]
    return (scripts or modules or [Path(words[0]).name or "other"])[0]


def tree_memory(root=None):
    """{component: MB} of a process tree."""
    table = {}
    for pid in process_tree(root):
        name = component(pid)
        table[name] = table.get(name, 0.0) + pss_mb(pid)
    return table


class PeakMemory(threading.Thread):
    """Samples the tree of this process in the background; `peak` MB and its table `at_peak` {component: MB}."""

    def __init__(self, every_s=2.0):
        super().__init__(daemon=True)
        self.every_s, self.peak, self.at_peak, self.done = every_s, 0.0, {}, threading.Event()

    def run(self):
        """The thread's work: sample until `stop`."""
        self._sample()
        while not self.done.wait(self.every_s):
            self._sample()

    def _sample(self):
        table = tree_memory()
        if sum(table.values()) > self.peak:
            self.peak, self.at_peak = sum(table.values()), table

    def stop(self):
        """Stop sampling; returns the peak as one line of text."""
        self.done.set()
        by_size = sorted(self.at_peak.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {mb:.0f}" for name, mb in by_size if mb >= 1)
        return f"peak memory of the process tree (PSS): {self.peak:.0f} MB ({parts})"
