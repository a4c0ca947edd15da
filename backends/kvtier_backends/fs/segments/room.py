"""Room for chunks: free slots first, then more segments, then the slots of evicted chunks.

Evicting a chunk costs only a change in memory, so no chunk is evicted before its slot is wanted. Room of the file
system is taken a segment at a time, and given back only when there is too much.

A segment may be lost: another program has removed it, and the next start will not find its chunks. No call fails by
itself, since a file without a name can be written and read as before. So after its write, a store asks whether the file
still has its name. All segments are checked from time to time, too. The chunks of a lost segment are forgotten at once.
When no call uses it any more, it is closed, and its room is free.
"""

import asyncio
import errno
import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from kvtier.backend import OffloadKey, in_thread
from kvtier.errors import Remedy
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import FULL
from kvtier_backends.fs.layout import Settling, SlotTier, until
from kvtier_backends.fs.segments.checkpoint import RECORD_BYTES_MAX
from kvtier_backends.fs.segments.folder import SegmentFolder, Stranger
from kvtier_backends.fs.segments.pool import PoolFolder
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.table import SlotTable
from kvtier_backends.fs.segments.wiping import Wiping

logger = logging.getLogger(__name__)

SEGMENT_BYTES_LEAST = 16 << 20  # The first one's; each makes the tier twice as large, up to its folder's most.
FULL_PAUSE_S = 10.0  # A full disk is asked again after so long.
CLAIM_S = 1.0  # Between two looks for colder chunks of other namespaces: some milliseconds a million chunks.
TICK_S = 10.0
LOOK_S = 10.0  # Two microseconds a segment.
CLOSE_S = 1.0  # Calls that used a lost segment have mostly ended by then.


