"""The recovery of segments at a start: their list, the part of a checkpoint that is believed, and the footers.

The chunks of the last checkpoint are known first, and the footers correct them. Blocking work runs in a lane of its
own. The part on the loop's thread records what was read, and writes checkpoints.
"""

import asyncio
import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import INVENTORY_BATCH_KEYS
from kvtier.errors import BackendClosed, LineLimit, Remedy
from kvtier_backends.fs.disk.below import AHEAD_NS, believable_ns, with_folder
from kvtier_backends.fs.disk.footer import ChunkFault, Footer, read_footer
from kvtier_backends.fs.disk.remains import is_absent
from kvtier_backends.fs.index import oldest_last
from kvtier_backends.fs.layout import FsTier, Work
from kvtier_backends.fs.segments import checkpoint
from kvtier_backends.fs.segments.checkpoint import SETTLED_NS, Remembered, SlotCheckpoint, remembered, trusted
from kvtier_backends.fs.segments.folder import SegmentFolder, Stranger
from kvtier_backends.fs.segments.room import Room
from kvtier_backends.fs.segments.segment import ZEROS, Segment
from kvtier_backends.fs.segments.table import Recalled, SlotEntry, SlotTable, Snapshot

logger = logging.getLogger(__name__)

AGAIN_S = 5.0  # Between two looks at what could not be seen, or was locked, at the start.
NAMED_MAX = 8  # Segments in the log; a line must stay one.
SEQUENCE_MAX = (1 << 63) - 1  # The year 2262, in ns. Greater ones are not ours, and would leave none for later chunks.


class Seen(NamedTuple):
    """Some slots, and what is known of them."""

    held: Sequence[SlotEntry] = ()
    looked: tuple[int, int] = (0, 0)  # The first slot whose footer was read, and how many.
    foreign: bool = False  # Of another process: the chunks are read, and nothing else.
    free: Sequence[tuple[int, int]] = ()  # Runs: the first slot, and how many.
    torn: Sequence[tuple[int, ChunkFault]] = ()
    distrusted: str = ""  # A segment with slots that are neither free nor held: the next start has to look again.
    failed: bool = False  # That segment could not be read to its end.


