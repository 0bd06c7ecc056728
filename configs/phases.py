"""Settings of the three training phases; see configs/schema.py."""
from dataclasses import dataclass

from configs.options import opt, sub
from configs.traffic import BASELINES

DTYPES = ("fp16", "bf16", "off")


@dataclass
class AmpConfig:
    """Mixed precision and its loss scale (runtime/precision.py)."""
    dtype: str = opt("fp16", "autocast type on the GPU; off on CPU", choices=DTYPES)
    strategy: str = opt("dynamic", "loss scaling", choices=("dynamic", "static"))
    init_scale: float = opt(65536.0, "first loss scale", low=1, high=1e38)
    growth_factor: float = opt(2.0, "growth of the loss scale", low=1.001)
    growth_interval: int = opt(2000, "steps without overflow before it grows", low=1)
    backoff_factor: float = opt(0.5, "loss scale after overflow", low=0.01, high=0.999)
    min_scale: float = opt(1.0, "lower limit of the loss scale", low=0.0001, high=1e38)
    max_scale: float = opt(16777216.0, "upper limit of the loss scale", low=1, high=1e38)
    hysteresis: int = opt(2, "overflows in a row before the loss scale backs off", low=1)


@dataclass
class LoaderConfig:
    """How phase 1 reads its batches (data/loading.py)."""
    num_workers: int = opt(2, "DataLoader processes, 0 = read in the training process", low=0, high=16)
    pin_memory: bool = opt(True, "page-locked batches (only with a GPU)")
    prefetch_factor: int = opt(2, "batches each process prepares ahead", low=1)
    persistent_workers: bool = opt(True, "keep the processes between epochs")
    timeout_s: float = opt(120.0, "a process that takes longer for a batch counts as stuck, s", low=1, high=1e6)
    drop_last: bool = opt(True, "drop an incomplete last batch, and an incomplete last optimiser step")
    rank_weights: list[float] = opt([1.0], "relative share of each rank in a global batch, for unequal GPUs; one "
                                           "number = equal shares", low=0.001)


@dataclass
class AugmentConfig:
    """What phase 1 does to its samples (data/augment.py)."""
    time_shift: int = opt(10, "a sample begins up to so many control steps earlier or later; 0 = off", low=0)
    speed_noise: float = opt(0.1, "standard deviation of noise on the seen speeds, m/s; 0 = off", low=0)
    position_jitter: float = opt(5.0, "a sample is moved along the road by up to so much, m; 0 = off", low=0)
    edge_dropout: float = opt(0.1, "share of the edges left out; 0 = off", low=0, high=1)
    node_mask: float = opt(0.05, "share of the vehicles whose features are hidden in a step; 0 = off", low=0, high=1)


@dataclass
class DDPConfig:
    """DistributedDataParallel (runtime/distributed.py)."""
    backend: str = opt("auto", "auto = nccl with GPUs, gloo without", choices=("auto", "nccl", "gloo"))
    timeout_s: float = opt(1800.0, "a collective that waits longer fails, s; a frozen SUMO takes 150", low=1, high=1e6)
    bucket_cap_mb: float = opt(25.0, "gradient bucket, MB", low=1)
    gradient_as_bucket_view: bool = opt(True, "saves one copy of the gradients")
    find_unused_parameters: bool = opt(False, "not needed: every rank uses every trainable parameter")
    static_graph: bool = opt(False, "refused together with accumulation (PyTorch loses gradients there)")
    fp16_compression: bool = opt(False, "send gradients as fp16")
    nccl_env: list[str] = opt(["NCCL_IB_DISABLE=1", "NCCL_P2P_DISABLE=1", "NCCL_CUMEM_HOST_ENABLE=0"],
                              "NAME=value, set before NCCL starts unless the user has set NAME", empty=True)


@dataclass
class Phase1Config:
    """Supervised training of GNN and world model."""
    epochs: int = opt(50, "passes over the data set", low=1)
    stage1_epochs: int = opt(15, "first epochs: next state only; then stage 2: H states and conflicts", low=0)
    batch_size: int = opt(32, "samples per rank and micro-batch", low=1)
    accumulation: int = opt(1, "micro-batches per optimiser step", low=1)
    lr: float = opt(3e-4, "AdamW learning rate", low=0)
    weight_decay: float = opt(0.01, "AdamW weight decay", low=0)
    warmup_steps: int = opt(100, "linear learning-rate warm-up, then cosine decay to 5 %", low=0)
    plateau_epochs: int = opt(0, "epochs without a better held-out loss before plateau_factor, 0 = never", low=0)
    plateau_factor: float = opt(0.5, "multiplies the learning rate on a plateau", low=0.01, high=1)
    clip_norm: float = opt(1.0, "gradient norm limit, 0 = none", low=0)
    checkpointing: bool = opt(False, "recompute the world model's activations in the backward pass")
    amp: AmpConfig = sub(AmpConfig)
    loader: LoaderConfig = sub(LoaderConfig)
    augment: AugmentConfig = sub(AugmentConfig)


@dataclass
class CurriculumConfig:
    """Stages of growing difficulty and replay of earlier ones (runtime/curriculum.py)."""
    enabled: bool = opt(False, "the elements of env.suite are stages, from easy to hard; off = they take turns")
    threshold: float = opt(0.8, "the next stage needs a larger share of arrivals", low=0, high=1)
    evaluations: int = opt(5, "in so many iterations in a row", low=1)
    patience: int = opt(10, "a stage lasts at least so many iterations", low=1)
    collapse_share: float = opt(0.6, "the last stage returns below this share of its score", low=0, high=1)
    collapse_evaluations: int = opt(3, "in so many iterations in a row", low=1)
    fallbacks: int = opt(2, "it does so at most so often", low=0)
    fallback_lr: float = opt(0.5, "multiplies the learning rate each time", low=0.01, high=1)
    replay: list[float] = opt([0.0, 0.3, 0.4, 0.5], "share of episodes of earlier stages, by stage", low=0, high=1)


