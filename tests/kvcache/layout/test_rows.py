"""Rows of all layers' pages: when they are allowed, what they look like, and that they are canonical."""

from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout import (
    CacheAxes,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    LayerSpec,
    MambaSpec,
    MLASpec,
    ParallelConfig,
    SlidingWindowSpec,
    allocate_rows,
    allocate_tensors,
    cache_view,
    canonical_kv_caches,
    group_layers,
    packing_refusal,
    state_views,
)
from kvtier.kvcache.layout.axes import HEADS_FRONT, KV_FRONT_NHD, KV_JOINED_HND, KV_JOINED_NHD, KV_SPLIT_HND, LATENT
from tests.kvcache.families import deepseek_v4, gpt_oss_20b

BF16 = torch.bfloat16
BLOCKS = 3
SILENT = CacheAxes("BKNHC")


def full(heads: int = 2, **fields: Any) -> LayerSpec:
    return FullAttentionSpec(**{"block_size": 4, "num_kv_heads": heads, "head_size": 8, "dtype": BF16} | fields)


WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=8, dtype=BF16, sliding_window=9)


def refusals() -> list[Any]:
    one = group_layers({"a": full(), "b": full()}, BLOCKS)
    states = MambaSpec(block_size=4, shapes=((128,),), dtypes=(BF16,))
    unequal = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=tuple(KVCacheTensor(size_bytes=size, shared_by=(name,)) for name, size in (("a", 768), ("b", 1_024))),
        groups=(KVCacheGroup(layer_names=("a", "b"), spec=full()),),
    )
    wider = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=tuple(KVCacheTensor(size_bytes=1_536, shared_by=(name,)) for name in "ab"),
        groups=tuple(KVCacheGroup(layer_names=(name,), spec=full(heads)) for name, heads in (("a", 2), ("b", 4))),
    )
    return [
        pytest.param(
            group_layers({"a": full(), "s": states}, BLOCKS), KV_JOINED_NHD, "s is not attention", id="states"
        ),
        pytest.param(wider, KV_JOINED_NHD, "page sizes differ: [256, 512] bytes", id="page sizes"),
        pytest.param(unequal, KV_JOINED_NHD, "tensor sizes differ: [768, 1024] bytes", id="tensor sizes"),
        pytest.param(one, KV_FRONT_NHD, "blocks do not lead in the stride order KBNHC of a", id="keys in front"),
        pytest.param(one, HEADS_FRONT, "blocks do not lead in the stride order HBNC of a", id="heads in front"),
        pytest.param(one, SILENT, "the backend of a has no stride order", id="no stride order"),
        pytest.param(one, None, "the backend of a has no stride order", id="no axes"),
        pytest.param(one, KV_JOINED_HND, "", id="allowed"),
        pytest.param(group_layers({"a": full(), "w": WINDOW}, BLOCKS), KV_JOINED_HND, "", id="two groups"),
    ]


@pytest.mark.parametrize(("config", "axes", "why"), refusals())
def test_pages_that_cannot_lie_in_rows_have_a_reason(config: KVCacheConfig, axes: CacheAxes | None, why: str) -> None:
    of_layers = {layer: axes for group in config.groups for layer in group.layer_names}
    assert packing_refusal(config, of_layers) == why


def test_layers_of_one_type_whose_pages_differ_lie_in_rows() -> None:
    made = deepseek_v4(2)
    assert packing_refusal(made.config, made.axes) == ""
    assert packing_refusal(made.config, {**made.axes, "layers.0.c4": CacheAxes("BNC")}) == (
        "the backend of layers.0.c4 has no stride order"
    )


def test_equal_pages_make_rows_of_pages_times_layers() -> None:
    config = group_layers({"a": full(), "b": full(), "w": WINDOW, "x": WINDOW}, BLOCKS)
    axes = {"a": KV_JOINED_NHD, "b": KV_JOINED_HND, "w": KV_SPLIT_HND, "x": KV_JOINED_NHD}
    made = allocate_rows(config, axes)
    assert (made.rows.dtype, made.rows.shape) == (torch.int8, (BLOCKS, 2 * 256))
    assert made.canonical.tensors == (made.rows,)
    assert [[(ref.page_bytes, ref.layers) for ref in refs] for refs in made.canonical.groups] == [
        [(512, ("a", "b"))],
        [(512, ("w", "x"))],
    ]
    shapes = {layer: (tuple(view.shape), view.stride()) for layer, view in made.layers.items()}  # type: ignore[union-attr]
    assert shapes == {
        "a": ((3, 2, 4, 16), (256, 16, 32, 1)),
        "b": ((3, 2, 4, 16), (256, 64, 16, 1)),
        "w": ((3, 2, 4, 2, 8), (256, 64, 8, 32, 1)),
        "x": ((3, 2, 4, 16), (256, 16, 32, 1)),
    }
    offsets = {layer: view.storage_offset() for layer, view in made.layers.items()}  # type: ignore[union-attr]
    assert offsets == {"a": 0, "b": 128, "w": 0, "x": 128}


