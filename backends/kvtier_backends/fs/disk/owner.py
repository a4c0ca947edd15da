"""The owner of a root: one tier, or all tiers that share it. A lock on a file in the root tells, and lasts as long.

The lock is on the directory's own file, so another path or mount of the directory meets it, too. The kernel drops it
when the process dies. A process in uninterruptible I/O keeps it: the same engine's next runner puts a new file in the
place of the locked one, and so never waits for its predecessor.

The lock is exclusive for one owner, and shared for `shared = true`. So a root is never both. The file names its last
writer, for messages alone. It stays open for reading only: a file open to write would block a remount read-only.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import ExitStack, suppress

import msgspec

from kvtier.backend import TierContext
from kvtier.errors import ConfigError, Remedy, one_line
from kvtier.memory import let_go_in_forks
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import lock_file, open_file, permit, unlock_file
from kvtier_backends.fs.disk.remains import called
from kvtier_backends.fs.disk.temporaries import Writer, temporary_name

logger = logging.getLogger(__name__)

OWNER = "kvtier-owner.json"
PATIENCE_S = 10.0  # A former owner writes its checkpoint before it lets go: as long as `limits.close_s`.
LOOK_EVERY_S = 0.05
CONTENT_BYTES_MAX = 4_096

_WAYS_OUT = (
    "give each engine its own root, inside vLLM by {dp_rank} or {engine_id} in the path, or set "
    'layout = "files" and shared = true in all of them'
)


class Holder(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tier that uses a root, as its file says."""

    tier: str
    process: str  # The runner's `Writer`: no other process ever has the same.
    pid: int  # The engine's, on its host.
    host: str
    command: str
    since: str  # UTC.
    engine: int = 0  # See `TierContext.engine`; 0: none.
    shared: bool = False

    @classmethod
    def of(cls, context: TierContext, writer: Writer, *, shared: bool) -> "Holder":
        pid, number = context.engine or (writer.pid, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        return cls(
            context.name, "-".join(map(str, writer)), pid, socket.gethostname(), _command(pid), since, number, shared
        )

    def is_replaced_by(self, other: "Holder") -> bool:
        """Return True if the other is the same tier of the same engine, in a later runner."""
        return 0 < self.engine == other.engine and self.tier == other.tier and self.process != other.process

    def __str__(self) -> str:
        command = f" ({one_line(self.command)})" if self.command else ""
        where = f"tier {one_line(self.tier)} of process {self.pid}{command} on {one_line(self.host)}"
        return f"{where} since {one_line(self.since)} UTC" + (" with shared = true" if self.shared else "")


class RootOwner:
    """A tier's hold on an open root. Blocks; belongs to one thread at a time."""

    def __init__(self, root: str, root_fd: int, holder: Holder, mode: int) -> None:
        """Hold nothing yet. `root`: as messages name it; `mode`: the file's permission bits."""
        self._root, self._root_fd, self._holder, self._mode = root, root_fd, holder, mode
        self._fd = -1
        self._made = False
        let_go_in_forks(self)

    def take(self) -> None:
        """Become an owner of the root; wait for an owner that may be closing.

        Raises `ConfigError` that names a holder that stays, or says that there are no locks to share with; `OSError`.
        """
        until, seen = 0.0, None
        while not self._try():
            holder = self._there()
            # Seen twice: the content is not that of an owner before the one that has the lock.
            if holder is not None and holder == seen and holder.is_replaced_by(self._holder) and self._replace(holder):
                return
            if not until:
                until = time.monotonic() + PATIENCE_S
                logger.info("%s: used by %s; waiting up to %g s", self._root, _named(holder), PATIENCE_S)
            if time.monotonic() >= until:
                raise self._refusal(holder)
            seen = holder
            time.sleep(LOOK_EVERY_S)

    def let_go(self, *, undo: bool = False) -> None:
        """Release the root; idempotent. `undo`: leave no file if this owner has made it."""
        if self._fd < 0:
            return
        with suppress(OSError):
            if undo and self._made and self._is_in_place(self._fd):
                lock_file(self._fd)  # Refused if others share it by now: then the file stays.
                below.unlink(self._root_fd, OWNER)
        with suppress(OSError):
            unlock_file(self._fd)  # A fork that has the descriptor, too, would keep the lock.
        self.forked()

    def is_seen(self) -> bool:
        """Return True if a newcomer meets this lock; False if its file was removed."""
        return self._is_in_place(self._fd)

    def forked(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):  # A file system in user space that is away says so here.
                os.close(self._fd)
            self._fd = -1

    def _try(self) -> bool:
        writable = open_file(self._root_fd, OWNER, os.O_RDWR | os.O_CREAT)
        try:
            if (locked := self._lock(writable)) is None:
                return False
            self._fd, self._made = locked, not os.fstat(writable).st_size
            self._write(writable)
            return self._keep_if_in_place()  # Last: `_replace` reads the content after it has changed the name.
        finally:
            os.close(writable)

    def _lock(self, writable: int) -> int | None:
        """Lock the open file; return a descriptor that has the lock, None if another owner has it."""
        fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY)
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                locked = self._locks(fd)
            except OSError as error:
                if error.errno != errno.EBADF:  # As NFS says of an exclusive lock on a file that is open to be read.
                    raise
                os.dup2(writable, fd, inheritable=False)
                locked = self._locks(fd)
            if locked:
                undo.pop_all()
        return fd if locked else None

    def _locks(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if self._holder.shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise
            if self._holder.shared:
                raise ConfigError(
                    f"root: {self._root!r} given, a file system with locks on files accepted for shared = true: "
                    f"{error.strerror}"
                ) from error
            logger.warning(
                "%s: no locks on files there: another engine with this root is not seen, and capacity holds for each "
                "of them alone; see %s",
                self._root,
                Remedy.ROOT_IN_USE,
            )
        return True

    def _keep_if_in_place(self) -> bool:
        with ExitStack() as undo:
            undo.callback(self.forked)
            if in_place := self._is_in_place(self._fd):
                undo.pop_all()
        return in_place

    def _replace(self, predecessor: Holder) -> bool:
        """Put a file of ours in the place of our predecessor's locked one; False if that has changed meanwhile.

        Raises `ConfigError` if another tier has its file by now: that one is the owner, and will find its file removed.
        """
        name = temporary_name(Writer.this_process())
        try:
            former = open_file(self._root_fd, OWNER)
        except FileNotFoundError:
            return False
        try:
            self._put_in_place(name)
            holder = _content_of(former)
        finally:
            os.close(former)
        if holder != predecessor:
            self._made = True
            self.let_go(undo=True)
            raise self._refusal(holder)
        return self._keep_if_in_place()

    def _put_in_place(self, name: str) -> None:
        """Make a file of ours under a temporary name, lock it, and rename it to the owner's."""
        writable = open_file(self._root_fd, name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            locked = self._lock(writable)
            assert locked is not None, "a new file is locked"
            self._fd = locked
            self._write(writable)
            below.rename(self._root_fd, name, OWNER)
        except BaseException:
            self.forked()
            with suppress(OSError):
                below.unlink(self._root_fd, name)
            raise
        finally:
            os.close(writable)

    def _write(self, fd: int) -> None:
        permit(fd, self._mode)
        with suppress(OSError):  # A full disk: the lock is what counts.
            content = msgspec.json.encode(self._holder)[:CONTENT_BYTES_MAX]
            os.pwrite(fd, content, 0)
            os.ftruncate(fd, len(content))

    def _there(self) -> Holder | None:
        try:
            fd = open_file(self._root_fd, OWNER)
        except OSError:
            return None
        try:
            return _content_of(fd)
        finally:
            os.close(fd)

    def _is_in_place(self, fd: int) -> bool:
        named = called(lambda: below.look(self._root_fd, OWNER), self._root_fd, OWNER)
        return named is not None and os.path.samestat(named, os.fstat(fd))

    def _refusal(self, holder: Holder | None) -> ConfigError:
        both = " (all that use a root share it, or none)" if holder and holder.shared != self._holder.shared else ""
        return ConfigError(
            f"root: {self._root!r} given, a directory that no other tier uses accepted{both}: it is used by "
            f"{_named(holder)}; {_WAYS_OUT}; see {Remedy.ROOT_IN_USE}"
        )


def _content_of(fd: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(fd, CONTENT_BYTES_MAX, 0), type=Holder)
    except (OSError, ValueError, RecursionError):
        return None


def remove_ownerless(root_fd: int) -> None:
    """Remove the owner's file unless a tier has the root. Raises `OSError`."""
    fd = open_file(root_fd, OWNER, os.O_RDWR)
    try:
        lock_file(fd)
        below.unlink(root_fd, OWNER)  # A tier that waits for the lock finds it removed, and makes another.
    finally:
        os.close(fd)


def _named(holder: Holder | None) -> str:
    return "a tier that has not written down who it is" if holder is None else str(holder)


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(CONTENT_BYTES_MAX).split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()[:120]
