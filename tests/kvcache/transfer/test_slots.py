"""Where pages lie in a chunk's bytes."""

import pytest
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout import CanonicalKVCaches, DataRef, ParallelConfig
from kvtier.kvcache.layout.mapping import own_part
from kvtier.kvcache.transfer import slot_layout


def caches(*groups: dict[int, int]) -> CanonicalKVCaches:
    """Tensors with pages of 64 and 32 bytes; groups by tensor and what of its pages they use, in one of 3 workers."""
    parallel = ParallelConfig(tp_size=3)
    return CanonicalKVCaches(
        (torch.zeros((4, 64), dtype=torch.int8), torch.zeros((4, 32), dtype=torch.int8)),
        tuple(
            tuple(DataRef(tensor, used, ("layer",), own_part(used, parallel)) for tensor, used in group.items())
            for group in groups
        ),
    )


def test_workers_own_pages_lie_tensor_after_tensor_with_their_padding() -> None:
    layout = slot_layout(caches({0: 60, 1: 32}), blocks_per_chunk=3)
    assert (layout.offsets, layout.page_bytes, layout.slot_bytes) == ((0, 192), (64, 32), 288)


def test_canonical_pages_are_as_long_as_the_longest_of_the_layers_that_share_them() -> None:
    for groups in ([{0: 60, 1: 32}, {0: 40, 1: 8}], [{0: 40, 1: 8}, {0: 60, 1: 32}]):
        layout = slot_layout(caches(*groups), blocks_per_chunk=2, canonical=True)
        assert (layout.offsets, layout.page_bytes, layout.slot_bytes) == ((0, 360), (180, 96), 552)


def test_a_chunk_has_at_least_one_block() -> None:
    with pytest.raises(ConfigError, match="blocks_per_chunk: 0 given, at least 1 accepted"):
        slot_layout(caches({0: 64}), blocks_per_chunk=0)
