"""runtime/guard.py: watermarks, what each of them gives up, smaller pools, and the exit codes of the command lines."""
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import coordinator
import train_ddp
from configs import Config, ConfigError, load_config
from env.workers import WorkerError, make_pool
from models.policy import Driver
from runtime import checkpoint, guard as guard_module, memory, resources
from runtime.checkpoint import CheckpointError, SaveError
from runtime.distributed import Team
from runtime.ending import note, run_script
from runtime.guard import MemoryGuard, budgets, next_level, split, table
from runtime.memory import Sampler, cgroup_memory, process_tree, proportional_mb, tree_root
from runtime.metrics import VOCABULARY, read_metrics
from runtime.resources import usable_cores
from runtime.rollout import Collector
from train_ddp import phase3
from train_rl import phase2

ROOT = Path(__file__).resolve().parent.parent
ALONE = Team(0, 1, 0, 1, torch.device("cpu"))
# share of the limit, level that follows: marks 0.80, 0.90, 0.96, hysteresis 0.05
HISTORY = [(0.79, 0), (0.80, 1), (0.76, 1), (0.75, 1), (0.74, 0), (0.79, 0), (0.91, 2), (0.86, 2), (0.84, 1), (0.76, 1),
           (0.90, 2), (0.97, 3), (0.92, 3), (0.905, 2), (0.50, 0), (2.00, 3), (0.80, 1)]


# ---- watermarks ----------------------------------------------------------------------------------------------------

def test_levels_rise_at_a_mark_and_fall_below_it():
    level, seen = 0, []
    for share, _ in HISTORY:
        level = next_level(level, share, (0.80, 0.90, 0.96), 0.05)
        seen.append(level)
    assert seen == [expected for _, expected in HISTORY]


@pytest.fixture
def guarded(monkeypatch):
    """guarded(shares, cfg) -> (guard, stop): each sample finds the next share of the limit."""
    for thread in threading.enumerate():  # of a program that another test has run: it took shares that were meant here
        if isinstance(thread, Sampler):
            thread.end()
    monkeypatch.setattr(MemoryGuard, "start", lambda self: None)  # the test samples

    def build(shares=(), cfg=None):
        shares, stop = iter(shares), SimpleNamespace(asked=False, used=[])

        def measured(found):
            (used, most, _), = found
            stop.used.append(used)
            return next(shares), used, most, "a limit"
        monkeypatch.setattr(guard_module, "tightest", measured)
        return MemoryGuard(cfg or Config(), ALONE, stop), stop
    return build


def test_measures_follow_the_levels(guarded, capsys):
    guard, _ = guarded([0.5, 0.85, 0.92, 0.86, 0.7, 0.97])
    dropped, pool = [], SimpleNamespace(num_workers=3, retire_worker=lambda: True)
    guard.caches, seen = [lambda: dropped.append(1)], []
    for _ in range(6):
        guard.sample()
        seen.append((guard.must_stop(), len(dropped), guard.give_up_worker(pool), guard.exit_code))
    assert seen == [(False, 0, False, 0), (False, 1, False, 0), (False, 2, True, 0), (False, 3, True, 0),
                    (False, 3, False, 0), (True, 4, True, 3)]
    out = capsys.readouterr().out
    assert out.count("dropping caches") == 1 and out.count("giving up rollout workers") == 1
    assert out.count("largest:") == 2 and "(97%) of a limit: saving and stopping" in out
    assert guard.leave("here") == 3
    out = capsys.readouterr().out
    assert "largest:" in out and f"(pid {os.getpid()})" in out and "stopped and saved here" in out


def test_nothing_is_given_up_twice_for_one_sample(guarded):
    guard, stop = guarded([0.92])
    guard.sample()
    assert (guard.must_stop(), guard.fewer_workers) == (False, True)
    assert (guard.must_stop(), guard.fewer_workers) == (False, False)
    stop.asked = True  # a stop request is not a want of memory
    assert guard.must_stop() and guard.leave("here") == 0


def test_peak_between_two_questions_counts(guarded):
    guard, _ = guarded([0.97, 0.3])
    guard.sample(), guard.sample()
    assert guard.must_stop()


