"""This process: its standard streams, its forks, its resource limits, and the host memory that is free for it."""

import errno
import mmap
import os
import resource
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

from kvtier.errors import ConfigError

PAGE_BYTES = 4_096  # Right for O_DIRECT, for footers and for every kernel that kvtier runs on.
DESCRIPTORS_MIN = 32  # A dozen of a runner, and those that the lanes of one tier open at once.
STANDARD_STREAMS = range(3)
STACK_BYTES_MOST = 64 << 20  # No larger stack is checked: for unlimited stacks, the C library takes 2 MiB.
THREAD_BYTES = 16 << 20  # For a thread's first steps: Python allocates by the MiB.
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Terminals and service managers send them to all.
_NO_THREAD = "can't start new thread"  # Python's RuntimeError.


def fill_standard_streams() -> None:
    """Open /dev/null for closed standard streams: else the next file gets their number, and what is printed."""
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
    limit = _limit(errno.EMFILE)
    if limit is not None and opened + DESCRIPTORS_MIN > limit:
        said = _said(errno.EMFILE)
        raise ConfigError(f"{opened:,} descriptors are open, and an engine needs {DESCRIPTORS_MIN}: {said}")


def file_bytes_max() -> int | None:
    """Return the largest file size that this process may write; None if it is unlimited."""
    return _limit(errno.EFBIG)


def require_file_bytes(size_bytes: int) -> None:
    """Raise `ConfigError` unless this process may write a file of this size."""
    limit = file_bytes_max()
    if limit is not None and limit < size_bytes:
        raise ConfigError(f"files of {size_bytes:,} bytes are needed: {_said(errno.EFBIG)}")


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, checking memory: Python waits forever for one that has none. RuntimeError if there is none."""
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if not 0 < stack_bytes < STACK_BYTES_MOST:
        stack_bytes = STACK_BYTES_MOST
    try:
        mmap.mmap(-1, stack_bytes + THREAD_BYTES).close()  # Untouched, it costs only addresses.
    except OSError as error:
        raise RuntimeError(_NO_THREAD) from error
    try:
        thread.start()
    except BaseException:  # An interrupt: it starts all the same, and can only be joined from then on.
        while not thread.is_alive() and thread in threading.enumerate():
            time.sleep(0.001)
        raise


def child_environment() -> dict[str, str]:
    """Return an environment in which a child finds this process's modules, in any working directory."""
    places: list[str] = []
    given: list[object] = list(sys.path)
    for place in given:
        if isinstance(place, str):  # Python itself does not search others, such as a `Path`.
            with suppress(FileNotFoundError):  # It is relative to a directory that is gone.
                places.append(os.path.abspath(place))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


class HoldsDescriptors(Protocol):
    def forked(self) -> None: ...


_holders: "weakref.WeakSet[HoldsDescriptors]" = weakref.WeakSet()


def let_go_in_forks(holder: HoldsDescriptors) -> None:
    """Call `holder.forked()` in every later forked child of this process, while the holder exists."""
    _holders.add(holder)


def _tell_holders() -> None:
    for holder in list(_holders):
        holder.forked()


os.register_at_fork(after_in_child=_tell_holders)


_LIMITS = {  # The limit that an errno may be of, and the remedy.
    errno.EMFILE: ("RLIMIT_NOFILE", "ulimit -n"),
    errno.EFBIG: ("RLIMIT_FSIZE", "ulimit -f"),
    errno.ENOMEM: ("RLIMIT_AS", "ulimit -v"),
    errno.EAGAIN: ("RLIMIT_NPROC", "ulimit -u"),
}


def _limit(code: int) -> int | None:
    """Return the present limit that an errno may be of; None if there is none."""
    soft, _ = resource.getrlimit(getattr(resource, _LIMITS[code][0]))
    return None if soft == resource.RLIM_INFINITY else soft


def _said(code: int) -> str:
    """Return a limit's value and remedy for a message; empty if there is no limit."""
    limit, (name, remedy) = _limit(code), _LIMITS[code]
    return "" if limit is None else f"{name} is {limit:,} (raise it: {remedy})"


def is_of_a_limit(error: BaseException) -> bool:
    return bool(_exceeded(error))


def reason(error: BaseException) -> str:
    """Return the message of an error. If a limit of this process may be the cause, name it and the remedy."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    limits = [words for code in _exceeded(error) if (words := _said(code))]
    return f"{said}; {' and '.join(limits)}" if limits else said


def _exceeded(error: BaseException) -> list[int]:
    """Return the numbers of the limits that an error may be due to."""
    if isinstance(error, OSError):
        return [error.errno] if error.errno in _LIMITS else []
    if isinstance(error, MemoryError):
        return [errno.ENOMEM]
    return [errno.ENOMEM, errno.EAGAIN] if isinstance(error, RuntimeError) and str(error) == _NO_THREAD else []


class FreeMemory(NamedTuple):
    """The bytes that one limit leaves, and the remedy if they are too few."""

    size_bytes: int
    place: str
    remedy: str


def require_free(size_bytes: int, directory: str | None = None, root: str = "/") -> None:
    """Raise `ConfigError` unless `size_bytes` are free now, and in `directory`: the kernel grants more than it has."""
    limits = [_available(root), *_cgroup_limits(root)]
    if directory is not None:
        limits.append(_file_system(directory))
    tightest = min(limits)
    if size_bytes > tightest.size_bytes:
        free = f"{max(tightest.size_bytes, 0):,} are free in {tightest.place}"
        raise ConfigError(f"{size_bytes:,} bytes of host memory were asked for and {free}: {tightest.remedy}")


def _available(root: str) -> FreeMemory:
    with open(os.path.join(root, "proc/meminfo")) as meminfo:
        fields = dict(line.split(":") for line in meminfo)
    size_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    return FreeMemory(size_bytes, "this machine's memory (MemAvailable)", "ask for fewer bytes, or free some")


def _file_system(directory: str) -> FreeMemory:
    status = os.statvfs(directory)
    remedy = "ask for fewer bytes, or mount it larger (mount -o remount,size=...; in a container, --shm-size)"
    return FreeMemory(status.f_bavail * status.f_frsize, directory, remedy)


def _cgroup_limits(root: str) -> Iterator[FreeMemory]:
    """Yield the bytes that each limited control group above this process leaves, in version 2's or 1's hierarchy."""
    with suppress(FileNotFoundError), open(os.path.join(root, "proc/self/cgroup")) as groups:
        for line in groups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                names = ("memory.max", "memory.current", "")
                yield from _group_limits(os.path.join(root, "sys/fs/cgroup"), path, names)
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
                yield from _group_limits(os.path.join(root, "sys/fs/cgroup/memory"), path, names)


def _group_limits(mount: str, path: str, names: tuple[str, str, str]) -> Iterator[FreeMemory]:
    limit_name, usage_name, stat_prefix = names
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        group = os.path.join(mount, *parts[:depth])
        # A container may see its own group as the root, under a path that does not exist here.
        with suppress(OSError):
            if (limit := _read_file(group, limit_name).strip()) == "max":
                continue
            statistics = dict(line.split() for line in _read_file(group, "memory.stat").splitlines())
            # The kernel reclaims page cache before it refuses memory. Shared mappings are not in these counts.
            cache = sum(int(statistics[f"{stat_prefix}{name}_file"]) for name in ("inactive", "active"))
            free = int(limit) - int(_read_file(group, usage_name)) + cache
            yield FreeMemory(free, f"control group {group}", f"ask for fewer bytes, or raise its {limit_name}")


def _read_file(group: str, name: str) -> str:
    with open(os.path.join(group, name)) as file:
        return file.read()
