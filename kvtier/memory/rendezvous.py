"""The rendezvous: a file in shared memory in which one engine's processes meet, and whose name they remove.

The file is linked to its path when it is complete, so nobody sees a half-made file. In the last page each participant
locks its own byte while it lives, and sets it once it has mapped the file; who sees all bytes set removes the name. A
participant on another host makes another file, and its byte is never set here. A file without locks was left by dead
processes, and the next process that uses its directory removes it.
"""

import errno
import fcntl
import math
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple, Self

from kvtier.errors import ConfigError
from kvtier.memory.this_process import PAGE_BYTES, require_free

_MAGIC = b"kvtier\x00\x01"
_HEADER = struct.Struct("=8sQQQ")  # Magic, rows, bytes a row, participants.
_FLAGS_AT = 64  # Byte 0 of the page locks the name; the participants' bytes begin here.
PARTICIPANTS_MAX = PAGE_BYTES - _FLAGS_AT  # One byte each in one page.

_LOCK = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, process.
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO of that name must not block.
_POLL_S = 0.005  # Far below the time that an engine takes to start.


class Apart(ConfigError):
    """Some participants have not mapped the file: they are on another host, or do not run."""

    def __init__(self, path: str, missing: Sequence[int], participants: int) -> None:
        self.path, self.missing = path, missing
        super().__init__(
            f"{path}: participants {ranges(missing)} of {participants} have not mapped it on {socket.gethostname()}:"
            " run all of them on one host, with one shared memory"
        )


class Meeting(NamedTuple):
    """The sizes that all participants must agree on, and the number of this one."""

    path: str
    rows: int
    row_bytes: int
    participants: int
    participant: int

    @property
    def rows_bytes(self) -> int:
        return self.rows * self.row_bytes


class SharedFile:
    """One participant's open file: the rows, then one page for the meeting."""

    def __init__(self, fd: int, meeting: Meeting) -> None:
        self.fd = fd
        self._meeting = meeting
        self._page = os.fstat(fd).st_size - PAGE_BYTES
        self._pid = os.getpid()

    @classmethod
    def meet(cls, meeting: Meeting, timeout_s: float) -> Self:
        """Make the file, or open another participant's; the caller maps it and calls `arrive`.

        Waits up to `timeout_s` for processes of an earlier start of this participant. `ConfigError`, leaving nothing,
        if they do not end, participants disagree on sizes, there is too little memory, or the path cannot be used.
        """
        try:
            for _ in range(1 + math.ceil(timeout_s / _POLL_S)):
                try:
                    file = cls._open(meeting)
                except FileNotFoundError:
                    file = cls._create(meeting)
                if file is not None:
                    return file
                time.sleep(_POLL_S)
        except OSError as error:
            raise ConfigError(f"{meeting.path}: cannot be shared memory: {_reason(error)}") from error
        raise ConfigError(
            f"{meeting.path}: participant {meeting.participant} has mapped it already and others of that time still"
            f" live after {timeout_s:g} s: give each start of an engine its own path"
        )

    def arrive(self) -> None:
        """Record that this participant has mapped the file; the last one to do so removes its name."""
        os.pwrite(self.fd, b"\x01", self._page + _FLAGS_AT + self._meeting.participant)
        # Without the lock, another participant has seen the same and is removing the name.
        if not self.missing() and self._lock(0, 1):
            self._remove_name()

    def missing(self) -> list[int]:
        """Return the participants that have not mapped the file yet."""
        flags = os.pread(self.fd, self._meeting.participants, self._page + _FLAGS_AT)
        return [participant for participant, flag in enumerate(flags) if not flag]

    def require_all(self, timeout_s: float) -> None:
        """Wait until every participant has mapped the file; raise `Apart` after `timeout_s`."""
        ends_at = time.monotonic() + timeout_s
        while missing := self.missing():
            if time.monotonic() >= ends_at:
                raise Apart(self._meeting.path, missing, self._meeting.participants)
            time.sleep(_POLL_S)

    def leave(self) -> None:
        """Close the file. The last to leave, before all have arrived, removes its name; a fork only closes."""
        try:
            if os.getpid() != self._pid:
                return
            self._lock(0, PAGE_BYTES, fcntl.F_UNLCK)  # First unlocked: of two leaving at once, one then is alone.
            self.remove_if_dead()
        finally:
            os.close(self.fd)

    def remove_if_dead(self) -> bool:
        """Remove the name if no other process holds the file; return True if so."""
        if dead := self._lock(0, PAGE_BYTES):
            self._remove_name()
        return dead

    @classmethod
    def _open(cls, meeting: Meeting) -> Self | None:
        """Open the file; None if dead processes left it, which removes it, or if this participant's place is taken."""
        with ExitStack() as undo:
            fd = os.open(meeting.path, _OPEN)
            undo.callback(os.close, fd)
            file, header = cls(fd, meeting), _read_header(fd, meeting.path)
            if file.remove_if_dead() or not file._enter():
                return None
            _require_agreement(meeting, header)
            undo.pop_all()
            return file

    @classmethod
    def _create(cls, meeting: Meeting) -> Self | None:
        """Make the file; None if another participant was first."""
        directory = os.path.dirname(meeting.path) or "."
        _sweep(directory)
        with ExitStack() as undo:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, fd)
            try:
                require_free(meeting.rows_bytes + PAGE_BYTES, directory)
            except ConfigError:
                if os.path.lexists(meeting.path):  # Another participant has made it and is taking this memory.
                    return None
                raise
            file = cls._filled(fd, meeting)
            try:
                # A directory's descriptor, though unused for an absolute name, is what makes os.link follow the link.
                os.link(f"/proc/self/fd/{fd}", meeting.path, src_dir_fd=fd)
            except FileExistsError:
                return None
            undo.pop_all()
            return file

    @classmethod
    def _filled(cls, fd: int, meeting: Meeting) -> Self:
        os.ftruncate(fd, meeting.rows_bytes + PAGE_BYTES)
        os.pwrite(fd, _HEADER.pack(_MAGIC, meeting.rows, meeting.row_bytes, meeting.participants), meeting.rows_bytes)
        file = cls(fd, meeting)
        file._lock(_FLAGS_AT + meeting.participant, 1)  # Locked before it has a name: it never looks like a dead one's.
        return file

    def _enter(self) -> bool:
        """Take this participant's place; False if it is or was taken, or if the file has lost its name."""
        place = _FLAGS_AT + self._meeting.participant
        return (
            self._lock(place, 1)
            and os.fstat(self.fd).st_nlink > 0
            and os.pread(self.fd, 1, self._page + place) == b"\x00"
        )

    def _remove_name(self) -> None:
        """Remove the name. The caller holds the lock on it, so a file with any name has this one."""
        if os.fstat(self.fd).st_nlink > 0:
            os.unlink(self._meeting.path)

    def _lock(self, start: int, length: int, kind: int = fcntl.F_WRLCK) -> bool:
        """Lock bytes of the page for this open file, so threads count, too; False if others hold some of them."""
        request = _LOCK.pack(kind, os.SEEK_SET, self._page + start, length, 0)
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True


