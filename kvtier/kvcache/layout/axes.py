"""Places of a cache's bytes in its storage, by the names of its axes and by its strides.

One letter an axis: B blocks (a kernel's), K key and value, H heads, N states (tokens), C content of one head's one
state. Names instead of positions let one rule place heads, split keys from values and find blocks for every backend.
Every layout comes down to runs of equal blocks at one distance from each other. Axes with larger strides than all
blocks together make several runs (keys in front, values behind); all others are inside of a block.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

import msgspec
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.model import AttentionSpec, MambaSpec


class CacheAxes(msgspec.Struct, frozen=True):
    """The axes of a backend's shape and, outermost first, the same in memory; by default in the same order."""

    shape: str
    memory: str = ""

    def __post_init__(self) -> None:
        axes = sorted(self.shape)
        if not set("BNC") <= set(axes) <= set("BKHNC") or len(axes) != len(set(axes)):
            raise ConfigError(f"axes {self.shape!r} given, B, N, C and perhaps K and H, each once, accepted")
        if sorted(self.order) != axes:
            raise ConfigError(f"axes {self.shape!r} lie in memory as {self.memory!r}: the same letters are accepted")
        if self.order[-1] != "C":
            raise ConfigError(f"axes {self.order!r} in memory: C, the content, is accepted as the innermost")

    @property
    def order(self) -> str:  # In memory.
        return self.memory or self.shape

    @property
    def outside_blocks(self) -> str:
        """The axes that lie around the blocks: each of their indices has all blocks to itself."""
        return self.order[: self.order.index("B")]

    def sizes(self, spec: AttentionSpec, num_blocks: int, kernel_blocks: int) -> dict[str, int]:
        """Return the length of each axis (C in elements), with each block split into `kernel_blocks` kernel blocks."""
        if spec.states % kernel_blocks:
            raise ConfigError(f"{spec.states} states of a block cannot be split into {kernel_blocks} kernel blocks")
        parts = 2 if "K" in self.shape else 1
        if spec.content_bytes % (parts * spec.dtype.itemsize):
            raise ConfigError(f"content of {spec.content_bytes} bytes cannot be split into keys and values alike")
        if "H" not in self.shape and spec.num_kv_heads > 1:
            raise ConfigError(f"axes {self.shape!r} have no place for {spec.num_kv_heads} heads")
        return {
            "B": num_blocks * kernel_blocks,
            "K": parts,
            "H": spec.num_kv_heads,
            "N": spec.states // kernel_blocks,
            "C": spec.content_bytes // parts // spec.dtype.itemsize,
        }


KV_FRONT_NHD = CacheAxes("KBNHC")  # Keys in front, values behind: two runs of all blocks.
KV_FRONT_HND = CacheAxes("KBNHC", "KBHNC")
KV_SPLIT_NHD = CacheAxes("BKNHC")  # Keys and values in the halves of each page.
KV_SPLIT_HND = CacheAxes("BKNHC", "BKHNC")
KV_JOINED_NHD = CacheAxes("BHNC", "BNHC")  # Key and value of a head's token side by side (vLLM 0.32 for all backends).
KV_JOINED_HND = CacheAxes("BHNC")
HEADS_FRONT = CacheAxes("BHNC", "HBNC")  # Heads around the blocks.
LATENT = CacheAxes("BNC")  # One latent vector a token; no heads.

AxesOf = Mapping[str, CacheAxes]
"""The axes of each attention layer."""


def cache_view(
    memory: torch.Tensor,
    spec: AttentionSpec,
    axes: CacheAxes,
    num_blocks: int,
    *,
    kernel_blocks: int = 1,
    offset_bytes: int = 0,
    block_stride_bytes: int | None = None,
) -> torch.Tensor:
    """Return a layer's cache as its backend wants it, in memory of any dtype, zero-copy.

    Kernel blocks lie `block_stride_bytes` apart, from `offset_bytes` of `memory` on; None: without gaps.
    """
    sizes = axes.sizes(spec, num_blocks, kernel_blocks)
    item_bytes, strides, stride = spec.dtype.itemsize, dict[str, int](), 1
    for axis in reversed(axes.order):
        if axis == "B" and block_stride_bytes is not None:
            if block_stride_bytes % item_bytes or block_stride_bytes < stride * item_bytes:
                raise ConfigError(
                    f"blocks of {stride * item_bytes:,} bytes cannot lie {block_stride_bytes:,} bytes apart"
                )
            stride = block_stride_bytes // item_bytes
        strides[axis] = stride
        stride *= sizes[axis]
    shape, in_memory = (tuple(each[axis] for axis in axes.shape) for each in (sizes, strides))
    return _view(memory, spec.dtype, shape, in_memory, offset_bytes)


