"""What an error of the system says of a chunk, and of the file system."""

import errno

from kvtier.errors import BlockError, NoSpace, TransferFailed
from kvtier.keys import OffloadKey

FULL = {errno.ENOSPC, errno.EDQUOT}
GONE = {errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
"""The whole file system is away."""


def failure(key: OffloadKey, error: OSError) -> BlockError:
    """Return a chunk's outcome: a value without a traceback, which would keep frames, and in them lent buffers."""
    kind = NoSpace if error.errno in FULL else TransferFailed
    return kind(f"{key.hex()}: {error.strerror or error}")