class Space:
    """The one capacity that all namespaces of a root or pool share. Belongs to the loop's thread."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.changing = asyncio.Lock()  # Held while segments are made or removed.
        self.opened: set[str] = set()  # Names of segments that a catalog has.
        self.strangers: list[Stranger] = []
        """Segments that no catalog has, the oldest first. They go before any chunk."""
        self.rooms: list[Room] = []
        self._claim_at_s = 0.0
        capacity.count(self)

    @property
    def used_bytes(self) -> int:
        return sum(stranger.allocated_bytes for stranger in self.strangers)

    def note(self, strangers: Sequence[Stranger]) -> None:
        self.strangers = [stranger for stranger in strangers if stranger.name not in self.opened]

    def open(self, name: str) -> None:
        self.opened.add(name)
        self.note(self.strangers)

    def giver(self, taker: "Room") -> "Room | None":
        """Return the room that gives up a segment for another: it has more than its part, and the coldest chunk."""
        if len(self.rooms) < 2 or time.monotonic() < self._claim_at_s:
            return None
        self._claim_at_s = time.monotonic() + CLAIM_S
        part_bytes = (self.capacity.limit_bytes or 0) // max(1, sum(room.is_used for room in self.rooms))
        givers = [room for room in self.rooms if not room.is_used or room.segments.used_bytes > part_bytes]
        coldest = coldest_of([taker, *givers])
        return None if coldest is taker else coldest


def coldest_of(rooms: "Iterable[Room]") -> "Room | None":
    """Return the room whose coldest chunk was used longest ago."""
    known = [(used_at_ns, room) for room in rooms if (used_at_ns := room.coldest_at_ns()) is not None]
    return min(known, key=itemgetter(0))[1] if known else None


class Room:
    """The slots for stores, and the segments that come and go. Belongs to the loop's thread."""

    def __init__(
        self, tier: SlotTier, table: SlotTable, folder: SegmentFolder | PoolFolder, wiping: Wiping, space: Space
    ) -> None:
        self.is_used = True  # An engine has its namespace: it keeps a part of the capacity.
        self.opened = asyncio.Event()  # Set when all segments that were there are known, and at the end.
        self.space = space
        self.changing = space.changing
        self.error: OSError | None = None  # Why the last segment could not be made, if that was not for want of room.
        self._tier = tier
        self._table = table
        self.segments = table.segments
        self._folder = folder
        self.wiping = wiping
        self._capacity = tier.capacity
        self._settling = Settling(tier)
        self._full_until_s = 0.0
        self._seen_lost: list[Segment] = []  # By lanes, and not yet noted.
        self._lost: list[Segment] = []  # Noted, and open still.
        self._wake_losses = asyncio.Event()
        space.rooms.append(self)

    @property
    def disk_is_full(self) -> bool:
        """Whether the disk has lately had no room for a segment of the wanted size."""
        return time.monotonic() < self._full_until_s

    async def take(self, count: int, incoming: Sequence[OffloadKey]) -> list[int]:
        """Give out up to `count` slots: free ones, new ones, then those of evicted chunks."""
        table = self._table
        slots = table.take_free(count)
        try:
            while len(slots) < count and await self._grow(count - len(slots)):
                slots += table.take_free(count - len(slots))
            while len(slots) < count and await self.wiping.until_some_wiped():
                slots += table.take_free(count - len(slots))
        except BaseException:
            table.give_back(slots)
            raise
        if len(slots) < count:
            if self.disk_is_full:
                self._tier.counters.count("disk_full", count - len(slots))
            slots += table.take_free(count - len(slots))
            victims = table.evict(count - len(slots), incoming)
            self._tier.counters.count("evicted", len(victims))
            slots += victims
        return slots

    async def run(self) -> None:
        """Give back what is too much, and let go what was not used for long, until cancelled."""
        ttl_s = self._tier.options.ttl_s
        tick_s = TICK_S if ttl_s is None else min(TICK_S, max(ttl_s / 16, 0.01))
        while True:
            await self._settling()
            await self.shrink()
            if ttl_s is not None and not self._table.scanning:
                self._expire(self._tier.clock_ns() - int(ttl_s * 1e9))
            await asyncio.sleep(min(tick_s, self._settling.left_s()))

    async def shrink(self) -> None:
        if self._table.scanning:
            return
        await self._look_at_disk()
        async with self.changing:
            while (free_bytes := self._capacity.free_bytes()) is not None and free_bytes < 0:
                room = coldest_of(self.space.rooms) or self
                if not (await self._remove_leftover() or await room.remove_coldest()):
                    return
                await self._look_at_disk()  # Else everything would go for what the first removal has given back.

    def coldest_at_ns(self) -> int | None:
        slot = None if self._table.scanning else self._table.coldest()
        return None if slot is None else self._table.index.used_at_ns[slot]

    def _expire(self, before_ns: int) -> None:
        expired = self._table.unused_since(before_ns)
        self._tier.counters.count("expired", len(expired))
        self._table.inventory.lost(*expired)
        self._table.remove(expired)
        self.wiping.check()

    async def remove_coldest(self) -> bool:
        slot = self._table.coldest()
        own = [segment for segment in self.segments.all if segment.own]
        chosen = [self.segments.of(slot)] if slot is not None else own[:1]
        for segment in [*chosen, *own]:
            chunks = self._table.clear_range(segment.first_slot, segment.header.slots)
            if chunks is not None:
                self._tier.counters.count("evicted", chunks)
                self.segments.remove(segment)
                self.space.opened.discard(segment.name)
                remove, remains = partial(self._folder.remove, segment), self._tier.root.remains
                await in_thread(self._tier.lanes.store, remains.remove, segment.name, segment.allocated_bytes, remove)
                self._tier.counters.count("evictions_failed", remains.take_failed())
                return segment.closed  # Else the others would be given up in vain, too.
        return False

    async def _remove_leftover(self) -> bool:
        remains = self._tier.root.remains
        if remains.used_bytes and await in_thread(self._tier.lanes.store, remains.again):
            return True
        for stranger in list(self.space.strangers):
            with suppress(OSError):  # Then it takes its room still.
                if await in_thread(self._tier.lanes.store, self._folder.remove_stranger, stranger.name):
                    self.space.strangers.remove(stranger)
                    return True
        return False

    # New segments, each as large as all before it, while there is room.

    async def _grow(self, wanted_slots: int) -> bool:
        """Make a segment; False if there is no room for one. A slot that has become free counts."""
        await self.opened.wait()
        async with self.changing:
            if self._table.free.count:
                return True
            if self.disk_is_full:
                return False
            await self._look_at_disk()
            most_slots = max(1, self._most_bytes // self._folder.header(1).slot_bytes)
            while (slots := self._affordable_slots(wanted_slots)) < min(wanted_slots, most_slots):
                if not await self._remove_leftover():
                    giver = self.space.giver(self)  # A namespace whose chunks were not used for longer than this one's.
                    if giver is None or not await giver.remove_coldest():
                        break
            if not slots:
                return False
            while not await self._make(slots):
                if not self.disk_is_full or not await self._remove_leftover():
                    return False
            return True

    @property
    def _most_bytes(self) -> int:
        """The most that a segment may take: less where namespaces may have to give segments to each other."""
        most_bytes, limit_bytes = self._folder.segment_bytes_most, self._capacity.limit_bytes
        if limit_bytes is None or len(self.space.rooms) < 2:
            return most_bytes
        return min(most_bytes, max(limit_bytes // 32, SEGMENT_BYTES_LEAST))

    async def _look_at_disk(self) -> None:
        """See how much is free there, if it matters. If asking fails, the last answer stays."""
        if self._capacity.watches_disk:
            with suppress(OSError):
                await in_thread(self._tier.lanes.store, self._capacity.look)

    def _affordable_slots(self, wanted_slots: int) -> int:
        """Return how many slots the next segment should have; 0 if it is too few to be one."""
        slot_bytes = self._folder.header(1).slot_bytes
        own_bytes = self.segments.used_bytes
        most_bytes = min(max(own_bytes, SEGMENT_BYTES_LEAST), self._most_bytes)
        slots = max(most_bytes // slot_bytes, min(wanted_slots, self._most_bytes // slot_bytes), 1)
        free_bytes = self._capacity.free_bytes()
        if free_bytes is None:
            return slots
        # Of what is free, checkpoints of all chunks are to find room, too: the last one, and the next beside it.
        known = sum(segment.header.slots for segment in self.segments.all)
        free_bytes -= 2 * RECORD_BYTES_MAX * known + self._folder.worst_bytes(0)
        slots = min(slots, max(0, free_bytes) // (slot_bytes + 2 * RECORD_BYTES_MAX))
        while slots and self._folder.worst_bytes(slots) + 2 * RECORD_BYTES_MAX * slots > free_bytes:
            slots -= 1 + slots // 512
        return max(0, slots)

    async def _make(self, slots: int) -> bool:
        worst_bytes = self._folder.worst_bytes(slots)
        granted_bytes = self._capacity.reserve(worst_bytes)
        making = SegmentMaking()
        try:
            if granted_bytes == worst_bytes:
                await in_thread(self._tier.lanes.store, making.run, self._folder, slots)
        finally:
            self._capacity.release(granted_bytes)
            if (segment := making.segment) is not None:
                first = self._table.add(segment.header.slots)
                self.segments.add(segment, first)
                self.space.open(segment.name)
                self._table.free.add(first, segment.header.slots)
                self._capacity.wrote(segment.allocated_bytes)
        self.error = making.error
        self._full_until_s = time.monotonic() + FULL_PAUSE_S if making.is_full else 0.0
        return making.segment is not None

    def errors(self, segments: Iterable[Segment]) -> dict[Segment, OSError]:
        """Return why chunks in some of the segments will not be found by the next start. Blocks, in a lane."""
        errors: dict[Segment, OSError] = {}
        for segment in segments:
            try:
                if not self._folder.has(segment):
                    self._seen_lost.append(segment)
                    errors[segment] = OSError(errno.ENOENT, f"{segment.name} was removed by another program")
            except OSError as error:
                errors[segment] = error.with_traceback(None)
        return errors

    def note_lost(self) -> None:
        seen, self._seen_lost = self._seen_lost, []
        for segment in seen:
            if segment in self.segments.all and segment not in self._lost:
                logger.warning("%s: removed by another program, and its chunks; see %s", segment.name, Remedy.UNDERFOOT)
                self._tier.counters.count("segments_lost")
                self._lost.append(segment)
        for segment in self._lost:
            self._table.abandon(segment.first_slot, segment.header.slots)
        if self._lost:
            self._wake_losses.set()

    async def run_losses(self) -> None:
        while True:
            await until(self._wake_losses.wait(), LOOK_S)
            self._wake_losses.clear()
            await self._tier.lanes.evict.run(self.errors, list(self.segments.all))
            self.note_lost()
            while self._lost:
                for segment in list(self._lost):
                    if self._table.abandon(segment.first_slot, segment.header.slots):
                        self._lost.remove(segment)
                        self.segments.remove(segment)
                        self.space.opened.discard(segment.name)
                        await self._tier.lanes.evict.run(self._folder.close, segment)
                await asyncio.sleep(CLOSE_S)


@dataclass(slots=True)
class SegmentMaking:
    """A segment that a lane makes. A call that is cancelled meanwhile knows it, too."""

    segment: Segment | None = None
    is_full: bool = False
    error: OSError | None = None  # Any other than that.

    def run(self, folder: SegmentFolder | PoolFolder, slots: int) -> None:
        """Make the largest that the disk has room for, up to `slots`. Blocks, in a lane."""
        while slots and self.segment is None:
            try:
                self.segment = folder.create(slots)
            except OSError as error:
                if error.errno not in FULL:
                    self.error = error.with_traceback(None)
                    return
                self.is_full = True
                slots //= 2
