"""Plain policies: FIFO and LRU. Neither remembers the keys that it has evicted."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice, takewhile

from kvtier.policies.policy import K, Policy
from kvtier.settings.hints import Hint


class FIFO(Policy[K]):
    """First in, first out: accesses change nothing, and kept keys stay in their place."""

    # An OrderedDict moves a key to its end in one C call and finds the coldest without a scan. A plain dict re-inserts
    # as fast, but then has to step over every hole that a moved key left behind.

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # The first to go first.

    def insert(self, keys: Sequence[K]) -> None:
        order = self._order
        for key in reversed(keys):
            order[key] = None

    def touch(self, keys: Sequence[K]) -> None:
        pass

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        pass

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        victims = list(islice(filterfalse(keep, self._order), count))
        if len(victims) < count:
            return None
        self.remove(victims)
        return victims

    def remove(self, keys: Sequence[K]) -> None:
        order = self._order
        for key in keys:
            del order[key]


class LRU(FIFO[K]):
    """Least recently used, the default: evicts the key with the oldest last use.

    A kept key at the cold end is renewed, because it is in use.
    """

    def touch(self, keys: Sequence[K]) -> None:
        renew = self._order.move_to_end
        for key in reversed(keys):
            renew(key)

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        self.touch(keys)

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        order = self._order
        victims = list(islice(filterfalse(keep, order), count))
        if len(victims) < count:
            return None
        for key in victims:
            del order[key]
        for key in list(takewhile(keep, order)):  # Otherwise every call would pass over long-pinned keys.
            order.move_to_end(key)
        return victims
