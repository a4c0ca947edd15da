"""Chunks' files: one each, written aside and renamed into place, read back, and taken out of the way.

Only this module knows where in the file system a chunk is. It does not know what its bytes must be. Everything blocks,
and any thread may call. A failure raises the `OSError` of the system call.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from kvtier.backend import FileMapper, OffloadKey
from kvtier_backends.fs.disk.below import NO_LINK, ForeignError, refuse_others, sync_folder
from kvtier_backends.fs.disk.capacity import Disk
from kvtier_backends.fs.disk.footer import Fault
from kvtier_backends.fs.disk.lanes import LoadsFirst
from kvtier_backends.fs.disk.reads import Wanted
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import temporary_name
from kvtier_backends.fs.files.discard import Discard, Discarded

CREATE_ATTEMPTS = 8  # Someone may remove a folder between its making and its use, but not for ever.
VANISHING = "folders vanish as fast as they are made"


class OpenChunk:
    """A chunk's file while it is open: reading and discarding mean the same file, whatever its name."""

    def __init__(self, name: str, fd: int, disk: Disk, discard: Discard) -> None:
        """Take over an open descriptor."""
        self._disk = disk
        self._name = name
        self._fd = fd
        self._discard = discard

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def wanted(self, buffers: Sequence[memoryview], done: Callable[[int | OSError], None]) -> Wanted:
        """Ask for the file's bytes; what comes may be less than there is."""
        return Wanted(self._fd, buffers, 0, sum(map(len, buffers)), done)

    def read_on(self, buffers: Sequence[memoryview], got: int, expected_bytes: int) -> int:
        """Fill the rest of the buffers after a first read, and return how many bytes came in all.

        That is all that the file has, if the buffers have room for it. `expected_bytes`: the length at which there is
        no doubt that the end was reached.
        """
        if got == expected_bytes:
            return got
        end = min(os.fstat(self._fd).st_size, sum(map(len, buffers)))
        while got < end and (more := os.preadv(self._fd, part_of(buffers, got, end), got)):
            got += more
        return got

    def allocated_bytes(self) -> int:
        """Return the bytes that the file takes on the disk."""
        return self._disk.taken_bytes(os.fstat(self._fd))

    def discard(self, fault: Fault) -> Discarded:
        """Take this very file out of the way, not one that has replaced it meanwhile."""
        return self._discard(self._name, self._fd, fault)


