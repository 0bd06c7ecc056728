"""models/: sizes, padding and order of the vehicles, attention, the world model's memory, selection as a policy."""
import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from configs import Config
from models.controller import (GLOBAL_FEATURES, HAS_LEFT, HAS_RIGHT, NODE_FEATURES, SURROUND_FEATURES, ScaledValue,
                               acceleration, lane_choices, plackett_luce)
from models.policy import PARTS, Driver, TrafficModel, bucket, candidate_slots
from models.presets import FULL_RANGES, PRESETS, Normalizer
from models.risk_gnn import TTC, RiskAttention, RiskGNN
from models.world_model import WorldModel

FP16_MAX = 65504.0
SMALL = PRESETS["small"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(preset, seed=0):
    cfg = Config()
    cfg.model.preset = preset
    torch.manual_seed(seed)
    return TrafficModel(cfg)


@pytest.fixture(scope="module")
def models():
    """Both presets; tests that change one take a copy."""
    return {"small": build("small"), "full": build("full")}


@pytest.fixture(scope="module")
def small(models):
    """A small model whose last layers are not near zero, so that a mistake in any input shows in the outputs."""
    model = copy.deepcopy(models["small"])
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.7 / math.sqrt(module.in_features))
            nn.init.normal_(module.bias, std=0.1)
    for last in (model.controller.action[-1], model.controller.importance[-1], model.controller.impact[-1]):
        last.weight.data *= 0.2
    return model.eval()


