"""A lane's share of a batch of files: each chunk verified and answered for by itself, and recorded in the share.

A share has many chunks, as a call costs as much as reading one. A cancelled call's return value would be lost.
"""

import errno
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvtier.backend import OffloadKey, Outcome, Read, Write
from kvtier.errors import ChunkCorrupt, ChunkMissing
from kvtier_backends.fs.disk.below import ForeignError, believable_ns
from kvtier_backends.fs.disk.footer import FOOTER_BYTES, GONE, LEFT_ALONE, ChunkFault, Whole, failure, judge_length
from kvtier_backends.fs.disk.lanes import Pages, share_chunks
from kvtier_backends.fs.disk.reads import Wanted, read_on
from kvtier_backends.fs.files.chunk_files import ChunkFiles, DoubtError, FoundFile
from kvtier_backends.fs.files.index import FileEntry, is_later
from kvtier_backends.fs.layout import FsTier

ROOM_BYTES = FOOTER_BYTES  # Behind the footer; it stays empty unless a file is too long: no call asks for that.


@dataclass(slots=True)
class LoadShare:
    """Reads of one lane, and their outcomes in order, once it has ended."""

    reads: Sequence[Read]
    leaving: Collection[OffloadKey]  # Keys whose files are on their way out, and may be anything by now.
    measure: bool  # Whether to say how much room the files take: for keys that the index does not know.
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    allocated_bytes: list[int | None] = field(default_factory=list[int | None])  # None: not loaded, or not measured.
    left: set[OffloadKey] = field(default_factory=set[OffloadKey])  # Keys whose files are of no use here, and stay.
    irremovable: set[OffloadKey] = field(default_factory=set[OffloadKey])  # Keys of corrupt files that stay for now.
    gone: int = 0  # Failures that say that the whole file system is away.
    opened: dict[int, int] = field(default_factory=dict[int, int])  # Files' descriptors, by position in the share.
    found: dict[int, Outcome] = field(default_factory=dict[int, Outcome])  # The same: outcomes other than `None`.
    sizes: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True)
class StoreShare:
    """Writes of one lane, and the outcomes of those that it has done, in order."""

    writes: Sequence[Write]
    used_at_ns: int  # The head's time; each of the others is a little older, so that it goes before the head.
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    allocated_bytes: list[int | None] = field(default_factory=list[int | None])  # None: not stored.
    doubtful: set[OffloadKey] = field(default_factory=set[OffloadKey])  # Keys of failed stores that may be in place.
    gone: int = 0


