"""Pre-faulting: the free host memory, and allocating all pages of a mapping before it is used.

The kernel grants a region that is larger than its memory. When the last pages are touched, the process is killed
(private memory) or gets SIGBUS (shared memory). So a size is compared with the free memory before a page is touched,
and every page is touched before the first chunk comes.
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

PAGE_BYTES = 4_096  # Right for O_DIRECT, for footers and for every kernel that kvtier runs on.
PREFAULT_SLICE_BYTES = 64 << 20  # 0.02 to 0.2 s of the kernel's time, for which Ctrl-C waits.
PREFAULT_THREADS_MAX = 8  # Clearing pages is bound by memory bandwidth, which a few cores reach.

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python 3.11's mmap.
_TOUCH_BYTES = 1 << 20  # Touched at once with the GIL held, for less than its switch interval.

# mmap.madvise holds the GIL (10 s for 4 GiB in pages of 4 KiB, measured); a foreign call does not.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Free(NamedTuple):
    """The bytes that one limit leaves, and the remedy if they are too few."""

    size_bytes: int
    place: str
    remedy: str


def require_free(size_bytes: int, directory: str | None = None, root: str = "/") -> None:
    """Raise `ConfigError` unless `size_bytes` of memory are free now, and on `directory`'s file system if given.

    `root` is the directory of /proc and /sys/fs/cgroup.
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
            # The kernel reclaims page cache before it refuses memory. Shared mappings are not in these counts.
            cache = sum(int(statistics[f"{stat_prefix}{name}_file"]) for name in ("inactive", "active"))
            free = int(limit) - int(_read(group, usage_name)) + cache
            yield Free(free, f"control group {group}", f"ask for fewer bytes, or raise its {limit_name}")


def _read(group: str, name: str) -> str:
    with open(os.path.join(group, name)) as file:
        return file.read()


def give_advice(mapping: mmap.mmap) -> None:
    """Ask for huge pages, which halve the processor time of direct I/O, and for exclusion from core dumps."""
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP):
        with suppress(OSError):  # The kernel was built without it.
            mapping.madvise(advice)


def prefault(mapping: mmap.mmap, fd: int | None, first: int = 0) -> None:
    """Allocate every page of a mapping without changing a byte; `fd` is its file, None if it is private.

    Works in slices, on several threads without the GIL. It begins with the slice that holds byte `first` and wraps
    around, so processes that share the mapping can begin in different places. Raises OSError if memory runs out.
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
        code = errno.ENOSPC if code == errno.EFAULT else code  # Instead of SIGBUS: the file system is full.
        raise OSError(code, os.strerror(code))


def _touch(mapping: mmap.mmap, fd: int | None, start: int, length: int) -> None:
    """Allocate pages on older kernels: a file's, which others may be writing, by fallocate; private ones by writing."""
    if fd is not None:
        os.posix_fallocate(fd, start, length)
        return
    for begin in range(start, start + length, _TOUCH_BYTES):
        end = min(begin + _TOUCH_BYTES, start + length)
        mapping[begin:end:PAGE_BYTES] = bytes((end - begin) // PAGE_BYTES)
