"""Pre-faulting: how much host memory is free, and pages put under a mapping before anything depends on them.

The kernel promises memory that it does not have. It grants a region that is too large at once. When the last pages are
touched, the process is killed (private memory) or gets SIGBUS (shared memory). So a size is compared with the free
memory, and refused, before a page is touched. Every page is touched before the first chunk comes.
"""

import ctypes
import errno
import logging
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

PAGE_BYTES = 4_096  # What O_DIRECT, footers and every kernel that kvtier runs on agree on.
PREFAULT_SLICE_BYTES = 64 << 20  # 0.02 to 0.2 s of the kernel's time: what Ctrl-C waits for.
PREFAULT_THREADS_MAX = 8  # Clearing pages is bound by memory bandwidth, which a few cores reach.

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python 3.11's mmap.
_TOUCH_BYTES = 1 << 20  # Touched in one go with the GIL held: less than its switch interval.

# mmap.madvise holds the GIL (10 s for 4 GiB in pages of 4 KiB, tried); a foreign call does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Free(NamedTuple):
    """Bytes that one limit leaves, and what to do when they are too few."""

    size_bytes: int
    place: str
    remedy: str


def require_free(size_bytes: int, directory: str | None = None, root: str = "/") -> None:
    """Raise `ConfigError` unless `size_bytes` of memory are free now, and on `directory`'s file system if it is given.

    `root` is where /proc and /sys/fs/cgroup are found.
    """
    limits = [_available(root), *_cgroup_limits(root)]
    if directory is not None:
        limits.append(_file_system(directory))
    tightest = min(limits)
    if size_bytes > tightest.size_bytes:
        free = f"{max(tightest.size_bytes, 0):,} are free in {tightest.place}"
        raise ConfigError(f"{size_bytes:,} bytes of host memory were asked for and {free}: {tightest.remedy}")


def _available(root: str) -> Free:
    with open(os.path.join(root, "proc/meminfo")) as meminfo:
        fields = dict(line.split(":") for line in meminfo)
    size_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    return Free(size_bytes, "this machine's memory (MemAvailable)", "ask for fewer bytes, or free some")


def _file_system(directory: str) -> Free:
    status = os.statvfs(directory)
    remedy = "ask for fewer bytes, or mount it larger (mount -o remount,size=...; in a container, --shm-size)"
    return Free(status.f_bavail * status.f_frsize, directory, remedy)


def _cgroup_limits(root: str) -> Iterator[Free]:
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


def _group_limits(mount: str, path: str, names: tuple[str, str, str]) -> Iterator[Free]:
    limit_name, usage_name, stat_prefix = names
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        group = os.path.join(mount, *parts[:depth])
        # A container may see its own group as the root, under a path that does not exist here.
        with suppress(OSError):
            limit = _read(group, limit_name).strip()
            if limit == "max":
                continue
            statistics = dict(line.split() for line in _read(group, "memory.stat").splitlines())
            # Page cache is given back before anything is refused; memory that is mapped and shared is not in it.
            cache = sum(int(statistics[f"{stat_prefix}{name}_file"]) for name in ("inactive", "active"))
            free = int(limit) - int(_read(group, usage_name)) + cache
            yield Free(free, f"control group {group}", f"ask for fewer bytes, or raise its {limit_name}")


def _read(group: str, name: str) -> str:
    with open(os.path.join(group, name)) as file:
        return file.read()


def advise(mapping: mmap.mmap) -> None:
    """Ask for huge pages (they halve the processor time of direct I/O), and to be left out of core dumps."""
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with suppress(OSError):  # A kernel built without it.
            mapping.madvise(advice)


def prefault(mapping: mmap.mmap, fd: int | None, first: int = 0) -> None:
    """Put memory under every page of a mapping without changing a byte; `fd` is the file behind it, None if private.

    Works on several threads without the GIL, in slices. It begins with the slice that holds byte `first` and goes
    around, so processes that share the mapping can begin in different places. Raises OSError if the kernel has no
    memory for it.
    """
    size_bytes = len(mapping)
    starts = range(0, size_bytes, PREFAULT_SLICE_BYTES)
    turn = first // PREFAULT_SLICE_BYTES
    fill = _populate if _populates(mapping) else _touch
    size, begun = f"{size_bytes / (1 << 20):,.0f} MiB", time.monotonic()
    logger.info("taking %s of host memory; the start waits for it", size)  # 3 to 4 s a GiB, at worst.

    def fill_slice(start: int) -> None:
        fill(mapping, fd, start, min(PREFAULT_SLICE_BYTES, size_bytes - start))

    with ThreadPoolExecutor(min(PREFAULT_THREADS_MAX, len(os.sched_getaffinity(0)))) as threads:
        for _ in threads.map(fill_slice, (*starts[turn:], *starts[:turn])):
            pass
    logger.info("took %s of host memory in %.1f s", size, time.monotonic() - begun)


def _populates(mapping: mmap.mmap) -> bool:
    try:
        _populate(mapping, None, 0, PAGE_BYTES)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _populate(mapping: mmap.mmap, _fd: int | None, start: int, length: int) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping, start))
    if _libc.madvise(address, length, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        code = errno.ENOSPC if code == errno.EFAULT else code  # What would have been SIGBUS: the file system is full.
        raise OSError(code, os.strerror(code))


def _touch(mapping: mmap.mmap, fd: int | None, start: int, length: int) -> None:
    """Do what an older kernel can do: allocate a file's pages, which others may be writing, and write private pages."""
    if fd is not None:
        os.posix_fallocate(fd, start, length)
        return
    for begin in range(start, start + length, _TOUCH_BYTES):
        end = min(begin + _TOUCH_BYTES, start + length)
        mapping[begin:end:PAGE_BYTES] = bytes((end - begin) // PAGE_BYTES)
