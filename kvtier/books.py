"""The books of one engine: all of its state, and what every part of the ledger does to it."""

from collections import Counter
from collections.abc import Collection, Sequence

from kvtier.answers import LedgerCounters, LedgerLimits
from kvtier.config import PRIMARY_NAME
from kvtier.events import Event, EventKind, EventLog
from kvtier.inbox import Inbox, Observe
from kvtier.keys import OffloadKey
from kvtier.outbox import Outbox
from kvtier.policies.base import Policy
from kvtier.primary import Primary
from kvtier.request import Leases, Request
from kvtier.tier import Tier, TierSpec, Whereabouts
from kvtier.transfers import Transfers


class Books:
    """Where everything is, what is under way, and what time it is."""

    def __init__(
        self,
        rows: int,
        policy: Policy[OffloadKey],
        tiers: Sequence[TierSpec],
        limits: LedgerLimits,
        events: EventLog | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.primary = Primary(rows, policy)
        self.tiers = [Tier(index, spec) for index, spec in enumerate(tiers)]
        self.where = Whereabouts()
        self.leases = Leases(self.primary, limits.lease_rows_max, limits.lease_s)
        self.transfers = Transfers(self.primary)
        self.outbox = Outbox(
            self.primary,
            self.tiers,
            self.where,
            self.transfers,
            cascade_rows_max=limits.cascade_rows_max,
            action_chunks=limits.action_chunks,
        )
        self.inbox = Inbox(
            self.primary, self.leases, self.tiers, self.where, self.transfers, self.outbox, events, observe
        )
        self.counters = LedgerCounters()
        self.promoting = True  # False between a reset and the engine's word that its workers have flushed.
        self.runner_up = True
        self.rows_in_use = 0  # Given to the engine to read or write, and not yet given back.
        self.kept: Counter[int] = Counter()  # Row -> views of it that are still read, each of them a pin.
        self._events = events
        self._now = 0.0
        self._looking: list[Request] = []  # Requests with hits in this step, since room was last made.
        self._looked: list[Request] = []  # And those before; a request may be in both.
        self._parked: dict[OffloadKey, list[Tier]] = {}  # Filling keys that request-level tiers will get, too.
        self._request_level = [tier for tier in self.tiers if tier.spec.request_level]

    def begin_step(self, now: float) -> None:
        """Take the time (seconds, never decreasing) and end the leases that it ends."""
        self._now = now
        if self.leases.deadlines:
            self.leases.expire(now)

    def _reserve(
        self, keys: Sequence[OffloadKey], offered: Collection[OffloadKey] = (), after: OffloadKey | None = None
    ) -> list[OffloadKey] | None:
        """Reserve rows as the primary does, evicting nothing that was answered HIT in this step."""
        if len(keys) > self.primary.rows_free:
            for request in self._looking:
                self.primary.hold(request.hits)
                request.found += request.hits
                request.hits.clear()
            self._looked += self._looking
            self._looking.clear()
        return self.primary.reserve(keys, offered, after)

    def _access(self, present: Sequence[OffloadKey], keys: Sequence[OffloadKey], request: Request) -> None:
        """Note that a request uses `keys`; count an access to those that are present, once.

        Absent ones have been given rows, after what the request used before. All that it used leaves tail first.
        """
        used, last = request.used, request.last_used
        present, keys = request.in_prefix_order(present), request.in_prefix_order(keys)
        fresh = [key for key in present if key not in used] if used else present
        if fresh:
            self.primary.touch(self.primary.rows_of(dict.fromkeys(fresh)))
        elif len(keys) == len(present):
            return
        if last is None:
            in_place = not fresh or keys[len(present) - 1] is present[-1]
        else:
            in_place = not fresh and self.primary.row(last) is not None
        if not (request.use(keys) and in_place):
            self.primary.rank(self.primary.rows_of(request.used))

    def _count_hits(self, keys: Sequence[OffloadKey], request: Request) -> None:
        sources = request.sources
        if not sources:
            self.counters.hits += len(keys)
            return
        for key in keys:
            source = sources.get(key)
            if source is None:
                self.counters.hits += 1
            else:
                self.tiers[source].counters.hits += 1

    def _removed(self, keys: Sequence[OffloadKey]) -> None:
        if keys and self._events is not None:
            self._events.add(Event(EventKind.REMOVED, PRIMARY_NAME, keys))
