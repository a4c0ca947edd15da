"""The engine of a configuration as a model for virtual time: a page stands for a chunk, a dummy tier for a disk.

Chunks of a real engine have tens of MiB, and nobody has a thousand million times that in memory. So every size is
divided by the number of pages in a row, bandwidths, too: transfers then take as long as the real ones would.
"""

import msgspec
from msgspec.structs import replace

from kvtier.config import ROW_ALIGN_BYTES, EngineConfig, TierConfig, TierLimits, tier_options
from kvtier.replay.setup import primary_rows
from kvtier.replay.study import Extent

KV_BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in bf16: K and V of 32 layers, 8 heads of 128, 2 bytes each.
DISK = {"latency_s": 100e-6, "bandwidth_bytes_per_s": 28_000_000_000, "concurrency": 256}  # Four SSDs of 7 GB/s.
DISK_QUEUE_CHUNKS = 1_024  # Four times as many as a long prompt has; the disks take them in three seconds.


def default_model(extent: Extent, block_tokens: int) -> EngineConfig:
    """Put a small primary over SSDs, for chunks of the trace's blocks as an 8B model has them."""
    chunk_bytes = block_tokens * KV_BYTES_PER_TOKEN
    in_flight = DISK_QUEUE_CHUNKS * chunk_bytes
    limits = TierLimits(load_bytes_in_flight=in_flight, store_bytes_in_flight=in_flight)
    return EngineConfig(
        cpu_bytes_to_use=primary_rows(extent) * chunk_bytes,
        chunk_bytes=chunk_bytes,
        secondary_tiers=(TierConfig(type="dummy", name="ssds", limits=limits, options=dict(DISK)),),
    )


def scale_model(config: EngineConfig) -> EngineConfig:
    """Scale an engine down to rows of one page, with its runner on the caller's loop.

    Tiers of type `fs` become dummy ones with the figures of `DISK`: real files take real time. Sizes among the options
    of other types than dummy stay as they are. Raises `ConfigError` for options that are none of their type's.
    """
    pages = config.row_bytes // ROW_ALIGN_BYTES
    return replace(
        config,
        cpu_bytes_to_use=config.rows * ROW_ALIGN_BYTES,
        chunk_bytes=ROW_ALIGN_BYTES,
        runner="inline",
        namespace=replace(config.namespace, row_bytes=None),
        secondary_tiers=tuple(
            _scaled(tier, pages, f"secondary_tiers[{index}]") for index, tier in enumerate(config.secondary_tiers)
        ),
    )


def _scaled(tier: TierConfig, pages: int, where: str) -> TierConfig:
    limits = replace(
        tier.limits,
        load_bytes_in_flight=max(ROW_ALIGN_BYTES, tier.limits.load_bytes_in_flight // pages),
        store_bytes_in_flight=max(ROW_ALIGN_BYTES, tier.limits.store_bytes_in_flight // pages),
    )
    if tier.type == "fs":
        tier = replace(tier, type="dummy", options=dict(DISK))
    elif tier.type != "dummy":
        return replace(tier, limits=limits)
    options = msgspec.structs.asdict(tier_options(tier, where))
    for size in ("bandwidth_bytes_per_s", "capacity_bytes"):
        if options[size] is not None:
            options[size] = max(1, options[size] // pages)
    return replace(tier, limits=limits, options=options)
