"""What killed processes had under way is removed, and what live ones have is not.

Of this machine and container, the process table knows who lives. Of others it knows nothing: their files are left
alone for as long as a store could possibly take, by a clock that may be behind ours or ahead. To be wrong costs a live
writer that one store, which then fails: its rename finds no file.
"""

import logging
import os

from kvtier_backends.fs.attempts import Writer, read_attempt, started_at

logger = logging.getLogger(__name__)

ABANDONED_S = 600.0  # Twenty times a batch's deadline. A file under way is younger: a chunk is written in one call.


class Sweep:
    """Removes abandoned temporaries. Blocks; one thread at a time."""

    def __init__(self, root_fd: int, here: Writer, now_s: float) -> None:
        """`here`: who we are; `now_s`: the time, since the epoch."""
        self.removed = 0
        self._root = root_fd
        self._here = here
        self._now_s = now_s
        self._alive: dict[Writer, bool] = {}

    def __call__(self, folder: str, name: str) -> bool:
        """Remove a file if it is an abandoned temporary; say whether it is a temporary at all."""
        if read_attempt(name) is None:
            return False
        path = f"{folder}/{name}"
        try:
            status = os.stat(path, dir_fd=self._root, follow_symlinks=False)
            if self.is_abandoned(name, status.st_mtime):
                os.unlink(path, dir_fd=self._root)
                self.removed += 1
        except OSError as error:  # Mostly: its writer has just ended, well or not.
            logger.debug("%s: cannot be swept: %s", path, error.strerror)
        return True

    def is_own(self, name: str) -> bool:
        """Say whether a name is that of a temporary of this process."""
        return read_attempt(name) == self._here

    def is_abandoned(self, name: str, changed_s: float) -> bool:
        """Say whether nobody is writing a temporary of this name, which may be another program's."""
        writer = read_attempt(name)
        if writer is None or writer.boot != self._here.boot:
            return abs(self._now_s - changed_s) > ABANDONED_S
        if writer not in self._alive:
            self._alive[writer] = started_at(writer.pid) == writer.started
        return not self._alive[writer]
