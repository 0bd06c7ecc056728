"""Every code block of README and docs/ is run, or, where that would take minutes, taken at its word: scripts, options,
settings and extras that it names exist.

Conventions: a block `xml NAME` is a file; a `text` block after a Python block is exactly what that prints; blocks
without a language hold command lines, or drawings.
"""
import ast
import configparser
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from configs import load_config
from configs.command_line import parse
from env import baselines, launch
from models import policy

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*) ?(\S*)\n(.*?)^```", re.M | re.S)
SCRIPTS = ("coordinator", "train_ddp", "train_rl", "evaluate", "data.collect", "data.preprocess", "data.check")


def blocks(path, *languages):
    return [match for match in BLOCK.findall(path.read_text()) if match[0] in languages]


def command_lines():
    """(document, command) of every line that starts one of our programs or an installation."""
    for path in DOCUMENTS:
        for _, _, body in blocks(path, "", "bash", "sh"):
            for line in body.replace("\\\n", " ").splitlines():
                for command in line.split("#")[0].split("&&"):
                    words = shlex.split(command, posix=True) if "'" not in command else command.split()
                    while words and "=" in words[0]:
                        words.pop(0)  # NAME=value before a command
                    if words and Path(words[0]).name in ("python", "torchrun", "pip", "netgenerate"):
                        yield path.name, " ".join([Path(words[0]).name, *words[1:]])


COMMANDS = sorted(set(command_lines()))
PYTHON = [(path.name, i) for path in DOCUMENTS for i in range(len(blocks(path, "python")))]


def test_documents_hold_what_is_tested():
    """A change of the layout that hides blocks from these tests must not go unnoticed."""
    assert {name for name, _ in PYTHON} >= {"controller.md", "encoder.md", "libraries.md", "scenario.md",
                                            "target-machine.md"}
    assert len(COMMANDS) > 20 and {c.split()[0] for _, c in COMMANDS} == {"python", "torchrun", "pip", "netgenerate"}


def test_files_that_documents_name_exist():
    for path in DOCUMENTS:
        text = path.read_text()
        links = [path.parent / link for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text)]
        names = [ROOT / name for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml)|\w+\.py)\b", text)
                 if not name.startswith(("runs/", "datasets/"))]
        assert [str(name) for name in links + names if not name.exists()] == [], path


@pytest.mark.parametrize("document, command", COMMANDS)
def test_command_line_is_one_that_the_program_takes(document, command, tmp_path, monkeypatch):
    program, *words = shlex.split(command)
    if program == "netgenerate":
        monkeypatch.chdir(tmp_path)
        subprocess.run([launch.find_binary(program), *words], check=True, capture_output=True)
    elif program == "pip":
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        assert set(re.findall(r"\[(\w+)\]", command)) <= set(setup["options.extras_require"])
    else:
        if program == "torchrun":
            words = words[next(i for i, word in enumerate(words) if word.endswith(".py")):]
        words = [word for word in words if word != "-m"]
        check_arguments(words[0].removesuffix(".py"), words[1:])


def check_arguments(name, words):
    """A script of ours parses the words; of other modules, the source names the options."""
    found = importlib.util.find_spec(name)
    assert found, f"no module {name}"
    if name not in SCRIPTS:
        source = Path(found.origin).read_text()
        assert all(word.split("=")[0] in source for word in words if word.startswith("--") and name != "venv")
        return
    module = importlib.import_module(name)
    options = parse(module.__doc__, words, getattr(module, "add_options", None), load=False)
    load_config(options.config_file or "configs/default.yaml", options.overrides)


@pytest.mark.parametrize("document, number", PYTHON)
def test_python_block_runs(document, number, tmp_path, monkeypatch):
    path = next(path for path in DOCUMENTS if path.name == document)
    code = blocks(path, "python")[number][2]
    program = compile(code, f"{document}, block {number}", "exec")
    missing = [name for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))
               for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
               if not importlib.util.find_spec(name.split(".")[0])]
    if missing or (code.count("ParallelTraffic") and not importlib.util.find_spec("pettingzoo")):
        pytest.skip(f"needs {', '.join(missing) or 'pettingzoo'}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policy, "RiskGNN", policy.RiskGNN)  # blocks may put their own in place
    monkeypatch.setattr(baselines, "BASELINES", dict(baselines.BASELINES))
    for _, name, text in blocks(path, "xml"):
        Path(name).write_text(text)
    for name, command in COMMANDS:
        if name == document and command.startswith("netgenerate"):
            subprocess.run([launch.find_binary("netgenerate"), *shlex.split(command)[1:]], check=True,
                           capture_output=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {"__name__": "block"})
    text = path.read_text()
    printed = re.match(r"```\s+prints\s+```text\n(.*?)```", text[text.index(code) + len(code):], re.S)
    assert out.getvalue() == (printed[1] if printed else out.getvalue())
    assert bool(printed) == ("```text" in text)
