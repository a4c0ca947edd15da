"""Bytes of KV cache that a model takes for each token, from its `config.json` or from its name.

A layer with attention keeps keys and values of its KV heads. One with latent attention (MLA) keeps one vector for both,
and a part for positions. Layers that keep a state of fixed size, as linear attention does, take nothing for a token.
Layers with a sliding window are counted in full, as engines offload them.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvtier.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
STATE_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


class Attention(NamedTuple):
    """What one token adds to the KV cache, in values: layers by values of a layer."""

    layers: int
    values: int

    @property
    def bytes_per_token(self) -> int:
        """In 16-bit values, as models are served unless their KV cache is quantized."""
        return 2 * self.layers * self.values


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
            config = msgspec.json.decode(file.read(), type=dict[str, Any])
        nested = config.get("text_config")  # Of a model that sees.
        return _bytes(config | nested if isinstance(nested, dict) else config)
    except OSError as error:
        raise ConfigError(
            f"--model {path}: cannot be read: {error.strerror}; a model's config.json accepted"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--model {path}: {error}; a model's config.json accepted") from error
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--model {path}: it does not say what its KV cache takes ({error}); --kv-bytes-per-token accepted instead"
        ) from error


def _bytes(config: Mapping[str, Any]) -> int:
    layers = int(config["num_hidden_layers"])
    if config.get("layer_types"):
        kinds = msgspec.convert(config["layer_types"], list[str])
        layers = sum(kind not in STATE_LAYERS for kind in kinds)
    if config.get("kv_lora_rank"):
        values = int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    else:
        query_heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or query_heads)
        values = 2 * kv_heads * int(config.get("head_dim") or int(config["hidden_size"]) // query_heads)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    found = layers * values * DTYPE_BYTES.get(dtype, 2)
    if found < 1:
        raise KeyError("layers with attention")
    return found
