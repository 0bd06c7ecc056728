"""Mistakes in a configuration that no single key shows."""
from pathlib import Path


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
    for phase in ("phase1", "phase3"):
        if c.ddp.static_graph and getattr(c, phase).accumulation > 1:
            yield (f"ddp.static_graph=true with {phase}.accumulation={getattr(c, phase).accumulation}: PyTorch loses "
                   "gradients when both are on; switch one off")
    for phase in ("phase1", "phase2", "phase3"):
        amp = getattr(c, phase).amp
        if not amp.min_scale <= amp.init_scale <= amp.max_scale:
            yield (f"{phase}.amp: min_scale={amp.min_scale}, init_scale={amp.init_scale}, max_scale={amp.max_scale}: "
                   "must rise")
    pi = c.baselines.pi_saturation
    if pi.gap_high_m <= pi.gap_low_m:
        yield (f"baselines.pi_saturation: gap_low_m={pi.gap_low_m}, gap_high_m={pi.gap_high_m}: must rise")
    if c.ddp.static_graph and c.phase2.imitate_keep and c.phase2.imitate_iterations + c.phase2.imitate_corrections:
        yield (f"ddp.static_graph=true with phase2.imitate_keep={c.phase2.imitate_keep}: the warm start accumulates "
               "gradients, which PyTorch loses then; switch one off")
    if c.ddp.static_graph and c.memory.split > 1:
        yield f"ddp.static_graph=true with memory.split={c.memory.split}: PyTorch loses gradients"
    if not c.memory.soft < c.memory.high < c.memory.hard or c.memory.gpu_soft_gb > c.memory.gpu_hard_gb:
        yield (f"memory.soft={c.memory.soft}, high={c.memory.high}, hard={c.memory.hard}, gpu_soft_gb="
               f"{c.memory.gpu_soft_gb}, gpu_hard_gb={c.memory.gpu_hard_gb}: must rise")
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
    if c.phase3.multiplier_init > c.phase3.multiplier_max:
        yield (f"phase3.multiplier_init={c.phase3.multiplier_init} is above "
               f"phase3.multiplier_max={c.phase3.multiplier_max}")
    if c.phase2.fragment_length > c.env.horizon_s / c.env.control_interval:
        yield (f"phase2.fragment_length={c.phase2.fragment_length} is longer than an episode of "
               f"{c.env.horizon_s / c.env.control_interval:g} control steps")
    if c.phase2.curriculum.enabled and len(c.env.suite) == 1:
        yield "phase2.curriculum.enabled=true needs the stages in env.suite"
    if c.env.horizon_s < (c.data.history + c.data.future + 2 * c.data.margin) * c.env.control_interval:
        yield (f"env.horizon_s={c.env.horizon_s} is shorter than one sample of data.history={c.data.history}, "
               f"data.future={c.data.future} and twice data.margin={c.data.margin} control steps")
    if c.phase1.augment.time_shift > c.data.margin:
        yield f"phase1.augment.time_shift={c.phase1.augment.time_shift} is above data.margin={c.data.margin}"
    if len(set(c.evaluate.seeds)) < len(c.evaluate.seeds):
        yield f"evaluate.seeds={c.evaluate.seeds}: the same seed twice"
    if not all(setting.partition("=")[0] and "=" in setting for setting in c.ddp.nccl_env):
        yield f"ddp.nccl_env={c.ddp.nccl_env}: expected elements NAME=value"
    if not 1 <= c.graph.k_min <= c.graph.k_max:
        yield f"graph.k_min={c.graph.k_min} is above graph.k_max={c.graph.k_max}"
