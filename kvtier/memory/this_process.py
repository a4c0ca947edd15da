"""This process as the kernel sees it: its standard streams, its forks, and the limits that it runs under."""

import errno
import mmap
import os
import resource
import signal
import threading
import weakref
from typing import NamedTuple, Protocol

from kvtier.errors import ConfigError

DESCRIPTORS_MIN = 32  # A runner's own dozen, and what the lanes of one tier open at once.
STANDARD_STREAMS = range(3)
STACK_BYTES_MOST = 64 << 20  # More is not looked for: where stacks are unlimited, the C library takes 2 MiB.
THREAD_BYTES = 16 << 20  # Beyond its stack, for a thread's first steps: Python takes memory by the MiB.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # What a terminal or a service manager sends to all.
_NO_THREAD = "can't start new thread"  # As Python has it, a RuntimeError.


def fill_standard_streams() -> None:
    """Open /dev/null under each of the numbers 0, 1 and 2 that is closed, as daemons have them.

    Otherwise the next file, socket or memory that is opened gets one of these numbers. Then printed lines, or
    redirected ones of a child, go there. And libuv aborts a process that closes such a descriptor.
    """
    if all(map(_is_open, STANDARD_STREAMS)):
        return
    while (fd := os.open(os.devnull, os.O_RDWR)) in STANDARD_STREAMS:
        os.set_inheritable(fd, True)  # As standard streams are.
    os.close(fd)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def require_descriptors() -> None:
    """Raise `ConfigError` unless this process may open as many descriptors as an engine takes."""
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        raise ConfigError(f"an engine needs {DESCRIPTORS_MIN} descriptors: {reason(error)}") from error
    limit = _LIMITS[errno.EMFILE]
    if limit.soft is not None and opened + DESCRIPTORS_MIN > limit.soft:
        raise ConfigError(f"{opened:,} descriptors are open, and an engine needs {DESCRIPTORS_MIN}: {limit.said}")


def file_bytes_max() -> int | None:
    """Return how long this process may make a file; None: there is no limit."""
    return _LIMITS[errno.EFBIG].soft


def require_file_bytes(size_bytes: int) -> None:
    """Raise `ConfigError` unless this process may make a file so long."""
    limit = _LIMITS[errno.EFBIG]
    if limit.soft is not None and limit.soft < size_bytes:
        raise ConfigError(f"files of {size_bytes:,} bytes are needed: {limit.said}")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. RuntimeError where the process may have no more of them, or has no memory for one.

    Python waits for ever for a thread that finds no memory before its first line. So this call checks the memory.
    """
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if not 0 < stack_bytes < STACK_BYTES_MOST:
        stack_bytes = STACK_BYTES_MOST
    try:
        mmap.mmap(-1, stack_bytes + THREAD_BYTES).close()  # Untouched, it costs nothing but addresses.
    except OSError as error:
        raise RuntimeError("can't start new thread") from error
    thread.start()


class HoldsDescriptors(Protocol):
    """Anything with descriptors that must not be shared with a forked child."""

    def forked(self) -> None:
        """Let go of the descriptors in the child, without telling their owner. Only the forking thread runs there."""


_holders: "weakref.WeakSet[HoldsDescriptors]" = weakref.WeakSet()


def let_go_in_forks(holder: HoldsDescriptors) -> None:
    """Have `holder.forked()` called in every child that this process forks from now on, for as long as it is used."""
    _holders.add(holder)


def _tell_holders() -> None:
    for holder in list(_holders):
        holder.forked()


os.register_at_fork(after_in_child=_tell_holders)


class _Limit(NamedTuple):
    """A limit of this process, by the number that `resource` has for it."""

    name: str
    resource: int
    remedy: str

    @property
    def soft(self) -> int | None:
        """The limit that holds now; None: none does."""
        soft, _ = resource.getrlimit(self.resource)
        return None if soft == resource.RLIM_INFINITY else soft

    @property
    def said(self) -> str:
        """The limit with its value and its remedy, in words; empty if nothing holds."""
        return "" if self.soft is None else f"{self.name} is {self.soft:,} (raise it: {self.remedy})"


_LIMITS = {
    errno.EMFILE: _Limit("RLIMIT_NOFILE", resource.RLIMIT_NOFILE, "ulimit -n"),
    errno.EFBIG: _Limit("RLIMIT_FSIZE", resource.RLIMIT_FSIZE, "ulimit -f"),
    errno.ENOMEM: _Limit("RLIMIT_AS", resource.RLIMIT_AS, "ulimit -v"),
    errno.EAGAIN: _Limit("RLIMIT_NPROC", resource.RLIMIT_NPROC, "ulimit -u"),
}


def is_of_a_limit(error: BaseException) -> bool:
    """Say whether an error means that the process has reached a limit of its own."""
    return bool(_exceeded(error))


def reason(error: BaseException) -> str:
    """Say in words why something failed. If a limit of this process may be the cause, name it and the remedy."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    limits = [words for limit in _exceeded(error) if (words := limit.said)]
    return f"{said}; {' and '.join(limits)}" if limits else said


def _exceeded(error: BaseException) -> list[_Limit]:
    """Return the limits that an error may be due to."""
    if isinstance(error, OSError):
        return [_LIMITS[error.errno]] if error.errno in _LIMITS else []
    if isinstance(error, MemoryError):
        return [_LIMITS[errno.ENOMEM]]
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return [_LIMITS[errno.ENOMEM], _LIMITS[errno.EAGAIN]]
    return []
