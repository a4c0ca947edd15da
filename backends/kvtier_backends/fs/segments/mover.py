"""The mover: it fills slots from rows, and drains them into rows and verifies these.

Neighbouring slots are one call to the disk. The catalog decides which slots; it has a stored chunk only once the batch
was written and synced. A slot may be written to while it is read. The bytes are verified. If they are not the chunk,
the catalog says whether that is in another slot by now, and it is read there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

from kvtier.backend import Lanes, OffloadKey, Outcome, Read, Write, in_thread, in_threads
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier_backends.fs.disk.footer import GONE, LEFT_ALONE, ChunkFault, Packing, failure
from kvtier_backends.fs.disk.lanes import FsLanes, Pages, share_chunks, share_least, share_out
from kvtier_backends.fs.disk.reads import Reads, Wanted, read_all, write_all
from kvtier_backends.fs.layout import Counters
from kvtier_backends.fs.segments.catalog import NO_SLOT, Doubt, Lease, LocalCatalog, Reservation, Verdict
from kvtier_backends.fs.segments.kept import KeptCatalog
from kvtier_backends.fs.segments.segment import Segment, Segments, sync

LOOKS_MAX = 4  # A chunk that has moved so often while it was read is missed.
PIECE_BYTES = 4 << 20  # Of a run, read in one call: while one is verified, others are under way.
RUN_SLOTS_MAX = 512  # Two buffers a slot; Linux takes 1,024 in one call (IOV_MAX).


class SlotPart(NamedTuple):
    slot: int
    position: int  # In the batch.
    key: OffloadKey
    row: memoryview
    sequence: int  # To be written, or of the last chunk that the slot had when the read began.


class SlotRun(NamedTuple):
    """Chunks in neighbouring slots."""

    segment: Segment
    parts: Sequence[SlotPart]

    @property
    def offset(self) -> int:
        return self.segment.header.offset(self.parts[0].slot - self.segment.first_slot)

    def pieces(self, piece_bytes: int) -> "list[SlotRun]":
        """Split it into runs of equal length, of about `piece_bytes` each and at least one slot."""
        count = -(-len(self.parts) // max(1, piece_bytes // self.segment.header.slot_bytes))
        size = -(-len(self.parts) // count)
        return [SlotRun(self.segment, self.parts[start : start + size]) for start in range(0, len(self.parts), size)]

    def alone(self) -> "list[SlotRun]":
        return [SlotRun(self.segment, [part]) for part in self.parts]


@dataclass(slots=True)
class SlotShare:
    """One lane's part of a batch, and the results, in the order of the parts: also of a call that was cancelled."""

    runs: Sequence[SlotRun]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    faults: dict[int, ChunkFault] = field(default_factory=dict[int, ChunkFault])  # By position, of loads.
    gone: int = 0  # Failures that say that the whole file system is away.

    @property
    def parts(self) -> list[SlotPart]:
        return [part for run in self.runs for part in run.parts]


def shares_of(segments: Segments, parts: Iterable[SlotPart], lanes: int, most: int, least: int = 1) -> list[SlotShare]:
    """Split a batch into shares as `share_out` does, neighbours together."""
    ordered = sorted(parts, key=attrgetter("slot"))
    return [SlotShare(list(runs_of(segments, part))) for part in share_out(ordered, lanes, most, least)]


def runs_of(segments: Segments, ordered: Sequence[SlotPart]) -> Iterator[SlotRun]:
    start = 0
    while start < len(ordered):
        first = ordered[start].slot
        segment = segments.of(first)
        most = min(len(ordered) - start, RUN_SLOTS_MAX, segment.first_slot + segment.header.slots - first)
        count = 1
        while count < most and ordered[start + count].slot == first + count:
            count += 1
        yield SlotRun(segment, ordered[start : start + count])
        start += count


class SlotIo(NamedTuple):
    """The lanes, packing and counters with which one tier's bytes are moved."""

    row_bytes: int
    lanes: FsLanes
    packing: Packing
    reads: Reads
    counters: Counters
    fsync: bool

    def pages(self, lanes: Lanes) -> Pages:
        return Pages(lanes.count, share_chunks(self.row_bytes) * self.packing.beside_bytes)


