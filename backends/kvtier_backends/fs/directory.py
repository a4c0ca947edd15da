"""The directory of a tier as commands see it: every namespace in it, known only by its files.

An engine may be using it: a fault of an open file counts, and the file is removed, only if it still has its name.
"""

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Self

from xxhash import xxh3_64

from kvtier.backend import MISPLACED, NAMINGS, Finding, Kind, Naming, OffloadKey, Place, State, StoredFile, read_folder
from kvtier.errors import ConfigError
from kvtier.memory import reason
from kvtier.settings import foreign
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import ForeignError, believable_ns, lock_file, open_file, open_folder
from kvtier_backends.fs.disk.capacity import taken_bytes
from kvtier_backends.fs.disk.footer import (
    FOOTER_BYTES,
    ChunkFault,
    Footer,
    Whole,
    judge_length,
    payload_checksum,
    read_footer,
)
from kvtier_backends.fs.disk.owner import OWNER, remove_ownerless
from kvtier_backends.fs.disk.reads import write_all
from kvtier_backends.fs.disk.remains import Remains
from kvtier_backends.fs.disk.root import BOOK, CONFIG_BYTES_MAX
from kvtier_backends.fs.disk.temporaries import TemporarySweep, Writer, chunk_of_vllms, temporary_name, writer_of
from kvtier_backends.fs.files.chunk_files import take_aside
from kvtier_backends.fs.segments.segment import (
    AHEAD_SLOTS,
    HEADER_BYTES,
    ZEROS,
    Header,
    ask_ahead,
    is_later,
    punch_hole,
    read_header,
)

SLICE_BYTES = 1 << 20
DEPTH_MAX = 8  # Folders within folders, as for the scan.
CONFIG = "config.json"
BUDGET_IDLE_S = 86_400.0  # After a day the budget is whole again, and removing its file allows no more writes.
# A chunk's name by either naming, wherever it lies. vLLM's shortest hash has 8 bytes; `cafe.bin` is not ours.
_CHUNK = re.compile(r"(?:[0-9a-f]{2}){8,}(?:_g[0-9]+)?\.bin")
_OF_MODEL = re.compile(r".+_[0-9a-f]{12}", re.DOTALL)  # Beside the folders of a model's chunks, which may be gone.
_SEGMENT = re.compile(r".*/[0-9]{8}\.seg", re.DOTALL)
_SLOT = re.compile(r"(.*/[0-9]{8}\.seg)#([0-9]+)", re.DOTALL)
HEADER_FAULT = "header"  # A segment's first page is damaged: none of its chunks is found.
ROW_SEARCH_FILES_MAX = 1_000  # Files to search for the first good footer; then the directory is vLLM's.


