"""The trial of a root: whether direct and queued I/O work there, and how the file system counts room."""

import errno
import logging
import mmap
import os
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal

from kvtier.backend import FileMapper
from kvtier.errors import BackendUnavailable, ConfigError, Remedy
from kvtier.memory import PAGE_BYTES
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import NO_LINK, Reached, open_below
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES, Disk
from kvtier_backends.fs.disk.footer import FULL
from kvtier_backends.fs.disk.reads import ONE_BY_ONE, QUEUE_BYTES, QueuedReads, Reads, takes_queued
from kvtier_backends.fs.disk.remains import Remains, remove_folder
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name

logger = logging.getLogger(__name__)

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}  # How file systems say that they have no direct I/O.


class RootTrial:
    """Tries an open root beside the namespace's configuration. Blocks; removes what it has made."""

    def __init__(
        self, root: str, root_fd: int, mapper: FileMapper, writer: Writer, disk: Disk, remains: Remains
    ) -> None:
        """`root`: as messages name it."""
        self._root, self._root_fd, self._mapper = root, root_fd, mapper
        self._writer, self._disk, self._remains = writer, disk, remains

    def direct(self, mode: Literal["auto", "direct", "buffered"]) -> bool:
        """Write and read two pages the way that chunks will be, aligned by a page; return whether directly."""
        if mode != "buffered" and self._transfers(os.O_DIRECT):
            return True
        if mode == "direct":
            raise ConfigError(f"io: 'direct' given, 'auto' or 'buffered' accepted: {self._root} refuses it")
        if not self._transfers(0):
            raise BackendUnavailable(f"{self._root}: what is written there does not come back")
        if mode == "auto":
            logger.warning(
                "%s: no direct I/O there; chunks go through the page cache; see %s", self._root, Remedy.BUFFERED
            )
        return False

    def reads(self) -> Reads:
        """Read a page directly, the way that chunks are to be; return how lanes read.

        Several reads run at once only directly from a local disk. Without direct I/O the kernel does not go on by
        itself. If a file server is silent, reads that the kernel goes on with would keep this process from being
        killed.
        """
        with suppress(OSError):
            fd = open_below(self._root_fd, self._mapper.config_name, os.O_RDONLY | os.O_DIRECT | NO_LINK)
            try:
                is_disk = os.major(os.fstat(fd).st_dev) != 0  # Only block devices have a nonzero major number.
                if is_disk and takes_queued(fd, memoryview(mmap.mmap(-1, PAGE_BYTES))):
                    return QueuedReads(QUEUE_BYTES)
            finally:
                os.close(fd)
        logger.info("%s: a lane reads one chunk at a time there", self._root)
        return ONE_BY_ONE

    def new_folder_bytes(self, mode: int) -> int:
        """Return the room of an empty directory."""
        name = f"{self._mapper.folder}/{temporary_name(self._writer)}"
        try:
            below.mkdir(self._root_fd, name, mode)
        except OSError as error:
            if error.errno in FULL:
                return self._disk.block_bytes
            raise
        try:
            return below.look(self._root_fd, name).st_blocks * SECTOR_BYTES
        finally:
            self._remains.remove(name, self._disk.block_bytes, partial(remove_folder, self._root_fd, name))

    def _transfers(self, flag: int) -> bool:
        folder, name = self._mapper.folder, temporary_name(self._writer)
        try:
            with ExitStack() as stack:
                folder_fd = stack.enter_context(Reached(self._root_fd, folder))
                stack.callback(self._remains.remove, f"{folder}/{name}", self._disk.block_bytes * 2)
                # Linux makes the file before it refuses the flag.
                fd = open_below(folder_fd, name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag)
                stack.callback(os.close, fd)
                page = memoryview(mmap.mmap(-1, PAGE_BYTES))
                page[:] = os.urandom(len(page))
                os.pwrite(fd, page, 0)
                self._disk.tried(os.fstat(fd))
                return _come_back(fd)
        except OSError as error:
            if flag and error.errno in _REFUSED:
                return False
            if error.errno in FULL:
                return self._readable(flag)
            raise

    def _readable(self, flag: int) -> bool:
        """Try reading alone: a full disk still serves its chunks."""
        try:
            fd = open_below(self._root_fd, self._mapper.config_name, os.O_RDONLY | flag | NO_LINK)
            try:
                return os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0) > 0
            finally:
                os.close(fd)
        except OSError as error:
            if flag and error.errno in _REFUSED:
                return False
            raise


def _come_back(fd: int) -> bool:
    """Return True if two pages written in one call are read back in one."""
    written, read = (memoryview(mmap.mmap(-1, 2 * PAGE_BYTES)) for _ in range(2))
    written[:] = bytes(range(256)) * (len(written) // 256)
    halves = slice(None, PAGE_BYTES), slice(PAGE_BYTES, None)
    sent = os.pwritev(fd, [written[half] for half in halves], 0)
    if sent < len(written):
        os.pwrite(fd, written[sent:], sent)  # The error that stopped it is raised now.
    received = os.preadv(fd, [read[half] for half in halves], 0)
    return sent == received == len(written) and read == written
