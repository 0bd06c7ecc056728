"""PettingZoo's parallel view of the environment: every ICV is an agent, agents come and go with the traffic.

    from env.parallel import ParallelTraffic
    traffic = ParallelTraffic(configs.load_config("configs/quick.yaml"))

Needs the extra `multi`. All agents may act in every step: K does not bind here, the cost of TrafficEnv does.
"""
import numpy as np
from gymnasium import spaces

from env.flat import LEVELS, flatten
from env.graph import GLOBAL, NODE, SURROUND
from env.traffic_env import make_env

try:
    from pettingzoo import ParallelEnv
except ImportError:  # an extra: the module can be read without it, not used
    ParallelEnv = None


class ParallelTraffic(ParallelEnv or object):
    """Agents icv_0, icv_1, ... in the order in which ICVs appear; the first `env.max_vehicles` of an episode.

    Observation: the ICV's node features, surroundings and the global metrics, Box [39], scaled as in env/flat.py.
    Action: MultiDiscrete [12, 3]: 0 leaves the speed to SUMO's driver, i is the acceleration LEVELS[i - 1] (-3 to
    2 m/s^2 in steps of 0.5); lane 0 left, 1 keep, 2 right. Every agent gets the reward of all traffic (env/score.py);
    `infos[agent]` is TrafficEnv's, with the cost of all. An agent whose vehicle leaves is terminated. While there is no
    ICV, the traffic goes on without a step of the view.
    """
    metadata, render_mode = {"name": "mixed_traffic_v0", "render_modes": []}, None

    def __init__(self, cfg=None, folder=None):
        if ParallelEnv is None:
            raise ImportError("env.parallel needs PettingZoo: pip install -e '.[multi]'")
        self.env, self.agents = make_env(cfg, folder), []
        self.possible_agents = [f"icv_{i}" for i in range(cfg.env.max_vehicles)]
        self.observed = spaces.Box(-10.0, 10.0, (len(NODE) + len(SURROUND) + len(GLOBAL),), np.float32)
        self.commanded = {agent: spaces.MultiDiscrete([len(LEVELS) + 1, 3]) for agent in self.possible_agents}

    def observation_space(self, agent):
        """The same for all."""
        return self.observed

    def action_space(self, agent):
        """One for each, so that each can be seeded."""
        return self.commanded[agent]

    def reset(self, seed=None, options=None):
        """Begin an episode and wait for the first ICV: (observations, infos) by agent."""
        self.slot_of, self.agent_of, self.free = {}, {}, iter(self.possible_agents)
        _, info = self.env.reset(seed=seed)
        _, _, _, info = self._until_somebody_is_there(0.0, False, False, info)
        return self._observe(self.agents), dict.fromkeys(self.agents, info)

    def step(self, actions):
        """One control interval: (observations, rewards, terminations, truncations, infos) by agent, of those who acted
        and those who have come. Who has left observes zeros."""
        acting = [agent for agent in self.agents if agent in actions]
        speed, lane = np.array([actions[agent] for agent in acting], int).reshape(-1, 2).T
        slots = np.array([self.slot_of[agent] for agent in acting], int)
        told = (speed > 0) | (lane != 1)
        accel = np.where(speed > 0, LEVELS[speed - 1], np.nan)
        before = self.agents
        _, *outcome = self.env.command(slots[told], accel[told], lane[told], np.zeros(told.sum()))
        reward, terminated, truncated, info = self._until_somebody_is_there(*outcome)
        here, over = self.agents, terminated or truncated
        self.agents = [] if over else here
        everybody = [*before, *(agent for agent in self.agents if agent not in before)]
        return (self._observe(everybody), dict.fromkeys(everybody, float(reward)),
                {agent: terminated or agent not in here for agent in everybody},
                {agent: truncated and agent in here for agent in everybody}, dict.fromkeys(everybody, info))

    def _until_somebody_is_there(self, reward, terminated, truncated, info):
        """Name the ICVs that are present; let the traffic go on while there is none. Rewards are summed."""
        self._name_agents()
        while not (self.agents or terminated or truncated):
            _, more, terminated, truncated, info = self.env.command([], [], [], [])
            reward += more
            self._name_agents()
        return reward, terminated, truncated, info

    def _name_agents(self):
        """A vehicle keeps its name while it is there; the next free one goes to a newcomer, or to who comes back from
        a car park, until all have been given."""
        slots = self.env.slots
        present = {slots.names[slot]: int(slot) for slot in np.flatnonzero(slots.icv)}
        self.agent_of = {vehicle: agent for vehicle, agent in self.agent_of.items() if vehicle in present}
        for vehicle in present:
            if vehicle not in self.agent_of and (agent := next(self.free, None)):
                self.agent_of[vehicle] = agent
        self.slot_of = {self.agent_of[v]: slot for v, slot in present.items() if v in self.agent_of}
        self.agents = list(self.slot_of)

    def _observe(self, agents):
        nodes, surround, of_all = (self.env.observation[name] for name in ("nodes", "surround", "globals"))
        nothing = np.zeros(self.observed.shape, np.float32)
        at = self.slot_of
        return {agent: flatten(nodes[at[agent]], surround[at[agent]], of_all) if agent in at else nothing.copy()
                for agent in agents}

    def close(self):
        """End SUMO."""
        self.env.close()
