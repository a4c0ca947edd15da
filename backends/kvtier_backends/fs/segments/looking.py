"""What a tier with segments does at its start, and writes down for the next: which slot has which key's chunk.

The checkpoint's word is taken for segments that nobody has written to since. Of the others, every slot's footer is
read, and nothing else; until then their slots are nobody's. All of it runs in a lane of its own.
"""

import asyncio
import logging
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import aiofiles.os

from kvtier.backend import INVENTORY_BATCH_KEYS
from kvtier.errors import BackendClosed
from kvtier.lend import Lanes
from kvtier.namespace import FileMapper
from kvtier.naming import read_folder
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.faults import Fault
from kvtier_backends.fs.folder import Folder
from kvtier_backends.fs.folder_sizes import SECTOR_BYTES, taken_bytes
from kvtier_backends.fs.footer import FOOTER_BYTES, Footer, read_footer
from kvtier_backends.fs.segments.catalog import Catalog, Held, Snapshot
from kvtier_backends.fs.segments.checkpoint import Memory, Remembered, SlotCheckpoint
from kvtier_backends.fs.segments.files import NAME, Segment, SegmentFiles, Unusable
from kvtier_backends.fs.segments.header import Header
from kvtier_backends.fs.segments.room import Room
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.sweep import Sweep

logger = logging.getLogger(__name__)

SETTLED_NS = 1_000_000_000  # A file's time says nothing of what was written so shortly before it was looked at.
ZEROS = bytes(FOOTER_BYTES)


class Around(NamedTuple):
    """What lies in the tier's folders besides segments."""

    taken_bytes: int
    others: int  # Folders of other namespaces, or of this one laid out otherwise.
    swept: int


class Seen(NamedTuple):
    """What some slots' footers say."""

    held: list[Held]
    free: list[tuple[int, int]]  # Runs: the first slot, and how many.
    torn: list[tuple[int, Fault]]


