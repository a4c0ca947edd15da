"""The page that processes share: how much their directory holds, and how much each has promised to its stores.

There is no server. A byte-range lock guards the page for the microseconds of one change. A process holds the lock of
its slot for as long as it lives. The kernel, or the file server, lets go of both when the process dies. Room that a
dead process had promised counts as written until the next count of the directory. So the limit holds.

A file server that was away for longer than its leases has let go of the locks. A process that comes back takes a new
slot, as if it had died, and keeps its promises. On a network no process is woken when a lock is free: each polls.

A page that is damaged, or older than one that was seen before, is begun again. Then nothing is known until the
directory has been counted. No room is promised until every live process has repeated its promises.

The page: magic 8, version u32, flags u32, boot 8, used u64, added u64, removed u64, 64 slots of 8, when it was begun
u64, its generation u64, a bit for each slot whose promises are still to be repeated u64, zeros, XXH3-64 of all before.
Little-endian.
"""

import errno
import fcntl
import logging
import os
import random
import struct
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.errors import BackendUnavailable, Remedy
from kvtier.memory import PAGE_BYTES, let_go_in_forks
from kvtier_backends.fs.disk.below import open_file
from kvtier_backends.fs.disk.footer import is_signed, signed

logger = logging.getLogger(__name__)

SLOTS = 64  # Processes on one directory. Each costs eight bytes, and a microsecond a count.
MAGIC = b"\x89kvledg\n"
VERSION = 1
KNOWN = 1  # Flag: the directory has been counted.
# Between two attempts at a lock that another process has: for microseconds, or over a network for milliseconds.
PAUSE_S_LEAST, PAUSE_S_MOST = 50e-6, 0.01  # A kernel that waits for a file server would sleep for 1 s.

_HEAD = struct.Struct("<8sII8sQQQ")
_SLOTS = struct.Struct(f"<{SLOTS}Q")
_LIFE = struct.Struct("<QQQ")
_FLOCK = struct.Struct("hhqqi0q")  # struct flock of fcntl(2).

# Locked bytes lie behind the page, where no data is.
_PAGE_LOCK = PAGE_BYTES
_EVICTION_LOCK = PAGE_BYTES + 1
_SLOT_LOCKS = PAGE_BYTES + 2


class Count(NamedTuple):
    """The state of the page when a count of the directory began."""

    begun_ns: int
    added_bytes: int
    removed_bytes: int


@dataclass(slots=True)
class Page:
    """The content of the page, while it is locked; as it is made, nothing is known."""

    begun_ns: int = 0  # When it was last begun; no two lives of a page have the same.
    generation: int = 0  # How often it was written since then.
    untold: int = 0  # A bit for each slot whose process has not said since then what it has promised.
    known: bool = False
    boot: bytes = bytes(8)
    used_bytes: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0
    reserved_bytes: list[int] = field(default_factory=lambda: [0] * SLOTS)


