"""coordinator.py: the order of the steps, what is repeated and what is not; the steps themselves do not run here."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import coordinator
from configs import ConfigError
from data.layout import only_writer
from runtime.distributed import StopRequest
from runtime.ending import note
from runtime.memory import process_tree
from runtime.resources import claim

ROOT = Path(coordinator.__file__).parent


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Call the coordinator's pipeline with steps that only note their names; `codes` are their exit codes in turn."""
    monkeypatch.chdir(tmp_path)
    plan = {step: {"processes": 1, "threads": 1} for step in coordinator.STEPS}
    monkeypatch.setattr(coordinator, "resource_plan", lambda cfg: plan)
    stop, names = SimpleNamespace(asked=False, at_once=False, child=None), []

    def pipeline(*arguments, codes=(), stop_in=None, twice=False):
        codes, stop.asked, stop.at_once = list(codes), stop_in == "before", False
        names.clear()

        def noted(step, command, *_):
            names.append(step + "".join(f" {word}" for word in command if word.startswith("memory.")))
            if left := coordinator.LEAVES.get(step):
                (tmp_path / "runs/smoke" / left).parent.mkdir(exist_ok=True)
                (tmp_path / "runs/smoke" / left).touch()
            stop.asked = stop.asked or step == stop_in
            stop.at_once = stop.asked and twice
            return codes.pop(0) if codes else 0
        monkeypatch.setattr(coordinator, "run_step", noted)
        options = coordinator.parse("", ["--config", "configs/smoke.yaml", *arguments], coordinator.add_options)
        return coordinator.pipeline(options, stop), list(names)
    return pipeline


def test_failed_step_is_tried_again_and_bad_input_is_not(steps):
    assert steps("--only", "phase1", codes=[1, 0]) == (0, ["phase1", "phase1"])
    assert steps("--only", "phase1", codes=[1, 1, 1]) == (1, ["phase1", "phase1"])  # coordinator.retries is 1
    assert steps("--only", "phase1", "coordinator.retries=0", codes=[1]) == (1, ["phase1"])
    assert steps("--only", "phase1", codes=[2]) == (2, ["phase1"])


def test_what_was_removed_is_made_again(steps, tmp_path):
    """"done in 0 s", without results; and phase 3 began from phase 1, as if phase 2 had been there."""
    run, everything = tmp_path / "runs/smoke", list(coordinator.STEPS)
    assert steps()[1] == everything and steps()[1] == []
    (run / "report.html").unlink()
    assert steps()[1] == ["report"]
    shutil.rmtree(run / "phase2")
    assert steps()[1] == []  # nobody needs it
    (run / "evaluation.json").unlink()
    assert steps()[1] == ["evaluate", "report"]
    shutil.rmtree(run / "phase3")
    (run / "evaluation.json").unlink()
    assert steps()[1] == everything[everything.index("phase2"):]


def test_one_step_and_all_from_a_phase_exclude_each_other(steps, capsys):
    """--from-phase was ignored in silence."""
    with pytest.raises(SystemExit, match="2"):
        steps("--only", "phase2", "--from-phase", "3")
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("below, code", [(False, 1), (True, 0)])
def test_a_phase_does_not_train_beside_the_coordinator_of_its_run(tmp_path, below, code):
    """`train_rl.py` trained in a run whose coordinator was in phase 1, which later took its work for its own."""
    lock = claim(tmp_path / "run")  # the coordinator's
    words = f"from runtime.resources import claim_phase; claim_phase({str(tmp_path / 'run/phase2')!r})"
    env = {**os.environ, **({"EXIT_CODE_FILE": str(tmp_path / "code")} if below else {})}
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == code and ("run: another process is working there" in done.stderr) == (not below)
    lock.close()


def test_who_is_refused_at_once_is_not_told_a_peak_of_nothing(tmp_path, monkeypatch, capsys):
    """Above "another process is working there" stood "peak memory of the process tree (PSS): 0 MB ()"."""
    monkeypatch.setattr(coordinator.PeakMemory, "sample", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["coordinator.py", "--config", "configs/smoke.yaml", f"run.folder={tmp_path}"])
    monkeypatch.setattr(coordinator, "claim", refuse)  # locks are the process's: it would get its own
    assert coordinator.main() == 2
    told = capsys.readouterr()
    assert "working there" in told.err and told.out == ""


def refuse(folder):
    raise ConfigError(f"{folder}: another process is working there")


