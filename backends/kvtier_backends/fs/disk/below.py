"""Files and folders below the root: the tier's own, no link that leads elsewhere, no pipe without a writer.

Only this module passes a name below the root to the system: with a folder's descriptor, and following no link in it.
"""

import ctypes
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

from kvtier.errors import ConfigError

T = TypeVar("T")

NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK  # A pipe or a device opens at once, or fails; a regular file does not care.
AHEAD_NS = 3_600_000_000_000  # As much as an hour, two machines' clocks may differ.

_OPENAT2 = 437  # On every machine. Linux has it since 5.6; some containers refuse it.
_NO_CALL = {errno.ENOSYS, errno.EPERM}  # The answers of an older kernel, and of a container.
_BENEATH = 0x08 | 0x04  # RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS
FILE_MODE = 0o644
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW  # To reach what is in it.

_syscall = ctypes.CDLL(None, use_errno=True).syscall  # Without `argtypes`, which cost a microsecond a call.


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


class Reached:
    """The descriptor of a folder below another, to use one-part names on; an empty name is the other itself."""

    __slots__ = ("_opened", "fd")

    def __init__(self, root_fd: int, folder: str) -> None:
        """Open it. Raises `ForeignError` if something else lies there or on the way, and what `os.open` does."""
        self.fd = open_below(root_fd, folder, _FOLDER, stat.S_IFDIR) if folder else root_fd
        self._opened = bool(folder)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._opened:
            os.close(self.fd)


def open_below(root_fd: int, name: str, flags: int, kind: int | None = stat.S_IFREG) -> int:
    """Open a name without a link in any part. Raises `ForeignError` for another `kind` (None: any) or a link."""
    flags |= os.O_NOFOLLOW
    try:
        return _opened(root_fd, name, flags)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        refuse_others(root_fd, name, kind)
        raise


def _opened(root_fd: int, name: str, flags: int) -> int:
    if "/" in name:
        try:
            return open_beneath(root_fd, name, flags)
        except OSError as error:
            if error.errno not in _NO_CALL:
                raise
    return open_by_parts(root_fd, name, flags)


def open_by_parts(root_fd: int, name: str, flags: int) -> int:
    """Open it folder by folder, on any kernel. Raises what `open_beneath` does."""
    *folders, base = name.split("/")
    opened = [root_fd]
    try:
        for folder in folders:
            opened.append(os.open(folder, _FOLDER, dir_fd=opened[-1]))
        return os.open(base, flags, FILE_MODE, dir_fd=opened[-1])
    finally:
        for fd in opened[1:]:
            os.close(fd)


def open_beneath(root_fd: int, name: str, flags: int) -> int:
    """Open a name of several parts in one call. Raises OSError of ENOSYS or EPERM where there is no such call."""
    path = name.encode("utf-8", "surrogateescape")
    while True:
        fd: int = _syscall(_OPENAT2, root_fd, path, _how(flags), 24)
        if fd >= 0:
            return fd
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number), name)


@cache
def _how(flags: int) -> bytes:
    """Return struct open_how of linux/openat2.h: flags, mode, resolve."""
    return struct.pack("=QQQ", flags | os.O_CLOEXEC, FILE_MODE if flags & os.O_CREAT else 0, _BENEATH)


