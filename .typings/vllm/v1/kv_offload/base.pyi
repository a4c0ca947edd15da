from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.backend.keys import OffloadKey as OffloadKey  # Both are bytes, made alike.

class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"

class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"

class TierMatcher(NamedTuple):
    medium: Medium | None = None
    locality: Locality | None = None

@dataclass(frozen=True)
class TierFilter:
    matchers: tuple[TierMatcher, ...] = ()
    ALL: ClassVar[TierFilter]

@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = ...
    load_tier_filter: TierFilter = ...

    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None: ...
    def get_offload_key_position(self, key: OffloadKey) -> int | None: ...

class LookupResult(Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4

class OffloadPolicy(Enum):
    CHUNK_LEVEL = "chunk_level"
    REQUEST_LEVEL = "request_level"

@dataclass
class RequestOffloadingContext:
    policy: OffloadPolicy = ...

class ScheduleEndContext(NamedTuple):
    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]

class LoadStoreSpec: ...

@dataclass
class PrepareStoreOutput:
    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]

@dataclass
class OffloadingEvent:
    keys: list[OffloadKey]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False  # vLLM 0.33's.

@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()

@dataclass(frozen=True)
class OffloadingCounterMetadata(OffloadingMetricMetadata): ...

@dataclass(frozen=True)
class OffloadingGaugeMetadata(OffloadingMetricMetadata): ...

@dataclass(frozen=True)
class OffloadingHistogramMetadata(OffloadingMetricMetadata):
    buckets: tuple[float, ...] | None = None

@dataclass(frozen=True)
class OffloadingKVEventsConfig:
    enable_kv_cache_events: bool
    self_describing_kv_events: bool

class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult: ...
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource: ...
    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec: ...
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None: ...
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None: ...
    @abstractmethod
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None: ...
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None: ...
    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...
    def on_request_finished(self, req_context: ReqContext) -> None: ...
    def take_events(self) -> Iterable[OffloadingEvent]: ...
    def on_schedule_end(self, context: ScheduleEndContext) -> None: ...
    def has_pending_work(self) -> bool: ...
    def reset_cache(self) -> None: ...
    def get_stats(self) -> OffloadingConnectorStats | None: ...
    def shutdown(self) -> None: ...

class BlockIDsLoadStoreSpec(LoadStoreSpec, ABC):
    block_ids: npt.NDArray[np.int32]

    def __init__(self, block_ids: list[int]) -> None: ...

class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    group_sizes: Sequence[int]
    block_indices: Sequence[int]

    def __init__(self, block_ids: list[int], group_sizes: Sequence[int], block_indices: Sequence[int]) -> None: ...

@dataclass
class CanonicalKVCacheTensor:
    tensor: torch.Tensor
    page_size_bytes: int

@dataclass(frozen=True)
class CopyRun:
    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int

@dataclass(frozen=True)
class CanonicalPageMapping:
    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[CopyRun, ...]
    num_writers: int
    writer_index: int
    parallelism_agnostic: bool

@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    page_size_bytes: int
    mapping: CanonicalPageMapping | None = None

@dataclass
class CanonicalKVCaches:
    tensors: list[CanonicalKVCacheTensor]
    group_data_refs: list[list[CanonicalKVCacheRef]]

@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None

class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool: ...
    @abstractmethod
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool: ...
    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...
    @abstractmethod
    def wait(self, job_ids: set[int]) -> None: ...
    def shutdown(self) -> None: ...

class OffloadingSpec(ABC):
    config: OffloadingConfig
    replicated_layout: bool
    kv_events_config: OffloadingKVEventsConfig
    blocks_per_chunk: int

    def __init__(self, config: OffloadingConfig) -> None: ...
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]: ...
    @abstractmethod
    def get_manager(self) -> OffloadingManager: ...
    @abstractmethod
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker: ...
