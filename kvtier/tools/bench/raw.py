"""The raw limit of a disk: plain threads that call preadv and pwritev on one file that was written before.

No names, no metadata, no new blocks, no checksums: no tier moves a chunk with less work. So this is the limit of an fs
tier on the same disk with as many threads.
"""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvtier.memory import PAGE_BYTES

FILL_BYTES = 8 << 20  # Of one call: any disk reaches its best rate.


class RawFile:
    """One file with a chunk for each buffer, written once before anything is measured. Close it."""

    def __init__(self, path: str, buffers: Sequence[memoryview], *, direct: bool) -> None:
        """Create the file. Raises `OSError`, and then leaves no file."""
        self._path = path
        self._buffers = buffers
        self._chunk_bytes = len(buffers[0])
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        self._fd = os.open(path, flags, 0o600)
        try:
            self._fill()
        except BaseException:
            self.close()
            raise

    def read(self, threads: int) -> float:
        """Read all chunks on `threads` threads; return the bytes a second."""
        return self._rate(threads, partial(self._move, os.preadv))

    def write(self, threads: int, *, sync: bool) -> float:
        """Write all chunks on `threads` threads, each with a final sync if wanted; return the bytes a second."""
        return self._rate(threads, self._write_and_sync if sync else partial(self._move, os.pwritev))

    def close(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        os.unlink(self._path)

    def _fill(self) -> None:
        size_bytes = len(self._buffers) * self._chunk_bytes
        page = memoryview(mmap.mmap(-1, FILL_BYTES))
        page[:] = os.urandom(PAGE_BYTES) * (FILL_BYTES // PAGE_BYTES)
        for start in range(0, size_bytes, FILL_BYTES):
            os.pwritev(self._fd, [page[: min(FILL_BYTES, size_bytes - start)]], start)
        os.fsync(self._fd)

    def _rate(self, threads: int, work: Callable[[Iterable[int]], None]) -> float:
        return len(self._buffers) * self._chunk_bytes / seconds_on(threads, len(self._buffers), work)

    def _move(self, call: Callable[[int, list[memoryview], int], int], part: Iterable[int]) -> None:
        for index in part:
            _whole(call(self._fd, [self._buffers[index]], index * self._chunk_bytes), self._chunk_bytes)

    def _write_and_sync(self, part: Iterable[int]) -> None:
        self._move(os.pwritev, part)
        os.fdatasync(self._fd)


def seconds_on(threads: int, chunks: int, work: Callable[[Iterable[int]], None]) -> float:
    """Divide the chunks among threads and return the time of all. Raises the first thread's `OSError`.

    If it is interrupted, it first waits until no thread uses a file descriptor: the number would soon be reused.
    """
    size = -(-chunks // threads)
    failed: list[OSError] = []
    stopped = threading.Event()

    def run(start: int) -> None:
        try:
            work(itertools.takewhile(lambda _: not stopped.is_set(), range(start, min(start + size, chunks))))
        except OSError as error:
            failed.append(error)

    workers = [threading.Thread(target=run, args=(start,)) for start in range(0, chunks, size)]
    begun = time.perf_counter()
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:
        stopped.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    seconds = time.perf_counter() - begun
    if failed:
        raise failed[0]
    return seconds


def takes_direct(directory: str) -> bool:
    """Return True if files in the directory can be read and written with O_DIRECT. Leaves no file."""
    path = os.path.join(directory, f".kvtier-direct-{os.getpid()}")
    page = memoryview(mmap.mmap(-1, PAGE_BYTES))
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        try:
            return os.pwritev(fd, [page], 0) == os.preadv(fd, [page], 0) == PAGE_BYTES
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        if os.path.exists(path):  # Linux creates the file before it refuses the flag.
            os.unlink(path)


def _whole(moved: int, expected: int) -> None:
    if moved != expected:
        raise OSError(None, f"{moved:,} bytes moved of {expected:,}")
