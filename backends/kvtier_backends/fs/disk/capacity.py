"""The capacity: how much a directory may hold. Only reserved bytes are written, so the limit always holds.

The file system's allocation counts: of chunks' files, whole or not, of directories, and of the tier's own books. A
reservation is for the most that a chunk can take. The real allocation is known when the chunk is there.
"""

import errno
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvtier.memory import PAGE_BYTES

SECTOR_BYTES = 512  # The unit of st_blocks, whatever the file system's own.
FRAGMENT_BYTES_MOST = 64 << 10  # No local file system has larger ones; a file server's are no blocks.
EXTENTS_INLINE = 4  # Of a file on ext4; more of them take blocks of their own,
EXTENTS_PER_BLOCK = 340  # each with up to 340.
STRIPES = 64
LOW_WATER = 0.95  # Part of the limit down to which files go behind the stores, before these have to wait for it.
KNOWN_MAX = 4_096  # Half a megabyte. Another lane finds a directory made or gone within milliseconds.
FOLDERS_NEW = 2  # Above a chunk's file,
FOLDERS_GROWN = 2  # and above these some that grow by a block, also where a new one takes nothing (XFS).


class Disk:
    """The file system as a whole, as it was last looked at. Any thread may look.

    How it counts a file's room is tried: a file server answers `statvfs` with the sizes that it likes to send at once.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        found = os.fstatvfs(fd)
        self.block_bytes = found.f_frsize if PAGE_BYTES <= found.f_frsize <= FRAGMENT_BYTES_MOST else PAGE_BYTES
        """The unit by which a file grows: as reported, until it has been tried."""
        self.counts_blocks = True
        """Whether it says at once what a file takes: not where blocks are found late (ZFS) or are not told at all."""
        self.size_bytes = found.f_blocks * found.f_frsize
        self.used_bytes = (found.f_blocks - found.f_bfree) * found.f_frsize
        self.free_bytes = found.f_bavail * found.f_frsize  # For who is not root.

    def look(self) -> None:
        found = os.fstatvfs(self._fd)
        self.free_bytes = found.f_bavail * found.f_frsize

    def tried(self, page: os.stat_result) -> None:
        """Learn from a file of one page, just written as chunks are, of bytes that cannot be compressed."""
        taken_bytes = page.st_blocks * SECTOR_BYTES
        self.counts_blocks = taken_bytes >= PAGE_BYTES
        self.block_bytes = max(taken_bytes, PAGE_BYTES)

    def taken_bytes(self, status: os.stat_result) -> int:
        """Return a file's room: its blocks, or its length where blocks are not known."""
        return taken_bytes(status, counts_blocks=self.counts_blocks)


