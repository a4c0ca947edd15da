"""What one layer keeps of a block of tokens: the shapes that decide how many bytes a page has and what they mean.

A **block** is a run of tokens that one table entry stands for, a **page** one layer's bytes of one block. Specs are
frozen and compare by value: layers with equal specs can share a group, and tensors.
"""

from fractions import Fraction
from math import prod
from typing import Any, ClassVar

import msgspec
import torch

from kvtier.backend import Attention
from kvtier.errors import ConfigError


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's share of a block; `page_bytes` apart each block's page lies from the next."""

    attention: ClassVar[Attention] = "other"

    block_size: int  # Tokens.
    padded_page_bytes: int | None = None  # So that layers of several kinds have pages of one size.
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
        """Bytes of a page that mean something."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return _round_up(self.padded_page_bytes or self.unpadded_page_bytes, self.align_bytes)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes that mean something, for each token of a block."""
        return Fraction(self.unpadded_page_bytes, self.block_size)


class AttentionSpec(LayerSpec, frozen=True, kw_only=True):
    """Keys and values: for each head and state, `content_bytes`.

    A state is what is kept of one token, or of `tokens_per_state` tokens together where the model compresses them.
    """

    num_kv_heads: int  # Of this worker.
    head_size: int
    dtype: torch.dtype
    head_size_v: int | None = None  # None: as long as a key. 0: there is no value (latent attention).
    state_bytes: int | None = None  # One head's one state where a backend packs it, with its scales, say.
    tokens_per_state: int = 1
    per_token_head_scales: bool = False

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
    def states(self) -> int:
        """States in a block."""
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


class FullAttentionSpec(AttentionSpec, frozen=True, kw_only=True):
    """Every token attends to all before it, so every block stays."""

    attention: ClassVar[Attention] = "full_attention"


class SlidingWindowSpec(AttentionSpec, frozen=True, kw_only=True):
    """A token attends to the last `sliding_window` tokens; blocks that fall out of it are freed."""

    attention: ClassVar[Attention] = "sliding_window"

    sliding_window: int


class ChunkedLocalSpec(AttentionSpec, frozen=True, kw_only=True):
    """A token attends within its chunk of `attention_chunk_size` tokens."""

    attention: ClassVar[Attention] = "chunked_local"

    attention_chunk_size: int


class MLASpec(AttentionSpec, frozen=True, kw_only=True):
    """One latent vector a state instead of heads' keys and values: the same bytes in every worker of a tensor group."""

    attention: ClassVar[Attention] = "mla"

    num_kv_heads: int = 1
    head_size_v: int | None = 0
    sliding_window: int | None = None  # None: full attention.


class MambaSpec(LayerSpec, frozen=True, kw_only=True):
    """State-space layers: the states after a block's last token, one tensor after the other in one page."""

    attention: ClassVar[Attention] = "mamba"

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    replicated: bool = False  # Every worker of a tensor group holds the whole state.

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise ConfigError(f"{len(self.shapes)} state shapes and {len(self.dtypes)} dtypes: as many, and at least 1")

    @property
    def state_sizes_bytes(self) -> tuple[int, ...]:
        """Bytes of each state tensor of one block."""
        return tuple(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @property
    def unpadded_page_bytes(self) -> int:
        return sum(self.state_sizes_bytes)


class UniformSpecs(msgspec.Struct, frozen=True):
    """Layers of one type of attention, and one block size, whose pages differ: a spec for each, in one group."""

    layers: dict[str, LayerSpec]

    def __post_init__(self) -> None:
        if len({spec.block_size for spec in self.layers.values()}) != 1:
            raise ConfigError(f"layers of one group need one block size: {self._each('block_size')}")
        if len({(spec.attention, getattr(spec, "sliding_window", None)) for spec in self.layers.values()}) != 1:
            raise ConfigError(f"layers of one group need one type of attention: {self._each('attention')}")

    @property
    def block_size(self) -> int:
        return next(iter(self.layers.values())).block_size

    @property
    def page_bytes(self) -> int:
        """Bytes of all the layers' pages of one block."""
        return sum(spec.page_bytes for spec in self.layers.values())

    def _each(self, field: str) -> dict[str, Any]:
        return {name: getattr(spec, field) for name, spec in self.layers.items()}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
