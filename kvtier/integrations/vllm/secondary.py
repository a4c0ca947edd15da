"""The second door: any kvtier tier behind vLLM's own TieringOffloadingManager.

    {"type": "kvtier", "backend": "fs", "root": "/var/kv"}

vLLM keeps its manager and its primary; the tier's I/O runs in a process of its own, which maps vLLM's rows. The tier is
the engine's own `Traffic`, over rows that vLLM picks and pins. vLLM has no quarantine for rows that come back late, so
a job ends only when nothing uses its rows any more: a runner that has not released rows in time is replaced.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.base import OffloadKey as VllmKey
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.backend import OffloadKey
from kvtier.config import EVENTS_MAX, EngineConfig, settled
from kvtier.engine.answers import EventLog
from kvtier.engine.ledger import ledger_of
from kvtier.engine.metrics import RUNNER_METRICS, TIER_METRICS, TierLog, series
from kvtier.engine.requests import PROMOTIONS_MAX, Leases, Request, Search, by_position
from kvtier.engine.steps import say_start
from kvtier.engine.tier import LedgerLimits, Tier
from kvtier.engine.traffic import Operation, Traffic
from kvtier.errors import ConfigError
from kvtier.integrations.signatures import warn_if_untried
from kvtier.integrations.vllm.manager import hint_in
from kvtier.integrations.vllm.rows import namespace_of, places_of, plan_rows, require_rows_of_all, rows_fd
from kvtier.integrations.vllm.signatures import VLLM
from kvtier.integrations.vllm.stats import (
    INFO_KEYS,
    Media,
    Stats,
    config_info,
    log_as_vllm,
    offloading_events,
    tier_metric_definitions,
    unregister_earlier,
)
from kvtier.integrations.vllm_options import SecondaryOptions, read_secondary_options, secondary_config
from kvtier.memory import Region, let_go_in_forks
from kvtier.runner import messages
from kvtier.runner.bridge import Bridge, ThreadBridge
from kvtier.runner.process import ProcessBridge
from kvtier.settings.hints import RETAIN_S_MAX, Advice, IgnoredHints, hint_of

Chunk = tuple[OffloadKey, int]  # A key and its row.


@dataclass(eq=False)
class _Job:
    """A job of vLLM's manager, sent to the tier in parts."""

    id: int
    operation: Operation
    request: Request
    wanted: int  # Chunks that must move for it to succeed.
    begun: float
    moved: list[OffloadKey] = field(default_factory=list[OffloadKey])
    parts: int = 0  # Parts whose rows are in use.


