"""What looks through the directory, and writes down what was found: once at the start, and where it is shared, again.

A tier answers meanwhile. All of it runs in a lane of its own, and none of it is waited for by a tier that closes.
"""

import asyncio
import time
from collections.abc import Callable

import aiofiles.os

from kvtier.backend import INVENTORY_BATCH_KEYS
from kvtier.lend import Lanes
from kvtier.namespace import FileMapper
from kvtier_backends.fs.capacity import Capacity
from kvtier_backends.fs.checkpoint import Checkpoint
from kvtier_backends.fs.counters import Tally
from kvtier_backends.fs.eviction import Eviction
from kvtier_backends.fs.folder import Folder
from kvtier_backends.fs.index import Index
from kvtier_backends.fs.ledger_file import LedgerFile
from kvtier_backends.fs.scan import Scan
from kvtier_backends.fs.shared import SharedEviction

AGAIN_S_LEAST = 5.0  # Between two looks through a shared directory,
AGAIN_TIMES = 20  # or so many times as long as the last one took: looking must not be all that the disk does.
AGAIN_S_MOST = 600.0  # What others have stored, and what dead processes have left, is seen after so long.

_next_recalled = aiofiles.os.wrap(Scan.next_recalled)
_next_vanished = aiofiles.os.wrap(Scan.next_vanished)
_next_batch = aiofiles.os.wrap(Scan.next_batch)
_write = aiofiles.os.wrap(Checkpoint.write)
_begin_count = aiofiles.os.wrap(LedgerFile.begin_count)
_end_count = aiofiles.os.wrap(LedgerFile.end_count)


class Looking:
    """One tier's scans and checkpoints. Belongs to the loop's thread."""

    def __init__(
        self,
        folder: Folder,
        mapper: FileMapper,
        takes: Callable[[int], bool],
        index: Index,
        capacity: Capacity,
        eviction: Eviction,
        tally: Tally,
        *,
        lane: Lanes,
        checkpoint: Checkpoint,
        checkpoint_s: float,
    ) -> None:
        """`takes`: whether a load would take a file of this length."""
        self.done = asyncio.Event()
        """Set once everything that was there at the start is known."""
        self.gauged = asyncio.Event()
        """Set once so much was found that the directory is not small, or all of it."""
        self._folder = folder
        self._mapper = mapper
        self._takes = takes
        self._index = index
        self._capacity = capacity
        self._eviction = eviction
        self._tally = tally
        self._lane = lane
        self._checkpoint = checkpoint
        self._checkpoint_s = checkpoint_s
        self._recalled = False  # Before that, the last checkpoint is better than one of what is known.
        self._scan = self._new_scan(recall=checkpoint_s > 0)

    def stop(self) -> None:
        """Have a scan end soon."""
        self._scan.stop()
        self.gauged.set()

    async def run(self) -> None:
        """Look through the directory; where it is the tier's own, once."""
        if not isinstance(self._eviction, SharedEviction):
            await self._look()
            return
        eviction = self._eviction
        while True:
            eviction.look_began()
            began_s = time.monotonic()
            count = await _begin_count(eviction.ledger, executor=self._lane)
            await self._look()
            await _end_count(eviction.ledger, count, self._scan.seen_bytes, executor=self._lane)
            self._end()
            pause_s = max(AGAIN_S_LEAST, AGAIN_TIMES * (time.monotonic() - began_s))
            await eviction.until_look_is_wanted(pause_s, AGAIN_S_MOST)
            self._scan = self._new_scan(recall=False)

    async def run_checkpoints(self) -> None:
        """Write down what is known every so often."""
        while self._checkpoint_s:
            await asyncio.sleep(self._checkpoint_s)
            if self._recalled and (room_bytes := self._room_for_checkpoint()) is not None:
                try:
                    await _write(self._checkpoint, self._index.snapshot(), time.time_ns(), executor=self._lane)
                finally:
                    self._capacity.release_kept(room_bytes)
                    self._eviction.check()  # It may have grown, and there is to be room for the next.

    def write_last_checkpoint(self, left_s: float) -> None:
        """Queue it on the lane, behind a scan that is being stopped; only the first closing can."""
        wanted, self._recalled = self._recalled, False
        if wanted and self._checkpoint_s and left_s and self._room_for_checkpoint() is not None:
            self._lane.submit(self._checkpoint.write, self._index.snapshot(), time.time_ns())

    def _room_for_checkpoint(self) -> int | None:
        """Promise room for a checkpoint of what is known; None if there is none, and the last one will have to do."""
        wanted_bytes = self._checkpoint.bytes_worst(len(self._index))
        if self._capacity.reserve_kept(wanted_bytes):
            return wanted_bytes
        self._tally.count("checkpoints_failed")
        return None

    def _new_scan(self, *, recall: bool) -> Scan:
        recalled = self._checkpoint.read() if recall else iter(())
        return Scan(self._folder, self._mapper, self._takes, recalled, now_s=time.time())

    async def _look(self) -> None:
        scan, tally = self._scan, self._tally
        while batch := await _next_recalled(scan, executor=self._lane):
            self._index.scanned(batch)
            self._eviction.changed()
        self._recalled = True
        while batch := await _next_batch(scan, executor=self._lane):
            self._eviction.scanned(batch)
            if len(batch) == INVENTORY_BATCH_KEYS:
                self.gauged.set()
        while gone := await _next_vanished(scan, executor=self._lane):
            self._index.vanished(gone)
        tally.count("scan_skipped", scan.skipped)
        tally.count("scan_failed", scan.failed)
        tally.count("scan_swept", scan.swept)
        tally.count("scan_others", scan.others)
        self._capacity.other_bytes += scan.other_bytes
        self._folder.sizes.scan_ended()
        shared = isinstance(self._eviction, SharedEviction)
        self._index.scan_ended(complete=scan.failed == 0 and not shared)
        self._eviction.scan_ended()
        if not shared:
            self._end()

    def _end(self) -> None:
        """Have nobody wait for the first look any more."""
        self.done.set()
        self.gauged.set()
