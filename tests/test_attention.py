"""models/risk_gnn.py: dense and gathered attention, the danger bias, isolated vehicles and empty scenes."""
import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from scenes import close, noise, scene

from env.graph import EDGE
from models.controller import NODE_FEATURES, SURROUND_FEATURES
from models.presets import PRESETS
from models.risk_gnn import INPUTS, RiskAttention, RiskGNN

TTC = EDGE.index("ttc")
SMALL = PRESETS["small"]


# ---- graph attention ---------------------------------------------------------------------------------------------

def test_dense_and_gathered_attention_agree(small):
    obs = scene(20, 24, 5)
    inputs = [obs[name] for name in INPUTS]
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
def test_danger_of_one_edge_reaches_those_who_see_it(small, gather_above, monkeypatch):
    """A shorter time to collision changes the vehicle and who attends to it, and nobody else in a net of one hop."""
    gnn, biases = copy.deepcopy(small.risk_gnn), recorded_biases(monkeypatch)
    gnn.gather_above, gnn.layers = gather_above, gnn.layers[:1]
    obs = scene(12, 12, 6, batch=1)
    obs["neighbours"][0, 4] = torch.tensor([5, 6, -1, -1, -1])
    results = []
    for ttc in (10.0, 0.5):
        obs["edges"][0, 4, 0, TTC] = ttc
        results.append(gnn(*(obs[name] for name in INPUTS)).detach())
    change = (results[0] - results[1]).abs().amax(-1)[0]
    concerned = (obs["neighbours"][0] == 4).any(-1) | (torch.arange(12) == 4)
    assert change[4] > 1e-3 and change[~concerned].max() == 0 and not concerned.all()
    shift = (biases[1] - biases[0])[0]  # [heads, N, k]
    assert (shift[:, 4, 0] > 0.5).all() and shift.sum() == shift[:, 4, 0].sum()


@pytest.mark.parametrize("column", ["ttc", "thw"])
def test_attention_grows_with_danger_whatever_was_learned(small, column, monkeypatch):
    """The bias was learned from all of an edge's features once: in a policy of that time five of twelve heads
    attended less to who was about to be hit. Random weights stand for any training here, negative ones included."""
    gnn, biases = copy.deepcopy(small.risk_gnn), recorded_biases(monkeypatch)
    torch.manual_seed(0)
    for parameter in gnn.parameters():
        torch.nn.init.normal_(parameter)
    obs = scene(12, 12, 6, batch=1)
    steps, scale, layers = (6.0, 3.0, 1.0, 0.0), {"ttc": 3, "thw": 1}[column], len(gnn.layers)
    for seconds in steps:
        obs["edges"][..., EDGE.index(column)] = seconds
        gnn(*(obs[name] for name in INPUTS))
    for i, layer in enumerate(gnn.layers):
        weights = torch.nn.functional.softplus(layer.danger)[:, EDGE.index(column) - TTC, None, None]
        for s, t, calm, tense in zip(steps, steps[1:], biases[i::layers], biases[i + layers::layers]):
            assert (tense > calm).all()
            grown = weights * (1 / (1 + t / scale) - 1 / (1 + s / scale))  # the closed form: nothing else moved
            torch.testing.assert_close(tense - calm, grown.expand_as(calm), rtol=0, atol=1e-4)


def test_a_learned_bias_has_no_danger_of_its_own():
    names = [name for name, _ in RiskGNN(SMALL, learned=True).named_parameters()]
    assert not [name for name in names if "danger" in name or "relation" in name]


def recorded_biases(monkeypatch):
    """A list that gets the bias [B, heads, N, k] of each layer that runs."""
    biases = []
    for way in ("_dense", "_gather"):
        old = getattr(RiskAttention, way)
        monkeypatch.setattr(RiskAttention, way, lambda self, q, k, v, bias, near, old=old: (
            biases.append(bias.detach()), old(self, q, k, v, bias, near))[1])
    return biases


@pytest.mark.parametrize("dense", [True, False])
def test_attention_bias_moves_one_vehicle(small, dense):
    """The edges enter a layer through the bias alone: another code or danger of one edge moves its vehicle only."""
    layer, x = small.risk_gnn.layers[0], torch.randn(1, 6, SMALL.gnn_width)
    neighbours = torch.tensor([[[1, 2], [0, 2], [3, 6], [4, 5], [3, 5], [6, 6]]])
    code, danger = torch.zeros(1, 6, 2, SMALL.edge_width), torch.zeros(1, 6, 2, 2)
    before = layer(x, neighbours, code, danger, dense)
    for changed in (code, danger):
        changed[0, 3, 1] += 3.0
        moved = (layer(x, neighbours, code, danger, dense) - before).abs().amax(-1)[0]
        assert moved[3] > 1e-3 and moved.sum() == moved[3]
        changed[0, 3, 1] -= 3.0


@pytest.mark.parametrize("gather_above", [384, 2])
@pytest.mark.parametrize("case", ["isolated", "empty"])
def test_isolated_vehicles_and_empty_scenes_give_no_nan(small, case, gather_above):
    model = copy.deepcopy(small)
    model.risk_gnn.gather_above = gather_above
    obs = scene(6, 8, 8)
    obs["neighbours"].fill_(-1), obs["edges"].zero_()
    if case == "empty":
        obs["mask"].zero_(), obs["icv"].zero_()
    embedding = model.risk_gnn(*(obs[name] for name in INPUTS))
    memory, _ = model.world_model.step(embedding, model.world_model.initial_state(2, 8), obs["mask"])
    seen = model.features(embedding, memory, obs["nodes"], obs["surround"], obs["globals"], obs["mask"], obs["icv"])
    inputs = seen["candidates"], seen["valid"], seen["scene"]
    chosen = model.controller.select(*inputs, noise(inputs[0], 0))
    log_prob, entropy, _ = model.controller.evaluate(*inputs, chosen)
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
    gnn = RiskGNN(SimpleNamespace(**{**vars(SMALL), "gnn_layers": 1}))
    nodes = torch.rand(1, 5, NODE_FEATURES, requires_grad=True)
    neighbours = torch.tensor([[[1, -1], [2, -1], [0, 3], [-1, -1], [0, 1]]])
    surround, mask = torch.rand(1, 5, SURROUND_FEATURES), torch.ones(1, 5, dtype=torch.bool)
    gnn(nodes, surround, torch.rand(1, 5, 2, 4), neighbours, mask)[0, 2].square().sum().backward()
    assert (nodes.grad[0].abs().sum(-1) > 0).tolist() == [True, False, True, True, False]
