"""Real models' shapes: what their pages are, and that they come back bit for bit."""

from typing import Any

import pytest
import torch

from kvtier.kvcache.layout import allocate_rows, allocate_tensors, canonical_kv_caches, packing_refusal
from kvtier.kvcache.transfer import GroupBlocks, TransferWorker, slot_layout
from tests.kvcache.families import FAMILIES, Family, deepseek_v4
from tests.kvcache.transfer.models import contents, fill, storages

KIB = 1 << 10

# Layers in each group, page bytes of each group's first layer, tensors (or rows), bytes of a block of one worker.
SHAPES = {
    "llama_3_8b": ([32], [64 * KIB], 32, 2 * KIB * KIB),
    "qwen_3_32b": ([64], [64 * KIB], 64, 4 * KIB * KIB),
    "gemma_3_27b": ([10, 9, 9, 9, 9, 8, 8], [128 * KIB] * 7, 10, 1_280 * KIB),
    "gpt_oss_20b": ([12, 12], [32 * KIB] * 2, 12, 384 * KIB),
    "deepseek_v2_lite": ([27], [73_728], 27, 27 * 73_728),
    "deepseek_v3": ([61], [73_728], 61, 61 * 73_728),
    "deepseek_v4": ([12, 8, 8, 4], [37_440, 37_440, 32_832, 32_832], 1, 8 * 37_440),
    "jamba": ([4] * 8, [320 * KIB] + [311_296] * 7, 4, 4 * 320 * KIB),
    "nemotron_h_8b": ([4] * 7, [2_112 * KIB] + [2_158_592] * 6, 4, 4 * 2_112 * KIB),
    "qwen_3_next": ([12] * 4, [1_088 * KIB] + [1_097_728] * 3, 12, 12 * 1_088 * KIB),
}


def allocated(made: Family, *, in_rows: bool) -> Any:
    if in_rows:
        rows = allocate_rows(made.config, made.axes)
        return rows.layers, rows.canonical
    layers = allocate_tensors(made.config, made.axes)
    return layers, canonical_kv_caches(made.config, layers, made.axes)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_familys_pages_have_their_true_sizes(family: Any) -> None:
    layers, page_bytes, tensors, block_bytes = SHAPES[family.__name__]
    made = family(1)
    _, canonical = allocated(made, in_rows=family is deepseek_v4)
    unpadded = [next(group.specs).unpadded_page_bytes for group in made.config.groups]
    if family.__name__ == "deepseek_v4":  # There padding is part of what kernels read.
        unpadded = [next(group.specs).page_bytes for group in made.config.groups]
    assert [len(group.layer_names) for group in made.config.groups] == layers
    assert unpadded == page_bytes
    assert len(canonical.tensors) == tensors
    assert slot_layout(canonical).slot_bytes == block_bytes


@pytest.mark.parametrize(
    ("family", "attending"),
    [
        ("gemma_3_27b", range(5, 62, 6)),
        ("gpt_oss_20b", range(1, 24, 2)),
        ("jamba", range(4, 32, 8)),
        ("nemotron_h_8b", range(7, 41, 11)),
        ("qwen_3_next", range(3, 48, 4)),
    ],
)
def test_a_familys_layers_with_full_attention_are_where_the_model_has_them(family: str, attending: range) -> None:
    made = next(one for one in FAMILIES if one.__name__ == family)(1)
    full = [name for group in made.config.groups if group.attention == "full_attention" for name in group.layer_names]
    assert full == [f"layers.{layer}" for layer in attending]


def ways(family: Any) -> list[Any]:
    """Return a family's pages as they come, and in rows where they can lie so."""
    made = family(1)
    own = [] if family is deepseek_v4 else [pytest.param(family, False, id=family.__name__)]
    refused = packing_refusal(made.config, made.axes)
    return own if refused else [*own, pytest.param(family, True, id=f"{family.__name__} in rows")]


@pytest.mark.parametrize(("family", "in_rows"), [way for family in FAMILIES for way in ways(family)])
def test_a_familys_chunks_come_back_bit_for_bit(family: Any, in_rows: bool) -> None:
    made = family(len(SHAPES[family.__name__][0]) + 1)
    layers, canonical = allocated(made, in_rows=in_rows)
    groups = [GroupBlocks([block], [block + 1]) for block in range(len(made.config.groups))]
    for seed, memory in enumerate(storages(layers).values()):
        fill(memory, seed)
    stored = contents(made.config, made.axes, layers, groups)
    slots = torch.zeros((len(groups) + 1, slot_layout(canonical).slot_bytes), dtype=torch.int8)
    with TransferWorker(canonical, slots) as worker:
        worker.submit_store(1, groups)
        assert worker.wait([1])
        for memory in storages(layers).values():
            memory.zero_()
        worker.submit_load(2, groups)
        assert worker.wait([2])
    assert contents(made.config, made.axes, layers, groups) == stored
