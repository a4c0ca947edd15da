"""The inbox: applies the runner's messages to rows, locations, breakers, counters and events.

A tier's inventory comes in batches. Each is acknowledged, so that a scan of millions of keys never floods a step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.backend import OffloadKey
from kvtier.config import PRIMARY_NAME
from kvtier.engine.answers import EventKind, EventLog
from kvtier.engine.outbox import Outbox
from kvtier.engine.primary import Rows
from kvtier.engine.requests import Leases
from kvtier.engine.tier import NOT_TRIED, LocationMap, Tier, Trial
from kvtier.engine.transfers import Operation, Transfer, Transfers
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Advise,
    Answered,
    Code,
    Finished,
    Found,
    Gone,
    Message,
    Returned,
    Scanned,
    TierSpeed,
    TierUsage,
    unpack_keys,
    unpack_rows,
)
from kvtier.runner.reports import Speed

Observe = Callable[[str, str, float], None]  # A tier's name, an operation, and its seconds.


class Inbox:
    """Applies the runner's messages, each in one synchronous step."""

    def __init__(
        self,
        primary: Rows,
        leases: Leases,
        tiers: Sequence[Tier],
        locations: LocationMap,
        transfers: Transfers,
        outbox: Outbox,
        events: EventLog | None,
        observe: Observe | None,
    ) -> None:
        self._primary = primary
        self._leases = leases
        self._tiers = tiers
        self._locations = locations
        self._transfers = transfers
        self._outbox = outbox
        self._events = events or EventLog()
        self._observe = observe

    def apply(self, message: Message, now: float) -> None:
        """Apply one message; one about a settled transfer is ignored."""
        match message:
            case Finished():
                self._time(message)
                self._settle(message.id, message.failures(), now, lent=message.lent, cause=message.cause)
            case Returned():
                self._end_late(message.id, unpack_rows(message.moved))
            case Answered():
                self._time(message)
                self._learn(message, now)
            case Found():
                self._found(self._tiers[message.tier], unpack_keys(message.keys))
            case Gone():
                self._gone(self._tiers[message.tier], unpack_keys(message.keys))
            case Scanned():  # The record of a tier with one owner is complete, too.
                tier = self._tiers[message.tier]
                tier.authoritative = tier.reports = message.complete
            case TierUsage():
                self._tiers[message.tier].use(message)
            case TierSpeed():
                self._tiers[message.tier].speed = Speed(message.fixed_s, message.s_per_byte)
            case _:
                pass  # The rest is between the bridge and its runner.

    def refuse(self, actions: Iterable[Action], now: float) -> None:
        """Settle actions that never left: nothing was lent, nothing moved."""
        for action in actions:
            match action:
                case Acknowledge():
                    self._outbox.acknowledge(self._tiers[action.tier])
                case Advise():
                    pass  # The tier's own order goes on.
                case _:
                    self._settle_whole(action.id, Code.REFUSED, now, lent=False)

    def lose(self, now: float) -> None:
        """Settle the transfers of a lost runner; its rows stay lent until `gone`.

        The location map stays: where it is wrong, one load fails. Other keys are probed until a new runner has scanned.
        """
        for id_, transfer in list(self._transfers.in_flight.items()):
            self._settle_whole(id_, Code.LOST, now, lent=bool(transfer.rows))
        for tier in self._tiers:
            tier.authoritative = False

    def give_up(self, now: float) -> None:
        """Settle transfers that missed a reset's deadline, and open the breakers of their tiers."""
        for id_, transfer in list(self._transfers.in_flight.items()):
            self._settle_whole(id_, Code.DEADLINE, now, lent=bool(transfer.rows))
            transfer.tier.breaker.trip(now)

    def gone(self, epoch: int) -> None:
        """Take back the rows of a lost runner: its process has ended."""
        for id_ in self._transfers.overdue_of(epoch):
            self._transfers.take_back(id_)

    def _time(self, message: Finished | Answered) -> None:
        transfer = self._transfers.in_flight.get(message.id)
        if transfer is None:
            return
        if transfer.expected_s and isinstance(message, Finished):
            self._compare(transfer, message)
        if self._observe is not None:
            self._observe(transfer.tier.spec.name, transfer.operation.value, message.seconds)

    def _compare(self, load: Transfer, message: Finished) -> None:
        """Compare a load's duration with its prediction.

        A failed load may have failed at once: it does not show that its tier is fast.
        """
        tier = load.tier
        if load.given_up or not message.codes:
            tier.compare(load, message.seconds)
        if message.codes:
            return
        tier.counters.compare(load.expected_s, message.seconds)
        if load.request is None:
            tier.trial = Trial(len(load.keys), message.seconds)

    def _settle(self, id_: int, failed: Mapping[int, Code], now: float, *, lent: bool, cause: str = "") -> None:
        transfer = self._transfers.settle(id_, lent=lent)
        if transfer is None:  # Settled by a reset.
            late = self._transfers.overdue.get(id_)
            if late is not None and not lent:
                self._end_late(id_, [index for index in range(len(late.keys)) if index not in failed])
            return
        keys = transfer.keys
        moved = [key for index, key in enumerate(keys) if index not in failed] if failed else keys
        if failed:
            self._count_failures(transfer, failed)
        if transfer.tier.judge(failed.values(), now, cause):
            if transfer.operation is Operation.PROBE:
                transfer.tier.counters.probes_failed += 1
            else:
                transfer.tier.counters.transfers_failed += 1
        match transfer.operation:
            case Operation.PROMOTION:
                self._settle_promotion(transfer, moved, failed, now, lent=lent)
            case Operation.CASCADE:
                self._settle_cascade(transfer, moved, now, lent=lent)
            case Operation.PROBE:
                self._believe(transfer, b"", now)
            case Operation.DELETE:  # No tier reports keys that it was told to delete.
                if failed:
                    untried = [keys[index] for index, code in failed.items() if code in NOT_TRIED]
                    transfer.tier.keep_undeleted(untried)
                self._events.add(EventKind.REMOVED, transfer.tier.spec.name, moved)

    def _settle_whole(self, id_: int, code: Code, now: float, *, lent: bool) -> None:
        chunks = len(self._transfers.in_flight[id_].keys)
        self._settle(id_, dict.fromkeys(range(chunks), code), now, lent=lent)

    def _count_failures(self, transfer: Transfer, failed: Mapping[int, Code]) -> None:
        tier = transfer.tier
        for code, indices in _by_code(failed).items():
            if code is Code.REFUSED and transfer.operation is Operation.CASCADE:
                tier.counters.drop("bridge", len(indices))
                continue
            if code is Code.MISSING and transfer.operation is Operation.PROMOTION:  # It was evicted since its look-up.
                tier.counters.misses += len(indices)
                continue
            tier.counters.fail(code.name.lower(), len(indices))
            keys = [transfer.keys[index] for index in indices]
            self._events.add(EventKind.FAILED, tier.spec.name, keys, code.name.lower())

    def _settle_promotion(
        self, transfer: Transfer, moved: Sequence[OffloadKey], failed: Mapping[int, Code], now: float, *, lent: bool
    ) -> None:
        tier, request = transfer.tier, transfer.request
        tier.loading -= len(transfer.keys)
        tier.hear(transfer, now)
        tier.counters.loaded += len(moved)
        published = self._primary.publish(moved)
        self._events.add(EventKind.STORED, PRIMARY_NAME, published)
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
            self._locations.remove(tier, gone)
            self._missed(tier, gone)

    def _doubt(self, tier: Tier, key: OffloadKey, now: float) -> None:
        """Count a key that a tier failed to load as absent for a while.

        If the tier does not report removals, a record counts no more than an answer. Else it would prevent the next
        store of the key.
        """
        if not tier.reports and self._locations.mask.get(key, 0) & tier.bit:
            self._locations.remove(tier, [key])
            tier.believe(key, present=True, now=now)
        tier.doubt(key, now)

    def _settle_cascade(self, transfer: Transfer, moved: Sequence[OffloadKey], now: float, *, lent: bool) -> None:
        tier = transfer.tier
        self._locations.add(tier, tier.stored(transfer.keys, moved, now))
        self._events.add(EventKind.STORED, tier.spec.name, moved)
        if not lent:
            self._transfers.unpin_cascade(transfer.rows)

    def _end_late(self, id_: int, moved: Iterable[int]) -> None:
        """Take back the rows of an overdue transfer, and probe the keys that it has stored after all.

        They may have been deleted or evicted before this message came.
        """
        transfer = self._transfers.overdue.get(id_)
        if transfer is not None and transfer.operation is Operation.CASCADE:
            keys = [transfer.keys[index] for index in moved]
            transfer.tier.forget_answers(keys)
            for key in keys:
                transfer.tier.unsure(key)
        self._transfers.take_back(id_)

    def _learn(self, message: Answered, now: float) -> None:
        """Apply a probe's answers."""
        transfer = self._transfers.settle(message.id, lent=False)
        if transfer is None:
            return
        transfer.tier.probe_latency_s = message.seconds
        if not message.present:
            transfer.tier.unanswered(message.cause, now)
        self._believe(transfer, message.present, now)

    def _believe(self, probe: Transfer, present: bytes, now: float) -> None:
        """Believe answers, except for keys that were stored, deleted or found since the probe was sent.

        Without answers, the keys count as absent for `answer_ttl_s`.
        """
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
        """Record that the tier holds these keys."""
        self._locations.add(tier, self._primary.own(keys))
        tier.forget_answers(keys)
        self._events.add(EventKind.STORED, tier.spec.name, keys)
        self._outbox.acknowledge(tier)

    def _gone(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Record removals; a store in flight may have come before its removal, or after it."""
        self._locations.remove(tier, keys)
        tier.forget_answers(keys)
        tier.raced.update(tier.storing.intersection(keys))
        self._events.add(EventKind.REMOVED, tier.spec.name, keys)
        self._outbox.acknowledge(tier)


def _by_code(failed: Mapping[int, Code]) -> dict[Code, list[int]]:
    indices: dict[Code, list[int]] = {}
    for index, code in failed.items():
        indices.setdefault(code, []).append(index)
    return indices
