"""Remains: files and folders that should be gone and may still take room. Each counts until it is proved to be gone.

A disk that errs may have done what it reports as failed, and may report a file as missing that is there. So an error
proves nothing. Proof is a removal that succeeds, or a listing of the folder without the name.
"""

import ctypes
import errno
import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from kvtier.errors import LineLimit, Remedy
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import ForeignError, with_folder

logger = logging.getLogger(__name__)

PAUSE_S_LEAST = 0.1  # Before removals are tried again; twice as long after each round without success,
PAUSE_S_MOST = 10.0  # up to this.
NAMES_MAX = 65_536  # Ten megabytes. Further ones keep their room, and are left to the next start.
CALLS_MAX = 8  # A file may be removed and stored again between a call and the listing, but not for ever.

T = TypeVar("T")

_LISTING_BYTES = 32 << 10
_ENTRY = struct.Struct("=QqHB")  # Of struct linux_dirent64; its name follows.
_getdents = getattr(ctypes.CDLL(None, use_errno=True), "getdents64", None)


def is_absent(root_fd: int, name: str) -> bool:
    """Return True if a listing proves that a name is not there; tried again before it raises `listed`'s OSError."""
    folder, _, last = name.rpartition("/")
    for _ in range(CALLS_MAX):
        try:
            return last not in with_folder(root_fd, folder or ".", names_in)
        except (ForeignError, NotADirectoryError):
            return True  # Something else lies in the place of its folder.
        except FileNotFoundError:
            if is_absent(root_fd, folder) if folder else os.fstat(root_fd).st_nlink == 0:
                return True
    raise listed(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder or "."))


def names_in(fd: int) -> set[str]:
    """Return the names in an open folder. `os.listdir` takes ENOENT for the end, and would leave out the rest."""
    if _getdents is None:
        return set(os.listdir(fd))
    names, buffer = set[str](), ctypes.create_string_buffer(_LISTING_BYTES)
    os.lseek(fd, 0, os.SEEK_SET)
    while (length := _getdents(fd, buffer, _LISTING_BYTES)) > 0:
        at = 0
        while at < length:
            _, _, entry_bytes, _ = _ENTRY.unpack_from(buffer, at)
            names.add(os.fsdecode(buffer.raw[at + _ENTRY.size : at + entry_bytes].split(b"\0", 1)[0]))
            at += entry_bytes
    if length < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.lseek(fd, 0, os.SEEK_SET)
    return names - {".", ".."}


def remove_file(root_fd: int, name: str) -> bool:
    """Remove a file; False if it may not have been there. Raises OSError if it may be there still."""

    def unlink() -> bool:
        below.unlink(root_fd, name)
        return True

    try:
        return called(unlink, root_fd, name) is not None
    except (NotADirectoryError, ForeignError):
        return False
    except OSError:
        if not is_absent(root_fd, name):
            raise
        return False


def remove_folder(root_fd: int, name: str) -> bool:
    """Remove an empty folder; False if it is proved absent. Raises OSError if it may be there still."""
    try:
        below.rmdir(root_fd, name)
    except OSError:
        if not is_absent(root_fd, name):
            raise
        return False
    return True


def called(call: Callable[[], T], root_fd: int, name: str) -> T | None:
    """Return the result of a call on a name; None if the name is proved absent. Raises any error of the call.

    Another file may come between call and listing: so it is tried again, before it raises the OSError of `listed`.
    """
    for _ in range(CALLS_MAX):
        with suppress(FileNotFoundError):
            return call()
        if is_absent(root_fd, name):
            return None
    raise listed(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name))


def listed(error: OSError) -> OSError:
    """Return an error that does not pass for a missing file: its folder lists it."""
    if error.errno != errno.ENOENT:
        return error
    return OSError(errno.EIO, "reported as missing, and listed in its folder")


class Remain(NamedTuple):
    taken_bytes: int  # At most.
    remove: Callable[[], object]  # Raises OSError if it may be there still.


class Remains:
    """The remains below one root. Any thread may call; what removes blocks."""

    def __init__(self, root_fd: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.used_bytes = 0
        self._root_fd = root_fd
        self._names: dict[str, Remain] = {}
        self._lock = threading.Lock()
        self._failed = 0
        self._lines = LineLimit(clock_s)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def remove(self, name: str, taken_bytes: int, remove: Callable[[], object] | None = None) -> bool:
        """Remove a file that takes no more than this, or count it until that succeeds; return True if it is gone."""
        remove = remove or partial(remove_file, self._root_fd, name)
        try:
            remove()
        except OSError as error:
            with self._lock:
                before = self._names.pop(name, None)
                self.used_bytes += taken_bytes - (before.taken_bytes if before else 0)
                self._failed += before is None
                if len(self._names) < NAMES_MAX:
                    self._names[name] = Remain(taken_bytes, remove)
            self._log(name, error)
            return False
        return True

    def take_failed(self) -> int:
        with self._lock:
            failed, self._failed = self._failed, 0
        return failed

    def again(self) -> int:
        """Try all of them again; return the bytes that this has freed."""
        freed_bytes = 0
        for name, remain in list(self._names.items()):
            try:
                remain.remove()
            except OSError as error:
                self._log(name, error)
                continue
            with self._lock:
                if self._names.get(name) is remain:
                    del self._names[name]
                    self.used_bytes -= remain.taken_bytes
                    freed_bytes += remain.taken_bytes
        return freed_bytes

    def _log(self, name: str, error: OSError) -> None:
        if self._lines.allows():
            logger.warning(
                "%s: cannot be removed: %s; %d such files and folders of %.1f MB count as used, and are tried again; "
                "see %s",
                *(name, error.strerror, max(1, len(self._names)), self.used_bytes / 1e6),
                Remedy.IRREMOVABLE,
            )


class Beside:
    """The room of a tier's files beside its chunks, as it was last measured."""

    def __init__(self, measure: Callable[[], int]) -> None:
        """Count nothing until the first look. `measure` returns all of it, or raises OSError."""
        self.used_bytes = 0
        self._measure = measure
        self._lock = threading.Lock()  # Or an older measure would replace a newer one.

    def look(self, added_bytes: int = 0) -> None:
        """Measure it. Blocks; if that raises OSError, `added_bytes` count until the next look."""
        with self._lock:
            try:
                self.used_bytes = self._measure()
            except OSError:
                self.used_bytes += added_bytes
                raise
