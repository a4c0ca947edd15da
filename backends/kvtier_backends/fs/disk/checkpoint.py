"""The checkpoint: a tier's knowledge in a file. The next start answers from it until the scan has looked.

A checkpoint is a head start, and never the truth. A torn one, an old one or none costs time only.

Little-endian: magic 8, version u32, longest key u32, row length u64, namespace fingerprint 32; the layout's preamble;
for each chunk the length of its key u8, the key padded to the longest, and the layout's fields; XXH3-64 of all that,
u64.
"""

import asyncio
import logging
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_64

from kvtier.backend import INVENTORY_BATCH_KEYS, FileMapper, OffloadKey
from kvtier.errors import BackendClosed
from kvtier.remedies import Remedy
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.capacity import Capacity
from kvtier_backends.fs.disk.footer import SLICE_BYTES
from kvtier_backends.fs.disk.root import Folder

logger = logging.getLogger(__name__)

T = TypeVar("T")
Record = tuple[Any, ...]  # A chunk's key, and the layout's fields.

VERSION = 1
KEY_BYTES_MAX = 68  # Hashes of 64 bytes. Chunks with longer ones are left to the scan.

_HEAD = struct.Struct("<8sIIQ32s")
_CHECKSUM = struct.Struct("<Q")


class Format(NamedTuple):
    """One layout's checkpoints."""

    magic: bytes
    fields: str  # Of a chunk, in letters of `struct`.
    bytes_max: int  # What is too much for it is left to the scan.

    def record(self, key_bytes: int) -> struct.Struct:
        return struct.Struct(f"<B{key_bytes}s{self.fields}")

    @property
    def record_bytes_max(self) -> int:
        return self.record(KEY_BYTES_MAX).size


class Records(NamedTuple):
    """The chunks of a checkpoint, packed as they are in the file."""

    content: bytes
    begin: int  # Of the first, in the content.
    chunks: int
    key_bytes: int  # To which each key is padded.
    form: struct.Struct

    def batches(self) -> Iterator[list[Record]]:
        """Yield them decoded."""
        packed = memoryview(self.content)[self.begin : self.begin + self.chunks * self.form.size]
        records = self.form.iter_unpack(packed)
        while batch := [
            (OffloadKey(key[:key_bytes]), *said) for key_bytes, key, *said in islice(records, INVENTORY_BATCH_KEYS)
        ]:
            yield batch


