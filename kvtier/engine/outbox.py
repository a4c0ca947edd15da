"""The outbox: what goes to the tiers when a step ends, in batches, loads first; and what has gone: the transfers.

Rows are reserved or pinned when something is queued, not when it is sent, so that nothing of it can be evicted in
between. What exceeds a limit is dropped here and counted, with the reason.

A transfer is under way until its outcome is known. If it ran out of time, or its runner died, its rows may still be
lent then. Such a transfer is overdue. No LLM engine waits for it, and no other transfer gets its rows until they are
returned.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, itemgetter
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Rows
from kvtier.engine.requests import Request
from kvtier.engine.tier import WHEN_EVICTED, Residency, Tier
from kvtier.hints import Advice, Hint
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Advise,
    Cascade,
    Delete,
    Probe,
    Promote,
    pack_keys,
    pack_rows,
)

ADVICE_KEYS_MAX = 4_096  # In one action: some milliseconds of the runner's loop.
ADVICE_MAX = 64  # In one step. Of more the oldest are dropped: they only say in which order chunks should go.
_NOTHING_SAID = Hint()  # Of a request that is over, where others have hints.

_to_ask = attrgetter("to_ask")


class Operation(Enum):
    """The operation that a transfer does; the values are the names in metrics."""

    PROMOTION = "load"
    CASCADE = "store"
    PROBE = "probe"
    DELETE = "delete"


class Run:
    """Neighbouring keys of what a request looked up in a step, that are to be loaded from one tier."""

    __slots__ = ("end", "others", "start", "tier", "unasked")

    def __init__(self, tier: Tier, start: int, end: int, others: int = 0, *, unasked: bool = False) -> None:
        self.tier = tier
        self.start = start  # Places among all that the request has found in the step, from 0.
        self.end = end
        self.others = others  # Bits of the other tiers that have all of it.
        self.unasked = unasked  # A further one may have some of it, and has not been asked.


def chunks_before(runs: Sequence[Run], end: int) -> dict[Tier, int]:
    """Count by tier the chunks of runs whose places are before an end; tiers without any, too."""
    chunks: dict[Tier, int] = {}
    for run in runs:
        chunks[run.tier] = chunks.get(run.tier, 0) + max(0, min(run.end, end) - run.start)
    return chunks


class Transfer:
    """One action that was sent. `rows` is empty for probes and deletes; `request` is set for promotions that have one.

    `expected_s` is the time that it was expected to take; 0 if that is not known. `sizes` are the sizes for which the
    tier's speed gave this time. `computing_s` is what computing it would take, for whoever waits. `given_up`: it was
    too late for its request.
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
        "sizes",
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
        self.sizes: tuple[int, int] = (0, 0)
        self.computing_s = 0.0
        self.given_up = False
        self.forgotten = False  # The primary was cleared meanwhile: its pins are gone, its rows are in quarantine.


Expect = Callable[[Transfer], None]
"""Notes how long a load is expected to take, which is about to be sent."""


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
        transfer = self.under_way[self._ids] = Transfer(operation, tier, keys, rows, self.epoch, request)
        if operation is Operation.PROMOTION:
            tier.loads[self._ids] = transfer
        return self._ids

    def settle(self, id_: int, *, lent: bool) -> Transfer | None:
        """Take a transfer whose outcome is known off the table; while `lent`, it is overdue. None: it is not known."""
        transfer = self.under_way.pop(id_, None)
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

    def stores_under_way(self) -> list[tuple[Tier, Sequence[OffloadKey]]]:
        sent = self.under_way.values()
        return [(each.tier, each.keys) for each in sent if each.operation is Operation.CASCADE]

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


class _Waiting(NamedTuple):
    """Advice for a tier that waits for stores of its keys: the tier could not heed it before."""

    tier: Tier
    advice: Advice[OffloadKey]
    stores: set[OffloadKey]  # In flight.