class SegmentsStart:
    """The start-up scan of one tier, and its checkpoints. Belongs to the loop's thread."""

    def __init__(self, tier: FsTier, folder: SegmentFolder, table: SlotTable, room: Room) -> None:
        tier.capacity.count(self)
        self.used_bytes = 0  # Bytes of unfinished files among the chunks.
        self.done = asyncio.Event()  # Set once everything that was there at the start is known.
        self.recalled = asyncio.Event()  # Set once everything that the last checkpoint names is known.
        self._checkpoint = SlotCheckpoint(tier.root, tier.context.mapper, tier.counters, tier.context.row_bytes)
        self._recovery = Recovery(tier, folder, self._checkpoint)
        self._tier = tier
        self._table = table
        self._segments = table.segments
        self._room = room
        self._lane = tier.lanes.scan
        self._distrusted: set[str] = set()  # Segments that the next start has to read through.
        self._failed = 0
        self._writes_checkpoints = False  # A new one is not worse than the last: the chunks of that one are known.

    def works(self) -> Sequence[Work]:
        return self.run, self.run_checkpoints

    def stop(self) -> None:
        self._recovery.stopped = True
        self.recalled.set()

    async def run(self) -> None:
        recovery, table, counters = self._recovery, self._table, self._tier.counters
        await self._open()
        self._failed += recovery.failed
        self._room.opened.set()
        recalled = recovery.recalled()
        while (chunks := await self._lane.run(next, recalled, None)) is not None:
            table.recall(chunks)
        self.recalled.set()
        found = recovery.recovered()
        while (seen := await self._lane.run(next, found, None)) is not None:
            self._note(seen)
        counters.count("scan_skipped", len(recovery.unusable))
        counters.count("scan_failed", self._failed)
        table.index.order_idle(await self._lane.run(oldest_last, *table.index.idle()))
        table.scan_ended(complete=not self._failed)
        self._room.wiping.check()  # The scan may have found torn or outdated slots.
        await self._room.shrink()
        self._writes_checkpoints = True
        self.done.set()
        while self._tier.capacity.unseen_bytes or any(not segment.own for segment in self._segments.all):
            await asyncio.sleep(AGAIN_S)
            await self._look_again()

    async def _look_again(self) -> None:
        """Measure what could not be seen at the start, and take over segments whose writers have ended since."""
        async with self._room.changing:  # A segment that is just being made would be taken for another process's.
            await self._open()
        for segment in list(self._segments.all):
            if not segment.own:
                async with self._room.changing:  # The part that is known must not be removed for room meanwhile.
                    await self._take_over(segment)

    async def _take_over(self, segment: Segment) -> None:
        """Own a segment, if its lock is free, by its footers: until all are known, no checkpoint names it."""
        found = await self._lane.run(self._recovery.take_over, segment)
        if found is None:
            return
        while (seen := await self._lane.run(next, found, None)) is not None:
            self._table.take_over(*seen.looked, seen.held)
            self._note_rest(seen)
        segment.own = True
        logger.info("%s: taken over from a process that exited", segment.name)

    async def _open(self) -> None:
        """Open the segments that are not, and measure the rest. Until that succeeds, it is all that is on the disk."""
        space = self._room.space
        for segment in await self._lane.run(self._recovery.open_all):
            segment.own &= not self.done.is_set()  # Later, it is read only when it is taken over like the others.
            self._segments.add(segment, self._table.add(segment.header.slots))
            space.open(segment.name)
        seen = await self._lane.run(self._recovery.look_around, space.opened)
        if seen is not None:
            self.used_bytes, strangers = seen
            space.note(strangers)
            self._tier.capacity.unseen_bytes = 0

    async def run_checkpoints(self) -> None:
        while True:
            await asyncio.sleep(checkpoint.CHECKPOINT_S)
            if self._writes_checkpoints and (room_bytes := self._promised_bytes()):
                try:
                    # What is written between the two is not in the first: that segment is looked through, not trusted.
                    before_ns = self._tier.clock_ns() - SETTLED_NS
                    segments = await self._lane.run(remembered, list(self._segments.all), before_ns)
                    segments = trusted(segments, self._unsettled())
                    await self._lane.run(self._checkpoint.write, segments, self._table.snapshot())
                finally:
                    self._tier.capacity.release(room_bytes)

    def write_last_checkpoint(self) -> None:
        """Queue it on the lane, when nothing writes any more; only the first closing can."""
        wanted, self._writes_checkpoints = self._writes_checkpoints, False
        if wanted and self._promised_bytes():
            with suppress(BackendClosed):
                segments, snapshot = list(self._segments.all), self._table.snapshot()
                self._lane.submit(self._write_last, segments, self._unsettled(), snapshot)

    def _write_last(self, segments: Sequence[Segment], unsettled: set[str], snapshot: Snapshot) -> None:
        settled = trusted(remembered(segments, self._tier.clock_ns() + SETTLED_NS), unsettled)
        self._checkpoint.write(settled, snapshot)

    def _promised_bytes(self) -> int:
        """Promise room for a new checkpoint; 0 if there is not enough, and the last one stays."""
        wanted_bytes = self._checkpoint.bytes_worst(len(self._table), len(self._segments.all))
        granted_bytes = self._tier.capacity.reserve(wanted_bytes)
        if granted_bytes == wanted_bytes:
            return wanted_bytes
        self._tier.capacity.release(granted_bytes)
        self._tier.counters.count("checkpoints_failed")
        return 0

    def _unsettled(self) -> set[str]:
        return {self._segments.of(slot).name for slot in self._table.unsettled()} | self._distrusted

    def _note(self, seen: Seen) -> None:
        if seen.foreign:
            for chunk in seen.held:
                self._table.found(chunk, foreign=True)
        else:
            self._table.looked(*seen.looked, seen.held)
        self._note_rest(seen)

    def _note_rest(self, seen: Seen) -> None:
        for first, count in seen.free:
            self._table.free.add(first, count)
        for slot, fault in seen.torn:
            self._tier.counters.corrupt(fault)
            self._table.outdated.retire(slot, None)
        if seen.distrusted:
            self._distrusted.add(seen.distrusted)
        self._failed += seen.failed


