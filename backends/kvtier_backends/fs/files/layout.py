"""One file a chunk: the layout that vLLM reads, and that any tool for files can look at."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import aiofiles.os

from kvtier.backend import Lanes, Occupancy, OffloadKey, Outcome, Read, TierContext, Write, in_threads
from kvtier.errors import BackendUnavailable
from kvtier.policies import LRU, policy_class
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.disk.beside import Books
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import KEY_BYTES_MAX
from kvtier_backends.fs.disk.lanes import Precedence, TierLanes, share_least, share_out, start_lanes
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.checkpoint import Checkpoint
from kvtier_backends.fs.files.chunk_files import ChunkFiles
from kvtier_backends.fs.files.claims import Claims
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import Index
from kvtier_backends.fs.files.lane import Chunks
from kvtier_backends.fs.files.loading import Loading
from kvtier_backends.fs.files.shared import SharedEviction
from kvtier_backends.fs.files.start import Looking
from kvtier_backends.fs.files.storing import Storing, sizes_of
from kvtier_backends.fs.layout import Background, Left, until
from kvtier_backends.fs.options import FilesOptions

# What a file tier is made of, put together: nothing here decides anything, and nothing runs yet.


@dataclass(frozen=True, slots=True)
class Parts:
    """What the tier's methods call."""

    index: Index
    capacity: Capacity
    chunks: Chunks
    claims: Claims
    eviction: Eviction
    loading: Loading
    storing: Storing
    looking: Looking


