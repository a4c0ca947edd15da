"""The root: a tier's place on the file system, made, checked and tried before the first chunk.

Everything is reached through a descriptor of the root. If the mount goes away, the path leads to the empty directory
below it, and chunks would fill the wrong disk. The path is opened again only when the root is gone, and then a
directory on a mount below the former one is refused.
"""

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

from kvtier.backend import SEGMENTS_SUFFIX, Lanes, TierContext
from kvtier.errors import BackendUnavailable, ConfigError, Remedy
from kvtier.memory import PAGE_BYTES, let_go_in_forks, reason
from kvtier.settings import foreign
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import NO_LINK, ForeignError, Reached, open_below, open_file, open_folder
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES, Disk, FolderSizes, file_bytes_worst
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, FULL, GONE
from kvtier_backends.fs.disk.owner import OWNER, Holder, RootOwner
from kvtier_backends.fs.disk.reads import ONE_BY_ONE, QUEUE_BYTES, Reads, has_queue
from kvtier_backends.fs.disk.remains import Beside, Remains, called, names_in, remove_folder
from kvtier_backends.fs.disk.shared_page import SharedPage
from kvtier_backends.fs.disk.temporaries import TemporarySweep, Writer, next_number, temporary_name, writer_of
from kvtier_backends.fs.disk.write_budget import DiskWriteBudget
from kvtier_backends.fs.options import FsOptions

logger = logging.getLogger(__name__)

CONFIG_BYTES_MAX = 1 << 20  # Thousands of layer names; anything longer is another program's file.

_OWN = re.compile(r"[0-9a-f]{2,3}|[0-9]{8}\.seg")  # Folders of chunks, and segments.
BOOK = re.compile(r"config\.json|(?:index|ledger|write-budget)(_r[0-9]+(?:_flat|_segments)?)")

_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}  # How file systems say that they have no direct I/O.
_OURS_TO_MEND = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG}


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


