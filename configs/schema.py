"""Every setting of the project: type, default, range and meaning.

The YAML files hold values; this file, configs/traffic.py and configs/phases.py hold meaning. `opt` attaches the
description and the limits that the loader (configs/loader.py) enforces. Defaults: the target machine's.
"""
import math
from dataclasses import dataclass

from configs.options import opt, sub
from configs.phases import DDPConfig, Phase1Config, Phase3Config, PPOConfig, RolloutConfig
from configs.traffic import (BASELINES, BaselinesConfig, BottleneckConfig, CorridorConfig, DriverConfig,
                             FigureEightConfig, MergeConfig, RingConfig)


@dataclass
class RunConfig:
    """Name, place, seed, device and numerics of a run."""
    name: str = opt("default", "run folder below `folder`")
    folder: str = opt("runs", "where run folders live")
    seed: int = opt(1, "everything random derives from it", low=0, high=2 ** 31 - 1)
    device: str = opt("auto", "auto = CUDA when there is one", choices=("auto", "cpu", "cuda"))
    cudnn_benchmark: bool = opt(True, "cuDNN tries its algorithms and keeps the fastest (not with deterministic)")
    deterministic: bool = opt(False, "GPU: only operations that give the same bits every time; slower")
    matmul_precision: str = opt("highest", "float32 products on the GPU: highest = no TF32",
                                choices=("highest", "high", "medium"))
    detect_anomaly: bool = opt(False, "name the operation whose gradient is NaN; several times slower")
    tensorboard: bool = opt(True, "metrics also go to <run>/tensorboard when TensorBoard is installed (extra `viz`)")
    threads: int = opt(0, "torch CPU threads per process, 0 = cores not taken by workers / processes", low=0)


@dataclass
class ProfileConfig:
    """Which optimiser steps torch.profiler records (runtime/profiler.py)."""
    active: int = opt(0, "optimiser steps that torch.profiler records, 0 = no profile; 3 is a good number", low=0)
    wait: int = opt(1, "steps left alone before", low=0)
    warmup: int = opt(1, "steps profiled but thrown away before", low=0)
    repeat: int = opt(1, "so many such rounds, each with a trace and a table of its own", low=1)


@dataclass
class EnvConfig:
    """One environment and its SUMO."""
    scenario: str = opt("corridor", "corridor, ring, figure_eight, merge, bottleneck, or path of a .sumocfg")
    backend: str = opt("traci", "how Python talks to SUMO; libsumo: faster, one environment per process, no deadlines; "
                       "gui: like traci, in a window", choices=("traci", "libsumo", "gui"))
    step_length: float = opt(0.1, "simulation step, s", low=0.01, high=1.0)
    suite: list[str] = opt(["same"], "variants that take turns, an episode's by its seed: each element is one or more "
                                     "section.key=value of a scenario, env.scenario, env.demand_scale, env.icv_share, "
                                     "driver, reward, baselines, phase2.imitate; same = as configured")
    control_interval: float = opt(1.0, "time between two commands, s", low=0.1, high=10.0)
    horizon_s: float = opt(900.0, "episode length after the warm-up, s; then the episode is truncated", low=1)
    warmup_s: float = opt(0.0, "simulated without control before the first observation, s; arrivals in it count, "
                          "averages do not", low=0)
    demand_scale: float = opt(1.0, "multiplies the demand of any scenario (SUMO's --scale)", low=0.01, high=10)
    icv_share: float = opt(0.25, "share of the vehicles that become ICVs at departure", low=0, high=1)
    max_vehicles: int = opt(600, "slots for vehicles present at once; further ones are counted as overflow", low=2,
                            high=2 ** 15 - 1)
    max_commands: int = opt(5, "K: ICVs commanded per control step at most; 1000 = all", low=0, high=1000)
    speed_mode: int = opt(26, "SUMO speed mode of commanded ICVs: no comfort limit of braking; safe-speed check at "
                              "crossings and among sublanes only (if shielded)", low=0, high=127)
    lane_change_mode: int = opt(1621, "SUMO lane-change mode of ICVs with a commanded speed (1621: SUMO's)", low=0)
    lane_change_hold_s: float = opt(4.5, "how long a commanded lane is held and not sent again, s", low=0.1)
    teleport_s: float = opt(300.0, "SUMO teleports a vehicle that waits longer, s; negative = never", low=-1)
    terminate_on_collision: bool = opt(True, "a collision ends a training episode (evaluation only counts it)")
    recycle_episodes: int = opt(200, "start a fresh SUMO process after so many episodes", low=1)
    call_timeout_s: float = opt(30.0, "a SUMO that answers later counts as frozen, s", low=0.1, high=1e6)
    start_timeout_s: float = opt(60.0, "time a SUMO gets to load its network, s", low=1, high=1e6)

    @property
    def episode_steps(self):
        """Control steps of an episode; the last one may reach beyond the horizon."""
        return math.ceil(round(self.horizon_s / self.control_interval, 6))  # 55 / 1.1 is a little less than 50


