"""The catalog: which slots are free, held, or under way from one to the other. Owned by the loop's thread.

A slot is free (its footer is zeros), under way (a store has it), held (it has a key's newest chunk), or outdated. After
the scan it is exact: it has the keys whose footers were read or written, and any other key is absent. During the scan,
slots are held by candidates, too: chunks that the checkpoint names. Nothing is decided by a candidate, and its slot is
neither written nor wiped until its footer has been read. Slots of another process's segments are held at most.
"""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import Advice, InventoryQueue, OffloadKey
from kvtier.policies import HintedOrder, KeyOrder, LinkedLRU, NumberOrder, Policy
from kvtier_backends.fs.disk.claims import InUse
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.segments.slots import FreeSlots, Held, Outdated, Recalled, Slots, Snapshot, newest_first

IDLE_BATCH = 32_768  # Some 5 ms of the loop.


class Catalog:
    """The slots of each key, and the order in which chunks go."""

    def __init__(self, policy: Policy[OffloadKey] | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Know nothing. `policy`: None for LRU."""
        self.segments = Segments()
        self.free = FreeSlots()
        self.outdated = Outdated()
        self.in_use = InUse()
        self.scanning = True
        self._slots = Slots()
        self.inventory = InventoryQueue(self._slots.of)
        self.idle_batch = IDLE_BATCH if policy is None else sys.maxsize
        """Idle slots to order at once. Other orders than LRU take the coldest first, so all at once."""
        self._order: NumberOrder = (
            LinkedLRU(0) if policy is None else KeyOrder(policy, self._slots.keys, self._slots.of.get)
        )
        self._hinted: HintedOrder[int] | None = None  # The same order, from the first hint on.
        self._clock = clock
        self._under_way: set[int] = set()
        self._last_sequence = 0

    def __len__(self) -> int:
        return len(self._slots.of)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._slots.of

    @property
    def slots(self) -> int:
        """How many slots there are, or were: the number of the next."""
        return len(self._slots.keys)

    def slot(self, key: OffloadKey) -> int | None:
        """Return where a key's chunk is; None if there is none."""
        return self._slots.of.get(key)

    def sequence(self, slot: int) -> int:
        """Return the number of the last chunk that a slot has held. No later chunk of the slot has it."""
        return self._slots.sequences[slot]

    def snapshot(self) -> Snapshot:
        """Return the chunks that are there now, for another thread to write down."""
        return self._slots.snapshot()

    def is_foreign(self, slot: int) -> bool:
        """Say whether a held slot is another process's: read, and nothing else."""
        return slot in self._slots.foreign

    def is_candidate(self, slot: int) -> bool:
        """Return True if the checkpoint alone says what a slot holds."""
        return self._slots.is_candidate(slot)

    def has_candidate(self, keys: Iterable[OffloadKey]) -> bool:
        """Return True if the checkpoint alone says where the chunk of one of these keys is."""
        slots = map(self._slots.of.get, keys) if self.scanning else ()
        return any(slot is not None and self.is_candidate(slot) for slot in slots)

    def unsettled(self) -> list[int]:
        """Return the slots of which a footer may say something else than this."""
        return [*self._under_way, *self.outdated.slots()]

    def add(self, count: int) -> int:
        """Take in so many slots, none of them free yet; return the first one's number."""
        first = self._slots.add(count)
        self._order.grow(self.slots)
        return first

    def take_free(self, count: int) -> list[int]:
        """Give out so many free slots, or as many as there are, to be written to."""
        taken = self.free.take(count)
        self._under_way.update(taken)
        return taken

    def evict(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out up to so many slots of chunks that go for it; the consumer hears of them."""
        if self.scanning:
            return []  # An older chunk of the same key may lie where nobody has looked yet.
        slots = self._victims(count, incoming)
        for slot in slots:
            key = self._slots.keys[slot]
            assert key is not None, slot
            self._slots.forget(key)
            self.outdated.mark(slot, key)
            self._under_way.add(slot)
            self.inventory.lost(key)
        return sorted(slots)

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

    def stored(self, key: OffloadKey, slot: int, sequence: int, used_at_ns: int) -> None:
        """Note a chunk that was written to a slot that was given out: for the order, a use.

        `sequence` tells which of two chunks is the newer, and is no time: it never falls, whatever the clock does.
        """
        self._under_way.discard(slot)
        self.outdated.clear(slot)
        old = self._slots.of.get(key)
        if old is not None and self._slots.sequences[old] > sequence and not self.is_candidate(old):
            self.outdated.retire(slot, key)
            return
        was_live = old is not None and self._slots.is_live(old)
        self._slots.hold(Held(key, slot, sequence, used_at_ns))
        if old is not None and was_live:
            self._order.move(old, slot)
        else:
            self._order.insert((slot,))
        if old is not None:
            self._leave(old, key)

    def used(self, keys: Iterable[OffloadKey], now_ns: int) -> None:
        """Note that those keys, in prefix order, that are known were used together: the head is the newest."""
        slots, first_used = self._renew(keys, now_ns)
        if first_used:
            others = set(first_used)
            self._order.touch([slot for slot in slots if slot not in others])
            self._order.rank(slots)
        else:
            self._order.touch(slots)

    def advise(self, advice: Advice[OffloadKey], now_ns: int, retained_max: int) -> None:
        """Apply advice to those of its keys that are known. All but a demotion renews their recency."""
        hinted = self._take_hints() if advice.is_hint else None
        if advice.kind == "demote":
            known = (self._slots.of.get(key) for key in dict.fromkeys(advice.keys))
            slots = [slot for slot in known if slot is not None and self._slots.is_live(slot)]
        else:
            slots, _ = self._renew(advice.keys, now_ns)
        if hinted is None:
            self._order.rank(slots)
        else:
            hinted.retained.keys_max = retained_max
            hinted.advise(advice.of(slots), self._clock())

    @property
    def retentions_cut(self) -> int:
        """How many chunks were to be retained and were not, or not for all their time."""
        return 0 if self._hinted is None else self._hinted.retained.cut

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks, and have their slots wiped."""
        for key in keys:
            if key in self._slots.of:
                self._drop(key)

    def lost(self, key: OffloadKey) -> None:
        """Forget a chunk that turned out to be none; the consumer hears of it."""
        self._drop(key)
        self.inventory.lost(key)

    def unused_since(self, before_ns: int) -> list[OffloadKey]:
        """Return the keys whose last use was before that time and that nothing keeps."""
        return [key for key in self._slots.unused_since(before_ns) if not self._is_kept(key)]

    def recall(self, chunks: Recalled) -> None:
        """Hold the chunks that a checkpoint names. What a store has brought since is newer than a candidate."""
        added, others = self._slots.recall(chunks)
        self._last_sequence = max(self._last_sequence, int(chunks.sequences.max()))
        for key in added:
            self.inventory.added(key)
        for index in others:
            if not chunks.candidates[index] and self._slots.keys[chunks.slots[index]] is None:
                self.found(chunks.held(index))

    def looked(self, first: int, count: int, chunks: Iterable[Held]) -> None:
        """Correct what the checkpoint said of a range of slots by all chunks that their footers name."""
        candidates = self._slots.end_candidates(first, count)
        for chunk in chunks:
            if candidates.get(chunk.slot) == chunk.key and self.sequence(chunk.slot) == chunk.sequence:
                del candidates[chunk.slot]
        for key in candidates.values():
            self._release(key)
            self.inventory.lost(key)
        for chunk in chunks:
            if self._slots.keys[chunk.slot] is None:
                self.found(chunk)

    def found(self, chunk: Held, *, foreign: bool = False) -> None:
        """Note the footer of a slot that no store has been given since the start."""
        key, slot, sequence, _ = chunk
        self._last_sequence = max(self._last_sequence, sequence)
        old = self._slots.of.get(key)
        if old is not None and self._slots.sequences[old] >= sequence and not self.is_candidate(old):
            if foreign:
                self._slots.sequences[slot] = sequence  # For `take_over`: this chunk was known.
            else:
                self.outdated.retire(slot, key)
            return
        if old is not None:
            if self._slots.is_live(old):
                self._order.remove((old,))  # Not used with this content; what it was used for is outdated.
            self._leave(old, key)
        if foreign:
            self._slots.hold(chunk)
            self._slots.foreign.add(slot)
        elif self.scanning:
            self._slots.hold_idle(chunk)
        else:
            self._slots.hold(chunk)
            self._order.insert_coldest((slot,))
        self.inventory.added(key)

    def take_over(self, first: int, count: int, chunks: Sequence[Held]) -> None:
        """Own a range of slots that another process wrote until now, by all chunks that their footers name.

        A chunk that was known and has been deleted or replaced since does not come back.
        """
        slots, named = self._slots, {chunk.slot: chunk for chunk in chunks}
        kept: list[Held] = []
        for slot in range(first, first + count):
            key, chunk = slots.keys[slot], named.get(slot)
            if key is not None and chunk is not None and (key, slots.sequences[slot]) == (chunk.key, chunk.sequence):
                kept.append(named.pop(slot))
            elif key is not None:
                self._release(key)
                self.inventory.lost(key)
        slots.foreign.difference_update(chunk.slot for chunk in kept)
        self._order.insert_coldest([chunk.slot for chunk in sorted(kept, key=attrgetter("sequence"), reverse=True)])
        for slot, chunk in named.items():
            if slots.sequences[slot] == chunk.sequence:
                self.outdated.retire(slot, chunk.key)
            else:
                self.found(chunk)

    def idle(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the slots of chunks that were not used since the start, and their last uses."""
        return self._slots.idle()

    def order_idle(self, slots: NDArray[np.int64]) -> None:
        """Insert chunks that were not used since the start below all others in the order, the newest first."""
        self._order.insert_coldest(self._slots.end_idle(slots))

    def scan_ended(self, *, complete: bool) -> None:
        """Note that every footer has been seen, and from now on chunks may go for room.

        `complete`: a key that is not known is absent.
        """
        self.order_idle(newest_first(*self.idle()))
        self._slots.scan_ended()
        self.scanning = False
        self.inventory.scan_ended(complete=complete)

    def coldest(self) -> OffloadKey | None:
        """Return the key that was used longest ago of those that may go."""
        return self._slots.coldest(self._is_kept)

    def clear_range(self, first: int, count: int) -> int | None:
        """Forget the slots of a file that is to be removed, and their chunks, and return how many chunks there were.

        None, and nothing is changed, if something keeps one of them.
        """
        end = first + count
        keys = [key for key in self._slots.keys[first:end] if key is not None]
        if any(map(self._is_kept, keys)) or any(first <= slot < end for slot in self.unsettled()):
            return None
        for key in keys:
            self._release(key)
            self.inventory.lost(key)
        self.free.drop(first, count)
        return len(keys)

    def abandon(self, first: int, count: int) -> bool:
        """Forget the chunks of slots whose file is lost, but for chunks that calls use; True when none is left.

        None of them is given out any more.
        """
        self.free.drop(first, count)
        end, left = first + count, False
        for key in self._slots.keys[first:end]:
            if key is not None and key in self.in_use:
                left = True
            elif key is not None:
                self._release(key)
                self.inventory.lost(key)
        return not left and not any(first <= slot < end for slot in self.unsettled())

    def _take_hints(self) -> HintedOrder[int]:
        if self._hinted is None:
            self._hinted = HintedOrder(self._order, 0, self._clock)
            self._order = self._hinted
        return self._hinted

    def _is_kept(self, key: OffloadKey) -> bool:
        return key in self.in_use or key in self.outdated

    def _keeps(self, slot: int) -> bool:
        key = self._slots.keys[slot]
        return key is not None and (key in self.in_use or key in self.outdated)

    def _victims(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Choose up to so many slots, and have them in the order no more."""
        own = len(self._slots.of) - len(self._slots.foreign)
        wanted = min(count, own)
        victims = self._order.evict(wanted, self._keeps, incoming) if wanted else []
        if victims is None:  # Then there are hardly more of them than calls have chunks.
            kept = {*self.in_use, *self.outdated.keys()} & self._slots.of.keys()
            wanted = min(count, own - sum(not self.is_foreign(self._slots.of[key]) for key in kept))
            victims = self._order.evict(wanted, self._keeps, incoming) if wanted > 0 else []
        return victims or []  # None, though there are enough: a policy that never evicts. Then there is no room.

    def _renew(self, keys: Iterable[OffloadKey], now_ns: int) -> tuple[list[int], list[int]]:
        """Note the last use of known keys; return their slots, and which were used for the first time since the start.

        These are in the order from then on.
        """
        slots, foreign = self._slots, self._slots.foreign
        known = [slot for key in dict.fromkeys(keys) if (slot := slots.of.get(key)) is not None and slot not in foreign]
        first_used = [slot for index, slot in enumerate(known) if slots.use(slot, now_ns - index)]
        if first_used:
            self._order.insert(first_used)
        return known, first_used

    def _leave(self, slot: int, key: OffloadKey) -> None:
        """Have nothing held in a slot whose key gets another."""
        if slot not in self._slots.foreign and not self.is_candidate(slot):
            self.outdated.retire(slot, key)
        self._slots.leave(slot)

    def _release(self, key: OffloadKey) -> int:
        """Forget a key, in the order, too; return where it was."""
        slot = self._slots.of[key]
        if self._slots.is_live(slot):
            self._order.remove((slot,))
        return self._slots.forget(key)

    def _drop(self, key: OffloadKey) -> None:
        slot = self._slots.of[key]
        stays = slot in self._slots.foreign or self.is_candidate(slot)
        self._release(key)
        if not stays:
            self.outdated.retire(slot, key)