class SlotMover:
    """The loads and stores of one tier, a batch at a time. Belongs to the loop's thread; what blocks runs in lanes."""

    def __init__(self, io: SlotIo, catalog: LocalCatalog | KeptCatalog) -> None:
        self._io = io
        self._catalog = catalog
        self._packing = io.packing
        self._share_chunks = share_chunks(io.row_bytes)
        self._share_least = share_least(io.row_bytes, io.reads.queue_bytes)
        self._load_pages, self._store_pages = io.pages(io.lanes.load), io.pages(io.lanes.store)

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        """Load the chunks; return the outcomes, and how many say that the file system is away."""
        outcomes: list[Outcome] = [None] * len(reads)
        with self._io.lanes.loads_first.loading():
            lease = await self._catalog.lease([read.key for read in reads])
            loaded = [False] * len(reads)
            try:
                gone = await self._load(reads, lease, outcomes)
                loaded = [outcome is None for outcome in outcomes]
            finally:
                self._catalog.release(lease, loaded)
        return outcomes, gone

    async def _load(self, reads: Sequence[Read], lease: Lease, outcomes: list[Outcome]) -> int:
        left, gone = list[SlotPart](), 0
        for position, ((key, into), slot, sequence) in enumerate(zip(reads, lease.slots, lease.sequences, strict=True)):
            if slot == NO_SLOT:
                outcomes[position] = ChunkMissing(f"{key.hex()}: no slot")
            else:
                left.append(SlotPart(slot, position, key, into, sequence))
        for _ in range(LOOKS_MAX):
            if not left:
                break
            left, gone_now = await self._look(left, outcomes)
            gone += gone_now
        return gone

    async def _look(self, left: Sequence[SlotPart], outcomes: list[Outcome]) -> tuple[list[SlotPart], int]:
        """Read the slots; return the chunks that are in other slots by now, and the failures that say it is away."""
        lanes = self._io.lanes.load
        shares = shares_of(self._catalog.segments, left, lanes.count, self._share_chunks, self._share_least)
        await in_threads(lanes, [partial(self._drain, share) for share in shares])
        doubtful: list[tuple[SlotPart, ChunkFault | None]] = []
        for share in shares:
            for part, outcome in zip(share.parts, share.outcomes, strict=True):
                outcomes[part.position] = outcome
                fault = share.faults.get(part.position)
                if outcome is not None or fault is not None:
                    doubtful.append((part, fault))
        again: list[SlotPart] = []
        if doubtful:
            doubts = [Doubt(part.key, part.slot, part.sequence, fault) for part, fault in doubtful]
            judged = await self._catalog.judge(doubts)
            for (part, fault), (verdict, slot, sequence) in zip(doubtful, judged, strict=True):
                if verdict == Verdict.MOVED:
                    again.append(part._replace(slot=slot, sequence=sequence))
                if verdict != Verdict.STAYS:
                    outcomes[part.position] = self._outcome(part, fault, verdict)
        return again, sum(share.gone for share in shares)

    def _outcome(self, part: SlotPart, fault: ChunkFault | None, verdict: Verdict) -> Outcome:
        name, counters = part.key.hex(), self._io.counters
        if fault is not None and verdict == Verdict.LEFT:
            counter, why = LEFT_ALONE[fault]
            counters.count(counter)
            return ChunkMissing(f"{name}: {why}; left alone")
        if fault is not None and verdict == Verdict.CORRUPT:
            counters.corrupt(fault)
            return ChunkCorrupt(f"{name}: {fault}: slot {part.slot}")
        return ChunkMissing(f"{name}: not in its slot any more")

    def _drain(self, share: SlotShare) -> None:
        """Fill the share's rows. A fault need not be one: the slot may have got another chunk meanwhile. Blocks."""
        pieces = [piece for run in share.runs for piece in run.pieces(PIECE_BYTES)]
        outcomes = [list[Outcome]() for _ in pieces]
        with self._load_pages.one() as pages:
            self._io.reads(self._wanted(pieces, pages, share, outcomes))
        share.outcomes += chain.from_iterable(outcomes)

    def _wanted(
        self, pieces: Sequence[SlotRun], pages: memoryview, share: SlotShare, outcomes: Sequence[list[Outcome]]
    ) -> Iterator[Wanted]:
        left = self._split(pages)
        for piece, found in zip(pieces, outcomes, strict=True):
            besides = list(islice(left, len(piece.parts)))
            size_bytes = len(piece.parts) * piece.segment.header.slot_bytes
            came = partial(self._came, piece, besides, share, found)
            yield Wanted(piece.segment.fd, self._places(piece, besides), piece.offset, size_bytes, came)

    def _came(
        self,
        piece: SlotRun,
        besides: Sequence[memoryview],
        share: SlotShare,
        found: list[Outcome],
        result: int | OSError,
    ) -> None:
        error = result if isinstance(result, OSError) else None
        if not isinstance(result, OSError):
            try:
                read_all(piece.segment.fd, self._places(piece, besides), piece.offset, result)
            except OSError as other:
                error = other.with_traceback(None)
        if error is None:
            for part, beside in zip(piece.parts, besides, strict=True):
                fault = self._packing.judge(part.key, part.row, beside)
                if fault is not None:
                    share.faults[part.position] = fault
            found += [None] * len(piece.parts)
        elif len(piece.parts) > 1:  # One bad place costs its own chunk only.
            for alone, beside in zip(piece.alone(), besides, strict=True):
                self._came(alone, [beside], share, found, 0)
        else:
            share.gone += error.errno in GONE
            found.append(failure(piece.parts[0].key, error))

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        """Store the chunks that fit, the leading ones first; return what `load` does."""
        outcomes: list[Outcome] = [None] * len(writes)
        reservation = await self._catalog.reserve([write.key for write in writes])
        gone = await self._write(writes, reservation, outcomes)
        for positions, reason, error in reservation.refusals:
            refused = [writes[position] for position in positions]
            if error is None:
                why = self._io.counters.refused(refused, reason)
            else:
                why = [failure(write.key, error) for write in refused]
                gone += len(refused) * (error.errno in GONE)
            for position, outcome in zip(positions, why, strict=True):
                outcomes[position] = outcome
        return outcomes, gone

    async def _write(self, writes: Sequence[Write], reservation: Reservation, outcomes: list[Outcome]) -> int:
        lanes, fsync, count = self._io.lanes.store, self._io.fsync, len(reservation.slots)
        written = [False] * count
        shares: list[SlotShare] = []
        synced: list[OSError | None] = [] if fsync else [None]
        told = False
        try:
            parts = [
                SlotPart(slot, index, *writes[position], reservation.sequence(index))
                for index, (position, slot) in enumerate(zip(reservation.positions, reservation.slots, strict=True))
            ]
            shares = shares_of(self._catalog.segments, parts, lanes.count, self._share_chunks)
            await in_threads(lanes, [partial(self._fill, share) for share in shares])
            if fsync:
                segments = dict.fromkeys(run.segment for share in shares for run in share.runs)
                await in_thread(lanes, _sync, segments, synced)
            told = True
        finally:
            results = _results(shares, synced, written)
            self._catalog.publish(reservation, written, told=told)
        for index, outcome in results.items():
            outcomes[reservation.positions[index]] = outcome
        error = synced[0] if synced else None
        away = error is not None and error.errno in GONE
        return count if away else sum(share.gone for share in shares)

    def _fill(self, share: SlotShare) -> None:
        """Write the share's chunks, and see whether that was of use. Blocks, in a lane."""
        loads_first = self._io.lanes.loads_first
        with self._store_pages.one() as pages:
            for run in share.runs:
                done = 0
                while done < len(run.parts):
                    with loads_first.storing():  # Fewer slots in one call where loads wait for the disk.
                        count = max(1, loads_first.slice_bytes // run.segment.header.slot_bytes)
                        part = run.parts[done : done + count]
                        share.outcomes += self._fill_run(SlotRun(run.segment, part), pages, share)
                        done += len(part)
        if errors := self._catalog.lost_names({run.segment for run in share.runs}):
            segments = [run.segment for run in share.runs for _ in run.parts]
            for index, (segment, written) in enumerate(zip(segments, share.parts, strict=True)):
                if segment in errors and share.outcomes[index] is None:
                    share.outcomes[index] = failure(written.key, errors[segment])

    def _fill_run(self, run: SlotRun, pages: memoryview, share: SlotShare) -> list[Outcome]:
        besides = list(islice(self._split(pages), len(run.parts)))
        for part, beside in zip(run.parts, besides, strict=True):
            self._packing.close(part.key, part.row, beside, part.sequence)
        try:
            write_all(run.segment.fd, self._places(run, besides), run.offset)
        except OSError as error:
            if len(run.parts) > 1:
                return [outcome for alone in run.alone() for outcome in self._fill_run(alone, pages, share)]
            share.gone += error.errno in GONE
            return [failure(run.parts[0].key, error)]
        return [None] * len(run.parts)

    def _places(self, run: SlotRun, besides: Sequence[memoryview]) -> list[memoryview]:
        pairs = zip(run.parts, besides, strict=True)
        return [place for part, beside in pairs for place in self._packing.places(part.row, beside)]

    def _split(self, pages: memoryview) -> Iterator[memoryview]:
        size = self._packing.beside_bytes
        return (pages[start : start + size] for start in range(0, len(pages), size))


def _results(shares: Sequence[SlotShare], synced: Sequence[OSError | None], written: list[bool]) -> dict[int, Outcome]:
    """Set which slots were written, by index, and return the outcomes.

    `synced`: empty if the batch was not, as a cancelled call's lane has not come to it; otherwise its error.
    """
    outcomes: dict[int, Outcome] = {}
    for share in shares:
        for part, outcome in zip(share.parts, share.outcomes, strict=False):  # A cancelled lane has not come to some.
            if outcome is None and synced and synced[0] is not None:
                outcome = failure(part.key, synced[0])
            written[part.position] = outcome is None and bool(synced)
            outcomes[part.position] = outcome
    return outcomes


def _sync(segments: Iterable[Segment], synced: list[OSError | None]) -> None:
    """Sync, and write down that it is done: a call that is cancelled meanwhile knows it, too. Blocks, in a lane."""
    try:
        sync(segments)
        synced.append(None)
    except OSError as error:
        synced.append(error.with_traceback(None))
