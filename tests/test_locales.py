"""A terminal that knows no letters but those of English: files are UTF-8 nevertheless, and names keep their letters."""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from configs import ConfigError
from configs.command_line import parse

ROOT = Path(__file__).resolve().parent.parent
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}


def python(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, env={**os.environ, **ASCII}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_configuration(tmp_path):
    """A name with an umlaut was misread, or no valid YAML."""
    (tmp_path / "my.yaml").write_text("run: {name: Zoë}", encoding="utf-8")
    assert python(tmp_path, "-c", "from configs import load_config; print(ascii(load_config('my.yaml').run.name))"
                  ) == "'Zo\\xeb'\n"


def test_report(tmp_path):
    """It ended with a UnicodeEncodeError and left an empty page."""
    folder = tmp_path / "Zoë"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"phase": 1, "step": 1, "loss_held_out": 0.5}\n')
    (folder / "config.yaml").write_text("run: {name: Zoë}  # ±", encoding="utf-8")
    assert "report.html" in python(tmp_path, "-m", "runtime.report", "Zoë")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<h1>Zoë</h1>" in page and "Zoë}  # ±" in page and page.endswith("</html>")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html"]


def test_simulator(tmp_path):
    """SUMO's UTF-8 names were opened as they came: a UnicodeEncodeError, or a connection that was called lost."""
    python(tmp_path, "-c", "import sys; from configs import Config; from env.traffic_env import TrafficEnv; "
           "TrafficEnv(Config(), sys.argv[1]).reset(seed=1)", "Zoë")


def test_no_room_for_temporary_files_is_one_message(monkeypatch):
    """Every command ended in a traceback on a full root disk, even with runs and data on another one."""
    def nowhere():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(ConfigError, match="No usable temporary directory found .*TMPDIR"):
        parse("", [])
