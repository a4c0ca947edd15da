"""A temporary directory that goes away however we end: by return, by Ctrl-C or by SIGKILL.

A small process waits for the end of a pipe that only we hold, and then removes the directory. It also is what lets an
interrupted command end at once: a hundred thousand files take seconds to remove, and it goes on removing them.
"""

import os
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

from kvtier.errors import KVTierError

INTERRUPTED_WAIT_S = 0.1  # Enough for what a short run left; a part of the second in which Ctrl-C is to be obeyed.

SWEEPER = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(20):  # A runner that outlives its owner for a moment may still write.
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.lexists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


class Scratch:
    """A directory of its own, and the process that removes it. Use it in a `with`."""

    def __init__(self, parent: str | None = None, prefix: str = "kvtier-replay-") -> None:
        """Make the directory in `parent`; None: where temporary ones belong."""
        self.path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        try:
            self._sweeper = subprocess.Popen(  # noqa: S603  # Our own few lines, with one path for an argument.
                [sys.executable, "-I", "-S", "-c", SWEEPER, self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # A terminal's Ctrl-C is for us, not for it.
            )
        except BaseException:
            os.rmdir(self.path)
            raise

    def remove(self, wait_s: float | None) -> bool:
        """Have the directory removed; wait for it so long (None: until it is done) and say whether it is gone."""
        assert self._sweeper.stdin is not None
        self._sweeper.stdin.close()
        try:
            self._sweeper.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = kind is not None and issubclass(kind, KVTierError)  # Then there is little to remove.
        self.remove(None if kind is None or refused else INTERRUPTED_WAIT_S)
