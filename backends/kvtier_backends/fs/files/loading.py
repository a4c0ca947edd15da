"""What a load does: reads in lanes of its own, and has noted what turned out to be there, to be used, or to be gone."""

from collections.abc import Callable, Sequence
from functools import partial

from kvtier.backend import Lanes, OffloadKey, Outcome, Read, in_threads
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.lanes import LoadsFirst, share_out
from kvtier_backends.fs.files.claims import Claims
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import Held, Index
from kvtier_backends.fs.files.lane import Chunks, LoadShare


class Loading:
    """Loads batches of one tier. Belongs to the loop's thread."""

    def __init__(
        self,
        eviction: Eviction,
        claims: Claims,
        capacity: Capacity,
        index: Index,
        chunks: Chunks,
        loads_first: LoadsFirst,
        *,
        lanes: Lanes,
        share_chunks: int,
        share_least: int,
        clock_ns: Callable[[], int],
    ) -> None:
        """Read in these lanes; each is sent at most `share_chunks` in one hop, and at least about `share_least`."""
        self._eviction = eviction
        self._claims = claims
        self._capacity = capacity
        self._index = index
        self._chunks = chunks
        self._loads_first = loads_first
        self._lanes = lanes
        self._share_chunks = share_chunks
        self._share_least = share_least
        self._clock_ns = clock_ns

    async def __call__(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        """Load the chunks; return the outcomes, and how many say that the file system is away."""
        leaving = self._claims.leaving.intersection(read.key for read in reads)
        shares = [
            LoadShare(part, leaving, measure=any(read.key not in self._index for read in part))
            for part in share_out(reads, self._lanes.count, self._share_chunks, self._share_least)
        ]
        keys = [read.key for read in reads]
        with self._loads_first.loading(), self._claims.in_use(keys), self._index.call(keys) as unchanged:
            try:
                await in_threads(self._lanes, [partial(self._chunks.load, share) for share in shares])
            finally:
                self._note(shares, unchanged)
        return [outcome for share in shares for outcome in share.outcomes], sum(share.gone for share in shares)

    def _note(self, shares: Sequence[LoadShare], unchanged: set[OffloadKey]) -> None:
        used: list[OffloadKey] = []
        for share in reversed(shares):  # Tail first: a prefix outlives its continuation.
            self._capacity.other_bytes += share.kept_bytes
            done = list(zip(share.reads, share.outcomes, share.allocated_bytes, strict=False))
            for read, outcome, allocated_bytes in reversed(done):
                key = read.key
                # One that was never known may have a file all the same: one that is refused, and takes room.
                if isinstance(outcome, ChunkCorrupt) or (isinstance(outcome, ChunkMissing) and key in self._index):
                    if key in unchanged:
                        self._index.lost(key)
                elif outcome is None and key in self._index:
                    self._index.used(key)
                    used.append(key)
                elif allocated_bytes is not None and key not in self._claims.leaving:
                    self._index.found(Held(key, allocated_bytes, self._clock_ns()))
        self._eviction.used(used[::-1])
        self._eviction.check()
        self._eviction.changed()
