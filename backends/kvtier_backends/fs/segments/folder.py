"""The folder of a namespace's segments: their list, and how one is made, opened, locked and removed.

A segment is written by the process that holds its lock. The kernel lets go of the lock when that process ends.
Everything blocks, and any thread may call. A failure raises the `OSError` of the system call.
"""

import errno
import mmap
import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from kvtier.backend import SEGMENTS_SUFFIX
from kvtier.memory import file_bytes_max
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import ForeignError, lock_file, open_below, open_file, with_folder
from kvtier_backends.fs.disk.footer import FULL
from kvtier_backends.fs.disk.reads import write_all
from kvtier_backends.fs.disk.remains import called, is_absent, names_in, remove_file
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import temporary_name
from kvtier_backends.fs.segments.segment import (
    HEADER_BYTES,
    SEGMENT_BYTES_MOST,
    Header,
    OpenSegments,
    Segment,
    read_header,
)

SUFFIX = ".seg"
NAME = re.compile(r"[0-9]{8}\.seg")
NUMBERS_MAX = 100_000_000
SYNCED_BYTES_MOST = 64 << 20  # With fsync they are written all over first, for which stores wait.
PIECE_BYTES = 8 << 20  # Of zeros that are written ahead of chunks.


class Stranger(NamedTuple):
    """A segment that no tier has open: of another namespace or row length, damaged, or of a later format."""

    name: str  # Within the root.
    allocated_bytes: int
    written_at_ns: int


