"""The primary's rows: which key lies where, in what state, and why it may not go. Synchronous, no I/O.

A row is free, filling (a store or a promotion writes it), ready, or quarantined (a transfer that ran out of time may
still use it, so nobody else may). Each reason to keep a row is a pin; a row that was answered HIT is kept by a stamp
until the step ends, because pinning and unpinning it would cost a look-up twice its time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvtier.keys import OffloadKey
from kvtier.policies.base import Policy


class Primary:
    """Rows of one primary, and the keys in them.

    `ready` and `filling` map a key to its row. They are read by the ledger on every look-up; only this class changes
    them.
    """

    def __init__(self, rows: int, policy: Policy[OffloadKey]) -> None:
        self.rows = rows
        self.ready: dict[OffloadKey, int] = {}
        self.filling: dict[OffloadKey, int] = {}
        self.stamps = [0] * rows  # The step in which a row was last answered HIT.
        self.step = 1
        self.quarantined: dict[int, int] = {}  # Row -> borrowers that have yet to return it.
        self.evictions = 0
        self._policy = policy
        self._keys: list[OffloadKey | None] = [None] * rows
        self._pins = [0] * rows
        self._free = list(range(rows - 1, -1, -1))

    @property
    def rows_free(self) -> int:
        return len(self._free)

    def row(self, key: OffloadKey) -> int | None:
        """Return the row of a key that is ready or filling."""
        row = self.ready.get(key)
        return self.filling.get(key) if row is None else row

    def key(self, row: int) -> OffloadKey | None:
        return self._keys[row]

    def reserve(self, keys: Sequence[OffloadKey], offered: Collection[OffloadKey] = ()) -> list[OffloadKey] | None:
        """Give each of these absent keys a row in state filling; return the keys evicted for it.

        All or nothing: None, and nothing changed, if too few rows are free or evictable. `offered` keys stay.
        """
        evicted: list[OffloadKey] = []
        missing = len(keys) - len(self._free)
        if missing > 0:
            chosen = self._evict(missing, keys, offered)
            if chosen is None:
                return None
            evicted = chosen
        self._policy.insert(keys)
        free, row_keys, filling = self._free, self._keys, self.filling
        for key in keys:
            row = free.pop()
            row_keys[row] = key
            filling[key] = row
        return evicted

    def publish(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Turn filling rows ready; return the keys for which that was done (the others were not filling)."""
        filling, ready = self.filling, self.ready
        published: list[OffloadKey] = []
        for key in keys:
            row = filling.pop(key, None)
            if row is not None:
                ready[key] = row
                published.append(key)
        return published

    def abandon(self, key: OffloadKey, *, lent: bool) -> int | None:
        """Forget a filling key whose chunk did not come; its row is quarantined if `lent`, else free once unpinned."""
        row = self.filling.pop(key, None)
        if row is None:
            return None
        self._policy.remove((key,))
        self._keys[row] = None
        if lent:
            self.quarantined[row] = 1
        elif self._pins[row] == 0:
            self._free.append(row)
        return row

    def discard(self, key: OffloadKey, lost_pins: int = 0) -> bool:
        """Forget a ready key that nothing holds; say whether it could be done.

        `lost_pins` of its row belong to nobody who will say when; its row is free when they have gone, too.
        """
        row = self.ready.get(key)
        if row is None or self._pins[row] > lost_pins:
            return False
        del self.ready[key]
        self._policy.remove((key,))
        self._keys[row] = None
        if self._pins[row] == 0:
            self._free.append(row)
        return True

    def release(self, row: int) -> None:
        """Take note that one borrower has returned a quarantined row; the last one frees it."""
        self.quarantined[row] -= 1
        if self.quarantined[row] == 0:
            del self.quarantined[row]
            if self._pins[row] == 0:
                self._free.append(row)

    def pin(self, rows: Iterable[int]) -> None:
        pins = self._pins
        for row in rows:
            pins[row] += 1

    def unpin(self, rows: Iterable[int]) -> None:
        """Drop one pin of each row. A row that lost its key while it was pinned is free with its last pin."""
        pins = self._pins
        for row in rows:
            pins[row] -= 1
            assert pins[row] >= 0, row
            if pins[row] == 0 and self._keys[row] is None and row not in self.quarantined:
                self._free.append(row)

    def pinned(self, row: int) -> bool:
        return self._pins[row] > 0

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._policy.touch(keys)

    def rank(self, keys: Sequence[OffloadKey]) -> None:
        self._policy.rank(keys)

    def end_step(self) -> None:
        """Let rows that were answered HIT go again, unless pinned."""
        self.step += 1

    def clear(self, lent: Mapping[int, int]) -> list[OffloadKey]:
        """Forget every key and pin; quarantine just the rows in `lent` (row -> borrowers). Return what was ready."""
        gone = list(self.ready)
        resident = gone + list(self.filling)
        self._policy.remove(resident)
        self.ready.clear()
        self.filling.clear()
        self._keys = [None] * self.rows
        self._pins = [0] * self.rows
        self.quarantined = dict(lent)
        self._free = [row for row in range(self.rows - 1, -1, -1) if row not in self.quarantined]
        return gone

    def _evict(
        self, count: int, incoming: Sequence[OffloadKey], offered: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        ready, pins, stamps, step = self.ready, self._pins, self.stamps, self.step

        def keep(key: OffloadKey) -> bool:
            row = ready.get(key)
            return row is None or pins[row] > 0 or stamps[row] == step or key in offered

        evicted = self._policy.evict(count, keep, incoming)
        if evicted is None:
            return None
        for key in evicted:
            row = ready.pop(key)
            self._keys[row] = None
            self._free.append(row)
        self.evictions += len(evicted)
        return evicted
