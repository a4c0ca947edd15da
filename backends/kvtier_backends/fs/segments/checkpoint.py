"""The checkpoint of segments: the place of each chunk, in a file. A start answers from it until it has read footers.

It is the truth for segments that were not written since, and a head start for others: a torn one, an old one or none
costs time only. A segment was not written since if its file has the time in the checkpoint, to the nanosecond, on the
same boot of the same machine. In other segments, a chunk that the checkpoint names is a candidate until its footer has
been read.

Little-endian: magic 8, version u32, longest key u32, row length u64, namespace fingerprint 32; boot 32, segments u64,
for each segment the length of its name u16, its name, its first slot u64, its slots u64, its time in ns u64 (0: do not
trust); for each chunk the length of its key u8, the key padded to the longest, its slot u64, its sequence number u64,
its last use in ns since the epoch u64; XXH3-64 of all that, u64.
"""

import hashlib
import logging
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from kvtier.backend import INVENTORY_BATCH_KEYS, FileMapper, OffloadKey
from kvtier.errors import Remedy
from kvtier_backends.fs.disk.footer import SLICE_BYTES
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import boot_id
from kvtier_backends.fs.layout import Counters
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.table import Snapshot

logger = logging.getLogger(__name__)

MAGIC = b"\x89kvtsix\n"
VERSION = 1
CHECKPOINT_S = 1_800.0  # Between two checkpoints; a start without one reads every footer.
KEY_BYTES_MAX = 68  # Hashes of 64 bytes. Chunks with longer ones are left to the scan.
BYTES_MAX = 2 << 30  # Twenty-five million chunks of 32-byte hashes. More are left to the scan.
SEGMENT_BYTES_MAX = 512  # Of a segment in it: a name has 255 bytes at most.
SETTLED_NS = 1_000_000_000  # A file's time says nothing of what was written so shortly before it was looked at.

_FAILURE = "%s: the checkpoint cannot be %s: %s; see %s"
_HEAD = struct.Struct("<8sIIQ32s")
_PREAMBLE = struct.Struct("<32sQ")
_NAME_BYTES = struct.Struct("<H")
_SEGMENT = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")


def _record(key_bytes: int) -> struct.Struct:
    return struct.Struct(f"<B{key_bytes}sQQQ")


def _columns(key_bytes: int) -> "np.dtype[np.void]":
    """Return the same record for numpy."""
    numbers = [(name, "<u8") for name in ("slot", "sequence", "used_at_ns")]
    return np.dtype([("length", "u1"), ("key", f"V{key_bytes}"), *numbers])


RECORD_BYTES_MAX = _record(KEY_BYTES_MAX).size


class Remembered(NamedTuple):
    """A segment as a checkpoint names it."""

    name: str
    first_slot: int
    slots: int
    written_at_ns: int  # 0: not to be trusted.


class Memory(NamedTuple):
    """The content of a checkpoint."""

    same_boot: bool
    segments: list[Remembered]
    chunks: "NDArray[np.void]"  # Records by column: millions of them make no objects.


