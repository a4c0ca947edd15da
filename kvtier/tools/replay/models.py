"""Bytes of KV cache for each token, from the `config.json` of a model with plain attention.

Only model types whose layers all keep 16-bit keys and values of their KV heads are accepted: a wrong figure is worse
than none. Any other model needs `--kv-bytes-per-token`.
"""

import os
from typing import Any

import msgspec

from kvtier.errors import ConfigError
from kvtier.settings import foreign

KV_BYTES_MAX = 1 << 30  # For a token. A thousand times the bytes of the largest models.
VALUE_BYTES = 2  # As models are served, whatever the type of their weights.
PLAIN = ("granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


class ModelConfig(msgspec.Struct):
    """The fields of a `config.json` that decide."""

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int = 0
    head_dim: int | None = None
    quantization_config: dict[str, Any] | None = None


def kv_bytes_per_token(model: str) -> int:
    """Return the bytes for a model's `config.json`, or for the folder that has it.

    Raises `ConfigError` for a file that cannot be read, and for a model that is not plain.
    """
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    try:
        with open(path, "rb") as file:
            config = foreign(msgspec.json.Decoder(ModelConfig).decode, file.read())
    except OSError as error:
        raise ConfigError(
            f"--model {path}: cannot be read: {error.strerror}; a model's config.json accepted"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"--model {path}: {error}; a config.json of a plain model, or --kv-bytes-per-token, accepted"
        ) from error
    quantized = [name for name, value in (config.quantization_config or {}).items() if "kv_cache" in name and value]
    if config.model_type not in PLAIN or quantized:
        given = f"model_type {config.model_type!r}" if not quantized else f"quantization_config.{quantized[0]}"
        raise ConfigError(f"--model {path}: {given}; {', '.join(PLAIN)}, or --kv-bytes-per-token, accepted")
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    head_dim = config.head_dim or config.hidden_size // max(1, config.num_attention_heads)
    found = 2 * layers * heads * head_dim * VALUE_BYTES
    if not 0 < found <= KV_BYTES_MAX or min(layers, heads, head_dim) < 1:
        raise ConfigError(f"--model {path}: {found} bytes a token, at least 1 and at most {KV_BYTES_MAX} accepted")
    return found
