"""Page mappings: which bytes of a canonical page each worker holds.

A canonical page is what a block of a layer would be in one worker alone.

A worker of several holds some of the heads. Its page and the canonical one have the same axes in the same order, the
canonical one with all heads. Bytes that lie together in both are a fragment. A run is fragments at equal distances. The
runs of all workers' pages tile the canonical page exactly, which is checked here for every page, for all ranks.
"""

from collections.abc import Iterable
from functools import cache
from itertools import product

import msgspec

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.axes import CacheAxes
from kvtier.kvcache.layout.model import AttentionSpec, LayerSpec, MambaSpec, MLASpec, ParallelConfig


class PageRun(msgspec.Struct, frozen=True):
    """Fragment i of `count`: `size_bytes` from `offset + i * stride` on, in the worker's page and in the canonical."""

    local_offset: int
    canonical_offset: int
    size_bytes: int
    count: int = 1
    local_stride: int = 0
    canonical_stride: int = 0

    def fragments(self, *, canonical: bool) -> list[tuple[int, int]]:
        """Return the first byte and the end of each fragment."""
        offset = self.canonical_offset if canonical else self.local_offset
        stride = self.canonical_stride if canonical else self.local_stride
        return [(offset + i * stride, offset + i * stride + self.size_bytes) for i in range(self.count)]