class Folder:
    """An open root, and where this namespace's files are in it."""

    writer: Writer  # Who we are in the names of unfinished files; there from `open` on, as are the next five.
    remains: Remains
    beside: Beside
    sizes: FolderSizes
    disk: Disk
    name_bytes_max: int  # How long a file's name may be there: 255 bytes mostly, 143 where names are encrypted.
    mode: int  # Permission bits of folders that the tier makes below the root: the root's own.

    def __init__(
        self, options: FsOptions, context: TierContext, before: Mount | None = None, owner: RootOwner | None = None
    ) -> None:
        """Touch nothing yet. `before`: the mount that the root was on until it was gone; `owner`: another tier's."""
        self.root_fd = -1
        self.mount = UNKNOWN
        self._before = before
        self.owner = owner
        self._owns = owner is None
        self.shared_page: SharedPage | None = None  # As the options want it; as is the next.
        self.write_budget: DiskWriteBudget | None = None
        self._used_fd = -1
        self._own_from = 0
        self.chunks = context.mapper.chunks_folder + (SEGMENTS_SUFFIX if options.layout == "segments" else "")
        self.direct = False
        self.reads: Reads = ONE_BY_ONE
        self._options = options
        self._context = context
        self._mapper = context.mapper
        let_go_in_forks(self)

    def open(self) -> None:
        """Become an owner of the root, make missing folders, and find out how files can be written. Blocks.

        Raises `ConfigError` for what the user can mend, `BackendUnavailable` for the rest, and then leaves nothing.
        """
        self.writer = Writer.this_process()
        root = self._options.root
        try:
            with ExitStack() as undo:
                self._make_root(root, undo)
                self.root_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
                undo.callback(self.close)
                self._check_mount(root)
                self._status = os.fstat(self.root_fd)
                self.mode = _folders_mode(self._status.st_mode)
                self._own(root, undo)
                self.remains, self.beside = Remains(self.root_fd), Beside(self.beside_bytes)
                self._own_from = next_number()
                self.disk = Disk(self.root_fd)
                self.name_bytes_max = os.fpathconf(self.root_fd, "PC_NAME_MAX")
                for name in (self._mapper.folder, self.chunks):
                    self._make(name, undo)
                self._say_it_is_used()
                self._refuse_links()
                self._settle_config(undo)
                self.direct = self._try_direct()
                self.reads = self._try_reads() if self.direct else ONE_BY_ONE
                self.sizes = FolderSizes(self._new_folder_bytes(), shared=bool(self._options.shared))
                for doubt in self._options.doubts():
                    logger.warning("%s: %s; see %s", root, doubt, Remedy.CONFIGURATION)
                undo.pop_all()
        except ForeignError as error:
            raise below.refused(root, error) from error
        except OSError as error:
            if error.errno in _OURS_TO_MEND:
                no_parent = error.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(os.path.normpath(root)))
                why = "its parent directory does not exist" if no_parent else error.strerror
                raise ConfigError(f"root: cannot {'create' if no_parent else 'write to'} {root!r}: {why}") from error
            raise BackendUnavailable(f"{root}: {reason(error)}") from error

    def open_beside(self, lanes: Lanes) -> None:
        """Open the shared page and the write budget; blocks. `ConfigError`; `BackendUnavailable` if too many share."""
        options, unit_bytes = self._options, self._context.row_bytes + FOOTER_BYTES
        try:
            if options.shared and options.layout == "files":
                boot = hashlib.sha256(self.writer.boot.encode()).digest()[:8]
                self.shared_page = SharedPage(self.root_fd, self._book("ledger"), boot)
            if self._owns and (bytes_per_day := options.write_budget_bytes_per_day) is not None:
                name = self._book("write-budget")
                self.write_budget = DiskWriteBudget(self.root_fd, name, bytes_per_day, unit_bytes, time.time_ns, lanes)
        except ForeignError as error:
            raise below.refused(options.root, error) from error
        except OSError as error:
            raise ConfigError(
                f"root: {options.root!r} given, a file system with locks on files accepted for shared = true or a "
                f"write budget: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Close the root and the files beside the chunks; idempotent. No thread may be using them."""
        for beside in (self.shared_page, self.write_budget):
            if beside is not None:
                beside.close()
        if self.owner is not None and self._owns:
            self.owner.let_go()
        if self._used_fd >= 0:
            with suppress(OSError):
                below.unlock_file(self._used_fd)  # A fork that has the descriptor, too, would keep the lock.
        self.forked()

    def is_gone(self, *, failed: bool) -> bool:
        """Return True if the root, its folders or its owner's file were removed, or their file system is away. Blocks.

        `failed`: calls fail there; then it is gone, too, if its path leads to another directory, on no mount below.
        """
        try:
            if not os.fstat(self.root_fd).st_nlink or self.owner is None or not self.owner.is_seen():
                return True
            for name in (self._mapper.folder, self.chunks):
                if called(partial(below.look, self.root_fd, name), self.root_fd, name) is None:
                    return True
        except OSError as error:  # A disk that errs is still there, and what is in doubt on it counts on.
            if error.errno in GONE:
                return True
        with suppress(OSError):  # Nothing there to go to.
            if not failed:
                return False
            fd = os.open(self._options.root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                return not os.path.samestat(self._status, os.fstat(fd)) and mount_of(fd).number not in self.mount.below
            finally:
                os.close(fd)
        return False

    def forked(self) -> None:
        used_fd, root_fd, self._used_fd, self.root_fd = self._used_fd, self.root_fd, -1, -1
        for fd in (used_fd, root_fd):
            if fd >= 0:
                os.close(fd)

    def read(self, name: str, bytes_max: int) -> bytes | None:
        try:
            fd = open_file(self.root_fd, name)
        except FileNotFoundError:
            return None
        with open(fd, "rb") as file:
            return file.read(min(bytes_max, os.fstat(fd).st_size))  # As much memory is taken as is asked for.

    def sweep(self, now_s: float) -> TemporarySweep:
        return TemporarySweep(self.root_fd, self.writer, now_s, self.remains, self._own_from)

    def beside_bytes(self) -> int:
        """Return the room of the files beside the chunks, except what this process writes. Raises OSError."""
        return self._measured(self._mapper.folder, BOOK.fullmatch) + self.taken_bytes(OWNER)

    def unfinished_bytes(self) -> int:
        """Return the room of unfinished files among the chunks, with their folder. Raises OSError."""
        return self._measured(self.chunks, lambda _: False)

    def taken_bytes(self, name: str) -> int:
        """Return a file's room on the disk, 0 if it is proved absent; raises OSError otherwise."""
        folder, _, base = name.rpartition("/")
        if folder == self.chunks:  # By this descriptor, also when no other is free.
            return self._taken_bytes(self._used_fd, base, name)
        return self._taken_bytes(self.root_fd, name, name)

    def _taken_bytes(self, fd: int, base: str, name: str) -> int:
        status = called(lambda: below.look(fd, base), self.root_fd, name)
        return 0 if status is None or stat.S_ISDIR(status.st_mode) else self.disk.taken_bytes(status)

    def _measured(self, folder: str, is_ours: Callable[[str], object]) -> int:
        if (fd := called(lambda: open_folder(self.root_fd, folder), self.root_fd, folder)) is None:
            return 0
        try:
            total = os.fstat(fd).st_blocks * SECTOR_BYTES
            sweep = self.sweep(0.0)
            for base in names_in(fd):
                name = f"{folder}/{base}"
                if (writer_of(base) or is_ours(base)) and not sweep.is_own(base) and name not in self.remains:
                    total += self._taken_bytes(fd, base, name)
        finally:
            os.close(fd)
        return total

    def publish(self, name: str, pieces: Iterable[bytes]) -> None:
        """Put a file of these bytes beside the chunks, in place of what was there, whole or not at all."""
        folder, _, base = name.rpartition("/")
        temporary, written_bytes = temporary_name(self.writer), 0
        try:
            with Reached(self.root_fd, folder) as fd:
                with open(open_below(fd, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    below.permit(file.fileno(), self.mode & 0o666)
                    for piece in pieces:
                        written_bytes += len(piece)
                        file.write(piece)
                below.rename(fd, temporary, base)
        except BaseException:
            self.remains.remove(f"{folder}/{temporary}", file_bytes_worst(written_bytes, self.disk.block_bytes))
            raise
        finally:
            with suppress(OSError):
                self.beside.look(file_bytes_worst(written_bytes, self.disk.block_bytes))

    def _check_mount(self, root: str) -> None:
        self.mount = mount_of(self.root_fd)
        if self._before is not None and self.mount.number in self._before.below:
            raise BackendUnavailable(f"{root}: its file system is not mounted")

    def _make_root(self, root: str, undo: ExitStack) -> None:
        with suppress(FileExistsError):
            os.mkdir(root, stat.S_IRWXU)
            undo.callback(_quietly, os.rmdir, root)

    def _make(self, name: str, undo: ExitStack) -> None:
        with suppress(FileExistsError):
            below.mkdir(self.root_fd, name, self.mode)
            undo.callback(_quietly, below.rmdir, self.root_fd, name)
        os.close(open_folder(self.root_fd, name))

    def _book(self, kind: str) -> str:
        """Return the name of a book of this namespace, which all who may write to the root may write."""
        name = f"{self._mapper.folder}/{kind}{self.chunks.removeprefix(self._mapper.folder)}"
        fd = open_file(self.root_fd, name, os.O_RDWR | os.O_CREAT)
        below.permit(fd, self.mode & 0o666)
        os.close(fd)
        return name

    def _own(self, root: str, undo: ExitStack) -> None:
        if self.owner is not None:
            return
        shared = bool(self._options.shared) and self._options.layout == "files"
        holder = Holder.of(self._context, self.writer, shared=shared)
        self.owner = RootOwner(root, self.root_fd, holder, self.mode & 0o666)
        self.owner.take()
        undo.callback(self.owner.let_go, undo=True)

    def _say_it_is_used(self) -> None:
        """Lock the folder of chunks along with all who use it: `kvtier prune` removes no empty one that is locked."""
        self._used_fd = open_folder(self.root_fd, self.chunks)
        with suppress(OSError):  # Not every file server has locks; and what is removed is made again.
            fcntl.flock(self._used_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _refuse_links(self) -> None:
        for name in filter(_OWN.fullmatch, os.listdir(self._used_fd)):  # 4,096 at most, or all segments.
            with suppress(FileNotFoundError):
                if stat.S_ISLNK(below.look(self._used_fd, name).st_mode):
                    kind = stat.S_IFREG if name.endswith(".seg") else stat.S_IFDIR
                    below.refuse_others(self.root_fd, f"{self.chunks}/{name}", kind)

    def _try_direct(self) -> bool:
        """Write and read two pages the way that chunks will be, aligned by a page; return whether directly."""
        mode, root = self._options.io, self._options.root
        if mode != "buffered" and self._transfers(os.O_DIRECT):
            return True
        if mode == "direct":
            raise ConfigError(f"io: 'direct' given, 'auto' or 'buffered' accepted: {root} refuses it")
        if not self._transfers(0):
            raise BackendUnavailable(f"{root}: what is written there does not come back")
        if mode == "auto":
            logger.warning("%s: no direct I/O there; chunks go through the page cache; see %s", root, Remedy.BUFFERED)
        return False

    def _try_reads(self) -> Reads:
        """Return how lanes read: several reads at once only from a local disk: a silent server's cannot be killed."""
        is_disk = os.major(self._status.st_dev) != 0  # Only block devices have a nonzero major number.
        if is_disk and has_queue():
            return Reads(QUEUE_BYTES)
        logger.info("%s: a lane reads one chunk at a time there", self._options.root)
        return ONE_BY_ONE

    def _new_folder_bytes(self) -> int:
        name = f"{self._mapper.folder}/{temporary_name(self.writer)}"
        try:
            below.mkdir(self.root_fd, name, self.mode)
        except OSError as error:
            if error.errno in FULL:
                return self.disk.block_bytes
            raise
        try:
            return below.look(self.root_fd, name).st_blocks * SECTOR_BYTES
        finally:
            self.remains.remove(name, self.disk.block_bytes, partial(remove_folder, self.root_fd, name))

    def _transfers(self, flag: int) -> bool:
        folder, name = self._mapper.folder, temporary_name(self.writer)
        try:
            with ExitStack() as stack:
                folder_fd = stack.enter_context(Reached(self.root_fd, folder))
                stack.callback(self.remains.remove, f"{folder}/{name}", self.disk.block_bytes * 2)
                # Linux makes the file before it refuses the flag.
                fd = open_below(folder_fd, name, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag)
                stack.callback(os.close, fd)
                page = memoryview(mmap.mmap(-1, PAGE_BYTES))
                page[:] = os.urandom(len(page))
                os.pwrite(fd, page, 0)
                self.disk.tried(os.fstat(fd))
                return _come_back(fd)
        except OSError as error:
            if flag and error.errno in _REFUSED:
                return False
            if error.errno in FULL:
                return self._readable(flag)
            raise

    def _readable(self, flag: int) -> bool:
        """Try reading alone: a full disk still serves its chunks."""
        try:
            fd = open_below(self.root_fd, self._mapper.config_name, os.O_RDONLY | flag | NO_LINK)
            try:
                return os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0) > 0
            finally:
                os.close(fd)
        except OSError as error:
            if flag and error.errno in _REFUSED:
                return False
            raise

    def _settle_config(self, undo: ExitStack) -> None:
        """Leave the names' meaning beside the chunks, as vLLM does, or see that what is there says the same."""
        name, ours = self._mapper.config_name, self._mapper.config_bytes
        if (there := self.read(name, CONFIG_BYTES_MAX)) is None:
            self.publish(name, [ours])
            undo.callback(_quietly, below.unlink, self.root_fd, name)
            return
        try:
            same = foreign(json.loads, there) == json.loads(ours)
        except ValueError:  # vLLM writes in place: this may be the half that a killed one left.
            logger.warning("%s/%s: not JSON; written again; see %s", self._options.root, name, Remedy.REWRITTEN)
            self.publish(name, [ours])
            return
        if not same:
            raise ConfigError(
                f"root: {self._options.root!r} given, a directory whose {name} is this namespace's accepted: "
                "this one's fields are others"
            )


def _folders_mode(root_mode: int) -> int:
    """Return the mode of folders below a root: its own bits, but nothing to write for all the world."""
    if root_mode & stat.S_ISVTX:  # A directory where everybody makes their own, such as /tmp.
        return stat.S_IRWXU
    return stat.S_IRWXU | root_mode & (stat.S_ISGID | stat.S_IRWXG | stat.S_IROTH | stat.S_IXOTH)


def _quietly(call: Callable[..., None], *args: int | str) -> None:
    with suppress(OSError):
        call(*args)


def _come_back(fd: int) -> bool:
    written, read = (memoryview(mmap.mmap(-1, 2 * PAGE_BYTES)) for _ in range(2))
    written[:] = bytes(range(256)) * (len(written) // 256)
    halves = slice(None, PAGE_BYTES), slice(PAGE_BYTES, None)
    if (sent := os.pwritev(fd, [written[half] for half in halves], 0)) < len(written):
        os.pwrite(fd, written[sent:], sent)  # The error that stopped it is raised now.
    received = os.preadv(fd, [read[half] for half in halves], 0)
    return sent == received == len(written) and read == written
