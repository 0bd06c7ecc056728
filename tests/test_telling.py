"""What a person is told: progress, warnings, TensorBoard, profiles, the resolved configuration, sizes."""
import errno
import gzip
import io
import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks.size import code_lines, function_lengths, measure, summarise
from configs import Config, ConfigError, WriteError, console, load_config
from configs.files import write_whole
from configs.show import main as show
from runtime.ending import run_script
from runtime.metrics import Metrics, findings, read_metrics
from runtime.precision import MOST_OVERFLOWS, HysteresisScaler, require_finite
from runtime import profiler
from runtime.profiler import profile_steps


# ---- progress ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("where", ["> /dev/full", ">&-", "2>&-", "2> /dev/full", "| cat"])
def test_output_that_cannot_be_written_ends_nothing(where):
    """A log on a disk that was full ended a training whose checkpoints had room elsewhere; letters that a terminal does
    not know ended an evaluation after its last episode, before its results were saved."""
    work = ("import sys; from configs.console import exit_code, say\n"
            "def work(): say('Zo\xeb' * 9999); print('Zo\xeb', file=sys.stderr)\nsys.exit(exit_code(work, ()))")
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "$0" -c "$1" {where}', sys.executable, work],
                          env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Exception" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """clock.now can be set; no step has begun."""
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now
    monkeypatch.setattr(console, "time", Clock())
    monkeypatch.setattr(console, "_begun", {})
    monkeypatch.setattr(console, "_shown", [0.0])
    monkeypatch.setattr(console, "_lasting", [""])
    return console.time


def test_progress_says_rate_time_left_and_figures(clock, capsys):
    console.begin("work", 10)
    clock.now += 20
    console.progress("work", 20, 40, "loss 3")
    clock.now += 1
    console.progress("work", 40, 40)
    assert capsys.readouterr().out.splitlines() == ["work  20/40  2 s each  40 s left  loss 3", "work  40/40  1.43/s"]


def test_log_hears_of_frequent_steps_twice_a_minute(clock, capsys):
    console.begin("work")
    for step in range(1, 101):
        clock.now += 1
        console.progress("work", step, 100, always=False)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["30/100", "60/100", "90/100"]


def test_terminal_keeps_one_line_that_fits(clock, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    console.begin("work")
    for step in (1, 2, 3):
        clock.now += 1
        console.progress("work", step, 3, "much more than thirty columns hold")
    console.say("done")
    line, done = sys.stdout.getvalue().split("\n")[:-1]
    *passing, last = line.replace("\x1b[K", "").replace("\r\r", "\r").strip("\r").split("\r")
    assert [len(text) for text in passing] == [29, 29] and last.endswith("columns hold")
    assert line.startswith("\r\x1b[K") and done == "\x1b[Kdone"


def test_terminal_shows_a_part_beside_the_whole(clock, monkeypatch):
    """The figures of an iteration were overwritten a fifth of a second later."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    for text, always in (("loss 3", True), ("", False)):
        clock.now += 1
        console.progress("whole" if always else "part", 1, 3, text, always)
    assert sys.stdout.getvalue().split("\x1b[K")[-1] == "part  1/3  |  whole  1/3  loss 3\r"


def test_only_the_first_rank_tells(clock, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    console.progress("work", 1, 3)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("seconds, text", [(0, "0 s"), (99, "99 s"), (101, "2 min"), (5900, "98 min"),
                                           (6000, "1 h 40 min"), (7170, "2 h 00 min"), (360000, "100 h 00 min")])
def test_durations_are_said_as_a_person_would(seconds, text):
    assert console.duration(seconds) == text


def test_stopped_command_says_how_to_continue(monkeypatch):
    """Below torchrun or the coordinator this process's own command line would be the wrong one."""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "data.collect", "data.folder=my data"])
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)
    assert console.again().endswith("python -m data.collect 'data.folder=my data'")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert console.again() == "the same command continues"


# ---- metrics -----------------------------------------------------------------------------------------------------

def records(name, values):
    return [{"phase": 2, "epoch": i, name: value} for i, value in enumerate(values, 1)]


