"""Pages are found in every layout without a copy, and refused where only a copy could make them."""

import re
from collections.abc import Mapping

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout import (
    CacheAxes,
    CanonicalKVCaches,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    LayerCache,
    LayerSpec,
    MambaSpec,
    MLASpec,
    ParallelConfig,
    SlidingWindowSpec,
    UniformSpecs,
    cache_view,
    canonical_kv_caches,
    state_views,
)
from kvtier.kvcache.layout.axes import (
    HEADS_FRONT,
    KV_FRONT_HND,
    KV_FRONT_NHD,
    KV_JOINED_HND,
    KV_JOINED_NHD,
    KV_SPLIT_HND,
    KV_SPLIT_NHD,
    LATENT,
)

BLOCKS = 5
BF16 = torch.bfloat16
ATTENTION = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=BF16)
PAGE_BYTES = ATTENTION.page_bytes
STATE = MambaSpec(block_size=4, shapes=((2, 3), (7,)), dtypes=(BF16, torch.float32))
LATENT_SPEC = MLASpec(block_size=4, head_size=12, dtype=BF16)


def config_of(
    *groups: Mapping[str, LayerSpec], num_blocks: int = BLOCKS, kernel_block_size: int | None = None
) -> KVCacheConfig:
    layers = {name: spec for group in groups for name, spec in group.items()}
    return KVCacheConfig(
        num_blocks=num_blocks,
        tensors=tuple(
            KVCacheTensor(size_bytes=spec.page_bytes * num_blocks, shared_by=(name,)) for name, spec in layers.items()
        ),
        groups=tuple(
            KVCacheGroup(layer_names=tuple(group), spec=next(iter(group.values())), kernel_block_size=kernel_block_size)
            for group in groups
        ),
    )


def memory(size_bytes: int) -> torch.Tensor:
    return torch.arange(size_bytes).to(torch.int8)


