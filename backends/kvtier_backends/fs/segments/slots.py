"""The states of slots by their numbers: held, free, outdated. Plain memory, owned by the loop's thread.

Facts about each slot are in arrays: ten million slots must not take gigabytes.
"""

from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import OffloadKey

HEAP_SLACK = 64  # Outdated entries are left in the heap until there are more of them than of others, and this many.


class Held(NamedTuple):
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
    """By chunk: 1 if its footer is still to be read; 0 if nobody has written to its segment since."""

    def held(self, index: int) -> Held:
        return Held(self.keys[index], *(int(column[index]) for column in self[1:4]))


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
    """The chunk that each slot holds, and its last use."""

    def __init__(self) -> None:
        self.of: dict[OffloadKey, int] = {}
        """Where each key's newest chunk is."""
        self.keys: list[OffloadKey | None] = []
        self.sequences = array("Q")  # Of the last chunk that was there, if there is none now.
        self.used_at_ns = array("q")  # 0: nothing is held there.
        self.foreign: set[int] = set()
        """Slots of another process: read, and nothing else."""
        self._idle: bytearray | None = bytearray()  # By slot: held from before, not used since; None after the scan.
        self._candidates = bytearray()  # By slot: held if the checkpoint is right; empty after the scan.

    def add(self, count: int) -> int:
        """Take in so many; return the first one's number."""
        first = len(self.keys)
        self.keys.extend([None] * count)
        self.sequences.extend([0] * count)
        self.used_at_ns.extend([0] * count)
        if self._idle is not None:
            self._idle.extend(bytes(count))
            self._candidates.extend(bytes(count))
        return first

    def hold(self, chunk: Held) -> None:
        """Note the key that a slot holds from now on."""
        key, slot, sequence, used_at_ns = chunk
        self.of[key] = slot
        self.keys[slot] = key
        self.sequences[slot] = sequence
        self.used_at_ns[slot] = max(used_at_ns, 1)

    def hold_idle(self, chunk: Held) -> None:
        """Note the key that a slot has held from before the start, and that it was not used since."""
        assert self._idle is not None
        self.hold(chunk)
        self._idle[chunk.slot] = 1

    def recall(self, chunks: Recalled) -> tuple[list[OffloadKey], list[int]]:
        """Hold a checkpoint's chunks, idle; return their keys, and the indices of chunks whose key is held already."""
        assert self._idle is not None
        of, held = self.of, self.keys
        others: list[int] = []
        for index, (key, slot) in enumerate(zip(chunks.keys, chunks.slots.tolist(), strict=True)):
            if key in of or held[slot] is not None:
                others.append(index)
            else:
                of[key] = slot
                held[slot] = key
        taken = np.delete(np.arange(len(chunks.keys)), others)
        slots = chunks.slots[taken]
        np.frombuffer(self.sequences, np.uint64)[slots] = chunks.sequences[taken]
        np.frombuffer(self.used_at_ns, np.int64)[slots] = np.maximum(chunks.used_at_ns[taken], 1)
        np.frombuffer(self._idle, np.uint8)[slots] = 1
        np.frombuffer(self._candidates, np.uint8)[slots] = chunks.candidates[taken]
        return ([chunks.keys[index] for index in taken] if others else chunks.keys), others

    def is_candidate(self, slot: int) -> bool:
        """Return True if the checkpoint alone says what a slot holds."""
        return bool(self._candidates) and self._candidates[slot] != 0

    def end_candidates(self, first: int, count: int) -> dict[int, OffloadKey]:
        """Return the candidates in a range of slots, whose footers are known now. None of them is one any more."""
        if not count:
            return {}
        flags = np.frombuffer(self._candidates, np.uint8)[first : first + count]
        slots = (np.flatnonzero(flags) + first).tolist()
        flags[:] = 0
        return {slot: key for slot in slots if (key := self.keys[slot]) is not None}

    def leave(self, slot: int) -> None:
        """Note that a slot holds nothing any more; its key has another one by now."""
        self.keys[slot] = None
        self.used_at_ns[slot] = 0
        self.foreign.discard(slot)
        if self._idle is not None:
            self._idle[slot] = self._candidates[slot] = 0

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

    def is_live(self, slot: int) -> bool:
        """Say whether what a slot of ours holds was stored or used since the start."""
        return slot not in self.foreign and not (self._idle is not None and self._idle[slot])

    def idle(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the idle slots and their last uses, for another thread to sort."""
        assert self._idle is not None
        slots = np.flatnonzero(np.frombuffer(bytes(self._idle), dtype=np.uint8))
        return slots, np.array(self.used_at_ns, dtype=np.int64)[slots]

    def end_idle(self, slots: NDArray[np.int64]) -> list[int]:
        """Return those of the slots that are still idle, in the same order; from now on they are not."""
        assert self._idle is not None
        flags = np.frombuffer(self._idle, np.uint8)
        still = slots[flags[slots] == 1]
        flags[still] = 0
        ended: list[int] = still.tolist()
        return ended

    def scan_ended(self) -> None:
        """Free the memory that only the scan needed; no slot is idle."""
        assert not any(self._idle or b"")
        self._idle, self._candidates = None, bytearray()

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
        """Return the slots in use now, for another thread to write down: some 10 ms a million slots."""
        return Snapshot(list(self.keys), self.sequences[:], self.used_at_ns[:], frozenset(self.foreign))


def newest_first(slots: NDArray[np.int64], used_at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort slots by their last use. Takes half a second for five million, and lets other threads run."""
    return slots[np.argsort(used_at_ns, kind="stable")[::-1]]


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
        """Have all slots of a file be free no more, nor ever again."""
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
    """Slots whose footers say what is true no more, until they are overwritten or wiped, and which wait for that.

    After a restart, footers are all that is known. So a chunk is not evicted, and does not count as deleted, while an
    older chunk of its key is still on the disk. That one would come back.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[OffloadKey, ...]] = {}  # A failed store may leave what was there, or its own.
        self._slots: dict[OffloadKey, tuple[int, ...]] = {}
        self._due: dict[int, None] = {}
        self._taken: set[int] = set()  # Of whoever wipes them.

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._slots

    def keys(self) -> Iterable[OffloadKey]:
        return self._slots.keys()

    def mark(self, slot: int, key: OffloadKey) -> None:
        """Note that a slot has an outdated chunk of this key, or may have one."""
        keys = self._keys.get(slot, ())
        if key not in keys:
            self._keys[slot] = (*keys, key)
            self._slots[key] = (*self._slots.get(key, ()), slot)

    def retire(self, slot: int, key: OffloadKey | None) -> None:
        """Have a slot wiped; None: its content is unknown."""
        if key is not None:
            self.mark(slot, key)
        self._due[slot] = None

    def is_marked(self, slot: int) -> bool:
        return slot in self._keys

    def clear(self, slot: int) -> None:
        """Note that nothing outdated is in a slot any more."""
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
        """Note that slots could not be wiped."""
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
