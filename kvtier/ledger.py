"""What is where and what is under way: every decision of the engine, in plain synchronous calls.

No await, no clock, no I/O: the time is an argument, and what is to be done comes out of `end_step` as actions. So every
change of state is atomic, and a test is a plain call. The ledger answers the engine; `outbox` and `inbox` are its
traffic with the tiers.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.bridge.messages import Action, LocalMessage, Message, RunnerBack, RunnerGone, RunnerLost
from kvtier.config import PRIMARY_NAME
from kvtier.events import Event, EventKind, EventLog
from kvtier.inbox import Inbox, Observe
from kvtier.keys import OffloadKey
from kvtier.outbox import Outbox
from kvtier.policies.base import Policy
from kvtier.primary import Primary
from kvtier.request import PROMOTIONS_MAX, Leases, Request
from kvtier.tier import Tier, TierMatcher, TierSpec, Whereabouts
from kvtier.transfers import Transfers


class LookupResult(Enum):
    """What a look-up says of one key."""

    MISS = "miss"  # Compute it.
    HIT = "hit"  # Ready in the primary, and kept there until the step ends.
    HIT_PENDING = "hit_pending"  # On its way into the primary: look again.
    RETRY = "retry"  # A tier has yet to say: look again.


HIT, HIT_PENDING, MISS, RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY


class StorePlan(NamedTuple):
    """What `prepare_store` decided: write the chunk of `keys[i]` into row `rows[i]`."""

    keys: list[OffloadKey]
    rows: list[int]
    evicted: list[OffloadKey]


class LedgerLimits(NamedTuple):
    """Rows are the primary's; seconds are of the clock whose times the ledger is given."""

    cascade_rows_max: int  # Pinned by cascades at once: beyond it cascades are dropped, so that stores go on.
    lease_rows_max: int  # Held for waiting requests at once.
    lease_s: float
    action_chunks: int  # Moved by one action at most.


class LedgerCounters:
    """Totals since the start, in chunks."""

    __slots__ = ("hits", "misses", "promotions_refused", "stores", "stores_refused")

    def __init__(self) -> None:
        self.hits = 0  # Loaded from where they lay in the primary.
        self.misses = 0  # Looked up and found nowhere, once a request and key.
        self.promotions_refused = 0  # Had by a tier, but there was no row for them.
        self.stores = 0
        self.stores_refused = 0  # Offered in a call for which there was no room.


