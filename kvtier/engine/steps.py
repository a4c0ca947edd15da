"""The step protocol: the calls of a synchronous owner, thousands of times a step, which never wait.

Every call of a step is plain, touches memory only and crosses no thread. A step's actions leave at its end with one
wake-up. The answers wait in the bridge's mailbox. They are applied before evictions, and look-ups in tiers.
"""

import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, Self
from warnings import warn

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from kvtier.backend import OffloadKey, checked_keys
from kvtier.config import EVENTS_MAX, EngineConfig, __version__, settled
from kvtier.engine.answers import HIT, Event, EventLog, LookupResult, StorePlan
from kvtier.engine.ledger import ledger_of, rows_of_share
from kvtier.engine.metrics import EngineStats, Metrics, TierLog
from kvtier.engine.requests import Position, Request, Waited
from kvtier.engine.tier import TierMatcher, TierSpec
from kvtier.engine.traffic import Observe
from kvtier.engine.writeback import CLOSED
from kvtier.errors import EngineClosed, Remedy
from kvtier.memory import LentRow, Region, let_go_in_forks, require_descriptors
from kvtier.policies import require_policy
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import RunnerBack, RunnerLost
from kvtier.runner.process import ProcessBridge
from kvtier.settings.hints import PRIORITY_MAX, RETAIN_S_MAX, Advice, shown

logger = logging.getLogger(__name__)