def part_of(buffers: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return these bytes of the buffers as if they were one."""
    pieces: list[memoryview] = []
    for buffer in buffers:
        if piece := buffer[max(0, start) : max(0, end)]:
            pieces.append(piece)
        start, end = start - len(buffer), end - len(buffer)
    return pieces


class Found(NamedTuple):
    """A file as it is seen without being opened."""

    allocated_bytes: int
    used_at_ns: int
    file_bytes: int


class Temporary(NamedTuple):
    """A file that is being written, under a name of its own."""

    name: str
    fd: int


class ChunkFiles:
    """The files of one namespace, by key."""

    def __init__(
        self,
        folder: Folder,
        mapper: FileMapper,
        loads_first: LoadsFirst,
        *,
        fsync: bool,
    ) -> None:
        """Use an opened folder, and let others go first between two slices of a chunk.

        With `fsync`, a chunk is on the device when `write` returns.
        """
        self._loads_first = loads_first
        self._root = folder.root_fd
        self._make_folder = folder.make_folder
        self._mapper = mapper
        self._writer = folder.writer
        self._fsync = fsync
        self._sizes = folder.sizes
        self._disk = folder.disk
        self._chunks = folder.chunks
        self._direct = os.O_DIRECT if folder.direct else 0
        self._discard = Discard(folder)

    def open(self, key: OffloadKey) -> OpenChunk:
        """Open a chunk's file to read it. A link is no chunk, wherever it leads."""
        name = self._mapper.name(key)
        try:
            fd = os.open(name, os.O_RDONLY | NO_LINK | self._direct, dir_fd=self._root)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # By the latter a socket would pass for a disk that is gone.
                refuse_others(self._root, name, stat.S_IFREG)
            raise
        return OpenChunk(name, fd, self._disk, self._discard)

    def write(self, key: OffloadKey, buffers: Sequence[memoryview], used_at_ns: int) -> int:
        """Put a file of these bytes in place of what was there, and return the bytes that it takes on the disk.

        `used_at_ns` becomes the file's time, by which files are ordered after a restart. Until it has returned, readers
        find what was there before; a failure leaves that. (But for a failed sync of the folder: then the new file may
        be in place, whole.)
        """
        name = self._mapper.name(key)
        parent = os.path.dirname(name)
        temporary, fd = self._create(parent)
        try:
            try:
                self._write_all(fd, buffers)
                os.utime(fd, ns=(used_at_ns, used_at_ns))
                if self._fsync:
                    os.fsync(fd)
                allocated_bytes = self._disk.taken_bytes(os.fstat(fd))
            finally:
                os.close(fd)  # Network file systems report a full disk here.
            # rename last: a reader sees the old chunk or the new one, never half of each.
            self._publish(temporary, name)
        except BaseException:
            self._drop(temporary)
            raise
        try:
            if self._fsync:
                sync_folder(self._root, parent)
            self._look_at(parent)
        except ForeignError:
            os.unlink(name, dir_fd=self._root)  # It is elsewhere, where nobody would look for it.
            raise
        return allocated_bytes

    def remove(self, key: OffloadKey) -> bool:
        """Remove a chunk's file and the folders that it leaves empty; False if there was none."""
        try:
            os.unlink(self._mapper.name(key), dir_fd=self._root)
        except NotADirectoryError:
            return False
        except FileNotFoundError:
            self.tidy(key)  # Who has removed it may have left its folders.
            return False
        self.tidy(key)
        return True

    def tidy(self, key: OffloadKey) -> None:
        """Remove the folders above a file that is gone, as far as they are empty: they take room, too."""
        folder = os.path.dirname(self._mapper.name(key))
        with suppress(OSError):  # Mostly because it is not empty.
            while folder != self._chunks:
                os.rmdir(folder, dir_fd=self._root)
                self._sizes.removed(folder)
                folder = os.path.dirname(folder)

    def stamp(self, key: OffloadKey, used_at_ns: int) -> None:
        """Have a chunk's file, if there is one, say that it was used then."""
        with suppress(OSError):  # It is a hint, for after a restart.
            os.utime(self._mapper.name(key), ns=(used_at_ns, used_at_ns), dir_fd=self._root, follow_symlinks=False)

    def length(self, key: OffloadKey) -> int | None:
        """Return the length of a chunk's file in bytes; None if there is none."""
        status = self._stat(key)
        return status and status.st_size

    def look(self, key: OffloadKey) -> "Found | None":
        """Return a chunk's file's room, and when it was used; None without a file.

        Opening asks a file server, whatever this machine remembers of the file; looking by name need not.
        """
        try:
            fd = os.open(self._mapper.name(key), os.O_RDONLY | NO_LINK, dir_fd=self._root)
        except OSError:
            status = self._stat(key)
        else:
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        return status and Found(self._disk.taken_bytes(status), status.st_mtime_ns, status.st_size)

    def _stat(self, key: OffloadKey) -> os.stat_result | None:
        try:
            return os.stat(self._mapper.name(key), dir_fd=self._root, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _publish(self, temporary: str, name: str) -> None:
        """Rename a file; its new folder may be missing if it was made in another one."""
        try:
            os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)
        except FileNotFoundError:
            self._make(os.path.dirname(name))
            os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)

    def _create(self, parent: str) -> Temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct
        for _ in range(CREATE_ATTEMPTS):
            temporary = f"{parent}/{temporary_name(self._writer)}"
            try:
                return Temporary(temporary, os.open(temporary, flags, 0o644, dir_fd=self._root))
            except FileNotFoundError:
                self._make(parent)  # Only now: most stores find their folder, and save the call.
            except FileExistsError:
                continue  # A process of the same id in another container: the next number is ours.
            except OSError:
                self._drop(temporary)  # Linux makes the file before it refuses a flag.
                raise
        raise OSError(errno.EAGAIN, VANISHING)

    def _write_all(self, fd: int, buffers: Sequence[memoryview]) -> None:
        total, done = sum(map(len, buffers)), 0
        while done < total:
            if done:
                self._loads_first.give_way()
            slice_bytes = self._loads_first.slice_bytes
            end = total if total - done < 2 * slice_bytes else done + slice_bytes  # No call for a footer alone.
            wrote = os.pwritev(fd, part_of(buffers, done, end), done)  # Fewer: the next call says why.
            if wrote == 0:
                raise OSError(errno.EIO, f"wrote {done} of {total} bytes and then none")
            done += wrote

    def _drop(self, temporary: str) -> None:
        with suppress(OSError):  # The error that led here is the one to report.
            os.unlink(temporary, dir_fd=self._root)

    def _make(self, folder: str) -> None:
        parent = os.path.dirname(folder)
        for _ in range(CREATE_ATTEMPTS):
            try:
                self._mkdir(folder)
                break
            except FileExistsError:
                return
            except FileNotFoundError:
                if not parent:
                    raise  # The root itself is gone.
                self._make(parent)  # Who finds it empty may remove it before there is a folder in it.
        else:
            raise OSError(errno.EAGAIN, VANISHING)
        self._look_at(folder)
        try:
            self._look_at(parent)
        except ForeignError:
            os.rmdir(folder, dir_fd=self._root)
            raise
        if self._fsync:
            with suppress(FileNotFoundError):  # Removed already: whoever needs it makes it anew.
                sync_folder(self._root, parent or ".")

    def _mkdir(self, folder: str) -> None:
        with self._sizes.making(folder):
            self._make_folder(folder)

    def _look_at(self, folder: str) -> None:
        """Count the room of a folder. Raises `ForeignError` if a link is in its place."""
        with suppress(FileNotFoundError):
            status = os.stat(folder, dir_fd=self._root, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                refuse_others(self._root, folder, stat.S_IFDIR)
            self._sizes.looked_at(folder, status)