class SharedPage:
    """One process's hold on the page. Blocks for as long as others change it; any thread may call.

    Every call raises `BackendUnavailable` if the page is away, and may have changed it. The next opens the file again.
    """

    def __init__(self, root_fd: int, name: str, boot: bytes) -> None:
        """Open the file and take a slot; `boot`: 8 bytes that tell this boot of this machine from others.

        Raises `BackendUnavailable` if all slots are taken, and `OSError` where there are no such locks.
        """
        self._root_fd, self._name, self._boot = root_fd, name, boot
        self._slot = -1
        self._lost_at_s: float | None = None  # When a call failed, and none has succeeded since.
        self._seen = 0, 0  # The last seen beginning and generation of the page.
        self._promised_bytes = 0  # As our slot says, whatever has become of the page.
        self.promised_to_others = False  # Whether others had room promised when we last asked for some.
        self._threads = threading.Lock()
        self._evictors = threading.Lock()
        self._fd = open_file(root_fd, name, os.O_RDWR | os.O_CREAT)
        try:
            self._settle_in()
        except BaseException:
            os.close(self._fd)
            raise
        let_go_in_forks(self)

    def forked(self) -> None:
        """Close the file in a child: the locks end with their owner."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Give up the slot; promises that were not taken back count as written. Idempotent."""
        with self._threads:
            self.forked()

    def reserve(self, wanted_bytes: int, limit_bytes: int) -> int | None:
        """Promise as much of that as fits into the limit, and return how much it was; None: used bytes are unknown."""
        with self._page() as page:
            if not self._is_sure(page):
                return None
            self.promised_to_others = sum(page.reserved_bytes) > page.reserved_bytes[self._slot]
            granted_bytes = max(0, min(wanted_bytes, limit_bytes - page.used_bytes - sum(page.reserved_bytes)))
            page.reserved_bytes[self._slot] += granted_bytes
            return granted_bytes

    def exchange(self, gone_bytes: int, wanted_bytes: int) -> int:
        """Count the evicted bytes, and promise as many of the wanted ones to the call that evicted."""
        with self._page() as page:
            _count(page, -gone_bytes)
            granted_bytes = min(gone_bytes, wanted_bytes)
            page.reserved_bytes[self._slot] += granted_bytes
            return granted_bytes

    def settle(self, reserved_bytes: int, added_bytes: int) -> None:
        """Take a promise back, and count the added bytes; below 0 if more has gone than come."""
        with self._page() as page:
            page.reserved_bytes[self._slot] -= reserved_bytes
            _count(page, added_bytes)

    def taken(self) -> tuple[int, int] | None:
        """Return the used and the promised bytes; None: they are unknown."""
        with self._page() as page:
            return (page.used_bytes, sum(page.reserved_bytes)) if self._is_sure(page) else None

    def begin_count(self) -> Count:
        """Return the page's totals before the directory is scanned. The scan sees the files of dead processes."""
        with self._page() as page:
            self._reap(page)
            return Count(page.begun_ns, page.added_bytes, page.removed_bytes)

    def end_count(self, began: Count, seen_bytes: int) -> None:
        """Correct the used bytes by the scan's and the changes since, unless the page was begun again meanwhile."""
        with self._page() as page:
            if page.begun_ns != began.begun_ns:
                return
            most = seen_bytes + page.added_bytes - began.added_bytes
            least = seen_bytes - (page.removed_bytes - began.removed_bytes) - sum(page.reserved_bytes)
            page.used_bytes = min(max(page.used_bytes, least), most) if page.known else most
            page.known = True

    @contextmanager
    def evicting(self) -> Generator[None]:
        with self._evictors:
            try:
                _lock(self._fd, fcntl.F_WRLCK, _EVICTION_LOCK)
            except OSError as error:
                raise self._away(error) from error
            try:
                yield
            finally:
                with suppress(OSError):  # As below.
                    _lock(self._fd, fcntl.F_UNLCK, _EVICTION_LOCK)

    @contextmanager
    def _page(self) -> Generator[Page]:
        """Lock the page, and write it back if nothing was raised."""
        begun_s = time.monotonic()
        with self._threads:
            try:
                if self._lost_at_s is not None:
                    self._open_again(begun_s)
                with self._locked() as page:
                    yield page
            except OSError as error:
                raise self._away(error) from error

    @contextmanager
    def _locked(self) -> Generator[Page]:
        _lock(self._fd, fcntl.F_WRLCK, _PAGE_LOCK)
        try:
            if not os.fstat(self._fd).st_nlink:  # Removed: a process that starts now has another.
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            page = self._current(read_page(os.pread(self._fd, PAGE_BYTES, 0)))
            yield page
            page.generation += 1
            os.pwrite(self._fd, _written(page), 0)
            self._seen, self._promised_bytes = (page.begun_ns, page.generation), page.reserved_bytes[self._slot]
        finally:
            with suppress(OSError):  # With the descriptor gone, so is the lock.
                _lock(self._fd, fcntl.F_UNLCK, _PAGE_LOCK)

    def _settle_in(self) -> None:
        """Take a slot. The dead process's promises count as written, and so do ours. We go on with our own."""
        self._slot = -1
        with self._locked() as page:
            self._slot = self._take_slot()
            alone = not any(self._is_alive(slot) for slot in range(SLOTS) if slot != self._slot)
            if alone and page.boot != self._boot:  # Since then the machine may have lost what it had not written.
                page.known = False
            page.boot = self._boot
            self._reap(page)
            page.used_bytes += page.reserved_bytes[self._slot]
            page.reserved_bytes[self._slot] = self._promised_bytes
            page.untold &= ~(1 << self._slot)

    def _open_again(self, begun_s: float) -> None:
        """Open the file under its number again: another thread may be waiting for a lock on it.

        A call that has waited behind one that failed since `begun_s` fails with it, without a time-out of its own.
        """
        if self._fd < 0 or (self._lost_at_s or 0.0) > begun_s:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fd = open_file(self._root_fd, self._name, os.O_RDWR | os.O_CREAT)
        try:
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)
        self._settle_in()
        self._lost_at_s = None
        logger.info("%s: the shared page is there again", self._name)

    def _away(self, error: OSError) -> BackendUnavailable:
        if self._fd >= 0:
            if self._lost_at_s is None:
                logger.warning(
                    "%s: the shared page is away, and nothing is stored until it is back: %s; see %s",
                    self._name,
                    error,
                    Remedy.SHARED_PAGE,
                )
            self._lost_at_s = time.monotonic()
        return BackendUnavailable(f"{self._name}: the shared page is away: {error.strerror}")

    def _current(self, page: Page | None) -> Page:
        """Return the page, or a new one if there is none, or if it is older than one that was seen."""
        if page is None or (page.begun_ns and (page.begun_ns, page.generation) < self._seen):
            page = Page(begun_ns=max(time.time_ns(), self._seen[0] + 1), untold=(1 << SLOTS) - 1)
        if self._slot >= 0:
            page.reserved_bytes[self._slot] = self._promised_bytes
            page.untold &= ~(1 << self._slot)
        return page

    def _is_sure(self, page: Page) -> bool:
        """Return True if the used bytes and the promises of all live processes are known."""
        if page.untold:
            self._reap(page)
        return page.known and not page.untold

    def _take_slot(self) -> int:
        for slot in range(SLOTS):
            with suppress(BlockingIOError):
                _lock(self._fd, fcntl.F_WRLCK, _SLOT_LOCKS + slot, wait=False)
                return slot
        raise BackendUnavailable(f"{SLOTS} processes share the directory already")

    def _is_alive(self, slot: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _SLOT_LOCKS + slot, 1, 0)
        told = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(told)[0] != fcntl.F_UNLCK)

    def _reap(self, page: Page) -> None:
        for slot, reserved_bytes in enumerate(page.reserved_bytes):
            if (reserved_bytes or page.untold >> slot & 1) and slot != self._slot and not self._is_alive(slot):
                _count(page, reserved_bytes)
                page.reserved_bytes[slot] = 0
                page.untold &= ~(1 << slot)


