"""What a store does: reserves room, writes, and has what became counted, in this order whatever happens between.

Room is promised for the worst case before a byte is written, to the leading chunks of a batch first: without its head,
a prefix's tail is of no use. Where the disk turns out to be full all the same, other chunks are removed and what
failed is tried once more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from kvtier.backend import Lanes, OffloadKey, Outcome, Write, in_threads
from kvtier.errors import NoSpace
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.capacity import Reservation, chunk_bytes_worst
from kvtier_backends.fs.disk.footer import FOOTER_BYTES
from kvtier_backends.fs.disk.lanes import share_chunks, share_out
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.write_budget import WriteBudget
from kvtier_backends.fs.files.claims import Claims
from kvtier_backends.fs.files.index import Held, Index
from kvtier_backends.fs.files.lane import Chunks, StoreShare


class Room(Protocol):
    """Who gives out what a directory has room for."""

    async def reserve(self, wanted_bytes: int, least_bytes: int, incoming: Sequence[OffloadKey]) -> Reservation: ...

    def stored(self, added_bytes: int) -> None: ...

    def release(self, reservation: Reservation) -> None: ...

    async def make_room_on_disk(self, wanted_bytes: int, incoming: Sequence[OffloadKey]) -> int: ...


class Sizes(NamedTuple):
    """What one chunk means to a store."""

    file_bytes: int
    worst_bytes: int  # Of room, with folders and the file system's own maps.
    share_chunks: int  # A lane is sent so many in one hop.


def sizes_of(row_bytes: int, folder: Folder) -> Sizes:
    """Return them for rows of this length in this place."""
    file_bytes = row_bytes + FOOTER_BYTES
    worst_bytes = chunk_bytes_worst(file_bytes, folder.disk.block_bytes, folder.sizes.new_bytes)
    return Sizes(file_bytes, worst_bytes, share_chunks(row_bytes))


class Storing:
    """Stores batches of one tier. Belongs to the loop's thread."""

    def __init__(
        self,
        room: Room,
        claims: Claims,
        write_budget: WriteBudget | None,
        index: Index,
        chunks: Chunks,
        counters: Counters,
        *,
        lanes: Lanes,
        sizes: Sizes,
        clock_ns: Callable[[], int],
    ) -> None:
        """Write in these lanes."""
        self._room = room
        self._claims = claims
        self._write_budget = write_budget
        self._index = index
        self._chunks = chunks
        self._counters = counters
        self._lanes = lanes
        self._sizes = sizes
        self._clock_ns = clock_ns

    async def __call__(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        """Store what there is room for; return the outcomes, and how many say that the file system is away."""
        keys = [write.key for write in writes]
        await self._claims.until_gone(keys)
        with self._claims.in_use(keys):
            worst_bytes = self._sizes.worst_bytes
            incoming = [key for key in dict.fromkeys(keys) if key not in self._index]
            reservation = await self._room.reserve(len(writes) * worst_bytes, worst_bytes, incoming)
            try:
                fitting = writes[: reservation.bytes // worst_bytes]
                allowed = fitting[: await self._allowed(len(fitting))]
                outcomes, gone = await self._write(allowed)
                if failed := [index for index, outcome in enumerate(outcomes) if isinstance(outcome, NoSpace)]:
                    await self._try_again(allowed, failed, outcomes)
            finally:
                self._room.release(reservation)
        outcomes += self._refused(fitting[len(allowed) :], "write_budget", "the day's write budget is used up")
        outcomes += self._refused(writes[len(fitting) :], "capacity", "no room, and nothing that may go for it")
        return outcomes, gone

    async def _allowed(self, count: int) -> int:
        if self._write_budget is None or not count:
            return count
        unit_bytes = self._sizes.file_bytes
        return await self._write_budget.take(count * unit_bytes, unit_bytes) // unit_bytes

    async def _write(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]:
        used_at_ns, shares = self._clock_ns(), list[StoreShare]()
        for part in share_out(writes, self._lanes.count, self._sizes.share_chunks):
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
            places = list(enumerate(zip(share.writes, share.allocated_bytes, strict=False)))
            for place, (write, allocated_bytes) in reversed(places):
                if allocated_bytes is not None:
                    added_bytes += allocated_bytes - self._index.taken_bytes(write.key)
                    self._index.stored(Held(write.key, allocated_bytes, share.used_at_ns - place))
                    if not told:
                        self._index.inventory.added(write.key)
        self._room.stored(added_bytes)

    async def _try_again(self, writes: Sequence[Write], failed: Sequence[int], outcomes: list[Outcome]) -> None:
        """Make room on a full disk, and write what did not fit."""
        self._counters.count("disk_full", len(failed))
        again = [writes[index] for index in failed]
        wanted_bytes = len(again) * self._sizes.worst_bytes
        if not await self._room.make_room_on_disk(wanted_bytes, [write.key for write in again]):
            return
        second, _ = await self._write(again)
        for index, outcome in zip(failed, second, strict=True):
            outcomes[index] = outcome

    def _refused(self, writes: Sequence[Write], reason: str, why: str) -> list[Outcome]:
        self._counters.refuse(reason, len(writes))
        return [NoSpace(f"{write.key.hex()}: {why}") for write in writes]
