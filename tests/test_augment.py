"""data/augment.py: what each augmentation changes and what it must not; only seed, epoch and row count.

The data set is random noise, so that any value in a wrong place shows.
"""
import numpy as np
import pytest
import torch
from data_sets import make_data_set

from configs.phases import AugmentConfig
from data.augment import AugmentedDataset, jitter_position, normal, random_numbers
from data.dataset import BlockSampler, ChunkedDataset
from env.graph import EDGE, NODE, SURROUND
from models.losses import prepare

N, ROWS = 6, 200  # vehicles, training rows
TARGETS = ("moved", "speed", "present", "conflict", "usable", "extent", "row", "bad")
OFF = dict(time_shift=0, speed_noise=0.0, position_jitter=0.0, edge_dropout=0.0, node_mask=0.0)
SPEED, RELATIVE = NODE.index("speed"), EDGE.index("relative_speed")
POSITION, LANE_END = NODE.index("position"), NODE.index("lane_end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_data_set(tmp_path_factory.mktemp("noise") / "made", N, (50, 50, 50, 50, 7), 10,
                         np.random.default_rng(0))


@pytest.fixture
def plain(folder):
    return ChunkedDataset(folder, "train")


def augmented(dataset, seed=1, **on):
    return AugmentedDataset(dataset, AugmentConfig(**{**OFF, **on}), seed)


def same(first, second, names):
    return [name for name in names if torch.equal(first[name], second[name])] == list(names)


def whole(dataset, epoch=0):
    return dataset.__getitems__((epoch, list(range(ROWS))))


# ---- what each one touches -------------------------------------------------------------------------------------

def test_everything_off_changes_nothing(plain):
    before = plain.__getitems__(range(ROWS))
    assert same(whole(augmented(plain)), before, list(before))


def test_time_shift_moves_the_whole_window(plain):
    """Targets and inputs are those of another moment of the same recording, all 21 moments equally often."""
    batch = whole(augmented(plain, time_shift=10))
    start = batch["speed"][:, 0, 0].long()  # the synthetic speed is the number of the frame
    assert set(start.tolist()) == set(range(21)) and torch.bincount(start).max() < 25
    direct = plain.read(range(ROWS), start.numpy())
    assert same(batch, direct, list(direct))
    few = whole(augmented(plain, time_shift=1))["speed"][:, 0, 0]
    assert set(few.tolist()) == {9, 10, 11}


def test_speed_noise_is_seen_by_nodes_and_edges_alike(plain):
    before, batch = plain.__getitems__(range(ROWS)), whole(augmented(plain, speed_noise=0.1))
    assert same(batch, before, [*TARGETS, "neighbours", "fresh", "globals"])
    noise = batch["nodes"][..., SPEED] - before["nodes"][..., SPEED]
    here = before["present"][:, :2]
    assert (noise[~here] == 0).all() and 0.09 < noise[here].std() < 0.11 and abs(noise[here].mean()) < 0.01
    assert (batch["nodes"][..., SPEED] >= 0).all()
    other = torch.arange(len(NODE)) != SPEED
    assert torch.equal(batch["nodes"][..., other], before["nodes"][..., other])
    near, change = before["neighbours"].long(), batch["edges"] - before["edges"]
    assert change[..., torch.arange(len(EDGE)) != RELATIVE].abs().max() == 0
    for b, t, v, k in np.ndindex(20, 2, N, 2):
        who = near[b, t, v, k]
        assert float(change[b, t, v, k, RELATIVE]) == pytest.approx(
            float(noise[b, t, who] - noise[b, t, v]) if who >= 0 else 0, abs=1e-6)


def test_position_jitter_is_one_offset_for_a_sample(plain):
    before, batch = plain.__getitems__(range(ROWS)), whole(augmented(plain, position_jitter=5.0))
    assert same(batch, before, [*TARGETS, "neighbours", "edges", "fresh", "globals"])
    here, change = before["present"][:, :2], batch["nodes"] - before["nodes"]
    others = [i for i in range(len(NODE)) if i not in (POSITION, LANE_END)]
    assert change[..., others].abs().max() == 0 and change[~here].abs().max() == 0
    metres = change[..., POSITION] * 1000  # extent
    offset = torch.stack([row[mask][0] for row, mask in zip(metres, here)])
    assert torch.allclose(metres[here], offset[:, None, None].expand_as(metres)[here], atol=1e-3)
    assert -5 <= offset.min() < -4.5 and 4.5 < offset.max() <= 5
    end = (before["nodes"][..., LANE_END] - offset[:, None, None]).clamp(min=0)
    assert torch.allclose(batch["nodes"][..., LANE_END][here], end[here], atol=1e-3)


def test_position_jitter_moves_merges_with_the_ends_of_lanes(plain):
    """On a lane that ends at a merge both say how far that is; jitter moved one, and they differed by up to 5 m."""
    batch, merge = plain.__getitems__([0, 1]), SURROUND.index("merge_distance")
    batch["nodes"][..., LANE_END], batch["surround"][..., merge] = 80.0, 80.0
    batch["surround"][0, 0, 0, merge] = 500.0  # no merge in sight
    before = batch["surround"].clone()
    jitter_position(batch, torch.tensor([[5.0], [-3.0]]))
    here, now = batch["present"][:, :2], batch["surround"]
    assert now[0, 0, 0, merge] == 500 and (now[..., merge] != before[..., merge]).any()
    joins = here & (now[..., merge] < 500)
    assert torch.equal(now[..., merge][joins], batch["nodes"][..., LANE_END][joins])
    others = [i for i in range(len(SURROUND)) if i != merge]
    assert torch.equal(now[..., others], before[..., others])