def mappings(fd: int, most: int) -> int:
    """Count the mappings of another program's file, from its beginning, that /proc shows, up to `most`."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    mapped, count = f" 00000000 {device} {status.st_ino} ".encode(), 0
    for process in os.listdir("/proc"):
        if process.isdecimal() and count < most:
            with suppress(OSError), open(f"/proc/{process}/maps", "rb") as maps:  # Another user's, or ended.
                count += maps.read().count(mapped)
    return min(count, most)


def ranges(numbers: Sequence[int]) -> str:
    """Write increasing numbers as ranges: 2 to 4, 6."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _sweep(directory: str) -> None:
    """Remove regions that killed processes left, before the free memory is counted: no later start opens them."""
    with os.scandir(directory) as entries:
        for path in [entry.path for entry in entries if entry.is_file(follow_symlinks=False)]:
            with suppress(OSError, ConfigError):  # Removed meanwhile, or no region of this user's.
                fd = os.open(path, _OPEN)
                try:
                    SharedFile(fd, Meeting(path, *_read_header(fd, path), participant=0)).remove_if_dead()
                finally:
                    os.close(fd)


def _read_header(fd: int, path: str) -> tuple[int, int, int]:
    """Return rows, bytes a row and participants. ConfigError for any other file, which is left unchanged."""
    status = os.fstat(fd)
    header = b""
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size > PAGE_BYTES:
        header = os.pread(fd, _HEADER.size, status.st_size - PAGE_BYTES)
    if not header.startswith(_MAGIC):
        raise ConfigError(f"{path}: is there already and is no region of this user's: give another path")
    _, rows, row_bytes, participants = _HEADER.unpack(header)
    return rows, row_bytes, participants


def _require_agreement(meeting: Meeting, header: tuple[int, int, int]) -> None:
    rows, row_bytes, participants = header
    if header != (meeting.rows, meeting.row_bytes, meeting.participants):
        raise ConfigError(
            f"{meeting.path}: has {rows:,} rows of {row_bytes:,} bytes for {participants} participants, but participant"
            f" {meeting.participant} expects {meeting.rows:,} of {meeting.row_bytes:,} for {meeting.participants}:"
            " give all participants the same configuration"
        )


def _reason(error: OSError) -> str:
    if error.errno == errno.EOPNOTSUPP:
        return "its file system cannot make a file without a name; use a tmpfs such as /dev/shm"
    return error.strerror or str(error)