def test_facts_are_in_the_vocabulary_and_add_up(guarded):
    guard, stop = guarded([0.5])
    facts = guard.facts()
    assert facts["memory_mb"] - 300 < stop.used[0] < facts["memory_mb"] - 1  # pages of files are no pressure
    assert set(facts) < set(VOCABULARY) and facts["memory_share"] == 0.5
    assert facts["memory_mb"] == pytest.approx(sum(facts[f"memory_{role}_mb"]
                                                   for role in ("learner", "worker", "sumo", "other")))
    assert facts["memory_mb"] > 50


def test_a_role_may_have_a_budget_of_its_own(monkeypatch):
    """The tightest one counts, and is named."""
    monkeypatch.setattr(memory, "machine_memory", lambda: (1.0, 1e6))
    monkeypatch.setattr(memory, "cgroup_memory", list)
    processes = [(3000.0, "train_rl"), (100.0, "rollout worker"), (200.0, "rollout worker"), (900.0, "sumo"),
                 (7.0, "others")]
    settings = replace(Config().memory, budget_gb=8.0)
    assert memory.tightest(budgets(settings, processes)) == (4207 / 8192, 4207, 8192, "memory.budget_gb")
    settings = replace(settings, sumo_gb=1.0, worker_gb=0.5, learner_gb=4.0)
    assert memory.tightest(budgets(settings, processes)) == (900 / 1024, 900, 1024, "memory.sumo_gb")
    assert sorted(budgets(settings, processes)[1:]) == [(300, 512, "memory.worker_gb"), (900, 1024, "memory.sumo_gb"),
                                                        (3000, 4096, "memory.learner_gb")]


def test_table_names_components_and_largest_processes():
    lines = table([(10.0, "sumo", 11), (30.0, "learner", 12), (25.0, "sumo", 13)], largest=2).splitlines()
    assert [line.split() for line in lines[:2]] == [["sumo", "2", "processes", "35", "MB"],
                                                    ["learner", "1", "processes", "30", "MB"]]
    assert lines[2] == "  largest: learner (pid 12) 30 MB, sumo (pid 13) 25 MB"


# ---- what is measured ----------------------------------------------------------------------------------------------

def test_pages_of_files_are_no_pressure(tmp_path):
    """Reading a large data set through a memory map looked like a leak."""
    (tmp_path / "data").write_bytes(bytes(64 << 20))
    before = proportional_mb(os.getpid())
    data = np.memmap(tmp_path / "data", np.uint8)
    data.sum()
    mapped = proportional_mb(os.getpid())
    own = np.ones(64 << 20, np.uint8)
    after = proportional_mb(os.getpid())
    assert mapped[0] - before[0] > 55 and mapped[1] - before[1] < 5
    assert after[1] - mapped[1] > 55 and len(own) == len(data)


@pytest.mark.parametrize("kind, limit, stat", [
    ("0::/a/b", "memory.max", "anon 104857600\nshmem 10485760\nfile 999999999\n"),
    ("4:memory:/a/b", "memory.limit_in_bytes", "total_rss 104857600\ntotal_shmem 10485760\ncache 99999999\n")])
def test_control_groups_limits_are_found(tmp_path, kind, limit, stat):
    """Of the process's own group or of one above it; "max" and the old kind's huge number are no limits."""
    top = tmp_path / "memory" if "memory" in kind else tmp_path
    (top / "a/b").mkdir(parents=True)
    (tmp_path / "own").write_text(kind + "\n1:cpu:/a\n")
    none = "max" if limit == "memory.max" else str(2 ** 63 - 4096)
    for folder, most in ((top / "a/b", none), (top / "a", "209715200")):
        (folder / limit).write_text(most)
        (folder / "memory.stat").write_text(stat)
    assert cgroup_memory(tmp_path, tmp_path / "own") == [(110.0, 200.0)]


