"""The table of slots: which slots are free, held, or in flight from one to the other. Owned by the loop's thread.

A slot is free (its footer is zeros), in flight (a store has it), held (it has a key's newest chunk), or outdated. After
the scan it is exact: it has the keys whose footers were read or written, and any other key is absent. During the scan,
slots are held by candidates, too: chunks that the checkpoint names. Nothing is decided by a candidate, and its slot is
neither written nor wiped until its footer has been read. Slots of another process's segments are held at most.
"""

import time
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, filterfalse
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import OffloadKey
from kvtier.policies import Policy
from kvtier_backends.fs.index import ChunkIndex, InUse
from kvtier_backends.fs.segments.segment import Segments

HEAP_SLACK = 64  # Outdated entries are left in the heap until there are more of them than of others, and this many.


class SlotEntry(NamedTuple):
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
        for slot, key in enumerate(self.keys):
            if key is not None and slot not in self.foreign:
                yield SlotEntry(key, slot, self.sequences[slot], self.used_at_ns[slot])


class FreeSlots:
    """A set of numbers, given out in runs: a job whose chunks lie together is one call to the disk.

    The longest run is given out first. Slots that are given back join their neighbours.
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

    A chunk is not evicted or deleted while an older one of its key is on the disk: a restart would bring that back.
    """

    def __init__(self) -> None:
        self._keys: dict[int, tuple[OffloadKey, ...]] = {}  # A failed store may leave what was there, or its own.
        self._slots: dict[OffloadKey, tuple[int, ...]] = {}
        self._due: dict[int, None] = {}
        self._taken: set[int] = set()  # Being wiped.

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._slots

    def keys(self) -> Iterable[OffloadKey]:
        return self._slots

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

    def clear(self, slot: int) -> None:
        self._taken.discard(slot)
        for key in self._keys.pop(slot, ()):
            if len(slots := self._slots.pop(key)) > 1:
                self._slots[key] = tuple(other for other in slots if other != slot)

    def has(self, slot: int) -> bool:
        return slot in self._keys

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
        return bool(self._due)

    def slots(self) -> list[int]:
        """Return all slots that are outdated, wait to be wiped or are just being wiped."""
        return list({*self._keys, *self._due, *self._taken})


