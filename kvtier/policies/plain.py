"""Policies that learn no hints: FIFO and LRU; ARC and S3-FIFO also learn from ghosts, the keys that they evicted."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, filterfalse, islice, takewhile

from kvtier.policies.policy import K, Policy
from kvtier.settings.hints import Hint

_USES_MAX = 3  # S3-FIFO's two bits: the main queue gives a key at most this many second chances in a row.
_USES_FOR_MAIN = 2


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

    def touch(self, keys: Sequence[K]) -> None: ...

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None: ...

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
    """Least recently used, the default. A kept key at the cold end is in use, and renewed."""

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


class ARC(Policy[K]):
    """Adaptive replacement: an order of keys used once, one of keys used again, and `capacity` ghosts of both.

    The return of a ghost gives its order more room. A kept key at the cold end of an order is renewed in it, because it
    is in use.

    Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003. Unlike in the paper, an engine
    makes room for a whole batch. All of a batch's ghost hits move the balance before its first victim is chosen.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once_target = 0.0  # The paper's p: the target number of resident keys used once.
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

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        once, again = self._once, self._again
        for key in reversed(keys):
            (again if key in again else once).move_to_end(key)

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        once, again = self._once, self._again
        target = self._rebalanced(incoming)
        once_surplus = max(0, math.ceil(len(once) - target))
        once_victims = list(islice(filterfalse(keep, once), min(once_surplus, count)))
        again_victims = list(islice(filterfalse(keep, again), count - len(once_victims)))
        if len(once_victims) + len(again_victims) < count:  # The other order makes up for kept keys.
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
        """Return the target after these keys: each ghost among them moves it towards its order."""
        target = self._once_target
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        for key in incoming:
            if key in once_ghosts:
                target = min(self._capacity, target + max(1.0, len(again_ghosts) / len(once_ghosts)))
            elif key in again_ghosts:
                target = max(0.0, target - max(1.0, len(once_ghosts) / len(again_ghosts)))
        return target

    def _trim_ghosts(self) -> None:
        """Keep the paper's bounds: |T1| + |B1| <= capacity, and all four together <= twice the capacity."""
        once_ghosts, again_ghosts = self._once_ghosts, self._again_ghosts
        while once_ghosts and len(self._once) + len(once_ghosts) > self._capacity:
            once_ghosts.popitem(last=False)
        resident = len(self._once) + len(self._again)
        while again_ghosts and resident + len(once_ghosts) + len(again_ghosts) > 2 * self._capacity:
            again_ghosts.popitem(last=False)


class S3FIFO(Policy[K]):
    """A small queue on probation, a main queue with second chances, and ghosts that skip the probation.

    Evicts from probation while that is above its share, else from main. Accesses move nothing, they only count: a touch
    is cheap, and all the work is in `evict`. A kept key goes round its queue again. So while all of probation is kept,
    a call looks at each of its keys once.

    Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023. As there: 10 % of
    the capacity on probation, ghosts for the rest, a counter of two bits, promotion on more than one further use.
    """

    def __init__(self, capacity: int) -> None:
        self._small_share = max(1, capacity // 10)
        self._ghosts_max = capacity - self._small_share
        self._small: OrderedDict[K, int] = OrderedDict()  # Key -> uses since it came; oldest first, as all three.
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def insert(self, keys: Sequence[K]) -> None:
        small, main, ghosts = self._small, self._main, self._ghosts
        for key in reversed(keys):
            if key in ghosts:
                del ghosts[key]
                main[key] = 0
            else:
                small[key] = 0

    def touch(self, keys: Sequence[K]) -> None:
        small, main = self._small, self._main
        for key in keys:
            queue = small if key in small else main
            uses = queue[key]
            if uses < _USES_MAX:
                queue[key] = uses + 1

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None: ...

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        evictable = islice(filterfalse(keep, chain(self._main, self._small)), count)
        if sum(1 for _ in evictable) < count:
            return None
        victims: list[K] = []
        small_is_kept = main_is_kept = False
        while len(victims) < count:
            if main_is_kept or (len(self._small) >= self._small_share and not small_is_kept):
                victim = self._small_victim(keep)
                small_is_kept, main_is_kept = not victim, False  # Main may have new keys.
            else:
                victim = self._main_victim(keep)
                main_is_kept = not victim
            victims += victim
        return victims

    def remove(self, keys: Sequence[K]) -> None:
        small, main = self._small, self._main
        for key in keys:
            del (small if key in small else main)[key]

    def _small_victim(self, keep: Callable[[K], bool]) -> list[K]:
        """Take keys from probation, used ones to main, until one can go and becomes a ghost. [] if all are kept."""
        small, ghosts = self._small, self._ghosts
        kept_in_a_row = 0
        while kept_in_a_row < len(small):
            key, uses = small.popitem(last=False)
            if uses >= _USES_FOR_MAIN:
                self._main[key] = 0
            elif keep(key):
                small[key] = uses
                kept_in_a_row += 1
            else:
                ghosts[key] = None
                if len(ghosts) > self._ghosts_max:
                    ghosts.popitem(last=False)
                return [key]
        return []

    def _main_victim(self, keep: Callable[[K], bool]) -> list[K]:
        """Go round main, each key spending a use, until one without uses can go. [] if all are kept."""
        main = self._main
        kept_in_a_row = 0
        while kept_in_a_row < len(main):
            key, uses = main.popitem(last=False)
            if uses:
                main[key] = uses - 1
                kept_in_a_row = 0
            elif keep(key):
                main[key] = 0
                kept_in_a_row += 1
            else:
                return [key]
        return []


def _retire(
    victims: list[K], order: OrderedDict[K, None], ghosts: OrderedDict[K, None], keep: Callable[[K], bool]
) -> None:
    """Turn the victims into ghosts, and renew the kept keys at the cold end."""
    for key in victims:
        del order[key]
        ghosts[key] = None
    for key in list(takewhile(keep, order)):
        order.move_to_end(key)
