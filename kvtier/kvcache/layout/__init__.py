"""KV-cache layouts: what layers keep, where it lies, and the canonical pages that everything else moves.

`model` describes layers and groups. `axes` has the places of their bytes in a tensor, by names or by strides alone.
`canonical` allocates caches, and finds the pages in them.
"""

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
