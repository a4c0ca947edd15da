"""The directory of a tier as people's commands see it: every namespace in it, with nothing known but what lies there.

An engine may be using it. A chunk is published by a rename, and a file of 0.1.0 that is overwritten has lost its name
before: so what is wrong with an open file counts only if its name is still its own, and only then is it removed.
"""

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Self

from xxhash import xxh3_64

from kvtier.backend import NAMINGS, Finding, Kind, Naming, OffloadKey, Place, State, StoredFile, read_folder
from kvtier.errors import ConfigError
from kvtier_backends.fs.directory.slots import SlotContents, is_segment, is_slot, reason, unreadable
from kvtier_backends.fs.disk.below import ForeignError, believable_ns, open_file, open_folder
from kvtier_backends.fs.disk.capacity import taken_bytes
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, Fault, Footer, Whole, judge_length, read_footer
from kvtier_backends.fs.disk.root import CONFIG_BYTES_MAX, QUARANTINE
from kvtier_backends.fs.disk.temporaries import SUFFIX, Sweep, Writer, temporary_name
from kvtier_backends.fs.files.discard import take_aside
from kvtier_backends.fs.options import FsOptions

SLICE_BYTES = 1 << 20
DEPTH_MAX = 8  # Folders within folders, as for the scan.
ROW_SEARCH_FILES_MAX = 1_000  # A directory with so many files before the first good footer is vLLM's.


