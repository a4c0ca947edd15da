"""`kvtier size`: what caches of several sizes would be worth for a trace, in bytes, seconds and drive writes."""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Annotated, NamedTuple

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from kvtier.config import EngineConfig, TierConfig, TierLimits
from kvtier.errors import ConfigError
from kvtier.settings import SIZE_BYTES_MAX, parse_size, shown_age, shown_bytes
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools.commands import JsonOption, LimitOption, PlotOption, StrictOption, listed
from kvtier.tools.outputs import bar, busy, check_outputs, counted, plain_table, round_size, write_json
from kvtier.tools.replay.models import KV_BYTES_MAX, kv_bytes_per_token
from kvtier.tools.replay.replay import GPU_NAME, Tally
from kvtier.tools.replay.replay_command import (
    PREFILL_TOKENS_PER_S_MAX,
    SLOTS_MAX,
    Options,
    Prepared,
    modelled_replay,
)
from kvtier.tools.replay.report import Figure, ModelPart, Quantiles, Report, make_report, model_table, quantiles
from kvtier.tools.replay.study import Extent, measure, too_long
from kvtier.tools.replay.tiered import Cascade, cascade_named
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.virtual import DISK_QUEUE_CHUNKS, SSD, WITH_TIERING, Prefill, arrivals_s, without_tiering_s
from kvtier.tools.replay.workload import GENERATED, GeneratedTrace, Workload, open_trace

DAY_S, YEAR_S = 86_400.0, 365 * 86_400.0
WARRANTY_YEARS = 5  # For which makers state drive writes a day.
DISK_NAME = "disk"
ROWS_SPARE = 1_024  # For what is under way.
ROW = "size"  # As a source: the table's own row.
SIZES = "sizes with units and commas between them, as in 64GiB,1TiB, at most 1024PiB"
"""What `--memory` takes."""
SIZES_OR_NONE = f"{SIZES}; 0 for none"
"""What `--disk` takes."""
_LOADED = {
    False: "What is faster computed than loaded is computed; --load-always shows the figures without that.",
    True: "Whatever a tier has is loaded, even where computing is faster (--load-always).",
}
ONE_SIZE = "one size with a unit, as in 40GiB; 0 for none"


class SizeCell(msgspec.Struct, frozen=True):
    """One combination of sizes. Bytes are those of chunks; ratios are shares of the block references."""

    memory_bytes: int
    disk_bytes: int
    hit_ratio: float
    hits: dict[str, float]  # The same by where they lay: `gpu`, `cpu`, `disk`.
    ttft_s: Quantiles
    gpu_seconds_saved: float  # Of computing what the tiers had, over the whole trace.
    written_bytes_per_day: float
    drive_life_years: float | None  # None: nothing is written, or there is no disk.
    dropped_chunks: int  # That the disk was too slow to take.
    failed_chunks: int  # That were sent, and did not come or go in time.


class SizeReport(msgspec.Struct, frozen=True):
    """What `kvtier size --json` writes."""

    trace: str
    kv_bytes_per_token: int
    chunk_bytes: int
    trace_bytes: int  # Of all unique blocks.
    best_hit_ratio: float
    without_tiering_ttft_s: Quantiles
    load_always: bool  # Whatever a tier had was loaded; else what was faster computed was.
    sizes: list[SizeCell]
    warnings: list[str]  # Requests that are longer than the smallest primary.
    model: Sequence[ModelPart]  # Without the sizes.


class Answer(NamedTuple):
    """What came of one combination of sizes."""

    report: Report
    tokens_found: int  # In memory and on the disk.


class Question(msgspec.Struct, frozen=True):
    """What is asked of every combination of sizes; it travels to other processes."""

    trace: str
    limit: int | None
    chunk_bytes: int
    block_tokens: int
    extent: Extent
    prefill: Prefill
    gpu_cache_blocks: int
    disk_bytes_per_s: int | None
    disk_write_bytes_per_s: int | None
    disk_source: str | None  # Who says so; None: `bench`, or nobody.
    bench: str | None
    cascade: Cascade
    load_always: bool