@dataclass
class GraphConfig:
    """Who is whose neighbour (env/graph.py)."""
    k_min: int = opt(4, "neighbours per vehicle: k = min(max(k_min, ceil(N / k_divisor)), k_max)", low=1)
    k_divisor: int = opt(4, "see k_min", low=1)
    k_max: int = opt(16, "see k_min", low=1, high=64)
    radius_m: float = opt(200.0, "vehicles further away are no neighbours, m", low=1)
    lookahead_m: float = opt(200.0, "how far leaders and followers are searched, m", low=10, high=1000)


@dataclass
class RewardConfig:
    """Weights and references of the reward (env/score.py)."""
    efficiency_weight: float = opt(0.7, "weight of efficiency in the reward (the score's is 0.7)")
    stability_weight: float = opt(0.3, "weight of stability in the reward (the score's is 0.3)")
    ocr_ref: float = opt(0.8, "typical OCR without control: turns arrivals into score points", low=0.01)
    sigma_ref: float = opt(7.65, "typical sigma_v without control, m/s", low=0.01)
    abs_a_ref: float = opt(0.405, "typical abs_a without control, m/s^2", low=0.01)
    demand_ref: float = opt(1100.0, "typical number of vehicles loaded in an episode", low=1)
    collision_penalty: float = opt(10.0, "points lost per collision", low=0)


@dataclass
class ModelConfig:
    """Size and kind of computation of the model."""
    preset: str = opt("full", "sizes of all parts (models/presets.py)", choices=("small", "full"))
    risk_bias: str = opt("danger", "attention grows as TTC, THW shrink, or as learned", choices=("danger", "learned"))
    compile: bool = opt(False, "torch.compile the risk GNN; without a working compiler one message, and no compilation")
    lane_room_m: float = opt(0.0, "lane changes only where both gaps on the new lane are longer, m, 0 = all", low=0)
    gather_above: int = opt(512, "graphs with more vehicles gather neighbours instead of a dense [N, N] bias", low=2)


@dataclass
class ShieldConfig:
    """Limits of the safety shield (models/safety_shield.py)."""
    enabled: bool = opt(True, "check every command")
    ttc_s: float = opt(2.0, "emergency braking below this time to collision, s", low=0)
    thw_s: float = opt(0.5, "emergency braking below this time headway, s", low=0)
    leader_decel: float = opt(9.0, "braking that the leader is assumed capable of, m/s^2", low=0.1)
    own_decel: float = opt(9.0, "strongest braking of the shield, m/s^2", low=0.1)
    emergency_decel: float = opt(4.5, "least braking of level 2, m/s^2", low=0.1)
    min_gap_m: float = opt(3.0, "standstill gap kept, m; SUMO counts less than minGap (2.5 m) as a collision", low=0)
    lane_gap_s: float = opt(1.0, "time gap a lane change must leave to the follower on the target lane, s", low=0)
    comfort_accel: float = opt(2.0, "level 1: upper limit of acceleration at standstill, m/s^2", low=0)
    max_speed: float = opt(30.0, "level 1: that limit falls linearly to 0 at this speed, m/s", low=1)
    risk_threshold: float = opt(0.9, "the trained risk head forbids acceleration and lane changes above it",
                                low=0, high=1)