class Ledger:
    """All state of one engine."""

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
        self._events = events
        self._now = 0.0
        self._looking: list[Request] = []  # Requests with hits in this step.
        self._parked: dict[OffloadKey, list[Tier]] = {}  # Filling keys that request-level tiers will get, too.
        self._request_level = [tier for tier in self.tiers if tier.spec.request_level]

    # Time and messages.

    def begin_step(self, now: float) -> None:
        """Take the time (seconds, never decreasing) and end the leases that it ends."""
        self._now = now
        self.leases.expire(now)

    def apply(self, message: Message | LocalMessage) -> None:
        """Settle what a message says was done."""
        match message:
            case RunnerLost():
                self.runner_up = False
                self.inbox.lose(self._now)
            case RunnerGone():
                self.inbox.gone(message.epoch)
            case RunnerBack():
                self.runner_up = True
                self.transfers.epoch = message.epoch
            case _:
                self.inbox.apply(message, self._now)

    def refuse(self, actions: Sequence[Action]) -> None:
        """Settle actions that the bridge did not take."""
        self.inbox.refuse(actions, self._now)

    def end_step(self) -> list[Action]:
        """Lease the rows of requests that wait, let go of other rows answered HIT, and return what is to be done."""
        for request in self._looking:
            if request.waits:
                self._lease_hits(request)
            request.forget_hits()
        self._looking.clear()
        self.primary.end_step()
        if self._parked:
            self._cascade_parked()
        return self.outbox.flush()

    # Requests.

    def new_request(
        self,
        request_id: str,
        matchers: Sequence[TierMatcher] | None = None,
        load_matchers: Sequence[TierMatcher] | None = None,
    ) -> Request:
        return Request(request_id, matchers, load_matchers)

    def finish(self, request: Request) -> None:
        """Rank the request's keys anew, tail first, here and in tiers, and end its leases.

        Loads and completions may still follow.
        """
        request.finished = True
        request.forget_hits()
        self.leases.end_all(request)
        ready, filling = self.primary.ready, self.primary.filling
        used = list(request.used)
        self.primary.rank([key for key in used if key in ready or key in filling])
        for tier in self.tiers:
            if self.runner_up and request.allows(tier.spec):
                self.outbox.rank(used, tier)

    # Looking up.

    def lookup(self, key: OffloadKey, request: Request) -> LookupResult:
        """Say where a key is; one that a tier has is on its way from now on."""
        primary = self.primary
        row = primary.ready.get(key)
        if row is None:
            return self._lookup_absent(key, request)
        primary.stamps[row] = primary.step
        hits = request.hits
        if not hits:
            self._looking.append(request)
        hits.append(key)
        return HIT

    def _lookup_absent(self, key: OffloadKey, request: Request) -> LookupResult:
        if key in self.primary.filling:
            return self._wait_for(key, request)
        if not (self.promoting and self.runner_up) or request.promotions.get(key, 0) >= PROMOTIONS_MAX:
            return self._miss(key, request, ())
        mask = self.where.mask.get(key, 0)
        asked: list[Tier] = []
        silent: list[Tier] = []
        for tier in self.tiers:
            if not request.loads_from(tier.spec) or not tier.admits(self._now):
                continue
            asked.append(tier)
            answer = tier.answer(key, bool(mask & tier.bit), self._now)
            if answer is None and (tier.index, key) in request.asked and key not in tier.asking:
                answer = tier.last_answer(key)  # A request asks once: else answers older than a step keep it waiting.
            if answer:
                return self._promote(key, tier, request)
            if answer is not None:
                continue
            if tier.may_ask(key):
                silent.append(tier)
            else:
                tier.counters.drop("asking", 1)
        if not silent:
            return self._miss(key, request, asked)
        for tier in silent:
            tier.ask(key)
            request.asked.add((tier.index, key))
        return RETRY

    def _wait_for(self, key: OffloadKey, request: Request) -> LookupResult:
        if not request.hits:
            self._looking.append(request)
        request.hits.append(key)
        request.waits = True
        return HIT_PENDING

    def _promote(self, key: OffloadKey, tier: Tier, request: Request) -> LookupResult:
        """Reserve and lease a row for a key that a tier has; without one it is a miss, never a wait.

        What the request found before is leased first: a prefix that exceeds the share keeps its leading part.
        """
        evicted = self.primary.reserve((key,)) if self.leases.room(self._rows_found(request), 1) else None
        if evicted is None:
            self.counters.promotions_refused += 1
            return self._miss(key, request, ())
        self._removed(evicted)
        self._lease_hits(request)
        self.leases.take(self.primary.filling[key], request, self._now)
        request.promotions[key] = request.promotions.get(key, 0) + 1
        request.sources[key] = tier.index
        self.outbox.promote(key, tier, request)
        return self._wait_for(key, request)

    def _rows_found(self, request: Request) -> list[int]:
        """Return the rows of what the request found in this step and has not leased; what failed since has none."""
        rows = map(self.primary.row, request.hits[request.held :])
        return [row for row in rows if row is not None]

    def _lease_hits(self, request: Request) -> None:
        for row in self._rows_found(request):
            if not self.leases.take(row, request, self._now):
                break
        request.held = len(request.hits)

    def _miss(self, key: OffloadKey, request: Request, asked: Sequence[Tier]) -> LookupResult:
        if key not in request.missed:
            request.missed.add(key)
            self.counters.misses += 1
            for tier in asked:
                tier.counters.misses += 1
        return MISS

    # Loading: primary → engine.

    def prepare_load(self, keys: Sequence[OffloadKey], request: Request) -> list[int]:
        """Pin the rows of these keys, each answered HIT in this step, and return them in order."""
        ready = self.primary.ready
        try:
            rows = [ready[key] for key in keys]
        except KeyError as error:
            raise LookupError(f"prepare_load of {error.args[0].hex()}, which this step's lookup did not find") from None
        self.primary.pin(rows)
        self.rows_in_use += len(rows)
        if request.leased:
            for row in rows:
                self.leases.end(row, request)
        self._count_hits(keys, request)
        self._access(keys, keys, request)
        return rows

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        """Drop the pins of one `prepare_load`."""
        ready = self.primary.ready
        self.primary.unpin([ready[key] for key in keys])
        self.rows_in_use -= len(keys)

    def touch(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Count an access to those of the keys that are present, once a request."""
        ready, filling = self.primary.ready, self.primary.filling
        present = [key for key in keys if key in ready or key in filling]
        self._access(present, present, request)

    # Storing: engine → primary.

    def prepare_store(self, keys: Sequence[OffloadKey], request: Request) -> StorePlan | None:
        """Reserve rows for the absent ones of these keys, all or none (None: no room); evict none of these keys."""
        ready, filling = self.primary.ready, self.primary.filling
        absent = [key for key in keys if key not in ready and key not in filling]
        present: Sequence[OffloadKey] = ()
        if len(absent) < len(keys):
            present = [key for key in keys if key in ready or key in filling]
        if len(absent) > 1:
            absent = list(dict.fromkeys(absent))
        evicted = self.primary.reserve(absent, frozenset(keys) if present else ()) if absent else []
        if evicted is None:
            self.counters.stores_refused += len(absent)
            return None
        if evicted:
            self._removed(evicted)
        self._access(present, keys, request)
        if present and self._request_level:
            self._offer_present(present, request)
        request.storing += len(absent)
        self.rows_in_use += len(absent)
        return StorePlan(absent, [filling[key] for key in absent], evicted)

    def complete_store(self, keys: Sequence[OffloadKey], request: Request, *, success: bool = True) -> None:
        """Make keys of a `StorePlan`, all or some, loadable, and have them cascade; without `success`, forget them."""
        request.storing -= len(keys)
        self.rows_in_use -= len(keys)
        if not success:
            for key in keys:
                row = self.primary.filling.get(key)
                if row is not None:
                    self.leases.end_row(row)
                    self.primary.abandon(key, lent=False)
            return
        published = self.primary.publish(keys)
        self.counters.stores += len(published)
        if published and self._events is not None:
            self._events.add(Event(EventKind.STORED, PRIMARY_NAME, published))
        for tier in self.tiers:
            if not request.allows(tier.spec):
                continue
            if self.runner_up:
                self.outbox.cascade(published, tier, self._now)
            else:
                tier.counters.drop("runner", len(published))

    # The whole.

    def delete(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget keys in the primary and in every tier, but for those that something holds: these are returned.

        What only a hung store holds is forgotten, too; its row stays lent, and the store, if it ends, may come after.
        """
        lost, ready = self.transfers.pins_overdue(), self.primary.ready
        self._removed([key for key in keys if key in ready and self.primary.discard(key, lost[ready[key]])])
        held = [key for key in keys if self.primary.row(key) is not None]
        gone = [key for key in keys if self.primary.row(key) is None]
        for tier in self.tiers:
            self.where.remove(tier, gone)
            for key in gone:
                tier.forget_answer(key)
            self.outbox.delete(gone, tier)
        return held

    def reset(self) -> None:
        """Clear the primary; the tiers keep what they have. What is still under way is given up, its rows stay lent."""
        self.outbox.clear()
        self.inbox.give_up(self._now)
        self.leases.clear()
        self._parked.clear()
        for request in self._looking:
            request.forget_hits()
        self._looking.clear()
        self._removed(self.primary.clear(self.transfers.clear()))
        self.rows_in_use = 0
        self.promoting = False

    @property
    def pending(self) -> bool:
        """Something is queued or under way within its deadline: the engine should go on stepping."""
        return bool(self.transfers.under_way) or not self.outbox.empty

    def _access(self, present: Sequence[OffloadKey], keys: Sequence[OffloadKey], request: Request) -> None:
        """Note that a request uses `keys`, in prefix order; count an access to those that are present, once."""
        used = request.used
        fresh = [key for key in present if key not in used]
        used.update(dict.fromkeys(keys))
        if fresh:
            self.primary.touch(list(dict.fromkeys(fresh)))

    def _count_hits(self, keys: Sequence[OffloadKey], request: Request) -> None:
        if not request.sources:
            self.counters.hits += len(keys)
            return
        for key in keys:
            source = request.sources.get(key)
            if source is None:
                self.counters.hits += 1
            else:
                self.tiers[source].counters.hits += 1

    def _removed(self, keys: Sequence[OffloadKey]) -> None:
        if keys and self._events is not None:
            self._events.add(Event(EventKind.REMOVED, PRIMARY_NAME, keys))

    def _offer_present(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Give request-level tiers what was there before; what is on its way, once it has come."""
        for tier in self._request_level:
            if request.allows(tier.spec):
                self.outbox.cascade([key for key in keys if key in self.primary.ready], tier, self._now)
                for key in keys:
                    if key in self.primary.filling:
                        self._parked.setdefault(key, []).append(tier)

    def _cascade_parked(self) -> None:
        for key, tiers in list(self._parked.items()):
            if key in self.primary.filling:
                continue
            del self._parked[key]
            if key in self.primary.ready:
                for tier in tiers:
                    self.outbox.cascade((key,), tier, self._now)
