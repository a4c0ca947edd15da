"""Slots: the free ones, the outdated ones, and chunks in their slots. Plain memory, owned by the loop's thread."""

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import OffloadKey

HEAP_SLACK = 64  # Outdated entries are left in the heap until there are more of them than of others, and this many.


class SlotEntry(NamedTuple):
    """A chunk in its slot."""

    key: OffloadKey
    slot: int
    sequence: int
    used_at_ns: int


class Recalled(NamedTuple):
    """Chunks that a checkpoint names, in today's slots."""

    keys: list[OffloadKey]
    slots: NDArray[np.int64]
    sequences: NDArray[np.uint64]
    used_at_ns: NDArray[np.int64]
    candidates: NDArray[np.uint8]
    """By chunk: 1 if its footer is still to be read; 0 if its segment was not written since."""

    def entry(self, place: int) -> SlotEntry:
        return SlotEntry(self.keys[place], *(int(column[place]) for column in self[1:4]))


class Snapshot(NamedTuple):
    """All slots at one moment."""

    keys: list[OffloadKey | None]
    sequences: "array[int]"
    used_at_ns: "array[int]"
    foreign: frozenset[int]

    def entries(self) -> Iterator[SlotEntry]:
        """Yield the chunks that are the tier's own."""
        for slot, key in enumerate(self.keys):
            if key is not None and slot not in self.foreign:
                yield SlotEntry(key, slot, self.sequences[slot], self.used_at_ns[slot])


class FreeSlots:
    """A set of numbers, given out in runs: a job whose chunks lie together is one call to the disk.

    The longest run is given out first, so a job needs few calls. Slots that are given back join their neighbours.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lengths: dict[int, int] = {}  # Of each run, by its first slot.
        self._starts: dict[int, int] = {}  # By the slot behind its last.
        self._dropped: list[tuple[int, int]] = []  # Files that are no more, in order: the first slot, and the end.
        self._longest: list[tuple[int, int]] = []  # A heap of (-length, first slot); may hold runs that are no more.

    def add(self, first: int, count: int = 1) -> None:
        """Give back slots that are not free. Slots that were dropped meanwhile are not taken."""
        if self._dropped and self._is_dropped(first):
            return
        self.count += count
        end = first + count
        if (start := self._starts.pop(first, None)) is not None:
            del self._lengths[start]
            first = start
        if (length := self._lengths.pop(end, None)) is not None:
            end += length
        self._note(first, end - first)

    def take(self, count: int) -> list[int]:
        """Return that many slots, or as many as there are, in ascending runs."""
        taken: list[int] = []
        while len(taken) < count and self._longest:
            length, first = heappop(self._longest)
            length = -length
            if self._lengths.get(first) != length:
                continue
            del self._lengths[first]
            del self._starts[first + length]
            part = min(length, count - len(taken))
            taken += range(first, first + part)
            if part < length:
                self._note(first + part, length - part)
        self.count -= len(taken)
        return taken

    def drop(self, first: int, count: int) -> None:
        """Remove all slots of a file, for good."""
        if not self._is_dropped(first):
            insort(self._dropped, (first, first + count))
        end = first + count
        for start, length in list(self._lengths.items()):
            stop = start + length
            if start < end and first < stop:
                del self._lengths[start]
                del self._starts[stop]
                self.count -= min(stop, end) - max(start, first)
                if start < first:
                    self._note(start, first - start)
                if end < stop:
                    self._note(end, stop - end)

    def _is_dropped(self, slot: int) -> bool:
        at = bisect_right(self._dropped, slot, key=itemgetter(0)) - 1
        return at >= 0 and slot < self._dropped[at][1]

    def _note(self, first: int, length: int) -> None:
        self._lengths[first] = length
        self._starts[first + length] = first
        heappush(self._longest, (-length, first))
        if len(self._longest) > 2 * len(self._lengths) + HEAP_SLACK:
            self._longest = [(-length, first) for first, length in self._lengths.items()]
            heapify(self._longest)


class Outdated:
    """Slots whose footers are no longer true, until they are overwritten or wiped.

    After a restart, footers are all that is known. So a chunk is not evicted, and does not count as deleted, while an
    older chunk of its key is still on the disk. That one would come back.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[OffloadKey, ...]] = {}  # A failed store may leave what was there, or its own.
        self._slots: dict[OffloadKey, tuple[int, ...]] = {}
        self._due: dict[int, None] = {}
        self._taken: set[int] = set()  # Being wiped.

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._slots

    def keys(self) -> Iterable[OffloadKey]:
        return self._slots.keys()

    def mark(self, slot: int, key: OffloadKey) -> None:
        """Record that a slot has an outdated chunk of this key, or may have one."""
        keys = self._keys.get(slot, ())
        if key not in keys:
            self._keys[slot] = (*keys, key)
            self._slots[key] = (*self._slots.get(key, ()), slot)

    def retire(self, slot: int, key: OffloadKey | None) -> None:
        """Mark a slot to be wiped; `key`: None if its content is unknown."""
        if key is not None:
            self.mark(slot, key)
        self._due[slot] = None

    def is_marked(self, slot: int) -> bool:
        return slot in self._keys

    def clear(self, slot: int) -> None:
        """Record that a slot was wiped or overwritten."""
        self._taken.discard(slot)
        for key in self._keys.pop(slot, ()):
            left = tuple(other for other in self._slots[key] if other != slot)
            if left:
                self._slots[key] = left
            else:
                del self._slots[key]

    def take_due(self) -> list[int]:
        """Return the slots that wait to be wiped. The caller wipes them now, and reports each outcome."""
        due, self._due = list(self._due), {}
        self._taken.update(due)
        return due

    def still_due(self, slots: Iterable[int]) -> None:
        """Mark slots that could not be wiped to be wiped again."""
        due = dict.fromkeys(slots)
        self._due.update(due)
        self._taken.difference_update(due)

    @property
    def waits(self) -> bool:
        """Whether there is something to wipe."""
        return bool(self._due)

    def slots(self) -> list[int]:
        """Return all slots that are outdated, wait to be wiped or are just being wiped."""
        return list({*self._keys, *self._due, *self._taken})