def test_bad_input_is_to_be_corrected_first(steps, capsys):
    """The same command was said to continue, which it never could."""
    steps("--only", "phase1", codes=[2])
    assert "correct what its message says first" in capsys.readouterr().err
    steps("--only", "phase1", codes=[5, 5, 5])
    assert "correct" not in capsys.readouterr().err


def test_no_step_counts_as_done_after_a_scenario_has_changed(steps, tmp_path):
    """Scores of the old demand stood for the new one: only the configuration was compared."""
    (tmp_path / "my.sumocfg").write_text('<configuration><route-files value="my.rou.xml"/></configuration>')
    words = ("env.scenario=my.sumocfg", "data.scenarios=[same]")
    for text, repeated in (("many", True), ("many", False), ("few", True)):
        (tmp_path / "my.rou.xml").write_text(text)
        assert bool(steps(*words)[1]) == repeated


def test_phase_without_memory_goes_on_with_smaller_micro_batches(steps):
    """Half of it each time, which is no retry, and remembered; other steps are only tried again."""
    assert steps("--only", "phase1", codes=[4, 4, 1, 0]) == (
        0, ["phase1", "phase1 memory.split=2", "phase1 memory.split=4", "phase1 memory.split=4"])
    assert steps("--only", "phase1") == (0, ["phase1 memory.split=4"])
    assert steps("--only", "phase3") == (0, ["phase3"])
    code, names = steps("--only", "phase2", codes=[4] * 9)
    assert code == 4 and names[4:] == ["phase2 memory.split=16"] * 2  # bounded
    assert steps("--only", "collect", codes=[4, 0]) == (0, ["collect", "collect"])
    assert steps("--only", "phase1", "phase1.batch_size=2") == (0, ["phase1"])  # another configuration
    assert steps("--only", "phase1", "ddp.static_graph=true", "phase3.accumulation=1", codes=[4, 0]) == (
        0, ["phase1", "phase1"])


@pytest.mark.parametrize("program, kills, expected", [
    ("raise SystemExit(1)", 0, 1), ("raise SystemExit(1)", 1, 4), ("pass", 1, 0),
    ("import os, pathlib; pathlib.Path(os.environ['EXIT_CODE_FILE']).write_text('3'); raise SystemExit(1)", 1, 3)])
def test_exit_code_of_a_step_is_its_own_word_or_the_kernels(monkeypatch, program, kills, expected):
    """torchrun turns every failure into 1; a process killed for want of memory says nothing at all."""
    counter = iter([7, 7 + kills])
    monkeypatch.setattr(coordinator, "oom_kills", lambda: next(counter))
    stop = SimpleNamespace(asked=False, child=None)
    assert coordinator.run_step("phase1", [sys.executable, "-c", program], 1, stop) == expected


class AskedLater:
    """A Stop that hears its signal, or none, while the step runs."""
    child = None

    def __init__(self, asked):
        self.answers = iter([False])
        type(self).asked = property(lambda self: next(self.answers, asked))


@pytest.mark.parametrize("asked, said, expected", [(True, 0, 0), (False, 0, 1), (True, 1, 1), (True, 2, 2),
                                                   (False, None, 1), (True, None, -signal.SIGTERM)])
def test_a_stop_counts_as_saved_only_where_a_rank_says_so(monkeypatch, tmp_path, asked, said, expected):
    """torchrun ends with 1 after any signal; a rank that crashes when it is asked to stop says 1. Where none says
    anything they had not begun: that was called a failure."""
    words = ""
    if said is not None:  # by a rank; noted here, because importing PyTorch takes the step seconds
        monkeypatch.setenv("EXIT_CODE_FILE", str(tmp_path / "said"))
        note(said)
        words = f"import os, shutil; shutil.copy({str(tmp_path / 'said')!r}, os.environ['EXIT_CODE_FILE']); "
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)
    step = [sys.executable, "-c", words + "raise SystemExit(1)"]
    assert coordinator.run_step("phase1", step, 1, AskedLater(asked)) == expected