def test_a_smaller_group_refers_to_its_part_of_the_rows() -> None:
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=(KVCacheTensor(size_bytes=768, shared_by=("a", "w")), KVCacheTensor(size_bytes=768, shared_by=("b",))),
        groups=(KVCacheGroup(layer_names=("a", "b"), spec=full()), KVCacheGroup(layer_names=("w",), spec=WINDOW)),
    )
    made = allocate_rows(config, dict.fromkeys("abw", KV_JOINED_HND))
    assert [refs[0].page_bytes for refs in made.canonical.groups] == [512, 256]


def test_kernel_blocks_of_each_group_keep_one_distance() -> None:
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=(KVCacheTensor(size_bytes=768, shared_by=("a", "w")), KVCacheTensor(size_bytes=768, shared_by=("b",))),
        groups=(
            KVCacheGroup(layer_names=("a", "b"), spec=full(), kernel_block_size=2),
            KVCacheGroup(layer_names=("w",), spec=WINDOW, kernel_block_size=1),
        ),
    )
    made = allocate_rows(config, dict.fromkeys("abw", KV_JOINED_HND))
    shapes = {layer: (tuple(view.shape), view.stride()) for layer, view in made.layers.items()}  # type: ignore[union-attr]
    assert shapes == {
        "a": ((6, 2, 2, 16), (128, 32, 16, 1)),
        "b": ((6, 2, 2, 16), (128, 32, 16, 1)),
        "w": ((12, 2, 1, 16), (64, 16, 16, 1)),
    }
    assert [refs[0].page_bytes for refs in made.canonical.groups] == [512, 3 * 128 + 64]


@pytest.mark.parametrize(
    ("page_bytes", "spec", "kernel_block_size", "row_bytes"),
    [
        (258, MLASpec(block_size=4, head_size=4, dtype=torch.float32), None, 260),
        (260, MLASpec(block_size=4, head_size=4, dtype=torch.float32), 2, 264),  # Each half has whole elements.
        (258, MambaSpec(block_size=4, shapes=((4,), (2,)), dtypes=(BF16, torch.float32)), None, 260),
    ],
)
def test_rows_are_as_long_as_the_longest_group_and_whole_elements_of_all_others(
    page_bytes: int, spec: LayerSpec, kernel_block_size: int | None, row_bytes: int
) -> None:
    longest = MLASpec(block_size=1, head_size=page_bytes, dtype=torch.uint8)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=(KVCacheTensor(size_bytes=page_bytes * BLOCKS, shared_by=("long", "short")),),
        groups=(
            KVCacheGroup(layer_names=("long",), spec=longest),
            KVCacheGroup(layer_names=("short",), spec=spec, kernel_block_size=kernel_block_size),
        ),
    )
    assert allocate_rows(config, dict.fromkeys(("long", "short"), LATENT)).rows.shape == (BLOCKS, row_bytes)


def test_differing_pages_are_packed_side_by_side() -> None:
    made = deepseek_v4(2, repeats=1)
    rows = allocate_rows(made.config, made.axes)
    sizes = [[spec.page_bytes for spec in group.specs] for group in made.config.groups]
    assert sizes == [[37_440, 8_640, 1_728], [37_440, 37_440], [32_832, 8_640], [32_832]]
    assert rows.rows.shape == (2, 2 * 37_440)
    window = rows.layers["layers.1.window"]
    assert isinstance(window, torch.Tensor)
    assert (window.shape, window.stride(), window.storage_offset()) == ((2, 64, 584), (74_880, 584, 1), 37_440)


@pytest.mark.parametrize("family", [deepseek_v4, gpt_oss_20b])
def test_rows_are_found_again_in_their_layers_views(family: Any) -> None:
    made = family(2)
    rows = allocate_rows(made.config, made.axes)
    found = canonical_kv_caches(made.config, rows.layers, made.axes)
    assert [(tensor.data_ptr(), tensor.shape) for tensor in found.tensors] == [(rows.rows.data_ptr(), rows.rows.shape)]
    assert [[ref.page_bytes for ref in refs] for refs in found.groups] == [[rows.rows.shape[1]]] * len(found.groups)