@dataclass
class DataConfig:
    """Recording, graphs on disk and how they are read."""
    folder: str = opt("datasets/corridor", "raw/ and processed/ go below it")
    seed: int = opt(0, "seed of the recorded traffic, 0 = run.seed; others train on the same data set", low=0)
    scenarios: list[str] = opt(["same"], "built-in names or .sumocfg paths, in turn by episode; same = env.scenario")
    samples: int = opt(1000, "samples to collect", low=1)
    samples_per_episode: int = opt(50, "samples taken from one episode, evenly in time", low=1)
    samples_per_chunk: int = opt(50, "samples per raw chunk (50 to 200) and processed chunk", low=1)
    vehicles: list[int] = opt([10, 20], "fewest and most vehicles of a sample: one vehicle and its nearest")
    regions: int = opt(1, "samples cut from one moment, each around a vehicle that no earlier one holds", low=1)
    history: int = opt(10, "T: control steps of history, 10 to 20", low=2, high=64)
    future: int = opt(5, "H: control steps to predict", low=1, high=20)
    margin: int = opt(10, "steps recorded before and after a sample, for phase1.augment.time_shift", low=0, high=64)
    k_vary: int = opt(2, "training samples have up to so many neighbours more or less than graph.k_* say; held-out "
                         "ones exactly those", low=0, high=16)
    held_out: float = opt(0.2, "share of the episodes kept for validation", low=0.01, high=0.9)
    controllers: list[str] = opt(["none", "random", "lane_advice", "follower_stopper"],
                                 "who drives the ICVs while collecting (env/baselines.py), in turn by episode",
                                 choices=BASELINES)
    demand_scales: list[float] = opt([0.7, 1.0, 1.2], "demand multipliers, in turn by episode", low=0.01, high=10)
    processes: int = opt(6, "SUMO processes that collect at once", low=1)
    storage: str = opt("float16", "features on disk; int8 halves them (data/storage.py says at what error)",
                       choices=("float16", "int8"))
    on_bad_row: str = opt("stop", "a training sample with NaN or infinite values ends phase 1, or is left out",
                          choices=("stop", "skip"))
    open_chunks: int = opt(3, "chunks that a process has open, and that samples are shuffled over", low=1, high=64)
    cache_mb: float = opt(0.0, "copies of chunks kept in memory by each reading process, MB; 0 = from the file", low=0)
    cache_timeout_s: float = opt(60.0, "a copy not used for so long is dropped, s", low=0, high=1e6)
    disk_gb: float = opt(20.0, "above this, graphs of earlier settings are removed, longest unused first, GB", low=0)
    tmpfs: bool = opt(False, "phase 1 reads a copy of the graphs in /dev/shm, removed at the end")


@dataclass
class MemoryConfig:
    """Limits and marks of the memory guard (runtime/guard.py)."""
    budget_gb: float = opt(15.0, "what a run's processes on a machine may need, without pages of files, GB; a control "
                           "group's limit and the machine's memory count too", low=0.01)
    learner_gb: float = opt(0.0, "of it for the learners and their data loaders, GB, 0 = no budget of their own", low=0)
    worker_gb: float = opt(0.0, "of it for the rollout workers, GB", low=0)
    sumo_gb: float = opt(0.0, "of it for the simulators, GB", low=0)
    soft: float = opt(0.80, "share of it above which caches are dropped", low=0.01, high=1)
    high: float = opt(0.90, "above it each learner gives up one rollout worker per iteration", low=0.01, high=1)
    hard: float = opt(0.96, "above it the run saves and stops with exit code 3", low=0.01, high=1)
    hysteresis: float = opt(0.05, "a measure ends when the share has fallen so far below its mark", low=0, high=0.5)
    every_s: float = opt(5.0, "time between two samples, s", low=0.1)
    split: int = opt(1, "parts of a micro-batch, their gradients summed: less memory, the same global batch", low=1,
                     high=64)
    gpu_soft_gb: float = opt(20.0, "GPU memory reserved by a learner above which PyTorch's cache is emptied, GB", low=0)
    gpu_hard_gb: float = opt(21.0, "above it `split` doubles or `checkpointing` goes on, for the run, GB", low=0)
    gpu_fraction: float = opt(0.0, "limit of a learner's share of its GPU, 0 = none", low=0, high=1)


@dataclass
class CheckpointConfig:
    """What is kept."""
    keep_last: int = opt(3, "complete checkpoints kept besides the best; of a phase that is begun again, old folders",
                         low=1)


