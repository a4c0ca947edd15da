"""Where each chunk was, in a file: the next start believes it where nobody has written since, and looks elsewhere.

A segment that has not been written to since has the file's time that the checkpoint says, to the nanosecond and on the
same boot of the same machine. Of any other, a checkpoint says only when its chunks were used last.

Little-endian: magic 8, version u32, longest key u32, row length u64, fingerprint 32, boot 32, segments u64; for each
segment the length of its name u16, its name, its first slot u64, its slots u64, its time in ns u64 (0: do not trust);
for each chunk the length of its key u8, the key padded to the longest, slot u64, sequence number u64, last use in ns
u64; XXH3-64 of all that, u64.
"""

import hashlib
import logging
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from xxhash import xxh3_64

from kvtier.backend import INVENTORY_BATCH_KEYS, FileMapper, OffloadKey
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.footer import SLICE_BYTES
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import boot_id
from kvtier_backends.fs.segments.slots import Held, Snapshot

logger = logging.getLogger(__name__)

MAGIC = b"\x89kvtsix\n"
VERSION = 1
BYTES_MAX = 2 << 30  # Twenty-five million chunks of 32-byte hashes. More are left to the scan.
KEY_BYTES_MAX = 68  # Hashes of 64 bytes. Chunks with longer ones are left to the scan.

_HEAD = struct.Struct("<8sIIQ32s32sQ")
_SEGMENT = struct.Struct("<QQQ")
_NAME_BYTES = struct.Struct("<H")
_CHECKSUM = struct.Struct("<Q")


def _record(longest: int) -> struct.Struct:
    return struct.Struct(f"<B{longest}sQQQ")


RECORD_BYTES_MAX = _record(KEY_BYTES_MAX).size


class Remembered(NamedTuple):
    """A segment as a checkpoint names it."""

    name: str
    first_slot: int
    slots: int
    written_at_ns: int  # 0: not to be trusted.


class Memory(NamedTuple):
    """What a checkpoint says."""

    same_boot: bool
    segments: list[Remembered]
    chunks: Iterator[list[Held]]


class SlotCheckpoint:
    """One namespace's checkpoint. Blocks; one thread at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, counters: Counters, row_bytes: int) -> None:
        """Keep it in an opened folder, beside the namespace's configuration."""
        self._folder = folder
        self._name = f"{mapper.folder}/index{folder.chunks.removeprefix(mapper.folder)}"
        self._fingerprint = mapper.fingerprint
        self._row_bytes = row_bytes
        self._counters = counters
        self._boot = bytes(32)
        self.used_bytes = 0
        """What it takes more of the disk than it did at the start."""

    def bytes_worst(self, chunks: int, segments: int) -> int:
        """Return the most that a checkpoint of so many chunks takes of the disk."""
        size_bytes = _HEAD.size + segments * 512 + chunks * RECORD_BYTES_MAX + _CHECKSUM.size
        block_bytes = self._folder.disk.block_bytes
        return (min(size_bytes, BYTES_MAX) // block_bytes + 2) * block_bytes

    def write(self, segments: Sequence[Remembered], snapshot: Snapshot) -> None:
        """Put a checkpoint in place of the last one, whole or not at all; a failure is logged and counted."""
        try:
            self._boot = _boot()
            before_bytes = self._folder.taken_bytes(self._name)
            self._folder.publish(self._name, self._written(segments, snapshot))
            self.used_bytes += self._folder.taken_bytes(self._name) - before_bytes
        except OSError as error:
            self._counters.count("checkpoints_failed")
            logger.warning("%s: the checkpoint cannot be written: %s", self._name, error.strerror)
        else:
            self._counters.count("checkpoints_written")

    def read(self) -> Memory:
        """Return what the last checkpoint says; nothing if there is none that can be used."""
        try:
            self._boot = _boot()
            content = self._folder.read(self._name, BYTES_MAX + 1)
        except OSError as error:
            content = b""
            logger.warning("%s: the checkpoint cannot be read: %s", self._name, error.strerror)
        if content is None:
            return Memory(same_boot=False, segments=[], chunks=iter(()))
        memory = self._memory(content)
        if memory is None:
            self._counters.count("checkpoints_ignored")
            logger.info("%s: no checkpoint of this namespace and version, or torn; ignored", self._name)
            return Memory(same_boot=False, segments=[], chunks=iter(()))
        return memory

    def _written(self, segments: Sequence[Remembered], snapshot: Snapshot) -> Iterator[bytes]:
        lengths = {len(key) for key in snapshot.keys if key is not None}
        longest = max((length for length in lengths if length <= KEY_BYTES_MAX), default=0)
        record = _record(longest)
        if any(length > KEY_BYTES_MAX for length in lengths):  # What is left out is to be looked for.
            segments = [segment._replace(written_at_ns=0) for segment in segments]
        total = xxh3_64()
        head = _HEAD.pack(MAGIC, VERSION, longest, self._row_bytes, self._fingerprint, self._boot, len(segments))
        for name, first_slot, slots, written_at_ns in segments:
            head += _NAME_BYTES.pack(len(name.encode())) + name.encode()
            head += _SEGMENT.pack(first_slot, slots, written_at_ns)
        total.update(head)
        yield head
        records = (
            record.pack(len(key), key, slot, sequence, used_at_ns)
            for key, slot, sequence, used_at_ns in snapshot.held()
            if len(key) <= KEY_BYTES_MAX
        )
        while part := b"".join(islice(records, INVENTORY_BATCH_KEYS)):
            total.update(part)
            yield part
        yield _CHECKSUM.pack(total.intdigest())

    def _memory(self, content: bytes) -> Memory | None:
        end = len(content) - _CHECKSUM.size
        if end < _HEAD.size or len(content) > BYTES_MAX:
            return None
        magic, version, longest, row_bytes, fingerprint, boot, count = _HEAD.unpack_from(content)
        if (magic, version, row_bytes, fingerprint) != (MAGIC, VERSION, self._row_bytes, self._fingerprint):
            return None
        total = xxh3_64()
        for start in range(0, end, SLICE_BYTES):
            total.update(memoryview(content)[start : min(start + SLICE_BYTES, end)])
        if _CHECKSUM.unpack_from(content, end) != (total.intdigest(),):
            return None
        segments: list[Remembered] = []
        at = _HEAD.size
        for _ in range(count):
            (name_bytes,) = _NAME_BYTES.unpack_from(content, at)
            at += _NAME_BYTES.size
            name = content[at : at + name_bytes].decode()
            segments.append(Remembered(name, *_SEGMENT.unpack_from(content, at + name_bytes)))
            at += name_bytes + _SEGMENT.size
        return Memory(boot == self._boot, segments, self._chunks(content, at, end, _record(longest)))

    def _chunks(self, content: bytes, at: int, end: int, record: struct.Struct) -> Iterator[list[Held]]:
        rows = record.iter_unpack(memoryview(content)[at:end])
        while batch := [
            Held(OffloadKey(key[:key_bytes]), slot, sequence, used_at_ns)
            for key_bytes, key, slot, sequence, used_at_ns in islice(rows, INVENTORY_BATCH_KEYS)
        ]:
            self._counters.count("checkpoint_chunks", len(batch))
            yield batch


def _boot() -> bytes:
    return hashlib.sha256(boot_id()).digest()