def places(canonical: CanonicalKVCaches, base: torch.Tensor) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Return where each tensor begins in the memory, its shape and its strides."""
    start = base.data_ptr()
    assert all(tensor.dtype == torch.int8 for tensor in canonical.tensors)
    return [(tensor.data_ptr() - start, tuple(tensor.shape), tensor.stride()) for tensor in canonical.tensors]


@pytest.mark.parametrize("axes", [KV_SPLIT_NHD, KV_SPLIT_HND, KV_JOINED_NHD, KV_JOINED_HND])
@pytest.mark.parametrize("named", [True, False])
def test_a_cache_with_its_blocks_in_front_is_one_tensor(axes: CacheAxes, named: bool) -> None:
    base = memory(PAGE_BYTES * BLOCKS)
    cache = cache_view(base, ATTENTION, axes, BLOCKS)
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}), {"a": cache}, {"a": axes} if named else None)
    assert places(canonical, base) == [(0, (BLOCKS, PAGE_BYTES), (PAGE_BYTES, 1))]
    assert [(ref.tensor, ref.page_bytes, ref.layers) for ref in canonical.groups[0]] == [(0, PAGE_BYTES, ("a",))]
    assert canonical.topology_free is named


@pytest.mark.parametrize("axes", [KV_FRONT_NHD, KV_FRONT_HND])
@pytest.mark.parametrize("named", [True, False])
def test_keys_in_front_and_values_behind_are_two_tensors(axes: CacheAxes, named: bool) -> None:
    base = memory(PAGE_BYTES * BLOCKS)
    cache = cache_view(base, ATTENTION, axes, BLOCKS)
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}), {"a": cache}, {"a": axes} if named else None)
    half = PAGE_BYTES // 2
    assert places(canonical, base) == [(0, (BLOCKS, half), (half, 1)), (half * BLOCKS, (BLOCKS, half), (half, 1))]
    assert [(ref.tensor, ref.page_bytes) for ref in canonical.groups[0]] == [(0, half), (1, half)]


def test_heads_around_the_blocks_are_a_tensor_each() -> None:
    base = memory(PAGE_BYTES * BLOCKS)
    cache = cache_view(base, ATTENTION, HEADS_FRONT, BLOCKS)
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}), {"a": cache}, {"a": HEADS_FRONT})
    half = PAGE_BYTES // 2
    assert places(canonical, base) == [(0, (BLOCKS, half), (half, 1)), (half * BLOCKS, (BLOCKS, half), (half, 1))]


def test_parts_around_the_blocks_come_in_the_order_of_the_shape() -> None:
    heads_then_parts, quarter = CacheAxes("HKBNC", "KHBNC"), PAGE_BYTES * BLOCKS // 4
    for axes, starts in ((CacheAxes("HKBNC", "HKBNC"), [0, 1, 2, 3]), (heads_then_parts, [0, 2, 1, 3])):
        base = memory(PAGE_BYTES * BLOCKS)
        caches = {"a": cache_view(base, ATTENTION, axes, BLOCKS)}
        canonical = canonical_kv_caches(config_of({"a": ATTENTION}), caches, {"a": axes})
        assert [start for start, _, _ in places(canonical, base)] == [quarter * part for part in starts]


def test_pages_of_several_workers_without_a_head_count_are_not_certified() -> None:
    one_head = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=BF16)
    cache = cache_view(memory(one_head.page_bytes * BLOCKS), one_head, KV_JOINED_NHD, BLOCKS)
    for heads, certified in ((None, False), (1, True), (2, True)):
        canonical = canonical_kv_caches(
            config_of({"a": one_head}),
            {"a": cache},
            {"a": KV_JOINED_NHD},
            parallel=ParallelConfig(tp_size=2),
            total_kv_heads=heads,
        )
        assert canonical.topology_free is certified


def test_latent_caches_and_states_are_one_tensor_each() -> None:
    base = memory(1_000)
    cache = cache_view(base, LATENT_SPEC, LATENT, BLOCKS)
    states = state_views(base, STATE, BLOCKS, offset_bytes=LATENT_SPEC.page_bytes * BLOCKS)
    config = config_of({"a": LATENT_SPEC}, {"s": STATE})
    canonical = canonical_kv_caches(config, {"a": cache, "s": states}, {"a": LATENT})
    assert places(canonical, base) == [(0, (BLOCKS, 96), (96, 1)), (480, (BLOCKS, 40), (40, 1))]
    assert [[ref.page_bytes for ref in refs] for refs in canonical.groups] == [[96], [40]]


def test_padding_is_part_of_rows_but_not_of_what_is_referred_to() -> None:
    padded = MambaSpec(block_size=4, shapes=STATE.shapes, dtypes=STATE.dtypes, padded_page_bytes=64)
    base = memory(64 * BLOCKS)
    canonical = canonical_kv_caches(config_of({"s": padded}), {"s": state_views(base, padded, BLOCKS)})
    assert places(canonical, base) == [(0, (BLOCKS, 64), (64, 1))]
    assert canonical.groups[0][0].page_bytes == 40


def test_a_storage_that_ends_with_its_last_page_does_so_without_that_ones_padding() -> None:
    padded = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=BF16, padded_page_bytes=PAGE_BYTES + 32)
    base = memory((PAGE_BYTES + 32) * BLOCKS - 32)
    cache = cache_view(base, padded, KV_JOINED_NHD, BLOCKS, block_stride_bytes=PAGE_BYTES + 32)
    canonical = canonical_kv_caches(config_of({"a": padded}), {"a": cache})
    assert places(canonical, base) == [(0, (BLOCKS, PAGE_BYTES), (PAGE_BYTES + 32, 1))]


@pytest.mark.parametrize("axes", [KV_SPLIT_HND, KV_JOINED_NHD, KV_FRONT_NHD])
def test_kernel_blocks_make_up_the_engines_blocks(axes: CacheAxes) -> None:
    base = memory(PAGE_BYTES * BLOCKS)
    cache = cache_view(base, ATTENTION, axes, BLOCKS, kernel_blocks=2)
    assert BLOCKS * 2 in cache.shape
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}, kernel_block_size=2), {"a": cache}, {"a": axes})
    assert sum(tensor.shape[1] for tensor in canonical.tensors) == PAGE_BYTES
    assert {tensor.shape[0] for tensor in canonical.tensors} == {BLOCKS}


def test_a_cache_may_begin_anywhere_in_its_storage() -> None:
    base = memory(PAGE_BYTES * BLOCKS + 64)
    cache = cache_view(base[32:], ATTENTION, KV_JOINED_HND, BLOCKS)
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}), {"a": cache})
    assert places(canonical, base) == [(32, (BLOCKS, PAGE_BYTES), (PAGE_BYTES, 1))]


def test_layers_over_the_same_bytes_share_a_tensor() -> None:
    window = SlidingWindowSpec(block_size=4, num_kv_heads=4, head_size=4, dtype=BF16, sliding_window=9)
    padded = MambaSpec(block_size=4, shapes=STATE.shapes, dtypes=STATE.dtypes, padded_page_bytes=PAGE_BYTES)
    base = memory(PAGE_BYTES * BLOCKS)
    caches: dict[str, LayerCache] = {
        "a": cache_view(base, ATTENTION, KV_JOINED_HND, BLOCKS),
        "w": cache_view(base, window, KV_SPLIT_NHD, BLOCKS),
        "s": state_views(base, padded, BLOCKS),
    }
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}, {"w": window}, {"s": padded}), caches)
    assert places(canonical, base) == [(0, (BLOCKS, PAGE_BYTES), (PAGE_BYTES, 1))]
    assert [(ref.tensor, ref.page_bytes) for refs in canonical.groups for ref in refs] == [
        (0, PAGE_BYTES),
        (0, PAGE_BYTES),
        (0, 40),
    ]


def test_layers_share_a_tensor_of_one_block_too() -> None:
    padded = MambaSpec(block_size=4, shapes=STATE.shapes, dtypes=STATE.dtypes, padded_page_bytes=PAGE_BYTES)
    base = memory(PAGE_BYTES)
    caches = {"a": cache_view(base, ATTENTION, KV_JOINED_HND, 1), "s": state_views(base, padded, 1)}
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}, {"s": padded}, num_blocks=1), caches)
    assert places(canonical, base) == [(0, (1, PAGE_BYTES), (PAGE_BYTES, 1))]


def test_pages_in_rows_are_one_tensor_of_rows_and_one_reference_a_group() -> None:
    row_bytes = 2 * PAGE_BYTES + 96
    base = memory(64 + row_bytes * BLOCKS)
    rows = base[64:]
    caches = {
        "a": cache_view(rows, ATTENTION, KV_SPLIT_NHD, BLOCKS, block_stride_bytes=row_bytes),
        "b": cache_view(rows, ATTENTION, KV_JOINED_HND, BLOCKS, offset_bytes=PAGE_BYTES, block_stride_bytes=row_bytes),
        "l": cache_view(rows, LATENT_SPEC, LATENT, BLOCKS, block_stride_bytes=row_bytes),
    }
    canonical = canonical_kv_caches(config_of({"a": ATTENTION, "b": ATTENTION}, {"l": LATENT_SPEC}), caches)
    assert places(canonical, base) == [(64, (BLOCKS, row_bytes), (row_bytes, 1))]
    assert [[(ref.page_bytes, ref.layers) for ref in refs] for refs in canonical.groups] == [
        [(row_bytes, ("a", "b"))],
        [(row_bytes, ("l",))],
    ]


def test_a_row_begins_before_its_first_page_where_it_could_not_end_otherwise() -> None:
    row_bytes = 2 * PAGE_BYTES
    base = memory(row_bytes * BLOCKS)
    second = cache_view(base, ATTENTION, KV_JOINED_NHD, BLOCKS, offset_bytes=PAGE_BYTES, block_stride_bytes=row_bytes)
    canonical = canonical_kv_caches(config_of({"a": ATTENTION}), {"a": second})
    assert places(canonical, base) == [(0, (BLOCKS, row_bytes), (row_bytes, 1))]


def test_layers_of_one_group_over_the_same_bytes_are_as_long_as_the_longest() -> None:
    specs: dict[str, LayerSpec] = {
        layer: FullAttentionSpec(
            block_size=4, num_kv_heads=heads, head_size=8, dtype=BF16, padded_page_bytes=PAGE_BYTES
        )
        for layer, heads in (("short", 1), ("long", 2))
    }
    base = memory(PAGE_BYTES * BLOCKS)
    caches = {
        layer: cache_view(base, spec, KV_JOINED_HND, BLOCKS, block_stride_bytes=PAGE_BYTES)
        for layer, spec in specs.items()
        if isinstance(spec, FullAttentionSpec)
    }
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=(KVCacheTensor(size_bytes=PAGE_BYTES * BLOCKS, shared_by=("short", "long")),),
        groups=(KVCacheGroup(layer_names=("short", "long"), spec=UniformSpecs(specs)),),
    )
    ((ref,),) = canonical_kv_caches(config, caches, dict.fromkeys(specs, KV_JOINED_HND)).groups
    assert (ref.page_bytes, ref.mapping.local_bytes, ref.layers) == (PAGE_BYTES, PAGE_BYTES, ("short", "long"))


def test_heads_around_the_layers_of_a_row_lie_in_it_too() -> None:
    """vLLM's layout BHLNC: block, head, layer, token, content."""
    base = memory(2 * PAGE_BYTES * BLOCKS)
    five = base.view(BF16).view(BLOCKS, 2, 2, 4, 16)
    caches = {"a": five[:, :, 0], "b": five[:, :, 1]}
    canonical = canonical_kv_caches(config_of({"a": ATTENTION, "b": ATTENTION}), caches)
    assert places(canonical, base) == [(0, (BLOCKS, 2 * PAGE_BYTES), (2 * PAGE_BYTES, 1))]


