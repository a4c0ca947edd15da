"""Loads of files, in lanes of their own. They note which files were there, were used, or are gone."""

from collections.abc import Sequence
from functools import partial

from kvtier.backend import OffloadKey, Outcome, Read, in_threads
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier_backends.fs.disk.lanes import share_chunks, share_least, share_out
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.files.lane import FileChunks, LoadShare
from kvtier_backends.fs.layout import OpenTier


class FileLoading:
    """The loads of one tier, a batch at a time. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier, index: FileIndex, chunks: FileChunks, eviction: Eviction) -> None:
        """Read in the lanes for loads."""
        self._tier = tier
        self._index = index
        self._chunks = chunks
        self._eviction = eviction
        self._lanes = tier.lanes.load
        self._share_chunks = share_chunks(tier.context.row_bytes)
        self._share_least = share_least(tier.context.row_bytes, tier.root.reads.queue_bytes)

    async def __call__(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        """Load the chunks; return the outcomes, and how many say that the file system is away."""
        leaving = self._index.claims.leaving.intersection(read.key for read in reads)
        shares = [
            LoadShare(part, leaving, measure=any(read.key not in self._index for read in part))
            for part in share_out(reads, self._lanes.count, self._share_chunks, self._share_least)
        ]
        keys = [read.key for read in reads]
        with (
            self._tier.lanes.loads_first.loading(),
            self._index.claims.in_use(keys),
            self._index.call(keys) as unchanged,
        ):
            try:
                await in_threads(self._lanes, [partial(self._chunks.load, share) for share in shares])
            finally:
                self._note(shares, unchanged)
        return [outcome for share in shares for outcome in share.outcomes], sum(share.gone for share in shares)

    def _note(self, shares: Sequence[LoadShare], unchanged: set[OffloadKey]) -> None:
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
