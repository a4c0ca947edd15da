"""What the tier saw that a user should hear of, counted where it is seen."""

import threading
from collections import Counter

import msgspec

from kvtier_backends.fs.faults import Fault


class FsCounters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Totals since the tier was opened."""

    buffered_fallback: int = 0  # 1 if direct I/O was wanted and refused.
    unverified_accepted: int = 0  # Loads of files without a footer.
    unverified_refused: int = 0
    corrupt: dict[str, int] = {}  # Files, by `Fault`.
    quarantined: int = 0  # Of those; the others were deleted, but for:
    corrupt_left: int = 0  # Could not be moved or deleted.
    scan_skipped: int = 0  # Files found at the start that no load would take: a wrong length, or refused.
    scan_failed: int = 0  # Folders that could not be read: the tier then goes on asking the file system.


class Tally:
    """Counts on behalf of any thread."""

    def __init__(self) -> None:
        """Start from zero."""
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._corrupt: Counter[str] = Counter()

    def count(self, what: str, times: int = 1) -> None:
        """Add to the counter of this name in `FsCounters`."""
        with self._lock:
            self._totals[what] += times

    def corrupt(self, fault: Fault) -> None:
        """Count one corrupt file."""
        with self._lock:
            self._corrupt[fault.value] += 1

    def totals(self) -> FsCounters:
        """Return what was counted so far."""
        with self._lock:
            return FsCounters(**self._totals, corrupt=dict(self._corrupt))
