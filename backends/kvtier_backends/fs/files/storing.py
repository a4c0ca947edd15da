"""Stores of files: room is reserved, chunks are written, and outcomes are counted, whatever happens between.

Room is promised for the worst case before a byte is written. The leading chunks of a batch get it first: without its
head, a prefix's tail is of no use. If the disk is still full, other chunks are removed, and failed stores are tried
once more.
"""

from collections.abc import Sequence
from functools import partial

from kvtier.backend import Outcome, Write, in_threads
from kvtier.errors import NoSpace
from kvtier_backends.fs.disk.capacity import chunk_bytes_worst
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.lanes import share_chunks, share_out
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.files.lane import FileChunks, StoreShare
from kvtier_backends.fs.layout import OpenTier


class FileStoring:
    """The stores of one tier, a batch at a time. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier, index: FileIndex, chunks: FileChunks, eviction: Eviction) -> None:
        """Write in the lanes for stores."""
        file_bytes, root = tier.context.row_bytes + FOOTER_BYTES, tier.root
        self._tier = tier
        self._index = index
        self._chunks = chunks
        self._eviction = eviction
        self._lanes = tier.lanes.store
        self._share_chunks = share_chunks(tier.context.row_bytes)
        self._worst_bytes = chunk_bytes_worst(file_bytes, root.disk.block_bytes, root.sizes.new_bytes)

    async def __call__(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        """Store the chunks that fit; return the outcomes, and how many say that the file system is away."""
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
        outcomes += self._tier.refused(fitting[len(allowed) :], "write_budget")
        scarce = self._tier.scarce(others=self._eviction.accounts.others_have_room)
        outcomes += self._tier.refused(writes[len(fitting) :], scarce)
        return outcomes, gone

    async def _write(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        used_at_ns, shares = self._tier.clock_ns(), list[StoreShare]()
        for part in share_out(writes, self._lanes.count, self._share_chunks):
            shares.append(StoreShare(part, used_at_ns))
            used_at_ns -= len(part)
        told = False
        try:
            await in_threads(self._lanes, [partial(self._chunks.store, share) for share in shares])
            told = True
        finally:
            self._note(shares, told=told)
        return [outcome for share in shares for outcome in share.outcomes], sum(share.gone for share in shares)

    def _note(self, shares: Sequence[StoreShare], *, told: bool) -> None:
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
        self._eviction.stored(added_bytes)

    async def _try_again(self, writes: Sequence[Write], failed: Sequence[int], outcomes: list[Outcome]) -> None:
        """Make room on a full disk, and write what did not fit."""
        self._tier.counters.count("disk_full", len(failed))
        again = [writes[index] for index in failed]
        wanted_bytes = len(again) * self._worst_bytes
        if not await self._eviction.make_room_on_disk(wanted_bytes, [write.key for write in again]):
            return
        second, _ = await self._write(again)
        for index, outcome in zip(failed, second, strict=True):
            outcomes[index] = outcome
