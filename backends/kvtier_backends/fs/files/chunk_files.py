"""Chunks' files: written aside and renamed into place, read, removed. For any thread; blocks; raises `OSError`."""

import errno
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from kvtier.backend import FileMapper, OffloadKey
from kvtier.errors import Remedy
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import NO_LINK, ForeignError, Reached, open_below, with_folder
from kvtier_backends.fs.disk.capacity import file_bytes_worst
from kvtier_backends.fs.disk.footer import ChunkFault
from kvtier_backends.fs.disk.lanes import LoadsFirst
from kvtier_backends.fs.disk.reads import part_of, write_all
from kvtier_backends.fs.disk.remains import called, is_absent, listed, remove_file, remove_folder
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import temporary_name

logger = logging.getLogger(__name__)


def take_aside(root_fd: int, name: str, file: os.stat_result, aside: str) -> bool:
    """Rename this file; False if the name is another file's by now, which keeps it."""
    if not os.path.samestat(below.look(root_fd, name), file):
        return False
    below.rename(root_fd, name, aside)
    if os.path.samestat(below.look(root_fd, aside), file):
        return True
    with suppress(FileExistsError):  # Newer still: that one stays.
        below.link(root_fd, aside, name)
    below.unlink(root_fd, aside)
    return False


class FoundFile(NamedTuple):
    allocated_bytes: int
    used_at_ns: int
    file_bytes: int


class DoubtError(OSError):
    """A store that has failed, after which the chunk's file may be the new one."""

    def __init__(self, error: OSError, allocated_bytes: int) -> None:
        super().__init__(error.errno, error.strerror)
        self.allocated_bytes = allocated_bytes


class Temporary(NamedTuple):
    """A file that is being written, under a name of its own in an open folder."""

    folder: Reached
    name: str
    fd: int


