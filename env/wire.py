"""The bytes of TraCI messages: packing commands, unpacking answers in bulk. Used by env/sumo.py only.

Format: https://sumo.dlr.de/docs/TraCI/Protocol.html. Big-endian; a command is length, code, payload.
"""
import struct

import numpy as np
import traci.constants as tc

from env.launch import SumoError

EVERYWHERE = 1.0e9    # radius of the context subscription, m
# What is read of every vehicle, in wire order: (TraCI variable, field, bytes and type of the value after its type tag).
READINGS = ((tc.VAR_POSITION, "xy", (">f8", 2)), (tc.VAR_ANGLE, "angle", ">f8"), (tc.VAR_SPEED, "speed", ">f8"),
            (tc.VAR_ACCELERATION, "accel", ">f8"), (tc.VAR_LANEPOSITION, "pos", ">f8"),
            (tc.VAR_DISTANCE, "odometer", ">f8"), (tc.VAR_ALLOWED_SPEED, "allowed", ">f8"),
            (tc.VAR_ROUTE_INDEX, "route_index", ">i4"))
STRINGS = (tc.VAR_LANE_ID, tc.VAR_ROUTE_ID)  # read after them; the only values of variable length
_head = [(f"tag_{name}", "V3") for _, name, _ in READINGS]  # variable, status, type: three bytes before each value
RECORD = np.dtype([column for head, (_, name, kind) in zip(_head, READINGS)
                   for column in (head, (name, *kind) if isinstance(kind, tuple) else (name, kind))])
HEAD = 3              # the same three bytes before each string


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

def _text(value):
    return struct.pack("!i", len(value)) + value


def command(code, payload):
    size = len(payload) + 2
    return (struct.pack("!BB", size, code) if size <= 255 else struct.pack("!BiB", 0, size + 4, code)) + payload


def _set(variable, vehicle, payload):
    return command(tc.CMD_SET_VEHICLE_VARIABLE, bytes([variable]) + _text(vehicle) + payload)


def get(code, variable, name, parameter=None):
    more = b"" if parameter is None else bytes([tc.TYPE_STRING]) + _text(parameter)
    return command(code, bytes([variable]) + _text(name) + more)


def context(now):
    """A context subscription over all vehicles that ends at once: SUMO evaluates it now and never again."""
    variables = [variable for variable, _, _ in READINGS] + list(STRINGS)
    return command(tc.CMD_SUBSCRIBE_SIM_CONTEXT, struct.pack("!dd", 0.0, now) + _text(b"") + struct.pack(
        "!BdB", tc.CMD_GET_VEHICLE_VARIABLE, EVERYWHERE, len(variables)) + bytes(variables))


def status(answer, at):
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


def value(answer, at):
    """(place behind one answered get command, its value; None when SUMO refused it)."""
    at, error = status(answer, at)
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


def decode_context(answer):
    """Cut the records of all vehicles out of the answer: (place behind it, ids, records, lane ids, route ids)."""
    at, error = status(answer, 0)
    if error:
        raise SumoError(f"SUMO refused the context subscription: {error}")
    head, end = _head_size(answer, at)
    at = head + 1 + 4 + 1 + 1  # response code, empty object id, domain, number of variables
    count, = struct.unpack_from("!i", answer, at)
    at += 4
    ids, lanes, routes, cut, length_of = [], [], [], [], struct.Struct("!i").unpack_from
    for _ in range(count):
        begin = at + 4 + length_of(answer, at)[0]
        ids.append(answer[at + 4:begin])
        lane = begin + RECORD.itemsize + HEAD
        cut.append(answer[begin:lane - HEAD])
        route = lane + 4 + length_of(answer, lane)[0] + HEAD
        lanes.append(answer[lane + 4:route - HEAD])
        at = route + 4 + length_of(answer, route)[0]
        routes.append(answer[route + 4:at])
    return end, ids, np.frombuffer(b"".join(cut), RECORD), lanes, routes
