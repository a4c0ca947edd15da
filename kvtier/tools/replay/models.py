"""Bytes of KV cache that a model takes for each token, from its `config.json`.

Only models whose layers are alike are read: keys and values of each layer's KV heads, or one latent vector (MLA).
Layers with a sliding window count in full, as LLM engines offload them. Any other model is refused: a wrong figure
would be worse than none.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from kvtier.errors import ConfigError
from kvtier.settings import foreign

KV_BYTES_MAX = 1 << 30  # For a token. A thousand times what the largest models take.
LAYERS_MAX = 10_000
VALUE_BYTES = 2  # As models are served, whatever their weights have.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
_LAYERS_DIFFER = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "block_types",
    "compress_ratios",
    "cross_attention_layers",
    "full_attention_interval",
    "full_attn_idxs",
    "global_head_dim",
    "hybrid_override_pattern",
    "index_topk",
    "is_encoder_decoder",
    "layers_block_type",
    "linear_attn_config",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "quantization_config.kv_cache_quant_algo",
    "quantization_config.kv_cache_scheme",
    "swa_num_key_value_heads",
)
"""Fields of models whose layers take different numbers of bytes, or other than 16-bit keys and values."""


def kv_bytes_per_token(model: str) -> int:
    """Return the bytes for a model's `config.json`, or a folder that has one.

    Raises `ConfigError` for a file that cannot be read or does not say enough.
    """
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
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
    quantization: dict[str, Any] = config.get("quantization_config") or {}
    given = {**config, **{f"quantization_config.{name}": value for name, value in quantization.items()}}
    if differ := next((field for field in _LAYERS_DIFFER if given.get(field)), None):
        raise ValueError(f"{differ}: layers that differ, or keep other than 16-bit keys and values")
    if unknown := set[str](config.get("layer_types") or ()) - _ATTENTION:
        raise ValueError(f"a layer of kind {min(unknown)!r}")
    layers = int(config["num_hidden_layers"])
    if not 0 < layers <= LAYERS_MAX:
        raise ValueError(f"{layers} layers, at least 1 and at most {LAYERS_MAX} accepted")
    found = layers * _values(config) * VALUE_BYTES
    if not 0 < found <= KV_BYTES_MAX:
        raise ValueError(f"{found} bytes a token, at least 1 and at most {KV_BYTES_MAX} accepted")
    return found


def _values(config: Mapping[str, Any]) -> int:
    """Return the number of values that a layer keeps for a token."""
    if config.get("kv_lora_rank"):
        return int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    query_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // query_heads)
    if config.get("v_head_dim") not in (None, head_dim):
        raise ValueError(f"v_head_dim: values with other dimensions than keys, which have {head_dim}")
    return 2 * int(config["num_key_value_heads"]) * head_dim
