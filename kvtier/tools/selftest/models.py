"""Small caches of every layout family, filled with known bytes, and what must be where after a transfer.

What is right is worked out by hand: on a twin of the caches in host memory, page by page, by slices alone. Rows and
caches are compared whole, so bytes that should have stayed are seen, too.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch

from kvtier.kvcache.layout import (
    AxesOf,
    CanonicalKVCaches,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    LayerCache,
    LayerSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    UniformSpecs,
    allocate_rows,
    allocate_tensors,
    canonical_kv_caches,
    group_layers,
    padded_to_one_page,
)
from kvtier.kvcache.layout.axes import (
    HEADS_FRONT,
    KV_FRONT_HND,
    KV_JOINED_HND,
    KV_JOINED_NHD,
    KV_SPLIT_HND,
    LATENT,
    CacheAxes,
)
from kvtier.kvcache.transfer import Direction, GroupBlocks, SlotLayout
from kvtier.tools.selftest.device import Wrong

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
BLOCKS = 24
TOKENS = 16  # Of a block.


class Family(NamedTuple):
    """A layout: what a model's layers keep, in which order, and whether a block's pages share one row."""

    name: str
    config: KVCacheConfig
    axes: AxesOf
    in_rows: bool = False
    blocks_per_chunk: int = 1


def families() -> tuple[Family, ...]:
    """Return one of each layout that LLM engines have."""
    return (
        _alike("a tensor for each layer, bf16", _full(BF16), KV_JOINED_NHD, blocks_per_chunk=4),
        _alike("keys in front, fp8", _full(FP8), KV_FRONT_HND),
        _alike("heads in front, bf16", _full(BF16), HEADS_FRONT),
        _alike("contiguous: all layers in one row, fp8", _full(FP8), KV_SPLIT_HND, in_rows=True),
        _alike("contiguous, in kernel blocks, bf16", _full(BF16), KV_JOINED_NHD, in_rows=True, kernel_tokens=8),
        _alike("MLA, bf16", MLASpec(block_size=TOKENS, head_size=576, dtype=BF16), LATENT, blocks_per_chunk=2),
        _packed(),
        _windows(),
        _hybrid(),
    )


def _full(dtype: torch.dtype, heads: int = 4) -> LayerSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=heads, head_size=64, dtype=dtype)


def _alike(
    name: str,
    spec: LayerSpec,
    axes: CacheAxes,
    *,
    in_rows: bool = False,
    blocks_per_chunk: int = 1,
    kernel_tokens: int | None = None,
) -> Family:
    layers = [f"layers.{number}" for number in range(6)]
    tensors = tuple(KVCacheTensor(size_bytes=BLOCKS * spec.page_bytes, shared_by=(layer,)) for layer in layers)
    group = KVCacheGroup(layer_names=tuple(layers), spec=spec, kernel_block_size=kernel_tokens)
    config = KVCacheConfig(num_blocks=BLOCKS, tensors=tensors, groups=(group,))
    return Family(name, config, dict.fromkeys(layers, axes), in_rows, blocks_per_chunk)


def _packed() -> Family:
    """Latents of three lengths, some of several tokens: pages that differ, side by side in rows."""
    specs: dict[str, LayerSpec] = {
        f"layers.{number}": MLASpec(
            block_size=64,
            head_size=128,
            dtype=torch.uint8,
            state_bytes=(584, 132, 584)[number % 3],
            tokens_per_state=(4, 4, 16)[number % 3],
            align_bytes=576,
        )
        for number in range(6)
    }
    group = KVCacheGroup(layer_names=tuple(specs), spec=UniformSpecs(specs))
    tensor = KVCacheTensor(size_bytes=BLOCKS * group.page_bytes, shared_by=tuple(specs))
    config = KVCacheConfig(num_blocks=BLOCKS, tensors=(tensor,), groups=(group,))
    return Family("packed: latents that differ in one row, uint8", config, dict.fromkeys(specs, LATENT), in_rows=True)


def _windows() -> Family:
    window = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=4, head_size=64, dtype=BF16, sliding_window=128)
    specs = {f"layers.{number}": _full(BF16) if number % 2 else window for number in range(8)}
    axes = dict.fromkeys(specs, KV_JOINED_HND)
    return Family("windows and full attention in turn, bf16", group_layers(specs, BLOCKS), axes, blocks_per_chunk=3)


def _hybrid() -> Family:
    state = MambaSpec(block_size=80, shapes=((3, 256), (256, 16)), dtypes=(BF16, torch.float32))
    attention = FullAttentionSpec(block_size=80, num_kv_heads=2, head_size=64, dtype=BF16)
    attending = [f"layers.{number}" for number in range(3, 8, 4)]
    specs = padded_to_one_page(
        {f"layers.{number}": attention if f"layers.{number}" in attending else state for number in range(8)}
    )
    return Family(
        "hybrid: states and attention, padded", group_layers(specs, BLOCKS), dict.fromkeys(attending, KV_JOINED_NHD)
    )


class Caches(NamedTuple):
    """A family's caches on one device, and all bytes of every allocation."""

    layers: dict[str, LayerCache]
    canonical: CanonicalKVCaches
    memories: list[torch.Tensor]  # Of uint8, in the order of the first canonical tensor on each.

    @classmethod
    def of(cls, family: Family, place: torch.device) -> Self:
        if family.in_rows:
            rows = allocate_rows(family.config, family.axes, place)
            layers, canonical = rows.layers, rows.canonical
        else:
            layers = allocate_tensors(family.config, family.axes, place)
            canonical = canonical_kv_caches(family.config, layers, family.axes)
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in canonical.tensors}
        whole = [torch.empty(0, dtype=torch.uint8, device=place).set_(storage) for storage in storages.values()]
        return cls(layers, canonical, whole)

    def fill(self, seed: int) -> None:
        """Fill all memory with random bytes that the seed decides, whatever the device."""
        for number, memory in enumerate(self.memories):
            memory.copy_(random_bytes(memory.nbytes, seed + number))


