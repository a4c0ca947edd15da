"""The engine of a configuration as a model for virtual time: a page stands for a chunk, a dummy tier for a disk.

Chunks of a real engine have tens of MiB, and nobody has a thousand million times that in memory. So every size is
divided by the number of pages in a row, bandwidths, too: transfers then take as long as the real ones would. What is
modelled, with which figures and from where, is told with the model: a study is worth what its model is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvtier.config import PRIMARY_NAME, ROW_ALIGN_BYTES, EngineConfig, TierConfig, TierLimits, tier_options
from kvtier.errors import ConfigError
from kvtier.replay.bench_report import BenchReport, Disk
from kvtier.replay.setup import primary_rows
from kvtier.replay.study import Extent
from kvtier.replay.tally import GPU_NAME

KV_BYTES_PER_TOKEN = 131_072  # Llama 3.1 8B in bf16: K and V of 32 layers, 8 heads of 128, 2 bytes each.
SSD = Disk(7e9, 4e9, 100e-6, 64, "assumed: one NVMe SSD")  # Of a data centre, behind four lanes of PCIe 4.
SSDS = 4  # One for each GPU of the default model, as servers have them.
DISK_QUEUE_CHUNKS = 1_024  # Four times as many as a long prompt has; the disks take them in five seconds.
FOOTER_BYTES = 4_096  # Of each chunk of an fs tier,
FOLDER_BYTES = 4_096  # and with vLLM's naming almost a directory each.

Figure = int | float | str | bool | None | Sequence[str]


class ModelPart(msgspec.Struct, frozen=True):
    """One thing that is modelled. A figure that is null is no limit."""

    what: str
    figures: Mapping[str, Figure]
    source: str


class ScaleModel(NamedTuple):
    """An engine to run in virtual time, and what it stands for: figures are those of the real one."""

    config: EngineConfig
    parts: tuple[ModelPart, ...]


def default_model(extent: Extent, block_tokens: int) -> EngineConfig:
    """Put a small primary over SSDs, for chunks of the trace's blocks as an 8B model has them."""
    chunk_bytes = block_tokens * KV_BYTES_PER_TOKEN
    in_flight = DISK_QUEUE_CHUNKS * chunk_bytes
    limits = TierLimits(load_bytes_in_flight=in_flight, store_bytes_in_flight=in_flight)
    options = {
        "latency_s": SSD.latency_s,
        "bandwidth_bytes_per_s": SSDS * int(SSD.load_bytes_per_s),
        "store_bandwidth_bytes_per_s": SSDS * int(SSD.store_bytes_per_s),
        "concurrency": SSDS * SSD.concurrency,
    }
    return EngineConfig(
        cpu_bytes_to_use=primary_rows(extent) * chunk_bytes,
        chunk_bytes=chunk_bytes,
        secondary_tiers=(TierConfig(type="dummy", name="ssds", limits=limits, options=options),),
    )


