"""Canonical KV caches: any LLM engine's caches as plain tensors of pages, without copying a byte.

However a model lays out its cache, what moves is pages: the i-th row of a `(num_blocks, page_bytes)` int8 tensor. Each
group refers to the tensors that hold its layers' pages; layers that share bytes share a tensor. Where a block's pages
of several layers lie in one row, the row is the page, and each group refers to it once.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from kvtier.backend import Group, Namespace
from kvtier.errors import ConfigError
from kvtier.kvcache.layout.axes import AxesOf, CacheAxes
from kvtier.kvcache.layout.blocks import BlockRun, block_axis, block_runs, storage_of, view_of
from kvtier.kvcache.layout.mapping import PageMapping, own_part, page_mapping, row_mapping
from kvtier.kvcache.layout.model import AttentionSpec, KVCacheConfig, KVCacheGroup, LayerSpec, ParallelConfig

LayerCache = torch.Tensor | Sequence[torch.Tensor]
"""An attention layer's cache, or a state-space layer's states."""


class DataRef(NamedTuple):
    """A reference to the pages of one layer, or of several that share them."""

    tensor: int  # Index of the tensor.
    page_bytes: int  # Of each of its rows, without padding.
    layers: tuple[str, ...]
    mapping: PageMapping  # To the canonical page.


class CanonicalKVCaches(NamedTuple):
    """Every layer's pages, each byte in one tensor at most."""

    tensors: tuple[torch.Tensor, ...]  # Each (num_blocks, page_bytes), int8, rows perhaps further apart.
    groups: tuple[tuple[DataRef, ...], ...]

    @property
    def num_blocks(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def topology_free(self) -> bool:
        """Whether the canonical pages of all layers are the same for any number of workers."""
        return all(ref.mapping.topology_free for refs in self.groups for ref in refs)


def canonical_kv_caches(
    config: KVCacheConfig,
    caches: Mapping[str, LayerCache],
    axes: AxesOf | None = None,
    *,
    parallel: ParallelConfig | None = None,
    total_kv_heads: int | None = None,
) -> CanonicalKVCaches:
    """Find the pages of a model's groups in the caches, which have the layers' names.

    Without a layer's `axes`, its blocks are found by its shape, and heads cannot be told from tokens. Its canonical
    pages then depend on the number of workers. They also do with several workers and no `total_kv_heads`.

    Raises `ConfigError`, naming layer and stride, if only a copy could bring a cache into pages, or a cache does not
    fit its spec.
    """
    finder = _Finder(config, dict(axes or {}))
    placed = {layer: finder.place(layer, caches[layer]) for group in config.groups for layer in group.layer_names}
    return _Assembly(config, dict(axes or {}), parallel or ParallelConfig(), total_kv_heads).build(placed)


def with_layout(
    namespace: Namespace,
    config: KVCacheConfig,
    parallel: ParallelConfig,
    *,
    total_kv_heads: int,
    canonical: CanonicalKVCaches | None = None,
) -> Namespace:
    """Return the namespace with the facts that follow from specs, parallel sizes and, in rows, canonical pages.

    All others stay: the names of model and layout, the model runner. Only facts are computed here.
    `kvtier.backend.refusal` decides from them whether sizes may share chunks.
    """
    specs = [spec for group in config.groups for spec in group.specs]
    heads = {spec.num_kv_heads if isinstance(spec, AttentionSpec) else None for spec in specs}
    facts: dict[str, Any] = {
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
        "rank": parallel.rank,
        "kv_cache_groups": tuple(
            Group(
                # Context parallelism makes a block stand for more tokens.
                tokens_per_block=group.block_size * parallel.dcp_size * parallel.pcp_size,
                layer_names=group.layer_names,
                attention=group.attention,
            )
            for group in config.groups
        ),
        "kv_heads_per_rank": heads.pop() if len(heads) == 1 else None,
        "total_kv_heads": total_kv_heads,
        "per_token_head_scales": any(getattr(spec, "per_token_head_scales", False) for spec in specs),
        "certified": canonical is not None and canonical.topology_free,
    }
    return msgspec.structs.replace(namespace, **facts)


class _Pages(NamedTuple):
    """A run of pages of one layer in one storage."""

    layer: str
    storage: torch.Tensor  # Any tensor on it.
    blocks: BlockRun
    width_bytes: int  # With padding, as far as the storage goes.
    packed: bool  # Other pages lie in the same row.

    @property
    def place(self) -> tuple[int, int, int]:
        """The key of runs that share their bytes: equal for all of them."""
        start = 0 if self.packed else self.blocks.offset_bytes
        return (storage_of(self.storage), start, self.blocks.stride_bytes)


class _Finder:
    """Finds the pages of single layers."""

    def __init__(self, config: KVCacheConfig, axes: dict[str, CacheAxes]) -> None:
        self._config = config
        self._axes = axes
        self._group_of = config.group_of

    def place(self, layer: str, cache: LayerCache) -> list[_Pages]:
        """Return the runs of a layer's pages: one, or one for each index of the axes around its blocks."""
        group = self._group_of[layer]
        spec = group.spec_of(layer)
        if isinstance(cache, torch.Tensor):
            storage, runs = cache, self._attention_runs(layer, cache, group)
        else:
            storage, runs = cache[0], [self._states_run(layer, cache)]
        page_bytes, parts = spec.page_bytes, len(runs)
        if (
            isinstance(spec, AttentionSpec)
            and runs[0].extent_bytes * parts != spec.unpadded_page_bytes
            and not runs[0].gap
        ):
            raise ConfigError(
                f"{layer}: {parts} x {runs[0].extent_bytes:,} bytes in a block (strides {tuple(storage.stride())}), "
                f"{spec.unpadded_page_bytes:,} in its spec's page"
            )
        return [self._pages(layer, storage, run, page_bytes // parts) for run in runs]

    def _attention_runs(self, layer: str, cache: torch.Tensor, group: KVCacheGroup) -> list[BlockRun]:
        blocks = self._config.num_blocks * group.kernel_blocks
        if layer not in self._axes:
            axis = block_axis(layer, cache, blocks)
        else:
            axis = self._axes[layer].shape.index("B")
            if cache.ndim != len(self._axes[layer].shape) or cache.shape[axis] != blocks:
                raise ConfigError(
                    f"{layer}: shape {tuple(cache.shape)} and strides {tuple(cache.stride())} given, "
                    f"{blocks} blocks as axis {axis} of {self._axes[layer].shape} accepted"
                )
        runs = block_runs(layer, cache, axis, self._config.num_blocks)
        if len(runs) > 2 * getattr(group.spec_of(layer), "num_kv_heads", 1):  # Keys and values of each head.
            raise ConfigError(
                f"{layer}: stride {cache.stride(axis)} of axis {axis}, its blocks, parts them into {len(runs)} pieces "
                f"of {runs[0].extent_bytes:,} bytes (strides {tuple(cache.stride())}): only a copy could join them"
            )
        return runs

    def _states_run(self, layer: str, states: Sequence[torch.Tensor]) -> BlockRun:
        """Return the one run of pages that hold all states of a layer."""
        num_blocks = self._config.num_blocks
        runs = [run for state in states for run in self._state_runs(layer, state)]
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

    def _state_runs(self, layer: str, state: torch.Tensor) -> list[BlockRun]:
        if not state.ndim or state.shape[0] != self._config.num_blocks:
            raise ConfigError(
                f"{layer}: state of shape {tuple(state.shape)} and strides {tuple(state.stride())}, "
                f"not {self._config.num_blocks} blocks first"
            )
        return block_runs(layer, state, 0, self._config.num_blocks)

    def _pages(self, layer: str, storage: torch.Tensor, run: BlockRun, page_bytes: int) -> _Pages:
        if self._config.num_blocks == 1:  # A single block's stride says nothing; layers that share it must agree.
            run = run._replace(stride_bytes=max(page_bytes, run.extent_bytes))
        packed = run.stride_bytes > max(page_bytes, run.extent_bytes)
        if run.gap and not packed:
            raise ConfigError(f"{layer}: {run.gap}: only a copy could close the gap")
        last = run.offset_bytes + (self._config.num_blocks - 1) * run.stride_bytes
        width_bytes = min(page_bytes, run.stride_bytes, storage.untyped_storage().nbytes() - last)
        return _Pages(layer, storage, run, max(width_bytes, run.extent_bytes), packed)


class _Assembly:
    """Builds tensors and references from all layers' pages."""

    def __init__(
        self, config: KVCacheConfig, axes: dict[str, CacheAxes], parallel: ParallelConfig, total_kv_heads: int | None
    ) -> None:
        self._config = config
        self._axes = axes
        self._parallel = parallel
        self._total_kv_heads = total_kv_heads

    def build(self, placed: Mapping[str, Sequence[_Pages]]) -> CanonicalKVCaches:
        by_place = dict[tuple[int, int, int], list[_Pages]]()
        for pages in (run for runs in placed.values() for run in runs):
            by_place.setdefault(pages.place, []).append(pages)
        index = {place: number for number, place in enumerate(by_place)}
        tensors = tuple(self._tensor(shared) for shared in by_place.values())
        groups = list[tuple[DataRef, ...]]()
        for group in self._config.groups:
            users = defaultdict[int, list[_Pages]](list)
            for pages in (run for layer in group.layer_names for run in placed[layer]):
                users[index[pages.place]].append(pages)
            groups.append(tuple(self._ref(group, number, tensors[number], using) for number, using in users.items()))
        return CanonicalKVCaches(tensors, tuple(groups))

    def _tensor(self, shared: list[_Pages]) -> torch.Tensor:
        """Return the tensor that all these runs are rows of."""
        first = shared[0]
        stride_bytes = first.blocks.stride_bytes
        start, width_bytes = first.blocks.offset_bytes, first.width_bytes  # One distance and one end: one width.
        if first.packed:
            start, width_bytes = self._row(shared), stride_bytes
        return view_of(first.storage, torch.int8, (self._config.num_blocks, width_bytes), (stride_bytes, 1), start)

    def _row(self, shared: list[_Pages]) -> int:
        """Return the offset of the first row: 0, or the last that leaves the first page and the end in place."""
        row_bytes = shared[0].blocks.stride_bytes
        size_bytes = shared[0].storage.untyped_storage().nbytes()
        first = min(pages.blocks.offset_bytes for pages in shared)
        last = max(pages.blocks.offset_bytes + pages.blocks.extent_bytes for pages in shared)
        start = max(0, min(first, size_bytes - self._config.num_blocks * row_bytes))
        if last > start + row_bytes or size_bytes < start + self._config.num_blocks * row_bytes:
            raise ConfigError(
                f"{', '.join(dict.fromkeys(pages.layer for pages in shared))}: pages from byte {first:,} to {last:,} "
                f"do not lie in one row of {row_bytes:,} bytes (their stride) within {size_bytes:,} bytes of memory"
            )
        return start

    def _ref(self, group: KVCacheGroup, number: int, tensor: torch.Tensor, using: list[_Pages]) -> DataRef:
        layers = tuple(pages.layer for pages in using)
        if using[0].packed:
            specs = map(group.spec_of, layers)
            return DataRef(number, tensor.shape[1], layers, row_mapping(specs, tensor.shape[1], self._parallel))
        mappings = [self._mapping(group, layer) for layer in layers]
        widest = max(range(len(using)), key=lambda i: using[i].blocks.extent_bytes)
        extent_bytes = using[widest].blocks.extent_bytes
        mapping = mappings[widest]
        if mapping.local_bytes != extent_bytes:  # States with gaps between them: as one, they are this worker's own.
            mapping = own_part(extent_bytes, self._parallel)
        return DataRef(number, extent_bytes, layers, mapping)

    def _mapping(self, group: KVCacheGroup, layer: str) -> PageMapping:
        spec: LayerSpec = group.spec_of(layer)
        heads = self._total_kv_heads
        if heads is None:
            heads = getattr(spec, "num_kv_heads", 0) if self._parallel.tp_size == 1 else 0
        return page_mapping(spec, self._axes.get(layer), self._parallel, heads, group.kernel_blocks)
