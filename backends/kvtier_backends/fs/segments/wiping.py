"""Wipes footers that are true no more, behind the calls that made them so, and then has their slots free."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.backend import Lanes, OffloadKey
from kvtier.errors import BackendClosed, BackendUnavailable
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.disk.attempts import attempt_name
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import Fault, frameless
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.discard import NAME_CHARACTERS_MAX
from kvtier_backends.fs.segments.catalog import Catalog
from kvtier_backends.fs.segments.lane import SlotChunks
from kvtier_backends.fs.segments.runs import Segments
from kvtier_backends.fs.segments.segment import Segment

logger = logging.getLogger(__name__)

FOLDER_BLOCKS = 2  # By which one more file may have its folder grow: on ext4 a block, and the first index of blocks.


class Doomed(NamedTuple):
    """A slot that is to be wiped."""

    slot: int
    segment: Segment
    kept_name: str  # What it holds is copied to this file first; empty: it is not.


@dataclass(slots=True)
class Round:
    """Slots that a lane wipes, and those that it has, whoever waits for it."""

    doomed: list[Doomed]
    wiped: list[Doomed] = field(default_factory=list[Doomed])
    copied: list[Doomed] = field(default_factory=list[Doomed])
    error: OSError | None = None  # The last, if a slot could not be wiped.
    grown_bytes: int = 0  # What the folder of copies takes more than before.


class Wiping:
    """One tier's. Belongs to the loop's thread, and wipes in a lane."""

    def __init__(
        self,
        catalog: Catalog,
        segments: Segments,
        chunks: SlotChunks,
        capacity: Capacity,
        folder: Folder,
        tally: Tally,
        *,
        lane: Lanes,
        fsync: bool,
    ) -> None:
        """`fsync`: what is wiped is so after a power cut, too."""
        self._catalog = catalog
        self._segments = segments
        self._chunks = chunks
        self._capacity = capacity
        self._folder = folder
        self._tally = tally
        self._lane = lane
        self._fsync = fsync
        self._wake = asyncio.Event()
        self._round = Round([])
        self._round_ended = asyncio.Event()  # Replaced each time that one has.
        self._rounds_failed = 0
        self._error: OSError | None = None  # Of the last round that failed.
        self._closed = False
        self._kept_names: dict[int, str] = {}
        self._warned: set[Fault] = set()

    def check(self) -> None:
        """See whether there is something to wipe."""
        if self._catalog.outdated.waits:
            self._wake.set()

    def corrupt(self, key: OffloadKey, slot: int, fault: Fault) -> None:
        """Note that what a slot holds is not its key's chunk: it goes, and is kept aside if that is wanted."""
        self._tally.corrupt(fault)
        level = logging.DEBUG if fault in self._warned else logging.WARNING
        self._warned.add(fault)
        segment = self._segments.of(slot)
        logger.log(level, "%s: slot %d is corrupt (%s)", segment.name, slot, fault)
        if self._admitted(segment):
            stem = key.hex()[:NAME_CHARACTERS_MAX]
            self._kept_names[slot] = f"{self._folder.quarantine.name}/{stem}.{fault}{attempt_name(self._folder.writer)}"
        self._catalog.lost(key)
        self.check()

    async def until_wiped(self, keys: Sequence[OffloadKey]) -> None:
        """Wait until nothing outdated of these keys is on the disk; raises `BackendUnavailable` if that fails."""
        outdated = self._catalog.outdated
        rounds_failed = self._rounds_failed
        while any(key in outdated for key in keys):
            if self._closed:
                raise BackendClosed(f"{self._folder.chunks}: closed")
            round_ended = self._round_ended
            self.check()
            await round_ended.wait()
            if self._rounds_failed > rounds_failed and any(key in outdated for key in keys):
                raise BackendUnavailable(f"{self._folder.chunks}: footers could not be wiped") from self._error

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
            self._round = Round(self._take())
            # No buffer is lent: a tier that closes need not wait for the thread.
            await asyncio.get_running_loop().run_in_executor(self._lane, self._wipe, self._round)
            self._note()

    def begin_last(self) -> None:
        """Have what is left wiped before the lane ends; `end_last` then takes note."""
        self._closed = True
        self._note()  # A round that is still under way is wiped again: nobody has been given its slots.
        self._round = Round(self._take())
        with suppress(BackendClosed):  # Closed before.
            self._lane.submit(self._wipe, self._round)

    def end_last(self) -> None:
        """Take note of what was wiped when the lane has ended."""
        self._note()

    def written(self) -> None:
        """Hear that a store has ended: outdated chunks that it has overwritten are no more."""
        self._end_round()
        self.check()

    def _take(self) -> list[Doomed]:
        return [
            Doomed(slot, self._segments.of(slot), self._kept_names.pop(slot, ""))
            for slot in self._catalog.outdated.take_due()
        ]

    def _admitted(self, segment: Segment) -> bool:
        """Say whether a copy of a slot may be kept, and count the room that it takes."""
        wanted_bytes = segment.header.slot_bytes + self._folder_bytes_most
        granted_bytes = self._capacity.reserve(wanted_bytes)
        self._capacity.release(granted_bytes)
        admitted = granted_bytes == wanted_bytes and self._folder.quarantine.admit()
        self._capacity.other_bytes += wanted_bytes * admitted
        return admitted

    @property
    def _folder_bytes_most(self) -> int:
        return FOLDER_BLOCKS * self._folder.disk.block_bytes

    def _wipe(self, work: "Round") -> None:
        """Wipe slots. Blocks, in a lane."""
        before_bytes = self._folder_bytes()
        for one in work.doomed:
            place = one.slot - one.segment.first_slot
            if one.kept_name:
                with suppress(OSError):  # Such as a user's tidying away the folder. Then it is only wiped.
                    one.segment.keep_copy(place, self._folder.root_fd, one.kept_name)
                    work.copied.append(one)
                    self._tally.count("quarantined")
            try:
                one.segment.wipe(place)
                work.wiped.append(one)
            except OSError as error:
                work.error = frameless(error)
        work.grown_bytes = self._folder_bytes() - before_bytes
        if self._fsync:
            try:
                self._chunks.sync(list({one.segment.name: one.segment for one in work.wiped}.values()))
            except OSError as error:
                work.error = frameless(error)
                work.wiped.clear()

    def _folder_bytes(self) -> int:
        """Return what the folder of copies takes itself. Blocks; 0 if that cannot be said."""
        try:
            return self._folder.taken_bytes(self._folder.quarantine.name)
        except OSError:
            return 0

    def _note(self) -> None:
        """Have wiped slots free; those that could not be wiped wait for the next round."""
        done, self._round = self._round, Round([])
        outdated = self._catalog.outdated
        wiped = {one.slot for one in done.wiped}
        for slot in wiped:
            outdated.clear(slot)
            self._catalog.free.add(slot)
        outdated.still_due(one.slot for one in done.doomed if one.slot not in wiped)
        kept = [one for one in done.doomed if one.kept_name]
        missing_bytes = sum(one.segment.header.slot_bytes for one in kept if one not in done.copied)
        self._capacity.other_bytes += done.grown_bytes - len(kept) * self._folder_bytes_most - missing_bytes
        if len(wiped) < len(done.doomed):
            self._rounds_failed += 1
            self._error = done.error
            self._tally.count("evictions_failed", len(done.doomed) - len(wiped))
        self._end_round()

    def _end_round(self) -> None:
        ended, self._round_ended = self._round_ended, asyncio.Event()
        ended.set()
