"""Is this machine ready, which settings suit it, and how long will a run take?

    python -m runtime.doctor
    python -m runtime.doctor --config configs/quick.yaml --no-benchmark

Every line says ok, warn or FAIL, what was found and, unless it is fine, what to do. Then follow about 20 seconds of
measurements (longer with the full model on a CPU). Exit code 2 when something fails. Like the scripts, this file uses
every part of the project, but imports torch only where it is needed: on a machine without it, that is a finding.
"""
import contextlib
import copy
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from configs import ConfigError
from configs.command_line import parse
from configs.console import duration, exit_code, hush_ctrl_c, say
if __name__ == "__main__":
    hush_ctrl_c()

from configs.options import leaves
from data.location import MEMORY, on_windows_drive
from data.settings import DataError, of_scenario, processed_folder, scenarios
from env.launch import SumoError
from runtime import machine
from runtime.machine import FAIL, OK, WARN, Finding
from runtime.resources import spin_briefly, threads_per_process, usable_cores
from runtime.sizing import Line, Speed, forecast, recommend

SECONDS = 1.2  # for each of the measurements


def examine(cfg):
    """All findings about this machine and this configuration."""
    versions = machine.installed([*machine.NEEDED, "libsumo"])
    yield machine.packages(versions)
    yield sumo(cfg)
    if versions["torch"]:
        yield from machine.gpus(cfg.run.device)
        yield machine.precision({p.amp.dtype for p in (cfg.phase1, cfg.phase2, cfg.phase3)}, *gpu_facts())
    yield machine.sockets()
    yield machine.processors()
    wsl, findings = machine.wsl2()
    yield from [*findings, *machine.memory(machine.meminfo(), wsl)]
    yield machine.space(MEMORY, 1, "/dev/shm", "NCCL and data.tmpfs need it: docker run --shm-size=4g, or `mount -o "
                        "remount,size=4G /dev/shm`")
    yield machine.open_files()
    yield from (place(f"{key}.folder", getattr(cfg, key).folder) for key in ("data", "run"))


def sumo(cfg):
    """Really start SUMO on each scenario that is recorded or driven, and simulate three control steps."""
    start, names = time.perf_counter(), []
    try:
        from env.traffic_env import TrafficEnv
        for name in dict.fromkeys([cfg.env.scenario, *scenarios(cfg)]):
            with contextlib.closing(TrafficEnv(of_scenario(cfg, name))) as env:
                for seed in range(len(env.variants)):
                    env.reset(seed=seed)
                    names.append(env.env_cfg.scenario)
                    [env.step(env.action_space.sample()) for _ in range(3)]
    except (SumoError, OSError, ImportError) as error:
        return Finding(FAIL, "SUMO", str(error), "pip install -e .; for a scenario of your own, what SUMO says above")
    said = f"starts, and three steps, in {time.perf_counter() - start:.2f} s"
    return Finding(OK, "SUMO", f"{', '.join(dict.fromkeys(names))}: {said}")


def gpu_facts():
    """(compute capability, whether bf16 is in hardware) of the first GPU, (None, False) without one."""
    import torch
    if not torch.cuda.is_available():
        return None, False
    return torch.cuda.get_device_capability(), torch.cuda.is_bf16_supported(including_emulation=False)


def place(key, folder):
    """Where data and runs lie: not on a Windows drive, and with space left."""
    if on_windows_drive(folder):
        own = Path.home() / Path(folder).name
        return Finding(WARN, key, f"{Path(folder).resolve()} is a Windows drive, several times slower than WSL2's own",
                       f"set {key} to a folder below your Linux home, for example {key}={own}")
    return machine.space(folder, 5, key, f"free some, or set {key} to another drive",
                         FAIL if key == "run.folder" else WARN)  # a finished data set may be read-only


# ---- measurements ----------------------------------------------------------------------------------------------