def scene(vehicles, slots, seed=0, batch=2, k=5):
    """Observations in physical units: `vehicles` in the first of `slots`, ICVs among them, some neighbours missing."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    scale = torch.tensor([1, 3, 30, 10, 500, 1, 1, 2, 2.0])
    near = torch.stack([torch.stack([torch.randperm(vehicles - 1, generator=g)[:k] for _ in range(vehicles)])
                        for _ in range(batch)])
    near += near >= torch.arange(vehicles)[:, None]  # nobody is their own neighbour
    near[rand(near.shape) < 0.3] = -1
    edges = rand(batch, vehicles, k, 4) * torch.tensor([100, 20, 20, 10.0]) - torch.tensor([50, 10, 0, 0.0])
    surround = rand(batch, vehicles, SURROUND_FEATURES) * torch.tensor([200, 30] * 5 + [1, 1, 500, 10.0])
    surround[..., HAS_LEFT:HAS_RIGHT + 1] = surround[..., HAS_LEFT:HAS_RIGHT + 1].round()
    icv = rand(batch, vehicles) < 0.5
    icv[:, :6] = True
    out = {"nodes": rand(batch, vehicles, NODE_FEATURES) * scale, "edges": edges * (near >= 0)[..., None],
           "neighbours": near, "surround": surround, "icv": icv, "mask": torch.ones(batch, vehicles, dtype=torch.bool)}
    out = {name: F.pad(x, (0, 0) * (x.dim() - 2) + (0, slots - vehicles), value=-1 if name == "neighbours" else 0)
           for name, x in out.items()}
    return {**out, "globals": rand(batch, GLOBAL_FEATURES) * 20}


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
        embedding = model.risk_gnn(obs["nodes"], obs["edges"], obs["neighbours"], obs["mask"])
        memory, state = model.world_model.step(embedding, state, torch.zeros(batch, slots, dtype=torch.bool))
    flow, risk = model.world_model.latents(memory)
    speed = obs["nodes"][..., 2]
    seen = model.features(embedding, memory, obs["nodes"], obs["surround"], obs["globals"], obs["mask"], obs["icv"])
    picks = (seen["slots"][:, None] == wanted[..., None]).long().argmax(-1)  # slot -> place among the candidates
    assert (seen["slots"].gather(1, picks) == wanted).all()
    chosen = {"picks": picks, "valid": torch.ones_like(picks, dtype=torch.bool), "u": u, "lane": lane,
              "release": u > 0.8}
    log_prob, entropy = model.controller.evaluate(seen["candidates"], seen["valid"], seen["scene"], chosen)
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


# ---- graph attention ---------------------------------------------------------------------------------------------

def test_dense_and_gathered_attention_agree(small):
    obs = scene(20, 24, 5)
    inputs = [obs[name] for name in ("nodes", "edges", "neighbours", "mask")]
    dense, gathered = copy.deepcopy(small.risk_gnn), copy.deepcopy(small.risk_gnn)
    gathered.gather_above = 2
    close(dense(*inputs), gathered(*inputs))
    for gnn in (dense, gathered):
        gnn(*inputs).square().sum().backward()
    for ours, theirs in zip(dense.parameters(), gathered.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
def test_attention_weights_are_the_softmax_of_the_bias(dense):
    """With queries of zero the logits are the bias alone, and 0 for the vehicle itself."""
    layer, values = RiskAttention(8, 2, 3), torch.randn(1, 2, 4, 4)
    zero, bias = torch.zeros(1, 2, 4, 4), torch.randn(1, 2, 4, 2)
    neighbours = torch.tensor([[[1, 2], [3, 4], [4, 4], [0, 2]]])  # 4 = none
    mixed = (layer._dense if dense else layer._gather)(zero, zero, values, bias, neighbours)
    for head, vehicle in itertools.product(range(2), range(4)):
        near = [(int(n), bias[0, head, vehicle, j]) for j, n in enumerate(neighbours[0, vehicle]) if n < 4]
        weights = torch.stack([torch.zeros(())] + [b for _, b in near]).softmax(0)
        expected = sum(w * values[0, head, n] for w, n in zip(weights, [vehicle] + [n for n, _ in near]))
        close(mixed[0, head, vehicle], expected)


@pytest.mark.parametrize("gather_above", [384, 2])
def test_danger_of_one_edge_reaches_those_who_see_it(small, gather_above):
    """A shorter time to collision changes the vehicle and who attends to it, and nobody else in a net of one hop."""
    gnn, biases = copy.deepcopy(small.risk_gnn), []
    gnn.gather_above, gnn.layers = gather_above, gnn.layers[:1]
    gnn.layers[0].bias.register_forward_hook(lambda module, inputs, output: biases.append(output.detach()))
    obs = scene(12, 12, 6, batch=1)
    obs["neighbours"][0, 4] = torch.tensor([5, 6, -1, -1, -1])
    results = []
    for ttc in (10.0, 0.5):
        obs["edges"][0, 4, 0, TTC] = ttc
        results.append(gnn(*(obs[name] for name in ("nodes", "edges", "neighbours", "mask"))).detach())
    change = (results[0] - results[1]).abs().amax(-1)[0]
    concerned = (obs["neighbours"][0] == 4).any(-1) | (torch.arange(12) == 4)
    assert change[4] > 1e-3 and change[~concerned].max() == 0 and not concerned.all()
    shift = (biases[0] - biases[1]).abs().amax(-1)[0]
    assert shift[4, 0] > 1e-2 and shift.sum() == shift[4, 0]


@pytest.mark.parametrize("dense", [True, False])
def test_attention_bias_moves_one_vehicle(small, dense):
    """The edges' codes enter a layer through the bias alone: another code for one edge moves its vehicle only."""
    layer, x = small.risk_gnn.layers[0], torch.randn(1, 6, SMALL.gnn_width)
    neighbours = torch.tensor([[[1, 2], [0, 2], [3, 6], [4, 5], [3, 5], [6, 6]]])
    code = torch.zeros(1, 6, 2, SMALL.edge_width)
    before = layer(x, neighbours, code, dense)
    code[0, 3, 1] = 3.0
    moved = (layer(x, neighbours, code, dense) - before).abs().amax(-1)[0]
    assert moved[3] > 1e-3 and moved.sum() == moved[3]


@pytest.mark.parametrize("gather_above", [384, 2])
@pytest.mark.parametrize("case", ["isolated", "empty"])
def test_isolated_vehicles_and_empty_scenes_give_no_nan(small, case, gather_above):
    model = copy.deepcopy(small)
    model.risk_gnn.gather_above = gather_above
    obs = scene(6, 8, 8)
    obs["neighbours"].fill_(-1), obs["edges"].zero_()
    if case == "empty":
        obs["mask"].zero_(), obs["icv"].zero_()
    embedding = model.risk_gnn(*(obs[name] for name in ("nodes", "edges", "neighbours", "mask")))
    memory, _ = model.world_model.step(embedding, model.world_model.initial_state(2, 8), obs["mask"])
    seen = model.features(embedding, memory, obs["nodes"], obs["surround"], obs["globals"], obs["mask"], obs["icv"])
    inputs = seen["candidates"], seen["valid"], seen["scene"]
    chosen = model.controller.select(*inputs, deterministic=False, generator=torch.Generator().manual_seed(0))
    log_prob, entropy = model.controller.evaluate(*inputs, chosen)
    values = torch.stack(model.controller.values(seen["scene"]))
    outputs = [embedding, memory, log_prob, entropy, values, seen["risk_logit"]]
    sum(x.sum() for x in outputs).backward()
    assert all(torch.isfinite(x).all() for x in outputs)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert chosen["valid"].any() == (case == "isolated")
    if case == "empty":
        assert (embedding == 0).all() and (log_prob == 0).all() and (entropy == 0).all()


