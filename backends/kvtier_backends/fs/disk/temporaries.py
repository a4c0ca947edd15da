"""Temporaries: files that are not finished. Two writers with one temporary name would publish a mixture.

A name says which process on which boot of which machine is writing, so files of killed writers are known, and swept.
"""

import hashlib
import itertools
import logging
import os
import re
from typing import NamedTuple, Self

from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES
from kvtier_backends.fs.disk.remains import Remains

logger = logging.getLogger(__name__)

SUFFIX = ".tmp"
ABANDONED_S = 600.0  # Twenty times a batch's deadline. A file under way is younger: a chunk is written in one call.

_NAME = re.compile(r"\.([0-9a-f]{8})-([0-9]{1,10})-([0-9]{1,20})-([0-9]{1,20})\.tmp")

_VLLMS = re.compile(r"(.+\.bin)_[0-9]{1,19}\.tmp", re.DOTALL)

_numbers = itertools.count()  # The process's own, not a tier's: two tiers may have one directory.


class Writer(NamedTuple):
    boot: str  # Of a machine, and of a container on it: process ids mean something within one only.
    pid: int
    started: int  # In clock ticks since boot: process ids come round again.

    @classmethod
    def this_process(cls) -> Self:
        boot = boot_id() + os.readlink("/proc/self/ns/pid").encode()
        started = started_at(os.getpid())
        assert started is not None
        return cls(hashlib.sha256(boot).hexdigest()[:8], os.getpid(), started)


def boot_id() -> bytes:
    """Return an id of this boot of this machine. No other boot of any machine has it."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read()


def started_at(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if none of this id runs."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # The name in parentheses may hold anything.
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[19]) if fields[0] != b"Z" else None  # Fields 22 and 3 of proc(5), counted from the third.


def temporary_name(writer: Writer) -> str:
    """Return a file name that no other temporary has: `.<boot>-<pid>-<start>-<number>.tmp`."""
    return f".{writer.boot}-{writer.pid}-{writer.started}-{next(_numbers)}{SUFFIX}"


def next_number() -> int:
    """Return a number that no temporary of this process has: those made before have smaller ones."""
    return next(_numbers)


def writer_of(name: str) -> Writer | None:
    match = _NAME.fullmatch(name)
    return match and Writer(match[1], int(match[2]), int(match[3]))


def chunk_of_vllms(name: str) -> str:
    """Return the name of the chunk that vLLM writes under this one; empty for any other name."""
    match = _VLLMS.fullmatch(name)
    return match[1] if match else ""


class TemporarySweep:
    """Removes temporaries that killed processes left, and none of live ones. Blocks; one thread at a time.

    The process table knows who lives in this container. Files of other machines' writers are left for as long as a
    store can take. To be wrong costs a live writer one store, whose rename finds no file.
    """

    def __init__(self, root_fd: int, here: Writer, now_s: float, remains: Remains, own_from: int = 0) -> None:
        """`remains` counts what cannot be removed; this process's temporaries before `own_from` are another tier's."""
        self.removed = 0
        self._remains = remains
        self._own_from = own_from
        self._root = root_fd
        self._here = here
        self._now_s = now_s
        self._alive: dict[Writer, bool] = {}

    def __call__(self, folder: str, name: str) -> bool:
        """Remove a file if it is an abandoned temporary; say whether it is a temporary at all."""
        if writer_of(name) is None:
            return False
        path = f"{folder}/{name}"
        try:
            status = below.look(self._root, path)
            if self.is_abandoned(name, status.st_mtime):
                self.removed += self._remains.remove(path, status.st_blocks * SECTOR_BYTES)
        except OSError as error:  # Mostly: its writer has just ended, well or not.
            logger.debug("%s: cannot be swept: %s", path, error.strerror)
        return True

    def is_own(self, name: str) -> bool:
        match = _NAME.fullmatch(name)
        return match is not None and writer_of(name) == self._here and int(match[4]) >= self._own_from

    def is_abandoned(self, name: str, changed_s: float) -> bool:
        """Return True if no process writes a temporary of this name, which may be another program's."""
        writer = writer_of(name)
        if self.is_own(name):
            return False
        if writer is None or writer.boot != self._here.boot or writer == self._here:
            return abs(self._now_s - changed_s) > ABANDONED_S
        if writer not in self._alive:
            self._alive[writer] = started_at(writer.pid) == writer.started
        return not self._alive[writer]
