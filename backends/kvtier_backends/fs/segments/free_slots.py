"""Which slots are free, as runs: a job whose chunks lie together is one call to the disk.

Pure. The longest run goes first, so that a job needs as few calls as can be; what is given back joins its neighbours.
"""

from bisect import bisect_right, insort
from heapq import heapify, heappop, heappush
from operator import itemgetter

HEAP_SLACK = 64  # Outdated entries are left in the heap until there are more of them than of others, and this many.


class FreeSlots:
    """A set of numbers, given out in runs."""

    def __init__(self) -> None:
        self.count = 0
        self._lengths: dict[int, int] = {}  # Of each run, by its first slot.
        self._starts: dict[int, int] = {}  # By the slot behind its last.
        self._dropped: list[tuple[int, int]] = []  # Files that are no more, in order: the first slot, and the end.
        self._longest: list[tuple[int, int]] = []  # A heap of (-length, first slot); may hold runs that are no more.

    def add(self, first: int, count: int = 1) -> None:
        """Give back slots that are not free; what was dropped meanwhile is not taken."""
        if self._dropped and self._is_dropped(first):
            return
        self.count += count
        end = first + count
        if (start := self._starts.pop(first, None)) is not None:
            del self._lengths[start]
            first = start
        if (length := self._lengths.pop(end, None)) is not None:
            end += length
        self._note(first, end - first)

    def take(self, count: int) -> list[int]:
        """Return that many slots, or as many as there are, in ascending runs."""
        taken: list[int] = []
        while len(taken) < count and self._longest:
            length, first = heappop(self._longest)
            length = -length
            if self._lengths.get(first) != length:
                continue
            del self._lengths[first]
            del self._starts[first + length]
            part = min(length, count - len(taken))
            taken += range(first, first + part)
            if part < length:
                self._note(first + part, length - part)
        self.count -= len(taken)
        return taken

    def drop(self, first: int, count: int) -> int:
        """Have all slots of a file be free no more, nor ever again; return how many were."""
        if not self._is_dropped(first):
            insort(self._dropped, (first, first + count))
        end, dropped = first + count, 0
        for start, length in list(self._lengths.items()):
            stop = start + length
            if start < end and first < stop:
                del self._lengths[start]
                del self._starts[stop]
                dropped += min(stop, end) - max(start, first)
                if start < first:
                    self._note(start, first - start)
                if end < stop:
                    self._note(end, stop - end)
        self.count -= dropped
        return dropped

    def _is_dropped(self, slot: int) -> bool:
        at = bisect_right(self._dropped, slot, key=itemgetter(0)) - 1
        return at >= 0 and slot < self._dropped[at][1]

    def _note(self, first: int, length: int) -> None:
        self._lengths[first] = length
        self._starts[first + length] = first
        heappush(self._longest, (-length, first))
        if len(self._longest) > 2 * len(self._lengths) + HEAP_SLACK:
            self._longest = [(-length, first) for first, length in self._lengths.items()]
            heapify(self._longest)
