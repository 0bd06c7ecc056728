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
    def said(key):
        return f"{key}={attrgetter(key)(c)}"
    if abs(1000 * c.env.step_length - round(1000 * c.env.step_length)) > 1e-6:
        yield f"{said('env.step_length')} is no whole number of milliseconds, which SUMO counts in"
    steps = c.env.control_interval / c.env.step_length
    if abs(steps - round(steps)) > 1e-6 or steps < 1:
        yield f"{said('env.control_interval')} is no multiple of {said('env.step_length')}"
    name = Path(c.run.name)
    if not name.parts or ".." in name.parts or name.is_absolute():
        yield f"run.name={c.run.name!r}: expected the name of a folder below {said('run.folder')}"
    for key in ("phase1.accumulation", "phase3.accumulation", "memory.split"):
        if c.ddp.static_graph and attrgetter(key)(c) > 1:
            yield f"ddp.static_graph=true with {said(key)}: PyTorch loses gradients when both are on; switch one off"
    for section, names, below in RISING:
        keys = [f"{section}.{name}" for name in names]
        values = attrgetter(*keys)(c)
        if not all(map(below, values, values[1:])):
            yield ", ".join(map(said, keys)) + ": must rise"
    if c.ddp.static_graph and c.phase2.imitate_keep and c.phase2.imitate_iterations + c.phase2.imitate_corrections:
        yield (f"ddp.static_graph=true with {said('phase2.imitate_keep')}: the warm start accumulates gradients, which "
               "PyTorch loses then; switch one off")
    if len(c.data.vehicles) != 2 or not 2 <= c.data.vehicles[0] <= c.data.vehicles[1] <= c.env.max_vehicles:
        yield f"{said('data.vehicles')}: expected two numbers, fewest and most, 2 to {said('env.max_vehicles')}"
    if c.env.backend == "libsumo" and c.rollout.num_envs_per_worker > 1:
        yield (f"env.backend=libsumo with {said('rollout.num_envs_per_worker')}: libsumo holds one simulation per "
               "process; set it to 1")
    if c.phase3.fragment_length % c.phase3.sequence_length:
        yield f"{said('phase3.fragment_length')} is no multiple of {said('phase3.sequence_length')}"
    if c.phase3.fragment_length < c.data.future:
        yield f"{said('phase3.fragment_length')} is shorter than {said('data.future')}: no step would have targets"
    steps = c.env.episode_steps
    if c.phase2.fragment_length > steps:
        yield f"{said('phase2.fragment_length')} is longer than an episode of {steps} control steps"
    if c.phase2.curriculum.enabled and len(c.env.suite) == 1:
        yield "phase2.curriculum.enabled=true needs the stages in env.suite"
    if steps < c.data.history + c.data.future + 2 * c.data.margin:
        yield (f"{said('env.horizon_s')} is shorter than one sample of {said('data.history')}, {said('data.future')} "
               f"and twice {said('data.margin')} control steps")
    if c.data.samples <= c.data.samples_per_episode:
        yield (f"{said('data.samples')} is one episode of {said('data.samples_per_episode')}, which is kept for "
               "validation: nothing to train on; raise the former or lower the latter")
    if c.phase1.augment.time_shift > c.data.margin:
        yield f"{said('phase1.augment.time_shift')} is above {said('data.margin')}"
    if len(set(c.evaluate.seeds)) < len(c.evaluate.seeds):
        yield f"{said('evaluate.seeds')}: the same seed twice"
    if not all(setting.partition("=")[0] and "=" in setting for setting in c.ddp.nccl_env):
        yield f"{said('ddp.nccl_env')}: expected elements NAME=value"
