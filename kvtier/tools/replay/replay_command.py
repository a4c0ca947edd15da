"""`kvtier replay`: a trace through a whole engine, with real bytes or in virtual time; a table, JSON and a picture.

A bar on stderr shows how it goes, tables on stdout show what came of it.
"""

import asyncio
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
import uvloop
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.config import EngineConfig
from kvtier.errors import ConfigError
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools.replay.chunks import ChunkSource
from kvtier.tools.replay.outputs import check_picture, check_writable, replacing
from kvtier.tools.replay.replay import CONCURRENCY, CONCURRENCY_MAX, GPU_NAME, Replay, Tally
from kvtier.tools.replay.report import Quantiles, Report, make_report, report_json
from kvtier.tools.replay.setup import (
    Scratch,
    check_directory,
    check_room,
    check_roots,
    default_config,
    rooted,
    without_root,
)
from kvtier.tools.replay.study import REQUESTS_MAX, Extent, measure
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.virtual import (
    GPU_CACHE_TOKENS,
    GPU_LOAD_BYTES_PER_S,
    Figure,
    ModelPart,
    Prefill,
    VirtualReplay,
    default_model,
    read_bench,
    scale_model,
)
from kvtier.tools.replay.workload import GENERATED, GeneratedTrace, Workload, open_trace

DEFAULT_SOURCE = "assumed: an 8B model, four NVMe SSDs"


class Options(NamedTuple):
    """What was asked for."""

    requests: Trace | GeneratedTrace
    extent: Extent
    config_path: str | None
    fs: str | None
    seed: int
    concurrency: int
    prefill: Prefill
    bench_path: str | None = None
    gpu_cache_blocks: int | None = None  # None: `GPU_CACHE_TOKENS` for each server.


class Job(NamedTuple):
    """One replay, ready to run, and what its report says of the engine."""

    replay: Replay | VirtualReplay
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    row_bytes: int
    engine: Mapping[str, Any]
    model: Sequence[ModelPart] | None = None


def real_job(options: Options, scratch: Callable[[], str]) -> Job:
    """Prepare a replay with real bytes. `scratch` makes a temporary directory; it is called only if one is needed."""
    config = default_config(options.extent) if options.config_path is None else EngineConfig.load(options.config_path)
    if options.fs is not None:
        check_directory("--fs", options.fs)
        config = rooted(config, options.fs, override=True)
    else:
        check_roots(config)
        if without_root(config):
            directory = scratch()
            check_room(config, options.extent, directory)
            config = rooted(config, directory, override=False)
    replay = Replay(
        options.requests,
        config,
        _source(options, config.chunk_bytes),
        Tally(options.extent.requests),
        concurrency=options.concurrency,
    )
    return Job(replay, uvloop.new_event_loop, config.row_bytes, {**_engine(config), "concurrency": options.concurrency})


def virtual_job(options: Options) -> Job:
    """Prepare a replay in virtual time."""
    block_tokens = options.requests.block_tokens
    if options.config_path is None:
        config, source = default_model(options.extent, block_tokens), DEFAULT_SOURCE
    else:
        config, source = EngineConfig.load(options.config_path), os.path.basename(options.config_path)
    bench = None if options.bench_path is None else read_bench(options.bench_path)
    model = scale_model(config, source=source, bench=bench)
    gpu_cache_blocks = options.gpu_cache_blocks
    if gpu_cache_blocks is None:
        gpu_cache_blocks = options.prefill.slots * GPU_CACHE_TOKENS // block_tokens
    replay = VirtualReplay(
        options.requests,
        model.config,
        _source(options, model.config.chunk_bytes),
        Tally(options.extent.requests),
        chunk_bytes=config.chunk_bytes,
        block_tokens=block_tokens,
        prefill=options.prefill,
        gpu_cache_blocks=gpu_cache_blocks,
    )
    prefill = options.prefill._asdict()
    engine = {**_engine(model.config), "chunk_bytes": config.chunk_bytes, "prefill": prefill}
    parts = (
        ModelPart("prefill", prefill, "--prefill-tokens-per-s, --slots"),
        ModelPart(GPU_NAME, {"cache_blocks": gpu_cache_blocks}, _gpu_source(options)),
        ModelPart("copy to the GPU", {"load_bytes_per_s": GPU_LOAD_BYTES_PER_S}, "assumed: sixteen lanes of PCIe 4"),
        *model.parts,
    )
    return Job(replay, VirtualTimeLoop, config.row_bytes, engine, parts)


