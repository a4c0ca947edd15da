"""Makes segments: each as large as all before it, as far as there is room for one."""

import asyncio
import time
from contextlib import suppress

from kvtier.lend import Lanes, in_thread
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.failures import FULL
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.checkpoint import RECORD_BYTES_MAX
from kvtier_backends.fs.segments.files import Segment
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.leftovers import Leftovers
from kvtier_backends.fs.segments.runs import Segments

SEGMENT_BYTES_LEAST = 16 << 20  # The first one's; each makes the tier twice as large,
SEGMENT_BYTES_MOST = 8 << 30  # up to this: 10 TiB are then some 1,300 open files.
SYNCED_BYTES_MOST = 64 << 20  # With fsync they are written all over first, for which stores wait.
FULL_PAUSE_S = 10.0  # A full disk is asked again after so long.


class Making:
    """A segment that a lane makes, known also to whoever is cancelled meanwhile."""

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.is_full = False
        self.error: OSError | None = None  # Any other than that.

    def run(self, folder: SegmentFolder, slots: int) -> None:
        """Make the largest that the disk has room for, up to so many slots. Blocks, in a lane."""
        while slots and self.segment is None:
            try:
                self.segment = folder.create(slots)
            except OSError as error:
                if error.errno not in FULL:
                    self.error = error.with_traceback(None)
                    return
                self.is_full = True
                slots //= 2


class Growth:
    """One tier's. Belongs to the loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        segments: Segments,
        folder: SegmentFolder,
        leftovers: Leftovers,
        capacity: Capacity,
        *,
        lanes: Lanes,
        fsync: bool,
    ) -> None:
        """Make them in these lanes."""
        self.opened = asyncio.Event()
        """Set when all segments that were there are known."""
        self.changing = asyncio.Lock()
        """Of whoever makes segments or removes them."""
        self.error: OSError | None = None
        """Why the last segment could not be made, if that was not for want of room."""
        self._catalog = catalog
        self._segments = segments
        self._folder = folder
        self._leftovers = leftovers
        self._capacity = capacity
        self._lanes = lanes
        self._most_bytes = SYNCED_BYTES_MOST if fsync else SEGMENT_BYTES_MOST
        self._full_until_s = 0.0

    @property
    def disk_is_full(self) -> bool:
        """Whether the disk has lately had no room for a segment of the wanted size."""
        return time.monotonic() < self._full_until_s

    async def grow(self, wanted_slots: int) -> bool:
        """Make a segment; False if there is no room for one. It may be somebody else's that has become free."""
        await self.opened.wait()
        async with self.changing:
            if self._catalog.free.count:
                return True
            if self.disk_is_full:
                return False
            await self.look_at_disk()
            worst_bytes = self._folder.worst_bytes(wanted_slots)
            while not (slots := self._affordable_slots(wanted_slots)):
                if not await self._leftovers.remove(worst_bytes):
                    return False
            return await self._make(slots)

    async def look_at_disk(self) -> None:
        """See what is free there, if it matters; what was seen last will do where it cannot be asked."""
        if self._capacity.watches_disk:
            with suppress(OSError):
                await in_thread(self._lanes, self._capacity.look)

    def _affordable_slots(self, wanted_slots: int) -> int:
        """Return how many slots the next segment should have; 0 if it is too few to be one."""
        slot_bytes = self._folder.header(1).slot_bytes
        own_bytes = self._segments.used_bytes
        most_bytes = min(max(own_bytes, SEGMENT_BYTES_LEAST), self._most_bytes)
        slots = max(most_bytes // slot_bytes, min(wanted_slots, self._most_bytes // slot_bytes), 1)
        free_bytes = self._capacity.free_bytes()
        if free_bytes is None:
            return slots
        # Of what is free, checkpoints of all chunks are to find room, too: the last one, and the next beside it.
        known = sum(segment.header.slots for segment in self._segments.all)
        free_bytes -= 2 * RECORD_BYTES_MAX * known + self._folder.worst_bytes(0)
        slots = min(slots, max(0, free_bytes) // (slot_bytes + 2 * RECORD_BYTES_MAX))
        while slots and self._folder.worst_bytes(slots) + 2 * RECORD_BYTES_MAX * slots > free_bytes:
            slots -= 1 + slots // 512
        return max(0, slots)

    async def _make(self, slots: int) -> bool:
        worst_bytes = self._folder.worst_bytes(slots)
        granted_bytes = self._capacity.reserve(worst_bytes)
        making = Making()
        try:
            if granted_bytes == worst_bytes:
                await in_thread(self._lanes, making.run, self._folder, slots)
        finally:
            self._capacity.release(granted_bytes)
            if making.segment is not None:
                self._take_in(making.segment)
                self._capacity.wrote(making.segment.allocated_bytes)
        self.error = making.error
        if making.is_full and making.segment is None and await self._leftovers.clear_quarantine(worst_bytes):
            return await self._make(slots)
        if making.is_full:
            self._full_until_s = time.monotonic() + FULL_PAUSE_S
        return making.segment is not None

    def _take_in(self, segment: Segment) -> None:
        """Have a new segment's slots given out."""
        count = segment.header.slots
        first = self._catalog.add(count)
        self._segments.add(segment, first)
        self._catalog.free.add(first, count)
