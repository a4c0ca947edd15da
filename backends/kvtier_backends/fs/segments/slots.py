"""What is known of each slot, in arrays by its number: ten million of them must not take gigabytes."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtier.backend import OffloadKey


class Held(NamedTuple):
    """A chunk in its slot."""

    key: OffloadKey
    slot: int
    sequence: int
    used_at_ns: int


class Snapshot(NamedTuple):
    """All slots at one moment."""

    keys: list[OffloadKey | None]
    sequences: "array[int]"
    used_at_ns: "array[int]"
    foreign: frozenset[int]

    def held(self) -> Iterator[Held]:
        """Yield the chunks that are the tier's own."""
        for slot, key in enumerate(self.keys):
            if key is not None and slot not in self.foreign:
                yield Held(key, slot, self.sequences[slot], self.used_at_ns[slot])


class Slots:
    """Which chunk each holds, and since when it was not used. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self.of: dict[OffloadKey, int] = {}
        """Where each key's newest chunk is."""
        self.keys: list[OffloadKey | None] = []
        self.sequences = array("Q")  # Of the last chunk that was there, if there is none now.
        self.used_at_ns = array("q")  # 0: nothing is held there.
        self.foreign: set[int] = set()
        """Slots of another process: read, and nothing else."""
        self._idle: bytearray | None = bytearray()  # By slot: held from before, not used since; None after the scan.

    def add(self, count: int) -> int:
        """Take in so many; return the first one's number."""
        first = len(self.keys)
        self.keys.extend([None] * count)
        self.sequences.extend([0] * count)
        self.used_at_ns.extend([0] * count)
        if self._idle is not None:
            self._idle.extend(bytes(count))
        return first

    def hold(self, chunk: Held) -> None:
        """Note what a slot holds from now on."""
        key, slot, sequence, used_at_ns = chunk
        self.of[key] = slot
        self.keys[slot] = key
        self.sequences[slot] = sequence
        self.used_at_ns[slot] = max(used_at_ns, 1)

    def hold_idle(self, chunk: Held) -> None:
        """Note what a slot has held from before the start, and that it was not used since."""
        assert self._idle is not None
        self.hold(chunk)
        self._idle[chunk.slot] = 1

    def leave(self, slot: int) -> None:
        """Note that a slot holds nothing any more; its key has another one by now."""
        self.keys[slot] = None
        self.used_at_ns[slot] = 0
        self.foreign.discard(slot)
        if self._idle is not None:
            self._idle[slot] = 0

    def forget(self, key: OffloadKey) -> int:
        """Note that nothing is held of this key any more; return where it was."""
        slot = self.of.pop(key)
        self.leave(slot)
        return slot

    def use(self, slot: int, used_at_ns: int) -> bool:
        """Note when a slot's chunk was used; say whether that was the first time since the start."""
        self.used_at_ns[slot] = max(used_at_ns, 1)
        if self._idle is None or not self._idle[slot]:
            return False
        self._idle[slot] = 0
        return True

    def is_idle(self, slot: int) -> bool:
        """Say whether what a slot holds is from before the start and was not used since."""
        return self._idle is not None and bool(self._idle[slot])

    def is_live(self, slot: int) -> bool:
        """Say whether what a slot of ours holds was stored or used since the start."""
        return slot not in self.foreign and not self.is_idle(slot)

    def end_idle(self) -> Sequence[int]:
        """Call nothing idle from now on; return the slots that were, the newest first."""
        assert self._idle is not None
        slots = np.flatnonzero(np.frombuffer(bytes(self._idle), dtype=np.uint8))
        self._idle = None
        newest_first = np.argsort(np.array(self.used_at_ns, dtype=np.int64)[slots], kind="stable")[::-1]
        return memoryview(slots[newest_first].tobytes()).cast("q")  # Read one by one: a list is as large as the rest.

    def unused_since(self, before_ns: int) -> list[OffloadKey]:
        """Return the keys of our chunks whose last use was before that time."""
        used_at_ns = np.array(self.used_at_ns, dtype=np.int64)
        old = np.flatnonzero((used_at_ns > 0) & (used_at_ns < before_ns)).tolist()
        return [key for slot in old if slot not in self.foreign and (key := self.keys[slot]) is not None]

    def coldest(self, keep: Callable[[OffloadKey], bool]) -> OffloadKey | None:
        """Return which of our keys was used longest ago of those that `keep` does not hold back."""
        never = np.iinfo(np.int64).max
        used_at_ns = np.array(self.used_at_ns, dtype=np.int64)
        used_at_ns[used_at_ns == 0] = never
        while len(used_at_ns) and used_at_ns[slot := int(used_at_ns.argmin())] != never:
            key = self.keys[slot]
            if key is not None and slot not in self.foreign and not keep(key):
                return key
            used_at_ns[slot] = never
        return None

    def snapshot(self) -> Snapshot:
        """Return what is there now, for another thread to write down: some 10 ms a million slots."""
        return Snapshot(list(self.keys), self.sequences[:], self.used_at_ns[:], frozenset(self.foreign))
