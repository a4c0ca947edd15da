"""The start-up scan of files, repeated in shared directories: in its own lane, which a closing tier does not await."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from kvtier.backend import INVENTORY_BATCH_KEYS
from kvtier.errors import Remedy
from kvtier_backends.fs.disk import below
from kvtier_backends.fs.disk.below import believable_ns, open_folder, with_folder
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES
from kvtier_backends.fs.disk.remains import called, is_absent, names_in
from kvtier_backends.fs.files.eviction import Eviction
from kvtier_backends.fs.files.index import FileEntry, FileIndex
from kvtier_backends.fs.files.lane import FileChunks
from kvtier_backends.fs.index import oldest_last
from kvtier_backends.fs.layout import FsTier

logger = logging.getLogger(__name__)

_REMOVED = {errno.ENOENT, errno.ESTALE}  # Since it was listed, or over a network as it was read.
DEPTH_MAX = 8  # Folders within folders. Names have three; a loop of bind mounts would have no end.


class Scan:
    """One walk over a namespace's files; the next batch waits until the last is indexed. Blocks; for one thread."""

    def __init__(self, tier: FsTier, takes: Callable[[int], bool]) -> None:
        self.seen_bytes = 0  # What is taken by all that it has seen, but for strangers' files.
        self.other_bytes = 0  # What is taken by a tier's files that are no chunks.
        self.skipped = 0  # Files of ours by name, that no load would take.
        self.failed = 0  # Folders that could not be read: what they take is not known.
        self._folder, self._root, self._now_ns = tier.root, tier.root.root_fd, tier.clock_ns()
        self.sweep = self._folder.sweep(self._now_ns / 1e9)
        self._mapper = tier.context.mapper
        self._takes = takes
        self._stopped = False
        self._chunks = self._all()

    def next_batch(self) -> list[FileEntry]:
        """Return the next chunks; an empty list at the end."""
        return list(islice(self._chunks, INVENTORY_BATCH_KEYS))

    def stop(self) -> None:
        self._stopped = True

    def _all(self) -> Iterator[FileEntry]:
        """Sweep old files beside the chunks, count the others, and yield the chunks."""
        try:
            for name in with_folder(self._root, self._mapper.folder, os.listdir):
                self.sweep(self._mapper.folder, name)
            self._folder.beside.look()
            self.seen_bytes += self._folder.beside.used_bytes + self._folder.remains.used_bytes
        except OSError as error:
            self._fail(self._mapper.folder, error)
        yield from self._walk(self._folder.chunks, DEPTH_MAX)

    def _walk(self, folder: str, depth: int) -> Iterator[FileEntry]:
        try:
            names, chunks = self._list(folder)
        except OSError as error:
            with suppress(OSError):
                if error.errno in _REMOVED and is_absent(self._root, folder):
                    return
            self._fail(folder, error)
            return
        yield from chunks
        for name in names if depth else ():
            yield from self._walk(f"{folder}/{name}", depth - 1)

    def _fail(self, folder: str, error: OSError) -> None:
        self.failed += 1
        logger.warning("%s: cannot be listed: %s; see %s", folder, error.strerror, Remedy.UNREADABLE)

    def _list(self, folder: str) -> tuple[list[str], list[FileEntry]]:
        """Return a folder's folders and chunks; its descriptor is closed before the walk goes on."""
        folders: list[str] = []
        chunks: list[FileEntry] = []
        fd = open_folder(self._root, folder)
        try:
            status = os.fstat(fd)
            self._folder.sizes.scanned(folder, status)
            self.seen_bytes += status.st_blocks * SECTOR_BYTES
            unseen = names_in(fd)
            with os.scandir(fd) as entries:
                for entry in entries:
                    unseen.discard(entry.name)
                    if self._stopped:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif (chunk := self._file(folder, entry)) is not None:
                        chunks.append(chunk)
            if unseen and not self._stopped and not unseen.isdisjoint(names_in(fd)):
                raise OSError(errno.EIO, "listed in part")
        finally:
            os.close(fd)
        return ([] if self._stopped else folders), chunks

    def _file(self, folder: str, entry: "os.DirEntry[str]") -> FileEntry | None:
        """Return the room of a file with a chunk's name. The room of our other files is added up."""
        temporary = self.sweep(folder, entry.name)
        key = None if temporary else self._mapper.key(f"{folder}/{entry.name}")
        status = called(lambda: entry.stat(follow_symlinks=False), self._root, f"{folder}/{entry.name}")
        if status is None:
            return None
        taken_bytes = self._folder.disk.taken_bytes(status)
        if key is None:
            # What this process writes now has been reserved.
            if temporary and not self.sweep.is_own(entry.name) and f"{folder}/{entry.name}" not in self._folder.remains:
                self.seen_bytes += taken_bytes
                self.other_bytes += taken_bytes
            return None
        self.seen_bytes += taken_bytes
        loadable = self._takes(status.st_size)
        self.skipped += not loadable
        used_at_ns = believable_ns(status.st_mtime_ns, self._now_ns)
        if used_at_ns < status.st_mtime_ns:  # Or each start would take it for the newest.
            with suppress(OSError):  # Somebody else's.
                below.date(self._root, f"{folder}/{entry.name}", used_at_ns)
        return FileEntry(key, taken_bytes, used_at_ns, loadable)


class FilesStart:
    """The scans of one tier. Belongs to the loop's thread."""

    def __init__(self, tier: FsTier, index: FileIndex, chunks: FileChunks, eviction: Eviction) -> None:
        self.done = asyncio.Event()  # Set once everything that was there at the start is known.
        self.gauged = asyncio.Event()  # Set once the scan has found a full batch, or everything.
        self._tier = tier
        self._index = index
        self._takes = chunks.takes
        self._eviction = eviction
        self._lane = tier.lanes.scan
        self._scan = Scan(tier, chunks.takes)

    def stop(self) -> None:
        self._scan.stop()
        self.gauged.set()

    async def run(self) -> None:
        accounts = self._eviction.accounts
        while True:
            await accounts.scan_began()
            await self._look()
            await accounts.scan_ended(None if self._scan.failed else self._scan.seen_bytes)
            self.done.set()
            self.gauged.set()
            if not await accounts.until_scan_is_wanted():
                return
            self._scan = Scan(self._tier, self._takes)

    async def _look(self) -> None:
        scan, counters = self._scan, self._tier.counters
        while batch := await self._lane.run(scan.next_batch):
            self._eviction.scanned(batch)
            if len(batch) == INVENTORY_BATCH_KEYS:
                self.gauged.set()
        counters.count("scan_skipped", scan.skipped)
        counters.count("scan_failed", scan.failed)
        counters.count("scan_swept", scan.sweep.removed)
        self._tier.capacity.other_bytes = scan.other_bytes
        if not scan.failed:
            self._tier.root.sizes.scan_ended()
        self._index.numbers.order_idle(await self._lane.run(oldest_last, *self._index.numbers.idle()))
        self._index.scan_ended(complete=scan.failed == 0 and not self._tier.options.shared)
        self._eviction.scan_ended(complete=scan.failed == 0)
