"""The second door: any kvtier tier behind vLLM's own TieringOffloadingManager.

    {"type": "KVTierSecondaryTier", "module_path": "kvtier.integrations.vllm", "backend": "fs", "root": "/var/kv"}

vLLM keeps its manager and its primary; the tier's I/O runs in a process of its own, which maps vLLM's rows.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtier.config import EVENTS_MAX, EngineConfig, settled
from kvtier.engine.answers import EventLog
from kvtier.engine.ledger import ledger_of
from kvtier.engine.requests import by_position
from kvtier.engine.steps import say_start
from kvtier.errors import ConfigError
from kvtier.integrations.vllm.events import INFO_KEYS, Media, config_info, offloading_events
from kvtier.integrations.vllm.hosts import require_rows_of_all, rows_fd
from kvtier.integrations.vllm.manager import hint_in
from kvtier.integrations.vllm.rows import namespace_of, places_of, plan_rows
from kvtier.integrations.vllm.second_door import TierClient
from kvtier.integrations.vllm.stats import (
    ObservedTimes,
    Stats,
    Summary,
    client_series,
    log_as_vllm,
    tier_metric_definitions,
    unregister_earlier,
)
from kvtier.integrations.vllm_options import SecondaryOptions, read_secondary_options, secondary_config
from kvtier.memory import Region
from kvtier.runner.bridge import Bridge, ThreadBridge
from kvtier.runner.process import ProcessBridge


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
        options = read_secondary_options(given)
        config = _engine_config(offloading_spec, primary_kv_view, options)
        require_rows_of_all(offloading_spec)
        bridge, self._region = _start(offloading_spec, primary_kv_view, config)
        events = offloading_spec.kv_events_config.enable_kv_cache_events and options.enable_kv_events
        self._config = config
        say_start(config, bridge, "vLLM's")
        times = ObservedTimes()
        self._client = TierClient(
            bridge,
            ledger_of(config, None, times.observe).tiers[0].spec,
            action_chunks=config.limits.action_chunks,
            observe=times.observe,
            events=EventLog(EVENTS_MAX) if events else None,
            chunk_tokens=config.tokens_per_chunk,
        )
        tier = self._client.tier
        self._media = Media([tier])
        # vLLM's own tiers set both once a class, and vLLM reads them from instances.
        self.medium = self._media.medium(tier.spec)  # pyright: ignore[reportAttributeAccessIssue]
        self.cache_hit_source = self._media.source(tier.spec)  # pyright: ignore[reportAttributeAccessIssue]
        self.locality = self._media.locality(tier.spec)
        self._stats = Stats(client_series(self._client), times)
        self._summary = Summary([tier])

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
        self._client.begin(req_context.req_id, req_context.get_offload_key_position, hint_in(req_context))
        return RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._client.finish(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        answer = self._client.has(key, req_context.req_id)
        if answer is None:
            return LookupResult.RETRY
        return LookupResult.HIT if answer else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._client.store(*_unpacked(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._client.load(*_unpacked(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for done in self._client.finished():
            yield JobResult(
                done.job_id,
                done.whole,
                successful_keys=None if done.whole or not done.moved else tuple(done.moved),
                transfer_time=done.seconds,
                transfer_bytes=len(done.moved) * self._config.row_bytes,
            )

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._client.flush()

    def has_pending_work(self) -> bool:
        return self._client.pending

    def take_events(self) -> Iterable[OffloadingEvent]:
        return offloading_events(self._client.take_events(), self._media)

    def get_stats(self) -> OffloadingConnectorStats | None:
        self._summary.look()
        return self._stats.take()

    def drain_jobs(self) -> None:
        self._client.drain()

    def shutdown(self) -> None:
        self._client.close(self._config.limits.close_s)
        self._region.close()


def _engine_config(spec: OffloadingSpec, rows: memoryview, options: SecondaryOptions) -> EngineConfig:
    """Return the configuration of a runner with this one tier over vLLM's rows."""
    interop = options.interop is not None
    plan = plan_rows(spec.config, spec.config.canonical_layout, interop=interop)
    namespace = namespace_of(spec.config, plan, revision=options.revision, interop=interop)
    count, row_bytes = rows.shape or (0, 0)
    return secondary_config(options, namespace, places_of(spec.config), rows=count, row_bytes=row_bytes)


def _start(spec: OffloadingSpec, rows: memoryview, config: EngineConfig) -> tuple[Bridge, Region]:
    """Start the runner: in a process if it can map vLLM's rows, else in a thread of this one.

    Raises `ConfigError` if the thread will not do for the tier.
    """
    fd = _rows_fd(spec, rows.nbytes)
    if fd is None:
        _check_thread(config)
        region = Region.over(rows, config.rows, config.row_bytes)
    else:
        region = Region.attach(fd, config.rows, config.row_bytes)
    try:
        return (ThreadBridge if fd is None else ProcessBridge)(config, region), region
    except BaseException:
        region.close()
        raise


def _check_thread(config: EngineConfig) -> None:
    try:
        settled(replace(config, runner="inline"))
    except ConfigError as error:
        raise ConfigError(
            f"secondary_tiers[].backend: {config.secondary_tiers[0].type!r} given, which needs a process of its own: "
            "vLLM's rows are not in one file here, which another process could map; use kvtier's own connector"
        ) from error


def _rows_fd(spec: OffloadingSpec, size_bytes: int) -> int | None:
    """Return the descriptor of vLLM's rows; None if they are not in one file (as vLLM 0.33 has them from 1 GiB on)."""
    fd = rows_fd(spec)
    return fd if fd is not None and os.fstat(fd).st_size == size_bytes else None


def _unpacked(job: TransferJob) -> tuple[int, Sequence[OffloadKey], list[int], str]:
    """Return a job's id, keys and rows in prefix order, and its request: vLLM's keys are in any order."""
    rows = dict(zip(job.keys, job.chunk_ids.tolist(), strict=True))
    keys = by_position(list(rows), job.req_context.get_offload_key_position)
    return job.job_id, keys, [rows[key] for key in keys], job.req_context.req_id
