"""A lane's share of a batch: chunks read or written in runs, each verified and answered for by itself."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import TypeVar

from kvtier.backend import Lanes, Outcome, Read, Write
from kvtier_backends.fs.disk.footer import GONE, ChunkFault, failure
from kvtier_backends.fs.disk.lanes import Pages, share_chunks
from kvtier_backends.fs.disk.reads import Wanted
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.segments.runs import SlotPart, SlotRun, SlotShare
from kvtier_backends.fs.segments.segment import read_all, write_all

T = TypeVar("T")

PIECE_BYTES = 4 << 20  # Of a run, read in one call: while one is verified, others are under way.


class SlotChunks:
    """The blocking part of loads and stores of slots. As many threads may call at once as there are lanes."""

    def __init__(self, tier: OpenTier, lanes: Lanes) -> None:
        """Make pages for footers, for each of these lanes."""
        self._loads_first = tier.lanes.loads_first
        self._reads = tier.root.reads
        self._packing = tier.packing
        self._pages = Pages(lanes.count, share_chunks(tier.context.row_bytes) * tier.packing.beside_bytes)

    def load(self, share: SlotShare[Read], faults: dict[int, ChunkFault]) -> None:
        """Fill the share's buffers, and note by position in the batch what is not the chunk that was asked for.

        A fault need not be one: the slot may have got another chunk meanwhile. The caller knows.
        """
        pieces = [piece for run in share.runs for piece in run.pieces(PIECE_BYTES)]
        outcomes = [list[Outcome]() for _ in pieces]
        with self._pages.one() as pages:
            self._reads(self._wanted(pieces, pages, faults, share, outcomes))
        share.outcomes += chain.from_iterable(outcomes)

    def store(self, share: SlotShare[tuple[Write, int]]) -> None:
        """Write the share's chunks, each with its sequence number."""
        with self._pages.one() as pages:
            for run in share.runs:
                done = 0
                while done < len(run.parts):
                    with self._loads_first.storing():
                        part = run.parts[done : done + self._slice_slots(run)]
                        share.outcomes += self._store(SlotRun(run.segment, part), pages, share)
                        done += len(part)

    def _slice_slots(self, run: SlotRun[tuple[Write, int]]) -> int:
        """Return how many slots to write in one call: fewer where loads wait for the disk."""
        return max(1, self._loads_first.slice_bytes // run.segment.header.slot_bytes)

    def _wanted(
        self,
        pieces: Sequence[SlotRun[Read]],
        pages: memoryview,
        faults: dict[int, ChunkFault],
        share: SlotShare[Read],
        outcomes: Sequence[list[Outcome]],
    ) -> Iterator[Wanted]:
        left = self._split(pages)
        for piece, found in zip(pieces, outcomes, strict=True):
            besides = list(islice(left, len(piece.parts)))
            size_bytes = len(piece.parts) * piece.segment.header.slot_bytes
            came = partial(self._came, piece, besides, faults, share, found)
            yield Wanted(piece.segment.fd, self._places(piece, besides), piece.offset, size_bytes, came)

    def _came(
        self,
        piece: SlotRun[Read],
        besides: Sequence[memoryview],
        faults: dict[int, ChunkFault],
        share: SlotShare[Read],
        found: list[Outcome],
        result: int | OSError,
    ) -> None:
        """Record the outcomes of neighbouring slots that were read in one call."""
        error = _read_on(piece, self._places(piece, besides), result)
        if error is None:
            for part, beside in zip(piece.parts, besides, strict=True):
                fault = self._packing.judge(part.item.key, part.item.into, beside)
                if fault is not None:
                    faults[part.position] = fault
            found += [None] * len(piece.parts)
        elif len(piece.parts) > 1:  # One bad place costs its own chunk only.
            for index, part in enumerate(piece.parts):
                self._came(_alone(piece, part), besides[index : index + 1], faults, share, found, 0)
        else:
            share.gone += error.errno in GONE
            found.append(failure(piece.parts[0].item.key, error))

    def _store(
        self, run: SlotRun[tuple[Write, int]], pages: memoryview, share: SlotShare[tuple[Write, int]]
    ) -> list[Outcome]:
        buffers: list[memoryview] = []
        for part, beside in zip(run.parts, self._split(pages), strict=False):
            (key, row), sequence = part.item
            self._packing.close(key, row, beside, sequence)
            buffers += self._packing.places(row, beside)
        try:
            write_all(run.segment.fd, buffers, run.offset)
        except OSError as error:
            if len(run.parts) > 1:
                return [outcome for part in run.parts for outcome in self._store(_alone(run, part), pages, share)]
            share.gone += error.errno in GONE
            return [failure(run.parts[0].item[0].key, error)]
        return [None] * len(run.parts)

    def _places(self, piece: SlotRun[Read], besides: Sequence[memoryview]) -> list[memoryview]:
        pairs = zip(piece.parts, besides, strict=True)
        return [place for part, beside in pairs for place in self._packing.places(part.item.into, beside)]

    def _split(self, pages: memoryview) -> Iterator[memoryview]:
        """Yield the buffer beside each chunk."""
        size = self._packing.beside_bytes
        return (pages[start : start + size] for start in range(0, len(pages), size))


def _read_on(piece: SlotRun[Read], buffers: Sequence[memoryview], result: int | OSError) -> OSError | None:
    """Read the rest of a piece after a first read, if that has not failed."""
    if isinstance(result, OSError):
        return result
    try:
        read_all(piece.segment.fd, buffers, piece.offset, result)
    except OSError as error:
        return error.with_traceback(None)
    return None


def _alone(run: SlotRun[T], part: SlotPart[T]) -> SlotRun[T]:
    return SlotRun(run.segment, [part])
