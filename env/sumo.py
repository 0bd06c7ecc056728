"""The only file that speaks TraCI: one SUMO process, its connection, and the messages of the control loop.

Everything frequent is packed and decoded here in bulk (one message for all commands and the step, one for all
readings); everything rare goes through the stock client `self.client`.
"""
import socket
import struct
import tempfile
import time

import numpy as np
import traci.constants as tc
from traci.connection import Connection
from traci.exceptions import FatalTraCIError, TraCIException

from env.launch import SumoError, find_binary, launch

POLL_S = 0.002        # between two attempts to connect (the stock client sleeps 1 s)
EVERYWHERE = 1.0e9    # radius of the context subscription, m
COUNTERS = ("stats.vehicles.loaded", "stats.teleports.total", "stats.safety.collisions")
# What is read of every vehicle, in wire order: (TraCI variable, field, bytes and type of the value after its type tag).
READINGS = ((tc.VAR_POSITION, "xy", (">f8", 2)), (tc.VAR_ANGLE, "angle", ">f8"), (tc.VAR_SPEED, "speed", ">f8"),
            (tc.VAR_ACCELERATION, "accel", ">f8"), (tc.VAR_LANEPOSITION, "pos", ">f8"),
            (tc.VAR_DISTANCE, "odometer", ">f8"), (tc.VAR_ROUTE_INDEX, "route_index", ">i4"))
_head = [(f"tag_{name}", "V3") for _, name, _ in READINGS]  # variable, status, type: three bytes before each value
RECORD = np.dtype([column for head, (_, name, kind) in zip(_head, READINGS)
                   for column in (head, (name, *kind) if isinstance(kind, tuple) else (name, kind))])
LANE_HEAD = 3         # the same three bytes before the lane id, the only string


class SumoTimeout(SumoError):
    """SUMO did not answer within the deadline."""


