"""The only file that speaks TraCI: one SUMO process, its connection, and the messages of the control loop.

Everything frequent is packed and decoded here in bulk (one message for all commands and the step, one for all
readings); everything rare goes through the stock client `self.client`.
"""
import contextlib
import signal
import socket
import struct
import tempfile
import time

import traci.constants as tc
from traci.connection import Connection
from traci.exceptions import FatalTraCIError, TraCIException
from traci.storage import Storage

from env import wire
from env.lanes import special_lanes
from env.launch import OURS, SumoError, explained, find_binary, launch
from env.scenarios import own_scale, without_outputs
from env.wire import Accelerate, ChangeLane, SetModes

__all__ = ["Sumo", "SumoError", "SumoTimeout", "Accelerate", "ChangeLane", "SetModes"]

POLL_S = 0.002  # between attempts to connect (the stock client sleeps 1 s)
EVENTS = {"departed": tc.VAR_DEPARTED_VEHICLES_IDS, "arrived": tc.VAR_ARRIVED_VEHICLES_IDS,  # lists of ids
          "colliding": tc.VAR_COLLIDING_VEHICLES_IDS, "lifted": tc.VAR_TELEPORT_STARTING_VEHICLES_IDS,
          "landed": tc.VAR_TELEPORT_ENDING_VEHICLES_IDS}
COUNTERS = ("stats.vehicles.inserted", "stats.vehicles.waiting", "stats.teleports.total", "stats.safety.collisions",
            "stats.vehicles.running", "stats.persons.running")
ALL_CHECKS, SAFE_SPEED, OWN_LANE_CHANGES = 31, 1, 1621  # speed mode, a bit of it, lane-change mode


class SumoTimeout(SumoError):
    """SUMO did not answer within the deadline."""


class Questions:
    """What is rarely asked, with the stock client `self.client` or libsumo; `_ask(question)` reports its failures."""

    def habits(self, name):
        """Of a vehicle (bytes): has it a stop ahead, has it blue lights; how often its driver acts, s; its minGap, m;
        its tau, s; by how much it shortens the gaps that lane changes need (lcAssertive); its vClass; decel, m/s^2, and
        emergencyDecel."""
        return self._ask(self._habits, name.decode())

    def _habits(self, name):
        vehicle, boldness = self.client.vehicle, 1.0
        with contextlib.suppress(getattr(self.client, "TraCIException", TraCIException)):  # some models know none
            boldness = float(vehicle.getParameter(name, "laneChangeModel.lcAssertive"))
        return (len(vehicle.getStops(name, 1)) > 0, vehicle.getParameter(name, "has.bluelight.device") == "true",
                vehicle.getActionStepLength(name), vehicle.getMinGap(name), vehicle.getTau(name), boldness,
                vehicle.getVehicleClass(name), vehicle.getDecel(name), vehicle.getEmergencyDecel(name))

    def extremes(self, names):
        """Of vehicles (bytes): how hard one brakes at most, m/s^2; the least headway beyond the own action step, s."""
        v, names = self.client.vehicle, [name.decode() for name in names]
        return self._ask(lambda: (max(max(v.getDecel(n), v.getEmergencyDecel(n)) for n in names),
                                  min(v.getTau(n) - v.getActionStepLength(n) for n in names)))

    def time(self):
        """Simulated time, s."""
        return self._ask(lambda: self.client.simulation.getTime())

    def road_lanes(self):
        """[(lane id, length m, [(next lane, internal lane)])] of the whole network, for `Road`."""
        return self._ask(lambda: [
            (i, self.client.lane.getLength(i), [(link[0], link[4]) for link in self.client.lane.getLinks(i)])
            for i in self.client.lane.getIDList()])

    def special_lanes(self):
        """See env.lanes."""
        return self._ask(lambda: special_lanes(self.client))

    def lane_shapes(self):
        """Points (x, y) m of each lane's middle, in the order of `road_lanes`."""
        return self._ask(lambda: [self.client.lane.getShape(i) for i in self.client.lane.getIDList()])