@pytest.mark.parametrize("told", [True, False])
def test_a_launcher_whose_rank_has_told_what_is_wrong_shows_no_traceback(tmp_path, told):
    """After "could not be saved (No space left on device)" came torchrun's ChildFailedError, as of a crash."""
    (tmp_path / "rank.py").write_text(f"""
from configs import WriteError
from runtime.ending import run_script
def main():
    raise WriteError("disk full")
run_script(main, (), (WriteError,) if {told} else ())
raise SystemExit(1)""")
    command = [sys.executable, "-m", "runtime.ranks", "--standalone", "--nproc_per_node=1", str(tmp_path / "rank.py")]
    env = {**os.environ, "EXIT_CODE_FILE": str(tmp_path / "code"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and ("error: disk full" in done.stderr) == told
    assert ("ChildFailedError" in done.stderr) == (not told)


def test_a_launcher_that_is_stopped_shows_no_traceback_of_its_own(tmp_path):
    """After "stopped and saved" came torchrun's SignalException."""
    (tmp_path / "rank.py").write_text("print('begun', flush=True)\nimport time\ntime.sleep(60)")
    command = [sys.executable, "-m", "runtime.ranks", "--standalone", "--nproc_per_node=1", str(tmp_path / "rank.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        while launcher.stdout.readline() != "begun\n":
            assert launcher.poll() is None
        launcher.terminate()
        assert launcher.stdout.read() == "" and launcher.wait() == 1


def test_stop_while_a_step_is_started():
    """The signal came when there was no child to pass it on to, and the whole step ran."""
    step = [sys.executable, "-c", "import time; time.sleep(60)"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who ignores a signal makes children that do so too
    assert coordinator.run_step("phase1", step, 1, SimpleNamespace(asked=True, child=None)) == -signal.SIGTERM


def test_guards_stop_is_passed_on_and_continued(steps):
    everything = list(coordinator.STEPS)
    assert steps(codes=[0, 0, 0, 3]) == (3, everything[:4])
    assert json.loads(Path("runs/smoke/state.json").read_text())["steps"]["phase2"]["status"] == "stopped"
    assert steps() == (0, everything[3:])


def test_steps_follow_one_another_and_are_not_repeated(steps):
    everything = list(coordinator.STEPS)
    assert steps(codes=[0, 0, 0, 7, 7]) == (7, ["collect", "preprocess", "phase1", "phase2", "phase2"])
    assert steps() == (0, everything[3:]) and steps() == (0, [])
    assert steps("--only", "evaluate") == (0, ["evaluate"])
    assert steps("--from-phase", "2") == (0, everything[3:])
    assert sorted(p.name for p in Path("runs/smoke").glob("*.old*")) == ["phase2.old1", "phase3.old1"]


def test_of_the_folders_set_aside_the_last_stay(steps, capsys):
    """Each `--from-phase` left one more."""
    steps()
    for _ in range(3):
        steps("--from-phase", "3", "checkpoint.keep_last=2")
    assert sorted(p.name for p in Path("runs/smoke").glob("*.old*")) == ["phase3.old2", "phase3.old3"]
    assert "removed runs/smoke/phase3.old1: the last 2 are kept" in capsys.readouterr().out


def test_curves_of_a_repeated_phase_are_set_aside_with_it(steps):
    """TensorBoard's files of every repetition stayed in one folder, and were never removed."""
    steps()
    for number in range(4):
        curves = Path("runs/smoke/tensorboard/phase3")
        curves.mkdir(parents=True)
        (curves / f"events.{number}").touch()
        steps("--from-phase", "3", "checkpoint.keep_last=2")
    left = sorted(str(path.relative_to(curves.parent)) for path in curves.parent.rglob("events.*"))
    assert left == ["phase3.old3/events.2", "phase3.old4/events.3"]


def test_stop_between_two_steps_starts_nothing_more(steps):
    """A signal while no step was running was remembered, but the whole next phase ran before it was obeyed."""
    assert steps(stop_in="before") == (0, [])
    assert steps(stop_in="collect") == (0, ["collect"])


def test_second_signal_is_no_clean_stop(steps, capsys):
    """It said "everything is saved" and ended with 0, though the step had been killed."""
    assert steps(stop_in="phase1", twice=True, codes=[0, 0, -9]) == (130, ["collect", "preprocess", "phase1"])
    assert "everything is saved" not in capsys.readouterr().out
    assert steps(stop_in="phase1", codes=[1])[0] == 1 and "everything is saved" not in capsys.readouterr().out
    assert steps(stop_in="phase1")[0] == 0 and "everything is saved" in capsys.readouterr().out


def test_a_lock_that_is_a_link_empties_nothing(tmp_path):
    """A run folder of somebody else's destroyed the file to which its `.lock` led."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".lock").symlink_to("precious")
    claim(tmp_path).close()
    with only_writer(tmp_path):
        assert (tmp_path / "precious").read_text() == "mine"


def test_terminal_that_closes_asks_for_a_stop_and_nohup_keeps_it_from_that(monkeypatch):
    """SIGHUP was no signal to save: what had been learned since the last checkpoint was lost. It may come twice."""
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("left at once"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopRequest(), coordinator.Stop()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for kind in (StopRequest, coordinator.Stop):
        stop = kind()
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
        assert stop.asked and not getattr(stop, "at_once", False)


def test_one_request_that_arrives_twice_is_passed_on_once():
    """`timeout` sends SIGTERM to its child and then to its group: the step was killed, and what it had learned lost."""
    stop, sent = coordinator.Stop(), []
    stop.child = SimpleNamespace(poll=lambda: None, send_signal=sent.append)
    stop._kill = lambda: sent.append("killed")
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM] and not stop.at_once
    stop.since -= 1.0
    signal.raise_signal(signal.SIGTERM)
    assert sent == [signal.SIGTERM, "killed"] and stop.at_once


def test_second_signal_ends_ranks_too_that_have_only_begun(tmp_path, ends_soon):
    """Killed while its ranks still imported PyTorch, torchrun left them behind: they had not asked to die with it."""
    (tmp_path / "train_ddp.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)")
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'train_ddp.py')!r}])"
    stop = coordinator.Stop()
    try:
        stop.child = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, start_new_session=True)
        assert stop.child.stdout.readline() == b"up\n"
        tree, stop.asked = process_tree(stop.child.pid), True
        signal.raise_signal(signal.SIGINT)
        stop.child.wait(10)
        assert len(tree) == 2 and stop.at_once and ends_soon(tree)
    finally:
        os.killpg(stop.child.pid, signal.SIGKILL) if Path(f"/proc/{tree[-1]}").exists() else None


def test_stopped_repetition_is_continued_by_the_same_command(steps):
    """`--from-phase 2`, stopped, promised that "the same command continues", which then began phase 2 anew."""
    assert steps()[0] == 0
    assert steps("--from-phase", "2", stop_in="phase3")[1] == ["phase2", "phase3"]
    assert steps("--from-phase", "2")[1] == ["phase3", "evaluate", "report"]
    assert steps("--from-phase", "2", stop_in="phase3")[1] == ["phase2", "phase3"]
    assert steps("--only", "report")[1] == ["report"]  # between the two: it used to make the second one begin anew
    assert steps("--from-phase", "2")[1] == ["phase3", "evaluate", "report"]
    assert steps("--from-phase", "2", stop_in="phase3")[1] == ["phase2", "phase3"]
    everything = steps("--from-phase", "2", "phase2.iterations=3")[1]  # another configuration: no continuation
    assert everything == list(coordinator.STEPS) and Path("runs/smoke/phase2.old4").exists()


def test_changed_configuration_looks_at_every_step_again(steps):
    """With more iterations and the same run.name the coordinator called everything done."""
    assert steps() == (0, list(coordinator.STEPS)) and steps() == (0, [])
    assert steps("phase2.iterations=3") == (0, list(coordinator.STEPS))
    assert steps("phase2.iterations=3") == (0, [])


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"steps": 3}', '{"steps": {"collect": 3}}'])
def test_damaged_state_is_named(steps, content):
    steps()
    Path("runs/smoke/state.json").write_text(content)
    with pytest.raises(ConfigError, match="state.json"):
        steps()
    Path("runs/smoke/state.json").unlink()
    assert steps() == (0, list(coordinator.STEPS)) and json.loads(Path("runs/smoke/state.json").read_text())["steps"]


@pytest.mark.parametrize("script", [["train_ddp.py", "--phase", "1"], ["train_rl.py"]], ids=lambda words: words[0])
@pytest.mark.parametrize("own, expected", [({}, "GOMP_SPINCOUNT = '1000'"),
                                           ({"OMP_WAIT_POLICY": "active"}, "GOMP_SPINCOUNT = '30000000000'")])
def test_threads_that_wait_spin_briefly(script, own, expected, tmp_path):
    """OpenMP reads this when torch is imported. Only the coordinator asked for it: a training that was started by
    itself beside two other busy processes on two cores learned 30 times slower, its threads waiting for each other."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run([sys.executable, str(ROOT / script[0]), *script[1:], "run.nonsense=1"],
                          env={**environment, **own, "OMP_DISPLAY_ENV": "verbose"}, cwd=tmp_path, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 2 and expected in done.stderr


@pytest.mark.parametrize("script", ["train_ddp.py", "train_rl.py", "evaluate.py"])
def test_ctrl_c_while_torch_is_imported_is_no_traceback(script, tmp_path):
    """It was, and importing torch takes seconds. Here it takes a minute."""
    (tmp_path / "torch.py").write_text("import pathlib, time; pathlib.Path('begun').touch(); time.sleep(60)")
    with subprocess.Popen([sys.executable, str(ROOT / script)], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while not (tmp_path / "begun").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == -signal.SIGINT
