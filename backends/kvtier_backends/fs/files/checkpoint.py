"""The checkpoint of an index: each chunk that it knew, the newest first, being the one that is asked for soonest.

Chunks that it names are looked for like all others. In the framing of `disk.checkpoint`: no preamble; of each chunk its
sectors of 512 bytes u32, and its last use in ns since the epoch u64.
"""

from collections import Counter
from collections.abc import Iterator

from kvtier.backend import FileMapper
from kvtier_backends.fs.counters import Counters
from kvtier_backends.fs.disk.capacity import SECTOR_BYTES
from kvtier_backends.fs.disk.checkpoint import CheckpointFile, Format
from kvtier_backends.fs.disk.root import Folder
from kvtier_backends.fs.files.index import Held, Snapshot

MAGIC = b"\x89kvtidx\n"
BYTES_MAX = 512 << 20  # Ten million chunks of 32-byte hashes. The oldest of more are left to the scan.


class Checkpoint:
    """One namespace's checkpoint. Blocks; one thread at a time."""

    def __init__(self, folder: Folder, mapper: FileMapper, counters: Counters, row_bytes: int) -> None:
        """Keep it in an opened folder, beside the namespace's configuration."""
        self._file = CheckpointFile(folder, mapper, counters, row_bytes, Format(MAGIC, "IQ", BYTES_MAX))
        self.bytes_worst = self._file.bytes_worst

    def write(self, snapshot: Snapshot, now_ns: int) -> None:
        """Put a checkpoint in place of the last one, whole or not at all; a failure is logged and counted."""
        records = (
            (key, allocated_bytes // SECTOR_BYTES, used_at_ns)
            for key, allocated_bytes, used_at_ns, _ in snapshot.newest_first(now_ns)
        )
        self._file.write(Counter(map(len, snapshot.keys)), records, lambda _: b"")

    def read(self) -> Iterator[list[Held]]:
        """Yield the last checkpoint's chunks, newest first, in batches; nothing if no checkpoint can be used."""
        found = self._file.read(lambda _: (None, 0))
        for batch in () if found is None else found[1].batches():
            yield [Held(key, sectors * SECTOR_BYTES, used_at_ns) for key, sectors, used_at_ns in batch]
