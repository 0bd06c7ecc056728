"""How close does an environment come to the bare simulator, and what do other ways of reading it cost?

    python -m benchmarks.simulator --json simulator.json

Control steps (1 s) per second over the first 300 s of the default corridor. "Environment" is all that a rollout worker
does in a step: five commands, simulation, reading, graph observation, written as the pool's workers write it. The
commands repeat the present acceleration of five other ICVs in every step, so that the traffic stays that of the bare
binary. Below it, three ways of reading the same values of all vehicles over TraCI, without graph or commands: this
project's one-shot subscription with its own decoder, the stock client's persistent context subscription, and one getter
per value. This project's ways run as in pool workers: on one processor, without the garbage collector; the stock ways
run as their users run them, on all processors, and once more on one. Start-up is not counted. The ways alternate;
medians of the repetitions are compared. The last table says where a step of the environment goes.
"""
import subprocess
import tempfile
import time

import numpy as np
import traci.constants as tc

from benchmarks.arguments import at_least, new_parser
from benchmarks.report import alternate, finish, load_line, settled
from configs import Config
from env import graph
from env.block import SECONDS, block_type
from env.launch import find_binary, sumo_environment
from env.spaces import KEEP
from env.sumo import Sumo
from env.traffic_env import make_env
from env.wire import VARIABLES

GETTERS = ("getPosition", "getAngle", "getSpeed", "getAcceleration", "getLanePosition", "getDistance",
           "getAllowedSpeed", "getLength", "getRouteIndex", "getLaneID", "getRouteID")
ACCELERATION = graph.NODE.index("acceleration")


class Bench:
    """The ways as methods that return seconds for `steps` control steps."""

    def __init__(self, folder, steps):
        self.folder, self.steps, self.parts, self.vehicles = folder, steps, {}, {}
        env = self.make("traci")
        env.reset(seed=1)  # generates the scenario
        self.arguments = env.arguments(1)
        env.close()

    def make(self, backend):
        cfg = Config()
        cfg.env.backend, cfg.env.terminate_on_collision, cfg.env.horizon_s = backend, False, 10.0 ** 6
        return make_env(cfg, self.folder)

    def bare(self):
        """The binary alone, without any client."""
        return self._binary(self.steps) - self._binary(0)

    def _binary(self, end):
        start = time.perf_counter()
        subprocess.run([find_binary("sumo"), *self.arguments, "--end", str(end)], check=True,
                       stdout=subprocess.DEVNULL, env=sumo_environment())
        return time.perf_counter() - start

    def environment(self, backend="traci"):
        """Five commands, simulation and observation in every step."""
        env = self.make(backend)
        out = {name: np.zeros(kind.shape, kind.base) for name, (kind, _) in block_type(env.cfg)["final"].fields.items()}
        env.reset(seed=1)
        parts, vehicles, start = np.zeros(3), 0, time.perf_counter()
        for step in range(self.steps):
            env.command(*self._commands(env, out, step), out)
            parts += env.seconds
            vehicles += len(env.ids)
        seconds = time.perf_counter() - start
        env.close()
        self.parts.setdefault(backend, []).append(np.append(parts, seconds - parts.sum()) / self.steps * 1000)
        self.vehicles[backend] = vehicles / self.steps
        return seconds

    @staticmethod
    def _commands(env, out, step):
        k = env.env_cfg.max_commands
        slots, accel = np.full(k, env.env_cfg.max_vehicles), np.zeros(k)
        icvs = np.roll(np.flatnonzero(out["icv"]), -k * step)[:k]
        slots[:len(icvs)], accel[:len(icvs)] = icvs, out["nodes"][icvs, ACCELERATION]
        return slots, accel, np.full(k, KEEP), np.zeros(k)

    def libsumo(self):
        return self.environment("libsumo")

    def one_shot(self):
        """This project's reading, without graph and commands."""
        def step(simulator, t):
            simulator.step(t)
            simulator.read(t)
        return self._reading(step)

    def persistent(self):
        """The stock client's context subscription, evaluated by SUMO in every simulation step."""
        def begin(simulator):
            simulator.client.simulation.subscribeContext("", tc.CMD_GET_VEHICLE_VARIABLE, 1e9, VARIABLES)

        def step(simulator, t):
            simulator.client.simulationStep(t)
            simulator.client.simulation.getContextSubscriptionResults("")
        return self._reading(step, begin)

    def getters(self):
        """One call per vehicle and value."""
        def step(simulator, t):
            simulator.client.simulationStep(t)
            for name in simulator.client.vehicle.getIDList():
                for getter in GETTERS:
                    getattr(simulator.client.vehicle, getter)(name)
        return self._reading(step)

    def _reading(self, step, begin=lambda simulator: None):
        simulator = Sumo(self.arguments)
        begin(simulator)
        start = time.perf_counter()
        for t in range(1, self.steps + 1):
            step(simulator, float(t))
        seconds = time.perf_counter() - start
        simulator.close()
        return seconds


def graph_cost(bench, vehicles=200):
    """(vehicles, ms) of building the observation of a jammed corridor, the median of many times over."""
    env, idle = bench.make("traci"), (np.full(1, 10 ** 6), np.zeros(1), np.full(1, KEEP), np.zeros(1))
    env.reset(seed=1)
    while len(env.ids) < vehicles and env.time < 900:
        env.command(*idle)
    times = []
    for _ in range(100):
        env._observe(out=env.observation)
        times.append(env.seconds[2] * 1000)
    env.close()
    return len(env.ids), float(np.median(times))


def main():
    parser = new_parser(__doc__, "simulator.json")
    parser.add_argument("--repeat", type=at_least(1), default=5)
    parser.add_argument("--steps", type=at_least(1), default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder, options.steps)
        count, cost = graph_cost(bench)
        medians, seconds = alternate({
            "bare binary": bench.bare, "environment, TraCI": settled(bench.environment),
            "environment, libsumo": settled(bench.libsumo), "one-shot, own decoder": settled(bench.one_shot),
            "persistent context, stock": bench.persistent, "getters, stock": bench.getters,
            "persistent, one processor": settled(bench.persistent), "getters, one processor": settled(bench.getters),
            }, options.repeat)
    rates = {name: options.steps / value for name, value in medians.items()}
    parts = {backend: np.median(rows, 0).tolist() for backend, rows in bench.parts.items()}
    print(load_line(options.repeat))
    print(f"{'way':28s}{'control steps/s':>18s}{'share of bare':>16s}")
    for name, rate in rates.items():
        print(f"{name:28s}{rate:18.0f}{rate / rates['bare binary']:16.2f}")
    ours = rates["one-shot, own decoder"]
    print(f"our reading / getters {ours / rates['getters, stock']:.1f}, / persistent context "
          f"{ours / rates['persistent context, stock']:.1f}; observation of {count} vehicles {cost:.2f} ms")
    print(f"\n{'ms per control step':22s}" + "".join(f"{part:>10s}" for part in (*SECONDS[:3], "commands", "vehicles")))
    for backend, row in parts.items():
        print(f"{backend:22s}" + "".join(f"{value:10.2f}" for value in row) + f"{bench.vehicles[backend]:10.0f}")
    finish(options.json, rates=rates, seconds=seconds, parts_ms=parts, vehicles=bench.vehicles,
           observation={"vehicles": count, "ms": cost})


if __name__ == "__main__":
    main()
