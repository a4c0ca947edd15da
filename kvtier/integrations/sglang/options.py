"""Options in SGLang's `--hicache-storage-backend-extra-config`, table `kvtier`, and the engine's; imports no SGLang."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvtier.backend import Durability, Namespace, backend_class
from kvtier.config import EngineConfig, EngineLimits, Text, TierConfig
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.settings import Checked, PositiveDuration, PositiveSize, decode

WHERE = "kvtier"
BATCH_PAGES = 128  # SGLang's `STORAGE_BATCH_SIZE`: the pages of one call.
ROWS_MIN = 2 * BATCH_PAGES  # One batch is stored while another is loaded.

Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class SglangOptions(Checked, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of `KVTierStorage`."""

    secondary_tiers: tuple[TierConfig, ...]  # Probed in this order.
    staging_bytes: PositiveSize | None = None  # Host memory of a pool's staging rows; None: two batches of pages.
    deadline_s: PositiveDuration = 5.0  # Limit of each call. SGLang waits 1 s + 0.25 s per 1,000 tokens for a prefetch.
    revision: Text | None = None  # Revision of the weights; SGLang's keys do not name it.
    kv_cache_dtype: Text | None = None  # Required for FP8: SGLang's host pools do not distinguish e4m3 and e5m2.
    metrics_port: Port | None = None  # Serves Prometheus metrics on 127.0.0.1; rank n uses the port n above it.
    limits: EngineLimits = EngineLimits()

    def __post_init__(self) -> None:
        """Refuse tiers that could never acknowledge a backup."""
        super().__post_init__()
        if not self.secondary_tiers:
            raise ConfigError("secondary_tiers: no tier given, at least one accepted: staging rows keep no pages")
        for index, tier in enumerate(self.secondary_tiers):
            if tier.cascade != "store":
                raise ConfigError(
                    f"secondary_tiers[{index}].cascade: {tier.cascade!r} given, 'store' accepted: SGLang frees a page"
                    " once its store is acknowledged"
                )


def read_options(extra_config: Mapping[str, Any] | None) -> SglangOptions:
    """Decode the table `kvtier`; `ConfigError` names the path of an invalid value."""
    extra = extra_config or {}
    if not extra.get("interface_v1"):
        raise ConfigError(
            f"interface_v1: {extra.get('interface_v1')!r} given, 1 accepted: without it SGLang copies each page once"
            " more, in another byte order"
        )
    return decode(SglangOptions, extra.get(WHERE, {}), WHERE)


def engine_config(options: SglangOptions, namespace: Namespace, page_bytes: int, *, side: bool) -> EngineConfig:
    """Return the configuration of one host pool's engine. `side`: a pool other than the KV pool.

    Raises `ConfigError` as `EngineConfig.from_dict`, and for staging rows that hold fewer than two batches.
    """
    row_bytes = -(-page_bytes // PAGE_BYTES) * PAGE_BYTES
    rows = ROWS_MIN if options.staging_bytes is None else options.staging_bytes // row_bytes
    if side:
        rows = max(8, min(rows, ROWS_MIN))  # Side pools move few pages a call, of megabytes each.
    elif rows < ROWS_MIN:
        raise ConfigError(
            f"{WHERE}.staging_bytes: {options.staging_bytes:,} given, at least {ROWS_MIN * row_bytes:,} accepted: two"
            f" batches of {BATCH_PAGES} pages of {row_bytes:,} bytes"
        )
    given: dict[str, Any] = {
        "cpu_bytes_to_use": rows * row_bytes,
        "chunk_bytes": page_bytes,
        "secondary_tiers": options.secondary_tiers,
        "runner": "process",
        "namespace": namespace,
        "limits": options.limits,
    }
    return EngineConfig.from_dict(given, WHERE)


def durable_tiers(options: SglangOptions) -> tuple[int, ...]:
    """Return the places of the tiers that outlive this process; of all tiers if none does."""
    tiers = tuple(range(len(options.secondary_tiers)))
    types = [tier.type for tier in options.secondary_tiers]
    return tuple(i for i in tiers if backend_class(types[i]).durability is not Durability.PROCESS) or tiers