@pytest.mark.parametrize("name, values, found", [
    ("grad_norm", [50.0] * 9, False), ("grad_norm", [50.0] * 10, True), ("grad_norm", [0.01] * 10, True),
    ("grad_norm", [50.0] * 5 + [1.0] * 10, False), ("overflow_share", [0.5] + [0.0] * 10, False),
    ("overflow_share", [0.02] * 10, True), ("return", [1.0, 2.0] * 10 + [0.0, -9.0] * 5, True),
    ("return", [1.0, 2.0] * 10 + [5.0, 14.0] * 5, False), ("return", [1.0, 2.0] * 10 + [0.0, 1.0] * 5, False),
    ("return", [1.0] * 9 + [-50.0, 3.0] * 5, False), ("loss_held_out", [1.0, 2.0] * 10 + [9.0, 1.0] * 5, True),
    ("loss_held_out", [None, math.nan] * 10, False)])
def test_what_looks_wrong_is_found(name, values, found):
    """Means of ten records; a spread twice that before counts where values got worse, not where they got better."""
    rows = records(name, [None if value is None or math.isnan(value) else value for value in values])
    assert list(findings(rows)) == [name] * found


def test_stage_1_is_no_measure():
    """Its gradients are a hundredth of stage 2's: every run of default.yaml would have begun with a warning."""
    assert findings([{**row, "stage": 1} for row in records("grad_norm", [0.01] * 15)]) == {}
    assert findings([{**row, "imitated": 1} for row in records("grad_norm", [100.0] * 15)]) == {}


def test_warning_is_said_when_it_begins(tmp_path, capsys):
    for epoch in range(1, 16):
        Metrics(tmp_path, 1).record(epoch, 15, grad_norm=100.0)  # a new object each time: as after a resume
    out = capsys.readouterr().out
    assert out.count("WARNING") == 1 and out.index(" 10/15") < out.index("WARNING") < out.index(" 11/15")


def test_tensorboard_gets_the_metrics_by_name(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for first in (1, 2):  # resumed after epoch 1: epoch 2 is drawn again
        metrics = Metrics(tmp_path, 2, board=True)
        for epoch in range(first, 3):
            metrics.record(epoch, 2, loss=float(10 * first + epoch), kl=math.nan)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "phase2")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 11.0), (2, 22.0)]
    assert "kl" not in events.Tags()["scalars"]


