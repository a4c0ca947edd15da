"""Real models' KV caches, with their true shapes: examples to read, to size a cache by, and to test with.

Layers and groups are as vLLM 0.32 makes them, in one worker. Sources: the models' published configurations, and for
DeepSeek-V4 vLLM's `models/deepseek_v4` (quantised pages: 448 bytes without position, 128 with, 8 of scales for a
latent; 132 for an index key).
"""

from typing import NamedTuple

import torch

from kvtier.kvcache.layout import AttentionSpec, CacheAxes, KVCacheConfig, KVCacheGroup, MambaSpec
from kvtier.kvcache.layout.axes import KV_JOINED_NHD, LATENT

BF16 = torch.bfloat16


class Family(NamedTuple):
    config: KVCacheConfig
    axes: dict[str, CacheAxes]


def attention(heads, head_size, block_size=16):
    return AttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype=BF16)


def states(block_size, padded_to, *shapes):
    return MambaSpec(
        block_size=block_size, shapes=shapes, dtypes=(BF16,) * len(shapes), padded_page_bytes=padded_to.page_bytes
    )


def latent(block_size, head_size, dtype=BF16, **fields):
    """One latent a state; DeepSeek-V4's pages are multiples of 576 bytes."""
    return AttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=head_size, head_size_v=0, dtype=dtype, **fields
    )


def packed(block_size, state_bytes, tokens_per_state):
    return latent(
        block_size, 128, torch.uint8, state_bytes=state_bytes, tokens_per_state=tokens_per_state, align_bytes=576
    )


def compressor(block_size, size):
    return latent(block_size, size, torch.float32, align_bytes=576)


LATENT_512_64 = latent(64, 576)
JAMBAS, NEMOTRONS, QWENS = attention(8, 128, 80), attention(8, 128, 528), attention(2, 256, 544)
JAMBA_STATES = states(80, JAMBAS, (3, 8_192), (8_192, 16))
NEMOTRON_STATES = states(528, NEMOTRONS, (3, 10_240), (128, 64, 128))
QWEN_STATES = states(544, QWENS, (3, 8_192), (32, 128, 128))

GROUPS = {
    "llama_3_8b": [[attention(8, 128)] * 32],
    # Every sixth of 62 layers full, the others with a window of 1,024: seven groups on ten tensors.
    "gemma_3_27b": [[attention(16, 128)] * layers for layers in (10, 9, 9, 9, 9, 8, 8)],
    # Windows of 128 and full attention in turn.
    "gpt_oss_20b": [[attention(8, 64)] * 12] * 2,
    # One latent of 512 + 64 a token: the same bytes in every worker.
    "deepseek_v3": [[LATENT_512_64] * 61],
    # Full attention with three page sizes (latents of 4 and of 128 tokens, index keys), windows, and either
    # compressor's states; packed into rows. Eight layers of them.
    "deepseek_v4": [
        [packed(256, 584, 4), packed(256, 132, 4), packed(256, 584, 128)] * 4,
        [packed(64, 584, 1)] * 8,
        [compressor(4, 2_048), compressor(4, 512)] * 4,
        [compressor(8, 1_024)] * 4,
    ],
    # Blocks so long that an attention page is as long as a state, which is padded to it.
    "jamba": [[JAMBAS] * 4, *[[JAMBA_STATES] * 4] * 7],
    "nemotron_h_8b": [[NEMOTRONS] * 4, *[[NEMOTRON_STATES] * 4] * 6],
    "qwen_3_next": [[QWENS] * 12, *[[QWEN_STATES] * 12] * 3],
}
"""The specs of each group's layers."""


def family(name, num_blocks):
    layers = [
        {f"{number}.{place}": spec for place, spec in enumerate(specs)} for number, specs in enumerate(GROUPS[name])
    ]
    axes = {
        layer: KV_JOINED_NHD if spec.head_size_v is None else LATENT
        for group in layers
        for layer, spec in group.items()
        if isinstance(spec, AttentionSpec)
    }
    groups = tuple(KVCacheGroup(layers=group) for group in layers)
    return Family(KVCacheConfig(num_blocks=num_blocks, groups=groups), axes)
