"""Names for files that are not finished: each attempt has its own, which says whose it is.

Two writers with one temporary name would publish a mixture. A name says which process on which boot of which machine
is writing, so that what a killed writer left can be told from what a live one is writing.
"""

import hashlib
import itertools
import os
import re
from typing import NamedTuple, Self

SUFFIX = ".tmp"

_NAME = re.compile(r"\.([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})-[0-9]{1,20}\.tmp")

_numbers = itertools.count()  # The process's own, not a tier's: two tiers may have one directory.


class Writer(NamedTuple):
    """One process, among all that ever were."""

    boot: str  # Of a machine, and of a container on it: process ids mean something within one only.
    pid: int
    started: int  # In clock ticks since boot: process ids come round again.

    @classmethod
    def this_process(cls) -> Self:
        """Read from /proc who we are."""
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read() + os.readlink("/proc/self/ns/pid").encode()
        started = started_at(os.getpid())
        assert started is not None
        return cls(hashlib.sha256(boot).hexdigest()[:8], os.getpid(), started)


def started_at(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if none of this id runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # The name in parentheses may hold anything.
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19]) if fields[0] != b"Z" else None  # Fields 22 and 3 of proc(5), counted from the third.


def attempt_name(writer: Writer) -> str:
    """Return a file name that no other attempt has: `.<boot>-<pid>-<start>-<number>.tmp`."""
    return f".{writer.boot}-{writer.pid}-{writer.started}-{next(_numbers)}{SUFFIX}"


def read_attempt(name: str) -> Writer | None:
    """Return whose attempt a file name is; None for any other."""
    match = _NAME.fullmatch(name)
    return match and Writer(match[1], int(match[2]), int(match[3]))
