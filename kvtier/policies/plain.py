"""Plain policies: LRU and FIFO. Neither remembers what it has evicted."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice, takewhile

from kvtier.policies.policy import K, Policy


class LRU(Policy[K]):
    """Least recently used, the default: evicts what was used longest ago.

    What is kept at the cold end is renewed: it is in use.
    """

    # An OrderedDict moves a key to its end in one C call and finds the coldest without a scan. A plain dict re-inserts
    # as fast, but then has to step over every hole that a moved key left behind.

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # Coldest first.

    def insert(self, keys: Sequence[K]) -> None:
        order = self._order
        for key in reversed(keys):
            order[key] = None

    def touch(self, keys: Sequence[K]) -> None:
        renew = self._order.move_to_end
        for key in reversed(keys):
            renew(key)

    def rank(self, keys: Sequence[K]) -> None:
        self.touch(keys)

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        order = self._order
        victims = list(islice(filterfalse(keep, order), count))
        if len(victims) < count:
            return None
        for key in victims:
            del order[key]
        for key in list(takewhile(keep, order)):  # Pinned for long: or else every call would pass over it again.
            order.move_to_end(key)
        return victims

    def remove(self, keys: Sequence[K]) -> None:
        for key in keys:
            del self._order[key]


class FIFO(Policy[K]):
    """First in, first out: evicts in the order of insertion; accesses change nothing. Kept keys stay in their place."""

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # Oldest first.

    def insert(self, keys: Sequence[K]) -> None:
        order = self._order
        for key in reversed(keys):
            order[key] = None

    def touch(self, keys: Sequence[K]) -> None:
        pass

    def rank(self, keys: Sequence[K]) -> None:
        pass

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        order = self._order
        victims = list(islice(filterfalse(keep, order), count))
        if len(victims) < count:
            return None
        for key in victims:
            del order[key]
        return victims

    def remove(self, keys: Sequence[K]) -> None:
        for key in keys:
            del self._order[key]
