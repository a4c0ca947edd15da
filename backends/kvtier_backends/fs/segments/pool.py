"""Segments in host memory: files without a name, which the kernel gives back with their last descriptor.

Chunks are copied by reads and writes of these files, at 0.8 to 0.9 of the rate of a copy between mappings. So one mover
serves disks and memory, a run of slots is one call, and a process that copies needs no pages of its own for the pool.
"""

import errno
import fcntl
import mmap
import os

from kvtier.errors import ConfigError
from kvtier.memory import give_advice, prefault, require_free
from kvtier_backends.fs.segments.segment import OpenSegments, Segment, punch_hole

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class PoolFolder(OpenSegments):
    """Offers what `SegmentFolder` does, in memory. Everything blocks, and any thread may call."""

    segment_bytes_most = 1 << 30  # Taken within a second, for which stores wait.

    def worst_bytes(self, slots: int) -> int:
        return self.header(slots).file_bytes if slots else 0

    def create(self, slots: int) -> Segment:
        """Make a segment of free slots and take its memory; OSError if there is too little."""
        header = self.header(slots)
        try:
            require_free(header.file_bytes)
        except ConfigError as error:
            raise OSError(errno.ENOSPC, str(error)) from error
        fd = os.memfd_create("kvtier-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, header.file_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            with mmap.mmap(fd, header.file_bytes) as mapping:
                give_advice(mapping)
                prefault(mapping, fd)
        except BaseException:
            os.close(fd)
            raise
        return self._taken(Segment(f"memory {fd}", fd, header, own=True, allocated_bytes=header.file_bytes))

    def has(self, segment: Segment) -> bool:
        return not segment.closed

    def remove(self, segment: Segment) -> None:
        punch_hole(segment.fd, 0, segment.header.file_bytes)  # Engines that have it open do not know yet.
        self.close(segment)

    def remove_stranger(self, name: str) -> bool:  # noqa: ARG002
        return False
