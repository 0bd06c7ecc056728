"""The bytes of TraCI messages: packing commands, unpacking answers in bulk. Used by env/sumo.py only.

Format: https://sumo.dlr.de/docs/TraCI/Protocol.html. Big-endian; a command is length, code, payload.
"""
import struct
from typing import NamedTuple

import numpy as np
import traci.constants as tc

from env.launch import SumoError

EVERYWHERE = 1.0e9    # radius of the context subscription, m
HEAD = 3              # bytes before each value: variable, status, type
# What is read of every vehicle, in wire order: (TraCI variable, field, type of the value after its type tag).
READINGS = ((tc.VAR_POSITION, "xy", "(2,)>f8"), (tc.VAR_ANGLE, "angle", ">f8"), (tc.VAR_SPEED, "speed", ">f8"),
            (tc.VAR_ACCELERATION, "accel", ">f8"), (tc.VAR_LANEPOSITION, "pos", ">f8"),
            (tc.VAR_DISTANCE, "odometer", ">f8"), (tc.VAR_ALLOWED_SPEED, "allowed", ">f8"),
            (tc.VAR_LENGTH, "length", ">f8"), (tc.VAR_ROUTE_INDEX, "route_index", ">i4"))
# After them, the only values of variable length.
VARIABLES = [*(variable for variable, _, _ in READINGS), tc.VAR_LANE_ID, tc.VAR_ROUTE_ID]
TYPES = {tc.VAR_POSITION: tc.POSITION_2D, tc.VAR_ROUTE_INDEX: tc.TYPE_INTEGER, tc.VAR_LANE_ID: tc.TYPE_STRING}
# A record ends with the length of the lane's name.
_columns = [column for _, name, kind in READINGS for column in ((f"tag_{name}", "V3"), (name, kind))]
RECORD = np.dtype([*_columns, ("tag_lane", "V3"), ("lane_bytes", ">i4")])
HEADS = np.array([[variable, 0, TYPES.get(variable, tc.TYPE_DOUBLE)] for variable in VARIABLES[:-1]], np.uint8).ravel()
HEAD_AT = np.concatenate([RECORD.fields[name][1] + np.arange(3) for name in RECORD.names if name.startswith("tag_")])


# ---- commands for `Sumo.step` ----------------------------------------------------------------------------------

class Accelerate(NamedTuple):
    """Constant acceleration, m/s^2, for `duration` s; then SUMO holds the speed for one more of its steps, and after
    that the driver has it again."""
    vehicle: bytes
    acceleration: float
    duration: float

    def pack(self):
        """The command's bytes."""
        return _set(tc.VAR_ACCELERATION, self.vehicle, struct.pack(
            "!BiBdBd", tc.TYPE_COMPOUND, 2, tc.TYPE_DOUBLE, self.acceleration, tc.TYPE_DOUBLE, self.duration))


class ChangeLane(NamedTuple):
    """Go to lane number `lane` when there is room and stay there until `duration` s are over."""
    vehicle: bytes
    lane: int
    duration: float

    def pack(self):
        """The command's bytes."""
        return _set(tc.CMD_CHANGELANE, self.vehicle, struct.pack(
            "!BiBbBd", tc.TYPE_COMPOUND, 2, tc.TYPE_BYTE, self.lane, tc.TYPE_DOUBLE, self.duration))


class SetModes(NamedTuple):
    """Which of SUMO's own checks apply to commands for this vehicle."""
    vehicle: bytes
    speed_mode: int
    lane_change_mode: int

    def pack(self):
        """The bytes of two commands."""
        return b"".join(_set(variable, self.vehicle, struct.pack("!Bi", tc.TYPE_INTEGER, mode)) for variable, mode in (
            (tc.VAR_SPEEDSETMODE, self.speed_mode), (tc.VAR_LANECHANGE_MODE, self.lane_change_mode)))


# ---- packing and unpacking -------------------------------------------------------------------------------------

def _text(value):
    return struct.pack("!i", len(value)) + value


def command(code, payload):
    """One TraCI command: its length, `code` and payload."""
    size = len(payload) + 2
    return (struct.pack("!BB", size, code) if size <= 255 else struct.pack("!BiB", 0, size + 4, code)) + payload


def _set(variable, vehicle, payload):
    return command(tc.CMD_SET_VEHICLE_VARIABLE, bytes([variable]) + _text(vehicle) + payload)


def get(code, variable, name, parameter=None):
    """The command that asks for one variable of one object, a text or names; `parameter` for a named one."""
    more = b"" if parameter is None else bytes([tc.TYPE_STRING]) + _text(parameter)
    return command(code, bytes([variable]) + _text(name) + more)


def context(now):
    """A context subscription over all vehicles that ends at once: SUMO evaluates it now and never again."""
    return command(tc.CMD_SUBSCRIBE_SIM_CONTEXT, struct.pack("!dd", 0.0, now) + _text(b"") + struct.pack(
        "!BdB", tc.CMD_GET_VEHICLE_VARIABLE, EVERYWHERE, len(VARIABLES)) + bytes(VARIABLES))


def status(answer):
    """The error text of one command, "" when SUMO has carried it out. `answer`: a Storage, read as far as that."""
    answer.readLength()
    _, result = answer.read("!BB")
    text = answer.readString()
    return text if result else ""


def value(answer):
    """The value in the answer to one `get`: a text or a list of names (bytes); None when SUMO refused it."""
    if status(answer):
        return None
    answer.readLength()
    answer.read("!BB")  # response, variable
    answer.readString()  # object
    kind, = answer.read("!B")
    return answer.readString() if kind == tc.TYPE_STRING else [name.encode() for name in answer.readStringList()]


def decode_context(answer):
    """Cut the records of all vehicles out of the rest of the answer: (ids, records, lane ids, route ids).

    Names have any length, so a record cannot be computed from its number; it is found by its tags, which stand at
    fixed distances from each other and which no name contains (they hold zero bytes).
    """
    if error := status(answer):
        raise SumoError(f"SUMO refused the context subscription: {error}")
    answer.readLength()
    *_, count = answer.read("!BiBBi")  # response, empty object id, domain, number of variables
    text = answer._content[answer._pos:]
    raw = np.frombuffer(text, np.uint8)
    inside = raw[:max(len(raw) - RECORD.itemsize, 0)]
    start = np.flatnonzero((inside[:-2] == HEADS[0]) & (inside[1:-1] == HEADS[1]) & (inside[2:] == HEADS[2]))
    start = start[(raw[start[:, None] + HEAD_AT] == HEADS).all(1)]
    if len(start) != count:
        raise SumoError(f"SUMO announced {count} vehicles and described {len(start)}")
    records = raw[start[:, None] + np.arange(RECORD.itemsize)].view(RECORD)[:, 0]
    lane_at = start + RECORD.itemsize
    route_at = lane_at + records["lane_bytes"] + HEAD + 4
    route_end = route_at + raw[route_at[:, None] + np.arange(-4, 0)].copy().view(">i4")[:, 0]
    id_at = np.append(0, route_end[:-1])[:count] + 4
    return (_cut(text, id_at, start), records, _cut(text, lane_at, lane_at + records["lane_bytes"]),
            _cut(text, route_at, route_end))


def _cut(answer, begins, ends):
    return [answer[begin:end] for begin, end in zip(begins.tolist(), ends.tolist())]