class Outbox:
    """Queues of one step, and `flush`, which turns them into actions of at most `action_chunks` chunks."""

    def __init__(
        self,
        primary: Rows,
        tiers: Sequence[Tier],
        residency: Residency,
        transfers: Transfers,
        *,
        cascade_rows_max: int,
        action_chunks: int,
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._residency = residency
        self._transfers = transfers
        self._cascade_rows_max = cascade_rows_max
        self._action_chunks = action_chunks
        self._promotions: dict[tuple[Tier, Request | None], list[OffloadKey]] = {}
        self.runs: dict[Request, list[Run]] = {}
        """What requests want loaded in this step, in the order of asking, as far as loads are weighed."""
        self._cascades: dict[Tier, list[OffloadKey]] = {}
        self._deletes: dict[Tier, list[OffloadKey]] = {}
        self._advice: deque[Action] = deque(maxlen=ADVICE_MAX)
        self._waiting: deque[_Waiting] = deque()
        self._hinted = False  # There has been a hint.
        self._acknowledgements: list[Action] = []

    def promote(
        self, key: OffloadKey, tier: Tier, request: Request, others: int | None = None, *, unasked: bool = False
    ) -> None:
        """Queue a load into the row that is reserved for the key: one batch for each tier and request.

        `others` and `unasked`: as of a `Run`, if the load of what the request finds next is to be weighed.
        """
        self._promotions.setdefault((tier, request), []).append(key)
        if others is not None:
            place, runs = request.found, self.runs.setdefault(request, [])
            if runs and (last := runs[-1]).end == place and last.tier is tier and last.others == others:
                last.end += 1
                last.unasked |= unasked
            else:
                runs.append(Run(tier, place, place + 1, others, unasked=unasked))
        tier.counters.promoted += 1
        tier.breaker.take()

    def reassign(self, request: Request, runs: Sequence[Run]) -> None:
        """Queue the loads of a request anew, from the tiers that its runs say now; its turn stays the same."""
        keys = [*request.held, *request.hits]
        had: dict[Tier, int] = {}
        for tier in self._tiers:
            had[tier] = len(self._promotions.pop((tier, request), ()))
            tier.counters.promoted -= had[tier]
        for run in runs:
            loaded = keys[run.start : run.end]
            self._promotions.setdefault((run.tier, request), []).extend(loaded)
            request.search.sources.update(dict.fromkeys(loaded, run.tier.index))
            run.tier.counters.promoted += len(loaded)
        for tier, chunks in chunks_before(runs, runs[-1].end).items():
            tier.breaker.take(max(0, chunks - had[tier]))

    def order_loads(self) -> None:
        """Put the loads that are weighed into the order of asking; others come after them."""
        turns: dict[Request | None, int] = {request: turn for turn, request in enumerate(self.runs)}
        loads = [(turns.get(request, len(turns)), tier, request) for tier, request in self._promotions]
        loads.sort(key=itemgetter(0))
        self._promotions = {(tier, request): self._promotions[tier, request] for _, tier, request in loads}

    def withdraw(self, tier: Tier, request: Request, kept: int) -> list[OffloadKey]:
        """Take back what was queued for a request from a tier, but for the first so many; return it."""
        queued = self._promotions[tier, request]
        withdrawn = queued[kept:]
        del queued[kept:]
        if not queued:
            del self._promotions[tier, request]
        tier.counters.promoted -= len(withdrawn)
        return withdrawn

    def explore(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        """Queue a load for nobody into the rows that are reserved for the keys."""
        self._promotions.setdefault((tier, None), []).extend(keys)
        tier.counters.promoted += len(keys)
        tier.counters.explored += len(keys)
        tier.breaker.take(len(keys))

    def cascade(self, keys: Iterable[OffloadKey], tier: Tier, now: float) -> None:
        """Queue stores of ready keys, each given once, that the tier neither has nor is getting."""
        mask, bit, storing = self._residency.mask, tier.bit, tier.storing
        lacking = [key for key in keys if key not in storing and not mask.get(key, 0) & bit]
        if not lacking:
            return
        queued = self._within_limits(lacking, tier, now)
        if queued:
            self.store(queued, tier)

    def store(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        """Queue stores of ready keys that the tier neither has nor is getting: at most as many as it has `places`."""
        tier.storing.update(keys)
        self._transfers.pin_cascade(list(map(self._primary.ready.__getitem__, keys)))
        tier.breaker.take(len(keys))
        self._cascades.setdefault(tier, []).extend(keys)

    def places(self, tier: Tier, now: float) -> int:
        """Return how many chunks can cascade to a tier now without exceeding a limit."""
        places = tier.spec.store_chunks_max - len(tier.storing)
        return max(0, min(tier.admits(now), places, self._cascade_rows_max - len(self._transfers.cascade_rows)))

    def delete(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        self._deletes.setdefault(tier, []).extend(keys)

    def end(self, keys: Sequence[OffloadKey], tier: Tier, hint: Hint | None) -> None:
        """Queue the end of a request that used these keys, in prefix order.

        Until the first hint of any request, this only renews recency.
        """
        self._hinted = self._hinted or hint is not None
        self.advise(tier, Advice("rank", keys, hint or _NOTHING_SAID if self._hinted else None))

    def expect_hints(self) -> None:
        """Queue an empty hint for each tier, which tracks sessions from then on."""
        self._hinted = True
        self._advice.extend(Advise.of(tier.index, Advice("rank", (), _NOTHING_SAID)) for tier in self._tiers)

    def advise(self, tier: Tier, advice: Advice[OffloadKey]) -> None:
        """Queue advice on those of its keys that the tier holds. A hint waits for stores of its keys in flight."""
        stores = tier.storing.intersection(advice.keys) if advice.is_hint else None
        if not stores:
            self._queue_advice(tier, advice)
            return
        self._waiting.append(_Waiting(tier, advice, stores))
        if len(self._waiting) > ADVICE_MAX:
            oldest = self._waiting.popleft()
            self._queue_advice(oldest.tier, oldest.advice)

    def acknowledge(self, tier: Tier) -> None:
        """Have the runner send the tier's next inventory batch."""
        self._acknowledgements.append(Acknowledge(tier.index))

    @property
    def slice_chunks(self) -> int:
        """The most chunks that can cascade at once without a drop when nothing is under way."""
        most = (tier.spec.store_chunks_max for tier in self._tiers if tier.spec.cascade != WHEN_EVICTED)
        return min([self._action_chunks, self._cascade_rows_max, *most])

    def room(self, chunks: int) -> bool:
        """Say whether so many chunks (at most `slice_chunks`) can cascade now without exceeding a limit."""
        return len(self._transfers.cascade_rows) + chunks <= self._cascade_rows_max and all(
            len(tier.storing) + chunks <= tier.spec.store_chunks_max
            for tier in self._tiers
            if tier.spec.cascade != WHEN_EVICTED
        )

    @property
    def storing(self) -> bool:
        """Whether a store is queued or under way within its deadline."""
        return any(tier.storing for tier in self._tiers)

    def loading(self) -> set[OffloadKey]:
        """Return the keys that are on their way from tiers, or are about to be."""
        sent = [each.keys for each in self._transfers.under_way.values() if each.operation is Operation.PROMOTION]
        return set(chain(*self._promotions.values(), *sent))

    @property
    def empty(self) -> bool:
        return not (self._promotions or self._cascades or self._deletes or any(map(_to_ask, self._tiers)))

    def flush(self, expect: Expect | None = None) -> list[Action]:
        """Turn what was queued into actions; `expect` is told of every load."""
        actions, self._acknowledgements = self._acknowledgements, []
        if not self.empty:
            actions.extend(self._work(expect))
        if self._waiting:
            self._advise_waiting()
        if self._advice:  # Nobody waits for these: with them alone the outbox is empty.
            actions.extend(self._advice)
            self._advice.clear()
        return actions

    def clear(self) -> None:
        """Forget promotions and cascades: the primary is about to drop every key and pin."""
        for tier, keys in self._cascades.items():
            tier.storing.difference_update(keys)
            tier.raced.difference_update(keys)
        self._promotions.clear()
        self.runs.clear()
        self._cascades.clear()

    def _advise_waiting(self) -> None:
        """Queue the advice whose stores are finished."""
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.stores.intersection_update(each.tier.storing)
            if each.stores:
                self._waiting.append(each)
            else:
                self._queue_advice(each.tier, each.advice)

    def _queue_advice(self, tier: Tier, advice: Advice[OffloadKey]) -> None:
        keys = advice.keys
        mask, bit, answered, size = self._residency.mask, tier.bit, tier.answered, ADVICE_KEYS_MAX
        if mask.keys().isdisjoint(keys) and answered.isdisjoint(keys):
            return
        held = [key for key in keys if mask.get(key, 0) & bit or key in answered]
        starts = range(0, len(held), size)
        for start in starts if advice.kind == "retain" else reversed(starts):  # The last part applied is the hottest.
            self._advice.append(Advise.of(tier.index, advice.of(held[start : start + size])))

    def _within_limits(self, keys: list[OffloadKey], tier: Tier, now: float) -> list[OffloadKey]:
        """Return those of the keys whose cascade exceeds no limit; the others are dropped, each for the first it meets.

        A row that another tier's cascade pins costs no further pin.
        """
        cascading = self._transfers.cascade_rows
        admitted = tier.admits(now)
        places, pins = tier.spec.store_chunks_max - len(tier.storing), self._cascade_rows_max - len(cascading)
        if len(keys) <= min(admitted, places, pins):
            return keys
        taken: list[OffloadKey] = []
        for key in keys:
            pinned = self._primary.ready[key] in cascading
            if len(taken) >= places:
                tier.counters.drop("budget", 1)
            elif pins <= 0 and not pinned:
                tier.counters.drop("pinned", 1)
            elif len(taken) >= admitted:
                overdue = tier.overdue_rows >= tier.spec.overdue_rows_max
                tier.counters.drop("overdue" if overdue else "breaker", 1)
            else:
                taken.append(key)
                pins -= not pinned
        return taken

    def _work(self, expect: Expect | None) -> Iterator[Action]:
        yield from self._probes()
        if self._promotions:
            yield from self._loads(expect)
        yield from self._stores()
        for tier, queued in self._deletes.items():
            for keys in self._batches(queued):
                yield Delete(self._transfers.send(Operation.DELETE, tier, keys, ()), tier.index, pack_keys(keys))
        self._deletes.clear()

    def _probes(self) -> Iterator[Action]:
        for tier in self._tiers:
            queued, tier.to_ask = tier.to_ask, []
            for keys in self._batches(queued):
                yield Probe(self._transfers.send(Operation.PROBE, tier, keys, ()), tier.index, pack_keys(keys))

    def _loads(self, expect: Expect | None) -> Iterator[Action]:
        for (tier, request), queued in self._promotions.items():
            for keys in self._batches(queued):
                rows = [self._primary.filling[key] for key in keys]
                id_ = self._transfers.send(Operation.PROMOTION, tier, keys, rows, request)
                if expect is not None:
                    expect(self._transfers.under_way[id_])
                tier.loading += len(keys)
                yield Promote(id_, tier.index, pack_keys(keys), pack_rows(rows))
        self._promotions.clear()
        self.runs.clear()

    def _stores(self) -> Iterator[Action]:
        for tier, queued in self._cascades.items():
            for keys in self._batches(queued):
                rows = list(map(self._primary.ready.__getitem__, keys))
                id_ = self._transfers.send(Operation.CASCADE, tier, keys, rows)
                yield Cascade(id_, tier.index, pack_keys(keys), pack_rows(rows))
        self._cascades.clear()

    def _batches(self, keys: list[OffloadKey]) -> Iterator[list[OffloadKey]]:
        size = self._action_chunks
        return (keys[start : start + size] for start in range(0, len(keys), size))
