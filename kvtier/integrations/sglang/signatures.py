"""The names and parameters of SGLang that kvtier uses. SGLang's releases change its storage interface."""

from sglang.version import __version__

from kvtier.integrations.signatures import Used

TRIED_VERSIONS = ("0.5.22", "0.5.23")

_STORAGE, _POOLS = "srt.mem_cache.hicache_storage", "srt.mem_cache.pool_host"

GIVEN = {
    f"{_STORAGE}:PoolTransferResult": "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages",
    f"{_STORAGE}:PoolTransferResult.empty": "",
    "srt.observability.metrics_collector:StorageMetrics": "prefetch_pgs backup_pgs prefetch_bandwidth backup_bandwidth",
    f"{_POOLS}.mha:MHATokenToKVPoolHost.get_page_buffer_meta": "self indices",
    f"{_POOLS}.mla:MLATokenToKVPoolHost.get_page_buffer_meta": "self indices",
    f"{_POOLS}.base:HostKVCache.get_data_page": "self index flat",
    f"{_POOLS}.base:HostKVCache.get_dummy_flat_data_page": "self",
    f"{_POOLS}.base:HostKVCache.set_from_flat_data_page": "self index data_page",
}

READ = {
    f"{_STORAGE}:HiCacheStorageConfig": "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model"
    " enable_storage_metrics model_name tp_lcm_size should_split_heads dp_rank extra_config",
    f"{_STORAGE}:PoolTransfer": "name host_indices keys hit_policy",
}

SGLANG = Used("SGLang", __version__, TRIED_VERSIONS, GIVEN, READ, may_lack=("close",))  # Called where it is there.
