"""Which vehicle sits in which row of the observation, and which vehicles are connected."""
import hashlib

import numpy as np

JUMP_M = 100.0  # so much more or less than its speed says, nobody drives in a control step


class Slots:
    """A slot belongs to one vehicle until that leaves; the lowest free one is given to a newcomer.

    `names` [n] vehicle id (bytes) or None, `icv` [n] bool, `slot_of` {id: slot}.
    """

    def __init__(self, count, seed, icv_share):
        self.seed, self.icv_share = seed, icv_share
        self.slot_of, self.names, self.icv = {}, [None] * count, np.zeros(count, bool)

    def assign(self, ids):
        """(slot of each vehicle, -1 = no slot free; whether it is new there). Slots of vehicles that left are freed."""
        slots = np.array([self.slot_of.get(name, -1) for name in ids], int)
        fresh, unknown = np.zeros(len(ids), bool), np.flatnonzero(slots < 0)
        self.forget(self.slot_of.keys() - set(ids))
        free = (slot for slot, name in enumerate(self.names) if name is None)
        for i, slot in zip(unknown, free):
            slots[i], fresh[i], name = slot, True, ids[i]
            self.slot_of[name], self.names[slot], self.icv[slot] = slot, name, self.is_icv(name)
        return slots, fresh

    def forget(self, names):
        """Free the slots of `names`. Who comes back, as after a teleport, is somebody new: no memory, no way driven and
        no order goes along."""
        for name in names:
            if (slot := self.slot_of.pop(name, None)) is not None:
                self.names[slot], self.icv[slot] = None, False

    def is_icv(self, name):
        """Whether vehicle `name` (bytes) is connected: a seeded draw at departure, whatever its type."""
        digest = hashlib.blake2b(b"%d:%b" % (self.seed, name), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.icv_share * 2 ** 64


class Odometer:
    """How far each vehicle has driven, by slot, m. SUMO's own counts along the edge that a vehicle is on, so that it
    jumps and goes backwards while somebody overtakes among the oncoming traffic, and jumps by a train's length where
    one turns back: there the speed counts."""

    def __init__(self, count):
        self.raw, self.error = np.zeros((2, count))

    def read(self, raw, slots, fresh, expected, doubtful):
        """(way since the last call, odometer), each [N], from SUMO's `raw`; the `expected` way where `doubtful`."""
        told = np.where(fresh, 0.0, raw - self.raw[slots])
        moved = np.where((doubtful | (np.abs(told - expected) > JUMP_M)) & ~fresh, expected, told)
        self.raw[slots], self.error[slots] = raw, np.where(fresh, 0.0, self.error[slots] + told - moved)
        return moved, raw - self.error[slots]


def keep(rows, ids, routes, *arrays):
    """The given rows of two lists and of arrays."""
    return [ids[i] for i in rows], [routes[i] for i in rows], *(array[rows] for array in arrays)
