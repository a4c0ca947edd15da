"""The raw limit of a disk: preadv and pwritev of one file that was written before, by plain threads.

No names, no metadata, no new blocks, no checksums: less work than this moves no chunk, so it is the limit of a tier on
the same disk with as many threads. `NewFiles` is the limit of tiers that make a file for each chunk: the same writes,
each into a file that is made for it. Where direct I/O is not asked for, all goes through the page cache.
"""

import itertools
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from kvtier.memory import PAGE_BYTES

FOLDERS = 64
FILL_BYTES = 8 << 20  # A call: large enough for any disk to be at its best.
RUNTIME_S = 1.0  # A round of fio: what the others take.

Way = Literal["read", "write"]


class RawFile:
    """One file of as many chunks as there are buffers, written once before anything is measured. `close` it."""

    def __init__(self, path: str, buffers: Sequence[memoryview], *, direct: bool) -> None:
        """Make the file; raises OSError, and then leaves none."""
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
        """Read all chunks on so many threads; return the bytes a second."""
        return self._rate(threads, partial(self._move, os.preadv))

    def write(self, threads: int, *, sync: bool) -> float:
        """Write all chunks likewise; with `sync`, each thread has its part on the device before it is done."""
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


class NewFiles:
    """Files that are made, one for each buffer, in every round others: stores of new chunks cannot avoid it.

    None is removed before the end: ext4 passes over what was just deleted, one inode after the other, when it makes a
    file, so that the next round would pay for this one's tidying up.
    """

    def __init__(self, folder: str, buffers: Sequence[memoryview], *, direct: bool) -> None:
        """Make the folder that they will be in."""
        os.mkdir(folder)
        self._folder = folder
        self._turn = 0
        self._buffers = buffers
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)

    def prepare(self) -> None:
        """Make the folders of the next round: several, or threads would wait for each other at one."""
        self._turn += 1
        for number in range(FOLDERS):
            os.makedirs(f"{self._folder}/{self._turn}/{number}")

    def write(self, threads: int, *, sync: bool) -> float:
        """Make and write all files on so many threads; return the bytes a second. Once after each `prepare`."""

        def work(part: Iterable[int]) -> None:
            for index in part:
                fd = os.open(self._name(index), self._flags, 0o600)
                try:
                    _whole(os.pwritev(fd, [self._buffers[index]], 0), len(self._buffers[index]))
                    if sync:
                        os.fsync(fd)
                finally:
                    os.close(fd)

        chunks = len(self._buffers)
        return chunks * len(self._buffers[0]) / seconds_on(threads, chunks, work)

    def _name(self, index: int) -> str:
        return f"{self._folder}/{self._turn}/{index % FOLDERS}/{index}"


def seconds_on(threads: int, chunks: int, work: Callable[[Iterable[int]], None]) -> float:
    """Share the chunks out over plain threads, and return how long all took. Raises what the first one that failed did.

    Whoever is interrupted waits until no thread uses a file any more: its number would soon be another's.
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
    """Say whether files there can be read and written past the page cache. Leaves nothing."""
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
        if os.path.exists(path):  # Linux makes the file before it refuses the flag.
            os.unlink(path)


def _whole(moved: int, expected: int) -> None:
    if moved != expected:
        raise OSError(None, f"{moved:,} bytes moved of {expected:,}")


def fio_path() -> str | None:
    """Return where fio is; None if it is not installed."""
    return shutil.which("fio")


class Fio:
    """Runs of fio over one file of its own in a directory, which the first run lays out."""

    def __init__(self, path: str, directory: str, *, size_bytes: int, direct: bool) -> None:
        self._path = path
        self._file = os.path.join(directory, "fio")
        self._size_bytes = size_bytes
        self._direct = direct

    def rate(self, way: Way, chunk_bytes: int, depth: int) -> float:
        """Read or write chunks at random places for a second, with so many under way; return the bytes a second."""
        ran = subprocess.run(  # noqa: S603  # The program that the user has installed.
            [*self._command(), f"--rw=rand{way}", f"--bs={chunk_bytes}", f"--iodepth={depth}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise OSError(None, f"fio ended with status {ran.returncode}: {ran.stderr.strip()[:200]}")
        return rate_in(ran.stdout, way)

    def _command(self) -> list[str]:
        return [
            self._path,
            "--name=kvtier",
            f"--filename={self._file}",
            f"--size={self._size_bytes}",
            f"--direct={int(self._direct)}",
            "--ioengine=libaio" if self._direct else "--ioengine=psync",
            "--time_based",
            f"--runtime={RUNTIME_S:g}",
            "--output-format=json",
        ]


def rate_in(report: str, way: Way) -> float:
    """Return the bytes a second that fio's JSON report tells; what stands before it (warnings) is skipped."""
    told: dict[str, Any] = json.loads(report[report.index("{") :])
    (job,) = told["jobs"]
    return float(job[way]["bw_bytes"])
