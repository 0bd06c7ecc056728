"""From the speed of a machine's parts to settings that suit it and to the time a whole run takes there."""
import math
from typing import NamedTuple

from runtime.resources import share_of_workers

GAIN = 0.95  # of the best rate is enough to save workers


class Line(NamedTuple):
    """Seconds of a call for n items: fixed + each * n."""
    fixed: float
    each: float

    def __call__(self, n):
        return self.fixed + self.each * n

    @staticmethod
    def through(few, seconds_few, many, seconds_many):
        """The line through two measurements; a fixed cost is never negative."""
        each = min(max((seconds_many - seconds_few) / (many - few), 0.0), seconds_many / many)
        return Line(max(seconds_many - each * many, 0.0), max(each, 1e-9))


class Speed(NamedTuple):
    """What a machine does: lines over the number of busy workers, environments, samples, control steps, sequences."""
    cores: int
    gpus: int
    simulate: Line   # a control step of one of n busy workers
    infer: Line      # one batch of n environments, on the learner's device
    score: float     # the same for one environment on the CPU, as evaluate.py does it
    phase1: Line     # a micro-batch of n samples
    phase2: Line     # a minibatch of n control steps
    phase3: Line     # a micro-batch of n sequences


def env_rate(speed, workers, envs, learners):
    """Control steps/s of all environments: two groups alternate, so simulating and inference hide each other as far as
    the cores allow."""
    workers = max(workers, 1)
    simulate, infer = speed.simulate(workers), speed.infer(workers / learners)
    hidden = max(simulate, infer) if envs > 1 else simulate + infer
    return min(workers / hidden, speed.cores / (simulate + infer * learners / workers))


def recommend(cfg, speed, available_gb):
    """{key: value} for this machine: the fewest workers that reach nearly the best rate, and batches as configured or
    so much larger that fixed costs are below a tenth."""
    learners, group = max(speed.gpus, 1), 1 if cfg.env.backend == "libsumo" else 2
    most = max(learners, min(speed.cores, int((available_gb - 2 - 2 * speed.gpus) / (0.04 + 0.06 * group))))
    useful = max(learners, cfg.phase2.train_batch_size // cfg.phase2.fragment_length)  # more would collect too much
    rates = {(n, envs): env_rate(speed, n, envs, learners) for n in range(learners, most + 1, learners)
             for envs in range(1, group + 1) if n * envs <= useful}
    workers, envs = next(pair for pair, rate in rates.items() if rate >= GAIN * max(rates.values()))
    train = cfg.data.samples * (1 - cfg.data.held_out) / learners
    return {"rollout.num_workers": workers, "rollout.num_envs_per_worker": envs,
            "data.processes": min(speed.cores, 32), "evaluate.workers": min(speed.cores, len(cfg.evaluate.seeds)),
            "phase1.batch_size": enough(speed.phase1, cfg.phase1.batch_size, 1, train / 8),
            "phase2.minibatch_size": enough(speed.phase2, cfg.phase2.minibatch_size, learners,
                                            cfg.phase2.train_batch_size / 16)}


def enough(line, size, ranks, most):
    """Smallest of size, 2 size, ... up to `most` that, shared by the ranks, has a tenth of fixed cost at most."""
    while line.fixed > 0.1 * line(size / ranks) and 2 * size <= most:
        size *= 2
    return size


def forecast(cfg, speed):
    """{step: seconds} of a whole run with this configuration; without preprocess and report, which take seconds."""
    ranks, learners = cfg.coordinator.nproc or max(speed.gpus, 1), max(speed.gpus, 1)
    steps, d, p1, p2, p3 = cfg.env.episode_steps, cfg.data, cfg.phase1, cfg.phase2, cfg.phase3
    r = cfg.rollout
    workers = {n: max(share_of_workers(r, n), 1) * n for n in (ranks, learners)}
    envs = workers[ranks] * r.num_envs_per_worker
    episodes = math.ceil(d.samples / d.samples_per_episode)
    train, held_out = d.samples * (1 - d.held_out) / ranks, d.samples * d.held_out / ranks
    batches = train // p1.batch_size
    sequences = p3.fragment_length / p3.sequence_length * envs / ranks
    rounds = p3.passes * (sequences // p3.batch_size)
    fragments = workers[learners] * r.num_envs_per_worker * p2.fragment_length
    seen = fragments * max(1, math.ceil(p2.train_batch_size / fragments))
    # All of the warm start but its first iteration learn from a kept rollout as well.
    warm = min(p2.imitate_iterations + p2.imitate_corrections, p2.iterations)
    learned = p2.iterations + (max(warm - 1, 0) if p2.imitate_keep else 0)
    minibatches = learned * p2.epochs * (seen // p2.minibatch_size)
    return {
        "collect": episodes * steps * shared(speed, d.processes),
        "phase1": p1.epochs * (batches * speed.phase1(p1.batch_size) + held_out * speed.phase1.each / 3),
        "phase2": (p2.iterations * seen / env_rate(speed, workers[learners], r.num_envs_per_worker, learners)
                   + minibatches * speed.phase2(p2.minibatch_size / learners)),
        "phase3": p3.epochs * (p3.fragment_length * envs / env_rate(speed, workers[ranks], r.num_envs_per_worker, ranks)
                               + rounds * speed.phase3(p3.batch_size)),
        "evaluate": evaluation(cfg, speed)}


def shared(speed, processes):
    """Seconds per control step of all of `processes` simulators together, more than cores or not."""
    busy = min(processes, speed.cores)
    return speed.simulate(busy) / busy


def evaluation(cfg, speed):
    """Seconds: rules cost next to nothing beside their simulators, the policy one inference per step, in turn."""
    steps = cfg.evaluate.horizon_s / cfg.env.control_interval * len(cfg.evaluate.seeds) * len(cfg.env.suite)
    names, simulate = {"none", *cfg.evaluate.controllers}, shared(speed, cfg.evaluate.workers)
    policy = max(simulate, speed.score, simulate + speed.score / speed.cores) if "policy" in names else 0.0
    return steps * (simulate * len(names - {"policy"}) + policy)