class KVTierSecondaryTier(SecondaryTierManager):
    """One kvtier tier. Calls come from one thread at a time; only `drain_jobs` and `shutdown` wait."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **given: Any,
    ) -> None:
        """`given` is the tier's configuration without vLLM's own fields. Raises `ConfigError`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_as_vllm()
        warn_if_untried(VLLM)
        options = read_secondary_options(given)
        self._config = config = _engine_config(offloading_spec, primary_kv_view, options)
        require_rows_of_all(offloading_spec)
        self._bridge, self._region = _start(offloading_spec, primary_kv_view, config)
        let_go_in_forks(self._bridge)  # In a forked child every call fails.
        say_start(config, self._bridge, "vLLM's")
        self._stats = Stats()
        self.tier = tier = Tier(0, ledger_of(config, None, self._stats.observe).tiers[0].spec)
        self.runner_up = True
        self.runners_lost = 0
        self.hints_ignored = IgnoredHints()
        self._stats.watch([*series(RUNNER_METRICS, self), *series(TIER_METRICS, tier, tier.spec.name)])
        events = offloading_spec.kv_events_config.enable_kv_cache_events and options.enable_kv_events
        self.events = EventLog(EVENTS_MAX if events else 0)
        rows, limits = _VllmsRows(), LedgerLimits(0, 0, 0.0, config.limits.action_chunks)
        self._traffic = Traffic(rows, Leases(rows, 0, 0.0), [tier], limits, self.events, self._stats.observe)
        self._where = self._traffic.locations
        self._tier_log = TierLog([tier])
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, _Job] = {}  # By the ids of parts whose rows are in use.
        self._begun: list[messages.Action] = []  # Parts to be sent at the step's end.
        self._over: list[JobResult] = []  # Not yet reported to vLLM.
        self._media = Media([tier])
        # vLLM's own tiers set both once a class, and vLLM reads them from instances.
        self.medium = self._media.medium(tier.spec)  # pyright: ignore[reportAttributeAccessIssue]
        self.cache_hit_source = self._media.source(tier.spec)  # pyright: ignore[reportAttributeAccessIssue]
        self.locality = self._media.locality(tier.spec)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        unregister_earlier()
        return tier_metric_definitions()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:  # vLLM 0.33's.
        """Return the labels of `config_info`; vLLM adds the tier's own."""
        return tuple(key for key in INFO_KEYS if key != "tier")

    def config_info(self) -> dict[str, str | int]:  # vLLM 0.33's.
        """Return this tier's constant labels."""
        _, facts = config_info(self._config)
        return {key: value for key, value in facts.items() if key != "tier"}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id not in self._requests:
            request = Request(req_context.req_id, position=req_context.get_offload_key_position)
            request.hint = hint_of(hint_in(req_context), self.hints_ignored)
            self._requests[request.id] = request
        return RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request; the tier learns the order in which it used its chunks, once all its stores have ended."""
        if (request := self._requests.pop(req_context.req_id, None)) is not None:
            request.finished = True
            request.order_used()
            self._rank(request)

    def lookup(self, key: VllmKey, req_context: ReqContext) -> LookupResult:
        return self._look_up(key, self._request(req_context).search)

    def submit_load(self, job_metadata: TransferJob) -> None:
        request, chunks = self._unpacked(job_metadata)
        promotions = request.search.promotions
        for key, _ in chunks:
            promotions[key] = promotions.get(key, 0) + 1
        self.tier.loading += len(chunks)
        self.tier.counters.promoted += len(chunks)
        self._begin(_Job(job_metadata.job_id, Operation.PROMOTION, request, len(chunks), time.monotonic()), chunks)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store these rows, except chunks that the tier has or is storing, and those above a limit."""
        now = self._receive()
        request, offered = self._unpacked(job_metadata)
        mask, storing = self._where.mask, self.tier.storing
        lacking = [(key, row) for key, row in offered if key not in storing and not mask.get(key, 0)]
        if request.keeps_out(self.tier.spec):
            self.tier.counters.skipped["no_store"] += len(lacking)
            lacking = []
        chunks = [(key, row) for key, row in lacking if self._take(key, now)]
        request.storing += 1
        self._begin(_Job(job_metadata.job_id, Operation.CASCADE, request, len(lacking), now), chunks)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._receive()
        over, self._over = self._over, []
        return over

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._flush()

    def has_pending_work(self) -> bool:
        return bool(self._jobs or self._over or self._traffic.in_flight or self.tier.to_ask)

    def take_events(self) -> Iterable[OffloadingEvent]:
        self._receive()
        return offloading_events(self.events.take(), self._media)

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.take()

    def drain_jobs(self) -> None:
        """Block until every job has ended and its rows are unused; a runner that keeps them too long is killed."""
        self._flush()
        while self._jobs:
            self._bridge.wait(1.0)
            self._receive()

    def shutdown(self) -> None:
        self._receive()
        self._tier_log.look(time.monotonic(), last=True)
        self._bridge.close(self._config.limits.close_s)
        self._region.close()

    def _request(self, req_context: ReqContext) -> Request:
        """Return the request; an unknown or finished one is treated as new."""
        return self._requests.get(req_context.req_id) or Request(req_context.req_id)

    def _unpacked(self, job: TransferJob) -> tuple[Request, list[Chunk]]:
        """Return a job's request, and its chunks in prefix order: vLLM's are in any."""
        rows = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
        keys = by_position(list(rows), job.req_context.get_offload_key_position)
        request = self._request(job.req_context)
        request.used.update(dict.fromkeys(keys))
        return request, [(key, rows[key]) for key in keys]

    def _flush(self) -> None:
        begun, self._begun = self._begun, []
        if actions := [*self._traffic.flush(), *begun]:
            self._refuse(self._bridge.send(actions), time.monotonic())

    def _look_up(self, key: OffloadKey, search: Search) -> LookupResult:
        now = self._receive()
        if not self.runner_up or not self.tier.admits(now) or search.promotions.get(key, 0) >= PROMOTIONS_MAX:
            return LookupResult.MISS
        if (answer := self.tier.answer(key, bool(self._where.mask.get(key, 0)), now)) is None:
            answer = self._ask(key, search)
        if answer is None:
            return LookupResult.RETRY
        if answer:
            self.tier.breaker.take()
            return LookupResult.HIT
        if key not in search.missed:
            search.missed.add(key)
            self.tier.counters.misses += 1
        return LookupResult.MISS

    def _ask(self, key: OffloadKey, search: Search) -> bool | None:
        """Queue a probe, one a request: with answers older than a step it would otherwise wait for ever."""
        tier = self.tier
        if (tier.index, key) in search.asked and key not in tier.asking:
            return key in tier.answered
        if not tier.may_ask(key):
            tier.counters.dropped["asking"] += 1
            return False
        tier.ask(key)
        search.asked.add((tier.index, key))
        return None

    def _take(self, key: OffloadKey, now: float) -> bool:
        """Return True if one more chunk may be stored, and count it: as being stored, or as dropped."""
        tier = self.tier
        if reason := self._refusal(now):
            tier.counters.dropped[reason] += 1
            return False
        tier.storing.add(key)
        tier.breaker.take()
        return True

    def _refusal(self, now: float) -> str:
        """Return the limit that a store of one more chunk would exceed; empty if none."""
        tier = self.tier
        if not self.runner_up:
            return "runner"
        if len(tier.storing) >= tier.spec.store_chunks_max:
            return "budget"
        if tier.admits(now):
            return ""
        return "overdue" if tier.hangs else "breaker"

    def _begin(self, job: _Job, chunks: Sequence[Chunk]) -> None:
        """Queue a job's parts; a job without any ends at once."""
        action = messages.Promote if job.operation is Operation.PROMOTION else messages.Cascade
        action_chunks = self._config.limits.action_chunks
        for start in range(0, len(chunks), action_chunks):
            keys, rows = zip(*chunks[start : start + action_chunks], strict=True)
            id_ = self._traffic.send(job.operation, self.tier, keys, rows, job.request)
            if job.operation is Operation.CASCADE:
                self._traffic.pin_cascade(rows)
            self._jobs[id_] = job
            job.parts += 1
            self._begun.append(action(id_, self.tier.index, messages.pack_keys(keys), messages.pack_rows(rows)))
        if not chunks:
            self._end(job)

    def _rank(self, request: Request) -> None:
        """Advise the tier of a finished request, once its stores have ended, and of its hint."""
        if not request.finished or request.storing:
            return
        hint = request.hint
        self._traffic.end(list(request.used), self.tier, hint)
        if hint is not None and hint.retain_s:
            keys = request.leading(hint.tokens, self._config.tokens_per_chunk)
            retained_s = min(hint.retain_s, RETAIN_S_MAX)
            self._traffic.advise(self.tier, Advice("retain", keys, seconds=retained_s, priority=hint.priority))

    def _receive(self) -> float:
        """Apply everything in the mailbox and return the time."""
        now = time.monotonic()
        mailbox = self._bridge.mailbox
        if mailbox or now >= self._tier_log.due:
            while mailbox:
                self._apply(mailbox.popleft(), now)
            self._tier_log.look(now)
        return now

    def _apply(self, message: messages.Message | messages.LocalMessage, now: float) -> None:
        match message:
            case messages.Finished():
                self._credit(message)
                self._traffic.apply(message, now)
                if message.id in self._traffic.overdue:
                    self._bridge.replace()  # The runner serves this tier alone.
                self._let_go((message.id,))
            case messages.Returned():
                self._traffic.apply(message, now)
                self._let_go((message.id,))
            case messages.RunnerLost():
                self.runner_up = False
                self.runners_lost += 1
                self._refuse_begun(now)
                self._traffic.lose(now)
            case messages.RunnerGone():
                self._let_go(self._traffic.gone(message.epoch))
            case messages.RunnerBack():
                self._refuse_begun(now)
                self.runner_up, self._traffic.epoch = True, message.epoch
                self._bridge.admit(message.epoch)
            case _:
                self._traffic.apply(message, now)

    def _refuse_begun(self, now: float) -> None:
        """Settle unsent parts: vLLM reuses the rows of ended jobs, so the next runner must not get them."""
        begun, self._begun = self._begun, []
        self._refuse(begun, now)

    def _refuse(self, actions: Sequence[messages.Action], now: float) -> None:
        self._traffic.refuse(actions, now)
        self._let_go(action.id for action in actions if not isinstance(action, messages.Acknowledge | messages.Advise))

    def _credit(self, message: messages.Finished) -> None:
        job, transfer = self._jobs.get(message.id), self._traffic.in_flight.get(message.id)
        if job is not None and transfer is not None:
            failed = message.failures()
            job.moved += [key for index, key in enumerate(transfer.keys) if index not in failed]

    def _let_go(self, ids: Iterable[int]) -> None:
        """Take parts whose rows are unused from their jobs; the last one ends its job."""
        for id_ in ids:
            if id_ in self._traffic.overdue:
                continue
            if (job := self._jobs.pop(id_, None)) is not None:
                job.parts -= 1
                if not job.parts:
                    self._end(job)

    def _end(self, job: _Job) -> None:
        whole, moved = len(job.moved) == job.wanted, len(job.moved)
        self._over.append(
            JobResult(
                job.id,
                whole,
                successful_keys=None if whole or not moved else tuple(job.moved),
                transfer_time=time.monotonic() - job.begun if moved else 0.0,
                transfer_bytes=moved * self._config.row_bytes,
            )
        )
        if job.operation is Operation.CASCADE:
            job.request.storing -= 1
            self._rank(job.request)


