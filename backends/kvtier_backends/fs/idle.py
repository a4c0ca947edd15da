"""What was there before the start and was not used since, by its last use.

The scan gives a batch at a time, and some of it may have to go before the rest is found. A batch is put in order when
it comes, and batches are merged as they are taken from: sixteen bytes a chunk, where a heap of pairs would take nine
times as much.
"""

from array import array
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace, merge
from itertools import count
from operator import itemgetter

from kvtier.keys import OffloadKey

Use = tuple[int, OffloadKey]  # When a chunk was used last, in ns since the epoch.


class Run:
    """One batch, the newest first, so that the oldest is taken from the end."""

    __slots__ = ("keys", "times_ns")

    def __init__(self, uses: Iterable[Use]) -> None:
        newest_first = sorted(uses, reverse=True)
        self.times_ns = array("q", map(itemgetter(0), newest_first))
        self.keys = list(map(itemgetter(1), newest_first))

    def copy(self) -> "Run":
        run = Run(())
        run.times_ns, run.keys = self.times_ns[:], self.keys[:]
        return run

    def __iter__(self) -> Iterator[Use]:
        return zip(self.times_ns, self.keys, strict=True)


class Idle:
    """Chunks by last use; what was used or removed meanwhile stands here still, and is for the taker to pass over."""

    def __init__(self) -> None:
        self._heads: list[tuple[int, int, Run]] = []  # A heap: when a run's oldest was used, and the run.
        self._numbers = count()  # Runs cannot be compared.

    def add(self, uses: Iterable[Use]) -> None:
        """Take in some more."""
        run = Run(uses)
        if run.keys:
            self._heads.append((run.times_ns[-1], next(self._numbers), run))
            heapify(self._heads)

    def oldest_ns(self) -> int | None:
        """Return when the oldest was used; None if there is none."""
        return self._heads[0][0] if self._heads else None

    def pop(self) -> Use:
        """Take the oldest, of which there must be one."""
        time_ns, number, run = self._heads[0]
        run.times_ns.pop()
        key = run.keys.pop()
        if run.keys:
            heapreplace(self._heads, (run.times_ns[-1], number, run))
        else:
            heappop(self._heads)
        return time_ns, key

    def __len__(self) -> int:
        return sum(len(run.keys) for _, _, run in self._heads)

    def copy(self) -> "Idle":
        """Return one that another thread may read."""
        idle = Idle()
        idle._heads = [(time_ns, number, run.copy()) for time_ns, number, run in self._heads]
        return idle

    def newest_first(self) -> Iterator[Use]:
        return merge(*(run for _, _, run in self._heads), key=itemgetter(0), reverse=True)