def measure(cfg, tell):
    """The machine's Speed, measured with the program's own parts; a line of text for each to `tell`."""
    import torch
    from env.workers import make_pool
    from models.losses import WorldModelLoss
    from models.policy import Driver, TrafficModel
    from runtime.batch_size import random_batch
    from runtime.distributed import Team
    from runtime.precision import Precision
    from runtime.training import to_device
    cfg = copy.deepcopy(cfg)
    # Traffic as in the middle of an episode, which does not end meanwhile.
    cfg.env.warmup_s, cfg.env.horizon_s, cfg.env.terminate_on_collision = cfg.env.horizon_s // 3, 1e6, False
    cores, gpus = usable_cores(), torch.cuda.device_count() if cfg.run.device != "cpu" else 0
    device = torch.device("cuda" if gpus else "cpu")
    ranks = cfg.coordinator.nproc or max(gpus, 1)
    torch.set_num_threads(threads_per_process(cfg.run.threads, ranks, cfg.rollout.num_workers))
    team, model = Team(0, 1, 0, 1, device), TrafficModel(cfg).to(device)
    autocast = Precision(cfg.phase2.amp, device).autocast
    with tempfile.TemporaryDirectory() as folder, make_pool(cfg, max(cores - max(gpus, 1), 1), 1, folder) as pool:
        pool.arrays["slot"][:] = cfg.env.max_vehicles  # nobody is commanded
        pool.reset(range(1, pool.num_envs + 1))
        simulate = simulation(pool)
        tell(f"simulate   {1 / simulate(1):.0f} control steps/s by one worker, {1 / simulate(pool.num_envs):.0f} "
             f"each by {pool.num_envs} at once ({pool.arrays['mask'][0].sum()} vehicles)")
        few, many = ((n, inference(Driver(model, n, cfg.env.max_vehicles, device, autocast=autocast), pool))
                     for n in (1, 8))
        infer = Line.through(*few, *many)
        score = inference(Driver(copy.deepcopy(model).cpu(), 1, cfg.env.max_vehicles), pool) if gpus else few[1]
        tell(f"infer      {1000 * infer(1):.1f} ms for one environment, {1000 * infer(8):.1f} ms for eight "
             f"({device.type})")
        later = learning_lines(cfg, team, model, pool, autocast)
    torch.set_num_threads(threads_per_process(cfg.run.threads, ranks))  # no simulators beside phase 1
    learn = [learning(cfg.phase1, team, model, WorldModelLoss(model, 2, cfg.phase1), (4, 16), lambda n: (
        to_device(random_batch(n, cfg, torch.Generator().manual_seed(0)), device), 1e3)), *later]
    for phase, line, n, unit in zip((1, 2, 3), learn, (32, 128, 8), ("samples", "control steps", "sequences")):
        tell(f"learn      phase {phase}: {n / line(n):.3g} {unit}/s in micro-batches of {n} ({device.type})")
    tell(f"load       {loading(cfg)}")
    return Speed(cores, gpus, simulate, infer, score, *learn)


def timed(action):
    """Median seconds of `action()`, called for SECONDS; the first call counts only where there is time for no other."""
    times, begin = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
        if times[0] > SECONDS:
            return times[0]
    return statistics.median(times[1:])


def simulation(pool):
    """Line of a control step over the number of busy workers."""
    def step(envs):
        pool.send(envs)
        pool.receive(envs)
    envs = list(range(pool.num_envs))
    alone = timed(lambda: step(envs[:1]))
    return Line.through(1, alone, len(envs), timed(lambda: step(envs))) if len(envs) > 1 else Line(alone, 0.0)


def inference(driver, pool):
    """Seconds of one decision for all of the driver's environments, each with the traffic of the pool's first."""
    envs = range(driver.num_envs)
    seen = {name: pool.arrays[name][[0 for _ in envs]] for name in pool.final}
    return timed(lambda: driver.decide(driver.perceive(seen, envs)))


