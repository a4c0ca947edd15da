"""Canonical KV caches: any LLM engine's caches as plain tensors of pages, without copying a byte.

What moves is pages: the i-th row of a `(num_blocks, page_bytes)` int8 tensor. Each group refers to the tensors that
hold its layers' pages; layers that share bytes share a tensor. Where a block's pages of several layers lie in one row,
the row is the page, referred to once: a chunk then moves as one copy instead of one a layer.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from math import lcm
from typing import NamedTuple

import msgspec
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.axes import (
    AxesOf,
    BlockRun,
    CacheAxes,
    block_runs,
    cache_view,
    state_views,
    storage_of,
    view_of,
)
from kvtier.kvcache.layout.model import AttentionSpec, KVCacheConfig, KVCacheGroup, MambaSpec

LayerCache = torch.Tensor | Sequence[torch.Tensor]
"""An attention layer's cache, or a state-space layer's states."""

UNNAMED = "an attention layer without axes: its backend must name them"


class PageRun(msgspec.Struct, frozen=True):
    """Fragment i: `fragment_size` bytes from `offset + i * stride` on, in the worker's page and the canonical one."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int = 1
    local_stride: int = 0
    canonical_stride: int = 0


class PageMapping(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of a canonical page, which is what a block of a layer would be in one worker alone.

    Loads read all runs; stores write them when it is this worker's turn. Names and runs are those of vLLM's mappings.
    """

    canonical_page_size_bytes: int
    runs: tuple[PageRun, ...]
    num_writers: int = 1  # Workers that hold these very bytes.
    writer_index: int = 0


class DataRef(NamedTuple):
    """A reference to the pages of one layer, or of several that share them."""

    tensor: int  # Index of the tensor.
    page_bytes: int  # Of each of its rows, without padding.
    layers: tuple[str, ...] = ()
    mapping: PageMapping | None = None  # To the canonical page; None: the page is one already.


class CanonicalKVCaches(NamedTuple):
    """Every layer's pages, each byte in one tensor at most."""

    tensors: tuple[torch.Tensor, ...]  # Each (num_blocks, page_bytes), int8, rows perhaps further apart.
    groups: tuple[tuple[DataRef, ...], ...]

    @property
    def num_blocks(self) -> int:
        return self.tensors[0].shape[0]


class RowCaches(NamedTuple):
    """All layers' caches in one tensor."""

    rows: torch.Tensor  # (num_blocks, row_bytes), int8.
    layers: dict[str, LayerCache]  # Views of it, each as its backend wants it.
    canonical: CanonicalKVCaches  # The one tensor, and one reference a group.


def allocate_tensors(config: KVCacheConfig, axes: AxesOf, device: torch.device | str = "cpu") -> dict[str, LayerCache]:
    """Allocate the caches, zero at first, a tensor for each layer of the largest group.

    The i-th layers of all groups share the i-th tensor, so their pages must be of one length. Pages lie `page_bytes`
    apart. If a block is several kernel blocks, these lie at equal distances. So a padded page cannot be split, and axes
    around blocks leave no room for padding. Raises `ConfigError` otherwise.
    """
    layers = dict[str, LayerCache]()
    for sharing in zip_longest(*([(group, layer) for layer in group.layers] for group in config.groups)):
        using = [each for each in sharing if each is not None]
        pages = {layer: group.layers[layer].page_bytes for group, layer in using}
        if len(set(pages.values())) > 1:
            raise ConfigError(f"layers that share a tensor need pages of one length: {pages} bytes")
        memory = torch.zeros(config.num_blocks * max(pages.values()), dtype=torch.int8, device=device)
        for group, layer in using:
            spec, of_layer = group.layers[layer], axes.get(layer)
            around = "" if of_layer is None else of_layer.outside_blocks
            if spec.page_bytes > spec.unpadded_page_bytes and group.kernel_blocks > 1:
                raise ConfigError(f"{layer}: a padded page cannot be split into {group.kernel_blocks} kernel blocks")
            if spec.page_bytes > spec.unpadded_page_bytes and around:
                raise ConfigError(f"{layer}: pages with axes {around} around blocks cannot be padded")
            stride_bytes = None if around else spec.page_bytes // group.kernel_blocks
            layers[layer] = _layer_views(memory, group, layer, of_layer, config.num_blocks, stride_bytes=stride_bytes)
    return layers


def allocate_rows(config: KVCacheConfig, axes: AxesOf, device: torch.device | str = "cpu") -> RowCaches:
    """Allocate all layers' caches, zero at first, as one `(num_blocks, row_bytes)` int8 tensor.

    A row is as long as the longest group's pages; equal pages make it `page_bytes x layers`. Groups lie over each
    other, each from the start of the row on. If kernels take smaller blocks, a row is cut into as many equal parts, and
    each part has all layers. So a layer's kernel blocks keep one stride. Raises `ConfigError` for caches that do not
    fit into rows.
    """
    longest = max(group.page_bytes for group in config.groups)
    multiple = lcm(*(_multiple(group) for group in config.groups))
    row_bytes = -(-longest // multiple) * multiple
    rows = torch.zeros((config.num_blocks, row_bytes), dtype=torch.int8, device=device)
    layers = dict[str, LayerCache]()
    refs = list[tuple[DataRef, ...]]()
    for group in config.groups:
        stride_bytes, offset_bytes = row_bytes // group.kernel_blocks, 0
        for layer, spec in group.layers.items():
            of_layer = axes.get(layer)
            if of_layer is not None and of_layer.outside_blocks:
                raise ConfigError(f"{layer}: blocks do not lead in memory ({of_layer.order})")
            layers[layer] = _layer_views(
                rows, group, layer, of_layer, config.num_blocks, offset_bytes=offset_bytes, stride_bytes=stride_bytes
            )
            offset_bytes += spec.page_bytes // group.kernel_blocks
        refs.append((DataRef(0, row_bytes - stride_bytes + offset_bytes, tuple(group.layers)),))
    return RowCaches(rows, layers, CanonicalKVCaches((rows,), tuple(refs)))


def _multiple(group: KVCacheGroup) -> int:
    """Return the bytes of which a row is a multiple: whole elements of each layer in each kernel block."""
    for layer, spec in group.layers.items():
        if group.kernel_blocks > 1 and isinstance(spec, MambaSpec):
            raise ConfigError(f"{layer}: a state cannot be split into {group.kernel_blocks} kernel blocks")
        if spec.page_bytes % (spec.item_bytes * group.kernel_blocks):
            raise ConfigError(
                f"{layer}: pages of {spec.page_bytes:,} bytes do not leave the next layer's whole elements, "
                f"in {group.kernel_blocks} kernel blocks"
            )
    return group.kernel_blocks * lcm(*(spec.item_bytes for spec in group.layers.values()))


def _layer_views(
    memory: torch.Tensor,
    group: KVCacheGroup,
    layer: str,
    axes: CacheAxes | None,
    num_blocks: int,
    *,
    stride_bytes: int | None,
    offset_bytes: int = 0,
) -> LayerCache:
    spec = group.layers[layer]
    try:
        if isinstance(spec, MambaSpec):
            return state_views(memory, spec, num_blocks, offset_bytes=offset_bytes, block_stride_bytes=stride_bytes)
        assert isinstance(spec, AttentionSpec), spec
        if axes is None:
            raise ConfigError(UNNAMED)
        return cache_view(
            memory,
            spec,
            axes,
            num_blocks,
            kernel_blocks=group.kernel_blocks,
            offset_bytes=offset_bytes,
            block_stride_bytes=stride_bytes,
        )
    except ConfigError as error:
        raise ConfigError(f"{layer}: {error}") from error


def canonical_kv_caches(config: KVCacheConfig, caches: Mapping[str, LayerCache], axes: AxesOf) -> CanonicalKVCaches:
    """Find the pages of a model's groups in the caches, which have the layers' names.

    Raises `ConfigError`, naming layer and stride, if a cache does not fit its spec, or only a copy could make it pages.
    """
    placed = {
        layer: _placed(layer, caches[layer], group, axes.get(layer), config.num_blocks)
        for group in config.groups
        for layer in group.layers
    }
    by_place = defaultdict[_Place, list[_Pages]](list)
    for pages in chain.from_iterable(placed.values()):
        by_place[pages.place].append(pages)
    number = {place: index for index, place in enumerate(by_place)}
    tensors = tuple(_tensor(sharing, config.num_blocks) for sharing in by_place.values())
    groups = list[tuple[DataRef, ...]]()
    for group in config.groups:
        users = defaultdict[int, list[_Pages]](list)
        for pages in chain.from_iterable(placed[layer] for layer in group.layers):
            users[number[pages.place]].append(pages)
        groups.append(tuple(_ref(index, tensors[index], using) for index, using in users.items()))
    return CanonicalKVCaches(tensors, tuple(groups))


_Place = tuple[int, int, int]


class _Pages(NamedTuple):
    """A run of pages of one layer in one storage."""

    layer: str
    storage: torch.Tensor  # Any tensor on it.
    blocks: BlockRun
    width_bytes: int  # With padding, as far as the storage goes.
    packed: bool  # Other pages lie in the same row.

    @property
    def place(self) -> _Place:
        """The key of runs that share their bytes: equal for all of them."""
        return (storage_of(self.storage), 0 if self.packed else self.blocks.offset_bytes, self.blocks.stride_bytes)


def _placed(
    layer: str, cache: LayerCache, group: KVCacheGroup, axes: CacheAxes | None, num_blocks: int
) -> list[_Pages]:
    spec = group.layers[layer]
    if isinstance(cache, torch.Tensor):
        storage, runs = cache, _attention_runs(layer, cache, group, axes, num_blocks)
    else:
        storage, runs = cache[0], [_states_run(layer, cache, num_blocks)]
    parts, first = len(runs), runs[0]
    if isinstance(spec, AttentionSpec) and first.extent_bytes * parts != spec.unpadded_page_bytes and not first.gap:
        raise ConfigError(
            f"{layer}: {parts} x {first.extent_bytes:,} bytes in a block (strides {tuple(storage.stride())}), "
            f"{spec.unpadded_page_bytes:,} in its spec's page"
        )
    return [_pages(layer, storage, run, spec.page_bytes // parts, num_blocks) for run in runs]


def _attention_runs(
    layer: str, cache: torch.Tensor, group: KVCacheGroup, axes: CacheAxes | None, num_blocks: int
) -> list[BlockRun]:
    if axes is None:
        raise ConfigError(f"{layer}: {UNNAMED}")
    blocks, axis = num_blocks * group.kernel_blocks, axes.shape.index("B")
    if cache.ndim != len(axes.shape) or cache.shape[axis] != blocks:
        raise ConfigError(
            f"{layer}: shape {tuple(cache.shape)} and strides {tuple(cache.stride())} given, "
            f"{blocks} blocks as axis {axis} of {axes.shape} accepted"
        )
    runs = block_runs(layer, cache, axis, num_blocks)
    if len(runs) > 2 * getattr(group.layers[layer], "num_kv_heads", 1):  # Keys and values of each head.
        raise ConfigError(
            f"{layer}: stride {cache.stride(axis)} of axis {axis}, its blocks, parts them into {len(runs)} pieces "
            f"of {runs[0].extent_bytes:,} bytes (strides {tuple(cache.stride())}): only a copy could join them"
        )
    return runs


def _states_run(layer: str, states: Sequence[torch.Tensor], num_blocks: int) -> BlockRun:
    runs = list[BlockRun]()
    for state in states:
        if not state.ndim or state.shape[0] != num_blocks:
            raise ConfigError(
                f"{layer}: state of shape {tuple(state.shape)} and strides {tuple(state.stride())}, "
                f"not {num_blocks} blocks first"
            )
        runs += block_runs(layer, state, 0, num_blocks)
    start = min(run.offset_bytes for run in runs)
    extent_bytes = max(run.offset_bytes + run.extent_bytes for run in runs) - start
    strides_bytes = {run.stride_bytes for run in runs} if num_blocks > 1 else {extent_bytes}
    storages = {storage_of(state) for state in states}
    if len(runs) > len(states) or len(storages) > 1 or len(strides_bytes) > 1 or extent_bytes > max(strides_bytes):
        raise ConfigError(
            f"{layer}: states with strides {[state.stride() for state in states]} in {len(storages)} allocations "
            "do not share one page a block"
        )
    return BlockRun(start, max(strides_bytes), extent_bytes, next((run.gap for run in runs if run.gap), ""))


def _pages(layer: str, storage: torch.Tensor, run: BlockRun, page_bytes: int, num_blocks: int) -> _Pages:
    if num_blocks == 1:  # A single block's stride says nothing; layers that share it must agree.
        run = run._replace(stride_bytes=max(page_bytes, run.extent_bytes))
    packed = run.stride_bytes > max(page_bytes, run.extent_bytes)
    if run.gap and not packed:
        raise ConfigError(f"{layer}: {run.gap}: only a copy could close the gap")
    last = run.offset_bytes + (num_blocks - 1) * run.stride_bytes
    width_bytes = min(page_bytes, run.stride_bytes, storage.untyped_storage().nbytes() - last)
    return _Pages(layer, storage, run, max(width_bytes, run.extent_bytes), packed)


def _tensor(sharing: list[_Pages], num_blocks: int) -> torch.Tensor:
    """Return the tensor that all these runs are rows of."""
    first = sharing[0]
    stride_bytes = first.blocks.stride_bytes
    start, width_bytes = first.blocks.offset_bytes, first.width_bytes  # One distance and one end: one width.
    if first.packed:
        start, width_bytes = _row(sharing, num_blocks), stride_bytes
    return view_of(first.storage, torch.int8, (num_blocks, width_bytes), (stride_bytes, 1), start)


def _row(sharing: list[_Pages], num_blocks: int) -> int:
    """Return the offset of the first row: 0, or the last that leaves the first page and the end in place."""
    row_bytes = sharing[0].blocks.stride_bytes
    size_bytes = sharing[0].storage.untyped_storage().nbytes()
    first = min(pages.blocks.offset_bytes for pages in sharing)
    last = max(pages.blocks.offset_bytes + pages.blocks.extent_bytes for pages in sharing)
    start = max(0, min(first, size_bytes - num_blocks * row_bytes))
    if last > start + row_bytes or size_bytes < start + num_blocks * row_bytes:
        raise ConfigError(
            f"{', '.join(dict.fromkeys(pages.layer for pages in sharing))}: pages from byte {first:,} to {last:,} "
            f"do not lie in one row of {row_bytes:,} bytes (their stride) within {size_bytes:,} bytes of memory"
        )
    return start


def _ref(number: int, tensor: torch.Tensor, using: list[_Pages]) -> DataRef:
    page_bytes = tensor.shape[1] if using[0].packed else max(pages.blocks.extent_bytes for pages in using)
    return DataRef(number, page_bytes, tuple(pages.layer for pages in using))
