"""ARC: recency and frequency in balance, moved by what turns out to have been evicted too early.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. It differs where an engine makes
room for a whole batch at a time: all of a batch's ghost hits move the balance before its first victim is chosen.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import filterfalse, islice, takewhile

from kvtier.policies.base import K, Policy


class ARC(Policy[K]):
    """Keeps keys used once and keys used again in an order each; `capacity` ghosts of both say which deserves more.

    What is kept at the cold end of an order is renewed in it: it is in use.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once_target = 0.0  # The paper's p: how many of the resident keys should be ones used once.
        self._once: OrderedDict[K, None] = OrderedDict()  # T1; coldest first, as all four.
        self._again: OrderedDict[K, None] = OrderedDict()  # T2
        self._once_ghosts: OrderedDict[K, None] = OrderedDict()  # B1
        self._again_ghosts: OrderedDict[K, None] = OrderedDict()  # B2

    def insert(self, keys: Sequence[K]) -> None:
        once, again, once_ghosts, again_ghosts = self._once, self._again, self._once_ghosts, self._again_ghosts
        for key in reversed(keys):
            if key in once_ghosts:
                del once_ghosts[key]
                again[key] = None
            elif key in again_ghosts:
                del again_ghosts[key]
                again[key] = None
            else:
                once[key] = None
        self._trim_ghosts()

    def touch(self, keys: Sequence[K]) -> None:
        once, again = self._once, self._again
        for key in reversed(keys):
            if key in again:
                again.move_to_end(key)
            else:
                del once[key]
                again[key] = None

    def rank(self, keys: Sequence[K]) -> None:
        once, again = self._once, self._again
        for key in reversed(keys):
            (again if key in again else once).move_to_end(key)

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        once, again = self._once, self._again
        target = self._rebalanced(incoming)
        once_surplus = max(0, math.ceil(len(once) - target))
        once_victims = list(islice(filterfalse(keep, once), min(once_surplus, count)))
        again_victims = list(islice(filterfalse(keep, again), count - len(once_victims)))
        if len(once_victims) + len(again_victims) < count:  # Too few of one sort may go: the other makes up for it.
            once_victims = list(islice(filterfalse(keep, once), count - len(again_victims)))
            if len(once_victims) + len(again_victims) < count:
                return None
        self._once_target = target
        _retire(once_victims, once, self._once_ghosts, keep)
        _retire(again_victims, again, self._again_ghosts, keep)
        return once_victims + again_victims

    def remove(self, keys: Sequence[K]) -> None:
        once, again = self._once, self._again
        for key in keys:
            del (again if key in again else once)[key]

    def _rebalanced(self, incoming: Sequence[K]) -> float:
        """Return what the target becomes when these keys come: each ghost says that its sort was evicted too early."""
        target = self._once_target
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        for key in incoming:
            if key in once_ghosts:
                target = min(self._capacity, target + max(1.0, len(again_ghosts) / len(once_ghosts)))
            elif key in again_ghosts:
                target = max(0.0, target - max(1.0, len(once_ghosts) / len(again_ghosts)))
        return target

    def _trim_ghosts(self) -> None:
        """Hold the paper's bounds: |T1| + |B1| <= capacity, and all four together <= twice the capacity."""
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        while once_ghosts and len(self._once) + len(once_ghosts) > self._capacity:
            once_ghosts.popitem(last=False)
        resident = len(self._once) + len(self._again)
        while again_ghosts and resident + len(once_ghosts) + len(again_ghosts) > 2 * self._capacity:
            again_ghosts.popitem(last=False)


def _retire(
    victims: list[K], order: OrderedDict[K, None], ghosts: OrderedDict[K, None], keep: Callable[[K], bool]
) -> None:
    """Turn the victims into ghosts, and renew what was passed over because it is kept."""
    for key in victims:
        del order[key]
        ghosts[key] = None
    for key in list(takewhile(keep, order)):
        order.move_to_end(key)