class PageMapping(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's part of a canonical page. Loads read all runs; stores write them when it is this worker's turn."""

    canonical_bytes: int
    local_bytes: int  # Without padding.
    runs: tuple[PageRun, ...]
    writers: int = 1  # Workers that hold these very bytes.
    writer_index: int = 0
    topology_free: bool = True  # The canonical bytes are the same for any number of workers.

    def writes(self, page: int) -> bool:
        """Return True if this worker writes page number `page`, which all workers count alike."""
        return page % self.writers == self.writer_index


def page_mapping(
    spec: LayerSpec, axes: CacheAxes | None, parallel: ParallelConfig, total_kv_heads: int, kernel_blocks: int = 1
) -> PageMapping:
    """Return this worker's part of a layer's canonical page; only the axes within a block count.

    `total_kv_heads` are all workers' together; 0: not known. In some cases a page cannot be free of the topology:
    unknown axes or heads, states of sharded state-space layers, scales apart from their heads, tokens or layers that
    are divided among workers. Then each worker has a private part of the page, and `topology_free` is False.
    """
    return _mappings(spec, axes, msgspec.structs.replace(parallel, rank=0), total_kv_heads, kernel_blocks)[
        parallel.rank
    ]


@cache
def _mappings(
    spec: LayerSpec, axes: CacheAxes | None, parallel: ParallelConfig, total_kv_heads: int, kernel_blocks: int
) -> tuple[PageMapping, ...]:
    """Return every worker's mapping, checked against each other."""
    ranks = range(parallel.world_size)
    own_bytes = _part_bytes(spec, axes)
    if parallel.pp_size * parallel.pcp_size * parallel.dcp_size > 1:
        mappings = tuple(_own_part(own_bytes, rank, len(ranks)) for rank in ranks)
    elif _replicated(spec):
        mappings = tuple(_copy(own_bytes, rank, len(ranks)) for rank in ranks)
    elif isinstance(spec, AttentionSpec) and axes is not None and _shares_heads(spec, axes, parallel, total_kv_heads):
        mappings = tuple(_heads(spec, axes, rank, parallel.tp_size, total_kv_heads, kernel_blocks) for rank in ranks)
    else:
        mappings = tuple(_own_part(own_bytes, rank, len(ranks)) for rank in ranks)
    check_tiling(mappings)
    return mappings


def _shares_heads(spec: AttentionSpec, axes: CacheAxes, parallel: ParallelConfig, total_kv_heads: int) -> bool:
    """Return True if workers hold equal shares of the heads, or copies of one each, within their pages."""
    fewer, more = sorted((total_kv_heads, parallel.tp_size))
    return (
        fewer > 0
        and more % fewer == 0
        and spec.num_kv_heads == max(1, total_kv_heads // parallel.tp_size)
        and not spec.per_token_head_scales
        and "H" not in axes.outside_blocks
        and ("H" in axes.shape or total_kv_heads == 1)
    )


def row_mapping(specs: Iterable[LayerSpec], row_bytes: int, parallel: ParallelConfig) -> PageMapping:
    """Return the mapping of a row of several layers' pages: copies of one another if all of them are, or its own."""
    alone = parallel.pp_size * parallel.pcp_size * parallel.dcp_size == 1
    if alone and all(map(_replicated, specs)):
        return _copy(row_bytes, parallel.rank, parallel.world_size)
    return own_part(row_bytes, parallel)


def own_part(size_bytes: int, parallel: ParallelConfig) -> PageMapping:
    """Return the mapping of an opaque page: each worker's bytes have a separate place."""
    return _own_part(size_bytes, parallel.rank, parallel.world_size)


def _replicated(spec: LayerSpec) -> bool:
    """Return True if all workers of a tensor group hold the same bytes."""
    return isinstance(spec, MLASpec) or (isinstance(spec, MambaSpec) and spec.replicated)


def _own_part(size_bytes: int, rank: int, ranks: int) -> PageMapping:
    return PageMapping(
        canonical_bytes=size_bytes * ranks,
        local_bytes=size_bytes,
        runs=(PageRun(0, rank * size_bytes, size_bytes),),
        topology_free=False,
    )


def _copy(page_bytes: int, rank: int, ranks: int) -> PageMapping:
    return PageMapping(
        canonical_bytes=page_bytes,
        local_bytes=page_bytes,
        runs=(PageRun(0, 0, page_bytes),),
        writers=ranks,
        writer_index=rank,
    )


def _heads(
    spec: AttentionSpec, axes: CacheAxes, rank: int, tp_size: int, total_kv_heads: int, kernel_blocks: int
) -> PageMapping:
    copies = max(1, tp_size // total_kv_heads)
    local = axes.sizes(spec, kernel_blocks=kernel_blocks)
    whole = local | {"H": total_kv_heads}
    order = [("S", kernel_blocks, kernel_blocks)]  # Kernel blocks, as they lie within a block.
    order += [(axis, local[axis], whole[axis]) for axis in axes.within_page]
    dims = list[_Dim]()
    local_stride = canonical_stride = spec.dtype.itemsize
    for name, local_size, canonical_size in reversed(order):
        dims.append(_Dim(name, local_size, local_stride, canonical_stride))
        local_stride, canonical_stride = local_stride * local_size, canonical_stride * canonical_size
    first_head = rank // copies * spec.num_kv_heads
    offset = sum(first_head * dim.canonical_stride for dim in dims if dim.name == "H")
    return PageMapping(
        canonical_bytes=canonical_stride,
        local_bytes=local_stride,
        runs=_runs(dims, offset, spec.dtype.itemsize),
        writers=copies,
        writer_index=rank % copies,
    )


class _Dim(msgspec.Struct, frozen=True):
    name: str
    size: int
    local_stride: int
    canonical_stride: int


def _runs(dims: list[_Dim], canonical_offset: int, item_bytes: int) -> tuple[PageRun, ...]:
    """Return the runs of axes given innermost first: one fragment, its repeats, and runs for all others."""
    size_bytes = item_bytes
    rest = [dim for dim in dims if dim.size > 1]
    while rest and rest[0].local_stride == rest[0].canonical_stride == size_bytes:
        size_bytes *= rest.pop(0).size
    if not rest:
        return (PageRun(0, canonical_offset, size_bytes),)
    inner, *outer = rest
    runs = list[PageRun]()
    for indices in product(*(range(dim.size) for dim in reversed(outer))):
        at = list(zip(indices, reversed(outer), strict=True))
        local = sum(index * dim.local_stride for index, dim in at)
        canonical = canonical_offset + sum(index * dim.canonical_stride for index, dim in at)
        runs.append(PageRun(local, canonical, size_bytes, inner.size, inner.local_stride, inner.canonical_stride))
    return tuple(runs)


def check_tiling(mappings: tuple[PageMapping, ...]) -> None:
    """Raise `ConfigError` unless each page is covered by its runs, and the canonical one by any turn's writers."""
    first = mappings[0]
    for mapping in mappings:
        if (mapping.canonical_bytes, mapping.writers) != (first.canonical_bytes, first.writers):
            raise ConfigError(f"workers disagree about a canonical page: {mapping} and {first}")
        _check_cover([mapping], canonical=False, size_bytes=mapping.local_bytes)
    for page in range(first.writers):
        _check_cover([m for m in mappings if m.writes(page)], canonical=True, size_bytes=first.canonical_bytes)


def _check_cover(mappings: list[PageMapping], *, canonical: bool, size_bytes: int) -> None:
    end = 0
    runs = [run for mapping in mappings for run in mapping.runs]
    for start, stop in sorted(part for run in runs for part in run.fragments(canonical=canonical)):
        if start != end:
            raise ConfigError(f"fragments of a page of {size_bytes:,} bytes end at {end:,} and begin at {start:,}")
        end = stop
    if end != size_bytes:
        raise ConfigError(f"fragments of a page of {size_bytes:,} bytes end at {end:,}")


def _part_bytes(spec: LayerSpec, axes: CacheAxes | None) -> int:
    """Return the bytes of a block that lie together: all of a page, or its part of the axes around the blocks."""
    if axes is None or not isinstance(spec, AttentionSpec):
        return spec.unpadded_page_bytes
    sizes = axes.sizes(spec)
    for axis in axes.outside_blocks:
        sizes[axis] = 1
    return sizes["K"] * sizes["H"] * sizes["N"] * sizes["C"] * spec.dtype.itemsize
