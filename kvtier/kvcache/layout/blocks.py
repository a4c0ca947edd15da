"""The blocks of a tensor in its storage: what its strides say, in bytes from the storage's start, and nothing else.

Every way to lay out a cache comes down to runs of equal blocks at one distance from each other. Axes with larger
strides than all blocks together make several runs (keys in front, values behind); all others are inside of a block.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from kvtier.errors import ConfigError


class BlockRun(NamedTuple):
    """Blocks at equal distances: block b is `extent_bytes` from `offset_bytes + b * stride_bytes` of the storage on."""

    offset_bytes: int
    stride_bytes: int
    extent_bytes: int
    gap: str  # Why the extent has bytes of others in it; empty: it has none.


class _Axis(NamedTuple):
    axis: int
    size: int
    stride_bytes: int


def block_axis(layer: str, tensor: torch.Tensor, blocks: int) -> int:
    """Return the axis of the (kernel) blocks in a cache without named axes: the first, or the one behind K and V.

    Raises `ConfigError` where neither fits, or both do.
    """
    shape = tuple(tensor.shape)
    leading = bool(shape) and shape[0] == blocks
    behind = len(shape) > 1 and shape[0] == 2 and shape[1] == blocks
    if leading and behind:
        raise ConfigError(
            f"{layer}: shape {shape} and strides {tuple(tensor.stride())} may have its {blocks} blocks first "
            "or second; name its axes"
        )
    if not leading and not behind:
        raise ConfigError(
            f"{layer}: shape {shape} and strides {tensor.stride()} have no axis of {blocks} blocks in front"
        )
    return 0 if leading else 1


def block_runs(layer: str, tensor: torch.Tensor, axis: int, num_blocks: int) -> list[BlockRun]:
    """Return the runs of a tensor's blocks; `axis` counts kernel blocks, a multiple of `num_blocks`.

    Raises `ConfigError`, naming layer and stride, where blocks overlap or lie inside of one another.
    """
    item_bytes = tensor.element_size()
    start_bytes = offset_bytes(tensor)
    axes = [
        _Axis(index, size, stride_bytes(tensor, index))
        for index, size in enumerate(tensor.shape)
        if size > 1 and index != axis
    ]
    kernel_blocks, kernel_stride_bytes = tensor.shape[axis] // num_blocks, stride_bytes(tensor, axis)
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
    return [BlockRun(start_bytes + offset, block_stride_bytes, extent_bytes, gap) for offset in _offsets(around)]


def _extent(layer: str, tensor: torch.Tensor, inner: list[_Axis], item_bytes: int) -> tuple[int, str]:
    """Return a block's extent, and a description of its first gap."""
    extent_bytes, gap = item_bytes, ""
    for axis in inner:
        if axis.stride_bytes < extent_bytes:
            raise ConfigError(
                f"{layer}: stride {tensor.stride(axis.axis)} of axis {axis.axis} makes elements overlap "
                f"(shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())})"
            )
        if axis.stride_bytes > extent_bytes and not gap:
            gap = (
                f"stride {tensor.stride(axis.axis)} of axis {axis.axis} leaves {axis.stride_bytes - extent_bytes:,} "
                f"bytes free inside of each block (shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())})"
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
    """Return a tensor's offset in its storage."""
    return int(tensor.storage_offset()) * tensor.element_size()


def stride_bytes(tensor: torch.Tensor, axis: int) -> int:
    return tensor.stride(axis) * tensor.element_size()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage: its address."""
    return tensor.untyped_storage().data_ptr()


def view_of(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], start_bytes: int
) -> torch.Tensor:
    """Return a view of the storage of `memory`, zero-copy; strides are in elements of `dtype`."""
    assert start_bytes % dtype.itemsize == 0, start_bytes
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start_bytes // dtype.itemsize, shape, strides)
