"""Several nodes: folders that they share, ranks that end with their launcher, and a node that dies and comes back."""
import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from data_sets import SAMPLES
from torch.distributed import TCPStore

from benchmarks.nodes import ROOT, two_nodes, wait_for_checkpoint
from configs import Config, ConfigError, load_config
from data.layout import DataError
from data.location import open_data
from runtime import checkpoint
from runtime.distributed import Team, attempts_store, check_shared
from runtime.ending import first_to_speak
from runtime.metrics import read_metrics
from runtime.training import Progress


class SecondNode(Team):
    """Rank 1 of two nodes; `gather` gives what rank 0 says before what this rank says."""

    def __init__(self, said):
        super().__init__(1, 2, 0, 1, torch.device("cpu"))
        self.said = said

    def gather(self, value):
        return [self.said.pop(0), value]

    def barrier(self):
        pass

    def any(self, flag):
        return True  # the first rank has done its part


def test_folder_that_the_nodes_do_not_share_is_refused(tmp_path):
    """The second node would have continued from other checkpoints than the first, or from none."""
    (tmp_path / ".shared-word").touch()
    check_shared(tmp_path, SecondNode(["word", ("here", True)]))
    with pytest.raises(ConfigError, match=f"{tmp_path}: not the same folder on every node"):
        check_shared(tmp_path, SecondNode(["another", ("here", True)]))
    check_shared(tmp_path, Team(1, 2, 1, 2, torch.device("cpu")))  # one node: nobody is asked


def test_data_that_a_node_does_not_see_are_refused(tmp_path):
    """Only the first rank's message was shown, and it had none: such a node ended without a word."""
    cfg = load_config("configs/smoke.yaml", [f"data.folder={tmp_path}"])
    with pytest.raises(DataError, match=f"{tmp_path}/raw/metadata.json: not to be seen on {socket.gethostname()};"):
        open_data(cfg, SecondNode([("first", True)]))


def test_ranks_never_continue_from_different_checkpoints(tmp_path):
    """A network file system may show a node an older moment: it would do other numbers of steps, and hang the rest."""
    progress = Progress(Config(), SecondNode([12]), tmp_path, None, None, None)  # here there is none
    with pytest.raises(checkpoint.CheckpointError, match=r"ranks see different checkpoints \(updates \[12, None\]\)"):
        progress.resume()


def test_one_rank_of_a_node_speaks_for_all_in_each_attempt(tmp_path, monkeypatch):
    """Only rank 0 spoke: a mistake that another rank, or another node, alone could see ended without a word."""
    heard = []
    for attempt, rank in ((0, 1), (0, 0), (0, 1), (1, 0)):
        folder = tmp_path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        heard.append(first_to_speak())
    assert heard == [True, False, False, True]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert first_to_speak()


RANK_THAT_FAILS = """
import sys, time
import torch.distributed as dist
from configs import Config
from runtime.distributed import start_team
from runtime.ending import run_script

dist.destroy_process_group = lambda: time.sleep(600)  # NCCL's waits for ranks that are somewhere else

def main():
    cfg = Config()
    cfg.run.device = "cpu"
    with start_team(cfg.run, cfg.ddp) as team:
        if team.rank == 1:
            raise {"MemoryError": MemoryError, "OSError": OSError}[sys.argv[1]]
        team.barrier()

sys.exit(run_script(main, ()))
"""


@pytest.mark.parametrize("error, code", [("MemoryError", "4"), ("OSError", "1")])
def test_error_of_one_rank_is_told_before_the_process_group_is_left(tmp_path, error, code):
    """It was told afterwards: with NCCL, which waits there for all ranks, after half an hour or never; and the
    coordinator did not hear that memory was wanting. torchrun's summary had a traceback of every rank for what one
    message tells too."""
    (tmp_path / "fails.py").write_text(RANK_THAT_FAILS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "EXIT_CODE_FILE": str(tmp_path / "code")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "fails.py", error]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and (tmp_path / "code").read_text() == code
    assert ("error: out of memory; memory.split=2" in done.stderr) == (code == "4")
    summary = done.stderr[done.stderr.rindex("ChildFailedError"):]
    assert ("in main" in summary) == ("in main" in summary[summary.index("Root Cause"):]) == (code == "1")


def test_rank_whose_launcher_has_died_while_it_was_starting_leaves():
    """PyTorch's import takes seconds, after which the kernel would not tell any more: such a rank lived on, held the
    run folder's lock and waited for its peers."""
    code = ("import os, signal, sys; sys.path.insert(0, {!r}); from env.launch import die_with_launcher; {}"
            "die_with_launcher(); print('alive')")
    kill = "os.kill(os.getppid(), signal.SIGKILL); __import__('time').sleep(0.3); "
    for early, word, expected in (("", "TORCHELASTIC_RUN_ID", "alive\n"), (kill, "TORCHELASTIC_RUN_ID", ""),
                                  (kill, "OTHER", "alive\n")):
        launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code.format(str(ROOT), early)!r}])"
        done = subprocess.run([sys.executable, "-c", launcher], env={word: "1"}, stdout=subprocess.PIPE, text=True)
        assert done.stdout == expected


def test_node_that_dies_comes_back_and_training_continues(recorded, tmp_path):
    """Two launchers with one rank each; the second is killed, its rank goes with it, and both end as if nothing had
    happened. Killed launchers left ranks behind that trained on."""
    words = ["train_ddp.py", "--phase", "1", "--config", "configs/smoke.yaml", f"data.folder={recorded}",
             f"data.samples={SAMPLES}", "data.samples_per_chunk=5", "run.threads=1", "phase1.epochs=12"]
    pair, run = two_nodes(tmp_path, "pair", words), tmp_path / "runs" / "smoke"
    try:
        wait_for_checkpoint(run / "phase1", pair[0])
        assert pair[1].kill() == []
        pair[1].start()
        assert [node.process.wait(120) for node in pair] == [0, 0], pair[0].log.read_text()
    finally:
        left = [node.kill() for node in pair]
    assert left == [[], []]
    said = "".join(node.log.read_text() for node in pair)
    assert said.count("phase 1 finished") == 1 and "resumed from" in said  # one rank speaks for both
    assert [row["epoch"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, 13))
    state = checkpoint.load(run / "phase1")
    assert state["epoch"] == 12 and len(state["ranks"]) == 2 and state["counters"]["updates"] == 12 * (22 // 8)
    assert all(torch.isfinite(value).all() for value in state["weights"]["model"].values())


def test_a_restart_below_one_launcher_meets_nobody_of_the_attempt_before(monkeypatch):
    """torchrun's store outlives its restarts: ranks found the addresses of dead ones there, and hung or ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
                        "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    for attempt, there in (("0", False), ("1", False), ("0", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        found = attempts_store(1, 2, timedelta(seconds=10))
        assert found.check(["address"]) == there
        found.set("address", "of a rank")
