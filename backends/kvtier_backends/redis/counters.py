"""The tier's own counters: events that matter to a user, counted where the tier sees them."""

import threading
from collections import Counter


class RedisCounters:
    """Totals since the tier was opened, by name; for any thread."""

    def __init__(self) -> None:
        """Start from zero."""
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()

    def count(self, what: str, times: int = 1) -> None:
        """Add to a total."""
        with self._lock:
            self._totals[what] += times

    def totals(self) -> dict[str, int]:
        """Return a copy of what was counted so far."""
        with self._lock:
            return dict(self._totals)