class Recovery:
    """The blocking part of a start, in a lane: one call at a time."""

    def __init__(self, tier: FsTier, segment_folder: SegmentFolder, checkpoint: SlotCheckpoint) -> None:
        """No chunk counts as used later than now."""
        self._now_ns = tier.clock_ns()
        self.opened: list[Segment] = []
        self.unusable: list[str] = []
        self.failed = 0  # Segments that could not be opened, and folders that could not be listed.
        self.stopped = False
        self._lines = LineLimit(time.monotonic)
        self._untouched: list[Segment] = []  # As the checkpoint says.
        self._taken = np.zeros(0, np.uint8)  # By slot: 1 if the checkpoint names a chunk there.
        self._tier = tier
        self._folder = tier.root
        self._segment_folder = segment_folder
        self._checkpoint = checkpoint

    def open_all(self) -> list[Segment]:
        """Open every segment that is not open; return those. What is gone by then, or cannot be read, is not there."""
        opened, unusable = list[Segment](), list[str]()
        try:
            names = [name for name in self._segment_folder.unopened() if name not in self.unusable]
        except OSError as error:
            self._fail(self._folder.chunks, "cannot be listed", error)
            names = []
        for name in names:
            try:
                found = self._segment_folder.open(name)
            except OSError as error:
                with suppress(OSError):
                    if isinstance(error, FileNotFoundError) and is_absent(self._folder.root_fd, name):
                        continue
                self._fail(name, "cannot be opened", error)
                continue
            if found is None:
                unusable.append(name)
            else:
                opened.append(found)
        if unusable:
            logger.warning(
                "%s: %d segments hold nothing for this tier (a first page that is damaged, of other rows or of a later "
                "version), and go before any chunk when their room is wanted: %s; see %s",
                *(self._folder.chunks, len(unusable), ", ".join(unusable[:NAMED_MAX])),
                Remedy.UNUSABLE,
            )
        self.opened += opened
        self.unusable += unusable
        return opened

    def look_around(self, opened: Collection[str]) -> tuple[int, list[Stranger]] | None:
        """Sweep old files; return the room of those left, and the segments that are not open; None if it is unknown."""
        sweep, folders = self._folder.sweep(self._now_ns / 1e9), (self._folder.chunks, self._tier.context.mapper.folder)
        try:
            for folder in folders:
                for name in with_folder(self._folder.root_fd, folder, os.listdir):
                    sweep(folder, name)
            self._folder.beside.look()
            return self._folder.unfinished_bytes(), self._segment_folder.strangers(opened)
        except OSError as error:
            self._fail(self._folder.chunks, "what is beside its segments cannot be listed", error)
            return None
        finally:
            self._tier.counters.count("scan_swept", sweep.removed)

    def _fail(self, name: str, what: str, error: OSError) -> None:
        self.failed += 1
        if self._lines.allows(f"{name}: {what}"):
            logger.warning("%s: %s: %s; see %s", name, what, error.strerror, Remedy.UNREADABLE)

    def take_over(self, segment: Segment) -> Iterator[Seen] | None:
        """Lock a segment that another process wrote, to yield what its footers say; None if that is not possible."""
        with suppress(OSError):
            if self._segment_folder.take_over(segment):
                return _footers_of(segment, self._folder.root_fd, self._now_ns)
        return None

    def recalled(self) -> Iterator[Recalled]:
        """Yield the chunks of the last checkpoint that lie in opened segments, which have their first slots."""
        memory = self._checkpoint.read()
        if memory is None:
            return
        by_name = {segment.name: segment for segment in self.opened}
        segments = [(said, by_name[said.name]) for said in memory.segments if _is_there(by_name, said)]
        segments.sort(key=lambda pair: pair[0].first_slot)
        if not segments:
            return
        if memory.same_boot:
            times = [(segment, said.written_at_ns) for said, segment in segments]
            self._untouched = [segment for segment, at_ns in times if 0 < at_ns == os.fstat(segment.fd).st_mtime_ns]
        self._taken = np.zeros(max(segment.first_slot + segment.header.slots for segment in self.opened), np.uint8)
        for batch in _recalled(memory.chunks, segments, set(self._untouched), self._now_ns):
            if self.stopped:
                return
            self._taken[batch.slots] = 1
            yield batch

    def recovered(self) -> Iterator[Seen]:
        """Yield the free slots of untouched segments, then all slots of the others by their footers."""
        for segment in self._untouched:
            if self.stopped:
                return  # The chunks may not all have been recalled: what looks free may not be.
            first = segment.first_slot
            yield Seen(free=_runs(first, self._taken[first : first + segment.header.slots]))
        for segment in self.opened:
            if segment not in self._untouched:
                for seen in _footers_of(segment, self._folder.root_fd, self._now_ns):
                    if self.stopped:
                        return
                    yield seen if segment.own else Seen(seen.held, foreign=True, failed=seen.failed)