def size(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst), or {GENERATED!r}."
        ),
    ],
    kv_bytes: Annotated[
        int | None,
        typer.Option("--kv-bytes-per-token", min=1, max=KV_BYTES_MAX, help="Bytes of KV cache for each token."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model whose tokens take them: its config.json, or a folder that has one."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Sizes of the primary, in host memory.")] = "64GiB,256GiB",
    disk: Annotated[str, typer.Option(help="Capacities of a disk tier under it; 0 for none.")] = "1TiB,4TiB",
    disk_speed: Annotated[
        str | None, typer.Option(metavar="RATE", help="How fast the disk reads: 7GB/s; without it and --bench, an SSD.")
    ] = None,
    disk_write_speed: Annotated[
        str | None, typer.Option(metavar="RATE", help="How fast it writes; else four sevenths of --disk-speed.")
    ] = None,
    bench: Annotated[
        str | None, typer.Option(metavar="FILE", help="A report of kvtier bench --json that says how fast it is.")
    ] = None,
    drive_writes_per_day: Annotated[
        float, typer.Option(min=0.01, max=1_000, help="Drive writes a day for which the disk is warranted, five years.")
    ] = 1.0,
    prefill: Annotated[
        float,
        typer.Option(
            min=1.0, max=PREFILL_TOKENS_PER_S_MAX, help="Tokens a second that one server computes of a prompt."
        ),
    ] = Prefill().tokens_per_s,
    slots: Annotated[int, typer.Option(min=1, max=SLOTS_MAX, help="Servers that prefill.")] = Prefill().slots,
    cascade: Annotated[
        str, typer.Option(help="When chunks are written to the disk: store, evict or second_use.")
    ] = "store",
    gpu_cache: Annotated[str, typer.Option(help="The LLM engine's own prefix cache, of all servers.")] = "40GiB",
    load_always: Annotated[
        bool, typer.Option("--load-always", help="Load whatever a tier has, even where computing is faster.")
    ] = False,
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Say what caches of several sizes are worth for a trace: hits, time to first token, GPU time, drive writes.

    Each combination of sizes is replayed in virtual time through the whole engine.
    """
    check_outputs(json_path, plot_path)
    memories = listed("--memory", memory, _size, SIZES)
    disks = listed("--disk", disk, _size_or_none, SIZES_OR_NONE)
    gpu_cache_bytes = _one_size("--gpu-cache", gpu_cache)
    per_token = _kv_bytes(kv_bytes, model)
    opened = open_trace(trace, workload=Workload(), limit=limit, strict=strict)
    chunk_bytes = opened.block_tokens * per_token
    with busy(f"reading {os.path.basename(opened.path)}"):
        extent = measure(opened)
    reads, writes = _speeds(disk_speed, disk_write_speed, bench)
    question = Question(
        trace=trace,
        limit=limit,
        chunk_bytes=chunk_bytes,
        block_tokens=opened.block_tokens,
        extent=extent,
        prefill=Prefill(prefill, slots),
        gpu_cache_blocks=gpu_cache_bytes // chunk_bytes,
        disk_bytes_per_s=reads,
        disk_write_bytes_per_s=writes,
        disk_source=_said_of_the_disk(disk_speed, disk_write_speed),
        bench=bench,
        cascade=cascade_named(cascade, "--cascade"),
        load_always=load_always,
    )
    combinations = [(primary, capacity) for primary in memories for capacity in disks]
    for primary, capacity in combinations:
        _check_room(question, primary, capacity)
    without = _without_tiering(question, opened)
    answers = _replayed(question, combinations)
    cells = [
        _cell(question, sizes, each, drive_writes_per_day) for sizes, each in zip(combinations, answers, strict=True)
    ]
    report = _report(
        os.path.basename(opened.path), per_token, question, without, cells, [each.report for each in answers]
    )
    console = write_json(json_path, report)
    if plot_path is not None:
        from kvtier.tools.pictures import write_size_picture  # An extra: see `check_picture`.

        write_size_picture(plot_path, report)
    _show(report, console, question.cascade)


def _size(text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes > SIZE_BYTES_MAX:
        raise ValueError(text)
    return size_bytes


def _size_or_none(text: str) -> int:
    return 0 if text == "0" else _size(text)


def _one_size(option: str, text: str) -> int:
    sizes = listed(option, text, _size_or_none, ONE_SIZE)
    if len(sizes) > 1:
        raise ConfigError(f"{option} {text!r}: expected {ONE_SIZE}")
    return sizes[0]


def _kv_bytes(given: int | None, model: str | None) -> int:
    if (given is None) == (model is None):
        raise ConfigError("--kv-bytes-per-token or --model: one of both accepted, and one is needed")
    return given if given is not None else kv_bytes_per_token(str(model))


def _speeds(reads: str | None, writes: str | None, bench: str | None) -> tuple[int | None, int | None]:
    if bench is not None and (reads, writes) != (None, None):
        raise ConfigError(f"--bench {bench}: it says how fast the disk is; --disk-speed or --bench accepted, not both")
    if reads is None and writes is None:
        return None, None
    read_bytes = _rate("--disk-speed", reads) if reads is not None else int(SSD.load_bytes_per_s)
    same_share = int(read_bytes * SSD.store_bytes_per_s / SSD.load_bytes_per_s)
    return read_bytes, max(1, _rate("--disk-write-speed", writes) if writes is not None else same_share)


def _said_of_the_disk(reads: str | None, writes: str | None) -> str | None:
    given = [name for name, rate in (("--disk-speed", reads), ("--disk-write-speed", writes)) if rate is not None]
    return f"{', '.join(given)}; the rest {SSD.source}" if given else None


def _rate(option: str, text: str) -> int:
    try:
        rate = parse_size(text.removesuffix("/s")) if text.endswith("/s") else 0
    except ValueError:
        rate = 0
    if not rate:
        raise ConfigError(f"{option} {text!r}: expected bytes a second, as in 7GB/s")
    return rate


def _check_room(question: Question, memory_bytes: int, disk_bytes: int) -> None:
    for option, given in (("--memory", memory_bytes), ("--disk", disk_bytes)):
        if 0 < given < question.chunk_bytes:
            raise ConfigError(
                f"{option} {round_size(given)}: a chunk of this trace has {round_size(question.chunk_bytes)}; "
                "room for at least one accepted"
            )


def _config(question: Question, memory_bytes: int, disk_bytes: int) -> EngineConfig:
    in_flight = DISK_QUEUE_CHUNKS * question.chunk_bytes
    limits = TierLimits(load_bytes_in_flight=in_flight, store_bytes_in_flight=in_flight)
    tier = TierConfig(
        type="fs",
        name=DISK_NAME,
        limits=limits,
        cascade=question.cascade,
        options={"capacity_bytes": disk_bytes},
    )
    if question.disk_bytes_per_s is not None:
        options = {
            "capacity_bytes": disk_bytes,
            "latency_s": SSD.latency_s,
            "bandwidth_bytes_per_s": question.disk_bytes_per_s,
            "store_bandwidth_bytes_per_s": question.disk_write_bytes_per_s,
            "concurrency": SSD.concurrency,
            "loads_first": True,
        }
        tier = replace(tier, type="dummy", options=options)
    used_bytes = (2 * question.extent.unique_blocks + ROWS_SPARE) * question.chunk_bytes
    return EngineConfig(
        cpu_bytes_to_use=min(memory_bytes, used_bytes),  # More rows than the trace could ever use cost time only.
        chunk_bytes=question.chunk_bytes,
        secondary_tiers=(tier,) if disk_bytes else (),
    )


def _without_tiering(question: Question, requests: Trace | GeneratedTrace) -> Quantiles:
    """Return the times to first token without kvtier: they are the same for every combination of sizes."""
    return quantiles(
        without_tiering_s(
            requests,
            arrivals_s(requests),
            question.prefill,
            block_tokens=question.block_tokens,
            gpu_cache_blocks=question.gpu_cache_blocks,
        )
    )


def answer(question: Question, memory_bytes: int, disk_bytes: int) -> Answer:
    """Replay the trace through an engine of these sizes."""
    requests = open_trace(question.trace, workload=Workload(), limit=question.limit, checked=True)
    options = Options(
        requests,
        question.extent,
        config_path=None,
        fs=None,
        seed=0,
        concurrency=1,
        prefill=question.prefill,
        bench_path=question.bench,
        gpu_cache_blocks=question.gpu_cache_blocks,
        load_always=question.load_always,
        compared=False,
    )
    config = _config(question, memory_bytes, disk_bytes)
    prepared: Prepared = modelled_replay(options, config, ROW)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        tally: Tally = runner.run(prepared.replay.run())
    report = make_report(
        tally,
        trace=os.path.basename(requests.path),
        seed=0,
        extent=question.extent,
        config=config,
        engine=prepared.engine,
        interrupted=False,
        ttft_s=prepared.replay.times_to_first_token_s,
        model=prepared.model,
    )
    return Answer(report, tally.tokens_found)


def _replayed(question: Question, combinations: Sequence[tuple[int, int]]) -> list[Answer]:
    """Replay each combination, several at once where there are processors for them."""
    workers = min(len(combinations), len(os.sched_getaffinity(0)))
    with bar(MofNCompleteColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("replaying", total=len(combinations))
        if workers == 1:
            answers: list[Answer] = []
            for combination in combinations:
                answers.append(answer(question, *combination))
                progress.advance(task)
            return answers
        with _processes(workers) as pool:
            asked = [pool.submit(answer, question, *combination) for combination in combinations]
            for done in as_completed(asked):
                done.result()
                progress.advance(task)
            return [each.result() for each in asked]


@contextmanager
def _processes(count: int) -> Generator[ProcessPoolExecutor]:
    """Give processes that end with the block, at once if it raises: a replay that nobody waits for is not finished."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin_to_work)
    try:
        with pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in set(multiprocessing.active_children()) - before:
                    process.terminate()
                raise
    finally:
        pool.shutdown()


