"""The outbox: stores, deletes, probes and advice of one step, which leave in batches at its end.

Rows are pinned when a store is queued, not when it is sent, so that none is evicted in between. A store that exceeds a
limit is dropped and counted, with the reason. Loads have a queue of their own: see `loads`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Rows
from kvtier.engine.tier import WHEN_EVICTED, LocationMap, Tier
from kvtier.engine.transfers import Operation, Transfers
from kvtier.runner.messages import Acknowledge, Action, Advise, Cascade, Delete, Probe, pack_keys, pack_rows
from kvtier.settings.hints import Advice, Hint

ADVICE_KEYS_MAX = 4_096  # In one action: some milliseconds of the runner's loop.
ADVICE_MAX = 64  # In one step. The oldest are dropped: they only concern the order of evictions.
_NOTHING_SAID = Hint()  # Of a finished request without a hint, where others have one.

_to_ask = attrgetter("to_ask")


class _Waiting(NamedTuple):
    """Advice that waits for stores of its keys: the tier could not follow it before."""

    tier: Tier
    advice: Advice[OffloadKey]
    stores: set[OffloadKey]  # In flight.


class Outbox:
    """Queues of one step, and `flush`, which turns them into actions of at most `action_chunks` chunks."""

    def __init__(
        self,
        primary: Rows,
        tiers: Sequence[Tier],
        locations: LocationMap,
        transfers: Transfers,
        *,
        cascade_rows_max: int,
        action_chunks: int,
    ) -> None:
        self._primary = primary
        self._tiers = tiers
        self._locations = locations
        self._transfers = transfers
        self._cascade_rows_max = cascade_rows_max
        self._action_chunks = action_chunks
        self._cascades: dict[Tier, list[OffloadKey]] = {}
        self._deletes: dict[Tier, list[OffloadKey]] = {}
        self._advice: deque[Action] = deque(maxlen=ADVICE_MAX)
        self._waiting: deque[_Waiting] = deque()
        self._hinted = False  # There has been a hint.
        self._acknowledgements: list[Action] = []

    def cascade(self, keys: Iterable[OffloadKey], tier: Tier, now: float) -> None:
        """Queue stores of those of the ready keys, each given once, that the tier neither has nor is getting."""
        mask, bit, storing = self._locations.mask, tier.bit, tier.storing
        lacking = [key for key in keys if key not in storing and not mask.get(key, 0) & bit]
        if not lacking:
            return
        queued = self._within_limits(lacking, tier, now)
        if queued:
            self.store(queued, tier)

    def store(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        """Queue stores of ready keys that the tier lacks: at most as many as it has `places`."""
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
        """Let the runner send the tier's next inventory batch."""
        self._acknowledgements.append(Acknowledge(tier.index))

    @property
    def slice_chunks(self) -> int:
        """The most chunks that can cascade at once without a drop while nothing is in flight."""
        most = (tier.spec.store_chunks_max for tier in self._tiers if tier.spec.cascade != WHEN_EVICTED)
        return min([self._action_chunks, self._cascade_rows_max, *most])

    def room(self, chunks: int) -> bool:
        """Return True if so many chunks (at most `slice_chunks`) can cascade now without exceeding a limit."""
        return len(self._transfers.cascade_rows) + chunks <= self._cascade_rows_max and all(
            len(tier.storing) + chunks <= tier.spec.store_chunks_max
            for tier in self._tiers
            if tier.spec.cascade != WHEN_EVICTED
        )

    @property
    def storing(self) -> bool:
        """Whether a store is queued, or in flight within its deadline."""
        return any(tier.storing for tier in self._tiers)

    @property
    def empty(self) -> bool:
        return not (self._cascades or self._deletes or any(map(_to_ask, self._tiers)))

    def flush(self, loads: Iterable[Action] = ()) -> list[Action]:
        """Turn what was queued into actions; `loads` go before stores."""
        actions, self._acknowledgements = self._acknowledgements, []
        if not self.empty:
            actions.extend(chain(self._probes(), loads, self._stores(), self._deletions()))
        elif loads:
            actions.extend(loads)
        if self._waiting:
            self._advise_waiting()
        if self._advice:  # No answer comes: with advice alone the outbox is empty.
            actions.extend(self._advice)
            self._advice.clear()
        return actions

    def clear(self) -> None:
        """Forget queued stores: the primary is about to drop every key and pin."""
        for tier, keys in self._cascades.items():
            tier.storing.difference_update(keys)
            tier.raced.difference_update(keys)
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
        mask, bit, answered, size = self._locations.mask, tier.bit, tier.answered, ADVICE_KEYS_MAX
        if mask.keys().isdisjoint(keys) and answered.isdisjoint(keys):
            return
        held = [key for key in keys if mask.get(key, 0) & bit or key in answered]
        starts = range(0, len(held), size)
        for start in starts if advice.kind == "retain" else reversed(starts):  # The last part applied is the hottest.
            self._advice.append(Advise.of(tier.index, advice.of(held[start : start + size])))

    def _within_limits(self, keys: list[OffloadKey], tier: Tier, now: float) -> list[OffloadKey]:
        """Return the keys whose cascade exceeds no limit; each of the others is dropped for the first limit it meets.

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

    def _probes(self) -> Iterator[Action]:
        for tier in self._tiers:
            queued, tier.to_ask = tier.to_ask, []
            for keys in self._batches(queued):
                yield Probe(self._transfers.send(Operation.PROBE, tier, keys, ()), tier.index, pack_keys(keys))

    def _stores(self) -> Iterator[Action]:
        for tier, queued in self._cascades.items():
            for keys in self._batches(queued):
                rows = list(map(self._primary.ready.__getitem__, keys))
                id_ = self._transfers.send(Operation.CASCADE, tier, keys, rows)
                yield Cascade(id_, tier.index, pack_keys(keys), pack_rows(rows))
        self._cascades.clear()

    def _deletions(self) -> Iterator[Action]:
        for tier, queued in self._deletes.items():
            for keys in self._batches(queued):
                yield Delete(self._transfers.send(Operation.DELETE, tier, keys, ()), tier.index, pack_keys(keys))
        self._deletes.clear()

    def _batches(self, keys: list[OffloadKey]) -> Iterator[list[OffloadKey]]:
        size = self._action_chunks
        return (keys[start : start + size] for start in range(0, len(keys), size))
