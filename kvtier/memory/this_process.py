"""This process: its standard streams, its forks, and its resource limits."""

import errno
import mmap
import os
import resource
import signal
import threading
import weakref
from typing import NamedTuple, Protocol

from kvtier.errors import ConfigError

DESCRIPTORS_MIN = 32  # A dozen of a runner, and those that the lanes of one tier open at once.
STANDARD_STREAMS = range(3)
STACK_BYTES_MOST = 64 << 20  # No larger stack is checked: for unlimited stacks, the C library takes 2 MiB.
THREAD_BYTES = 16 << 20  # For a thread's first steps: Python allocates by the MiB.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Terminals and service managers send them to all.
_NO_THREAD = "can't start new thread"  # Python's RuntimeError.


def fill_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, such as a daemon's.

    Otherwise the next file, socket or memory that is opened gets its number. Then printed lines, or redirected ones of
    a child, are written there. And libuv aborts a process that closes such a descriptor.
    """
    if all(map(_is_open, STANDARD_STREAMS)):
        return
    while (fd := os.open(os.devnull, os.O_RDWR)) in STANDARD_STREAMS:
        os.set_inheritable(fd, True)  # Like any standard stream.
    os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def require_descriptors() -> None:
    """Raise `ConfigError` unless this process may open the descriptors that an engine needs."""
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise ConfigError(f"an engine needs {DESCRIPTORS_MIN} descriptors: {reason(error)}") from error
    limit = _LIMITS[errno.EMFILE]
    if limit.soft is not None and opened + DESCRIPTORS_MIN > limit.soft:
        raise ConfigError(f"{opened:,} descriptors are open, and an engine needs {DESCRIPTORS_MIN}: {limit.said}")


def file_bytes_max() -> int | None:
    """Return the largest file size that this process may write; None if it is unlimited."""
    return _LIMITS[errno.EFBIG].soft


def require_file_bytes(size_bytes: int) -> None:
    """Raise `ConfigError` unless this process may write a file of this size."""
    limit = _LIMITS[errno.EFBIG]
    if limit.soft is not None and limit.soft < size_bytes:
        raise ConfigError(f"files of {size_bytes:,} bytes are needed: {limit.said}")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. RuntimeError if the process is at its limit of threads, or has no memory for one.

    Python waits forever for a thread that finds no memory before its first line. So this call checks the memory.
    """
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if not 0 < stack_bytes < STACK_BYTES_MOST:
        stack_bytes = STACK_BYTES_MOST
    try:
        mmap.mmap(-1, stack_bytes + THREAD_BYTES).close()  # Untouched, it costs only addresses.
    except OSError as error:
        raise RuntimeError(_NO_THREAD) from error
    thread.start()


class HoldsDescriptors(Protocol):
    """An object with descriptors that a forked child must not share."""

    def forked(self) -> None:
        """Release the descriptors in the child, where only the forking thread runs."""


_holders: "weakref.WeakSet[HoldsDescriptors]" = weakref.WeakSet()


def let_go_in_forks(holder: HoldsDescriptors) -> None:
    """Call `holder.forked()` in every later forked child of this process, while the holder exists."""
    _holders.add(holder)


def _tell_holders() -> None:
    for holder in list(_holders):
        holder.forked()


os.register_at_fork(after_in_child=_tell_holders)


class _ProcessLimit(NamedTuple):
    """A resource limit of this process."""

    name: str
    resource: int
    remedy: str

    @property
    def soft(self) -> int | None:
        """The present limit; None if there is none."""
        soft, _ = resource.getrlimit(self.resource)
        return None if soft == resource.RLIM_INFINITY else soft

    @property
    def said(self) -> str:
        """The limit's value and remedy for a message; empty if there is no limit."""
        return "" if self.soft is None else f"{self.name} is {self.soft:,} (raise it: {self.remedy})"


_LIMITS = {
    errno.EMFILE: _ProcessLimit("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "ulimit -n"),
    errno.EFBIG: _ProcessLimit("RLIMIT_FSIZE", resource.RLIMIT_FSIZE, "ulimit -f"),
    errno.ENOMEM: _ProcessLimit("RLIMIT_AS", resource.RLIMIT_AS, "ulimit -v"),
    errno.EAGAIN: _ProcessLimit("RLIMIT_NPROC", resource.RLIMIT_NPROC, "ulimit -u"),
}


def is_of_a_limit(error: BaseException) -> bool:
    """Return True if an error may be due to one of this process's limits."""
    return bool(_exceeded(error))


def reason(error: BaseException) -> str:
    """Return the message of an error. If a limit of this process may be the cause, name it and the remedy."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    limits = [words for limit in _exceeded(error) if (words := limit.said)]
    return f"{said}; {' and '.join(limits)}" if limits else said


def _exceeded(error: BaseException) -> list[_ProcessLimit]:
    if isinstance(error, OSError):
        return [_LIMITS[error.errno]] if error.errno in _LIMITS else []
    if isinstance(error, MemoryError):
        return [_LIMITS[errno.ENOMEM]]
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return [_LIMITS[errno.ENOMEM], _LIMITS[errno.EAGAIN]]
    return []
