"""Mounts: which one a directory is on, and which lie below it. An empty mount point must not be taken for its disk."""

from typing import NamedTuple


class Mount(NamedTuple):
    """A mount by the kernel's number, which bind mounts of one device do not share."""

    number: int
    below: frozenset[int]  # The mount that its mount point is on, and so on down to the first.


UNKNOWN = Mount(0, frozenset({0}))  # No directory on it is ever taken in place of another.


def mount_of(fd: int) -> Mount:
    """Return the mount of an open directory; `UNKNOWN` where the kernel does not say."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            number = next(int(line.split()[1]) for line in file if line.startswith(b"mnt_id:"))
        with open("/proc/self/mountinfo", "rb") as file:
            parents = {int(of): int(parent) for of, parent, _ in (line.split(b" ", 2) for line in file)}
    except (OSError, ValueError, StopIteration):
        return UNKNOWN
    below, at = set[int](), number
    while (at := parents.get(at, at)) not in {*below, number}:
        below.add(at)
    return Mount(number, frozenset(below))
