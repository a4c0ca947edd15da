"""Makes room: by free slots first, then by more segments, then in place of chunks that go for it.

A chunk that goes costs nothing but a change in memory, so none goes before its slot is wanted. The file system's room
is taken a segment at a time and given back only when there is too much.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from kvtier.keys import OffloadKey
from kvtier.lend import Lanes, in_thread
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.files import Segment
from kvtier_backends.fs.segments.folder import SegmentFolder, Unusable
from kvtier_backends.fs.segments.growth import Growth
from kvtier_backends.fs.segments.leftovers import Leftovers
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.segments.wiping import Wiping

logger = logging.getLogger(__name__)

TICK_S = 10.0


class Room:
    """One tier's. Belongs to the loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        segments: Segments,
        folder: SegmentFolder,
        wiping: Wiping,
        growth: Growth,
        leftovers: Leftovers,
        capacity: Capacity,
        tally: Tally,
        *,
        lanes: Lanes,
        ttl_s: float | None,
        clock_ns: Callable[[], int],
    ) -> None:
        """Remove segments in these lanes. `ttl_s`: chunks go when they were not used for so long; None: never."""
        self.changed: Callable[[], None] = lambda: None
        self._catalog = catalog
        self._segments = segments
        self._folder = folder
        self._wiping = wiping
        self._growth = growth
        self._leftovers = leftovers
        self._capacity = capacity
        self._tally = tally
        self._lanes = lanes
        self._ttl_s = ttl_s
        self._clock_ns = clock_ns
        self._tick_s = TICK_S if ttl_s is None else min(TICK_S, max(ttl_s / 16, 0.01))

    @property
    def error(self) -> OSError | None:
        """Why there are no more slots, if that is not for want of room."""
        return self._growth.error

    def begin(self, unusable: Iterable[Unusable]) -> None:
        """Make segments from now on: all that were there are known, and what lies among them and holds nothing."""
        self._leftovers.found(unusable)
        self._growth.opened.set()

    async def take(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out so many slots, or as many as there are or can be made."""
        catalog = self._catalog
        slots = catalog.take_free(count)
        try:
            while len(slots) < count and await self._growth.grow(count - len(slots)):
                slots += catalog.take_free(count - len(slots))
            while len(slots) < count and await self._wiping.until_some_wiped():
                slots += catalog.take_free(count - len(slots))
        except BaseException:
            catalog.give_back(slots)
            raise
        if len(slots) < count:
            if self._growth.disk_is_full:
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
            await asyncio.sleep(self._tick_s)

    async def shrink(self) -> None:
        """Remove segments as long as they take more than they may."""
        if self._catalog.scanning:
            return
        await self._growth.look_at_disk()
        async with self._growth.changing:
            while (free_bytes := self._capacity.free_bytes()) is not None and free_bytes < 0:
                if not (await self._leftovers.remove(-free_bytes) or await self._remove_coldest()):
                    return
                await self._growth.look_at_disk()  # Else everything would go for what the first removal has given back.

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
                self.changed()
                await in_thread(self._lanes, self._remove_file, segment)
                return segment.closed  # Else the others would be given up in vain, too.
        return False

    def _remove_file(self, segment: Segment) -> None:
        """Remove a segment that nobody uses. Blocks, in a lane; only one at a time."""
        try:
            self._folder.remove(segment)
        except OSError as error:
            logger.warning("%s: cannot be removed: %s", segment.name, error.strerror)
            self._tally.count("evictions_failed")
            self._capacity.other_bytes += segment.allocated_bytes
