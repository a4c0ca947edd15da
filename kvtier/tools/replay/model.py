"""The scale model of an engine for virtual time: a page stands for a chunk, a dummy tier for a disk.

Nobody has the memory for the chunks of a real engine, of tens of MiB each. So every size and bandwidth is divided by
the number of pages in a row: transfers take as long as the real ones. The model's figures are those of the real engine.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvtier.config import PRIMARY_NAME, EngineConfig, TierConfig, TierLimits, tier_options
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.settings import parse_size
from kvtier.tools.replay.replay import GPU_NAME
from kvtier.tools.replay.setup import chunk_bytes_on_disk, fs_options
from kvtier.tools.replay.tiered import DISK_NAME, CascadeName

KV_BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in bf16: K and V of 32 layers, 8 heads of 128, 2 bytes each.
DISK_QUEUE_CHUNKS = 1_024  # Four times the chunks of a long prompt; an SSD takes them in five seconds.
NOT_MODELLED = {
    "eviction_policy": "lru",
    "min_free_bytes": 0,
    "ttl_s": None,
    "shared": False,
    "write_budget_bytes_per_day": None,
}
"""Options of an fs tier that its model lacks, and their values without an effect."""

Figure = int | float | str | None
Figures = Mapping[str, Figure]


class DiskSpeed(NamedTuple):
    """The speed of a disk, or of several as one; latency and concurrency are those of four NVMe SSDs."""

    load_bytes_per_s: int
    store_bytes_per_s: int
    latency_s: float = 100e-6
    concurrency: int = 256


SSDS = DiskSpeed(28_000_000_000, 16_000_000_000)  # Four of a data centre, one a server, behind four lanes of PCIe 4.
SSDS_RATES = "28GB/s,16GB/s"


class ScaleModel(NamedTuple):
    """A scale model to run in virtual time, and the figures of the real engine: by the primary's and tiers' names."""

    config: EngineConfig
    figures: Mapping[str, Figures]


def disk_speed(option: str, text: str) -> DiskSpeed:
    """Parse the rates of a disk, as in `7GB/s,4GB/s`. Raises `ConfigError`, which names the option."""
    try:
        load, store = (
            parse_size(rate.strip().removesuffix("/s")) * rate.strip().endswith("/s") for rate in text.split(",")
        )
    except ValueError:
        load = store = 0
    if not load or not store:
        raise ConfigError(f"{option} {text!r}: expected bytes a second for reads and for writes, as in 7GB/s,4GB/s")
    return DiskSpeed(load, store)


def model_engine(
    chunk_bytes: int, memory_bytes: int, disk_bytes: int | None, disk: DiskSpeed, cascade: CascadeName = "store"
) -> EngineConfig:
    """Return an engine with a primary over one disk with a capacity; None: without a limit, 0: no disk."""
    in_flight = DISK_QUEUE_CHUNKS * chunk_bytes
    limits = TierLimits(load_bytes_in_flight=in_flight, store_bytes_in_flight=in_flight)
    options = _disk_options(disk) | {"capacity_bytes": disk_bytes}
    tier = TierConfig(type="dummy", name=DISK_NAME, limits=limits, cascade=cascade, options=options)
    return EngineConfig(
        cpu_bytes_to_use=memory_bytes, chunk_bytes=chunk_bytes, secondary_tiers=() if disk_bytes == 0 else (tier,)
    )


def scale_model(config: EngineConfig, disk: DiskSpeed = SSDS) -> ScaleModel:
    """Scale an engine down to rows of one page, with its runner on the caller's loop.

    Real files take real time, so tiers of type `fs` become dummy ones: with their capacity and limits, and the
    speed of `disk`. Tiers of other types run as they are. Raises `ConfigError` for options
    that their type does not have.
    """
    figures: dict[str, Figures] = {
        PRIMARY_NAME: {
            "capacity_bytes": config.rows * config.row_bytes,
            "chunks": config.rows,
            "eviction_policy": config.eviction_policy,
        }
    }
    tiers = list[TierConfig]()
    for index, tier in enumerate(config.secondary_tiers):
        where = f"secondary_tiers[{index}]"
        if tier.name == GPU_NAME:
            raise ConfigError(f"{where}.name: {tier.name!r} given, another accepted: the LLM engine's cache has it")
        options, figures[tier.name] = _modelled(tier, config.row_bytes, where, disk)
        tiers.append(_scaled(tier, options, config.row_bytes // PAGE_BYTES))
    scaled = replace(
        config,
        cpu_bytes_to_use=config.rows * PAGE_BYTES,
        chunk_bytes=PAGE_BYTES,
        runner="inline",
        namespace=replace(config.namespace, row_bytes=None),
        secondary_tiers=tuple(tiers),
    )
    return ScaleModel(scaled, figures)


def _modelled(tier: TierConfig, row_bytes: int, where: str, disk: DiskSpeed) -> tuple[dict[str, Any] | None, Figures]:
    """Return the options of the dummy tier that models a tier, in real sizes, and its figures.

    The options are None for a tier that runs as it is.
    """
    not_modelled = ""
    if tier.type == "fs":
        given = fs_options(tier, where)
        options = _disk_options(disk) | _room_options(given, row_bytes)
        not_modelled = ", ".join(
            name for name, neutral in NOT_MODELLED.items() if getattr(given, name) not in (neutral, None)
        )
    elif tier.type == "dummy":
        options = msgspec.structs.asdict(tier_options(tier, where))
    else:
        return None, {"type": tier.type}
    load_bytes_per_s, store_bytes_per_s = options["bandwidth_bytes_per_s"], options["store_bandwidth_bytes_per_s"]
    capacity_bytes = options["capacity_bytes"]
    figures: dict[str, Figure] = {
        "load_bytes_per_s": load_bytes_per_s,
        "store_bytes_per_s": load_bytes_per_s if store_bytes_per_s is None else store_bytes_per_s,
        "latency_s": options["latency_s"],
        "concurrency": options["concurrency"],
        "capacity_bytes": capacity_bytes,
        "chunks": None if capacity_bytes is None else capacity_bytes // row_bytes,
        "cascade": tier.cascade,
    }
    return options, figures | ({"not_modelled": not_modelled} if not_modelled else {})


def _disk_options(disk: DiskSpeed) -> dict[str, Any]:
    return {
        "latency_s": disk.latency_s,
        "bandwidth_bytes_per_s": disk.load_bytes_per_s,
        "store_bandwidth_bytes_per_s": disk.store_bytes_per_s,
        "concurrency": disk.concurrency,
    }


def _room_options(options: Any, row_bytes: int) -> dict[str, Any]:
    """Return the capacity of an fs tier in bytes of rows: without footers and folders."""
    capacity_bytes = options.capacity_bytes
    return {"capacity_bytes": capacity_bytes and capacity_bytes // chunk_bytes_on_disk(options, row_bytes) * row_bytes}


def _scaled(tier: TierConfig, options: dict[str, Any] | None, pages: int) -> TierConfig:
    limits = replace(
        tier.limits,
        load_bytes_in_flight=max(PAGE_BYTES, tier.limits.load_bytes_in_flight // pages),
        store_bytes_in_flight=max(PAGE_BYTES, tier.limits.store_bytes_in_flight // pages),
    )
    if options is None:
        return replace(tier, limits=limits)
    sizes = ("bandwidth_bytes_per_s", "store_bandwidth_bytes_per_s")
    scaled = {size: max(1, options[size] // pages) for size in sizes if options.get(size) is not None}
    if options["capacity_bytes"] is not None:
        scaled["capacity_bytes"] = options["capacity_bytes"] // pages
    return replace(tier, type="dummy", limits=limits, options=options | scaled)
