"""Two nodes on one machine: phases 1, 2 and 3 under two torchrun launchers, which die or are asked to stop.

    python -m benchmarks.nodes --json nodes.json

Undisturbed first; then with the second launcher killed (SIGKILL) in the middle of each phase and started again; phase 1
also with the first one killed, which hosts the meeting point, and with SIGTERM to both, all started again. Weights and
optimisers must be those of the undisturbed run bit for bit, and nothing may live on of a launcher.
"""
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import writable
from benchmarks.drill_place import difference
from benchmarks.leftovers import marked_environment, survivors
from benchmarks.report import ROOT, finish, load_line
from configs import ConfigError
from configs.command_line import parse
from env.sumo import free_port
from runtime import checkpoint
from runtime.ending import run_script
from runtime.metrics import read_metrics

LONGER = ["run.threads=1", "phase1.epochs=6", "phase2.iterations=6", "phase3.epochs=6", "rollout.num_workers=1"]
COMPARED = ("weights", "optimizer", "counters")
WAYS = {1: ("second killed", "first killed", "SIGTERM to both"), 2: ("second killed",), 3: ("second killed",)}
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else a launcher that comes back is not told where rank 0 is
SCRIPT = {1: ["train_ddp.py", "--phase", "1"], 2: ["train_rl.py"], 3: ["train_ddp.py", "--phase", "3"]}


class Node:
    """A torchrun launcher with one rank."""

    def __init__(self, folder, port, log, words, host):
        self.command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
                        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={host}",
                        "--local-addr=127.0.0.1", "--max-restarts=2", str(ROOT / words[0]), *map(str, words[1:])]
        self.folder, self.log = folder, log
        self.word, self.environment = marked_environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="",
                                                         OMP_NUM_THREADS="1", **REJOIN)
        self.start()

    def start(self):
        with open(self.log, "a") as out:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=self.environment, stdout=out, stderr=out)

    def kill(self):
        """SIGKILL to the launcher alone; returns what of it lives on."""
        self.process.kill()
        self.process.wait()
        return survivors(self.word, 5.0)


def two_nodes(folder, name, words):
    """Both launchers; the first hosts the meeting point."""
    port = free_port()
    return [Node(folder, port, folder / f"{name}-node{number}.txt", words, number == 1) for number in (1, 2)]


def wait_for_checkpoint(folder, node):
    """Until a phase has saved for the first time, or the launcher has ended."""
    while node.process.poll() is None and not (folder / "latest").exists():
        time.sleep(0.02)


def disturb(pair, way):
    """Do to the pair what `way` says and start again who has ended; returns what lived on of them."""
    first, second = pair
    if way == "second killed":
        left = second.kill()
        second.start()
        return left
    if way == "first killed":
        left = first.kill()
        second.process.wait()  # it has lost the meeting point
    else:
        for node in pair:
            node.process.send_signal(signal.SIGTERM)
        for node in pair:
            node.process.wait()
        left = []
    left += survivors(first.word, 5.0) + survivors(second.word, 5.0)
    first.start(), second.start()
    return left


def train(options, place, name, phase, way=None):
    """One phase on two nodes. Returns its facts, and its newest checkpoint."""
    config = Path(options.config_file).resolve() if Path(options.config_file).exists() else options.config_file
    words = [*SCRIPT[phase], "--config", config, *LONGER, f"run.name={name}", *options.overrides]
    begun, pair, left = time.monotonic(), two_nodes(place, f"{name}-{phase}", words), []
    if way:
        wait_for_checkpoint(place / "runs" / name / f"phase{phase}", pair[0])
        left = disturb(pair, way)
    codes = [node.process.wait() for node in pair]
    left += survivors(pair[0].word) + survivors(pair[1].word)
    epochs = [row["epoch"] for row in read_metrics(place / "runs" / name / "metrics.jsonl") if row["phase"] == phase]
    text = pair[0].log.read_text() + pair[1].log.read_text()
    resumed = re.findall(r"resumed from .*\((epoch \d+, \d+ updates)\)", text)
    facts = {"phase": phase, "way": way or "undisturbed", "exit_codes": codes, "epochs": epochs, "left": left,
             "resumed": resumed, "seconds": time.monotonic() - begun}
    return facts, checkpoint.load(place / "runs" / name / f"phase{phase}")


def main():
    def add(parser):
        parser.add_argument("--json", type=writable, default="nodes.json", help="where the result goes")
        parser.set_defaults(config="configs/smoke.yaml")
    options, rows = parse(__doc__, add=add), []
    print(load_line(1), flush=True)
    with tempfile.TemporaryDirectory(prefix="nodes-") as place:
        for phase in (1, 2, 3):
            alone, expected = train(options, Path(place), "alone", phase)
            rows.append({**alone, "kept": alone["exit_codes"] == [0, 0] and not alone["left"]})
            show(rows[-1])
            for way in WAYS[phase]:
                facts, state = train(options, Path(place), way.replace(" ", "-"), phase, way)
                same = state is not None and all(difference(state[key], expected[key], key) is None for key in COMPARED)
                kept = same and not facts["left"] and all(facts[key] == alone[key] for key in ("exit_codes", "epochs"))
                rows.append({**facts, "equal": same, "kept": kept})
                show(rows[-1])
    finish(options.json, rows=rows)
    return 0 if all(row["kept"] for row in rows) else 1


def show(row):
    print(f"{'pass' if row['kept'] else 'FAIL'}  phase {row['phase']}, {row['way']}: exit codes {row['exit_codes']}, "
          f"{row['seconds']:.0f} s, continued from {'; '.join(row['resumed']) or 'the start'}, "
          f"{'equal bit for bit' if row.get('equal', True) else 'OTHER WEIGHTS'}, left: {row['left'] or 'nothing'}",
          flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main, (ConfigError,)))