class MemorySpace(Disk):
    """A pool of memory in a disk's place: its capacity is all there is."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.free_bytes = size_bytes
        self.used_bytes = 0

    def look(self) -> None: ...


def taken_bytes(status: os.stat_result, *, counts_blocks: bool) -> int:
    length = 0 if counts_blocks else -(-status.st_size // SECTOR_BYTES)
    return max(status.st_blocks, length) * SECTOR_BYTES


class FolderSizes:
    """The sizes of directories on the disk: on some file systems nothing, on others, at one a chunk, much.

    Each is counted once, when a store or the scan notices it or its growth. Only sizes other than a new directory's are
    remembered: a million directories of one block take no memory. Counts on behalf of any thread.
    """

    def __init__(self, new_bytes: int, *, shared: bool = False) -> None:
        """`new_bytes`: the room of an empty directory there; `shared`: others make and remove directories, too."""
        self._shared = shared
        self._known: dict[str, bool] = {}  # The last that were made, looked at or removed: whether they are there.
        self.new_bytes = new_bytes
        self.used_bytes = 0
        self.scanned_bytes = 0  # Of those, what the scan has found.
        self._other: dict[str, int] = {}
        self._doubtful: dict[str, bool] = {}  # Whether the name counts, and no longer does when it is proved absent.
        self._unlooked: dict[str, int] = {}  # The room by which each may have grown since it could be looked at.
        self._seen: set[str] | None = set()  # While the scan runs: it must not count again what a store has counted.
        self._lock = threading.Lock()
        self._changing = [threading.Lock() for _ in range(STRIPES)]  # By names: what is done with one is in order.

    @contextmanager
    def making(self, name: str) -> Generator[None]:
        """Count a directory that is made in the block, from before it is there. After an error it is in doubt."""
        with self.changing(name):
            with self._lock:
                self.used_bytes += self.new_bytes
            try:
                yield
            except FileExistsError:
                with self._lock:
                    self.used_bytes -= self.new_bytes
                    self._know(name, there=True)
                raise
            except BaseException:
                with self._lock:
                    counts = (not self._shared and self._known.get(name, False)) or self._doubtful.get(name, False)
                    self.used_bytes -= self.new_bytes * counts
                    self._doubtful[name] = True
                    self._know(name, there=True)
                raise
            with self._lock:
                self.used_bytes -= self.new_bytes * self._doubtful.pop(name, False)
                self._know(name, there=True)
                self._other.pop(name, None)
                if self._seen is not None:
                    self._seen.add(name)

    def changing(self, name: str) -> threading.Lock:
        """Return the lock under which a directory is made or removed, and that is counted."""
        return self._changing[hash(name) % STRIPES]

    def looked_at(self, name: str, status: os.stat_result) -> None:
        """Count the bytes that a directory has grown by since the last look."""
        self._settle(name, status)
        with self._lock:
            self.used_bytes -= self._unlooked.pop(name, 0)

    def not_looked_at(self, name: str, grown_bytes: int) -> None:
        """Count bytes by which a directory may have grown, as it could not be looked at."""
        with self._lock:
            self.used_bytes += grown_bytes
            self._unlooked[name] = self._unlooked.get(name, 0) + grown_bytes

    def scanned(self, name: str, status: os.stat_result) -> None:
        self.scanned_bytes += self._settle(name, status)

    def removed(self, name: str) -> None:
        with self._lock:
            self._doubtful.pop(name, None)
            self._know(name, there=False)
            self.used_bytes -= self._unlooked.pop(name, 0)
            taken = self._other.pop(name, self.new_bytes)
            if self._seen is None:
                self.used_bytes -= taken
            elif name in self._seen:
                self._seen.discard(name)
                self.used_bytes -= taken

    def not_removed(self, name: str, error: OSError, *, was_there: bool) -> None:
        """Record a failed removal of a directory: it may be gone all the same, or should go later.

        `was_there`: it counted just before, unless it is among the last that were made, looked at or removed.
        """
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return
        with self._lock:
            counts = not self._shared and self._known.get(name, was_there)
            if counts or len(self._doubtful) < KNOWN_MAX:
                self._doubtful[name] = self._doubtful.get(name, False) or counts

    @property
    def doubtful(self) -> list[str]:
        """Directories that may be there or not, or should go; and those to be looked at."""
        with self._lock:
            return [*self._doubtful, *self._unlooked]

    def proved(self, name: str, *, absent: bool) -> None:
        """Settle a directory in doubt: it is in use, or absent."""
        if absent and self._doubtful.get(name):
            self.removed(name)
        with self._lock:
            self._doubtful.pop(name, None)
            if absent:
                self.used_bytes -= self._unlooked.pop(name, 0)

    def scan_ended(self) -> None:
        with self._lock:
            self._seen = None

    def _know(self, name: str, *, there: bool) -> None:
        self._known.pop(name, None)
        self._known[name] = there
        if len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _settle(self, name: str, status: os.stat_result) -> int:
        taken = status.st_blocks * SECTOR_BYTES
        with self._lock:
            before = self._other.get(name, self.new_bytes)
            if self._seen is not None and name not in self._seen:
                self._seen.add(name)
                before = 0
            self.used_bytes += taken - before
            if taken == self.new_bytes:
                self._other.pop(name, None)
            else:
                self._other[name] = taken
            return taken - before


class Used(Protocol):
    """A part of the directory that knows what it takes."""

    @property
    def used_bytes(self) -> int: ...


def chunk_bytes_worst(file_bytes: int, block_bytes: int, folder_bytes: int) -> int:
    """Return the most that a chunk's file can take: as fragmented as can be, and the first one in its folders."""
    return file_bytes_worst(file_bytes, block_bytes) + FOLDERS_GROWN * block_bytes + FOLDERS_NEW * folder_bytes


