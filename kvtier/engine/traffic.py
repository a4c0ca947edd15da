"""The traffic with the tiers: the actions that are queued and sent, the rows that they use, and what comes back.

A transfer in flight that missed its deadline, or lost its runner, is overdue: no LLM engine waits for it, and no other
transfer gets its rows until they are returned. A step's stores, deletes, probes and advice leave in batches at its end,
with the rows pinned from the queue on. A store that exceeds a limit is dropped and counted. `loads` queues loads.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.config import PRIMARY_NAME
from kvtier.engine.answers import EventKind, EventLog
from kvtier.engine.primary import Rows
from kvtier.engine.requests import Leases, Request
from kvtier.engine.tier import NOT_TRIED, WHEN_EVICTED, LedgerLimits, LocationMap, Tier, Trial
from kvtier.runner import messages
from kvtier.runner.messages import Action, Code, pack_keys, pack_rows, unpack_keys, unpack_rows
from kvtier.runner.reports import Speed
from kvtier.settings.hints import Advice, Hint

Observe = Callable[[str, str, float], None]  # A tier's name, an operation, and its seconds.

ADVICE_KEYS_MAX = 4_096  # In one action: some milliseconds of the runner's loop.
ADVICE_MAX = 64  # In one step. The oldest are dropped: they only concern the order of evictions.
_NOTHING_SAID = Hint()  # Of a finished request without a hint, where others have one.

_to_ask = attrgetter("to_ask")


class Operation(Enum):
    """The operation of a transfer; the values are the names in metrics."""

    PROMOTION = "load"
    CASCADE = "store"
    PROBE = "probe"
    DELETE = "delete"


@dataclass(slots=True, eq=False)
class Transfer:
    operation: Operation
    tier: Tier
    keys: Sequence[OffloadKey]
    rows: Sequence[int]  # Empty for probes and deletes.
    epoch: int  # Of its runner.
    request: Request | None  # That a promotion is for; None for a trial.
    sent_at: float = 0.0
    expected_s: float = 0.0  # Its predicted duration; 0 if the tier's speed was not known.
    size_bytes: int = 0  # The size that it was predicted for.
    computing_s: float = 0.0  # To compute its chunks instead.
    given_up: bool = False  # It was too late for its request.
    forgotten: bool = False  # The primary was cleared: its pins are gone, and its rows are in quarantine.


class _Waiting(NamedTuple):
    """Advice that waits for stores of its keys: the tier could not follow it before."""

    tier: Tier
    advice: Advice[OffloadKey]
    stores: set[OffloadKey]  # In flight.


class Traffic:
    """The transfers in flight and overdue, by action id, and the queues of one step."""

    def __init__(
        self,
        primary: Rows,
        leases: Leases,
        tiers: Sequence[Tier],
        limits: LedgerLimits,
        events: EventLog,
        observe: Observe | None,
    ) -> None:
        self.locations = LocationMap()
        self.in_flight: dict[int, Transfer] = {}
        self.overdue: dict[int, Transfer] = {}
        self.cascade_rows: Counter[int] = Counter()  # Row -> cascades, queued or sent, that pin it.
        self.epoch = 0  # Of the present runner.
        self._ids = 0
        self._primary = primary
        self._leases = leases
        self._tiers = tiers
        self._events = events
        self._observe = observe
        self._cascade_rows_max = limits.cascade_rows_max
        self._action_chunks = limits.action_chunks
        self._cascades: dict[Tier, list[OffloadKey]] = {}
        self._deletes: dict[Tier, list[OffloadKey]] = {}
        self._advice: deque[Action] = deque(maxlen=ADVICE_MAX)
        self._waiting: deque[_Waiting] = deque()
        self._hinted = False  # There has been a hint.
        self._acknowledgements: list[Action] = []

    def cascade(self, keys: Iterable[OffloadKey], tier: Tier, now: float) -> None:
        """Queue stores of those of the ready keys, each given once, that the tier neither has nor is getting."""
        mask, bit, storing = self.locations.mask, tier.bit, tier.storing
        lacking = [key for key in keys if key not in storing and not mask.get(key, 0) & bit]
        if lacking and (queued := self._within_limits(lacking, tier, now)):
            self.store(queued, tier)

    def store(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        """Queue stores of ready keys that the tier lacks: at most as many as it has `places`."""
        tier.storing.update(keys)
        self.pin_cascade(list(map(self._primary.ready.__getitem__, keys)))
        tier.breaker.take(len(keys))
        self._cascades.setdefault(tier, []).extend(keys)

    def places(self, tier: Tier, now: float) -> int:
        """Return how many chunks can cascade to a tier now without exceeding a limit."""
        places = tier.spec.store_chunks_max - len(tier.storing)
        return max(0, min(tier.admits(now), places, self._cascade_rows_max - len(self.cascade_rows)))

    def delete(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        self._deletes.setdefault(tier, []).extend(keys)

    def end(self, keys: Sequence[OffloadKey], tier: Tier, hint: Hint | None) -> None:
        """Queue the end of a request that used these keys, in prefix order. Without any hint yet, it renews recency."""
        self._hinted = self._hinted or hint is not None
        self.advise(tier, Advice("rank", keys, hint or _NOTHING_SAID if self._hinted else None))

    def expect_hints(self) -> None:
        """Queue an empty hint for each tier, which tracks sessions from then on."""
        self._hinted = True
        self._advice.extend(messages.Advise.of(tier.index, Advice("rank", (), _NOTHING_SAID)) for tier in self._tiers)

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
        """Let the runner send the tier's next inventory batch, so that a scan of millions of keys floods no step."""
        self._acknowledgements.append(messages.Acknowledge(tier.index))

    @property
    def slice_chunks(self) -> int:
        """The most chunks that can cascade at once without a drop while nothing is in flight."""
        most = (tier.spec.store_chunks_max for tier in self._tiers if tier.spec.cascade != WHEN_EVICTED)
        return min([self._action_chunks, self._cascade_rows_max, *most])

    def room(self, chunks: int) -> bool:
        """Return True if so many chunks (at most `slice_chunks`) can cascade now without exceeding a limit."""
        return len(self.cascade_rows) + chunks <= self._cascade_rows_max and all(
            len(tier.storing) + chunks <= tier.spec.store_chunks_max
            for tier in self._tiers
            if tier.spec.cascade != WHEN_EVICTED
        )

    @property
    def storing(self) -> bool:
        return any(tier.storing for tier in self._tiers)

    @property
    def nothing_queued(self) -> bool:
        return not (self._cascades or self._deletes or any(map(_to_ask, self._tiers)))

    def flush(self, loads: Iterable[Action] = ()) -> list[Action]:
        """Turn what was queued into actions; `loads` go before stores."""
        actions, self._acknowledgements = self._acknowledgements, []
        if not self.nothing_queued:
            actions.extend(chain(self._probes(), loads, self._stores(), self._deletions()))
        elif loads:
            actions.extend(loads)
        if self._waiting:
            self._advise_waiting()
        if self._advice:  # No answer comes: with advice alone nothing counts as queued.
            actions.extend(self._advice)
            self._advice.clear()
        return actions

    def forget_queued(self) -> None:
        """Forget queued stores: the primary is about to drop every key and pin."""
        for tier, keys in self._cascades.items():
            tier.storing.difference_update(keys)
            tier.raced.difference_update(keys)
        self._cascades.clear()

    def _advise_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for each in waiting:
            each.stores.intersection_update(each.tier.storing)
            if each.stores:
                self._waiting.append(each)
            else:
                self._queue_advice(each.tier, each.advice)

    def _queue_advice(self, tier: Tier, advice: Advice[OffloadKey]) -> None:
        keys = advice.keys
        mask, bit, answered, size = self.locations.mask, tier.bit, tier.answered, ADVICE_KEYS_MAX
        if mask.keys().isdisjoint(keys) and answered.isdisjoint(keys):
            return
        held = [key for key in keys if mask.get(key, 0) & bit or key in answered]
        starts = range(0, len(held), size)
        for start in starts if advice.kind == "retain" else reversed(starts):  # The last part applied is the hottest.
            self._advice.append(messages.Advise.of(tier.index, advice.of(held[start : start + size])))

    def _within_limits(self, keys: list[OffloadKey], tier: Tier, now: float) -> list[OffloadKey]:
        """Return the keys whose cascade exceeds no limit; each of the others is dropped for the first limit it meets.

        A row that another tier's cascade pins costs no further pin.
        """
        cascading = self.cascade_rows
        admitted = tier.admits(now)
        places, pins = tier.spec.store_chunks_max - len(tier.storing), self._cascade_rows_max - len(cascading)
        if len(keys) <= min(admitted, places, pins):
            return keys
        taken: list[OffloadKey] = []
        for key in keys:
            pinned = self._primary.ready[key] in cascading
            if len(taken) >= places:
                tier.counters.dropped["budget"] += 1
            elif pins <= 0 and not pinned:
                tier.counters.dropped["pinned"] += 1
            elif len(taken) >= admitted:
                tier.counters.dropped["overdue" if tier.hangs else "breaker"] += 1
            else:
                taken.append(key)
                pins -= not pinned
        return taken

    def _probes(self) -> Iterator[Action]:
        for tier in self._tiers:
            queued, tier.to_ask = tier.to_ask, []
            for keys in self._batches(queued):
                yield messages.Probe(self.send(Operation.PROBE, tier, keys, ()), tier.index, pack_keys(keys))

    def _stores(self) -> Iterator[Action]:
        for tier, queued in self._cascades.items():
            for keys in self._batches(queued):
                rows = list(map(self._primary.ready.__getitem__, keys))
                id_ = self.send(Operation.CASCADE, tier, keys, rows)
                yield messages.Cascade(id_, tier.index, pack_keys(keys), pack_rows(rows))
        self._cascades.clear()

    def _deletions(self) -> Iterator[Action]:
        for tier, queued in self._deletes.items():
            for keys in self._batches(queued):
                yield messages.Delete(self.send(Operation.DELETE, tier, keys, ()), tier.index, pack_keys(keys))
        self._deletes.clear()

    def _batches(self, keys: list[OffloadKey]) -> Iterator[list[OffloadKey]]:
        size = self._action_chunks
        return (keys[start : start + size] for start in range(0, len(keys), size))

    # What is in flight, and whose rows it uses.

    def send(
        self,
        operation: Operation,
        tier: Tier,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        request: Request | None = None,
    ) -> int:
        self._ids += 1
        transfer = self.in_flight[self._ids] = Transfer(operation, tier, keys, rows, self.epoch, request)
        if operation is Operation.PROMOTION:
            tier.loads[self._ids] = transfer
        return self._ids

    def pin_cascade(self, rows: Sequence[int]) -> None:
        self.cascade_rows.update(rows)
        self._primary.pin(rows)

    def _unpin_cascade(self, rows: Sequence[int]) -> None:
        self._primary.unpin(rows)
        cascades = self.cascade_rows
        for row in rows:
            if left := cascades[row] - 1:
                cascades[row] = left
            else:
                cascades.pop(row)  # A Counter's own `del` is a call in Python.

    def pins_overdue(self) -> Counter[int]:
        pins: Counter[int] = Counter()
        for transfer in self.overdue.values():
            if transfer.operation is Operation.CASCADE and not transfer.forgotten:
                pins.update(transfer.rows)
        return pins

    @property
    def rows_overdue(self) -> int:
        """The overdue rows of the present runner; it is not to blame for those of a dead one."""
        return sum(len(transfer.rows) for transfer in self.overdue.values() if transfer.epoch == self.epoch)

    def _take_out(self, id_: int, *, lent: bool) -> Transfer | None:
        """Remove a transfer whose outcome is known, or None for an unknown id; while `lent`, it is overdue."""
        if (transfer := self.in_flight.pop(id_, None)) is None:
            return None
        tier = transfer.tier
        if tier.loads:
            tier.loads.pop(id_, None)
        if lent:
            self.overdue[id_] = transfer
            tier.overdue_rows += len(transfer.rows)
        return transfer

    def _take_back(self, id_: int) -> None:
        if (transfer := self.overdue.pop(id_, None)) is None:
            return
        transfer.tier.overdue_rows -= len(transfer.rows)
        if transfer.forgotten or transfer.operation is Operation.PROMOTION:
            for row in transfer.rows:
                self._primary.release(row)
        else:
            self._unpin_cascade(transfer.rows)

    # What comes back: each message is applied in one synchronous step.

    def apply(self, message: messages.Message, now: float) -> None:
        match message:
            case messages.Finished():
                self._time(message)
                self._settle(message.id, message.failures(), now, lent=message.lent, cause=message.cause)
            case messages.Returned():
                self._end_late(message.id, unpack_rows(message.moved))
            case messages.Answered():
                self._time(message)
                self._learn(message, now)
            case messages.Found():
                self._found(self._tiers[message.tier], unpack_keys(message.keys))
            case messages.Gone():
                self._gone(self._tiers[message.tier], unpack_keys(message.keys))
            case messages.Scanned():  # The record of a tier with one owner is complete, too.
                tier = self._tiers[message.tier]
                tier.authoritative = tier.reports = message.complete
            case messages.TierUsage():
                self._tiers[message.tier].use(message)
            case messages.TierSpeed():
                self._tiers[message.tier].speed = Speed(message.fixed_s, message.s_per_byte)
            case _:
                pass  # The rest is between the bridge and its runner.

    def refuse(self, actions: Iterable[Action], now: float) -> None:
        """Settle actions that never left: nothing was lent, nothing moved."""
        for action in actions:
            match action:
                case messages.Acknowledge():
                    self.acknowledge(self._tiers[action.tier])
                case messages.Advise():
                    pass  # The tier's own order goes on.
                case _:
                    self._settle_whole(action.id, Code.REFUSED, now, lent=False)

    def lose(self, now: float) -> list[Transfer]:
        """Settle the transfers of a lost runner and return them; their rows stay lent until `gone`.

        The location map stays: where it is wrong, one load fails. Other keys are probed until a new runner has scanned.
        """
        lost = self._settle_all(Code.LOST, now)
        for tier in self._tiers:
            tier.authoritative = False
        return lost

    def gone(self, epoch: int) -> list[int]:
        """Take back the rows of a lost runner, whose process has ended; return the ids of its transfers."""
        ids = [id_ for id_, transfer in self.overdue.items() if transfer.epoch == epoch]
        for id_ in ids:
            self._take_back(id_)
        return ids

    def reset(self, now: float) -> Counter[int]:
        """Forget every queued store and every pin; return the rows that are still lent, row -> borrowers.

        The breakers of tiers with transfers in flight open: these have missed a reset's deadline.
        """
        self.forget_queued()
        for transfer in self._settle_all(Code.DEADLINE, now):
            transfer.tier.breaker.trip(now)
        self.cascade_rows.clear()
        lent: Counter[int] = Counter()
        for transfer in self.overdue.values():
            transfer.forgotten = True
            lent.update(transfer.rows)
        return lent

    def _time(self, message: messages.Finished | messages.Answered) -> None:
        if (transfer := self.in_flight.get(message.id)) is None:
            return
        if transfer.expected_s and isinstance(message, messages.Finished):
            self._compare(transfer, message)
        if self._observe is not None:
            self._observe(transfer.tier.spec.name, transfer.operation.value, message.seconds)

    def _compare(self, load: Transfer, message: messages.Finished) -> None:
        """Compare a load's duration with its prediction. A failed load does not show that its tier is fast."""
        tier = load.tier
        if load.given_up or not message.codes:
            tier.compare(load, message.seconds)
        if message.codes:
            return
        tier.counters.expected_seconds += load.expected_s
        tier.counters.loaded_seconds += message.seconds
        if load.request is None:
            tier.trial = Trial(len(load.keys), message.seconds)

    def _settle(self, id_: int, failed: Mapping[int, Code], now: float, *, lent: bool, cause: str = "") -> None:
        if (transfer := self._take_out(id_, lent=lent)) is None:  # Settled by a reset.
            late = self.overdue.get(id_)
            if late is not None and not lent:
                self._end_late(id_, [index for index in range(len(late.keys)) if index not in failed])
            return
        tier, keys = transfer.tier, transfer.keys
        moved = [key for index, key in enumerate(keys) if index not in failed] if failed else keys
        if failed:
            self._count_failures(transfer, failed)
        if tier.judge(failed.values(), now, cause):
            if transfer.operation is Operation.PROBE:
                tier.counters.probes_failed += 1
            else:
                tier.counters.transfers_failed += 1
        match transfer.operation:
            case Operation.PROMOTION:
                self._settle_promotion(transfer, moved, failed, now, lent=lent)
            case Operation.CASCADE:
                self._settle_cascade(transfer, moved, now, lent=lent)
            case Operation.PROBE:
                self._believe(transfer, b"", now)
            case Operation.DELETE:  # No tier reports keys that it was told to delete.
                if failed:
                    tier.keep_undeleted([keys[index] for index, code in failed.items() if code in NOT_TRIED])
                self._events.add(EventKind.REMOVED, tier.spec.name, moved)

    def _settle_whole(self, id_: int, code: Code, now: float, *, lent: bool) -> None:
        self._settle(id_, dict.fromkeys(range(len(self.in_flight[id_].keys)), code), now, lent=lent)

    def _settle_all(self, code: Code, now: float) -> list[Transfer]:
        sent = dict(self.in_flight)
        for id_, transfer in sent.items():
            self._settle_whole(id_, code, now, lent=bool(transfer.rows))
        return list(sent.values())

    def _count_failures(self, transfer: Transfer, failed: Mapping[int, Code]) -> None:
        tier, by_code = transfer.tier, dict[Code, list[OffloadKey]]()
        for index, code in failed.items():
            by_code.setdefault(code, []).append(transfer.keys[index])
        for code, keys in by_code.items():
            if code is Code.REFUSED and transfer.operation is Operation.CASCADE:
                tier.counters.dropped["bridge"] += len(keys)
            elif code is Code.MISSING and transfer.operation is Operation.PROMOTION:  # Evicted since its look-up.
                tier.counters.misses += len(keys)
            else:
                tier.counters.failed[code.name.lower()] += len(keys)
                self._events.add(EventKind.FAILED, tier.spec.name, keys, code.name.lower())

    def _settle_promotion(
        self, transfer: Transfer, moved: Sequence[OffloadKey], failed: Mapping[int, Code], now: float, *, lent: bool
    ) -> None:
        tier, request = transfer.tier, transfer.request
        tier.loading -= len(transfer.keys)
        tier.hear(transfer, now)
        tier.counters.loaded += len(moved)
        self._events.add(EventKind.STORED, PRIMARY_NAME, self._primary.publish(moved))
        gone: list[OffloadKey] = []
        for index, code in failed.items():
            key = transfer.keys[index]
            self._leases.end_row(transfer.rows[index])
            self._primary.abandon(key, lent=lent)
            if request is not None:
                request.search.give_up(key)
            if code in (Code.MISSING, Code.CORRUPT):
                tier.believe(key, present=False, now=now)
                gone.append(key)
            elif code not in NOT_TRIED:
                self._doubt(tier, key, now)
        if gone:
            self.locations.remove(tier, gone)
            self._missed(tier, gone)

    def _settle_cascade(self, transfer: Transfer, moved: Sequence[OffloadKey], now: float, *, lent: bool) -> None:
        tier = transfer.tier
        self.locations.add(tier, tier.stored(transfer.keys, moved, now))
        self._events.add(EventKind.STORED, tier.spec.name, moved)
        if not lent:
            self._unpin_cascade(transfer.rows)

    def _doubt(self, tier: Tier, key: OffloadKey, now: float) -> None:
        """Count a key that a tier failed to load as absent for a while.

        Without reports of removals, a record counts no more than an answer, or it would prevent the key's next store.
        """
        if not tier.reports and self.locations.mask.get(key, 0) & tier.bit:
            self.locations.remove(tier, [key])
            tier.believe(key, present=True, now=now)
        tier.doubt(key, now)

    def _end_late(self, id_: int, moved: Iterable[int]) -> None:
        """Take back an overdue transfer's rows. Keys that it has stored are probed: they may be deleted by now."""
        transfer = self.overdue.get(id_)
        if transfer is not None and transfer.operation is Operation.CASCADE:
            keys = [transfer.keys[index] for index in moved]
            transfer.tier.forget_answers(keys)
            for key in keys:
                transfer.tier.unsure(key)
        self._take_back(id_)

    def _learn(self, message: messages.Answered, now: float) -> None:
        if (transfer := self._take_out(message.id, lent=False)) is None:
            return
        transfer.tier.probe_latency_s = message.seconds
        if not message.present:
            transfer.tier.unanswered(message.cause, now)
        self._believe(transfer, message.present, now)

    def _believe(self, probe: Transfer, present: bytes, now: float) -> None:
        """Believe answers, except for keys with newer news. Without answers, keys are absent for `answer_ttl_s`."""
        tier = probe.tier
        gone: list[OffloadKey] = []
        for index, key in enumerate(probe.keys):
            if key in tier.asking:
                if not present:
                    tier.doubt(key, now)
                elif present[index]:
                    tier.believe(key, present=True, now=now)
                elif tier.believe(key, present=False, now=now):
                    gone.append(key)
        self._missed(tier, gone)

    def _missed(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Report removals for a tier that does not report them itself."""
        if not tier.reports:
            self._events.add(EventKind.REMOVED, tier.spec.name, keys)

    def _found(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        self.locations.add(tier, self._primary.own(keys))
        tier.forget_answers(keys)
        self._events.add(EventKind.STORED, tier.spec.name, keys)
        self.acknowledge(tier)

    def _gone(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Record removals; a store in flight may have come before its removal, or after it."""
        self.locations.remove(tier, keys)
        tier.forget_answers(keys)
        tier.raced.update(tier.storing.intersection(keys))
        self._events.add(EventKind.REMOVED, tier.spec.name, keys)
        self.acknowledge(tier)
