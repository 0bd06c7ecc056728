"""Every command line for real, with configs/smoke.yaml and SUMO: the pipeline, resuming, evaluating, bad input.

One run of the coordinator, interrupted in phase 2 and continued, serves most tests. Processes of a test are found by a
word in their environment, which SUMO, workers and ranks inherit.
"""
import csv
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import coordinator
import train_ddp
from benchmarks.leftovers import leaked_memory, marked_environment, survivors
from configs import load_config
from env.launch import find_binary, sumo_environment
from runtime import checkpoint
from runtime.ending import run_script
from runtime.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 300  # s; generous, because nothing here measures time
MARK, ENVIRONMENT = marked_environment(PYTHONPATH=str(ROOT))
# One process and one thread: then a phase is determined bit by bit. Enough epochs for an interrupt in the middle.
SMOKE = ["--config", "configs/smoke.yaml", "run.threads=1", "coordinator.nproc=1", "evaluate.horizon_s=60",
         "evaluate.controllers=[none, random, harmonise, policy]", "phase1.epochs=4", "phase2.iterations=3",
         "phase2.imitate_corrections=1", "phase2.imitate_keep=1", "phase3.epochs=3"]
EPOCHS = {1: 4, 2: 3, 3: 3}
SUMOCFG = "<configuration><input>{}</input></configuration>"
SCRIPT = {1: ["train_ddp.py", "--phase", "1"], 2: ["train_rl.py"], 3: ["train_ddp.py", "--phase", "3"]}


def command(script, *arguments):
    start = ["-m", script] if "." in script and not script.endswith(".py") else [str(ROOT / script)]
    return [sys.executable, *start, *map(str, arguments)]


def run(folder, *words):
    """Run a command line to its end: .returncode, .stdout, .stderr."""
    return subprocess.run(command(*words), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=DEADLINE)


def interrupt(folder, run_name, phase, *words):
    """Start a command line and press Ctrl-C (SIGINT to its process group) after the phase's first metrics line."""
    log, metrics = folder / "interrupted.txt", folder / "runs" / run_name / "metrics.jsonl"
    with open(log, "w") as out:
        process = subprocess.Popen(command(*words), cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out,
                                   start_new_session=True)
    try:
        end, begun = time.monotonic() + DEADLINE, f'"phase": {phase}, '
        while process.poll() is None and time.monotonic() < end and not (
                metrics.exists() and begun in metrics.read_text()):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(DEADLINE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return SimpleNamespace(returncode=process.returncode, stdout=log.read_text())


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}


def written_since(before, folder):
    return [path for path, changed in tree(folder).items() if before.get(path) != changed]


def assert_same_weights(*folders):
    one, other = (checkpoint.load(folder)["weights"]["model"] for folder in folders)
    assert list(one) == list(other) and [name for name in one if not torch.equal(one[name], other[name])] == []


def progress(folder, phase):
    return [row["epoch"] for row in read_metrics(folder / "metrics.jsonl") if row["phase"] == phase]


# ---- the whole pipeline ----------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A coordinator run, interrupted in phase 2 and continued by the same command to its end."""
    folder, shared = tmp_path_factory.mktemp("pipeline"), set(os.listdir("/dev/shm"))
    first = interrupt(folder, "smoke", 2, "coordinator.py", *SMOKE)
    left, state = survivors(MARK), json.loads((folder / "runs/smoke/state.json").read_text())
    done = checkpoint.load(folder / "runs/smoke/phase2")["epoch"]
    second = run(folder, "coordinator.py", *SMOKE)
    return SimpleNamespace(folder=folder, run=folder / "runs/smoke", first=first, second=second, left=left, state=state,
                           done=done, after=(survivors(MARK), leaked_memory(shared)))


def test_interrupt_stops_the_pipeline_cleanly(finished):
    assert finished.first.returncode == 0, finished.first.stdout
    assert finished.left == []
    steps = finished.state["steps"]
    assert [(name, step["status"], step["exit_code"]) for name, step in steps.items()] == [
        ("collect", "done", 0), ("preprocess", "done", 0), ("phase1", "done", 0), ("phase2", "stopped", 0)]
    assert "stopped in phase2" in finished.first.stdout and "Traceback" not in finished.first.stdout