def scale_model(config: EngineConfig, *, source: str = "configuration", bench: BenchReport | None = None) -> ScaleModel:
    """Scale an engine down to rows of one page, with its runner on the caller's loop.

    Tiers of type `fs` become dummy ones, because real files take real time: with their capacity, low-water mark, write
    budget and limits, and the speed of the disk that `bench` measured, else of `SSD`. Sizes among the options of other
    types than dummy stay as they are. `source` is where the configuration comes from. Raises `ConfigError` for options
    that are none of their type's.
    """
    primary = ModelPart(
        PRIMARY_NAME,
        {
            "capacity_bytes": config.rows * config.row_bytes,
            "chunks": config.rows,
            "eviction_policy": config.eviction_policy,
        },
        source,
    )
    parts, tiers = [primary], list[TierConfig]()
    for index, tier in enumerate(config.secondary_tiers):
        where = f"secondary_tiers[{index}]"
        if tier.name == GPU_NAME:
            raise ConfigError(
                f"{where}.name: {tier.name!r} given, another accepted: so the engine's own cache is called"
            )
        options, of_tier = _modelled(tier, config.row_bytes, where, source, bench)
        parts += of_tier
        tiers.append(_scaled(tier, options, config.row_bytes // ROW_ALIGN_BYTES))
    scaled = replace(
        config,
        cpu_bytes_to_use=config.rows * ROW_ALIGN_BYTES,
        chunk_bytes=ROW_ALIGN_BYTES,
        runner="inline",
        namespace=replace(config.namespace, row_bytes=None),
        secondary_tiers=tuple(tiers),
    )
    return ScaleModel(scaled, tuple(parts))


def _modelled(
    tier: TierConfig, row_bytes: int, where: str, source: str, bench: BenchReport | None
) -> tuple[dict[str, Any] | None, list[ModelPart]]:
    """Return the options of the dummy tier that stands for one, in real sizes, and what is to be said of it.

    There are no options for a tier that runs as it is.
    """
    if tier.type == "fs":
        given = replace(tier, options={"root": "modelled", **tier.options})  # A root may be missing: nothing is there.
        options = msgspec.structs.asdict(tier_options(given, where))
        disk = SSD if bench is None else bench.disk(row_bytes, options)
        modelled = _disk_options(disk) | _room_options(options, row_bytes)
        left_out = _left_out(options)
        return modelled, [
            ModelPart(tier.name, _device_figures(modelled), disk.source),
            ModelPart(tier.name, _room_figures(modelled, tier.limits, row_bytes), source),
            *([ModelPart(tier.name, {"not_modelled": left_out}, source)] if left_out else []),
        ]
    if tier.type != "dummy":
        return None, [ModelPart(tier.name, {"type": tier.type}, "runs as it is, in real time")]
    modelled = msgspec.structs.asdict(tier_options(tier, where))
    figures = _device_figures(modelled) | _room_figures(modelled, tier.limits, row_bytes)
    return modelled, [ModelPart(tier.name, figures, source)]


def _disk_options(disk: Disk) -> dict[str, Any]:
    return {
        "latency_s": disk.latency_s,
        "bandwidth_bytes_per_s": int(disk.load_bytes_per_s),
        "store_bandwidth_bytes_per_s": int(disk.store_bytes_per_s),
        "concurrency": disk.concurrency,
    }


def _room_options(options: Mapping[str, Any], row_bytes: int) -> dict[str, Any]:
    """Return how much an fs tier may hold and write, in bytes of rows: without footers and folders."""
    files = options["layout"] == "files"
    file_bytes = row_bytes + FOOTER_BYTES
    taken_bytes = file_bytes + (FOLDER_BYTES if files and options["naming"] == "vllm" else 0)
    one_by_one = not files or (
        options["naming"] == "flat" and not options["shared"]
    )  # A chunk goes for each that comes.
    capacity_bytes, budget_bytes = options["capacity_bytes"], options["write_budget_bytes_per_day"]
    return {
        "capacity_bytes": None if capacity_bytes is None else capacity_bytes // taken_bytes * row_bytes,
        "low_water": 1.0 if one_by_one else options["low_water"],
        "write_budget_bytes_per_day": None if budget_bytes is None else max(1, budget_bytes * row_bytes // file_bytes),
    }


def _left_out(options: Mapping[str, Any]) -> list[str]:
    """Return what is set of an fs tier and has no part in its model."""
    modelled = {"eviction_policy": "lru", "min_free_bytes": 0, "ttl_s": None, "shared": False}
    return [name for name, without in modelled.items() if options[name] != without]


def _device_figures(options: Mapping[str, Any]) -> dict[str, Figure]:
    load_bytes_per_s, store_bytes_per_s = options["bandwidth_bytes_per_s"], options["store_bandwidth_bytes_per_s"]
    return {
        "load_bytes_per_s": load_bytes_per_s,
        "store_bytes_per_s": load_bytes_per_s if store_bytes_per_s is None else store_bytes_per_s,
        "latency_s": options["latency_s"],
        "concurrency": options["concurrency"],
    }


def _room_figures(options: Mapping[str, Any], limits: TierLimits, row_bytes: int) -> dict[str, Figure]:
    capacity_bytes = options["capacity_bytes"]
    return {
        "capacity_bytes": capacity_bytes,
        **({} if capacity_bytes is None else {"chunks": capacity_bytes // row_bytes}),
        "low_water": options["low_water"],
        "write_budget_bytes_per_day": options["write_budget_bytes_per_day"],
        "load_bytes_in_flight": limits.load_bytes_in_flight,
        "store_bytes_in_flight": limits.store_bytes_in_flight,
    }


def _scaled(tier: TierConfig, options: dict[str, Any] | None, pages: int) -> TierConfig:
    limits = replace(
        tier.limits,
        load_bytes_in_flight=max(ROW_ALIGN_BYTES, tier.limits.load_bytes_in_flight // pages),
        store_bytes_in_flight=max(ROW_ALIGN_BYTES, tier.limits.store_bytes_in_flight // pages),
    )
    if options is None:
        return replace(tier, limits=limits)
    sizes = ("bandwidth_bytes_per_s", "store_bandwidth_bytes_per_s", "write_budget_bytes_per_day")
    scaled = {size: max(1, options[size] // pages) for size in sizes if options[size] is not None}
    if options["capacity_bytes"] is not None:
        scaled["capacity_bytes"] = options["capacity_bytes"] // pages
    return replace(tier, type="dummy", limits=limits, options=options | scaled)
