"""runtime/storage.py: rollouts without padding, minibatches from them, and spilling to a file."""
import os

import numpy as np
import pytest
import torch

from runtime.storage import STEP, Minibatches, Rollout, Rows, SpillError

T, E, F = 7, 3, 5


def counts(t, env):
    """Candidates of a step: none in many, more than everywhere else in one."""
    return 40 if (t, env) == (4, 1) else max(0, (3 * t + 5 * env) % 9 - 3)


def feature(t, env, row):
    return np.arange(F, dtype=np.float16) + 1 + 100 * t + 30 * env + row


def filled(folder=None, spill_mb=0, big=1):
    """A rollout whose numbers say where they belong; groups of environments arrive in turns, as in the Collector."""
    rollout = Rollout(T, E, folder, spill_mb)
    for t in range(T):
        for envs in ([0, 2], [1]):
            many = np.array([counts(t, env) for env in envs])
            rows = np.full((len(envs), 48, F * big), 777, np.float16)  # what lies beyond the count is no row
            for i, env in enumerate(envs):
                for row in range(many[i]):
                    rows[i, row] = np.tile(feature(t, env, row), big)
            rollout.append(t, envs, {"candidates": rows}, many)
            rollout.put(t, envs, {"scene": np.array([[t, env] for env in envs], np.float16)})
            if t % 3 == 0:
                rollout.append(t, envs, {"before": rows[:, :, :1]}, many)
    return rollout


def open_files(folder):
    """What this process has open in `folder`."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.islink(link) and os.readlink(link).startswith(str(folder))]


# ---- rows --------------------------------------------------------------------------------------------------------

def test_rows_grow_and_stay():
    rows, kept = Rows((3,), np.float32), []
    for n in (2, 0, 1, STEP // 12, 5, STEP // 2):
        kept.append(np.random.default_rng(n).random((n, 3), np.float32))
        assert rows.append(kept[-1]) == sum(map(len, kept[:-1]))
    assert np.array_equal(rows.array(), np.concatenate(kept)) and rows.bytes == sum(map(len, kept)) * 12
    assert len(rows.map) < 2 * rows.bytes


def test_full_disk_is_one_clear_message(tmp_path, monkeypatch):
    """A map of a file on a full disk kills the process when it is written to: room is claimed before."""
    rows = Rows((3,), np.float32)
    rows.append(np.ones((10, 3)))
    rows.spill(tmp_path)

    def full(descriptor, begin, size):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpillError, match=rf"{tmp_path}.*no room.*No space left on device.*phase2.spill_mb"):
        rows.append(np.ones((STEP, 3)))


# ---- rollout -----------------------------------------------------------------------------------------------------

def test_tables_hold_what_occurred_and_nothing_else():
    rollout, total = filled(), sum(counts(t, env) for t in range(T) for env in range(E))
    assert rollout.tables["candidates"].used == total + 1 and rollout.tables["candidates"].bytes == (total + 1) * F * 2
    assert not (rollout.tables["candidates"].array() == 777).any()


def test_padded_tables_and_what_every_step_has():
    rollout = filled()
    dense = rollout.dense()
    assert set(dense) == {"candidates", "scene", "before"} and dense["candidates"].shape == (T, E, 40, F)
    for t in range(T):
        for env in range(E):
            assert dense["scene"][t, env].tolist() == [t, env]
            for row in range(40):
                expected = feature(t, env, row) if row < counts(t, env) else np.zeros(F)
                assert (dense["candidates"][t, env, row].numpy() == expected).all()
    most = max(counts(t, env) for t in (0, 3, 6) for env in range(E))
    assert torch.equal(dense["before"], dense["candidates"][::3, :, :most, :1])


def test_steps_without_any_row_keep_their_place():
    """At the start of an episode nobody is on the road: the step once vanished from the padded table."""
    rollout = Rollout(2, 2)
    for t, many in enumerate(([0, 0], [2, 1])):
        rollout.append(t, [0, 1], {"mask": np.ones((2, 2, 1), np.float16)}, np.array(many))
    assert rollout["mask"][..., 0].tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 0]]]


# ---- minibatches -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("steps", [[], [0], [13, 2, 13], [0, 1, 2, 3, 20, 19, 5, 4]])
def test_minibatch_holds_its_steps_candidates_as_rows(steps):
    batch = Minibatches(filled(), ("scene",), torch.device("cpu"))(np.array(steps, int))
    rows, place = batch["candidates"], batch["place"]
    assert len(rows) == 1 + sum(counts(*divmod(step, E)) for step in steps) and (rows[0] == 0).all()
    assert place.shape == (len(steps), max([counts(*divmod(step, E)) for step in steps] + [1]))
    assert sorted(place[place > 0].tolist()) == list(range(1, len(rows)))
    assert batch["scene"].tolist() == [list(divmod(step, E)) for step in steps]
    for b, step in enumerate(steps):
        t, env = divmod(step, E)
        assert (place[b] > 0).tolist() == [c < counts(t, env) for c in range(place.shape[1])]
        for c in range(counts(t, env)):
            assert (rows[place[b, c]].numpy() == feature(t, env, c)).all()


# ---- spilling ----------------------------------------------------------------------------------------------------

def test_spilled_rollout_is_the_same(tmp_path):
    """Results do not depend on it, the file has no name, and is gone with the rollout."""
    here, there = filled(big=2000), filled(tmp_path, 1, big=2000)
    assert not here.spilled and there.spilled and there.tables["candidates"].bytes > 2 ** 20
    assert list(tmp_path.iterdir()) == [] and len(open_files(tmp_path)) == 4  # two tables: a file and its map each
    for name, value in here.dense().items():
        assert torch.equal(value, there[name]), name
    steps = np.array([3, 13, 20])
    ours, theirs = (Minibatches(r, ("scene",), torch.device("cpu"))(steps) for r in (here, there))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    del there, theirs
    assert open_files(tmp_path) == []


def test_rollout_below_the_limit_stays_in_memory(tmp_path):
    assert not filled(tmp_path, 100, big=2000).spilled and not filled(tmp_path, 0, big=2000).spilled
    assert open_files(tmp_path) == []
