"""One file a chunk: the layout that vLLM reads, and that any tool for files can look at."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain

from kvtier.backend import Advice, Occupancy, OffloadKey, Outcome, Read, Write, in_threads
from kvtier.errors import BackendUnavailable
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.lanes import share_out
from kvtier_backends.fs.files.accounts import Accounts
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import FileIndex
from kvtier_backends.fs.files.lane import FileChunks
from kvtier_backends.fs.files.loading import FileLoading
from kvtier_backends.fs.files.start import FilesStart
from kvtier_backends.fs.files.storing import FileStoring
from kvtier_backends.fs.layout import Background, Left, OpenTier, left_s, until

PROBES_MAX = 512  # Calls without bytes, of one lane at once: half a millisecond of a local file system's time.
SCAN_PATIENCE_S = 0.5  # So long from the opening, stores wait for the scan, rather than be refused for its sake;
SMALL_PATIENCE_S = 5.0  # and for a small directory's longer, from each call: only what hangs takes that long.


class FilesLayout:
    """See `Layout`."""

    def __init__(self, tier: OpenTier) -> None:
        """Make its parts, on the running loop."""
        root = tier.root
        self.key_bytes_max = min(tier.packing.key_bytes_max, tier.context.mapper.key_bytes_max(root.name_bytes_max))
        self._tier = tier
        self._lanes = tier.lanes
        self._index = index = FileIndex(tier.policy(), tier.clock_ns)
        self.inventory = index.inventory
        tier.capacity.count(index, root.sizes)
        self._chunks = chunks = FileChunks(tier)
        self._eviction = eviction = Eviction(tier, index, chunks, Accounts(tier))
        self._loading = FileLoading(tier, index, chunks, eviction)
        self._storing = FileStoring(tier, index, chunks, eviction)
        self._start = FilesStart(tier, index, chunks, eviction)
        self._background = Background()
        self._patient_until = time.monotonic() + SCAN_PATIENCE_S

    def begin(self) -> None:
        self._background.begin(self._tier.context.name, (self._start.run, self._eviction.run))

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        answers = [not self._tier.options.shared and key in self._index for key in keys]  # Others remove files, too.
        if self._index.authoritative or all(answers):
            return answers
        unknown = [key for key, known in zip(keys, answers, strict=True) if not known]
        shares = share_out(unknown, self._lanes.load.count, PROBES_MAX)
        asked = await asyncio.gather(*(self._lanes.load.run(self._chunks.loadable, share) for share in shares))
        told = chain.from_iterable(asked)
        return [known or next(told) for known in answers]

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        return await self._loading(reads)

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        if not self._start.done.is_set():
            if self._tier.options.shared or self._tier.capacity.free_bytes() is not None:
                await until(self._start.gauged.wait(), SMALL_PATIENCE_S)
            await until(self._start.done.wait(), self._patient_until - time.monotonic())
        return await self._storing(writes)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        parts = share_out(keys, self._lanes.store.count, PROBES_MAX)
        removed: dict[OffloadKey, bool] = {}
        note = self._index.lost
        with self._index.call(keys) as unchanged:
            try:
                errors = await in_threads(
                    self._lanes.store, [partial(self._chunks.remove, part, removed) for part in parts]
                )
                note = self._index.removed
            finally:
                sure = unchanged.intersection(removed)  # Others were stored before they were removed, or since.
                self._eviction.doubt(key for key in keys if key in self._index and key not in sure)
                self._eviction.stored(-sum(self._index.taken_bytes(key) for key in sure if removed[key]))
                for key in sure:
                    note(key)
        for error in filter(None, errors):
            left = len(keys) - len(removed)
            raise BackendUnavailable(
                f"{self._tier.context.name}: {left} of {len(keys)} files could not be removed"
            ) from error

    def advise(self, advice: Advice[OffloadKey]) -> None:
        tier, index = self._tier, self._index
        chunk_bytes = max(tier.context.row_bytes + FOOTER_BYTES, index.used_bytes // max(1, len(index)))
        index.advise(advice, tier.retained_max(chunk_bytes))
        if advice.kind == "rank":
            self._eviction.used(advice.keys)

    @property
    def retentions_cut(self) -> int:
        return self._index.retentions_cut

    def occupancy(self) -> Occupancy:
        capacity = self._tier.capacity
        return Occupancy(len(self._index), self._eviction.used_bytes(), capacity.limit_bytes, capacity.reserved_bytes)

    async def aclose(self, ends_at: float) -> Left:
        self._start.stop()
        self._background.cancel()
        self._index.claims.close()
        self._eviction.stamps.write_before_end()
        loads, stores = await self._tier.end_transfers(ends_at)
        self._start.done.set()  # For stores that still wait: lanes are closed then.
        lanes = self._lanes.scan, self._lanes.evict
        others = await asyncio.gather(*(each.aclose(left_s(ends_at)) for each in lanes))
        return Left(loads + stores, sum(others))

    def close_files(self) -> None:
        pass  # None is open between two calls.

    async def ended(self) -> None:
        await self._background.ended()
