"""Eviction ahead of demand: victims are chosen early, so that their chunks are written before room is needed."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import filterfalse, islice
from typing import Any, Generic

from kvtier.policies.hinted import HintedOrder
from kvtier.policies.numbered import LinkedLRU, NumberOrder
from kvtier.policies.plain import LRU
from kvtier.policies.policy import K, Policy
from kvtier.settings.hints import Hint

_AT_ANY_TIME = (LRU, LinkedLRU)  # Choose the same victims before and after an insertion; subclasses need not.


class EvictionQueue(Generic[K]):
    """An order of numbers or of keys, behind a queue of the victims that it has chosen already.

    The victim that was chosen first is evicted first. A key that is used meanwhile returns to the order, as if it were
    new. So over an LRU, both together are an LRU. A key that must stay when its turn comes is put aside.
    """

    def __init__(self, order: "NumberOrder | Policy[K]", ahead: int) -> None:
        """`ahead`: the size of the queue when one key is evicted and another is chosen."""
        self._order: Any = order
        self.learns_hints = order.learns_hints
        self._later = type(order) in _AT_ANY_TIME  # The next `choose` makes up for evictions.
        self._hinted: HintedOrder[K] | None = None  # The same order, from the first hint on.
        self._ahead = ahead
        self._queue: OrderedDict[K, None] = OrderedDict()
        self.aside: dict[K, None] = {}
        """Keys that had to stay when their turn came."""
        self._news: list[K] = []

    def __iter__(self) -> Iterator[K]:
        yield from self.aside
        yield from self._queue

    def __len__(self) -> int:
        return len(self._queue) + len(self.aside)

    def among(self, keys: Iterable[K]) -> list[K]:
        """Return those of the keys that are chosen."""
        queue, aside = self._queue, self.aside
        return [key for key in keys if key in queue or key in aside] if queue or aside else []

    def take_news(self) -> list[K]:
        """Return the keys that were chosen since the last call and are still here, the last one first."""
        news, self._news = self._news, []
        return self.among(dict.fromkeys(reversed(news)))

    def choose(self, count: int, keep: Callable[[K], int]) -> bool:
        """Choose further victims; return False, and change nothing, if there are fewer."""
        chosen = self._chosen(count, keep, ())
        if chosen is None:
            return False
        self._enqueue(chosen)
        return True

    def reconsider(self, keep: Callable[[K], int]) -> bool:
        """Put keys that were aside and need not stay back to the front; return False if there are none."""
        idle = list(filterfalse(keep, self.aside)) if self.aside else []
        for key in idle:
            del self.aside[key]
        self._put_first(idle)
        return bool(idle)

    def take_hints(self, retained_max: int) -> HintedOrder[K]:
        """Take hints in the order from now on; the caller lets their keys `come_back` first."""
        self._order = self._hinted = HintedOrder[K](self._order, retained_max)
        return self._hinted

    def come_back(self, keys: Sequence[K]) -> None:
        """Return chosen keys to the order."""
        back = self.among(keys)
        if back:
            self._drop(back)
            if self._hinted is None:
                self._order.insert(back)
            else:
                self._hinted.come_back(back)

    # The interface of every order.

    def insert(self, keys: Sequence[K], after: K | None = None) -> None:
        if after is None or self.among((after,)):
            self._order.insert(keys)
        else:
            self._order.insert(keys, after)

    def touch(self, keys: Sequence[K]) -> None:
        self.come_back(keys)
        self._order.touch(keys)

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        self.come_back(keys)
        self._order.rank(keys, hint)

    def move(self, old: K, new: K) -> None:
        self.come_back((old,))
        self._order.move(old, new)

    def remove(self, keys: Sequence[K]) -> None:
        chosen = self.among(keys)
        if chosen:
            keys = list(filterfalse(set(chosen).__contains__, keys))
            self._drop(chosen)
            if self._hinted is not None:
                self._hinted.gone(chosen)
        self._order.remove(keys)

    def evict(self, count: int, keep: Callable[[K], int], incoming: Sequence[Any] = ()) -> list[K] | None:
        """Take `count` victims from the queue, and from the order if it is too short.

        As many are chosen for the queue: now, or with the next `choose` if the order does not learn from `incoming`.
        """
        victims = self._take(count, keep)
        others = self._others(count - len(victims), len(victims), keep, incoming)
        if others is None:
            self._put_first(victims)
            return self.evict(count, keep, incoming) if self.reconsider(keep) else None
        if self._hinted is not None:
            self._hinted.gone(victims)
        return victims + others

    def grow(self, capacity: int) -> None:
        self._order.grow(capacity)

    def _chosen(self, count: int, keep: Callable[[K], int], incoming: Sequence[Any]) -> list[K] | None:
        if not count:
            return []
        return (self._order.evict if self._hinted is None else self._hinted.leave)(count, keep, incoming)

    def _others(self, missing: int, gone: int, keep: Callable[[K], int], incoming: Sequence[Any]) -> list[K] | None:
        """Return the missing victims from the order, and choose some for the queue if now is the time."""
        more = 0 if self._later else min(gone, max(0, self._ahead - len(self)))
        if not (missing or more):
            return []
        chosen = self._chosen(missing + more, keep, incoming)
        if chosen is None and more:
            chosen = self._chosen(missing, keep, incoming)
        if chosen is None:
            return None
        self._enqueue(chosen[missing:])
        if self._hinted is not None:
            self._hinted.gone(chosen[:missing])
        return chosen[:missing]

    def _enqueue(self, keys: Sequence[K]) -> None:
        self._queue.update(dict.fromkeys(keys))
        self._news += keys

    def _take(self, count: int, keep: Callable[[K], int]) -> list[K]:
        """Take out up to `count` keys that need not stay."""
        queue, victims = self._queue, list(islice(self._queue, count))
        if not any(map(keep, victims)):  # As nearly always.
            for key in victims:
                del queue[key]
            return victims
        victims = list[K]()
        while queue and len(victims) < count:
            key, _ = queue.popitem(last=False)
            if keep(key):
                self.aside[key] = None
            else:
                victims.append(key)
        return victims

    def _put_first(self, keys: Sequence[K]) -> None:
        for key in reversed(keys):
            self._queue[key] = None
            self._queue.move_to_end(key, last=False)

    def _drop(self, keys: Sequence[K]) -> None:
        for key in keys:
            if key in self.aside:
                del self.aside[key]
            else:
                del self._queue[key]