def _gpu_source(options: Options) -> str:
    given = options.gpu_cache_blocks is not None
    return "--gpu-cache-blocks" if given else f"default: {GPU_CACHE_TOKENS:,} tokens a server"


def _source(options: Options, chunk_bytes: int) -> ChunkSource:
    """Make chunks that no other trace has: in a directory that several have used, each finds its own only."""
    first = next(iter(options.requests))
    return ChunkSource(chunk_bytes, seed=options.seed, trace=msgspec.json.encode(first))


def _engine(config: EngineConfig) -> dict[str, Any]:
    return {
        "rows": config.rows,
        "chunk_bytes": config.chunk_bytes,
        "eviction_policy": config.eviction_policy,
        "runner": config.runner,
        "tiers": {tier.name: tier.type for tier in config.secondary_tiers},
    }


SEED_MAX = (1 << 63) - 1  # The report says it, and readers of JSON take no more.
SLOTS_MAX = 65_536  # Servers. A heap has an entry for each; no cluster has so many.
PREFILL_TOKENS_PER_S_MAX = (
    1e9  # Ten thousand times one GPU; beyond it computing takes no time, and nothing is compared.
)
GPU_CACHE_BLOCKS_MAX = 1_000_000_000  # No cluster's GPUs have room for so many; a report's readers take the figure.
EXIT_WRONG = 1
EXIT_INTERRUPTED = 130  # As shells have it: 128 and the number of the signal.

Draw = Callable[[Job, Report], None]


def replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help=f"A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst); {GENERATED!r} is a made-up workload.",
        ),
    ] = GENERATED,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The engine, in TOML or JSON; else a primary of 5 % of the unique blocks over an fs tier.",
        ),
    ] = None,
    fs: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where fs tiers keep their chunks, whatever the configuration says; they stay there. "
            "Without it, tiers that have no root get a temporary directory.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=REQUESTS_MAX, help="Replay at most this many requests.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a trace that cannot be true, instead of warning of it.")
    ] = False,
    json_path: Annotated[str | None, typer.Option("--json", metavar="OUT", help="Write the report there.")] = None,
    plot_path: Annotated[
        str | None,
        typer.Option("--plot", metavar="OUT", help="Draw hits and throughput over time there: .png, .pdf or .svg."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=CONCURRENCY_MAX, help="Requests open at once, a task each.")
    ] = CONCURRENCY,
    seed: Annotated[
        int, typer.Option(min=0, max=SEED_MAX, help="Of the chunks' bytes and of the generated workload.")
    ] = 0,
    virtual_time: Annotated[
        bool,
        typer.Option(
            "--virtual-time", help="Replay at the trace's own times against models of the tiers; report first tokens."
        ),
    ] = False,
    prefill_tokens_per_s: Annotated[
        float,
        typer.Option(min=1.0, max=PREFILL_TOKENS_PER_S_MAX, help="Prefill speed of one server, in virtual time."),
    ] = Prefill().tokens_per_s,
    slots: Annotated[
        int, typer.Option(min=1, max=SLOTS_MAX, help="Servers that prefill, in virtual time.")
    ] = Prefill().slots,
    gpu_cache_blocks: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=GPU_CACHE_BLOCKS_MAX,
            help="Blocks of the LLM engine's own prefix cache, in virtual time; 0: none. "
            "Without it, room for 262,144 tokens of each server.",
        ),
    ] = None,
    bench: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A report of kvtier bench fs --json: how fast the disk under fs tiers is, in virtual time.",
        ),
    ] = None,
) -> None:
    """Replay a trace through a whole engine, and compare every chunk that comes back with what was stored.

    Exits with 1 if any byte was wrong. Ctrl-C ends the replay with a report of what was done.
    """
    if virtual_time and fs is not None:
        raise ConfigError(f"--fs {fs}: nothing is written in virtual time; one of both options accepted")
    for option, given in (("--bench", bench), ("--gpu-cache-blocks", gpu_cache_blocks)):
        if given is not None and not virtual_time:
            raise ConfigError(f"{option} {given}: accepted with --virtual-time only: nothing else is modelled")
    draw = _outputs(json_path, plot_path)
    requests = open_trace(trace, workload=Workload(seed=seed), limit=limit, strict=strict)
    options = Options(
        requests,
        _measured(requests),
        config,
        fs,
        seed,
        concurrency,
        Prefill(prefill_tokens_per_s, slots),
        bench,
        gpu_cache_blocks,
    )
    with ExitStack() as stack:
        job = (
            virtual_job(options)
            if virtual_time
            else real_job(options, lambda: stack.enter_context(temporary_directory()))
        )
        report = _run(job, options)
        if json_path is not None:
            with replacing(json_path) as file:
                file.write(report_json(report))
        if draw is not None and not report.interrupted:  # Drawing takes a second, and that long nobody waits.
            draw(job, report)
        print_report(report)
        if report.interrupted:
            raise typer.Exit(EXIT_INTERRUPTED)
    if report.wrong_chunks:
        raise typer.Exit(EXIT_WRONG)


