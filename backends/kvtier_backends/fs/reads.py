"""How a lane reads: several reads under way at once where the kernel can do that, else one after the other.

A lane that verifies one chunk while the next ones come keeps the disk's queue full, and goes to the kernel (and, each
time, back to the interpreter's lock) twice for many chunks instead of once for each.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

from kvtier_backends.fs.aio import Context

PLACES = 32  # As many as a lane is sent chunks in one hop; the system has 65,536 for all its processes.
LEAST = 2  # Under way at once: one to wait for, and one to go on with.
START = 4  # Started in one call: the disk begins with these while the next files are opened.

# Contexts that no lane uses. They are the process's, and kept: the kernel takes 30 ms to end one.
_idle: deque[Context] = deque()
os.register_at_fork(after_in_child=_idle.clear)  # They stay the parent's.


class Wanted(NamedTuple):
    """One read: what goes where, and who is told."""

    fd: int
    buffers: Sequence[memoryview]
    offset: int
    size_bytes: int
    done: Callable[[int | OSError], None]  # Called once, with the bytes that came: fewer are an end, or worth a retry.


class Reads(Protocol):
    """What a lane does its reads with."""

    @property
    def queue_bytes(self) -> int:
        """About how much is under way at once; 0: one read."""
        ...

    def __call__(self, wanted: Iterable[Wanted]) -> None:
        """Do the reads, which are asked for as there is room, and tell what became of each, in any order.

        Blocks. When it returns or raises, none is under way.
        """
        ...


class PlainReads:
    """See `Reads`. Any number of threads may call."""

    queue_bytes = 0

    def __call__(self, wanted: Iterable[Wanted]) -> None:
        for read in wanted:
            read.done(_read(read))


ONE_BY_ONE = PlainReads()


class QueuedReads:
    """See `Reads`. Any number of threads may call."""

    def __init__(self, queue_bytes: int) -> None:
        """Have about so many bytes under way in each thread; reads that are longer are done one by one."""
        self.queue_bytes = queue_bytes

    def __call__(self, wanted: Iterable[Wanted]) -> None:
        reads = iter(wanted)
        first = list(islice(reads, LEAST))
        worth_it = len(first) == LEAST and first[0].size_bytes < self.queue_bytes
        context = _borrow() if worth_it else None
        if context is None:
            ONE_BY_ONE(chain(first, reads))
        else:
            _Queue(context, self.queue_bytes).run(chain(first, reads))
            _idle.append(context)  # After a failure it is not: nobody knows what is in it.


class _Queue:
    """The reads of one call."""

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
        """Return how many reads to start now."""
        count = len(self._under_way)
        if count < LEAST:
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


def takes_queued(fd: int, page: memoryview) -> bool:
    """Say whether reads of a file can be queued, by a read of its first page. Raises OSError if it cannot be read."""
    length, context = os.preadv(fd, [page], 0), _borrow()
    if context is None:
        return False
    expected = bytes(page)
    page[:] = bytes(len(page))
    context.prepare(0, fd, [page], 0)
    try:
        context.start([0])
    except OSError:
        return False
    ended = context.wait(1)
    _idle.append(context)
    return ended == [(0, length)] and bytes(page) == expected


def _read(read: Wanted) -> int | OSError:
    try:
        return os.preadv(read.fd, read.buffers, read.offset)
    except OSError as error:
        return error.with_traceback(None)  # It would keep the frame, and with it the lent buffers.


def _borrow() -> Context | None:
    try:
        return _idle.pop()
    except IndexError:
        pass
    try:
        return Context(PLACES)
    except OSError:
        return None  # None of this system, or no more of them.
