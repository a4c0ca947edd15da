"""Plain policies: LRU, FIFO and LFU. None of them remembers what it has evicted."""

from bisect import insort
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


class LFU(Policy[K]):
    """Least frequently used, with ageing: what was used often stays, until it was not used for long enough.

    Evicts what has the lowest priority, and of these what was used longest ago. Kept keys stay in their place. Without
    `ageing` the priority is the plain count of uses while resident: textbook LFU, to be compared with.

    Ageing is dynamic (Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating content management techniques for Web
    proxy caches", 2000). A key's priority is its worth plus the cache's age at its last use. The age is the priority of
    the last victim. So nothing is ever halved or swept. A key's worth is the bit length of its count, not the count
    itself. A conversation's blocks are used once a turn. With plain counts, long conversations that have ended would
    stay longer than live ones. Measured on a trace of coding agents at 5 % of the unique blocks, the hit ratio is 0.93
    with bit lengths, 0.88 with counts, 0.19 without ageing, and 0.94 for LRU.
    """

    def __init__(self, capacity: int, *, ageing: bool = True) -> None:
        self._ageing = ageing
        self._age = 0
        self._uses: dict[K, int] = {}
        self._priority: dict[K, int] = {}
        self._buckets: dict[int, OrderedDict[K, None]] = {}  # Priority -> its keys, coldest first; may be empty.
        self._levels: list[int] = []  # The priorities that have buckets, in ascending order.

    def insert(self, keys: Sequence[K]) -> None:
        uses, priorities, priority = self._uses, self._priority, self._age + 1
        bucket = self._bucket(priority)
        for key in reversed(keys):
            uses[key] = 1
            priorities[key] = priority
            bucket[key] = None

    def touch(self, keys: Sequence[K]) -> None:
        uses, priorities, buckets, age, ageing = self._uses, self._priority, self._buckets, self._age, self._ageing
        for key in reversed(keys):
            count = uses[key] = uses[key] + 1
            old, new = priorities[key], age + count.bit_length() if ageing else count
            if new == old:
                buckets[old].move_to_end(key)
            else:
                del buckets[old][key]
                priorities[key] = new
                self._bucket(new)[key] = None

    def rank(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            self._buckets[self._priority[key]].move_to_end(key)

    def evict(self, count: int, keep: Callable[[K], bool], incoming: Sequence[K] = ()) -> list[K] | None:
        victims: list[K] = []
        for level in self._levels:
            victims += islice(filterfalse(keep, self._buckets[level]), count - len(victims))
            if len(victims) == count:
                break
        if len(victims) < count:
            return None
        if victims and self._ageing:
            self._age = max(self._age, self._priority[victims[-1]])
        self.remove(victims)
        return victims

    def remove(self, keys: Sequence[K]) -> None:
        for key in keys:
            del self._uses[key]
            del self._buckets[self._priority.pop(key)][key]
        while self._levels and not self._buckets[self._levels[0]]:
            del self._buckets[self._levels.pop(0)]

    def _bucket(self, priority: int) -> OrderedDict[K, None]:
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = OrderedDict()
            insort(self._levels, priority)
        return bucket