def random_bytes(count: int, seed: int) -> torch.Tensor:
    """Return random bytes in host memory, of uint8."""
    return torch.as_tensor(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def requests_of(family: Family, rows: int, seed: int) -> list[GroupBlocks]:
    """Return random blocks for each group, in random rows, from anywhere in a chunk on. No two share any."""
    dice = random.Random(seed)
    groups, per_chunk = len(family.config.groups), family.blocks_per_chunk
    blocks, free = dice.sample(range(BLOCKS), BLOCKS), dice.sample(range(rows), rows)
    found = list[GroupBlocks]()
    for _ in range(groups):
        count, first = dice.randint(1, BLOCKS // groups), dice.randrange(2 * per_chunk)
        chunks = -(-(first % per_chunk + count) // per_chunk)
        found.append(GroupBlocks(blocks[:count], free[:chunks], first))
        blocks, free = blocks[count:], free[chunks:]
    return found


def move_by_hand(
    direction: Direction,
    caches: CanonicalKVCaches,
    layout: SlotLayout,
    rows: torch.Tensor,
    groups: Sequence[GroupBlocks],
) -> None:
    """Do what a transfer must do, in host memory, one page after the other. `rows` begin with the slots."""
    for refs, request in zip(caches.groups, groups, strict=True):
        for ref in refs:
            for index, block in enumerate(request.blocks):
                chunk, position = divmod(request.first_block % layout.blocks_per_chunk + index, layout.blocks_per_chunk)
                start = layout.offsets[ref.tensor] + position * layout.page_bytes[ref.tensor]
                in_row = rows[int(request.rows[chunk]), start : start + ref.page_bytes]
                page = caches.tensors[ref.tensor][int(block), : ref.page_bytes]
                target, source = (in_row, page) if direction is Direction.STORE else (page, in_row)
                target.copy_(source)


def require_same(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise `Wrong`, naming the first byte, unless both have the same bytes, on the device of `found`."""
    found = found.view(torch.uint8)
    wanted = wanted.view(torch.uint8).to(found.device)
    if not torch.equal(found, wanted):
        differs = (found != wanted).flatten().nonzero().flatten()
        first = int(differs[0])
        raise Wrong(
            f"{what}: {len(differs):,} of {found.numel():,} bytes are wrong, the first at {first:,}: "
            f"{int(found.flatten()[first])} instead of {int(wanted.flatten()[first])}"
        )
