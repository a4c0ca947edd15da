"""The catalog: which slots are free, held, or in flight from one to the other. Owned by the loop's thread.

A slot is free (its footer is zeros), in flight (a store has it), held (it has a key's newest chunk), or outdated. After
the scan it is exact: it has the keys whose footers were read or written, and any other key is absent. During the scan,
slots are held by candidates, too: chunks that the checkpoint names. Nothing is decided by a candidate, and its slot is
neither written nor wiped until its footer has been read. Slots of another process's segments are held at most.
"""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, filterfalse

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import Advice, OffloadKey
from kvtier.policies import Policy
from kvtier_backends.fs.disk.claims import InUse
from kvtier_backends.fs.index import ChunkIndex
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.segments.slots import FreeSlots, Outdated, Recalled, SlotEntry, Snapshot


class Catalog:
    """The slots of each key, and the order in which chunks go."""

    def __init__(self, policy: Policy[OffloadKey] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty. `policy`: None for LRU."""
        self.segments = Segments()
        self.free = FreeSlots()
        self.outdated = Outdated()
        self.in_use = InUse()
        self.scanning = True
        self.index = ChunkIndex(policy, clock)
        self.inventory = self.index.inventory
        self._of = self.index.of
        self._keys = self.index.keys
        self._sequences = array("Q")  # By slot: of the last chunk that was there, if there is none now.
        self._candidates = bytearray()  # By slot: held if the checkpoint is right; empty after the scan.
        self._in_flight: set[int] = set()
        self._last_sequence = 0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._of

    def slot(self, key: OffloadKey) -> int | None:
        """Return where a key's chunk is; None if there is none."""
        return self._of.get(key)

    def sequence(self, slot: int) -> int:
        """Return the number of the last chunk that a slot has held. No later chunk of the slot has it."""
        return self._sequences[slot]

    def snapshot(self) -> Snapshot:
        """Return the slots in use now, for another thread to write down: some 10 ms a million slots."""
        index = self.index
        return Snapshot(list(self._keys), self._sequences[:], index.used_at_ns[:], frozenset(index.foreign))

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
        """Return the slots whose footers may differ from the catalog."""
        return [*self._in_flight, *self.outdated.slots()]

    def add(self, count: int) -> int:
        """Add `count` slots, none of them free yet; return the number of the first."""
        self._sequences.extend([0] * count)
        if self.scanning:
            self._candidates.extend(bytes(count))
        return self.index.add(count)

    # Slots for stores.

    def take_free(self, count: int) -> list[int]:
        """Give out up to `count` free slots to write to."""
        taken = self.free.take(count)
        self._in_flight.update(taken)
        return taken

    def evict(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out up to `count` slots of chunks that go for it, and report these as removed."""
        if self.scanning:
            return []  # An older chunk of the same key may lie in a segment that is not read yet.
        outdated = filterfalse(self.in_use.__contains__, self.outdated.keys())
        slots = self.index.evict(count, self._keeps, chain(self.in_use, outdated), incoming)
        for slot in slots:
            key = self.index.forget(slot)
            self.outdated.mark(slot, key)
            self._in_flight.add(slot)
            self.inventory.lost(key)
        return sorted(slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """Take back slots that were given out and not written to."""
        for slot in slots:
            self._in_flight.discard(slot)
            if self.outdated.is_marked(slot):
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
            if self._sequences[old] > sequence and not self.is_candidate(old):
                self.outdated.retire(slot, key)
                return
            self._retire(old, key)
        self._sequences[slot] = sequence
        self.index.store(key, slot, used_at_ns)

    # Uses and removals.

    def used(self, keys: Iterable[OffloadKey], now_ns: int) -> None:
        """Count a use of those keys, in prefix order, that are known: used together, the head is the newest."""
        self.index.use(keys, now_ns)

    def advise(self, advice: Advice[OffloadKey], now_ns: int, retained_max: int) -> None:
        """See `ChunkIndex`."""
        self.index.advise(advice, now_ns, retained_max)

    @property
    def retentions_cut(self) -> int:
        return self.index.retentions_cut

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
        """Return the slot that was used longest ago of those that may go."""
        return self.index.coldest(self._keeps)

    def clear_range(self, first: int, count: int) -> int | None:
        """Forget the slots of a file that is to be removed, and their chunks; return how many chunks there were.

        None, and nothing is changed, if a call uses one of them.
        """
        end = first + count
        keys = [key for key in self._keys[first:end] if key is not None]
        if any(map(self._is_kept, keys)) or any(first <= slot < end for slot in self.unsettled()):
            return None
        for key in keys:
            self._forget(key)
            self.inventory.lost(key)
        self.free.drop(first, count)
        return len(keys)

    def abandon(self, first: int, count: int) -> bool:
        """Forget the chunks of slots whose file is lost, except those that calls use; True when none is left.

        None of the slots is given out any more.
        """
        self.free.drop(first, count)
        end, left = first + count, False
        for key in self._keys[first:end]:
            if key is not None and key in self.in_use:
                left = True
            elif key is not None:
                self._forget(key)
                self.inventory.lost(key)
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
        np.frombuffer(self._sequences, np.uint64)[slots] = chunks.sequences[taken]
        np.frombuffer(self._candidates, np.uint8)[slots] = chunks.candidates[taken]
        self._last_sequence = max(self._last_sequence, int(chunks.sequences.max()))
        for place in others:
            if not chunks.candidates[place] and held[chunks.slots[place]] is None:
                self.found(chunks.entry(place))

    def looked(self, first: int, count: int, chunks: Iterable[SlotEntry]) -> None:
        """Correct the candidates in a range of slots by all chunks that their footers name."""
        candidates = self._end_candidates(first, count)
        for chunk in chunks:
            if candidates.get(chunk.slot) == chunk.key and self._sequences[chunk.slot] == chunk.sequence:
                del candidates[chunk.slot]
        for key in candidates.values():
            self._forget(key)
            self.inventory.lost(key)
        for chunk in chunks:
            if self._keys[chunk.slot] is None:
                self.found(chunk)

    def found(self, chunk: SlotEntry, *, foreign: bool = False) -> None:
        """Record the footer of a slot that no store has been given since the start."""
        key, slot, sequence, used_at_ns = chunk
        self._last_sequence = max(self._last_sequence, sequence)
        old = self._of.get(key)
        if old is not None and self._sequences[old] >= sequence and not self.is_candidate(old):
            if foreign:
                self._sequences[slot] = sequence  # For `take_over`: this chunk was known.
            else:
                self.outdated.retire(slot, key)
            return
        if old is not None:
            self._drop(key)  # Not used with this content: its uses are those of an outdated chunk.
        self._sequences[slot] = sequence
        self.index.hold(key, slot, used_at_ns, foreign=foreign)
        self.inventory.added(key)

    def take_over(self, first: int, count: int, chunks: Sequence[SlotEntry]) -> None:
        """Own a range of slots that another process wrote until now, by all chunks that their footers name.

        A chunk that was known and has been deleted or replaced since does not come back.
        """
        named = {chunk.slot: chunk for chunk in chunks}
        for slot in range(first, first + count):
            key, chunk = self._keys[slot], named.get(slot)
            if key is not None and chunk is not None and (key, self._sequences[slot]) == (chunk.key, chunk.sequence):
                del named[slot]
                self.index.own(slot)
            elif key is not None:
                self._forget(key)
                self.inventory.lost(key)
        for slot, chunk in named.items():
            if self._sequences[slot] == chunk.sequence:
                self.outdated.retire(slot, chunk.key)
            else:
                self.found(chunk)

    def scan_ended(self, *, complete: bool) -> None:
        """Record that every footer has been seen; from now on chunks may go for room.

        `complete`: a key that is not known is absent.
        """
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
        """Mark a slot whose chunk goes to be wiped, if it is ours and its footer is known."""
        if self.is_candidate(slot):
            self._candidates[slot] = 0
        elif slot not in self.index.foreign:
            self.outdated.retire(slot, key)

    def _forget(self, key: OffloadKey) -> None:
        slot = self._of[key]
        if self._candidates:
            self._candidates[slot] = 0
        self.index.remove(slot)

    def _drop(self, key: OffloadKey) -> None:
        slot = self._of[key]
        self._retire(slot, key)
        self.index.remove(slot)
