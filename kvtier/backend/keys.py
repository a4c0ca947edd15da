"""Offload keys: a chunk's hash followed by its KV-cache group, as raw bytes.

Raw bytes, not a tuple: a key is hashed millions of times a second, is never traversed by the garbage collector, and
travels packed between processes. The format is vLLM's own (`make_offload_key` in `vllm/v1/kv_offload/base.py`).
"""

from collections.abc import Sequence
from typing import NewType

OffloadKey = NewType("OffloadKey", bytes)

GROUP_BYTES = 4  # Big-endian, unsigned, at the end of the key.


def make_offload_key(chunk_hash: bytes, group_index: int = 0) -> OffloadKey:
    """Join a chunk's hash and the index of its KV-cache group (0 to 2**32 - 1; OverflowError beyond)."""
    return OffloadKey(chunk_hash + group_index.to_bytes(GROUP_BYTES, "big"))


def chunk_hash(key: OffloadKey) -> bytes:
    """Return the hash part of a key."""
    return key[:-GROUP_BYTES]


def of_one_group(keys: Sequence[OffloadKey]) -> bool:
    """Say whether keys that come group by group are all of one group; these are in prefix order as they come."""
    return not keys or keys[0][-GROUP_BYTES:] == keys[-1][-GROUP_BYTES:]


def group_index(key: OffloadKey) -> int:
    """Return the index of the KV-cache group that a key belongs to."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")