def file_bytes_worst(file_bytes: int, block_bytes: int) -> int:
    blocks = -(-file_bytes // block_bytes)
    maps = 0 if blocks <= EXTENTS_INLINE else -(-blocks // EXTENTS_PER_BLOCK)
    return (blocks + maps) * block_bytes


@dataclass(slots=True)
class Reservation:
    """The room that one store was promised."""

    bytes: int = 0


class Capacity:
    """Used, promised and free bytes of one directory. Belongs to the loop's thread."""

    def __init__(self, disk: Disk, *, limit_bytes: int | None, min_free_bytes: int) -> None:
        """Count nothing yet. `min_free_bytes`: the room of the file system that is left to others."""
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0  # Bytes promised to stores in flight.
        self.leaving_bytes = 0  # Of files that are being removed: free once they are gone.
        self.other_bytes = 0  # Of what else of ours lies in the tier's folders.
        self.unseen_bytes = disk.used_bytes
        """As much as the directory may hold that the scan has not come to: at first, all that is on the disk."""
        self._disk = disk
        self._parts: list[Used] = []
        self._min_free_bytes = min_free_bytes

    def count(self, *parts: Used) -> None:
        self._parts += parts

    @property
    def used_bytes(self) -> int:
        return sum(part.used_bytes for part in self._parts) + self.leaving_bytes + self.other_bytes

    def free_bytes(self) -> int | None:
        """Return the bytes that may still be promised, below 0 if there is too much already; None: no limit."""
        room: list[int] = []
        if self.limit_bytes is not None:
            room.append(self.limit_bytes - self.used_bytes - self.reserved_bytes - self.unseen_bytes)
        if self._min_free_bytes:
            room.append(self._disk.free_bytes - self._min_free_bytes - self.reserved_bytes)
        return min(room) if room else None

    @property
    def is_disk_scarcer(self) -> bool:
        left_bytes = self._disk.free_bytes - self._min_free_bytes
        used_bytes = self.used_bytes + self.unseen_bytes
        return self._min_free_bytes > 0 and (self.limit_bytes is None or left_bytes < self.limit_bytes - used_bytes)

    @property
    def watches_disk(self) -> bool:
        return self._min_free_bytes > 0

    def look(self) -> None:
        self._disk.look()

    def wrote(self, added_bytes: int) -> None:
        """Count written bytes until the next `look`; some may count twice until then."""
        if self.watches_disk:
            self._disk.free_bytes -= max(0, added_bytes)

    def reserve(self, wanted_bytes: int) -> int:
        """Promise as much of that as is free, and return how much it was."""
        free_bytes = self.free_bytes()
        granted_bytes = wanted_bytes if free_bytes is None else max(0, min(wanted_bytes, free_bytes))
        self.reserved_bytes += granted_bytes
        return granted_bytes

    def exchange(self, gone_bytes: int, wanted_bytes: int) -> int:
        """Promise the evicted bytes to the call that made room. The total does not grow, however full the tier is."""
        granted_bytes = min(gone_bytes, wanted_bytes)
        self.reserved_bytes += granted_bytes
        return granted_bytes

    def release(self, reserved_bytes: int) -> None:
        """Take a promise back: the store has ended, and its bytes are counted elsewhere."""
        self.reserved_bytes -= reserved_bytes
        assert self.reserved_bytes >= 0, self.reserved_bytes

    def surplus_bytes(self) -> int:
        """Return the bytes to evict before stores have to wait: down to the low-water mark, from halfway to it."""
        return self.surplus_of(self.used_bytes - self.leaving_bytes, self.reserved_bytes)

    def surplus_of(self, used_bytes: int, reserved_bytes: int) -> int:
        surplus = 0
        if self.limit_bytes is not None:
            low = int(self.limit_bytes * LOW_WATER)
            high = (self.limit_bytes + low) // 2
            taken = used_bytes + reserved_bytes
            surplus = taken - low if taken > high else 0
        if self._min_free_bytes:
            surplus = max(surplus, self._min_free_bytes + reserved_bytes - self._disk.free_bytes - self.leaving_bytes)
        return surplus
