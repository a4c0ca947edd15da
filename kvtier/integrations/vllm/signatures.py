"""The names and parameters of vLLM that kvtier uses. vLLM's releases change its offloading interface."""

from vllm import __version__

from kvtier.integrations.signatures import Used

TRIED_VERSIONS = ("0.32", "0.33")

_BASE, _TIERING = "v1.kv_offload.base", "v1.kv_offload.tiering.base"
_CONNECTOR = "distributed.kv_transfer.kv_connector.v1"
_STATS = f"{_CONNECTOR}.offloading.metrics:OffloadingConnectorStats"

GIVEN = {
    f"{_CONNECTOR}.offloading_connector:OffloadingConnector": "vllm_config role kv_cache_config",
    f"{_CONNECTOR}.offloading.canonical_mapping:canonical_format_id": "kv_cache_layout",
    f"{_STATS}.increase_counter": "self counter_name counter_increase_value labelvalues",
    f"{_STATS}.set_gauge": "self gauge_name gauge_value labelvalues",
    f"{_STATS}.observe_histogram": "self histogram_name histogram_value labelvalues",
    f"{_STATS}.is_empty": "self",
    f"{_BASE}:OffloadingSpec": "config",
    f"{_BASE}:PrepareStoreOutput": "keys_to_store store_spec evicted_keys",
    f"{_BASE}:OffloadingEvent": "keys medium removed locality ownership removal_expected",
    f"{_BASE}:TransferResult": "job_id success transfer_size transfer_time",
    f"{_BASE}:ReqContext.get_offload_key_position": "self key",
    f"{_BASE}:OffloadingCounterMetadata": "documentation labelnames",
    f"{_BASE}:OffloadingGaugeMetadata": "documentation labelnames",
    f"{_BASE}:OffloadingHistogramMetadata": "documentation labelnames buckets",
    f"{_TIERING}:SecondaryTierManager": "offloading_spec primary_kv_view tier_type backpressure_detector",
    f"{_TIERING}:JobResult": "job_id success successful_keys transfer_time transfer_bytes",
    "v1.kv_offload.cpu.common:CPULoadStoreSpec": "block_ids",
}

READ = {
    f"{_BASE}:ReqContext": "req_id kv_transfer_params load_tier_filter",
    f"{_BASE}:TierFilter": "matchers",
    f"{_BASE}:CanonicalKVCaches": "tensors group_data_refs",
    f"{_BASE}:GPULoadStoreSpec": "block_ids group_sizes block_indices",
    f"{_BASE}:BlockIDsLoadStoreSpec": "block_ids",
    f"{_TIERING}:TransferJob": "job_id keys chunk_ids req_context",
    "v1.kv_offload.config:OffloadingConfig": "groups worker_kv_bytes_per_block extra_config engine_id model cache"
    " parallel replicated_layout canonical_layout kv_cache_layout",
    "v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens"
    " scheduled_spec_decode_tokens scheduled_encoder_inputs has_sync_kv_loads",
}

VLLM = Used(
    "vLLM",
    __version__,
    TRIED_VERSIONS,
    GIVEN,
    READ,
    may_lack=("config_info", "config_info_keys", "on_reset_flushed"),  # As 0.32 does.
)
