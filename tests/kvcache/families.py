"""Real models' KV caches, with their true shapes: examples to read, to size a cache by, and to test with.

Shapes are one worker's of `tp_size`; layers and groups are as vLLM 0.32 makes them. Sources: the models' published
configurations, and for DeepSeek-V4 vLLM's `models/deepseek_v4` (quantised pages: 448 bytes without position, 128 with,
8 of scales for a latent; 132 for an index key).
"""

from typing import NamedTuple

import torch

from kvtier.kvcache.layout.axes import KV_JOINED_NHD, LATENT, CacheAxes
from kvtier.kvcache.layout.model import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheTensor,
    LayerSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    UniformSpecs,
    group_layers,
    padded_to_one_page,
)

BF16 = torch.bfloat16


class Family(NamedTuple):
    """A model's caches in one worker."""

    config: KVCacheConfig
    axes: dict[str, CacheAxes]
    total_kv_heads: int


def llama_3_8b(num_blocks: int, tp_size: int = 1) -> Family:
    """32 layers of full attention, 8 KV heads of 128: one group, 4 KiB a token and layer."""
    return _attention({f"layers.{i}": _full(8, 128, tp_size) for i in range(32)}, num_blocks, 8)


def qwen_3_32b(num_blocks: int, tp_size: int = 1) -> Family:
    """64 layers of full attention, 8 KV heads of 128."""
    return _attention({f"layers.{i}": _full(8, 128, tp_size) for i in range(64)}, num_blocks, 8)


def gemma_3_27b(num_blocks: int, tp_size: int = 1) -> Family:
    """62 layers, 16 KV heads of 128: every sixth full, the others with a window of 1,024.

    Ten full layers make the first group, and 52 sliding ones six more, of nine or eight: ten tensors, each shared by up
    to seven layers.
    """
    layers: dict[str, LayerSpec] = {
        f"layers.{i}": _full(16, 128, tp_size) if i % 6 == 5 else _sliding(16, 128, tp_size, 1_024) for i in range(62)
    }
    full_first = sorted(layers, key=lambda name: isinstance(layers[name], SlidingWindowSpec))
    return _attention({name: layers[name] for name in full_first}, num_blocks, 16)


def gpt_oss_20b(num_blocks: int, tp_size: int = 1) -> Family:
    """24 layers, 8 KV heads of 64: windows of 128 and full attention in turn. Two groups on twelve tensors."""
    layers: dict[str, LayerSpec] = {
        f"layers.{i}": _full(8, 64, tp_size) if i % 2 else _sliding(8, 64, tp_size, 128) for i in range(24)
    }
    return _attention(layers, num_blocks, 8)


def deepseek_v2_lite(num_blocks: int, tp_size: int = 1) -> Family:
    """27 layers of one latent of 512 + 64 a token, whatever `tp_size`: every worker has the same bytes."""
    return _latent(27, num_blocks, tp_size)


def deepseek_v3(num_blocks: int, tp_size: int = 1) -> Family:
    """61 layers of one latent of 512 + 64 a token, the same bytes in every worker."""
    return _latent(61, num_blocks, tp_size)


def deepseek_v4(num_blocks: int, tp_size: int = 1, repeats: int = 4) -> Family:
    """Compressed latents, their index keys, a sliding window and the compressors' states, packed into rows.

    `repeats` times a layer that keeps one state of 4 tokens, with index keys, and one that keeps one of 128; each with
    a window of 128 tokens of its own. Pages are multiples of 576 bytes. Four groups: full attention with three page
    sizes, the windows, and the states of either compressor. Blocks of 256, 64, 4 and 8 tokens. The same bytes in every
    worker.
    """
    del tp_size
    full, window = dict[str, LayerSpec](), dict[str, LayerSpec]()
    fours, eights = dict[str, LayerSpec](), dict[str, LayerSpec]()
    for i in range(repeats):
        full |= {f"layers.{2 * i}.c4": _packed(256, 584, 4), f"layers.{2 * i}.index": _packed(256, 132, 4)}
        full[f"layers.{2 * i + 1}.c128"] = _packed(256, 584, 128)
        window |= {f"layers.{2 * i + j}.window": _packed(64, 584, 1, window=128) for j in range(2)}
        fours |= {f"layers.{2 * i}.states": _states(4, 2_048, 8), f"layers.{2 * i}.index_states": _states(4, 512, 8)}
        eights[f"layers.{2 * i + 1}.states"] = _states(8, 1_024, 128)
    specs = full | window | fours | eights
    groups = (
        KVCacheGroup(layer_names=tuple(full), spec=UniformSpecs(full)),
        KVCacheGroup(layer_names=tuple(window), spec=next(iter(window.values()))),
        KVCacheGroup(layer_names=tuple(fours), spec=UniformSpecs(fours)),
        KVCacheGroup(layer_names=tuple(eights), spec=next(iter(eights.values()))),
    )
    row_bytes = max(group.page_bytes for group in groups)
    tensor = KVCacheTensor(size_bytes=row_bytes * num_blocks, shared_by=tuple(specs))
    config = KVCacheConfig(num_blocks=num_blocks, tensors=(tensor,), groups=groups)
    return Family(config, dict.fromkeys(specs, LATENT), 1)


