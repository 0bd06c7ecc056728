"""models/: sizes, padding and order of the vehicles, numeric range, the world model."""
import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from scenes import scene

from models.policy import PARTS, bucket, candidate_slots
from models.presets import PRESETS, Normalizer
from models.risk_gnn import INPUTS
from models.world_model import WorldModel

FP16_MAX = 65504.0
SMALL = PRESETS["small"]
# Parameters of each part at full size that are promised, in millions.
FULL_RANGES = {"risk_gnn": (2, 3), "world_model": (5, 8), "controller": (3, 5), "safety_shield": (1, 2),
               "total": (11, 18)}


def permuted(obs, order):
    """The same scene with old slot order[i] in slot i."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    out = {name: x if name == "globals" else x[:, order] for name, x in obs.items()}
    near = out["neighbours"]
    return {**out, "neighbours": torch.where(near < 0, -1, place[near.clamp(min=0)])}


def run(model, frames, wanted, lane, u):
    """Everything from observations to the policy's numbers. `wanted` [B, K] are the slots of the picked ICVs."""
    batch, slots = frames[0]["mask"].shape
    state = model.world_model.initial_state(batch, slots)
    for obs in frames:
        embedding = model.risk_gnn(*(obs[name] for name in INPUTS))
        memory, state = model.world_model.step(embedding, state, torch.zeros(batch, slots, dtype=torch.bool))
    flow, risk = model.world_model.latents(memory)
    speed = obs["nodes"][..., 2]
    seen = model.features(embedding, memory, obs["nodes"], obs["surround"], obs["globals"], obs["mask"], obs["icv"])
    picks = (seen["slots"][:, None] == wanted[..., None]).long().argmax(-1)  # slot -> place among the candidates
    assert (seen["slots"].gather(1, picks) == wanted).all()
    chosen = {"picks": picks, "valid": torch.ones_like(picks, dtype=torch.bool), "u": u, "lane": lane,
              "release": u > 0.8, "pace": u < 0.4}
    log_prob, entropy, _ = model.controller.evaluate(seen["candidates"], seen["valid"], seen["scene"], chosen)
    value, cost_value = model.controller.values(seen["scene"])
    world = model.world_model
    by_slot = {"embedding": embedding, "memory": memory, "states": world.predict_states(flow, speed),
               "next": world.predict_next(memory, speed), "conflict": world.predict_conflict(risk)}
    rest = {"log_prob": log_prob, "entropy": entropy, "value": value, "cost_value": cost_value, "scene": seen["scene"],
            "risk": seen["risk_logit"].gather(1, picks), "picked": seen["candidates"].gather(
                1, picks[..., None].expand(-1, -1, seen["candidates"].shape[-1]))}
    return by_slot, rest


def policy_inputs(vehicles):
    """Two frames of one scene in exactly as many slots as vehicles, picked slots, lanes and accelerations."""
    frames = [scene(vehicles, vehicles, seed) for seed in (1, 2)]
    frames[1]["icv"] = frames[0]["icv"]
    wanted = torch.tensor([[3, 0, 5, 1], [4, 2, 1, 0]])
    lane = torch.ones_like(wanted)
    return frames, wanted, lane, torch.linspace(-1, 1, 8).view(2, 4)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- sizes -------------------------------------------------------------------------------------------------------

def test_full_preset_keeps_the_promised_sizes(models):
    counts = models["full"].parameter_counts()
    assert set(counts) == set(FULL_RANGES)
    for part, (low, high) in FULL_RANGES.items():
        assert low * 1e6 <= counts[part] <= high * 1e6, (part, counts[part])


@pytest.mark.parametrize("preset", PRESETS)
def test_parts_make_up_the_whole_model(models, preset):
    counts = models[preset].parameter_counts()
    assert counts["total"] == sum(counts[part] for part in PARTS) == sum(p.numel() for p in models[preset].parameters())
    for part in counts:
        assert f"{part} " in models[preset].describe()
        assert counts[part] <= models["full"].parameter_counts()[part]


def test_freeze_trains_exactly_the_other_parts(models):
    model = copy.deepcopy(models["small"])
    for frozen in (("controller", "safety_shield"), ("risk_gnn",), ("risk_gnn", "world_model", "safety_shield")):
        model.freeze(*frozen)  # a second call forgets the first
        for part in PARTS:
            assert {p.requires_grad for p in getattr(model, part).parameters()} == {part not in frozen}


