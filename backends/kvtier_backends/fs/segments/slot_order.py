"""Which chunk goes next, by its slot: LRU as two links a slot, any other policy as it is.

An ordered dictionary takes more than a hundred bytes a chunk, which is as much as everything else that is known of it.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvtier.keys import OffloadKey
from kvtier.policies.base import Policy

Keep = Callable[[OffloadKey], bool]


class SlotOrder(Protocol):
    """An order among the chunks that may go for room."""

    def insert(self, key: OffloadKey, slot: int) -> None: ...

    def touch(self, key: OffloadKey, slot: int) -> None: ...

    def move(self, key: OffloadKey, old: int, new: int) -> None:
        """Count the store of a chunk that is there already, in another slot now."""
        ...

    def rank(self, found: Sequence[tuple[OffloadKey, int]]) -> None:
        """Renew the recency of chunks in prefix order, without counting a use."""
        ...

    def remove(self, key: OffloadKey, slot: int) -> None: ...

    def settle(self, found: Iterable[tuple[OffloadKey, int]]) -> None:
        """Take in what is older than everything else; the newest first."""
        ...

    def victims(
        self, count: int, keep: Keep, kept: Callable[[], int], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        """Choose up to `count` chunks, and forget them. `kept`: how many `keep` holds back at most."""
        ...


class LRUOrder:
    """By last use: a ring of links, with the coldest behind the ring's first element and the newest before it."""

    def __init__(self, keys: list[OffloadKey | None]) -> None:
        """`keys`: whose chunk each slot has; it grows with the slots."""
        self._keys = keys
        self._next = array("I", [0])  # Of a slot at its number + 1; 0 is the ring's own.
        self._prev = array("I", [0])

    def insert(self, key: OffloadKey, slot: int) -> None:
        self._link(slot + 1, self._prev[0], 0)

    def touch(self, key: OffloadKey, slot: int) -> None:
        self.remove(key, slot)
        self.insert(key, slot)

    def move(self, key: OffloadKey, old: int, new: int) -> None:
        self.remove(key, old)
        self.insert(key, new)

    def rank(self, found: Sequence[tuple[OffloadKey, int]]) -> None:
        for key, slot in reversed(found):
            self.touch(key, slot)

    def remove(self, key: OffloadKey, slot: int) -> None:
        before, behind = self._prev[slot + 1], self._next[slot + 1]
        self._next[before] = behind
        self._prev[behind] = before

    def settle(self, found: Iterable[tuple[OffloadKey, int]]) -> None:
        for _, slot in found:
            self._link(slot + 1, 0, self._next[0])

    def victims(
        self, count: int, keep: Keep, kept: Callable[[], int], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        chosen: list[OffloadKey] = []
        at = self._next[0]
        while at and len(chosen) < count:
            key, slot, at = self._keys[at - 1], at - 1, self._next[at]
            assert key is not None, slot
            if not keep(key):
                self.remove(key, slot)
                chosen.append(key)
        return chosen

    def _link(self, at: int, before: int, behind: int) -> None:
        if at >= len(self._next):
            more = [0] * (len(self._keys) + 1 - len(self._next))
            self._next.extend(more)
            self._prev.extend(more)
        self._next[at], self._prev[at] = behind, before
        self._next[before] = self._prev[behind] = at


class PolicyOrder:
    """By a policy of the engine's, which goes by keys."""

    def __init__(self, policy: Policy[OffloadKey]) -> None:
        self._policy = policy
        self._count = 0

    def insert(self, key: OffloadKey, slot: int) -> None:
        self._policy.insert((key,))
        self._count += 1

    def touch(self, key: OffloadKey, slot: int) -> None:
        self._policy.touch((key,))

    def move(self, key: OffloadKey, old: int, new: int) -> None:
        self._policy.touch((key,))

    def rank(self, found: Sequence[tuple[OffloadKey, int]]) -> None:
        self._policy.rank([key for key, _ in found])

    def remove(self, key: OffloadKey, slot: int) -> None:
        self._policy.remove((key,))
        self._count -= 1

    def settle(self, found: Iterable[tuple[OffloadKey, int]]) -> None:
        for key, slot in reversed(list(found)):
            self.insert(key, slot)

    def victims(
        self, count: int, keep: Keep, kept: Callable[[], int], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey]:
        wanted = min(count, self._count - kept())
        # None, though there are enough: a policy that never evicts. Then there is no room.
        chosen = (self._policy.evict(wanted, keep, incoming) if wanted > 0 else None) or []
        self._count -= len(chosen)
        return chosen