class SlotTable:
    """The slots of each key, and the order in which chunks go."""

    def __init__(self, policy: Policy[OffloadKey] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.segments = Segments()
        self.free = FreeSlots()
        self.outdated = Outdated()
        self.in_use = InUse()
        self.scanning = True
        self.index = ChunkIndex(policy, clock)
        self.inventory = self.index.inventory
        self._of = self.index.of
        self._keys = self.index.keys
        self.sequences = array("Q")  # By slot: of the last chunk that it has held. No later chunk of the slot has it.
        self._candidates = bytearray()  # By slot: held if the checkpoint is right; empty after the scan.
        self._in_flight: set[int] = set()
        self._last_sequence = 0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._of

    def slot(self, key: OffloadKey) -> int | None:
        return self._of.get(key)

    def snapshot(self) -> Snapshot:
        """Return the slots in use now, for another thread to write down: some 10 ms a million slots."""
        index = self.index
        return Snapshot(list(self._keys), self.sequences[:], index.used_at_ns[:], frozenset(index.foreign))

    def is_foreign(self, slot: int) -> bool:
        """Return True if a held slot is another process's: it is read, and nothing else."""
        return slot in self.index.foreign

    def is_candidate(self, slot: int) -> bool:
        """Return True if the checkpoint alone says what a slot holds."""
        return bool(self._candidates) and self._candidates[slot] != 0

    def has_candidate(self, keys: Iterable[OffloadKey]) -> bool:
        """Return True if the checkpoint alone says where the chunk of one of these keys is."""
        slots = map(self._of.get, keys) if self.scanning else ()
        return any(slot is not None and self.is_candidate(slot) for slot in slots)

    def unsettled(self) -> list[int]:
        return [*self._in_flight, *self.outdated.slots()]

    def add(self, count: int) -> int:
        """Add `count` slots, none of them free yet; return the number of the first."""
        self.sequences.extend([0] * count)
        if self.scanning:
            self._candidates.extend(bytes(count))
        return self.index.add(count)

    def take_free(self, count: int) -> list[int]:
        taken = self.free.take(count)
        self._in_flight.update(taken)
        return taken

    def evict(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out up to `count` slots of chunks that go for it, and report these as removed."""
        if self.scanning:
            return []  # An older chunk of the same key may lie in a segment that is not read yet.
        outdated = filterfalse(self.in_use.__contains__, self.outdated.keys())
        slots = self.index.evict(count, self._keeps, chain(self.in_use, outdated), incoming)
        keys = list(map(self.index.forget, slots))
        for slot, key in zip(slots, keys, strict=True):
            self.outdated.mark(slot, key)
        self._in_flight.update(slots)
        self.inventory.lost(*keys)
        return sorted(slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """Take back slots that were given out and not written to."""
        for slot in slots:
            self._in_flight.discard(slot)
            if self.outdated.has(slot):
                self.outdated.retire(slot, None)
            else:
                self.free.add(slot)

    def failed(self, key: OffloadKey, slot: int) -> None:
        """Take back a slot in which a chunk of this key may be by now, though its store has failed."""
        self._in_flight.discard(slot)
        self.outdated.retire(slot, key)

    def next_sequences(self, count: int, now_ns: int) -> int:
        """Reserve sequence numbers and return the first: later ones are greater, whatever the clock does."""
        first = max(self._last_sequence + 1, now_ns)
        self._last_sequence = first + count - 1
        return first

    def stored(self, key: OffloadKey, slot: int, sequence: int, used_at_ns: int) -> None:
        """Record a chunk that was written to a slot that was given out: for the order, a use.

        `sequence` tells which of two chunks is the newer, and is no time: it never falls, whatever the clock does.
        """
        self._in_flight.discard(slot)
        self.outdated.clear(slot)
        old = self._of.get(key)
        if old is not None:
            if self.sequences[old] > sequence and not self.is_candidate(old):
                self.outdated.retire(slot, key)
                return
            self._retire(old, key)
        self.sequences[slot] = sequence
        self.index.store(key, slot, used_at_ns)

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks, and mark their slots to be wiped."""
        for key in keys:
            if key in self._of:
                self._drop(key)

    def lost(self, key: OffloadKey) -> None:
        """Forget a chunk that is not in its slot, and report it as removed."""
        self._drop(key)
        self.inventory.lost(key)

    def unused_since(self, before_ns: int) -> list[OffloadKey]:
        """Return the keys whose last use was before that time, except those that calls use."""
        keys = (self._keys[slot] for slot in self.index.unused_since(before_ns))
        return [key for key in keys if key is not None and not self._is_kept(key)]

    def coldest(self) -> int | None:
        return self.index.coldest(self._keeps)

    def clear_range(self, first: int, count: int) -> int | None:
        """Forget a file's slots and chunks; return how many. None, and nothing changes, if a call uses one of them."""
        end = first + count
        keys = [key for key in self._keys[first:end] if key is not None]
        if any(map(self._is_kept, keys)) or any(first <= slot < end for slot in self.unsettled()):
            return None
        for key in keys:
            self._forget(key)
        self.free.drop(first, count)
        return len(keys)

    def abandon(self, first: int, count: int) -> bool:
        """Forget a lost file's chunks, except those that calls use; return True when none is left."""
        self.free.drop(first, count)
        end, left = first + count, False
        for key in self._keys[first:end]:
            if key is not None and key in self.in_use:
                left = True
            elif key is not None:
                self._forget(key)
        return not left and not any(first <= slot < end for slot in self.unsettled())

    # The start-up scan, and segments that are taken over later.

    def recall(self, chunks: Recalled) -> None:
        """Hold the chunks that a checkpoint names. A chunk that was stored since is newer than a candidate."""
        of, held = self._of, self._keys
        others: list[int] = []
        for place, (key, slot) in enumerate(zip(chunks.keys, chunks.slots.tolist(), strict=True)):
            if key in of or held[slot] is not None:
                others.append(place)
            else:
                of[key] = slot
                held[slot] = key
                self.inventory.added(key)
        taken = np.delete(np.arange(len(chunks.keys)), others)
        slots = chunks.slots[taken]
        self.index.recall(slots, chunks.used_at_ns[taken])
        np.frombuffer(self.sequences, np.uint64)[slots] = chunks.sequences[taken]
        np.frombuffer(self._candidates, np.uint8)[slots] = chunks.candidates[taken]
        self._last_sequence = max(self._last_sequence, int(chunks.sequences.max()))
        for place in others:
            if not chunks.candidates[place] and held[chunks.slots[place]] is None:
                self.found(chunks.entry(place))

    def looked(self, first: int, count: int, chunks: Iterable[SlotEntry]) -> None:
        """Correct the candidates in a range of slots by all chunks that their footers name."""
        candidates = self._end_candidates(first, count)
        for chunk in chunks:
            if candidates.get(chunk.slot) == chunk.key and self.sequences[chunk.slot] == chunk.sequence:
                del candidates[chunk.slot]
        for key in candidates.values():
            self._forget(key)
        for chunk in chunks:
            if self._keys[chunk.slot] is None:
                self.found(chunk)

    def found(self, chunk: SlotEntry, *, foreign: bool = False) -> None:
        """Record the footer of a slot that no store has been given since the start."""
        key, slot, sequence, used_at_ns = chunk
        self._last_sequence = max(self._last_sequence, sequence)
        old = self._of.get(key)
        if old is not None and self.sequences[old] >= sequence and not self.is_candidate(old):
            if foreign:
                self.sequences[slot] = sequence  # For `take_over`: this chunk was known.
            else:
                self.outdated.retire(slot, key)
            return
        if old is not None:
            self._drop(key)  # Not used with this content: its uses are those of an outdated chunk.
        self.sequences[slot] = sequence
        self.index.hold(key, slot, used_at_ns, foreign=foreign)
        self.inventory.added(key)

    def take_over(self, first: int, count: int, chunks: Sequence[SlotEntry]) -> None:
        """Own another process's slots by their footers; a chunk deleted or replaced since does not come back."""
        named = {chunk.slot: chunk for chunk in chunks}
        for slot in range(first, first + count):
            key, chunk = self._keys[slot], named.get(slot)
            if key is not None and chunk is not None and (key, self.sequences[slot]) == (chunk.key, chunk.sequence):
                del named[slot]
                self.index.own(slot)
            elif key is not None:
                self._forget(key)
        for slot, chunk in named.items():
            if self.sequences[slot] == chunk.sequence:
                self.outdated.retire(slot, chunk.key)
            else:
                self.found(chunk)

    def scan_ended(self, *, complete: bool) -> None:
        """Let chunks go for room: every footer has been seen. `complete`: a key that is not known is absent."""
        self._candidates = bytearray()
        self.scanning = False
        self.inventory.scan_ended(complete=complete)

    def _end_candidates(self, first: int, count: int) -> dict[int, OffloadKey]:
        """Return the candidates in a range of slots, whose footers are known now. None of them is one any more."""
        if not count:
            return {}
        flags: NDArray[np.uint8] = np.frombuffer(self._candidates, np.uint8)[first : first + count]
        slots: list[int] = (np.flatnonzero(flags) + first).tolist()
        flags[:] = 0
        return {slot: key for slot in slots if (key := self._keys[slot]) is not None}

    def _is_kept(self, key: OffloadKey) -> bool:
        return key in self.in_use or key in self.outdated

    def _keeps(self, slot: int) -> bool:
        key = self._keys[slot]
        return key is not None and (key in self.in_use or key in self.outdated)

    def _retire(self, slot: int, key: OffloadKey) -> None:
        if self.is_candidate(slot):
            self._candidates[slot] = 0
        elif slot not in self.index.foreign:
            self.outdated.retire(slot, key)

    def _forget(self, key: OffloadKey) -> None:
        slot = self._of[key]
        if self._candidates:
            self._candidates[slot] = 0
        self.index.remove(slot)
        self.inventory.lost(key)

    def _drop(self, key: OffloadKey) -> None:
        slot = self._of[key]
        self._retire(slot, key)
        self.index.remove(slot)