class CheckpointFile:
    """One namespace's checkpoint, beside its configuration. Blocks; one thread at a time."""

    def __init__(
        self, folder: Folder, mapper: FileMapper, counters: Counters, row_bytes: int, checkpoint_format: Format
    ) -> None:
        """Use an opened folder."""
        self._folder = folder
        self._name = f"{mapper.folder}/index{folder.chunks.removeprefix(mapper.folder)}"
        self._format = checkpoint_format
        self._ours = (checkpoint_format.magic, VERSION, row_bytes, mapper.fingerprint)
        self._counters = counters

    def bytes_worst(self, chunks: int, preamble_bytes: int = 0) -> int:
        """Return the most that a checkpoint of so many chunks takes of the disk."""
        size_bytes = _HEAD.size + preamble_bytes + chunks * self._format.record_bytes_max + _CHECKSUM.size
        block_bytes = self._folder.disk.block_bytes
        return (min(size_bytes, self._format.bytes_max) // block_bytes + 2) * block_bytes  # Its last, and its extents'.

    def write(self, lengths: Counter[int], records: Iterable[Record], preamble: Callable[[bool], bytes]) -> None:
        """Put a checkpoint in place of the last one, whole or not at all; a failure is logged and counted.

        `lengths`: the number of keys of each length; `preamble`: returns the bytes before the chunks, given whether all
        chunks fit.
        """
        try:
            self._folder.publish(self._name, self._written(lengths, records, preamble))
        except OSError as error:
            self._counters.count("checkpoints_failed")
            logger.warning(
                "%s: the checkpoint cannot be written: %s; see %s", self._name, error.strerror, Remedy.CHECKPOINT
            )
        else:
            self._counters.count("checkpoints_written")

    def read(self, preamble: Callable[[memoryview], tuple[T, int]]) -> tuple[T, Records] | None:
        """Return the last checkpoint's preamble, decoded, and its chunks; None if it is of no use.

        `preamble`: reads one, and says how many bytes it took.
        """
        try:
            content = self._folder.read(self._name, self._format.bytes_max + 1)
        except OSError as error:
            content = b""
            logger.warning(
                "%s: the checkpoint cannot be read: %s; see %s", self._name, error.strerror, Remedy.CHECKPOINT
            )
        if content is None:
            return None
        found = self._found(content, preamble)
        if found is None:
            self._counters.count("checkpoints_ignored")
            logger.info("%s: no checkpoint of this namespace and version, or torn; ignored", self._name)
        else:
            self._counters.count("checkpoint_chunks", found[1].chunks)
        return found

    def _written(
        self, lengths: Counter[int], records: Iterable[Record], preamble: Callable[[bool], bytes]
    ) -> Iterator[bytes]:
        longest = max((length for length in lengths if length <= KEY_BYTES_MAX), default=0)
        record = self._format.record(longest)
        magic, version, row_bytes, fingerprint = self._ours
        head = _HEAD.pack(magic, version, longest, row_bytes, fingerprint)
        most = (self._format.bytes_max - len(head) - len(preamble(False)) - _CHECKSUM.size) // record.size
        head += preamble(longest == max(lengths, default=0) and lengths.total() <= most)
        packed = (record.pack(len(key), key, *said) for key, *said in records if len(key) <= KEY_BYTES_MAX)
        kept = islice(packed, max(0, most))
        total = xxh3_64(head)
        yield head
        while part := b"".join(islice(kept, INVENTORY_BATCH_KEYS)):
            total.update(part)
            yield part
        yield _CHECKSUM.pack(total.intdigest())

    def _found(self, content: bytes, preamble: Callable[[memoryview], tuple[T, int]]) -> tuple[T, Records] | None:
        end = len(content) - _CHECKSUM.size
        if end < _HEAD.size or len(content) > self._format.bytes_max:
            return None
        magic, version, longest, row_bytes, fingerprint = _HEAD.unpack_from(content)
        if (magic, version, row_bytes, fingerprint) != self._ours or longest > KEY_BYTES_MAX:
            return None
        whole = memoryview(content)
        total = xxh3_64()
        for start in range(0, end, SLICE_BYTES):  # Else nobody else would run meanwhile.
            total.update(whole[start : min(start + SLICE_BYTES, end)])
        if _CHECKSUM.unpack_from(content, end) != (total.intdigest(),):
            return None
        try:
            said, size = preamble(whole[_HEAD.size : end])
        except (OSError, ValueError, struct.error):  # Whoever has made it knew the checksum, and nothing else.
            return None
        form, begin = self._format.record(longest), _HEAD.size + size
        chunks, rest = divmod(end - begin, form.size)
        return None if rest or chunks < 0 else (said, Records(content, begin, chunks, longest, form))


class CheckpointSchedule:
    """The schedule of a tier's checkpoints: every so often, and at the end. Belongs to the loop's thread."""

    def __init__(
        self, capacity: Capacity, counters: Counters, bytes_worst: Callable[[], int], *, every_s: float
    ) -> None:
        """`bytes_worst`: the most that one of what is known takes; `every_s`: 0: none is written, nor the last."""
        self.ready = False
        """Set once a new one is not worse than the last: what that one says is known."""
        self._capacity = capacity
        self._counters = counters
        self._bytes_worst = bytes_worst
        self._every_s = every_s

    async def run(self, write: Callable[[], Awaitable[None]], ended: Callable[[], None] = lambda: None) -> None:
        """Have one written every so often, until cancelled; `ended`: called when its room is no longer promised."""
        while self._every_s:
            await asyncio.sleep(self._every_s)
            if self.ready and (room_bytes := self._promised_bytes()) is not None:
                try:
                    await write()
                finally:
                    self._capacity.release_kept(room_bytes)
                    ended()

    def last(self, queue: Callable[[], object]) -> None:
        """Have the last one queued on a lane; only the first closing can."""
        wanted, self.ready = self.ready, False
        if wanted and self._every_s and self._promised_bytes() is not None:
            with suppress(BackendClosed):
                queue()

    def _promised_bytes(self) -> int | None:
        """Promise room for a new checkpoint; None if there is no room, and the last one stays."""
        wanted_bytes = self._bytes_worst()
        if self._capacity.reserve_kept(wanted_bytes):
            return wanted_bytes
        self._counters.count("checkpoints_failed")
        return None
