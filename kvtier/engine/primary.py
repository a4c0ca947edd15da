"""The primary: the rows, the keys in them, and the pins that keep them. Synchronous, no I/O.

A row is free, filling (a store or a promotion writes it), ready, or quarantined (an overdue transfer, or a caller, may
still use it). Each reason to keep a row is a pin, and being filled is one. A chunk that was answered HIT is held until
the step ends; that pin is made at the next eviction, because a look-up has no time for it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, cast

from kvtier.backend import OffloadKey
from kvtier.policies import EvictionQueue, HintedOrder, NumberOrder, Policy, number_order
from kvtier.settings.hints import Advice, Hint


class Rows(Protocol):
    """Rows as transfers need them: a primary's, or those that another manager chooses and pins itself."""

    @property
    def ready(self) -> Mapping[OffloadKey, int]: ...
    @property
    def filling(self) -> Mapping[OffloadKey, int]: ...
    def own(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]: ...
    def pin(self, rows: Iterable[int]) -> None: ...
    def unpin(self, rows: Iterable[int]) -> None: ...
    def publish(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]: ...
    def abandon(self, key: OffloadKey, *, lent: bool) -> int | None: ...
    def release(self, row: int) -> None: ...


class Primary:
    """Rows, and the keys in them. `ready` and `filling` (key to row) are changed here only: always the same objects."""

    def __init__(self, rows: int, policy: Policy[OffloadKey], retained_max: int = 0, *, ahead_rows: int = 0) -> None:
        """`retained_max`: the most rows that hints may retain. `ahead_rows`: how many are chosen for eviction ahead."""
        self.rows = rows
        self.ready: dict[OffloadKey, int] = {}
        self.filling: dict[OffloadKey, int] = {}
        self.quarantined: dict[int, int] = {}  # Row -> borrowers that have yet to return it.
        self.evictions = 0
        self._keys: list[OffloadKey | None] = [None] * rows
        self._pins = [0] * rows  # A list: reading an array makes a number each time.
        self._idle = 0  # Ready rows without a pin: all that are evictable, held ones included.
        self._held: set[int] = set()  # Answered HIT in this step.
        self._free = list(range(rows - 1, -1, -1))
        order = number_order(policy, rows, self._keys, self.row)
        self.ahead: EvictionQueue[int] | None = EvictionQueue(order, ahead_rows) if ahead_rows else None
        self.reserved_rows: Sequence[int] = ()  # By the last `reserve`: the evicted ones, last one first; then others.
        self._order: NumberOrder = order if self.ahead is None else self.ahead
        self._hinted: HintedOrder[int] | None = None  # The same order, from the first hint on.
        self._retained_max = retained_max

    @property
    def rows_free(self) -> int:
        return len(self._free)

    @property
    def rows_quarantined(self) -> int:
        """The rows without a key that are not free: overdue transfers or callers still use them."""
        return self.rows - len(self._free) - len(self.ready) - len(self.filling)

    @property
    def rows_evictable(self) -> int:
        """The ready rows without a pin; this step's hits are evictable when the step has ended."""
        return self._idle

    def row(self, key: OffloadKey) -> int | None:
        row = self.ready.get(key)
        return self.filling.get(key) if row is None else row

    def key(self, row: int) -> OffloadKey | None:
        return self._keys[row]

    def keys_of(self, rows: Iterable[int]) -> list[OffloadKey]:
        return cast("list[OffloadKey]", list(map(self._keys.__getitem__, rows)))

    def rows_of(self, keys: Collection[OffloadKey]) -> list[int]:
        try:
            return list(map(self.ready.__getitem__, keys))
        except KeyError:  # Some are filling, or absent.
            return [row for key in keys if (row := self.row(key)) is not None]

    def ready_rows(self, rows: Iterable[int]) -> list[int]:
        keys, ready = self._keys, self.ready
        return [row for row in rows if keys[row] in ready]

    def own(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys as the objects that are kept here, so that 80 bytes each are not kept twice."""
        ready, row_keys = self.ready, self._keys
        if not ready:
            return keys
        return [key if (row := ready.get(key)) is None else row_keys[row] or key for key in keys]

    def reserve(
        self, keys: Sequence[OffloadKey], offered: Collection[OffloadKey] = (), after: OffloadKey | None = None
    ) -> list[OffloadKey] | None:
        """Give each of these absent keys a row in state filling; return the keys evicted for it.

        All or nothing: None, and nothing changed, if too few rows are free or evictable. `offered` keys stay. The new
        keys are evicted just before `after`, which they continue, if it is still here.
        """
        evicted: list[OffloadKey] = []
        missing = len(keys) - len(self._free)
        if missing > 0:
            chosen = self._evict(missing, keys, offered)
            if chosen is None:
                return None
            evicted = chosen
        behind = None if after is None else self.row(after)
        free, row_keys, pins = self._free, self._keys, self._pins
        rows = free[: -len(keys) - 1 : -1]
        del free[len(free) - len(keys) :]
        for key, row in zip(keys, rows, strict=True):
            row_keys[row] = key
            pins[row] = 1
        self.filling.update(zip(keys, rows, strict=True))
        self.reserved_rows = rows
        self._order.insert(rows, behind)
        return evicted

    def publish(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        filling, ready, pins = self.filling, self.ready, self._pins
        published: list[OffloadKey] = []
        idle = 0
        for key in keys:
            row = filling.pop(key, None)
            if row is None:
                continue
            ready[key] = row
            published.append(key)
            left = pins[row] = pins[row] - 1
            if not left:
                idle += 1
        self._idle += idle
        return published

    def abandon(self, key: OffloadKey, *, lent: bool) -> int | None:
        """Forget a filling key; its row is quarantined if `lent`, else free once unpinned."""
        row = self.filling.pop(key, None)
        if row is None:
            return None
        self._order.remove((row,))
        self._keys[row] = None
        self._pins[row] -= 1
        if lent:
            self.quarantined[row] = 1
        elif self._pins[row] == 0:
            self._free.append(row)
        return row

    def discard(self, key: OffloadKey, lost_pins: int = 0) -> bool:
        """Forget a ready key; return False if something holds it.

        `lost_pins` of its row are of overdue transfers and views; its row is free when these have gone, too.
        """
        row = self.ready.get(key)
        if row is None or self._pins[row] > lost_pins:
            return False
        del self.ready[key]
        self._order.remove((row,))
        self._keys[row] = None
        if self._pins[row] == 0:
            self._idle -= 1
            self._free.append(row)
        return True

    def release(self, row: int) -> None:
        """Return a quarantined row for one borrower; the last one frees it."""
        self.quarantined[row] -= 1
        if self.quarantined[row] == 0:
            del self.quarantined[row]
            if self._pins[row] == 0:
                self._free.append(row)

    def pin(self, rows: Iterable[int]) -> None:
        pins = self._pins
        idle = 0
        for row in rows:
            before = pins[row]
            if not before:
                idle += 1
            pins[row] = before + 1
        self._idle -= idle

    def unpin(self, rows: Iterable[int]) -> None:
        """Drop one pin of each row. A row that lost its key while it was pinned is free with its last pin."""
        pins, keys = self._pins, self._keys
        idle = 0
        for row in rows:
            left = pins[row] - 1
            assert left >= 0, row
            pins[row] = left
            if left:
                continue
            if keys[row] is not None:
                idle += 1
            elif row not in self.quarantined:
                self._free.append(row)
        self._idle += idle

    def pinned(self, row: int) -> bool:
        return self._pins[row] > 0

    def hold(self, keys: Iterable[OffloadKey]) -> None:
        """Keep the rows of these keys, if they are ready, until the step ends."""
        rows = map(self.ready.get, keys)
        self._held.update(row for row in rows if row is not None)

    def touch(self, rows: Sequence[int]) -> None:
        self._order.touch(rows)

    def rank(self, rows: Sequence[int]) -> None:
        self._order.rank(rows)

    @property
    def retained(self) -> int:
        return 0 if self._hinted is None else len(self._hinted.retained)

    @property
    def retentions_cut(self) -> int:
        return 0 if self._hinted is None else self._hinted.retained.cut

    @property
    def takes_hints(self) -> bool:
        return self._hinted is not None

    def take_hints(self) -> HintedOrder[int]:
        """Take hints from now on, and track which sessions use which row."""
        if self._hinted is None and self.ahead is not None:
            self._hinted = self.ahead.take_hints(self._retained_max)
        elif self._hinted is None:
            self._hinted = HintedOrder(self._order, self._retained_max)
            self._order = self._hinted
        return self._hinted

    def end(self, rows: Sequence[int], hint: Hint | None) -> Sequence[int]:
        """Rank the rows that an ended request has used; return those of a session that is over."""
        if hint is not None:
            self.take_hints()
        if self._hinted is None:
            self._order.rank(rows)
            return ()
        self._come_back(rows)
        return self._hinted.end(rows, hint)

    def advise(self, advice: Advice[int], now: float) -> int:
        """Demote or retain rows; return how many of them are demoted or retained."""
        self._come_back(advice.keys)
        hinted = self.take_hints()
        hinted.advise(advice, now)
        return sum(map(hinted.retained.__contains__, advice.keys)) if advice.kind == "retain" else len(advice.keys)

    def spare(self, rows: Sequence[int]) -> None:
        self._come_back(rows)
        self.take_hints().spare(rows)

    def end_retentions(self, now: float) -> None:
        if self._hinted is not None:
            self._hinted.retained.expire(now)

    def choose_ahead(self, count: int) -> None:
        """Choose `count` more rows, or as many as are idle. Rows that were pinned when their turn came have another."""
        assert self.ahead is not None
        pins, ahead = self._pins, self.ahead
        ahead.reconsider(self._keeper(()))
        idle = self._idle - len(ahead)
        if count > idle:  # Chosen rows that are pinned are not idle; they are counted only where it matters.
            idle += sum(pins[row] > 0 for row in ahead)
        if count > 0 and idle > 0:
            ahead.choose(min(count, idle), self._keeper(()))

    def _come_back(self, rows: Sequence[int]) -> None:
        if self.ahead is not None:
            self.ahead.come_back(rows)

    def end_step(self) -> None:
        self._held.clear()

    def clear(self, lent: Mapping[int, int]) -> list[OffloadKey]:
        """Forget every key and pin; quarantine just the rows in `lent` (row -> borrowers). Return what was ready."""
        gone = list(self.ready)
        self._order.remove([*self.ready.values(), *self.filling.values()])
        self.ready.clear()
        self.filling.clear()
        self._keys[:] = [None] * self.rows
        self._pins = [0] * self.rows
        self._idle = 0
        self._held.clear()
        self.quarantined = dict(lent)
        self._free = [row for row in range(self.rows - 1, -1, -1) if row not in self.quarantined]
        return gone

    def _evict(
        self, count: int, incoming: Sequence[OffloadKey], offered: Collection[OffloadKey]
    ) -> list[OffloadKey] | None:
        if count > self._idle:
            return None
        if self._hinted is not None and count > self._idle - len(self._hinted.retained):
            self._let_go_retained(count)
        rows = self._order.evict(count, self._keeper(offered), incoming)
        if rows is None:
            return None
        ready, row_keys = self.ready, self._keys
        evicted: list[OffloadKey] = []
        for row in rows:
            key = row_keys[row]
            assert key is not None, row
            row_keys[row] = None
            del ready[key]
            evicted.append(key)
        self._free += rows
        self._idle -= len(rows)
        self.evictions += len(rows)
        return evicted

    def _let_go_retained(self, count: int) -> None:
        """End as many retentions as `count` evictions need: else every row is looked at to find too few."""
        assert self._hinted is not None
        retained, pins = self._hinted.retained, self._pins
        idle_retained = sum(not pins[row] for row in retained)  # A pinned row stays retained.
        retained.let_go(count - (self._idle - idle_retained))

    def _keeper(self, offered: Collection[OffloadKey]) -> Callable[[int], int]:
        """Return a function of a row: 0 if it may be evicted."""
        pins, kept = self._pins, self._held
        if offered:
            kept = kept.union(self.rows_of(offered))
        if not kept:
            return pins.__getitem__
        return lambda row: pins[row] or row in kept
