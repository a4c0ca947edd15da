"""Runs of neighbouring slots, each one call to the disk: how a batch is split. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from kvtier.backend import Outcome
from kvtier_backends.fs.disk.lanes import share_out
from kvtier_backends.fs.segments.segment import Segment

T = TypeVar("T")

RUN_SLOTS_MAX = 512  # Two buffers a slot; Linux takes 1,024 in one call (IOV_MAX).


class SlotPart(NamedTuple, Generic[T]):
    """Something to do with one slot."""

    slot: int
    position: int  # In the batch.
    item: T


class SlotRun(NamedTuple, Generic[T]):
    """Things to do with neighbouring slots."""

    segment: Segment
    parts: Sequence[SlotPart[T]]

    @property
    def offset(self) -> int:
        """Where in the file the first slot begins."""
        return self.segment.header.offset(self.parts[0].slot - self.segment.first_slot)

    def pieces(self, piece_bytes: int) -> "list[SlotRun[T]]":
        """Split it into runs of equal length, of about `piece_bytes` each and at least one slot."""
        count = -(-len(self.parts) // max(1, piece_bytes // self.segment.header.slot_bytes))
        size = -(-len(self.parts) // count)
        return [SlotRun(self.segment, self.parts[start : start + size]) for start in range(0, len(self.parts), size)]


@dataclass(slots=True)
class SlotShare(Generic[T]):
    """One lane's part of a batch, and what became of it, in the order of the parts."""

    runs: Sequence[SlotRun[T]]
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    gone: int = 0  # Failures that say that the whole file system is away.

    @property
    def parts(self) -> list[SlotPart[T]]:
        return [part for run in self.runs for part in run.parts]


class Segments:
    """The tier's segments by the numbers of their slots. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._first_slots: list[int] = []

    @property
    def used_bytes(self) -> int:
        """The room that they take of the disk, at most."""
        return sum(segment.allocated_bytes for segment in self.all)

    def add(self, segment: Segment, first_slot: int) -> None:
        """Add a segment; its slots have greater numbers than all before."""
        segment.first_slot = first_slot
        self.all.append(segment)
        self._first_slots.append(first_slot)

    def remove(self, segment: Segment) -> None:
        """Remove a segment; the caller closes it."""
        index = self.all.index(segment)
        del self.all[index]
        del self._first_slots[index]

    def of(self, slot: int) -> Segment:
        """Return the segment that has a slot."""
        return self.all[bisect_right(self._first_slots, slot) - 1]

    def shares(self, parts: Sequence[SlotPart[T]], lanes: int, most: int, least: int = 1) -> list[SlotShare[T]]:
        """Split a batch into shares as `share_out` does, neighbours together."""
        ordered = sorted(parts, key=itemgetter(0))
        return [SlotShare(self.runs(part)) for part in share_out(ordered, lanes, most, least)]

    def runs(self, ordered: Sequence[SlotPart[T]]) -> list[SlotRun[T]]:
        """Return slots, in ascending order, as runs."""
        runs: list[SlotRun[T]] = []
        start = 0
        while start < len(ordered):
            first = ordered[start].slot
            segment = self.of(first)
            most = min(len(ordered) - start, RUN_SLOTS_MAX, segment.first_slot + segment.header.slots - first)
            count = 1
            while count < most and ordered[start + count].slot == first + count:
                count += 1
            runs.append(SlotRun(segment, ordered[start : start + count]))
            start += count
        return runs
