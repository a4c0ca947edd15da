"""KV-cache layouts: what layers keep, where it lies, and the canonical pages that everything else moves.

`model` describes layers and groups. `axes` and `blocks` say where a tensor has their bytes, by names or by strides
alone. `allocation` makes the tensors. `canonical` finds the pages in them, and `mapping` each worker's part of a page.
"""

from kvtier.kvcache.layout.allocation import RowCaches, allocate_rows, allocate_tensors, packing_refusal
from kvtier.kvcache.layout.axes import AxesOf, CacheAxes, cache_view, layer_views, state_views
from kvtier.kvcache.layout.canonical import CanonicalKVCaches, DataRef, LayerCache, canonical_kv_caches, with_layout
from kvtier.kvcache.layout.mapping import PageMapping, PageRun, page_mapping
from kvtier.kvcache.layout.model import (
    AttentionSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    LayerSpec,
    MambaSpec,
    MLASpec,
    ParallelConfig,
    SlidingWindowSpec,
    UniformSpecs,
    group_layers,
    padded_to_one_page,
)

__all__ = [
    "AttentionSpec",
    "AxesOf",
    "CacheAxes",
    "CanonicalKVCaches",
    "ChunkedLocalSpec",
    "DataRef",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroup",
    "KVCacheTensor",
    "LayerCache",
    "LayerSpec",
    "MLASpec",
    "MambaSpec",
    "PageMapping",
    "PageRun",
    "ParallelConfig",
    "RowCaches",
    "SlidingWindowSpec",
    "UniformSpecs",
    "allocate_rows",
    "allocate_tensors",
    "cache_view",
    "canonical_kv_caches",
    "group_layers",
    "layer_views",
    "packing_refusal",
    "padded_to_one_page",
    "page_mapping",
    "state_views",
    "with_layout",
]
