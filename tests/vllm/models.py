"""Tiny models with random weights, saved once, so that engines of different sizes have the same ones."""

import torch
import transformers

VOCABULARY = 1_024
COMMON = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "intermediate_size": 512,
    "max_position_embeddings": 4_096,
    "initializer_range": 0.1,  # Large enough for attention to look somewhere: wrong KV then gives other tokens.
}
LLAMA = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 32}


def llama(folder):
    """Full attention, grouped queries: 64 KiB for a block of 32 tokens."""
    return _saved(folder / "llama", transformers.LlamaConfig, **LLAMA)


def llama_of_few_heads(folder):
    """One KV head, of which every worker has a copy."""
    return _saved(folder / "llama-one-head", transformers.LlamaConfig, **LLAMA | {"num_key_value_heads": 1})


def another_llama(folder):
    return _saved(folder / "llama-other", transformers.LlamaConfig, seed=1, **LLAMA)


def gemma3(folder):
    """Sliding windows of 128 tokens in five of six layers, full attention in the sixth."""
    return _saved(
        folder / "gemma3", transformers.Gemma3TextConfig, num_hidden_layers=6, num_key_value_heads=2, head_dim=32,
        sliding_window=128, query_pre_attn_scalar=32,
    )  # fmt: skip


def deepseek_v2(folder):
    """Multi-head latent attention, dense layers only."""
    return _saved(
        folder / "deepseek-v2", transformers.DeepseekV2Config, num_hidden_layers=2, num_key_value_heads=8,
        kv_lora_rank=512,  # What the CPU's kernels know.
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=2,
        n_routed_experts=4, moe_intermediate_size=128,
    )  # fmt: skip


def lfm2(folder):
    """Short convolutions, whose state vLLM keeps as it keeps Mamba's, in two of four layers."""
    return _saved(
        folder / "lfm2", transformers.Lfm2Config, num_hidden_layers=4, num_key_value_heads=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_L_cache=3, conv_dim=256, block_dim=256, block_auto_adjust_ff_dim=False,
    )  # fmt: skip


def _saved(path, config, seed=0, **fields):
    if not (path / "config.json").exists():
        torch.manual_seed(seed)
        transformers.AutoModelForCausalLM.from_config(config(**COMMON, **fields), dtype=torch.bfloat16).save_pretrained(
            path
        )
    return str(path)
