"""A model's KV cache: the pages that each layer keeps of a block, and the groups of layers with one block table.

A **block** is a run of tokens that one table entry stands for, a **page** one layer's bytes of one block. Layers of
several groups may share a tensor: a block belongs to one group at a time, so the same bytes serve all groups in turn.
Specs are frozen and compare by value.
"""

from math import prod

import msgspec
import torch

from kvtier.errors import ConfigError


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of a layer: what it keeps of a block, in a page. Pages lie `page_bytes` apart."""

    block_size: int  # Tokens.
    padded_page_bytes: int | None = None  # Set to give layers of several kinds pages of one size.
    align_bytes: int = 1  # A page's length is rounded up to a multiple of it.

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.align_bytes < 1:
            raise ConfigError(f"a block of {self.block_size} tokens aligned to {self.align_bytes} bytes: both are >= 1")
        if self.padded_page_bytes is not None and self.padded_page_bytes < self.unpadded_page_bytes:
            raise ConfigError(
                f"a page of {self.unpadded_page_bytes:,} bytes does not fit into {self.padded_page_bytes:,} padded ones"
            )

    @property
    def unpadded_page_bytes(self) -> int:
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        return -(-(self.padded_page_bytes or self.unpadded_page_bytes) // self.align_bytes) * self.align_bytes

    @property
    def item_bytes(self) -> int:
        raise NotImplementedError


class AttentionSpec(LayerSpec, frozen=True, kw_only=True):
    """Keys and values: for each head and state, `content_bytes`. Windows and the like change no page.

    A state is what is kept of one token, or of `tokens_per_state` tokens together where the model compresses them.
    """

    num_kv_heads: int  # In this worker.
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None  # None: as long as a key. 0: one latent vector in place of key and value.
    state_bytes: int | None = None  # One head's one state where a backend packs it, with its scales, say.
    tokens_per_state: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads < 1 or self.head_size < 1 or self.content_bytes % self.dtype.itemsize:
            raise ConfigError(
                f"{self.num_kv_heads} heads of {self.head_size} and {self.content_bytes} bytes in {self.dtype}: "
                "at least one head, and whole elements, are needed"
            )
        if self.tokens_per_state < 1 or self.block_size % self.tokens_per_state:
            raise ConfigError(f"a block of {self.block_size} tokens has no whole states of {self.tokens_per_state}")

    @property
    def states(self) -> int:  # In a block.
        return self.block_size // self.tokens_per_state

    @property
    def content_bytes(self) -> int:
        """Bytes of one head's one state, key and value together."""
        if self.state_bytes is not None:
            return self.state_bytes
        value_size = self.head_size if self.head_size_v is None else self.head_size_v
        return (self.head_size + value_size) * self.dtype.itemsize

    @property
    def unpadded_page_bytes(self) -> int:
        return self.num_kv_heads * self.states * self.content_bytes

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize


class MambaSpec(LayerSpec, frozen=True, kw_only=True):
    """State-space layers: the states after a block's last token, one tensor after the other in one page."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigError(f"{len(self.shapes)} state shapes and {len(self.dtypes)} dtypes: 1 pair or more accepted")

    @property
    def state_sizes_bytes(self) -> tuple[int, ...]:
        return tuple(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def unpadded_page_bytes(self) -> int:
        return sum(self.state_sizes_bytes)

    @property
    def item_bytes(self) -> int:
        return max(dtype.itemsize for dtype in self.dtypes)


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table, in order, each with its spec."""

    layers: dict[str, LayerSpec]
    kernel_block_size: int | None = None  # Tokens that a kernel takes for a block; None: a block is a kernel's, too.

    def __post_init__(self) -> None:
        sizes = {name: spec.block_size for name, spec in self.layers.items()}
        if len(set(sizes.values())) != 1:
            raise ConfigError(f"layers of one group need one block size: {sizes}")
        kernel, block_size = self.kernel_block_size, self.block_size
        if kernel is not None and (kernel < 1 or block_size % kernel):
            raise ConfigError(f"blocks of {block_size} tokens cannot be split into kernel blocks of {kernel}")

    @property
    def block_size(self) -> int:
        return next(iter(self.layers.values())).block_size

    @property
    def kernel_blocks(self) -> int:  # In a block.
        return 1 if self.kernel_block_size is None else self.block_size // self.kernel_block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of all the layers' pages of one block."""
        return sum(spec.page_bytes for spec in self.layers.values())


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's KV cache. Every layer is in one group."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        layers = [layer for group in self.groups for layer in group.layers]
        if self.num_blocks < 1 or not layers:
            raise ConfigError(f"{self.num_blocks} blocks of {len(layers)} layers: at least one of each is needed")
        if len(layers) != len(set(layers)):
            raise ConfigError(f"layers {layers} in groups: each is needed once")
