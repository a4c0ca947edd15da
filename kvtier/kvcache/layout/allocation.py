"""Allocations of a model's caches: a tensor for each of its configuration's, or one for all layers, in rows.

In rows, a block's pages of every layer lie side by side. A chunk then moves as one copy instead of one a layer. Groups
lie over each other, each from the start of the row on, since a block belongs to one group at a time. If kernels take
smaller blocks, a row is cut into as many equal parts, and each part has all layers. So a layer's kernel blocks keep one
stride.
"""

from collections.abc import Mapping
from math import lcm
from typing import NamedTuple

import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.axes import AxesOf, CacheAxes, layer_views
from kvtier.kvcache.layout.canonical import CanonicalKVCaches, DataRef, LayerCache
from kvtier.kvcache.layout.mapping import row_mapping
from kvtier.kvcache.layout.model import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MambaSpec,
    ParallelConfig,
    UniformSpecs,
)


def allocate_tensors(config: KVCacheConfig, axes: AxesOf, device: torch.device | str = "cpu") -> dict[str, LayerCache]:
    """Allocate the caches, zero at first: layers that share a tensor get views of the same bytes.

    Pages lie `page_bytes` apart. If a block is several kernel blocks, these lie at equal distances. So a padded page
    cannot be split, and axes around blocks leave no room for padding. Both raise `ConfigError`.
    """
    layers = dict[str, LayerCache]()
    group_of = config.group_of
    for tensor in config.tensors:
        memory = torch.zeros(tensor.size_bytes, dtype=torch.int8, device=device)
        for layer in tensor.shared_by:
            group = group_of[layer]
            spec, of_layer = group.spec_of(layer), axes.get(layer)
            padded = spec.page_bytes > spec.unpadded_page_bytes
            if padded and group.kernel_blocks > 1:
                raise ConfigError(f"{layer}: a padded page cannot be split into {group.kernel_blocks} kernel blocks")
            if padded and of_layer is not None and of_layer.outside_blocks:
                raise ConfigError(f"{layer}: pages with axes {of_layer.outside_blocks} around blocks cannot be padded")
            around = of_layer is not None and of_layer.outside_blocks
            layers[layer] = layer_views(
                memory,
                layer,
                spec,
                of_layer,
                config.num_blocks,
                kernel_blocks=group.kernel_blocks,
                block_stride_bytes=None if around else spec.page_bytes // group.kernel_blocks,
            )
    return layers


class RowCaches(NamedTuple):
    """All layers' caches in one tensor."""

    rows: torch.Tensor  # (num_blocks, row_bytes), int8.
    layers: dict[str, LayerCache]  # Views of it, each as its backend wants it.
    canonical: CanonicalKVCaches  # The one tensor, and one reference a group.


def packing_refusal(config: KVCacheConfig, axes: Mapping[str, CacheAxes | None]) -> str:
    """Return the reason why blocks' pages cannot lie side by side in rows; empty if they can.

    `axes` has each layer's, None where its backend has no cache shape of its own. Pages of different sizes are packed
    only if they are of one type of attention.
    """
    uniform = any(isinstance(group.spec, UniformSpecs) for group in config.groups)
    return ("" if uniform else _unequal(config)) or _not_leading(config, axes)


def _unequal(config: KVCacheConfig) -> str:
    """Return the reason why pages and tensors are not alike."""
    specs = {layer: group.spec_of(layer) for group in config.groups for layer in group.layer_names}
    for layer, spec in specs.items():
        if not isinstance(spec, AttentionSpec):
            return f"{layer} is not attention"
    page_sizes = sorted({spec.page_bytes for spec in specs.values()})
    if len(page_sizes) > 1:
        return f"page sizes differ: {page_sizes} bytes"
    tensor_sizes = sorted({tensor.size_bytes for tensor in config.tensors})
    return f"tensor sizes differ: {tensor_sizes} bytes" if len(tensor_sizes) > 1 else ""


def _not_leading(config: KVCacheConfig, axes: Mapping[str, CacheAxes | None]) -> str:
    """Return the reason why blocks are not the outermost axis in memory."""
    for group in config.groups:
        for layer, spec in zip(group.layer_names, group.specs, strict=True):
            if not isinstance(spec, AttentionSpec):
                continue
            of_layer = axes.get(layer)
            if of_layer is None or of_layer.memory is None:
                return f"the backend of {layer} has no stride order"
            if of_layer.outside_blocks:
                return f"blocks do not lead in the stride order {of_layer.memory} of {layer}"
    return ""


def allocate_rows(
    config: KVCacheConfig, axes: AxesOf, device: torch.device | str = "cpu", *, parallel: ParallelConfig | None = None
) -> RowCaches:
    """Allocate all layers' caches, zero at first, as one `(num_blocks, row_bytes)` int8 tensor.

    A row is as long as the longest group's pages; equal pages make it `page_bytes x layers`. Raises `ConfigError` for
    caches that do not fit into rows (see `packing_refusal`).
    """
    if refused := _not_leading(config, axes):
        raise ConfigError(refused)
    row_bytes = _row_bytes(config)
    rows = torch.zeros((config.num_blocks, row_bytes), dtype=torch.int8, device=device)
    layers = dict[str, LayerCache]()
    refs = list[tuple[DataRef, ...]]()
    for group in config.groups:
        stride_bytes, offset_bytes = row_bytes // group.kernel_blocks, 0
        for layer, spec in zip(group.layer_names, group.specs, strict=True):
            layers[layer] = layer_views(
                rows,
                layer,
                spec,
                axes.get(layer),
                config.num_blocks,
                kernel_blocks=group.kernel_blocks,
                offset_bytes=offset_bytes,
                block_stride_bytes=stride_bytes,
            )
            offset_bytes += spec.page_bytes // group.kernel_blocks
        used_bytes = row_bytes - stride_bytes + offset_bytes
        mapping = row_mapping(group.specs, used_bytes, parallel or ParallelConfig())
        refs.append((DataRef(0, used_bytes, group.layer_names, mapping),))
    return RowCaches(rows, layers, CanonicalKVCaches((rows,), tuple(refs)))


def _row_bytes(config: KVCacheConfig) -> int:
    """Return the length of a row: a multiple of what each layer's elements and each group's kernel blocks need."""
    longest = max(group.page_bytes for group in config.groups)
    multiple = lcm(*(_multiple(group) for group in config.groups))
    return -(-longest // multiple) * multiple


def _multiple(group: KVCacheGroup) -> int:
    for layer, spec in zip(group.layer_names, group.specs, strict=True):
        if group.kernel_blocks > 1 and isinstance(spec, MambaSpec):
            raise ConfigError(f"{layer}: a state cannot be split into {group.kernel_blocks} kernel blocks")
        if spec.page_bytes % (_item_bytes(spec) * group.kernel_blocks):
            raise ConfigError(
                f"{layer}: pages of {spec.page_bytes:,} bytes do not leave the next layer's whole elements, "
                f"in {group.kernel_blocks} kernel blocks"
            )
    return group.kernel_blocks * lcm(*(_item_bytes(spec) for spec in group.specs))


def _item_bytes(spec: LayerSpec) -> int:
    """Return the bytes of the largest element of a layer."""
    if isinstance(spec, MambaSpec):
        return max(dtype.itemsize for dtype in spec.dtypes)
    assert isinstance(spec, AttentionSpec), spec
    return spec.dtype.itemsize
