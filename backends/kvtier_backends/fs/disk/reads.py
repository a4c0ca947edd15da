"""A lane's reads: several in flight at once if the kernel can do that, otherwise one after the other.

A lane verifies one chunk while the next come: the disk's queue stays full, two kernel calls serve many chunks.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple

BUFFERS_MAX = 64  # Of one read.
PLACES = 32  # As many as a lane is sent chunks at once; the system has 65,536 for all its processes.
QUEUE_BYTES = 8 << 20  # What a lane has in flight at once. Longer chunks are read one by one.
LEAST = 2  # Under way at once: one to wait for, and one to go on with.
START = 4  # Started in one call: the disk begins with these while the next files are opened.


_NUMBERS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}  # Of io_setup, io_submit, io_getevents in 64 bits.

# struct iocb and struct io_event of linux/aio_abi.h, struct iovec.
_IOCB = struct.Struct("=QQHhiQQqQQ")
_EVENT = struct.Struct("=QQqq")
_IOVEC = struct.Struct("=QQ")
_PREADV = 7

# A ctypes call releases the GIL, so a blocked thread blocks no other.
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall_with_lock = ctypes.PyDLL(None, use_errno=True).syscall  # For what never blocks.
_syscall_with_lock.restype = ctypes.c_long
_AT_ONCE = (ctypes.c_long * 2)(0, 0)  # A time to wait: struct timespec.


class Context:
    """Linux AIO by system calls (libaio is not everywhere, containers refuse io_uring): one thread's direct reads.

    Each has its place; the kernel writes to its buffers until `wait` has returned that, whatever else happens.
    """

    def __init__(self, places: int) -> None:
        """Make `places` for reads; raises OSError if the kernel has no more, or no Linux AIO."""
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self.places = places
        setup, self._submit, self._getevents = map(ctypes.c_long, numbers)
        self._iocbs = (ctypes.c_char * (places * _IOCB.size))()
        self._iovecs = (ctypes.c_char * (places * BUFFERS_MAX * _IOVEC.size))()
        self._events = (ctypes.c_char * (places * _EVENT.size))()
        self._pointers = (ctypes.c_uint64 * places)()
        self._iocbs_at, self._iovecs_at = ctypes.addressof(self._iocbs), ctypes.addressof(self._iovecs)
        self._id = ctypes.c_ulong(0)
        _checked(_syscall(setup, ctypes.c_long(places), ctypes.byref(self._id)))

    def prepare(self, place: int, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write down a read of at most `BUFFERS_MAX` writable buffers, to be started in a free place."""
        assert len(buffers) <= BUFFERS_MAX, len(buffers)
        first = place * BUFFERS_MAX
        for index, buffer in enumerate(buffers, first):
            at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            _IOVEC.pack_into(self._iovecs, index * _IOVEC.size, at, len(buffer))
        first_at = self._iovecs_at + first * _IOVEC.size
        _IOCB.pack_into(self._iocbs, place * _IOCB.size, place, 0, _PREADV, 0, fd, first_at, len(buffers), offset, 0, 0)

    def start(self, places: Sequence[int]) -> int:
        """Start prepared reads; return how many of the first the kernel has taken. Raises OSError if it takes none."""
        for index, place in enumerate(places):
            self._pointers[index] = self._iocbs_at + place * _IOCB.size
        return _checked(_syscall(self._submit, self._id, ctypes.c_long(len(places)), self._pointers))

    def wait(self, under_way: int) -> list[tuple[int, int]]:
        """Wait until one has ended; return the places of all that have, with the bytes read or a negative errno."""
        ended = self._ended(_syscall, 1)
        while not ended:  # A signal.
            ended = self._ended(_syscall, 1)
        if len(ended) < under_way:
            ended += self._ended(_syscall_with_lock, 0)  # While this thread waited for the lock, others have ended.
        return ended

    def _ended(self, syscall: Callable[..., int], least: int) -> list[tuple[int, int]]:
        try:
            count = _checked(
                syscall(
                    self._getevents,
                    self._id,
                    ctypes.c_long(least),
                    ctypes.c_long(self.places),
                    self._events,
                    None if least else _AT_ONCE,
                )
            )
        except InterruptedError:
            return []
        events = (_EVENT.unpack_from(self._events, index * _EVENT.size) for index in range(count))
        return [(place, result) for place, _, result, _ in events]


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


# Contexts that no lane uses. They are the process's, and kept: the kernel takes 30 ms to end one.
_idle: deque[Context] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # They stay the parent's.


class Wanted(NamedTuple):
    fd: int
    buffers: Sequence[memoryview]
    offset: int
    size_bytes: int
    done: Callable[[int | OSError], None]  # Called once, with the bytes that came: fewer are an end, or worth a retry.