class FileChunks:
    """The blocking part of loads, stores and removals of files. As many threads may call at once as there are pages."""

    def __init__(self, tier: FsTier) -> None:
        lanes, mapper = tier.lanes, tier.context.mapper
        self._tier = tier
        self._files = ChunkFiles(tier.root, mapper, lanes.loads_first, fsync=tier.options.fsync)
        self._row_bytes = tier.context.row_bytes
        self._packing = tier.packing
        beside_bytes = tier.packing.beside_bytes
        self._load_pages = Pages(lanes.load.count, share_chunks(self._row_bytes) * (beside_bytes + ROOM_BYTES))
        self._store_pages = Pages(lanes.store.count, beside_bytes)

    def load(self, share: LoadShare) -> None:
        """Fill the share's buffers; none but a `None` outcome says that one holds its chunk."""
        with self._load_pages.one() as pages:
            try:
                self._tier.root.reads(self._wanted(share, pages))
            finally:
                while share.opened:
                    os.close(share.opened.popitem()[1])
        share.outcomes = [share.found.get(index) for index in range(len(share.reads))]
        share.allocated_bytes = [share.sizes.get(index) for index in range(len(share.reads))]

    def _wanted(self, share: LoadShare, pages: memoryview) -> Iterator[Wanted]:
        size = self._packing.beside_bytes + ROOM_BYTES
        for index, (key, into) in enumerate(share.reads):
            beside = pages[index * size : (index + 1) * size]
            if key in share.leaving:
                share.found[index] = ChunkMissing(f"{key.hex()}: no file any more")
                continue
            try:
                fd = self._files.open(key)
            except (NotADirectoryError, ForeignError):
                share.found[index] = ChunkMissing(f"{key.hex()}: no file")
            except OSError as error:
                share.found[index] = failure(key, error)
                share.gone += error.errno in GONE
            else:
                if fd is None:
                    share.found[index] = ChunkMissing(f"{key.hex()}: no file")
                    self._files.tidy(key)  # Whoever has removed it may have left its folders.
                    continue
                share.opened[index] = fd
                places = self._packing.places(into, beside)
                yield Wanted(fd, places, 0, sum(map(len, places)), partial(self._came, share, index, beside))

    def _came(self, share: LoadShare, index: int, beside: memoryview, result: int | OSError) -> None:
        read, error = share.reads[index], result if isinstance(result, OSError) else None
        fd = share.opened.pop(index)
        try:
            if not isinstance(result, OSError):
                if (outcome := self._judge(share, fd, read, beside, result)) is not None:
                    share.found[index] = outcome
                elif share.measure:
                    share.sizes[index] = self._files.allocated_bytes(fd)
        except OSError as raised:
            error = raised.with_traceback(None)  # Its frames would keep the lent buffer.
        finally:
            os.close(fd)
        if error is not None and error.errno == errno.ESTALE:
            # Another host has removed it: a file server keeps no open file.
            share.found[index] = ChunkMissing(f"{read.key.hex()}: removed as it was read")
        elif error is not None:
            share.found[index] = failure(read.key, error)
            share.gone += error.errno in GONE

    def store(self, share: StoreShare) -> None:
        with self._store_pages.one() as beside:
            for index, write in enumerate(share.writes):
                with self._tier.lanes.loads_first.storing():
                    self._store(write, share.used_at_ns - index, beside, share)

    def remove(self, keys: Sequence[OffloadKey], removed: dict[OffloadKey, bool]) -> OSError | None:
        """Remove files, note each that is surely gone and whether it was there; return the last error of the others."""
        last: OSError | None = None
        for key in keys:
            try:
                removed[key] = self._files.remove(key)
            except OSError as error:
                last = error
        return last

    def evict(self, victims: Sequence[FileEntry], gone: dict[OffloadKey, int]) -> None:
        for victim in victims:
            with suppress(OSError):  # It is there still, and the caller counts it so.
                gone[victim.key] = victim.allocated_bytes if self._files.remove(victim.key, known=True) else 0

    def evict_unused(
        self, victims: Sequence[FileEntry], gone: dict[OffloadKey, int], used: list[FileEntry], *, now_ns: int
    ) -> None:
        """Remove victims, except those that others have used since, by their files' times."""
        for victim in victims:
            try:
                found = self._files.look(victim.key)
                if found is None and self._files.is_absent(victim.key):
                    self._files.tidy(victim.key)
                    gone[victim.key] = 0  # Whoever removed it has had the room.
                elif found is not None and self._is_used(found, victim, now_ns):
                    used.append(FileEntry(victim.key, found.allocated_bytes, believable_ns(found.used_at_ns, now_ns)))
                else:
                    there_bytes = victim.allocated_bytes if found is None else found.allocated_bytes
                    gone[victim.key] = there_bytes if self._files.remove(victim.key) else 0
            except OSError:
                continue  # As above.

    def look(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, int]:
        """Return the room of each key's file, 0 without a file; keys of which neither is sure are left out."""
        sure: dict[OffloadKey, int] = {}
        for key in keys:
            with suppress(OSError):
                found = self._files.look(key)
                if found is not None or self._files.is_absent(key):
                    sure[key] = 0 if found is None else found.allocated_bytes
        return sure

    def settle_folders(self) -> bool:
        return self._files.settle_folders()

    def stamp(self, used_at_ns: Mapping[OffloadKey, int]) -> None:
        for key, time_ns in used_at_ns.items():
            self._files.stamp(key, time_ns)

    def loadable(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask the file system for each key whether a load would likely find it."""
        answers: list[bool] = []
        for key in keys:
            try:
                length = self._files.length(key)
            except OSError:
                length = None
            answers.append(length is not None and self.takes(length))
        return answers

    def takes(self, file_bytes: int) -> bool:
        whole = judge_length(file_bytes, self._row_bytes)
        return whole is Whole.FOOTED or (whole is Whole.BARE and self._tier.options.unverified == "accept")

    def _is_used(self, found: FoundFile, victim: FileEntry, now_ns: int) -> bool:
        if not victim.loadable:
            return self.takes(found.file_bytes)
        believable = 0 <= found.used_at_ns == believable_ns(found.used_at_ns, now_ns)
        return believable and is_later(found.used_at_ns, victim.used_at_ns)

    def _store(self, write: Write, used_at_ns: int, beside: memoryview, share: StoreShare) -> None:
        key, row = write
        self._packing.close(key, row, beside)
        try:
            allocated_bytes = self._files.write(key, self._packing.places(row, beside), used_at_ns)
        except OSError as error:
            if isinstance(error, DoubtError):
                share.doubtful.add(key)
            share.gone += error.errno in GONE
            share.allocated_bytes.append(error.allocated_bytes if isinstance(error, DoubtError) else None)
            share.outcomes.append(failure(key, error))
        else:
            share.allocated_bytes.append(allocated_bytes)
            share.outcomes.append(None)

    def _judge(self, share: LoadShare, fd: int, read: Read, beside: memoryview, got: int) -> Outcome:
        key, into = read
        file_bytes = got
        if got != self._row_bytes + FOOTER_BYTES:  # The first read has not come to the end for certain.
            file_bytes = read_on(fd, self._packing.places(into, beside), got)
        whole = judge_length(file_bytes, self._row_bytes)
        if whole is Whole.BARE:
            return self._bare(share, key)
        fault = whole if isinstance(whole, ChunkFault) else self._packing.judge(key, into, beside)
        if fault is None:
            return None
        if left := LEFT_ALONE.get(fault):
            counter, why = left
            self._tier.counters.count(counter)
            share.left.add(key)
            return ChunkMissing(f"{key.hex()}: {why}; left alone")
        self._tier.counters.corrupt(fault)
        if not self._files.discard(key, fd, fault):
            self._tier.counters.count("corrupt_left")
            share.irremovable.add(key)
        self._files.tidy(key)
        return ChunkCorrupt(f"{key.hex()}: {fault}: a file of {file_bytes:,} bytes for a row of {self._row_bytes:,}")

    def _bare(self, share: LoadShare, key: OffloadKey) -> Outcome:
        """Judge a file without a footer. Refused, it may have replaced one of ours, and takes room as that did."""
        if self._tier.options.unverified == "accept":
            self._tier.counters.count("unverified_accepted")
            return None
        self._tier.counters.count("unverified_refused")
        share.left.add(key)
        return ChunkMissing(f"{key.hex()}: a file without a footer; refused")
