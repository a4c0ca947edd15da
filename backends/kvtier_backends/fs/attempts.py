"""Names for files that are not finished: each attempt has its own, which says whose it is.

Two writers with one temporary name would publish a mixture. A name says which process on which boot of which machine
is writing, so that what a killed writer left can be told from what a live one is writing.
"""

import itertools
import os
from typing import NamedTuple, Self

SUFFIX = ".tmp"

_numbers = itertools.count()  # The process's own, not a tier's: two tiers may have one directory.


class Writer(NamedTuple):
    """One process, among all that ever were."""

    boot: str  # First digits of the machine's boot id: another boot, another machine.
    pid: int
    started: int  # In clock ticks since boot: process ids come round again.

    @classmethod
    def this_process(cls) -> Self:
        """Read from /proc who we are."""
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read(8).decode()
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # The name in parentheses may hold anything.
        return cls(boot, os.getpid(), int(fields[19]))  # Field 22 of proc(5), counted from the third.


def attempt_name(writer: Writer) -> str:
    """Return a file name that no other attempt has: `.<boot>-<pid>-<start>-<number>.tmp`."""
    return f".{writer.boot}-{writer.pid}-{writer.started}-{next(_numbers)}{SUFFIX}"
