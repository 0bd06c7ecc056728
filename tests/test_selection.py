"""Selection as a policy: Plackett-Luce, log-probabilities, samples, lanes, rescaled values; and the driver."""
import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from scenes import build, close, noise, scene

from configs import load_config
from controllers import make_controller
from env import road
from models.controller import (DOWNSTREAM, FREE_SPEED, HAS_LEFT, HAS_RIGHT, KEEP, NODE_FEATURES, SURROUND_FEATURES,
                               Controller, ScaledValue, acceleration, downstream_speeds, plackett_luce)
from models.policy import Driver
from models.presets import PRESETS
from models.risk_gnn import INPUTS, POSITION, PROGRESS, SPEED

SMALL = PRESETS["small"]


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
    chosen = small.controller.select(*inputs, None if deterministic else noise(inputs[0], 3))
    assert chosen["picks"].shape == (len(inputs[0]), 5)
    assert chosen["valid"].sum(1).tolist() == [min(5, n) for n in inputs[1].sum(1).tolist()]
    assert (chosen["picks"][~chosen["valid"]] == 0).all()  # what is stored is an index of some candidate in any case
    log_prob, entropy, _ = small.controller.evaluate(*inputs, chosen)
    close(log_prob, chosen["log_prob"])
    assert (log_prob[~chosen["valid"]] == 0).all() and (log_prob[chosen["valid"]] != 0).all()
    assert entropy[0] == 0 and torch.isfinite(entropy).all()


def test_picks_are_distinct_candidates(small):
    inputs = candidates(small, [8, 6, 5, 2] * 50)
    chosen = small.controller.select(*inputs, noise(inputs[0], 4))
    for row, (picks, valid) in enumerate(zip(chosen["picks"], chosen["valid"])):
        taken = picks[valid].tolist()
        assert len(set(taken)) == len(taken) and inputs[1][row][picks[valid]].all()


def test_log_probability_is_that_of_the_parts(small):
    """pick, then release or not, and only if not the lane, the speed or not, and only then its density."""
    c, inputs = small.controller, candidates(small, [8] * 40)
    chosen = c.select(*inputs, noise(inputs[0], 5))
    scores = c.scores(*inputs[:2])
    picked = inputs[0].gather(1, chosen["picks"][..., None].expand(-1, -1, c.features))
    mean, lane, gates = c.heads(picked, inputs[2], c.lane_choices(picked))
    density = torch.distributions.Normal(mean, c.log_std.exp()).log_prob(chosen["u"])
    gate, pace = (torch.distributions.Bernoulli(logits=logit).log_prob(chosen[name].float())
                  for name, logit in zip(("release", "pace"), gates.unbind(-1)))
    steer = torch.distributions.Categorical(logits=lane).log_prob(chosen["lane"])
    expected = plackett_luce(scores, chosen["picks"], chosen["valid"]) + gate + torch.where(
        chosen["release"], 0.0, steer + pace + torch.where(chosen["pace"], density, 0.0))
    torch.testing.assert_close(chosen["log_prob"], expected, rtol=1e-4, atol=1e-4)
    assert all(0.1 < chosen[name].float().mean() < 0.9 for name in ("release", "pace"))  # both kinds occur


