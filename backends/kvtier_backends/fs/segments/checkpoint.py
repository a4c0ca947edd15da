"""The checkpoint of segments: the place of each chunk. It is the truth for segments that were not written since.

A segment was not written since if its file has the time in the checkpoint, to the nanosecond, on the same boot of the
same machine. In other segments, a chunk that the checkpoint names is a candidate until its footer has been read.

In the framing of `disk.checkpoint`: a preamble of boot 32, segments u64, for each segment the length of its name u16,
its name, its first slot u64, its slots u64, its time in ns u64 (0: do not trust); of each chunk its slot u64, its
sequence number u64, its last use in ns since the epoch u64.
"""

import hashlib
import os
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtier.backend import FileMapper, OffloadKey
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.checkpoint import CheckpointFile, Format, Records
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.disk.temporaries import boot_id
from kvtier_backends.fs.segments.segment import Segment
from kvtier_backends.fs.segments.slots import Snapshot

MAGIC = b"\x89kvtsix\n"
FIELDS = "QQQ"
BYTES_MAX = 2 << 30  # Twenty-five million chunks of 32-byte hashes. More are left to the scan.
RECORD_BYTES_MAX = Format(MAGIC, FIELDS, BYTES_MAX).record_bytes_max
SEGMENT_BYTES_MAX = 512  # Of a segment in it: a name has 255 bytes at most.
SETTLED_NS = 1_000_000_000  # A file's time says nothing of what was written so shortly before it was looked at.

_PREAMBLE = struct.Struct("<32sQ")
_NAME_BYTES = struct.Struct("<H")
_SEGMENT = struct.Struct("<QQQ")
_LENGTH_BYTES = 1  # Of a key's length, before the key.


class Remembered(NamedTuple):
    """A segment as a checkpoint names it."""

    name: str
    first_slot: int
    slots: int
    written_at_ns: int  # 0: not to be trusted.


class Chunks(NamedTuple):
    """The chunks of a checkpoint, by column: millions of them make no objects but their keys, when these are wanted."""

    slots: NDArray[np.uint64]
    sequences: NDArray[np.uint64]
    used_at_ns: NDArray[np.uint64]
    lengths: NDArray[np.uint8]
    records: Records

    def keys(self, chosen: NDArray[np.intp]) -> list[OffloadKey]:
        """Return the keys of chosen chunks."""
        content, begin, _, _, form = self.records
        places = begin + _LENGTH_BYTES + chosen * form.size
        ends = places + self.lengths[chosen]
        return [OffloadKey(content[at:end]) for at, end in zip(places.tolist(), ends.tolist(), strict=True)]


class Memory(NamedTuple):
    """The content of a checkpoint."""

    same_boot: bool
    segments: list[Remembered]
    chunks: Chunks


class SlotCheckpoint:
    """One namespace's checkpoint. Blocks; one thread at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, counters: Counters, row_bytes: int) -> None:
        """Keep it in an opened folder, beside the namespace's configuration."""
        self._file = CheckpointFile(folder, mapper, counters, row_bytes, Format(MAGIC, FIELDS, BYTES_MAX))

    def bytes_worst(self, chunks: int, segments: int) -> int:
        """Return the most that a checkpoint of so many chunks takes of the disk."""
        return self._file.bytes_worst(chunks, _PREAMBLE.size + segments * SEGMENT_BYTES_MAX)

    def write(self, segments: Sequence[Remembered], snapshot: Snapshot) -> None:
        """Put a checkpoint in place of the last one, whole or not at all; a failure is logged and counted."""
        lengths = Counter(len(key) for key in snapshot.keys if key is not None)
        self._file.write(lengths, snapshot.held(), lambda whole: _preamble(segments, whole=whole))

    def read(self) -> Memory | None:
        """Return the content of the last checkpoint; None if no checkpoint can be used."""
        found = self._file.read(_read_preamble)
        if found is None:
            return None
        (same_boot, segments), records = found
        return Memory(same_boot, segments, _columns(records))


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
                continue  # Somebody else has. Another one may have its name by now.
            trusted_ns = status.st_mtime_ns if 0 < status.st_mtime_ns < before_ns else 0
            found.append(Remembered(segment.name, segment.first_slot, segment.header.slots, trusted_ns))
    return found


def trusted(segments: Sequence[Remembered], unsettled: set[str]) -> list[Remembered]:
    """Return segments as they are, but for those that are unsettled: these are not to be trusted."""
    return [each._replace(written_at_ns=0) if each.name in unsettled else each for each in segments]


def _columns(records: Records) -> Chunks:
    fields_at = _LENGTH_BYTES + records.key_bytes
    row = np.dtype(
        {
            "names": ["length", "slot", "sequence", "used_at_ns"],
            "formats": ["u1", "<u8", "<u8", "<u8"],
            "offsets": [0, fields_at, fields_at + 8, fields_at + 16],
            "itemsize": records.form.size,
        }
    )
    table = np.frombuffer(records.content, row, records.chunks, records.begin)
    lengths = np.minimum(table["length"], records.key_bytes).astype(np.uint8)
    return Chunks(table["slot"], table["sequence"], table["used_at_ns"], lengths, records)


def _preamble(segments: Sequence[Remembered], *, whole: bool) -> bytes:
    """`whole`: all that is in them is named; else they are not to be trusted."""
    parts = [_PREAMBLE.pack(_boot(), len(segments))]
    for name, first_slot, slots, written_at_ns in segments:
        encoded = name.encode()
        parts += (
            _NAME_BYTES.pack(len(encoded)),
            encoded,
            _SEGMENT.pack(first_slot, slots, written_at_ns if whole else 0),
        )
    return b"".join(parts)


def _read_preamble(content: memoryview) -> tuple[tuple[bool, list[Remembered]], int]:
    boot, count = _PREAMBLE.unpack_from(content)
    segments: list[Remembered] = []
    at = _PREAMBLE.size
    for _ in range(count):
        (name_bytes,) = _NAME_BYTES.unpack_from(content, at)
        at += _NAME_BYTES.size
        name = bytes(content[at : at + name_bytes]).decode()
        segments.append(Remembered(name, *_SEGMENT.unpack_from(content, at + name_bytes)))
        at += name_bytes + _SEGMENT.size
    return (boot == _boot(), segments), at


def _boot() -> bytes:
    return hashlib.sha256(boot_id()).digest()
