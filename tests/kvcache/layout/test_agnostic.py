"""Facts from specs reach the one gate: what the namespace decides, it decides for caches, too."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvtier.backend.namespace import HEADS_OUTERMOST, FileMapper, Group, Namespace, refusal
from kvtier.kvcache.layout import (
    FullAttentionSpec,
    KVCacheConfig,
    LayerSpec,
    MambaSpec,
    MLASpec,
    ParallelConfig,
    SlidingWindowSpec,
    allocate_tensors,
    canonical_kv_caches,
    group_layers,
    with_layout,
)
from kvtier.kvcache.layout.axes import KV_JOINED_HND, KV_JOINED_NHD
from tests.kvcache.families import FAMILIES, deepseek_v3, deepseek_v4, gemma_3_27b, llama_3_8b, qwen_3_next

BF16 = torch.bfloat16
ASKED = Namespace(
    model_name="m", parallel_agnostic=True, layout=HEADS_OUTERMOST, v2_model_runner=False, per_token_head_scales=False
)


def full(heads: int, **fields: Any) -> LayerSpec:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": heads, "head_size": 8, "dtype": BF16} | fields)


def why(layers: dict[str, LayerSpec], total_kv_heads: int = 8, namespace: Namespace = ASKED, **parallel: int) -> str:
    config = group_layers(layers, 2)
    return refusal(with_layout(namespace, config, ParallelConfig(**parallel), total_kv_heads=total_kv_heads))


def test_heads_that_workers_share_out_may_be_read_at_any_size() -> None:
    assert why({"a": full(4), "b": full(4)}, tp_size=2) == ""
    assert why({"a": full(8)}) == ""


@pytest.mark.parametrize(
    ("layers", "parallel", "reason"),
    [
        ({"a": full(1)}, {"tp_size": 16}, "16 workers of 1 KV heads hold copies: there are 8"),
        ({"a": full(8)}, {"pcp_size": 2}, "context parallelism divides a block's tokens"),
        ({"a": full(4)}, {"tp_size": 2, "dcp_size": 2}, "context parallelism divides a block's tokens"),
        ({"a": full(8)}, {"pp_size": 2}, "pipeline parallelism divides a block's layers"),
        ({"a": full(8, per_token_head_scales=True)}, {}, "scales per token and head lie apart from the heads"),
        ({"a": full(8), "b": full(8, head_size=16)}, {}, "the group's attention is other, not full_attention"),
        (
            {"a": MLASpec(block_size=16, head_size=8, dtype=BF16)},
            {},
            "the group's attention is mla, not full_attention",
        ),
        ({"a": MambaSpec(block_size=16, shapes=((8,),), dtypes=(BF16,))}, {}, "not known: kv_heads_per_rank"),
        (
            {
                "a": full(8),
                "w": SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=8, dtype=BF16, sliding_window=9),
            },
            {},
            "2 KV-cache groups; only a single one is laid out alike at every size",
        ),
    ],
)
def test_anything_else_is_refused_with_the_gates_own_words(
    layers: dict[str, LayerSpec], parallel: dict[str, int], reason: str
) -> None:
    assert why(layers, **parallel) == reason


def test_who_does_not_ask_is_refused_first() -> None:
    assert why({"a": full(8)}, namespace=replace(ASKED, parallel_agnostic=False)) == "not asked for"


def canonical_refusal(family: Any, axes: Any = None, **parallel: int) -> str:
    made = family(1, parallel.get("tp_size", 1))
    of_layers = dict.fromkeys(made.axes, axes) if axes else made.axes
    caches = allocate_tensors(made.config, of_layers)
    sizes = ParallelConfig(**parallel)
    canonical = canonical_kv_caches(made.config, caches, of_layers, parallel=sizes, total_kv_heads=made.total_kv_heads)
    namespace = replace(ASKED, canonical_format="v1-nhd")
    facts = with_layout(namespace, made.config, sizes, total_kv_heads=made.total_kv_heads, canonical=canonical)
    return refusal(facts)


@pytest.mark.parametrize("family", [llama_3_8b, gemma_3_27b, deepseek_v3])
@pytest.mark.parametrize("tp_size", [1, 2, 16])
def test_certified_canonical_pages_may_be_read_at_any_size(family: Any, tp_size: int) -> None:
    assert canonical_refusal(family, tp_size=tp_size) == ""


def test_canonical_pages_with_states_in_them_are_not_certified() -> None:
    assert canonical_refusal(qwen_3_next, tp_size=2) == "the canonical pages are not certified"


def test_names_change_with_what_specs_say_and_with_nothing_else() -> None:
    def folder(heads: int, tp_size: int, axes: object = KV_JOINED_HND) -> str:
        del axes
        config = group_layers({"a": full(heads)}, 2)
        parallel = ParallelConfig(tp_size=tp_size, rank=tp_size - 1)
        return FileMapper(with_layout(ASKED, config, parallel, total_kv_heads=8)).folder

    assert folder(8, 1) == folder(4, 2) == folder(1, 8, KV_JOINED_NHD)
    assert folder(1, 16) != folder(1, 8)


def test_groups_reach_the_namespace_as_they_are_named_there() -> None:
    config: KVCacheConfig = gemma_3_27b(1).config
    namespace = with_layout(ASKED, config, ParallelConfig(tp_size=2, dcp_size=2, pcp_size=4), total_kv_heads=16)
    assert namespace.kv_cache_groups[0] == Group(
        tokens_per_block=128, layer_names=config.groups[0].layer_names, attention="full_attention"
    )
    assert [group.attention for group in namespace.kv_cache_groups[1:]] == ["sliding_window"] * 6
    assert (namespace.tp_size, namespace.dcp_size, namespace.kv_heads_per_rank) == (2, 2, 16)


def test_a_group_of_latent_layers_is_latent_even_if_their_pages_differ() -> None:
    assert {group.attention for group in deepseek_v4(1).config.groups} == {"mla"}
    mixed = group_layers({"a": full(8), "b": full(4)}, 1)
    assert mixed.groups[0].attention == "other"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_the_decision_is_the_namespaces(family: Any) -> None:
    made = family(1)
    namespace = with_layout(ASKED, made.config, ParallelConfig(), total_kv_heads=made.total_kv_heads)
    assert refusal(namespace) == FileMapper(namespace).why


def test_scales_of_one_layer_are_scales_of_the_cache() -> None:
    config = group_layers({"a": full(8), "b": full(8, per_token_head_scales=True)}, 2)
    assert with_layout(ASKED, config, ParallelConfig(), total_kv_heads=8).per_token_head_scales