def test_same_command_continues_to_the_end(finished):
    assert finished.second.returncode == 0, finished.second.stderr
    assert finished.done < EPOCHS[2]  # else the interrupt came too late to show anything
    said = finished.second.stdout
    assert "==== phase1" not in said and "resumed from" in said and f"(epoch {finished.done}," in said
    state = json.loads((finished.run / "state.json").read_text())
    assert {name: step["status"] for name, step in state["steps"].items()} == dict.fromkeys(coordinator.STEPS, "done")
    for phase, last in EPOCHS.items():
        assert progress(finished.run, phase) == list(range(1, last + 1))  # none lost, none twice
        folder = finished.run / f"phase{phase}"
        assert checkpoint.load(folder)["epoch"] == last and (folder / "latest").read_text() in os.listdir(folder)
        assert not [name for name in os.listdir(folder) if name.startswith(".") and name != ".lock"]
        for name in ("latest", "best"):
            checkpoint.load_step(folder / (folder / name).read_text())
    assert load_config(finished.run / "config.yaml") == load_config("configs/smoke.yaml", SMOKE[2:])
    assert finished.after == ([], [])  # no process, no shared memory


def test_warm_start_hands_over(finished):
    """The rule drives, corrects, leaves; imitation's rate falls. A rule's return once made the "best" policy."""
    p = load_config("configs/smoke.yaml", SMOKE[2:]).phase2
    rows = [row for row in read_metrics(finished.run / "metrics.jsonl") if row["phase"] == 2]
    assert [row["lr"] for row in rows] == pytest.approx([p.imitate_lr, p.imitate_lr / 2, p.lr])
    folder = finished.run / "phase2"
    best = checkpoint.load_step(folder / (folder / "best").read_text())["counters"]
    assert best["epoch"] > 1 and -best["best"] == rows[best["epoch"] - 1]["reward"]


def test_second_call_runs_nothing_again(finished):
    before = tree(finished.folder)
    again = run(finished.folder, "coordinator.py", *SMOKE)
    assert again.returncode == 0 and "====" not in again.stdout
    assert {path.name for path in written_since(before, finished.folder)} <= {"state.json", "smoke"}


def test_results_have_the_promised_structure(finished):
    results = json.loads((finished.run / "evaluation.json").read_text())
    e = load_config("configs/smoke.yaml", SMOKE[2:]).evaluate
    rows, facts = results["episodes"], (results["scenario"], results["seeds"], results["sumo_version"])
    assert facts == ("corridor", e.seeds, version("eclipse-sumo"))
    assert [(r["controller"], r["seed"]) for r in rows] == [(c, s) for c in e.controllers for s in e.seeds]
    promised = """controller seed loaded arrived ocr sigma_v abs_a c_int s_efficiency s_stability s_total collisions
        teleports min_ttc hard_brakes shield_clips shield_emergencies controlled_vehicle_steps""".split()
    assert all(set(promised) <= set(row) and row["loaded"] > 0 and row["arrived"] > 0 for row in rows)
    assert all((row["c_int"] > 0) == (row["s_total"] != 0) for row in rows if row["controller"] in ("none", "random"))
    assert list(results["summary"]) == e.controllers
    for name, metrics in results["summary"].items():
        assert set(metrics) == set(rows[0]) - {"controller", "seed"}
        a, b = (r["sigma_v"] for r in rows if r["controller"] == name)
        assert metrics["sigma_v"]["mean"] == pytest.approx((a + b) / 2)
        assert metrics["sigma_v"]["ci95"] == pytest.approx(12.7062 * abs(a - b) / 2, rel=1e-4)  # Student's t, 1 degree
    with open(finished.run / "evaluation.csv") as file:
        table = list(csv.DictReader(file))
    assert [list(row) for row in table] == [list(row) for row in rows]
    assert [float(row["sigma_v"]) for row in table] == [row["sigma_v"] for row in rows]


def test_report_is_one_file_that_needs_no_network(finished):
    page = (finished.run / "report.html").read_text()
    shown = "follower_stopper", "S_total", "Phase 1", "Phase 2", "Phase 3", "<svg", "1.28", "coordinator.py", "phase2:"
    assert [text for text in shown if text not in page] == []
    outside = re.sub('src="data:image/png;base64,[^"]*"|http-equiv', "", page)
    assert "src=" not in outside and "http" not in outside
    assert "time-space diagram: without control" in page and "time-space diagram: policy" in page