def test_embeddings_listen_to_neighbours_only():
    """With one layer the gradient of one embedding reaches exactly the vehicles in reach."""
    torch.manual_seed(0)
    gnn = RiskGNN(replace(SMALL, gnn_layers=1))
    nodes = torch.rand(1, 5, NODE_FEATURES, requires_grad=True)
    neighbours = torch.tensor([[[1, -1], [2, -1], [0, 3], [-1, -1], [0, 1]]])
    gnn(nodes, torch.rand(1, 5, 2, 4), neighbours, torch.ones(1, 5, dtype=torch.bool))[0, 2].square().sum().backward()
    assert (nodes.grad[0].abs().sum(-1) > 0).tolist() == [True, False, True, True, False]


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
    model = WorldModel(replace(SMALL, lstm_layers=layers))
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


# ---- selection ---------------------------------------------------------------------------------------------------

def test_plackett_luce_is_a_distribution_over_ordered_subsets():
    torch.manual_seed(0)
    scores = torch.randn(1, 6) * 2
    scores[0, 4] = -torch.inf
    for k in (1, 2, 3, 5):
        subsets = torch.tensor(list(itertools.permutations([0, 1, 2, 3, 5], k)))
        log_prob = plackett_luce(scores.expand(len(subsets), -1), subsets, torch.ones_like(subsets, dtype=torch.bool))
        assert log_prob.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_plackett_luce_is_one_softmax_after_another():
    torch.manual_seed(1)
    scores, picks = torch.randn(4, 7), torch.stack([torch.randperm(7)[:5] for _ in range(4)])
    valid = torch.arange(5)[None] < torch.tensor([5, 3, 1, 0])[:, None]
    result = plackett_luce(scores, picks, valid)
    for row in range(4):
        rest = scores[row].clone()
        for j in range(5):
            expected = rest.log_softmax(0)[picks[row, j]] if valid[row, j] else torch.zeros(())
            close(result[row, j], expected)
            if valid[row, j]:
                rest[picks[row, j]] = -torch.inf


def test_plackett_luce_has_gradients_where_nothing_is_left():
    """All candidates taken and further entries invalid: no NaN from a softmax over nothing."""
    scores = torch.tensor([[0.3, -torch.inf, 1.0], [-torch.inf] * 3], requires_grad=True)
    picks = torch.tensor([[2, 0, 1, 0], [0, 1, 2, 0]])
    valid = torch.tensor([[True, True, False, False], [False] * 4])
    plackett_luce(scores, picks, valid).sum().backward()
    assert torch.isfinite(scores.grad).all() and scores.grad[0, 0] != 0 and (scores.grad[1] == 0).all()


def candidates(model, counts, width=8, seed=0):
    """Random features of `counts[b]` candidates in `width` places, lanes at random, and a scene."""
    c, g = model.controller, torch.Generator().manual_seed(seed)
    valid = torch.arange(width)[None] < torch.tensor(counts)[:, None]
    features = torch.randn(len(counts), width, c.features, generator=g)
    lanes = features[..., -SURROUND_FEATURES:][..., HAS_LEFT:HAS_RIGHT + 1]
    lanes.copy_((lanes > 0).float())
    return features * valid[..., None], valid, torch.randn(len(counts), c.scene_features, generator=g)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("width", [3, 8])
