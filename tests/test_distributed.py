"""Two gloo processes against one: equal training, one all-reduce per optimiser step, decisions taken together.

Two spawned ranks run everything once, joined by product code as torchrun would have it; the tests read what they left.
"""
import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing
from torch import distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import train_ddp
from configs import Config, ConfigError
from models.controller import GLOBAL_FEATURES, NODE_FEATURES, SURROUND_FEATURES
from models.losses import ConstrainedLoss, PPOLoss, WorldModelLoss
from models.policy import TrafficModel
from runtime import checkpoint
from runtime.distributed import StopRequest, Team, start_team, wrap
from runtime.guard import MemoryGuard
from runtime.precision import Precision
from runtime.training import Progress

WORLD, MICRO, STEPS = 2, 2, 3
T, N, K = 4, 10, 3  # frames, slots, neighbours
ALONE = Team(0, 1, 0, 1, torch.device("cpu"))


def config():
    """Small and fast; the learning rate is high and gradients are not clipped, so that a wrong weight shows."""
    cfg = Config()
    cfg.run.device, cfg.run.threads, cfg.model.preset, cfg.data.future = "cpu", 1, "small", 3
    cfg.ddp.timeout_s, cfg.ddp.bucket_cap_mb = 240.0, 0.25  # several buckets
    p = cfg.phase1
    p.lr, p.warmup_steps, p.clip_norm, p.epochs, p.accumulation = 0.5, 0, 1e9, 1, MICRO
    cfg.phase3.anchor = 0.3
    return cfg


def part(batch, rank, world, micro, of):
    """Rows of micro-batch `micro` of `of` on `rank`: rank 0 has the first rows."""
    size = len(next(iter(batch.values()))) // (world * of)
    begin = (rank * of + micro) * size
    return {name: value[begin:begin + size] for name, value in batch.items()}


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.05, momentum=0.9)


def fresh_model(cfg, *frozen):
    torch.manual_seed(0)
    model = TrafficModel(cfg)
    for module in model.modules():
        if isinstance(module, nn.Sequential) and not module[-1].bias.any():
            module[-1].weight.data *= 10  # else what comes before the last layers would hardly learn in three steps
    model.freeze(*frozen)
    return model


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


# ---- phase 1 -----------------------------------------------------------------------------------------------------

def samples(step):
    """Eight samples as the data set gives them, with 2 to 9 vehicles: a mean per rank would weigh them wrongly."""
    g = torch.Generator().manual_seed(step)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    frames, many = T + 3, torch.arange(2, 10)
    present = (torch.arange(N) < many[:, None])[:, None].expand(8, frames, N).clone()
    present[:, 4:, 1] = False  # one leaves
    neighbours = (rand(8, T, N, K) * many[:, None, None, None]).long()
    return {"nodes": rand(8, T, N, NODE_FEATURES) * 5, "surround": rand(8, T, N, SURROUND_FEATURES) * 50,
            "edges": rand(8, T, N, K, 4) * 10, "neighbours": neighbours,
            "present": present, "fresh": rand(8, frames, N) < 0.1, "speed": rand(8, frames, N) * 20,
            "moved": rand(8, frames, N) * 30, "conflict": rand(8, frames, N) < 0.3, "usable": rand(8, T, N) < 0.8,
            "row": torch.arange(8), "bad": torch.zeros(8, dtype=torch.bool)}


def phase1_training(team, folder):
    """(progress, module, epoch) where epoch(batches, stop) runs the product's own loop; accumulation 1 when alone."""
    cfg = config()
    cfg.phase1.accumulation = MICRO if team.world > 1 else 1
    model = fresh_model(cfg, "controller", "safety_shield")
    module = wrap(WorldModelLoss(model, 2, cfg.phase1), team, cfg.ddp)
    precision = Precision(cfg.phase1.amp, team.device, team.any)
    progress = Progress(cfg, team, folder, model, sgd(model), precision.scaler)

    def epoch(batches, stop):
        guard = MemoryGuard(cfg, team, stop)
        return train_ddp.train_epoch(cfg, team, guard, progress, module, batches, precision, STEPS)
    return progress, module, epoch


def micro_batches(team, calls=None):
    for step in range(STEPS):
        for micro in range(MICRO):
            if calls is not None and micro == 0:
                calls.append([])
            yield part(samples(step), team.rank, team.world, micro, MICRO)


