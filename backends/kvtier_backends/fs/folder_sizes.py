"""What directories take on the disk, which is nothing on some file systems and, at a directory a chunk, much on others.

Each is counted once, whoever notices that it is there or has grown: a store, or the scan. Only sizes other than a new
directory's are remembered, so that a million directories of one block each take no memory.
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager

from kvtier_backends.fs.disk import SECTOR_BYTES


class FolderSizes:
    """Counts on behalf of any thread."""

    def __init__(self, new_bytes: int) -> None:
        """`new_bytes`: what an empty directory takes there."""
        self.new_bytes = new_bytes
        self.used_bytes = 0
        self.scanned_bytes = 0
        """Of those, what the scan has found."""
        self._other: dict[str, int] = {}
        self._seen: set[str] | None = set()  # While the scan runs: it must not count again what a store has counted.
        self._lock = threading.Lock()

    @contextmanager
    def making(self, name: str) -> Generator[None]:
        """Count a directory that is made in the block, from before it is there."""
        with self._lock:
            self.used_bytes += self.new_bytes
        try:
            yield
        except BaseException:
            with self._lock:
                self.used_bytes -= self.new_bytes
            raise
        with self._lock:
            self._other.pop(name, None)
            if self._seen is not None:
                self._seen.add(name)

    def looked_at(self, name: str, status: os.stat_result) -> None:
        """Count what a directory has grown by since it was last looked at."""
        self._settle(name, status)

    def scanned(self, name: str, status: os.stat_result) -> None:
        """Count a directory that the scan has come to."""
        self.scanned_bytes += self._settle(name, status)

    def removed(self, name: str) -> None:
        """Give back what a directory took."""
        with self._lock:
            taken = self._other.pop(name, self.new_bytes)
            if self._seen is None:
                self.used_bytes -= taken
            elif name in self._seen:
                self._seen.discard(name)
                self.used_bytes -= taken

    def scan_ended(self) -> None:
        """From now on every directory has been counted."""
        with self._lock:
            self._seen = None

    def _settle(self, name: str, status: os.stat_result) -> int:
        taken = status.st_blocks * SECTOR_BYTES
        with self._lock:
            before = self._other.get(name, self.new_bytes)
            if self._seen is not None and name not in self._seen:
                self._seen.add(name)
                before = 0
            self.used_bytes += taken - before
            if taken == self.new_bytes:
                self._other.pop(name, None)
            else:
                self._other[name] = taken
            return taken - before