def test_one_block_alone_is_a_page() -> None:
    for axes in (KV_JOINED_NHD, KV_FRONT_HND, HEADS_FRONT):
        base = memory(PAGE_BYTES)
        cache = cache_view(base, ATTENTION, axes, 1)
        canonical = canonical_kv_caches(config_of({"a": ATTENTION}, num_blocks=1), {"a": cache}, {"a": axes})
        assert places(canonical, base) == [(0, (1, PAGE_BYTES), (PAGE_BYTES, 1))]


def refused(caches: Mapping[str, LayerCache], spec: LayerSpec = ATTENTION, axes: CacheAxes | None = None) -> str:
    config = config_of(dict.fromkeys(caches, spec))
    with pytest.raises(ConfigError) as error:
        canonical_kv_caches(config, caches, dict.fromkeys(caches, axes) if axes else None)
    return str(error.value)


def test_blocks_inside_of_a_page_are_refused_by_layer_and_stride() -> None:
    innermost = memory(PAGE_BYTES * BLOCKS).view(BF16).view(2, 4, 16, BLOCKS).permute(3, 0, 1, 2)
    assert refused({"model.layers.3": innermost}) == (
        "model.layers.3: stride 1 of axis 0, its blocks, parts them into 128 pieces of 2 bytes "
        "(strides (1, 320, 80, 5)): only a copy could join them"
    )


