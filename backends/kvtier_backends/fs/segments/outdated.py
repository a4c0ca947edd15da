"""Slots whose footers say what is true no more, until they are overwritten or wiped.

After a restart, footers are all that is known. So a chunk may not go for room, nor count as deleted, as long as an
older one of its key still lies on the disk: that one would come back.
"""

from collections.abc import Iterable

from kvtier.keys import OffloadKey


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
