"""The recovery of segments at a start: their list, the part of a checkpoint that is believed, and the footers."""

import logging
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby
from typing import NamedTuple

from kvtier.backend import INVENTORY_BATCH_KEYS, read_folder
from kvtier.remedies import Remedy
from kvtier_backends.fs.disk.below import believable_ns, list_folder
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Fault, Footer, read_footer
from kvtier_backends.fs.disk.remains import is_absent
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.options import SegmentsOptions
from kvtier_backends.fs.segments.checkpoint import Memory, Remembered, SlotCheckpoint
from kvtier_backends.fs.segments.folder import SegmentFolder, Unusable
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.slots import Held

logger = logging.getLogger(__name__)

NAMED_MAX = 8  # Segments in the log; a line must stay one.
ZEROS = bytes(FOOTER_BYTES)
SEQUENCE_MAX = (1 << 63) - 1  # The year 2262, in ns. Greater ones are nobody's, and would leave none for what comes.


class Around(NamedTuple):
    """The tier's files and folders besides segments."""

    taken_bytes: int  # Unfinished files, and segments that are not open.
    measured: bool  # False: it could not be seen how much that is.
    others: int  # Folders of other namespaces, or of this one laid out otherwise.
    swept: int


class Seen(NamedTuple):
    """Some slots, and what is known of them."""

    held: Sequence[Held] = ()
    foreign: bool = False  # Of another process: the chunks are read, and nothing else.
    free: Sequence[tuple[int, int]] = ()  # Runs: the first slot, and how many.
    torn: Sequence[tuple[int, Fault]] = ()
    distrusted: str = ""  # A segment with slots that are neither free nor held: the next start has to look again.
    failed: bool = False  # That segment could not be read to its end.


class Recovery:
    """The blocking part of a start, in a lane: one call at a time."""

    def __init__(
        self, tier: OpenTier[SegmentsOptions], segment_folder: SegmentFolder, checkpoint: SlotCheckpoint
    ) -> None:
        """Begin now: no chunk counts as used later."""
        self._now_ns = tier.clock_ns()
        self.opened: list[Segment] = []
        self.unusable: list[Unusable] = []
        self.failed = 0
        """Segments that could not be opened, and folders that could not be listed."""
        self.stopped = False
        self._folder = tier.root
        self._mapper = tier.context.mapper
        self._segment_folder = segment_folder
        self._checkpoint = checkpoint

    def open_all(self) -> None:
        """Open every segment; those that are gone by then, or cannot be read, are not there."""
        try:
            names = self._segment_folder.names()
        except OSError as error:
            self.failed += 1
            logger.warning("%s: cannot be listed: %s; see %s", self._folder.chunks, error.strerror, Remedy.UNREADABLE)
            return
        for name in names:
            try:
                found = self._segment_folder.open(name)
            except OSError as error:
                with suppress(OSError):
                    if isinstance(error, FileNotFoundError) and is_absent(self._folder.root_fd, name):
                        continue
                self.failed += 1
                logger.warning("%s: cannot be opened: %s; see %s", name, error.strerror, Remedy.UNREADABLE)
                continue
            if isinstance(found, Segment):
                self.opened.append(found)
            else:
                self.unusable.append(found)
        if self.unusable:
            logger.warning(
                "%s: %d segments hold nothing for this tier (a first page that is damaged, of other rows or of a later "
                "version), and go before any chunk when their room is wanted: %s; see %s",
                self._folder.chunks,
                len(self.unusable),
                ", ".join(each.name for each in self.unusable[:NAMED_MAX]),
                Remedy.UNUSABLE,
            )

    def look_around(self) -> Around:
        """Measure and sweep what is besides segments, as far as it can be."""
        sweep = self._folder.sweep(self._now_ns / 1e9)
        taken, measured, names = 0, False, list[str]()
        try:
            for folder in (self._folder.chunks, self._mapper.folder):
                for name in list_folder(self._folder.root_fd, folder):
                    sweep(folder, name)
            self._folder.beside.look()
            taken = self._folder.unfinished_bytes() + self._segment_folder.unopened_bytes()
            measured = True
            names = list_folder(self._folder.root_fd, ".")
        except OSError as error:
            self.failed += 1
            logger.warning(
                "%s: what is beside its segments cannot be listed: %s; see %s",
                self._folder.chunks,
                error.strerror,
                Remedy.UNREADABLE,
            )
        others = sum(name != self._folder.chunks and read_folder(name) is not None for name in names)
        return Around(taken, measured, others, sweep.removed)

    def recovered(self, *, recall: bool) -> Iterator[Seen]:
        """Yield the chunks of the opened segments, which have their first slots. `recall`: read the checkpoint."""
        memory = self._checkpoint.read() if recall else Memory(same_boot=False, segments=[], chunks=iter(()))
        yield from recovered(self.opened, memory, self._folder.root_fd, self._now_ns, lambda: self.stopped)


