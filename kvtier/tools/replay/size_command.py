"""`kvtier size`: sizes of memory and disk compared over a trace, in hits, seconds and bytes written."""

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from kvtier.errors import ConfigError
from kvtier.settings import SIZE_BYTES_MAX, parse_size, shown_bytes
from kvtier.tools.options import (
    DiskSpeedOption,
    GpuCacheOption,
    JsonOption,
    LimitOption,
    LoadAlwaysOption,
    PlotOption,
    PrefillOption,
    SlotsOption,
    StrictOption,
    TraceArgument,
    listed,
)
from kvtier.tools.outputs import bar, check_outputs, counted, plain_table, round_size, write_json
from kvtier.tools.replay.model import SSDS_RATES, disk_speed
from kvtier.tools.replay.models import KV_BYTES_MAX, kv_bytes_per_token
from kvtier.tools.replay.replay_command import measured
from kvtier.tools.replay.report import model_table, quantiles
from kvtier.tools.replay.sizes import SizeQuestion, SizeReport, size_cells
from kvtier.tools.replay.study import too_long
from kvtier.tools.replay.tiered import DISK_NAME, cascade_named
from kvtier.tools.replay.virtual import (
    GPU_CACHE_TOKENS,
    PREFILL_TOKENS_PER_S,
    SLOTS,
    Servers,
    arrivals_s,
    without_tiering_s,
)
from kvtier.tools.replay.workload import open_trace

SIZES = "sizes with units and commas between them, as in 64GiB,1TiB, at most 1024PiB"
SIZES_OR_NONE = f"{SIZES}; 0 for none"
LOADED = {
    False: "What is faster computed than loaded is computed; --load-always shows the figures without that.",
    True: "Every chunk that a tier has is loaded, even if computing is faster (--load-always).",
}


def size(
    trace: TraceArgument,
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
    cascade: Annotated[
        str, typer.Option(help="When chunks are written to the disk: store, evict or second_use.")
    ] = "store",
    prefill_tokens_per_s: PrefillOption = PREFILL_TOKENS_PER_S,
    slots: SlotsOption = SLOTS,
    gpu_cache_tokens: GpuCacheOption = GPU_CACHE_TOKENS,
    disk_rates: DiskSpeedOption = SSDS_RATES,
    load_always: LoadAlwaysOption = False,
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Compare sizes of memory and disk over a trace: hits, times to first token, GPU time, writes.

    Each combination of sizes is simulated, as `kvtier simulate` does.
    """
    check_outputs(json_path, plot_path)
    memories = listed("--memory", memory, _size, SIZES)
    disks = listed("--disk", disk, _size_or_none, SIZES_OR_NONE)
    per_token = _kv_bytes(kv_bytes, model)
    speed = disk_speed("--disk-speed", disk_rates)
    cascaded = cascade_named(cascade, "--cascade")
    opened = open_trace(trace, limit=limit, strict=strict)
    chunk_bytes = opened.block_tokens * per_token
    extent = measured(opened)
    combinations = [(primary, capacity) for primary in memories for capacity in disks]
    for primary, capacity in combinations:
        _check_room(chunk_bytes, primary, capacity)
    servers = Servers(prefill_tokens_per_s, slots, gpu_cache_tokens)
    without = quantiles(without_tiering_s(opened, arrivals_s(opened), servers, opened.block_tokens))
    question = SizeQuestion(trace, limit, chunk_bytes, extent, servers, speed, cascaded, load_always)
    with bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("simulating", total=len(combinations))
        cells = size_cells(question, combinations, lambda: progress.advance(task))
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
        warnings=too_long(extent, least // chunk_bytes, f"--memory {round_size(least)}: a primary"),
        model=servers.figures() | ({DISK_NAME: {**speed._asdict(), "cascade": cascaded}} if any(disks) else {}),
    )
    console = write_json(json_path, report)
    if plot_path is not None:
        from kvtier.tools.pictures import write_size_picture  # An extra: see `check_picture`.

        write_size_picture(plot_path, report)
    _show(report, console, second_use=cascaded == "second_use")


def _size(text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes > SIZE_BYTES_MAX:
        raise ValueError(text)
    return size_bytes


def _size_or_none(text: str) -> int:
    return 0 if text == "0" else _size(text)


def _kv_bytes(given: int | None, model: str | None) -> int:
    if given is None and model is not None:
        return kv_bytes_per_token(model)
    if given is None or model is not None:
        raise ConfigError("--kv-bytes-per-token or --model: one of both accepted, and one is needed")
    return given


def _check_room(chunk_bytes: int, memory_bytes: int, disk_bytes: int) -> None:
    for option, given in (("--memory", memory_bytes), ("--disk", disk_bytes)):
        if 0 < given < chunk_bytes:
            raise ConfigError(
                f"{option} {round_size(given)}: a chunk of this trace has {round_size(chunk_bytes)}; "
                "room for at least one accepted"
            )


def _show(report: SizeReport, console: Console, *, second_use: bool) -> None:
    headings = ("memory", "disk", "hit\nratio", "p50\ns", "p99\ns", "GPU s\nsaved", "written\na day")
    table = plain_table(*(f">{heading}" for heading in headings), title=f"Sizes of a cache, {report.trace}")
    without = report.without_tiering_ttft_s
    table.add_row("none", "none", "", f"{without.p50:.2f}", f"{without.p99:.2f}")
    for cell in report.sizes:
        table.add_row(
            round_size(cell.memory_bytes),
            round_size(cell.disk_bytes) if cell.disk_bytes else "none",
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
        f"{report.best_hit_ratio:.4f}. p50 and p99 are times to the first token. {LOADED[report.load_always]}",
        highlight=False,
    )
    if lost := max(cell.dropped_chunks + cell.failed_chunks for cell in report.sizes):
        remedy = "Ask" if second_use else "Write less (--cascade second_use), or ask"
        console.print(
            f"[yellow]The disk was too slow: in the worst row, {counted(lost, 'chunk')} not written or read in time. "
            f"{remedy} for a faster disk (--disk-speed).[/]",
            highlight=False,
        )
    for warning in report.warnings:
        console.print(f"[yellow]{warning}[/]", highlight=False)
    console.print()
    console.print(model_table(report.model))


def _short(number: float) -> str:
    """Format a number with two significant digits: a small one is never shown as 0."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