def test_full_disk_ends_tensorboard_and_nothing_else(tmp_path, monkeypatch, capsys):
    """A full disk ended training with a traceback of TensorBoard's writer."""
    metrics = Metrics(tmp_path, 2)
    monkeypatch.setattr(metrics, "writer", SimpleNamespace(add_scalar=lambda *_: None, flush=full))
    metrics.record(1, 2, reward=1.0)
    metrics.record(2, 2, reward=2.0)
    assert [row["reward"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0]
    assert capsys.readouterr().out.count("WARNING") == 1


def test_tensorboards_own_thread_stays_silent(tmp_path, monkeypatch, capsys):
    """Whether its thread or ours met the full disk was chance; the thread printed a traceback."""
    pytest.importorskip("tensorboard")
    others = []
    monkeypatch.setattr(threading, "excepthook", others.append)
    metrics = Metrics(tmp_path, 2, board=True)
    metrics.record(1, 3, reward=1.0)
    monkeypatch.setattr(metrics.writer._get_file_writer().event_writer._async_writer._writer, "write", full)
    metrics.record(2, 3, reward=2.0)
    metrics.record(3, 3, reward=3.0)
    assert capsys.readouterr().out.count("WARNING") == 1 and not others
    thread = threading.Thread(target=full)
    thread.start(), thread.join()
    assert [about.thread for about in others] == [thread]


def full(*_):
    raise OSError(28, "No space left on device")


def test_without_tensorboard_everything_else_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    Metrics(tmp_path, 2, board=True).record(1, 2, loss=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# ---- NaN -----------------------------------------------------------------------------------------------------------

def test_gradients_that_are_not_finite_are_named():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module(torch.ones(1, 2)).sum().backward()
    require_finite(torch.tensor(1.0), module, {})
    module[1].bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"'loss': 3.*1 parameters, the first 1\.bias.*data\.check"):
        require_finite(torch.tensor(math.nan), module, {"loss": torch.tensor(3.0)})


def test_endless_overflow_stops_with_a_diagnosis():
    """At the lowest scale every step was skipped for ever: the run went on and learned nothing."""
    p = nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([p], 1.0), HysteresisScaler("cpu", replace(Config().phase1.amp), True)
    with pytest.raises(FloatingPointError, match="loss scale of 1:"):
        for step in range(1, MOST_OVERFLOWS + 1):
            scaler.scale(p.sum()).backward()
            p.grad.fill_(math.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert step == MOST_OVERFLOWS


def test_a_record_whose_file_cannot_be_opened_is_a_warning(tmp_path, capsys):
    """A disk without a free inode, or a process without a descriptor, ended the training before its checkpoint."""
    (tmp_path / "file").touch()
    Metrics(tmp_path / "file", 1).record(1, 2, loss=1.0)
    assert "metrics.jsonl: this record could not be written" in capsys.readouterr().err


# ---- profiles ------------------------------------------------------------------------------------------------------

def test_a_profile_that_finds_no_room_is_a_warning(tmp_path, capsys):
    """It ended the training."""
    def full(path):
        raise OSError(28, "No space left on device")
    profiler._tell(SimpleNamespace(export_chrome_trace=full, key_averages=list), tmp_path / "phase1", False)
    assert "WARNING" in (out := capsys.readouterr().out) and "No space left" in out


def test_of_the_profiles_the_last_ten_stay(tmp_path, capsys):
    """Each start left more; and a trace that was removed by hand made the next one take another's name."""
    trace = SimpleNamespace(export_chrome_trace=lambda path: Path(path).touch(), key_averages=list)
    name = "profile_phase1_{}.json.gz"
    for number in (1, 2, *range(4, 13)):
        (tmp_path / name.format(number)).touch()
    profiler._tell(trace, tmp_path / "phase1", False)
    assert {path.name for path in tmp_path.iterdir()} == {name.format(number) for number in range(4, 14)}
    assert capsys.readouterr().out.count("profiles of a phase are kept") == 2


def test_profile_leaves_a_trace_and_names_the_expensive_operations(tmp_path, capsys):
    p = nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.SGD([p], 0.1)
    profile_steps(optimizer, replace(Config().profile, active=0), tmp_path / "phase1")
    assert not optimizer._optimizer_step_post_hooks  # off costs nothing
    profile_steps(optimizer, replace(Config().profile, active=2, repeat=2), tmp_path / "phase1")
    for _ in range(10):
        (p @ p).sum().backward()
        optimizer.step()
    traces = sorted(tmp_path.glob("profile_phase1_*.json.gz"))
    assert [path.name for path in traces] == ["profile_phase1_1.json.gz", "profile_phase1_2.json.gz"]
    names = [event["name"] for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]]
    assert names.count("aten::mm") == 6  # forward and two in backward, two steps
    out = capsys.readouterr().out
    assert out.count("ten most expensive") == 2 and "aten::mm" in out and "ProfilerStep" not in out


# ---- configs.show --------------------------------------------------------------------------------------------------

def test_show_says_where_each_value_comes_from(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("base: quick.yaml\nphase1: {epochs: 7}")
    words = ["phase1", "--config", str(tmp_path / "mine.yaml"), "phase1.amp.dtype=off", "run.name"]
    show(words)
    lines = {line.split("=")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "run.seed" not in lines and "phase2.lr" not in lines
    assert "phase1.epochs=7 " in lines["phase1.epochs"] and "mine.yaml, default 50]" in lines["phase1.epochs"]
    assert "quick.yaml, default 0.0003]" in lines["phase1.lr"] and "AdamW learning rate" in lines["phase1.lr"]
    assert "[command line, default fp16]" in lines["phase1.amp.dtype"]
    assert "[default]" in lines["phase1.clip_norm"] and "quick.yaml, default default]" in lines["run.name"]


def test_show_names_a_users_own_default_yaml(tmp_path, capsys):
    """It was taken for the shipped one, and the file below it was named for its values."""
    (tmp_path / "default.yaml").write_text("base: smoke.yaml\nphase1: {lr: 0.5}\n")
    show(["--config", str(tmp_path / "default.yaml"), "phase1.lr"])
    assert f"[{tmp_path / 'default.yaml'}, default" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["phase", "phase1.lrr", "phase1.lrr=3"])
def test_show_refuses_what_does_not_exist(word, capsys):
    assert console.exit_code(lambda: show([word]), (ConfigError,)) == 2
    assert word.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("ending", [console.exit_code, run_script])
def test_folder_that_is_closed_to_us_is_one_message(ending, monkeypatch, capsys):
    """evaluate.py, runtime.report, data.check, data.collect and configs.show ended with a traceback and 1."""
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)

    def work():
        raise PermissionError(13, "Permission denied", "/closed/runs")
    assert ending(work, ()) == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: '/closed/runs'\n"


@pytest.mark.parametrize("ending", [console.exit_code, run_script])
def test_name_that_is_too_long_is_one_message(ending, monkeypatch, tmp_path, capsys):
    """A --config, --checkpoint or --scenario of 300 letters was a traceback."""
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)
    assert ending((tmp_path / ("x" * 300)).exists, ()) == 2
    assert "File name too long" in capsys.readouterr().err
    with pytest.raises(OSError):
        ending((tmp_path / "nothing").read_text, ())


