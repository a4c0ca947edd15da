"""Linux AIO: direct reads that the kernel goes on with while the thread that asked for them does something else.

System calls by number, since libaio is not everywhere. Not io_uring, which containers refuse as a rule: it was as fast.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

BUFFERS_MAX = 64  # Of one read.


class _Numbers(NamedTuple):
    setup: int
    submit: int
    getevents: int


_NUMBERS = {"x86_64": _Numbers(206, 209, 208), "aarch64": _Numbers(0, 2, 4)}  # Of 64-bit programs.

# struct iocb and struct io_event of linux/aio_abi.h, struct iovec.
_IOCB = struct.Struct("=QQHhiQQqQQ")
_EVENT = struct.Struct("=QQqq")
_IOVEC = struct.Struct("=QQ")
_PREADV = 7

# A foreign call lets go of the GIL, and of a blocked thread nobody else hears.
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall_with_lock = ctypes.PyDLL(None, use_errno=True).syscall  # For what never blocks.
_syscall_with_lock.restype = ctypes.c_long
_AT_ONCE = (ctypes.c_long * 2)(0, 0)  # A time to wait: struct timespec.


class Context:
    """Reads under way of one thread, each in a place of its own. It ends with the process.

    The kernel writes to a read's buffers until `wait` has returned its place, whatever else happens.
    """

    def __init__(self, places: int) -> None:
        """Have room for so many reads; raises OSError if the kernel has none, or no such thing."""
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self.places = places
        self._submit, self._getevents = ctypes.c_long(numbers.submit), ctypes.c_long(numbers.getevents)
        self._iocbs = (ctypes.c_char * (places * _IOCB.size))()
        self._iovecs = (ctypes.c_char * (places * BUFFERS_MAX * _IOVEC.size))()
        self._events = (ctypes.c_char * (places * _EVENT.size))()
        self._pointers = (ctypes.c_uint64 * places)()
        self._iocbs_at, self._iovecs_at = ctypes.addressof(self._iocbs), ctypes.addressof(self._iovecs)
        self._id = ctypes.c_ulong(0)
        _checked(_syscall(ctypes.c_long(numbers.setup), ctypes.c_long(places), ctypes.byref(self._id)))

    def prepare(self, place: int, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write down a read of at most `BUFFERS_MAX` writable buffers, to be started in a free place."""
        assert len(buffers) <= BUFFERS_MAX, len(buffers)
        first = place * BUFFERS_MAX
        for index, buffer in enumerate(buffers, first):
            at = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            _IOVEC.pack_into(self._iovecs, index * _IOVEC.size, at, len(buffer))
        iovecs_at = self._iovecs_at + first * _IOVEC.size
        _IOCB.pack_into(
            self._iocbs, place * _IOCB.size, place, 0, _PREADV, 0, fd, iovecs_at, len(buffers), offset, 0, 0
        )

    def start(self, places: Sequence[int]) -> int:
        """Start reads that were prepared; return how many of them, from the first on, the kernel has taken.

        Raises OSError if it takes none.
        """
        for index, place in enumerate(places):
            self._pointers[index] = self._iocbs_at + place * _IOCB.size
        return _checked(_syscall(self._submit, self._id, ctypes.c_long(len(places)), self._pointers))

    def wait(self, under_way: int) -> list[tuple[int, int]]:
        """Wait until one has ended; return the places of all that have, with the bytes read, or a negative errno.

        `under_way`: how many are.
        """
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
