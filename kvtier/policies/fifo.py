"""First in, first out: the plainest order, and the floor that every other policy is measured against."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice

from kvtier.policies.base import K, Policy


class FIFO(Policy[K]):
    """Evicts in the order of insertion; accesses change nothing. Kept keys stay in their place."""

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
