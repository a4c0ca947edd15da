"""Which slots are free, held and on their way from one to the other: plain memory, owned by the loop's thread.

A slot is free (its footer is zeros), under way (a store has it), held (it has a key's newest chunk), or outdated. Only
what has been read from a footer, or written as one, is in here, so that it is exact: a key that is not in here after
the scan is absent. Slots of another process's segments are held at most.
"""

from collections.abc import Iterable, Sequence

from kvtier.backend import OffloadKey
from kvtier.policies import Policy
from kvtier_backends.fs.disk.news import InUse, News
from kvtier_backends.fs.segments.free_slots import FreeSlots
from kvtier_backends.fs.segments.slots import Held, LRUOrder, PolicyOrder, SlotOrder, Slots, Snapshot

# Slots whose footers say what is true no more, until they are overwritten or wiped.
#
# After a restart, footers are all that is known. So a chunk may not go for room, nor count as deleted, as long as an
# older one of its key still lies on the disk: that one would come back.


class Outdated:
    """Which they are, and which of them wait to be wiped. Plain memory."""

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
        """Have a slot wiped; None: nobody knows what is in it."""
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
        """Return the slots that wait to be wiped, for whoever does it now and then says of each how it ended."""
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


class Catalog:
    """Keys, slots, and who goes next."""

    def __init__(self, policy: Policy[OffloadKey] | None) -> None:
        """Know nothing. `policy`: None for LRU."""
        self.free = FreeSlots()
        self.outdated = Outdated()
        self.in_use = InUse()
        self.scanning = True
        self._slots = Slots()
        self.news = News(self._slots.of)
        self._order: SlotOrder = LRUOrder(self._slots.keys) if policy is None else PolicyOrder(policy)
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
        """Return the number of the last chunk that a slot has held: what tells it from any that it gets later."""
        return self._slots.sequences[slot]

    def snapshot(self) -> Snapshot:
        """Return what is there now, for another thread to write down."""
        return self._slots.snapshot()

    def is_foreign(self, slot: int) -> bool:
        """Say whether a held slot is another process's: read, and nothing else."""
        return slot in self._slots.foreign

    def unsettled(self) -> list[int]:
        """Return the slots of which a footer may say something else than this."""
        return [*self._under_way, *self.outdated.slots()]

    def add(self, count: int) -> int:
        """Take in so many slots, none of them free yet; return the first one's number."""
        return self._slots.add(count)

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
        slots = sorted(self._slots.of[key] for key in victims)
        for key in victims:
            slot = self._slots.forget(key)
            self.outdated.mark(slot, key)
            self._under_way.add(slot)
            self.news.lost(key)
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

    def stored(self, key: OffloadKey, slot: int, sequence: int, used_at_ns: int) -> None:
        """Note a chunk that was written to a slot that was given out: for the order, a use.

        `sequence` tells which of two chunks is the newer, and is no time: it never falls, whatever the clock does.
        """
        self._under_way.discard(slot)
        self.outdated.clear(slot)
        old = self._slots.of.get(key)
        if old is not None and self._slots.sequences[old] > sequence:
            self.outdated.retire(slot, key)
            return
        if old is None or not self._slots.is_live(old):
            self._order.insert(key, slot)
        else:
            self._order.move(key, old, slot)
        if old is not None:
            self._leave(old, key)
        self._slots.hold(Held(key, slot, sequence, used_at_ns))

    def used(self, key: OffloadKey, used_at_ns: int) -> None:
        """Note that a chunk was used, if it is known."""
        slot = self._slots.of.get(key)
        if slot is None or slot in self._slots.foreign:
            return
        if self._slots.use(slot, used_at_ns):
            self._order.insert(key, slot)
        else:
            self._order.touch(key, slot)

    def rank(self, keys: Iterable[OffloadKey], now_ns: int) -> None:
        """Renew the recency of those keys, in prefix order, that are known: used together, the head is the newest."""
        slots = self._slots
        known = [(key, slot) for key in dict.fromkeys(keys) if (slot := slots.of.get(key)) is not None]
        ranked: list[tuple[OffloadKey, int]] = []
        for place, (key, slot) in reversed(list(enumerate(known))):
            if slot in slots.foreign:
                continue
            if slots.use(slot, now_ns - place):
                self._order.insert(key, slot)
            ranked.append((key, slot))
        self._order.rank(ranked[::-1])

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks, and have their slots wiped."""
        for key in keys:
            if key in self._slots.of:
                self._drop(key)

    def lost(self, key: OffloadKey) -> None:
        """Forget a chunk that turned out to be none; the consumer hears of it."""
        self._drop(key)
        self.news.lost(key)

    def unused_since(self, before_ns: int) -> list[OffloadKey]:
        """Return the keys whose last use was before that time and that nothing keeps."""
        return [key for key in self._slots.unused_since(before_ns) if not self._is_kept(key)]

    def found(self, chunk: Held, *, foreign: bool = False) -> None:
        """Note what a footer says, of a slot that nobody has been given since the start."""
        key, slot, sequence, _ = chunk
        self._last_sequence = max(self._last_sequence, sequence)
        old = self._slots.of.get(key)
        if old is not None and self._slots.sequences[old] >= sequence:
            if not foreign:
                self.outdated.retire(slot, key)
            return
        if old is not None:
            if self._slots.is_live(old):
                self._order.remove(key, old)  # Not used with this content; what it was used for is outdated.
            self._leave(old, key)
        if foreign:
            self._slots.hold(chunk)
            self._slots.foreign.add(slot)
        else:
            self._slots.hold_idle(chunk)
        self.news.added(key)

    def scan_ended(self, *, complete: bool) -> None:
        """Note that every footer has been seen, and from now on chunks may go for room.

        `complete`: what is not known is absent.
        """
        self._order.settle(self._slots.end_idle())
        self.scanning = False
        self.news.complete = complete

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
            self.news.lost(key)
        self.free.drop(first, count)
        return len(keys)

    def abandon(self, first: int, count: int) -> bool:
        """Forget what lies in slots whose file is lost, but for what calls are at; True when nothing is left there.

        None of them is given out any more.
        """
        self.free.drop(first, count)
        end, left = first + count, False
        for key in self._slots.keys[first:end]:
            if key is not None and key in self.in_use:
                left = True
            elif key is not None:
                self._release(key)
                self.news.lost(key)
        return not left and not any(first <= slot < end for slot in self.unsettled())

    def _is_kept(self, key: OffloadKey) -> bool:
        return key in self.in_use or key in self.outdated

    def _kept(self) -> int:
        return sum(key in self._slots.of for key in {*self.in_use, *self.outdated.keys()})

    def _leave(self, slot: int, key: OffloadKey) -> None:
        """Have nothing held in a slot whose key gets another."""
        if slot not in self._slots.foreign:
            self.outdated.retire(slot, key)
        self._slots.leave(slot)

    def _release(self, key: OffloadKey) -> int:
        """Forget a key, in the order, too; return where it was."""
        slot = self._slots.of[key]
        if self._slots.is_live(slot):
            self._order.remove(key, slot)
        return self._slots.forget(key)

    def _drop(self, key: OffloadKey) -> None:
        foreign = self._slots.of[key] in self._slots.foreign
        slot = self._release(key)
        if not foreign:
            self.outdated.retire(slot, key)
