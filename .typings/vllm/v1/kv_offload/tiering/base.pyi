from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

@dataclass
class TransferJob:
    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: npt.NDArray[np.int32]
    is_promotion: bool
    req_context: ReqContext

@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None

class SecondaryTierManager(ABC):
    medium: Medium | None  # vLLM's own tiers set these once a class; they are read from instances.
    cache_hit_source: CacheHitSource
    tier_type: str
    locality: Locality | None

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None: ...
    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult: ...
    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None: ...
    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]: ...
    def has_pending_work(self) -> bool: ...
    def take_events(self) -> Iterable[OffloadingEvent]: ...
    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...
    def on_request_finished(self, req_context: ReqContext) -> None: ...
    def on_schedule_end(self, context: ScheduleEndContext) -> None: ...
    @abstractmethod
    def drain_jobs(self) -> None: ...
    def shutdown(self) -> None: ...
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]: ...
    def get_stats(self) -> OffloadingConnectorStats | None: ...
