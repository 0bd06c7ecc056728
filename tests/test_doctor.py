"""The doctor: each finding with its remedy, the arithmetic of its advice, and the command itself."""
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs import Config, load_config
from runtime import doctor, machine
from runtime.machine import FAIL, OK, WARN
from runtime.sizing import Line, Speed, env_rate, forecast, recommend, shared

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = {name: "1.28.0" for name in (*machine.NEEDED, "libsumo")}
GB = {"total": 16.0, "available": 13.0, "swap": 8.0}
WSL = "5.15.167.4-microsoft-standard-WSL2"


# ---- findings ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("findings, status, words", [
    ([machine.packages(VERSIONS)], OK, "traci 1.28.0"),
    ([machine.packages({**VERSIONS, "libsumo": None})], OK, "traci 1.28.0"),
    ([machine.packages({**VERSIONS, "traci": None})], FAIL, "missing: traci"),
    ([machine.packages({**VERSIONS, "traci": "1.27.0"})], FAIL, "pip install traci==1.28.0"),
    ([machine.packages({**VERSIONS, "libsumo": "1.29.0"})], FAIL, "pip install libsumo==1.28.0"),
    ([machine.precision({"bf16"}, None, False)], OK, "float32"),
    ([machine.precision({"bf16"}, (7, 5), False)], WARN, "amp.dtype=fp16"),
    ([machine.precision({"fp16"}, (7, 5), False)], OK, "only emulated"),
    ([machine.precision({"bf16"}, (8, 6), True)], OK, "bf16 in hardware"),
    ([machine.precision({"fp16"}, (6, 1), False)], WARN, "amp.dtype=off"),
    ([machine.sockets()], OK, "127.0.0.1"),
    (machine.memory(GB, False), OK, "13.0 GB"),
    (machine.memory({**GB, "available": 7.0}, False), WARN, "configs/low_memory.yaml"),
    (machine.memory({**GB, "available": 7.0}, True), WARN, ".wslconfig"),
    (machine.memory({**GB, "available": 1.9}, False), FAIL, "2 GB"),
    (machine.memory({**GB, "swap": 0.0}, False), WARN, "swapon"),
    (machine.memory({**GB, "swap": 0.0}, True), WARN, "wsl --shutdown"),
    ([machine.space("/gone/away", 1, "disk", "free some", free=2 * 2**30)], OK, "2.0 GB free in /"),
    ([machine.space("/gone/away", 1, "disk", "free some", free=2**29)], WARN, "free some"),
    ([machine.open_files(1023)], WARN, "ulimit -n"), ([machine.open_files(1024)], OK, "1024"),
    ([machine.space("/proc/self/status/deeper", 1, "data.folder", "")], WARN, "no folder that can be written to"),
    (machine.wsl2(WSL)[1], OK, "half of the host's memory"),
    (machine.wsl2("4.4.0-19041-Microsoft")[1], FAIL, "--set-version"),
    ([machine.processors(load=0.0)], OK, "load 0.0"), ([machine.processors(load=99.0)], WARN, "top"),
    ([doctor.place("data.folder", "/mnt/c/data")], WARN, f"data.folder={Path.home()}/data"),  # not itself
    ([doctor.place("data.folder", ".")], OK, "GB free")])
def test_finding_and_remedy(findings, status, words):
    findings = list(findings)
    worst = max((f.status for f in findings), key=(OK, WARN, FAIL).index)
    text = " ".join(f"{f.found} {f.remedy}" for f in findings)
    assert worst == status and words in text
    assert [f for f in findings if (f.status == OK) == bool(f.remedy)] == []  # a remedy where one is needed


def test_folder_that_is_closed_to_us_is_no_traceback(monkeypatch, tmp_path):
    """`Path.exists` raises where a folder on the way may not be looked into; so did the doctor."""
    def closed(path):
        raise PermissionError(13, "Permission denied", str(path))
    monkeypatch.setattr(Path, "exists", closed)
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.X_OK)
    finding = machine.space(tmp_path / "runs", 1, "run.folder", "")
    assert finding.status == WARN and finding.found == f"{tmp_path} is no folder that can be written to"


def test_kernel_tells_wsl2_from_others():
    assert machine.wsl2(WSL)[0] and not machine.wsl2("4.4.0-19041-Microsoft")[0]
    assert machine.wsl2("4.19.128-microsoft-standard")[0]  # of older kernels the name does not say WSL2: "is WSL1"
    assert machine.wsl2("6.8.0-45-generic") == (False, [])


