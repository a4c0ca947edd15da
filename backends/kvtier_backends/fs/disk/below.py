"""Files and folders below the root: the tier's own, no link that leads elsewhere, no pipe that nobody writes to.

The root itself may be a link, which is followed once. Files below it have names that everybody knows. Without these
checks, somebody who can put a link there could have this process write or remove other files.
"""

import errno
import fcntl
import os
import stat
from contextlib import suppress

from kvtier.errors import ConfigError

NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK  # A pipe or a device opens at once, or fails; a regular file does not care.
AHEAD_NS = 3_600_000_000_000  # As much as an hour, two machines' clocks may differ.

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a regular file",
}


class ForeignError(OSError):
    """Something else lies where the tier's own belongs; says what, where, and what to do."""


def open_file(root_fd: int, name: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """Open a regular file. A file for writing must have no second name, which might be somebody else's.

    Raises `ForeignError` for anything else that lies there, and what `os.open` does.
    """
    try:
        fd = os.open(name, flags | NO_LINK, mode, dir_fd=root_fd)
    except OSError:
        refuse_others(root_fd, name, stat.S_IFREG)
        raise
    try:
        status = os.fstat(fd)
        _check(status, name, stat.S_IFREG)
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise ForeignError(errno.EMLINK, f"{name} has another name, too; remove this one, or copy the file to it")
    except OSError:
        os.close(fd)
        raise
    return fd


def open_folder(root_fd: int, name: str) -> int:
    """Open a directory to list it, or to reach what is in it. Raises likewise."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root_fd)
    except OSError:
        refuse_others(root_fd, name, stat.S_IFDIR)
        raise


def list_folder(root_fd: int, name: str) -> list[str]:
    """Return the names in a directory. Raises likewise."""
    fd = open_folder(root_fd, name)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def sync_folder(root_fd: int, name: str) -> None:
    """Have the names in a directory reach the device. Raises likewise."""
    fd = open_folder(root_fd, name)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(fd: int, *, wait: bool = False) -> None:
    """Lock a file against all others who open it; without `wait`, raises `BlockingIOError` if it is locked."""
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(fd: int) -> None:
    """Let go of its lock: also for a fork that has the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def refuse_others(root_fd: int, name: str, kind: int) -> None:
    """Raise `ForeignError` if something of another kind lies there."""
    with suppress(FileNotFoundError):
        _check(os.stat(name, dir_fd=root_fd, follow_symlinks=False), name, kind)


def refused(root: str, error: ForeignError) -> ConfigError:
    """Return the message for the user who has named this root."""
    return ConfigError(
        f"root: {root!r} given, a directory with nothing else in the place of a tier's files accepted: {error.strerror}"
    )


def _check(status: os.stat_result, name: str, kind: int) -> None:
    found = stat.S_IFMT(status.st_mode)
    if found != kind:
        code = errno.ELOOP if found == stat.S_IFLNK else errno.EINVAL
        raise ForeignError(code, f"{name} is {_KINDS[found]}, {_KINDS[kind]} or nothing accepted; remove it")


def believable_ns(time_ns: int, now_ns: int) -> int:
    """Return a file's time as one that can be believed: not before 1970, and if it is far ahead, now.

    Anybody may set a file's time, and a clock may have been wrong. Clocks of machines that share a directory differ.
    """
    return now_ns if time_ns > now_ns + AHEAD_NS else max(time_ns, 0)
