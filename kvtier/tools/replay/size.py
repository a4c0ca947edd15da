"""`kvtier size`: sizes of memory and disk compared over a trace, in hits, seconds and bytes written."""

import os
from itertools import product
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from kvtier.errors import ConfigError
from kvtier.settings import SIZE_BYTES_MAX, foreign, parse_size, shown_bytes
from kvtier.testing.virtual_time import run
from kvtier.tools import options
from kvtier.tools.outputs import bar, check_outputs, counted, plain_table, write_json
from kvtier.tools.replay import simulate
from kvtier.tools.replay.replay_command import measured
from kvtier.tools.replay.report import Quantiles, quantiles
from kvtier.tools.replay.study import Extent, too_long
from kvtier.tools.replay.workload import open_trace

SIZES = "sizes with units and commas between them, as in 64GiB,1TiB, at most 1024PiB"
DAY_S = 86_400.0
ROWS_SPARE = 1_024  # For transfers in flight.
KV_BYTES_MAX = 1 << 30  # For a token. A thousand times the bytes of the largest models.
PLAIN = ("granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


class SizeCell(msgspec.Struct, frozen=True):
    """One combination of sizes. Bytes are those of chunks; ratios are shares of the block references."""

    memory_bytes: int  # Size of the primary.
    disk_bytes: int  # Capacity of the disk.
    hit_ratio: float  # Share of the block references found, on the GPUs, too.
    hits: dict[str, float]  # The same by the tier that held them: `gpu`, `cpu`, `disk`.
    ttft_s: Quantiles  # Times to first token with kvtier.
    gpu_seconds_saved: float  # Time to compute the tiers' hits, over the whole trace.
    written_bytes_per_day: float  # Bytes written to the disk, at the trace's own pace.
    dropped_chunks: int  # Never sent: the disk was too slow.
    failed_chunks: int  # Sent, and not stored or loaded in time.


class SizeReport(msgspec.Struct, frozen=True):
    """The JSON of `kvtier size`."""

    trace: str  # Name of the trace's file.
    kv_bytes_per_token: int  # The given bytes, or those of the model.
    chunk_bytes: int  # Bytes of one block of the trace.
    trace_bytes: int  # Bytes of all unique blocks.
    best_hit_ratio: float  # Hit ratio of a cache that keeps every block.
    without_tiering_ttft_s: Quantiles  # Times to first token without kvtier, with the same cache on the GPUs.
    load_always: bool  # Every chunk that a tier had was loaded, even if computing was faster.
    sizes: list[SizeCell]  # One for each row of the table.
    warnings: list[str]  # Requests that are longer than the smallest primary.


def size(
    trace: options.TraceArgument,
    kv_bytes: Annotated[
        int | None,
        typer.Option("--kv-bytes-per-token", min=1, max=KV_BYTES_MAX, help="Bytes of KV cache for each token."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The model's config.json, which gives these bytes, or its folder."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Sizes of the primary, in host memory.")] = "64GiB,256GiB",
    disk: Annotated[str, typer.Option(help="Capacities of a disk tier under it; 0 for none.")] = "1TiB,4TiB",
    cascade: Annotated[simulate.CascadeName, typer.Option(help="When chunks are written to the disk.")] = "store",
    prefill_tokens_per_s: options.PrefillOption = simulate.PREFILL_TOKENS_PER_S,
    slots: options.SlotsOption = simulate.SLOTS,
    gpu_cache_tokens: options.GpuCacheOption = simulate.GPU_CACHE_TOKENS,
    disk_rates: options.DiskSpeedOption = simulate.SSDS_RATES,
    load_always: options.LoadAlwaysOption = False,
    limit: options.LimitOption = None,
    json_path: options.JsonOption = None,
) -> None:
    """Compare sizes of memory and disk over a trace: hits, times to first token, GPU time, writes.

    Each combination of sizes is simulated, as `kvtier simulate` does.
    """
    check_outputs(json_path)
    memories = options.listed("--memory", memory, _size, SIZES)
    disks = options.listed("--disk", disk, lambda text: 0 if text == "0" else _size(text), f"{SIZES}; 0 for none")
    if (kv_bytes is None) == (model is None):
        raise ConfigError("--kv-bytes-per-token or --model: one of both accepted, and one is needed")
    per_token = kv_bytes or kv_bytes_per_token(model or "")
    speed = simulate.disk_speed("--disk-speed", disk_rates)
    opened = open_trace(trace, limit=limit)
    chunk_bytes = opened.block_tokens * per_token
    extent = measured(opened)
    for option, given in [("--memory", each) for each in memories] + [("--disk", each) for each in disks if each]:
        if given < chunk_bytes:
            raise ConfigError(
                f"{option} {shown_bytes(given)}: a chunk of this trace has {shown_bytes(chunk_bytes)}; "
                "room for at least one accepted"
            )
    servers = simulate.Servers(prefill_tokens_per_s, slots, gpu_cache_tokens)
    without = quantiles(simulate.without_tiering_s(opened, simulate.arrivals_s(opened), servers, opened.block_tokens))
    cells = list[SizeCell]()
    with bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        for sizes in progress.track(list(product(memories, disks)), description="simulating"):
            rows = min(sizes[0] // chunk_bytes, 2 * extent.unique_blocks + ROWS_SPARE)  # More would only cost time.
            config = simulate.model_engine(chunk_bytes, rows * chunk_bytes, sizes[1], speed, cascade)
            replay = simulate.modelled(opened, config, servers, speed, extent.requests, load_always=load_always)
            cells.append(size_cell(replay, extent, sizes))
    least = min(memories)
    report = SizeReport(
        trace=os.path.basename(opened.path),
        kv_bytes_per_token=per_token,
        chunk_bytes=chunk_bytes,
        trace_bytes=extent.unique_blocks * chunk_bytes,
        best_hit_ratio=extent.hit_ratio(extent.best_hits),
        without_tiering_ttft_s=without,
        load_always=load_always,
        sizes=cells,
        warnings=too_long(extent, least // chunk_bytes, f"--memory {shown_bytes(least)}: a primary"),
    )
    _show(report, write_json(json_path, report))


def _size(text: str) -> int:
    if (size_bytes := parse_size(text)) > SIZE_BYTES_MAX:
        raise ValueError(text)
    return size_bytes


def _show(report: SizeReport, console: Console) -> None:
    headings = ("memory", "disk", "hit\nratio", "p50\ns", "p99\ns", "GPU s\nsaved", "written\na day")
    console.out(f"Sizes of a cache, {report.trace}", highlight=False)
    table = plain_table(*(f">{heading}" for heading in headings))
    without = report.without_tiering_ttft_s
    table.add_row("none", "none", "", f"{without.p50:.2f}", f"{without.p99:.2f}")
    for cell in report.sizes:
        table.add_row(
            shown_bytes(cell.memory_bytes),
            shown_bytes(cell.disk_bytes) if cell.disk_bytes else "none",
            f"{cell.hit_ratio:.4f}",
            f"{cell.ttft_s.p50:.2f}",
            f"{cell.ttft_s.p99:.2f}",
            _short(cell.gpu_seconds_saved),
            shown_bytes(round(cell.written_bytes_per_day)) if cell.disk_bytes else "",
        )
    console.print(table)
    console.print()
    console.print(
        f"All blocks of the trace take {shown_bytes(report.trace_bytes)}. The best possible hit ratio is "
        f"{report.best_hit_ratio:.4f}. p50 and p99 are times to the first token.",
        highlight=False,
    )
    if lost := max(cell.dropped_chunks + cell.failed_chunks for cell in report.sizes):
        console.print(
            f"[yellow]The disk was too slow: in the worst row, {counted(lost, 'chunk')} not written or read in time. "
            "Write less (--cascade second_use), or ask for a faster disk (--disk-speed).[/]",
            highlight=False,
        )
    for warning in report.warnings:
        console.print(f"[yellow]{warning}[/]", highlight=False)


def _short(number: float) -> str:
    """Format a number with two significant digits: a small one is never shown as 0."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def size_cell(replay: simulate.VirtualReplay, extent: Extent, sizes: tuple[int, int]) -> SizeCell:
    tally = run(replay.run())
    tiers = tally.samples[-1].tiers
    disk = tiers.get(simulate.DISK_NAME)
    return SizeCell(
        memory_bytes=sizes[0],
        disk_bytes=sizes[1],
        hit_ratio=tally.hit_ratio,
        hits={name: extent.hit_ratio(tier.hits) for name, tier in tiers.items()},
        ttft_s=quantiles(replay.times_to_first_token_s),
        gpu_seconds_saved=tally.tokens_found / replay.servers.tokens_per_s,
        written_bytes_per_day=0.0 if disk is None else disk.bytes_stored / tally.seconds * DAY_S,
        dropped_chunks=0 if disk is None else sum(disk.dropped.values()),
        failed_chunks=0 if disk is None else sum(disk.failed.values()),
    )


class ModelConfig(msgspec.Struct):
    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    hidden_size: int = 0
    head_dim: int | None = None
    quantization_config: dict[str, Any] | None = None


def kv_bytes_per_token(model: str) -> int:
    """Return the bytes for a model's `config.json` or folder. `ConfigError` if it is unreadable or not plain."""
    path = os.path.join(model, "config.json") if os.path.isdir(model) else model
    try:
        with open(path, "rb") as file:
            config = foreign(msgspec.json.Decoder(ModelConfig).decode, file.read())
    except OSError as error:
        raise ConfigError(f"--model {path}: cannot be read: {error.strerror}; a config.json accepted") from error
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
    found = 2 * layers * heads * head_dim * 2  # 2 bytes, as models are served, whatever their weights have.
    if not 0 < found <= KV_BYTES_MAX or min(layers, heads, head_dim) < 1:
        raise ConfigError(f"--model {path}: {found} bytes a token, at least 1 and at most {KV_BYTES_MAX} accepted")
    return found
