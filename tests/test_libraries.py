"""The environment in other people's hands: gymnasium.make and its vector environments, PettingZoo's parallel view."""
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from configs import load_config
from env import parallel
from env.flat import LEVELS
from env.parallel import ParallelTraffic

IDS = ("mixed_autonomy/Traffic-v0", "mixed_autonomy/FlatTraffic-v0")
needs_pettingzoo = pytest.mark.skipif(parallel.ParallelEnv is None, reason="pip install -e '.[multi]'")


def settings(*overrides):
    return load_config("configs/smoke.yaml", ["env.horizon_s=20", "data.margin=0", "phase1.augment.time_shift=0",
                                              "phase2.fragment_length=10", *overrides])


def test_a_single_override_needs_no_list():
    """Each letter of it was a wrong override."""
    assert load_config("configs/smoke.yaml", "env.horizon_s=70").env.horizon_s == 70


# ---- gymnasium ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", IDS)
def test_registered_environment_passes_gymnasiums_check_without_a_warning(name, scenarios):
    """`info["episode"]` is the key of gymnasium's and Stable-Baselines3's own statistics: ours stood there once, and
    neither could be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(name, cfg=settings(), folder=scenarios)
        check_env(env.unwrapped)
        env = gymnasium.wrappers.RecordEpisodeStatistics(env)
        env.reset(seed=1)
        while True:
            *_, terminated, truncated, info = env.step(env.action_space.sample())
            if terminated or truncated:
                break
        env.close()
    assert truncated and info["episode"]["l"] == 20 == info["summary"]["steps"]


@pytest.mark.parametrize("name", IDS)
def test_vector_environments_step_alike_in_one_process_and_in_several(name, scenarios):
    seen = []
    for mode in ("sync", "async"):
        envs = gymnasium.make_vec(name, num_envs=2, vectorization_mode=mode, cfg=settings(), folder=scenarios)
        envs.action_space.seed(5)
        _, info = envs.reset(seed=[3, 4])
        assert len(set(info["seed"])) == 2  # other seeds, other traffic
        rewards = [envs.step(envs.action_space.sample())[1] for _ in range(22)]  # over the end of an episode
        seen.append(np.array(rewards))
        envs.close()
    assert np.array_equal(*seen) and len(set(seen[0][:, 0])) > 10


def test_flat_rewards_add_up_to_what_phase_2_maximises(scenarios):
    """The price of a whole episode's C_int was taken in every step."""
    env = gymnasium.make(IDS[1], cfg=settings("phase2.cost_weight=40"), folder=scenarios)
    env.reset(seed=1)
    env.action_space.seed(2)
    total, costs, truncated = 0.0, [], False
    while not truncated:
        _, reward, _, truncated, info = env.step(env.action_space.sample())
        total, costs = total + reward, [*costs, info["cost"]]
    env.close()
    assert np.mean(costs) > 0.01
    assert total == pytest.approx(info["summary"]["return"] - 40 * np.mean(costs))


def test_without_a_configuration_the_message_shows_how_to_give_one():
    with pytest.raises(TypeError, match=r"cfg=None.*gymnasium.make\(.*cfg=configs.load_config"):
        gymnasium.make(IDS[0])


@pytest.mark.parametrize("name", IDS)
def test_a_way_of_drawing_is_answered_as_gymnasium_does(name):
    """`render_mode`, which many scripts always give, if only as None, was a TypeError with the whole configuration."""
    gymnasium.make(name, cfg=settings(), render_mode=None)
    with pytest.warns(UserWarning, match=r"render_mode='human' that is not in the possible render_modes \(\[\]\)"):
        gymnasium.make(name, cfg=settings(), render_mode="human")


# ---- PettingZoo ----------------------------------------------------------------------------------------------------

@pytest.fixture
def view(scenarios):
    """view(*overrides) -> ParallelTraffic, closed after the test."""
    made = []

    def build(*overrides):
        made.append(ParallelTraffic(settings(*overrides), scenarios))
        return made[-1]
    yield build
    for one in made:
        one.close()