def part_of(buffers: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return these bytes of the buffers as if they were one."""
    pieces: list[memoryview] = []
    for buffer in buffers:
        if piece := buffer[max(0, start) : max(0, end)]:
            pieces.append(piece)
        start, end = start - len(buffer), end - len(buffer)
    return pieces


def read_on(fd: int, buffers: Sequence[memoryview], done: int) -> int:
    """Fill the rest of the buffers, of which `done` bytes are read; return how many came: all of the file that fits."""
    end = min(os.fstat(fd).st_size, sum(map(len, buffers)))
    while done < end and (more := os.preadv(fd, part_of(buffers, done, end), done)):
        done += more
    return done


def read_all(fd: int, buffers: Sequence[memoryview], offset: int, done: int = 0) -> None:
    """Fill the buffers from `offset`, of which `done` bytes are read; a shorter file is an error."""
    total = sum(map(len, buffers))
    while done < total:
        if (read := os.preadv(fd, part_of(buffers, done, total) if done else buffers, offset + done)) == 0:
            raise OSError(errno.EIO, f"{done} of {total} bytes and then the file's end")
        done += read


def write_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    total, done = sum(map(len, buffers)), 0
    while done < total:
        if (wrote := os.pwritev(fd, part_of(buffers, done, total) if done else buffers, offset + done)) == 0:
            raise OSError(errno.EIO, f"wrote {done} of {total} bytes and then none")
        done += wrote


class Reads:
    """A way in which a lane reads. Any number of threads may call."""

    def __init__(self, queue_bytes: int) -> None:
        """Keep about `queue_bytes` in flight in each thread; reads that are as long or longer are done one by one."""
        self.queue_bytes = queue_bytes

    def __call__(self, wanted: Iterable[Wanted]) -> None:
        """Do the reads, asked for as there is room, and report each, in any order. Blocks; none outlasts the call."""
        reads = iter(wanted)
        first = list(islice(reads, LEAST if self.queue_bytes else 0))
        context = _borrow() if len(first) == LEAST and first[0].size_bytes < self.queue_bytes else None
        if context is None:
            for read in chain(first, reads):
                read.done(_read(read))
        else:
            _Queue(context, self.queue_bytes).run(chain(first, reads))
            _idle.append(context)  # Not after a failure: reads may still be in it.


ONE_BY_ONE = Reads(0)


class _Queue:
    def __init__(self, context: Context, queue_bytes: int) -> None:
        self._context = context
        self._queue_bytes = queue_bytes
        self._free = list(range(context.places))
        self._under_way: dict[int, Wanted] = {}
        self._bytes = 0  # Under way.

    def run(self, wanted: Iterator[Wanted]) -> None:
        try:
            self._start(wanted)
            while self._under_way:
                ended = self._wait()
                self._start(wanted)  # First: the disk goes on while what came is looked at.
                for read, result in ended:
                    read.done(result)
        finally:
            while self._under_way:  # Buffers are lent no longer than the call.
                self._wait()

    def _start(self, wanted: Iterator[Wanted]) -> None:
        while reads := list(islice(wanted, self._room())):
            places = [self._free.pop() for _ in reads]
            for place, read in zip(places, reads, strict=True):
                self._context.prepare(place, read.fd, read.buffers, read.offset)
            try:
                started = self._context.start(places)
            except OSError:
                started = 0
            for place, read in zip(places[:started], reads, strict=False):
                self._under_way[place] = read
                self._bytes += read.size_bytes
            self._free += places[started:]
            for read in reads[started:]:  # Whatever the kernel has against them: a plain read does it, or says.
                read.done(_read(read))

    def _room(self) -> int:
        if (count := len(self._under_way)) < LEAST:
            return LEAST - count
        return min(START, len(self._free)) if self._bytes < self._queue_bytes else 0

    def _wait(self) -> list[tuple[Wanted, int | OSError]]:
        ended: list[tuple[Wanted, int | OSError]] = []
        for place, result in self._context.wait(len(self._under_way)):
            read = self._under_way.pop(place)
            self._bytes -= read.size_bytes
            self._free.append(place)
            ended.append((read, result if result >= 0 else OSError(-result, os.strerror(-result))))
        return ended


def has_queue() -> bool:
    if (context := _borrow()) is not None:
        _idle.append(context)
    return context is not None


def _read(read: Wanted) -> int | OSError:
    try:
        return os.preadv(read.fd, read.buffers, read.offset)
    except OSError as error:
        return error.with_traceback(None)  # It would keep the frame, and with it the lent buffers.


def _borrow() -> Context | None:
    with suppress(IndexError):
        return _idle.pop()
    try:
        return Context(PLACES)
    except OSError:
        return None  # None of this system, or no more of them.