def _outputs(json_path: str | None, plot_path: str | None) -> Draw | None:
    """Make sure that what is to be written can be; return what draws."""
    if json_path is not None:
        check_writable("--json", json_path)
    if plot_path is None:
        return None
    check_picture("--plot", plot_path)
    from kvtier.tools.replay.pictures import write_replay_picture

    return lambda job, report: write_replay_picture(plot_path, report, job.replay.tally.samples, job.row_bytes)


def _measured(requests: Trace | GeneratedTrace) -> Extent:
    """Read the whole trace once: its size is needed, and a bad line is to be found before anything is made."""
    with Console(stderr=True).status(f"reading {os.path.basename(requests.path)}"):
        return measure(requests)


def _run(job: Job, options: Options) -> Report:
    """Run to the end or to Ctrl-C, and sum up what was done."""
    replay, requests = job.replay, options.extent.requests
    interrupted = False
    try:
        with asyncio.Runner(loop_factory=job.loop_factory) as runner, replay_bar(replay.tally, requests) as progress:
            runner.run(replay.run(progress))
    except KeyboardInterrupt:  # The replay was cancelled first, and has closed its engine.
        interrupted = True
    return make_report(
        replay.tally,
        trace=os.path.basename(options.requests.path),
        seed=options.seed,
        best_hit_ratio=options.extent.hit_ratio(options.extent.best_hits),
        row_bytes=job.row_bytes,
        engine=job.engine,
        interrupted=interrupted,
        ttft_s=replay.times_to_first_token_s,
        model=job.model,
    )


REMOVAL_WAIT_S = 60.0  # Two hundred thousand files take twenty seconds of a disk that has nothing else to do.
STEPS_MAX = 1_000  # Of the bar: more would not be seen.