def test_entropy_is_that_of_the_parts(small):
    c, inputs = small.controller, candidates(small, [8, 3, 1])
    chosen = c.select(*inputs, noise(inputs[0], 6))
    _, entropy, _ = c.evaluate(*inputs, chosen)
    picked = inputs[0].gather(1, chosen["picks"][..., None].expand(-1, -1, c.features))
    mean, lane, gates = c.heads(picked, inputs[2], c.lane_choices(picked))
    gate, pace = (torch.distributions.Bernoulli(logits=logit) for logit in gates.unbind(-1))
    action = torch.distributions.Categorical(logits=lane).entropy() + pace.entropy() + pace.probs * (
        torch.distributions.Normal(mean, c.log_std.exp()).entropy())
    each = gate.entropy() + (1 - gate.probs) * action
    for row in range(3):
        first = torch.distributions.Categorical(logits=c.scores(*inputs[:2])[row][inputs[1][row]]).entropy()
        torch.testing.assert_close(entropy[row], first + each[row][chosen["valid"][row]].mean(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [math.inf, -0.2])
def test_expected_effort_is_the_mean_of_what_is_commanded(small, limit):
    """Within four standard errors of 20,000 draws of the gates and lanes, for the same picks. It once counted
    accelerations that `evaluate.accel_limit` cuts."""
    model, draws = copy.deepcopy(small), 20000
    model.controller.accel_limit = limit
    with torch.no_grad():
        model.controller.log_std.fill_(-6.0)
        inputs = [x.expand(draws, *x.shape[1:]) for x in candidates(model, [4], 8)]
        uniform, normal = noise(inputs[0], 8)
        uniform[:, 5 * model.controller.k:] = 0.5
        chosen = model.controller.select(*inputs, (uniform, normal))
        each = chosen["pace"] * acceleration(chosen["u"]).clamp(max=limit).abs() + 5.0 * (chosen["lane"] != KEEP)
        effort = (each * ~chosen["release"] * chosen["valid"]).sum(1)
        *_, expected = model.controller.evaluate(*(x[:1] for x in inputs), {k: v[:1] for k, v in chosen.items()})
    assert (chosen["picks"] == chosen["picks"][0]).all() and effort.std() > 0.5
    model.controller.evaluate(*inputs, chosen)[2].sum().backward()
    accel, left, keep, right, release, pace = model.controller.action[-1].bias.grad.tolist()
    assert accel == 0 and keep and release and pace  # commands are given up, not weakened to "hold your speed"
    assert abs(effort.mean() - expected[0]) < 4 * effort.std() / math.sqrt(draws)


def test_divergence_is_that_of_the_parts(small):
    """Of the first pick, the gates, and where they are open the lane and the acceleration; 0 from itself. A wider
    noise of the acceleration used to count for nothing."""
    mine, other = copy.deepcopy(small.controller), build("small", seed=4).controller
    inputs = candidates(small, [8, 3, 1, 0])
    mine.log_std.data += 0.7
    chosen = mine.select(*inputs, noise(inputs[0], 9))
    close(mine.divergence(mine, *inputs, chosen), torch.zeros(4))
    picked = inputs[0].gather(1, chosen["picks"][..., None].expand(-1, -1, mine.features))
    heads = lambda c: c.heads(picked, inputs[2], c.lane_choices(picked))  # noqa: E731
    (mean, lane, gates), (mean0, lane0, gates0) = heads(mine), heads(other)
    bernoulli, kl = torch.distributions.Bernoulli, torch.distributions.kl_divergence
    gate = kl(bernoulli(logits=gates0), bernoulli(logits=gates))
    steer = kl(*(torch.distributions.Categorical(logits=x) for x in (lane0, lane)))
    speed = kl(*(torch.distributions.Normal(x, c.log_std.exp()) for x, c in ((mean0, other), (mean, mine))))
    released, pace = gates0.sigmoid().unbind(-1)
    told = gate[..., 0] + (1 - released) * (steer + gate[..., 1] + pace * speed)
    result = mine.divergence(other, *inputs, chosen)
    for row in range(3):
        first = kl(*(torch.distributions.Categorical(logits=c.scores(*inputs[:2])[row][inputs[1][row]])
                     for c in (other, mine)))
        close(result[row], first + told[row][chosen["valid"][row]].sum())
    assert result[3] == 0 and (result[:3] > 0.01).all()


def test_gumbel_top_k_samples_plackett_luce(small):
    """Pearson's statistic over the 20 ordered pairs of 5 candidates, 19 degrees of freedom: 43.8 has p = 0.001."""
    model, draws = copy.deepcopy(small), 20000
    model.controller.k = 2
    features, valid, surroundings = candidates(model, [5], 8)
    inputs = [x.expand(draws, *x.shape[1:]) for x in (features, valid, surroundings)]
    with torch.no_grad():
        model.controller.alpha.mul_(50), model.controller.beta.mul_(50)
        chosen = model.controller.select(*inputs, noise(inputs[0], 7, 2))
        scores = model.controller.scores(features, valid)
    pairs = torch.tensor(list(itertools.permutations(range(5), 2)))
    probability = plackett_luce(scores.expand(20, -1), pairs, torch.ones_like(pairs, dtype=torch.bool)).sum(1).exp()
    counts = torch.stack([(chosen["picks"] == pair).all(1).sum() for pair in pairs])
    assert counts.sum() == draws and probability.max() > 3 * probability.min()  # a case in which the order matters
    assert ((counts - draws * probability) ** 2 / (draws * probability)).sum() < 43.8


def test_actions_are_sampled_from_their_distributions(small):
    """Lane and gate frequencies, mean and spread of u, over many draws of one candidate."""
    draws, inputs = 20000, candidates(small, [1], 1, seed=2)
    inputs[0][..., -SURROUND_FEATURES:] = 1.0
    many = [x.expand(draws, *x.shape[1:]) for x in inputs]
    with torch.no_grad():
        chosen = small.controller.select(*many, noise(many[0], 8))
        mean, lane, gates = small.controller.heads(*inputs[::2], torch.ones(1, 1, 3, dtype=torch.bool))
    u, tolerance = chosen["u"][:, 0], 5 / math.sqrt(draws)
    assert u.mean().item() == pytest.approx(mean.item(), abs=tolerance)
    assert u.std().item() == pytest.approx(small.controller.log_std.exp().item(), abs=tolerance)
    for name, share in zip(("release", "pace"), gates.sigmoid().flatten().tolist()):
        assert chosen[name][:, 0].float().mean().item() == pytest.approx(share, abs=tolerance)
    shares = torch.bincount(chosen["lane"][:, 0], minlength=3) / draws
    torch.testing.assert_close(shares, lane.exp()[0, 0], rtol=0, atol=tolerance)


def test_deterministic_selection_takes_the_best(small):
    inputs = candidates(small, [8, 5, 2])
    chosen = small.controller.select(*inputs)
    order = small.controller.scores(*inputs[:2]).argsort(1, descending=True)
    for row, count in enumerate([5, 5, 2]):
        assert chosen["picks"][row, :count].tolist() == order[row, :count].tolist()


def test_lanes_that_do_not_exist_are_never_chosen(small):
    """Many draws; the heads want every lane, the surroundings forbid some."""
    model = copy.deepcopy(small)
    model.controller.action[-1].bias.data[1:4] = torch.tensor([5.0, -5.0, 5.0])  # loves to change lanes
    features, valid, surroundings = candidates(model, [8] * 500)
    flags = features[..., -SURROUND_FEATURES:][..., HAS_LEFT:HAS_RIGHT + 1]
    for sampling in (noise(features, 1), None):
        chosen = model.controller.select(features, valid, surroundings, sampling)
        has = flags.gather(1, chosen["picks"][..., None].expand(-1, -1, 2)) > 0.5
        lane = chosen["lane"]
        assert not ((lane == 0) & ~has[..., 0]).any() and not ((lane == 2) & ~has[..., 1]).any()
        for which in (0, 2):
            assert (lane == which).any()
        assert (lane[~has.any(-1)] == 1).all() and (~has.any(-1)).any()


def test_lanes_are_chosen_where_they_exist_and_have_room(small):
    """lane_choices reads normalised, rounded features. Changes into no room once were told, and told again in every
    second of waiting, each at the price of a change."""
    surround = scene(6, 6, 2)["surround"]
    gaps = surround[..., 2:10].view(2, 6, 2, 4)[..., ::2]  # front and rear, left and right
    gaps[0, :3] = torch.tensor([4.9, 5.2, 100.0])[:, None, None]
    widths = (SMALL.gnn_width, SMALL.latent, SMALL.latent, len(DOWNSTREAM), NODE_FEATURES)
    parts = [torch.zeros(2, 6, n) for n in widths]
    features = small.controller.candidate_features(*parts, surround)
    wary = Controller(SMALL, 5, room_m=5.0)
    lanes = wary.lane_choices(features)
    room = gaps.amin(-1) > 5.05
    assert lanes[..., 1].all() and room[0, :3].tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert torch.equal(lanes[..., 0], (surround[..., HAS_LEFT] == 1) & room[..., 0])
    assert torch.equal(lanes[..., 2], (surround[..., HAS_RIGHT] == 1) & room[..., 1])
    assert torch.equal(lanes, wary.lane_choices(features.half()))
    anywhere = Controller(SMALL, 5, room_m=0.0).lane_choices(features)
    assert torch.equal(anywhere[..., ::2], surround[..., HAS_LEFT:HAS_LEFT + 2] == 1) and (anywhere != lanes).any()


def test_downstream_speeds_equal_a_loop():
    g = torch.Generator().manual_seed(4)
    position, speed = torch.rand(2, 9, generator=g), 30 * torch.rand(2, 9, generator=g)
    mask = torch.rand(2, 9, generator=g) < 0.7
    means = downstream_speeds(position[:, :5], position, speed, mask)
    for b in range(2):
        for c in range(5):
            for reach, mean in zip(DOWNSTREAM, means[b, c]):
                among = [float(speed[b, n]) for n in range(9)
                         if mask[b, n] and 0 < position[b, n] - position[b, c] <= reach]
                assert float(mean) == pytest.approx(sum(among) / len(among) if among else FREE_SPEED, abs=1e-4)
    assert FREE_SPEED == road.FREE_SPEED and (means == FREE_SPEED).any() and (means != FREE_SPEED).any()


def test_acceleration_stays_in_its_range_and_starts_at_zero(models):
    assert acceleration(torch.tensor([-50.0, 50.0])).tolist() == [-3.0, 2.0]
    inputs = candidates(models["small"], [8])
    with torch.no_grad():
        chosen = models["small"].controller.select(*inputs)
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
    embedding = models["small"].risk_gnn(*(full[name] for name in INPUTS))
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


def test_who_has_a_jam_around_or_is_in_one_or_about_to_leave_cannot_be_picked(models):
    """Who left a queue was told not to accelerate, and it stayed; lane changes beyond a jam cost its outflow 2 %."""
    driver, reach, left = Driver(models["small"], 2, 40, leave_below=15.0, leave_after=0.9), DOWNSTREAM[-1], []
    for seed, env in itertools.product(range(5), range(2)):
        obs = observation(seed)
        place, speed, progress = obs["nodes"][env, :9, [POSITION, SPEED, PROGRESS]]
        may = [icv := np.flatnonzero(obs["icv"][env]), icv[speed[icv] >= 15]]
        for way in (1, -1):
            near = [speed[(0 < way * (place - place[i])) & (way * (place - place[i]) <= reach)] for i in may[-1]]
            may.append(np.array([i for i, x in zip(may[-1], near) if not len(x) or x.mean() >= 15], int))
        may.append(may[-1][progress[may[-1]] <= 0.9])
        seen = driver.perceive(obs, [0, 1])
        assert seen["slots"][env][seen["valid"][env]].tolist() == may[-1].tolist()
        left.append([*map(len, may)])
    assert (np.diff(np.sum(left, 0)) < 0).all() and sum(x[-1] for x in left) > 5  # each leaves some out


@torch.no_grad()
def test_accelerations_are_cut_to_the_limit(models):
    """What is wanted is cut, so that the shield's log counts only what the shield changed."""
    cut = copy.deepcopy(models["small"])
    free, driver, told = Driver(models["small"], 2, 40), Driver(cut, 2, 40), []
    for seed in range(5):
        seen = free.perceive(observation(seed), [0, 1])
        choice = free.choose(seen, noise(seen["candidates"], seed))
        choice["pace"][:] = True
        wanted = free.commands(seen, choice)["wanted"]
        for limit in (0.0, 0.3):
            cut.controller.accel_limit = limit
            sent = driver.commands(seen, choice)
            np.testing.assert_allclose(sent["wanted"], np.minimum(wanted, limit), atol=1e-6)
            assert (sent["accel"] <= limit + 1e-6).all()
        told += wanted.ravel().tolist()
    assert min(told) < 0 < 0.3 < max(told)


def test_policy_is_scored_with_the_limits_of_its_configuration():
    """Once with the shield of its training, whatever that of the rules beside it was told."""
    settings = "evaluate.leave_below=7 evaluate.leave_after=0.8 evaluate.accel_limit=0.5 shield.thw_s=5"
    cfg = load_config("configs/smoke.yaml", settings.split())
    driver = make_controller(cfg, "policy", {"policy": build("small")}, 1).driver
    limits, model = (driver.leave_below, driver.leave_after), driver.model
    assert (*limits, model.controller.accel_limit, model.safety_shield.cfg.thw_s) == (7, 0.8, 0.5, 5)


def test_decisions_are_taken_on_what_is_stored(models):
    """The policy once decided on float32 features and learned from their float16 copies: the first ratio was not 1."""
    driver = Driver(models["small"], 2, 40)
    seen = driver.perceive(observation(3), [0, 1])
    choice, _ = driver.decide(seen, noise(seen["candidates"], 1))
    stored = [seen[name].half().float() for name in ("candidates", "scene")]
    with torch.no_grad():
        log_prob, *_ = models["small"].controller.evaluate(stored[0], seen["valid"], stored[1], choice)
        value, cost_value = models["small"].controller.values(stored[1])
    for stored_now, decided in ((log_prob, "log_prob"), (value, "value"), (cost_value, "cost_value")):
        torch.testing.assert_close(stored_now, choice[decided], rtol=0, atol=1e-6)


def test_commands_name_slots_of_icvs_and_released_ones_get_none(models):
    driver, obs = Driver(models["small"], 2, 40), observation(3)
    seen = driver.perceive(obs, [0, 1])
    choice, commands = driver.decide(seen, noise(seen["candidates"], 1))
    active = (choice["valid"] & ~choice["release"] & (choice["pace"] | (choice["lane"] != KEEP))).numpy()
    assert active.any() and not active.all()
    assert (commands["slot"][~active] == 40).all()
    for env in range(2):
        assert obs["icv"][env][commands["slot"][env][active[env]]].all()
    wanted = seen["slots"].gather(1, choice["picks"]).numpy()
    assert (commands["slot"][active] == wanted[active]).all()
    paced = choice["pace"].numpy()
    assert (commands["accel"] <= commands["wanted"] + 1e-6)[paced].all() and np.isnan(commands["wanted"][~paced]).all()
    assert (commands["reason"][~active] == 0).all()


def test_statistics_reach_the_normalisers():
    model = build("small")
    nodes = {"mean": [9.0] * 9, "std": [8.0] * 9}
    model.set_statistics({"nodes": nodes, "globals": {"mean": [1.0] * 16, "std": [2.0] * 16}})
    speeds = torch.zeros(9).index_fill(0, torch.tensor(2), 25.0)
    assert model.risk_gnn.normalize(speeds)[2] == 2.0 and model.risk_gnn.normalize(speeds)[0] == pytest.approx(-5 / 3)
    assert (model.controller.globals(torch.full((16,), 5.0)) == 2.0).all()
