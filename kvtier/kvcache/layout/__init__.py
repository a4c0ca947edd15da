"""KV-cache layouts: layers and groups (`model`), places of their bytes (`axes`), pages that move (`canonical`)."""

from kvtier.kvcache.layout.axes import AxesOf, CacheAxes, cache_view, state_views
from kvtier.kvcache.layout.canonical import (
    CanonicalKVCaches,
    DataRef,
    LayerCache,
    PageMapping,
    PageRun,
    RowCaches,
    allocate_rows,
    allocate_tensors,
    canonical_kv_caches,
)
from kvtier.kvcache.layout.model import AttentionSpec, KVCacheConfig, KVCacheGroup, LayerSpec, MambaSpec

__all__ = [
    "AttentionSpec",
    "AxesOf",
    "CacheAxes",
    "CanonicalKVCaches",
    "DataRef",
    "KVCacheConfig",
    "KVCacheGroup",
    "LayerCache",
    "LayerSpec",
    "MambaSpec",
    "PageMapping",
    "PageRun",
    "RowCaches",
    "allocate_rows",
    "allocate_tensors",
    "cache_view",
    "canonical_kv_caches",
    "state_views",
]