def run_phase1(team, folder):
    """Three steps of 2 ranks x 2 micro-batches x 2 samples, every all-reduce counted by step; then a stop request."""
    calls, (progress, module, epoch) = [], phase1_training(team, folder)

    def counting(state, bucket):
        calls[-1].append((bucket.index(), bucket.is_last()))
        return default_hooks.allreduce_hook(state, bucket)
    module.register_comm_hook(None, counting)
    log = epoch(micro_batches(team, calls), SimpleNamespace(asked=False))
    result = {"weights": weights(progress.model), "log": log, "calls": [list(step) for step in calls]}
    stop, yielded = StopRequest(), []

    def interrupted():
        for i, batch in enumerate(micro_batches(team)):
            if i == 2 and team.rank == 1:  # in the middle of the second step, on one rank only
                os.kill(os.getpid(), signal.SIGTERM)
            yielded.append(i)
            yield batch
    result.update(stopped=epoch(interrupted(), stop), asked=stop.asked, yielded=len(yielded),
                  updates=progress.counters["updates"])
    return result


# ---- phases 2 and 3 ----------------------------------------------------------------------------------------------

def actions(rand, *shape):
    """A stored choice of up to five of six candidates, and the numbers PPO needs beside it."""
    picks = rand(*shape, 6).argsort(-1)[..., :5]
    return {"picks": picks, "pick_valid": torch.arange(5) < (rand(*shape, 1) * 6).long(), "u": rand(*shape, 5) - 0.5,
            "lane": torch.ones_like(picks), "release": rand(*shape, 5) < 0.3, "pace": rand(*shape, 5) < 0.6,
            "log_prob": -2 - 2 * rand(*shape, 5),
            "advantage": 2 * rand(*shape) - 1, "return": rand(*shape) * 2, "cost_return": rand(*shape),
            "price": rand(*shape)}


def ppo_batch(step, controller):
    g = torch.Generator().manual_seed(100 + step)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    return {"candidates": rand(16, 6, controller.features), "scene": rand(16, controller.scene_features),
            **actions(rand, 16)}


def as_rows(batch):
    """The candidates [B, C, F] one after another, as a minibatch has them: row 0 is nobody's."""
    b, c, f = batch["candidates"].shape
    rows = torch.cat([torch.zeros(1, f), batch["candidates"].flatten(0, 1)])
    return {**batch, "candidates": rows, "place": 1 + torch.arange(b * c).view(b, c)}


def sequence_batch(step, model):
    """Four sequences of three steps with 6 to 9 vehicles, all of their ICVs among the first six."""
    g = torch.Generator().manual_seed(200 + step)
    rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
    mask = (torch.arange(N) < torch.arange(6, 10)[:, None])[:, None].expand(4, 3, N)
    valid = (rand(4, 3, N, 3) < torch.tensor([0.2, 0.5, 0.9, 0.3])[:, None, None, None]) & mask[..., None]
    width = model.controller.d
    return {"embedding": rand(4, 3, N, width), "nodes": rand(4, 3, N, NODE_FEATURES) * 5, "mask": mask,
            "surround": rand(4, 3, N, SURROUND_FEATURES) * 50, "globals": rand(4, 3, GLOBAL_FEATURES) * 5,
            "icv": (torch.arange(N) < 6).expand(4, 3, N), "fresh": rand(4, 3, N) < 0.1, "states": rand(4, 3, N, 3, 2),
            "target_valid": valid, "conflicts": (rand(4, 3, N, 3) < 0.3).float(), "speed": rand(4, 3, N) * 20,
            "before": 0.1 * rand(4, *model.world_model.initial_state(N).shape), **actions(rand, 4, 3)}


def run_phase2(team):
    """Three minibatches of 16 steps, shared by the ranks, counted as train_rl does."""
    cfg = config()
    model = fresh_model(cfg, "risk_gnn", "world_model", "safety_shield")
    module = wrap(PPOLoss(model, cfg.phase2), team, cfg.ddp)
    optimizer, precision = sgd(model), Precision(cfg.phase2.amp, team.device, team.any)
    for step in range(STEPS):
        mine = as_rows(part(ppo_batch(step, model.controller), team.rank, team.world, 0, 1))
        train_ddp.optimiser_step(module, [(mine, len(mine["u"]))], optimizer, precision, 1e9)
    return weights(model)


def run_poisoned(team):
    """A minibatch with NaN on rank 1 only: what each rank raises, and the weights that it has then."""
    cfg = config()
    model = fresh_model(cfg, "risk_gnn", "world_model", "safety_shield")
    module = wrap(PPOLoss(model, cfg.phase2), team, cfg.ddp)
    precision = Precision(cfg.phase2.amp, team.device, team.any)
    mine = as_rows(part(ppo_batch(0, model.controller), team.rank, team.world, 0, 1))
    mine["advantage"][0] = math.nan if team.rank == 1 else 1.0
    try:
        train_ddp.optimiser_step(module, [(mine, len(mine["u"]))], sgd(model), precision, 1e9)
    except FloatingPointError as error:
        return {"error": str(error), "weights": weights(model)}