def assemble(
    options: FilesOptions, context: TierContext, folder: Folder, books: Books, tally: Tally, lanes: TierLanes
) -> Parts:
    """Make a tier's parts over an opened folder, on the running loop."""
    clock_ns, sizes = time.time_ns, sizes_of(context.row_bytes, folder)
    limit_bytes = min(options.capacity_bytes or folder.disk.size_bytes, folder.disk.size_bytes)
    kind = policy_class(options.eviction_policy)
    policy = None if kind is LRU else kind(max(1, limit_bytes // context.row_bytes))  # LRU: the index has that order.
    index = Index(policy, None if options.ttl_s is None else clock_ns)
    checkpoint = Checkpoint(folder, context.mapper, tally, context.row_bytes)
    checkpoint_s = 0 if options.shared else options.checkpoint_s
    capacity = Capacity(
        (index, folder.sizes, checkpoint, folder.quarantine),
        folder.disk,
        limit_bytes=options.capacity_bytes,
        low_water=options.low_water,
        min_free_bytes=options.min_free_bytes,
        kept_free_bytes=checkpoint.bytes_worst(limit_bytes // context.row_bytes) if checkpoint_s else 0,
    )
    precedence = Precedence()
    chunks = Chunks(
        ChunkFiles(
            folder,
            context.mapper,
            precedence,
            fsync=options.fsync,
        ),
        tally,
        precedence,
        lanes=options.load_lanes + options.store_lanes,
        row_bytes=context.row_bytes,
        fingerprint=context.mapper.fingerprint,
        accept_bare=options.unverified == "accept",
        reads=folder.reads,
    )
    claims = Claims()
    kind_of_eviction = SharedEviction if options.shared else Eviction
    eviction = kind_of_eviction(
        index,
        capacity,
        chunks,
        claims,
        tally,
        folder.quarantine,
        lane=lanes.evict,
        store_lanes=lanes.store,
        ttl_s=options.ttl_s,
        clock_ns=clock_ns,
    )
    if isinstance(eviction, SharedEviction):
        assert books.ledger is not None
        eviction.share(books.ledger, folder.sizes)
    if books.write_budget is not None:
        books.write_budget.use(lanes.store)
    loading = Loading(
        eviction,
        claims,
        capacity,
        index,
        chunks,
        precedence,
        lanes=lanes.load,
        share_chunks=sizes.share_chunks,
        share_least=share_least(context.row_bytes, folder.reads.queue_bytes),
        clock_ns=clock_ns,
    )
    storing = Storing(
        eviction, claims, books.write_budget, index, chunks, tally, lanes=lanes.store, sizes=sizes, clock_ns=clock_ns
    )
    looking = Looking(
        folder,
        context.mapper,
        chunks.takes,
        index,
        capacity,
        eviction,
        tally,
        lane=lanes.scan,
        checkpoint=checkpoint,
        checkpoint_s=checkpoint_s,
    )
    return Parts(index, capacity, chunks, claims, eviction, loading, storing, looking)


PROBES_MAX = 512  # Calls without bytes, in one hop: half a millisecond of a local file system's time.
SCAN_PATIENCE_S = 0.5  # So long from the opening, stores wait for the scan, rather than be refused for its sake;
SMALL_PATIENCE_S = 5.0  # and for a small directory's longer, from each call: only what hangs takes that long.

_loadable = aiofiles.os.wrap(Chunks.loadable)


class FilesLayout:
    """See `Layout`."""

    def __init__(
        self, options: FilesOptions, context: TierContext, folder: Folder, books: Books, tally: Tally, scan_lane: Lanes
    ) -> None:
        """Use an opened folder, on the running loop."""
        self._name = context.name
        self.key_bytes_max = min(KEY_BYTES_MAX, context.mapper.key_bytes_max(folder.name_bytes_max()))
        self._shared = options.shared
        self._lanes = start_lanes(options, context.name, scan_lane)
        parts = assemble(options, context, folder, books, tally, self._lanes)
        self.news = parts.index.news
        self._index, self._capacity, self._chunks = parts.index, parts.capacity, parts.chunks
        self._claims, self._eviction, self._looking = parts.claims, parts.eviction, parts.looking
        self._loading, self._storing = parts.loading, parts.storing
        self._background = Background()
        self._patient_until = time.monotonic() + SCAN_PATIENCE_S

    def begin(self, changed: Callable[[], None]) -> None:
        self._eviction.changed = changed
        self._background.begin(self._name, (self._looking.run, self._looking.run_checkpoints, self._eviction.run))

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        answers = [not self._shared and key in self._index for key in keys]  # Others remove files, too.
        if self._index.authoritative or all(answers):
            return answers
        unknown = [key for key, known in zip(keys, answers, strict=True) if not known]
        shares = share_out(unknown, self._lanes.load.count, PROBES_MAX)
        asked = await asyncio.gather(*(_loadable(self._chunks, share, executor=self._lanes.load) for share in shares))
        told = chain.from_iterable(asked)
        return [known or next(told) for known in answers]

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        return await self._loading(reads)

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        if not self._looking.done.is_set():
            if self._shared or self._capacity.free_bytes() is not None:
                await until(self._looking.gauged.wait(), SMALL_PATIENCE_S)
            await until(self._looking.done.wait(), self._patient_until - time.monotonic())
        return await self._storing(writes)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
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

    def rank(self, keys: Sequence[OffloadKey]) -> None:
        self._index.rank(keys)
        self._eviction.used(keys)

    def occupancy(self) -> Occupancy:
        capacity = self._capacity
        return Occupancy(len(self._index), self._eviction.used_bytes(), capacity.limit_bytes, capacity.reserved_bytes)

    async def aclose(self, ends_at: float) -> Left:
        self._looking.stop()
        self._background.cancel()
        self._claims.close()
        self._eviction.stamps.write_before_end()
        lanes = self._lanes.load, self._lanes.store
        loads, stores = await asyncio.gather(*(each.aclose(max(0.0, ends_at - time.monotonic())) for each in lanes))
        self._looking.done.set()  # For stores that still wait: lanes are closed then.
        self._looking.write_last_checkpoint(max(0.0, ends_at - time.monotonic()))
        lanes = self._lanes.scan, self._lanes.evict
        others = await asyncio.gather(*(each.aclose(max(0.0, ends_at - time.monotonic())) for each in lanes))
        return Left(loads + stores, sum(others))

    async def ended(self) -> None:
        await self._background.ended()
