"""How chunks' bytes reach the disk and come back: one file each, written aside and renamed into place.

The only module that knows where in the file system a chunk is; what its bytes must be is not known here. Everything
blocks, any thread may call, and what fails raises the `OSError` of the call that failed.
"""

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from kvtier.keys import OffloadKey
from kvtier.namespace import FileMapper
from kvtier_backends.fs.attempts import attempt_name
from kvtier_backends.fs.discard import Discard, Discarded
from kvtier_backends.fs.faults import Fault
from kvtier_backends.fs.folder import Folder

SECTOR_BYTES = 512  # The unit of st_blocks, whatever the file system's own.
CREATE_ATTEMPTS = 8  # Someone may remove a folder between its making and its use, but not for ever.


class ChunkFiles:
    """The files of one namespace, by key."""

    def __init__(self, folder: Folder, mapper: FileMapper, *, fsync: bool) -> None:
        """Use an opened folder; with `fsync`, a chunk is on the device when `write` returns."""
        self._root = folder.root_fd
        self._mapper = mapper
        self._writer = folder.writer
        self._fsync = fsync
        self._direct = os.O_DIRECT if folder.direct else 0
        self._discard = Discard(folder)

    def open(self, key: OffloadKey) -> "OpenChunk":
        """Open a chunk's file to read it."""
        name = self._mapper.name(key)
        return OpenChunk(name, os.open(name, os.O_RDONLY | self._direct, dir_fd=self._root), self._discard)

    def write(self, key: OffloadKey, buffers: Sequence[memoryview]) -> int:
        """Put a file of these bytes in place of what was there, and return the bytes that it takes on the disk.

        Until it has returned, readers find what was there before; a failure leaves that. (But for a failed sync of
        the folder: then the new file may be in place, whole.)
        """
        name = self._mapper.name(key)
        parent = os.path.dirname(name)
        temporary, fd = self._create(parent)
        try:
            try:
                _write_all(fd, buffers)
                if self._fsync:
                    os.fsync(fd)
                allocated_bytes = os.fstat(fd).st_blocks * SECTOR_BYTES
            finally:
                os.close(fd)  # Network file systems report a full disk here.
            # rename last: a reader sees the old chunk or the new one, never half of each.
            os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)
        except BaseException:
            self._drop(temporary)
            raise
        if self._fsync:
            self._sync(parent)
        return allocated_bytes

    def remove(self, key: OffloadKey) -> None:
        """Remove a chunk's file, if there is one."""
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._mapper.name(key), dir_fd=self._root)

    def length(self, key: OffloadKey) -> int | None:
        """Return the length of a chunk's file in bytes; None if there is none."""
        try:
            return os.stat(self._mapper.name(key), dir_fd=self._root).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _create(self, parent: str) -> tuple[str, int]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct
        for _ in range(CREATE_ATTEMPTS):
            temporary = f"{parent}/{attempt_name(self._writer)}"
            try:
                return temporary, os.open(temporary, flags, 0o644, dir_fd=self._root)
            except FileNotFoundError:
                self._make(parent)  # Only now: most stores find their folder, and save the call.
            except FileExistsError:
                continue  # A process of the same id in another container: the next number is ours.
            except OSError:
                self._drop(temporary)  # Linux makes the file before it refuses a flag.
                raise
        raise OSError(errno.EAGAIN, "folders vanish as fast as they are made")

    def _drop(self, temporary: str) -> None:
        with suppress(OSError):  # The error that led here is the one to report.
            os.unlink(temporary, dir_fd=self._root)

    def _make(self, folder: str) -> None:
        parent = os.path.dirname(folder)
        try:
            os.mkdir(folder, dir_fd=self._root)
        except FileExistsError:
            return
        except FileNotFoundError:
            if not parent:
                raise  # The root itself is gone.
            self._make(parent)
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self._root)
        if self._fsync:
            self._sync(parent or ".")

    def _sync(self, folder: str) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class OpenChunk:
    """A chunk's file for as long as it is open: what is read and what is discarded are the same file."""

    def __init__(self, name: str, fd: int, discard: Discard) -> None:
        """Take over an open descriptor."""
        self._name = name
        self._fd = fd
        self._discard = discard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._fd)

    def read(self, buffers: Sequence[memoryview], expected_bytes: int) -> int:
        """Fill the buffers in order and return how many bytes came: all that the file has, if they had room for it.

        `expected_bytes`: the length at which there is no doubt that the end was reached.
        """
        got = os.preadv(self._fd, buffers, 0)
        if got == expected_bytes:
            return got
        end = min(os.fstat(self._fd).st_size, sum(map(len, buffers)))
        while got < end and (more := os.preadv(self._fd, _rest(buffers, got), got)):
            got += more
        return got

    def allocated_bytes(self) -> int:
        """Return the bytes that the file takes on the disk."""
        return os.fstat(self._fd).st_blocks * SECTOR_BYTES

    def discard(self, fault: Fault) -> Discarded:
        """Take this very file out of the way, not one that has replaced it meanwhile."""
        return self._discard(self._name, self._fd, fault)


def _write_all(fd: int, buffers: Sequence[memoryview]) -> None:
    total = sum(map(len, buffers))
    done = os.pwritev(fd, buffers, 0)
    while done < total:  # Short: a signal, a nearly full disk (the next call says so), more than 2 GiB.
        more = os.pwritev(fd, _rest(buffers, done), done)
        if more == 0:
            raise OSError(errno.EIO, f"wrote {done} of {total} bytes and then none")
        done += more


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of the buffers after so many bytes."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest
