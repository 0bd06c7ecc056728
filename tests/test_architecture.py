"""Who may import whom, nothing happens at import, the README names what exists, and files stay readable.

Reads the source with `ast`; only the two import tests start Python processes. Needs no SUMO.
"""
import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.metrics import VOCABULARY

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("configs", "env", "data", "models", "runtime", "benchmarks")
SCRIPTS = sorted(p.stem for p in ROOT.glob("*.py"))
# The arrows: what a package may import besides the standard library and itself.
MAY_IMPORT = {"configs": {"yaml"}, "env": {"numpy", "gymnasium", "traci", "libsumo", "pettingzoo"},
              "data": {"env", "configs", "numpy", "torch"}, "models": {"torch"},
              "runtime": {"configs", "torch", "numpy", "matplotlib"}}
DOCTOR = ROOT / "runtime" / "doctor.py"  # a script in all but its place: nobody imports it, it uses everything
TORCH_FREE = ("env", "data.collect", "data.preprocess", "data.layout", "data.check", "data.records", "configs")


def files(folder):
    return sorted((ROOT / folder).glob("**/*.py"))


def imports(path):
    """Names of everything that a file imports, wherever in the file: "package.module"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules():
    """Dotted names of all modules of the project that can be imported."""
    inside = [".".join(p.relative_to(ROOT).with_suffix("").parts) for package in PACKAGES for p in files(package)]
    return SCRIPTS + sorted(name.removesuffix(".__init__") for name in inside)


# ---- arrows ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_the_arrows_allow(package):
    assert files(package)
    for path in set(files(package)) - {DOCTOR}:
        outside = {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {package}
        wrong = sorted(outside - MAY_IMPORT[package])
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_only_one_file_talks_to_sumo():
    """env/wire.py packs and unpacks messages with TraCI's constants, two benchmarks use the stock client; the
    connection is env/sumo.py's alone, and libsumo env/inprocess.py's."""
    everything = [*ROOT.glob("*.py"), *(path for package in PACKAGES for path in files(package))]
    users = {p: {n for n in imports(p) if n.split(".")[0] in ("traci", "libsumo")} for p in everything}
    assert {p for p, names in users.items() if names} <= {
        ROOT / "env" / "sumo.py", ROOT / "env" / "wire.py", ROOT / "env" / "inprocess.py",
        ROOT / "benchmarks" / "simulator.py", ROOT / "benchmarks" / "reset.py"}
    assert [p for p, names in users.items() if p.parent.name == "env" and names - {"traci.constants"}] == [
        ROOT / "env" / "inprocess.py", ROOT / "env" / "sumo.py"]


def test_scripts_are_imported_by_scripts_only():
    """A package that imports a script could not be used, nor tested, without it."""
    for package in PACKAGES:
        for path in files(package):
            used = {name.split(".")[0] for name in imports(path)} & set(SCRIPTS)
            assert package == "benchmarks" or path == DOCTOR or not used, f"{path.relative_to(ROOT)} imports {used}"


# ---- import ----------------------------------------------------------------------------------------------------

IMPORT_EVERYTHING = """
import importlib, json, os, sys, threading

class NoSumo:  # as on a machine without the simulator
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sumo", "libsumo", "matplotlib", "tensorboard", "tqdm", "pettingzoo"):
            raise ModuleNotFoundError(f"No module named {name!r}")

import gymnasium, numpy, torch, torch.distributed.run, traci, yaml
import torch.nn.parallel, torch.utils.data, torch.utils.checkpoint  # their import is not ours to judge
for path in %r:
    sys.path.insert(0, path)
sys.meta_path.insert(0, NoSumo())
did, before = [], (threading.active_count(), dict(os.environ), os.getcwd())
WORK = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system", "os.mkdir", "os.rename", "os.remove",
        "os.rmdir", "shutil.rmtree", "tempfile.mkstemp", "tempfile.mkdtemp", "socket.bind", "socket.connect", "os.kill")

def watch(event, arguments):
    writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
    if event in WORK or writes:
        did.append(f"{module}: {event} {arguments!r}")

module = ""
sys.addaudithook(watch)
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
    after = (threading.active_count(), dict(os.environ), os.getcwd())
    if after != before:
        did.append(f"{module}: changed threads, environment or folder")
