"""KV caches with known bytes: small ones of every layout family, and transfers made by hand to compare with.

A transfer is repeated on a twin of the caches in host memory, page by page, with slices alone. Rows and caches are
compared whole, so a byte that should not have changed is found, too.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from kvtier.kvcache import layout
from kvtier.kvcache.layout import CanonicalKVCaches, LayerSpec
from kvtier.kvcache.layout import axes as axes_of
from kvtier.kvcache.layout.axes import CacheAxes
from kvtier.kvcache.transfer import Direction, GroupBlocks, SlotLayout
from kvtier.tools.selftest.device import Wrong

BLOCKS = 24


class Family(NamedTuple):
    """A layout: the specs of each group's layers, the order of their axes, and whether a block's pages share a row."""

    name: str
    groups: Sequence[Sequence[LayerSpec]]
    axes: CacheAxes
    in_rows: bool = False
    blocks_per_chunk: int = 1
    kernel_tokens: int | None = None

    @property
    def config(self) -> layout.KVCacheConfig:
        groups = (
            layout.KVCacheGroup(
                layers={f"{group}.{layer}": spec for layer, spec in enumerate(specs)},
                kernel_block_size=self.kernel_tokens,
            )
            for group, specs in enumerate(self.groups)
        )
        return layout.KVCacheConfig(num_blocks=BLOCKS, groups=tuple(groups))


def families() -> list[Family]:
    """Return one of each layout of LLM engines."""
    bf16, fp8 = [_attention(torch.bfloat16)] * 8, [_attention(torch.float8_e4m3fn)] * 8
    mla = layout.AttentionSpec(block_size=16, num_kv_heads=1, head_size=576, head_size_v=0, dtype=torch.bfloat16)
    attending = [_attention(torch.bfloat16, block_size=80, heads=2)] * 2
    states = [
        layout.MambaSpec(
            block_size=80,
            shapes=((3, 256), (256, 16)),
            dtypes=(torch.bfloat16, torch.float32),
            padded_page_bytes=attending[0].page_bytes,
        )
    ] * 2
    return [
        Family("a tensor for each layer, bf16", [bf16], axes_of.KV_JOINED_NHD, blocks_per_chunk=4),
        Family("keys in front, fp8", [fp8], axes_of.KV_FRONT_HND),
        Family("heads in front, bf16", [bf16], axes_of.HEADS_FRONT),
        Family("contiguous: all layers in one row, fp8", [fp8], axes_of.KV_SPLIT_HND, in_rows=True),
        Family("contiguous, in kernel blocks, bf16", [bf16], axes_of.KV_JOINED_NHD, True, kernel_tokens=8),
        Family("MLA, bf16", [[mla] * 8], axes_of.LATENT, blocks_per_chunk=2),
        Family("packed: latents of three lengths in one row", [_latents() * 3], axes_of.LATENT, in_rows=True),
        Family("windows and full attention in turn, bf16", [bf16[:4]] * 2, axes_of.KV_JOINED_HND, False, 3),
        Family("hybrid: states and attention, padded", [attending, states, states, states], axes_of.KV_JOINED_NHD),
    ]


def _attention(dtype: torch.dtype, block_size: int = 16, heads: int = 4) -> LayerSpec:
    return layout.AttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=64, dtype=dtype)


def _latents() -> list[LayerSpec]:
    return [
        layout.AttentionSpec(
            block_size=64,
            num_kv_heads=1,
            head_size=128,
            dtype=torch.uint8,
            state_bytes=size,
            tokens_per_state=tokens,
            align_bytes=576,
        )
        for size, tokens in ((584, 4), (132, 4), (584, 16))
    ]


class Caches(NamedTuple):
    """A family's caches on one device."""

    canonical: CanonicalKVCaches
    memories: list[torch.Tensor]  # All bytes of every allocation, as uint8.

    def fill(self, seed: int) -> None:
        """Fill all memory with random bytes that depend on the seed alone."""
        for number, memory in enumerate(self.memories):
            memory.copy_(random_bytes((memory.nbytes,), seed + number).view(torch.uint8))


def caches_of(family: Family, place: torch.device) -> Caches:
    """Allocate a family's caches."""
    config = family.config
    axes = {
        name: family.axes
        for group in config.groups
        for name, spec in group.layers.items()
        if isinstance(spec, layout.AttentionSpec)
    }
    if family.in_rows:
        canonical = layout.allocate_rows(config, axes, place).canonical
    else:
        canonical = layout.canonical_kv_caches(config, layout.allocate_tensors(config, axes, place), axes)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in canonical.tensors}
    return Caches(canonical, [torch.empty(0, dtype=torch.uint8, device=place).set_(each) for each in storages.values()])


def plain_caches(count: int, blocks: int, page_bytes: int, place: torch.device) -> CanonicalKVCaches:
    """Allocate layers with full attention whose pages have this length, a multiple of 2 KiB."""
    layers = [_attention(torch.bfloat16, page_bytes // 2_048, heads=8)] * count
    config = msgspec.structs.replace(Family("plain", [layers], axes_of.KV_JOINED_HND).config, num_blocks=blocks)
    axes = dict.fromkeys(config.groups[0].layers, axes_of.KV_JOINED_HND)
    return layout.canonical_kv_caches(config, layout.allocate_tensors(config, axes, place), axes)


def random_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return random bytes in host memory, as int8."""
    return torch.as_tensor(np.random.default_rng(seed).integers(-128, 128, shape, dtype=np.int8))


def requests_of(family: Family, rows: int, seed: int) -> list[GroupBlocks]:
    """Return random blocks of each group, for random rows, from any place in a chunk on. No two groups share any."""
    dice = random.Random(seed)
    groups, per_chunk = len(family.config.groups), family.blocks_per_chunk
    blocks, free = dice.sample(range(BLOCKS), BLOCKS), dice.sample(range(rows), rows)
    found = list[GroupBlocks]()
    for group in range(groups):
        count, first = dice.randint(1, BLOCKS // groups), dice.randrange(2 * per_chunk)
        chunks = -(-(first % per_chunk + count) // per_chunk)
        found.append(GroupBlocks(blocks[group::groups][:count], free[group::groups][:chunks], first))
    return found


def move_by_hand(
    direction: Direction,
    caches: CanonicalKVCaches,
    slots: SlotLayout,
    rows: torch.Tensor,
    groups: Sequence[GroupBlocks],
) -> None:
    """Do a transfer in host memory, page by page. The slots are at the start of `rows`."""
    for refs, request in zip(caches.groups, groups, strict=True):
        for ref in refs:
            for index, block in enumerate(request.blocks):
                chunk, position = divmod(request.first_block % slots.blocks_per_chunk + index, slots.blocks_per_chunk)
                start = slots.offsets[ref.tensor] + position * slots.page_bytes[ref.tensor]
                in_row = rows[int(request.rows[chunk]), start : start + ref.page_bytes]
                page = caches.tensors[ref.tensor][int(block), : ref.page_bytes]
                target, source = (in_row, page) if direction is Direction.STORE else (page, in_row)
                target.copy_(source)


def require_same(what: str, found: torch.Tensor, right: torch.Tensor) -> None:
    """Compare bytes on the device of `found`; `Wrong` counts those that differ and names the first."""
    differs = (found.view(torch.uint8) != right.to(found.device).view(torch.uint8)).flatten()
    if count := int(differs.sum()):
        first = int(differs.to(torch.uint8).argmax())
        raise Wrong(f"{what}: {count:,} of {differs.numel():,} bytes are wrong, the first at {first:,}")
