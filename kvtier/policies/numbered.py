"""Orders of small numbers, such as rows and slots: a linked LRU (8 bytes each), and any policy of their keys."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol

from kvtier.policies.density import Density
from kvtier.policies.plain import LRU
from kvtier.policies.policy import K, Order, Policy
from kvtier.settings.hints import Hint


class NumberOrder(Order[int], Protocol):
    """An order of numbers, each with a key. It promises what `Policy` does.

    `incoming` are keys, which have no number yet. `keep` may return a count of pins; a pinned number stays. `after` is
    the number that new ones continue: if the order can do so, they leave just before it.
    """

    def insert(self, keys: Sequence[int], after: int | None = None, /) -> None: ...
    def move(self, old: int, new: int, /) -> None:
        """Count an access to a key whose number may have changed."""
        ...

    def grow(self, capacity: int, /) -> None:
        """Accept numbers below `capacity`."""
        ...


def number_order(
    policy: Policy[K], capacity: int, keys: Sequence[K | None], number: Callable[[K], int | None]
) -> NumberOrder:
    """Return the order of a new policy. `keys` maps each number to its key, and `number` a key to its number."""
    if type(policy) is LRU:  # A subclass may do anything.
        return LinkedLRU(capacity)
    if isinstance(policy, Density) and type(policy) is Density:
        return policy.numbered(capacity, keys)
    return KeyOrder(policy, keys, number)


class LinkedLRU(Policy[int]):
    """An LRU among numbers below `capacity`: two links each."""

    def __init__(self, capacity: int) -> None:
        self._end = capacity  # A sentinel between the hottest and the coldest.
        self._hotter = array("I", [capacity]) * (capacity + 1)  # The next hotter one; the sentinel's is the coldest.
        self._colder = array("I", [capacity]) * (capacity + 1)

    def grow(self, capacity: int) -> None:
        hotter, colder, end = self._hotter, self._colder, self._end
        coldest, hottest = hotter[end], colder[end]
        for links in (hotter, colder):
            links.extend(array("I", [capacity]) * (capacity - end))
        if coldest != end:
            hotter[capacity], colder[capacity] = coldest, hottest
            colder[coldest] = hotter[hottest] = capacity
        self._end = capacity

    def insert(self, keys: Sequence[int], after: int | None = None) -> None:
        """Make the keys resident, tail first: as the hottest, or next colder than the resident `after`."""
        hotter, colder = self._hotter, self._colder
        above = self._end if after is None else after
        below = colder[above]
        for key in reversed(keys):
            hotter[below] = key
            colder[key] = below
            below = key
        hotter[below] = above
        colder[above] = below

    def touch(self, keys: Sequence[int]) -> None:
        if self._are_hottest(keys):
            return
        if self._lie_together(keys):
            self._move_hottest(keys[0], keys[-1])
        else:
            self.remove(keys)
            self.insert(keys)

    def rank(self, keys: Sequence[int], hint: Hint | None = None) -> None:
        self.touch(keys)

    def move(self, old: int, new: int) -> None:
        self.remove((old,))
        self.insert((new,))

    def evict(self, count: int, keep: Callable[[int], int], incoming: Sequence[object] = ()) -> list[int] | None:
        hotter, end = self._hotter, self._end
        victims: list[int] = []
        passed = False
        key = hotter[end]
        while len(victims) < count:
            if key == end:
                return None
            if keep(key):
                passed = True
            else:
                victims.append(key)
            key = hotter[key]
        if passed:
            self.remove(victims)
        else:
            hotter[end] = key
            self._colder[key] = end
        self._renew_coldest(keep)
        return victims

    def remove(self, keys: Sequence[int]) -> None:
        hotter, colder = self._hotter, self._colder
        for key in keys:
            above, below = hotter[key], colder[key]
            hotter[below] = above
            colder[above] = below

    def _are_hottest(self, keys: Sequence[int]) -> bool:
        """Return True if the keys are at the hot end already, in this order."""
        colder = self._colder
        hottest = colder[self._end]
        for key in keys:
            if key != hottest:
                return False
            hottest = colder[hottest]
        return True

    def _lie_together(self, keys: Sequence[int]) -> bool:
        return list(map(self._colder.__getitem__, keys[:-1])) == [*keys[1:]]

    def _move_hottest(self, first: int, last: int) -> None:
        """Move the neighbours from `first` down to `last`, which are not the hottest, to the hot end."""
        hotter, colder, end = self._hotter, self._colder, self._end
        above, below = hotter[first], colder[last]
        hotter[below], colder[above] = above, below
        hottest = colder[end]
        hotter[hottest], colder[last] = last, hottest
        hotter[first], colder[end] = end, first

    def _renew_coldest(self, keep: Callable[[int], int]) -> None:
        """Renew the kept keys at the cold end. Otherwise every call would pass over them again."""
        hotter, end = self._hotter, self._end
        kept: list[int] = []
        key = hotter[end]
        while key != end and keep(key):
            kept.append(key)
            key = hotter[key]
        if kept:
            kept.reverse()
            self.touch(kept)


class KeyOrder(Generic[K]):
    """A policy of keys as an order of their numbers."""

    def __init__(self, policy: Policy[K], keys: Sequence[K | None], number: Callable[[K], int | None]) -> None:
        self._policy = policy
        self._keys = keys
        self._number = number
        self.learns_hints = policy.learns_hints

    def insert(self, keys: Sequence[int], after: int | None = None, /) -> None:  # Policies know no places.
        self._policy.insert(self._named(keys))

    def touch(self, keys: Sequence[int], /) -> None:
        self._policy.touch(self._named(keys))

    def rank(self, keys: Sequence[int], hint: Hint | None = None, /) -> None:
        self._policy.rank(self._named(keys), hint)

    def move(self, old: int, new: int, /) -> None:
        self._policy.touch(self._named((new,)))

    def remove(self, keys: Sequence[int], /) -> None:
        self._policy.remove(self._named(keys))

    def evict(self, count: int, keep: Callable[[int], int], incoming: Sequence[K] = (), /) -> list[int] | None:
        number = self._number
        victims = self._policy.evict(count, lambda key: keep(_known(number(key))) > 0, incoming)
        return None if victims is None else [_known(number(key)) for key in victims]

    def grow(self, capacity: int, /) -> None:
        pass  # The policy was given its capacity when it was made.

    def _named(self, numbers: Iterable[int]) -> list[K]:
        keys = self._keys
        return [key for number in numbers if (key := keys[number]) is not None]


def _known(number: int | None) -> int:
    assert number is not None, "a policy named a key that is not resident"
    return number