def jamba(num_blocks: int, tp_size: int = 1) -> Family:
    """Jamba v0.1: 28 Mamba layers (states of 3 x 8,192 and 8,192 x 16) and 4 of attention (8 KV heads of 128).

    Blocks of 80 tokens, so that an attention page is as long as a state; states are padded to it. Eight groups on four
    tensors.
    """
    attention = _full(8, 128, tp_size, block_size=80)
    state = MambaSpec(block_size=80, shapes=((3, 8_192 // tp_size), (8_192 // tp_size, 16)), dtypes=(BF16, BF16))
    return _hybrid("MMMM*MMM" * 4, attention, state, num_blocks, 8)


def nemotron_h_8b(num_blocks: int, tp_size: int = 1) -> Family:
    """24 Mamba-2 layers (3 x 10,240 and 128 x 64 x 128), 4 of attention (8 KV heads of 128); blocks of 528 tokens.

    Its 24 dense layers keep nothing. Seven groups on four tensors.
    """
    attention = _full(8, 128, tp_size, block_size=528)
    shapes = ((3, 10_240 // tp_size), (128 // tp_size, 64, 128))
    state = MambaSpec(block_size=528, shapes=shapes, dtypes=(BF16, BF16))
    return _hybrid("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-", attention, state, num_blocks, 8)


def qwen_3_next(num_blocks: int, tp_size: int = 1) -> Family:
    """Qwen3-Next-80B-A3B: 36 layers of gated delta rule (3 x 8,192 and 32 x 128 x 128) and 12 of attention.

    2 KV heads of 256; blocks of 544 tokens. Four groups on twelve tensors.
    """
    attention = _full(2, 256, tp_size, block_size=544)
    shapes = ((3, 8_192 // tp_size), (32 // tp_size, 128, 128))
    state = MambaSpec(block_size=544, shapes=shapes, dtypes=(BF16, BF16))
    return _hybrid("MMM*" * 12, attention, state, num_blocks, 2)


FAMILIES = (
    llama_3_8b,
    qwen_3_32b,
    gemma_3_27b,
    gpt_oss_20b,
    deepseek_v2_lite,
    deepseek_v3,
    deepseek_v4,
    jamba,
    nemotron_h_8b,
    qwen_3_next,
)
"""One of each, to be called with a number of blocks and, perhaps, of workers."""


def _attention(layers: dict[str, LayerSpec], num_blocks: int, total_kv_heads: int) -> Family:
    return Family(group_layers(layers, num_blocks), dict.fromkeys(layers, KV_JOINED_NHD), total_kv_heads)


def _latent(layers: int, num_blocks: int, tp_size: int) -> Family:
    del tp_size
    spec = MLASpec(block_size=64, head_size=576, dtype=BF16)
    specs: dict[str, LayerSpec] = {f"layers.{i}": spec for i in range(layers)}
    return Family(group_layers(specs, num_blocks), dict.fromkeys(specs, LATENT), 1)


def _hybrid(kinds: str, attention: LayerSpec, state: LayerSpec, num_blocks: int, total_kv_heads: int) -> Family:
    """Return a model with a layer for each letter: * attention, M a state, - neither."""
    attending = [f"layers.{i}" for i, kind in enumerate(kinds) if kind == "*"]
    keeping = [f"layers.{i}" for i, kind in enumerate(kinds) if kind == "M"]
    specs = padded_to_one_page(dict.fromkeys(attending, attention) | dict.fromkeys(keeping, state))
    return Family(group_layers(specs, num_blocks), dict.fromkeys(attending, KV_JOINED_NHD), total_kv_heads)


def _full(heads: int, head_size: int, tp_size: int, block_size: int = 16) -> LayerSpec:
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=max(1, heads // tp_size), head_size=head_size, dtype=BF16
    )


def _sliding(heads: int, head_size: int, tp_size: int, window: int) -> LayerSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=max(1, heads // tp_size), head_size=head_size, dtype=BF16, sliding_window=window
    )


def _packed(block_size: int, state_bytes: int, tokens_per_state: int, window: int | None = None) -> LayerSpec:
    return MLASpec(
        block_size=block_size,
        head_size=512 if state_bytes == 584 else 128,
        dtype=torch.uint8,
        state_bytes=state_bytes,
        tokens_per_state=tokens_per_state,
        sliding_window=window,
        align_bytes=576,
    )


def _states(block_size: int, size: int, window: int) -> LayerSpec:
    return MLASpec(block_size=block_size, head_size=size, dtype=torch.float32, sliding_window=window, align_bytes=576)
