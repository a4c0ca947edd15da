"""What is in the directory at the start, a batch at a time, beside the tier's work.

A pull, not a push: the next batch is asked for when the last one is indexed, so that a million files never lie in a
queue. No buffer is lent, so a cancelled scan need not wait for its thread.
"""

import logging
import os
from collections.abc import Callable, Iterator

from kvtier.backend import INVENTORY_BATCH_KEYS
from kvtier.namespace import FileMapper
from kvtier_backends.fs.files import SECTOR_BYTES
from kvtier_backends.fs.folder import Folder
from kvtier_backends.fs.index import Held

logger = logging.getLogger(__name__)

DEPTH_MAX = 8  # Folders within folders. Names have three; a loop of bind mounts would have no end.


class Scan:
    """One walk over a namespace's files. Blocks; one thread at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, takes: Callable[[int], bool]) -> None:
        """`takes`: whether a load would take a file of this length; others are left out."""
        self.skipped = 0
        """Files of ours by name, that no load would take."""
        self.failed = 0
        """Folders that could not be read."""
        self._root = folder.root_fd
        self._mapper = mapper
        self._takes = takes
        self._stopped = False
        self._chunks = self._walk(folder.chunks, DEPTH_MAX)

    def next_batch(self) -> list[Held]:
        """Return the next chunks; an empty list at the end."""
        batch: list[Held] = []
        for chunk in self._chunks:
            batch.append(chunk)
            if len(batch) == INVENTORY_BATCH_KEYS:
                break
        return batch

    def stop(self) -> None:
        """Have the walk end soon, from any thread."""
        self._stopped = True

    def _walk(self, folder: str, depth: int) -> Iterator[Held]:
        try:
            names, chunks = self._list(folder)
        except FileNotFoundError:
            return  # Removed since it was listed.
        except OSError as error:
            self.failed += 1
            logger.warning("%s: cannot be listed: %s", folder, error.strerror)
            return
        yield from chunks
        for name in names if depth else ():
            yield from self._walk(f"{folder}/{name}", depth - 1)

    def _list(self, folder: str) -> tuple[list[str], list[Held]]:
        """Return a folder's folders and chunks; its descriptor is closed before the walk goes on."""
        folders: list[str] = []
        chunks: list[Held] = []
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root)
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if self._stopped:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif (chunk := self._chunk(folder, entry)) is not None:
                        chunks.append(chunk)
        finally:
            os.close(fd)
        return ([] if self._stopped else folders), chunks

    def _chunk(self, folder: str, entry: "os.DirEntry[str]") -> Held | None:
        key = self._mapper.key(f"{folder}/{entry.name}")
        if key is None:
            return None
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not self._takes(status.st_size):
            self.skipped += 1
            return None
        return Held(key, status.st_blocks * SECTOR_BYTES)
