"""Mistakes in a configuration that no single key shows."""
from operator import attrgetter, le, lt
from pathlib import Path

SCALES = ("min_scale", "init_scale", "max_scale")
RISING = (("phase1.amp", SCALES, le), ("phase2.amp", SCALES, le), ("phase3.amp", SCALES, le),
          ("phase3", ("multiplier_init", "multiplier_max"), le), ("graph", ("k_min", "k_max"), le),
          ("memory", ("gpu_soft_gb", "gpu_hard_gb"), le), ("memory", ("soft", "high", "hard"), lt),
          ("baselines.pi_saturation", ("gap_low_m", "gap_high_m"), lt))  # section, keys whose values rise, at least so


def cross_checks(c):
    """Mistakes that only several keys together show: texts."""
    if abs(1000 * c.env.step_length - round(1000 * c.env.step_length)) > 1e-6:
        yield f"env.step_length={c.env.step_length} is no whole number of milliseconds, which SUMO counts in"
    steps = c.env.control_interval / c.env.step_length
    if abs(steps - round(steps)) > 1e-6 or steps < 1:
        yield f"env.control_interval={c.env.control_interval} is no multiple of env.step_length={c.env.step_length}"
    name = Path(c.run.name)
    if not name.parts or ".." in name.parts or name.is_absolute():
        yield f"run.name={c.run.name!r}: expected the name of a folder below run.folder={c.run.folder}"
    for key in ("phase1.accumulation", "phase3.accumulation", "memory.split"):
        if c.ddp.static_graph and attrgetter(key)(c) > 1:
            yield (f"ddp.static_graph=true with {key}={attrgetter(key)(c)}: PyTorch loses gradients when both are on; "
                   "switch one off")
    for section, names, below in RISING:
        values = [attrgetter(f"{section}.{name}")(c) for name in names]
        if not all(map(below, values, values[1:])):
            yield ", ".join(f"{section}.{name}={value}" for name, value in zip(names, values)) + ": must rise"
    if c.ddp.static_graph and c.phase2.imitate_keep and c.phase2.imitate_iterations + c.phase2.imitate_corrections:
        yield (f"ddp.static_graph=true with phase2.imitate_keep={c.phase2.imitate_keep}: the warm start accumulates "
               "gradients, which PyTorch loses then; switch one off")
    if len(c.data.vehicles) != 2 or not 2 <= c.data.vehicles[0] <= c.data.vehicles[1] <= c.env.max_vehicles:
        yield (f"data.vehicles={c.data.vehicles}: expected two numbers, fewest and most, "
               f"2 to env.max_vehicles={c.env.max_vehicles}")
    if c.env.backend == "libsumo" and c.rollout.num_envs_per_worker > 1:
        yield (f"env.backend=libsumo with rollout.num_envs_per_worker={c.rollout.num_envs_per_worker}: libsumo holds "
               "one simulation per process; set it to 1")
    if c.phase3.fragment_length % c.phase3.sequence_length:
        yield (f"phase3.fragment_length={c.phase3.fragment_length} is no multiple of "
               f"phase3.sequence_length={c.phase3.sequence_length}")
    if c.phase3.fragment_length < c.data.future:
        yield (f"phase3.fragment_length={c.phase3.fragment_length} is shorter than data.future={c.data.future}: "
               "no step would have targets")
    steps = c.env.episode_steps
    if c.phase2.fragment_length > steps:
        yield f"phase2.fragment_length={c.phase2.fragment_length} is longer than an episode of {steps} control steps"
    if c.phase2.curriculum.enabled and len(c.env.suite) == 1:
        yield "phase2.curriculum.enabled=true needs the stages in env.suite"
    if steps < c.data.history + c.data.future + 2 * c.data.margin:
        yield (f"env.horizon_s={c.env.horizon_s} is shorter than one sample of data.history={c.data.history}, "
               f"data.future={c.data.future} and twice data.margin={c.data.margin} control steps")
    if c.phase1.augment.time_shift > c.data.margin:
        yield f"phase1.augment.time_shift={c.phase1.augment.time_shift} is above data.margin={c.data.margin}"
    if len(set(c.evaluate.seeds)) < len(c.evaluate.seeds):
        yield f"evaluate.seeds={c.evaluate.seeds}: the same seed twice"
    if not all(setting.partition("=")[0] and "=" in setting for setting in c.ddp.nccl_env):
        yield f"ddp.nccl_env={c.ddp.nccl_env}: expected elements NAME=value"