def test_gpu_that_pytorch_does_not_use_fails(monkeypatch):
    """A CPU build of PyTorch beside a GPU trained on the CPU without a word."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    (one,) = machine.gpus("cuda", "570.1, NVIDIA GeForce RTX 2080 Ti")
    assert one.status == FAIL and "CUDA build" in one.remedy and "2080 Ti" in one.found
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "driver" in next(machine.gpus("auto", "390.1, old")).remedy


def test_gpu_that_cannot_compute_is_a_finding(monkeypatch):
    """A full card, or a PyTorch without kernels for it, was a traceback of the doctor's."""
    def ones(*shape, device):
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nhint")
    card = SimpleNamespace(name="GeForce RTX 2080 Ti", major=7, minor=5)
    for name, value in (("is_available", lambda: True), ("device_count", lambda: 2),
                        ("get_device_properties", lambda i: card), ("get_arch_list", lambda: ["sm_90", "sm_100"])):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "ones", ones)
    found = list(machine.gpus("auto", "570.1, old"))
    assert [f.status for f in found] == [FAIL, FAIL] and "no kernel image" in found[0].found
    assert "hint" not in found[0].found and "sm_90 sm_100" in found[0].remedy and "sm_75" in found[0].remedy


@pytest.mark.parametrize("smi", ["", "570.1, NVIDIA GeForce RTX 2080 Ti"])
def test_gpu_fails_only_who_asks_for_one(monkeypatch, smi):
    """With a GPU that PyTorch's CPU build does not use, the doctor failed a run on the CPU too."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {wanted: next(machine.gpus(wanted, smi)) for wanted in ("cuda", "auto", "cpu")}
    assert {wanted: finding.status for wanted, finding in found.items()} == {"cuda": FAIL, "auto": WARN, "cpu": OK}
    assert not found["cpu"].remedy


def test_container_has_the_memory_of_its_limit(tmp_path):
    """What the group uses already counted as available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.stat").write_text(f"anon {2 * 2**30}\nshmem {2**30}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nSwapTotal: 1048576 kB\n")
    assert machine.meminfo(tmp_path) == {"total": 32.0, "available": 16.0, "swap": 1.0}
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert machine.meminfo(tmp_path)["total"] == 32.0
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{8 * 2**30}\n")
    assert machine.meminfo(tmp_path) == {"total": 8.0, "available": 5.0, "swap": 1.0}


# ---- advice ------------------------------------------------------------------------------------------------------

def speed(cores=32, gpus=2, **changes):
    """10 ms a control step however many workers; inference 1 ms + 0.1 ms; 1 ms a batch, sample, step and sequence."""
    line = Line(1e-3, 1e-3)
    parts = {"simulate": Line(0.01, 0.0), "infer": Line(1e-3, 1e-4), "score": 1e-3, "phase1": line, "phase2": line,
             "phase3": line, **changes}
    return Speed(cores=cores, gpus=gpus, **parts)


def test_line_through_two_measurements():
    assert Line.through(1, 3.0, 8, 10.0) == pytest.approx((2.0, 1.0))
    assert Line.through(4, 1.0, 16, 16.0) == pytest.approx((0.0, 1.0))  # noise: no negative fixed cost
    fixed, each = Line.through(4, 2.0, 16, 1.0)
    assert fixed == pytest.approx(1.0) and each < 1e-6


def test_rate_of_environments_by_hand():
    s = speed()
    assert env_rate(s, 4, 2, 2) == pytest.approx(4 / 0.01)                       # simulation hides inference
    assert env_rate(s, 4, 1, 2) == pytest.approx(4 / (0.01 + 0.0012))            # one environment: it does not
    slow = speed(infer=Line(0.02, 0.0))
    assert env_rate(slow, 4, 2, 2) == pytest.approx(4 / 0.02)                    # inference is slower
    two = speed(cores=2, gpus=0, infer=Line(0.0, 0.01))
    assert env_rate(two, 2, 2, 1) == pytest.approx(2 / (0.01 + 0.02 / 2))        # only two cores for both
    assert shared(speed(cores=2), 8) == pytest.approx(0.005)


def test_advice_fits_the_machine():
    cfg = Config()
    cfg.phase2.train_batch_size = 100_000
    assert recommend(cfg, speed(), 64)["rollout.num_workers"] == 30  # all cores but the learners' shares
    few = recommend(cfg, speed(infer=Line(0.0, 0.005)), 64)  # inference of 2 a learner takes as long as a step
    assert few["rollout.num_workers"] == 4
    assert recommend(cfg, speed(), 7)["rollout.num_workers"] <= 6  # memory
    assert recommend(cfg, speed(phase1=Line(1e-3, 1e-2)), 64)["phase1.batch_size"] == 32
    assert recommend(cfg, speed(phase1=Line(1e-1, 1e-5)), 64)["phase1.batch_size"] == 32  # 8 steps an epoch at least
    cfg.data.samples = 10_000
    assert recommend(cfg, speed(phase1=Line(0.01, 1e-3)), 64)["phase1.batch_size"] == 128
    cfg.env.backend = "libsumo"
    assert recommend(cfg, speed(), 64)["rollout.num_envs_per_worker"] == 1


