"""S3-FIFO: a small queue on probation, a main queue with second chances, and ghosts that skip the probation.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023: 10 % of the capacity on
probation, ghosts for the rest, a counter of two bits, promotion on more than one further use. Accesses move nothing,
they only count, so a touch is cheap and all the work is in `evict`.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, filterfalse, islice

from kvtier.policies.base import K, Policy

_USES_MAX = 3  # Two bits, as in the paper: the main queue gives a key at most this many second chances in a row.
_USES_FOR_MAIN = 2


class S3FIFO(Policy[K]):
    """Evicts from probation while that is over its share, else from main.

    What is kept goes round its queue again; so, while all of probation is kept, a call looks at each of its keys once.
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

    def rank(self, keys: Sequence[K]) -> None:
        pass

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        evictable = islice(filterfalse(keep, chain(self._main, self._small)), count)
        if sum(1 for _ in evictable) < count:
            return None
        victims: list[K] = []
        small_is_kept = main_is_kept = False
        while len(victims) < count:
            if main_is_kept or (len(self._small) >= self._small_share and not small_is_kept):
                victim = self._small_victim(keep)
                small_is_kept, main_is_kept = not victim, False  # Main may have got new keys.
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
        """Move on from probation, used keys to main, until one can go; that becomes a ghost. None if all are kept."""
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
        """Go round main, each key spending a use, until one without uses can go. None if all are kept."""
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
