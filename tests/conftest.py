"""Fixtures that several test files share."""
import math
import os
import shutil
import signal
import subprocess
import time
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from data_sets import config, silent
from scenes import build
from torch import nn

from configs import load_config
from configs.schema import Config
from data.collect import collect
from data.preprocess import preprocess
from env import launch
from env.scenarios import build_scenario
from env.traffic_env import TrafficEnv

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bits are compared, and a GPU may belong to a training that runs now
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and all they start, ignore it
torch.set_num_threads(1)  # tests run side by side: with a thread per core each, many cores get in each other's way


@pytest.fixture(autouse=True)
def signals():
    """A test's answers to signals end with it. SIGTERM, once ignored, was ignored by processes of later tests too: a
    benchmark that should have ended at once drove 898 episodes."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def scenarios(tmp_path_factory):
    """Folder in which the built-in scenarios are generated, once per session."""
    return str(tmp_path_factory.mktemp("scenarios"))


@pytest.fixture(scope="session")
def corridor(scenarios):
    """The default corridor's .sumocfg."""
    return build_scenario(Config(), scenarios)


@pytest.fixture
def ends_soon():
    """ends_soon(pids, seconds): whether none of the processes exists any more, not even as a zombie."""
    def wait(pids, seconds=5.0):
        deadline = time.monotonic() + seconds
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    return wait


@pytest.fixture
def make(scenarios):
    """make(**changes of EnvConfig) -> TrafficEnv, closed after the test."""
    made = []

    def build(**changes):
        config = Config()
        for name, value in {"max_vehicles": 200, "terminate_on_collision": False, **changes}.items():
            assert hasattr(config.env, name)
            setattr(config.env, name, value)
        made.append(TrafficEnv(config, scenarios))
        return made[-1]
    yield build
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def grid(tmp_path_factory):
    """grid(text of a routes file, lanes=1, more="") -> path of a .sumocfg: 3 x 3 crossings with traffic lights."""
    folder = tmp_path_factory.mktemp("grid")
    for lanes in (1, 2):
        command = [launch.find_binary("netgenerate"), "--grid", "--grid.number", "3", "--grid.length", "150",
                   "--default.lanenumber", str(lanes), "--default-junction-type", "traffic_light", "--no-turnarounds",
                   "true", "--seed", "1", "-o", str(folder / f"grid{lanes}.net.xml")]
        subprocess.run(command, check=True, capture_output=True, env=launch.sumo_environment())

    def write(routes, lanes=1, more=""):
        name = f"case{len(list(folder.iterdir()))}"
        (folder / f"{name}.rou.xml").write_text(f"<routes>{routes}</routes>")
        path = folder / f"{name}.sumocfg"
        path.write_text(f'<configuration><input><net-file value="grid{lanes}.net.xml"/>'
                        f'<route-files value="{name}.rou.xml"/></input>{more}</configuration>')
        return str(path)
    return write


@pytest.fixture
def road(tmp_path):
    """road(nodes, edges, routes, more, additional, opposites, connections) -> path of a .sumocfg."""
    def build(nodes, edges, routes="", more="", additional="<additional/>", opposites=False, connections=None):
        for name, root, text in (("nodes", "nodes", nodes), ("edges", "edges", edges), ("routes", "routes", routes)):
            (tmp_path / f"{name}.xml").write_text(f"<{root}>{text}</{root}>")
        (tmp_path / "more.xml").write_text(additional)
        words = ["-n", tmp_path / "nodes.xml", "-e", tmp_path / "edges.xml", "-o", tmp_path / "net.xml",
                 f"--opposites.guess={opposites}"]
        if connections:
            (tmp_path / "connections.xml").write_text(f"<connections>{connections}</connections>")
            words += ["-x", tmp_path / "connections.xml"]
        subprocess.run([launch.find_binary("netconvert"), *words], check=True, capture_output=True,
                       env=launch.sumo_environment())
        path = tmp_path / "road.sumocfg"
        path.write_text('<configuration><input><net-file value="net.xml"/><route-files value="routes.xml"/>'
                        f'<additional-files value="more.xml"/></input>{more}</configuration>')
        return str(path)
    return build


@pytest.fixture
def drive():
    """drive(scenario, overrides) -> TrafficEnv, reset with seed 1 and closed afterwards."""
    made = []

    def build(scenario, *overrides):
        made.append(TrafficEnv(load_config("configs/smoke.yaml", [f"env.scenario={scenario}", *overrides])))
        made[-1].reset(seed=1)
        return made[-1]
    yield build
    for env in made:
        env.close()


@pytest.fixture(scope="session")
def models():
    """Both presets; tests that change one take a copy."""
    return {"small": build("small"), "full": build("full")}


@pytest.fixture(scope="session")
def small(models):
    """A small model whose last layers are not near zero, so that a mistake in any input shows in the outputs."""
    torch.manual_seed(0)  # the same whichever tests ran before
    model = deepcopy(models["small"])
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.7 / math.sqrt(module.in_features))
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
    for last in (model.controller.action[-1], model.controller.importance[-1], model.controller.impact[-1]):
        last.weight.data *= 0.2
    return model.eval()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A finished data set; tests only read it."""
    folder = tmp_path_factory.mktemp("data") / "set"
    collect(config(folder), silent)
    preprocess(config(folder), silent)
    return folder


@pytest.fixture
def copy(recorded, tmp_path):
    """A copy of the finished data set that a test may damage."""
    return shutil.copytree(recorded, tmp_path / "set")


@pytest.fixture
def raw(copy):
    """A copy that is collected but not preprocessed."""
    shutil.rmtree(copy / "processed")
    return copy
