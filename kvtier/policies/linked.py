"""LRU among rows: the same order as `kvtier.policies.plain.LRU`, in two links a row instead of an ordered dictionary.

Keys that are small numbers need no hashing and no entry of their own: 8 bytes a row, where the dictionary takes 90 to
140. The primary keeps its rows so.
"""

from array import array
from collections.abc import Callable, Sequence

from kvtier.policies.policy import Policy


class RowLRU(Policy[int]):
    """Evicts what was used longest ago, among keys below `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._end = capacity  # Stands between the hottest and the coldest.
        self._hotter = array("I", [capacity]) * (
            capacity + 1
        )  # The next on the way to the hottest; the end's: the coldest.
        self._colder = array("I", [capacity]) * (capacity + 1)

    def insert(self, keys: Sequence[int], after: int | None = None) -> None:
        """Make the keys resident, tail first: the hottest, or next colder than `after`, which is resident."""
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

    def rank(self, keys: Sequence[int]) -> None:
        self.touch(keys)

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
        """Say whether these lie at the hot end already, in this order: then there is nothing to move."""
        colder = self._colder
        hottest = colder[self._end]
        for key in keys:
            if key != hottest:
                return False
            hottest = colder[hottest]
        return True

    def _lie_together(self, keys: Sequence[int]) -> bool:
        """Say whether these lie side by side, in this order: most do that one request stored or used."""
        return list(map(self._colder.__getitem__, keys[:-1])) == [*keys[1:]]

    def _move_hottest(self, first: int, last: int) -> None:
        """Move all from `first` down to `last`, which is not the hottest, to the hot end."""
        hotter, colder, end = self._hotter, self._colder, self._end
        above, below = hotter[first], colder[last]
        hotter[below], colder[above] = above, below
        hottest = colder[end]
        hotter[hottest], colder[last] = last, hottest
        hotter[first], colder[end] = end, first

    def _renew_coldest(self, keep: Callable[[int], int]) -> None:
        """Renew what is kept at the cold end: or else every call would pass over it again."""
        hotter, end = self._hotter, self._end
        kept: list[int] = []
        key = hotter[end]
        while key != end and keep(key):
            kept.append(key)
            key = hotter[key]
        if kept:
            kept.reverse()
            self.touch(kept)