def test_a_block_inside_of_another_is_refused_by_layer_and_stride() -> None:
    base = memory(PAGE_BYTES * BLOCKS).view(BF16)
    overlapping = base.as_strided((BLOCKS, 2, 4, 16), (64, 64, 16, 1))
    assert refused({"a": overlapping}) == (
        "a: a block reaches over 256 bytes, the next begins after 128 (stride 64 of axis 0, of (64, 64, 16, 1)): "
        "only a copy could part them"
    )


def test_keys_that_reach_into_values_are_refused_by_layer_and_stride() -> None:
    stride = (BLOCKS - 1) * 64 + 8  # Values begin within the last block's keys.
    reaching = memory(PAGE_BYTES * BLOCKS).view(BF16).as_strided((2, BLOCKS, 4, 2, 8), (stride, 64, 16, 8, 1))
    assert refused({"a": reaching}, axes=KV_FRONT_NHD) == (
        f"a: stride {stride} of axis 0 lies within all blocks' 640 bytes (strides ({stride}, 64, 16, 8, 1)): "
        "only a copy could part them"
    )


def test_elements_over_each_other_are_refused_by_layer_and_stride() -> None:
    expanded = memory(PAGE_BYTES * BLOCKS).view(BF16)[: BLOCKS * 16].view(BLOCKS, 1, 1, 16).expand(-1, 2, 4, -1)
    assert "a: stride 0 of axis" in refused({"a": expanded})


def test_gaps_inside_of_pages_are_refused_by_layer_and_stride() -> None:
    base = memory(2 * PAGE_BYTES * BLOCKS).view(BF16)
    every_other = base.as_strided((BLOCKS, 2, 4, 8), (2 * 64, 2 * 32, 16, 2))
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype=BF16, padded_page_bytes=256)
    assert "a: stride 2 of axis 3 leaves 2 bytes free inside of each block" in refused({"a": every_other}, spec)


def test_a_shape_that_may_be_read_both_ways_needs_its_axes() -> None:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=BF16)
    cache = cache_view(memory(2 * spec.page_bytes), spec, KV_SPLIT_NHD, 2)
    config = config_of({"a": spec}, num_blocks=2)
    message = re.escape("strides (128, 64, 16, 8, 1) may have its 2 blocks first or second; name its axes")
    with pytest.raises(ConfigError, match=message):
        canonical_kv_caches(config, {"a": cache})
    assert len(canonical_kv_caches(config, {"a": cache}, {"a": KV_SPLIT_NHD}).tensors) == 1


@pytest.mark.parametrize(
    ("cache", "axes", "message"),
    [
        (torch.zeros((4, 2, 4, 16), dtype=BF16), None, "have no axis of 5 blocks in front"),
        (
            torch.zeros((4, 2, 4, 16), dtype=BF16),
            KV_JOINED_NHD,
            "strides (128, 64, 16, 1) given, 5 blocks as axis 0 of BHNC accepted",
        ),
        (torch.zeros((5, 2, 4), dtype=BF16), KV_JOINED_NHD, "5 blocks as axis 0 of BHNC accepted"),
        (
            torch.zeros((5, 2, 4, 8), dtype=BF16),
            None,
            "1 x 128 bytes in a block (strides (64, 32, 8, 1)), 256 in its spec's page",
        ),
    ],
)
def test_caches_that_are_not_what_their_specs_say_are_refused(
    cache: torch.Tensor, axes: CacheAxes | None, message: str
) -> None:
    assert message in refused({"a": cache}, axes=axes)


