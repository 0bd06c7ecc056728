"""The PPO of Stable-Baselines3 and of Ray RLlib on the flat traffic environment, with the settings of `phase2`.

    python -m benchmarks.rivals SIDE FOLDER PARAMETERS CONFIG.yaml [section.key=value ...]

SIDE is sb3, rllib, sb3_gnn or rllib_gnn, run by benchmarks/compare_rl.py with the interpreter of an environment that
has the extra `compare`; or env, which needs no extra: nobody learns. FOLDER/metrics.jsonl is left in the form of our
own training, and FOLDER/facts.json.
"""
import functools
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium
import numpy as np

from configs import load_config
from env.flat import GRAPH, VEHICLES, FlatTraffic
from env.traffic_env import check_scenario
from env.workers import make_pool
from runtime.metrics import Metrics

RAY_OBJECT_STORE = 200 * 2 ** 20  # bytes; the least that its documentation suggests


class NotingTraffic(FlatTraffic):
    """FlatTraffic that keeps its scenario in `folder`, and there notes one line per ended episode: shows whether
    everybody simulated about the same traffic."""

    def __init__(self, cfg, folder, arrays=VEHICLES):
        super().__init__(cfg, str(Path(folder) / "scenario"), arrays)
        self.notes = Path(folder) / "episodes.jsonl"

    def step(self, action):
        *rest, info = super().step(action)
        if "summary" in info:
            with open(self.notes, "a") as file:
                facts = {name: info["summary"][name] for name in ("ocr", "loaded")}
                file.write(json.dumps({"time": time.time(), **facts}) + "\n")
        return *rest, {}


def hidden_width(inputs, outputs, parameters):
    """Width h of two separate MLPs, [inputs, h, h, outputs] for the policy and [inputs, h, h, 1] for the value, that
    together hold about as many parameters as wanted."""
    def count(h):
        return 2 * (inputs + 1) * h + 2 * (h + 1) * h + (h + 1) * (outputs + 1)
    return min(range(1, 1025), key=lambda h: abs(count(h) - parameters))


def note(folder, parameters, package, threads):
    """What was built."""
    sizes = [(p.numel(), p.requires_grad) for p in parameters]
    facts = {"parameters": sum(n for n, _ in sizes), "trained": sum(n for n, trained in sizes if trained),
             "version": f"{package} {version(package)}", "threads": threads}
    (Path(folder) / "facts.json").write_text(json.dumps(facts))


