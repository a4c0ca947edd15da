"""Wiping: footers of chunks that have gone are zeroed, behind the calls that removed them. Then slots are free."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.backend import OffloadKey
from kvtier.errors import BackendClosed, BackendUnavailable, Remedy
from kvtier_backends.fs.disk.footer import ChunkFault, frameless
from kvtier_backends.fs.layout import SlotTier
from kvtier_backends.fs.segments.segment import Segment, sync
from kvtier_backends.fs.segments.table import SlotTable

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class WipingRound:
    """Slots that a lane is to wipe, and slots that it has wiped, even if the waiting call is cancelled."""

    doomed: dict[int, Segment]
    wiped: list[int] = field(default_factory=list[int])
    error: OSError | None = None  # The last, if a slot could not be wiped.


class Wiping:
    """The wiping of one tier's slots, synced with `fsync`. Belongs to the loop's thread, and wipes in a lane."""

    def __init__(self, tier: SlotTier, table: SlotTable) -> None:
        self._tier = tier
        self._table = table
        self._outdated = table.outdated
        self._wake = asyncio.Event()
        self._round = WipingRound({})
        self._round_ended = asyncio.Event()  # Replaced each time that one has.
        self._rounds_failed = 0
        self._error: OSError | None = None  # Of the last round that failed.
        self._closed = False
        self._warned: set[ChunkFault] = set()

    def check(self) -> None:
        if self._outdated.waits:
            self._wake.set()

    def corrupt(self, key: OffloadKey, slot: int, fault: ChunkFault) -> None:
        level = logging.DEBUG if fault in self._warned else logging.WARNING
        self._warned.add(fault)
        name = self._table.segments.of(slot).name
        logger.log(level, "%s: slot %d is corrupt (%s); see %s", name, slot, fault, Remedy.CORRUPT)
        self._table.lost(key)
        self.check()

    async def until_wiped(self, keys: Sequence[OffloadKey]) -> None:
        """Wait until nothing outdated of these keys is on the disk; raises `BackendUnavailable` if that fails."""
        rounds_failed = self._rounds_failed
        while any(key in self._outdated for key in keys):
            if self._closed:
                raise BackendClosed(f"{self._tier.root.chunks}: closed")
            self.check()
            await self._round_ended.wait()
            if self._rounds_failed > rounds_failed and any(key in self._outdated for key in keys):
                raise BackendUnavailable(f"{self._tier.root.chunks}: footers could not be wiped") from self._error

    async def until_some_wiped(self) -> bool:
        """Wait for what is being wiped; False if there is nothing, or it fails."""
        if self._closed or not (self._round.doomed or self._outdated.waits):
            return False
        rounds_failed = self._rounds_failed
        self.check()
        await self._round_ended.wait()
        return not self._closed and self._rounds_failed == rounds_failed

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._round = self._next_round()
            # No buffer is lent: a tier that closes need not wait for the thread.
            await self._tier.lanes.evict.run(self._wipe, self._round)
            self._note()

    def begin_last(self) -> None:
        """Queue the last round, once. `end_last` then ends the calls that wait."""
        if self._closed:
            return
        self._closed = True
        self._outdated.still_due(self._round.doomed)  # A round in flight is wiped again: no slot of it was given out.
        self._round = self._next_round()
        self._tier.lanes.evict.submit(self._wipe, self._round)

    def end_last(self, *, ended: bool) -> None:
        """Free the wiped slots if the lane has ended, and end the calls that wait."""
        if ended:
            self._note()
        else:
            self._end_round()

    def written(self) -> None:
        self._end_round()
        self.check()

    def _next_round(self) -> WipingRound:
        return WipingRound({slot: self._table.segments.of(slot) for slot in self._outdated.take_due()})

    def _wipe(self, work: WipingRound) -> None:
        for slot, segment in work.doomed.items():
            try:
                segment.wipe(slot - segment.first_slot)
                work.wiped.append(slot)
            except OSError as error:
                work.error = frameless(error)
        if self._tier.options.fsync:
            try:
                sync({work.doomed[slot].name: work.doomed[slot] for slot in work.wiped}.values())
            except OSError as error:
                work.error = frameless(error)
                work.wiped.clear()

    def _note(self) -> None:
        """Free wiped slots; those that could not be wiped wait for the next round."""
        done, self._round = self._round, WipingRound({})
        for slot in set(done.wiped):
            self._outdated.clear(slot)
            self._table.free.add(slot)
        left = done.doomed.keys() - set(done.wiped)
        self._outdated.still_due(slot for slot in done.doomed if slot in left)
        if left:
            self._rounds_failed += 1
            self._error = done.error
            self._tier.counters.count("evictions_failed", len(left))
        self._end_round()

    def _end_round(self) -> None:
        ended, self._round_ended = self._round_ended, asyncio.Event()
        ended.set()
