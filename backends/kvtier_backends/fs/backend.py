"""The tiers `fs` and `memory`, the asynchronous shell: it checks calls, and a layout does them."""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from kvtier import backend as api
from kvtier.errors import BackendClosed, BackendUnavailable, ConfigError
from kvtier.memory import require_file_bytes
from kvtier.settings import shown_bytes
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Packing, make_packing
from kvtier_backends.fs.disk.lanes import start_lanes
from kvtier_backends.fs.disk.reads import ONE_BY_ONE, QUEUE_BYTES, Reads, has_queue
from kvtier_backends.fs.files.layout import FilesLayout
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.layout import Counters, FsCounters, FsTier, OpenTier, PoolRoot, by_name, open_tier
from kvtier_backends.fs.lives import Layout, Life, Lives
from kvtier_backends.fs.options import FsOptions, MemoryOptions, common_options
from kvtier_backends.fs.segments import wire
from kvtier_backends.fs.segments.kept import KeptCatalog
from kvtier_backends.fs.segments.layout import SegmentsLayout, disk_catalog, pool_catalog
from kvtier_backends.fs.segments.room import Space
from kvtier_backends.fs.segments.segment import HEADER_BYTES, SEGMENT_BYTES_MOST

ItemT = TypeVar("ItemT", api.Read, api.Write)
OptionsT = TypeVar("OptionsT", bound=FsOptions | MemoryOptions)


class LivingBackend(api.Backend[OptionsT]):
    """The shell of a tier with lives: a file system's, or a pool's of memory."""

    def __init__(self, life: Life, options: FsOptions | MemoryOptions) -> None:
        if options.fsync:
            self.durability = api.Durability.POWER
        self._name = life.name
        self._options = options
        self._stores = api.Calls(self._name)
        self._lives = Lives(life)
        self._closed = False

    @staticmethod
    def keeper(options: FsOptions | MemoryOptions) -> Place | None:
        """Return the place of the tier's keeper; None if it has none."""
        if not options.shared or getattr(options, "layout", None) == "files":
            return None
        return Place(options.root) if isinstance(options, FsOptions) else Place.of_pool(options.pool)

    async def probe(self, keys: Sequence[api.OffloadKey]) -> Sequence[bool]:
        self._check_open()
        return await self._lives.call(lambda life: life.fit.probe(keys, life.layout.probe))

    async def load(self, reads: Sequence[api.Read]) -> Sequence[api.Outcome]:
        self._check_open()
        return await self._lives.call(lambda life: life.fit.load(reads, partial(self._answer, life.layout.load)))

    async def store(self, writes: Sequence[api.Write]) -> Sequence[api.Outcome]:
        with self._stores.one():
            return await self._lives.call(
                lambda life: life.fit.store(writes, partial(self._answer, life.layout.store)), stores=True
            )

    async def delete(self, keys: Sequence[api.OffloadKey]) -> None:
        self._check_open()
        await self._lives.call(lambda life: life.layout.delete(life.fit.keys(keys)))

    async def aclose(self, deadline_s: float) -> api.Abandoned:
        self._closed = True
        self._lives.close()
        ends_at = time.monotonic() + deadline_s
        await self._stores.close(deadline_s)  # A store may need several hops, and the first look to be over.
        left = await self._lives.aclose(ends_at)
        return api.Abandoned(left.transfers)

    def watch(self) -> AsyncIterator[api.InventoryEvent]:
        """See `Inventory`. A chunk that a cancelled call has stored or deleted is reported, too."""
        return self._lives.watch()

    def occupancy(self) -> api.Occupancy:
        """See `Measured`. While the directory is being scanned, it covers what was found so far."""
        return self._layout.occupancy()

    def advise(self, advice: api.Advice[api.OffloadKey]) -> None:
        self._layout.advise(advice)

    def counts(self) -> dict[str, int]:
        retentions_cut = self._lives.retentions_cut_before + self._layout.retentions_cut
        return by_name(self.counters()) | {"retentions_cut": retentions_cut}

    def description(self) -> dict[str, str]:
        return _about(self._options)

    def counters(self) -> FsCounters:
        return self._lives.now.counters.totals()

    @property
    def _layout(self) -> Layout:
        return self._lives.now.layout

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed(f"{self._name}: closed")

    async def _answer(
        self, call: Callable[[Sequence[ItemT]], Awaitable[tuple[list[api.Outcome], int]]], items: Sequence[ItemT]
    ) -> Sequence[api.Outcome]:
        outcomes, gone = await call(items)
        if outcomes and gone == len(outcomes):
            raise BackendUnavailable(f"{self._name}: the file system is away: {outcomes[-1]}") from outcomes[-1]
        self._lives.note(outcomes)
        return outcomes


class FsBackend(LivingBackend[FsOptions]):
    """Chunks in a directory of the engine's own: a file each, or in slots of segments."""

    durability = api.Durability.HOST  # With `fsync` an open tier promises `POWER`.
    options_type = FsOptions

    @classmethod
    async def open(cls, options: FsOptions, context: api.TierContext) -> Self:
        """Open the tier; calls are answered while the directory is scanned. A root is made if its parent is there."""
        _require_room_for_a_chunk(options, context.row_bytes)
        mapper = api.FileMapper(context.mapper.namespace, options.naming or "vllm")
        context = context._replace(mapper=mapper)
        if (place := cls.keeper(options)) is not None:
            return cls(await _shared_life(place, options, context, Counters()), options)
        tier = await open_tier(options, context)
        try:
            if options.io == "auto" and not tier.root.direct:
                tier.counters.count("buffered_fallback")
            return cls(_fs_life(tier), options)
        except BaseException:
            tier.let_go()
            raise