def _begin_to_work() -> None:
    """Leave Ctrl-C to the process that started this one, and end when that one ends, whatever ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _report(
    trace: str, per_token: int, question: Question, without: Quantiles, cells: list[SizeCell], reports: Sequence[Report]
) -> SizeReport:
    return SizeReport(
        trace=trace,
        kv_bytes_per_token=per_token,
        chunk_bytes=question.chunk_bytes,
        trace_bytes=question.extent.unique_blocks * question.chunk_bytes,
        best_hit_ratio=reports[0].best_hit_ratio,
        without_tiering_ttft_s=without,
        load_always=question.load_always,
        sizes=cells,
        warnings=_too_long(question, min(cell.memory_bytes for cell in cells)),
        model=_model(question, max(reports, key=lambda report: len(report.tiers))),
    )


def _too_long(question: Question, memory_bytes: int) -> list[str]:
    chunks = memory_bytes // question.chunk_bytes
    return too_long(question.extent, chunks, f"--memory {round_size(memory_bytes)}: a primary")


def _model(question: Question, report: Report) -> list[ModelPart]:
    """Return what is modelled besides the sizes, of a row that has a disk if any has."""
    assert report.model is not None
    sources = {"prefill": "--prefill, --slots", GPU_NAME: "--gpu-cache"}
    parts = [replace(part, source=sources.get(part.what, part.source)) for part in report.model if part.source != ROW]
    if DISK_NAME not in report.tiers:
        return parts
    if question.disk_source is not None:
        figures: dict[str, Figure] = {
            "load_bytes_per_s": question.disk_bytes_per_s,
            "store_bytes_per_s": question.disk_write_bytes_per_s,
            "latency_s": SSD.latency_s,
            "concurrency": SSD.concurrency,
        }
        parts.append(ModelPart(DISK_NAME, figures, question.disk_source))
    return [*parts, ModelPart("stores to the disk", {"cascade": question.cascade}, "--cascade")]


def _cell(question: Question, sizes: tuple[int, int], answer: Answer, drive_writes_per_day: float) -> SizeCell:
    report = answer.report
    assert report.ttft_s is not None
    memory_bytes, disk_bytes = sizes
    disk = report.tiers.get(DISK_NAME)
    written = disk.bytes_stored / report.seconds * DAY_S if disk is not None else 0.0
    return SizeCell(
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        hit_ratio=report.hit_ratio,
        hits={name: question.extent.hit_ratio(tier.hits) for name, tier in report.tiers.items()},
        ttft_s=report.ttft_s[WITH_TIERING].quantiles(),
        gpu_seconds_saved=answer.tokens_found / question.prefill.tokens_per_s,
        written_bytes_per_day=written,
        drive_life_years=WARRANTY_YEARS * drive_writes_per_day * disk_bytes / written if written else None,
        dropped_chunks=sum(disk.dropped.values()) if disk is not None else 0,
        failed_chunks=sum(disk.failed.values()) if disk is not None else 0,
    )


def _short(number: float) -> str:
    """Write a number with two digits that count, and what is not nothing never as 0."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _show(report: SizeReport, console: Console, cascade: Cascade) -> None:
    table = plain_table(title=f"What a cache is worth, {report.trace}")
    for heading in (
        "memory",
        "disk",
        "hit\nratio",
        "p50\ns",
        "p99\ns",
        "GPU s\nsaved",
        "written\na day",
        "drive\nlife",
    ):
        table.add_column(heading, justify="right")
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
            "" if cell.drive_life_years is None else shown_age(YEAR_S * cell.drive_life_years),
        )
    console.print(table)
    console.print()
    console.print(
        f"All blocks of the trace take {shown_bytes(report.trace_bytes)}. The best possible hit ratio is "
        f"{report.best_hit_ratio:.4f}. p50 and p99 are times to the first token. {_LOADED[report.load_always]}",
        highlight=False,
    )
    if lost := max(cell.dropped_chunks + cell.failed_chunks for cell in report.sizes):
        chunks = counted(lost, "chunk")
        remedy = "Ask" if cascade == "second_use" else "Write less (--cascade second_use), or ask"
        console.print(
            f"[yellow]The disk was too slow: in the worst row, {chunks} not written or read in time. "
            f"{remedy} for a faster disk (--disk-speed, --bench).[/]",
            highlight=False,
        )
    for warning in report.warnings:
        console.print(f"[yellow]{warning}[/]", highlight=False)
    console.print()
    console.print(model_table(report.model))
