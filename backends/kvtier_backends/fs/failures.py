"""What an error of the system says of a chunk, and of the file system."""

import errno

from kvtier.errors import BlockError, NoSpace, TransferFailed
from kvtier.keys import OffloadKey

FULL = {errno.ENOSPC, errno.EDQUOT}
GONE = {errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH}
"""The whole file system is away."""


def failure(key: OffloadKey, error: OSError) -> BlockError:
    """Return a chunk's outcome, with its cause: both without a traceback, which would keep frames, and lent buffers."""
    kind = NoSpace if error.errno in FULL else TransferFailed
    outcome = kind(f"{key.hex()}: {error.strerror or error}")
    outcome.__cause__ = frameless(error)
    return outcome


def frameless(error: OSError) -> OSError:
    """Return a copy of an error that keeps nothing of where it was raised."""
    return OSError(error.errno, error.strerror)
