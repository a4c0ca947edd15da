"""The pages of a host pool: the addresses of their bytes, and the namespace that tells them from all other pages.

A page is a list of pieces (address, length) in the pool's order, or one flat tensor for a pool without addresses.
"""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvtier.backend import Group, Namespace, OffloadKey, make_offload_key
from kvtier.errors import ConfigError
from kvtier.integrations.sglang.engine import PagePieces

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
KV = "kv"

_SHA256 = re.compile("[0-9a-f]{64}")
_OPAQUE = ("torch.uint8", "torch.int8")  # Host pools report these for every 8-bit float.


def page_key(key: str) -> OffloadKey:
    """Return the key of a page: the 32 bytes of SGLang's hash, or the SHA-256 of any other text."""
    return make_offload_key(bytes.fromhex(key) if _SHA256.fullmatch(key) else sha256(key.encode()).digest())


class HostPages:
    """One host pool's pages."""

    def __init__(self, pool: Any) -> None:
        """Measure a page. Raises `ConfigError` for a pool without bytes to copy."""
        self.pool = pool
        self.page_size: int = pool.page_size
        first = torch.arange(self.page_size)
        try:
            addresses, sizes = pool.get_page_buffer_meta(first)
            self._per_page: int | None = len(addresses)
        except (NotImplementedError, ValueError, AttributeError):  # No addresses: SGLang's pools say so in three ways.
            self._per_page, sizes = None, (pool.get_dummy_flat_data_page().nbytes,)
        except TypeError as error:  # A logical pool returns None.
            raise ConfigError(f"the host pool {type(pool).__name__} has no bytes to store") from error
        self.sizes = tuple(map(int, sizes))
        self.page_bytes = sum(self.sizes)
        if self.page_bytes < 1:
            raise ConfigError(f"the host pool {type(pool).__name__} has pages of 0 bytes")

    @property
    def byte_order(self) -> str:
        """Name the order of a page's bytes: the layout, and the lengths of its pieces."""
        pieces = f"{len(self.sizes)}x{self.sizes[0]}" if len(set(self.sizes)) == 1 else "+".join(map(str, self.sizes))
        return f"{self.pool.layout}:{pieces}{'' if self._per_page else ':flat'}"

    def to_store(self, indices: torch.Tensor) -> "Located":
        """Locate the bytes of the pages at these slots."""
        if self._per_page:
            return self._located(indices)
        flat = [self.pool.get_data_page(index, flat=True) for index in self._starts(indices)]
        return Located([[(page.data_ptr(), page.nbytes)] for page in flat], flat)

    def to_load(self, indices: torch.Tensor) -> "Located":
        """Locate the memory that pages are loaded into; call `settle` afterwards."""
        if self._per_page:
            return self._located(indices)
        flat = [self.pool.get_dummy_flat_data_page() for _ in self._starts(indices)]
        return Located([[(page.data_ptr(), page.nbytes)] for page in flat], flat)

    def settle(self, located: "Located", indices: torch.Tensor, loaded: Sequence[bool]) -> None:
        """Write loaded flat pages into the pool; pages with addresses were loaded into it directly."""
        for start, page, came in zip(self._starts(indices), located.flat, loaded, strict=False):
            if came:
                self.pool.set_from_flat_data_page(start, page)

    def _located(self, indices: torch.Tensor) -> "Located":
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        pieces, step = list(zip(addresses, sizes, strict=True)), self._per_page or 1
        return Located([pieces[start : start + step] for start in range(0, len(pieces), step)], [])

    def _starts(self, indices: torch.Tensor) -> list[int]:
        return indices[:: self.page_size].tolist()


class Located(NamedTuple):
    """Pieces of pages, and the flat tensors that they lie in if these are not the pool's own."""

    pages: PagePieces
    flat: list[torch.Tensor]


def namespace_of(
    config: HiCacheStorageConfig, pages: HostPages, name: str, *, revision: str | None, kv_cache_dtype: str | None
) -> Namespace:
    """Return the namespace of one pool's pages: all that decides their bytes and is not in SGLang's keys.

    Pages of MLA's latent KV are the same in every tensor-parallel rank, so all ranks share one name.
    """
    if not config.model_name:
        raise ConfigError("model_name: SGLang passed none; start it with --served-model-name or a model's path")
    if config.should_split_heads:
        raise ConfigError(f"tp_lcm_size: {config.tp_lcm_size} given, which kvtier's pages do not support: leave it out")
    if getattr(config, "dcp_size", 1) > 1:
        raise ConfigError("decode context parallelism: 1 rank accepted, its shards of a page are not supported")
    layout = pages.pool.layout
    if name == KV and layout not in LAYOUTS:
        raise ConfigError(f"--hicache-mem-layout: {layout!r} given, {', '.join(LAYOUTS)} accepted")
    dtype = str(getattr(pages.pool, "dtype", "none"))
    if name == KV and dtype in _OPAQUE and kv_cache_dtype is None:
        raise ConfigError(
            f"kvtier.kv_cache_dtype: missing; SGLang's host pool reports {dtype}, which may be fp8_e4m3 or fp8_e5m2:"
            " give the value of --kv-cache-dtype"
        )
    sharded = name == "mamba" or isinstance(pages.pool, MHATokenToKVPoolHost)  # Such as a draft model's next to MLA.
    any_rank = config.is_mla_model and not sharded
    tp_rank, tp_size = (0, 1) if any_rank else (config.tp_rank, config.tp_size)
    return Namespace(
        model_name=config.model_name,
        tokens_per_hash=pages.page_size,
        tp_size=tp_size,
        pp_size=config.pp_size,
        pcp_size=config.attn_cp_size,
        rank=(config.pp_rank * config.attn_cp_size + config.attn_cp_rank) * tp_size + tp_rank,
        dtype=f"{kv_cache_dtype or dtype.removeprefix('torch.')}/{dtype.removeprefix('torch.')}",
        kv_cache_groups=(Group(tokens_per_block=pages.page_size, layer_names=(name,)),),
        inference_engine="sglang",
        canonical_format=pages.byte_order,
        weights_revision=revision,
        replicated_layout=any_rank,
    )


def process_rank(config: HiCacheStorageConfig) -> int:
    """Return this scheduler process's number within its server."""
    rank = (config.dp_rank * config.pp_size + config.pp_rank) * config.attn_cp_size + config.attn_cp_rank
    return rank * config.tp_size + config.tp_rank
