"""Corrupt files: each is deleted. A good file that has replaced it meanwhile stays.

No system call removes a name on the condition that it is still a certain file. So the file is renamed aside and looked
at there. If it is another file than was read, it is put back, unless a newer one has come. For a moment its chunk is
missing, but no chunk is lost.
"""

import logging
import os
from contextlib import suppress
from enum import Enum

from kvtier.errors import Remedy
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.footer import ChunkFault
from kvtier_backends.fs.disk.remains import is_absent
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import temporary_name

logger = logging.getLogger(__name__)


class Discarded(Enum):
    """What happened to a corrupt file."""

    DELETED = "deleted"
    REPLACED = "replaced"  # A newer file has its name, and stays.
    LEFT = "left"  # It could not be renamed.


class Discard:
    """Discards files of one folder. Blocks; any thread may call."""

    def __init__(self, folder: Folder) -> None:
        """Discard in an opened folder."""
        self._root = folder.root_fd
        self._disk = folder.disk
        self._writer = folder.writer
        self._remains = folder.remains
        self._warned: set[ChunkFault] = set()

    def __call__(self, name: str, fd: int, fault: ChunkFault) -> Discarded:
        """Discard the file that is open as `fd` and was found under `name`. Raises what `fstat` does."""
        file = os.fstat(fd)
        taken_bytes = self._disk.taken_bytes(file)
        aside = f"{os.path.dirname(name)}/{temporary_name(self._writer)}"
        try:
            if not take_aside(self._root, name, file, aside):
                return Discarded.REPLACED
        except OSError as error:
            self._remains.remove(aside, taken_bytes)
            with suppress(OSError):
                if isinstance(error, FileNotFoundError) and is_absent(self._root, name):
                    return Discarded.REPLACED  # Somebody else has discarded it.
            self._log(fault, f"{name}: corrupt ({fault}) and cannot be discarded: {error.strerror}")
            return Discarded.LEFT
        self._remains.remove(aside, taken_bytes)
        self._log(fault, f"{name}: corrupt ({fault}); deleted")
        return Discarded.DELETED

    def _log(self, fault: ChunkFault, line: str) -> None:
        """Warn once of each kind: a whole directory may be corrupt, and all of it is counted."""
        level = logging.DEBUG if fault in self._warned else logging.WARNING
        self._warned.add(fault)
        logger.log(level, "%s; see %s", line, Remedy.CORRUPT)


def take_aside(root_fd: int, name: str, file: os.stat_result, aside: str) -> bool:
    """Rename this file; False if the name is another file's by now, which keeps it."""
    if not os.path.samestat(below.look(root_fd, name), file):
        return False
    below.rename(root_fd, name, aside)
    if os.path.samestat(below.look(root_fd, aside), file):
        return True
    with suppress(FileExistsError):  # Newer still: that one stays.
        below.link(root_fd, aside, name)
    below.unlink(root_fd, aside)
    return False