def test_interrupt_says_what_is_kept(capsys):
    """data.preprocess ended with a traceback."""
    def work():
        raise KeyboardInterrupt
    assert console.exit_code(work, (ConfigError,), "chunks are kept, ") == 0
    assert "chunks are kept, the same command continues" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["configs.show", "benchmarks.size"])
def test_reader_that_has_seen_enough_is_no_error(module):
    """`python -m configs.show | head -2` ended with a traceback, and so did the table of sizes."""
    show = subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    show.stdout.close()
    assert show.stderr.read() == b"" and show.wait() == 1


@pytest.mark.parametrize("work", ["while True: say('x' * 999)", "print('the last word')"])
@pytest.mark.parametrize("module, ending", [("configs.console", "exit_code"), ("runtime.ending", "run_script")])
def test_reader_that_has_seen_enough_ends_a_command_quietly(module, ending, work):
    """`python evaluate.py ... | head -1` ended with a traceback; what was still to be written, with another one."""
    code = (f"import sys\nfrom {module} import {ending}\nfrom configs.console import say\n"
            f"def work():\n    {work}\nsys.exit({ending}(work, ()))")
    talker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    talker.stdout.close()
    assert talker.stderr.read() == b"" and talker.wait() == 1


@pytest.mark.parametrize("ending", [console.exit_code, run_script])
def test_broken_pipe_to_somebody_else_is_no_quiet_end(ending, monkeypatch):
    monkeypatch.delenv("EXIT_CODE_FILE", raising=False)

    def work():
        raise BrokenPipeError
    with pytest.raises(BrokenPipeError):
        ending(work, ())


def test_links_to_themselves_are_one_message(tmp_path, capsys):
    """A configuration that is one was a RuntimeError's traceback."""
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert console.exit_code(lambda: show(["--config", str(tmp_path / "loop.yaml")]), (ConfigError,)) == 2
    assert "symbolic links" in capsys.readouterr().err
    assert console.exit_code((tmp_path / "loop.yaml").read_text, ()) == 2


@pytest.mark.parametrize("number, advice", [(errno.ENOSPC, "make room"), (errno.EROFS, "name another place"),
                                            (errno.EISDIR, "name another place")])
def test_advice_about_files_that_cannot_be_written_fits(number, advice, tmp_path, monkeypatch):
    """A read-only folder was to be given more room."""
    def refuse(*_):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WriteError, match=advice):
        write_whole(tmp_path / "a.txt", "x")


def test_off_is_a_word_where_it_is_a_choice():
    """YAML reads `off` as false: `phase1.amp.dtype=off` was refused as "False is not valid"."""
    assert load_config("configs/smoke.yaml", ["phase1.amp.dtype=off"]).phase1.amp.dtype == "off"
    with pytest.raises(ConfigError, match="run.name: False"):
        load_config("configs/smoke.yaml", ["run.name=off"])


# ---- benchmarks.size -------------------------------------------------------------------------------------------------

def test_lines_of_code_leave_out_blanks_comments_and_docstrings(tmp_path):
    source = ('"""Module.\n\nText."""\n\nx = 1  # why\n# comment\n\n\n'
              'def f(a,\n      b):\n    """Doc."""\n    y = """not\na doc"""\n\n    return y\n')
    assert code_lines(source) == {5, 9, 10, 12, 13, 15} and function_lengths(source) == {"f": 5}
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "a.py").write_text(source)
    (tmp_path / "script.py").write_text("x = 1\n")
    assert measure(tmp_path) == {"env": {"a.py": (6, [5])}, "scripts": {"script.py": (1, [])}}
    assert summarise([(6, [5, 1, 3]), (2, [])]) == (8, 3, 3, 5)
