"""Every setting of the project: type, default, range and meaning.

The YAML files hold values, this file holds meaning. `opt` attaches the one-line description and the limits that
the loader (configs/loader.py) enforces. Defaults here are those of the target machine (see default.yaml).
"""
from dataclasses import dataclass, field

DTYPES = ("fp16", "bf16", "off")


def opt(default, doc, low=None, high=None, choices=None):
    """A setting with its meaning and its closed range [low, high] or its list of choices."""
    meta = {"doc": doc, "low": low, "high": high, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


def sub(cls, **changes):
    """A nested section whose defaults differ from those of its class in `changes`."""
    return field(default_factory=lambda: cls(**changes))


@dataclass
class RunConfig:
    name: str = opt("default", "run folder below `folder`")
    folder: str = opt("runs", "where run folders live")
    seed: int = opt(1, "everything random derives from it", low=0)
    device: str = opt("auto", "auto = CUDA when there is one", choices=("auto", "cpu", "cuda"))
    threads: int = opt(0, "torch CPU threads per process, 0 = cores not taken by workers / processes", low=0)


@dataclass
class EnvConfig:
    scenario: str = opt("corridor", "built-in name (corridor, ring) or path of a .sumocfg")
    backend: str = opt("traci", "how Python talks to SUMO", choices=("traci",))
    step_length: float = opt(0.1, "simulation step, s", low=0.01, high=1.0)
    control_interval: float = opt(1.0, "time between two commands, s", low=0.1, high=10.0)
    horizon_s: float = opt(900.0, "episode length after the warm-up, s; then the episode is truncated", low=1)
    warmup_s: float = opt(0.0, "simulated without control before the first observation, s", low=0)
    demand_scale: float = opt(1.0, "multiplies the demand of any scenario (SUMO's --scale)", low=0.01, high=10)
    icv_share: float = opt(0.25, "share of the vehicles that become ICVs at departure", low=0, high=1)
    max_vehicles: int = opt(600, "slots for vehicles present at once; further ones are counted as overflow", low=2)
    max_commands: int = opt(5, "K: ICVs commanded per control step at most", low=1, high=64)
    speed_mode: int = opt(26, "SUMO speed mode of commanded ICVs: safe-speed check and comfort limit of braking off, "
                              "right of way and red lights on", low=0, high=127)
    lane_change_mode: int = opt(1621, "SUMO lane-change mode of commanded ICVs (1621 = SUMO's default)", low=0)
    lane_change_hold_s: float = opt(4.5, "how long a commanded lane is held, s", low=0.1)
    teleport_s: float = opt(300.0, "SUMO teleports a vehicle that waits longer, s; negative = never", low=-1)
    terminate_on_collision: bool = opt(True, "a collision ends a training episode (evaluation only counts it)")
    recycle_episodes: int = opt(200, "start a fresh SUMO process after so many episodes", low=1)
    call_timeout_s: float = opt(30.0, "a SUMO that answers later counts as frozen, s", low=0.1)
    start_timeout_s: float = opt(60.0, "time a SUMO gets to load its network, s", low=1)


@dataclass
class CorridorConfig:
    main_flow: float = opt(2800.0, "mainline demand, veh/h", low=1)
    ramp_flow: float = opt(800.0, "demand of each on-ramp, veh/h", low=1)
    lanes: int = opt(2, "mainline lanes", low=1, high=6)
    ramps: int = opt(2, "on-ramps, each with a 150 m acceleration lane", low=1, high=8)


@dataclass
class RingConfig:
    length_m: float = opt(230.0, "circumference, m", low=60)
    vehicles: int = opt(22, "vehicles on the ring, evenly spaced at the start", low=2, high=200)


@dataclass
class DriverConfig:
    model: str = opt("Krauss", "SUMO car-following model of every built-in scenario")
    accel: float = opt(0.8, "m/s^2", low=0.1)
    decel: float = opt(4.5, "comfortable braking, m/s^2", low=0.1)
    sigma: float = opt(0.5, "driver imperfection", low=0, high=1)
    tau: float = opt(1.0, "desired time headway, s", low=0.1)
    max_speed: float = opt(30.0, "m/s", low=1)


@dataclass
class GraphConfig:
    k_min: int = opt(4, "neighbours per vehicle: k = min(max(k_min, ceil(N / k_divisor)), k_max)", low=1)
    k_divisor: int = opt(4, "see k_min", low=1)
    k_max: int = opt(16, "see k_min", low=1, high=64)
    radius_m: float = opt(200.0, "vehicles further away are no neighbours, m", low=1)
    lookahead_m: float = opt(200.0, "how far leaders and followers are searched, m", low=10, high=1000)


@dataclass
class RewardConfig:
    efficiency_weight: float = opt(0.7, "weight of S_efficiency in the score")
    stability_weight: float = opt(0.3, "weight of S_stability in the score")
    ocr_ref: float = opt(0.8, "typical OCR without control: turns arrivals into score points", low=0.01)
    sigma_ref: float = opt(7.65, "typical sigma_v without control, m/s", low=0.01)
    abs_a_ref: float = opt(0.405, "typical abs_a without control, m/s^2", low=0.01)
    demand_ref: float = opt(1100.0, "typical number of vehicles loaded in an episode", low=1)
    collision_penalty: float = opt(10.0, "points lost per collision", low=0)


@dataclass
class ModelConfig:
    preset: str = opt("full", "sizes of all parts (models/presets.py)", choices=("small", "full"))
    gather_above: int = opt(384, "graphs with more vehicles gather neighbours instead of a dense [N, N] bias", low=2)


@dataclass
class ShieldConfig:
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
    folder: str = opt("datasets/corridor", "raw/ and processed/ go below it")
    samples: int = opt(1000, "samples to collect", low=1)
    samples_per_episode: int = opt(50, "samples taken from one episode, evenly in time", low=1)
    samples_per_chunk: int = opt(50, "samples per raw chunk (50 to 200) and processed chunk", low=1)
    vehicles: list[int] = opt([10, 20], "fewest and most vehicles of a sample: one vehicle and its nearest")
    history: int = opt(10, "T: control steps of history, 10 to 20", low=2, high=64)
    future: int = opt(5, "H: control steps to predict", low=1, high=20)
    held_out: float = opt(0.2, "share of the episodes kept for validation", low=0.01, high=0.9)
    controllers: list[str] = opt(["none", "random", "lane_advice", "follower_stopper"],
                                 "who drives the ICVs while collecting, in turn by episode")
    demand_scales: list[float] = opt([0.7, 1.0, 1.2], "demand multipliers, in turn by episode")
    processes: int = opt(6, "SUMO processes that collect at once", low=1)


@dataclass
class AmpConfig:
    dtype: str = opt("fp16", "autocast type on the GPU; off on CPU", choices=DTYPES)
    strategy: str = opt("dynamic", "loss scaling", choices=("dynamic", "static"))
    init_scale: float = opt(65536.0, "first loss scale", low=1)
    growth_factor: float = opt(2.0, "growth of the loss scale", low=1)
    growth_interval: int = opt(2000, "steps without overflow before it grows", low=1)
    backoff_factor: float = opt(0.5, "loss scale after overflow", low=0.01, high=1)
    min_scale: float = opt(1.0, "lower limit of the loss scale", low=0.0001)
    max_scale: float = opt(16777216.0, "upper limit of the loss scale", low=1)
    hysteresis: int = opt(2, "overflows in a row before the loss scale backs off", low=1)


@dataclass
class LoaderConfig:
    num_workers: int = opt(2, "DataLoader processes, 0 = read in the training process", low=0, high=16)
    pin_memory: bool = opt(True, "page-locked batches (only with a GPU)")
    prefetch_factor: int = opt(2, "batches each process prepares ahead", low=1)
    persistent_workers: bool = opt(True, "keep the processes between epochs")
    drop_last: bool = opt(True, "drop an incomplete last batch")


@dataclass
class DDPConfig:
    backend: str = opt("auto", "auto = nccl with GPUs, gloo without", choices=("auto", "nccl", "gloo"))
    timeout_s: float = opt(1800.0, "a collective that waits longer fails, s", low=1)
    bucket_cap_mb: float = opt(25.0, "gradient bucket, MB", low=1)
    gradient_as_bucket_view: bool = opt(True, "saves one copy of the gradients")
    find_unused_parameters: bool = opt(False, "not needed: every rank uses every trainable parameter")
    static_graph: bool = opt(False, "refused together with accumulation (PyTorch loses gradients there)")
    fp16_compression: bool = opt(False, "send gradients as fp16")
    nccl_env: list[str] = opt(["NCCL_IB_DISABLE=1", "NCCL_P2P_DISABLE=1"],
                              "NAME=value, set before NCCL starts unless the user has set NAME")


@dataclass
class RolloutConfig:
    num_workers: int = opt(6, "rollout processes per node, shared by its learners; 0 = in this process", low=0)
    num_envs_per_worker: int = opt(2, "environments of a worker; the groups alternate", low=1, high=8)


@dataclass
class Phase1Config:
    epochs: int = opt(50, "passes over the data set", low=1)
    stage1_epochs: int = opt(15, "first epochs: next state only; then stage 2: H states and conflicts", low=0)
    batch_size: int = opt(32, "samples per rank and micro-batch", low=1)
    accumulation: int = opt(1, "micro-batches per optimiser step", low=1)
    lr: float = opt(3e-4, "AdamW learning rate", low=0)
    weight_decay: float = opt(0.01, "AdamW weight decay", low=0)
    warmup_steps: int = opt(100, "linear learning-rate warm-up, then cosine decay to 5 %", low=0)
    clip_norm: float = opt(1.0, "gradient norm limit", low=0)
    checkpointing: bool = opt(False, "recompute the world model's activations in the backward pass")
    amp: AmpConfig = sub(AmpConfig)
    loader: LoaderConfig = sub(LoaderConfig)


@dataclass
class PPOConfig:
    iterations: int = opt(200, "collect-and-learn rounds", low=1)
    train_batch_size: int = opt(4000, "environment steps per iteration over all ranks, rounded up to fragments", low=1)
    minibatch_size: int = opt(128, "environment steps per optimiser step over all ranks", low=1)
    epochs: int = opt(10, "passes over each batch", low=1)
    fragment_length: int = opt(200, "control steps between two bootstraps", low=1)
    gamma: float = opt(0.99, "discount per control step", low=0, high=1)
    gae_lambda: float = opt(0.95, "GAE lambda", low=0, high=1)
    clip: float = opt(0.2, "PPO clip of each pick's ratio", low=0)
    value_weight: float = opt(0.5, "weight of the value loss", low=0)
    cost_value_weight: float = opt(0.5, "weight of the cost-value loss", low=0)
    entropy_weight: float = opt(0.003, "weight of the entropy bonus", low=0)
    target_kl: float = opt(0.03, "stop the epochs of an iteration above this KL per pick", low=0)
    cost_weight: float = opt(1.5, "fixed price of one unit of C_int, in points of score (phase 3 learns it)", low=0)
    lr: float = opt(3e-4, "Adam learning rate", low=0)
    clip_norm: float = opt(1.0, "gradient norm limit", low=0)
    checkpoint_every: int = opt(10, "iterations between checkpoints; each starts fresh episodes", low=1)
    amp: AmpConfig = sub(AmpConfig, init_scale=32768.0, growth_interval=1000)


@dataclass
class Phase3Config:
    epochs: int = opt(100, "collect-and-learn rounds; the multiplier moves once in each", low=1)
    fragment_length: int = opt(200, "control steps per environment and epoch", low=1)
    sequence_length: int = opt(10, "control steps of one training sequence", low=2)
    batch_size: int = opt(24, "sequences per rank and micro-batch", low=1)
    accumulation: int = opt(2, "micro-batches per optimiser step", low=1)
    passes: int = opt(4, "passes over the epoch's sequences", low=1)
    lr: float = opt(1e-4, "AdamW learning rate", low=0)
    weight_decay: float = opt(0.0, "AdamW weight decay", low=0)
    warmup_steps: int = opt(0, "linear learning-rate warm-up", low=0)
    clip_norm: float = opt(1.0, "gradient norm limit", low=0)
    world_model_weight: float = opt(0.5, "weight of the auxiliary world-model loss", low=0)
    risk_weight: float = opt(0.5, "weight of the shield's risk-head loss", low=0)
    checkpointing: bool = opt(True, "recompute the world model's activations in the backward pass")
    limit_start: float = opt(0.2, "first limit of C_int", low=0)
    limit_end: float = opt(0.05, "last limit of C_int, reached after `limit_epochs`", low=0)
    limit_epochs: int = opt(60, "epochs over which the limit falls linearly", low=1)
    multiplier_init: float = opt(0.5, "first Lagrange multiplier", low=0)
    multiplier_lr: float = opt(5.0, "dual ascent step per unit of C_int above the limit", low=0)
    multiplier_max: float = opt(20.0, "upper clamp of the multiplier", low=0)
    checkpoint_every: int = opt(10, "epochs between checkpoints; each starts fresh episodes", low=1)
    amp: AmpConfig = sub(AmpConfig)


@dataclass
class CheckpointConfig:
    keep_last: int = opt(3, "complete checkpoints kept besides the best", low=1)


@dataclass
class EvaluateConfig:
    seeds: list[int] = opt(list(range(1001, 1021)), "held-out seeds, never used in training")
    controllers: list[str] = opt(["none", "random", "follower_stopper", "lane_advice", "policy"], "who is scored")
    horizon_s: float = opt(900.0, "length of a scored episode, s", low=1)
    workers: int = opt(6, "processes that simulate at once", low=1)


@dataclass
class CoordinatorConfig:
    nproc: int = opt(0, "torchrun processes of phases 1 and 3, 0 = one per GPU (one without)", low=0)
    retries: int = opt(1, "restarts of a failed phase from its last checkpoint", low=0, high=10)


@dataclass
class Config:
    run: RunConfig = sub(RunConfig)
    env: EnvConfig = sub(EnvConfig)
    corridor: CorridorConfig = sub(CorridorConfig)
    ring: RingConfig = sub(RingConfig)
    driver: DriverConfig = sub(DriverConfig)
    graph: GraphConfig = sub(GraphConfig)
    reward: RewardConfig = sub(RewardConfig)
    model: ModelConfig = sub(ModelConfig)
    shield: ShieldConfig = sub(ShieldConfig)
    data: DataConfig = sub(DataConfig)
    ddp: DDPConfig = sub(DDPConfig)
    rollout: RolloutConfig = sub(RolloutConfig)
    phase1: Phase1Config = sub(Phase1Config)
    phase2: PPOConfig = sub(PPOConfig)
    phase3: Phase3Config = sub(Phase3Config)
    checkpoint: CheckpointConfig = sub(CheckpointConfig)
    evaluate: EvaluateConfig = sub(EvaluateConfig)
    coordinator: CoordinatorConfig = sub(CoordinatorConfig)