# ---- padding and order -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("slots, gather_above", [(23, 384), (40, 384), (40, 30), (40, 2)])
def test_padding_changes_nothing(small, slots, gather_above):
    """Also across the border between dense and gathered attention, which padding may cross."""
    frames, *policy = policy_inputs(18)
    expected = run(small, frames, *policy)
    more = [{name: x if name == "globals" else F.pad(
        x, (0, 0) * (x.dim() - 2) + (0, slots - 18), value=-1 if name == "neighbours" else 0)
        for name, x in obs.items()} for obs in frames]
    for obs in more:  # and more room for neighbours
        obs["neighbours"], obs["edges"] = F.pad(obs["neighbours"], (0, 3), value=-1), F.pad(obs["edges"], (0, 0, 0, 3))
    model = copy.deepcopy(small)
    model.risk_gnn.gather_above = gather_above
    by_slot, rest = run(model, more, *policy)
    for name, value in expected[0].items():
        close(by_slot[name][:, :18], value)
    for name, value in expected[1].items():
        close(rest[name], value)


def test_padding_may_hold_anything(small):
    """Slots outside the mask keep whatever was there: nobody may see it."""
    obs = scene(9, 16, 3)
    frames, policy = [obs], (torch.tensor([[3, 0], [4, 2]]), torch.ones(2, 2, dtype=torch.long), torch.zeros(2, 2))
    expected = run(small, frames, *policy)
    junk = {**obs, "nodes": obs["nodes"].clone(), "surround": obs["surround"].clone(), "edges": obs["edges"].clone()}
    for name in ("nodes", "surround", "edges"):
        junk[name][:, 9:] = 77.0
    by_slot, rest = run(small, [junk], *policy)
    close(by_slot["embedding"], expected[0]["embedding"])
    assert (by_slot["embedding"][:, 9:] == 0).all()
    for name, value in expected[1].items():
        close(rest[name], value)


def test_order_of_the_vehicles_does_not_matter(small):
    frames, wanted, lane, u = policy_inputs(18)
    expected = run(small, frames, wanted, lane, u)
    order = torch.randperm(18, generator=torch.Generator().manual_seed(7))
    place = torch.empty_like(order)
    place[order] = torch.arange(18)
    by_slot, rest = run(small, [permuted(obs, order) for obs in frames], place[wanted], lane, u)
    for name, value in expected[0].items():
        close(by_slot[name], value[:, order])
    for name, value in expected[1].items():
        close(rest[name], value)


def test_scenes_of_a_batch_do_not_meet(small):
    frames, wanted, lane, u = policy_inputs(18)
    both = run(small, frames, wanted, lane, u)
    alone = run(small, [{name: x[1:] for name, x in obs.items()} for obs in frames], wanted[1:], lane[1:], u[1:])
    for part in (0, 1):
        for name, value in alone[part].items():
            close(both[part][name][1:], value)


def test_candidates_are_packed_in_order():
    torch.manual_seed(0)
    icv = torch.rand(5, 37) < torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0])[:, None]
    slots, valid = candidate_slots(icv)
    assert slots.shape == (5, 37) and bucket(37) == 48  # never wider than the scene
    for row in range(5):
        assert slots[row][valid[row]].tolist() == icv[row].nonzero().flatten().tolist()
        assert int(valid[row].sum()) == int(icv[row].sum()) and not valid[row, int(icv[row].sum()):].any()
    assert candidate_slots(icv[:2])[0].shape == (2, 16)
    assert [bucket(n) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]


# ---- numeric range -----------------------------------------------------------------------------------------------

def extreme(kind):
    """The corners of what an environment may report."""
    obs = scene(20, 24, 9)
    node = {"high": [1, 10, 60, 5, 500, 1, 1, 1, 1.0], "low": [0, 0, 0, -5, 0, 0, 0, -1, -1.0]}[kind]
    edge = {"high": [200, 60, 20, 10.0], "low": [-200, -60, 0, 0.0]}[kind]
    fill = {"high": 500.0, "low": -200.0}[kind]
    here, real = obs["mask"][..., None], (obs["neighbours"] >= 0)[..., None]
    return {**obs, "nodes": torch.tensor(node) * here, "edges": torch.tensor(edge) * real,
            "surround": fill * here.expand_as(obs["surround"]).float(),
            "globals": torch.full_like(obs["globals"], fill)}


@pytest.mark.parametrize("kind", ["high", "low"])
@pytest.mark.parametrize("preset", PRESETS)
def test_extreme_features_stay_far_below_the_range_of_fp16(models, preset, kind):
    model, largest, obs = models[preset], [], extreme(kind)
    keep = lambda module, inputs, output: largest.append(output.detach().abs().max())  # noqa: E731
    leaves = [m for m in model.modules() if not list(m.children())]
    hooks = [m.register_forward_hook(keep) for m in leaves if not isinstance(m, nn.LSTMCell)]
    policy = torch.tensor([[3, 0], [4, 2]]), torch.ones(2, 2, dtype=torch.long), torch.full((2, 2), 0.5)
    try:
        with torch.no_grad():
            run(model, [obs] * 3, *policy)
            with torch.autocast("cpu", torch.bfloat16):
                half = run(model, [obs] * 3, *policy)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(largest) > 50 and max(largest) < FP16_MAX / 10  # a factor for weights that training makes larger
    assert all(torch.isfinite(x).all() for part in half for x in part.values())


