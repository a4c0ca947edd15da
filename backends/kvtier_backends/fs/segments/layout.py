"""Chunks in slots of segments, which are large files: the layout for speed, and the default."""

from collections.abc import Sequence
from functools import partial
from typing import Self

from kvtier.backend import Advice, Occupancy, OffloadKey, Outcome, Read, Write
from kvtier_backends.fs.layout import Background, FsTier, Left, SlotTier
from kvtier_backends.fs.segments.catalog import LocalCatalog, PoolStart
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.mover import SlotIo, SlotMover
from kvtier_backends.fs.segments.pool import PoolFolder
from kvtier_backends.fs.segments.recovery import SegmentsStart
from kvtier_backends.fs.segments.space import Space


class SegmentsLayout:
    """One tier's chunks in slots, with a catalog in this process. Offers what `FilesLayout` does."""

    def __init__(self, tier: SlotTier, folder: SegmentFolder | PoolFolder, catalog: LocalCatalog) -> None:
        self.key_bytes_max = tier.packing.key_bytes_max
        self.background = Background()
        self.inventory = catalog.inventory
        self._tier, self._folder, self._catalog = tier, folder, catalog
        io = SlotIo(
            tier.context.row_bytes, tier.lanes, tier.packing, tier.root.reads, tier.counters, tier.options.fsync
        )
        self._mover = SlotMover(io, catalog)

    @classmethod
    def on_disk(cls, tier: FsTier) -> Self:
        row_bytes, fingerprint = tier.context.row_bytes, tier.context.mapper.fingerprint
        folder = SegmentFolder(tier.root, row_bytes=row_bytes, fingerprint=fingerprint, fsync=tier.options.fsync)
        start = partial(SegmentsStart, tier, folder)
        return cls(tier, folder, LocalCatalog(tier, folder, Space(tier.capacity), start))

    @classmethod
    def in_memory(cls, tier: SlotTier) -> Self:
        folder = PoolFolder(row_bytes=tier.context.row_bytes, fingerprint=tier.context.mapper.fingerprint)
        return cls(tier, folder, LocalCatalog(tier, folder, Space(tier.capacity), PoolStart))

    def begin(self) -> None:
        self.background.begin(self._tier.context.name, self._catalog.works())

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        return await self._catalog.probe(keys)

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        return await self._mover.load(reads)

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        return await self._mover.store(writes)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._catalog.delete(keys)

    def advise(self, advice: Advice[OffloadKey]) -> None:
        self._catalog.advise(advice)

    @property
    def retentions_cut(self) -> int:
        return self._catalog.retentions_cut

    def occupancy(self) -> Occupancy:
        return self._catalog.occupancy()

    async def aclose(self, ends_at: float) -> Left:
        self._catalog.stop()
        self.background.cancel()
        loads, stores = await self._tier.end_transfers(ends_at)
        return Left(loads + stores, await self._catalog.aclose(ends_at))

    def close_files(self) -> None:
        """Let go of the open segments; idempotent. No thread may be using them. Any thread may call."""
        self._folder.close_all()
