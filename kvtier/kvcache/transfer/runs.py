"""Where pages lie at equal distances from each other: what can be copied as one strided piece of memory."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvtier.kvcache.transfer.blocks import Indices


class Runs(NamedTuple):
    """An order of pages, and the parts of it in which indices grow by `step`."""

    order: Indices
    step: int
    starts: Indices
    stops: Indices

    def parts(self, indices: Indices, pages_max: int) -> Iterator[tuple[int, int, int]]:
        """Yield parts of runs, so many pages at most: where they begin and end in the order, and their first index."""
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            for first in range(start, stop, pages_max):
                yield first, min(stop, first + pages_max), int(indices[self.order[first]])


def runs_of(indices: Indices, period: int | None = None) -> Runs:
    """Return the order with the fewest runs: ascending, or by the remainders of `period`.

    Chunks of several pages are best taken position by position where their rows are neighbours.
    """
    ascending = _runs_in(indices, np.argsort(indices, kind="stable"))
    if period in (None, 1) or len(ascending.starts) == 1:
        return ascending
    by_position = _runs_in(indices, np.lexsort((indices, indices % period)))
    return by_position if len(by_position.starts) < len(ascending.starts) else ascending


def _runs_in(indices: Indices, order: Indices) -> Runs:
    distances = np.diff(indices[order])
    if not len(distances):
        return Runs(order, 1, np.array([0]), np.array([len(order)]))
    values, counts = np.unique(distances, return_counts=True)
    step = max(1, int(values[counts.argmax()]))
    breaks = np.flatnonzero(distances != step) + 1
    return Runs(order, step, np.concatenate(([0], breaks)), np.concatenate((breaks, [len(order)])))