class FsContents:
    """A root and the namespaces in it."""

    lanes = 1

    @classmethod
    def open(cls, root: str) -> Self:
        return cls(root)

    @classmethod
    def configured(cls, options: FsOptions) -> Self:
        return cls(options.root)

    def __init__(self, root: str) -> None:
        try:
            self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{root}: {error.strerror}; a tier's directory accepted") from error
        self._writer = Writer.this_process()
        self._now_ns = time.time_ns()
        self._sweep = Sweep(self._fd, self._writer, self._now_ns / 1e9)
        self._slots = SlotContents(self._fd, self._now_ns, self._taken_bytes)
        self._row_bytes: dict[str, int | None] = {}
        try:
            names = self._listed(".")
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(f"{root}: {reason(error)}; a directory that can be read accepted") from error
        self._folders = {name: found for name in sorted(names) if (found := read_folder(name)) is not None}
        self._counts_blocks = all(self._tells_blocks(found.folder) for found in self._folders.values())
        if names and not self._folders:
            os.close(self._fd)
            raise ConfigError(f"{root}: holds no chunks; the directory that a tier has as its root accepted")

    def places(self) -> list[Place]:
        return [Place(name, self._model(found.folder)) for name, found in self._folders.items()]

    def parts(self, place: Place) -> list[str]:
        try:
            below = [f"{place.name}/{name}" for name in sorted(self._listed(place.name))]
        except OSError:
            return [place.name]  # Who asks for its files is told why.
        shared = f"{self._folders[place.name].folder}/{QUARANTINE}"
        first = next(name for name, found in self._folders.items() if found.folder == self._folders[place.name].folder)
        return [*below, shared] if place.name == first else below

    def files(self, place: Place, part: str) -> Iterator[StoredFile]:
        try:
            yield from self._files(place, part)
        except OSError as error:
            yield unreadable(part, error)

    def _files(self, place: Place, part: str) -> Iterator[StoredFile]:
        kind = self._folders[place.name].kind
        if part == place.name:
            for below in self._listed(part):
                yield from self.files(place, f"{part}/{below}")
        elif part.endswith(f"/{QUARANTINE}"):
            for entry in self._listed(part):
                yield from self._file(Kind.LEFTOVER, f"{part}/{entry}")
        elif kind == "segments":
            yield from self._slots.files(part) if is_segment(part) else self._file(Kind.TEMPORARY, part)
        else:
            yield from self._walk(part, len(place.name) + 1, NAMINGS[kind], DEPTH_MAX)

    def check(self, place: Place, file: StoredFile) -> Finding:
        if is_slot(file.name):
            return self._slots.check(file)
        try:
            fd = open_file(self._fd, file.name)
        except FileNotFoundError:
            return Finding(State.GONE)
        except ForeignError:  # No load would take it.
            return Finding(State.CORRUPT, Fault.FOREIGN)
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

    def remove(self, file: StoredFile) -> bool:
        if is_slot(file.name) or is_segment(file.name):
            return self._slots.remove(file)
        folder = os.path.dirname(file.name)
        aside = f"{folder}/{temporary_name(self._writer)}"
        try:
            status = os.stat(file.name, dir_fd=self._fd, follow_symlinks=False)
            if status.st_ino != file.identity or not take_aside(self._fd, file.name, status, aside):
                return False
            os.unlink(aside, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        with suppress(OSError):  # Mostly: it holds others. A tier that finds its folder missing makes it again.
            while folder.count("/"):
                os.rmdir(folder, dir_fd=self._fd)
                folder = os.path.dirname(folder)
        return True

    def close(self) -> None:
        self._slots.close()
        os.close(self._fd)

    def _taken_bytes(self, status: os.stat_result) -> int:
        return taken_bytes(status, counts_blocks=self._counts_blocks)

    def _tells_blocks(self, folder: str) -> bool:
        """Say whether blocks are told there, by a file that has some."""
        with suppress(OSError):
            return os.stat(f"{folder}/config.json", dir_fd=self._fd).st_blocks > 0
        return True

    def _model(self, folder: str) -> str:
        try:
            with open(open_file(self._fd, f"{folder}/config.json"), "rb") as file:
                return str(json.loads(file.read(CONFIG_BYTES_MAX))["model_name"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

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
        for entry, is_folder in listed.items():
            name = f"{folder}/{entry}"
            if is_folder:
                if depth:
                    yield from self._walk(name, skip, naming, depth - 1)
            elif (key := naming.key(name[skip:])) is not None:
                yield from self._file(Kind.CHUNK, name, key)
            elif entry.endswith(SUFFIX):
                yield from self._file(Kind.TEMPORARY, name)

    def _file(self, kind: Kind, name: str, key: OffloadKey | None = None) -> Iterator[StoredFile]:
        """Yield the file, unless it is gone by now."""
        try:
            status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError as error:
            yield unreadable(name, error)
            return
        if kind is Kind.TEMPORARY and self._sweep.is_abandoned(os.path.basename(name), status.st_mtime):
            kind = Kind.LEFTOVER
        used_at_ns = believable_ns(status.st_mtime_ns, self._now_ns)
        yield StoredFile(kind, name, key, status.st_size, self._taken_bytes(status), used_at_ns, status.st_ino)

    def _is_still(self, file: StoredFile, before: os.stat_result) -> bool:
        """Say whether nobody has written into a file or renamed it since: version 0.1.0 does both to those that go."""
        with suppress(FileNotFoundError, NotADirectoryError):
            now = os.stat(file.name, dir_fd=self._fd, follow_symlinks=False)
            return os.path.samestat(now, before) and now.st_mtime_ns == before.st_mtime_ns
        return False

    def _judge(self, place: Place, file: StoredFile, fd: int, size_bytes: int) -> Finding:
        footer = _footer_at_end(fd, size_bytes)
        if footer is Fault.VERSION:
            return Finding(State.UNVERIFIED)
        if isinstance(footer, Fault):
            return self._judge_without_footer(place, footer, size_bytes)
        if footer.key != file.key:
            return Finding(State.CORRUPT, Fault.SWAPPED)
        if (whole := judge_length(size_bytes, footer.payload_bytes)) is not Whole.FOOTED:
            return Finding(State.CORRUPT, whole.value)
        if _checksum(fd, footer.payload_bytes) != footer.payload_checksum:
            return Finding(State.CORRUPT, Fault.PAYLOAD)
        return Finding(State.SEALED if footer.seal else State.WHOLE)

    def _judge_without_footer(self, place: Place, fault: Fault, size_bytes: int) -> Finding:
        """Tell vLLM's files, which end with their rows, from damaged ones by the length of the rows of others."""
        row_bytes = self._rows_of(place)
        if row_bytes is None:
            whole = bool(size_bytes) and size_bytes % FOOTER_BYTES == 0
            return Finding(State.UNVERIFIED) if whole else Finding(State.CORRUPT, Fault.TRUNCATED)
        match judge_length(size_bytes, row_bytes):
            case Whole.BARE:
                return Finding(State.UNVERIFIED)
            case Whole.FOOTED:
                return Finding(State.CORRUPT, fault)
            case length:
                return Finding(State.CORRUPT, length)

    def _rows_of(self, place: Place) -> int | None:
        """Return how long a namespace's rows are, by the first good footer; None if there is none to be found."""
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


def _footer_at_end(fd: int, size_bytes: int) -> Footer | Fault:
    """Read a file's last page; what is shorter than one has no footer."""
    page = os.pread(fd, FOOTER_BYTES, max(0, size_bytes - FOOTER_BYTES))
    return read_footer(memoryview(page)) if len(page) == FOOTER_BYTES else Fault.TRUNCATED


def _checksum(fd: int, payload_bytes: int) -> int:
    total, at = xxh3_64(), 0
    while at < payload_bytes and (piece := os.pread(fd, min(SLICE_BYTES, payload_bytes - at), at)):
        total.update(piece)
        at += len(piece)
    return total.intdigest()