def run_phase3(team):
    """Three steps of four sequences: 2 ranks x 2 micro-batches x 1, or all at once; counted as phase 3 does."""
    cfg = config()
    model, of = fresh_model(cfg, "risk_gnn"), MICRO if team.world > 1 else 1
    module = wrap(ConstrainedLoss(model, cfg.phase2, cfg.phase3), team, cfg.ddp)
    optimizer, precision = sgd(model), Precision(cfg.phase3.amp, team.device, team.any)
    for step in range(STEPS):
        window = [part(sequence_batch(step, model), team.rank, team.world, i, of) for i in range(of)]
        own = [sum(int(n) for n in numbers) for numbers in zip(*(ConstrainedLoss.counts(w) for w in window))]
        share = [n / team.world for n in team.all_sum(own)]
        train_ddp.optimiser_step(module, [(w, share) for w in window], optimizer, precision, 1e9)
    return weights(model)


# ---- the two ranks -----------------------------------------------------------------------------------------------

def talk(team):
    """What the ranks agree on. Rank 0 has 3 numbers, rank 1 has 5."""
    numbers = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0, 40.0, 1e4])][team.rank]
    return {"sum": team.all_sum([1, 10.0 * team.rank, 0.1]), "moments": team.moments(numbers), "world": team.world,
            "any": [team.any(flag) for flag in (False, team.rank == 1, team.rank == 0, torch.tensor(True))],
            "gather": team.gather({"rank": team.rank}), "main": team.is_main, "rank": team.rank}