class Sumo:
    """One SUMO process. `arguments`: SUMO's command line without the binary (`-c file ...`)."""

    def __init__(self, arguments, call_timeout_s=30.0, start_timeout_s=60.0):
        self.call_timeout_s, self.start_timeout_s = call_timeout_s, start_timeout_s
        self.process, self.client, self.stderr = None, None, None
        self._start(arguments)

    # ---- life of the process -----------------------------------------------------------------------------------

    def _start(self, arguments):
        self.stderr = tempfile.TemporaryFile()
        token = f"mixed-autonomy-{time.monotonic_ns()}-{id(self)}"  # tells our SUMO from a stranger's on the same port
        port = _free_port()
        self.process = launch([find_binary("sumo"), *arguments, "--remote-port", str(port),
                               "--save-state.prefix", token], self.stderr)
        try:
            self._connect(port)
            if self.client.simulation.getOption("save-state.prefix") != token:
                raise SumoError(f"port {port} belongs to somebody else's SUMO")
            self.client._socket.settimeout(self.call_timeout_s)
        except (TraCIException, FatalTraCIError) as error:
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
            self.client._socket.settimeout(self.call_timeout_s)
        except (TraCIException, FatalTraCIError, OSError, AttributeError) as error:
            raise self._failure(f"SUMO could not load {' '.join(arguments)}: {error}") from None

    def close(self):
        """End the process and its connection; safe to call twice."""
        if self.client is not None and self.client._socket is not None:
            self.client._socket.close()
            self.client._socket = None
        self.client = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = None
        if self.stderr is not None:
            self.stderr.close()
        self.stderr = None

    def _failure(self, what, kind=SumoError):
        """The exception for a broken process, with SUMO's own words; the process is gone afterwards."""
        words = ""
        if self.process is not None:
            try:  # a dying SUMO closes its socket before it exits
                self.process.wait(1.0)
                what += f" (exit code {self.process.returncode})"
            except Exception:  # still running: frozen or only disconnected
                pass
            self.stderr.seek(0)
            words = self.stderr.read()[-4000:].decode(errors="replace").strip()
        self.close()
        return kind(f"{what}\nSUMO said: {words or '(nothing)'}")

    # ---- messages ----------------------------------------------------------------------------------------------

    def exchange(self, message):
        """Send packed commands, return SUMO's packed answer; SumoError when it died, SumoTimeout when it froze."""
        try:
            link = self.client._socket
            link.sendall(struct.pack("!i", len(message) + 4) + message)
            size = struct.unpack("!i", self._receive(link, 4))[0] - 4
            return self._receive(link, size)
        except TimeoutError:
            raise self._failure(f"SUMO did not answer within {self.call_timeout_s} s", SumoTimeout) from None
        except (OSError, AttributeError, struct.error) as error:
            raise self._failure(f"connection to SUMO lost: {error}") from None

    @staticmethod
    def _receive(link, size):
        parts, missing = [], size
        while missing:
            part = link.recv(missing, socket.MSG_WAITALL)
            if not part:
                raise OSError("closed by SUMO")
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def step(self, until, commands=()):
        """Send `commands` (see `accelerate` and its siblings) and simulate up to time `until`, in one message.

        SUMO carries the commands out before the step but answers the step only: a command for a vehicle that has
        gone is dropped silently, so check the vehicle first.
        """
        answer = self.exchange(b"".join(commands) + _command(tc.CMD_SIMSTEP, struct.pack("!d", until)))
        _, error = _status(answer, 0)
        if error:
            raise self._failure(f"SUMO failed at the step to {until} s: {error}")

    def read(self, now):
        """All vehicles on the road and what happened since the last call of `step`.

        Returns (ids [N] bytes, records (N,) RECORD, lanes [N] bytes, events) with events = {"departed": ids,
        "arrived": ids, "colliding": ids (last simulation step), **COUNTERS}. One round trip.
        """
        events = [tc.VAR_DEPARTED_VEHICLES_IDS, tc.VAR_ARRIVED_VEHICLES_IDS, tc.VAR_COLLIDING_VEHICLES_IDS]
        answer = self.exchange(_context(now) + b"".join(_get(tc.CMD_GET_SIM_VARIABLE, v, b"") for v in events)
                               + b"".join(_get(tc.CMD_GET_SIM_VARIABLE, tc.VAR_PARAMETER, b"", name.encode())
                                          for name in COUNTERS))
        at, ids, records, lanes = _decode_context(answer)
        values = []
        for _ in range(len(events) + len(COUNTERS)):
            at, value = _value(answer, at)
            values.append(value)
        return ids, records, lanes, dict(zip(("departed", "arrived", "colliding"), values),
                                         **{k: int(float(v)) for k, v in zip(COUNTERS, values[3:])})

    def get(self, requests):
        """Values of [(variable, vehicle id bytes)] in one round trip; None where SUMO knows no such vehicle."""
        answer = self.exchange(b"".join(_get(tc.CMD_GET_VEHICLE_VARIABLE, v, i) for v, i in requests))
        at, values = 0, []
        for _ in requests:
            at, value = _value(answer, at)
            values.append(value)
        return values

    def road_lanes(self):
        """[(lane id, length m, [(next lane, internal lane)])] of the whole network, for `Road.from_lanes`."""
        lane = self.client.lane
        return [(i, lane.getLength(i), [(link[0], link[4]) for link in lane.getLinks(i)]) for i in lane.getIDList()]


# ---- commands for `Sumo.step` ----------------------------------------------------------------------------------

def accelerate(vehicle, acceleration, duration):
    """Constant acceleration, m/s^2, for `duration` s; afterwards SUMO's driver has the speed again."""
    return _set(tc.VAR_ACCELERATION, vehicle, struct.pack("!BiBdBd", tc.TYPE_COMPOUND, 2, tc.TYPE_DOUBLE, acceleration,
                                                          tc.TYPE_DOUBLE, duration))


def change_lane(vehicle, lane, duration):
    """Go to lane number `lane` when there is room and stay there until `duration` s are over."""
    return _set(tc.CMD_CHANGELANE, vehicle, struct.pack("!BiBbBd", tc.TYPE_COMPOUND, 2, tc.TYPE_BYTE, lane,
                                                        tc.TYPE_DOUBLE, duration))


