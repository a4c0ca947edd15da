"""The region: the primary's memory as rows of bytes, in one page-aligned mapping, private or shared. No torch.

Memory is never taken away from under a view: it goes with the last one, a row lent to a hung thread or a torch tensor.
All pages are allocated first: the kernel grants more than it has, and kills (SIGBUS if shared) at the touch.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import time
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from typing import Self

from kvtier.errors import ConfigError
from kvtier.memory.rendezvous import PARTICIPANTS_MAX, Meeting, SharedFile
from kvtier.memory.this_process import PAGE_BYTES, fill_standard_streams, reason, require_free

PREFAULT_SLICE_BYTES = 64 << 20  # 0.02 to 0.2 s of the kernel's time, for which Ctrl-C waits.
PREFAULT_THREADS_MAX = 8  # Clearing pages is bound by memory bandwidth, which a few cores reach.

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python 3.11's mmap.
_TOUCH_BYTES = 1 << 20  # Touched at once with the GIL held, for less than its switch interval.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # A shorter file under a mapping is SIGBUS.

# mmap.madvise holds the GIL (10 s for 4 GiB in pages of 4 KiB, measured); a foreign call does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

logger = logging.getLogger(__name__)


class Region:
    """Rows of `row_bytes` (a multiple of 4,096), zero at first, in one mapping that this process holds.

    Every constructor allocates all memory; it blocks (seconds for many GiB) without the GIL. It raises `ConfigError`
    for sizes that are impossible or not free now, before it touches memory, and leaves nothing.
    """

    __slots__ = ("_file", "_resources", "_view", "fd", "row_bytes", "rows")

    def __init__(
        self,
        mapping: mmap.mmap | memoryview,
        rows: int,
        row_bytes: int,
        fd: int | None,
        resources: ExitStack,
        file: SharedFile | None = None,
    ) -> None:
        """Take over a mapping and its resources. Callers use `private`, `memfd`, `attach`, `shared` or `over`."""
        self.rows = rows
        self.row_bytes = row_bytes
        self.fd = fd  # The memory, for `attach`; None for private memory, and after closing.
        self._view = memoryview(mapping)  # The only reference to the mapping: see close.
        self._resources = resources
        self._file = file  # Set for one of several participants.

    @classmethod
    def private(cls, rows: int, row_bytes: int) -> Self:
        rows_bytes = _rows_bytes(rows, row_bytes)
        require_free(rows_bytes)
        with _undone_on_failure() as resources:
            mapping = _mapped(resources, None, rows_bytes)
            prefault(mapping, None)
            return cls(mapping, rows, row_bytes, None, resources.pop_all())

    @classmethod
    def memfd(cls, rows: int, row_bytes: int) -> Self:
        """Make a region without a name, which other processes attach by its `fd`. It ends with its last holder."""
        rows_bytes = _rows_bytes(rows, row_bytes)
        require_free(rows_bytes)
        with _undone_on_failure() as resources:
            fd = os.memfd_create("kvtier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            resources.callback(os.close, fd)
            os.ftruncate(fd, rows_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _mapped(resources, fd, rows_bytes)
            prefault(mapping, fd)
            return cls(mapping, rows, row_bytes, fd, resources.pop_all())

    @classmethod
    def attach(cls, fd: int, rows: int, row_bytes: int) -> Self:
        """Map the region behind another region's `fd`, which the caller closes. `ConfigError` for another size."""
        rows_bytes = _rows_bytes(rows, row_bytes)
        with _undone_on_failure() as resources:
            own_fd = os.dup(fd)
            resources.callback(os.close, own_fd)
            size_bytes = os.fstat(own_fd).st_size
            if size_bytes not in (rows_bytes, rows_bytes + PAGE_BYTES):  # From `memfd`, or from `shared`.
                raise ConfigError(
                    f"{rows:,} rows of {row_bytes:,} bytes expected behind a file of {size_bytes:,} bytes"
                )
            return cls(_mapped(resources, own_fd, rows_bytes), rows, row_bytes, own_fd, resources.pop_all())

    @classmethod
    def shared(
        cls,
        path: str,
        rows: int,
        row_bytes: int,
        *,
        participant: int,
        participants: int,
        timeout_s: float = 30.0,
        met_s: float | None = None,
    ) -> Self:
        """Make or join the region that `participants` processes find by `path`, in a tmpfs such as /dev/shm.

        The path is removed when every participant (0 to `participants` - 1) has mapped it, or the last one has closed
        it; if all are killed before, by the next region made in the directory. Each start of an engine needs its own
        path. If a participant is there already, the call waits `timeout_s` for the processes of the earlier start, then
        raises `ConfigError`; at once, if sizes differ. A runner's process attaches, and is no participant.

        With `met_s`, the call waits that long for all others, and then raises `Apart`, before it takes memory. The
        process that decides what rows hold waits: otherwise it would store rows of zeros for participants on another
        host.
        """
        rows_bytes = _rows_bytes(rows, row_bytes)
        if not 0 <= participant < participants <= PARTICIPANTS_MAX:
            raise ConfigError(f"participant {participant} of {participants}: 0 to {PARTICIPANTS_MAX - 1:,} accepted")
        with _undone_on_failure() as resources:
            file = SharedFile.meet(Meeting(path, rows, row_bytes, participants, participant), timeout_s)
            resources.callback(file.leave)
            mapping = _mapped(resources, file.fd, rows_bytes)
            file.arrive()
            if met_s is not None:
                file.require_all(met_s)
            prefault(mapping, file.fd, rows_bytes // participants * participant)
            return cls(mapping, rows, row_bytes, file.fd, resources.pop_all(), file)

    @classmethod
    def over(cls, memory: memoryview, rows: int, row_bytes: int) -> Self:
        """Make a region of memory that the caller has mapped, and keeps mapped while the region is open."""
        whole = memory.cast("B")
        if whole.nbytes != _rows_bytes(rows, row_bytes):
            raise ConfigError(f"{rows:,} rows of {row_bytes:,} bytes expected in {whole.nbytes:,} bytes of memory")
        resources = ExitStack()
        resources.callback(whole.release)
        return cls(whole, rows, row_bytes, None, resources)

    @property
    def view(self) -> memoryview:
        """All rows, one after the other: writable, zero-copy, format "B"."""
        return self._view[:]  # `close` releases the region's own view, which torch would not notice.

    def row(self, index: int) -> memoryview:
        """Return one row: writable, zero-copy, format "B", on a page boundary."""
        if not 0 <= index < self.rows:  # A slice would be cut short silently.
            raise IndexError(f"row {index} of {self.rows}")
        start = index * self.row_bytes
        return self._view[start : start + self.row_bytes]

    def lend(self, index: int, size_bytes: int) -> "LentRow":
        return LentRow(index, self.row(index)[:size_bytes])

    def require_met(self) -> None:
        """Raise `Apart` unless every participant has mapped the region."""
        if self._file is not None:
            self._file.require_all(0)

    def close(self) -> None:
        """Give the memory back: now, or with its last view. Idempotent."""
        self.fd = self._file = None
        self._view.release()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LentRow:
    """A row lent through a read-only view, until no object made from the view reads it.

    A slice of a view, or numpy's array over it, still reads the row when the view is released: Python counts neither.
    So every view is of a separate object, which lives as long as anything that reads through it. The exception is a
    tensor that torch makes from the view itself: it keeps a bare address.
    """

    __slots__ = ("_read", "row", "view")

    def __init__(self, row: int, memory: memoryview) -> None:
        """`memory`: the row's, writable, because ctypes needs that."""
        read = _array_type(len(memory)).from_buffer(memory)
        self.row = row
        self.view = memoryview(read).cast("B").toreadonly()
        self._read = weakref.ref(read)

    def release(self) -> bool:
        """Release the view; return True if nothing reads the row any more. Idempotent."""
        with suppress(BufferError):  # The view itself is still exported.
            self.view.release()
        return self._read() is None


@lru_cache(maxsize=16)  # An engine's rows are equally long.
def _array_type(size_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size_bytes


def _rows_bytes(rows: int, row_bytes: int) -> int:
    if rows < 1:
        raise ConfigError(f"{rows:,} rows: at least one is needed")
    if row_bytes < PAGE_BYTES or row_bytes % PAGE_BYTES:
        raise ConfigError(f"rows of {row_bytes:,} bytes: a positive multiple of {PAGE_BYTES:,} is needed")
    return rows * row_bytes


@contextmanager
def _undone_on_failure() -> Generator[ExitStack]:
    """Collect a region's resources, and close them if making the region fails. OSError becomes ConfigError."""
    fill_standard_streams()
    try:
        with ExitStack() as resources:
            yield resources
    except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread could start.
        raise ConfigError(f"the kernel refuses host memory: {reason(error)}") from error


def _mapped(resources: ExitStack, fd: int | None, size_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1 if fd is None else fd, size_bytes, mmap.MAP_PRIVATE if fd is None else mmap.MAP_SHARED)
    resources.callback(_unmap, mapping)
    give_advice(mapping)
    return mapping


def _unmap(mapping: mmap.mmap) -> None:
    with suppress(BufferError):  # Views are left; the last one unmaps it.
        mapping.close()


def give_advice(mapping: mmap.mmap) -> None:
    """Ask for huge pages, which halve the processor time of direct I/O, and for exclusion from core dumps."""
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with suppress(OSError):  # The kernel was built without it.
            mapping.madvise(advice)


def prefault(mapping: mmap.mmap, fd: int | None, first: int = 0) -> None:
    """Allocate every page of a mapping without changing a byte; `fd` is its file, None if it is private.

    Works in slices, on several threads without the GIL. It begins with the slice that holds byte `first` and wraps
    around, so processes that share the mapping can begin in different places. Raises OSError if memory runs out.
    """
    size_bytes = len(mapping)
    starts = range(0, size_bytes, PREFAULT_SLICE_BYTES)
    turn = first // PREFAULT_SLICE_BYTES
    size, begun = f"{size_bytes / (1 << 20):,.0f} MiB", time.monotonic()
    logger.info("taking %s of host memory", size)  # 3 to 4 s a GiB, at worst.

    def fill_slice(start: int) -> None:
        length = min(PREFAULT_SLICE_BYTES, size_bytes - start)
        if not _populate(mapping, start, length):
            _touch(mapping, fd, start, length)

    with ThreadPoolExecutor(min(PREFAULT_THREADS_MAX, len(os.sched_getaffinity(0)))) as threads:
        for _ in threads.map(fill_slice, (*starts[turn:], *starts[:turn])):
            pass
    logger.info("took %s of host memory in %.1f s", size, time.monotonic() - begun)


def _populate(mapping: mmap.mmap, start: int, length: int) -> bool:
    """Allocate pages as this kernel does best; False if it is too old for that."""
    if not _libc.madvise(ctypes.addressof(ctypes.c_char.from_buffer(mapping, start)), length, _MADV_POPULATE_WRITE):
        return True
    if (code := ctypes.get_errno()) == errno.EINVAL:
        return False
    code = errno.ENOSPC if code == errno.EFAULT else code  # Instead of SIGBUS: the file system is full.
    raise OSError(code, os.strerror(code))


def _touch(mapping: mmap.mmap, fd: int | None, start: int, length: int) -> None:
    """Allocate pages on older kernels: a file's, which others may be writing, by fallocate; private ones by writing."""
    if fd is not None:
        os.posix_fallocate(fd, start, length)
        return
    for begin in range(start, start + length, _TOUCH_BYTES):
        end = min(begin + _TOUCH_BYTES, start + length)
        mapping[begin:end:PAGE_BYTES] = bytes((end - begin) // PAGE_BYTES)
