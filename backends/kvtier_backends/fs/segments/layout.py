"""Chunks in slots of segments, which are large files: the layout for speed, and the default."""

import time
from collections.abc import Sequence

from kvtier.backend import Advice, Occupancy, OffloadKey, Outcome, Read, Write
from kvtier.errors import BackendClosed
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.layout import Background, Left, OpenTier, left_s, until
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.mover import SlotMover
from kvtier_backends.fs.segments.recovery import SegmentsStart
from kvtier_backends.fs.segments.room import Room
from kvtier_backends.fs.segments.wiping import Wiping

SCAN_PATIENCE_S = 0.5  # So long after the start a call waits for the scan of what it needs, if it needs it.
# And for the checkpoint: five million chunks on a busy machine. A miss now would be believed for `answer_ttl_s`.
RECALL_PATIENCE_S = 10.0


class SegmentsLayout:
    """One tier's chunks in slots. Offers what `FilesLayout` does."""

    def __init__(self, tier: OpenTier) -> None:
        self.key_bytes_max = tier.packing.key_bytes_max
        self._tier = tier
        self._catalog = catalog = Catalog(tier.policy())
        self.index = catalog.index
        tier.capacity.count(catalog.segments)
        row_bytes, fingerprint = tier.context.row_bytes, tier.context.mapper.fingerprint
        folder = SegmentFolder(tier.root, row_bytes=row_bytes, fingerprint=fingerprint, fsync=tier.options.fsync)
        self._folder = folder
        self._wiping = Wiping(tier, catalog)
        self._room = Room(tier, catalog, folder, self._wiping)
        self._mover = SlotMover(tier, catalog, self._room, self._wiping)
        self._start = SegmentsStart(tier, catalog, folder, self._room)
        self.background = Background()
        self._begun = time.monotonic()

    def begin(self) -> None:
        start = self._start
        works = (start.run, start.run_checkpoints, self._wiping.run, self._room.run, self._room.run_losses)
        self.background.begin(self._tier.context.name, works)

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await self._are_known(keys)
        return [key in self._catalog for key in keys]

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        keys = [read.key for read in reads]
        await self._are_known(keys)
        if self._catalog.has_candidate(keys):  # A later chunk of the key may lie in a segment that is not read yet.
            await self._is_scanned()
        try:
            return await self._mover.load(reads)
        finally:
            self._wiping.check()

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        await self._is_scanned()
        try:
            return await self._mover.store(writes)
        finally:
            self._wiping.written()

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._start.done.wait()  # An older chunk that is not read yet would come back.
        if self._catalog.scanning:
            raise BackendClosed(f"{self._tier.context.name}: closed")
        self._catalog.remove(keys)
        await self._wiping.until_wiped(keys)

    def advise(self, advice: Advice[OffloadKey]) -> None:
        tier = self._tier
        retained_max = tier.retained_max(tier.context.row_bytes + FOOTER_BYTES)
        self.index.advise(advice, tier.clock_ns(), retained_max)

    def occupancy(self) -> Occupancy:
        chunks, slot_bytes = len(self._catalog), self._tier.context.row_bytes + FOOTER_BYTES
        used_bytes = chunks * slot_bytes + self._tier.root.remains.used_bytes
        return Occupancy(chunks, used_bytes, self._tier.capacity.limit_bytes)

    async def aclose(self, ends_at: float) -> Left:
        self._start.stop()
        self.background.cancel()
        self._room.opened.set()
        lanes = self._tier.lanes
        loads, stores = await self._tier.end_transfers(ends_at)
        self._wiping.begin_last()
        wiping = await lanes.evict.aclose(left_s(ends_at))
        self._wiping.end_last(ended=not wiping)
        if left_s(ends_at):
            self._start.write_last_checkpoint()
        scan = await lanes.scan.aclose(left_s(ends_at))
        self._start.done.set()
        return Left(loads + stores, wiping + scan)

    def close_files(self) -> None:
        """Let go of the open segments; idempotent. No thread may be using them. Any thread may call."""
        self._folder.close_all()

    async def _are_known(self, keys: Sequence[OffloadKey]) -> None:
        if not all(key in self._catalog for key in keys) and not self._start.recalled.is_set():
            await until(self._start.recalled.wait(), self._begun + RECALL_PATIENCE_S - time.monotonic())
        if not all(key in self._catalog for key in keys):
            await self._is_scanned()

    async def _is_scanned(self) -> None:
        if not self._start.done.is_set():
            await until(self._start.done.wait(), self._begun + SCAN_PATIENCE_S - time.monotonic())