# ---- resuming --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("phase", [1, 2, 3])
def test_interrupted_phase_continues_to_the_same_weights(finished, phase, monkeypatch, capsys):
    """Against phases 1 and 3 of the pipeline, which nobody interrupted. Its phase 2 was interrupted and has continued:
    to the weights of one that runs through."""
    def start(name):
        if phase > 1:  # from where the pipeline's own phase began
            shutil.copytree(finished.run / f"phase{phase - 1}", finished.folder / "runs" / name / f"phase{phase - 1}")
        return [*SCRIPT[phase], *SMOKE, f"run.name={name}"], finished.folder / "runs" / name / f"phase{phase}"
    words, own = start(f"stopped{phase}")
    first = interrupt(finished.folder, f"stopped{phase}", phase, *words)
    assert first.returncode == 0 and "stopped and saved" in first.stdout and survivors(MARK) == [], first.stdout
    done = checkpoint.load(own)["epoch"]
    assert done < EPOCHS[phase]  # else the interrupt came too late to show anything
    if phase == 2:
        words, own = start("through")
    capsys.readouterr()
    assert Here(finished.folder, monkeypatch, capsys).code(*words) == 0
    assert (f"(epoch {done}," in capsys.readouterr().out) == (phase != 2)
    assert progress(own.parent, phase) == list(range(1, EPOCHS[phase] + 1))
    assert_same_weights(own, finished.run / f"phase{phase}")


# ---- evaluating ------------------------------------------------------------------------------------------------

def scores(folder, name, *words, here=None):
    """Rows of evaluate.py by (controller, seed); `here`: in this process."""
    words = ["evaluate.py", "--out", f"{name}/results.json", *words]
    done = SimpleNamespace(returncode=here.code(*words), stderr="") if here else run(folder, *words)
    assert done.returncode == 0 and (folder / name / "results.csv").exists(), done.stderr
    return rows_of(folder / name / "results.json")


def rows_of(path):
    return {(row["controller"], row["seed"]): row for row in json.loads(path.read_text())["episodes"]}


@pytest.fixture(scope="module")
def eager(finished):
    """The finished policy with gates that always command: a little trained one may release everybody."""
    state = checkpoint.load(finished.run / "phase3")
    weights = state["weights"]["model"]
    gate, = (weights[name] for name in weights if name.startswith("controller.action") and weights[name].shape == (6,))
    gate[4], gate[5] = -10.0, 10.0
    checkpoint.save(finished.folder / "runs/eager/phase3", 1, state)
    return finished.folder / "runs" / "eager"


