"""The index of files: the chunks in the directory, as far as the tier knows, and the room that each takes.

It answers probes without a system call. In doubt it says that a chunk is there: a load corrects that.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.errors import BackendClosed
from kvtier.policies import Policy
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES
from kvtier_backends.fs.index import ChunkIndex, InUse

REFRESH_MINUTES = 60  # A file's time is set to its last use at most so often.
MINUTE_NS = 60_000_000_000
MINUTES_MAX = (1 << 32) - 1
NUMBERS_LEAST = 1_024  # The least to add at once; above it, an eighth of all.


class FileEntry(NamedTuple):
    key: OffloadKey
    allocated_bytes: int
    used_at_ns: int = 0  # By the file's mtime, which is set to the chunk's last use.
    loadable: bool = True  # False: a file of ours by name that no load would take. It takes room all the same.


def minute_of(time_ns: int) -> int:
    return min(max(time_ns, 0) // MINUTE_NS, MINUTES_MAX)


def is_later(time_ns: int, known_ns: int) -> bool:
    """Return True if a file's time is a later minute than the one that was known of it."""
    return minute_of(time_ns) > minute_of(known_ns)


class Claims:
    """Keys that are busy: calls use their files, or these are on their way out. Belongs to the loop's thread.

    A chunk in use never goes. A store waits for its key's old file to go; for a load, a leaving chunk is a miss.
    """

    def __init__(self) -> None:
        self.leaving: set[OffloadKey] = set()
        """Whose files are going: whether they are still there is up to the lane that is at it."""
        self.in_use = InUse()  # The keys whose files calls are at.
        self._gone = asyncio.Event()  # Replaced each time that some are.
        self._closed = False

    async def until_gone(self, keys: Sequence[OffloadKey]) -> None:
        """Wait until none of the keys' files is leaving; raises `BackendClosed` once closed."""
        while not self.leaving.isdisjoint(keys):
            if self._closed:
                raise BackendClosed("closed before the former chunk was removed")
            await self._gone.wait()

    def end(self, keys: Iterable[OffloadKey]) -> None:
        self.leaving.difference_update(keys)
        self._wake()

    def close(self) -> None:
        """End all waiting for files. A chunk that was chosen, and not removed yet, stays."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        gone, self._gone = self._gone, asyncio.Event()
        gone.set()


class FileIndex:
    """The chunks of one directory, by key. Belongs to the loop's thread."""

    def __init__(self, policy: Policy[OffloadKey] | None = None, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.used_bytes = 0
        self.claims = Claims()
        self.numbers = ChunkIndex(policy)
        self.inventory = self.numbers.inventory
        self.doubtful: set[OffloadKey] = set()  # Keys whose files may have gone, or may take another room.
        self._clock_ns = clock_ns
        self._of = self.numbers.of
        self._free: list[int] = []
        self._sectors = array("I")  # By number: the room of its file.
        self._minutes = array("I")  # By number: the minute that its file's time says, since 1970.
        self._unloadable: dict[OffloadKey, int] = {}  # Numbers of files that no load would take.
        self._calls: list[set[OffloadKey]] = []  # In flight, each with its keys that were not stored since it began.
        self._scanning = True
        self._removed_in_scan: set[OffloadKey] = set()

    @property
    def files(self) -> int:
        return len(self._of) + len(self._unloadable)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._of

    def taken_bytes(self, key: OffloadKey) -> int:
        """Return the room that a key's file takes, whether or not a load would take it; 0 if none is known."""
        number = self._number(key)
        return 0 if number is None else self._sectors[number] * SECTOR_BYTES

    @contextmanager
    def call(self, keys: Iterable[OffloadKey]) -> Generator[set[OffloadKey]]:
        """Give, while the block lasts, the keys that were not stored since: only they can be said to be gone."""
        unchanged = set(keys)
        self._calls.append(unchanged)
        try:
            yield unchanged
        finally:
            self._calls = [call for call in self._calls if call is not unchanged]

    def stored(self, chunk: FileEntry) -> None:
        """Record a chunk that a store of ours has put in place: for the order, a use."""
        key = chunk.key
        for unchanged in self._calls:
            unchanged.discard(key)
        self._removed_in_scan.discard(key)
        self.doubtful.discard(key)
        if key in self._unloadable:
            self._forget(self._unloadable[key])
        number = self._of.get(key)
        if number is None:
            number = self._take_number()
        sectors = chunk.allocated_bytes // SECTOR_BYTES  # Inlined `_measure`: once a stored chunk.
        self.used_bytes += (sectors - self._sectors[number]) * SECTOR_BYTES
        self._sectors[number] = sectors
        self._minutes[number] = chunk.used_at_ns // MINUTE_NS
        self.numbers.store(key, number, self._clock_ns())

    def used(self, keys: Sequence[OffloadKey]) -> None:
        self.numbers.use(keys, self._clock_ns())

    def refresh_due(self, key: OffloadKey, now_ns: int) -> bool:
        """Return True if a file's time should be set to now; asked once, it counts as done."""
        number = self._of.get(key)
        if number is None:
            return False
        minute = minute_of(now_ns)
        if abs(minute - self._minutes[number]) < REFRESH_MINUTES:
            return False
        self._minutes[number] = minute
        return True

    def measured(self, key: OffloadKey, allocated_bytes: int) -> None:
        """Record the room that a chunk in doubt takes; 0: it has no file, which is reported."""
        self.doubtful.discard(key)
        if not allocated_bytes:
            self.lost(key)
        elif (number := self._of.get(key)) is not None:
            self._set_room(number, allocated_bytes)

    def removed(self, key: OffloadKey) -> None:
        if self._scanning:
            self._removed_in_scan.add(key)
        self.doubtful.discard(key)
        if (number := self._number(key)) is not None:
            self._forget(number)

    def lost(self, key: OffloadKey) -> None:
        """Record that a `call` has not found a chunk, or not a whole one, and report it as removed."""
        if key in self._of:
            self.inventory.lost(key)
        self.removed(key)

    def found(self, chunk: FileEntry) -> None:
        """Record a chunk that is there although no store call has said so, and report it."""
        if chunk.key not in self._of:
            self.stored(chunk)
            self.inventory.added(chunk.key)

    def scanned(self, chunks: Sequence[FileEntry]) -> int:
        """Record the scan's chunks, except those stored, used or removed meanwhile; return the room of these."""
        noted_bytes = 0
        for chunk in chunks:
            key, number = chunk.key, self._of.get(chunk.key)
            live = number is not None and self.numbers.is_live(number)
            if live or key in self._removed_in_scan or key in self._unloadable:
                continue
            noted_bytes += chunk.allocated_bytes
            if number is None:
                self._hold_idle(chunk)
                if chunk.loadable:
                    self.inventory.added(key)
            elif chunk.loadable:
                self._measure(number, chunk)
                self.numbers.used_elsewhere(number, chunk.used_at_ns)
            else:
                self._forget(number)
                self._hold_idle(chunk)
                self.inventory.lost(key)
        return noted_bytes

    def scan_ended(self, *, complete: bool) -> None:
        self._scanning = False
        self.inventory.scan_ended(complete=complete)
        self._removed_in_scan.clear()

    def stays(self, chunk: FileEntry) -> None:
        if chunk.loadable:
            self.found(chunk)
        elif chunk.key not in self._of and chunk.key not in self._unloadable:
            self._hold_idle(chunk)

    def victims(self, count: int, incoming: Sequence[OffloadKey] = ()) -> list[FileEntry]:
        """Choose up to `count` files that no call uses, forget them, and report them as removed."""
        in_use = self.claims.in_use
        return [self._evict(number) for number in self.numbers.evict(count, self._keeps, in_use, incoming)]

    def unused_since(self, before_ns: int) -> list[FileEntry]:
        old = [number for number in self.numbers.unused_since(before_ns) if not self._keeps(number)]
        for number in old:
            self.numbers.take(number)
        return [self._evict(number) for number in old]

    def _keeps(self, number: int) -> bool:
        key = self.numbers.keys[number]
        return key is not None and key in self.claims.in_use

    def _evict(self, number: int) -> FileEntry:
        key = self.numbers.forget(number)
        loadable = key not in self._unloadable
        taken_bytes = self._sectors[number] * SECTOR_BYTES
        if self._scanning:
            self._removed_in_scan.add(key)
        if loadable:
            self.inventory.lost(key)
        else:
            del self._unloadable[key]
        self.doubtful.discard(key)
        self.used_bytes -= taken_bytes
        self._sectors[number] = 0
        self._free.append(number)
        return FileEntry(key, taken_bytes, self._minutes[number] * MINUTE_NS, loadable)

    def _number(self, key: OffloadKey) -> int | None:
        number = self._of.get(key)
        return self._unloadable.get(key) if number is None else number

    def _take_number(self) -> int:
        if not self._free:
            count = max(NUMBERS_LEAST, len(self._sectors) // 8)
            first = self.numbers.add(count)
            self._sectors.extend([0] * count)
            self._minutes.extend([0] * count)
            self._free = list(range(first + count - 1, first - 1, -1))
        return self._free.pop()

    def _hold_idle(self, chunk: FileEntry) -> None:
        number = self._take_number()
        self._measure(number, chunk)
        if not chunk.loadable:
            self._unloadable[chunk.key] = number
        self.numbers.hold(chunk.key, number, chunk.used_at_ns, listed=chunk.loadable)

    def _measure(self, number: int, chunk: FileEntry) -> None:
        self._set_room(number, chunk.allocated_bytes)
        self._minutes[number] = minute_of(chunk.used_at_ns)

    def _set_room(self, number: int, allocated_bytes: int) -> None:
        sectors = allocated_bytes // SECTOR_BYTES
        self.used_bytes += (sectors - self._sectors[number]) * SECTOR_BYTES
        self._sectors[number] = sectors

    def _forget(self, number: int) -> None:
        self._unloadable.pop(self.numbers.remove(number), None)
        self._set_room(number, 0)
        self._free.append(number)
