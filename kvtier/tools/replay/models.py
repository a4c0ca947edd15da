"""Bytes of KV cache that a model takes for each token, from its `config.json` or from its name.

A layer with attention keeps keys and values of its KV heads. One with latent attention (MLA) keeps one vector for both,
and a part for positions. Layers that keep a state of fixed size, as linear attention does, take nothing for a token.
Layers with a sliding window are counted in full, as engines offload them. A model whose layers differ otherwise is
refused: a wrong figure would be worse than none.
"""

import os
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import Any, NamedTuple

import msgspec

from kvtier.errors import ConfigError
from kvtier.settings import foreign

KV_BYTES_MAX = 1 << 30  # For a token. A thousand times what the largest models take.
LAYERS_MAX = 10_000
VALUE_BYTES = 2  # As models are served, also where their weights have fewer or more.
_WITH_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention", "*"})
_WITHOUT = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe", "M", "-", "E"})
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_attention_groups")
_NOT_COUNTED = (
    "block_configs",
    "compress_ratios",
    "cross_attention_layers",
    "global_head_dim",
    "index_topk",
    "is_encoder_decoder",
    "num_global_key_value_heads",
    "swa_num_key_value_heads",
)
"""Fields of models whose layers take different numbers of bytes, or more than keys and values."""


class Attention(NamedTuple):
    """What one token adds to the KV cache, in values: layers by values of a layer."""

    layers: int
    values: int

    @property
    def bytes_per_token(self) -> int:
        """In 16-bit values, as models are served unless their KV cache is quantized."""
        return VALUE_BYTES * self.layers * self.values


def heads(layers: int, kv_heads: int, head_dim: int) -> Attention:
    """Return attention with so many KV heads of so many dimensions in each layer."""
    return Attention(layers, 2 * kv_heads * head_dim)


MODELS = {
    "deepseek-ai/DeepSeek-R1": Attention(61, 512 + 64),
    "deepseek-ai/DeepSeek-V3": Attention(61, 512 + 64),
    "meta-llama/Llama-3.1-8B": heads(32, 8, 128),
    "meta-llama/Llama-3.1-70B": heads(80, 8, 128),
    "meta-llama/Llama-3.3-70B": heads(80, 8, 128),
    "mistralai/Mistral-7B": heads(32, 8, 128),
    "openai/gpt-oss-20b": heads(24, 8, 64),
    "openai/gpt-oss-120b": heads(36, 8, 64),
    "Qwen/Qwen3-8B": heads(36, 8, 128),
    "Qwen/Qwen3-32B": heads(64, 8, 128),
    "Qwen/Qwen3-30B-A3B": heads(48, 4, 128),
    "Qwen/Qwen3-235B-A22B": heads(94, 4, 128),
}
"""Models by name, from the configurations that are published with them."""


def kv_bytes_per_token(model: str) -> int:
    """Return the bytes for a model's name, its `config.json`, or a folder that has one.

    Raises `ConfigError` for a name that is not known and for a file that does not say enough.
    """
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    if os.path.isfile(path):
        return _of_config(path)
    for name, attention in MODELS.items():
        if model.lower() in (name.lower(), name.lower().rpartition("/")[2]):
            return attention.bytes_per_token
    raise ConfigError(
        f"--model {model!r}: neither a config.json nor a known name; {', '.join(MODELS)} accepted, the path of the "
        "model's config.json, or --kv-bytes-per-token"
    )


def _of_config(path: str) -> int:
    try:
        with open(path, "rb") as file:
            config = foreign(msgspec.json.Decoder(dict[str, Any]).decode, file.read())
    except OSError as error:
        raise ConfigError(
            f"--model {path}: cannot be read: {error.strerror}; a model's config.json accepted"
        ) from error
    except ValueError as error:
        raise ConfigError(f"--model {path}: {error}; a model's config.json accepted") from error
    try:
        nested = config.get("text_config")  # Of a model that sees.
        return _bytes(config | nested if isinstance(nested, dict) else config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--model {path}: it does not say what its KV cache takes ({error}); --kv-bytes-per-token accepted instead"
        ) from error


def _bytes(config: Mapping[str, Any]) -> int:
    for field in _NOT_COUNTED:
        if config.get(field):
            raise ValueError(f"{field}: layers that differ, or that keep more than keys and values")
    found = _layers(config) * _values(config) * _value_bytes(config.get("quantization_config") or {})
    if not 0 < found <= KV_BYTES_MAX:
        raise ValueError(f"{found} bytes a token, at least 1 and at most {KV_BYTES_MAX} accepted")
    return found


def _layers(config: Mapping[str, Any]) -> int:
    """Return how many layers keep keys and values of their own."""
    layers = int(config["num_hidden_layers"])
    if not 0 < layers <= LAYERS_MAX:
        raise ValueError(f"{layers} layers, at least 1 and at most {LAYERS_MAX} accepted")
    counts = (count(config[field], layers) for field, count in _LAYERS.items() if config.get(field))
    return int(next(counts, layers)) - int(config.get("num_kv_shared_layers") or 0)


def _of_kinds(kinds: Any, layers: int) -> int:
    """Count the kinds with attention; a pattern that is shorter than the model comes again and again."""
    named = list(kinds) if isinstance(kinds, str) else msgspec.convert(kinds, list[str])
    if unknown := set(named) - _WITH_ATTENTION - _WITHOUT:
        raise ValueError(f"a layer of kind {min(unknown)!r}")
    return sum(kind in _WITH_ATTENTION for kind in islice(cycle(named), layers))


_LAYERS: dict[str, Callable[[Any, int], int]] = {
    "layer_types": _of_kinds,
    "layers_block_type": _of_kinds,
    "block_types": _of_kinds,
    "hybrid_override_pattern": _of_kinds,
    "attn_type_list": lambda ones, _: sum(ones),
    "attn_layer_indices": lambda indexes, _: len(indexes),
    "full_attn_idxs": lambda indexes, _: len(indexes),
    "linear_attn_config": lambda table, _: len(table["full_attn_layers"]),
    "full_attention_interval": lambda every, layers: layers // every,
    "attn_layer_period": lambda every, layers: layers // every,
}
"""Where models say which of their layers have attention, and how many of so many layers these are."""


def _values(config: Mapping[str, Any]) -> int:
    """Return how many values a layer keeps for a token."""
    if config.get("kv_lora_rank"):
        return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    query_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // query_heads)
    if config.get("v_head_dim") not in (None, head_dim):
        raise ValueError(f"v_head_dim: values with other dimensions than keys, which have {head_dim}")
    one_for_all = config.get("multi_query") and not config.get("new_decoder_architecture")
    kv_heads = 1 if one_for_all else next(filter(None, map(config.get, _KV_HEADS)), query_heads)
    return 2 * int(kv_heads) * head_dim


def _value_bytes(quantization: Mapping[str, Any]) -> int:
    """Return the bytes of a value: fewer where a model was quantized together with its KV cache."""
    named, scheme = quantization.get("kv_cache_quant_algo"), quantization.get("kv_cache_scheme")
    bits = {"FP8": 8}[named] if named else scheme["num_bits"] if scheme else 8 * VALUE_BYTES
    if bits not in (8, 16):
        raise ValueError(f"a KV cache of {bits} bits")
    return bits // 8