def open_file(root_fd: int, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file; to write, only one without a second name, maybe another program's. Raises `ForeignError`."""
    fd = open_below(root_fd, name, flags | NO_LINK)
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
    """Open a directory to list it, or to reach its entries. Raises what `open_file` does."""
    return open_below(root_fd, name, os.O_RDONLY | os.O_DIRECTORY, stat.S_IFDIR)


def with_folder(root_fd: int, name: str, call: Callable[[int], T]) -> T:
    """Return the result of a call on a folder's descriptor, such as `os.listdir` or `os.fsync`."""
    fd = open_folder(root_fd, name)
    try:
        return call(fd)
    finally:
        os.close(fd)


def look(root_fd: int, name: str) -> os.stat_result:
    """Return the status of what has this name: a link's own."""
    if "/" not in name:
        return os.stat(name, dir_fd=root_fd, follow_symlinks=False)
    fd = open_below(root_fd, name, os.O_PATH, None)  # Of a missing file, one call tells.
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def date(root_fd: int, name: str, time_ns: int) -> None:
    folder, _, base = name.rpartition("/")
    with Reached(root_fd, folder) as fd:
        os.utime(base, ns=(time_ns, time_ns), dir_fd=fd, follow_symlinks=False)


def unlink(root_fd: int, name: str) -> None:
    folder, _, base = name.rpartition("/")
    with Reached(root_fd, folder) as fd:
        os.unlink(base, dir_fd=fd)


def rename(root_fd: int, name: str, new: str) -> None:
    folder, _, base = name.rpartition("/")
    new_folder, _, new_base = new.rpartition("/")
    with Reached(root_fd, folder) as fd, Reached(root_fd, new_folder) as new_fd:
        os.rename(base, new_base, src_dir_fd=fd, dst_dir_fd=new_fd)


def link(root_fd: int, name: str, new: str) -> None:
    """Give a file a second name; raises `FileExistsError` if something has it."""
    folder, _, base = name.rpartition("/")
    new_folder, _, new_base = new.rpartition("/")
    with Reached(root_fd, folder) as fd, Reached(root_fd, new_folder) as new_fd:
        os.link(base, new_base, src_dir_fd=fd, dst_dir_fd=new_fd, follow_symlinks=False)


def mkdir(root_fd: int, name: str, mode: int) -> None:
    """Make a directory with these permissions, whatever the umask is."""
    folder, _, base = name.rpartition("/")
    with Reached(root_fd, folder) as fd:
        os.mkdir(base, mode, dir_fd=fd)
        if mode & ~stat.S_IRWXU:
            made = open_folder(fd, base)
            permit(made, mode)
            os.close(made)


def permit(fd: int, mode: int) -> None:
    """Give an open file or folder these permissions, which the umask may have cut; another user's keeps its own."""
    with suppress(OSError):  # Not every file system has permissions.
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)


def rmdir(root_fd: int, name: str) -> None:
    folder, _, base = name.rpartition("/")
    with Reached(root_fd, folder) as fd:
        os.rmdir(base, dir_fd=fd)


def lock_file(fd: int, *, wait: bool = False) -> None:
    """Lock a file against all others who open it; without `wait`, raises `BlockingIOError` if it is locked."""
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(fd: int) -> None:
    """Release its lock: also for a fork that has the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def refuse_others(root_fd: int, name: str, kind: int | None) -> None:
    """Raise `ForeignError` if something of another kind lies there, or anything but folders on the way."""
    parts = [part for part in name.split("/") if part]
    for count in range(1, len(parts) + (kind is not None)):
        path, expected = "/".join(parts[:count]), stat.S_IFDIR if count < len(parts) else kind
        try:
            fd = _opened(root_fd, path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            continue  # There is none, or no telling.
        try:
            _check(os.fstat(fd), path, expected)
        finally:
            os.close(fd)


def refused(root: str, error: ForeignError) -> ConfigError:
    return ConfigError(
        f"root: {root!r} given, a directory with nothing else in the place of a tier's files accepted: {error.strerror}"
    )


def _check(status: os.stat_result, name: str, kind: int | None) -> None:
    found = stat.S_IFMT(status.st_mode)
    if kind not in (None, found):
        code = errno.ELOOP if found == stat.S_IFLNK else errno.EINVAL
        raise ForeignError(code, f"{name} is {_KINDS[found]}, {_KINDS[kind]} or nothing accepted; remove it")


def believable_ns(time_ns: int, now_ns: int) -> int:
    """Return a file's time, which anybody may set, as one to believe: not before 1970, and now if it is far ahead."""
    return now_ns if time_ns > now_ns + AHEAD_NS else max(time_ns, 0)
