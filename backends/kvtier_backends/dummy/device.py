"""When transfers end on a device: so many at a time, each with its latency, all behind one link.

A transfer takes the slot that is free first, waits out the latency, and then sends its bytes over the link, which
serves one transfer after the other. So a burst of n chunks takes max(n / slots * latency, bytes / bandwidth) and about
one latency more, on an idle device; a busy one adds what was booked before. No clock and no sleep: time is an argument.
"""

import heapq
from collections.abc import Iterable


class Device:
    """The times at which the slots and the link of one device are free again."""

    def __init__(self, *, latency_s: float, bandwidth_bytes_per_s: float | None, slots: int) -> None:
        """Start idle. Without latency and with no limit to its bandwidth (None) a device takes no time at all."""
        self._latency_s = latency_s
        self._seconds_per_byte = 0.0 if bandwidth_bytes_per_s is None else 1.0 / bandwidth_bytes_per_s
        self._slots_free_at = [0.0] * slots
        self._link_free_at = 0.0

    def book(self, now: float, sizes_bytes: Iterable[int]) -> float:
        """Book transfers of these sizes one behind the other, and return when the last one ends."""
        if not self._latency_s and not self._seconds_per_byte:
            return now
        ends_at = now
        for size_bytes in sizes_bytes:
            first_byte_at = max(now, self._slots_free_at[0]) + self._latency_s
            if size_bytes:
                first_byte_at = self._link_free_at = (
                    max(first_byte_at, self._link_free_at) + size_bytes * self._seconds_per_byte
                )
            heapq.heapreplace(self._slots_free_at, first_byte_at)
            ends_at = max(ends_at, first_byte_at)
        return ends_at
