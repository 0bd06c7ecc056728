"""Rollout pools: environments in torch-free worker processes, or in this process, behind one interface.

Observations and actions live in one block of anonymous shared memory (nothing to clean up, whatever happens);
only short tokens travel by pipe. Environments form groups: while one group simulates, the learner computes the
other group's actions.

    pool.reset(seeds)                       start an episode in every environment
    pool.send(group, next_seeds)            step the group's environments with pool.arrays["slot"] and its siblings
    ended = pool.receive(group)             [(environment, episode summary)] of the episodes that ended

After `receive`, `pool.arrays[name][env]` holds the observation; where an episode ended, `pool.final[name][env]` holds
its last observation and `arrays` that of the next episode, if `next_seeds` gave one. Where `pool.arrays["lost"][env]`
is set, simulator or worker crashed or froze during the step and was replaced: the step and the rest of its episode do
not exist, and `arrays` holds the next episode's first observation.
"""
import contextlib
import mmap
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys

from env.block import SECONDS, Environments, block_type, map_block
from env.launch import WORKER_GOES, die_with_parent, first_to_go, python_environment


class WorkerError(Exception):
    """An environment failed; the message names worker, environment and seed and holds the worker's traceback."""


def make_pool(cfg, num_workers, envs_per_worker, folder=None):
    """A WorkerPool, or the SerialPool when `num_workers` is 0."""
    if num_workers:
        return WorkerPool(cfg, num_workers, envs_per_worker, folder)
    return SerialPool(cfg, envs_per_worker, folder)


class Pool(contextlib.AbstractContextManager):
    """What both pools share. `groups` lists the environments of each group; `arrays` and `final` are the block."""

    def __init__(self, cfg, envs, groups, buffer):
        self.num_envs, self.num_workers, self.groups, self.buffer = envs, 1, groups, buffer
        self.arrays, self.final = map_block(buffer, cfg)

    def __exit__(self, *_):
        self.close()

    def reset(self, seeds, indices=None, once=False):
        """Start an episode in the environments `indices` (all by default), `seeds[i]` for the i-th of them. Who asks
        for it `once` finds in `arrays["lost"]` whether it failed; otherwise that is tried again, and then an error."""
        indices = range(self.num_envs) if indices is None else indices
        orders = {index: (index, "try" if once else "reset", int(seed)) for index, seed in zip(indices, seeds)}
        self._dispatch(orders)
        self.receive(orders)

    def send(self, group, next_seeds=None):
        """Let the environments of `group` (their indices) take one step; `next_seeds[n]` follows an ended episode."""
        seeds = [None] * len(group) if next_seeds is None else [int(seed) for seed in next_seeds]
        self._dispatch({i: (i, "step", seed) for i, seed in zip(group, seeds)})

    def retire_worker(self):
        """Give up one worker with its environments, if there are several; all others need a `reset`."""
        return False

    def spent(self, group):
        """{part of a worker's work: seconds in the group's last step}, mean over the pool's workers."""
        return dict(zip(SECONDS, (self.arrays["seconds"][group].sum(0) / self.num_workers).tolist()))


class SerialPool(Pool):
    """All environments in this process, for debugging; same interface, one group."""

    def __init__(self, cfg, envs, folder=None):
        super().__init__(cfg, envs, [list(range(envs))], bytearray(envs * block_type(cfg).itemsize))
        self.environments, self.orders = Environments(cfg, range(envs), self.arrays, self.final, folder), {}

    def _dispatch(self, orders):
        self.orders.update(orders)

    def receive(self, group):
        """See WorkerPool; here the environments take their step now."""
        ended = []
        for i in group:
            try:
                ended += self.environments.run([self.orders.pop(i)])
            except Exception as error:
                self.close()
                raise WorkerError(f"environment {i} (seed {self.environments.envs[i].seed}) failed: {error}") from error
        return ended

    def close(self):
        """End all simulators."""
        self.environments.close()