@dataclass
class PPOConfig:
    """Phase 2: PPO."""
    iterations: int = opt(80, "collect-and-learn rounds", low=1)
    train_batch_size: int = opt(4000, "environment steps per iteration over all ranks, rounded up to fragments", low=1)
    minibatch_size: int = opt(128, "environment steps per optimiser step over all ranks", low=1)
    epochs: int = opt(10, "passes over each batch", low=1)
    fragment_length: int = opt(200, "an iteration's control steps per environment are a multiple of it", low=1)
    gamma: float = opt(0.99, "discount per control step", low=0, high=1)
    gae_lambda: float = opt(0.95, "GAE lambda", low=0, high=1)
    clip: float = opt(0.2, "PPO clip of each pick's ratio", low=0)
    value_weight: float = opt(0.5, "weight of the value loss", low=0)
    cost_value_weight: float = opt(0.5, "weight of the cost-value loss", low=0)
    entropy_weight: float = opt(0.003, "weight of the entropy bonus", low=0)
    target_kl: float = opt(0.03, "an iteration ends its steps when a minibatch has 1.5 times this KL per pick", low=0)
    cost_weight: float = opt(150.0, "fixed price of one unit of C_int, in points of score (phase 3 learns it)", low=0)
    lr: float = opt(3e-4, "Adam learning rate", low=0)
    clip_norm: float = opt(1.0, "gradient norm limit, 0 = none", low=0)
    imitate: str = opt("harmonise", "rule (env/baselines.py) that drives and is imitated at first", choices=BASELINES)
    imitate_iterations: int = opt(20, "for so many iterations", low=0)
    imitate_corrections: int = opt(60, "then for so many the policy drives and learns what the rule would do (DAgger); "
                                       "PPO follows, from the start if both are 0", low=0)
    imitate_keep: int = opt(0, "rollouts of the warm start kept on the disk and learned from again (DAgger keeps all)",
                            low=0)
    imitate_lr: float = opt(2e-3, "Adam learning rate of these iterations, at first; it falls linearly to 0", low=0)
    exploration: float = opt(0.2, "standard deviation of the acceleration before it is squashed, at first", low=1e-3)
    checkpoint_every: int = opt(10, "iterations between checkpoints; each starts fresh episodes", low=1)
    spill_mb: int = opt(0, "a rollout that grows beyond it moves to a file in the run folder, MB; 0 = never", low=0)
    curriculum: CurriculumConfig = sub(CurriculumConfig)
    amp: AmpConfig = sub(AmpConfig, init_scale=32768.0, growth_interval=1000)


@dataclass
class Phase3Config:
    """Phase 3: constrained PPO."""
    epochs: int = opt(100, "collect-and-learn rounds; the multiplier moves once in each", low=1)
    fragment_length: int = opt(200, "control steps per environment and epoch", low=1)
    sequence_length: int = opt(10, "control steps of one training sequence", low=2)
    batch_size: int = opt(24, "sequences per rank and micro-batch", low=1)
    accumulation: int = opt(2, "micro-batches per optimiser step", low=1)
    passes: int = opt(4, "passes over the epoch's sequences", low=1)
    lr: float = opt(1e-4, "AdamW learning rate", low=0)
    weight_decay: float = opt(0.0, "AdamW weight decay", low=0)
    warmup_steps: int = opt(0, "linear learning-rate warm-up", low=0)
    clip_norm: float = opt(1.0, "gradient norm limit, 0 = none", low=0)
    world_model_weight: float = opt(0.5, "weight of the auxiliary world-model loss; 0 freezes the world model", low=0)
    risk_weight: float = opt(0.5, "weight of the shield's risk-head loss", low=0)
    checkpointing: bool = opt(True, "recompute the world model's activations in the backward pass")
    limit_start: float = opt(0.2, "first limit of C_int", low=0)
    limit_end: float = opt(0.05, "last limit of C_int, reached after `limit_epochs`", low=0)
    limit_epochs: int = opt(60, "epochs over which the limit falls linearly", low=1)
    multiplier_init: float = opt(0.0, "first Lagrange multiplier: the return that a unit of C_int is worth", low=0)
    multiplier_lr: float = opt(20000.0, "dual ascent step per unit of an episode's C_int above the limit", low=0)
    multiplier_proportional: float = opt(0.0, "PID control: gain of C_int above the limit; 0 = dual ascent", low=0)
    multiplier_derivative: float = opt(0.0, "PID control: gain of a rise of C_int since the last epoch", low=0)
    multiplier_max: float = opt(5000.0, "upper clamp of the multiplier: a higher price is paid in jams", low=0)
    anchor: float = opt(10.0, "weight of the divergence from phase 2's policy in the loss", low=0)
    checkpoint_every: int = opt(10, "epochs between checkpoints; each starts fresh episodes", low=1)
    amp: AmpConfig = sub(AmpConfig)


@dataclass
class RolloutConfig:
    """Processes that simulate while phases 2 and 3 learn."""
    num_workers: int = opt(6, "rollout processes per node, shared by its learners; 0 = in this process", low=0)
    num_envs_per_worker: int = opt(2, "environments of a worker; the groups alternate", low=1, high=8)
    restarts: int = opt(3, "so often in a row a dead or frozen SUMO or worker is replaced; 0 = it ends the run", low=0)
    pin_workers: bool = opt(True, "keep each worker and its SUMO on one processor, when some are left for the learners")