def test_pareto_trains_each_limit_once_and_scores_all(finished, monkeypatch, capsys):
    (finished.folder / "other.yaml").write_text("base: runs/smoke/config.yaml\nphase3: {epochs: 1}\n")
    short = ["--seeds", "1001", "evaluate.horizon_s=20", "evaluate.workers=1"]
    words = ["--run", "runs/smoke", "--limits", "0.05", "--price", "3", *short]
    done = run(finished.folder, "benchmarks.pareto", *words, "--config", "other.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    folders = [finished.folder / "runs" / f"smoke-{name}" for name in ("limit-0.05", "price-3")]
    limited, priced = (load_config(str(folder / "config.yaml")).phase3 for folder in folders)
    assert (limited.limit_end, limited.limit_start) == (0.05, 0.05)
    assert (priced.multiplier_init, priced.multiplier_lr) == (3, 0) and [progress(f, 3) for f in folders] == [[1], [1]]
    result = json.loads((finished.folder / "pareto.json").read_text())
    assert list(result["summary"]) == ["none", "phase 2", "limit-0.05", "price-3"]
    assert [row["controller"] for row in result["rows"]] == list(result["summary"])
    here = Here(finished.folder, monkeypatch, capsys)
    assert "expected numbers such as" in here.refused("benchmarks.pareto", *words[:2], "--limits", "0.05,low")
    before = tree(folders[0] / "phase3")
    assert here.code("benchmarks.pareto", *words[:4], "--cap", *short, "phase3.epochs=1") == 0
    assert not written_since(before, folders[0] / "phase3")
    for setting in ("phase3.lr=0.5", "evaluate.leave_below=25.0", "run.seed=9"):
        said = here.refused("benchmarks.pareto", *words, setting)
        assert "smoke-limit-0.05: its phase 3 was trained with " + setting.split("=")[0] in said
    copy = folders[0] / "phase2"
    manifest = copy / (copy / "latest").read_text().strip() / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert "trained from another phase 2 than runs/smoke/phase2" in here.refused("benchmarks.pareto", *words)
    assert not written_since(before, folders[0] / "phase3")


def test_evaluation_depends_on_neither_workers_nor_order(finished, eager, monkeypatch, capsys):
    several = ["--controllers", "policy", "--seeds", "1002,1001", "evaluate.workers=3"]
    again, before = scores(finished.folder, "a", "--checkpoint", "runs/smoke", *several), rows_of(
        finished.run / "evaluation.json")
    assert again == {job: before[job] for job in again}
    one = ["--controllers", "policy", "--seeds", "1001-1002", "evaluate.workers=1"]
    here = Here(finished.folder, monkeypatch, capsys)
    rows = scores(finished.folder, "b", "--checkpoint", eager, *several, here=here)
    assert list(rows) == list(again) == [("none", 1002), ("none", 1001), ("policy", 1002), ("policy", 1001)]
    assert rows == scores(finished.folder, "c", "--checkpoint", eager, *one, here=here)
    assert all((row["controlled_vehicle_steps"] > 50) == (name == "policy") for (name, _), row in rows.items())


def user_network(folder):
    """A grid with traffic lights, cars and buses, as a stranger would bring it; returns its .sumocfg."""
    grid = "--grid --grid.number 3 --grid.length 150 --grid.attach-length 100 --default.lanenumber 2".split()
    grid += "--default-junction-type traffic_light --output-file grid.net.xml".split()
    subprocess.run([find_binary("netgenerate"), *grid], cwd=folder, env=sumo_environment(), check=True,
                   capture_output=True)
    ways = [("left0A0", "C0right0"), ("left1A1", "C1right1"), ("bottom1B0", "B2top1"), ("top0A2", "C0right0")]
    flows = [f'<flow id="{kind}{i}" type="{kind}" from="{a}" to="{b}" begin="0" end="900" vehsPerHour="{rate}"/>'
             for kind, rate in (("car", 500), ("bus", 100)) for i, (a, b) in enumerate(ways)]
    (folder / "trips.rou.xml").write_text('<routes><vType id="car"/><vType id="bus" vClass="bus" length="12" '
                                          f'maxSpeed="15"/>{"".join(flows)}</routes>')
    (folder / "town.sumocfg").write_text(SUMOCFG.format('<net-file value="grid.net.xml"/>'
                                                        '<route-files value="trips.rou.xml"/>'))
    return folder / "town.sumocfg"


def test_network_of_a_user_needs_no_change_of_code(eager, tmp_path, monkeypatch, capsys):
    town, here = user_network(tmp_path).name, Here(tmp_path, monkeypatch, capsys)
    rows = scores(tmp_path, "town", "--scenario", town, "--controllers", "none,policy", "--seeds", "7,8",
                  "--checkpoint", eager, "evaluate.horizon_s=100", here=here)
    assert json.loads((tmp_path / "town/results.json").read_text())["scenario"] == town and len(rows) == 4
    for (name, _), row in rows.items():
        assert row["loaded"] > 40 and row["arrived"] > 5 and 0 < row["sigma_v"] < 15 and row["steps"] == 100
        assert (row["controlled_vehicle_steps"] > 50) == (name == "policy")


# ---- bad input -------------------------------------------------------------------------------------------------

def refused(folder, *words, may_write=None):
    """Standard error of a command that must end with 2, one message, no traceback, and no file written."""
    before = tree(folder)
    done = run(folder, *words)
    assert done.returncode == 2, (done.returncode, done.stderr)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    written = [path for path in written_since(before, folder) if path.is_file()]
    assert [path for path in written if may_write is None or folder / may_write not in path.parents] == []
    assert survivors(MARK) == []
    return done.stderr


class Here:
    """Commands in this process, where each would spend seconds on importing PyTorch. Processes of their own show that
    every script ends as it should."""

    def __init__(self, folder, monkeypatch, capsys):
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        monkeypatch.setattr(signal, "signal", lambda *_: signal.SIG_DFL)  # pytest keeps its own handlers

    def code(self, script, *words):
        """Exit code of a command."""
        main = importlib.import_module(script.removesuffix(".py")).main
        with self.monkeypatch.context() as patch:
            patch.chdir(self.folder)
            patch.setattr(sys, "argv", [script, *map(str, words)])
            return run_script(main, train_ddp.USER_ERRORS)

    def refused(self, script, *words):
        """Standard error of a command that ends with 2, one message, and no file written."""
        before, _ = tree(self.folder), self.capsys.readouterr()
        assert self.code(script, *words) == 2
        said = self.capsys.readouterr().err
        assert said.count("error:") == 1 and not [path for path in written_since(before, self.folder) if path.is_file()]
        return said


GONE, EVALUATE = "env.scenario=gone.sumocfg", ["evaluate.py", "--config", "configs/smoke.yaml", "--controllers"]


@pytest.mark.parametrize("words, expected", [
    (["coordinator.py", *SMOKE, "phase1.epochz=3"], ["command line", "phase1.epochz", "did you mean phase1.epochs?"]),
    (["train_rl.py", "--config", "wrong.yaml"], ["wrong.yaml", "phase2.gama", "0.5", "phase2.gamma"]),
    (["train_rl.py", *SMOKE, "run.device=cuda"], ["run.device"]),
    (["train_ddp.py", "--phase", "3", *SMOKE, GONE], ["env.scenario", "gone.sumocfg"]),
    ([*EVALUATE, "none", "--scenario", "gone.sumocfg"], ["gone.sumocfg"]),
    ([*EVALUATE, "none,polizy"], ["controllers", "polizy", "lane_advice, "]),
    ([*EVALUATE, "none", "--seeds", "1001-x"], ["--seeds", "1001-x"]),
    ([*EVALUATE, "none,policy"], ["policy", "--checkpoint"]),
    ([*EVALUATE, "policy", "--checkpoint", "runs/gone"], ["runs/gone"])], ids=lambda v: v[0] if len(v) > 2 else "")
def test_bad_input_is_one_message(tmp_path, words, expected, monkeypatch, capsys):
    """run.device=cuda without a GPU ended with 1."""
    (tmp_path / "wrong.yaml").write_text("base: smoke.yaml\nphase2: {gama: 0.5}")
    message = Here(tmp_path, monkeypatch, capsys).refused(*words)
    assert [text for text in expected if text not in message] == []


@pytest.mark.parametrize("words, expected", [
    (["coordinator.py", "--config", "mine.yaml"], ["mine.yaml"]),
    (["train_ddp.py", "--phase", "1", *SMOKE, GONE], ["env.scenario", "gone.sumocfg"]),
    *(([script, *SMOKE, GONE], ["env.scenario", "gone.sumocfg"])
      for script in ("train_rl.py", "data.collect", "coordinator.py")),
    (["data.preprocess", *SMOKE], ["datasets/smoke/raw/metadata.json", "data.collect"]),
    ([*EVALUATE, "none", "--scenario", "bad.sumocfg"], ["bad.sumocfg", "SUMO said: Error", "fast"])],
    ids=lambda v: v[0] if len(v) > 2 else "")
def test_bad_input_is_one_message_and_nothing_starts(tmp_path, words, expected):
    """config.yaml was written before the scenario was looked at."""
    (tmp_path / "bad.sumocfg").write_text(SUMOCFG.format('<net-file value="bad.net.xml"/>'))
    (tmp_path / "bad.net.xml").write_text('<net version="1.20"><edge id="a" from="x" to="y"><lane id="a_0" index="0" '
                                          'speed="fast" length="9" shape="0,0 9,0"/></edge></net>')
    started = words[0] == "coordinator.py" and GONE in words  # its first step did, and the run's state says so
    message = refused(tmp_path, *words, may_write="runs" if started else None)
    assert [text for text in expected if text not in message] == []


@pytest.mark.parametrize("case", ["damaged", "foreign", "other interval", "foreign under torchrun"])
def test_wrong_checkpoint_is_one_message(finished, tmp_path, case, monkeypatch, capsys):
    """Under torchrun, bad input ended with 1 and one message per rank, and the coordinator tried it a second time; then
    with a traceback of torchrun's own."""
    folder, here = tmp_path / "runs" / "smoke" / "phase3", Here(tmp_path, monkeypatch, capsys)
    shutil.copytree(finished.run / "phase3", folder)
    if case == "damaged":
        for state in folder.glob("step_*/state.pt"):
            content = bytearray(state.read_bytes())
            content[len(content) // 2] ^= 1
            state.write_bytes(content)
        message = here.refused("evaluate.py", "--checkpoint", "runs/smoke", "--seeds", "1")
        assert all(str(Path(*path.parts[-5:])) in message for path in folder.glob("step_*/state.pt"))
    elif case == "other interval":
        message = here.refused("evaluate.py", "--checkpoint", "runs/smoke", "env.control_interval=0.5")
        assert "control_interval" in message and "0.5" in message
    elif case == "foreign":
        message = refused(tmp_path, "train_ddp.py", "--phase", "3", *SMOKE, "model.preset=full",
                          may_write="runs/smoke/scenario")
        assert "preset: checkpoint 'small', here 'full'" in message and "runs/smoke/phase3" in message
    else:
        message = refused(tmp_path, "coordinator.py", "--only", "phase3", *SMOKE, "coordinator.nproc=2",
                          "env.max_commands=4", may_write="runs")
        assert "max_commands: checkpoint 5, here 4" in message
