"""Fixtures that several test files share."""
import time
from pathlib import Path

import pytest

from configs.schema import Config
from env.scenarios import build_scenario


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