def test_an_end_of_lane_out_of_sight_stays_out_of_sight(plain):
    batch = plain.__getitems__([0, 1])
    batch["nodes"][..., LANE_END], batch["nodes"][..., POSITION] = 500, 0.999
    jitter_position(batch, torch.tensor([[5.0], [-5.0]]))
    here = batch["present"][:, :2]
    assert (batch["nodes"][..., LANE_END] == 500).all()
    assert set(batch["nodes"][0, ..., POSITION][here[0]].tolist()) == {1.0}  # never beyond the road


def test_edge_dropout_leaves_out_a_tenth_of_the_edges(plain):
    before, batch = plain.__getitems__(range(ROWS)), whole(augmented(plain, edge_dropout=0.1))
    assert same(batch, before, [*TARGETS, "nodes", "fresh", "globals"])
    had, gone = before["neighbours"] >= 0, batch["neighbours"] < 0
    assert 0.08 < float(gone[had].float().mean()) < 0.12 and gone[~had].all()
    assert (batch["edges"][gone] == 0).all() and torch.equal(batch["edges"][~gone], before["edges"][~gone])
    assert torch.equal(batch["neighbours"][~gone], before["neighbours"][~gone])


def test_masked_node_is_hidden_but_still_a_target(plain):
    before, batch = plain.__getitems__(range(ROWS)), whole(augmented(plain, node_mask=0.05))
    assert same(batch, before, [*TARGETS, "neighbours", "edges", "fresh", "globals"])
    hidden, here = (batch["nodes"] == 0.25).all(-1), before["present"][:, :2]  # 0.25: the data set's means
    assert not hidden[~here].any() and 0.03 < float(hidden[here].float().mean()) < 0.07
    assert torch.equal(batch["nodes"][~hidden], before["nodes"][~hidden])
    wanted, given = prepare(before, 1), prepare(batch, 1)
    assert all(torch.equal(wanted[name], given[name]) for name in wanted if name != "nodes")
    assert given["target_valid"][hidden].any()


def test_all_together_never_touch_a_target(plain):
    """The loss must see the motion of the shifted window, whatever the inputs look like."""
    batch = whole(AugmentedDataset(plain, AugmentConfig(), 1))
    direct = plain.read(range(ROWS), batch["speed"][:, 0, 0].numpy())
    wanted, given = prepare(direct, 1), prepare(batch, 1)
    assert all(torch.equal(wanted[name], given[name])
               for name in ("states", "conflicts", "target_valid", "mask", "fresh", "speed"))
    assert all(not torch.equal(wanted[name], given[name]) for name in ("nodes", "edges", "neighbours"))


# ---- what it depends on ----------------------------------------------------------------------------------------

def test_numbers_are_uniform_and_normal():
    numbers = random_numbers(3, 1, range(50), 2000)
    assert 0 <= numbers.min() and numbers.max() < 1 and abs(numbers.mean() - 0.5) < 0.005
    bell = normal(torch.from_numpy(numbers))
    assert torch.isfinite(bell).all() and abs(float(bell.std()) - 1) < 0.01 and abs(float(bell.mean())) < 0.01
    assert len({tuple(row) for row in numbers}) == 50
    assert np.isfinite(normal(torch.tensor([0.0, 1 - 2 ** -24])).numpy()).all()


def test_sample_looks_the_same_however_it_is_reached(plain):
    """World size, batch size, position and resuming change nothing; seed and epoch change everything."""
    dataset = AugmentedDataset(plain, AugmentConfig(), 1)

    def epoch_of(world, batch, seed=1, epoch=3, done=0):
        seen = {}
        for rank in range(world):
            sampler = BlockSampler(plain.sizes, batch, rank, world, seed=9)
            sampler.epoch, sampler.done = epoch, done
            for key in sampler:
                samples = AugmentedDataset(plain, AugmentConfig(), seed).__getitems__(key)
                seen.update({row: [samples[name][i] for name in samples] for i, row in enumerate(key[1])})
        return seen
    alone = epoch_of(1, 8)
    for other in (epoch_of(2, 4), epoch_of(3, 5, done=95), epoch_of(1, 40)):
        assert other and all(torch.equal(a, b) for row in other for a, b in zip(alone[row], other[row]))
    for other in (epoch_of(1, 8, epoch=4), epoch_of(1, 8, seed=2)):
        equal = [all(torch.equal(a, b) for a, b in zip(alone[row], other[row])) for row in other]
        assert not any(equal)
    assert len(dataset) == ROWS and dataset.where(60) == plain.where(60)


def test_bad_rows_stay_marked_and_empty(plain, folder, tmp_path):
    made = make_data_set(tmp_path / "bad", N, (5, 2), 10, np.random.default_rng(0))
    array = np.load(made / "chunk_000.npy")
    array["edges"][2] = np.nan
    np.save(made / "chunk_000.npy", array)
    batch = AugmentedDataset(ChunkedDataset(made, "train"), AugmentConfig(), 1).__getitems__((0, [1, 2, 3]))
    assert batch["bad"].tolist() == [False, True, False]
    assert all((batch[name][1] == 0).all() for name in ("nodes", "edges", "present", "moved"))
    assert all(torch.isfinite(batch[name]).all() for name in ("nodes", "edges"))
