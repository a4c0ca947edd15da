"""What a tier with segments does at its start, and writes down for the next: which slot has which key's chunk.

The checkpoint's word is taken for segments that nobody has written to since. Of the others, every slot's footer is
read, and nothing else; until then their slots are nobody's. All of it runs in a lane of its own.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from kvtier.errors import BackendClosed
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.options import SegmentsOptions
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.checkpoint import Remembered, SlotCheckpoint
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.reading import Reading, Seen
from kvtier_backends.fs.segments.room import Room
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.slots import Snapshot

SETTLED_NS = 1_000_000_000  # A file's time says nothing of what was written so shortly before it was looked at.


class SlotLooking:
    """One tier's start and its checkpoints. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier[SegmentsOptions], catalog: Catalog, folder: SegmentFolder, room: Room) -> None:
        """Look in the lane for scans."""
        self.done = asyncio.Event()
        """Set once everything that was there at the start is known."""
        self._checkpoint = SlotCheckpoint(tier.root, tier.context.mapper, tier.counters, tier.context.row_bytes)
        tier.capacity.count(self._checkpoint)
        self._reading = Reading(tier, folder, self._checkpoint)
        self._catalog = catalog
        self._segments = catalog.segments
        self._room = room
        self._capacity = tier.capacity
        self._counters = tier.counters
        self._lane = tier.lanes.scan
        self._checkpoint_s = tier.options.checkpoint_s
        self._ended = False

    def stop(self) -> None:
        """Have the look end soon."""
        self._reading.stopped = True

    @property
    def opened(self) -> list[Segment]:
        """The segments that were there, as far as they could be opened."""
        return self._reading.opened

    async def run(self) -> None:
        """Look what is there, once."""
        reading, catalog, counters = self._reading, self._catalog, self._counters
        await self._lane.run(reading.open_all)
        around = await self._lane.run(reading.look_around, time.time())
        for segment in reading.opened:
            self._segments.add(segment, catalog.add(segment.header.slots))
        self._capacity.other_bytes += around.taken_bytes + sum(each.allocated_bytes for each in reading.unusable)
        self._capacity.unseen_bytes = 0
        self._room.begin(reading.unusable)
        await self._lane.run(reading.read_checkpoint, wanted=self._checkpoint_s > 0)
        while batch := await self._lane.run(reading.next_recalled):
            for chunk in batch:
                catalog.found(chunk)
        self._free(await self._lane.run(reading.free_of_trusted))
        while (told := await self._lane.run(reading.next_seen)) is not None:
            self._note(*told)
        counters.count("scan_skipped", len(reading.unusable))
        counters.count("scan_failed", reading.failed)
        counters.count("scan_swept", around.swept)
        counters.count("scan_others", around.others)
        catalog.scan_ended(complete=not reading.failed)
        await self._room.shrink()
        self.done.set()

    async def run_checkpoints(self) -> None:
        """Write down what is known every so often."""
        while self._checkpoint_s:
            await asyncio.sleep(self._checkpoint_s)
            if self.done.is_set() and (room_bytes := self._room_for_checkpoint()) is not None:
                try:
                    now_ns = time.time_ns()
                    segments = await self._lane.run(remembered, list(self._segments.all), now_ns - SETTLED_NS)
                    segments = trusted(segments, self._unsettled())
                    await self._lane.run(self._checkpoint.write, segments, self._catalog.snapshot())
                finally:
                    self._capacity.release(room_bytes)

    def write_last_checkpoint(self) -> None:
        """Queue it on the lane, when nothing writes any more; only the first closing can."""
        wanted, self._ended = self.done.is_set() and not self._ended, True
        if wanted and self._checkpoint_s and self._room_for_checkpoint() is not None:
            with suppress(BackendClosed):
                segments, unsettled = list(self._segments.all), self._unsettled()
                self._lane.submit(self._write_last, segments, unsettled, self._catalog.snapshot())

    def _write_last(self, segments: Sequence[Segment], unsettled: set[str], snapshot: Snapshot) -> None:
        settled = trusted(remembered(segments, time.time_ns() + SETTLED_NS), unsettled)
        self._checkpoint.write(settled, snapshot)

    def _unsettled(self) -> set[str]:
        """Return the names of segments with a slot whose footer may say something else than what is known."""
        return {self._segments.of(slot).name for slot in self._catalog.unsettled()} | self._reading.distrusted

    def _room_for_checkpoint(self) -> int | None:
        """Promise room for a checkpoint of what is known; None if there is none, and the last one will have to do."""
        wanted_bytes = self._checkpoint.bytes_worst(len(self._catalog), len(self._segments.all))
        granted_bytes = self._capacity.reserve(wanted_bytes)
        if granted_bytes == wanted_bytes:
            return wanted_bytes
        self._capacity.release(granted_bytes)
        self._counters.count("checkpoints_failed")
        return None

    def _note(self, segment: Segment, seen: Seen) -> None:
        for chunk in seen.held:
            self._catalog.found(chunk, foreign=not segment.own)
        if segment.own:
            self._free(seen.free)
            for slot, fault in seen.torn:
                self._counters.corrupt(fault)
                self._catalog.outdated.retire(slot, None)

    def _free(self, runs: Sequence[tuple[int, int]]) -> None:
        for first, count in runs:
            self._catalog.free.add(first, count)


def remembered(segments: Sequence[Segment], before_ns: int) -> list[Remembered]:
    """Return segments as a checkpoint names them; those written to since that time are not to be trusted. Blocks."""
    found: list[Remembered] = []
    for segment in segments:
        if segment.own and not segment.closed:
            try:
                status = os.fstat(segment.fd)
            except OSError:
                continue  # Another lane has just removed it.
            if not status.st_nlink:
                continue  # Somebody else has. Another one may have its name by now.
            trusted_ns = status.st_mtime_ns if 0 < status.st_mtime_ns < before_ns else 0
            found.append(Remembered(segment.name, segment.first_slot, segment.header.slots, trusted_ns))
    return found


def trusted(segments: Sequence[Remembered], unsettled: set[str]) -> list[Remembered]:
    return [each._replace(written_at_ns=0) if each.name in unsettled else each for each in segments]
