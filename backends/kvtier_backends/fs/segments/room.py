"""Makes room: by free slots first, then by more segments, then in place of chunks that go for it.

A chunk that goes costs nothing but a change in memory, so none goes before its slot is wanted. The file system's room
is taken a segment at a time and given back only when there is too much.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvtier.keys import OffloadKey
from kvtier.lend import Lanes, in_thread
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.failures import FULL
from kvtier_backends.fs.layout import until
from kvtier_backends.fs.quarantine import Cleared, Quarantine
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.checkpoint import RECORD_BYTES_MAX
from kvtier_backends.fs.segments.files import Segment, SegmentFiles, Unusable
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.segments.wiping import Wiping

logger = logging.getLogger(__name__)

SEGMENT_BYTES_LEAST = 16 << 20  # The first one's; each makes the tier twice as large,
SEGMENT_BYTES_MOST = 8 << 30  # up to this: 10 TiB are then some 1,300 open files.
SYNCED_BYTES_MOST = 64 << 20  # With fsync they are written all over first, for which stores wait.
FULL_PAUSE_S = 10.0  # A full disk is asked again after so long.
TICK_S = 10.0


class Growth:
    """A segment that a lane makes, known also to whoever is cancelled meanwhile."""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.is_full = False
        self.error: OSError | None = None  # Any other than that.

    def make(self, files: SegmentFiles, slots: int) -> None:
        """Make the largest that the disk has room for, up to so many slots. Blocks, in a lane."""
        while slots and self.segment is None:
            try:
                self.segment = files.create(slots)
            except OSError as error:
                if error.errno not in FULL:
                    self.error = error.with_traceback(None)
                    return
                self.is_full = True
                slots //= 2


class Room:
    """One tier's. Belongs to the loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        segments: Segments,
        files: SegmentFiles,
        wiping: Wiping,
        capacity: Capacity,
        quarantine: Quarantine,
        tally: Tally,
        *,
        lanes: Lanes,
        fsync: bool,
        ttl_s: float | None,
        clock_ns: Callable[[], int],
    ) -> None:
        """Make segments in these lanes."""
        self.unusable: list[Unusable] = []
        """Files in the segments' place that take room and hold nothing."""
        self.removed: list[Segment] = []
        """Those that the tier has no more. They stay open where they could not be removed."""
        self.opened = asyncio.Event()
        """Set when all segments that were there are known."""
        self.changed: Callable[[], None] = lambda: None
        self._catalog = catalog
        self._segments = segments
        self._files = files
        self._wiping = wiping
        self._capacity = capacity
        self._quarantine = quarantine
        self._tally = tally
        self._lanes = lanes
        self._most_bytes = SYNCED_BYTES_MOST if fsync else SEGMENT_BYTES_MOST
        self._ttl_s = ttl_s
        self._clock_ns = clock_ns
        self._growing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._full_until_s = 0.0
        self.error: OSError | None = None
        """Why the last segment could not be made, if that was not for want of room."""

    async def take(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out so many slots, or as many as there are or can be made."""
        catalog = self._catalog
        slots = catalog.take_free(count)
        try:
            while len(slots) < count and await self._grow(count - len(slots)):
                slots += catalog.take_free(count - len(slots))
            while len(slots) < count and await self._wiping.until_some_wiped():
                slots += catalog.take_free(count - len(slots))
        except BaseException:
            catalog.give_back(slots)
            raise
        if len(slots) < count:
            if time.monotonic() < self._full_until_s:
                self._tally.count("disk_full", count - len(slots))
            slots += catalog.take_free(count - len(slots))
            victims = catalog.evict(count - len(slots), incoming)
            self._tally.count("evicted", len(victims))
            slots += victims
            self.changed()
        return slots

    async def run(self) -> None:
        """Give back what is too much, and let go what was not used for long, until cancelled."""
        while True:
            await self.shrink()
            self._expire()
            self._wake.clear()
            await until(self._wake.wait(), TICK_S if self._ttl_s is None else min(TICK_S, max(self._ttl_s / 16, 0.01)))

    def check(self) -> None:
        """See soon whether there is too much."""
        self._wake.set()

    async def shrink(self) -> None:
        """Remove segments as long as they take more than they may."""
        if self._catalog.scanning:
            return
        await self._look()
        async with self._growing:
            while (free_bytes := self._capacity.free_bytes()) is not None and free_bytes < 0:
                if not (
                    await self._remove_unusable()
                    or await self._clear_quarantine(-free_bytes)
                    or await self._remove_coldest()
                ):
                    return
                await self._look()  # Else everything would go for what the first removal has given back.

    def _expire(self) -> None:
        if self._ttl_s is None or self._catalog.scanning:
            return
        expired = self._catalog.unused_since(self._clock_ns() - int(self._ttl_s * 1e9))
        self._tally.count("expired", len(expired))
        for key in expired:
            self._catalog.news.lost(key)
        self._catalog.remove(expired)
        self._wiping.check()
        self.changed()

    async def _grow(self, wanted_slots: int) -> bool:
        """Make a segment; False if there is no room for one. It may be somebody else's that has become free."""
        await self.opened.wait()
        async with self._growing:
            if self._catalog.free.count:
                return True
            if time.monotonic() < self._full_until_s:
                return False
            await self._look()
            worst_bytes = self._files.worst_bytes(wanted_slots)
            while not (slots := self._affordable_slots(wanted_slots)):
                if not (await self._remove_unusable() or await self._clear_quarantine(worst_bytes)):
                    return False
            return await self._make(slots)

    async def _make(self, slots: int) -> bool:
        worst_bytes = self._files.worst_bytes(slots)
        granted_bytes = self._capacity.reserve(worst_bytes)
        growth = Growth()
        try:
            if granted_bytes == worst_bytes:
                await in_thread(self._lanes, growth.make, self._files, slots)
        finally:
            self._capacity.release(granted_bytes)
            if growth.segment is not None:
                self.take_in(growth.segment)
                self._capacity.wrote(growth.segment.allocated_bytes)
        self.error = growth.error
        if growth.is_full and growth.segment is None and await self._clear_quarantine(worst_bytes):
            return await self._make(slots)
        if growth.is_full:
            self._full_until_s = time.monotonic() + FULL_PAUSE_S
        return growth.segment is not None

    def take_in(self, segment: Segment) -> None:
        """Have a new segment's slots given out."""
        count = segment.header.slots
        first = self._catalog.add(count)
        self._segments.add(segment, first)
        self._catalog.free.add(first, count)

    async def _look(self) -> None:
        """See what is free on the disk, if it matters; what was seen last will do where it cannot be asked."""
        if self._capacity.watches_disk:
            with suppress(OSError):
                await in_thread(self._lanes, self._capacity.look)

    def _affordable_slots(self, wanted_slots: int) -> int:
        """Return how many slots the next segment should have; 0 if it is too few to be one."""
        slot_bytes = self._files.header(1).slot_bytes
        own_bytes = self._segments.used_bytes
        most_bytes = min(max(own_bytes, SEGMENT_BYTES_LEAST), self._most_bytes)
        slots = max(most_bytes // slot_bytes, min(wanted_slots, self._most_bytes // slot_bytes), 1)
        free_bytes = self._capacity.free_bytes()
        if free_bytes is None:
            return slots
        # Of what is free, checkpoints of all chunks are to find room, too: the last one, and the next beside it.
        known = sum(segment.header.slots for segment in self._segments.all)
        free_bytes -= 2 * RECORD_BYTES_MAX * known + self._files.worst_bytes(0)
        slots = min(slots, max(0, free_bytes) // (slot_bytes + 2 * RECORD_BYTES_MAX))
        while slots and self._files.worst_bytes(slots) + 2 * RECORD_BYTES_MAX * slots > free_bytes:
            slots -= 1 + slots // 512
        return max(0, slots)

    async def _remove_unusable(self) -> bool:
        while self.unusable:
            unusable = self.unusable.pop()
            removed = False
            with suppress(OSError):  # Then it takes its room still.
                removed = await in_thread(self._lanes, self._files.remove_unusable, unusable)
            if removed:
                self._capacity.other_bytes -= unusable.allocated_bytes
                return True
        return False

    async def _clear_quarantine(self, wanted_bytes: int) -> bool:
        """Have corrupt slots that are kept go before any chunk; False if there are none."""
        cleared = list[Cleared]()
        if self._quarantine.empty:
            return False
        try:
            await in_thread(self._lanes, lambda: cleared.append(self._quarantine.clear(wanted_bytes)))
        finally:
            for files, freed_bytes in cleared:
                self._tally.count("quarantine_evicted", files)
                self._capacity.other_bytes -= freed_bytes
        return any(files for files, _ in cleared)

    async def _remove_coldest(self) -> bool:
        """Remove the segment that has the chunk that was used longest ago; False if none may go."""
        key = self._catalog.coldest()
        slot = None if key is None else self._catalog.slot(key)
        own = [segment for segment in self._segments.all if segment.own]
        chosen = [self._segments.of(slot)] if slot is not None else own[:1]
        for segment in [*chosen, *own]:
            chunks = self._catalog.clear_range(segment.first_slot, segment.header.slots)
            if chunks is not None:
                self._tally.count("evicted", chunks)
                self._segments.remove(segment)
                self.removed = [*(each for each in self.removed if not each.closed), segment]
                self.changed()
                await in_thread(self._lanes, self._remove_file, segment)
                return segment.closed  # Else the others would be given up in vain, too.
        return False

    def _remove_file(self, segment: Segment) -> None:
        """Remove a segment that nobody uses. Blocks, in a lane; only one at a time."""
        try:
            self._files.remove(segment)
        except OSError as error:
            logger.warning("%s: cannot be removed: %s", segment.name, error.strerror)
            self._tally.count("evictions_failed")
            self._capacity.other_bytes += segment.allocated_bytes