class SegmentFolder(OpenSegments):
    def __init__(self, folder: Folder, *, row_bytes: int, fingerprint: bytes, fsync: bool) -> None:
        """Use an opened folder; with `fsync`, a new segment is on the device, written all over, when it is used."""
        super().__init__(row_bytes, fingerprint)
        self._folder = folder
        self._fsync = fsync
        self._direct = os.O_DIRECT if folder.direct else 0

    @property
    def root_fd(self) -> int:
        return self._folder.root_fd

    @property
    def segment_bytes_most(self) -> int:
        """The most that one segment's slots take: less than a file of this process may have, and little with fsync."""
        most_bytes, limit_bytes = SYNCED_BYTES_MOST if self._fsync else SEGMENT_BYTES_MOST, file_bytes_max()
        return most_bytes if limit_bytes is None else min(most_bytes, limit_bytes - HEADER_BYTES)

    def worst_bytes(self, slots: int) -> int:
        block_bytes = self._folder.disk.block_bytes
        blocks = -(-self.header(slots).file_bytes // block_bytes)
        return (blocks + blocks // 340 + 2) * block_bytes  # A block maps 340 extents: see `capacity.py`.

    def names(self) -> list[str]:
        names = filter(NAME.fullmatch, with_folder(self.root_fd, self._folder.chunks, names_in))
        return [f"{self._folder.chunks}/{name}" for name in sorted(names)]

    def unopened(self) -> list[str]:
        known = {segment.name for segment in self._opened}
        return [name for name in self.names() if name not in known and name not in self._folder.remains]

    def open(self, name: str) -> Segment | None:
        """Open a segment; it is our own if no other process writes it. Raises `FileNotFoundError` if it is gone.

        None for one that is not of this namespace and row length, or that cannot be used.
        """
        fd = open_file(self.root_fd, name, os.O_RDWR | self._direct)
        try:
            own = _lock(fd)
            status = os.fstat(fd)
            if not status.st_nlink:  # Removed before it was locked: what is stored in it would go with this process.
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            header = self._usable(fd, status.st_size)
            if header is None:
                os.close(fd)
                return None
            return self._taken(Segment(name, fd, header, own, self.worst_bytes(header.slots)))
        except BaseException:
            with suppress(OSError):
                os.close(fd)
            raise

    def take_over(self, segment: Segment) -> bool:
        """Lock a segment that another process wrote; False while that process lives, or if the segment was removed."""
        return _lock(segment.fd) and self.has(segment)

    def create(self, slots: int) -> Segment:
        """Make a segment of free slots, whole or not at all."""
        header = self.header(slots)
        aside = f"{self._folder.chunks}/{temporary_name(self._folder.writer)}"
        fd = self._create(aside, slots)
        try:
            os.posix_fallocate(fd, 0, header.file_bytes)
            if not _lock(fd):
                raise OSError(errno.EWOULDBLOCK, "a new file is locked")
            page = mmap.mmap(-1, HEADER_BYTES)
            page[:] = header.written()
            write_all(fd, [memoryview(page)], 0)
            if self._fsync:
                _write_zeros(fd, HEADER_BYTES, header.file_bytes)
                os.fsync(fd)
            name = self._publish(aside, fd, slots)
        except BaseException as error:
            os.close(fd)
            is_gone = self._drop(aside, slots)
            if isinstance(error, OSError) and error.errno in FULL and not is_gone:  # A smaller one would be too much.
                raise OSError(errno.EEXIST, f"{aside} could not be removed") from error
            raise
        return self._taken(Segment(name, fd, header, own=True, allocated_bytes=self.worst_bytes(slots)))

    def has(self, segment: Segment) -> bool:
        """Return True if the next start will find this very file under its name; raises OSError for a doubt."""
        status = os.fstat(segment.fd)
        if not status.st_nlink:
            return False
        try:
            named = called(lambda: below.look(self.root_fd, segment.name), self.root_fd, segment.name)
        except (NotADirectoryError, ForeignError):
            return False
        return named is not None and os.path.samestat(named, status)

    def remove(self, segment: Segment) -> None:
        """Remove a segment without slots in use, unless its name is another file's. Repeatable after an OSError."""
        if not segment.closed and self.has(segment):
            remove_file(self.root_fd, segment.name)
            os.ftruncate(segment.fd, 0)  # Engines that have it open do not know yet.
        self.close(segment)

    def strangers(self, opened: Collection[str]) -> list[Stranger]:
        """Return the root's segments that are not open, the oldest first; raises OSError if they cannot be known."""
        found: list[Stranger] = []
        for folder in names_in(self.root_fd):
            if folder.endswith(SEGMENTS_SUFFIX):
                with suppress(FileNotFoundError, NotADirectoryError, ForeignError):
                    for base in filter(NAME.fullmatch, with_folder(self.root_fd, folder, names_in)):
                        if (name := f"{folder}/{base}") not in opened:
                            status = called(partial(below.look, self.root_fd, name), self.root_fd, name)
                            if status is not None and stat.S_ISREG(status.st_mode):
                                found.append(Stranger(name, self._folder.disk.taken_bytes(status), status.st_mtime_ns))
        return sorted(found, key=attrgetter("written_at_ns"))

    def remove_stranger(self, name: str) -> bool:
        """Remove a segment that no process has; True if it is gone. Raises OSError if it may be there still."""
        try:
            fd = open_file(self.root_fd, name, os.O_RDWR)
        except FileNotFoundError:
            return is_absent(self.root_fd, name)
        try:
            if not _lock(fd):
                return False
            status = os.fstat(fd)
            if not status.st_nlink:
                return True  # Another process has removed it, and its name may be another one's by now.
            if self._usable(fd, status.st_size) is not None:
                return False  # One of ours that could not be opened, or was looked at before it had its content.
            remove_file(self.root_fd, name)
        finally:
            os.close(fd)
        return True

    def _usable(self, fd: int, size_bytes: int) -> Header | None:
        """Return the header of a whole segment of this namespace and row length; None for anything else."""
        page = mmap.mmap(-1, HEADER_BYTES)
        header = read_header(page[: os.preadv(fd, [page], 0)])
        if header is None or header != self.header(header.slots) or size_bytes < header.file_bytes:
            return None
        return header

    def _drop(self, name: str, slots: int) -> bool:
        return self._folder.remains.remove(name, self.worst_bytes(slots))

    def _create(self, aside: str, slots: int) -> int:
        try:
            return open_below(self.root_fd, aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | self._direct)
        except OSError:
            self._drop(aside, slots)
            raise

    def _publish(self, aside: str, fd: int, slots: int) -> str:
        """Give a file the next number. A place is taken first, since not every file system has links or swaps."""
        names = self.names()
        number = int(names[-1][-len("00000000.seg") : -len(SUFFIX)]) + 1 if names else 1
        while number < NUMBERS_MAX:
            name = f"{self._folder.chunks}/{number:08d}{SUFFIX}"
            if name not in self._folder.remains:
                try:
                    self._take_place(aside, name, fd)
                    return name
                except FileExistsError:  # Another process's, made since.
                    pass
                except OSError:
                    self._drop(name, slots)
                    raise
            number += 1
        raise OSError(errno.ENOSPC, "no numbers are left for segments")

    def _take_place(self, aside: str, name: str, fd: int) -> None:
        taken = open_below(self.root_fd, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _lock(taken)  # Or another process would take it for an unusable file.
            try:
                below.rename(self.root_fd, aside, name)
            except OSError:
                named = below.look(self.root_fd, name)
                if not os.path.samestat(named, os.fstat(fd)):  # Else it is done, whatever was reported.
                    raise
        finally:
            os.close(taken)
        if self._fsync:
            with_folder(self.root_fd, self._folder.chunks, os.fsync)


def _write_zeros(fd: int, start: int, end: int) -> None:
    """Write zeros to allocated space. Then the first sync after a chunk need not record that its place is used."""
    zeros = memoryview(mmap.mmap(-1, PIECE_BYTES))
    for offset in range(start, end, PIECE_BYTES):
        write_all(fd, [zeros[: min(PIECE_BYTES, end - offset)]], offset)


def _lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        lock_file(fd)
        return True
    return False