class ChunkFiles:
    def __init__(self, folder: Folder, mapper: FileMapper, loads_first: LoadsFirst, *, fsync: bool) -> None:
        """Use an opened folder. With `fsync`, a chunk is on the device when `write` returns."""
        self._loads_first = loads_first
        self._folder, self._root = folder, folder.root_fd
        self._mapper = mapper
        self._remains, self._sizes, self._disk = folder.remains, folder.sizes, folder.disk
        self._fsync = fsync
        self._direct = os.O_DIRECT if folder.direct else 0
        self._warned: set[ChunkFault] = set()

    def open(self, key: OffloadKey) -> int | None:
        """Open a chunk's file to read it; None without a file. A link is no chunk, wherever it leads."""
        name = self._mapper.name(key)
        return called(lambda: open_below(self._root, name, os.O_RDONLY | NO_LINK | self._direct), self._root, name)

    def discard(self, key: OffloadKey, fd: int, fault: ChunkFault) -> bool:
        """Delete the corrupt file of a chunk, open as `fd`; False if that fails. Raises what `fstat` does.

        No system call removes a name only if it is a certain file. So the file is renamed aside, and looked at there.
        Another one is put back, unless a newer has come: for a moment its chunk is missing, but none is lost.
        """
        file, name = os.fstat(fd), self._mapper.name(key)
        aside = f"{os.path.dirname(name)}/{temporary_name(self._folder.writer)}"
        done, gone = "deleted", False
        try:
            if not take_aside(self._root, name, file, aside):
                return True  # A newer one has its name, and stays.
        except OSError as error:
            done = f"cannot be discarded: {error.strerror}"
            with suppress(OSError):  # Somebody else may have discarded it.
                gone = isinstance(error, FileNotFoundError) and is_absent(self._root, name)
        self._remains.remove(aside, self._disk.taken_bytes(file))
        if not gone:  # One warning of each kind: a whole directory may be corrupt.
            level = logging.DEBUG if fault in self._warned else logging.WARNING
            self._warned.add(fault)
            logger.log(level, "%s: corrupt (%s); %s; see %s", name, fault, done, Remedy.CORRUPT)
        return gone or done == "deleted"

    def allocated_bytes(self, fd: int) -> int:
        return self._disk.taken_bytes(os.fstat(fd))

    def write(self, key: OffloadKey, buffers: Sequence[memoryview], used_at_ns: int) -> int:
        """Put a file of these bytes and this time in place of what was there; return the bytes that it takes.

        Until then, readers find what was there before; a failure leaves that. Raises `DoubtError` if that is in doubt.
        """
        parent, _, base = self._mapper.name(key).rpartition("/")
        try:
            folder, temporary, fd = self._create(parent)
        except BaseException:
            self._tidy(parent, was_there=False)  # Some of its folders may have been made.
            raise
        file_bytes = sum(map(len, buffers))
        with folder as folder_fd:
            try:
                try:
                    self._write_all(fd, buffers)
                    os.utime(fd, ns=(used_at_ns, used_at_ns))
                    if self._fsync:
                        os.fsync(fd)
                    status = os.fstat(fd)
                finally:
                    os.close(fd)  # Network file systems report a full disk here.
            except BaseException:
                self._drop(f"{parent}/{temporary}", file_bytes_worst(file_bytes, self._disk.block_bytes))
                raise
            # rename last: a reader sees the old chunk or the new one, never half of each.
            self._publish(folder_fd, parent, temporary, base, status)
            allocated_bytes = self._disk.taken_bytes(status)
            try:
                if self._fsync:
                    with_folder(folder_fd, ".", os.fsync)
            except OSError as error:
                raise DoubtError(error, allocated_bytes) from error
            finally:
                self._look_at(parent, folder_fd)
        return allocated_bytes

    def remove(self, key: OffloadKey, *, known: bool = False) -> bool:
        """Remove a chunk's file and folders left empty; False if there was none. `known`: its folders count."""
        was_there = remove_file(self._root, self._mapper.name(key))
        self.tidy(key, was_there=was_there or known)  # Whoever has removed it may have left its folders, too.
        return was_there

    def is_absent(self, key: OffloadKey) -> bool:
        """Return True if there is proof that a chunk has no file; raises OSError if it may have one."""
        name = self._mapper.name(key)
        if is_absent(self._root, name):
            return True
        raise listed(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name))

    def tidy(self, key: OffloadKey, *, was_there: bool = False) -> None:
        self._tidy(os.path.dirname(self._mapper.name(key)), was_there=was_there)

    def _drop(self, temporary: str, taken_bytes: int) -> None:
        folder = os.path.dirname(temporary)
        self._remains.remove(
            temporary, taken_bytes, lambda: self._tidy(folder, was_there=remove_file(self._root, temporary))
        )

    def _tidy(self, folder: str, *, was_there: bool) -> None:
        while folder != self._folder.chunks:
            with self._sizes.changing(folder):
                try:
                    below.rmdir(self._root, folder)
                except OSError as error:  # Mostly because it is not empty.
                    self._sizes.not_removed(folder, error, was_there=was_there)
                    return
                self._sizes.removed(folder)
            was_there = True
            folder = os.path.dirname(folder)

    def settle_folders(self) -> bool:
        """Remove folders that should have gone, and look at those in doubt; return True if none is left."""
        for folder in self._sizes.doubtful:
            with suppress(OSError):  # Then it is still in doubt.
                with self._sizes.changing(folder):
                    gone = self._settle_folder(folder)
                if gone:
                    self._tidy(os.path.dirname(folder), was_there=False)
        return not self._sizes.doubtful

    def _settle_folder(self, folder: str) -> bool:
        try:
            if folder == self._folder.chunks:
                raise OSError(errno.ENOTEMPTY, "the tier's own, which stays")
            if remove_folder(self._root, folder):
                self._sizes.removed(folder)
            else:
                self._sizes.proved(folder, absent=True)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self._sizes.looked_at(folder, below.look(self._root, folder))
                self._sizes.proved(folder, absent=False)
            return False
        return True

    def stamp(self, key: OffloadKey, used_at_ns: int) -> None:
        with suppress(OSError):  # It is a hint, for after a restart.
            below.date(self._root, self._mapper.name(key), used_at_ns)

    def length(self, key: OffloadKey) -> int | None:
        status = self._stat(key)
        return status and status.st_size

    def look(self, key: OffloadKey) -> "FoundFile | None":
        """Return a file's room and last use; None without one. It opens: a server is asked, whatever is cached here."""
        try:
            fd = open_below(self._root, self._mapper.name(key), os.O_RDONLY | NO_LINK)
        except OSError:
            status = self._stat(key)
        else:
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
        return status and FoundFile(self._disk.taken_bytes(status), status.st_mtime_ns, status.st_size)

    def _stat(self, key: OffloadKey) -> os.stat_result | None:
        try:
            return below.look(self._root, self._mapper.name(key))
        except (FileNotFoundError, NotADirectoryError, ForeignError):
            return None

    def _publish(self, folder_fd: int, parent: str, temporary: str, base: str, file: os.stat_result) -> None:
        try:
            below.rename(folder_fd, temporary, base)
        except OSError as error:
            with suppress(OSError):
                if os.path.samestat(below.look(folder_fd, base), file):
                    return  # It is done, whatever was reported.
            allocated_bytes = self._disk.taken_bytes(file)
            try:
                below.unlink(folder_fd, temporary)
            except OSError:
                self._drop(f"{parent}/{temporary}", allocated_bytes)
                raise DoubtError(error, allocated_bytes) from error
            self._tidy(parent, was_there=True)
            raise

    def _create(self, parent: str) -> Temporary:
        for _ in range(8):  # Someone may remove a folder between its making and its use, but not for ever.
            try:
                return self._create_in(parent)
            except FileExistsError:
                continue  # A process of the same id in another container: the next number is ours.
            except FileNotFoundError:
                if not os.fstat(self._root).st_nlink:
                    raise  # The root itself is gone. Otherwise the folder was found empty and removed.
        raise OSError(errno.EAGAIN, "folders vanish as fast as they are made")

    def _create_in(self, parent: str) -> Temporary:
        folder, name = self._reach(parent), temporary_name(self._folder.writer)
        try:
            fd = open_below(folder.fd, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct)
        except BaseException as error:
            folder.close()
            if not isinstance(error, FileExistsError):  # Linux makes the file before it refuses a flag.
                self._drop(f"{parent}/{name}", self._disk.block_bytes)
            raise
        return Temporary(folder, name, fd)

    def _write_all(self, fd: int, buffers: Sequence[memoryview]) -> None:
        total, done = sum(map(len, buffers)), 0
        while done < total:
            if done:
                self._loads_first.give_way()
            slice_bytes = self._loads_first.slice_bytes
            end = total if total - done < 2 * slice_bytes else done + slice_bytes  # No call for a footer alone.
            write_all(fd, part_of(buffers, done, end), done)
            done = end

    def _reach(self, folder: str) -> Reached:
        """Open a folder, and make it if there is none: most stores find theirs, and save the call."""
        with suppress(FileNotFoundError):
            return Reached(self._root, folder)
        parent, base = os.path.split(folder)
        with self._reach(parent) as parent_fd:
            return self._make(parent_fd, parent, base)

    def _make(self, parent_fd: int, parent: str, base: str) -> Reached:
        folder = f"{parent}/{base}" if parent else base
        with suppress(FileExistsError), self._sizes.making(folder):
            below.mkdir(parent_fd, base, self._folder.mode)
        made = Reached(parent_fd, base)
        self._look_at(folder, made.fd)
        if parent:
            self._look_at(parent, parent_fd)
        try:
            if self._fsync:
                with_folder(parent_fd, ".", os.fsync)
        except BaseException:
            made.close()
            raise
        return made

    def _look_at(self, folder: str, fd: int) -> None:
        """Count the room of an open folder, unless it was removed."""
        try:
            status = os.fstat(fd)
        except OSError:  # It may have grown.
            self._sizes.not_looked_at(folder, self._disk.block_bytes)
            return
        if status.st_nlink:
            self._sizes.looked_at(folder, status)