def _recalled(
    chunks: "NDArray[np.void]", segments: Sequence[tuple[Remembered, Segment]], untouched: set[Segment], now_ns: int
) -> Iterator[Recalled]:
    """Yield the chunks in these segments, in batches, where they are today; the segments in order of their slots."""
    firsts = np.array([said.first_slot for said, _ in segments], np.uint64)
    counts = np.array([said.slots for said, _ in segments], np.uint64)
    firsts_now = np.array([segment.first_slot for _, segment in segments], np.int64)
    candidates = np.array([segment not in untouched for _, segment in segments], np.uint8)
    for start in range(0, len(chunks), INVENTORY_BATCH_KEYS):
        batch = chunks[start : start + INVENTORY_BATCH_KEYS]
        index = np.searchsorted(firsts, batch["slot"], side="right").astype(np.intp) - 1
        places = batch["slot"] - firsts[index]
        good = (index >= 0) & (places < counts[index]) & (batch["sequence"] <= SEQUENCE_MAX)
        batch, index, places = batch[good], index[good], places[good].astype(np.int64)
        used_at_ns = np.where(batch["used_at_ns"] > now_ns + AHEAD_NS, now_ns, batch["used_at_ns"]).astype(np.int64)
        if len(batch):
            slots = firsts_now[index] + places
            yield Recalled(checkpoint.keys_of(batch), slots, batch["sequence"], used_at_ns, candidates[index])


def _is_there(segments: dict[str, Segment], said: Remembered) -> bool:
    segment = segments.get(said.name)
    return segment is not None and segment.own and segment.header.slots == said.slots


def _footers_of(segment: Segment, root_fd: int, now_ns: int) -> Iterator[Seen]:
    """Yield a segment's footers, in batches; a chunk counts as used when it was stored."""
    for start in range(0, segment.header.slots, INVENTORY_BATCH_KEYS):
        count = min(INVENTORY_BATCH_KEYS, segment.header.slots - start)
        taken, held, torn = np.zeros(count, np.uint8), list[SlotEntry](), list[tuple[int, ChunkFault]]()
        distrusted = ""
        try:
            for index, page in enumerate(segment.footers(root_fd, start, count)):
                if bytes(page) == ZEROS:
                    continue
                taken[index] = 1
                slot, footer = segment.first_slot + start + index, _footer_in(page, segment)
                if footer is ChunkFault.VERSION:
                    distrusted = segment.name
                elif isinstance(footer, ChunkFault):
                    torn.append((slot, footer))
                else:
                    held.append(SlotEntry(footer.key, slot, footer.sequence, believable_ns(footer.sequence, now_ns)))
        except OSError as error:
            logger.warning("%s: cannot be looked through: %s; see %s", segment.name, error.strerror, Remedy.UNREADABLE)
            unread = segment.first_slot + start, segment.header.slots - start
            yield Seen(looked=unread, distrusted=segment.name, failed=True)
            return
        first = segment.first_slot + start
        yield Seen(held, (first, count), free=_runs(first, taken), torn=torn, distrusted=distrusted)


def _footer_in(page: memoryview, segment: Segment) -> Footer | ChunkFault:
    footer = read_footer(page)
    if isinstance(footer, ChunkFault):
        return footer
    if (footer.fingerprint, footer.payload_bytes) != (segment.header.fingerprint, segment.header.row_bytes):
        return ChunkFault.NAMESPACE
    return ChunkFault.FOOTER if footer.sequence > SEQUENCE_MAX else footer


def _runs(first_slot: int, taken: NDArray[np.uint8]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(taken, prepend=np.uint8(1), append=np.uint8(1)))
    starts, ends = edges[::2], edges[1::2]
    return list(zip((first_slot + starts).tolist(), (ends - starts).tolist(), strict=True))