class MemoryBackend(LivingBackend[MemoryOptions]):
    """Chunks in host memory, which is taken as it is needed and never exceeds its capacity."""

    durability = api.Durability.PROCESS
    options_type = MemoryOptions

    @classmethod
    async def open(cls, options: MemoryOptions, context: api.TierContext) -> Self:
        _require_room_for_a_chunk(options, context.row_bytes)
        place = cls.keeper(options)
        return cls(
            await _shared_life(place, options, context, Counters()) if place else _memory_life(options, context),
            options,
        )


def _fs_life(tier: FsTier) -> Life:
    layout: Layout = (
        FilesLayout(tier)
        if tier.options.layout == "files"
        else SegmentsLayout(tier, *disk_catalog(tier, Space(tier.capacity)))
    )

    async def again() -> Life:
        return _fs_life(await open_tier(tier.options, tier.context, tier))

    context, root = tier.context, tier.root
    return Life(
        context.name, tier.options.root, context.row_bytes, layout, tier.counters, tier.lanes, root.close,
        lambda failed: tier.lanes.load.run(partial(root.is_gone, failed=failed)), again,
    )  # fmt: skip


def _memory_life(options: MemoryOptions, context: api.TierContext) -> Life:
    root = PoolRoot("memory", options.capacity_bytes)
    capacity = Capacity(root.disk, limit_bytes=options.capacity_bytes, min_free_bytes=0)
    packing = Packing(context.mapper.fingerprint, context.row_bytes)
    tier = OpenTier(options, context, root, start_lanes(options, context.name), packing, capacity)

    async def is_gone(_: bool) -> bool:
        return False

    async def again() -> Life:
        return _memory_life(options, context)

    layout = SegmentsLayout(tier, *pool_catalog(tier, Space(capacity)))
    return Life(
        context.name, "memory", context.row_bytes, layout, tier.counters, tier.lanes, root.close, is_gone, again
    )


async def _shared_life(
    place: Place, options: FsOptions | MemoryOptions, context: api.TierContext, counters: Counters
) -> Life:
    """Join the engines that share a root or a pool. `ConfigError` or `BackendUnavailable` leave nothing."""
    on_disk = isinstance(options, FsOptions)
    mapper, row_bytes = context.mapper, context.row_bytes
    lanes = start_lanes(options, context.name)
    try:
        if isinstance(options, FsOptions):
            packing = await lanes.scan.run(make_packing, options, context)
        else:
            packing = Packing(mapper.fingerprint, row_bytes)
        pid = context.engine.pid if context.engine else os.getpid()
        hello = wire.Hello(
            wire.PROTOCOL, "fs" if on_disk else "memory", common_options(options), mapper.namespace, row_bytes,
            context.retained_share, f"{context.name} of process {pid}",
        )  # fmt: skip
        catalog = KeptCatalog(await lanes.scan.run(place.meet), hello, options.capacity_bytes, counters)
        await catalog.opened()
    except BaseException:
        lanes.let_go()
        raise
    reads = Reads(QUEUE_BYTES) if catalog.queue and has_queue() else ONE_BY_ONE
    root = PoolRoot(str(place), options.capacity_bytes or 0, reads)
    capacity = Capacity(root.disk, limit_bytes=None, min_free_bytes=0)
    tier = OpenTier(options, context, root, lanes, packing, capacity, counters)

    async def is_gone(_: bool) -> bool:
        return catalog.is_lost

    async def again() -> Life:
        return await _shared_life(place, options, context, counters)

    layout = SegmentsLayout(tier, catalog, catalog.close)
    return Life(context.name, str(place), row_bytes, layout, tier.counters, lanes, root.close, is_gone, again)


def _about(options: FsOptions | MemoryOptions) -> dict[str, str]:
    about: dict[str, str] = {}
    if isinstance(options, FsOptions):
        about |= {"root": options.root, "layout": options.layout or ""}
        if options.naming is not None:
            about["naming"] = options.naming
    elif options.shared:
        about["pool"] = options.pool
    if options.capacity_bytes is not None:
        about["capacity"] = shown_bytes(options.capacity_bytes)
    if options.shared:
        about["shared"] = "with others"
    return about


def _require_room_for_a_chunk(options: FsOptions | MemoryOptions, row_bytes: int) -> None:
    chunk_bytes = row_bytes + FOOTER_BYTES
    segments = isinstance(options, MemoryOptions) or options.layout == "segments"
    least_bytes = chunk_bytes + (HEADER_BYTES if isinstance(options, MemoryOptions) else 0)
    for name in ("capacity_bytes", "write_budget_bytes_per_day"):
        given_bytes: int | None = getattr(options, name, None)
        if given_bytes is not None and given_bytes < least_bytes:
            raise ConfigError(
                f"{name}: {given_bytes:,} bytes given, at least one chunk's {least_bytes:,} (its row and a footer)"
                " accepted: nothing could ever be stored"
            )
    if segments and chunk_bytes > SEGMENT_BYTES_MOST:
        raise ConfigError(
            f"chunk_bytes: chunks of {chunk_bytes:,} bytes with their footers given, at most {SEGMENT_BYTES_MOST:,} "
            'accepted with layout = "segments": a segment is no longer'
        )
    require_file_bytes(chunk_bytes + (HEADER_BYTES if segments else 0))
