"""The tiers `fs` and `memory`, the asynchronous shell: it checks calls, and a layout does them."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import NamedTuple, Self, TypeVar

from kvtier import backend as api
from kvtier.errors import BackendClosed, BackendUnavailable, ConfigError, Remedy, TransferFailed
from kvtier.memory import require_file_bytes
from kvtier.settings import shown_bytes
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Packing, make_packing
from kvtier_backends.fs.disk.lanes import start_lanes
from kvtier_backends.fs.disk.reads import ONE_BY_ONE, QUEUE_BYTES, Reads, has_queue
from kvtier_backends.fs.files.layout import FilesLayout
from kvtier_backends.fs.host.meeting import Place
from kvtier_backends.fs.layout import (
    Counters,
    FsCounters,
    FsTier,
    Left,
    OpenTier,
    PoolRoot,
    SlotTier,
    by_name,
    left_s,
    open_pool,
    open_tier,
    until,
)
from kvtier_backends.fs.options import FsOptions, MemoryOptions, common_options
from kvtier_backends.fs.segments import wire
from kvtier_backends.fs.segments.kept import KeeperGone, KeptCatalog
from kvtier_backends.fs.segments.layout import SegmentsLayout, disk_catalog, pool_catalog
from kvtier_backends.fs.segments.room import Space
from kvtier_backends.fs.segments.segment import HEADER_BYTES, SEGMENT_BYTES_MOST

logger = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT", api.Read, api.Write)
OptionsT = TypeVar("OptionsT", bound=FsOptions | MemoryOptions)
Layout = FilesLayout | SegmentsLayout

LOOK_EVERY_S = 10.0
END_S = 1.0  # Calls on a directory that is gone fail at once, or hang in its file system for ever.


class LivingBackend(api.Backend[OptionsT]):
    """The shell of a tier with lives: a file system's, or a pool's of memory."""

    def __init__(self, life: "Life", options: FsOptions | MemoryOptions) -> None:
        if options.fsync:
            self.durability = api.Durability.POWER
        self._name = life.tier.context.name
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
        options = self._options
        names = ("root", "layout", "naming", *(("pool",) if options.shared else ()))
        about = {name: str(value) for name in names if (value := getattr(options, name, None)) is not None}
        if options.capacity_bytes is not None:
            about["capacity"] = shown_bytes(options.capacity_bytes)
        return about | ({"shared": "with others"} if options.shared else {})

    def counters(self) -> FsCounters:
        return self._lives.now.tier.counters.totals()

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
        life = await _fs_life(options, context)
        if options.io == "auto" and not life.tier.root.direct:
            life.tier.counters.count("buffered_fallback")
        return cls(life, options)


class MemoryBackend(LivingBackend[MemoryOptions]):
    """Chunks in host memory, which is taken as it is needed and never exceeds its capacity."""

    durability = api.Durability.PROCESS
    options_type = MemoryOptions

    @classmethod
    async def open(cls, options: MemoryOptions, context: api.TierContext) -> Self:
        _require_room_for_a_chunk(options, context.row_bytes)
        place = cls.keeper(options)
        shared = None if place is None else await _shared_life(place, options, context, Counters())
        return cls(shared or await _memory_life(options, context), options)


class Life(NamedTuple):
    """An open tier, from the opening of its place until that is gone."""

    tier: SlotTier
    where: str
    layout: Layout
    again: "Callable[[], Awaitable[Life]]"
    """Open the same tier again. Raises `ConfigError` or `BackendUnavailable`."""

    @property
    def fit(self) -> api.Fit:
        return api.Fit(self.tier.context.row_bytes, self.layout.key_bytes_max)

    def close_files(self) -> None:
        self.layout.close_files()
        self.tier.root.close()

    async def aclose(self, ends_at: float, close_files: Callable[[], None]) -> Left:
        """End the life, at most until then; `close_files` is called once no lane is in a call."""
        left = await self.layout.aclose(ends_at)
        self.tier.lanes.let_go()
        if left.transfers + left.others:
            self.tier.lanes.when_ended(close_files)
        else:
            close_files()
        return left


class Lives:
    """The lives of one tier, one at a time.

    A directory goes with its disk or mount, or with `rm -rf`, and what engines share goes with its keeper. After a call
    that failed, the next one looks whether the place is still there, and opens the tier again before it begins. Stores
    look every so often, too: in a root that was emptied, not all of them fail. Belongs to the loop's thread.
    """

    def __init__(self, life: Life) -> None:
        self.now = life
        self.retentions_cut_before = 0
        self._doubted = False  # A call has failed, and the root was not checked since.
        self._ended = False  # The life has ended, and the next has not begun.
        self._opening: asyncio.Task[None] | None = None  # Ends a life and begins the next, also for a cancelled caller.
        self._closed = False
        self._closing_files = threading.Lock()
        self._turn = asyncio.Lock()
        self._looked_at = asyncio.get_running_loop().time()
        self._calls = 0
        self._idle = asyncio.Event()
        self._changed = asyncio.Event()  # There is another life, or the end.
        self._believed: list[api.OffloadKey] = []  # Keys of past lives, as the inventory's consumer knows them.
        self.now.layout.begin()

    async def call(self, call: Callable[[Life], Awaitable[T]], *, stores: bool = False) -> T:
        """Do a call on the directory as it is now. Raises `BackendUnavailable` if there is none."""
        looks = stores and asyncio.get_running_loop().time() >= self._looked_at + LOOK_EVERY_S
        if looks or self._doubted:
            await self._look()
        self._calls += 1
        try:
            return await call(self.now)
        except BackendUnavailable:
            self._doubted = True
            raise
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def aclose(self, ends_at: float) -> Left:
        """End the last life; see there. Raises what was wrong with its tasks, if it was not over before."""
        if (opening := self._opening) is not None:
            await asyncio.wait({opening}, timeout=left_s(ends_at))
            opening.cancel()
        left = await self.now.aclose(ends_at, partial(self._close_files, self.now))
        with suppress(*[OSError] if self._ended else []):
            await self.now.layout.background.ended()
        return left

    def note(self, outcomes: Sequence[api.Outcome]) -> None:
        """Record a call's outcomes: a failure of the file system may mean that the directory is gone."""
        if any(isinstance(outcome, TransferFailed) for outcome in outcomes):
            self._doubted = True

    async def watch(self) -> AsyncIterator[api.InventoryEvent]:
        """Yield what the directory holds. After a new life's scan, keys that did not come back are reported removed."""
        while not self._closed:
            life, believed = self.now, self._believed
            self._believed = []
            async with aclosing(life.layout.inventory.watch(believed)) as events:
                async for event in events:
                    yield event
            while life is self.now and not self._closed:
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        """End the inventory's iteration, and begin no other life."""
        self._closed = True
        self.now.layout.inventory.close()
        self._changed.set()

    def _close_files(self, life: Life) -> None:
        """Let go of every descriptor, and of the locks; idempotent. No lane may be in a call; any thread may call."""
        with self._closing_files:  # A second end may come while the last thread is at it.
            life.close_files()

    async def _look(self) -> None:
        async with self._turn:
            tier = self.now.tier
            if self._ended or await tier.lanes.load.run(partial(tier.root.is_gone, failed=self._doubted)):
                self._doubted = True  # Other calls wait here until there is another life.
                await self._open_again()
            self._doubted = False
            self._looked_at = asyncio.get_running_loop().time()

    async def _open_again(self) -> None:
        """End the life and begin another. A cancelled call leaves both to go on: a life half ended keeps the root."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._next(), name=f"kvtier-{self.now.tier.context.name}-open-again")
            self._opening.add_done_callback(self._opened)
        opening = self._opening
        await asyncio.wait({opening})
        if isinstance(error := opening.exception(), BackendUnavailable):
            raise BackendUnavailable(str(error))  # Its own: the other one would gather the frames of all that wait.
        opening.result()

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None  # Its error would hold the buffers of the calls that it was raised in.
        if not opening.cancelled():
            opening.exception()  # All callers may have been cancelled.

    async def _end(self) -> None:
        if self._ended:
            return
        life, name = self.now, self.now.tier.context.name
        logger.warning("%s: %s is gone: opening it again; see %s", name, life.where, Remedy.UNAVAILABLE)
        self._idle.clear()
        if self._calls and not await until(self._idle.wait(), END_S):
            raise BackendUnavailable(f"{name}: the directory is gone, and calls hang that were begun before")
        self._believed += life.layout.inventory.believed()
        self.retentions_cut_before += life.layout.retentions_cut
        life.layout.inventory.close()
        self._ended = True
        await life.aclose(time.monotonic() + END_S, life.close_files)
        with suppress(OSError):  # Of a task that met the end.
            await life.layout.background.ended()

    async def _next(self) -> None:
        await self._end()
        name = self.now.tier.context.name
        try:
            life = await self.now.again()
        except ConfigError as error:  # Of a start; by now it is a state that may pass.
            raise BackendUnavailable(f"{name}: {error}") from error
        if self._closed:
            life.tier.lanes.let_go()
            life.tier.lanes.when_ended(life.close_files)
            raise BackendUnavailable(f"{name}: closed")
        self.now = life
        self._ended = False
        life.layout.begin()
        self._changed.set()
        logger.info("%s: %s is there again", name, life.where)


async def _fs_life(options: FsOptions, context: api.TierContext, before: FsTier | None = None) -> Life:
    tier = await open_tier(options, context, before)
    try:
        layout: Layout
        if options.layout == "files":
            layout = FilesLayout(tier)
        else:
            layout = SegmentsLayout(tier, *disk_catalog(tier, Space(tier.capacity)))
    except BaseException:
        tier.let_go()
        raise
    return Life(tier, options.root, layout, partial(_fs_life, options, context, tier))


async def _memory_life(options: MemoryOptions, context: api.TierContext) -> Life:
    tier = open_pool(options, context)
    layout = SegmentsLayout(tier, *pool_catalog(tier, Space(tier.capacity)))
    return Life(tier, "memory", layout, partial(_memory_life, options, context))


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

        async def join() -> KeptCatalog:
            return await KeptCatalog(await lanes.scan.run(place.meet), hello, options.capacity_bytes, counters).opened()

        try:
            catalog = await join()
        except KeeperGone:  # It was about to end, and another is met now.
            catalog = await join()
    except BaseException:
        lanes.let_go()
        raise
    reads = Reads(QUEUE_BYTES) if catalog.queue and has_queue() else ONE_BY_ONE
    root = PoolRoot(str(place), options.capacity_bytes or 0, reads, lambda: catalog.is_lost)
    capacity = Capacity(root.disk, limit_bytes=None, min_free_bytes=0)
    tier = OpenTier(options, context, root, lanes, packing, capacity, counters)
    again = partial(_shared_life, place, options, context, counters)
    return Life(tier, str(place), SegmentsLayout(tier, catalog, catalog.close), again)


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
