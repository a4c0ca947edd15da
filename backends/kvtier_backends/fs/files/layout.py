"""One file a chunk: the layout that vLLM reads, and that any tool for files can look at."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain

from kvtier.backend import Advice, Occupancy, OffloadKey, Outcome, Read, Write, in_threads
from kvtier.errors import BackendUnavailable, ChunkCorrupt, ChunkMissing, NoSpace
from kvtier_backends.fs.disk.capacity import chunk_bytes_worst
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.lanes import share_chunks, share_least, share_out
from kvtier_backends.fs.files.accounts import Accounts
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.files.lane import FileChunks, LoadShare, StoreShare
from kvtier_backends.fs.files.start import FilesStart
from kvtier_backends.fs.layout import Background, FsTier, Left, left_s, until

PROBES_MAX = 512  # Calls without bytes, of one lane at once: half a millisecond of a local file system's time.
SCAN_PATIENCE_S = 0.5  # So long from the opening, stores wait for the scan, rather than be refused for its sake;
SMALL_PATIENCE_S = 5.0  # and for a small directory's longer, from each call: only what hangs takes that long.


class FilesLayout:
    """One tier's chunks in files. Loads and stores also return how many outcomes say: the file system is away."""

    def __init__(self, tier: FsTier) -> None:
        root = tier.root
        self.key_bytes_max = min(tier.packing.key_bytes_max, tier.context.mapper.key_bytes_max(root.name_bytes_max))
        self._tier = tier
        self._lanes = tier.lanes
        self._index = index = FileIndex(tier.policy(), tier.clock_ns)
        self._numbers = index.numbers
        self.inventory = index.numbers.inventory
        tier.capacity.count(index, root.sizes)
        self._chunks = chunks = FileChunks(tier)
        self._eviction = eviction = Eviction(tier, index, chunks, Accounts(tier))
        self._start = FilesStart(tier, index, chunks, eviction)
        self.background = Background()
        row_bytes = tier.context.row_bytes
        self._share_chunks = share_chunks(row_bytes)
        self._share_least = share_least(row_bytes, root.reads.queue_bytes)
        self._worst_bytes = chunk_bytes_worst(row_bytes + FOOTER_BYTES, root.disk.block_bytes, root.sizes.new_bytes)
        self._patient_until = time.monotonic() + SCAN_PATIENCE_S

    def begin(self) -> None:
        self.background.begin(self._tier.context.name, (self._start.run, self._eviction.run))

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        answers = [not self._tier.options.shared and key in self._index for key in keys]  # Others remove files, too.
        if self._index.inventory.complete or all(answers):
            return answers
        unknown = [key for key, known in zip(keys, answers, strict=True) if not known]
        shares = share_out(unknown, self._lanes.load.count, PROBES_MAX)
        asked = await asyncio.gather(*(self._lanes.load.run(self._chunks.loadable, share) for share in shares))
        told = chain.from_iterable(asked)
        return [known or next(told) for known in answers]

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        leaving = self._index.claims.leaving.intersection(read.key for read in reads)
        shares = [
            LoadShare(part, leaving, measure=any(read.key not in self._index for read in part))
            for part in share_out(reads, self._lanes.load.count, self._share_chunks, self._share_least)
        ]
        keys = [read.key for read in reads]
        with self._lanes.loads_first.loading(), self._index.claims.in_use(keys), self._index.call(keys) as unchanged:
            try:
                await in_threads(self._lanes.load, [partial(self._chunks.load, share) for share in shares])
            finally:
                self._note_loads(shares, unchanged)
        return [outcome for share in shares for outcome in share.outcomes], sum(share.gone for share in shares)

    def _note_loads(self, shares: Sequence[LoadShare], unchanged: set[OffloadKey]) -> None:
        used: list[OffloadKey] = []
        known: list[OffloadKey] = []
        for share in reversed(shares):  # Tail first: a prefix outlives its continuation.
            done = list(zip(share.reads, share.outcomes, share.allocated_bytes, strict=False))
            for read, outcome, allocated_bytes in reversed(done):
                key = read.key
                # One that was never known may have a file all the same: one that is refused, and takes room.
                if isinstance(outcome, ChunkCorrupt) or (isinstance(outcome, ChunkMissing) and key in self._index):
                    if key in unchanged and key not in share.left:  # What is left takes its room, until it goes for it.
                        self._lost(key, is_there=key in share.irremovable)
                elif outcome is None and key in self._index:
                    known.append(key)
                    used.append(key)
                elif allocated_bytes is not None and key not in self._index.claims.leaving:
                    self._index.found(FileEntry(key, allocated_bytes))  # Nobody knows what its time says: that is set.
                    used.append(key)
        self._index.used(known[::-1])
        self._eviction.used(used[::-1])
        self._eviction.check()

    def _lost(self, key: OffloadKey, *, is_there: bool) -> None:
        taken_bytes = self._index.taken_bytes(key)
        self._index.lost(key)
        if is_there:
            self._index.stays(FileEntry(key, taken_bytes, loadable=False))
            self._eviction.doubt([key])

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        """Promise the worst case's room before a byte is written, head first; on a full disk, evict and try again."""
        if not self._start.done.is_set():
            if self._tier.options.shared or self._tier.capacity.free_bytes() is not None:
                await until(self._start.gauged.wait(), SMALL_PATIENCE_S)
            await until(self._start.done.wait(), self._patient_until - time.monotonic())
        keys = [write.key for write in writes]
        await self._index.claims.until_gone(keys)
        with self._index.claims.in_use(keys):
            worst_bytes = self._worst_bytes
            incoming = [key for key in dict.fromkeys(keys) if key not in self._index]
            reservation = await self._eviction.reserve(len(writes) * worst_bytes, worst_bytes, incoming)
            try:
                fitting = writes[: reservation.bytes // worst_bytes]
                allowed = fitting[: await self._tier.allowed(len(fitting))]
                outcomes, gone = await self._write(allowed)
                if failed := [index for index, outcome in enumerate(outcomes) if isinstance(outcome, NoSpace)]:
                    await self._try_again(allowed, failed, outcomes)
                    left = sum(isinstance(outcomes[index], NoSpace) for index in failed)
                    self._tier.counters.refuse("disk", left)
            finally:
                self._eviction.release(reservation)
        outcomes += self._tier.counters.refused(fitting[len(allowed) :], "write_budget")
        scarce = self._tier.scarce(others=self._eviction.accounts.others_have_room)
        outcomes += self._tier.counters.refused(writes[len(fitting) :], scarce)
        return outcomes, gone

    async def _write(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        used_at_ns, shares = self._tier.clock_ns(), list[StoreShare]()
        for part in share_out(writes, self._lanes.store.count, self._share_chunks):
            shares.append(StoreShare(part, used_at_ns))
            used_at_ns -= len(part)
        told = False
        try:
            await in_threads(self._lanes.store, [partial(self._chunks.store, share) for share in shares])
            told = True
        finally:
            self._note_stores(shares, told=told)
        return [outcome for share in shares for outcome in share.outcomes], sum(share.gone for share in shares)

    def _note_stores(self, shares: Sequence[StoreShare], *, told: bool) -> None:
        added_bytes = 0
        for share in reversed(shares):  # Tail first: a prefix outlives its continuation.
            done = list(enumerate(zip(share.writes, share.allocated_bytes, strict=False)))
            for index, (write, allocated_bytes) in reversed(done):
                if allocated_bytes is not None:
                    added_bytes += allocated_bytes - self._index.taken_bytes(write.key)
                    self._index.stored(FileEntry(write.key, allocated_bytes, share.used_at_ns - index))
                    if write.key in share.doubtful:
                        self._eviction.doubt([write.key])
                    if not told or write.key in share.doubtful:
                        self._index.inventory.added(write.key)
        self._eviction.accounts.added(added_bytes)

    async def _try_again(self, writes: Sequence[Write], failed: Sequence[int], outcomes: list[Outcome]) -> None:
        self._tier.counters.count("disk_full", len(failed))
        again = [writes[index] for index in failed]
        if not await self._eviction.make_room_on_disk(len(again) * self._worst_bytes, [write.key for write in again]):
            return
        second, _ = await self._write(again)
        for index, outcome in zip(failed, second, strict=True):
            outcomes[index] = outcome

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        lanes = self._lanes.store
        parts = share_out(keys, lanes.count, PROBES_MAX)
        removed: dict[OffloadKey, bool] = {}
        note = self._index.lost
        with self._index.call(keys) as unchanged:
            try:
                errors = await in_threads(lanes, [partial(self._chunks.remove, part, removed) for part in parts])
                note = self._index.removed
            finally:
                sure = unchanged.intersection(removed)  # Others were stored before they were removed, or since.
                self._eviction.doubt(key for key in keys if key in self._index and key not in sure)
                self._eviction.accounts.added(-sum(self._index.taken_bytes(key) for key in sure if removed[key]))
                for key in sure:
                    note(key)
        for error in filter(None, errors):
            left = f"{len(keys) - len(removed)} of {len(keys)} files"
            raise BackendUnavailable(f"{self._tier.context.name}: {left} could not be removed") from error

    @property
    def retentions_cut(self) -> int:
        return self._numbers.retentions_cut

    def advise(self, advice: Advice[OffloadKey]) -> None:
        tier, index = self._tier, self._index
        chunk_bytes = max(tier.context.row_bytes + FOOTER_BYTES, index.used_bytes // max(1, len(index)))
        self._numbers.advise(advice, tier.clock_ns(), tier.retained_max(chunk_bytes))
        if advice.kind == "rank":
            self._eviction.used(advice.keys)

    def occupancy(self) -> Occupancy:
        capacity = self._tier.capacity
        return Occupancy(len(self._index), self._eviction.used_bytes(), capacity.limit_bytes, capacity.reserved_bytes)

    async def aclose(self, ends_at: float) -> Left:
        """Wait for what is in flight, at most until then by the monotonic clock; no call comes any more. Idempotent."""
        self._start.stop()
        self.background.cancel()
        self._index.claims.close()
        self._eviction.stamp_last()
        loads, stores = await self._tier.end_transfers(ends_at)
        self._eviction.stamp_last()
        self._start.done.set()  # For stores that still wait: lanes are closed then.
        lanes = self._lanes.scan, self._lanes.evict
        return Left(loads + stores, sum(await asyncio.gather(*(each.aclose(left_s(ends_at)) for each in lanes))))

    def close_files(self) -> None:
        """None is open between two calls."""