module = "afterwards"
print(json.dumps([did, torch.distributed.is_initialized(), torch.cuda.is_initialized()]))
"""
MODULES_LOADED = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sorted(sys.modules))"


def python(program, *arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("SUMO_HOME", None)
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=cwd, env=environment, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_a_module_does_no_work_and_needs_no_sumo(tmp_path):
    """Work at import runs again in every spawned process; and nobody could import such a file in a test."""
    out = python(IMPORT_EVERYTHING % [str(ROOT)], json.dumps(modules()), cwd=tmp_path)
    did, distributed, cuda = json.loads(out)  # nothing but our own line was printed
    assert did == [] and not distributed and not cuda
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("start", ["env.workers", "env.worker", "data.collect", "data.preprocess", "data.check"])
def test_torch_is_not_loaded_where_it_must_not_be(start, tmp_path):
    """Rollout and collection processes are about 30 MB because they never load torch, not even through others."""
    loaded = python(MODULES_LOADED, start, cwd=tmp_path).split()
    assert start in loaded and "numpy" in loaded
    assert not [name for name in loaded if name.split(".")[0] == "torch"]


def test_torch_is_not_imported_anywhere_in_torch_free_modules():
    """Not even inside a function, which the test above would not see."""
    for name in modules():
        path = ROOT / (name.replace(".", "/") + ".py")
        if path.exists() and name.startswith(TORCH_FREE):
            assert not {n.split(".")[0] for n in imports(path)} & {"torch", "models", "runtime"}, name


# ---- README and size -------------------------------------------------------------------------------------------

def section(heading):
    """Text of one `## ` section of the README."""
    text = (ROOT / "README.md").read_text()
    parts = re.split(rf"^## {re.escape(heading)}\s*$", text, flags=re.M)
    assert len(parts) == 2, f"README.md: expected exactly one section `## {heading}`"
    return re.split(r"^## ", parts[1], flags=re.M)[0]


def test_readme_glossary_is_the_metric_vocabulary():
    names = re.findall(r"^\|\s*`([^`]+)`\s*\|", section("Metric glossary"), flags=re.M)
    assert sorted(names) == sorted(VOCABULARY)


def test_readme_file_tree_names_what_exists():
    block = re.search(r"^```[^\n]*\n(.*?)^```", section("File tree"), flags=re.M | re.S).group(1)
    paths = [line.split()[0] for line in block.splitlines() if line.strip()]
    assert [p for p in paths if not (ROOT / p).exists()] == []
    expected = {f"{name}.py" for name in SCRIPTS} | {str(p.relative_to(ROOT)) for package in PACKAGES[:-1]
                                                     for p in files(package) if p.name != "__init__.py"}
    assert sorted(expected - set(paths)) == []


def sized_files():
    """(path, most lines) of every Python file of the project."""
    for name in SCRIPTS:
        yield f"{name}.py", 350
    for folder, limit in [(package, 250) for package in PACKAGES] + [("tests", 400)]:
        yield from ((str(path.relative_to(ROOT)), limit) for path in files(folder))


@pytest.mark.parametrize("path, limit", list(sized_files()))
def test_file_is_short_enough_to_read(path, limit):
    assert len((ROOT / path).read_text().splitlines()) <= limit


def test_every_docstring_opens_a_module():
    """A reader who opens any file is told first what it is for."""
    silent = [name for name in modules() if (ROOT / (name.replace(".", "/") + ".py")).exists()
              and not ast.get_docstring(ast.parse((ROOT / (name.replace(".", "/") + ".py")).read_text()))]
    assert silent == []


def public(node, prefix=""):
    """(dotted name, docstring) of all functions, methods and classes that others may use."""
    for item in node.body:
        if isinstance(item, (ast.FunctionDef, ast.ClassDef)) and not item.name.startswith("_"):
            yield prefix + item.name, ast.get_docstring(item)
            if isinstance(item, ast.ClassDef):
                yield from public(item, f"{prefix}{item.name}.")


def test_every_public_name_says_what_it_is():
    """`main` is what the docstring of its module says."""
    silent = [f"{path.relative_to(ROOT)}: {name}" for package in PACKAGES[:-1] for path in files(package)
              for name, doc in public(ast.parse(path.read_text())) if not doc and name != "main"]
    assert silent == []
