"""Chunks in slots of segments, which are large files: the layout for speed, and the default."""

from collections.abc import Callable
from functools import partial

from kvtier_backends.fs.layout import Background, FsTier, Left, SlotTier
from kvtier_backends.fs.segments.catalog import LocalCatalog, PoolStart
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.kept import KeptCatalog
from kvtier_backends.fs.segments.mover import SlotIo, SlotMover
from kvtier_backends.fs.segments.pool import PoolFolder
from kvtier_backends.fs.segments.recovery import SegmentsStart
from kvtier_backends.fs.segments.room import Space


class SegmentsLayout:
    """One tier's chunks in slots. Offers what `FilesLayout` does."""

    def __init__(self, tier: SlotTier, catalog: LocalCatalog | KeptCatalog, close_files: Callable[[], None]) -> None:
        """`close_files` lets go of the segments; idempotent, called from any thread when none is using them."""
        self.key_bytes_max = tier.packing.key_bytes_max
        self.background = Background()
        self.inventory = catalog.inventory
        self.close_files = close_files
        self._tier, self._catalog = tier, catalog
        context, options = tier.context, tier.options
        io = SlotIo(context.row_bytes, tier.lanes, tier.packing, tier.root.reads, tier.counters, options.fsync)
        mover = SlotMover(io, catalog)
        self.load, self.store = mover.load, mover.store
        self.probe, self.delete = catalog.probe, catalog.delete
        self.advise, self.occupancy = catalog.advise, catalog.occupancy

    def begin(self) -> None:
        self.background.begin(self._tier.context.name, self._catalog.works())

    @property
    def retentions_cut(self) -> int:
        return self._catalog.retentions_cut

    async def aclose(self, ends_at: float) -> Left:
        self._catalog.stop()
        self.background.cancel()
        loads, stores = await self._tier.end_transfers(ends_at)
        return Left(loads + stores, await self._catalog.aclose(ends_at))


def disk_catalog(tier: FsTier, space: Space) -> tuple[LocalCatalog, Callable[[], None]]:
    """Return a catalog of segments on a disk, and what lets go of them."""
    row_bytes, fingerprint = tier.context.row_bytes, tier.context.mapper.fingerprint
    folder = SegmentFolder(tier.root, row_bytes=row_bytes, fingerprint=fingerprint, fsync=tier.options.fsync)
    return LocalCatalog(tier, folder, space, partial(SegmentsStart, tier, folder)), folder.close_all


def pool_catalog(tier: SlotTier, space: Space) -> tuple[LocalCatalog, Callable[[], None]]:
    folder = PoolFolder(tier.context.row_bytes, tier.context.mapper.fingerprint)
    return LocalCatalog(tier, folder, space, PoolStart), folder.close_all
