"""What lies in which slot: plain memory, owned by the loop's thread.

A slot is free (its footer is zeros), under way (a store has it), held (it has a key's newest chunk), or outdated. Only
what has been read from a footer, or written as one, is in here, so that it is exact: a key that is not in here after
the scan is absent. Slots of another process's segments are held at most.
"""

from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from kvtier.keys import OffloadKey
from kvtier.policies.base import Policy
from kvtier_backends.fs.report import Report
from kvtier_backends.fs.segments.free_slots import FreeSlots
from kvtier_backends.fs.segments.outdated import Outdated
from kvtier_backends.fs.segments.slot_order import LRUOrder, PolicyOrder, SlotOrder


class Held(NamedTuple):
    """A chunk in its slot."""

    key: OffloadKey
    slot: int
    sequence: int
    used_at_ns: int


class Snapshot(NamedTuple):
    """A catalog at one moment."""

    keys: list[OffloadKey | None]
    sequences: "array[int]"
    used_at_ns: "array[int]"
    foreign: frozenset[int]

    def held(self) -> Iterator[Held]:
        """Yield the chunks that are the tier's own."""
        for slot, key in enumerate(self.keys):
            if key is not None and slot not in self.foreign:
                yield Held(key, slot, self.sequences[slot], self.used_at_ns[slot])