def rank_main(rank, port, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cfg = config()
    with start_team(cfg.run, cfg.ddp) as team:
        result = {"talk": talk(team), "phase1": run_phase1(team, folder / "phase1"), "phase2": run_phase2(team),
                  "poisoned": run_poisoned(team), "phase3": run_phase3(team), "threads": torch.get_num_threads()}
        torch.save(result, folder / f"rank{rank}.pt")
        team.barrier()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of both ranks. This process hosts the store, as torchrun would, so that no port is guessed."""
    folder = tmp_path_factory.mktemp("ranks")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(rank_main, (store.port, folder), nprocs=WORLD)
    del store
    results = [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]
    return SimpleNamespace(results=results, folder=folder)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums in the order of the ranks, which have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_training(ranks, phase, alone):
    """Both ranks hold the same bits, and each parameter has moved as far as in one process, within 1 % of its way."""
    (first, second), start = (result[phase] for result in ranks.results), weights(fresh_model(config()))
    first, second = (r.get("weights", r) for r in (first, second))
    assert first.keys() == second.keys() == alone.keys()
    ways = {name: float((alone[name] - start[name]).abs().max()) for name in alone}
    assert sum(way > 1e-4 for way in ways.values()) > 0.8 * len(ways)
    for name, way in ways.items():
        assert torch.equal(first[name], second[name]), name
        assert float((first[name] - alone[name]).abs().max()) < 0.01 * way + 5e-7, name  # rounding of values up to 1


# ---- tests -------------------------------------------------------------------------------------------------------

def test_samples_weigh_differently():
    """The case can tell right from wrong weights: the micro-batches hold very different numbers of vehicles."""
    counts = [int(part(samples(0), rank, WORLD, micro, MICRO)["present"].sum()) for rank in (0, 1) for micro in (0, 1)]
    assert max(counts) > 2.5 * min(counts)


def test_two_ranks_train_like_one_on_the_whole_batch(ranks, tmp_path):
    """2 ranks x 2 micro-batches x 2 samples and 1 x 8: equal parameters, loss and gradient norm after three steps."""
    progress, module, epoch = phase1_training(ALONE, tmp_path)
    log = epoch((samples(step) for step in range(STEPS)), SimpleNamespace(asked=False))
    assert not isinstance(module, DistributedDataParallel) and progress.counters["updates"] == STEPS
    same_training(ranks, "phase1", weights(progress.model))
    for name in ("loss", "grad_norm"):
        for result in ranks.results:
            assert result["phase1"]["log"][name] == pytest.approx(log[name], rel=1e-4), name


def test_ppo_on_two_ranks_equals_one(ranks):
    same_training(ranks, "phase2", run_phase2(ALONE))


def test_constrained_loss_on_two_ranks_equals_one(ranks):
    """With gradient checkpointing and three counts, as in phase 3."""
    assert config().phase3.checkpointing
    same_training(ranks, "phase3", run_phase3(ALONE))


def test_phase_3_decides_in_float32_under_autocast():
    """With bf16 in the update the first ratio was not 1, as in phase 2."""
    model, inside = fresh_model(config(), "risk_gnn"), []
    for layer in model.controller.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda *_: inside.append(torch.is_autocast_enabled("cpu")))
    module, batch = ConstrainedLoss(model, config().phase2, config().phase3), sequence_batch(0, model)
    with torch.autocast("cpu", torch.bfloat16):
        module(batch, ConstrainedLoss.counts(batch))
    assert inside and not any(inside)


def test_phase_3_without_weight_on_the_world_model_does_not_pay_for_it():
    """Its loss was computed, and its gradient of nothing but zeros: more than half of an optimiser step's time."""
    gradients = []
    for weight in (0.0, 0.5):
        cfg = config()
        cfg.phase3.world_model_weight = weight
        model = fresh_model(cfg, "risk_gnn")
        batch = sequence_batch(0, model)
        loss, log = ConstrainedLoss(model, cfg.phase2, cfg.phase3)(batch, ConstrainedLoss.counts(batch))
        loss.backward()
        assert ("loss_world_model" in log) == (weight > 0)
        assert all((p.grad is not None) == (weight > 0) for p in model.world_model.parameters())
        gradients.append({name: p.grad for name, p in model.controller.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=0)


def test_accumulation_reduces_gradients_once_per_optimiser_step(ranks):
    """Every bucket goes through the communication hook once in each step, although each step has two micro-batches."""
    for result in ranks.results:
        calls = result["phase1"]["calls"]
        assert len(calls) == STEPS
        for step in calls:
            assert sorted(step) == [(i, i == len(step) - 1) for i in range(len(step))]
        assert len(calls[-1]) > 1  # DDP cuts its buckets after the first step


def test_stop_request_of_one_rank_stops_both_at_the_same_step(ranks):
    """Rank 1 got SIGTERM within its second step: both finish that step, save and leave; nobody reads on."""
    results = [result["phase1"] for result in ranks.results]
    assert [r["asked"] for r in results] == [False, True]
    for r in results:
        assert r["stopped"] is None and r["updates"] == STEPS + 2 and r["yielded"] == 2 * MICRO
    state = checkpoint.load(ranks.folder / "phase1")
    assert state["counters"]["updates"] == STEPS + 2 and len(state["ranks"]) == WORLD


def test_nan_gradients_of_one_rank_stop_both_before_the_step(ranks):
    untouched = weights(fresh_model(config(), "risk_gnn", "world_model", "safety_shield"))
    for result in (result["poisoned"] for result in ranks.results):
        assert "the step was not taken" in result["error"]
        assert all(torch.equal(value, untouched[name]) for name, value in result["weights"].items())


def test_ranks_agree(ranks):
    numbers = torch.tensor([1, 2, 3, 10, 20, 30, 40, 1e4], dtype=torch.float64)
    for rank, said in enumerate(result["talk"] for result in ranks.results):
        assert (said["rank"], said["main"], said["world"]) == (rank, rank == 0, WORLD)
        assert said["sum"] == pytest.approx([2, 10, 0.2])
        assert said["any"] == [False, True, True, True]
        assert said["gather"] == [{"rank": 0}, {"rank": 1}]
        assert said["moments"] == pytest.approx([numbers.mean().item(), numbers.std(correction=0).item()])
        assert ranks.results[rank]["threads"] == 1


def test_a_team_of_one_needs_no_processes():
    one = talk(ALONE)
    assert one["sum"] == pytest.approx([1, 0, 0.1]) and one["any"] == [False, False, True, True]
    assert one["gather"] == [{"rank": 0}]
    assert one["moments"] == pytest.approx([2.0, (2 / 3) ** 0.5])
    with ALONE:
        ALONE.barrier()


# ---- options -----------------------------------------------------------------------------------------------------

def test_every_ddp_option_reaches_pytorch():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        team, options = Team(0, 2, 0, 2, torch.device("cpu")), Config().ddp
        plain = wrap(nn.Linear(2, 2), team, options)
        assert (plain.bucket_bytes_cap, plain.gradient_as_bucket_view, plain.find_unused_parameters,
                plain.static_graph, plain._comm_hooks) == (25 * 2 ** 20, True, False, False, [])
        other = wrap(nn.Linear(2, 2), team, replace(
            options, bucket_cap_mb=3.0, gradient_as_bucket_view=False, find_unused_parameters=True, static_graph=True,
            fp16_compression=True))
        assert (other.bucket_bytes_cap, other.gradient_as_bucket_view, other.find_unused_parameters,
                other.static_graph) == (3 * 2 ** 20, False, True, True)
        assert [hook for hook, _ in other._comm_hooks] == [default_hooks.fp16_compress_hook]
    finally:
        dist.destroy_process_group()


def test_nccl_without_enough_gpus_is_refused_before_anybody_waits(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    run, ddp = replace(Config().run, device="cpu"), replace(Config().ddp, backend="nccl")
    with pytest.raises(ConfigError, match="ddp.backend=nccl needs a GPU for each of the 2 ranks"):
        start_team(run, ddp)
    assert not dist.is_initialized()