class WorkerPool(Pool):
    """`num_workers` processes with `envs_per_worker` environments each; group g holds the g-th of every worker."""

    def __init__(self, cfg, num_workers, envs_per_worker, folder=None):
        envs = num_workers * envs_per_worker
        self.memory = os.memfd_create("rollout")
        os.ftruncate(self.memory, envs * block_type(cfg).itemsize)
        groups = [list(range(g, envs, envs_per_worker)) for g in range(envs_per_worker)]
        super().__init__(cfg, envs, groups, mmap.mmap(self.memory, 0))
        self.cfg, self.folder, self.num_workers, self.per_worker = cfg, folder, num_workers, envs_per_worker
        self.processes, self.pipes = [None] * num_workers, [None] * num_workers
        self.waiting = [[] for _ in range(num_workers)]  # orders that a worker has not answered yet
        self.failures = [0] * num_workers  # since its last good step
        # For one order. SUMO's own calls have deadlines; a warm-up, in many calls, is no slower than the traffic.
        warmup_s = max(variant.env.warmup_s for variant in cfg.variants())
        self.patience = cfg.env.start_timeout_s + 2 * cfg.env.call_timeout_s + warmup_s + 30
        try:
            for w in range(num_workers):
                self._start_worker(w)
        except BaseException:
            self.close()
            raise

    def _start_worker(self, w):
        ours, theirs = socket.socketpair()
        environment = {**python_environment(threads=1), "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
                       "CUDA_VISIBLE_DEVICES": ""}
        with theirs:
            self.processes[w] = subprocess.Popen(
                [sys.executable, "-m", "env.worker", str(theirs.fileno()), str(self.memory)], env=environment,
                pass_fds=(theirs.fileno(), self.memory), preexec_fn=_prepare_child)
        self.pipes[w] = multiprocessing.connection.Connection(ours.detach())
        processor = _processor(w, self.num_workers) if self.cfg.rollout.pin_workers else None
        indices = range(w * self.per_worker, (w + 1) * self.per_worker)
        self._tell(w, (self.cfg, list(indices), self.folder, processor))

    def _tell(self, w, message):
        with contextlib.suppress(OSError):  # it has gone: `_answer_of` will see it
            self.pipes[w].send(message)

    def _dispatch(self, orders):
        by_worker = {}
        for i, order in orders.items():
            by_worker.setdefault(i // self.per_worker, []).append(order)
        for w, batch in by_worker.items():
            self.waiting[w].append(batch)
            self._tell(w, batch)

    def receive(self, group):
        """Wait for the group's step; returns [(environment, episode summary)] of the episodes that ended in it."""
        return [end for w in sorted({i // self.per_worker for i in group}) for end in self._answer_of(w)]

    def _answer_of(self, w):
        """What worker w says to the oldest of its orders, if need be after it was replaced."""
        orders, once = self.waiting[w][0], self.waiting[w][0][0][1] == "try"
        patience = min(self.patience * len(orders), 1e6)  # more is too large for the system
        while True:
            try:
                if self.pipes[w].poll(patience):
                    answer = self.pipes[w].recv()
                    break
                trouble = f"did not answer within {patience:.0f} s"
            except (EOFError, OSError):
                trouble = "has gone" + self._exit_code(w)
            if once:
                self.arrays["lost"][[i for i, _, _ in orders]], self.waiting[w][0] = True, []
            self._replace(w, trouble)
        if isinstance(answer, str):
            self.close()
            raise WorkerError(f"rollout worker {w} failed: {answer}")
        self.waiting[w].pop(0)
        if once or not any(what == "reset" or self.arrays["lost"][i] for i, what, _ in orders):
            self.failures[w] = 0
        return answer

    def _exit_code(self, w):
        try:
            return f" (exit code {self.processes[w].wait(0.2)})"
        except subprocess.TimeoutExpired:
            return ""

    def _replace(self, w, trouble):
        """Start worker w anew and give it the orders that are open: it has no episode to step, so they are lost."""
        self.failures[w] += 1
        if self.failures[w] > self.cfg.rollout.restarts:
            self.close()
            raise WorkerError(f"rollout worker {w} {trouble}")
        print(f"rollout worker {w} {trouble}: its episodes are lost, it starts anew", file=sys.stderr, flush=True)
        self.pipes[w].close()
        self.processes[w].kill()  # its simulators are killed by the kernel with it
        self.processes[w].wait()
        self._start_worker(w)
        for batch in self.waiting[w]:
            self._tell(w, batch)

    def retire_worker(self):
        """The last worker ends."""
        if self.num_workers == 1:
            return False
        self.num_workers, self.num_envs = self.num_workers - 1, self.num_envs - self.per_worker
        self.groups = [[i for i in group if i < self.num_envs] for group in self.groups]
        self.arrays, self.final = ({name: array[:self.num_envs] for name, array in block.items()}
                                   for block in (self.arrays, self.final))
        self.pipes.pop().close()
        _bury(self.processes.pop())
        return True

    def close(self):
        """End all workers and their simulators; safe to call twice."""
        for pipe in filter(None, self.pipes):
            pipe.close()  # a worker that reads the end of its pipe closes its simulators and leaves
        for process in filter(None, self.processes):
            _bury(process)
        self.pipes, self.processes = [], []
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None


def _bury(process):
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()  # its simulators are killed by the kernel with it
        process.wait()


def _processor(worker, workers):
    """The processor for one of this learner's workers; None when they would leave none for the learners.

    A worker and its SUMO take turns, so neither has to be woken on another processor (a fifth of a control step). A
    learner without a processor must be free to share them. Workers are spread: neighbours may be threads of one core.
    """
    processors = sorted(os.sched_getaffinity(0))
    worker += int(os.environ.get("LOCAL_RANK", 0)) * workers
    workers *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return processors[worker * len(processors) // workers] if workers < len(processors) else None


def _prepare_child():
    """Runs in the new process before Python starts: die with the parent, leave Ctrl-C and TERM to the parent."""
    die_with_parent()
    first_to_go(WORKER_GOES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
