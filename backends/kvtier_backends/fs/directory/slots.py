"""Segments as commands see them: each slot with a footer is a chunk, named by its segment and place.

An engine that writes to a segment holds its lock. Commands still read such a segment, because all bytes are verified.
They remove nothing in it. A slot's identity is its sequence number, which no later chunk there has.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from kvtier.backend import Finding, Kind, State, StoredFile
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import believable_ns, lock_file, open_file
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, ChunkFault, Footer, payload_checksum, read_footer
from kvtier_backends.fs.segments.segment import (
    AHEAD_SLOTS,
    HEADER_BYTES,
    ZEROS,
    Header,
    ask_ahead,
    is_later,
    punch_hole,
    read_header,
    write_all,
)

_SEGMENT = re.compile(r".*/[0-9]{8}\.seg", re.DOTALL)
_SLOT = re.compile(r"(.*/[0-9]{8}\.seg)#([0-9]+)", re.DOTALL)
HEADER_FAULT = "header"  # A segment's first page is damaged: none of its chunks is found.


def is_segment(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None


def is_slot(name: str) -> bool:
    return _SLOT.fullmatch(name) is not None


def unreadable(name: str, error: OSError) -> StoredFile:
    """Return the entry of a file or folder that cannot be read."""
    return StoredFile(Kind.UNREADABLE, name, None, 0, 0, 0, 0, reason(error))


def reason(error: OSError) -> str:
    return error.strerror or str(error)


class SegmentsDirectory:
    """The segments of a root. Blocks; one thread at a time."""

    def __init__(self, root_fd: int, now_ns: int, taken_bytes: Callable[[os.stat_result], int]) -> None:
        """Use an open root; no chunk counts as used after `now_ns`. `taken_bytes`: returns the room of a file there."""
        self._taken_bytes = taken_bytes
        self._now_ns = now_ns
        self._root_fd = root_fd
        self._open: tuple[str, int, bool] | None = None  # The segment looked at last, and whether it was locked.
        self._empty_below = 0  # In that segment, while it is locked.

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def files(self, name: str) -> Iterator[StoredFile]:
        """Yield a segment's chunks, and slots beyond its end. A file that is no segment is one leftover."""
        try:
            fd = self._opened(name)
        except FileNotFoundError:
            return
        except OSError as error:
            yield unreadable(name, error)
            return
        header = _header(fd)
        if header is None:
            yield self._leftover(name, fd)
            return
        taken_bytes = self._taken_bytes(os.fstat(fd))
        for start in range(0, header.slots, AHEAD_SLOTS):
            fd = self._opened(name)  # What was done with the last chunk may have opened another.
            places = range(start, min(start + AHEAD_SLOTS, header.slots))
            ask_ahead(fd, header, places)
            for place in places:
                for file in self._slot(name, self._opened(name), header, place):
                    taken_bytes -= file.allocated_bytes
                    yield file
        rest_bytes = max(0, taken_bytes)  # Compressed, it takes less than its chunks.
        yield StoredFile(Kind.BESIDE, name, None, rest_bytes, rest_bytes, 0, 0)

    def check(self, file: StoredFile) -> Finding:
        """See `Directory`."""
        name, place = _split(file.name)
        try:
            fd = self._opened(name)
            header = _header(fd)
            if header is None:
                return Finding(State.GONE)
            slot = _slot_at(fd, header, place)
            finding = _judge(memoryview(slot), header, file.identity)
            if finding.state is State.CORRUPT and _slot_at(fd, header, place) != slot:
                return Finding(State.GONE)  # An engine is just writing another chunk there.
        except FileNotFoundError:
            return Finding(State.GONE)
        except OSError as error:
            return Finding(State.UNREADABLE, reason(error))
        return finding

    def remove(self, file: StoredFile) -> int | None:
        """Wipe a slot and give its room back; remove a segment in which nothing is left, and what is no segment.

        Returns the bytes that the file system has got back: 0 for a slot where it has no holes. Raises
        `BlockingIOError` if an engine is writing to it.
        """
        try:
            return self._wipe(file, *_split(file.name)) if is_slot(file.name) else self._remove_whole(file)
        except FileNotFoundError:
            return None
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno, "an engine is writing to it; run this again when that has ended"
            ) from error

    def _wipe(self, file: StoredFile, name: str, place: int) -> int | None:
        fd = self._opened(name, locked=True)
        header = _header(fd)
        if header is None:
            return None
        at = header.footer_offset(place)
        if _identity(os.pread(fd, FOOTER_BYTES, at)) != file.identity:
            return None
        taken_bytes = self._taken_bytes(os.fstat(fd))
        write_all(fd, [memoryview(ZEROS)], at)
        if self._is_empty(fd, header):
            below.unlink(self._root_fd, name)
            return taken_bytes
        with suppress(OSError):  # A file system without holes: the next chunk there takes the same room.
            punch_hole(fd, header.offset(place), header.slot_bytes)
        return max(0, taken_bytes - self._taken_bytes(os.fstat(fd)))

    def _remove_whole(self, file: StoredFile) -> int | None:
        fd = self._opened(file.name, locked=True)
        status = os.fstat(fd)
        if status.st_ino != file.identity or _header(fd) is not None:
            return None
        below.unlink(self._root_fd, file.name)
        return self._taken_bytes(status)

    def _slot(self, name: str, fd: int, header: Header, place: int) -> Iterator[StoredFile]:
        slot = f"{name}#{place}"
        try:
            page = os.pread(fd, FOOTER_BYTES, header.footer_offset(place))
        except OSError as error:
            yield unreadable(slot, error)
            return
        if page == ZEROS:
            return
        if len(page) < FOOTER_BYTES:
            yield StoredFile(Kind.LOST, slot, None, 0, 0, 0, _identity(page), ChunkFault.TRUNCATED)
            return
        footer = read_footer(memoryview(page))
        key, used_at_ns = (
            (None, 0) if isinstance(footer, ChunkFault) else (footer.key, believable_ns(footer.sequence, self._now_ns))
        )
        fault = "" if isinstance(footer, ChunkFault) or _is_of(footer, header) else ChunkFault.NAMESPACE.value
        size_bytes = header.slot_bytes
        yield StoredFile(Kind.CHUNK, slot, key, size_bytes, size_bytes, used_at_ns, _identity(page), fault)

    def _leftover(self, name: str, fd: int) -> StoredFile:
        """Return a segment without a first page that can be read; an empty one is only being made."""
        status = os.fstat(fd)
        is_damaged = status.st_size and not is_later(os.pread(fd, HEADER_BYTES, 0))
        fault = HEADER_FAULT if is_damaged else ""
        taken, used_at_ns = self._taken_bytes(status), believable_ns(status.st_mtime_ns, self._now_ns)
        return StoredFile(Kind.LEFTOVER, name, None, status.st_size, taken, used_at_ns, status.st_ino, fault)

    def _is_empty(self, fd: int, header: Header) -> bool:
        for place in range(self._empty_below, header.slots):
            if place % AHEAD_SLOTS == 0:
                ask_ahead(fd, header, range(place, min(place + AHEAD_SLOTS, header.slots)))
            if os.pread(fd, FOOTER_BYTES, header.footer_offset(place)) != ZEROS:
                self._empty_below = place  # Nobody else writes: next time, it is looked for from here.
                return False
        return True

    def _opened(self, name: str, *, locked: bool = False) -> int:
        """Return a descriptor of a segment, its own until another is asked for."""
        if self._open is not None and self._open[0] == name and self._open[2] >= locked:
            return self._open[1]
        self.close()
        fd = open_file(self._root_fd, name, os.O_RDWR if locked else os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            if locked:
                lock_file(fd)
                if not os.fstat(fd).st_nlink:  # Removed just before, and its name may be another one's by now.
                    raise FileNotFoundError(name)
        except BaseException:
            os.close(fd)
            raise
        self._open, self._empty_below = (name, fd, locked), 0
        return fd


def _split(name: str) -> tuple[str, int]:
    match = _SLOT.fullmatch(name)
    assert match is not None, name
    return match[1], int(match[2])


def _header(fd: int) -> Header | None:
    return read_header(os.pread(fd, HEADER_BYTES, 0))


def _slot_at(fd: int, header: Header, place: int) -> bytes:
    slot = os.pread(fd, header.slot_bytes, header.offset(place))
    os.posix_fadvise(fd, header.offset(place), header.slot_bytes, os.POSIX_FADV_DONTNEED)
    return slot


def _identity(page: bytes) -> int:
    """Return a footer's identity, which no later one has: its sequence number, or a checksum if it is no footer."""
    footer = read_footer(memoryview(page)) if len(page) == FOOTER_BYTES else ChunkFault.TRUNCATED
    return payload_checksum(memoryview(page)) if isinstance(footer, ChunkFault) else footer.sequence


def _is_of(footer: Footer, header: Header) -> bool:
    """Return True if a chunk is of its segment's namespace and row length."""
    return (footer.payload_bytes, footer.fingerprint) == (header.row_bytes, header.fingerprint)


def _judge(slot: memoryview, header: Header, identity: int) -> Finding:
    if len(slot) < header.slot_bytes:
        return Finding(State.CORRUPT, ChunkFault.TRUNCATED)
    page = slot[header.row_bytes :]
    if _identity(bytes(page)) != identity:
        return Finding(State.GONE)
    footer = read_footer(page)
    if footer is ChunkFault.VERSION:
        return Finding(State.UNVERIFIED)
    if isinstance(footer, ChunkFault):
        return Finding(State.CORRUPT, footer)
    if not _is_of(footer, header):
        return Finding(State.CORRUPT, ChunkFault.NAMESPACE)
    if payload_checksum(slot[: header.row_bytes]) != footer.payload_checksum:
        return Finding(State.CORRUPT, ChunkFault.PAYLOAD)
    return Finding(State.SEALED if footer.seal else State.WHOLE)