class FilesDirectory:
    @classmethod
    def open(cls, root: str) -> Self:
        return cls(root)

    def __init__(self, root: str) -> None:
        try:
            self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{root}: {error.strerror}; a tier's directory accepted") from error
        self._writer = Writer.this_process()
        self._now_ns = time.time_ns()
        self._sweep = TemporarySweep(self._fd, self._writer, self._now_ns / 1e9, Remains(self._fd))
        self._slots = SegmentsDirectory(self._fd, self._now_ns, self._taken_bytes)
        self._row_bytes: dict[str, int | None] = {}
        try:
            names = self._listed(".")
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"{root}: {reason(error)}; a directory that can be read accepted") from error
        self._folders = {name: found for name in sorted(names) if (found := read_folder(name)) is not None}
        self._counts_blocks = all(self._tells_blocks(found.folder) for found in self._folders.values())
        names.pop(OWNER, None)
        if names and not self._folders and not any(map(_OF_MODEL.fullmatch, names)):
            os.close(self._fd)
            raise ConfigError(f"{root}: holds no chunks; the directory that a tier has as its root accepted")

    def places(self) -> list[Place]:
        return [Place(name, self._model(found.folder)) for name, found in self._folders.items()]

    def parts(self, place: Place) -> list[str]:
        try:
            below = [f"{place.name}/{name}" for name in sorted(self._listed(place.name))]
        except OSError:
            return [place.name]  # Who asks for its files is told why.
        return [*below, self._folders[place.name].folder]

    def files(self, place: Place, part: str) -> Iterator[StoredFile]:
        try:
            yield from self._files(place, part)
        except OSError as error:
            yield unreadable(part, error)

    def _files(self, place: Place, part: str) -> Iterator[StoredFile]:
        found = self._folders[place.name]
        if part == place.name:
            for below in self._listed(part):
                yield from self.files(place, f"{part}/{below}")
        elif part == found.folder:
            yield from self._beside(place, part)
        elif found.kind == "segments":
            yield from self._slots.files(part) if _SEGMENT.fullmatch(part) else self._file(_kind(part), part)
        else:
            yield from self._walk(part, len(place.name) + 1, NAMINGS[found.kind], DEPTH_MAX)

    def _beside(self, place: Place, folder: str) -> Iterator[StoredFile]:
        """Yield the files beside the chunks and their folder; files of all namespaces count for the first one."""
        yield from self._file(Kind.BESIDE, place.name)
        if place.name == next(iter(self._folders)):
            yield from self._file(Kind.BESIDE, OWNER)
        is_first = place.name == next(name for name, found in self._folders.items() if found.folder == folder)
        if is_first:
            yield from self._file(Kind.BESIDE, folder)
        for entry in self._listed(folder):
            owner = _owner(folder, entry)
            if owner == place.name or (is_first and owner not in self._folders):
                yield from self._file(_kind(entry), f"{folder}/{entry}")

    def check(self, place: Place, file: StoredFile) -> Finding:
        if _SLOT.fullmatch(file.name):
            return self._slots.check(file)
        try:
            fd = open_file(self._fd, file.name)
        except FileNotFoundError:
            return Finding(State.GONE)
        except ForeignError:  # No load would take it.
            return Finding(State.CORRUPT, ChunkFault.FOREIGN)
        except OSError as error:
            return Finding(State.UNREADABLE, reason(error))
        try:
            status = os.fstat(fd)
            if status.st_ino != file.identity:
                return Finding(State.GONE)
            finding = self._judge(place, file, fd, status.st_size)
            counts = finding.state is not State.CORRUPT or self._is_still(file, status)
            return finding if counts else Finding(State.GONE)
        except OSError as error:
            return Finding(State.UNREADABLE, reason(error))
        finally:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # A look at everything must not push out what is used.
            os.close(fd)

    def remove(self, file: StoredFile) -> int | None:
        if _SLOT.fullmatch(file.name) or _SEGMENT.fullmatch(file.name):
            return self._slots.remove(file)
        folder = os.path.dirname(file.name)
        aside = os.path.join(folder, temporary_name(self._writer))
        try:
            status = below.look(self._fd, file.name)
            if status.st_ino != file.identity or not take_aside(self._fd, file.name, status, aside):
                return None
            below.unlink(self._fd, aside)
        except FileNotFoundError:
            return None
        with suppress(OSError):  # Mostly: it holds others. A tier that finds its folder missing makes it again.
            while folder.count("/"):
                below.rmdir(self._fd, folder)
                folder = os.path.dirname(folder)
        return self._taken_bytes(status)

    def clear(self, place: Place) -> bool:
        self._slots.close()
        try:
            fd = open_folder(self._fd, place.name)
        except OSError:
            return False  # It is gone, or not ours.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_empty(place.name, DEPTH_MAX)
        except OSError:  # An engine uses it, something is left in it, or there is no telling.
            return False
        finally:
            os.close(fd)
        with suppress(OSError):  # Other programs' files beside it stay.
            self._clear_beside(place)
        return True

    def _clear_beside(self, place: Place) -> None:
        """Remove a namespace's books, then what none of its model needs, then the owner's file. Raises `OSError`."""
        folder = self._folders[place.name].folder
        for entry in self._listed(folder):
            is_own = _owner(folder, entry) == place.name
            if is_own and not (entry.startswith("write-budget") and self._is_used(f"{folder}/{entry}")):
                below.unlink(self._fd, f"{folder}/{entry}")
        others = [name for name in self._listed(".") if (found := read_folder(name)) and found.folder == folder]
        beside = set(self._listed(folder))
        if not others and beside <= {CONFIG}:
            if CONFIG in beside:
                below.unlink(self._fd, f"{folder}/{CONFIG}")
            below.rmdir(self._fd, folder)
        if set(self._listed(".")) == {OWNER}:
            remove_ownerless(self._fd)

    def _remove_empty(self, folder: str, depth: int) -> None:
        """Remove a folder in which there are only folders, to the bottom. Raises `OSError` for any other."""
        if depth:
            for entry in self._listed(folder):
                self._remove_empty(f"{folder}/{entry}", depth - 1)
        below.rmdir(self._fd, folder)

    def _is_used(self, name: str) -> bool:
        return self._now_ns / 1e9 - below.look(self._fd, name).st_mtime <= BUDGET_IDLE_S

    def close(self) -> None:
        self._slots.close()
        os.close(self._fd)

    def _taken_bytes(self, status: os.stat_result) -> int:
        return taken_bytes(status, counts_blocks=self._counts_blocks)

    def _tells_blocks(self, folder: str) -> bool:
        with suppress(OSError):
            return below.look(self._fd, f"{folder}/config.json").st_blocks > 0
        return True

    def _model(self, folder: str) -> str:
        try:
            with open(open_file(self._fd, f"{folder}/config.json"), "rb") as file:
                name = foreign(json.loads, file.read(CONFIG_BYTES_MAX))["model_name"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return name if isinstance(name, str) else ""

    def _listed(self, name: str) -> dict[str, bool]:
        """Return a folder's names, and whether each is a folder; nothing if it is gone, or none."""
        try:
            fd = open_folder(self._fd, name)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except ForeignError as error:
            if error.errno != errno.ELOOP:
                return {}  # A file beside the folders of chunks.
            raise
        try:
            with os.scandir(fd) as entries:
                return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        finally:
            os.close(fd)

    def _walk(self, folder: str, skip: int, naming: Naming, depth: int) -> Iterator[StoredFile]:
        """Yield the chunks and temporaries below a folder; `skip`: characters before the name within the namespace."""
        try:
            listed = self._listed(folder)
        except OSError as error:
            yield unreadable(folder, error)
            return
        if not listed:
            yield from self._plain(folder, skip, naming)  # A file, or a folder with nothing in it.
            return
        yield from self._file(Kind.BESIDE, folder)
        for entry, is_folder in listed.items():
            name = f"{folder}/{entry}"
            if is_folder:
                if depth:
                    yield from self._walk(name, skip, naming, depth - 1)
            else:
                yield from self._plain(name, skip, naming)

    def _plain(self, name: str, skip: int, naming: Naming) -> Iterator[StoredFile]:
        entry = os.path.basename(name)
        if (key := naming.key(name[skip:])) is not None:
            yield from self._file(Kind.CHUNK, name, key)
        elif _CHUNK.fullmatch(entry):
            yield from self._file(Kind.CHUNK, name)
        elif naming.key(chunk_of_vllms(name[skip:])) is not None:
            yield from self._file(Kind.TEMPORARY, name)
        else:
            yield from self._file(_kind(entry), name)

    def _file(self, kind: Kind, name: str, key: OffloadKey | None = None) -> Iterator[StoredFile]:
        try:
            status = below.look(self._fd, name)
        except FileNotFoundError:
            return
        except OSError as error:
            yield unreadable(name, error)
            return
        if stat.S_ISDIR(status.st_mode):
            kind, key = Kind.BESIDE, None
        if kind is Kind.TEMPORARY and self._sweep.is_abandoned(os.path.basename(name), status.st_mtime):
            kind = Kind.LEFTOVER
        fault = ""
        if kind is Kind.CHUNK and not (key is not None and stat.S_ISREG(status.st_mode)):
            fault = MISPLACED if key is None else ChunkFault.FOREIGN.value
        used_at_ns = believable_ns(status.st_mtime_ns, self._now_ns)
        yield StoredFile(kind, name, key, status.st_size, self._taken_bytes(status), used_at_ns, status.st_ino, fault)

    def _is_still(self, file: StoredFile, before: os.stat_result) -> bool:
        with suppress(FileNotFoundError, NotADirectoryError, ForeignError):
            now = below.look(self._fd, file.name)
            return os.path.samestat(now, before) and now.st_mtime_ns == before.st_mtime_ns
        return False

    def _judge(self, place: Place, file: StoredFile, fd: int, size_bytes: int) -> Finding:
        footer, fault = _footer_at_end(fd, size_bytes), ""
        if isinstance(footer, ChunkFault):
            return self._judge_without_footer(place, footer, size_bytes)
        if (whole := judge_length(size_bytes, footer.payload_bytes)) is not Whole.FOOTED:
            fault = whole.value
        if footer.key != file.key:
            fault = ChunkFault.SWAPPED
        return _finding(footer, fault, lambda: _checksum(fd, footer.payload_bytes))

    def _judge_without_footer(self, place: Place, fault: ChunkFault, size_bytes: int) -> Finding:
        """Tell vLLM's files, which end with their rows, from damaged ones by the length of the rows of others."""
        if fault is ChunkFault.VERSION:
            return Finding(State.UNVERIFIED)
        if (row_bytes := self._rows_of(place)) is None:
            whole = bool(size_bytes) and size_bytes % FOOTER_BYTES == 0
            return Finding(State.UNVERIFIED) if whole else Finding(State.CORRUPT, ChunkFault.TRUNCATED)
        match judge_length(size_bytes, row_bytes):
            case Whole.BARE:
                return Finding(State.UNVERIFIED)
            case Whole.FOOTED:
                return Finding(State.CORRUPT, fault)
            case length:
                return Finding(State.CORRUPT, length)

    def _rows_of(self, place: Place) -> int | None:
        if place.name not in self._row_bytes:
            chunks = (file for part in self.parts(place) for file in self.files(place, part) if file.key is not None)
            searched = (self._row_of(file.name) for file in islice(chunks, ROW_SEARCH_FILES_MAX))
            self._row_bytes[place.name] = next((row_bytes for row_bytes in searched if row_bytes), None)
        return self._row_bytes[place.name]

    def _row_of(self, name: str) -> int | None:
        with suppress(OSError):
            fd = open_file(self._fd, name)
            try:
                size_bytes = os.fstat(fd).st_size
                footer = _footer_at_end(fd, size_bytes)
            finally:
                os.close(fd)
            if isinstance(footer, Footer) and judge_length(size_bytes, footer.payload_bytes) is Whole.FOOTED:
                return footer.payload_bytes
        return None


def _owner(folder: str, entry: str) -> str | None:
    """Return the namespace that a book belongs to alone; None for what no namespace or all of a model have."""
    book = BOOK.fullmatch(entry)
    return f"{folder}{book[1]}" if book and book[1] else None


def _kind(name: str) -> Kind:
    """Tell files that a tier is writing from others that are no chunks, which may be another program's."""
    return Kind.BESIDE if writer_of(os.path.basename(name)) is None else Kind.TEMPORARY


def _footer_at_end(fd: int, size_bytes: int) -> Footer | ChunkFault:
    page = os.pread(fd, FOOTER_BYTES, max(0, size_bytes - FOOTER_BYTES))
    return read_footer(memoryview(page)) if len(page) == FOOTER_BYTES else ChunkFault.TRUNCATED


def _checksum(fd: int, payload_bytes: int) -> int:
    total, at = xxh3_64(), 0
    while at < payload_bytes and (piece := os.pread(fd, min(SLICE_BYTES, payload_bytes - at), at)):
        total.update(piece)
        at += len(piece)
    return total.intdigest()


def unreadable(name: str, error: OSError) -> StoredFile:
    return StoredFile(Kind.UNREADABLE, name, None, 0, 0, 0, 0, reason(error))


class SegmentsDirectory:
    """Segments as commands see them: each slot with a footer is a chunk, named by its segment and place.

    Nothing is removed where an engine writes. A slot's identity is its sequence number. Blocks; one thread at a time.
    """

    def __init__(self, root_fd: int, now_ns: int, taken_bytes: Callable[[os.stat_result], int]) -> None:
        """Use an open root; no chunk counts as used after `now_ns`. `taken_bytes`: returns the room of a file there."""
        self._taken_bytes = taken_bytes
        self._now_ns = now_ns
        self._root_fd = root_fd
        self._open: tuple[str, int, bool] | None = None  # The segment looked at last, and whether it was locked.
        self._empty_below = 0  # In that segment, while it is locked.

    def close(self) -> None:
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
        if (header := _header(fd)) is None:
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
        name, place = _split(file.name)
        try:
            fd = self._opened(name)
            if (header := _header(fd)) is None:
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
        """Wipe a slot, or remove an empty or foreign segment; return the freed bytes. `BlockingIOError` if in use."""
        try:
            return self._wipe(file, *_split(file.name)) if _SLOT.fullmatch(file.name) else self._remove_whole(file)
        except FileNotFoundError:
            return None
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, "an engine is writing to it; run this again afterwards") from error

    def _wipe(self, file: StoredFile, name: str, place: int) -> int | None:
        fd = self._opened(name, locked=True)
        if (header := _header(fd)) is None:
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
        fault = HEADER_FAULT if status.st_size and not is_later(os.pread(fd, HEADER_BYTES, 0)) else ""
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
    return (footer.payload_bytes, footer.fingerprint) == (header.row_bytes, header.fingerprint)


def _judge(slot: memoryview, header: Header, identity: int) -> Finding:
    if len(slot) < header.slot_bytes:
        return Finding(State.CORRUPT, ChunkFault.TRUNCATED)
    page = slot[header.row_bytes :]
    if _identity(bytes(page)) != identity:
        return Finding(State.GONE)
    footer = read_footer(page)
    if isinstance(footer, ChunkFault):
        return Finding(State.UNVERIFIED) if footer is ChunkFault.VERSION else Finding(State.CORRUPT, footer)
    fault = "" if _is_of(footer, header) else ChunkFault.NAMESPACE
    return _finding(footer, fault, lambda: payload_checksum(slot[: header.row_bytes]))


def _finding(footer: Footer, fault: str, checksum: Callable[[], int]) -> Finding:
    """Return the state of a chunk with this footer, and perhaps a fault, by its payload's checksum."""
    if not fault and checksum() != footer.payload_checksum:
        fault = ChunkFault.PAYLOAD
    return Finding(State.CORRUPT, fault) if fault else Finding(State.SEALED if footer.seal else State.WHOLE)
