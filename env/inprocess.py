"""SUMO inside this process (libsumo), with the same methods as env.sumo.Sumo and the same trajectories.

One simulation per process, no deadline for a call, and a crash of SUMO is a crash of the process: that is its price.
"""
import contextlib
import os
import weakref

import numpy as np

from env.launch import SumoError, explained, sumo_home
from env.sumo import COUNTERS, Questions
from env.wire import READINGS, Accelerate, ChangeLane, SetModes

RECORD = np.dtype([(name, kind) for _, name, kind in READINGS]).newbyteorder("=")
GETTERS = {"xy": "getPosition", "angle": "getAngle", "speed": "getSpeed", "accel": "getAcceleration",
           "pos": "getLanePosition", "odometer": "getDistance", "allowed": "getAllowedSpeed",
           "length": "getLength", "route_index": "getRouteIndex"}
LISTS = {"departed": "getDepartedIDList", "arrived": "getArrivedIDList", "colliding": "getCollidingVehiclesIDList",
         "lifted": "getStartingTeleportIDList", "landed": "getEndingTeleportIDList"}  # those of env.sumo.EVENTS
NO_CLIENT = "--remote-port", "0"  # a scenario that names a port would wait there for ever
VAGUE = "Process Error"  # libsumo's word for a network that it cannot read; why, it tells standard error alone


class LibSumo(Questions):
    """The simulation of this process. `arguments`: SUMO's command line without the binary (`-c file ...`)."""

    def __init__(self, arguments):
        self.client = _library()
        if self.client.isLoaded():
            raise SumoError("libsumo holds one simulation per process and has one already: "
                            "env.backend=traci runs several")
        self.alive, self._end = True, weakref.finalize(self, self.client.close)  # also when nobody closes it
        self._ask(self.client.start, ["sumo", *arguments, *NO_CLIENT])

    def _ask(self, function, *arguments):
        try:
            return function(*arguments)
        except (self.client.TraCIException, self.client.FatalTraCIError, RuntimeError) as error:
            self.close()
            words = str(error).strip().replace(VAGUE, f"{VAGUE}; what it says of that stands above, on standard error")
            raise SumoError(f"SUMO failed: {explained(words)}") from None

    def load(self, arguments):
        """Start another episode."""
        self._ask(self.client.load, [*arguments, *NO_CLIENT])

    def close(self):
        """End the simulation; safe to call twice."""
        if self.alive:
            self.alive = False
            self._end()

    def step(self, until, commands=()):
        """Carry out `commands` and simulate up to time `until`. Commands for vehicles that have gone are dropped."""
        for command in commands:
            with contextlib.suppress(self.client.TraCIException):
                self._send(command)
        self._ask(self.client.simulationStep, until)

    def _send(self, command):
        vehicle, name = self.client.vehicle, command.vehicle.decode()
        if isinstance(command, Accelerate):
            vehicle.setAcceleration(name, command.acceleration, command.duration)
        elif isinstance(command, ChangeLane):
            vehicle.changeLane(name, command.lane, command.duration)
        elif isinstance(command, SetModes):
            vehicle.setSpeedMode(name, command.speed_mode)
            vehicle.setLaneChangeMode(name, command.lane_change_mode)

    def read(self, now):
        """See env.sumo.Sumo.read."""
        vehicle, simulation = self.client.vehicle, self.client.simulation
        names = vehicle.getIDList()
        records = np.empty(len(names), RECORD)
        for field, getter in GETTERS.items():
            records[field] = list(map(getattr(vehicle, getter), names)) or 0
        lanes, routes = (_encode(map(getter, names)) for getter in (vehicle.getLaneID, vehicle.getRouteID))
        events = {name: _encode(getattr(simulation, getter)()) for name, getter in LISTS.items()}
        events.update({name: int(float(simulation.getParameter("", name))) for name in COUNTERS})
        return _encode(names), records, lanes, routes, events

    def routes_of(self, names):
        """Edges (bytes) of each vehicle's route; [] where SUMO knows no such vehicle."""
        return [self._route_of(name.decode()) for name in names]

    def _route_of(self, name):
        try:
            return _encode(self.client.vehicle.getRoute(name))
        except self.client.TraCIException:
            return []


def _encode(names):
    return [name.encode() for name in names]


def _library():
    os.environ["SUMO_HOME"] = str(sumo_home())
    try:
        import libsumo
    except ImportError as error:
        raise SumoError(f"env.backend=libsumo needs the package libsumo, pip install 'libsumo==1.28.*': "
                        f"{explained(str(error))}") from None
    return libsumo
