"""How close does reading and commanding the corridor come to the bare simulator, and to the stock client?

    python -m benchmarks.simulator --json simulator.json

Control steps (1 s) per second over the first 300 s of the default corridor: the bare `sumo` binary; the whole
environment (graph observation, 5 commands a step); and three ways of reading the same values of all vehicles over
TraCI: this project's one-shot subscription with its own decoder, the stock client's persistent context subscription,
and one getter per value. The ways alternate; medians of the repetitions are compared.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import traci.constants as tc

from configs import Config
from env.launch import find_binary, sumo_environment
from env.scenarios import build_scenario
from env.spaces import KEEP
from env.sumo import Sumo
from env.traffic_env import make_env
from env.wire import READINGS, STRINGS

STEPS = 300
VARIABLES = [variable for variable, _, _ in READINGS] + list(STRINGS)
GETTERS = ("getPosition", "getAngle", "getSpeed", "getAcceleration", "getLanePosition", "getDistance",
           "getAllowedSpeed", "getRouteIndex", "getLaneID", "getRouteID")


def arguments(scenario):
    return ["-c", scenario, "--seed", "1", "--step-length", "0.1", "--no-step-log", "--no-warnings",
            "--xml-validation", "never", "--duration-log.disable"]


def bare(cfg, folder):
    """The binary alone, without any client."""
    command = [find_binary("sumo"), *arguments(build_scenario(cfg, folder)), "--end", str(STEPS)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=sumo_environment())


def environment(cfg, folder):
    """The gymnasium environment with five commands in every step."""
    env, k = make_env(cfg, folder), cfg.env.max_commands
    observation, _ = env.reset(seed=1)
    for _ in range(STEPS):
        slots = np.full(k, cfg.env.max_vehicles)
        icvs = np.flatnonzero(observation["icv"])[:k]
        slots[:len(icvs)] = icvs
        observation, *_ = env.command(slots, np.zeros(k), np.full(k, KEEP), np.zeros(k))
    env.close()


def one_shot(cfg, folder):
    """This project's reading, without graph and commands."""
    simulator = Sumo(arguments(build_scenario(cfg, folder)))
    for t in range(1, STEPS + 1):
        simulator.step(float(t))
        simulator.read(float(t))
    simulator.close()


def persistent(cfg, folder):
    """The stock client's context subscription, evaluated by SUMO in every simulation step."""
    simulator = Sumo(arguments(build_scenario(cfg, folder)))
    client = simulator.client
    client.simulation.subscribeContext("", tc.CMD_GET_VEHICLE_VARIABLE, 1e9, VARIABLES)
    for t in range(1, STEPS + 1):
        client.simulationStep(float(t))
        client.simulation.getContextSubscriptionResults("")
    simulator.close()


def getters(cfg, folder):
    """One call per vehicle and value."""
    simulator = Sumo(arguments(build_scenario(cfg, folder)))
    client = simulator.client
    for t in range(1, STEPS + 1):
        client.simulationStep(float(t))
        for name in client.vehicle.getIDList():
            for getter in GETTERS:
                getattr(client.vehicle, getter)(name)
    simulator.close()


WAYS = {"bare binary": bare, "environment": environment, "one-shot, own decoder": one_shot,
        "persistent context, stock": persistent, "getters, stock": getters}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="simulator.json")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    cfg, times = Config(), {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        build_scenario(cfg, folder)
        for _ in range(options.repeat):
            for name, way in WAYS.items():
                start = time.perf_counter()
                way(cfg, folder)
                times[name].append(time.perf_counter() - start)
    rates = {name: STEPS / statistics.median(seconds) for name, seconds in times.items()}
    print(f"machine load {os.getloadavg()[0]:.1f}; median of {options.repeat}")
    print(f"{'way':28s}{'control steps/s':>18s}{'share of bare':>16s}")
    for name, rate in rates.items():
        print(f"{name:28s}{rate:18.0f}{rate / rates['bare binary']:16.2f}")
    Path(options.json).write_text(json.dumps({"rates": rates, "seconds": times, "load": os.getloadavg()}, indent=1))


if __name__ == "__main__":
    main()