class SlotCheckpoint:
    """One namespace's checkpoint, beside its configuration. Blocks; one thread at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, counters: Counters, row_bytes: int) -> None:
        self._folder = folder
        self._name = f"{mapper.folder}/index{folder.chunks.removeprefix(mapper.folder)}"
        self._row_bytes, self._fingerprint = row_bytes, mapper.fingerprint
        self._counters = counters

    def bytes_worst(self, chunks: int, segments: int) -> int:
        preamble_bytes = _PREAMBLE.size + segments * SEGMENT_BYTES_MAX
        size_bytes = _HEAD.size + preamble_bytes + chunks * RECORD_BYTES_MAX + _CHECKSUM.size
        block_bytes = self._folder.disk.block_bytes
        return (min(size_bytes, BYTES_MAX) // block_bytes + 2) * block_bytes  # Its last, and its extents'.

    def write(self, segments: Sequence[Remembered], snapshot: Snapshot) -> None:
        """Put a checkpoint in place of the last one, whole or not at all; a failure is logged and counted."""
        try:
            self._folder.publish(self._name, self._written(segments, snapshot))
        except OSError as error:
            self._counters.count("checkpoints_failed")
            logger.warning(_FAILURE, self._name, "written", error.strerror, Remedy.CHECKPOINT)
        else:
            self._counters.count("checkpoints_written")

    def read(self) -> Memory | None:
        """Return the content of the last checkpoint; None if no checkpoint can be used."""
        try:
            content = self._folder.read(self._name, BYTES_MAX + 1)
        except OSError as error:
            content = b""
            logger.warning(_FAILURE, self._name, "read", error.strerror, Remedy.CHECKPOINT)
        if content is None:
            return None
        found = self._found(content)
        if found is None:
            self._counters.count("checkpoints_ignored")
            logger.info("%s: no checkpoint of this namespace and version, or torn; ignored", self._name)
        else:
            self._counters.count("checkpoint_chunks", len(found.chunks))
        return found

    def _written(self, segments: Sequence[Remembered], snapshot: Snapshot) -> Iterator[bytes]:
        lengths = Counter(len(key) for key in snapshot.keys if key is not None)
        longest = max((length for length in lengths if length <= KEY_BYTES_MAX), default=0)
        record = _record(longest)
        head = _HEAD.pack(MAGIC, VERSION, longest, self._row_bytes, self._fingerprint)
        most = (BYTES_MAX - len(head) - len(_preamble(segments, whole=False)) - _CHECKSUM.size) // record.size
        head += _preamble(segments, whole=longest == max(lengths, default=0) and lengths.total() <= most)
        packed = (record.pack(len(key), key, *said) for key, *said in snapshot.entries() if len(key) <= KEY_BYTES_MAX)
        kept = islice(packed, max(0, most))
        total = xxh3_64(head)
        yield head
        while part := b"".join(islice(kept, INVENTORY_BATCH_KEYS)):
            total.update(part)
            yield part
        yield _CHECKSUM.pack(total.intdigest())

    def _found(self, content: bytes) -> Memory | None:
        end = len(content) - _CHECKSUM.size
        if end < _HEAD.size or len(content) > BYTES_MAX:
            return None
        magic, version, longest, row_bytes, fingerprint = _HEAD.unpack_from(content)
        ours = MAGIC, VERSION, self._row_bytes, self._fingerprint
        if (magic, version, row_bytes, fingerprint) != ours or longest > KEY_BYTES_MAX:
            return None
        whole = memoryview(content)
        total = xxh3_64()
        for start in range(0, end, SLICE_BYTES):  # In one call, no other thread would run meanwhile.
            total.update(whole[start : min(start + SLICE_BYTES, end)])
        if _CHECKSUM.unpack_from(content, end) != (total.intdigest(),):
            return None
        try:
            same_boot, segments, size = _read_preamble(whole[_HEAD.size : end])
        except (OSError, ValueError, struct.error):  # The checksum is right, and the content is not ours.
            return None
        at, columns = _HEAD.size + size, _columns(longest)
        chunks, rest = divmod(end - at, columns.itemsize)
        return None if rest or chunks < 0 else Memory(same_boot, segments, np.frombuffer(content, columns, chunks, at))


def keys_of(chunks: "NDArray[np.void]") -> list[OffloadKey]:
    lengths, keys = (chunks[name].tolist() for name in ("length", "key"))
    return [OffloadKey(key[:length]) for length, key in zip(lengths, keys, strict=True)]


def remembered(segments: Sequence[Segment], before_ns: int) -> list[Remembered]:
    """Return segments as a checkpoint names them; those written to since that time are not to be trusted. Blocks."""
    found: list[Remembered] = []
    for segment in segments:
        if segment.own and not segment.closed:
            try:
                status = os.fstat(segment.fd)
            except OSError:
                continue  # Another lane has just removed it.
            if not status.st_nlink:
                continue  # Another process has. Another file may have its name by now.
            trusted_ns = status.st_mtime_ns if 0 < status.st_mtime_ns < before_ns else 0
            found.append(Remembered(segment.name, segment.first_slot, segment.header.slots, trusted_ns))
    return found


def trusted(segments: Sequence[Remembered], unsettled: set[str]) -> list[Remembered]:
    return [each._replace(written_at_ns=0) if each.name in unsettled else each for each in segments]


def _preamble(segments: Sequence[Remembered], *, whole: bool) -> bytes:
    """`whole`: all their chunks are named; otherwise they are not to be trusted."""
    parts = [_PREAMBLE.pack(_boot(), len(segments))]
    for name, first_slot, slots, written_at_ns in segments:
        encoded = name.encode()
        parts += _NAME_BYTES.pack(len(encoded)), encoded, _SEGMENT.pack(first_slot, slots, written_at_ns * whole)
    return b"".join(parts)


def _read_preamble(content: memoryview) -> tuple[bool, list[Remembered], int]:
    boot, count = _PREAMBLE.unpack_from(content)
    segments: list[Remembered] = []
    at = _PREAMBLE.size
    for _ in range(count):
        (name_bytes,) = _NAME_BYTES.unpack_from(content, at)
        at += _NAME_BYTES.size
        name = bytes(content[at : at + name_bytes]).decode()
        segments.append(Remembered(name, *_SEGMENT.unpack_from(content, at + name_bytes)))
        at += name_bytes + _SEGMENT.size
    return boot == _boot(), segments, at


def _boot() -> bytes:
    return hashlib.sha256(boot_id()).digest()
