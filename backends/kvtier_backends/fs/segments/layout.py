"""Chunks in slots of segments: the layout for chunks that are too small to be worth a file each."""

import asyncio
import time
from collections.abc import Callable, Sequence

from kvtier.backend import Lanes, Occupancy, OffloadKey, Outcome, Read, TierContext, Write
from kvtier.errors import BackendClosed
from kvtier.policies import policy_class
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.disk.beside import Books
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import KEY_BYTES_MAX
from kvtier_backends.fs.disk.lanes import Precedence, share_chunks, share_least, start_lanes
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.layout import Background, Left, until
from kvtier_backends.fs.options import SegmentsOptions
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.checkpoint import SlotCheckpoint
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.lane import SlotChunks
from kvtier_backends.fs.segments.loading import SlotLoading
from kvtier_backends.fs.segments.losses import Losses
from kvtier_backends.fs.segments.reading import Reading
from kvtier_backends.fs.segments.room import Growth, Leftovers, Room
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.segments.start import SlotLooking
from kvtier_backends.fs.segments.storing import SlotStoring
from kvtier_backends.fs.segments.wiping import Wiping

SCAN_PATIENCE_S = 0.5  # So long after the start a call waits for the scan of what it needs, if it needs it.


class SegmentsLayout:
    """See `Layout`."""

    def __init__(
        self,
        options: SegmentsOptions,
        context: TierContext,
        folder: Folder,
        books: Books,
        tally: Tally,
        scan_lane: Lanes,
    ) -> None:
        """Use an opened folder, on the running loop."""
        self._name = context.name
        self.key_bytes_max = KEY_BYTES_MAX
        self._slot_bytes = context.row_bytes + 4_096
        self._lanes = lanes = start_lanes(options, context.name, scan_lane)
        policy = None
        if options.eviction_policy != "lru":
            room_bytes = min(options.capacity_bytes or folder.disk.size_bytes, folder.disk.size_bytes)
            policy = policy_class(options.eviction_policy)(max(1, room_bytes // context.row_bytes))
        self._catalog = catalog = Catalog(policy)
        self.news = catalog.news
        self._segments = segments = Segments()
        checkpoint = SlotCheckpoint(folder, context.mapper, tally, context.row_bytes)
        self._capacity = capacity = Capacity(
            (segments, checkpoint),
            folder.disk,
            limit_bytes=options.capacity_bytes,
            min_free_bytes=options.min_free_bytes,
        )
        fingerprint = context.mapper.fingerprint
        own_folder = SegmentFolder(folder, row_bytes=context.row_bytes, fingerprint=fingerprint, fsync=options.fsync)
        most = share_chunks(context.row_bytes)
        precedence = Precedence()
        chunks = SlotChunks(
            precedence,
            reads=folder.reads,
            lanes=options.load_lanes + options.store_lanes,
            share_chunks=most,
            fingerprint=fingerprint,
        )
        self._wiping = wiping = Wiping(
            catalog, segments, chunks, tally, name=folder.chunks, lane=lanes.evict, fsync=options.fsync
        )
        leftovers = Leftovers(own_folder, folder.quarantine, capacity, tally, lanes=lanes.store)
        self._growth = growth = Growth(
            catalog, segments, own_folder, leftovers, capacity, lanes=lanes.store, fsync=options.fsync
        )
        self._room = room = Room(
            catalog,
            segments,
            own_folder,
            wiping,
            growth,
            leftovers,
            capacity,
            tally,
            lanes=lanes.store,
            ttl_s=options.ttl_s,
            clock_ns=time.time_ns,
        )
        self._losses = losses = Losses(catalog, segments, own_folder, tally, lane=lanes.evict)
        if books.write_budget is not None:
            books.write_budget.use(lanes.store)
        self._loading = SlotLoading(
            catalog,
            segments,
            chunks,
            wiping,
            precedence,
            tally,
            lanes=lanes.load,
            share_chunks=most,
            share_least=share_least(context.row_bytes, folder.reads.queue_bytes),
            clock_ns=time.time_ns,
        )
        self._storing = SlotStoring(
            catalog,
            segments,
            room,
            books.write_budget,
            chunks,
            wiping,
            losses,
            tally,
            lanes=lanes.store,
            share_chunks=most,
            fsync=options.fsync,
            clock_ns=time.time_ns,
        )
        self._reading = Reading(folder, context.mapper, own_folder, checkpoint, now_ns=time.time_ns())
        self._looking = SlotLooking(
            self._reading,
            catalog,
            segments,
            room,
            capacity,
            tally,
            lane=scan_lane,
            checkpoint=checkpoint,
            checkpoint_s=options.checkpoint_s,
        )
        self._background = Background()
        self._patient_until = time.monotonic() + SCAN_PATIENCE_S
        self._changed: Callable[[], None] = lambda: None

    def begin(self, changed: Callable[[], None]) -> None:
        self._changed = self._room.changed = self._losses.changed = changed
        looking = self._looking
        works = (looking.run, looking.run_checkpoints, self._wiping.run, self._room.run, self._losses.run)
        self._background.begin(self._name, works)

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await self._are_known(keys)
        return [key in self._catalog for key in keys]

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        await self._are_known([read.key for read in reads])
        try:
            return await self._loading(reads)
        finally:
            self._wiping.check()
            self._changed()

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        await self._is_scanned()
        try:
            return await self._storing(writes)
        finally:
            self._wiping.check()
            self._changed()

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._looking.done.wait()  # An older chunk that nobody has looked at yet would come back.
        if self._catalog.scanning:
            raise BackendClosed(f"{self._name}: closed")
        self._catalog.remove(keys)
        self._changed()
        await self._wiping.until_wiped(keys)

    def rank(self, keys: Sequence[OffloadKey]) -> None:
        self._catalog.rank(keys, time.time_ns())

    def occupancy(self) -> Occupancy:
        chunks = len(self._catalog)
        return Occupancy(chunks, chunks * self._slot_bytes, self._capacity.limit_bytes)

    async def aclose(self, ends_at: float) -> Left:
        self._looking.stop()
        self._background.cancel()
        self._growth.opened.set()  # For who still waits: lanes are closed then.
        lanes = self._lanes.load, self._lanes.store
        loads, stores = await asyncio.gather(*(each.aclose(_left(ends_at)) for each in lanes))
        self._wiping.begin_last()
        wiping = await self._lanes.evict.aclose(_left(ends_at))
        if not wiping:
            self._wiping.end_last()
        if _left(ends_at):
            self._looking.write_last_checkpoint()
        looking = await self._lanes.scan.aclose(_left(ends_at))
        self._looking.done.set()
        if not loads + stores + wiping + looking:
            self._close_files()
        return Left(loads + stores, wiping + looking)

    async def ended(self) -> None:
        await self._background.ended()

    async def _are_known(self, keys: Sequence[OffloadKey]) -> None:
        if not all(key in self._catalog for key in keys):
            await self._is_scanned()

    async def _is_scanned(self) -> None:
        if not self._looking.done.is_set():
            await until(self._looking.done.wait(), self._patient_until - time.monotonic())

    def _close_files(self) -> None:
        """Let go of segments, and of their locks; idempotent. No thread may be using them."""
        for segment in self._reading.opened + self._segments.all + self._segments.removed:
            segment.close()


def _left(ends_at: float) -> float:
    return max(0.0, ends_at - time.monotonic())