class StepManager:
    """Tiers chunks over a primary in host memory and any number of secondary tiers, for an LLM engine that steps.

    All calls belong to one thread. `drain`, `reset` and `close` block, each up to its deadline; nothing else does. A
    request is known from `on_new_request` to `on_request_finished`, by an id of the caller's. `ledger` is the engine's
    inside, without a promise; reading it is harmless.
    """

    def __init__(
        self,
        config: EngineConfig,
        region: Region,
        bridge: Bridge,
        *,
        clock: Callable[[], float] = time.monotonic,
        observer: Observe | None = None,
        waited: Waited | None = None,
    ) -> None:
        self.config = config
        self.region = region
        self._clock, self._bridge = clock, bridge
        self._observer, self._waited = observer, waited
        self._bug_level = logging.ERROR
        self._mailbox = bridge.mailbox
        self.messages_received = 0  # If it has changed, figures may have changed.
        self._replaced = -1  # The last epoch that was replaced for its quarantined rows.
        self._events = EventLog(EVENTS_MAX if config.events else 0)
        self.ledger = ledger_of(config, self._events, self._observe, self._observe_wait)
        self._ready: Mapping[OffloadKey, int] = self.ledger.primary.ready
        self._tier_log = TierLog(self.ledger.tiers)
        self._metrics = Metrics(self.ledger)
        self._requests: dict[str, Request] = {}
        self._calls: Counter[Request] = Counter()  # Calls of the asyncio face in progress keep a request known.
        self._given_back: Callable[[], object] = bool  # Called when rows or leases were released: here by no one.
        self._kept: list[LentRow] = []  # Released, and still read.
        self._owner_pid = os.getpid()
        self._closed = self._forked = False
        let_go_in_forks(self)
        self.ledger.begin_step(clock())
        say_start(config, bridge, config.eviction_policy)

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        region: Region | None = None,
        observer: Observe | None = None,
        waited: Waited | None = None,
    ) -> Self:
        """Start a kvtier engine with its runner in a process; blocks until its tiers are open.

        The rows are those of `region`, which other processes may have mapped, too, or a new one. From now on it belongs
        to the engine, and is closed with it or with a start that fails. `observer` is called with (tier, operation,
        seconds) after every transfer, `waited` with the seconds for which a request waited for loads.

        Raises `ConfigError`, leaving nothing behind, if the configuration cannot be used or not all participants have
        mapped the region, and `BackendUnavailable` if a tier cannot be opened now.
        """
        if config.runner == "inline":
            raise ValueError("an inline runner needs a running event loop: use TieringOffloadingManager.open(config)")
        if region is not None and (region.rows, region.row_bytes) != (config.rows, config.row_bytes):
            raise ValueError(
                f"a region of {region.rows:,} rows of {region.row_bytes:,} bytes for a configuration of {config.rows:,}"
                f" of {config.row_bytes:,}"
            )
        try:
            config = checked(replace(config, runner="process"))
            if region is not None:
                region.require_met()
            region = region or make_region(config)
            bridge = ProcessBridge(config, region)
        except BaseException:
            if region is not None:
                region.close()
            raise
        return cls(config, region, bridge, observer=observer, waited=waited)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{self._described}>"

    @property
    def _described(self) -> str:
        primary, closed = self.ledger.primary, " (closed)" * self._closed
        tiers = [
            f"{config.name} ({config.type}, breaker {tier.breaker.state.value})"
            for tier, config in zip(self.ledger.tiers, self.config.secondary_tiers, strict=True)
        ]
        return f"{closed}: {len(primary.ready):,} of {primary.rows:,} rows ready; tiers: {', '.join(tiers) or 'none'}"

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or sys.is_finalizing():
            return
        what, self._closed = repr(self), True
        self._bridge.drop()
        warn(f"{what} was dropped, and never closed; see {Remedy.DROPPED}", ResourceWarning, stacklevel=2, source=self)

    def on_new_request(
        self,
        request_id: str,
        matchers: Sequence[TierMatcher] | None = None,
        *,
        load_matchers: Sequence[TierMatcher] | None = None,
        position: Position | None = None,
        hint: object = None,
    ) -> None:
        """Begin a request; `matchers` limit the tiers that serve it, None means all.

        `load_matchers` limit further the tiers from which it is loaded; its chunks are stored in the others, too.
        `position` returns where a key's chunk ends in the request's tokens, for LLM engines that do not offer keys in
        prefix order (with several groups, they come one group after the other). `hint` is a `Hint`, or the object that
        a client sent as one: see `kvtier.settings.hints`. A bad one is ignored and counted.

        Raises `EngineClosed` after closing, and ValueError if the id is in use. An id is in use until its request has
        finished, and its last store, `put` or `fetch` is over.
        """
        self._check_open()
        if known := self._requests.get(request_id):
            if known.finished:
                raise ValueError(
                    f"request {request_id!r} has finished, but a store or a fetch of it has not: complete it, or wait "
                    "for its put or fetch"
                )
            raise ValueError(f"request {request_id!r} is known already: finish it first, or choose another id")
        self._receive()
        request = self._requests[request_id] = Request(request_id, matchers, load_matchers, position)
        if hint is not None:
            self.ledger.hint(request, hint)

    def on_request_finished(self, request_id: str, hint: object = None) -> None:
        """Rank the request's keys and end its leases. Completions, and a load decided before, may still follow.

        A `hint` replaces the one of the request's beginning. Nothing happens if the request is not known.
        """
        if self._forked:
            self._check_owner()
        request = self._requests.get(request_id)
        if request is not None:
            if hint is not None:
                self.ledger.hint(request, hint)
            self._finish(request)

    # Looking up, loading, storing.

    def lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Find a key, and promote it if a tier has it. A HIT holds until `end_step`, unless deleted or reset.

        Raises LookupError for a request that is not known, and `EngineClosed` after closing.
        """
        try:
            request = self._requests[request_id]
        except KeyError:
            request = self._known(request_id)
        hits = request.hits
        if hits and key in self._ready:  # Inlined: the ledger would do the same.
            hits.append(key)
            return HIT
        if self._mailbox:
            self._receive()
        return self.ledger.lookup(key, request)

    def hits(self, request_id: str) -> list[OffloadKey]:
        """Return a request's hits, for a caller that cannot afford a call of `lookup`.

        While the list is not empty, a key in `ledger.primary.ready` may be appended to it, in place of a look-up. The
        end of the step, a reset, and any store or look-up that evicts, or tries to, empty it. It stays the same list.
        """
        return self._known(request_id).hits

    def source(self, key: OffloadKey, request_id: str) -> TierSpec | None:
        """Return the tier from which this request had a key promoted; None if it found it in the primary."""
        self._check_owner()
        request = self._requests.get(request_id)
        index = None if request is None else request.sources.get(key)
        return None if index is None else self.ledger.tiers[index].spec

    def prepare_load(self, keys: Sequence[OffloadKey], request_id: str) -> list[int]:
        """Pin the rows of keys that were HIT in this step and return them, in order; LookupError for any other key."""
        rows = self.ledger.prepare_load(keys, self._request(request_id))
        self._given_back()
        return rows

    def complete_load(self, keys: Sequence[OffloadKey], request_id: str) -> None:  # noqa: ARG002  # Part of the protocol.
        """Release rows of `prepare_load` that the LLM engine has read."""
        if self._forked:
            self._check_owner()
        self.ledger.complete_load(keys)
        self._given_back()

    def touch(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Count a use of these keys by the request; absent ones, and a second use, count nothing."""
        self.ledger.touch(keys, self._request(request_id))

    def prepare_store(self, keys: Sequence[OffloadKey], request_id: str) -> StorePlan | None:
        """Reserve rows for those of the keys that are absent: all of them, or None and nothing changed.

        Evicts none of `keys`. The caller writes the rows and then calls `complete_store` with the plan's keys.
        """
        if self._mailbox:
            self._receive()
        return self.ledger.prepare_store(keys, self._request(request_id))

    def complete_store(self, keys: Sequence[OffloadKey], request_id: str, *, success: bool = True) -> None:
        """Make written rows loadable, and cascade them; with `success` false, forget them."""
        if self._closed and not self._forked:
            return
        request = self._request(request_id)
        self.ledger.complete_store(keys, request, success=success)
        if request.finished:
            self._forget(request)
        self._given_back()

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Record a step of the LLM engine that computed `tokens` of prompts in `seconds`.

        The prefill speed is learned from it, against which loads are weighed, unless the configuration has one. Steps
        without a prompt need not be recorded. One step alone shows nothing: it may have compiled.
        """
        if self._forked:
            self._check_owner()
        self.ledger.prefill.note(tokens, seconds, self._clock())

    # Deletes, events, and the end of a step.

    def delete(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Forget keys here and in every tier; return those that have stayed, because something holds their rows.

        Tiers delete at the step's end. A key that only a hung store holds is forgotten; the store may still end later.
        """
        self._check_open()
        return self.ledger.delete(checked_keys(keys))

    # Advice on keys, without a request.

    def prefetch(self, keys: Sequence[OffloadKey]) -> None:
        """Bring the longest leading run of keys whose chunks are in any tier into the primary, from this step on.

        It takes steps, and there is pending work until it is over. It brings at most the share of leases. A look-up
        shows which chunks came. Of more than a thousand calls at once, the newest are ignored.
        """
        self._check_open()
        self.ledger.prefetches.begin(checked_keys(keys))

    def demote(self, keys: Sequence[OffloadKey]) -> int:
        """Evict keys before all others, here and in tiers from the step's end, until used; return how many are here."""
        self._check_open()
        return self.ledger.advise(Advice("demote", checked_keys(keys)))

    def forget(self, keys: Sequence[OffloadKey]) -> int:
        """Forget keys here and in every tier; return how many are gone here. Tiers delete at the step's end.

        No reader loses a chunk. A chunk that is in use, or in flight, is forgotten at the end of the first step in
        which it is not. So is a key that is stored again before that.
        """
        self._check_open()
        return self.ledger.forget(checked_keys(keys))

    def retain(self, keys: Sequence[OffloadKey], seconds: float, *, priority: int = 0) -> int:
        """Keep keys, in prefix order, from eviction for some seconds, here and in tiers; return how many are kept here.

        At most `limits.retained_share` of the rows is: the leading part of more keys, unless others have a lower
        `priority` (0 to 99). It is no pin: if there is nothing else to evict, they are evicted. A day is the longest
        time. ValueError for a time that is not positive and finite, and for another priority; TypeError for no number.
        """
        self._check_open()
        _check("seconds", seconds, Real, lambda given: 0 < given < math.inf, "a positive, finite number")
        accepted = f"a whole number from 0 to {PRIORITY_MAX}"
        _check("priority", priority, Integral, lambda given: 0 <= given <= PRIORITY_MAX, accepted)
        seconds = float(min(seconds, RETAIN_S_MAX))
        return self.ledger.advise(Advice("retain", checked_keys(keys), seconds=seconds, priority=int(priority)))

    def take_events(self) -> list[Event]:
        """Return the events of chunks since the last call; none unless the configuration says `events`."""
        if self._mailbox or self._forked:
            self._receive()
        return self._events.take()

    def end_step(self) -> None:
        """Apply messages, and send the actions of this step."""
        self._receive()
        if self._kept:
            self._take_kept()
        actions = self.ledger.end_step()
        if actions:
            refused = self._bridge.send(actions)
            if refused:
                self.ledger.refuse(refused)
                self._given_back()
        if self.ledger.traffic.overdue:
            self._watch_quarantine()

    def has_pending_work(self) -> bool:
        """Return True if the LLM engine should go on stepping. Overdue transfers do not count."""
        if self._mailbox or self._forked:
            self._receive()
        return self.ledger.pending

    def stats(self) -> EngineStats:
        """Return the counts of this kvtier engine and its tiers, and how many chunks they hold now."""
        return self._metrics.stats()

    @property
    def metrics(self) -> CollectorRegistry:
        """A Prometheus registry with everything that this kvtier engine counts."""
        return self._metrics.registry

    def drain(self, deadline_s: float | None = None) -> bool:
        """Send all queued actions, and wait until nothing is in flight; False if the deadline came first. Blocks."""
        until = time.monotonic() + self._deadline(deadline_s)
        while True:
            ended = self.ledger.prefetches.ended
            self.end_step()
            left = until - time.monotonic()
            if not self.ledger.pending or left <= 0:
                return not self.ledger.pending
            if ended == self.ledger.prefetches.ended:
                self._bridge.wait(left)

    def reset(self, deadline_s: float | None = None) -> bool:
        """Clear the primary; tiers keep their chunks. Blocks until nothing is in flight or the deadline comes.

        False if a tier does not end in time: its rows stay lent, and its breaker opens. Nothing is promoted until
        `on_reset_flushed`. No completion of an earlier load or store may follow. RuntimeError during a `put` or `fetch`
        of the asyncio face.
        """
        self._check_open()
        if calls := self._calls.total():
            raise RuntimeError(
                f"{calls} put or fetch in progress, which may hold rows: await TieringOffloadingManager.reset()"
            )
        until = time.monotonic() + self._deadline(deadline_s)
        self.ledger.loads.clear()
        self.ledger.traffic.forget_queued()
        try:
            while self.ledger.traffic.in_flight and (left := until - time.monotonic()) > 0:
                self._bridge.wait(left)
                self._receive()
        finally:  # After an interrupt, too: queued transfers are forgotten already.
            clean = self._reset()
        return clean

    def on_reset_flushed(self) -> None:
        """Promote again after a reset: the LLM engine's workers no longer touch earlier rows."""
        self._check_owner()
        self.ledger.promoting = True

    def close(self, deadline_s: float | None = None) -> int:
        """Let transfers end, close the tiers and the runner; return how many transfers were left behind. Idempotent.

        Before, rows dirty for tiers with `cascade = "evict"` are written. Closing takes at most the deadline once more.
        """
        if self._closed:
            return 0
        self._begin_end()
        self.drain(deadline_s)
        self._end_drained()
        abandoned = self._bridge.close(self._deadline(deadline_s))
        self._free()
        return abandoned

    def forked(self) -> None:
        """Stop the engine in a forked child: it has no runner, and its rows are the owner's.

        From then on `stats` and `metrics` return the figures of the fork's moment in
        the child. `close` and `aclose` do nothing there, and every other call raises `EngineClosed`.
        """
        self._forked = self._closed = True
        self._requests.clear()
        self._bridge.forked()
        self.region.close()

    def _receive(self) -> None:
        if self._forked:
            self._check_owner()
        now = self._clock()
        self.ledger.begin_step(now)
        mailbox = self._mailbox
        if not mailbox and now < self._tier_log.due:
            return
        while mailbox:
            message = mailbox.popleft()
            self.messages_received += 1
            self.ledger.apply(message)
            if isinstance(message, RunnerBack):
                self._bridge.admit(message.epoch)
            elif isinstance(message, RunnerLost):
                self.ledger.runners_lost += 1
        if not self._closed:  # Failures of the closing are expected.
            self._tier_log.look(now)

    def _known(self, request_id: str) -> Request:
        try:
            return self._requests[request_id]
        except KeyError:
            self._check_open()
            raise LookupError(f"request {request_id!r} is unknown: call on_new_request first") from None

    def _request(self, request_id: str) -> Request:
        """Return the request, or a new one for an unknown id. `EngineClosed` after closing."""
        request = self._requests.get(request_id)
        if request is None:  # As all are once it is closed.
            self._check_open()
            request = Request(request_id)
        return request

    def _finish(self, request: Request) -> None:
        self.ledger.finish(request)
        self._forget(request)
        self._given_back()

    def _forget(self, request: Request) -> None:
        """Forget a request that is over; a later one with its id stays."""
        over = request.finished and request.storing <= 0 and request not in self._calls
        if over and self._requests.get(request.id) is request:
            del self._requests[request.id]

    def _call_began(self, request_id: str) -> Request:
        request = self._known(request_id)
        self._calls[request] += 1
        return request

    def _call_ended(self, request: Request) -> None:
        self._calls[request] -= 1
        if not self._calls[request]:
            del self._calls[request]
        if request.finished:  # Again, for later uses and leases.
            self._finish(request)

    # Rows that are still read, and rows that hang.

    def _keep(self, lent: Sequence[LentRow]) -> None:
        """Keep rows out of use that callers still read; every step looks again."""
        self.ledger.keep([each.row for each in lent])
        self._kept += lent

    def _take_kept(self) -> None:
        kept, self._kept = self._kept, []
        for each in kept:
            if each.release():
                self.ledger.let_go(each.row)
            else:
                self._kept.append(each)
        if len(self._kept) < len(kept):
            self._given_back()

    def _watch_quarantine(self) -> None:
        traffic = self.ledger.traffic
        if (
            traffic.epoch > self._replaced
            and traffic.rows_overdue >= rows_of_share(self.config.limits.quarantine_share, self.config.rows)
            and self._bridge.replace()
        ):
            self._replaced = traffic.epoch

    def _observe(self, tier: str, operation: str, seconds: float) -> None:
        self._metrics.observe(tier, operation, seconds)
        if self._observer is not None:
            self._tell(f"{operation} of tier {tier}", partial(self._observer, tier, operation, seconds))

    def _observe_wait(self, seconds: float) -> None:
        self._metrics.observe_wait(seconds)
        if self._waited is not None:
            self._tell(f"wait of {seconds:.3f} s", partial(self._waited, seconds))

    def _tell(self, seen: str, observer: Callable[[], object]) -> None:
        try:
            observer()
        except Exception:  # The supervisor's edge: a bug in an observer costs no transfer its outcome.
            # It may raise for every transfer, so only the first is an error.
            level, self._bug_level = self._bug_level, logging.DEBUG
            logger.log(level, "the observer raised for a %s; see %s", seen, Remedy.OBSERVER, exc_info=True)

    # The end, of all or of what it holds.

    def _reset(self) -> bool:
        clean = not self.ledger.traffic.in_flight
        self.ledger.reset()
        for request in list(self._requests.values()):
            request.storing = 0
            self._forget(request)
        return clean

    def _begin_end(self) -> None:
        self._receive()
        self.ledger.end(runner_returns=self._bridge.returns)

    def _end_drained(self) -> None:
        """Count and log what was lost, and dirty rows that were not written."""
        if chunks := self.ledger.writeback.give_up(CLOSED):
            logger.warning(
                "%s chunks were not written to tiers with cascade = 'evict' by the end's deadline: a larger close_s, "
                "or a faster tier, may keep more; see %s",
                f"{chunks:,}",
                Remedy.UNWRITTEN,
            )
        self._tier_log.look(self._clock(), last=True)

    def _free(self) -> None:
        """Apply the last messages and free the rows' memory; lent rows keep it until they are released."""
        self._closed = True
        self._receive()
        self.ledger.apply(RunnerLost(self.ledger.traffic.epoch, "it was closed"))
        self._requests.clear()
        self._kept.clear()  # Their readers keep the memory.
        self.region.close()

    def _deadline(self, deadline_s: float | None) -> float:
        return self.config.limits.close_s if deadline_s is None else deadline_s

    def _check_owner(self) -> None:
        if self._forked:
            raise EngineClosed(
                f"this kvtier engine is of process {self._owner_pid}, and this process is a fork of it: start one here"
            )

    def _check_open(self) -> None:
        if self._closed:
            self._check_owner()
            raise EngineClosed("this kvtier engine was closed")


def _check(name: str, given: object, kind: type, valid: Callable[[Any], bool], accepted: str) -> None:
    if not isinstance(given, kind) or not valid(given):
        error = ValueError if isinstance(given, kind) else TypeError
        raise error(f"{name}: {shown(given)} given, {accepted} accepted")


def checked(config: EngineConfig) -> EngineConfig:
    """Raise every `ConfigError` that can be known before anything is allocated; make paths absolute."""
    require_policy(config.eviction_policy)
    require_descriptors()
    return settled(config)


def make_region(config: EngineConfig) -> Region:
    make: Callable[[int, int], Region] = Region.memfd if config.runner == "process" else Region.private
    return make(config.rows, config.row_bytes)


def say_start(config: EngineConfig, bridge: Bridge, primary: str) -> None:
    """Log the start; tiers log their own findings. `primary`: the owner of the rows, or their policy."""
    logger.info(
        "kvtier %s: %s rows of %s bytes (%s); tiers: %s; %s runner, process %s",
        __version__,
        f"{config.rows:,}",
        f"{config.row_bytes:,}",
        primary,
        ", ".join(tier.name for tier in config.secondary_tiers) or "none",
        bridge.kind,
        bridge.pid,
    )
