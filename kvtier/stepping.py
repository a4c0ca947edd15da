"""The step protocol: what a synchronous engine calls, thousands of times a step, and never waits for.

Every call here is plain, touches memory only and crosses no thread. A step's actions leave at its end with one wake-up;
what comes back waits in the bridge's mailbox and is applied before look-ups and before anything is evicted.
"""

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import RunnerBack, RunnerLost
from kvtier.config import EngineConfig
from kvtier.errors import EngineClosed
from kvtier.events import Event, EventLog
from kvtier.inbox import Observe
from kvtier.keys import OffloadKey
from kvtier.ledger import Ledger, LedgerLimits, LookupResult, StorePlan
from kvtier.metrics import Metrics
from kvtier.policies.named import policy_class
from kvtier.region import Region
from kvtier.request import Request
from kvtier.tier import TierMatcher, TierSpec


class SteppedManager:
    """One engine: its ledger, the bridge to its runner, and its rows. All calls belong to one thread.

    A request is known from `on_new_request` to `on_request_finished`, by an id of the caller's.
    """

    def __init__(
        self,
        config: EngineConfig,
        region: Region,
        bridge: Bridge,
        *,
        clock: Callable[[], float] = time.monotonic,
        observer: Observe | None = None,
    ) -> None:
        self.config = config
        self.region = region
        self._bridge = bridge
        self._clock = clock
        self._events = EventLog(config.limits.events) if config.events else None
        self.ledger = ledger_of(config, self._events, self._observe)
        self._metrics = Metrics(self.ledger, config.row_bytes, self._events)
        self._observer = observer
        self._requests: dict[str, Request] = {}
        self._closed = False
        self._replaced = -1  # The last epoch that was replaced for its quarantined rows.
        self.ledger.begin_step(clock())

    @property
    def metrics(self) -> CollectorRegistry:
        """A Prometheus registry with everything that this engine counts."""
        return self._metrics.registry

    @property
    def runners_lost(self) -> int:
        """How many runners ended, or were killed, before they were closed."""
        return self._metrics.runners_lost

    @property
    def events_dropped(self) -> int:
        """How many events were lost because nobody took them."""
        return 0 if self._events is None else self._events.dropped

    # Requests.

    def on_new_request(
        self,
        request_id: str,
        matchers: Sequence[TierMatcher] | None = None,
        *,
        load_matchers: Sequence[TierMatcher] | None = None,
    ) -> bool:
        """Take note of a request; `matchers` limit the tiers that serve it, None means all.

        `load_matchers` limit further the tiers that it is loaded from; its chunks are stored in the others, too.

        Returns whether a tier wants all of the request's chunks, those that are present already, too.
        Raises `EngineClosed` after shutdown, and ValueError if the id is in use.
        """
        self._check_open()
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is known already: finish it first, or choose another id")
        self._receive()
        request = self._requests[request_id] = self.ledger.new_request(request_id, matchers, load_matchers)
        return any(tier.spec.request_level and request.allows(tier.spec) for tier in self.ledger.tiers)

    def on_request_finished(self, request_id: str) -> None:
        """Rank the request's keys and end its leases. Completions, and a load decided before, may still follow."""
        request = self._requests.get(request_id)
        if request is not None:
            self.ledger.finish(request)
            self._forget(request)

    # Looking up, loading, storing.

    def lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Say where one key is, and have it on its way if a tier has it. A HIT holds until `end_step`."""
        if self._bridge.mailbox:
            self._receive()
        return self.ledger.lookup(key, self._known(request_id))

    def source(self, key: OffloadKey, request_id: str) -> TierSpec | None:
        """Return the tier from which this request had a key promoted; None if it found it in the primary."""
        request = self._requests.get(request_id)
        index = None if request is None else request.sources.get(key)
        return None if index is None else self.ledger.tiers[index].spec

    def prepare_load(self, keys: Sequence[OffloadKey], request_id: str) -> list[int]:
        """Pin the rows of keys that were HIT in this step and return them, in order; LookupError for any other key."""
        return self.ledger.prepare_load(keys, self._request(request_id))

    def complete_load(self, keys: Sequence[OffloadKey], request_id: str) -> None:  # noqa: ARG002  # Part of the protocol.
        """Say that the engine has read these rows."""
        self.ledger.complete_load(keys)

    def touch(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Count a use of these keys by the request; absent ones, and a second use, count nothing."""
        self.ledger.touch(keys, self._request(request_id))

    def prepare_store(self, keys: Sequence[OffloadKey], request_id: str) -> StorePlan | None:
        """Reserve rows for those of the keys that are absent: all of them, or None and nothing changed.

        Evicts none of `keys`. The caller writes the rows and then calls `complete_store` with the plan's keys.
        """
        if self._bridge.mailbox:
            self._receive()
        return self.ledger.prepare_store(keys, self._request(request_id))

    def complete_store(self, keys: Sequence[OffloadKey], request_id: str, *, success: bool = True) -> None:
        """Make written rows loadable, and have them cascade; with `success` false, give them up."""
        if self._closed:
            return
        request = self._request(request_id)
        self.ledger.complete_store(keys, request, success=success)
        self._forget(request)

    def end_step(self) -> None:
        """Take what has come back, and send what this step and that decided."""
        self._receive()
        actions = self.ledger.end_step()
        if actions:
            refused = self._bridge.send(actions)
            if refused:
                self.ledger.refuse(refused)
        self._watch_quarantine()

    def take_events(self) -> list[Event]:
        """Return what happened to chunks since the last call; nothing unless the configuration says `events`."""
        if self._bridge.mailbox:
            self._receive()
        return [] if self._events is None else self._events.take()

    def has_pending_work(self) -> bool:
        """Say whether the engine should go on stepping. What has run out of time does not count."""
        if self._bridge.mailbox:
            self._receive()
        return self.ledger.pending

    # The whole.

    def drain(self, deadline_s: float | None = None) -> bool:
        """Send what is queued and wait until nothing is under way; False if the deadline came first. Blocks."""
        until = time.monotonic() + self._deadline(deadline_s)
        self.end_step()
        while self.ledger.pending and (left := until - time.monotonic()) > 0:
            self._bridge.wait(left)
            self.end_step()
        return not self.ledger.pending

    def reset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary; tiers keep their chunks. Blocks until nothing is under way or the deadline comes.

        A tier that does not end in time is taken out of use until it has proved itself, and its rows stay lent; then
        the answer is False. Nothing is promoted until `on_reset_flushed`. No completion of an earlier load or store
        may follow.
        """
        self._check_open()
        until = time.monotonic() + self._deadline(deadline_s)
        self.ledger.outbox.clear()
        try:
            while self.ledger.transfers.under_way and (left := until - time.monotonic()) > 0:
                self._bridge.wait(left)
                self._receive()
        finally:  # Interrupted, too: what was queued has been forgotten, and its rows with it.
            clean = self._reset()
        return clean

    def on_reset_flushed(self) -> None:
        """Say that the engine's workers no longer touch rows of before the reset: tiers may fill them again."""
        self.ledger.promoting = True

    def shutdown(self, deadline_s: float | None = None) -> int:
        """Let transfers end, close the tiers and the runner; return how many transfers were left behind.

        Takes at most the deadline for the transfers and once more for the closing. Idempotent.
        """
        if self._closed:
            return 0
        self.drain(deadline_s)
        abandoned = self._bridge.close(self._deadline(deadline_s))
        self._free()
        return abandoned

    def _reset(self) -> bool:
        clean = not self.ledger.transfers.under_way
        self.ledger.reset()
        for request in list(self._requests.values()):
            request.storing = 0
            self._forget(request)
        return clean

    def _free(self) -> None:
        """Take the last outcomes and give the rows' memory back; what is still lent keeps it until it lets go."""
        self._closed = True
        self._receive()
        self.ledger.apply(RunnerLost(self.ledger.transfers.epoch, "the engine was shut down"))
        self._requests.clear()
        self.region.close()

    def _deadline(self, deadline_s: float | None) -> float:
        return self.config.limits.close_s if deadline_s is None else deadline_s

    def _known(self, request_id: str) -> Request:
        """Return a request that has begun and not finished."""
        try:
            return self._requests[request_id]
        except KeyError:
            self._check_open()
            raise LookupError(f"request {request_id!r} is unknown: call on_new_request first") from None

    def _request(self, request_id: str) -> Request:
        """Return the request; one that is over is treated as one without a past. `EngineClosed` after shutdown."""
        self._check_open()
        return self._requests.get(request_id) or self.ledger.new_request(request_id)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was shut down")

    def _forget(self, request: Request) -> None:
        if request.finished and request.storing <= 0:
            self._requests.pop(request.id, None)

    def _receive(self) -> None:
        """Apply everything in the mailbox."""
        self.ledger.begin_step(self._clock())
        mailbox = self._bridge.mailbox
        while mailbox:
            message = mailbox.popleft()
            self.ledger.apply(message)
            if isinstance(message, RunnerBack):
                self._bridge.admit(message.epoch)
            elif isinstance(message, RunnerLost):
                self._metrics.runners_lost += 1

    def _watch_quarantine(self) -> None:
        """Have the runner replaced when hung transfers hold more rows than we can spare."""
        transfers = self.ledger.transfers
        if (
            transfers.overdue
            and transfers.epoch > self._replaced
            and transfers.rows_overdue >= _share(self.config.limits.quarantine_share, self.config.rows)
            and self._bridge.replace()
        ):
            self._replaced = transfers.epoch

    def _observe(self, tier: str, operation: str, seconds: float) -> None:
        self._metrics.observe(tier, operation, seconds)
        if self._observer is not None:
            self._observer(tier, operation, seconds)