class Reading:
    """The start's blocking part, in a lane: one call at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, files: SegmentFiles, checkpoint: SlotCheckpoint) -> None:
        self.opened: list[Segment] = []
        self.unusable: list[Unusable] = []
        self.unopened_bytes = 0
        """What segments take that could not be opened."""
        self.failed = 0
        """Segments that could not be read to their end."""
        self.stopped = False
        self.distrusted: set[str] = set()
        """Names of segments with slots that are neither free nor held: the next start has to look again."""
        self._folder = folder
        self._mapper = mapper
        self._files = files
        self._checkpoint = checkpoint
        self._memory = Memory(same_boot=False, segments=[], chunks=iter(()))
        self._last_uses: dict[str, tuple[array[int], array[int]]] = {}  # Sequence numbers, and times, by place.
        self._trusted: dict[str, Remembered] = {}
        self._held_places: dict[str, bytearray] = {}
        self._batches: Iterator[tuple[Segment, Seen]] = iter(())

    def open_all(self) -> None:
        """Open every segment; those that are gone by then, or cannot be read, are not there."""
        try:
            names = self._files.names()
        except OSError as error:
            self.failed += 1
            logger.warning("%s: cannot be listed: %s", self._folder.chunks, error.strerror)
            return
        for name in names:
            try:
                found = self._files.open(name)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.failed += 1
                with suppress(OSError):
                    self.unopened_bytes += self._folder.taken_bytes(name)
                logger.warning("%s: cannot be opened: %s", name, error.strerror)
                continue
            if isinstance(found, Segment):
                self.opened.append(found)
            else:
                self.unusable.append(found)

    def look_around(self, now_s: float) -> Around:
        """Measure and sweep what is besides segments, as far as it can be."""
        sweep = Sweep(self._folder.root_fd, self._folder.writer, now_s)
        taken, names = self.unopened_bytes, list[str]()
        try:
            for name in (self._folder.chunks, self._mapper.folder):
                taken += self._measured(name, sweep)
            names = _names(self._folder.root_fd, ".")
        except OSError as error:
            self.failed += 1
            logger.warning("%s: what is beside its segments cannot be listed: %s", self._folder.chunks, error.strerror)
        others = sum(name != self._folder.chunks and read_folder(name) is not None for name in names)
        return Around(taken, others, sweep.removed)

    def read_checkpoint(self, *, wanted: bool) -> None:
        """Find out which segments' word the last checkpoint has, when the segments have their first slots."""
        if wanted:
            self._memory = self._checkpoint.read()
        opened = {segment.name: segment for segment in self.opened}
        for remembered in self._memory.segments:
            segment = opened.get(remembered.name)
            if segment is None or segment.header.slots != remembered.slots:
                continue
            untouched = segment.own and os.fstat(segment.fd).st_mtime_ns == remembered.written_at_ns
            if untouched and self._memory.same_boot:
                self._trusted[segment.name] = remembered
                self._held_places[segment.name] = bytearray(segment.header.slots)
            else:
                blank = [0] * remembered.slots
                self._last_uses[segment.name] = array("Q", blank), array("q", blank)

    def next_recalled(self) -> list[Held]:
        """Return the next chunks that are there because the checkpoint says so; an empty list at the end."""
        remembered = sorted(self._memory.segments, key=lambda each: each.first_slot)
        first_slots = [each.first_slot for each in remembered]
        opened = {segment.name: segment for segment in self.opened}
        while not self.stopped and (batch := next(self._memory.chunks, None)):
            recalled: list[Held] = []
            for chunk in batch:
                if (index := bisect_right(first_slots, chunk.slot) - 1) < 0:
                    continue
                each = remembered[index]
                place = chunk.slot - each.first_slot
                if each.name in self._trusted and place < each.slots:
                    self._held_places[each.name][place] = 1
                    recalled.append(chunk._replace(slot=opened[each.name].first_slot + place))
                elif each.name in self._last_uses and place < each.slots:
                    sequences, used_at_ns = self._last_uses[each.name]
                    sequences[place], used_at_ns[place] = chunk.sequence, chunk.used_at_ns
            if recalled:
                return recalled
        return []

    def free_of_trusted(self) -> list[tuple[int, int]]:
        """Return what is free in the segments that the checkpoint speaks for, when all has been recalled."""
        runs: list[tuple[int, int]] = []
        for segment in self.opened:
            if (places := self._held_places.pop(segment.name, None)) is not None:
                runs += _runs(segment.first_slot, places)
        return runs

    def next_seen(self) -> tuple[Segment, Seen] | None:
        """Return what the next footers say that have to be looked at; None at the end."""
        while not self.stopped:
            if (batch := next(self._batches, None)) is not None:
                return batch
            segment = next((each for each in self.opened if each.name not in self._trusted), None)
            if segment is None:
                return None
            self._trusted[segment.name] = Remembered(segment.name, 0, 0, 0)
            self._batches = self._look_through(segment)
        return None

    def _look_through(self, segment: Segment) -> Iterator[tuple[Segment, Seen]]:
        sequences, used_at_ns = self._last_uses.pop(segment.name, (None, None))
        for start in range(0, segment.header.slots, INVENTORY_BATCH_KEYS):
            count = min(INVENTORY_BATCH_KEYS, segment.header.slots - start)
            seen, taken = Seen([], [], []), bytearray(count)
            try:
                for index, page in enumerate(self._files.footers(segment, start, count)):
                    slot = segment.first_slot + start + index
                    if bytes(page) == ZEROS:
                        continue
                    taken[index] = 1
                    footer = read_footer(page)
                    if footer is Fault.VERSION:
                        self.distrusted.add(segment.name)
                    elif isinstance(footer, Fault):
                        seen.torn.append((slot, footer))
                    elif not _belongs(footer, segment.header):
                        seen.torn.append((slot, Fault.NAMESPACE))
                    else:
                        same = sequences is not None and sequences[start + index] == footer.sequence
                        used = used_at_ns[start + index] if same and used_at_ns is not None else footer.sequence
                        seen.held.append(Held(footer.key, slot, footer.sequence, used))
            except OSError as error:
                self.failed += 1
                self.distrusted.add(segment.name)
                logger.warning("%s: cannot be looked through: %s", segment.name, error.strerror)
                return
            seen.free.extend(_runs(segment.first_slot + start, taken))
            yield segment, seen

    def _measured(self, folder: str, sweep: Sweep) -> int:
        """Return what a folder and all in it takes but for segments, and remove what the dead have left."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._folder.root_fd)
        try:
            total = os.fstat(fd).st_blocks * SECTOR_BYTES
            with os.scandir(fd) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        total += self._measured(f"{folder}/{entry.name}", sweep)
                    elif not (folder == self._folder.chunks and NAME.fullmatch(entry.name)):
                        sweep(folder, entry.name)
                        with suppress(FileNotFoundError):
                            total += taken_bytes(os.stat(entry.name, dir_fd=fd, follow_symlinks=False))
        finally:
            os.close(fd)
        return total


class SlotLooking:
    """One tier's start and its checkpoints. Belongs to the loop's thread."""

    def __init__(
        self,
        reading: Reading,
        catalog: Catalog,
        segments: Segments,
        room: Room,
        capacity: Capacity,
        tally: Tally,
        *,
        lane: Lanes,
        checkpoint: SlotCheckpoint,
        checkpoint_s: float,
    ) -> None:
        """`checkpoint_s`: how often one is written; 0: never, nor read."""
        self.done = asyncio.Event()
        """Set once everything that was there at the start is known."""
        self._reading = reading
        self._catalog = catalog
        self._segments = segments
        self._room = room
        self._capacity = capacity
        self._tally = tally
        self._lane = lane
        self._checkpoint = checkpoint
        self._checkpoint_s = checkpoint_s
        self._ended = False

    def stop(self) -> None:
        """Have the look end soon."""
        self._reading.stopped = True

    async def run(self) -> None:
        """Look what is there, once."""
        reading, catalog, tally = self._reading, self._catalog, self._tally
        await _open_all(reading, executor=self._lane)
        around = await _look_around(reading, time.time(), executor=self._lane)
        for segment in reading.opened:
            self._segments.add(segment, catalog.add(segment.header.slots))
        self._room.unusable += reading.unusable
        self._capacity.other_bytes += around.taken_bytes + sum(each.allocated_bytes for each in reading.unusable)
        self._capacity.unseen_bytes = 0
        self._room.opened.set()
        await _read_checkpoint(reading, wanted=self._checkpoint_s > 0, executor=self._lane)
        while batch := await _next_recalled(reading, executor=self._lane):
            for chunk in batch:
                catalog.found(chunk)
            self._room.changed()
        self._free(await _free_of_trusted(reading, executor=self._lane))
        while (told := await _next_seen(reading, executor=self._lane)) is not None:
            self._note(*told)
        tally.count("scan_skipped", len(reading.unusable))
        tally.count("scan_failed", reading.failed)
        tally.count("scan_swept", around.swept)
        tally.count("scan_others", around.others)
        catalog.scan_ended(complete=not reading.failed)
        await self._room.shrink()
        self.done.set()
        self._room.changed()

    async def run_checkpoints(self) -> None:
        """Write down what is known every so often."""
        while self._checkpoint_s:
            await asyncio.sleep(self._checkpoint_s)
            if self.done.is_set() and (room_bytes := self._room_for_checkpoint()) is not None:
                try:
                    now_ns = time.time_ns()
                    segments = await _remembered(list(self._segments.all), now_ns - SETTLED_NS, executor=self._lane)
                    segments = trusted(segments, self._unsettled())
                    await _write(self._checkpoint, segments, self._catalog.snapshot(), executor=self._lane)
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
        self._tally.count("checkpoints_failed")
        return None

    def _note(self, segment: Segment, seen: Seen) -> None:
        for chunk in seen.held:
            self._catalog.found(chunk, foreign=not segment.own)
        if segment.own:
            self._free(seen.free)
            for slot, fault in seen.torn:
                self._tally.corrupt(fault)
                self._catalog.outdated.retire(slot, None)
        self._room.changed()

    def _free(self, runs: Sequence[tuple[int, int]]) -> None:
        for first, count in runs:
            self._catalog.free.add(first, count)


def remembered(segments: Sequence[Segment], before_ns: int) -> list[Remembered]:
    """Return segments as a checkpoint names them; those written to since that time are not to be trusted. Blocks."""
    found: list[Remembered] = []
    for segment in segments:
        if segment.own and not segment.closed:
            try:
                written_at_ns = os.fstat(segment.fd).st_mtime_ns
            except OSError:
                continue  # Another lane has just removed it.
            trusted_ns = written_at_ns if written_at_ns < before_ns else 0
            found.append(Remembered(segment.name, segment.first_slot, segment.header.slots, trusted_ns))
    return found


def trusted(segments: Sequence[Remembered], unsettled: set[str]) -> list[Remembered]:
    return [each._replace(written_at_ns=0) if each.name in unsettled else each for each in segments]


_open_all = aiofiles.os.wrap(Reading.open_all)
_look_around = aiofiles.os.wrap(Reading.look_around)
_read_checkpoint = aiofiles.os.wrap(Reading.read_checkpoint)
_next_recalled = aiofiles.os.wrap(Reading.next_recalled)
_free_of_trusted = aiofiles.os.wrap(Reading.free_of_trusted)
_next_seen = aiofiles.os.wrap(Reading.next_seen)
_remembered = aiofiles.os.wrap(remembered)
_write = aiofiles.os.wrap(SlotCheckpoint.write)


def _belongs(footer: Footer, header: Header) -> bool:
    return (footer.fingerprint, footer.payload_bytes) == (header.fingerprint, header.row_bytes)


def _runs(first_slot: int, taken: bytearray) -> list[tuple[int, int]]:
    """Return the runs of places that nothing is in."""
    runs: list[tuple[int, int]] = []
    for is_taken, places in groupby(range(len(taken)), taken.__getitem__):
        if not is_taken:
            run = list(places)
            runs.append((first_slot + run[0], len(run)))
    return runs


def _names(root_fd: int, folder: str) -> list[str]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root_fd)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
