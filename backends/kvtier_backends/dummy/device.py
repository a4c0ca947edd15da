"""When transfers end on a device: so many at a time, each with its latency, all behind one link.

A transfer takes the slot that is free first, waits out the latency, and then sends its bytes over the link, which
serves one transfer after the other. So a burst of n chunks takes max(n / slots * latency, bytes / bandwidth) and about
one latency more, on an idle device; a busy one adds what was booked before. Loads and stores share the link, and each
byte takes the time of its direction. No clock and no sleep: time is an argument.
"""

import heapq
from collections.abc import Iterable

DAY_S = 86_400.0
BURST_SHARE = 4 / 32  # Of a day's write budget: what may come at once,
INFLOW_SHARE = 27 / 32  # and what runs in during the day. As an fs tier has it; the rest is that one's reserve.


class Device:
    """The times at which the slots and the link of one device are free again."""

    def __init__(
        self,
        *,
        latency_s: float,
        bandwidth_bytes_per_s: float | None,
        slots: int,
        store_bandwidth_bytes_per_s: float | None = None,
    ) -> None:
        """Start idle. Without latency and with no limit to its bandwidth (None) a device takes no time at all.

        `store_bandwidth_bytes_per_s`: of stores, if they have another one than loads.
        """
        self._latency_s = latency_s
        self._load_s_per_byte = 0.0 if bandwidth_bytes_per_s is None else 1.0 / bandwidth_bytes_per_s
        self._store_s_per_byte = (
            self._load_s_per_byte if store_bandwidth_bytes_per_s is None else 1.0 / store_bandwidth_bytes_per_s
        )
        self._slots_free_at = [0.0] * slots
        self._link_free_at = 0.0

    def book(self, now: float, sizes_bytes: Iterable[int], *, storing: bool = False) -> float:
        """Book transfers of these sizes one behind the other, and return when the last one ends."""
        seconds_per_byte = self._store_s_per_byte if storing else self._load_s_per_byte
        if not self._latency_s and not seconds_per_byte:
            return now
        ends_at = now
        for size_bytes in sizes_bytes:
            first_byte_at = max(now, self._slots_free_at[0]) + self._latency_s
            if size_bytes:
                first_byte_at = self._link_free_at = (
                    max(first_byte_at, self._link_free_at) + size_bytes * seconds_per_byte
                )
            heapq.heapreplace(self._slots_free_at, first_byte_at)
            ends_at = max(ends_at, first_byte_at)
        return ends_at


class WriteBudget:
    """Bytes that may be written in a day: what a burst may take, and what runs in. Time is an argument here, too."""

    def __init__(self, bytes_per_day: int, unit_bytes: int) -> None:
        """Start full. `unit_bytes`: what is written at once at least."""
        self._burst_bytes = max(float(unit_bytes), bytes_per_day * BURST_SHARE)
        self._bytes_per_s = bytes_per_day * INFLOW_SHARE / DAY_S
        self._level_bytes = self._burst_bytes
        self._looked_at = 0.0

    def take(self, now: float, units: int, unit_bytes: int) -> int:
        """Return how many of these units may be written; they count as written."""
        inflow_bytes = (now - self._looked_at) * self._bytes_per_s
        self._level_bytes = min(self._burst_bytes, self._level_bytes + inflow_bytes)
        self._looked_at = now
        allowed = min(units, int(self._level_bytes / unit_bytes))
        self._level_bytes -= allowed * unit_bytes
        return allowed