@needs_pettingzoo
def test_parallel_view_passes_pettingzoos_own_test(view):
    from pettingzoo.test import parallel_api_test
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(view("env.horizon_s=60", "env.terminate_on_collision=false"), num_cycles=30)


@needs_pettingzoo
def test_agents_come_and_go_with_their_vehicles(view):
    traffic = view("env.scenario=merge", "env.horizon_s=60", "env.icv_share=0.5")
    traffic.reset(seed=1)
    ever, gone, steps = set(traffic.agents), set(), 0
    while traffic.agents:
        icvs = {traffic.env.slots.names[i] for i in np.flatnonzero(traffic.env.slots.icv)}
        assert len(traffic.agents) == len(icvs)
        observed, _, terminated, truncated, _ = traffic.step(dict.fromkeys(traffic.agents, (0, 1)))
        left = {agent for agent, over in terminated.items() if over}
        assert all(not observed[agent].any() for agent in left) and not left & set(traffic.agents)
        ever, gone, steps = ever | set(observed), gone | left, steps + 1
    assert len(gone) > 3 and ever == {f"icv_{i}" for i in range(len(ever))} and all(
        truncated[agent] for agent in observed if agent not in left)
    assert traffic.env.totals.effort == 0  # nobody was told anything


@needs_pettingzoo
def test_rewards_of_steps_without_an_icv_are_not_lost(view):
    """With few ICVs the agents' rewards added up to less than the traffic's."""
    traffic = view("env.icv_share=0.01", "env.horizon_s=60")
    traffic.reset(seed=5)
    first, before, total, steps = traffic.env.steps, traffic.env.totals.reward_sum, 0.0, 0
    while traffic.agents:
        rewards = traffic.step(dict.fromkeys(traffic.agents, (0, 1)))[1]
        total, steps = total + next(iter(rewards.values())), steps + 1
    assert total == pytest.approx(traffic.env.totals.reward_sum - before)
    assert 0 < steps < traffic.env.steps - first  # some were skipped


@needs_pettingzoo
def test_an_agents_action_reaches_its_vehicle_and_is_paid_for(view):
    traffic = view("env.icv_share=1.0")
    traffic.reset(seed=1)
    for _ in range(10):
        traffic.step(dict.fromkeys(traffic.agents, (0, 1)))
    agent, n = traffic.agents[1], len(traffic.agents)
    slot = traffic.slot_of[agent]
    _, rewards, _, _, infos = traffic.step({other: (0, 1) for other in traffic.agents} | {agent: (1, 1)})
    assert infos[agent]["cost"] == pytest.approx(-LEVELS[0] / n)
    assert infos[agent]["executed"] == {slot: pytest.approx(LEVELS[0], abs=0.05)}
    assert set(rewards.values()) == {traffic.env.totals.reward}


@needs_pettingzoo
def test_icvs_beyond_the_agents_are_left_to_sumos_drivers(view):
    traffic = view("env.icv_share=1.0", "env.max_vehicles=20")
    traffic.reset(seed=1)
    traffic.agent_of, traffic.free = {}, iter(traffic.possible_agents[18:])  # as if 18 had come and gone: two are left
    traffic._name_agents()
    while len(traffic.env.slots.slot_of) < 4:
        traffic.step(dict.fromkeys(traffic.agents, (11, 0)))
    assert set(traffic.agents) <= {"icv_18", "icv_19"}


@needs_pettingzoo
def test_who_comes_back_is_a_new_agent(view):
    """A vehicle that had parked came back as the agent that had been terminated."""
    traffic = view("env.icv_share=1.0")
    traffic.reset(seed=1)
    first, slot = traffic.agents[0], traffic.slot_of[traffic.agents[0]]
    for there in (False, True):
        traffic.env.slots.icv[slot] = there
        traffic._name_agents()
        assert first not in traffic.agents
    assert slot in traffic.slot_of.values()


def test_without_pettingzoo_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(parallel, "ParallelEnv", None)
    with pytest.raises(ImportError, match="multi"):
        ParallelTraffic(settings())
