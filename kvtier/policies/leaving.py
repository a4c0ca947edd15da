"""An order whose victims go in two steps: so what they hold can be written away before their room is needed."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from typing import Any, Generic

from kvtier.hints import Hint
from kvtier.policies.hinted import HintedOrder
from kvtier.policies.numbered import LinkedLRU, NumberOrder
from kvtier.policies.plain import LRU
from kvtier.policies.policy import K, Policy

_OVER_MIN = 1_024  # Fewer entries than this that are over are not worth a new line.
_AT_ANY_TIME = (LRU, LinkedLRU)  # Their victims are the same before what comes is inserted and after: not a subclass's.


class Leaving(Generic[K]):
    """An order of numbers or of keys, in front of those that have left it and are still there.

    The inner order chooses who leaves; who left first goes first. What is used meanwhile returns to the inner order, as
    if it were new. So over an LRU, both together are an LRU. Who may not go when its turn comes is put aside.
    """

    # Who has left stands in a line, a list whose beginning is over: most victims are a slice of it. Who came back stays
    # in the line, and is counted, until its turn comes: then it is passed over as often as it is counted.

    def __init__(self, order: "NumberOrder | Policy[K]", ahead: int) -> None:
        """`ahead`: who have left and are still there, when one goes and another leaves."""
        self._order: Any = order
        self.learns_hints = order.learns_hints
        self._later = type(order) in _AT_ANY_TIME  # Who leaves in place of others is chosen by the next `leave`.
        self._hinted: HintedOrder[K] | None = None  # The same order, from the first hint on.
        self._ahead = ahead
        self.left: set[K] = set()
        """Who have left and are still there."""
        self._line: list[K] = []  # Who left first comes first.
        self._over = 0  # How many of the line have had their turn.
        self.aside: list[K] = []
        """Who could not go when their turn came. Some of them may have come back, or have gone, since."""
        self._returned: Counter[K] = Counter()  # How often each is in the line, or aside, though it came back, or went.
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

    def reconsider(self, keep: Callable[[K], int]) -> bool:
        """Give those who are aside another turn, before all others, as far as they may go now; False if none may."""
        idle = list(filterfalse(keep, self.aside)) if self.aside else []
        if idle:
            self.aside = list(filter(keep, self.aside))
            self._begin_with(idle)
        return bool(idle)

    def take_hints(self, retained_max: int) -> HintedOrder[K]:
        """Have the inner order take hints from now on; what gives one has its keys `come_back` first."""
        self._order = self._hinted = HintedOrder[K](self._order, retained_max)
        return self._hinted

    def come_back(self, keys: Sequence[K]) -> None:
        """Put back into the inner order what had left it."""
        left = self.left
        back = [key for key in keys if key in left] if left else []
        if back:
            self._strike(back)
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

    def rank(self, keys: Sequence[K], hint: Hint | None = None) -> None:
        self.come_back(keys)
        self._order.rank(keys, hint)

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
        victims = self._take(count, keep)
        others = self._others(count - len(victims), len(victims), keep, incoming)
        if others is None:
            self.left.update(victims)
            self._begin_with(victims)
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
        """Return victims that had not left, so many as are missing; others leave for those that had, if now is when."""
        more = 0 if self._later else min(gone, max(0, self._ahead - len(self.left)))
        if not (missing or more):
            return []
        chosen = self._chosen(missing + more, keep, incoming)
        if chosen is None and more:
            chosen = self._chosen(missing, keep, incoming)
        if chosen is None:
            return None
        self._leave(chosen[missing:])
        if self._hinted is not None:
            self._hinted.gone(chosen[:missing])
        return chosen[:missing]

    def _leave(self, keys: Sequence[K]) -> None:
        line, left = self._line, self.left
        if self._over > len(left) + _OVER_MIN:
            del line[: self._over]
            self._over = 0
        if len(line) + len(self.aside) > 3 * (len(left) + _OVER_MIN):
            self._form_anew()
        left.update(keys)
        line += keys
        self._news += keys

    def _take(self, count: int, keep: Callable[[K], int]) -> list[K]:
        """Take out who may go, so many or fewer."""
        first = self._line[self._over : self._over + count]
        if any(map(keep, first)) or not self._returned.keys().isdisjoint(first):
            return self._pick(count, keep)
        self._over += len(first)
        self.left.difference_update(first)
        return first

    def _pick(self, count: int, keep: Callable[[K], int]) -> list[K]:
        """Do the same one by one."""
        line, returned, victims = self._line, self._returned, list[K]()
        while len(victims) < count and self._over < len(line):
            key = line[self._over]
            self._over += 1
            if key in returned:
                returned[key] -= 1
                if not returned[key]:
                    del returned[key]
            elif keep(key):
                self.aside.append(key)
            else:
                self.left.remove(key)
                victims.append(key)
        return victims

    def _begin_with(self, keys: Sequence[K]) -> None:
        """Put keys at the beginning of the line."""
        self._line[: self._over] = keys
        self._over = 0

    def _form_anew(self) -> None:
        """Form the line of those that have left and are still there."""
        places = dict.fromkeys(reversed([*self.aside, *self._line[self._over :]]))  # The last one of each counts.
        self._line[:] = [key for key in reversed(places) if key in self.left]
        self._over = 0
        self.aside.clear()
        self._returned.clear()

    def _strike(self, keys: Sequence[K]) -> None:
        """Note that keys that had left came back, or went out of their turn."""
        self.left.difference_update(keys)
        self._returned.update(keys)

    def _gone(self, left: Sequence[K]) -> None:
        """Forget keys that had left."""
        self._strike(left)
        if self._hinted is not None:
            self._hinted.gone(left)