def set_modes(vehicle, speed_mode, lane_change_mode):
    """Which of SUMO's own checks apply to commands for this vehicle."""
    return [_set(variable, vehicle, struct.pack("!Bi", tc.TYPE_INTEGER, mode))
            for variable, mode in ((tc.VAR_SPEEDSETMODE, speed_mode), (tc.VAR_LANECHANGE_MODE, lane_change_mode))]


# ---- packing and unpacking -------------------------------------------------------------------------------------

def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _text(value):
    return struct.pack("!i", len(value)) + value


def _command(code, payload):
    size = len(payload) + 2
    return (struct.pack("!BB", size, code) if size <= 255 else struct.pack("!BiB", 0, size + 4, code)) + payload


def _set(variable, vehicle, payload):
    return _command(tc.CMD_SET_VEHICLE_VARIABLE, bytes([variable]) + _text(vehicle) + payload)


def _get(code, variable, name, parameter=None):
    more = b"" if parameter is None else bytes([tc.TYPE_STRING]) + _text(parameter)
    return _command(code, bytes([variable]) + _text(name) + more)


def _context(now):
    """A context subscription over all vehicles that ends at once: SUMO evaluates it now and never again."""
    variables = [variable for variable, _, _ in READINGS] + [tc.VAR_LANE_ID]
    return _command(tc.CMD_SUBSCRIBE_SIM_CONTEXT, struct.pack("!dd", 0.0, now) + _text(b"") + struct.pack(
        "!BdB", tc.CMD_GET_VEHICLE_VARIABLE, EVERYWHERE, len(variables)) + bytes(variables))


def _status(answer, at):
    """(place after the status of one command, its error text or "")."""
    size, result = answer[at], answer[at + 2]
    length, = struct.unpack_from("!i", answer, at + 3)
    text = answer[at + 7:at + 7 + length].decode()
    return at + (size or struct.unpack_from("!i", answer, at + 1)[0]), text if result else ""


def _head_size(answer, at):
    """(place behind the length field of a response, end of the response)."""
    if answer[at]:
        return at + 1, at + answer[at]
    return at + 5, at + struct.unpack_from("!i", answer, at + 1)[0]


def _value(answer, at):
    """(place behind one answered get command, its value; None when SUMO refused it)."""
    at, error = _status(answer, at)
    if error:
        return at, None
    head, end = _head_size(answer, at)
    name_length, = struct.unpack_from("!i", answer, head + 2)
    at = head + 6 + name_length
    kind, at = answer[at], at + 1
    if kind == tc.TYPE_STRING:
        return end, answer[at + 4:end].decode()
    if kind == tc.TYPE_STRINGLIST:
        names, place = [], at + 4
        for _ in range(struct.unpack_from("!i", answer, at)[0]):
            length, = struct.unpack_from("!i", answer, place)
            names.append(answer[place + 4:place + 4 + length])
            place += 4 + length
        return end, names
    return end, struct.unpack_from("!d" if kind == tc.TYPE_DOUBLE else "!i", answer, at)[0]


def _decode_context(answer):
    """Cut the records of all vehicles out of the answer: only their two strings have variable length."""
    at, error = _status(answer, 0)
    if error:
        raise SumoError(f"SUMO refused the context subscription: {error}")
    head, end = _head_size(answer, at)
    at = head + 1 + 4 + 1 + 1  # response code, empty object id, domain, number of variables
    count, = struct.unpack_from("!i", answer, at)
    at += 4
    ids, lanes, cut, length_of = [], [], [], struct.Struct("!i").unpack_from
    for _ in range(count):
        begin = at + 4 + length_of(answer, at)[0]
        ids.append(answer[at + 4:begin])
        middle = begin + RECORD.itemsize
        cut.append(answer[begin:middle])
        at = middle + LANE_HEAD + 4 + length_of(answer, middle + LANE_HEAD)[0]
        lanes.append(answer[middle + LANE_HEAD + 4:at])
    return end, ids, np.frombuffer(b"".join(cut), RECORD), lanes
