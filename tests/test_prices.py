"""What interventions cost in phases 2 and 3: prices, the multiplier's limit, and the figures that are told of them."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_ppo import ALONE, E, T, config, rollout_of

import train_ddp
import train_rl
from configs import load_config
from runtime.rollout import mean_icvs, summarise


def facts_of_two():
    """Two environments, four steps; in the second one the last two are lost."""
    lost = torch.zeros(4, 2, dtype=torch.bool)
    lost[2:, 1] = True
    return {"lost": lost, "icvs": torch.tensor([[2, 9], [2, 3], [2, 1], [2, 1]]), "reward": torch.ones(4, 2),
            "cost": torch.zeros(4, 2)}


def test_mean_of_the_icvs_leaves_out_lost_steps():
    assert mean_icvs(facts_of_two()).tolist() == [2.0, 6.0]


def test_share_of_released_is_of_those_picked():
    picked = torch.zeros(4, 2, 5, dtype=torch.bool)
    picked[:, :, :2], release = True, torch.ones(4, 2, 5, dtype=torch.bool)
    release[:, :, 0] = False
    assert summarise(ALONE, {**facts_of_two(), "pick_valid": picked, "release": release})["released"] == 0.5


def test_phase_2_prices_commands_as_its_configuration_says(small):
    cfg, prices = config(), []
    for cfg.phase2.cost_weight in (0.0, 10.0):
        rollout = rollout_of(small.controller)
        rollout.fixed.update({name: np.zeros((T, E), kind) for name, kind in (
            ("terminated", bool), ("ended", bool), *((name, np.float32) for name in (
                "value", "cost_value", "next_value", "next_cost_value")))}, icvs=np.full((T, E), 4))
        train_rl.add_advantages(cfg, ALONE, rollout)
        prices.append(rollout.fixed["price"])
    assert not prices[0].any() and (prices[1] > 0).all()


@pytest.mark.parametrize("interval", [1.0, 0.5])
def test_price_of_an_episodes_effort_is_that_of_its_c_int(interval):
    cfg, shape = config(), (40, 1)
    cfg.env.control_interval, cfg.env.horizon_s = interval, 40 * interval
    batch = {**{name: torch.randn(shape) for name in ("reward", "cost", "value", "cost_value", "next_value",
                                                      "next_cost_value")}, "icvs": torch.full(shape, 4),
             **dict.fromkeys(("terminated", "ended", "lost"), torch.zeros(shape, dtype=torch.bool))}
    team = SimpleNamespace(moments=lambda values: (0.0, 1.0))
    price = train_ddp.advantages(cfg, team, batch, 9.0)["price"]
    torch.testing.assert_close(price.sum(), torch.tensor(9.0 / 4))  # an effort of 1 in every step: C_int 1 / 4


def test_the_multiplier_follows_the_limit_of_its_epoch(tmp_path, monkeypatch):
    """Not the last one's: the curriculum would be one in the log only."""
    limits = []
    monkeypatch.setattr(train_ddp, "learn_constrained", lambda *_: {"overflow_share": 0.0})
    monkeypatch.setattr(train_ddp.objectives, "move_multiplier", lambda c, cost, icvs, limit, *_: limits.append(limit))
    guard = SimpleNamespace(facts=dict, must_stop=lambda: False, give_up_worker=lambda pool: False)
    train_ddp.phase3(load_config("configs/smoke.yaml", [
        f"run.folder={tmp_path}", "phase3.epochs=2", "phase3.limit_start=0.2", "phase3.limit_end=0.1",
        "phase3.limit_epochs=2"]), ALONE, guard)
    assert [round(limit, 6) for limit in limits] == [0.2, 0.15]
