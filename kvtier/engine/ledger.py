"""The ledger: the state of one kvtier engine, and every decision about it, in plain synchronous calls.

No await, no clock, no I/O: the time is an argument, and `end_step` returns the actions to carry out. So every change of
state is atomic, and a test is a plain call. `traffic` sends and settles. Three modules decide for the ledger: `loads`
what is loaded and what is computed, `writeback` what is written later, and `prefetches` what is looked up in advance.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier.backend import OffloadKey, check_keys
from kvtier.config import PRIMARY_NAME, PROBES_IN_FLIGHT_MAX, QUEUED_ACTIONS_MAX, EngineConfig, TierConfig
from kvtier.engine.answers import (
    HIT,
    HIT_PENDING,
    MISS,
    RETRY,
    EventKind,
    EventLog,
    LookupResult,
    StorePlan,
    sources_of,
)
from kvtier.engine.loads import Loads
from kvtier.engine.prefetches import Prefetches
from kvtier.engine.prefill import PrefillSpeed
from kvtier.engine.primary import Primary
from kvtier.engine.requests import PROMOTIONS_MAX, Leases, Request, Search, StepHits, Waited
from kvtier.engine.tier import WHEN_EVICTED, LedgerLimits, Tier, TierSpec
from kvtier.engine.traffic import Observe, Operation, Traffic
from kvtier.engine.writeback import NO_STORE, SecondUse, WriteBack
from kvtier.policies import Policy, policy_class
from kvtier.runner.messages import Action, Gone, LocalMessage, Message, RunnerBack, RunnerGone, RunnerLost, unpack_keys
from kvtier.settings.hints import RETAIN_S_MAX, Advice, IgnoredHints, hint_of, shortened

__all__ = ["Ledger", "LedgerCounters", "LedgerLimits", "LookupResult", "StorePlan", "ledger_of", "rows_of_share"]


@dataclass(slots=True)
class LedgerCounters:
    """Totals since the start, in chunks unless a name says otherwise."""

    hits: int = 0  # Loaded, and in the primary at the look-up.
    misses: int = 0  # Found nowhere, once a request and key.
    promotions_refused: int = 0  # Held by a tier, without a free row here.
    rows_kept: int = 0  # Released while the caller still held views of them.
    saved_s: float = 0.0  # Seconds to compute the loaded chunks, while the prefill speed was known.
    stores: int = 0
    stores_refused: int = 0  # Without room.


class Ledger:
    def __init__(
        self,
        rows: int,
        policy: Policy[OffloadKey],
        tiers: Sequence[TierSpec],
        limits: LedgerLimits,
        events: EventLog | None = None,
        observe: Observe | None = None,
        prefill: PrefillSpeed | None = None,
        waited: Waited | None = None,
    ) -> None:
        self.prefill = prefill or PrefillSpeed()
        self.events = events or EventLog()
        self.runners_lost = 0  # Counted by the owner: a runner that was closed properly is settled like a lost one.
        ahead_rows = limits.ahead_rows if any(spec.cascade == WHEN_EVICTED for spec in tiers) else 0
        self.primary = Primary(rows, policy, limits.retained_rows_max, ahead_rows=ahead_rows)
        self.tiers = [Tier(index, spec) for index, spec in enumerate(tiers)]
        self.leases = Leases(self.primary, limits.lease_rows_max, limits.lease_s)
        self._hits = StepHits(self.primary, self.leases, waited)
        self.traffic = Traffic(self.primary, self.leases, self.tiers, limits, self.events, observe)
        self.locations = self.traffic.locations
        self.loads = Loads(self.prefill, self.primary, self.leases, self.traffic, self.tiers, limits)
        self.writeback = WriteBack(self.primary, self.tiers, self.traffic, limits)
        self.second_use = SecondUse(self.primary, self.tiers, self.traffic)
        self.counters = LedgerCounters()
        self.row_bytes = limits.row_bytes
        self.hints_ignored = IgnoredHints()
        self.prefetches = Prefetches(self.primary, self.writeback, self.leases, self.loads, self.lookup)
        self._forgetting: dict[OffloadKey, None] = {}  # To be forgotten when nothing holds them.
        self._chunk_tokens = limits.chunk_tokens
        self.promoting = True  # False from a reset until the LLM engine's workers have flushed.
        self.runner_up = True
        self._awaits_runner = False  # At the end, while rows are dirty.
        self.rows_in_use = 0  # The LLM engine reads or writes them.
        self.kept: Counter[int] = Counter()  # Row -> views that the caller still holds, each of them a pin.
        self._now = 0.0
        self._step = 1

    def begin_step(self, now: float) -> None:
        """Set the time (seconds, never decreasing) and end expired leases."""
        self._now = now
        if self.leases.deadlines:
            self.leases.expire(now)

    def apply(self, message: Message | LocalMessage) -> None:
        match message:
            case RunnerLost():
                self.runner_up = False
                for lost in self.traffic.lose(self._now):
                    if lost.operation is Operation.CASCADE:
                        self.writeback.interrupted(lost.tier, lost.keys)
            case RunnerGone():
                self.traffic.gone(message.epoch)
            case RunnerBack():
                self.runner_up = True
                self.traffic.epoch = message.epoch
                if self.primary.takes_hints:
                    self.traffic.expect_hints()
                self._delete_undeleted()
            case _:
                self.traffic.apply(message, self._now)
                if self.writeback.active and isinstance(message, Gone):
                    self.writeback.lost(self.tiers[message.tier], unpack_keys(message.keys))

    def refuse(self, actions: Sequence[Action]) -> None:
        self.traffic.refuse(actions, self._now)

    def end_step(self) -> list[Action]:
        """Weigh loads (a declined one is a miss from now on), lease rows to waiting requests; return the actions."""
        loads = self.loads
        if loads.wanted or loads.trials:
            loads.weigh(self._now, self._step)
        if self.prefetches.waiting:  # After the weighing: a prefetch may load what a request declined.
            self.prefetches.step()
        self._hits.end(self._now, loads.wait_max_s(1) if loads.token_s else None)
        if self._forgetting:
            self._forgetting = dict.fromkeys(self.delete(list(self._forgetting)))
        if self.writeback.active:
            self.writeback.clean_ahead(self._now, runner_up=self.runner_up)
        actions = self.traffic.flush(loads.flush(self._now) if loads.queue else ())
        if loads.token_s or self.prefill.tokens_per_s:
            loads.begin_step()
        self._step += 1
        return actions

    @property
    def pending(self) -> bool:
        """True if something is queued, or in flight within its deadline: steps should go on."""
        if self.traffic.in_flight or not (self.traffic.nothing_queued and self.loads.empty) or self.prefetches.waiting:
            return True
        return self._awaits_runner and not self.runner_up and self.writeback.queued_rows > 0

    def end(self, *, runner_returns: bool) -> None:
        """Clean every dirty row: with the next runner, if none is up and one will be."""
        self._awaits_runner = runner_returns
        self.writeback.end()

    def lookup(self, key: OffloadKey, request: Request) -> LookupResult:
        if key in self.primary.ready:
            self._hits.add(request, key)
            return HIT
        if key in self.primary.filling:
            return self._join(key, request)
        search = request.search
        if not (self.promoting and self.runner_up) or search.promotions.get(key, 0) >= PROMOTIONS_MAX:
            return self._miss(key, request, search)
        never = self.loads.never if request.weighed and self.loads.token_s else None
        now, holders = self._now, self.locations.mask.get(key, 0)
        having, too_slow, silent, late, admitted = sources_of(key, request, search, self.tiers, holders, now, never)
        if late:
            search.end_probes(now)
            if key not in search.missed:
                for tier in late:
                    tier.counters.dropped["asking"] += 1
        if having:
            source, *others = having
            return self._promote(key, source, request, too_slow, alternatives=bool(others or silent))
        if silent and self._probe(key, silent, request):
            return RETRY
        if too_slow:
            return self._try_or_decline(key, too_slow, request)
        return self._miss(key, request, search, admitted)

    def _join(self, key: OffloadKey, request: Request) -> LookupResult:
        if self.loads.token_s and (self._now >= request.late_at or request.declined(key)):
            self.loads.give_up(key, request)
            return self._miss(key, request, request.search)
        return self._wait_for(key, request)

    def _try_or_decline(self, key: OffloadKey, too_slow: Sequence[Tier], request: Request) -> LookupResult:
        """Promote a key behind others of the request, or as a trial of its tier; else the request computes it."""
        for tier in sorted(too_slow, key=lambda each: each.tried_at):
            if request in self.loads.wanted or self.loads.may_try(tier, request, self._now):
                return self._promote(key, tier, request)
        self.loads.decline((key,), too_slow[0], request, self._now)
        return self._miss(key, request, request.search)

    def _probe(self, key: OffloadKey, tiers: Sequence[Tier], request: Request) -> bool:
        """Queue probes for a key; return False if none of these tiers may be probed now."""
        check_keys((key,))  # A look-up that probes no tier needs no check: it finds nothing.
        asks, asked, weighs = False, request.search.asked, request.weighed and self.loads.token_s > 0
        for tier in tiers:
            if tier.may_ask(key):
                tier.ask(key)
                if weighs and (tier.index, key) not in asked:
                    weighs = False
                    request.search.await_probe(self._now, tier.probe_latency_s, self.loads.wait_max_s(1))
                asked.add((tier.index, key))
                request.retried_in = self._step
                asks = True
            else:
                tier.counters.dropped["asking"] += 1
        return asks

    def _promote(
        self,
        key: OffloadKey,
        tier: Tier,
        request: Request,
        too_slow: Sequence[Tier] = (),
        *,
        alternatives: bool = False,
    ) -> LookupResult:
        """Reserve and lease a row for a key that a tier has. Without one it is a miss, or RETRY in a `Turn`.

        The hits before it are leased first: a prefix that exceeds the share keeps its leading part.
        """
        turn, evicted = request.turn, None
        if (turn is None or turn.mine) and self.leases.room(self._hits.rows(request), 1):
            evicted = self._reserve((key,))
        if evicted is None and turn is not None:
            turn.short = True
            return RETRY
        if evicted is None:
            self.counters.promotions_refused += 1
            return self._miss(key, request, request.search)
        self.events.add(EventKind.REMOVED, PRIMARY_NAME, evicted)
        self._hits.lease(request, self._now)
        self.leases.take(self.primary.filling[key], request, self._now)
        search = request.search
        search.promotions[key] = search.promotions.get(key, 0) + 1
        search.sources[key] = tier.index
        self.loads.want(key, tier, request, too_slow, alternatives=alternatives)
        if self.writeback.active:
            self.writeback.promoted(key, tier.spec, request)
        return self._wait_for(key, request)

    def cut(self, keys: Sequence[OffloadKey], request: Request) -> int:
        """End a run before these keys, for want of rows; return how many of them a tier has."""
        chunks = 0
        for key in keys:
            mask = self.locations.mask.get(key, 0)
            if not any(tier.answer(key, mask & tier.bit, self._now) for tier in self.tiers):
                break
            chunks += 1
        self.counters.promotions_refused += chunks
        self._miss(keys[0], request, request.search)
        return chunks

    def rows_left(self, keys: Collection[OffloadKey] = ()) -> int:
        """Return how many rows can be free for keys at some time: those that no hung transfer and no reader holds."""
        row_key = self.primary.key
        held = {*self.traffic.pins_overdue(), *self.kept}
        stuck = {key for row in held if (key := row_key(row)) is not None}
        return self.primary.rows - self.primary.rows_quarantined - len(stuck.difference(keys))

    def _wait_for(self, key: OffloadKey, request: Request) -> LookupResult:
        self._hits.add(request, key)
        request.waits = True
        return HIT_PENDING

    def _miss(self, key: OffloadKey, request: Request, search: Search, asked: Sequence[Tier] = ()) -> LookupResult:
        if request.waiting_since is not None:
            self._hits.add_miss(request)
        missed = search.missed
        if key not in missed:
            missed.add(key)
            self.counters.misses += 1
            for tier in asked:
                tier.counters.misses += 1
        return MISS

    # Loading: primary → the LLM engine.

    def prepare_load(self, keys: Sequence[OffloadKey], request: Request) -> list[int]:
        """Pin the rows of these keys, each answered HIT in this step, and return them in order."""
        ready = self.primary.ready
        try:
            rows = list(map(ready.__getitem__, keys))
        except KeyError as error:
            check_keys(keys)
            raise LookupError(f"prepare_load of {error.args[0].hex()}, which this step's lookup did not find") from None
        self.primary.pin(rows)
        self.rows_in_use += len(rows)
        if request.leased:
            for row in rows:
                self.leases.end(row, request)
        sources = request.sources
        if not sources:
            self.counters.hits += len(keys)
        for key in keys if sources else ():
            source = sources.get(key)
            counters = self.counters if source is None else self.tiers[source].counters
            counters.hits += 1
        if self.loads.token_s:
            self.counters.saved_s += request.tokens_of(keys, self._chunk_tokens) * self.loads.token_s
        self._access(keys, keys, request)
        return rows

    def complete_load(self, keys: Sequence[OffloadKey]) -> None:
        self.primary.unpin(list(map(self.primary.ready.__getitem__, keys)))
        self.rows_in_use -= len(keys)

    def touch(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Count an access to those of the keys that are present, once a request."""
        ready, filling = self.primary.ready, self.primary.filling
        present = [key for key in keys if key in ready or key in filling]
        self._access(present, present, request)

    def keep(self, rows: Sequence[int]) -> None:
        """Pin rows whose caller still reads them: each until `let_go`."""
        self.kept.update(rows)
        self.counters.rows_kept += len(rows)
        self.primary.pin(rows)

    def let_go(self, row: int) -> None:
        if row not in self.kept:  # The primary was cleared meanwhile: the row is in quarantine.
            self.primary.release(row)
            return
        self.kept[row] -= 1
        if not self.kept[row]:
            del self.kept[row]
        self.primary.unpin((row,))

    def _access(self, present: Sequence[OffloadKey], keys: Sequence[OffloadKey], request: Request) -> None:
        """Record that a request uses `keys`; count one access to those that are present.

        Absent ones have rows by now, behind the keys that the request used before. All of them are evicted tail first.
        """
        used, last = request.used, request.last_used
        present, keys = request.in_prefix_order(present), request.in_prefix_order(keys)
        fresh = [key for key in present if key not in used] if used else present
        if fresh:
            rows = self.primary.rows_of(dict.fromkeys(fresh))
            self.primary.touch(rows)
            self.writeback.used(rows)
            if self.second_use.active and self.runner_up:
                self.second_use.used(fresh, request, self._now)
        elif len(keys) == len(present):
            return
        if last is None:
            in_place = not fresh or keys[len(present) - 1] is present[-1]
        else:
            in_place = not fresh and self.primary.row(last) is not None
        if not (request.use(keys) and in_place):
            rows = self.primary.rows_of(request.used)
            self.primary.rank(rows)
            self.writeback.used(rows)

    # Storing: the LLM engine → primary.

    def prepare_store(self, keys: Sequence[OffloadKey], request: Request) -> StorePlan | None:
        """Reserve rows for the absent ones of these keys, all or none (None: no room); evict none of these keys."""
        ready, filling = self.primary.ready, self.primary.filling
        absent = [key for key in keys if key not in ready and key not in filling]
        check_keys(absent)
        present: Sequence[OffloadKey] = ()
        if len(absent) < len(keys):
            present = [key for key in keys if key in ready or key in filling]
        if len(absent) > 1:
            absent = list(dict.fromkeys(absent))
        evicted = self._reserve(request.in_prefix_order(absent), present, request.last_used) if absent else []
        if evicted is None:
            self.counters.stores_refused += len(absent)
            return None
        if evicted:
            self.events.add(EventKind.REMOVED, PRIMARY_NAME, evicted)
        if self._forgetting:
            self._have_gone(absent)
        self._access(present, keys, request)
        request.storing += len(absent)
        self.rows_in_use += len(absent)
        return StorePlan(absent, [filling[key] for key in absent], evicted)

    def complete_store(self, keys: Sequence[OffloadKey], request: Request, *, success: bool = True) -> None:
        """Make keys of a `StorePlan` loadable, all or some, and cascade them; without `success`, forget them."""
        check_keys(keys)
        if success:
            published = self.primary.publish(keys)
        else:
            published = [key for key in keys if key in self.primary.filling]
            self.leases.abandon(published)
        request.storing -= len(published)
        self.rows_in_use -= len(published)
        if not success:
            self.events.add(EventKind.FAILED, PRIMARY_NAME, published, "store")
            return
        if published:
            self.counters.stores += len(published)
            self.events.add(EventKind.STORED, PRIMARY_NAME, published)
        for tier in self.tiers:
            if not request.stores_in(tier.spec):
                if request.allows(tier.spec):
                    tier.counters.skipped[NO_STORE] += len(published)
                self.writeback.keep_out(published, tier)
            elif tier.spec.cascade == WHEN_EVICTED:
                self.writeback.written(published, tier, request)
            else:
                due = published if tier.at_once else self.second_use.stored(published, tier, request)
                if self.runner_up:
                    self.traffic.cascade(due, tier, self._now)
                else:
                    tier.counters.dropped["runner"] += len(due)

    def _reserve(
        self, keys: Sequence[OffloadKey], offered: Collection[OffloadKey] = (), after: OffloadKey | None = None
    ) -> list[OffloadKey] | None:
        """Reserve rows without evicting this step's hits."""
        if len(keys) > self.primary.rows_free:
            self._hits.hold()
            self.primary.end_retentions(self._now)
        evicted = self.primary.reserve(keys, offered, after)
        if evicted is not None and self.writeback.active:
            self.writeback.evicting(evicted)
        return evicted

    # A request's beginning and end.

    def hint(self, request: Request, given: object) -> None:
        """Set a request's hint, in place of an earlier one. An unreadable one and unknown tiers' names are counted."""
        hint = hint_of(given, self.hints_ignored)
        if hint is None:
            return
        self._take_hints()
        request.hint = hint
        if not isinstance(hint.no_store, bool):
            for name in set(hint.no_store).difference(tier.spec.name for tier in self.tiers):
                self.hints_ignored.add("tier", f"no_store names {shortened(name)}, which is no tier here")

    def finish(self, request: Request) -> None:
        """Rank the request's keys, tail first, here and in tiers, and end its leases; completions may still follow."""
        request.finished = True
        if request.waiting_since is not None:
            self._hits.end_wait(request, self._now)
        if request.leased:
            self.leases.end_all(request)
        if len(request.used) == request.told:
            return
        used, hint = list(request.used), request.hint
        request.told = len(used)
        rows = self.primary.rows_of(used)
        over = self.primary.end(rows, hint)
        self.writeback.used(rows)
        if over and self.writeback.active:
            self.writeback.over.update(over)
        if hint is not None and hint.no_store:
            self.writeback.keep_out_own(used, request)
            self.second_use.keep_out(used, request)
        for tier in self.tiers:
            if self.runner_up and request.allows(tier.spec):
                self.traffic.end(used, tier, hint)
        if hint is not None and hint.retain_s:
            keys, seconds = request.leading(hint.tokens, self._chunk_tokens), min(hint.retain_s, RETAIN_S_MAX)
            self.advise(Advice("retain", keys, seconds=seconds, priority=hint.priority), request)

    # What is said of keys.

    def advise(self, advice: Advice[OffloadKey], request: Request | None = None) -> int:
        """Demote or retain keys, here and in the tiers that the request allows; return how many are so here."""
        self._take_hints()
        rows = self.primary.rows_of(dict.fromkeys(advice.keys))
        if advice.kind == "retain":
            self.writeback.used(rows)
        elif self.writeback.active:
            self.writeback.demoted.update(rows)
        heeded = self.primary.advise(advice.of(rows), self._now)
        for tier in self.tiers:
            if self.runner_up and (request is None or request.allows(tier.spec)):
                self.traffic.advise(tier, advice)
        return heeded

    def _take_hints(self) -> None:
        if not self.primary.takes_hints:
            self.primary.take_hints()
            self.traffic.expect_hints()

    def forget(self, keys: Sequence[OffloadKey]) -> int:
        """Forget keys here and in every tier; return how many are gone here. Held ones follow when released."""
        held = self.delete(keys)
        self._delete_in_tiers(held)
        self._forgetting.update(dict.fromkeys(held))
        return len(keys) - len(held)

    def _have_gone(self, keys: Sequence[OffloadKey]) -> None:
        """Delete keys in tiers that were to be forgotten and are gone here; later chunks under them are new."""
        gone = [key for key in keys if key in self._forgetting]
        self._delete_in_tiers(gone)
        for key in gone:
            del self._forgetting[key]

    def delete(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget keys in the primary and in every tier, except held ones, which are returned.

        A key that only a hung store or a view holds is forgotten; its row stays lent. The store may still end later.
        """
        lost, ready = self.traffic.pins_overdue() + self.kept, self.primary.ready
        gone = [key for key in keys if key in ready and self.primary.discard(key, lost[ready[key]])]
        self.events.add(EventKind.REMOVED, PRIMARY_NAME, gone)
        held = [key for key in keys if self.primary.row(key) is not None]
        self._delete_in_tiers([key for key in keys if self.primary.row(key) is None])
        return held

    def _delete_in_tiers(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self.writeback.forget(keys)
            self.second_use.forget(keys)
            for tier in self.tiers:
                self.locations.remove(tier, keys)
                tier.forget_answers(keys)
                self.traffic.delete(keys, tier)

    def _delete_undeleted(self) -> None:
        """Send deletes that a lost runner did not do, except for keys that have been stored again."""
        for tier in self.tiers:
            keys = [key for key in tier.take_undeleted() if self.primary.row(key) is None]
            if keys:
                self.locations.remove(tier, keys)
                self.traffic.delete(keys, tier)

    def reset(self) -> None:
        """Clear the primary; tiers keep their chunks. Transfers in flight are given up, and their rows stay lent."""
        self.prefetches.clear()
        self.loads.clear()
        lent = self.traffic.reset(self._now)
        self.leases.clear()
        self._hits.clear()
        if self.writeback.active:
            self.writeback.clear()
        gone = self.primary.clear(lent + self.kept)
        self.events.add(EventKind.REMOVED, PRIMARY_NAME, gone)
        self._have_gone(list(self._forgetting))
        self.kept.clear()
        self.rows_in_use = 0
        self.promoting = False


def ledger_of(config: EngineConfig, events: EventLog | None, observe: Observe, waited: Waited | None = None) -> Ledger:
    """Build the ledger that a configuration describes. Raises `ConfigError` for an unknown policy."""
    rows, limits = config.rows, config.limits
    policy = policy_class(config.eviction_policy)(rows)
    bounds = LedgerLimits(
        rows_of_share(limits.cascade_share, rows),
        rows_of_share(limits.lease_share, rows),
        limits.lease_s,
        limits.action_chunks,
        ahead_rows=rows_of_share(limits.leaving_share, rows),
        chunk_tokens=config.tokens_per_chunk,
        row_bytes=config.row_bytes,
        late_margin=config.late_margin,
        retained_rows_max=int(limits.retained_share * rows),
    )
    tiers = [_spec_of(tier, config) for tier in config.secondary_tiers]
    return Ledger(rows, policy, tiers, bounds, events, observe, PrefillSpeed(config.prefill_tokens_per_s), waited)


def rows_of_share(share: float, rows: int) -> int:
    return max(1, int(share * rows))


def _spec_of(tier: TierConfig, config: EngineConfig) -> TierSpec:
    limits = tier.limits
    store_chunks_max = min(limits.store_chunks_in_flight, limits.store_bytes_in_flight // config.row_bytes)
    if tier.cascade == WHEN_EVICTED:
        # The bridge refuses a step that exceeds its queue. Dirty rows can wait for the next step instead, so all these
        # tiers together have half of the queue.
        tiers = sum(each.cascade == WHEN_EVICTED for each in config.secondary_tiers)
        actions = max(1, QUEUED_ACTIONS_MAX // (2 * tiers))
        store_chunks_max = min(store_chunks_max, actions * config.limits.action_chunks)
    return TierSpec(
        tier.name,
        store_chunks_max,
        limits.answer_ttl_s,
        limits.breaker_failures,
        limits.breaker_cooldown_s,
        trial_chunks=config.limits.action_chunks,
        asked_keys_max=PROBES_IN_FLIGHT_MAX,
        overdue_rows_max=rows_of_share(config.limits.quarantine_share, config.rows),
        cascade=tier.cascade,
        medium=tier.medium,
        locality=tier.locality,
        row_bytes=config.row_bytes,
    )
