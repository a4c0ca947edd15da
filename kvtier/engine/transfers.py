"""Transfers: the actions that were sent to the tiers, and whose rows they use.

A transfer is in flight until its outcome is known. If it missed its deadline, or its runner died, its rows may still be
lent then. Such a transfer is overdue. No LLM engine waits for it, and no other transfer gets its rows until they are
returned.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Rows
from kvtier.engine.requests import Request
from kvtier.engine.tier import Tier


class Operation(Enum):
    """The operation of a transfer; the values are the names in metrics."""

    PROMOTION = "load"
    CASCADE = "store"
    PROBE = "probe"
    DELETE = "delete"


class Transfer:
    """One action that was sent. `rows` is empty for probes and deletes; `request` is set for promotions that have one.

    `expected_s` is its predicted duration, or 0 if the tier's speed is not known, and `size_bytes` the size that it was
    predicted for. `computing_s` is how long computing the chunks would take. `given_up`: it was too late for its
    request.
    """

    __slots__ = (
        "computing_s",
        "epoch",
        "expected_s",
        "forgotten",
        "given_up",
        "keys",
        "operation",
        "request",
        "rows",
        "sent_at",
        "size_bytes",
        "tier",
    )

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
        self.sent_at = 0.0
        self.expected_s = 0.0
        self.size_bytes = 0
        self.computing_s = 0.0
        self.given_up = False
        self.forgotten = False  # The primary was cleared: its pins are gone, and its rows are in quarantine.


class Transfers:
    """Transfers in flight and overdue, by action id, and the rows that cascades pin."""

    def __init__(self, primary: Rows) -> None:
        self.in_flight: dict[int, Transfer] = {}
        self.overdue: dict[int, Transfer] = {}
        self.cascade_rows: Counter[int] = Counter()  # Row -> cascades, queued or sent, that pin it.
        self.epoch = 0  # Of the present runner.
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
        """Enter a transfer and return its id."""
        self._ids += 1
        transfer = self.in_flight[self._ids] = Transfer(operation, tier, keys, rows, self.epoch, request)
        if operation is Operation.PROMOTION:
            tier.loads[self._ids] = transfer
        return self._ids

    def settle(self, id_: int, *, lent: bool) -> Transfer | None:
        """Remove a transfer whose outcome is known, or None for an unknown id; while `lent`, it is overdue."""
        transfer = self.in_flight.pop(id_, None)
        if transfer is None:
            return None
        tier = transfer.tier
        if tier.loads:
            tier.loads.pop(id_, None)
        if lent:
            self.overdue[id_] = transfer
            tier.overdue_rows += len(transfer.rows)
        return transfer

    def take_back(self, id_: int) -> None:
        """Free the rows of an overdue transfer."""
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

    def stores_in_flight(self) -> list[tuple[Tier, Sequence[OffloadKey]]]:
        sent = self.in_flight.values()
        return [(each.tier, each.keys) for each in sent if each.operation is Operation.CASCADE]

    def pins_overdue(self) -> Counter[int]:
        """Count by row the pins of overdue cascades."""
        pins: Counter[int] = Counter()
        for transfer in self.overdue.values():
            if transfer.operation is Operation.CASCADE and not transfer.forgotten:
                pins.update(transfer.rows)
        return pins

    @property
    def rows_overdue(self) -> int:
        """The overdue rows of the present runner; it is not to blame for those of a dead one."""
        return sum(len(transfer.rows) for transfer in self.overdue.values() if transfer.epoch == self.epoch)

    def clear(self) -> Counter[int]:
        """Forget every pin and return the rows still lent, row -> borrowers. Nothing may be in flight."""
        assert not self.in_flight, self.in_flight
        self.cascade_rows.clear()
        lent: Counter[int] = Counter()
        for transfer in self.overdue.values():
            transfer.forgotten = True
            lent.update(transfer.rows)
        return lent