def test_evaluate_repeats_the_log_probability_of_select(small, width, deterministic):
    """With no candidate, fewer than K, exactly K and more; in fewer places than K as well."""
    inputs = candidates(small, [0, 1, 3, 5, 8][:3 if width == 3 else 5], width)
    chosen = small.controller.select(*inputs, deterministic, torch.Generator().manual_seed(3))
    assert chosen["picks"].shape == (len(inputs[0]), 5)
    assert chosen["valid"].sum(1).tolist() == [min(5, n) for n in inputs[1].sum(1).tolist()]
    log_prob, entropy = small.controller.evaluate(*inputs, chosen)
    close(log_prob, chosen["log_prob"])
    assert (log_prob[~chosen["valid"]] == 0).all() and (log_prob[chosen["valid"]] != 0).all()
    assert entropy[0] == 0 and torch.isfinite(entropy).all()


def test_picks_are_distinct_candidates(small):
    inputs = candidates(small, [8, 6, 5, 2] * 50)
    chosen = small.controller.select(*inputs, False, torch.Generator().manual_seed(4))
    for row, (picks, valid) in enumerate(zip(chosen["picks"], chosen["valid"])):
        taken = picks[valid].tolist()
        assert len(set(taken)) == len(taken) and inputs[1][row][picks[valid]].all()