def test_more_environments_are_not_advised_where_an_iteration_would_collect_more():
    """With configs/quick.yaml a second environment a worker doubled the time of phase 2, and was recommended."""
    cfg, two = load_config("configs/quick.yaml"), speed(cores=2, gpus=0)
    assert recommend(cfg, two, 64)["rollout.num_envs_per_worker"] == cfg.rollout.num_envs_per_worker == 1
    cfg.phase2.train_batch_size *= 2
    assert recommend(cfg, two, 64)["rollout.num_envs_per_worker"] == 2


def test_no_more_workers_are_advised_than_an_iteration_has_fragments():
    """On 32 cores 30 workers with two environments were recommended: three times `phase2.train_batch_size` of 4000."""
    advice = recommend(Config(), speed(), 64)
    assert (advice["rollout.num_workers"], advice["rollout.num_envs_per_worker"]) == (20, 1)


def test_expected_time_by_hand():
    cfg = load_config("configs/default.yaml", ["data.samples=1280", "data.held_out=0.5", "env.horizon_s=100",
                                               "data.samples_per_episode=128", "data.processes=4", "phase1.epochs=3",
                                               "phase2.iterations=2", "phase2.fragment_length=100",
                                               "phase2.train_batch_size=3300", "rollout.num_workers=16",
                                               "phase2.imitate_iterations=0", "phase2.imitate_corrections=0",
                                               "phase3.epochs=5", "evaluate.horizon_s=50", "evaluate.workers=2",
                                               "phase2.minibatch_size=64", "phase2.epochs=1"])
    times = forecast(cfg, speed())
    assert times["collect"] == pytest.approx(10 * 100 * 0.01 / 4)
    assert times["phase1"] == pytest.approx(3 * (10 * 0.033 + 320 * 1e-3 / 3))
    # two fragments of 32 environments; they were not rounded up, and a warm start's second minibatches not counted
    assert times["phase2"] == pytest.approx(2 * (6400 / (16 / 0.01) + 100 * 0.033))
    # 32 environments x 200 steps; 320 sequences a rank in 13 micro-batches of 24, four times
    assert times["phase3"] == pytest.approx(5 * (6400 / 1600 + 4 * 13 * 0.025))
    assert times["evaluate"] == pytest.approx(20 * 50 * (5 * 0.005 + 0.005 + 1e-3 / 32))
    cfg.phase2.imitate_iterations, cfg.phase2.imitate_keep = 9, 1
    assert forecast(cfg, speed())["phase2"] == pytest.approx(times["phase2"] + 100 * 0.033)
    cfg.env.suite = ["same"] * 3  # it was that of one variant
    assert forecast(cfg, speed())["evaluate"] == pytest.approx(3 * times["evaluate"])


# ---- the command -------------------------------------------------------------------------------------------------

def run(*words):
    return subprocess.run([sys.executable, "-m", "runtime.doctor", *words], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)


def test_doctor_finds_what_fails_and_says_so():
    done = run("--config", "configs/smoke.yaml", "env.scenario=gone.sumocfg")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert done.returncode == 2 and "SUMO" in line and "gone.sumocfg" in line and "not measured" in done.stdout
    assert run("phase1.epochz=3").returncode == 2


@pytest.mark.parametrize("words, status, found", [
    (["env.suite=[env.scenario=gone.sumocfg, same]"], FAIL, "gone.sumocfg"),
    (["data.scenarios=[gone.sumocfg]"], FAIL, "gone.sumocfg"),
    (["env.suite=[env.scenario=merge, env.scenario=ring]"], OK, "merge, ring: starts")])
def test_every_scenario_is_started(words, status, found):
    """Of a suite without the corridor, and of one with a file that is not there, it said "ok, corridor: starts"."""
    finding = doctor.sumo(load_config("configs/smoke.yaml", words))
    assert finding.status == status and found in finding.found


def test_where_no_run_can_write_fails(tmp_path):
    """A warning and exit code 0, where every other command refuses; a finished data set may be read-only."""
    (tmp_path / "file").touch()
    places = {key: doctor.place(f"{key}.folder", str(tmp_path / "file/deeper")).status for key in ("run", "data")}
    assert places == {"run": FAIL, "data": WARN}


def test_doctor_measures_and_advises(monkeypatch, capsys, tmp_path):
    """Every measurement once: the figures mean nothing here. A sequence that is shorter than what is predicted was a
    traceback."""
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)  # other tests run in this process too
    assert doctor.main(["--config", "configs/smoke.yaml", f"data.folder={tmp_path}", "run.device=cpu",
                        "phase3.sequence_length=4"]) == 0
    out = capsys.readouterr().out
    assert "SUMO        corridor: starts" in out and "rollout.num_workers=" in out
    for text in ("simulate ", "infer ", "phase 1:", "phase 2:", "phase 3:", "load ", "no data set in", "all "):
        assert text in out, text
