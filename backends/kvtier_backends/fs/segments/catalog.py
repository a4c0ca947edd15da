"""The catalog: it decides which slots hold chunks, and which take the next ones. It moves no byte: movers ask it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from enum import IntEnum
from itertools import compress, filterfalse, repeat
from typing import NamedTuple

from kvtier.backend import Advice, InventoryQueue, Occupancy, OffloadKey
from kvtier.errors import BackendClosed
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, LEFT_ALONE, ChunkFault
from kvtier_backends.fs.layout import Scarce, SlotTier, Work, left_s, until
from kvtier_backends.fs.segments.folder import SegmentFolder
from kvtier_backends.fs.segments.pool import PoolFolder
from kvtier_backends.fs.segments.recovery import SegmentsStart
from kvtier_backends.fs.segments.room import Room, Space
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.table import SlotTable
from kvtier_backends.fs.segments.wiping import Wiping

SCAN_PATIENCE_S = 0.5  # Time after the start until which a call waits for the scan of its keys.
# And for the checkpoint: five million chunks on a busy machine. A miss now would be believed for `answer_ttl_s`.
RECALL_PATIENCE_S = 10.0
NO_SLOT = -1


class Lease(NamedTuple):
    """The slots of a batch's chunks, which are not evicted until the lease is released."""

    keys: Sequence[OffloadKey]
    slots: Sequence[int]  # By key; `NO_SLOT` for a chunk that is not held.
    sequences: Sequence[int]  # By key: of the last chunk that its slot had.
    id: int = 0  # In its session.


class Doubt(NamedTuple):
    """A chunk that did not come out of its slot as it should."""

    key: OffloadKey
    slot: int
    sequence: int
    fault: ChunkFault | None  # None: the read failed.


class Verdict(IntEnum):
    STAYS = 0  # It is in this slot: the read's failure is its outcome.
    MOVED = 1  # It is in another slot by now.
    GONE = 2
    LEFT = 3  # The slot holds something that is left alone.
    CORRUPT = 4  # The chunk was dropped.


Judged = tuple[Verdict, int, int]  # If it has moved, with the slot where it is, and the chunk's number there.


class Refusal(NamedTuple):
    """Chunks of a batch that get no slot."""

    positions: Sequence[int]
    reason: Scarce
    error: OSError | None = None  # If set, this is why.


class Reservation(NamedTuple):
    """Slots to be written; nobody else reads or writes them until the reservation is published."""

    keys: Sequence[OffloadKey]  # All keys of the batch.
    positions: Sequence[int]  # Places in the batch of the chunks that have a slot, in order.
    slots: Sequence[int]  # One each, ascending.
    last_sequence: int
    """The head's number is the greatest: a prefix outlives its continuation, also after a restart."""
    refusals: Sequence[Refusal]
    id: int = 0  # In its session.

    @property
    def slot_keys(self) -> list[OffloadKey]:
        """The keys of the chunks that have a slot, in the order of `slots`."""
        return [self.keys[position] for position in self.positions]

    def sequence(self, index: int) -> int:
        return self.last_sequence - index


class PoolStart:
    """The start of a pool of memory: nothing is there, and nothing is left."""

    def __init__(self, table: SlotTable, room: Room) -> None:
        self.done, self.recalled = asyncio.Event(), asyncio.Event()
        for event in (room.opened, self.recalled, self.done):
            event.set()
        table.scan_ended(complete=True)

    def works(self) -> Sequence[Work]:
        return ()

    def stop(self) -> None: ...

    def write_last_checkpoint(self) -> None: ...