def test_log_probability_is_that_of_the_parts(small):
    """pick, then release or not, and only if not the acceleration's density and the lane."""
    c, inputs = small.controller, candidates(small, [8] * 40)
    chosen = c.select(*inputs, False, torch.Generator().manual_seed(5))
    scores = c.scores(*inputs[:2])
    picked = inputs[0].gather(1, chosen["picks"][..., None].expand(-1, -1, c.features))
    mean, lane, release = c.heads(picked, inputs[2], lane_choices(picked))
    density = torch.distributions.Normal(mean, c.log_std.exp()).log_prob(chosen["u"])
    gate = torch.distributions.Bernoulli(logits=release).log_prob(chosen["release"].float())
    steer = torch.distributions.Categorical(logits=lane).log_prob(chosen["lane"])
    expected = plackett_luce(scores, chosen["picks"], chosen["valid"]) + gate + torch.where(
        chosen["release"], 0.0, density + steer)
    torch.testing.assert_close(chosen["log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert 0.1 < chosen["release"].float().mean() < 0.9  # both kinds occur


def test_entropy_is_that_of_the_parts(small):
    c, inputs = small.controller, candidates(small, [8, 3, 1])
    chosen = c.select(*inputs, False, torch.Generator().manual_seed(6))
    _, entropy = c.evaluate(*inputs, chosen)
    picked = inputs[0].gather(1, chosen["picks"][..., None].expand(-1, -1, c.features))
    mean, lane, release = c.heads(picked, inputs[2], lane_choices(picked))
    gate = torch.distributions.Bernoulli(logits=release)
    action = torch.distributions.Normal(mean, c.log_std.exp()).entropy() + torch.distributions.Categorical(
        logits=lane).entropy()
    each = gate.entropy() + (1 - gate.probs) * action
    for row in range(3):
        first = torch.distributions.Categorical(logits=c.scores(*inputs[:2])[row][inputs[1][row]]).entropy()
        torch.testing.assert_close(entropy[row], first + each[row][chosen["valid"][row]].mean(), rtol=1e-4, atol=1e-4)


def test_gumbel_top_k_samples_plackett_luce(small):
    """Pearson's statistic over the 20 ordered pairs of 5 candidates, 19 degrees of freedom: 43.8 has p = 0.001."""
    model, draws = copy.deepcopy(small), 20000
    model.controller.k = 2
    features, valid, surroundings = candidates(model, [5], 8)
    inputs = [x.expand(draws, *x.shape[1:]) for x in (features, valid, surroundings)]
    with torch.no_grad():
        model.controller.alpha.mul_(20), model.controller.beta.mul_(20)
        chosen = model.controller.select(*inputs, False, torch.Generator().manual_seed(7))
        scores = model.controller.scores(features, valid)
    pairs = torch.tensor(list(itertools.permutations(range(5), 2)))
    probability = plackett_luce(scores.expand(20, -1), pairs, torch.ones_like(pairs, dtype=torch.bool)).sum(1).exp()
    counts = torch.stack([(chosen["picks"] == pair).all(1).sum() for pair in pairs])
    assert counts.sum() == draws and probability.max() > 3 * probability.min()  # a case in which the order matters
    assert ((counts - draws * probability) ** 2 / (draws * probability)).sum() < 43.8


def test_actions_are_sampled_from_their_distributions(small):
    """Lane and release frequencies, mean and spread of u, over many draws of one candidate."""
    draws, inputs = 20000, candidates(small, [1], 1, seed=2)
    inputs[0][..., -SURROUND_FEATURES:][..., HAS_LEFT:HAS_RIGHT + 1] = 1.0
    many = [x.expand(draws, *x.shape[1:]) for x in inputs]
    with torch.no_grad():
        chosen = small.controller.select(*many, False, torch.Generator().manual_seed(8))
        mean, lane, release = small.controller.heads(*inputs[::2], torch.ones(1, 1, 3, dtype=torch.bool))
    u, tolerance = chosen["u"][:, 0], 5 / math.sqrt(draws)
    assert u.mean().item() == pytest.approx(mean.item(), abs=tolerance)
    assert u.std().item() == pytest.approx(small.controller.log_std.exp().item(), abs=tolerance)
    assert chosen["release"][:, 0].float().mean().item() == pytest.approx(release.sigmoid().item(), abs=tolerance)
    shares = torch.bincount(chosen["lane"][:, 0], minlength=3) / draws
    torch.testing.assert_close(shares, lane.exp()[0, 0], rtol=0, atol=tolerance)


def test_deterministic_selection_takes_the_best(small):
    inputs = candidates(small, [8, 5, 2])
    chosen = small.controller.select(*inputs, True)
    again = small.controller.select(*inputs, True, torch.Generator().manual_seed(9))
    for name, value in chosen.items():
        assert torch.equal(value, again[name]), name
    order = small.controller.scores(*inputs[:2]).argsort(1, descending=True)
    for row, count in enumerate([5, 5, 2]):
        assert chosen["picks"][row, :count].tolist() == order[row, :count].tolist()


def test_lanes_that_do_not_exist_are_never_chosen(small):
    """Many draws; the heads want every lane, the surroundings forbid some."""
    model = copy.deepcopy(small)
    model.controller.action[-1].bias.data[1:4] = torch.tensor([5.0, -5.0, 5.0])  # loves to change lanes
    features, valid, surroundings = candidates(model, [8] * 500)
    flags = features[..., -SURROUND_FEATURES:][..., HAS_LEFT:HAS_RIGHT + 1]
    for deterministic in (False, True):
        chosen = model.controller.select(features, valid, surroundings, deterministic, torch.Generator().manual_seed(1))
        has = flags.gather(1, chosen["picks"][..., None].expand(-1, -1, 2)) > 0.5
        lane = chosen["lane"]
        assert not ((lane == 0) & ~has[..., 0]).any() and not ((lane == 2) & ~has[..., 1]).any()
        for which in (0, 2):
            assert (lane == which).any()
        assert (lane[~has.any(-1)] == 1).all() and (~has.any(-1)).any()


def test_lane_flags_survive_normalisation(small):
    """lane_choices reads normalised features: the two flags must come through unchanged."""
    surround = scene(6, 6, 2)["surround"]
    parts = [torch.zeros(2, 6, n) for n in (SMALL.gnn_width, SMALL.latent, SMALL.latent, NODE_FEATURES)]
    lanes = lane_choices(small.controller.candidate_features(*parts, surround))
    assert torch.equal(lanes[..., 0], surround[..., HAS_LEFT] == 1) and lanes[..., 1].all()
    assert torch.equal(lanes[..., 2], surround[..., HAS_RIGHT] == 1)


def test_acceleration_stays_in_its_range_and_starts_at_zero(models):
    assert acceleration(torch.tensor([-50.0, 50.0])).tolist() == [-3.0, 2.0]
    inputs = candidates(models["small"], [8])
    with torch.no_grad():
        chosen = models["small"].controller.select(*inputs, True)
    assert acceleration(chosen["u"]).abs().max() < 0.6


def test_rescaling_leaves_the_values_unchanged():
    torch.manual_seed(0)
    net, x = ScaledValue(6, 16), torch.randn(50, 6)
    nn.init.normal_(net.net[-1].weight)
    before = net(x).detach()
    for mean, std in ((40.0, 12.0), (-3.0, 0.5), (7.0, 0.0)):  # a standard deviation of 0 is possible: one return
        net.rescale(mean, std)
        torch.testing.assert_close(net(x).detach(), before, rtol=1e-4, atol=1e-4)
        assert net.mean == mean and net.std == pytest.approx(max(std, 1e-2))


def test_value_loss_is_in_normalised_units():
    net, x, returns = ScaledValue(3, 8), torch.randn(20, 3), torch.randn(20) * 50 + 100
    net.rescale(100.0, 50.0)
    expected = 0.5 * ((net(x) - returns) / 50).square().sum() / 4
    torch.testing.assert_close(net.loss(x, returns, 4.0), expected)


# ---- driver ------------------------------------------------------------------------------------------------------

def observation(seed, vehicles=9, slots=40):
    """What a pool gives: arrays of many slots, most of them empty."""
    obs = {**scene(vehicles, slots, seed), "fresh": torch.zeros(2, slots, dtype=torch.bool)}
    return {name: x.numpy() for name, x in obs.items()}


def test_driver_cuts_empty_slots_without_changing_anything(models):
    driver = Driver(models["small"], 2, 40)
    seen = driver.perceive(observation(1), [0, 1])
    assert seen["embedding"].shape[1] == 16
    full = scene(9, 40, 1)
    embedding = models["small"].risk_gnn(*(full[name] for name in ("nodes", "edges", "neighbours", "mask")))
    close(seen["embedding"], embedding[:, :16])


def test_driver_remembers_each_environment_by_itself(models):
    driver = Driver(models["small"], 4, 40)
    first = driver.perceive(observation(1), [1, 3])
    peek = driver.perceive(observation(2), [1, 3], remember=False)
    again = driver.perceive(observation(2), [1, 3], remember=False)
    assert torch.equal(peek["scene"], again["scene"])  # looking does not advance the memory
    assert (first["before"] == 0).all() and (peek["before"][:, :9] != 0).any(-1).all()
    assert (driver.state[[0, 2]] == 0).all() and (driver.state[[1, 3], 16:] == 0).all()
    driver.forget(1)
    assert (driver.state[1] == 0).all() and (driver.state[3] != 0).any()
    driver.forget()
    assert (driver.state == 0).all()


def test_decisions_are_taken_on_what_is_stored(models):
    """The policy once decided on float32 features and learned from their float16 copies: the first ratio was not 1."""
    driver = Driver(models["small"], 2, 40)
    seen = driver.perceive(observation(3), [0, 1])
    choice, _ = driver.decide(seen, False, torch.Generator().manual_seed(1))
    stored = [seen[name].half().float() for name in ("candidates", "scene")]
    with torch.no_grad():
        log_prob, _ = models["small"].controller.evaluate(stored[0], seen["valid"], stored[1], choice)
        value, cost_value = models["small"].controller.values(stored[1])
    for stored_now, decided in ((log_prob, "log_prob"), (value, "value"), (cost_value, "cost_value")):
        torch.testing.assert_close(stored_now, choice[decided], rtol=0, atol=1e-6)


def test_commands_name_slots_of_icvs_and_released_ones_get_none(models):
    driver, obs = Driver(models["small"], 2, 40), observation(3)
    seen = driver.perceive(obs, [0, 1])
    choice, commands = driver.decide(seen, False, torch.Generator().manual_seed(1))
    active = (choice["valid"] & ~choice["release"]).numpy()
    assert active.any() and not active.all()
    assert (commands["slot"][~active] == 40).all()
    for env in range(2):
        assert obs["icv"][env][commands["slot"][env][active[env]]].all()
    wanted = seen["slots"].gather(1, choice["picks"]).numpy()
    assert (commands["slot"][active] == wanted[active]).all()
    assert (commands["accel"] <= commands["wanted"] + 1e-6).all() and (commands["reason"][~active] == 0).all()


def test_statistics_reach_the_normalisers():
    model = build("small")
    nodes = {"mean": [9.0] * 9, "std": [8.0] * 9}
    model.set_statistics({"nodes": nodes, "globals": {"mean": [1.0] * 16, "std": [2.0] * 16}})
    speeds = torch.zeros(9).index_fill(0, torch.tensor(2), 25.0)
    assert model.risk_gnn.normalize(speeds)[2] == 2.0 and model.risk_gnn.normalize(speeds)[0] == pytest.approx(-5 / 3)
    assert (model.controller.globals(torch.full((16,), 5.0)) == 2.0).all()
