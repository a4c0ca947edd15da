"""A tier on a file system, the asynchronous shell: it checks, splits batches over lanes, and indexes what became."""

import asyncio
from collections.abc import AsyncIterator, Sequence
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
from kvtier.errors import BackendClosed, BackendUnavailable, BlockCorrupt, BlockMissing
from kvtier.keys import GROUP_BYTES, OffloadKey
from kvtier.lend import Lanes, in_threads
from kvtier_backends.fs.chunks import Chunks, LoadShare, StoreShare, share_chunks, share_out
from kvtier_backends.fs.counters import FsCounters, Tally
from kvtier_backends.fs.files import ChunkFiles
from kvtier_backends.fs.folder import Folder
from kvtier_backends.fs.index import Held, Index
from kvtier_backends.fs.options import FsOptions
from kvtier_backends.fs.scan import Scan

PROBES_MAX = 512  # Calls without bytes, in one hop: half a millisecond of a local file system's time.

_open = aiofiles.os.wrap(Folder.open)
_loadable = aiofiles.os.wrap(Chunks.loadable)
_next_batch = aiofiles.os.wrap(Scan.next_batch)


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
        folder = Folder(options, context.mapper)
        tally = Tally()
        scan_lane = Lanes(1, f"kvtier-{context.name}-scan")
        try:
            await _open(folder, executor=scan_lane)
            return cls(options, context, folder, tally, scan_lane)
        except BaseException:
            scan_lane.submit(folder.close)  # When the lane comes to it: a cancelled call's thread may still be at it.
            scan_lane.shutdown(wait=False)
            raise

    def __init__(
        self, options: FsOptions, context: TierContext, folder: Folder, tally: Tally, scan_lane: Lanes
    ) -> None:
        """Use `open` instead."""
        self._name = context.name
        self._row_bytes = context.row_bytes
        self._share_chunks = share_chunks(context.row_bytes)
        self._folder = folder
        self._tally = tally
        self._index = Index()
        self._chunks = Chunks(
            ChunkFiles(folder, context.mapper, fsync=options.fsync),
            tally,
            lanes=options.load_lanes + options.store_lanes,
            row_bytes=context.row_bytes,
            fingerprint=context.mapper.fingerprint,
            accept_bare=options.unverified == "accept",
        )
        if options.io == "auto" and not folder.direct:
            tally.count("buffered_fallback")
        self._load_lanes = Lanes(options.load_lanes, f"kvtier-{context.name}-load")
        self._store_lanes = Lanes(options.store_lanes, f"kvtier-{context.name}-store")
        self._scan_lane = scan_lane
        self._closed = False
        self._news = asyncio.Event()  # Something for the inventory's consumer, or the end.
        self._scan = Scan(folder, context.mapper, self._chunks.takes)
        self._scanning = asyncio.create_task(self._run_scan(), name=f"kvtier-{context.name}-scan")

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        self._check_open()
        answers = [key in self._index for key in keys]
        if self._index.authoritative or all(answers):
            return answers
        unknown = [key for key, known in zip(keys, answers, strict=True) if not known]
        shares = share_out(unknown, self._load_lanes.count, PROBES_MAX)
        asked = await asyncio.gather(*(_loadable(self._chunks, share, executor=self._load_lanes) for share in shares))
        told = chain.from_iterable(asked)
        return [known or next(told) for known in answers]

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        self._check_open()
        self._check_batch(reads)
        mark = self._index.mark()
        shares = [
            LoadShare(part, measure=any(read.key not in self._index for read in part))
            for part in share_out(reads, self._load_lanes.count, self._share_chunks)
        ]
        try:
            await in_threads(self._load_lanes, [partial(self._chunks.load, share) for share in shares])
        finally:
            self._note_loaded(shares, mark)
        return self._outcomes(shares)

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        self._check_open()
        self._check_batch(writes)
        shares = [StoreShare(part) for part in share_out(writes, self._store_lanes.count, self._share_chunks)]
        told = False
        try:
            await in_threads(self._store_lanes, [partial(self._chunks.store, share) for share in shares])
            told = True
        finally:
            self._note_stored(shares, told=told)
        return self._outcomes(shares)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._check_open()
        mark = self._index.mark()
        parts = share_out(keys, self._store_lanes.count, PROBES_MAX)
        removed: list[OffloadKey] = []
        note = self._index.lost
        try:
            errors = await in_threads(
                self._store_lanes, [partial(self._chunks.remove, part, removed) for part in parts]
            )
            note = self._index.removed
        finally:
            for key in removed:
                note(key, mark)
            self._news.set()
        for error in filter(None, errors):
            left = len(keys) - len(removed)
            raise BackendUnavailable(f"{self._name}: {left} of {len(keys)} files could not be removed") from error

    async def aclose(self, deadline_s: float) -> Abandoned:
        self._closed = True
        self._news.set()
        self._scan.stop()
        self._scanning.cancel()
        lanes = self._load_lanes, self._store_lanes, self._scan_lane
        loads, stores, scans = await asyncio.gather(*(each.aclose(deadline_s) for each in lanes))
        if not loads + stores + scans:
            self._folder.close()
        await asyncio.wait({self._scanning})
        if not self._scanning.cancelled():
            self._scanning.result()  # Raises what was wrong with it, if anything was.
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
        return Occupancy(len(self._index), self._index.used_bytes, capacity_bytes=None)

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

    def _note_loaded(self, shares: Sequence[LoadShare], mark: int) -> None:
        # Tail first, here and below: a prefix outlives its continuation.
        for share in reversed(shares):
            done = list(zip(share.reads, share.outcomes, share.allocated_bytes, strict=False))
            for read, outcome, allocated_bytes in reversed(done):
                if isinstance(outcome, BlockMissing | BlockCorrupt):
                    self._index.lost(read.key, mark)
                elif outcome is None and read.key in self._index:
                    self._index.used(read.key)
                elif allocated_bytes is not None:
                    self._index.found(Held(read.key, allocated_bytes))
        self._news.set()

    def _note_stored(self, shares: Sequence[StoreShare], *, told: bool) -> None:
        for share in reversed(shares):
            for write, allocated_bytes in reversed(list(zip(share.writes, share.allocated_bytes, strict=False))):
                if allocated_bytes is not None:  # It may be 0: not every file system counts blocks.
                    self._index.stored(Held(write.key, allocated_bytes))
                    if not told:
                        self._index.report(write.key)
        self._news.set()

    def _outcomes(self, shares: Sequence[LoadShare] | Sequence[StoreShare]) -> list[Outcome]:
        outcomes = [outcome for share in shares for outcome in share.outcomes]
        if outcomes and sum(share.gone for share in shares) == len(outcomes):
            raise BackendUnavailable(f"{self._name}: the file system is away: {outcomes[-1]}")
        return outcomes

    async def _run_scan(self) -> None:
        while batch := await _next_batch(self._scan, executor=self._scan_lane):
            self._index.scanned(batch)
            self._news.set()
        self._tally.count("scan_skipped", self._scan.skipped)
        self._tally.count("scan_failed", self._scan.failed)
        self._index.scan_ended(complete=self._scan.failed == 0)
        self._news.set()