def environment(cfg, folder):
    """Our pool of environments commanded at random, without any policy: a speed that no learner can exceed."""
    p, k, rng, metrics = cfg.phase2, cfg.env.max_commands, np.random.default_rng(cfg.run.seed), Metrics(folder, 2)
    note(folder, [], "numpy", 1)
    with make_pool(cfg, cfg.rollout.num_workers, 1, str(Path(folder) / "scenario")) as pool:
        envs, arrays = pool.groups[0], pool.arrays
        pool.reset(envs)
        for epoch in range(1, p.iterations + 1):
            start = time.perf_counter()
            for _ in range(p.train_batch_size // len(envs)):
                for env in envs:
                    icvs = rng.permutation(np.flatnonzero(arrays["icv"][env]))[:k]
                    arrays["slot"][env] = cfg.env.max_vehicles
                    arrays["slot"][env][:len(icvs)] = icvs
                    arrays["accel"][env], arrays["lane"][env] = rng.uniform(-3, 2, k), rng.integers(0, 3, k)
                pool.send(envs, envs)
                pool.receive(envs)
            metrics.record(epoch, p.iterations, env_steps=epoch * p.train_batch_size, time_learn=0.0,
                           time_collect=time.perf_counter() - start)


def hidden(cfg, make_env, graph, parameters):
    """[h, h]; with `graph` (a GraphFeatures) the MLPs read its output and hold what it leaves of the parameters."""
    env = make_env()
    inputs = graph.width if graph else env.observation_space.shape[0]
    rest = parameters - (sum(p.numel() for p in graph.parameters()) if graph else 0)
    return 2 * [hidden_width(inputs, int(env.action_space.nvec.sum()), rest)]


def sb3(cfg, folder, make_env, graph, layers):
    """Stable-Baselines3: one environment per process of SubprocVecEnv, inference and learning in this process."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import SubprocVecEnv

    p, metrics = cfg.phase2, Metrics(folder, 2)

    class Recorder(BaseCallback):
        """An iteration ends where the next rollout starts."""
        epoch = 0

        def _on_step(self):
            return True

        def _on_rollout_start(self):
            self._on_training_end()
            self.start = time.perf_counter()

        def _on_rollout_end(self):
            self.collected = time.perf_counter()

        def _on_training_end(self):
            if self.num_timesteps:
                self.epoch += 1
                metrics.record(self.epoch, p.iterations, env_steps=self.num_timesteps,
                               time_collect=self.collected - self.start,
                               time_learn=time.perf_counter() - self.collected)

    class Extractor(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, graph.width)
            self.graph = graph

        def forward(self, flat):
            return self.graph(flat)

    envs = SubprocVecEnv([make_env] * cfg.rollout.num_workers)
    network = {"net_arch": layers, **({"features_extractor_class": Extractor} if graph else {})}
    model = PPO("MlpPolicy", envs, learning_rate=p.lr, n_steps=p.train_batch_size // cfg.rollout.num_workers,
                batch_size=p.minibatch_size, n_epochs=p.epochs, gamma=p.gamma, gae_lambda=p.gae_lambda,
                clip_range=p.clip, ent_coef=p.entropy_weight, vf_coef=p.value_weight, max_grad_norm=p.clip_norm,
                policy_kwargs=network, seed=cfg.run.seed, device="cpu")
    note(folder, model.policy.parameters(), "stable-baselines3", torch.get_num_threads())
    model.learn(p.iterations * p.train_batch_size, callback=Recorder())
    envs.close()


def graph_module(graph):
    """RLlib's default PPO module behind `graph`."""
    from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
    from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule

    class GraphModule(DefaultPPOTorchRLModule):
        def setup(self):
            space = gymnasium.spaces.Box(-10.0, 10.0, (graph.width,))
            self.catalog = PPOCatalog(space, self.action_space, model_config_dict=self.model_config)
            super().setup()
            self.graph = graph

        def _forward(self, batch, **options):
            return super()._forward({**batch, "obs": self.graph(batch["obs"])}, **options)

        def _forward_train(self, batch, **options):
            return super()._forward_train({**batch, "obs": self.graph(batch["obs"])}, **options)

        def compute_values(self, batch, embeddings=None):
            if embeddings is None:
                batch = {**batch, "obs": self.graph(batch["obs"])}
            return super().compute_values(batch, embeddings)

    return GraphModule


def rllib(cfg, folder, make_env, graph, layers):
    """Ray RLlib, new API stack: one environment per env runner, the learner in this process."""
    import ray
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.core.rl_module.rl_module import RLModuleSpec
    from ray.tune.registry import register_env

    p, workers, metrics = cfg.phase2, cfg.rollout.num_workers, Metrics(folder, 2)
    ray.init(num_cpus=workers + 1, object_store_memory=RAY_OBJECT_STORE, include_dashboard=False,
             _temp_dir=str(Path(folder) / "ray"))
    register_env("traffic", lambda _: make_env())
    model = DefaultModelConfig(fcnet_hiddens=layers, vf_share_layers=False)
    config = (PPOConfig()
              .environment("traffic")
              .env_runners(num_env_runners=workers, num_envs_per_env_runner=1,
                           rollout_fragment_length=p.train_batch_size // workers)
              .learners(num_learners=0)
              .training(train_batch_size_per_learner=p.train_batch_size, minibatch_size=p.minibatch_size,
                        num_epochs=p.epochs, lr=p.lr, gamma=p.gamma, lambda_=p.gae_lambda, clip_param=p.clip,
                        entropy_coeff=p.entropy_weight, vf_loss_coeff=p.value_weight, grad_clip=p.clip_norm,
                        use_kl_loss=False)
              .rl_module(rl_module_spec=RLModuleSpec(module_class=graph_module(graph)) if graph else None,
                         model_config=model)
              .debugging(seed=cfg.run.seed))
    algorithm = config.build_algo()
    module = algorithm.learner_group._learner.module["default_policy"]
    note(folder, module.parameters(), "ray", torch.get_num_threads())
    for epoch in range(1, p.iterations + 1):
        result = algorithm.train()
        metrics.record(epoch, p.iterations, env_steps=int(result["num_env_steps_sampled_lifetime"]),
                       time_collect=float(result["timers"]["env_runner_sampling_timer"]),
                       time_learn=float(result["timers"]["learner_update_timer"]))
    algorithm.stop()
    ray.shutdown()


def main():
    if len(sys.argv) < 5:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    side, folder, parameters, config, *overrides = sys.argv[1:]
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")  # its workers step back by 15 otherwise
    cfg, graph, arrays = load_config(config, overrides), None, VEHICLES
    check_scenario(cfg, Path(folder) / "scenario")
    if side == "env":
        return environment(cfg, folder)
    if side.endswith("_gnn"):
        from benchmarks.rival_networks import GraphFeatures
        graph, arrays = GraphFeatures(cfg), GRAPH
    make_env = functools.partial(NotingTraffic, cfg, folder, arrays)
    train = sb3 if side.startswith("sb3") else rllib
    train(cfg, folder, make_env, graph, hidden(cfg, make_env, graph, int(parameters)))


if __name__ == "__main__":
    main()
