"""A chunk's file while it is read: what is verified and what is taken out of the way is one file, whatever its name."""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvtier_backends.fs.discard import Discard, Discarded
from kvtier_backends.fs.disk import Disk
from kvtier_backends.fs.faults import Fault
from kvtier_backends.fs.reads import Wanted


class OpenChunk:
    """A chunk's file for as long as it is open: what is read and what is discarded are the same file."""

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
        """Fill what a first read has left of the buffers, and return how many bytes came in all.

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
