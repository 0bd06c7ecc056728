"""Phase 1's data over ranks: no sample lost or repeated when the number of ranks changes in the middle of an epoch, and
rows with NaN are a decision that all ranks take together.

A driver runs train_ddp.py unchanged, but notes which samples each optimiser step has used, and can end a run early with
the SIGTERM that a user would send. It forks its ranks, which so import PyTorch once (the optimisers' part of it too);
torchrun starts them where ranks end with an error, of which it hears and tells.
"""
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_sets import SAMPLES, graphs

from data.dataset import ChunkedDataset
from runtime.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import hashlib, os, signal, sys
import torch._dynamo
import train_ddp
from env.sumo import free_port

ranks, last, log, steps, others = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1), 0, []
if ranks > 1:
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(free_port()), RANK="0", LOCAL_RANK="0")
for rank in range(1, ranks):
    if not (pid := os.fork()):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        others = []
        break
    others.append(pid)
log = f"{log}.{os.environ.get('RANK', 0)}"
step, save = train_ddp.optimiser_step, train_ddp.Progress.save

def digest(tensor):
    return hashlib.sha1(tensor.contiguous().numpy().tobytes()).hexdigest()

def noted_step(module, micro_batches, *more):
    global steps
    steps += 1
    with open(log, "a") as file:
        file.writelines(f"{digest(row)}\\n" for batch, _ in micro_batches for row in batch["speed"])
    if steps == last:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(module, micro_batches, *more)

def noted_save(progress, *more, **options):
    with open(log, "a") as file:
        file.write("weights " + " ".join(digest(w) for w in progress.model.state_dict().values()) + "\\n")
    return save(progress, *more, **options)

train_ddp.optimiser_step, train_ddp.Progress.save = noted_step, noted_save
code = train_ddp.run_script(train_ddp.main, train_ddp.USER_ERRORS)
sys.exit(code or any([os.waitpid(pid, 0)[1] for pid in others]))
"""


@pytest.fixture
def train(copy, tmp_path):
    """train(ranks, last step or 0, run name, *overrides, torchrun=False) -> (finished process, each rank's notes)."""
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    calls = []

    def run(ranks, last, name, *overrides, torchrun=False):
        calls.append(name)
        log = tmp_path / f"log{len(calls)}"
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if torchrun else []
        forked = 1 if torchrun else ranks
        words = ["--phase", "1", "--config", "configs/smoke.yaml", f"data.folder={copy}", f"data.samples={SAMPLES}",
                 "data.samples_per_chunk=5", "run.threads=1", f"run.name={name}", "phase1.epochs=1",
                 "phase1.stage1_epochs=0", "phase1.batch_size=2", *overrides]
        done = subprocess.run([sys.executable, *launcher, str(driver), str(forked), str(last), str(log), *words],
                              cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        notes = [Path(f"{log}.{rank}") for rank in range(ranks)]
        return done, [path.read_text().splitlines() if path.exists() else [] for path in notes]
    return run


def samples_of(notes):
    return [line for rank in notes for line in rank if not line.startswith("weights")]


def test_no_sample_is_lost_or_repeated_from_two_ranks_to_one_to_three(copy, train):
    """2 ranks x 2 samples x 2 steps, 1 x 2 x 1, then 3 x 2: 10 samples were done, which is no multiple of 6. The third
    run went back to the sixth and used four samples twice."""
    dataset = ChunkedDataset(graphs(copy), "train")
    everything = {hashlib.sha1(dataset[row]["speed"][:10].numpy().tobytes()).hexdigest() for row in range(len(dataset))}
    seen, still = [], "phase1.augment.time_shift=0"
    for ranks, last, expected in ((2, 2, 8), (1, 1, 2), (3, 0, (len(dataset) - 10) // 6 * 6)):
        done, notes = train(ranks, last, "elastic", still)
        assert done.returncode == 0, done.stderr
        assert ("stopped and saved in epoch 1" in done.stdout) == (last > 0)
        assert len(samples_of(notes)) == expected and len({len(samples_of([rank])) for rank in notes}) == 1
        seen += samples_of(notes)
    assert len(set(seen)) == len(seen) and set(seen) <= everything and len(everything - set(seen)) < 6


def spoil(folder, rows):
    """NaN in some rows of the training split; returns how the product names them."""
    dataset, names = ChunkedDataset(folder, "train"), []
    for row in rows:
        path, _, place = dataset.where(row).partition(": row ")
        array = np.load(path)
        array["nodes"][int(place), :, 0, 3] = np.nan
        np.save(path, array)
        names.append(f"{path}: row {place}")
    return names


def test_all_ranks_leave_out_rows_with_nan(copy, train, tmp_path):
    """A NaN on one rank went through the all-reduce into every rank's weights."""
    names = spoil(graphs(copy), [3, 17])
    done, notes = train(2, 0, "skipping", "data.on_bad_row=skip", "phase1.epochs=2", "phase1.batch_size=1")
    assert done.returncode == 0, done.stderr
    assert sum("left out" in line for line in done.stdout.splitlines()) >= 2
    assert all(name in done.stdout for name in names) and "finished" in done.stdout
    assert [row["not_finite"] for row in read_metrics(tmp_path / "runs" / "skipping" / "metrics.jsonl")] == [2, 2]
    weights = [[line for line in rank if line.startswith("weights")] for rank in notes]
    assert len(weights[0]) == 2 and weights[0] == weights[1] and weights[0][0] != weights[0][1]
    assert "nan" not in done.stdout.lower().replace("left out, nan or infinite values", "")


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_stop_at_a_row_with_nan(copy, train, ranks):
    name, = spoil(graphs(copy), [5])
    done, notes = train(ranks, 0, "stopping", torchrun=ranks > 1)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and name in errors[0] and "data.on_bad_row=skip" in errors[0]
    assert done.returncode == 2 if ranks == 1 else done.returncode != 0
    assert len({len(rank) for rank in notes}) == 1  # nobody took a step more than the others


def test_row_with_nan_among_the_held_out_is_named_too(copy, train):
    path = ChunkedDataset(graphs(copy), "held_out").where(1).partition(": row ")[0]
    array = np.load(path)
    array["moved"][1, 20, 0] = np.inf
    np.save(path, array)
    done, _ = train(1, 0, "held-out")
    assert done.returncode == 2 and f"{path}: row 1" in done.stderr


def test_unequal_gpus_train_on_unequal_shares(copy, train):
    done, notes = train(2, 0, "unequal", "phase1.loader.rank_weights=[3, 1]", "phase1.batch_size=4")
    assert done.returncode == 0, done.stderr
    many, few = (len(samples_of([rank])) for rank in notes)
    assert many == 3 * few > 0
    weights = [[line for line in rank if line.startswith("weights")] for rank in notes]
    assert weights[0] == weights[1] != []