class Sumo(Questions):
    """One SUMO process. `arguments`: SUMO's command line without the binary (`-c file ...`)."""
    binary = "sumo"

    def __init__(self, arguments, call_timeout_s=30.0, start_timeout_s=60.0):
        self.call_timeout_s, self.start_timeout_s = call_timeout_s, start_timeout_s
        self.process = self.client = None
        self._start(arguments)

    # ---- life of the process -----------------------------------------------------------------------------------

    def _start(self, arguments):
        self.stderr = tempfile.TemporaryFile()
        token = f"mixed-autonomy-{time.monotonic_ns()}-{id(self)}"  # tells our SUMO from a stranger's on the same port
        port = free_port()
        self.process = launch([find_binary(self.binary), *arguments, "--remote-port", str(port),
                               "--save-state.prefix", token], self.stderr)
        try:
            self._connect(port)
            if self.client.simulation.getOption("save-state.prefix") != token:
                raise SumoError(f"port {port} belongs to somebody else's SUMO")
            self.client._socket.settimeout(self.call_timeout_s)
        except (TraCIException, FatalTraCIError, OSError, struct.error, UnicodeError) as error:  # a stranger's bytes
            raise self._failure(f"SUMO refused its input: {error}") from None
        except SumoError:
            self.close()
            raise

    def _connect(self, port):
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            try:
                self.client = Connection("127.0.0.1", port, self.process, None, False, None)
                self.client._socket.settimeout(self.start_timeout_s)
                return
            except OSError:
                if self.process.poll() is not None:
                    raise self._failure("SUMO ended before it could be connected") from None
                if time.monotonic() > deadline:
                    raise self._failure(f"SUMO did not open its port within {self.start_timeout_s} s") from None
                time.sleep(POLL_S)

    def load(self, arguments):
        """Start another episode in the living process (2 ms instead of 30). Subscriptions are lost."""
        try:
            self.client._socket.settimeout(self.start_timeout_s)
            self.client.load(arguments)
            self.client.simulation.getTime()  # SUMO answers `load` before it has opened the files
            self.client._socket.settimeout(self.call_timeout_s)
        except (TraCIException, FatalTraCIError, OSError, AttributeError) as error:
            process, failure = self.process, self._failure(f"SUMO could not load {' '.join(arguments)}: {error}")
            if process is None or process.returncode in (0, 1, -signal.SIGKILL):  # it refused, or froze and was killed
                raise failure from None
            self._start(arguments)  # some crash on a network after another one, on which a new one does not

    @property
    def alive(self):
        """Whether there is a process to talk to (after an error there is none)."""
        return self.process is not None and self.process.poll() is None

    def close(self):
        """End the process and its connection; safe to call twice."""
        if self.client is not None and self.client._socket is not None:
            self.client._socket.close()
            self.client._socket = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.stderr.close()
        self.client = self.process = None

    def _failure(self, what, kind=SumoError):
        """The exception for a broken process, with SUMO's own words; the process is gone afterwards."""
        words = ""
        if self.process is not None:
            with contextlib.suppress(Exception):  # still running: frozen or only disconnected
                what += f" (exit code {self.process.wait(1.0)})"  # a dying SUMO closes its socket before it exits
            self.stderr.seek(0)
            words = explained(self.stderr.read()[-4000:].decode(errors="replace").strip())
        self.close()
        return kind(f"{what}\nSUMO said: {words or '(nothing)'}")

    # ---- messages ----------------------------------------------------------------------------------------------

    def exchange(self, message):
        """Send packed commands, return SUMO's answer; SumoError when it died, SumoTimeout when it froze."""
        try:
            link = self.client._socket
            link.sendall(struct.pack("!i", len(message) + 4) + message)
            size = struct.unpack("!i", self._receive(link, 4))[0] - 4
            return Storage(self._receive(link, size))
        except TimeoutError:
            raise self._failure(f"SUMO did not answer within {self.call_timeout_s} s", SumoTimeout) from None
        except (OSError, AttributeError, struct.error) as error:
            raise self._failure(f"connection to SUMO lost: {error}") from None

    @staticmethod
    def _receive(link, size):
        data = b""
        while len(data) < size:
            part = link.recv(size - len(data), socket.MSG_WAITALL)
            if not part:
                raise OSError("closed by SUMO")
            data += part
        return data

    def step(self, until, commands=()):
        """Send `commands` (Accelerate, ChangeLane, SetModes) and simulate up to time `until`, in one message.

        SUMO carries the commands out before the step but answers the step only: a command for a vehicle that has
        gone is dropped silently, so check the vehicle first.
        """
        packed = b"".join(command.pack() for command in commands)
        answer = self.exchange(packed + wire.command(tc.CMD_SIMSTEP, struct.pack("!d", until)))
        if error := wire.status(answer):
            raise self._failure(f"SUMO failed at the step to {until} s: {error}")

    def read(self, now):
        """All vehicles on the road and what happened since the last call of `step`.

        Returns (ids, records (N,) RECORD, lane ids, route ids, events): ids are lists of N bytes, events = {name of
        EVENTS: ids ("colliding": of the last simulation step), **COUNTERS}. One round trip."""
        asked = [wire.get(tc.CMD_GET_SIM_VARIABLE, variable, b"") for variable in EVENTS.values()]
        asked += [wire.get(tc.CMD_GET_SIM_VARIABLE, tc.VAR_PARAMETER, b"", name.encode()) for name in COUNTERS]
        answer = self.exchange(b"".join(asked) + wire.context(now))
        happened = {name: wire.value(answer) for name in EVENTS}
        happened.update({name: int(float(wire.value(answer))) for name in COUNTERS})
        return *wire.decode_context(answer), happened

    def routes_of(self, names):
        """Edges (bytes) of each vehicle's route in one round trip; [] where SUMO knows no such vehicle."""
        if not names:
            return []  # SUMO would not answer an empty message
        answer = self.exchange(b"".join(wire.get(tc.CMD_GET_VEHICLE_VARIABLE, tc.VAR_EDGES, name) for name in names))
        return [wire.value(answer) or [] for _ in names]

    def _ask(self, question, *arguments):
        """What `question(*arguments)` finds out with the stock client; SumoError when SUMO dies meanwhile."""
        try:
            return question(*arguments)
        except (TraCIException, FatalTraCIError, OSError, AttributeError) as error:
            raise self._failure(f"connection to SUMO lost: {error}") from None