def test_normalised_features_are_bounded():
    """Whatever a simulator reports, fp16 holds what follows."""
    normal = Normalizer([100.0, 0.0], [2.0, 1e-3])
    absurd = torch.tensor([[1e30, -1e30], [math.inf, -math.inf], [101.0, 0.002]])
    assert normal(absurd).tolist() == [[10.0, -10.0], [10.0, -10.0], [0.5, 2.0]]
    assert normal(absurd.half()).dtype == torch.float32


def test_memory_and_probabilities_stay_in_float32_under_autocast(small):
    model, inside = copy.deepcopy(small), []
    model.world_model.cells[0].register_forward_pre_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
    policy = torch.tensor([[3, 0], [4, 2]]), torch.ones(2, 2, dtype=torch.long), torch.zeros(2, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        by_slot, rest = run(model, [scene(9, 16, 3)], *policy)
    assert inside == [False]
    for name in ("memory", "states", "next", "conflict"):
        assert by_slot[name].dtype == torch.float32, name
    for name in ("log_prob", "entropy", "value", "cost_value", "risk", "scene", "picked"):
        assert rest[name].dtype == torch.float32, name


# ---- world model -------------------------------------------------------------------------------------------------

def tracks(model, steps=6, vehicles=5):
    torch.manual_seed(11)
    embedding = torch.randn(2, steps, vehicles, SMALL.gnn_width)
    fresh = torch.zeros(2, steps, vehicles, dtype=torch.bool)
    fresh[0, 3, 2] = True
    return embedding, fresh, 0.3 * torch.randn_like(model.initial_state(2, vehicles))


@pytest.mark.parametrize("layers", [1, 2])
def test_steps_equal_the_sequence(layers):
    model = WorldModel(SimpleNamespace(**{**vars(SMALL), "lstm_layers": layers}))
    embedding, fresh, state = tracks(model)
    memory = model.sequence(embedding, state, fresh)
    for t in range(embedding.shape[1]):
        one, state = model.step(embedding[:, t], state, fresh[:, t])
        torch.testing.assert_close(one, memory[:, t])


def test_fresh_forgets_one_vehicle_only():
    model = WorldModel(SMALL)
    embedding, fresh, state = tracks(model)
    memory = model.sequence(embedding, state, fresh)
    unbroken = model.sequence(embedding, state, torch.zeros_like(fresh))
    changed = (memory - unbroken).abs().amax(-1) > 1e-6
    expected = torch.zeros_like(fresh)
    expected[0, 3:, 2] = True
    assert torch.equal(changed, expected)
    alone = model.sequence(embedding[:1, 3:, 2:3], model.initial_state(1, 1), torch.zeros(1, 3, 1, dtype=torch.bool))
    close(memory[:1, 3:, 2:3], alone)


def test_memory_uses_the_past():
    model = WorldModel(SMALL)
    embedding, fresh, state = tracks(model)
    other = embedding.clone()
    other[:, 0] += 1.0
    difference = (model.sequence(embedding, state, fresh) - model.sequence(other, state, fresh)).abs().amax(-1)
    assert difference[1, -1].min() > 1e-5 and difference[0, -1, 2] == 0  # that one started anew in between


def test_checkpointing_gives_the_same_gradients():
    plain = WorldModel(SMALL)
    saving = copy.deepcopy(plain)
    embedding, fresh, state = tracks(plain)
    inputs = [embedding.clone().requires_grad_() for _ in range(2)]
    for model, x, on in ((plain, inputs[0], False), (saving, inputs[1], True)):
        model.sequence(x, state, fresh, checkpointing=on).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    for ours, theirs in zip(saving.cells.parameters(), plain.cells.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("interval", [0.5, 1.0])
def test_predictions_start_near_constant_velocity(interval):
    torch.manual_seed(0)
    model = WorldModel(SMALL, horizon=4, interval=interval)
    memory, speed = torch.tanh(torch.randn(3, 7, SMALL.lstm_width)), 30 * torch.rand(3, 7)
    flow, _ = model.latents(memory)
    following, states = model.predict_next(memory, speed), model.predict_states(flow, speed)
    assert states.shape == (3, 7, 4, 2)
    torch.testing.assert_close(following, torch.stack([speed * interval, speed], -1), rtol=0, atol=0.2)
    for h in range(4):
        expected = torch.stack([speed * interval * (h + 1), speed], -1)
        torch.testing.assert_close(states[..., h, :], expected, rtol=0, atol=0.2 * (h + 1))


def test_scene_holds_the_mean_over_the_vehicles(small):
    c, mask = small.controller, torch.arange(8) < 3
    parts = [torch.randn(8, n) for n in (c.d, *2 * [(c.scene_features - 2 * c.d - 16) // 2])]
    scene = c.scene_summary(*parts, mask, torch.zeros(16))
    torch.testing.assert_close(scene[:-16 - c.d], torch.cat([x[:3].mean(0) for x in parts]))
