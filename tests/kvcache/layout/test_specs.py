"""Specs: how long pages are, and which cannot be."""

from typing import Any

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout import (
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

BF16 = torch.bfloat16


def full(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": BF16} | fields)


@pytest.mark.parametrize(
    ("spec", "unpadded", "padded"),
    [
        (full(), 65_536, 65_536),
        (full(head_size_v=64), 49_152, 49_152),
        (full(padded_page_bytes=70_000), 65_536, 70_000),
        (full(align_bytes=60_000), 65_536, 120_000),
        (full(dtype=torch.uint8, state_bytes=132), 16_896, 16_896),  # Values and their scales.
        (MLASpec(block_size=64, head_size=576, dtype=BF16), 73_728, 73_728),
        (
            MLASpec(
                block_size=256, head_size=512, dtype=torch.uint8, state_bytes=584, tokens_per_state=128, align_bytes=576
            ),
            1_168,
            1_728,
        ),
        (MambaSpec(block_size=100, shapes=((3, 10), (5,)), dtypes=(BF16, torch.float32)), 80, 80),
    ],
)
def test_pages_are_as_long_as_their_heads_states_and_padding(spec: LayerSpec, unpadded: int, padded: int) -> None:
    assert (spec.unpadded_page_bytes, spec.page_bytes) == (unpadded, padded)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "a block of 0 tokens"),
        ({"align_bytes": 0}, "aligned to 0 bytes"),
        ({"num_kv_heads": 0}, "0 heads of 128"),
        ({"state_bytes": 3}, "3 bytes in torch.bfloat16"),
        ({"tokens_per_state": 3}, "a block of 16 tokens has no whole states of 3"),
        ({"padded_page_bytes": 65_535}, "a page of 65,536 bytes does not fit into 65,535 padded ones"),
    ],
)
def test_specs_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        full(**fields)


def test_states_without_a_dtype_each_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 state shapes and 1 dtypes"):
        MambaSpec(block_size=1, shapes=((1,), (2,)), dtypes=(BF16,))


def test_layers_of_one_group_have_one_block_size_and_type() -> None:
    uniform = UniformSpecs({"a": full(), "b": full(num_kv_heads=4)})
    assert KVCacheGroup(layer_names=("a", "b"), spec=uniform).page_bytes == 65_536 + 32_768
    with pytest.raises(ConfigError, match=r"one block size: \{'a': 16, 'b': 32\}"):
        UniformSpecs({"a": full(), "b": full(block_size=32)})
    with pytest.raises(ConfigError, match="one type of attention"):
        UniformSpecs(
            {
                "a": full(),
                "b": SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BF16, sliding_window=9),
            }
        )


def test_a_group_knows_its_layers_specs_and_kernel_blocks() -> None:
    group = KVCacheGroup(layer_names=("a", "b"), spec=full(), kernel_block_size=4)
    assert (group.block_size, group.kernel_blocks, group.page_bytes) == (16, 4, 131_072)
    assert group.spec_of("b") == full()
    with pytest.raises(ConfigError, match="blocks of 16 tokens cannot be split into kernel blocks of 5"):
        KVCacheGroup(layer_names=("a",), spec=full(), kernel_block_size=5)
    with pytest.raises(ConfigError, match=r"specs for \['a'\] in a group of \['a', 'b'\]"):
        KVCacheGroup(layer_names=("a", "b"), spec=UniformSpecs({"a": full()}))


@pytest.mark.parametrize(
    ("num_blocks", "size_bytes", "shared_by", "message"),
    [
        (0, 65_536, ("a",), "0 blocks of 1 layers"),
        (2, 131_072, ("b",), r"layers \['a'\] in groups, \['b'\] in tensors"),
        (2, 131_071, ("a",), "2 pages of 65,536 bytes do not fit into the 131,071 bytes that a share"),
    ],
)
def test_configurations_that_cannot_be_are_refused(
    num_blocks: int, size_bytes: int, shared_by: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheConfig(
            num_blocks=num_blocks,
            tensors=(KVCacheTensor(size_bytes=size_bytes, shared_by=shared_by),),
            groups=(KVCacheGroup(layer_names=("a",), spec=full()),),
        )


@pytest.mark.parametrize("fields", [{"tp_size": 0}, {"rank": 1}, {"tp_size": 2, "rank": 2}, {"rank": -1}])
def test_a_rank_is_one_of_the_workers(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="sizes are >= 1"):
        ParallelConfig(**fields)


def test_equal_layers_are_one_group_with_a_tensor_each() -> None:
    config = group_layers({"a": full(), "b": full()}, 3)
    assert [group.layer_names for group in config.groups] == [("a", "b")]
    assert [tensor.shared_by for tensor in config.tensors] == [("a",), ("b",)]
    assert [tensor.size_bytes for tensor in config.tensors] == [3 * 65_536] * 2


def test_layers_of_one_type_whose_pages_differ_are_one_uniform_group() -> None:
    config = group_layers({"a": full(), "b": full(num_kv_heads=4)}, 3)
    assert config.groups[0].spec == UniformSpecs({"a": full(), "b": full(num_kv_heads=4)})
    assert [tensor.size_bytes for tensor in config.tensors] == [3 * 65_536, 3 * 32_768]


def test_groups_are_as_large_as_the_rarest_type_and_share_tensors() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BF16, sliding_window=9)
    layers: dict[str, LayerSpec] = {"f0": full(), "f1": full()} | {f"w{i}": window for i in range(5)}
    config = group_layers(layers, 3)
    assert [group.layer_names for group in config.groups] == [("f0", "f1"), ("w0", "w3"), ("w1", "w4"), ("w2",)]
    assert [tensor.shared_by for tensor in config.tensors] == [("f0", "w0", "w1", "w2"), ("f1", "w3", "w4")]


def test_groups_are_as_large_as_the_commonest_type_if_that_is_little_larger() -> None:
    window = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=BF16, sliding_window=9)
    layers: dict[str, LayerSpec] = {f"f{i}": full() for i in range(4)} | {f"w{i}": window for i in range(3)}
    assert [len(group.layer_names) for group in group_layers(layers, 3).groups] == [4, 3]


def test_states_are_padded_so_that_all_layers_can_share_tensors() -> None:
    state = MambaSpec(block_size=16, shapes=((8, 8),), dtypes=(BF16,))
    with pytest.raises(ConfigError, match=r"pages of one size; these have \[128, 65536\] bytes"):
        group_layers({"a": full(), "s": state}, 3)
    config = group_layers(padded_to_one_page({"a": full(), "s": state}), 3)
    assert [spec.page_bytes for group in config.groups for spec in group.specs] == [65_536, 65_536]
    assert [tensor.shared_by for tensor in config.tensors] == [("a", "s")]
