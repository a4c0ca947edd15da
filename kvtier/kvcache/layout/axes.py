"""The axes of a layer's cache, by name: their order in an attention backend's shape, and in memory.

One letter an axis: B blocks (a kernel's), K key and value, H heads, N states (tokens), C content of one head's one
state. Names instead of positions let one rule place heads, split keys from values and find blocks for every backend.
"""

from collections.abc import Mapping

import msgspec
import torch

from kvtier.errors import ConfigError
from kvtier.kvcache.layout.blocks import offset_bytes as memory_offset_bytes
from kvtier.kvcache.layout.blocks import view_of
from kvtier.kvcache.layout.model import AttentionSpec, LayerSpec, MambaSpec

LETTERS = "BKHNC"


class CacheAxes(msgspec.Struct, frozen=True):
    """The axes of a backend's shape and, outermost first, the same in memory; None if the backend does not tell."""

    shape: str
    memory: str | None = None

    def __post_init__(self) -> None:
        axes = sorted(self.shape)
        if not set("BNC") <= set(axes) <= set(LETTERS) or len(axes) != len(set(axes)):
            raise ConfigError(f"axes {self.shape!r} given, B, N, C and perhaps K and H, each once, accepted")
        if self.memory is not None and sorted(self.memory) != axes:
            raise ConfigError(f"axes {self.shape!r} lie in memory as {self.memory!r}: the same letters are accepted")
        if self.memory is not None and self.memory[-1] != "C":
            raise ConfigError(f"axes {self.memory!r} in memory: C, the content, is accepted as the innermost")

    @property
    def order(self) -> str:
        """The axes in memory; by default as in the shape."""
        return self.shape if self.memory is None else self.memory

    @property
    def within_page(self) -> str:
        """The axes inside a block, outermost first."""
        return self.order[self.order.index("B") + 1 :]

    @property
    def outside_blocks(self) -> str:
        """The axes that lie around the blocks: each of their indices has all blocks to itself."""
        return self.order[: self.order.index("B")]

    def sizes(self, spec: AttentionSpec, num_blocks: int = 1, kernel_blocks: int = 1) -> dict[str, int]:
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


KV_FRONT_NHD = CacheAxes("KBNHC", "KBNHC")
"""Keys in front, values behind: two runs of all blocks."""
KV_FRONT_HND = CacheAxes("KBNHC", "KBHNC")
KV_SPLIT_NHD = CacheAxes("BKNHC", "BKNHC")
"""Keys and values in the halves of each page."""
KV_SPLIT_HND = CacheAxes("BKNHC", "BKHNC")
KV_JOINED_NHD = CacheAxes("BHNC", "BNHC")
"""Key and value of one head's one token side by side (vLLM 0.32 for all backends)."""
KV_JOINED_HND = CacheAxes("BHNC", "BHNC")
HEADS_FRONT = CacheAxes("BHNC", "HBNC")
"""Heads around the blocks."""
LATENT = CacheAxes("BNC", "BNC")
"""One latent vector a token; no heads."""

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

    Kernel blocks lie `block_stride_bytes` apart, from `offset_bytes` of `memory`'s storage on; None: without gaps.
    """
    sizes = axes.sizes(spec, num_blocks, kernel_blocks)
    strides = _strides(axes.order, sizes, spec.dtype.itemsize, block_stride_bytes)
    return _view(
        memory,
        spec.dtype,
        tuple(sizes[axis] for axis in axes.shape),
        tuple(strides[axis] for axis in axes.shape),
        offset_bytes,
    )


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
        strides = (stride_bytes // dtype.itemsize, *dense)
        views.append(_view(memory, dtype, (num_blocks, *shape), strides, offset_bytes))
        offset_bytes += size_bytes
    return views


def layer_views(
    memory: torch.Tensor,
    layer: str,
    spec: LayerSpec,
    axes: CacheAxes | None,
    num_blocks: int,
    *,
    kernel_blocks: int = 1,
    offset_bytes: int = 0,
    block_stride_bytes: int | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Return a layer's cache or states, by its spec: `cache_view` or `state_views`.

    Raises `ConfigError`, naming the layer, if there is no such view.
    """
    try:
        if isinstance(spec, MambaSpec):
            return state_views(
                memory, spec, num_blocks, offset_bytes=offset_bytes, block_stride_bytes=block_stride_bytes
            )
        assert isinstance(spec, AttentionSpec), spec
        if axes is None:
            raise ConfigError("an attention layer without axes: its backend must name them")
        return cache_view(
            memory,
            spec,
            axes,
            num_blocks,
            kernel_blocks=kernel_blocks,
            offset_bytes=offset_bytes,
            block_stride_bytes=block_stride_bytes,
        )
    except ConfigError as error:
        raise ConfigError(f"{layer}: {error}") from error


def _strides(order: str, sizes: Mapping[str, int], item_bytes: int, block_stride_bytes: int | None) -> dict[str, int]:
    strides = dict[str, int]()
    stride = 1
    for axis in reversed(order):
        if axis == "B" and block_stride_bytes is not None:
            if block_stride_bytes % item_bytes or block_stride_bytes < stride * item_bytes:
                raise ConfigError(
                    f"blocks of {stride * item_bytes:,} bytes cannot lie {block_stride_bytes:,} bytes apart"
                )
            stride = block_stride_bytes // item_bytes
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


def _view(
    memory: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset_bytes: int
) -> torch.Tensor:
    start_bytes = memory_offset_bytes(memory) + offset_bytes
    if start_bytes % dtype.itemsize:
        raise ConfigError(f"a page at byte {start_bytes:,} of its memory cannot hold elements of {dtype}")
    return view_of(memory, dtype, shape, strides, start_bytes)
