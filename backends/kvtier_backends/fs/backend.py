"""A tier on a file system, the asynchronous shell: it checks calls, and a layout does them."""

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Self, TypeVar

from kvtier.backend import (
    Abandoned,
    Advice,
    Backend,
    Calls,
    Durability,
    FileMapper,
    InventoryEvent,
    Occupancy,
    OffloadKey,
    Outcome,
    Read,
    TierContext,
    Write,
)
from kvtier.errors import BackendClosed, BackendUnavailable, ConfigError
from kvtier.memory import require_file_bytes
from kvtier.settings import shown_bytes
from kvtier_backends.fs.counters import FsCounters, by_name
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.files.layout import FilesLayout
from kvtier_backends.fs.layout import Layout, OpenTier, open_tier
from kvtier_backends.fs.lives import Life, Lives
from kvtier_backends.fs.options import FsOptions
from kvtier_backends.fs.segments.layout import SegmentsLayout
from kvtier_backends.fs.segments.segment import HEADER_BYTES, SEGMENT_BYTES_MOST

ItemT = TypeVar("ItemT", Read, Write)

LAYOUTS: dict[str, Callable[[OpenTier], Layout]] = {"files": FilesLayout, "segments": SegmentsLayout}


class FsBackend(Backend[FsOptions]):
    """Chunks in a directory of the engine's own: a file each, or in slots of segments."""

    durability = Durability.HOST  # With `fsync` an open tier promises `POWER`.
    options_type = FsOptions

    @classmethod
    async def open(cls, options: FsOptions, context: TierContext) -> Self:
        """Open the tier and start to look what the directory holds; calls are answered meanwhile.

        A root that is missing is made if its parent is there.
        """
        _require_room_for_a_chunk(options, context.row_bytes)
        mapper = FileMapper(context.mapper.namespace, options.naming or "vllm")
        tier = await open_tier(options, context._replace(mapper=mapper))
        try:
            return cls(tier)
        except BaseException:
            tier.let_go()
            raise

    def __init__(self, tier: OpenTier) -> None:
        """Use `open` instead."""
        if tier.options.fsync:
            self.durability = Durability.POWER
        if tier.options.io == "auto" and not tier.root.direct:
            tier.counters.count("buffered_fallback")
        self._name = tier.context.name
        self._stores = Calls(self._name)
        self._lives = Lives(tier, LAYOUTS[tier.options.layout or ""])
        self._closed = False
        self._closing_files = threading.Lock()

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self._check_open()
        return await self._lives.call(lambda life: life.fit.probe(keys, life.layout.probe))

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        self._check_open()
        return await self._lives.call(lambda life: life.fit.load(reads, partial(self._answer, life.layout.load)))

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._stores.one():
            return await self._lives.call(
                lambda life: life.fit.store(writes, partial(self._answer, life.layout.store)), stores=True
            )

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._check_open()
        await self._lives.call(lambda life: life.layout.delete(life.fit.keys(keys)))

    async def aclose(self, deadline_s: float) -> Abandoned:
        self._closed = True
        self._lives.close()
        ends_at = time.monotonic() + deadline_s
        await self._stores.close(deadline_s)  # A store may need several hops, and the first look to be over.
        left = await self._lives.aclose(ends_at, self._close_files)
        return Abandoned(left.transfers)

    def watch(self) -> AsyncIterator[InventoryEvent]:
        """See `Inventory`. A chunk that a cancelled call has stored or deleted is reported, too."""
        return self._lives.watch()

    def occupancy(self) -> Occupancy:
        """See `Measured`. While the directory is being scanned, it covers what was found so far."""
        return self._layout.occupancy()

    def advise(self, advice: Advice[OffloadKey]) -> None:
        self._layout.advise(advice)

    def counts(self) -> dict[str, int]:
        """See `Counted`."""
        retentions_cut = self._lives.retentions_cut_before + self._layout.retentions_cut
        return by_name(self.counters()) | {"retentions_cut": retentions_cut}

    def description(self) -> dict[str, str]:
        """See `Described`."""
        options = self._lives.now.tier.options
        about = {"root": options.root, "layout": options.layout or ""}
        if options.naming is not None:
            about["naming"] = options.naming
        if options.capacity_bytes is not None:
            about["capacity"] = shown_bytes(options.capacity_bytes)
        if options.shared:
            about["shared"] = "with others"
        return about

    def counters(self) -> FsCounters:
        """Return what was counted since the tier was opened."""
        return self._lives.now.tier.counters.totals()

    @property
    def _layout(self) -> Layout:
        return self._lives.now.layout

    def _close_files(self, life: Life) -> None:
        """Let go of every descriptor, and of the locks; idempotent. No lane may be in a call; any thread may call."""
        with self._closing_files:  # A second end may come while the last thread is at it.
            life.close_files()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed(f"{self._name}: closed")

    async def _answer(
        self, call: Callable[[Sequence[ItemT]], Awaitable[tuple[list[Outcome], int]]], items: Sequence[ItemT]
    ) -> Sequence[Outcome]:
        outcomes, gone = await call(items)
        if outcomes and gone == len(outcomes):
            raise BackendUnavailable(f"{self._name}: the file system is away: {outcomes[-1]}") from outcomes[-1]
        self._lives.note(outcomes)
        return outcomes


def _require_room_for_a_chunk(options: FsOptions, row_bytes: int) -> None:
    """Refuse to begin where every store would fail."""
    chunk_bytes = row_bytes + FOOTER_BYTES
    for name in ("capacity_bytes", "write_budget_bytes_per_day"):
        given_bytes: int | None = getattr(options, name)
        if given_bytes is not None and given_bytes < chunk_bytes:
            raise ConfigError(
                f"{name}: {given_bytes:,} bytes given, at least one chunk's {chunk_bytes:,} (its row and a footer)"
                " accepted: nothing could ever be stored"
            )
    if options.layout == "segments" and chunk_bytes > SEGMENT_BYTES_MOST:
        raise ConfigError(
            f"chunk_bytes: chunks of {chunk_bytes:,} bytes with their footers given, at most {SEGMENT_BYTES_MOST:,} "
            'accepted with layout = "segments": a segment is no longer'
        )
    require_file_bytes(chunk_bytes + (HEADER_BYTES if options.layout == "segments" else 0))