def ledger_of(config: EngineConfig, events: EventLog | None, observe: Observe) -> Ledger:
    """Build the ledger that a configuration describes. Raises `ConfigError` for an unknown policy."""
    rows, limits = config.rows, config.limits
    policy = policy_class(config.eviction_policy)(rows)
    bounds = LedgerLimits(
        cascade_rows_max=_share(limits.cascade_share, rows),
        lease_rows_max=_share(limits.lease_share, rows),
        lease_s=limits.lease_s,
        action_chunks=limits.action_chunks,
    )
    tiers = [
        TierSpec(
            name=tier.name,
            store_chunks_max=min(
                tier.limits.store_chunks_in_flight, tier.limits.store_bytes_in_flight // config.row_bytes
            ),
            answer_ttl_s=tier.limits.answer_ttl_s,
            asked_keys_max=tier.limits.probe_keys_in_flight,
            breaker_failures=tier.limits.breaker_failures,
            breaker_cooldown_s=tier.limits.breaker_cooldown_s,
            trial_chunks=limits.action_chunks,
            overdue_rows_max=_share(limits.quarantine_share, rows),
            request_level=tier.request_level,
            medium=tier.medium,
            locality=tier.locality,
        )
        for tier in config.secondary_tiers
    ]
    return Ledger(rows, policy, tiers, bounds, events, observe)


def _share(share: float, rows: int) -> int:
    return max(1, int(share * rows))
