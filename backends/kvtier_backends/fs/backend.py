"""A tier on a file system, the asynchronous shell: it checks, splits batches over lanes, and indexes what became."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import ClassVar, Self

import aiofiles.os
import msgspec

from kvtier.backend import (
    Abandoned,
    Backend,
    Durability,
    InventoryEvent,
    Occupancy,
    Outcome,
    Read,
    TierContext,
    Write,
)
from kvtier.calls import Calls
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier.keys import GROUP_BYTES, OffloadKey
from kvtier.lend import Lanes, in_threads
from kvtier.namespace import FileMapper
from kvtier_backends.fs.books import Books, open_books
from kvtier_backends.fs.chunks import Chunks, share_out
from kvtier_backends.fs.counters import FsCounters, Tally, by_name
from kvtier_backends.fs.folder import Folder
from kvtier_backends.fs.options import FsOptions
from kvtier_backends.fs.parts import assemble, start_lanes

PROBES_MAX = 512  # Calls without bytes, in one hop: half a millisecond of a local file system's time.
SCAN_PATIENCE_S = 0.5  # Stores wait so long for the scan of a small directory, rather than be refused for its sake.

_open = aiofiles.os.wrap(open_books)
_loadable = aiofiles.os.wrap(Chunks.loadable)


class FsBackend(Backend):
    """Chunks as files in a directory of the engine's own."""

    durability: ClassVar[Durability] = Durability.HOST
    Options: ClassVar[type[msgspec.Struct]] = FsOptions

    @classmethod
    async def open(cls, options: msgspec.Struct, context: TierContext) -> Self:
        """Open the tier and start to look what the directory holds; calls are answered meanwhile.

        A root that is missing is made if its parent is there.
        """
        assert isinstance(options, FsOptions), options
        context = context._replace(mapper=FileMapper(context.mapper.namespace, options.naming))
        folder = Folder(options, context.mapper)
        tally = Tally()
        scan_lane = Lanes(1, f"kvtier-{context.name}-scan")
        try:
            books = await _open(folder, context, options, executor=scan_lane)
            return cls(options, context, folder, books, tally, scan_lane)
        except BaseException:
            scan_lane.submit(folder.close)  # When the lane comes to it: a cancelled call's thread may still be at it.
            scan_lane.shutdown(wait=False)
            raise

    def __init__(
        self,
        options: FsOptions,
        context: TierContext,
        folder: Folder,
        books: Books,
        tally: Tally,
        scan_lane: Lanes,
    ) -> None:
        """Use `open` instead."""
        self._name = context.name
        self._row_bytes = context.row_bytes
        self._stores = Calls(context.name)
        self._folder = folder
        self._tally = tally
        if options.io == "auto" and not folder.direct:
            tally.count("buffered_fallback")
        self._shared = options.shared
        self._books = books
        self._lanes = start_lanes(options, context.name, scan_lane)
        parts = assemble(options, context, folder, books, tally, self._lanes)
        self._index, self._capacity, self._chunks = parts.index, parts.capacity, parts.chunks
        self._eviction, self._looking = parts.eviction, parts.looking
        self._loading, self._storing = parts.loading, parts.storing
        self._closed = False
        self._news = asyncio.Event()  # Something for the inventory's consumer, or the end.
        self._patient_until = time.monotonic() + SCAN_PATIENCE_S
        self._eviction.changed = self._news.set
        self._background = [
            asyncio.create_task(work(), name=f"kvtier-{context.name}-{work.__name__}")
            for work in (self._looking.run, self._looking.run_checkpoints, self._eviction.run)
        ]

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self._check_open()
        answers = [not self._shared and key in self._index for key in keys]  # Others remove files, too.
        if self._index.authoritative or all(answers):
            return answers
        unknown = [key for key, known in zip(keys, answers, strict=True) if not known]
        shares = share_out(unknown, self._lanes.load.count, PROBES_MAX)
        asked = await asyncio.gather(*(_loadable(self._chunks, share, executor=self._lanes.load) for share in shares))
        told = chain.from_iterable(asked)
        return [known or next(told) for known in answers]

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        self._check_open()
        self._check_batch(reads)
        return self._answered(*await self._loading(reads))

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._stores.one():
            self._check_batch(writes)
            if not self._looking.done.is_set():
                await self._look_is_done()
            return self._answered(*await self._storing(writes))

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._check_open()
        parts = share_out(keys, self._lanes.store.count, PROBES_MAX)
        removed: list[OffloadKey] = []
        note = self._index.lost
        with self._index.call(keys) as unchanged:
            try:
                errors = await in_threads(
                    self._lanes.store, [partial(self._chunks.remove, part, removed) for part in parts]
                )
                note = self._index.removed
            finally:
                self._eviction.stored(-sum(map(self._index.taken_bytes, removed)))
                for key in unchanged.intersection(removed):
                    note(key)
                self._eviction.changed()
        for error in filter(None, errors):
            left = len(keys) - len(removed)
            raise BackendUnavailable(f"{self._name}: {left} of {len(keys)} files could not be removed") from error

    async def aclose(self, deadline_s: float) -> Abandoned:
        self._closed = True
        self._news.set()
        ends_at = time.monotonic() + deadline_s
        await self._stores.close(deadline_s)  # A store may need several hops, and the first look to be over.
        self._looking.stop()
        for task in self._background:
            task.cancel()
        self._eviction.stamps.write_before_end()
        lanes = self._lanes.load, self._lanes.store
        loads, stores = await asyncio.gather(*(each.aclose(max(0.0, ends_at - time.monotonic())) for each in lanes))
        self._looking.write_last_checkpoint(max(0.0, ends_at - time.monotonic()))
        lanes = self._lanes.scan, self._lanes.evict
        others = await asyncio.gather(*(each.aclose(max(0.0, ends_at - time.monotonic())) for each in lanes))
        if not loads + stores + sum(others):
            self._books.close()
            self._folder.close()
        await asyncio.wait(self._background)
        for task in self._background:
            if not task.cancelled():
                task.result()  # Raises what was wrong with it, if anything was.
        return Abandoned(loads + stores)

    async def watch(self) -> AsyncIterator[InventoryEvent]:
        """See `Inventory`. A chunk that a cancelled call has stored or deleted is reported, too."""
        report = self._index.begin_report()
        try:
            while not self._closed:
                if (event := self._index.next_event()) is not None:
                    yield event
                else:
                    self._news.clear()
                    await self._news.wait()
        finally:
            self._index.end_report(report)

    def occupancy(self) -> Occupancy:
        """See `Measured`. While the directory is being scanned, it covers what was found so far."""
        capacity = self._capacity
        return Occupancy(len(self._index), self._eviction.used_bytes(), capacity.limit_bytes, capacity.reserved_bytes)

    def rank(self, keys: Sequence[OffloadKey]) -> None:
        """See `Ranked`."""
        self._index.rank(keys)
        self._eviction.used(keys)

    def counts(self) -> dict[str, int]:
        """See `Counted`."""
        return by_name(self._tally.totals())

    def counters(self) -> FsCounters:
        """Return what was counted since the tier was opened."""
        return self._tally.totals()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed(f"{self._name}: closed")

    def _check_batch(self, batch: Sequence[Read] | Sequence[Write]) -> None:
        """Refuse what is a caller's mistake before anything moves."""
        for key, buffer in batch:
            if buffer.nbytes != self._row_bytes:
                raise ValueError(f"{key.hex()}: a buffer of {buffer.nbytes:,} bytes for a row of {self._row_bytes:,}")
            if len(key) < GROUP_BYTES:
                raise ValueError(f"{key.hex()}: a key of {len(key)} bytes, at least {GROUP_BYTES} expected")

    async def _look_is_done(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._patient_until - time.monotonic())):
                await self._looking.done.wait()

    def _answered(self, outcomes: list[Outcome], gone: int) -> list[Outcome]:
        if outcomes and gone == len(outcomes):
            raise BackendUnavailable(f"{self._name}: the file system is away: {outcomes[-1]}")
        return outcomes
