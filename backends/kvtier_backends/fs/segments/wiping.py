"""Wiping: footers of chunks that have gone are zeroed, behind the calls that removed them. Then slots are free."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.errors import BackendClosed, BackendUnavailable, Remedy
from kvtier_backends.fs.disk.footer import ChunkFault, frameless
from kvtier_backends.fs.layout import OpenTier
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.segment import Segment, sync

logger = logging.getLogger(__name__)


class Doomed(NamedTuple):
    """A slot that is to be wiped."""

    slot: int
    segment: Segment


@dataclass(slots=True)
class WipingRound:
    """Slots that a lane is to wipe, and slots that it has wiped, even if the waiting call is cancelled."""

    doomed: list[Doomed]
    wiped: list[Doomed] = field(default_factory=list[Doomed])
    error: OSError | None = None  # The last, if a slot could not be wiped.


class Wiping:
    """The wiping of one tier's slots. Belongs to the loop's thread, and wipes in a lane."""

    def __init__(self, tier: OpenTier, catalog: Catalog) -> None:
        """Wipe in the lane for what is behind the calls. With `fsync`, a wiped slot is wiped after a power cut, too."""
        self._catalog = catalog
        self._segments = catalog.segments
        self._name = tier.root.chunks
        self._counters = tier.counters
        self._lane = tier.lanes.evict
        self._fsync = tier.options.fsync
        self._wake = asyncio.Event()
        self._round = WipingRound([])
        self._round_ended = asyncio.Event()  # Replaced each time that one has.
        self._rounds_failed = 0
        self._error: OSError | None = None  # Of the last round that failed.
        self._closed = False
        self._warned: set[ChunkFault] = set()

    def check(self) -> None:
        """Start a round if slots wait to be wiped."""
        if self._catalog.outdated.waits:
            self._wake.set()

    def corrupt(self, key: OffloadKey, slot: int, fault: ChunkFault) -> None:
        """Drop a chunk whose slot holds other bytes; count and log it."""
        self._counters.corrupt(fault)
        level = logging.DEBUG if fault in self._warned else logging.WARNING
        self._warned.add(fault)
        segment = self._segments.of(slot)
        logger.log(level, "%s: slot %d is corrupt (%s); see %s", segment.name, slot, fault, Remedy.CORRUPT)
        self._catalog.lost(key)
        self.check()

    async def until_wiped(self, keys: Sequence[OffloadKey]) -> None:
        """Wait until nothing outdated of these keys is on the disk; raises `BackendUnavailable` if that fails."""
        outdated = self._catalog.outdated
        rounds_failed = self._rounds_failed
        while any(key in outdated for key in keys):
            if self._closed:
                raise BackendClosed(f"{self._name}: closed")
            round_ended = self._round_ended
            self.check()
            await round_ended.wait()
            if self._rounds_failed > rounds_failed and any(key in outdated for key in keys):
                raise BackendUnavailable(f"{self._name}: footers could not be wiped") from self._error

    async def until_some_wiped(self) -> bool:
        """Wait for what is being wiped; False if there is nothing, or it fails."""
        if self._closed or not (self._round.doomed or self._catalog.outdated.waits):
            return False
        rounds_failed, round_ended = self._rounds_failed, self._round_ended
        self.check()
        await round_ended.wait()
        return not self._closed and self._rounds_failed == rounds_failed

    async def run(self) -> None:
        """Wipe in the background until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._round = WipingRound(self._take())
            # No buffer is lent: a tier that closes need not wait for the thread.
            await self._lane.run(self._wipe, self._round)
            self._note()

    def begin_last(self) -> None:
        """Queue the last round, once. `end_last` then ends the calls that wait."""
        if self._closed:
            return
        self._closed = True
        # A round in flight is wiped again: none of its slots was given out.
        self._catalog.outdated.still_due(one.slot for one in self._round.doomed)
        self._round = WipingRound(self._take())
        self._lane.submit(self._wipe, self._round)

    def end_last(self, *, ended: bool) -> None:
        """Free the wiped slots if the lane has ended, and end the calls that wait."""
        if ended:
            self._note()
        else:
            self._end_round()

    def written(self) -> None:
        """Wake calls after a store: it has overwritten outdated chunks."""
        self._end_round()
        self.check()

    def _take(self) -> list[Doomed]:
        return [Doomed(slot, self._segments.of(slot)) for slot in self._catalog.outdated.take_due()]

    def _wipe(self, work: "WipingRound") -> None:
        """Wipe slots. Blocks, in a lane."""
        for one in work.doomed:
            try:
                one.segment.wipe(one.slot - one.segment.first_slot)
                work.wiped.append(one)
            except OSError as error:
                work.error = frameless(error)
        if self._fsync:
            try:
                sync({one.segment.name: one.segment for one in work.wiped}.values())
            except OSError as error:
                work.error = frameless(error)
                work.wiped.clear()

    def _note(self) -> None:
        """Free wiped slots; those that could not be wiped wait for the next round."""
        done, self._round = self._round, WipingRound([])
        outdated = self._catalog.outdated
        wiped = {one.slot for one in done.wiped}
        for slot in wiped:
            outdated.clear(slot)
            self._catalog.free.add(slot)
        outdated.still_due(one.slot for one in done.doomed if one.slot not in wiped)
        if len(wiped) < len(done.doomed):
            self._rounds_failed += 1
            self._error = done.error
            self._counters.count("evictions_failed", len(done.doomed) - len(wiped))
        self._end_round()

    def _end_round(self) -> None:
        ended, self._round_ended = self._round_ended, asyncio.Event()
        ended.set()