@contextmanager
def replay_bar(tally: Tally, requests: int) -> Generator[Callable[[], None]]:
    """Give what is to be called after each request. There is no bar where nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("hit ratio {task.fields[hit_ratio]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    every = max(1, requests // STEPS_MAX)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=5, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("replaying", total=requests, hit_ratio=0.0)

        def step() -> None:
            if tally.requests % every == 0:
                progress.update(task, completed=tally.requests, hit_ratio=tally.hit_ratio)

        yield step


@contextmanager
def temporary_directory() -> Generator[str]:
    """Give a directory that is removed at the end: while one waits, or in the background if that takes long."""
    console = Console(stderr=True)
    with Scratch() as scratch:
        yield scratch.path
        with console.status(f"removing {scratch.path}"):
            removed = scratch.remove(REMOVAL_WAIT_S)
        if not removed:
            console.print(f"{scratch.path} is being removed in the background", highlight=False, soft_wrap=True)


def print_report(report: Report) -> None:
    """Print the figures as tables, and before them in a line what matters most."""
    console = Console()
    state = "[yellow]interrupted after[/]" if report.interrupted else "replayed"
    virtual = "" if report.ttft_s is None else " of virtual time"
    wrong = "[red]" if report.wrong_chunks else "[green]"
    console.print(
        f"{escape(report.trace)}: {state} {report.requests:,} requests, {report.chunk_references:,} chunk references\n"
        f"in {report.seconds:,.1f} s{virtual} ({report.requests_per_s:,.0f} requests/s)\n"
        f"hit ratio [bold]{report.hit_ratio:.4f}[/] (best possible {report.best_hit_ratio:.4f}), "
        f"{wrong}{report.wrong_chunks:,} wrong chunks[/]",
        highlight=False,
    )
    if not (report.drained or report.interrupted):
        console.print("[yellow]some of what was stored had not reached its tiers when the time for it was over[/]")
    console.print(_tier_table(report))
    console.print(_time_table("latency", report.latency_s, 1_000, "ms"))
    if report.ttft_s is not None:
        console.print(_time_table("time to first token", report.ttft_s, 1, "s"))
    if report.model is not None:
        console.print(_model_table(report.model))


def _tier_table(report: Report) -> Table:
    table = Table("tier")
    for heading in ("hits", "share", "read", "written", "dropped", "failed"):
        table.add_column(heading, justify="right")
    for name, tier in report.tiers.items():
        share = tier.hits / report.chunk_references if report.chunk_references else 0.0
        table.add_row(
            escape(name),
            f"{tier.hits:,}",
            f"{share:.4f}",
            decimal(tier.bytes_loaded),
            decimal(tier.bytes_stored),
            _reasons(tier.dropped),
            _reasons(tier.failed),
        )
    return table


def _time_table(heading: str, times: Mapping[str, Quantiles], scale: int, unit: str) -> Table:
    table = Table(heading)
    for column in (f"p50, {unit}", f"p99, {unit}", f"mean, {unit}", "samples"):
        table.add_column(column, justify="right")
    for name, taken in times.items():
        seconds = (taken.p50, taken.p99, taken.mean)
        table.add_row(escape(name), *(f"{each * scale:,.2f}" for each in seconds), f"{taken.samples:,}")
    return table


def _model_table(model: Sequence[ModelPart]) -> Table:
    table = Table("modelled", "with", "from")
    for part in model:
        figures = ", ".join(shown_figure(name, value) for name, value in part.figures.items())
        table.add_row(escape(part.what), escape(figures), escape(part.source))
    return table


def shown_figure(name: str, value: Figure) -> str:
    """Write a figure for people, by the unit that its name ends in: `store 4.0 GB/s`, `latency 0.1 ms`."""
    words = name.replace("_bytes_", "_").replace("_per_s", "").replace("_per_day", "").removesuffix("_bytes")
    per = "/s" if name.endswith("_per_s") else "/day" if name.endswith("_per_day") else ""
    if value is None:
        shown, per = "no limit", ""
    elif "_bytes" in name and isinstance(value, int | float):
        shown = decimal(int(value))
    elif name.endswith("_s") and not per:
        words, shown = name.removesuffix("_s"), f"{value * 1_000:,.4g} ms" if isinstance(value, float) else str(value)
    elif isinstance(value, int | float):
        shown = f"{value:,g}" if isinstance(value, float) else f"{value:,}"
    else:
        shown = value if isinstance(value, str) else ", ".join(value)
    return f"{words.replace('_', ' ')} {shown}{per}"


def _reasons(counts: Mapping[str, int]) -> str:
    """Give the sum, and under it what it is made of."""
    return "\n".join([f"{sum(counts.values()):,}", *(f"{reason} {chunks:,}" for reason, chunks in counts.items())])
