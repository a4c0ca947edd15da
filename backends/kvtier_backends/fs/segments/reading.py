"""What a start reads in a lane: which segments there are, what a checkpoint says of them, and footers of the others."""

import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from kvtier.backend import INVENTORY_BATCH_KEYS, read_folder
from kvtier_backends.fs.disk.below import believable_ns, open_folder
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Fault, Footer, read_footer
from kvtier_backends.fs.disk.temporaries import Sweep
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.options import SegmentsOptions
from kvtier_backends.fs.segments.checkpoint import Memory, Remembered, SlotCheckpoint
from kvtier_backends.fs.segments.folder import SegmentFolder, Unusable
from kvtier_backends.fs.segments.segment import Header, Segment
from kvtier_backends.fs.segments.slots import Held

logger = logging.getLogger(__name__)

ZEROS = bytes(FOOTER_BYTES)
SEQUENCE_MAX = (1 << 63) - 1  # The year 2262, in ns. Greater ones are nobody's, and would leave none for what comes.


class Around(NamedTuple):
    """What lies in the tier's folders besides segments, and is the tier's."""

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

    def __init__(
        self, tier: OpenTier[SegmentsOptions], segment_folder: SegmentFolder, checkpoint: SlotCheckpoint
    ) -> None:
        """Begin now: what says that it was used later was used now."""
        self._now_ns = tier.clock_ns()
        self.opened: list[Segment] = []
        self.unusable: list[Unusable] = []
        self.unopened_bytes = 0
        """What segments take that could not be opened."""
        self.failed = 0
        """Segments that could not be read to their end."""
        self.stopped = False
        self.distrusted: set[str] = set()
        """Names of segments with slots that are neither free nor held: the next start has to look again."""
        self._folder = tier.root
        self._mapper = tier.context.mapper
        self._segment_folder = segment_folder
        self._checkpoint = checkpoint
        self._memory = Memory(same_boot=False, segments=[], chunks=iter(()))
        self._last_uses: dict[str, tuple[array[int], array[int]]] = {}  # Sequence numbers, and times, by place.
        self._trusted: dict[str, Remembered] = {}
        self._held_places: dict[str, bytearray] = {}
        self._batches: Iterator[tuple[Segment, Seen]] = iter(())

    def open_all(self) -> None:
        """Open every segment; those that are gone by then, or cannot be read, are not there."""
        try:
            names = self._segment_folder.names()
        except OSError as error:
            self.failed += 1
            logger.warning("%s: cannot be listed: %s", self._folder.chunks, error.strerror)
            return
        for name in names:
            try:
                found = self._segment_folder.open(name)
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
            for folder in (self._folder.chunks, self._mapper.folder):
                for name in _names(self._folder.root_fd, folder):
                    sweep(folder, name)
            taken += self._folder.beside_bytes() + self._folder.unfinished_bytes()
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
            trusted = segment.own and remembered.written_at_ns > 0
            untouched = trusted and os.fstat(segment.fd).st_mtime_ns == remembered.written_at_ns
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
                    used = believable_ns(chunk.used_at_ns, self._now_ns)
                    recalled.append(chunk._replace(slot=opened[each.name].first_slot + place, used_at_ns=used))
                elif each.name in self._last_uses and place < each.slots:
                    sequences, used_at_ns = self._last_uses[each.name]
                    sequences[place] = chunk.sequence
                    used_at_ns[place] = believable_ns(chunk.used_at_ns, self._now_ns)
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
                for index, page in enumerate(segment.footers(self._folder.root_fd, start, count)):
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
                    elif footer.sequence > SEQUENCE_MAX:
                        seen.torn.append((slot, Fault.FOOTER))
                    else:
                        same = sequences is not None and sequences[start + index] == footer.sequence
                        used = used_at_ns[start + index] if same and used_at_ns is not None else footer.sequence
                        used = believable_ns(used, self._now_ns)
                        seen.held.append(Held(footer.key, slot, footer.sequence, used))
            except OSError as error:
                self.failed += 1
                self.distrusted.add(segment.name)
                logger.warning("%s: cannot be looked through: %s", segment.name, error.strerror)
                return
            seen.free.extend(_runs(segment.first_slot + start, taken))
            yield segment, seen


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
    fd = open_folder(root_fd, folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)