def episode_arguments(scenario, seed, env_cfg):
    """SUMO's command line, without the binary, for an episode of a .sumocfg. Nobody leaves the score unseen."""
    scale = [] if env_cfg.demand_scale == 1.0 else ["--scale", str(env_cfg.demand_scale * own_scale(scenario))]
    return ["-c", scenario, *scale, "--seed", str(seed), "--random", "false", "--step-length", str(env_cfg.step_length),
            "--no-step-log", "--no-warnings", "--xml-validation", "never", "--time-to-teleport",
            str(env_cfg.teleport_s), "--collision.action", "warn", "--collision.check-junctions",
            "--duration-log.disable", "--max-depart-delay", "-1", "--time-to-teleport.remove", "false", *OURS,
            *without_outputs(scenario), "--threads", "1"]  # with more of them no episode would be like another


def open_simulator(arguments, env_cfg):
    """The simulator of `env.backend` with the same methods: `step`, `read`, `routes_of`, `load`, `alive`, `close`."""
    if env_cfg.backend == "libsumo":
        from env.inprocess import LibSumo  # an extra
        return LibSumo(arguments)
    if env_cfg.backend == "gui":
        from env.gui import SumoGui
        return SumoGui(arguments, env_cfg.call_timeout_s, env_cfg.start_timeout_s)
    return Sumo(arguments, env_cfg.call_timeout_s, env_cfg.start_timeout_s)


def free_port():
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