@pytest.mark.parametrize("kind, files, expected", [
    ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 3),
    ("0::/", {"cpu.max": "50000 100000"}, 1),
    ("0::/", {"cpu.max": "6400000 100000"}, 32),
    ("0::/", {}, 32),
    ("3:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
                          "cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2)])
def test_a_containers_share_of_the_processors_counts(tmp_path, monkeypatch, kind, files, expected):
    """`docker --cpus=2` on a machine with 32 processors had 32 threads, which waited for each other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    for name, text in {"own": f"1:name=systemd:/a\n{kind}\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path, tmp_path / "own") == expected
    assert usable_cores(tmp_path, tmp_path / "no such file") == 32


def test_the_tree_begins_at_the_outermost_script():
    """A learner of the coordinator counts the coordinator's tree; a name that is no ancestor's is not believed."""
    code = "from runtime.memory import tree_root; print(tree_root())"
    start = lambda **more: int(subprocess.run(  # noqa: E731
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True).stdout)
    assert tree_root() == os.getpid() and start(MEMORY_ROOT=str(os.getppid())) == os.getppid()
    assert start(TORCHELASTIC_RUN_ID="x") == os.getpid()
    assert start(MEMORY_ROOT="999999999") not in (999999999, os.getpid())


# ---- smaller pools -------------------------------------------------------------------------------------------------

@pytest.fixture
def pool_of(scenarios):
    """pool_of(workers, environments per worker) -> pool, closed after the test."""
    cfg, made = Config(), []
    cfg.env.max_vehicles, cfg.env.horizon_s, cfg.rollout.restarts = 40, 20.0, 3

    def build(workers, per_worker):
        made.append(make_pool(cfg, workers, per_worker, scenarios))
        return made[-1]
    yield build
    for pool in made:
        pool.close()


def collected(pool, model, iteration, during=lambda: None):
    """What a rollout of 6 steps holds and how many steps were lost."""
    collector = Collector(pool, Driver(model, pool.num_envs, 40), 7, 2)
    collector.begin(iteration)
    during()
    rollout, facts = collector.collect(6)
    return {name: rollout[name] for name in (*rollout.fixed, *rollout.tables)}, facts["lost_steps"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_shrunk_pool_collects_what_a_small_one_does(pool_of, models):
    """Also after one of its workers was replaced, which must find its places in a block made for more."""
    shrunk, small = pool_of(3, 2), pool_of(2, 2)
    shrunk.reset(range(6))
    gone = shrunk.processes[2]
    assert shrunk.retire_worker() and gone.returncode == 0
    assert (shrunk.num_workers, shrunk.num_envs, shrunk.groups) == (2, 4, [[0, 2], [1, 3]])
    (rows, lost), (expected, _) = collected(shrunk, models["small"], 3), collected(small, models["small"], 3)
    assert rows["reward"].shape == (6, 4) and lost == 0 and same(rows, expected)
    _, lost = collected(shrunk, models["small"], 4, lambda: os.kill(shrunk.processes[1].pid, signal.SIGKILL))
    assert lost > 0
    assert same(collected(shrunk, models["small"], 5)[0], collected(small, models["small"], 5)[0])
    assert shrunk.retire_worker() and not shrunk.retire_worker() and shrunk.groups == [[0], [1]]


def test_simulators_die_before_workers_and_workers_before_learners(pool_of):
    pool = pool_of(1, 1)
    pool.reset([1])
    sumo, = set(process_tree(pool.processes[0].pid)) - {pool.processes[0].pid}
    own, worker, simulator = (int(Path(f"/proc/{pid}/oom_score_adj").read_text())
                              for pid in (os.getpid(), pool.processes[0].pid, sumo))
    assert own < worker < simulator


def test_environments_in_this_process_are_not_given_up(pool_of):
    assert not pool_of(0, 2).retire_worker()


# ---- GPU memory, smaller micro-batches -----------------------------------------------------------------------------

@pytest.mark.parametrize("static, phase, expected", [
    (False, 1, "1 1 1 1 2 2 2r 4r"), (True, 1, "1 1 1 1 1r 1r 1r 1r"), (False, 3, "1r 1r 1r 1r 2r 2r 4r 8r"),
    (False, 2, "1 1 1 1 2 2 4 8"), (True, 2, "1 1 1 1 1 1 1 1")])
def test_gpu_memory_empties_the_cache_then_learns_with_less(guarded, monkeypatch, static, phase, expected, capsys):
    """After each measure (parts of a micro-batch, r = activations recomputed) the guard waits until it can have had an
    effect. PyTorch loses gradients when several micro-batches meet ddp.static_graph. It said the same again every
    second where nothing more could be done, and never recomputed anything."""
    cfg, clock, measures = Config(), iter([100, 101, 102, 110, 120, 121, 130, 140]), []
    cfg.ddp.static_graph = static
    readings, seen, emptied = iter([19.0, 20.5, 20.6, 20.7, 21.5, 21.5, 22.0, 22.0]), [], []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: seen.append(next(readings)) or seen[-1] * 2 ** 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(seen[-1]))
    guard, _ = guarded(cfg=cfg)
    guard.gpu, guard.phase = torch.device("cuda"), getattr(cfg, f"phase{phase}")
    for _ in range(8):
        now = next(clock)
        monkeypatch.setattr(guard_module.time, "monotonic", lambda: now)
        assert not guard.must_stop()
        measures.append(f"{cfg.memory.split}{'r' * getattr(guard.phase, 'checkpointing', False)}")
    assert measures == expected.split() and emptied == [20.5, 20.7, 21.5, 22.0, 22.0]
    said = re.findall(r"in (\d) parts(, act)?", capsys.readouterr().out)
    assert [f"{n}{'r' * bool(recomputed)}" for n, recomputed in said] == list(dict.fromkeys(expected.split()))


@pytest.mark.parametrize("parts", [1, 2, 3, 64])
def test_parts_of_a_micro_batch_add_up_to_it(parts):
    torch.manual_seed(0)
    batch, net = {"x": torch.rand(7, 3), "y": torch.rand(7)}, nn.Linear(3, 1)
    loss = lambda b, count: ((net(b["x"]).squeeze(-1) - b["y"]) ** 2).sum() / count  # noqa: E731
    expected, = torch.autograd.grad(loss(batch, 7.0), [net.weight])
    pieces = split([(batch, 7.0)], parts)
    assert len(pieces) == min(parts, 7) or (parts == 3 and len(pieces) == 3)
    got, = torch.autograd.grad(sum(loss(*piece) for piece in pieces), [net.weight])
    torch.testing.assert_close(got, expected)


# ---- phases 2 and 3, command lines ----------------------------------------------------------------------------------

@pytest.mark.parametrize("phase", [phase2, phase3])
def test_phase_goes_on_with_fewer_workers_and_stops_saved(guarded, tmp_path, monkeypatch, phase):
    monkeypatch.chdir(tmp_path)
    cfg = load_config("configs/smoke.yaml", [
        "run.device=cpu", "rollout.num_envs_per_worker=1", "phase2.iterations=9", "phase2.train_batch_size=20",
        "phase3.epochs=9", "phase2.checkpoint_every=9", "phase3.checkpoint_every=9"])
    guard, _ = guarded([0.5, 0.92, 0.6, 0.97], cfg)
    assert phase(cfg, ALONE, guard) == 3
    assert [row["env_steps"] for row in read_metrics("runs/smoke/metrics.jsonl")] == [40, 80, 100, 120]
    assert checkpoint.load(f"runs/smoke/{phase.__name__}")["epoch"] == 4


@pytest.mark.parametrize("error", [
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    torch.AcceleratorError("CUDA error: out of memory"),  # of the driver: pinned memory, kernels
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")])
def test_want_of_memory_has_its_own_exit_code(tmp_path, monkeypatch, capsys, error):
    """Also under torchrun, which passes on 1. What CUDA's driver and cuBLAS say was a failure like any other, so that
    the next try was no smaller."""
    monkeypatch.setenv("EXIT_CODE_FILE", str(tmp_path / "code"))

    def main(error=error):
        raise error
    assert run_script(main, (ConfigError,)) == 4 and (tmp_path / "code").read_text() == "4"
    assert "memory.split=2" in capsys.readouterr().err
    for other in ("another", "NCCL error: unhandled cuda error, CUDA error: out of memory"):  # no smaller batch helps
        with pytest.raises(RuntimeError, match=other):
            run_script(lambda: main(RuntimeError(other)), (ConfigError,))


@pytest.mark.parametrize("error, code", [(CheckpointError("no"), 2), (SaveError("no"), 1), (WorkerError("no"), 1)])
def test_what_another_try_may_survive_is_no_bad_input(tmp_path, monkeypatch, capsys, error, code):
    """A lost worker and a full disk ended with 2, which the coordinator does not try again."""
    monkeypatch.setenv("EXIT_CODE_FILE", str(tmp_path / "code"))

    def main():
        raise error
    assert run_script(main, train_ddp.USER_ERRORS, train_ddp.TROUBLES) == code
    assert (tmp_path / "code").read_text() == str(code)
    assert capsys.readouterr().err == "error: no\n"


def test_garbage_is_collected_again_once_a_script_has_begun(monkeypatch):
    """While it imports PyTorch none is: that took a fifth of the time."""
    monkeypatch.setattr(resources, "spin_briefly", lambda: None)
    try:
        resources.before_torch()
        assert not gc.isenabled() and run_script(lambda: 0 if gc.isenabled() else 1, ()) == 0
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("command", [
    "coordinator.py", "evaluate.py", "-m runtime.report no/run", "train_ddp.py --phase 1", "train_rl.py",
    "-m data.collect", "-m data.preprocess", "-m data.check", "-m runtime.doctor"])
def test_ctrl_c_in_the_first_second_is_no_traceback(tmp_path, command):
    """It was the import's traceback; sometimes an import swallowed it, and the pipeline ran on."""
    (tmp_path / "numpy.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)")
    done = subprocess.run([sys.executable, *command.split()], cwd=Path(__file__).parent.parent, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == -signal.SIGINT and done.stderr == b""


def test_what_the_first_rank_to_end_says_outweighs_the_lost_connections_of_others(tmp_path, monkeypatch):
    monkeypatch.setenv("EXIT_CODE_FILE", str(tmp_path / "code"))
    for code in (0, 4, 1, 0):
        assert note(code) == code
    assert (tmp_path / "code").read_text() == "4"


OUT_OF_MEMORY_ONCE = """
import sys
import threading
if sys.argv and sys.argv[0].endswith("train_rl.py") and "memory.split=2" not in sys.argv:
    import torch
    def want(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")
    torch.optim.Adam.__init__ = want
"""


def test_want_of_memory_is_survived_and_a_tiny_budget_is_a_saved_stop(tmp_path, monkeypatch, capfd):
    """The coordinator halves the micro-batch when a phase runs out of memory, remembers it, and passes on the guard's
    exit code 3. Its own process counts as a part of the tree."""
    (tmp_path / "sitecustomize.py").write_text(OUT_OF_MEMORY_ONCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(coordinator, "resource_plan", lambda cfg: {"phase2": {"processes": 1, "threads": 1}})
    options = coordinator.parse("", ["--config", "configs/smoke.yaml", "--only", "phase2", "run.device=cpu",
                                     "run.threads=1", "rollout.num_workers=0", "rollout.num_envs_per_worker=1",
                                     "memory.budget_gb=0.1"], coordinator.add_options)
    assert coordinator.pipeline(options, SimpleNamespace(asked=False, at_once=False, child=None)) == 3
    out, err = capfd.readouterr()
    assert "error: out of memory" in err and "phase2 ran out of memory" in out
    largest, = re.findall("largest: .*", out)
    assert f"(pid {os.getpid()})" in largest and "train_rl (pid " in largest
    state = json.loads(Path("runs/smoke/state.json").read_text())
    assert state["parts"] == {"phase2": 2} and state["steps"]["phase2"]["status"] == "stopped"
    saved = checkpoint.load("runs/smoke/phase2")
    assert saved["epoch"] == 1 and saved["config"]["memory"]["split"] == 2
