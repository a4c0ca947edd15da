"""The engine of a replay, and the roots of its fs tiers: tiers without one get a temporary directory."""

from shutil import disk_usage
from typing import Any

from msgspec.structs import replace

from kvtier.config import EngineConfig, TierConfig, TierLimits, tier_options
from kvtier.errors import ConfigError
from kvtier.settings import shown_bytes
from kvtier.tools.outputs import check_directory
from kvtier.tools.replay.study import Extent

CHUNK_BYTES = 16 << 10
PRIMARY_SHARE = 0.05  # Of the trace's unique blocks: small, so that many hits come from the tier below.
PRIMARY_ROWS_MIN = 512  # A short trace's primary: 8 MiB.
STORE_CHUNKS = 256  # Keeps the lanes busy. Waiting stores pin rows: more would cost hits in the primary.
FOOTER_BYTES = 4_096  # Of each chunk of an fs tier.
FOLDER_BYTES = 4_096


def default_config(extent: Extent, concurrency: int) -> EngineConfig:
    """Return a small primary over one fs tier, with the runner in a process."""
    return EngineConfig(
        cpu_bytes_to_use=primary_rows(extent, concurrency) * CHUNK_BYTES,
        chunk_bytes=CHUNK_BYTES,
        runner="process",
        secondary_tiers=(TierConfig(type="fs", limits=TierLimits(store_chunks_in_flight=STORE_CHUNKS)),),
    )


def primary_rows(extent: Extent, concurrency: int) -> int:
    """Return the size of a small primary that holds the longest request for each of the concurrent ones.

    At least two of them, and at most the trace twice: half of the rows may be leased, or wait for a tier.
    """
    open_rows = min(max(2, concurrency) * extent.longest, 2 * extent.unique_blocks)
    return max(PRIMARY_ROWS_MIN, extent.capacity(PRIMARY_SHARE), open_rows)


def check_roots(config: EngineConfig) -> None:
    """Raise `ConfigError` if an fs tier's own root does not exist."""
    for index, tier in enumerate(config.secondary_tiers):
        root = tier.options.get("root")
        if _is_fs(tier) and isinstance(root, str):
            check_directory(f"secondary_tiers[{index}].root", root)


def without_root(config: EngineConfig) -> bool:
    """Return True if an fs tier has no root."""
    return any(_is_fs(tier) and "root" not in tier.options for tier in config.secondary_tiers)


def rooted(config: EngineConfig, directory: str, *, override: bool) -> EngineConfig:
    """Set the root of fs tiers: of all of them, or only of those that have none.

    An only fs tier gets the directory itself; each of several gets a folder in it, named by the tier's index.
    """
    tiers = config.secondary_tiers
    alone = sum(map(_is_fs, tiers)) == 1
    if override and not any(map(_is_fs, tiers)):
        raise ConfigError(f"--fs {directory}: the configuration has no tier of type fs")
    return replace(
        config,
        secondary_tiers=tuple(
            replace(tier, options={**tier.options, "root": directory if alone else f"{directory}/{index}"})
            if _is_fs(tier) and (override or "root" not in tier.options)
            else tier
            for index, tier in enumerate(tiers)
        ),
    )


def check_room(config: EngineConfig, extent: Extent, directory: str) -> None:
    """Raise `ConfigError` if the trace's chunks would fill the disk of a temporary directory."""
    needed = 0
    for index, tier in enumerate(config.secondary_tiers):
        if _is_fs(tier) and "root" not in tier.options:
            options = fs_options(tier, f"secondary_tiers[{index}]")
            taken = extent.unique_blocks * chunk_bytes_on_disk(options, config.row_bytes)
            needed += taken if options.capacity_bytes is None else min(taken, options.capacity_bytes)
    free = disk_usage(directory).free
    if needed > free:
        raise ConfigError(
            f"{directory}: the trace's chunks take about {shown_bytes(needed)}, {shown_bytes(free)} are free; "
            "a directory elsewhere (--fs DIR), or fewer requests (--limit N), accepted"
        )


def fs_options(tier: TierConfig, where: str) -> Any:
    """Decode an fs tier's own options; its root may be missing. Raises `ConfigError`."""
    return tier_options(replace(tier, options={"root": "missing", **tier.options}), where)


def chunk_bytes_on_disk(options: Any, row_bytes: int) -> int:
    """Return the size of a chunk on disk, with its footer; with vLLM's naming most chunks have their own folder."""
    foldered: bool = options.layout == "files" and options.naming == "vllm"
    return row_bytes + FOOTER_BYTES + FOLDER_BYTES * foldered


def _is_fs(tier: TierConfig) -> bool:
    return tier.type == "fs"