class Catalog:
    """Keys, slots, and who goes next."""

    def __init__(self, policy: Policy[OffloadKey] | None) -> None:
        """Know nothing. `policy`: None for LRU."""
        self.free = FreeSlots()
        self.outdated = Outdated()
        self.report = Report(self.__contains__)
        self.scanning = True
        self._slots: dict[OffloadKey, int] = {}
        self._keys: list[OffloadKey | None] = []
        self._sequences = array("Q")
        self._used_at_ns = array("q")  # 0: nothing is held there.
        self._order: SlotOrder = LRUOrder(self._keys) if policy is None else PolicyOrder(policy)
        self._idle: bytearray | None = bytearray()  # By slot: held from before, not used since; None after the scan.
        self._foreign: set[int] = set()
        self._under_way: set[int] = set()
        self._busy: dict[OffloadKey, int] = {}  # How many calls are at it.
        self._last_sequence = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._slots

    @property
    def slots(self) -> int:
        """How many slots there are, or were: the number of the next."""
        return len(self._keys)

    def keys(self) -> Iterable[OffloadKey]:
        return self._slots.keys()

    def slot(self, key: OffloadKey) -> int | None:
        """Return where a key's chunk is; None if there is none."""
        return self._slots.get(key)

    def sequence(self, slot: int) -> int:
        """Return the number of the last chunk that a slot has held: what tells it from any that it gets later."""
        return self._sequences[slot]

    def snapshot(self) -> "Snapshot":
        """Return what is there now, for another thread to write down: some 10 ms a million slots."""
        return Snapshot(list(self._keys), self._sequences[:], self._used_at_ns[:], frozenset(self._foreign))

    def is_foreign(self, slot: int) -> bool:
        """Say whether a held slot is another process's: read, and nothing else."""
        return slot in self._foreign

    def unsettled(self) -> list[int]:
        """Return the slots of which a footer may say something else than this."""
        return [*self._under_way, *self.outdated.slots()]

    def add(self, count: int) -> int:
        """Take in so many slots, none of them free yet; return the first one's number."""
        first = len(self._keys)
        self._keys.extend([None] * count)
        self._sequences.extend([0] * count)
        self._used_at_ns.extend([0] * count)
        if self._idle is not None:
            self._idle.extend(bytes(count))
        return first

    @contextmanager
    def in_use(self, keys: Sequence[OffloadKey]) -> Generator[None]:
        """Keep the keys' chunks for as long as the block lasts."""
        busy = self._busy
        for key in keys:
            busy[key] = busy.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                if busy[key] == 1:
                    del busy[key]
                else:
                    busy[key] -= 1

    def take_free(self, count: int) -> list[int]:
        """Give out so many free slots, or as many as there are, to be written to."""
        taken = self.free.take(count)
        self._under_way.update(taken)
        return taken

    def evict(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out up to so many slots of chunks that go for it; the consumer hears of them."""
        if self.scanning:
            return []  # An older chunk of the same key may lie where nobody has looked yet.
        victims = self._order.victims(count, self._is_kept, self._kept, incoming) if count else []
        slots = sorted(self._slots[key] for key in victims)
        for key in victims:
            slot = self._forget(key)
            self.outdated.mark(slot, key)
            self._under_way.add(slot)
            self.report.lost(key)
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Take back slots that were given out and that nothing was written to."""
        for slot in slots:
            self._under_way.discard(slot)
            if self.outdated.is_marked(slot):
                self.outdated.retire(slot, None)
            else:
                self.free.add(slot)

    def failed(self, key: OffloadKey, slot: int) -> None:
        """Take back a slot in which a chunk of this key may be by now, though its store has failed."""
        self._under_way.discard(slot)
        self.outdated.retire(slot, key)

    def next_sequences(self, count: int, now_ns: int) -> int:
        """Reserve so many sequence numbers and return the first: later ones are greater, whatever the clock does."""
        first = max(self._last_sequence + 1, now_ns)
        self._last_sequence = first + count - 1
        return first

    def stored(self, key: OffloadKey, slot: int, sequence: int) -> None:
        """Note a chunk that was written to a slot that was given out: for the order, a use."""
        self._under_way.discard(slot)
        self.outdated.clear(slot)
        old = self._slots.get(key)
        if old is not None and self._sequences[old] > sequence:
            self.outdated.retire(slot, key)
            return
        self._place(Held(key, slot, sequence, sequence))
        if old is None or self._leave(old, key):
            self._order.insert(key, slot)
        else:
            self._order.move(key, old, slot)

    def used(self, key: OffloadKey, used_at_ns: int) -> None:
        """Note that a chunk was used, if it is known."""
        slot = self._slots.get(key)
        if slot is None or slot in self._foreign:
            return
        self._used_at_ns[slot] = max(used_at_ns, 1)
        if self._wake_idle(slot):
            self._order.insert(key, slot)
        else:
            self._order.touch(key, slot)

    def rank(self, keys: Iterable[OffloadKey], now_ns: int) -> None:
        """Renew the recency of those keys, in prefix order, that are known: used together, the head is the newest."""
        known = [(key, slot) for key in dict.fromkeys(keys) if (slot := self._slots.get(key)) is not None]
        ranked: list[tuple[OffloadKey, int]] = []
        for place, (key, slot) in reversed(list(enumerate(known))):
            if slot in self._foreign:
                continue
            if self._is_idle(slot):
                self.used(key, now_ns - place)
            self._used_at_ns[slot] = now_ns - place
            ranked.append((key, slot))
        self._order.rank(ranked[::-1])

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks, and have their slots wiped."""
        for key in keys:
            if key in self._slots:
                self._drop(key)

    def lost(self, key: OffloadKey) -> None:
        """Forget a chunk that turned out to be none; the consumer hears of it."""
        self._drop(key)
        self.report.lost(key)

    def unused_since(self, before_ns: int) -> list[OffloadKey]:
        """Return the keys whose last use was before that time and that nothing keeps."""
        used_at_ns = np.array(self._used_at_ns, dtype=np.int64)
        old = np.flatnonzero((used_at_ns > 0) & (used_at_ns < before_ns)).tolist()
        keys = [key for slot in old if slot not in self._foreign and (key := self._keys[slot]) is not None]
        return [key for key in keys if not self._is_kept(key)]

    def found(self, chunk: Held, *, foreign: bool = False) -> None:
        """Note what a footer says, of a slot that nobody has been given since the start."""
        key, slot, sequence, _ = chunk
        self._last_sequence = max(self._last_sequence, sequence)
        old = self._slots.get(key)
        if old is not None and self._sequences[old] >= sequence:
            if not foreign:
                self.outdated.retire(slot, key)
            return
        self._place(chunk)
        if foreign:
            self._foreign.add(slot)
        if old is not None and not self._leave(old, key):
            self._order.remove(key, old)  # Not used with this content; what it was used for is outdated.
        if not foreign:
            assert self._idle is not None
            self._idle[slot] = 1
        self.report.added(key)

    def scan_ended(self, *, complete: bool) -> None:
        """Note that every footer has been seen, and from now on chunks may go for room.

        `complete`: what is not known is absent.
        """
        assert self._idle is not None
        slots = np.flatnonzero(np.frombuffer(bytes(self._idle), dtype=np.uint8))
        newest_first = np.argsort(np.array(self._used_at_ns, dtype=np.int64)[slots], kind="stable")[::-1]
        idle = memoryview(slots[newest_first].tobytes()).cast("q")  # Read one by one: a list is as large as the rest.
        self._idle = None
        self._order.settle((key, slot) for slot in idle if (key := self._keys[slot]) is not None)
        self.scanning = False
        self.report.complete = complete

    def coldest(self) -> OffloadKey | None:
        """Return the key that was used longest ago of those that may go."""
        never = np.iinfo(np.int64).max
        used_at_ns = np.array(self._used_at_ns, dtype=np.int64)
        used_at_ns[used_at_ns == 0] = never
        while len(used_at_ns) and used_at_ns[slot := int(used_at_ns.argmin())] != never:
            key = self._keys[slot]
            if key is not None and slot not in self._foreign and not self._is_kept(key):
                return key
            used_at_ns[slot] = never
        return None

    def clear_range(self, first: int, count: int) -> int | None:
        """Forget the slots of a file that is to be removed, and their chunks, and return how many chunks there were.

        None, and nothing is changed, if something keeps one of them.
        """
        end = first + count
        keys = [key for key in self._keys[first:end] if key is not None]
        if any(map(self._is_kept, keys)) or any(first <= slot < end for slot in self.unsettled()):
            return None
        for key in keys:
            slot = self._slots[key]
            if not self._is_idle(slot):
                self._order.remove(key, slot)
            self._forget(key)
            self.report.lost(key)
        self.free.drop(first, count)
        return len(keys)

    def _is_kept(self, key: OffloadKey) -> bool:
        return key in self._busy or key in self.outdated

    def _kept(self) -> int:
        return sum(key in self._slots for key in {*self._busy, *self.outdated.keys()})

    def _is_idle(self, slot: int) -> bool:
        return self._idle is not None and bool(self._idle[slot])

    def _wake_idle(self, slot: int) -> bool:
        """Have a slot be idle no more; False if it was not."""
        if self._idle is None or not self._idle[slot]:
            return False
        self._idle[slot] = 0
        return True

    def _place(self, chunk: Held) -> None:
        key, slot, sequence, used_at_ns = chunk
        self._slots[key] = slot
        self._keys[slot] = key
        self._sequences[slot] = sequence
        self._used_at_ns[slot] = max(used_at_ns, 1)

    def _leave(self, slot: int, key: OffloadKey) -> bool:
        """Have nothing held in a slot whose key has another by now; say whether the order did not know it."""
        self._keys[slot] = None
        self._used_at_ns[slot] = 0
        if slot in self._foreign:
            self._foreign.discard(slot)
            return True
        self.outdated.retire(slot, key)
        return self._wake_idle(slot)

    def _forget(self, key: OffloadKey) -> int:
        """Have a key's slot hold nothing; the order has forgotten it."""
        slot = self._slots.pop(key)
        self._keys[slot] = None
        self._used_at_ns[slot] = 0
        self._foreign.discard(slot)
        self._wake_idle(slot)
        return slot

    def _drop(self, key: OffloadKey) -> None:
        slot = self._slots[key]
        foreign = slot in self._foreign
        if not foreign and not self._is_idle(slot):
            self._order.remove(key, slot)
        self._forget(key)
        if not foreign:
            self.outdated.retire(slot, key)
