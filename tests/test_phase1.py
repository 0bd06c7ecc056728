"""Phase 1 in this process, on the small data set: what becomes of a run that goes on under other circumstances."""
from types import SimpleNamespace

import pytest
import torch
from data_sets import config

import train_ddp
from runtime.distributed import Team
from runtime.schedule import learning_rate

ALONE = Team(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def train(recorded, tmp_path, monkeypatch):
    """train(*overrides, stop=after so many optimiser steps) -> the learning rate of each step."""
    def run(*overrides, stop=None, folder=recorded):
        rates, small = [], ["run.device=cpu", "phase1.loader.num_workers=0", f"run.folder={tmp_path / 'runs'}"]
        monkeypatch.setattr(train_ddp, "set_learning_rate", lambda _, rate: rates.append(rate))
        guard = SimpleNamespace(must_stop=lambda: len(rates) == stop, leave=lambda where: 0, facts=dict)
        train_ddp.phase1(config(folder, *small, *overrides), ALONE, guard)
        return rates
    return run


def test_learning_rate_goes_on_where_it_was_with_another_batch_size(train):
    """Its step was the number of updates, done in smaller batches, of a total counted in the larger ones: a run
    that went on with more ranks trained the rest at the lowest rate."""
    expected = [learning_rate(step, 4 * 5, 0.01, 7) for step in range(4 * 5)]
    settings = ["phase1.epochs=4", "phase1.lr=0.01", "phase1.warmup_steps=7"]
    assert train("run.name=whole", *settings, "phase1.batch_size=4") == expected
    assert len(train(*settings, "phase1.batch_size=2", stop=11 + 4)) == 15  # an epoch and 8 samples
    assert train(*settings, "phase1.batch_size=4", stop=1) == expected[5 + 2:5 + 3]
    assert train(*settings, "phase1.batch_size=4") == expected[5 + 3:]