class LocalCatalog:
    """The catalog of one namespace's slots, in this process. Belongs to the loop's thread, except `lost_names`."""

    def __init__(
        self,
        tier: SlotTier,
        folder: SegmentFolder | PoolFolder,
        space: Space,
        start: Callable[[SlotTable, Room], SegmentsStart | PoolStart],
    ) -> None:
        self.table = table = SlotTable(tier.policy())
        self.segments = table.segments
        self.inventory: InventoryQueue = table.inventory
        space.capacity.count(table.segments)
        self._tier = tier
        self._wiping = Wiping(tier, table)
        self.room = Room(tier, table, folder, self._wiping, space)
        self._start = start(table, self.room)
        self._begun = time.monotonic()

    def works(self) -> Sequence[Work]:
        """Return the tasks that go on beside calls."""
        return *self._start.works(), self._wiping.run, self.room.run, self.room.run_losses

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        await self._are_known(keys)
        return [key in self.table for key in keys]

    async def lease(self, keys: Sequence[OffloadKey]) -> Lease:
        """Find the slots of chunks, and keep these from eviction until the lease is released."""
        await self._are_known(keys)
        table = self.table
        if table.has_candidate(keys):  # A later chunk of the key may lie in a segment that is not read yet.
            await self._is_scanned()
        table.in_use.pin(keys)
        slots = list(map(table.index.of.get, keys, repeat(NO_SLOT)))
        return Lease(keys, slots, [0 if slot < 0 else table.sequences[slot] for slot in slots])

    async def judge(self, doubts: Sequence[Doubt]) -> Sequence[Judged]:
        """Return where each chunk is, while its lease is in force; drop corrupt chunks."""
        return [self.judged(doubt) for doubt in doubts]

    def judged(self, doubt: Doubt) -> Judged:
        table, (key, slot, sequence, fault) = self.table, doubt
        now = table.slot(key)
        if now is None:
            return Verdict.GONE, NO_SLOT, 0
        if now != slot or table.sequences[now] != sequence:
            return Verdict.MOVED, now, table.sequences[now]
        if fault is None:
            return Verdict.STAYS, NO_SLOT, 0
        if table.is_candidate(slot) or table.is_foreign(slot):
            table.lost(key)
            return Verdict.GONE, NO_SLOT, 0
        if fault in LEFT_ALONE:
            return Verdict.LEFT, NO_SLOT, 0
        self._wiping.corrupt(key, slot, fault)
        return Verdict.CORRUPT, NO_SLOT, 0

    def release(self, lease: Lease, loaded: Sequence[bool]) -> None:
        """End a lease; a loaded chunk counts as used. Never waits, so that a cancelled call can do it."""
        self.table.index.use(compress(lease.keys, loaded), self._tier.clock_ns())
        self.table.in_use.unpin(lease.keys)
        self._wiping.check()

    async def reserve(self, keys: Sequence[OffloadKey]) -> Reservation:
        """Find slots for a batch, the leading chunks first. What goes for them is gone when this returns."""
        await self._is_scanned()
        table = self.table
        table.in_use.pin(keys)
        with ExitStack() as undo:
            undo.callback(self._wiping.written)
            undo.callback(table.in_use.unpin, keys)
            slots = await self.room.take(len(keys), list(filterfalse(table.index.of.__contains__, dict.fromkeys(keys))))
            undo.callback(table.give_back, slots)
            allowed = await self._tier.allowed(len(slots))
            undo.pop_all()
        table.give_back(slots[allowed:])
        refusals: list[Refusal] = []
        if allowed < len(slots):
            refusals.append(Refusal(range(allowed, len(slots)), "write_budget"))
        if len(slots) < len(keys):
            others = not all(segment.own for segment in self.segments.all)
            scarce = self._tier.scarce(others=others, disk=self.room.disk_is_full)
            refusals.append(Refusal(range(len(slots), len(keys)), scarce, self.room.error))
        last_sequence = table.next_sequences(allowed, self._tier.clock_ns()) + allowed - 1
        return Reservation(keys, range(allowed), sorted(slots[:allowed]), last_sequence, refusals)

    def publish(self, reservation: Reservation, written: Sequence[bool], *, told: bool) -> None:
        """Hold the chunks whose slots were written, by index; take the other slots back. Never waits.

        With `told` unset, the caller was cancelled: the inventory tells what was stored.
        """
        table, now_ns = self.table, self._tier.clock_ns()
        keys = reservation.slot_keys
        for index in range(len(keys) - 1, -1, -1):  # The tail first: used last, the head is evicted last.
            key, slot = keys[index], reservation.slots[index]
            if written[index]:
                table.stored(key, slot, reservation.sequence(index), now_ns - index)
            else:
                table.failed(key, slot)
        if not told:
            self.inventory.added(*compress(keys, written))
        table.in_use.unpin(reservation.keys)
        self.room.note_lost()
        self._wiping.written()

    def lost_names(self, segments: Iterable[Segment]) -> dict[Segment, OSError]:
        """Return why chunks in some segments will not be found by the next start. Blocks, in a lane."""
        return self.room.errors(segments)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._start.done.wait()  # An older chunk that is not read yet would come back.
        if self.table.scanning:
            raise BackendClosed(f"{self._tier.context.name}: closed")
        self.table.remove(keys)
        await self._wiping.until_wiped(keys)

    def advise(self, advice: Advice[OffloadKey]) -> None:
        tier = self._tier
        self.table.index.advise(advice, tier.clock_ns(), tier.retained_max(tier.context.row_bytes + FOOTER_BYTES))

    @property
    def retentions_cut(self) -> int:
        return self.table.index.retentions_cut

    def occupancy(self) -> Occupancy:
        chunks, slot_bytes = len(self.table), self._tier.context.row_bytes + FOOTER_BYTES
        used_bytes = chunks * slot_bytes + self._tier.root.remains.used_bytes
        return Occupancy(chunks, used_bytes, self._tier.capacity.limit_bytes)

    def stop(self) -> None:
        """End the scan, and let calls go on that wait for it."""
        self._start.stop()
        self.room.opened.set()

    async def aclose(self, ends_at: float) -> int:
        """Wipe what is left to wipe, and write a checkpoint, when no mover writes; return how many jobs are left."""
        lanes = self._tier.lanes
        self._wiping.begin_last()
        wiping = await lanes.evict.aclose(left_s(ends_at))
        self._wiping.end_last(ended=not wiping)
        if left_s(ends_at):
            self._start.write_last_checkpoint()
        scan = await lanes.scan.aclose(left_s(ends_at))
        self._start.done.set()
        return wiping + scan

    async def _are_known(self, keys: Sequence[OffloadKey]) -> None:
        if not self._start.recalled.is_set() and not all(key in self.table for key in keys):
            await until(self._start.recalled.wait(), self._begun + RECALL_PATIENCE_S - time.monotonic())
        if not self._start.done.is_set() and not all(key in self.table for key in keys):
            await self._is_scanned()

    async def _is_scanned(self) -> None:
        if not self._start.done.is_set():
            await until(self._start.done.wait(), self._begun + SCAN_PATIENCE_S - time.monotonic())
