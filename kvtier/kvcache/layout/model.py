"""A model's KV cache: what each layer keeps of a block, the groups of layers with one block table, and their tensors.

A **block** is a run of tokens that one table entry stands for, a **page** one layer's bytes of one block. Specs are
frozen and compare by value: layers with equal specs can share a group, and tensors.

Layers of several groups may share a tensor. A block belongs to one group at a time. So the same bytes serve the layers
of all groups, one after the other.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from math import prod
from typing import Any, ClassVar

import msgspec
import torch

from kvtier.backend import Attention
from kvtier.errors import ConfigError


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of a layer: what it keeps of a block, in a page. Pages lie `page_bytes` apart."""

    attention: ClassVar[Attention] = "other"

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
        """Bytes of a page without padding."""
        raise NotImplementedError

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return -(-(self.padded_page_bytes or self.unpadded_page_bytes) // self.align_bytes) * self.align_bytes


class AttentionSpec(LayerSpec, frozen=True, kw_only=True):
    """Keys and values: for each head and state, `content_bytes`.

    A state is what is kept of one token, or of `tokens_per_state` tokens together where the model compresses them.
    """

    num_kv_heads: int  # In this worker.
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

    def _each(self, field: str) -> dict[str, Any]:
        return {name: getattr(spec, field) for name, spec in self.layers.items()}


class KVCacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation and the layers that use it: one of each group over the other or, packed, all of them in rows."""

    size_bytes: int
    shared_by: tuple[str, ...]


class KVCacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table."""

    layer_names: tuple[str, ...]
    spec: LayerSpec | UniformSpecs
    kernel_block_size: int | None = None  # Tokens that a kernel takes for a block; None: a block is a kernel's, too.

    def __post_init__(self) -> None:
        if isinstance(self.spec, UniformSpecs) and set(self.spec.layers) != set(self.layer_names):
            raise ConfigError(f"specs for {sorted(self.spec.layers)} in a group of {sorted(self.layer_names)}")
        kernel = self.kernel_block_size
        if kernel is not None and (kernel < 1 or self.spec.block_size % kernel):
            raise ConfigError(f"blocks of {self.spec.block_size} tokens cannot be split into kernel blocks of {kernel}")

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks in a block."""
        return 1 if self.kernel_block_size is None else self.block_size // self.kernel_block_size

    def spec_of(self, layer: str) -> LayerSpec:
        return self.spec.layers[layer] if isinstance(self.spec, UniformSpecs) else self.spec

    @property
    def specs(self) -> Iterator[LayerSpec]:
        """Each layer's spec, in the layers' order."""
        return map(self.spec_of, self.layer_names)

    @property
    def attention(self) -> Attention:
        """The layers' attention; "other" for layers of one type whose pages differ, except where all are latent."""
        specs = list(self.specs)
        if all(isinstance(spec, MLASpec) for spec in specs):
            return "mla"
        return specs[0].attention if len(set(specs)) == 1 else "other"

    @property
    def page_bytes(self) -> int:
        """Bytes of all the layers' pages of one block."""
        return sum(spec.page_bytes for spec in self.specs)


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's KV cache. Every layer is in one group and uses one tensor."""

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        in_groups = [layer for group in self.groups for layer in group.layer_names]
        in_tensors = [layer for tensor in self.tensors for layer in tensor.shared_by]
        if self.num_blocks < 1 or not in_groups:
            raise ConfigError(f"{self.num_blocks} blocks of {len(in_groups)} layers: at least one of each is needed")
        if len(in_groups) != len(set(in_groups)) or sorted(in_groups) != sorted(in_tensors):
            raise ConfigError(f"layers {in_groups} in groups, {in_tensors} in tensors: each is needed once in both")
        for tensor in self.tensors:
            page_bytes = max(self.spec_of(layer).page_bytes for layer in tensor.shared_by)
            if tensor.size_bytes < page_bytes * self.num_blocks:
                raise ConfigError(
                    f"{self.num_blocks:,} pages of {page_bytes:,} bytes do not fit into the {tensor.size_bytes:,} "
                    f"bytes that {', '.join(tensor.shared_by)} share"
                )

    @property
    def group_of(self) -> dict[str, KVCacheGroup]:
        """Each layer's group."""
        return {layer: group for group in self.groups for layer in group.layer_names}

    def spec_of(self, layer: str) -> LayerSpec:
        return self.group_of[layer].spec_of(layer)


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The parallel sizes: how the workers share the model, and which of them this one is."""

    tp_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if min(self.tp_size, self.pp_size, self.pcp_size, self.dcp_size) < 1 or not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of {self.world_size} workers: sizes are >= 1, ranks below their number"
            )

    @property
    def world_size(self) -> int:
        """Workers; decode context parallelism divides the tensor-parallel ones."""
        return self.tp_size * self.pp_size * self.pcp_size


def group_layers(layers: Mapping[str, LayerSpec], num_blocks: int) -> KVCacheConfig:
    """Put layers into groups, and groups over tensors, as vLLM does.

    One kind of layer, or one type of attention with pages that differ, makes one group, and a tensor for each layer.
    Several types make groups of as many layers as the rarest type has; or as the commonest has, if it has less than
    half as many again. The i-th layers of all groups then lie on the i-th tensor. Their pages must be of one size; pad
    them. Raises `ConfigError` otherwise.
    """
    kinds: dict[LayerSpec, list[str]] = defaultdict(list)
    for name, spec in layers.items():
        kinds[spec].append(name)
    if len(kinds) == 1:
        return _on_shared_tensors(layers, [list(layers)], num_blocks)
    if len({(spec.attention, spec.block_size, getattr(spec, "sliding_window", None)) for spec in kinds}) == 1:
        return _one_uniform_group(layers, num_blocks)
    counts = [len(names) for names in kinds.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = [
        names[part :: -(-len(names) // size)] for names in kinds.values() for part in range(-(-len(names) // size))
    ]
    return _on_shared_tensors(layers, groups, num_blocks)


def _one_uniform_group(layers: Mapping[str, LayerSpec], num_blocks: int) -> KVCacheConfig:
    tensors = tuple(
        KVCacheTensor(size_bytes=spec.page_bytes * num_blocks, shared_by=(name,)) for name, spec in layers.items()
    )
    group = KVCacheGroup(layer_names=tuple(layers), spec=UniformSpecs(dict(layers)))
    return KVCacheConfig(num_blocks=num_blocks, tensors=tensors, groups=(group,))


def _on_shared_tensors(layers: Mapping[str, LayerSpec], groups: list[list[str]], num_blocks: int) -> KVCacheConfig:
    sizes = {spec.page_bytes for spec in layers.values()}
    if len(sizes) != 1:
        raise ConfigError(f"groups that share tensors need pages of one size; these have {sorted(sizes)} bytes")
    tensors = tuple(
        KVCacheTensor(size_bytes=sizes.copy().pop() * num_blocks, shared_by=tuple(filter(None, shared)))
        for shared in zip_longest(*groups)
    )
    made = tuple(KVCacheGroup(layer_names=tuple(names), spec=layers[names[0]]) for names in groups)
    return KVCacheConfig(num_blocks=num_blocks, tensors=tensors, groups=made)


def padded_to_one_page(layers: Mapping[str, LayerSpec]) -> dict[str, LayerSpec]:
    """Return the layers with state-space pages padded to the largest page, so that all may share tensors."""
    page_bytes = max(spec.page_bytes for spec in layers.values())
    return {
        name: msgspec.structs.replace(spec, padded_page_bytes=page_bytes) if isinstance(spec, MambaSpec) else spec
        for name, spec in layers.items()
    }