def state_views(
    memory: torch.Tensor,
    spec: MambaSpec,
    num_blocks: int,
    *,
    offset_bytes: int = 0,
    block_stride_bytes: int | None = None,
) -> list[torch.Tensor]:
    """Return a state-space layer's states, each `(num_blocks, *shape)`, one after the other in each page, zero-copy."""
    stride_bytes = spec.page_bytes if block_stride_bytes is None else block_stride_bytes
    views = list[torch.Tensor]()
    for shape, dtype, size_bytes in zip(spec.shapes, spec.dtypes, spec.state_sizes_bytes, strict=True):
        if stride_bytes % dtype.itemsize:
            raise ConfigError(f"pages {stride_bytes:,} bytes apart do not hold whole elements of {dtype}")
        dense = torch.empty(shape, device="meta").stride()
        views.append(_view(memory, dtype, (num_blocks, *shape), (stride_bytes // dtype.itemsize, *dense), offset_bytes))
        offset_bytes += size_bytes
    return views


class BlockRun(NamedTuple):
    """Blocks at equal distances: block b is `extent_bytes` from `offset_bytes + b * stride_bytes` of the storage on."""

    offset_bytes: int
    stride_bytes: int
    extent_bytes: int
    gap: str  # The bytes of others in the extent, described; empty: there are none.


class _Axis(NamedTuple):
    axis: int
    size: int
    stride_bytes: int


def block_runs(layer: str, tensor: torch.Tensor, axis: int, num_blocks: int) -> list[BlockRun]:
    """Return the runs of a tensor's blocks; `axis` counts kernel blocks, a multiple of `num_blocks`.

    Raises `ConfigError`, naming layer and stride, where blocks overlap or lie inside of one another.
    """
    item_bytes = tensor.element_size()
    axes = [
        _Axis(index, size, tensor.stride(index) * item_bytes)
        for index, size in enumerate(tensor.shape)
        if size > 1 and index != axis
    ]
    kernel_blocks, kernel_stride_bytes = tensor.shape[axis] // num_blocks, tensor.stride(axis) * item_bytes
    block_stride_bytes = kernel_stride_bytes * kernel_blocks
    if kernel_blocks > 1:
        axes.append(_Axis(axis, kernel_blocks, kernel_stride_bytes))
    axes.sort(key=lambda inner: inner.stride_bytes)
    around = [one for one in axes if num_blocks > 1 and one.stride_bytes > block_stride_bytes * (num_blocks - 1)]
    extent_bytes, gap = _extent(layer, tensor, [one for one in axes if one not in around], item_bytes)
    if num_blocks == 1:
        block_stride_bytes = max(block_stride_bytes, extent_bytes)
    if extent_bytes > block_stride_bytes:
        raise ConfigError(
            f"{layer}: a block reaches over {extent_bytes:,} bytes, the next begins after {block_stride_bytes:,} "
            f"(stride {tensor.stride(axis)} of axis {axis}, of {tuple(tensor.stride())}): only a copy could part them"
        )
    _refuse_overlap(layer, tensor, around, block_stride_bytes * (num_blocks - 1) + extent_bytes)
    start = offset_bytes(tensor)
    return [BlockRun(start + offset, block_stride_bytes, extent_bytes, gap) for offset in _offsets(around)]


def _extent(layer: str, tensor: torch.Tensor, inner: list[_Axis], item_bytes: int) -> tuple[int, str]:
    """Return a block's extent, and a description of its first gap."""
    extent_bytes, gap = item_bytes, ""
    for axis in inner:
        if axis.stride_bytes < extent_bytes:
            raise ConfigError(f"{layer}: stride {tensor.stride(axis.axis)} of axis {axis.axis} makes elements overlap")
        if axis.stride_bytes > extent_bytes and not gap:
            gap = (
                f"stride {tensor.stride(axis.axis)} of axis {axis.axis} leaves {axis.stride_bytes - extent_bytes:,} "
                "bytes free inside of each block"
            )
        extent_bytes += (axis.size - 1) * axis.stride_bytes
    return extent_bytes, gap


def _refuse_overlap(layer: str, tensor: torch.Tensor, around: list[_Axis], extent_bytes: int) -> None:
    for axis in around:
        if axis.stride_bytes < extent_bytes:
            raise ConfigError(
                f"{layer}: stride {tensor.stride(axis.axis)} of axis {axis.axis} lies within all blocks' "
                f"{extent_bytes:,} bytes (strides {tuple(tensor.stride())}): only a copy could part them"
            )
        extent_bytes += (axis.size - 1) * axis.stride_bytes


def _offsets(around: list[_Axis]) -> Iterator[int]:
    """Return the offset of each combination of the axes around the blocks, in the order of the tensor's axes."""
    in_shape = sorted(around, key=lambda axis: axis.axis)
    for indices in product(*(range(axis.size) for axis in in_shape)):
        yield sum(index * axis.stride_bytes for index, axis in zip(indices, in_shape, strict=True))


def offset_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def view_of(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start_bytes: int
) -> torch.Tensor:
    """Return a view of the storage of `memory`, zero-copy; strides are in elements of `dtype`."""
    assert start_bytes % dtype.itemsize == 0, start_bytes
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start_bytes // dtype.itemsize, shape, strides)


def _view(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start_bytes: int
) -> torch.Tensor:
    start_bytes += offset_bytes(memory)
    if start_bytes % dtype.itemsize:
        raise ConfigError(f"a page at byte {start_bytes:,} of its memory cannot hold elements of {dtype}")
    return view_of(memory, dtype, shape, strides, start_bytes)
