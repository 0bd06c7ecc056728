"""Which vehicle sits in which row of the observation, and which vehicles are connected."""
import hashlib
import heapq

import numpy as np


class Slots:
    """A slot belongs to one vehicle until that leaves; the lowest free one is given to a newcomer.

    `names` [n] vehicle id (bytes) or None, `icv` [n] bool, `slot_of` {id: slot}.
    """

    def __init__(self, count, seed, icv_share):
        self.seed, self.icv_share = seed, icv_share
        self.slot_of, self.free = {}, list(range(count))
        self.names, self.icv = [None] * count, np.zeros(count, bool)

    def assign(self, ids):
        """(slot of each vehicle, -1 = no slot free; whether it is new there). Slots of vehicles that left are freed."""
        slot_of = self.slot_of
        slots = np.array([slot_of.get(name, -1) for name in ids], int)
        fresh, unknown = np.zeros(len(ids), bool), np.flatnonzero(slots < 0)
        if len(slot_of) > len(ids) - len(unknown):
            self._free(slot_of.keys() - set(ids))
        for i in unknown[:len(self.free)]:
            name, slot = ids[i], heapq.heappop(self.free)
            slots[i], fresh[i] = slot, True
            slot_of[name], self.names[slot], self.icv[slot] = slot, name, self.is_icv(name)
        return slots, fresh

    def _free(self, gone):
        for name in gone:
            slot = self.slot_of.pop(name)
            self.names[slot], self.icv[slot] = None, False
            heapq.heappush(self.free, slot)

    def is_icv(self, name):
        """Whether vehicle `name` (bytes) is connected: a seeded draw at departure, whatever its type."""
        digest = hashlib.blake2b(b"%d:%b" % (self.seed, name), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.icv_share * 2 ** 64


def keep(rows, ids, routes, *arrays):
    """The given rows of two lists and of arrays."""
    return [ids[i] for i in rows], [routes[i] for i in rows], *(array[rows] for array in arrays)
