"""The order in which the primary's rows are evicted: a policy, told in rows.

Policies speak of keys, because some remember keys that have gone. An LRU remembers none: it is kept among the rows
themselves, which takes a tenth of the memory and no hashing.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.backend import OffloadKey
from kvtier.policies import LRU, Policy, RowLRU


class RowOrder(Protocol):
    """What `Policy` promises, of rows that hold a key; `incoming` are keys, which have no row yet.

    `keep` may answer with a number: a row that has any pins stays. `after` is the row that new ones continue: an order
    that can, has them leave just before it.
    """

    def insert(self, keys: Sequence[int], after: int | None = None, /) -> None: ...
    def touch(self, keys: Sequence[int], /) -> None: ...
    def rank(self, keys: Sequence[int], /) -> None: ...
    def remove(self, keys: Sequence[int], /) -> None: ...
    def evict(
        self, count: int, keep: Callable[[int], int], incoming: Sequence[OffloadKey] = (), /
    ) -> list[int] | None: ...


def row_order(
    policy: Policy[OffloadKey],
    rows: int,
    keys: Sequence[OffloadKey | None],
    row: Callable[[OffloadKey], int | None],
) -> RowOrder:
    """Return the order of a new policy. `keys` says what is in each row, and `row` where a key is."""
    if type(policy) is LRU:  # Not a subclass: that may do anything.
        return RowLRU(rows)
    return _Told(policy, keys, row)


class _Told:
    """A policy that is told, and answers, in keys."""

    def __init__(
        self,
        policy: Policy[OffloadKey],
        keys: Sequence[OffloadKey | None],
        row: Callable[[OffloadKey], int | None],
    ) -> None:
        self._policy = policy
        self._keys = keys
        self._row = row

    def insert(self, rows: Sequence[int], after: int | None = None, /) -> None:  # noqa: ARG002  # Keys know no place.
        self._policy.insert(self._named(rows))

    def touch(self, rows: Sequence[int], /) -> None:
        self._policy.touch(self._named(rows))

    def rank(self, rows: Sequence[int], /) -> None:
        self._policy.rank(self._named(rows))

    def remove(self, rows: Sequence[int], /) -> None:
        self._policy.remove(self._named(rows))

    def evict(self, count: int, keep: Callable[[int], int], incoming: Sequence[OffloadKey] = (), /) -> list[int] | None:
        row = self._row
        victims = self._policy.evict(count, lambda key: keep(_known(row(key))) > 0, incoming)
        return None if victims is None else [_known(row(key)) for key in victims]

    def _named(self, rows: Sequence[int]) -> list[OffloadKey]:
        keys = self._keys
        return [key for row in rows if (key := keys[row]) is not None]


def _known(row: int | None) -> int:
    assert row is not None, "a policy named a key that is not resident"
    return row