class _VllmsRows:
    """A primary without state: rows are vLLM's, which pins them until their job ends."""

    ready: Mapping[OffloadKey, int] = {}
    filling: Mapping[OffloadKey, int] = {}

    def own(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return keys

    def pin(self, rows: Iterable[int]) -> None: ...
    def unpin(self, rows: Iterable[int]) -> None: ...
    def release(self, row: int) -> None: ...

    def publish(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        return []  # vLLM announces its own primary's chunks.

    def abandon(self, key: OffloadKey, *, lent: bool) -> None: ...


def _engine_config(spec: OffloadingSpec, rows: memoryview, options: SecondaryOptions) -> EngineConfig:
    interop = options.interop is not None
    plan = plan_rows(spec.config, spec.config.canonical_layout, interop=interop)
    namespace = namespace_of(spec.config, plan, revision=options.revision, interop=interop)
    count, row_bytes = rows.shape or (0, 0)
    return secondary_config(options, namespace, places_of(spec.config), rows=count, row_bytes=row_bytes)


def _start(spec: OffloadingSpec, rows: memoryview, config: EngineConfig) -> tuple[Bridge, Region]:
    """Start the runner: in a process if it can map vLLM's rows, else in a thread; `ConfigError` if that will not do."""
    fd = rows_fd(spec)
    mapped = fd is not None and os.fstat(fd).st_size == rows.nbytes  # vLLM 0.33 has several files from 1 GiB on.
    if fd is not None and mapped:
        region = Region.attach(fd, config.rows, config.row_bytes)
    else:
        _check_thread(config)
        region = Region.over(rows, config.rows, config.row_bytes)
    try:
        return (ProcessBridge if mapped else ThreadBridge)(config, region), region
    except BaseException:
        region.close()
        raise


def _check_thread(config: EngineConfig) -> None:
    try:
        settled(replace(config, runner="inline"))
    except ConfigError as error:
        raise ConfigError(
            f"secondary_tiers[].backend: {config.secondary_tiers[0].type!r} given, which needs a separate process: "
            "vLLM's rows are not in one file here, which another process could map; use kvtier's own connector"
        ) from error
