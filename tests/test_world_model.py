"""What the world model sees and is asked for, the memory it needs, and the rules and scores of its prediction."""
import copy
import itertools
import math

import numpy as np
import pytest
import torch
from data_sets import config, graphs
from scenes import close, scene

import train_ddp
from benchmarks import gpu_memory, prediction
from benchmarks.checkpointing import saved_bytes
from configs import load_config
from configs.phases import Phase1Config
from data.dataset import ChunkedDataset
from models import objectives
from models.losses import WorldModelLoss, prediction_errors, prepare
from models.presets import PRESETS
from models.risk_gnn import INPUTS, edge_inputs, surround_inputs
from models.world_model import CHANGE_SCALE, WorldModel
from runtime.distributed import Team

HORIZON = 4


# ---- inputs ------------------------------------------------------------------------------------------------------

def test_surroundings_by_hand():
    """In front 20 m at 5 m/s, behind on the left 10 m at 14 m/s, nobody else near; own speed 10 m/s."""
    surround = torch.tensor([20, 5, 200, 40, 10, 14, 0, 0, 0, 0, 1, 0, 125, 5.0])
    gap, closeness, dv, urgency = surround_inputs(surround, torch.tensor(10.0))[:20].view(4, 5)
    rest = surround_inputs(surround, torch.tensor(10.0))[20:]
    close(gap, torch.tensor([0.4, 4, 0.2, 0, 0]))
    close(closeness, torch.tensor([0.2, 1 / 41, 1 / 3, 1, 1]))
    close(dv, torch.tensor([-0.5, 3, 0.4, -1, -1]))
    # in front 20 m / 5 m/s; left in front opens (200 m / 0.1 m/s); left behind closes in 10 m / 4 m/s; right is at 0 m
    close(urgency, torch.tensor([10 / 4.5, 10 / 2000.5, 10 / 3.0, 5, 5]))
    close(rest, torch.tensor([1, 0, 0.5, 1.0]))


def test_the_leader_is_marked_among_the_neighbours():
    edges = torch.tensor([[[30.0, -4, 7.5, 2], [30, 4, 20, 2], [-30, -4, 20, 2], [12, -4, 3, 1]]])
    marks = edge_inputs(edges, torch.tensor([30.0]), torch.tensor([-4.0]))[..., -1]
    assert marks[0, 0] == 1 and marks[0, 1:].max() < 1e-3
    assert edge_inputs(edges, torch.tensor([200.0]), torch.tensor([10.0]))[..., -1].max() < 1e-3  # nobody leads


@pytest.mark.parametrize("name", INPUTS[:-1])
def test_every_input_reaches_the_prediction(small, name):
    """The surroundings were once seen by the controller and the shield only, and leaders outside a sample by nobody."""
    obs = scene(9, 9, 3)
    other = {**obs, name: torch.roll(obs[name], 1, dims=1)}
    embeddings = [small.risk_gnn(*(o[n] for n in INPUTS)) for o in (obs, other)]
    assert (embeddings[0] - embeddings[1]).abs().amax() > 1e-3


def test_predictions_depend_on_the_present_and_on_the_past():
    """Three ways lead to the decoders: the present step and its change directly, and all steps through the memory."""
    torch.manual_seed(0)
    model = WorldModel(PRESETS["small"])
    embedding, fresh = torch.randn(1, 3, 2, 64, requires_grad=True), torch.zeros(1, 3, 2, dtype=torch.bool)
    memory = model.sequence(embedding, model.initial_state(1, 2), fresh)
    memory[0, -1, 0].sum().backward()
    reach = embedding.grad[0].abs().sum(-1) > 0
    assert reach.tolist() == [[True, False]] * 3
    fresh[0, 0], fresh[0, 2, 1] = True, True
    with torch.no_grad():
        for p in model.cells.parameters():
            p.zero_()
        memory = model.sequence(embedding, model.initial_state(1, 2), fresh) - model.present(embedding)
        change = model.change(CHANGE_SCALE * (embedding[:, 1:] - embedding[:, :-1]))
    close(memory[0, 0], torch.zeros(2, 96))  # nothing is known of a new vehicle's past
    close(memory[0, 1:, 0], change[0, :, 0])
    close(memory[0, 2, 1], torch.zeros(96))


# ---- targets -----------------------------------------------------------------------------------------------------

