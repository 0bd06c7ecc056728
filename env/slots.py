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
        present = set(ids)
        for name in [name for name in self.slot_of if name not in present]:
            slot = self.slot_of.pop(name)
            self.names[slot], self.icv[slot] = None, False
            heapq.heappush(self.free, slot)
        slots, fresh = np.empty(len(ids), int), np.zeros(len(ids), bool)
        for i, name in enumerate(ids):
            slot = self.slot_of.get(name)
            if slot is None and self.free:
                slot, fresh[i] = heapq.heappop(self.free), True
                self.slot_of[name], self.names[slot], self.icv[slot] = slot, name, self.is_icv(name)
            slots[i] = -1 if slot is None else slot
        return slots, fresh

    def is_icv(self, name):
        """Whether vehicle `name` (bytes) is connected: a seeded draw at departure, whatever its type."""
        digest = hashlib.blake2b(b"%d:%b" % (self.seed, name), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.icv_share * 2 ** 64