def test_rows_of_latent_pages_only_are_the_same_in_every_worker() -> None:
    made = deepseek_v4(2)
    rows = allocate_rows(made.config, made.axes, parallel=ParallelConfig(tp_size=4, rank=3))
    assert rows.canonical.topology_free
    (ref,) = rows.canonical.groups[0]
    assert (ref.mapping.writers, ref.mapping.writer_index, ref.mapping.canonical_bytes) == (4, 3, ref.page_bytes)
    for shared in ({"pp_size": 2}, {"pcp_size": 2}, {"tp_size": 2, "dcp_size": 2}):
        parallel = ParallelConfig(**shared)
        assert not allocate_rows(made.config, made.axes, parallel=parallel).canonical.topology_free
    mixed = group_layers({"a": full(), "w": WINDOW}, BLOCKS)
    axes = dict.fromkeys("aw", KV_JOINED_NHD)
    assert not allocate_rows(mixed, axes, parallel=ParallelConfig(tp_size=2)).canonical.topology_free


@pytest.mark.parametrize(
    ("layers", "kernel_block_size", "axes", "message"),
    [
        ({"a": full()}, None, KV_FRONT_NHD, "blocks do not lead in the stride order KBNHC of a"),
        (
            {"a": full(padded_page_bytes=257)},
            None,
            KV_JOINED_NHD,
            "a: pages of 257 bytes do not leave the next layer's",
        ),
        (
            {"s": MambaSpec(block_size=4, shapes=((4,),), dtypes=(BF16,))},
            2,
            LATENT,
            "s: a state cannot be split into 2",
        ),
    ],
)
def test_what_does_not_fit_into_rows_is_refused(
    layers: dict[str, LayerSpec], kernel_block_size: int | None, axes: CacheAxes, message: str
) -> None:
    (name,) = layers
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=(KVCacheTensor(size_bytes=4_096, shared_by=(name,)),),
        groups=(KVCacheGroup(layer_names=(name,), spec=layers[name], kernel_block_size=kernel_block_size),),
    )
    with pytest.raises(ConfigError, match=message):
        allocate_rows(config, {name: axes})


@pytest.mark.parametrize(
    ("spec", "kernel_block_size", "axes", "message"),
    [
        (full(padded_page_bytes=512), 2, KV_JOINED_NHD, "a: a padded page cannot be split into 2 kernel blocks"),
        (full(padded_page_bytes=512), None, KV_FRONT_NHD, "a: pages with axes K around blocks cannot be padded"),
        (full(), None, LATENT, "a: axes 'BNC' have no place for 2 heads"),
        (full(), None, None, "a: an attention layer without axes"),
        (full(tokens_per_state=2), 1, KV_JOINED_NHD, "a: 2 states of a block cannot be split into 4 kernel blocks"),
        (full(state_bytes=6), None, KV_FRONT_NHD, "a: content of 6 bytes cannot be split into keys and values alike"),
        (full(padded_page_bytes=259), None, KV_JOINED_NHD, "a: blocks of 256 bytes cannot lie 259 bytes apart"),
    ],
)
def test_caches_that_no_backend_could_read_are_refused(
    spec: LayerSpec, kernel_block_size: int | None, axes: CacheAxes | None, message: str
) -> None:
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        tensors=(KVCacheTensor(size_bytes=4_096, shared_by=("a",)),),
        groups=(KVCacheGroup(layer_names=("a",), spec=spec, kernel_block_size=kernel_block_size),),
    )
    with pytest.raises(ConfigError, match=message):
        allocate_tensors(config, {"a": axes} if axes else {})


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ({"block_stride_bytes": 254}, "blocks of 256 bytes cannot lie 254 bytes apart"),
        ({"offset_bytes": 1}, "a page at byte 1 of its memory cannot hold elements of torch.bfloat16"),
    ],
)
def test_pages_that_would_reach_into_each_other_or_split_elements_are_refused(
    view: dict[str, int], message: str
) -> None:
    memory = torch.zeros(4_096, dtype=torch.int8)
    with pytest.raises(ConfigError, match=message):
        cache_view(memory, full(), KV_JOINED_NHD, BLOCKS, **view)


def test_states_of_whole_elements_only_are_seen_in_pages() -> None:
    spec = MambaSpec(block_size=4, shapes=((4,),), dtypes=(torch.float32,))
    with pytest.raises(ConfigError, match=r"pages 18 bytes apart do not hold whole elements of torch\.float32"):
        state_views(torch.zeros(4_096, dtype=torch.int8), spec, BLOCKS, block_stride_bytes=18)


@pytest.mark.parametrize(
    ("shape", "memory", "message"),
    [
        ("BNH", None, "axes 'BNH' given"),
        ("BBNC", None, "axes 'BBNC' given"),
        ("BXNC", None, "axes 'BXNC' given"),
        ("BHNC", "BNC", "lie in memory as 'BNC'"),
        ("BHNC", "BHCN", "C, the content, is accepted as the innermost"),
    ],
)
def test_axes_are_each_named_once(shape: str, memory: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheAxes(shape, memory)