def test_conflict_within_the_horizon_by_enumeration():
    """Known: no step with a conflict counts as seen when it is not valid; one seen conflict is enough."""
    for steps in itertools.product(((0, False), (0, True), (1, False), (1, True)), repeat=3):
        hits, valid = torch.tensor([float(s[0]) for s in steps]), torch.tensor([s[1] for s in steps])
        targets, known = objectives.within_horizon(hits, valid)
        assert torch.equal(targets[:3], hits) and torch.equal(known[:3], valid)
        seen = any(hit and ok for hit, ok in steps)
        assert bool(targets[3]) == seen and bool(known[3]) == (seen or all(ok for _, ok in steps))


def test_conflict_head_learns_steps_and_horizon(small):
    """Gradients of the last logit come from conflicts within the horizon, also where some steps are unknown."""
    logits = torch.zeros(1, 1, 1, HORIZON + 1, requires_grad=True)
    hits, valid = torch.tensor([0.0, 1, 0, 0]), torch.tensor([True, True, False, False])
    targets = objectives.within_horizon(hits.view(1, 1, 1, 4), valid.view(1, 1, 1, 4))
    objectives.conflict_loss(logits, *targets, 1.0).backward()
    assert logits.grad.flatten().tolist() == [0.5, -0.5, 0, 0, -0.5]
    _, risk = small.world_model.latents(torch.randn(3, 96))
    assert small.world_model.predict_conflict(risk).shape == (3, small.world_model.horizon + 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_untrained_model_calls_conflicts_rare(preset):
    """It once began at one half; on the way to the rate, one in a hundred, the risk latent saturated."""
    torch.manual_seed(0)
    model = WorldModel(PRESETS[preset])
    _, risk = model.latents(torch.randn(500, PRESETS[preset].lstm_width))
    assert 0.005 < model.predict_conflict(risk).sigmoid().mean() < 0.02


def test_cross_entropy_of_conflicts_is_a_mean(recorded):
    """It was a sum over the H steps and "in any of them" of what was counted without the latter: a fifth too high."""
    def undecided(batch, count):
        states = torch.zeros_like(batch["states"])
        return torch.tensor(0.0), {"next": states[..., 0, :], "states": states,
                                   "conflict": torch.zeros(*states.shape[:-2], states.shape[-2] + 1)}
    held_out = ChunkedDataset(graphs(recorded), "held_out")
    facts = train_ddp.validate(config(recorded), Team(0, 1, 0, 1, torch.device("cpu")), undecided, held_out, 2)
    assert facts["loss_conflict"] == pytest.approx(math.log(2))


# ---- gradient checkpointing --------------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", PRESETS)
def test_checkpointing_saves_activation_memory(preset):
    """At least 30 % less for the sequence; weights are there in any case and do not count."""
    torch.manual_seed(0)
    model, sizes = WorldModel(PRESETS[preset]), PRESETS[preset]
    embedding = torch.randn(4, 10, 20, sizes.gnn_width, requires_grad=True)
    fresh, state = torch.zeros(4, 10, 20, dtype=torch.bool), model.initial_state(4, 20)
    plain, saving = (saved_bytes(lambda on=on: model.sequence(embedding, state, fresh, on), model.parameters())[0]
                     for on in (False, True))
    assert saving < 0.7 * plain


def test_steps_whose_gpu_memory_is_measured_are_those_of_training(monkeypatch):
    """Phase 3's loss asked for more than the benchmark gave it, which only a GPU would have shown."""
    monkeypatch.setattr(gpu_memory, "BATCHES", (2,))
    monkeypatch.setattr(gpu_memory, "VEHICLES", (8,))
    names = []
    for name, module, arguments in gpu_memory.cases(load_config("configs/smoke.yaml"), torch.device("cpu")):
        module(*arguments)[0].backward()
        names.append(name)
    assert len(names) == 3 and "phase 3" in names[-1]


def sequences(horizon):
    """A batch of phase 1, [2, 3 steps, 8 vehicles]."""
    batch, g = {}, torch.Generator().manual_seed(0)
    for t in range(3):
        for name, x in scene(6, 8, t).items():
            batch.setdefault(name, []).append(x)
    batch = {name: torch.stack(x, 1) for name, x in batch.items()}
    return {**batch, "fresh": torch.rand(2, 3, 8, generator=g) < 0.2, "speed": batch["nodes"][..., 2],
            "states": torch.rand(2, 3, 8, horizon, 2, generator=g), "conflicts": torch.zeros(2, 3, 8, horizon),
            "target_valid": batch["mask"][..., None].expand(-1, -1, -1, horizon)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("gather_above", [512, 2])
def test_a_rank_without_rows_in_the_last_batch_has_gradients_of_zero(small, gather_above, checkpointing):
    """More ranks than rows are left: its attention could not reshape nothing, and all ranks ended with it."""
    model = copy.deepcopy(small)
    model.risk_gnn.gather_above = gather_above
    batch = {name: x[:0] for name, x in sequences(small.world_model.horizon).items()}
    loss, _ = WorldModelLoss(model, 2, Phase1Config(checkpointing=checkpointing))(batch, 10.0)
    loss.backward()
    gradients = [p.grad for part in (model.risk_gnn, model.world_model) for p in part.parameters()]
    assert loss == 0 and all(g is not None and not g.any() for g in gradients)


def test_checkpointing_changes_no_gradient_of_the_whole_loss(small):
    gradients = []
    for on in (False, True):
        model = copy.deepcopy(small)
        loss, _ = WorldModelLoss(model, 2, Phase1Config(checkpointing=on))(sequences(small.world_model.horizon), 10.0)
        loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 30
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected)


# ---- rules of the benchmark --------------------------------------------------------------------------------------

@pytest.mark.parametrize("speed, accel", [(20.0, 0.0), (10.0, 1.5), (10.0, -1.0), (3.0, -2.0), (0.0, -1.0), (0.0, 0.5)])
def test_constant_acceleration_stops_at_zero(speed, accel):
    x, v, expected = 0.0, speed, []
    for step in range(1, 4001):  # 4 s in steps of 1 ms
        faster = max(v + accel * 0.001, 0)
        x, v = x + (v + faster) / 2 * 0.001, faster
        if step % 1000 == 0:
            expected.append([x, v])
    ours = prediction.constant_acceleration(torch.tensor(speed), torch.tensor(accel), 1.0, 4)
    torch.testing.assert_close(ours, torch.tensor(expected), rtol=1e-3, atol=5e-3)


def test_idm_equals_one_vehicle_at_a_time():
    """Three vehicles behind each other in mixed slots, one before a standing obstacle, one free."""
    p = {"v0": 30.0, "T": 1.2, "a": 1.0, "b": 1.5, "s0": 2.0}
    v, lead = torch.tensor([[12.0, 15, 10, 8, 25]]), torch.tensor([[1, 2, -1, -1, -1]])
    surround = torch.zeros(1, 5, 14)
    surround[0, :, 0], surround[0, :, 1] = torch.tensor([9.0, 14, 200, 12, 200]), torch.tensor([15.0, 10, 40, 0, 40])
    ours = prediction.idm({"speed": v, "lead": lead, "surround": surround}, p, 1.0, 3, parts=4)
    x, speed = [0.0] * 5, v[0].tolist()
    for step in range(1, 13):
        accel = []
        for i in range(5):
            j, interaction = int(lead[0, i]), 0.0
            if j >= 0 or i == 3:
                ahead, lead_speed = (x[j], speed[j]) if j >= 0 else (0.0, 0.0)
                closing = speed[i] * (speed[i] - lead_speed) / (2 * math.sqrt(p["a"] * p["b"]))
                desired = p["s0"] + max(0, speed[i] * p["T"] + closing)
                interaction = (desired / max(float(surround[0, i, 0]) + ahead - x[i], 0.1)) ** 2
            accel.append(max(p["a"] * (1 - (speed[i] / p["v0"]) ** 4 - interaction), -9.0))
        faster = [max(s + a * 0.25, 0) for s, a in zip(speed, accel)]
        x = [old + (s + f) / 2 * 0.25 for old, s, f in zip(x, speed, faster)]
        speed = faster
        if step % 4 == 0:
            torch.testing.assert_close(ours[0, :, step // 4 - 1], torch.tensor([x, speed]).T, rtol=1e-4, atol=1e-4)
    assert (ours[..., 1] >= 0).all()


def test_fit_finds_the_parameters_that_made_the_data():
    """Episodes rolled forward by IDM itself: the fitted parameters predict them better than those of a textbook."""
    g = torch.Generator().manual_seed(0)
    true = {"v0": 28.0, "T": 0.8, "a": 0.6, "b": 1.0, "s0": 3.0}
    textbook = {"v0": 30.0, "T": 1.5, "a": 1.0, "b": 2.0, "s0": 2.0}
    surround = torch.zeros(400, 2, 14)
    surround[:, 0, 0], surround[:, 1, :2] = 5 + 30 * torch.rand(400, generator=g), torch.tensor([200.0, 40])
    e = {"speed": 5 + 15 * torch.rand(400, 2, generator=g), "lead": torch.tensor([[1, -1]]).expand(400, -1),
         "surround": surround, "valid": torch.ones(400, 2, 5, dtype=torch.bool),
         "dense": torch.tensor([[True, False]]).expand(400, -1)}
    e["states"] = prediction.idm(e, true, 1.0, 5)
    error = [prediction.pool([prediction.errors(prediction.idm(e, p, 1.0, 5), e, e["dense"])])["position_5"]
             for p in (prediction.fit_idm([e], 1.0, 5), textbook)]
    assert error[0] < 0.3 * error[1]


# ---- scores ------------------------------------------------------------------------------------------------------

def test_roc_area_is_the_share_of_ordered_pairs():
    rng = np.random.default_rng(0)
    score, label = rng.integers(0, 6, 60) / 6, rng.random(60) < 0.3  # many ties
    pairs = [(s > t) + 0.5 * (s == t) for s in score[label] for t in score[~label]]
    assert prediction.roc_area(score, label) == pytest.approx(np.mean(pairs))
    assert prediction.roc_area(label.astype(float), label) == 1.0
    assert prediction.roc_area(-score, label) == pytest.approx(1 - np.mean(pairs))
    assert math.isnan(prediction.roc_area(score, np.zeros(60, bool)))


def test_calibration_error_by_hand():
    """Nine times 0.05 with one hit, once 1.0 without: (|0.45 - 1| + |1 - 0|) / 10."""
    probability, label = np.array([0.05] * 9 + [1.0]), np.array([True] + [False] * 9)
    assert prediction.calibration_error(probability, label) == pytest.approx(0.155)
    assert prediction.calibration_error(np.array([0.25, 0.25, 0.25, 0.25]), np.array([1, 0, 0, 0], bool)) == 0


def test_errors_count_valid_targets_of_the_asked_vehicles():
    e = {"states": torch.zeros(2, 3, HORIZON, 2), "valid": torch.ones(2, 3, HORIZON, dtype=torch.bool)}
    e["valid"][0, 0, -1] = False
    predicted = torch.zeros(2, 3, HORIZON, 2)
    predicted[..., 0, 0], predicted[..., -1, 1] = 2.0, 3.0
    predicted[1, 2] = 100.0
    where = torch.ones(2, 3, dtype=torch.bool)
    where[1, 2] = False
    sums = prediction.errors(predicted, e, where)
    assert sums == {"position_1": (20.0, 5), "speed_1": (0.0, 5), "position_2": (0.0, 5), "speed_2": (0.0, 5),
                    "position_3": (0.0, 5), "speed_3": (0.0, 5), "position_4": (0.0, 4), "speed_4": (36.0, 4)}
    pooled = prediction.pool([sums, sums])
    assert (pooled["position_1"], pooled["speed_3"], pooled["speed_4"]) == (2.0, 0.0, 3.0)


def test_a_vehicle_whose_leader_is_outside_the_sample_is_no_target():
    frames = torch.ones(1, 4, 2, dtype=torch.bool)
    samples = {**dict.fromkeys(("moved", "speed"), torch.ones(1, 4, 2)), "present": frames, "fresh": ~frames,
               "conflict": ~frames, "usable": torch.tensor([[[True, False], [False, True]]]),
               **{name: torch.zeros(1, 2, 2, 1) for name in ("nodes", "surround", "edges", "neighbours")}}
    assert prepare(samples, 2)["target_valid"].all(-1).tolist() == samples["usable"].tolist()


def test_errors_ahead_are_in_seconds_not_in_steps():
    target = torch.tensor([[[[[5.0, 10.0], [10.0, 10.0]]]]])  # one vehicle at 10 m/s, two steps of 0.5 s
    batch = {"target_valid": torch.ones(1, 1, 1, 2, dtype=torch.bool), "states": target,
             "speed": torch.full((1, 1, 1), 10.0), "conflicts": torch.zeros(1, 1, 1, 2)}
    out = {"next": target[..., 0, :], "states": target, "conflict": torch.zeros(1, 1, 1, 3)}
    sums = prediction_errors(out, batch, 0.5, torch.zeros(()), 2)
    assert sums[1:5, 0].tolist() == [0.0] * 4 and sums[6:8, 0].tolist() == [0.0, 0.0]
