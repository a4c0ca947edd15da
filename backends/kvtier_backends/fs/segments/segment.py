"""A segment's file: its slots are read, written and wiped here. Other modules decide which.

Everything blocks, and any thread may call. A failure raises the `OSError` of the system call.

The first page says how long slots are, how many there are, and what their bytes mean. Little-endian: magic 8, version
u32, zero u32, row length u64, slots u64, namespace fingerprint 32, zeros up to byte 4,088, XXH3-64 of all bytes before
it. Slots follow, each a row and its footer.
"""

import ctypes
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.memory import PAGE_BYTES, let_go_in_forks
from kvtier_backends.fs.disk.below import open_file, unlock_file
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, is_signed, signed
from kvtier_backends.fs.disk.reads import read_all, write_all

HEADER_BYTES = PAGE_BYTES
MAGIC = b"\x89kvtseg\n"
VERSION = 1
ZEROS = bytes(FOOTER_BYTES)  # The footer of a free slot.
WIPED = memoryview(mmap.mmap(-1, FOOTER_BYTES))  # Aligned zeros; never written to.
SEGMENT_BYTES_MOST = 8 << 30  # All slots; 10 TiB are then some 1,300 open files.
AHEAD_SLOTS = 256  # Footers that are asked for before the first of them is read.

_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)

_HEAD = struct.Struct("<8sIIQQ32s")


class Header(NamedTuple):
    """The first page of a segment."""

    row_bytes: int
    slots: int
    fingerprint: bytes  # 32 bytes.

    @property
    def slot_bytes(self) -> int:
        return self.row_bytes + FOOTER_BYTES

    @property
    def file_bytes(self) -> int:
        return self.offset(self.slots)

    def offset(self, place: int) -> int:
        return HEADER_BYTES + place * self.slot_bytes

    def footer_offset(self, place: int) -> int:
        return self.offset(place) + self.row_bytes

    def written(self) -> bytes:
        return signed(_HEAD.pack(MAGIC, VERSION, 0, self.row_bytes, self.slots, self.fingerprint))


def read_header(page: bytes) -> Header | None:
    """Read a segment's first page; None if it is damaged, of another version or longer than a segment."""
    if not is_signed(page, MAGIC, VERSION):
        return None
    _, _, _, row_bytes, slots, fingerprint = _HEAD.unpack_from(page)
    header = Header(row_bytes, slots, fingerprint)
    whole = slots and row_bytes and not row_bytes % PAGE_BYTES
    return header if whole and header.file_bytes <= HEADER_BYTES + SEGMENT_BYTES_MOST else None


def is_later(page: bytes) -> bool:
    return page[:8] == MAGIC and int.from_bytes(page[8:12], "little") > VERSION


@dataclass(eq=False, slots=True, weakref_slot=True)
class Segment:
    """One open file of slots."""

    name: str  # Within the root.
    fd: int
    header: Header
    own: bool  # False: another process writes it.
    allocated_bytes: int  # The most that it takes on the disk.
    first_slot: int = 0  # Its first slot's number among all of the tier's.
    closed: bool = False

    def __post_init__(self) -> None:
        let_go_in_forks(self)

    def forked(self) -> None:
        """Close it in a child: the lock stays its owner's."""
        if not self.closed:
            self.closed = True
            os.close(self.fd)

    def footers(self, root_fd: int, first: int, count: int) -> Iterator[memoryview]:
        """Yield the footers of `count` slots that no store has: each is valid until the next."""
        fd = open_file(root_fd, self.name)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            page = memoryview(bytearray(FOOTER_BYTES))
            for start in range(first, first + count, AHEAD_SLOTS):
                places = range(start, min(start + AHEAD_SLOTS, first + count))
                ask_ahead(fd, self.header, places)
                for place in places:
                    read_all(fd, [page], self.header.footer_offset(place))
                    yield page
        finally:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def wipe(self, place: int) -> None:
        write_all(self.fd, [WIPED], self.header.footer_offset(place))

    def close(self) -> None:
        """Let go of it and of its lock; idempotent. No thread may be using it: its number would be another file's."""
        if not self.closed:
            with suppress(OSError):
                unlock_file(self.fd)  # A fork that has the descriptor, too, would keep the lock.
            with suppress(OSError):
                self.forked()


class OpenSegments:
    """The segments that one catalog has open. Any thread may call."""

    def __init__(self, row_bytes: int, fingerprint: bytes) -> None:
        self._row_bytes, self._fingerprint = row_bytes, fingerprint
        self._opened: set[Segment] = set()  # Also those that only a lane knows yet.

    def header(self, slots: int) -> Header:
        return Header(self._row_bytes, slots, self._fingerprint)

    def _taken(self, segment: Segment) -> Segment:
        self._opened.add(segment)
        return segment

    def close(self, segment: Segment) -> None:
        segment.close()
        self._opened.discard(segment)

    def close_all(self) -> None:
        """Let go of every segment that is open; idempotent. No thread may be using one, or opening or making one."""
        for segment in list(self._opened):
            self.close(segment)


class Segments:
    """The tier's segments by the numbers of their slots. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._first_slots: list[int] = []

    @property
    def used_bytes(self) -> int:
        return sum(segment.allocated_bytes for segment in self.all)

    def add(self, segment: Segment, first_slot: int) -> None:
        segment.first_slot = first_slot
        self.all.append(segment)
        self._first_slots.append(first_slot)

    def remove(self, segment: Segment) -> None:
        index = self.all.index(segment)
        del self.all[index]
        del self._first_slots[index]

    def of(self, slot: int) -> Segment:
        return self.all[bisect_right(self._first_slots, slot) - 1]


def punch_hole(fd: int, offset: int, size_bytes: int) -> None:
    """Give the room of these bytes back: they are zeros then. Raises OSError where the file system has no holes."""
    if _fallocate(fd, _PUNCH_HOLE, offset, size_bytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync(segments: Iterable[Segment]) -> None:
    for segment in segments:
        os.fdatasync(segment.fd)


def ask_ahead(fd: int, header: Header, places: Sequence[int]) -> None:
    for place in places:
        os.posix_fadvise(fd, header.footer_offset(place), FOOTER_BYTES, os.POSIX_FADV_WILLNEED)
