"""The space that all namespaces of a root, or of a pool of memory, share: one capacity, and the coldest chunk goes."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from kvtier.backend import Lanes, in_thread
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.segments.folder import Stranger

CLAIM_S = 1.0  # Between two looks for colder chunks of other namespaces: some milliseconds a million chunks.


class Sharer(Protocol):
    """One namespace's part of the space."""

    @property
    def segment_bytes(self) -> int: ...

    def coldest_at_ns(self) -> int | None:
        """Return when the chunk that was used longest ago was used; None if none may go now."""
        ...

    async def remove_coldest(self) -> bool:
        """Remove the segment with that chunk; False if none may go."""
        ...


class Space:
    """The rooms of one root. Belongs to the loop's thread."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.changing = asyncio.Lock()  # Held while segments are made or removed.
        self.opened: set[str] = set()  # Names of segments that a catalog has.
        self.strangers: list[Stranger] = []
        """Segments that no catalog has, the oldest first. They go before any chunk."""
        self._rooms: list[Sharer] = []
        self._claim_at_s = 0.0
        capacity.count(self)

    @property
    def used_bytes(self) -> int:
        return sum(stranger.allocated_bytes for stranger in self.strangers)

    def enter(self, room: Sharer) -> None:
        self._rooms.append(room)

    def note(self, strangers: Sequence[Stranger]) -> None:
        self.strangers = [stranger for stranger in strangers if stranger.name not in self.opened]

    def open(self, name: str) -> None:
        self.opened.add(name)
        self.strangers = [stranger for stranger in self.strangers if stranger.name != name]

    @property
    def segment_bytes_most(self) -> int | None:
        """The most that a segment may take where namespaces may have to give segments to each other."""
        limit_bytes = self.capacity.limit_bytes
        return None if limit_bytes is None or len(self._rooms) < 2 else limit_bytes // 32

    async def remove_stranger(self, lanes: Lanes, remove: Callable[[str], bool]) -> bool:
        """Remove the oldest stranger that may go; `remove` does it, in a lane. Return False if none may."""
        for stranger in list(self.strangers):
            removed = False
            with suppress(OSError):  # Then it takes its room still.
                removed = await in_thread(lanes, remove, stranger.name)
            if removed:
                self.strangers.remove(stranger)
                return True
        return False

    def giver(self, taker: Sharer) -> Sharer | None:
        """Return the room that gives up a segment for another: it has more than its part, and the coldest chunk."""
        if len(self._rooms) < 2 or time.monotonic() < self._claim_at_s:
            return None
        self._claim_at_s = time.monotonic() + CLAIM_S
        part_bytes = (self.capacity.limit_bytes or 0) // len(self._rooms)
        coldest = self.coldest([room for room in self._rooms if room is taker or room.segment_bytes > part_bytes])
        return None if coldest is taker else coldest

    def coldest(self, rooms: Sequence[Sharer] | None = None) -> Sharer | None:
        """Return the room, of these or of all, whose coldest chunk was used longest ago."""
        known = [
            (used_at_ns, room) for room in rooms or self._rooms if (used_at_ns := room.coldest_at_ns()) is not None
        ]
        return min(known, key=lambda pair: pair[0])[1] if known else None