def _lock(fd: int, kind: int, at: int, *, wait: bool = True) -> None:
    """Lock or unlock one byte for this open file: the kernel lets go of it when the last descriptor is closed."""
    wanted, pause_s = _FLOCK.pack(kind, os.SEEK_SET, at, 1, 0), PAUSE_S_LEAST
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            if not wait:
                raise
        else:
            return
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # Or those who have met once would meet again.
        pause_s = min(2 * pause_s, PAUSE_S_MOST)


def _count(page: Page, added_bytes: int) -> None:
    page.used_bytes = max(0, page.used_bytes + added_bytes)
    if added_bytes >= 0:
        page.added_bytes += added_bytes
    else:
        page.removed_bytes -= added_bytes


def read_page(content: bytes) -> Page | None:
    """Read a page; None if it is new, damaged or of another version."""
    if not is_signed(content, MAGIC, VERSION):
        return None
    _, _, flags, boot, used, added, removed = _HEAD.unpack_from(content)
    reserved_bytes = list(_SLOTS.unpack_from(content, _HEAD.size))
    begun_ns, generation, untold = _LIFE.unpack_from(content, _HEAD.size + _SLOTS.size)
    return Page(begun_ns, generation, untold, bool(flags & KNOWN), boot, used, added, removed, reserved_bytes)


def _written(page: Page) -> bytes:
    flags = KNOWN if page.known else 0
    head = _HEAD.pack(MAGIC, VERSION, flags, page.boot, page.used_bytes, page.added_bytes, page.removed_bytes)
    return signed(head + _SLOTS.pack(*page.reserved_bytes) + _LIFE.pack(page.begun_ns, page.generation, page.untold))
