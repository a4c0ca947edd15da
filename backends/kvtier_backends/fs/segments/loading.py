"""Loads from slots, which are read in runs. A wrong slot may only mean that its chunk has moved.

A slot may be written to while it is read. The bytes are verified. If they are not the chunk, the catalog says whether
the chunk is in another slot by now, and it is read there.
"""

from collections.abc import Sequence
from functools import partial

from kvtier.backend import OffloadKey, Outcome, Read, in_threads
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier_backends.fs.disk.footer import LEFT_ALONE, ChunkFault
from kvtier_backends.fs.disk.lanes import share_chunks, share_least
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.lane import SlotChunks
from kvtier_backends.fs.segments.runs import SlotPart
from kvtier_backends.fs.segments.wiping import Wiping

LOOKS_MAX = 4  # A chunk that has moved so often while it was read is missed.


class SlotLoading:
    """The loads of one tier, a batch at a time. Belongs to the loop's thread."""

    def __init__(self, tier: OpenTier, catalog: Catalog, wiping: Wiping) -> None:
        """Read in the lanes for loads."""
        self._tier = tier
        self._catalog = catalog
        self._wiping = wiping
        self._lanes = tier.lanes.load
        self._chunks = SlotChunks(tier, self._lanes)
        self._share_chunks = share_chunks(tier.context.row_bytes)
        self._share_least = share_least(tier.context.row_bytes, tier.root.reads.queue_bytes)

    async def __call__(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        """Load the chunks; return the outcomes, and how many say that the file system is away."""
        outcomes: list[Outcome] = [None] * len(reads)
        with self._tier.lanes.loads_first.loading(), self._catalog.in_use([read.key for read in reads]):
            left, gone = list(enumerate(reads)), 0
            for _ in range(LOOKS_MAX):
                if not left:
                    break
                left, gone_now = await self._look(left, outcomes)
                gone += gone_now
        now_ns = self._tier.clock_ns()
        self._catalog.used([read.key for read, outcome in zip(reads, outcomes, strict=True) if outcome is None], now_ns)
        return outcomes, gone

    async def _look(
        self, left: Sequence[tuple[int, Read]], outcomes: list[Outcome]
    ) -> tuple[list[tuple[int, Read]], int]:
        """Read chunks where they are now; return those that were moved meanwhile."""
        catalog, parts = self._catalog, list[SlotPart[Read]]()
        for position, read in left:
            if (slot := catalog.slot(read.key)) is None:
                outcomes[position] = ChunkMissing(f"{read.key.hex()}: no slot")
            else:
                parts.append(SlotPart(slot, position, read))
        sequences = {part.position: catalog.sequence(part.slot) for part in parts}
        shares = self._catalog.segments.shares(parts, self._lanes.count, self._share_chunks, self._share_least)
        faults: dict[int, ChunkFault] = {}
        await in_threads(self._lanes, [partial(self._chunks.load, share, faults) for share in shares])
        again: list[tuple[int, Read]] = []
        for share in shares:
            for part, outcome in zip(share.parts, share.outcomes, strict=True):
                slot, position, read = part
                outcomes[position] = outcome
                fault = faults.get(position) if faults else None
                if outcome is None and fault is None:
                    continue
                now = catalog.slot(read.key)
                if now != slot or catalog.sequence(slot) != sequences[position]:
                    outcomes[position] = ChunkMissing(f"{read.key.hex()}: no slot any more")
                    if now is not None:
                        again.append((position, read))
                elif fault is not None:
                    outcomes[position] = self._judge(read.key, slot, fault)
        return again, sum(share.gone for share in shares)

    def _judge(self, key: OffloadKey, slot: int, fault: ChunkFault) -> Outcome:
        """Return the outcome of a chunk that its slot does not hold; a corrupt one is dropped."""
        if self._catalog.is_candidate(slot):
            self._catalog.lost(key)
            return ChunkMissing(f"{key.hex()}: not there any more")
        if self._catalog.is_foreign(slot):
            self._catalog.lost(key)  # Its writer has put another there.
            return ChunkMissing(f"{key.hex()}: replaced by another process")
        if left := LEFT_ALONE.get(fault):
            self._tier.counters.count(left.counter)
            return ChunkMissing(f"{key.hex()}: {left.why}; left alone")
        self._wiping.corrupt(key, slot, fault)
        return ChunkCorrupt(f"{key.hex()}: {fault}: slot {slot}")
