"""A model's caches, as they describe themselves to `kvtier.backend.namespace`: it alone decides who shares names.

Only facts are computed here. The decision has one owner, `namespace.refusal`, so that an engine that names chunks from
specs and one that names them from its own verdicts cannot come to different answers.
"""

from typing import Any

import msgspec

from kvtier.backend import Attention, Group, Namespace, refusal
from kvtier.kvcache.layout.canonical import CanonicalKVCaches
from kvtier.kvcache.layout.model import KVCacheConfig, KVCacheGroup, ParallelConfig
from kvtier.kvcache.layout.specs import AttentionSpec, LayerSpec, MLASpec


def with_layout(
    namespace: Namespace,
    config: KVCacheConfig,
    parallel: ParallelConfig,
    *,
    total_kv_heads: int,
    canonical: CanonicalKVCaches | None = None,
) -> Namespace:
    """Return the namespace with all that specs, parallel sizes and, where rows hold them, canonical pages say of it.

    What they cannot say stays as it is: the model's name, the layout's, which runner the engine has.
    """
    specs = [spec for group in config.groups for spec in group.specs]
    heads = {spec.num_kv_heads if isinstance(spec, AttentionSpec) else None for spec in specs}
    facts: dict[str, Any] = {
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
        "rank": parallel.rank,
        "kv_cache_groups": tuple(_group(group, parallel) for group in config.groups),
        "kv_heads_per_rank": heads.pop() if len(heads) == 1 else None,
        "total_kv_heads": total_kv_heads,
        "per_token_head_scales": any(getattr(spec, "per_token_head_scales", False) for spec in specs),
        "certified": canonical is not None and canonical.topology_free,
    }
    return msgspec.structs.replace(namespace, **facts)


def parallel_refusal(
    namespace: Namespace,
    config: KVCacheConfig,
    parallel: ParallelConfig,
    *,
    total_kv_heads: int,
    canonical: CanonicalKVCaches | None = None,
) -> str:
    """Say why chunks of these caches depend on the parallel sizes; empty if they do not. See `namespace.refusal`."""
    return refusal(with_layout(namespace, config, parallel, total_kv_heads=total_kv_heads, canonical=canonical))


def attention_of(group: KVCacheGroup) -> Attention:
    """Return a group's attention; "other" for layers of one type whose pages differ, except where all are latent."""
    specs: list[LayerSpec] = list(group.specs)
    if all(isinstance(spec, MLASpec) for spec in specs):
        return "mla"
    return specs[0].attention if len(set(specs)) == 1 else "other"


def _group(group: KVCacheGroup, parallel: ParallelConfig) -> Group:
    """Return a group as names have it: context parallelism makes its blocks stand for more tokens."""
    return Group(
        tokens_per_block=group.block_size * parallel.dcp_size * parallel.pcp_size,
        layer_names=group.layer_names,
        attention=attention_of(group),
    )
