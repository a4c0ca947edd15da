"""An order whose victims go in two steps: so what they hold can be written away before their room is needed."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse, islice
from typing import Any, Generic

from kvtier.policies.hinted import HintedOrder
from kvtier.policies.numbered import LinkedLRU, NumberOrder
from kvtier.policies.plain import LRU
from kvtier.policies.policy import K, Policy

_AT_ANY_TIME = (LRU, LinkedLRU)  # Their victims are the same before what comes is inserted and after: not a subclass's.


class Leaving(Generic[K]):
    """An order of numbers or of keys, in front of those that have left it and are still there.

    The inner order chooses who leaves; who left first goes first. What is used meanwhile returns to the inner order, as
    if it were new. So over an LRU, both together are an LRU.
    """

    def __init__(self, order: "NumberOrder | Policy[K]", ahead: int) -> None:
        """`ahead`: who have left and are still there, when one goes and another leaves."""
        self._order: Any = order
        self._later = type(order) in _AT_ANY_TIME  # Who leaves in place of others is chosen by the next `leave`.
        self._hinted: HintedOrder[K] | None = None  # The same order, from the first hint on.
        self._ahead = ahead
        self.left: OrderedDict[K, None] = OrderedDict()  # Who left first comes first.
        self._news: list[K] = []

    def take_news(self) -> list[K]:
        """Return who has left since the last call and has neither returned nor gone, those that left last first."""
        news, self._news = self._news, []
        return list(filter(self.left.__contains__, dict.fromkeys(reversed(news)))) if news else news

    def leave(self, count: int, keep: Callable[[K], int]) -> bool:
        """Have so many more leave; False, and nothing changed, if fewer may."""
        chosen = self._chosen(count, keep, ())
        if chosen is None:
            return False
        self._leave(chosen)
        return True

    def take_hints(self, retained_max: int) -> HintedOrder[K]:
        """Have the inner order take hints from now on; what gives one has its keys `come_back` first."""
        self._order = self._hinted = HintedOrder[K](self._order, retained_max)
        return self._hinted

    def come_back(self, keys: Sequence[K]) -> None:
        """Put back into the inner order what had left it."""
        left = self.left
        back = [key for key in keys if key in left] if left else []
        if back:
            for key in back:
                del left[key]
            if self._hinted is None:
                self._order.insert(back)
            else:
                self._hinted.come_back(back)

    # What every order has.

    def insert(self, keys: Sequence[K], after: K | None = None) -> None:
        if after is None or after in self.left:
            self._order.insert(keys)
        else:
            self._order.insert(keys, after)

    def insert_coldest(self, keys: Iterable[K]) -> None:
        self._order.insert_coldest(keys)

    def touch(self, keys: Sequence[K]) -> None:
        self.come_back(keys)
        self._order.touch(keys)

    def rank(self, keys: Sequence[K]) -> None:
        self.come_back(keys)
        self._order.rank(keys)

    def move(self, old: K, new: K) -> None:
        self.come_back((old,))
        self._order.move(old, new)

    def remove(self, keys: Sequence[K]) -> None:
        left = self.left
        self._order.remove([key for key in keys if key not in left] if left else keys)
        self._gone([key for key in keys if key in left])

    def evict(self, count: int, keep: Callable[[K], int], incoming: Sequence[Any] = ()) -> list[K] | None:
        """Choose `count` victims: who left first.

        As many others leave for those that come: now, or if the order does not learn from them, with the next `leave`.
        """
        victims = list(islice(filterfalse(keep, self.left), count))
        missing = count - len(victims)
        more = 0 if self._later else min(len(victims), max(0, self._ahead - len(self.left) + len(victims)))
        if missing or more:
            chosen = self._chosen(missing + more, keep, incoming)
            if chosen is None and more:
                chosen = self._chosen(missing, keep, incoming)
            if chosen is None:
                return None
            self._leave(chosen[missing:])
            others = chosen[:missing]
        else:
            others = []
        self._gone(victims)
        if self._hinted is not None:
            self._hinted.gone(others)
        return victims + others

    def grow(self, capacity: int) -> None:
        self._order.grow(capacity)

    def _chosen(self, count: int, keep: Callable[[K], int], incoming: Sequence[Any]) -> list[K] | None:
        if not count:
            return []
        return (self._order.evict if self._hinted is None else self._hinted.leave)(count, keep, incoming)

    def _leave(self, keys: Sequence[K]) -> None:
        self.left.update(dict.fromkeys(keys))
        self._news += keys

    def _gone(self, left: Sequence[K]) -> None:
        """Forget keys that had left."""
        there = self.left
        for key in left:
            del there[key]
        if self._hinted is not None:
            self._hinted.gone(left)