def learning_lines(cfg, team, model, pool, autocast):
    """Lines of phase 2 over control steps and of phase 3 over sequences, from short rollouts."""
    import numpy as np
    from models.losses import ConstrainedLoss, PPOLoss
    from models.policy import Driver
    from runtime.rollout import Collector
    from runtime.storage import Minibatches
    from runtime.training import to_device
    from train_ddp import make_sequences
    from train_rl import LEARN, add_advantages
    p2, p3, n, rollouts = cfg.phase2, cfg.phase3, pool.num_envs, []
    steps = math.ceil(cfg.data.future / p3.sequence_length) * p3.sequence_length  # so that there are targets
    driver = Driver(model, n, cfg.env.max_vehicles, team.device, autocast=autocast)
    for keep in (0, p3.sequence_length):
        collector = Collector(pool, driver, cfg.run.seed, 2, keep_sequences=keep)
        collector.begin(0)
        rollouts.append(collector.collect(steps)[0])
    add_advantages(cfg, team, rollouts[0])
    minibatches, rows = Minibatches(rollouts[0], LEARN, team.device), steps * n
    sequences = to_device(make_sequences(cfg, team, rollouts[1].dense(), 1.0)[0], team.device)
    return [learning(p2, team, model, PPOLoss(model, p2), (32, 128), lambda b: (minibatches(np.arange(b) % rows), b)),
            learning(p3, team, model, ConstrainedLoss(model, p2, p3), (1, 4), lambda b: (
                {name: value[np.arange(b) % n] for name, value in sequences.items()}, [100.0] * 3))]


def learning(phase, team, model, module, sizes, arguments):
    """Line of an optimiser step of `module` over the size n of the micro-batch `arguments(n)`."""
    import torch
    from runtime.precision import Precision
    from train_ddp import optimiser_step
    optimizer, precision = torch.optim.Adam(model.parameters(), 0.0), Precision(phase.amp, team.device)

    def step(batch):
        float(optimiser_step(module, [batch], optimizer, precision, phase.clip_norm)[1])  # waits for the GPU
    few, many = ((n, timed(lambda batch=arguments(n): step(batch))) for n in sizes)
    return Line.through(*few, *many)


def loading(cfg):
    """Samples/s that one process reads and augments, as text; the data set is whatever lies there."""
    from data.augment import AugmentedDataset
    from data.dataset import ChunkedDataset
    try:
        train = ChunkedDataset(processed_folder(cfg), "train")
    except (DataError, OSError):
        return f"no data set in {cfg.data.folder} yet: run data.collect and data.preprocess first"
    data, rows = AugmentedDataset(train, cfg.phase1.augment, cfg.run.seed), [(0, list(range(min(32, len(train)))))]
    return f"{len(rows[0][1]) / timed(lambda: data.__getitems__(rows[0])):.0f} samples/s, augmented, by one process"


# ---- the command -----------------------------------------------------------------------------------------------

def advise(cfg, speed, gb):
    """Lines of text: what suits this machine, and how long a run takes as configured and with that."""
    better, advice = copy.deepcopy(cfg), recommend(cfg, speed, gb["available"])
    now = {key: value for key, value, _ in leaves(cfg)}
    yield "for this machine:  " + "  ".join(f"{key}={value}" + ("" if value == now[key] else f" (now {now[key]})")
                                            for key, value in advice.items())
    for key, value in advice.items():
        section, name = key.split(".")
        setattr(getattr(better, section), name, value)
    before, after = forecast(cfg, speed), forecast(better, speed)
    yield f"{'expected time':14s}{'as configured':>16s}{'with the above':>16s}"
    for step in (*before, "all"):
        times = [sum(t.values()) if step == "all" else t[step] for t in (before, after)]
        yield f"{step:14s}" + "".join(f"{duration(t):>16s}" for t in times)
    if times[1] > 0.95 * times[0]:
        yield "the configuration suits this machine as it is"


def main(arguments=None):
    spin_briefly()  # as the trainings do, which it measures
    options = parse(__doc__, arguments, lambda parser: parser.add_argument(
        "--no-benchmark", action="store_true", help="only look, measure nothing"))
    cfg, failed = options.config, False
    for status, what, found, remedy in examine(cfg):
        say(f"{status:6s}{what:12s}{found}" + (f"\n      -> {remedy}" if remedy else ""))
        failed |= status == FAIL
    if failed:
        say("\nnot measured: first what fails above")
    elif not options.no_benchmark:
        say(f"\nmeasuring ({options.config_file}, preset {cfg.model.preset}):")
        for line in advise(cfg, measure(cfg, say), machine.meminfo()):
            say(line)
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_code(main, (ConfigError,)))