@dataclass
class EvaluateConfig:
    """Scoring (evaluate.py)."""
    seeds: list[int] = opt(list(range(1001, 1021)), "held-out seeds, never used in training", low=0, high=2 ** 31 - 2)
    controllers: list[str] = opt(["none", "random", "follower_stopper", "lane_advice", "harmonise", "policy"],
                                 "who is scored: rules of env/baselines.py, policy", choices=(*BASELINES, "policy"))
    horizon_s: float = opt(900.0, "length of a scored episode, s", low=1)
    selection: str = opt("learned", "whom the policy commands: its own choice, anybody, or who has the slowest traffic "
                                    "ahead", choices=("learned", "random", "jam"))
    sample: bool = opt(False, "the policy's actions are drawn, as in training; false = the likeliest")
    leave_below: float = opt(0.0, "the policy leaves ICVs alone that are slower, m/s, or have slower traffic in the "
                             "third of the road before or behind them, 0 = none (in phase 3 too)", low=0)
    leave_after: float = opt(1.0, "and those beyond that share of their way, 1 = none (in phase 3 too)", low=0, high=1)
    surprise_limit: float = opt(0.0, "the policy commands nobody until its world model has been seen to err by a tenth "
                                "less, m/s, nor once it errs by more: median of the speeds one control step ahead, "
                                "mean of the last three minutes; 0 = it commands whatever its errors", low=0)
    merge_speed: float = opt(0.0, "the policy commands nobody until a tenth of at least ten vehicles within 500 m of a "
                             "merge drives as fast, m/s: other roads are not what it learned on; 0 = on all", low=0)
    accel_limit: float = opt(2.0, "highest acceleration that the policy commands, m/s^2 (phase 3 too)", low=0, high=2)
    c_int_cap: float = opt(0.0, "commands that would take an episode's C_int above it are not sent, 0 = no cap "
                           "(not in phase 3)", low=0)
    workers: int = opt(6, "processes that simulate at once", low=1)


@dataclass
class CoordinatorConfig:
    """The whole pipeline (coordinator.py)."""
    nproc: int = opt(0, "torchrun processes of phases 1 and 3, 0 = one per GPU (one without)", low=0)
    retries: int = opt(1, "restarts of a failed phase from its last checkpoint", low=0, high=10)


@dataclass
class Config:
    """Everything; scripts get one from configs.load_config."""
    run: RunConfig = sub(RunConfig, "Names, seeds, devices")
    env: EnvConfig = sub(EnvConfig, "Environment and SUMO")
    corridor: CorridorConfig = sub(CorridorConfig, "Built-in scenario `corridor`")
    ring: RingConfig = sub(RingConfig, "Built-in scenario `ring`")
    figure_eight: FigureEightConfig = sub(FigureEightConfig, "Built-in scenario `figure_eight`")
    merge: MergeConfig = sub(MergeConfig, "Built-in scenario `merge`")
    bottleneck: BottleneckConfig = sub(BottleneckConfig, "Built-in scenario `bottleneck`")
    driver: DriverConfig = sub(DriverConfig, "Human drivers of the corridor")
    baselines: BaselinesConfig = sub(BaselinesConfig, "Controllers to compare with (env/baselines.py)")
    graph: GraphConfig = sub(GraphConfig, "Graph of the traffic")
    reward: RewardConfig = sub(RewardConfig, "Reward of one control step (env/score.py)")
    model: ModelConfig = sub(ModelConfig, "Model sizes")
    shield: ShieldConfig = sub(ShieldConfig, "Safety shield")
    data: DataConfig = sub(DataConfig, "Data collection and preprocessing")
    ddp: DDPConfig = sub(DDPConfig, "DistributedDataParallel")
    rollout: RolloutConfig = sub(RolloutConfig, "Rollout processes of phases 2 and 3")
    phase1: Phase1Config = sub(Phase1Config, "Phase 1: world model (train_ddp.py --phase 1)")
    phase2: PPOConfig = sub(PPOConfig, "Phase 2: PPO (train_rl.py)")
    phase3: Phase3Config = sub(Phase3Config, "Phase 3: constrained optimisation (train_ddp.py --phase 3)")
    profile: ProfileConfig = sub(ProfileConfig, "Profiles of the three phases' training steps (runtime/profiler.py)")
    memory: MemoryConfig = sub(MemoryConfig, "Memory: watched in phases 1 to 3 (runtime/guard.py)")
    checkpoint: CheckpointConfig = sub(CheckpointConfig, "Checkpoints")
    evaluate: EvaluateConfig = sub(EvaluateConfig, "Evaluation")
    coordinator: CoordinatorConfig = sub(CoordinatorConfig, "Pipeline")

    def variants(self):
        """The configuration of each element of `env.suite`, without a suite of its own."""
        from configs.loader import variant  # which needs the classes of this file
        return [self] if self.env.suite == ["same"] else [variant(self, text) for text in self.env.suite]

    def variant_of(self, seed):
        """The configuration of the episode with this seed, as the environment chooses it."""
        return (variants := self.variants())[seed % len(variants)]
