"""Transfers: what was sent, and who holds its rows.

A transfer is under way until its outcome is known. If its rows are still lent then (it ran out of time, or its runner
died), it is overdue: no LLM engine waits for it, and nobody else gets its rows until they are returned.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Rows
from kvtier.engine.requests import Request
from kvtier.engine.tier import Tier


class Operation(Enum):
    """What a transfer does; the values are the operations' names in metrics."""

    PROMOTION = "load"
    CASCADE = "store"
    PROBE = "probe"
    DELETE = "delete"


class Transfer:
    """One action that was sent. `rows` is empty for probes and deletes; `request` is set for promotions."""

    __slots__ = ("epoch", "forgotten", "keys", "operation", "request", "rows", "tier")

    def __init__(
        self,
        operation: Operation,
        tier: Tier,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        epoch: int,
        request: Request | None,
    ) -> None:
        self.operation = operation
        self.tier = tier
        self.keys = keys
        self.rows = rows
        self.epoch = epoch
        self.request = request
        self.forgotten = False  # The primary was cleared meanwhile: its pins are gone, its rows are in quarantine.


class Transfers:
    """Transfers under way and overdue, by action id, and the rows that cascades pin."""

    def __init__(self, primary: Rows) -> None:
        self.under_way: dict[int, Transfer] = {}
        self.overdue: dict[int, Transfer] = {}
        self.cascade_rows: Counter[int] = Counter()  # Row -> cascades, queued or sent, that pin it.
        self.epoch = 0  # Of the runner that takes actions now.
        self._primary = primary
        self._ids = 0

    def send(
        self,
        operation: Operation,
        tier: Tier,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        request: Request | None = None,
    ) -> int:
        """Enter a transfer as under way and return its id."""
        self._ids += 1
        self.under_way[self._ids] = Transfer(operation, tier, keys, rows, self.epoch, request)
        return self._ids

    def settle(self, id_: int, *, lent: bool) -> Transfer | None:
        """Take a transfer whose outcome is known off the table; while `lent`, it is overdue. None: it is not known."""
        transfer = self.under_way.pop(id_, None)
        if transfer is not None and lent:
            self.overdue[id_] = transfer
            transfer.tier.overdue_rows += len(transfer.rows)
        return transfer

    def take_back(self, id_: int) -> None:
        """Free the rows of an overdue transfer: nothing uses them any more."""
        transfer = self.overdue.pop(id_, None)
        if transfer is None:
            return
        transfer.tier.overdue_rows -= len(transfer.rows)
        if transfer.forgotten or transfer.operation is Operation.PROMOTION:
            for row in transfer.rows:
                self._primary.release(row)
        else:
            self.unpin_cascade(transfer.rows)

    def overdue_of(self, epoch: int) -> Iterator[int]:
        return iter([id_ for id_, transfer in self.overdue.items() if transfer.epoch == epoch])

    def pin_cascade(self, rows: Sequence[int]) -> None:
        self.cascade_rows.update(rows)
        self._primary.pin(rows)

    def unpin_cascade(self, rows: Sequence[int]) -> None:
        self._primary.unpin(rows)
        cascades = self.cascade_rows
        for row in rows:
            left = cascades[row] - 1
            if left:
                cascades[row] = left
            else:
                cascades.pop(row)  # A Counter's own `del` is a call in Python.

    def pins_overdue(self) -> Counter[int]:
        """Count by row the pins of cascades that ran out of time: nobody knows when these go."""
        pins: Counter[int] = Counter()
        for transfer in self.overdue.values():
            if transfer.operation is Operation.CASCADE and not transfer.forgotten:
                pins.update(transfer.rows)
        return pins

    @property
    def rows_overdue(self) -> int:
        """Rows that the present runner is late with; for what a dead one still holds its successor is not to blame."""
        return sum(len(transfer.rows) for transfer in self.overdue.values() if transfer.epoch == self.epoch)

    def clear(self) -> Counter[int]:
        """Forget every pin and return the rows still lent, row -> borrowers. Nothing may be under way."""
        assert not self.under_way, self.under_way
        self.cascade_rows.clear()
        lent: Counter[int] = Counter()
        for transfer in self.overdue.values():
            transfer.forgotten = True
            lent.update(transfer.rows)
        return lent
