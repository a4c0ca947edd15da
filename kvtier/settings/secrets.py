"""Secrets: files and environment variables that options name. No message shows the name: it may be the secret itself.

A file is for its reader alone, as for PostgreSQL and SSH. Its group may read a file of root's: so Kubernetes mounts it.
"""

import os
import stat
from typing import BinaryIO

from kvtier.errors import ConfigError

OWNERS_OWN = 0o077  # Permission bits that group and others must not have.
ROOTS_OWN = 0o037  # The same for a file of root, which the group may read.


def open_secret(option: str, path: str) -> BinaryIO:
    """Open a file with a secret. Raises `ConfigError` if it cannot be read, or if others can."""
    try:
        file = open(path, "rb")  # noqa: SIM115  # The caller closes it.
    except (OSError, ValueError) as error:  # Both show the name: no cause, for a traceback would show it, too.
        why = error.strerror if isinstance(error, OSError) else "no file has such a name"
        raise ConfigError(f"{option}: the file cannot be read: {why}") from None
    try:
        _require_private(option, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def check_secret(option: str, path: str) -> None:
    """Raise `ConfigError` if a file with a secret, which a library will read, cannot be read, or if others can."""
    open_secret(option, path).close()


def secret_variable(option: str, name: str) -> bytes:
    """Return the content of an environment variable. Raises `ConfigError` if there is none of this name."""
    if (value := os.environb.get(os.fsencode(name))) is None:
        raise ConfigError(
            f"{option}: the environment has no variable of the given name; the name of a variable with the secret "
            "accepted, not the secret itself"
        )
    return value


def _require_private(option: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode) and status.st_mode & (OWNERS_OWN if status.st_uid else ROOTS_OWN):
        raise ConfigError(
            f"{option}: others can read or change the file, its mode is {stat.S_IMODE(status.st_mode):04o}; chmod 600 "
            "it, or mount the Secret with defaultMode: 0400"
        )