def test_states_in_several_allocations_or_pages_are_refused() -> None:
    apart = [torch.zeros((BLOCKS, 2, 3), dtype=BF16), torch.zeros((BLOCKS, 7))]
    assert "in 2 allocations do not share one page a block" in refused({"s": apart}, STATE)
    base = memory(1_000)
    one_after_the_other = [base[:60].view(BF16).view(BLOCKS, 2, 3), base[64:204].view(torch.float32).view(BLOCKS, 7)]
    assert "do not share one page a block" in refused({"s": one_after_the_other}, STATE)
    assert (
        refused({"s": [torch.zeros(3, 4)]}, STATE) == "s: state of shape (3, 4) and strides (4, 1), not 5 blocks first"
    )


def test_states_that_lie_behind_each_other_block_by_block_are_refused() -> None:
    """At one distance in one allocation, and yet no page has both: all blocks of the one, then all of the other."""
    spec = MambaSpec(block_size=4, shapes=((6,), (6,)), dtypes=(BF16, BF16))
    base = memory(2 * 12 * BLOCKS).view(BF16)
    behind = [part.view(BLOCKS, 6) for part in base.chunk(2)]
    assert refused({"s": behind}, spec) == (
        "s: states with strides [(6, 1), (6, 1)] in 1 allocations do not share one page a block"
    )


def test_states_at_different_distances_are_refused() -> None:
    spec = MambaSpec(block_size=4, shapes=((6,), (6,)), dtypes=(BF16, BF16))
    base = memory(64 * BLOCKS).view(BF16)
    apart = [base.as_strided((BLOCKS, 6), (32, 1)), base.as_strided((BLOCKS, 6), (16, 1), 8)]
    assert refused({"s": apart}, spec) == (
        "s: states with strides [(32, 1), (16, 1)] in 1 allocations do not share one page a block"
    )


def test_states_with_a_gap_between_them_are_one_page_of_the_workers_own() -> None:
    spec = MambaSpec(block_size=4, shapes=((6,), (6,)), dtypes=(BF16, BF16), replicated=True)
    base = memory(44 * BLOCKS)
    halves = base.view(BF16)
    states = [halves.as_strided((BLOCKS, 6), (22, 1)), halves.as_strided((BLOCKS, 6), (22, 1), 16)]
    canonical = canonical_kv_caches(config_of({"s": spec}), {"s": states})
    assert places(canonical, base) == [(0, (BLOCKS, 44), (44, 1))]
    assert canonical.groups[0][0].page_bytes == 44
    assert not canonical.topology_free  # What lies in the gap may differ.


def test_a_state_in_several_runs_of_blocks_is_refused() -> None:
    spec = MambaSpec(block_size=4, shapes=((2, 6),), dtypes=(BF16,))
    in_front = memory(24 * BLOCKS).view(BF16).view(2, BLOCKS, 6).transpose(0, 1)
    assert refused({"s": [in_front]}, spec) == (
        "s: states with strides [(6, 30, 1)] in 1 allocations do not share one page a block"
    )


def test_pages_that_no_row_holds_together_are_refused() -> None:
    row_bytes = 2 * PAGE_BYTES
    base = memory(row_bytes * (BLOCKS + 1))
    caches = {
        "a": cache_view(base, ATTENTION, KV_JOINED_NHD, BLOCKS, block_stride_bytes=row_bytes),
        "b": cache_view(base, ATTENTION, KV_JOINED_NHD, BLOCKS, offset_bytes=row_bytes, block_stride_bytes=row_bytes),
    }
    assert refused(caches) == (
        f"a, b: pages from byte 0 to {row_bytes + PAGE_BYTES} do not lie in one row of {row_bytes} bytes "
        f"(their stride) within {base.nbytes:,} bytes of memory"
    )


def test_rows_that_end_behind_their_memory_are_refused() -> None:
    row_bytes = 2 * PAGE_BYTES
    base = memory(row_bytes * BLOCKS - 32)
    cache = cache_view(base, ATTENTION, KV_JOINED_NHD, BLOCKS, block_stride_bytes=row_bytes)
    assert refused({"a": cache}) == (
        f"a: pages from byte 0 to {PAGE_BYTES} do not lie in one row of {row_bytes} bytes (their stride) "
        f"within {base.nbytes:,} bytes of memory"
    )
