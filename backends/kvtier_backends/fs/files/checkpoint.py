"""What the index knew, in a file: the next start answers from it while its scan finds out what became of it.

A head start and never the truth: what it names is looked for like everything else, so that a torn one, an old one or
none costs time and nothing else. The newest chunk comes first, being the one that is asked for soonest.

Little-endian: magic 8, version u32, longest key u32, row length u64, namespace fingerprint 32; for each chunk the
length of its key u8, the key padded to the longest, its sectors of 512 bytes u32, its last use in ns since the epoch
u64; XXH3-64 of all that, u64.
"""

import logging
import struct
from collections.abc import Iterator
from itertools import islice

from xxhash import xxh3_64

from kvtier.backend import INVENTORY_BATCH_KEYS, FileMapper, OffloadKey
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES
from kvtier_backends.fs.disk.footer import SLICE_BYTES
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.index import Held, Snapshot

logger = logging.getLogger(__name__)

MAGIC = b"\x89kvtidx\n"
VERSION = 1
BYTES_MAX = 512 << 20  # Ten million chunks of 32-byte hashes. The oldest of more are left to the scan.
KEY_BYTES_MAX = 68  # Hashes of 64 bytes. Chunks with longer ones are left to the scan.

_HEAD = struct.Struct("<8sIIQ32s")
_CHECKSUM = struct.Struct("<Q")


class Checkpoint:
    """One namespace's checkpoint. Blocks; one thread at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, counters: Counters, row_bytes: int) -> None:
        """Keep it in an opened folder, beside the namespace's configuration."""
        self._folder = folder
        self._name = f"{mapper.folder}/index{mapper.chunks_folder.removeprefix(mapper.folder)}"
        self._fingerprint = mapper.fingerprint
        self._row_bytes = row_bytes
        self._counters = counters
        self.used_bytes = 0
        """What it takes more of the disk than it did at the start."""

    def bytes_worst(self, chunks: int) -> int:
        """Return the most that a checkpoint of so many chunks takes of the disk."""
        size_bytes = _HEAD.size + chunks * _record(KEY_BYTES_MAX).size + _CHECKSUM.size
        block_bytes = self._folder.disk.block_bytes
        return (min(size_bytes, BYTES_MAX) // block_bytes + 2) * block_bytes  # Its last block, and its extents'.

    def write(self, snapshot: Snapshot, now_ns: int) -> None:
        """Put a checkpoint in place of the last one, whole or not at all; a failure is logged and counted."""
        try:
            before_bytes = self._folder.taken_bytes(self._name)
            self._folder.publish(self._name, self._written(snapshot, now_ns))
            self.used_bytes += self._folder.taken_bytes(self._name) - before_bytes
        except OSError as error:
            self._counters.count("checkpoints_failed")
            logger.warning("%s: the checkpoint cannot be written: %s", self._name, error.strerror)
        else:
            self._counters.count("checkpoints_written")

    def read(self) -> Iterator[list[Held]]:
        """Yield what the last checkpoint says, newest first, in batches; nothing if there is none that can be used."""
        try:
            content = self._folder.read(self._name, BYTES_MAX + 1)
        except OSError as error:
            content = b""
            logger.warning("%s: the checkpoint cannot be read: %s", self._name, error.strerror)
        if content is None:
            return
        if (record := self._record(content)) is None:
            self._counters.count("checkpoints_ignored")
            logger.info("%s: no checkpoint of this namespace and version, or torn; ignored", self._name)
            return
        rows = record.iter_unpack(memoryview(content)[_HEAD.size : -_CHECKSUM.size])
        while batch := [
            Held(OffloadKey(key[:key_bytes]), sectors * SECTOR_BYTES, used_at_ns)
            for key_bytes, key, sectors, used_at_ns in islice(rows, INVENTORY_BATCH_KEYS)
        ]:
            self._counters.count("checkpoint_chunks", len(batch))
            yield batch

    def _written(self, snapshot: Snapshot, now_ns: int) -> Iterator[bytes]:
        longest = max((len(key) for key in snapshot.keys if len(key) <= KEY_BYTES_MAX), default=0)
        total, head = xxh3_64(), _HEAD.pack(MAGIC, VERSION, longest, self._row_bytes, self._fingerprint)
        total.update(head)
        yield head
        record = _record(longest)
        records = (
            record.pack(len(key), key, allocated_bytes // SECTOR_BYTES, used_at_ns)
            for key, allocated_bytes, used_at_ns, _ in snapshot.newest_first(now_ns)
            if len(key) <= KEY_BYTES_MAX
        )
        kept = islice(records, (BYTES_MAX - _HEAD.size - _CHECKSUM.size) // record.size)
        while part := b"".join(islice(kept, INVENTORY_BATCH_KEYS)):
            total.update(part)
            yield part
        yield _CHECKSUM.pack(total.intdigest())

    def _record(self, content: bytes) -> struct.Struct | None:
        """Return how a chunk is written in a checkpoint; None if this is not one of ours, whole."""
        if len(content) < _HEAD.size + _CHECKSUM.size:
            return None
        magic, version, longest, row_bytes, fingerprint = _HEAD.unpack_from(content)
        if (magic, version, row_bytes, fingerprint) != (MAGIC, VERSION, self._row_bytes, self._fingerprint):
            return None
        record = _record(longest) if longest <= KEY_BYTES_MAX else None
        if record is None or (len(content) - _HEAD.size - _CHECKSUM.size) % record.size:
            return None
        total, end = xxh3_64(), len(content) - _CHECKSUM.size
        for start in range(0, end, SLICE_BYTES):
            total.update(memoryview(content)[start : min(start + SLICE_BYTES, end)])
        return record if _CHECKSUM.unpack_from(content, end) == (total.intdigest(),) else None


def _record(longest: int) -> struct.Struct:
    return struct.Struct(f"<B{longest}sIQ")
