"""The start-up scan of segments, and their checkpoints: the part on the loop's thread, which notes what was read.

The chunks of the last checkpoint are known first, and the footers correct them. Blocking work runs in a lane of its
own: see `recovery`.
"""

import asyncio
import logging
from collections.abc import Sequence

from kvtier_backends.fs.index import oldest_last
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.checkpoint import SETTLED_NS, CheckpointSchedule, SlotCheckpoint, remembered, trusted
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.recovery import Around, Recovery, Seen
from kvtier_backends.fs.segments.room import Room
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.slots import Snapshot

logger = logging.getLogger(__name__)

AGAIN_S = 5.0  # Between two looks at what could not be seen, or was locked, at the start.


class SegmentsStart:
    """The start-up scan of one tier, and its checkpoints. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier, catalog: Catalog, folder: SegmentFolder, room: Room) -> None:
        """Scan in the lane for that."""
        self.done = asyncio.Event()
        """Set once everything that was there at the start is known."""
        self.recalled = asyncio.Event()
        """Set once everything that the last checkpoint names is known."""
        self._checkpoint = SlotCheckpoint(tier.root, tier.context.mapper, tier.counters, tier.context.row_bytes)
        self._recovery = Recovery(tier, folder, self._checkpoint)
        self._catalog = catalog
        self._segments = catalog.segments
        self._room = room
        self._capacity = tier.capacity
        self._counters = tier.counters
        self._lane = tier.lanes.scan
        self._clock_ns = tier.clock_ns
        self._distrusted: set[str] = set()  # Segments that the next start has to read through.
        self._failed = 0
        self._added = 0  # Opened segments that the catalog knows,
        self._unusable = 0  # and unusable ones that the room knows.
        self._schedule = CheckpointSchedule(tier.capacity, tier.counters, self._checkpoint_bytes_worst)

    def stop(self) -> None:
        """Ask the scan to end soon."""
        self._recovery.stopped = True
        self.recalled.set()

    async def run(self) -> None:
        """Find out what is there, once."""
        recovery, catalog, counters = self._recovery, self._catalog, self._counters
        await self._lane.run(recovery.open_all)
        around = await self._lane.run(recovery.look_around)
        self._failed += recovery.failed
        self._add_opened()
        self._count(around)
        self._room.begin()
        recalled = recovery.recalled()
        while (chunks := await self._lane.run(next, recalled, None)) is not None:
            catalog.recall(chunks)
        self.recalled.set()
        found = recovery.recovered()
        while (seen := await self._lane.run(next, found, None)) is not None:
            self._note(seen)
        counters.count("scan_skipped", len(recovery.unusable))
        counters.count("scan_failed", self._failed)
        counters.count("scan_swept", around.swept)
        counters.count("scan_others", around.others)
        catalog.index.order_idle(await self._lane.run(oldest_last, *catalog.index.idle()))
        catalog.scan_ended(complete=not self._failed)
        await self._room.shrink()
        self._schedule.ready = True
        self.done.set()
        while self._capacity.unseen_bytes or any(not segment.own for segment in self._segments.all):
            await asyncio.sleep(AGAIN_S)
            await self._look_again()

    async def _look_again(self) -> None:
        """Measure what could not be seen at the start, and take over segments whose locks have been released.

        A process that hangs keeps its locks until it ends: a runner that was replaced, or `kvtier prune`.
        """
        async with self._room.changing:  # A segment that is just being made would be taken for another process's.
            await self._lane.run(self._recovery.open_all)
            for segment in self._add_opened():
                segment.own = False  # Locked, and not read yet: it is taken over like the others.
            self._count(await self._lane.run(self._recovery.look_around))
        for segment in list(self._segments.all):
            if not segment.own:
                async with self._room.changing:  # The part that is known must not be removed for room meanwhile.
                    await self._take_over(segment)

    async def _take_over(self, segment: Segment) -> None:
        """Own a segment, if its lock is free, by what its footers say now.

        Until all of them are known, no checkpoint names it.
        """
        found = await self._lane.run(self._recovery.take_over, segment)
        if found is None:
            return
        while (seen := await self._lane.run(next, found, None)) is not None:
            self._catalog.take_over(*seen.looked, seen.held)
            self._note_rest(seen)
        segment.own = True
        logger.info("%s: taken over from a process that has ended", segment.name)

    def _add_opened(self) -> Sequence[Segment]:
        """Add the segments that were opened since the last call, and return them."""
        opened = self._recovery.opened[self._added :]
        for segment in opened:
            self._segments.add(segment, self._catalog.add(segment.header.slots))
        self._added += len(opened)
        self._room.found(self._recovery.unusable[self._unusable :])
        self._unusable = len(self._recovery.unusable)
        return opened

    def _count(self, around: Around) -> None:
        """Count what lies around the open segments. As long as that is unknown, it is all that is on the disk."""
        if around.measured:
            self._capacity.other_bytes, self._capacity.unseen_bytes = around.taken_bytes, 0

    async def run_checkpoints(self) -> None:
        """Write down what is known every so often."""
        await self._schedule.run(self._write_checkpoint)

    def write_last_checkpoint(self) -> None:
        """Queue it on the lane, when nothing writes any more; only the first closing can."""
        self._schedule.last(self._queue_last_checkpoint)

    async def _write_checkpoint(self) -> None:
        # What is written between the two is not in the first, so that a segment is looked through rather than trusted.
        now_ns = self._clock_ns()
        segments = await self._lane.run(remembered, list(self._segments.all), now_ns - SETTLED_NS)
        segments = trusted(segments, self._unsettled())
        await self._lane.run(self._checkpoint.write, segments, self._catalog.snapshot())

    def _queue_last_checkpoint(self) -> None:
        self._lane.submit(self._write_last, list(self._segments.all), self._unsettled(), self._catalog.snapshot())

    def _write_last(self, segments: Sequence[Segment], unsettled: set[str], snapshot: Snapshot) -> None:
        settled = trusted(remembered(segments, self._clock_ns() + SETTLED_NS), unsettled)
        self._checkpoint.write(settled, snapshot)

    def _unsettled(self) -> set[str]:
        """Return the names of segments with a slot whose footer may say something else than what is known."""
        return {self._segments.of(slot).name for slot in self._catalog.unsettled()} | self._distrusted

    def _checkpoint_bytes_worst(self) -> int:
        return self._checkpoint.bytes_worst(len(self._catalog), len(self._segments.all))

    def _note(self, seen: Seen) -> None:
        if seen.foreign:
            for chunk in seen.held:
                self._catalog.found(chunk, foreign=True)
        else:
            self._catalog.looked(*seen.looked, seen.held)
        self._note_rest(seen)

    def _note_rest(self, seen: Seen) -> None:
        """Record the slots of a range that hold no chunk."""
        for first, count in seen.free:
            self._catalog.free.add(first, count)
        for slot, fault in seen.torn:
            self._counters.corrupt(fault)
            self._catalog.outdated.retire(slot, None)
        if seen.distrusted:
            self._distrusted.add(seen.distrusted)
        self._failed += seen.failed
