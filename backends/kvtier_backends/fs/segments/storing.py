"""Stores into slots: slots are taken, written in runs, and synced once. Only then the catalog has their chunks.

The leading chunks of a batch get room first: without its head, a prefix's tail is of no use.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

from kvtier.backend import Outcome, Write, in_thread, in_threads
from kvtier_backends.fs.disk.footer import GONE, failure
from kvtier_backends.fs.disk.lanes import share_chunks
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.lane import SlotChunks
from kvtier_backends.fs.segments.losses import Losses
from kvtier_backends.fs.segments.room import Room
from kvtier_backends.fs.segments.runs import SlotPart, SlotShare
from kvtier_backends.fs.segments.segment import Segment, sync


class Syncing:
    """A sync of a batch. A call that is cancelled meanwhile knows it, too."""

    def __init__(self) -> None:
        self.done = False
        self.error: OSError | None = None

    def run(self, segments: Iterable[Segment]) -> None:
        """Blocks, in a lane."""
        try:
            sync(segments)
        except OSError as error:
            self.error = error.with_traceback(None)
        else:
            self.done = True


class SlotStoring:
    """The stores of one tier, a batch at a time. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier, catalog: Catalog, room: Room, losses: Losses) -> None:
        """Write in the lanes for stores."""
        self._tier = tier
        self._catalog = catalog
        self._room = room
        self._losses = losses
        self._lanes = tier.lanes.store
        self._chunks = SlotChunks(tier, self._lanes)
        self._share_chunks = share_chunks(tier.context.row_bytes)
        self._fsync = tier.options.fsync

    async def __call__(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        """Store the chunks that fit; return the outcomes, and how many say that the file system is away."""
        keys = [write.key for write in writes]
        with self._catalog.in_use(keys):
            incoming = [key for key in dict.fromkeys(keys) if key not in self._catalog]
            slots = await self._room.take(len(writes), incoming)
            try:
                fitting = writes[: len(slots)]
                allowed = fitting[: await self._tier.allowed(len(fitting))]
            except BaseException:
                self._catalog.give_back(slots)
                raise
            self._catalog.give_back(slots[len(allowed) :])
            outcomes, gone = await self._write(allowed, slots[: len(allowed)])
        outcomes += self._tier.refused(fitting[len(allowed) :], "write_budget")
        without = writes[len(fitting) :]
        if (error := self._room.error) is not None and without:
            outcomes += [failure(write.key, error) for write in without]
            return outcomes, gone + len(without) * (error.errno in GONE)
        others = not all(segment.own for segment in self._catalog.segments.all)
        outcomes += self._tier.refused(without, self._tier.scarce(others=others, disk=self._room.disk_is_full))
        return outcomes, gone

    async def _write(self, writes: Sequence[Write], slots: Sequence[int]) -> tuple[list[Outcome], int]:
        now_ns = self._tier.clock_ns()
        last = self._catalog.next_sequences(len(writes), now_ns) + len(writes) - 1
        # The head's number is the greatest: a prefix outlives its continuation, also after a restart.
        parts = [
            SlotPart(slot, position, (write, last - position))
            for position, (write, slot) in enumerate(zip(writes, sorted(slots), strict=True))
        ]
        shares = self._catalog.segments.shares(parts, self._lanes.count, self._share_chunks)
        syncing = Syncing()
        syncing.done, told = not self._fsync, False
        try:
            await in_threads(self._lanes, [partial(self._store, share) for share in shares])
            if self._fsync:
                segments = dict.fromkeys(run.segment for share in shares for run in share.runs)
                await in_thread(self._lanes, syncing.run, segments)
            told = True
        finally:
            outcomes = self._note(shares, syncing, len(writes), now_ns, told=told)
            self._losses.note()
        gone = sum(share.gone for share in shares)
        if syncing.error is not None and syncing.error.errno in GONE:
            gone = len(writes)
        return outcomes, gone

    def _store(self, share: SlotShare[tuple[Write, int]]) -> None:
        """Write, and see whether that was of use. Blocks, in a lane."""
        self._chunks.store(share)
        self._losses.check(share)

    def _note(
        self, shares: Sequence[SlotShare[tuple[Write, int]]], syncing: Syncing, count: int, now_ns: int, *, told: bool
    ) -> list[Outcome]:
        """Record written chunks in the catalog, tail first, and give back the other slots."""
        outcomes: list[Outcome] = [None] * count
        stored: list[SlotPart[tuple[Write, int]]] = []
        for part, outcome, is_written in chain.from_iterable(map(_parts, shares)):
            if outcome is None and syncing.error is not None:
                outcome = failure(part.item[0].key, syncing.error)
            if is_written and outcome is None and syncing.done:
                stored.append(part)
            else:
                self._catalog.failed(part.item[0].key, part.slot)
            outcomes[part.position] = outcome
        for part in sorted(stored, key=lambda part: part.position, reverse=True):
            (key, _), sequence = part.item
            self._catalog.stored(key, part.slot, sequence, now_ns - part.position)
            if not told:
                self._catalog.inventory.added(key)
        return outcomes


def _parts(share: SlotShare[tuple[Write, int]]) -> Iterator[tuple[SlotPart[tuple[Write, int]], Outcome, bool]]:
    """Yield each part of a store, its outcome, and whether a cancelled call's lane has come to it."""
    for index, part in enumerate(share.parts):
        done = index < len(share.outcomes)
        yield part, share.outcomes[index] if done else None, done
