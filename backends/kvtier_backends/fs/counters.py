"""The tier's own counters: events that matter to a user, counted where the tier sees them."""

import threading
from collections import Counter

import msgspec


class FsCounters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Totals since the tier was opened."""

    buffered_fallback: int = 0  # 1 if direct I/O was wanted and refused.
    unverified_accepted: int = 0  # Loads of files without a footer.
    unverified_refused: int = 0
    other_version: int = 0  # Loads of files of a later format, which are left alone.
    sealed_kind: int = 0  # Loads of chunks sealed otherwise than the option `seal` says; left alone.
    sealed_key: int = 0  # Loads of chunks sealed with a key that the tier lacks; left alone.
    corrupt: dict[str, int] = {}  # Files, by `ChunkFault`.
    corrupt_left: int = 0  # Of those, files that could not be deleted.
    scan_skipped: int = 0  # Files found at the start that no load would take: a wrong length, or refused.
    scan_swept: int = 0  # Temporaries of dead processes, removed.
    scan_others: int = 0  # Folders of other namespaces, left alone.
    evicted: int = 0  # Files that went for room.
    expired: int = 0  # Files that went because they were not used for `ttl_s`.
    evictions_failed: int = 0  # Files that could not be removed, and take room still.
    refused: dict[str, int] = {}  # Chunks without room, by reason: `capacity`, `disk`, `write_budget`, `others`.
    segments_lost: int = 0  # Segments that another program has removed, with their chunks.
    disk_full: int = 0  # Chunks that the file system had no room for, whatever the limit says.
    checkpoint_chunks: int = 0  # Chunks that the last life's checkpoint named.
    checkpoints_ignored: int = 0  # Torn, of another version or namespace.
    checkpoints_written: int = 0
    checkpoints_failed: int = 0
    scan_failed: int = 0  # Folders that could not be read: the tier then goes on asking the file system.


def by_name(counters: FsCounters) -> dict[str, int]:
    """Return the totals with those by kind as names of their own, such as `corrupt_payload`."""
    totals = msgspec.structs.asdict(counters)
    kinds: dict[str, dict[str, int]] = {name: totals.pop(name) for name in ("corrupt", "refused")}
    return totals | {f"{name}_{kind}": total for name, by in kinds.items() for kind, total in by.items()}


class Counters:
    """Counts on behalf of any thread."""

    def __init__(self) -> None:
        """Start from zero."""
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._corrupt: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def count(self, what: str, times: int = 1) -> None:
        """Add to the counter of this name in `FsCounters`."""
        with self._lock:
            self._totals[what] += times

    def corrupt(self, fault: str) -> None:
        """Count one corrupt chunk, by its `ChunkFault`."""
        with self._lock:
            self._corrupt[str(fault)] += 1

    def refuse(self, reason: str, chunks: int) -> None:
        """Count chunks that were not stored for want of room."""
        if chunks:
            with self._lock:
                self._refused[reason] += chunks

    def totals(self) -> FsCounters:
        """Return what was counted so far."""
        with self._lock:
            return FsCounters(**self._totals, corrupt=dict(self._corrupt), refused=dict(self._refused))
