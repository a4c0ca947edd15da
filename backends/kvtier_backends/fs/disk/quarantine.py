"""The quarantine folder: some corrupt files, set aside for people to look at while there is room.

Corrupt files serve no request. So when room is needed they go before chunks, the oldest first.
"""

import os
import threading
from contextlib import suppress
from typing import NamedTuple

from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import list_folder, open_folder
from kvtier_backends.fs.disk.capacity import Disk
from kvtier_backends.fs.disk.temporaries import is_kept

FILES_MAX = 100  # Enough to study what happened; a disk of corrupt files must not stay full of them.
FOLDER_BYTES = 32 << 10  # By which their names may make the folder grow: 150 bytes each, in blocks that are half full.


class Cleared(NamedTuple):
    """The files that were removed."""

    files: int
    freed_bytes: int


class Quarantine:
    """A folder of such files in an open root. Any thread may call."""

    def __init__(self, root_fd: int, name: str, disk: Disk, *, keeps: bool) -> None:
        """See what is there from before. `keeps`: whether more may come. Blocks."""
        self.name = name
        self._root = root_fd
        self._disk = disk
        self._keeps = keeps
        self._lock = threading.Lock()
        try:
            self._files = sum(map(is_kept, list_folder(root_fd, name)))
        except OSError:
            self._files = 0  # There is none, or none to look into.
        self._admitted = 0

    @property
    def used_bytes(self) -> int:
        """The room by which the folder may grow. It counts from the start, so growing asks for no room."""
        return max(FOLDER_BYTES, 2 * self._disk.block_bytes) if self._keeps else 0

    @property
    def empty(self) -> bool:
        """Whether it held nothing when it was last looked at, and nothing came since."""
        return not self._files

    def admit(self) -> bool:
        """Say whether one more may be kept, and count it."""
        with self._lock:
            admits = self._keeps and self._files < FILES_MAX
            self._files += admits
            self._admitted += admits
        return admits

    def clear(self, wanted_bytes: int) -> Cleared:
        """Remove files, the oldest first, until so much has gone or none is left. Blocks; raises nothing."""
        admitted = self._admitted
        try:
            fd = open_folder(self._root, self.name)
        except OSError:
            found, cleared = 0, Cleared(0, 0)  # There is none, or none of ours.
        else:
            try:
                found, cleared = _cleared(fd, self._disk, wanted_bytes)
            finally:
                os.close(fd)
        with self._lock:
            known = self._files if self._admitted > admitted else found  # People tidy up, too.
            self._files = max(0, known - cleared.files)
        return cleared


def _cleared(fd: int, disk: Disk, wanted_bytes: int) -> tuple[int, Cleared]:
    """Remove files of a folder, the oldest first; return how many there were, and what has gone."""
    found, cleared = list[tuple[int, str, int]](), Cleared(0, 0)
    for entry in filter(is_kept, os.listdir(fd)):
        with suppress(OSError):  # Another process has removed it.
            status = below.look(fd, entry)
            found.append((status.st_ctime_ns, entry, disk.taken_bytes(status)))  # When it came here: moving sets it.
    for _, entry, freed_bytes in sorted(found):
        if cleared.freed_bytes >= wanted_bytes:
            break
        with suppress(OSError):  # As above, or it cannot be: then chunks go.
            below.unlink(fd, entry)
            cleared = Cleared(cleared.files + 1, cleared.freed_bytes + freed_bytes)
    return len(found), cleared
