"""What directories take on the disk, which is nothing on some file systems and, at a directory a chunk, much on others.

Each is counted once, whoever notices that it is there or has grown: a store, or the scan. Only sizes other than a new
directory's are remembered, so that a million directories of one block each take no memory.
"""

import os
import threading

SECTOR_BYTES = 512  # The unit of st_blocks, whatever the file system's own.


class FolderSizes:
    """Counts on behalf of any thread."""

    def __init__(self, new_bytes: int) -> None:
        """`new_bytes`: what an empty directory takes there."""
        self.new_bytes = new_bytes
        self.used_bytes = 0
        self._other: dict[str, int] = {}
        self._seen: set[str] | None = set()  # While the scan runs: it must not count again what a store has counted.
        self._lock = threading.Lock()

    def made(self, name: str, status: os.stat_result) -> None:
        """Count a directory that was made just now."""
        self._settle(name, status, known=False)

    def looked_at(self, name: str, status: os.stat_result) -> None:
        """Count what a directory has grown by since it was last looked at."""
        self._settle(name, status, known=True)

    def scanned(self, name: str, status: os.stat_result) -> None:
        """Count a directory that the scan has come to."""
        self._settle(name, status, known=self._seen is None)

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

    def _settle(self, name: str, status: os.stat_result, *, known: bool) -> None:
        taken = status.st_blocks * SECTOR_BYTES
        with self._lock:
            if self._seen is not None:
                known = name in self._seen
                self._seen.add(name)
            before = self._other.get(name, self.new_bytes) if known else 0
            self.used_bytes += taken - before
            if taken == self.new_bytes:
                self._other.pop(name, None)
            else:
                self._other[name] = taken
