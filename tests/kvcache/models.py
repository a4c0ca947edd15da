"""Random models and requests, and what the bytes of their layers are, worked out from the tensors alone."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from msgspec.structs import replace

from kvtier.kvcache.layout import (
    AttentionSpec,
    CacheAxes,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    allocate_rows,
    allocate_tensors,
    canonical_kv_caches,
)
from kvtier.kvcache.layout import axes as axes_of
from kvtier.kvcache.transfer import GroupBlocks

LEADING = (axes_of.KV_SPLIT_NHD, axes_of.KV_SPLIT_HND, axes_of.KV_JOINED_NHD, axes_of.KV_JOINED_HND)
ALL_AXES = (*LEADING, axes_of.KV_FRONT_NHD, axes_of.KV_FRONT_HND, axes_of.HEADS_FRONT)
DTYPES = (torch.bfloat16, torch.float32, torch.uint8)
HOW = ("own tensors", "shared tensors", "rows", "rows found again")


class Model(NamedTuple):
    config: KVCacheConfig
    axes: dict[str, CacheAxes]
    how: str
    blocks_per_chunk: int

    @property
    def in_rows(self):
        return self.how.startswith("rows")

    def allocate(self, device):
        if self.in_rows:
            rows = allocate_rows(self.config, self.axes, device)
            found = canonical_kv_caches(self.config, rows.layers, self.axes) if self.how != "rows" else rows.canonical
            return rows.layers, found
        shared = [self.config]
        if self.how == "own tensors":  # Allocated group by group, whose pages may then differ.
            shared = [replace(self.config, groups=(group,)) for group in self.config.groups]
        layers = {
            layer: cache for config in shared for layer, cache in allocate_tensors(config, self.axes, device).items()
        }
        return layers, canonical_kv_caches(self.config, layers, self.axes)


@st.composite
def models(draw):
    """Models of one to four groups: kinds of layers, padding, orders of axes, sharing and splits into kernel blocks."""
    how, num_blocks = draw(st.sampled_from(HOW)), draw(st.integers(4, 9))
    block_size = draw(st.sampled_from([2, 4, 6]))
    kernel_blocks = draw(st.sampled_from([1, 2])) if how != "shared tensors" else 1
    drawn, axes = [], {}
    for group in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["heads", "latent", "state", "differing"]))
        if kind == "state" and kernel_blocks > 1:
            kind = "heads"
        names = [f"g{group}.l{layer}" for layer in range(draw(st.integers(1, 3)))]
        padding = draw(st.sampled_from([0, 16, 64])) if kernel_blocks == 1 else 0
        first = draw(specs(kind, block_size))
        several = kind == "differing" and how != "shared tensors"
        layers = {name: draw(specs(kind, block_size)) if several else first for name in names}
        padded = {name: _padded(spec, padding) for name, spec in layers.items()}
        orders = LEADING if how != "own tensors" or padding else ALL_AXES
        for name, spec in padded.items():
            if isinstance(spec, AttentionSpec):
                axes[name] = axes_of.LATENT if spec.head_size_v == 0 else draw(st.sampled_from(orders))
        drawn.append(padded)
    if how == "shared tensors":
        page_bytes = max(spec.page_bytes for group in drawn for spec in group.values())
        drawn = [{name: _widened(spec, page_bytes) for name, spec in group.items()} for group in drawn]
    kernel_block_size = block_size // kernel_blocks if kernel_blocks > 1 else None
    groups = tuple(KVCacheGroup(layers=layers, kernel_block_size=kernel_block_size) for layers in drawn)
    return Model(KVCacheConfig(num_blocks=num_blocks, groups=groups), axes, how, draw(st.integers(1, 4)))


@st.composite
def specs(draw, kind, block_size):
    dtype = draw(st.sampled_from(DTYPES))
    if kind == "state":
        shapes = draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([4, 8])), min_size=1, max_size=3))
        return MambaSpec(block_size=block_size, shapes=tuple(shapes), dtypes=(dtype,) * len(shapes))
    size = draw(st.sampled_from([4, 8]))
    if kind == "latent":
        return AttentionSpec(block_size=block_size, num_kv_heads=1, head_size=size, head_size_v=0, dtype=dtype)
    return AttentionSpec(block_size=block_size, num_kv_heads=draw(st.integers(1, 3)), head_size=size, dtype=dtype)


def _padded(spec, padding):
    return _widened(spec, -(-spec.page_bytes // 16) * 16 + padding) if padding else spec


def _widened(spec, page_bytes):
    return replace(spec, padded_page_bytes=-(-page_bytes // 16) * 16)


@st.composite
def requests(draw, config, blocks_per_chunk, num_rows):
    blocks = draw(st.permutations(range(config.num_blocks)))
    rows, groups = draw(st.permutations(range(num_rows))), list[GroupBlocks]()
    for _ in config.groups:
        count = draw(st.integers(0, len(blocks)))
        first_block = draw(st.integers(0, 2 * blocks_per_chunk))
        chunks = -(-(first_block % blocks_per_chunk + count) // blocks_per_chunk) if count else 0
        if chunks > len(rows):
            count = chunks = 0
        groups.append(GroupBlocks(blocks[:count], rows[:chunks], first_block))
        blocks, rows = blocks[count:], rows[chunks:]
    return groups


def tensors_of(cache):
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def contents(config, axes, layers, groups):
    """Return what the layers of each group keep in its blocks, element by element in the order of their shapes."""
    found = dict[str, list[bytes]]()
    for group, request in zip(config.groups, groups, strict=True):
        for layer in group.layers:
            found[layer] = [
                block_bytes(part, axes.get(layer), group.kernel_blocks, block)
                for block in request.blocks
                for part in tensors_of(layers[layer])
            ]
    return found


def block_bytes(tensor, axes, kernel_blocks, block):
    axis = axes.shape.index("B") if axes else 0
    part = tensor.narrow(axis, block * kernel_blocks, kernel_blocks) if axes else tensor[block]
    return part.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def storages(layers):
    found = dict[int, torch.Tensor]()
    for tensor in (part for cache in layers.values() for part in tensors_of(cache)):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    return found


def touched(model, layers, canonical, groups):
    """Return which bytes of every allocation are the groups' in their blocks; whole rows where layers are in rows."""
    masks = {address: torch.zeros(len(data), dtype=torch.bool) for address, data in storages(layers).items()}
    for number, (group, request) in enumerate(zip(model.config.groups, groups, strict=True)):
        for block in request.blocks:
            if model.in_rows:
                for ref in canonical.groups[number]:
                    rows = canonical.tensors[ref.tensor]
                    start = rows.storage_offset() + int(block) * rows.stride(0)
                    masks[rows.untyped_storage().data_ptr()][start:][: ref.page_bytes] = True
                continue
            for layer in group.layers:
                of_layer = model.axes.get(layer)
                for part in tensors_of(layers[layer]):
                    mask = masks[part.untyped_storage().data_ptr()]
                    shape = (*part.shape, part.element_size())
                    strides = (*(stride * part.element_size() for stride in part.stride()), 1)
                    marked = mask.as_strided(shape, strides, part.storage_offset() * part.element_size())
                    axis = of_layer.shape.index("B") if of_layer else 0
                    marked.narrow(axis, int(block) * group.kernel_blocks, group.kernel_blocks).fill_(True)
    return masks


def fill(tensor, seed):
    data = np.random.default_rng(seed).integers(0, 256, tensor.nbytes, dtype=np.uint8)
    tensor.view(torch.uint8).copy_(torch.from_numpy(data).view(tensor.shape))