def recovered(
    opened: Sequence[Segment], memory: Memory, root_fd: int, now_ns: int, stopped: Callable[[], bool]
) -> Iterator[Seen]:
    """Yield the chunks of segments: first believed ones of the checkpoint, then those in other segments' footers."""
    segments = {segment.name: segment for segment in opened}
    remembered = sorted(
        (each for each in memory.segments if _is_there(segments, each)), key=lambda each: each.first_slot
    )
    untouched = [each for each in remembered if memory.same_boot and _is_untouched(segments[each.name], each)]
    held_places = {each.name: bytearray(each.slots) for each in untouched}
    last_uses = {each.name: LastUses(each.slots) for each in remembered if each.name not in held_places}
    recalled = _recalled(memory.chunks, segments, remembered, held_places, last_uses, now_ns)
    free = (Seen(free=_runs(segments[name].first_slot, places)) for name, places in held_places.items())
    others = (segment for segment in opened if segment.name not in held_places)
    footers = (_footers_of(segment, last_uses.pop(segment.name, None), root_fd, now_ns) for segment in others)
    for seen in chain(recalled, free, chain.from_iterable(footers)):
        if stopped():
            return
        yield seen


def _recalled(
    chunks: Iterator[list[Held]],
    segments: dict[str, Segment],
    remembered: Sequence[Remembered],
    held_places: dict[str, bytearray],
    last_uses: dict[str, "LastUses"],
    now_ns: int,
) -> Iterator[Seen]:
    """Yield the chunks that are there because the checkpoint says so, and note the places; of others, the last use."""
    first_slots = [each.first_slot for each in remembered]
    for batch in chunks:
        held: list[Held] = []
        for chunk in batch:
            index = bisect_right(first_slots, chunk.slot) - 1
            if index < 0 or (place := chunk.slot - first_slots[index]) >= remembered[index].slots:
                continue  # Its segment has gone.
            name, used_at_ns = remembered[index].name, believable_ns(chunk.used_at_ns, now_ns)
            if (places := held_places.get(name)) is not None:
                places[place] = 1
                held.append(chunk._replace(slot=segments[name].first_slot + place, used_at_ns=used_at_ns))
            else:
                last_uses[name].note(place, chunk.sequence, used_at_ns)
        yield Seen(held)


class LastUses:
    """The last uses of a segment's chunks, by their places, as far as a checkpoint says."""

    def __init__(self, slots: int) -> None:
        self._sequences = array("Q", bytes(8 * slots))
        self._used_at_ns = array("q", bytes(8 * slots))

    def note(self, place: int, sequence: int, used_at_ns: int) -> None:
        self._sequences[place] = sequence
        self._used_at_ns[place] = used_at_ns

    def of(self, place: int, sequence: int) -> int:
        """Return when the chunk with this sequence number was last used; if that is unknown, when it was stored."""
        return self._used_at_ns[place] if self._sequences[place] == sequence else sequence


def _is_there(segments: dict[str, Segment], remembered: Remembered) -> bool:
    segment = segments.get(remembered.name)
    return segment is not None and segment.header.slots == remembered.slots


def _is_untouched(segment: Segment, remembered: Remembered) -> bool:
    trusted = segment.own and remembered.written_at_ns > 0
    return trusted and os.fstat(segment.fd).st_mtime_ns == remembered.written_at_ns


def _footers_of(segment: Segment, last_uses: LastUses | None, root_fd: int, now_ns: int) -> Iterator[Seen]:
    """Yield a segment's footers, in batches."""
    last_uses = last_uses or LastUses(segment.header.slots)
    for start in range(0, segment.header.slots, INVENTORY_BATCH_KEYS):
        count = min(INVENTORY_BATCH_KEYS, segment.header.slots - start)
        taken, held, torn, distrusted = bytearray(count), list[Held](), list[tuple[int, Fault]](), ""
        try:
            for index, page in enumerate(segment.footers(root_fd, start, count)):
                if bytes(page) == ZEROS:
                    continue
                taken[index] = 1
                slot, footer = segment.first_slot + start + index, _footer_in(page, segment)
                if footer is Fault.VERSION:
                    distrusted = segment.name
                elif isinstance(footer, Fault):
                    torn.append((slot, footer))
                else:
                    used_at_ns = believable_ns(last_uses.of(start + index, footer.sequence), now_ns)
                    held.append(Held(footer.key, slot, footer.sequence, used_at_ns))
        except OSError as error:
            logger.warning("%s: cannot be looked through: %s; see %s", segment.name, error.strerror, Remedy.UNREADABLE)
            yield Seen(distrusted=segment.name, failed=True)
            return
        if segment.own:
            yield Seen(held, False, _runs(segment.first_slot + start, taken), torn, distrusted)
        else:
            yield Seen(held, foreign=True)


def _footer_in(page: memoryview, segment: Segment) -> Footer | Fault:
    """Return a footer of this segment, or its fault."""
    footer = read_footer(page)
    if isinstance(footer, Fault):
        return footer
    if (footer.fingerprint, footer.payload_bytes) != (segment.header.fingerprint, segment.header.row_bytes):
        return Fault.NAMESPACE
    return Fault.FOOTER if footer.sequence > SEQUENCE_MAX else footer


def _runs(first_slot: int, taken: bytearray) -> list[tuple[int, int]]:
    """Return the runs of places that nothing is in."""
    runs: list[tuple[int, int]] = []
    for is_taken, places in groupby(range(len(taken)), taken.__getitem__):
        if not is_taken:
            run = list(places)
            runs.append((first_slot + run[0], len(run)))
    return runs
