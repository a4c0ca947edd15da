"""`kvtier replay`: a trace through a whole engine, with real bytes or in virtual time; a table, JSON and a picture."""

import asyncio
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
import uvloop
from msgspec.structs import replace
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.config import EngineConfig, read_config
from kvtier.errors import ConfigError
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools import statuses
from kvtier.tools.commands import JsonOption, LimitOption, PlotOption, StrictOption
from kvtier.tools.outputs import bar, busy, check_outputs, make_directory, temporary_directory, write_json
from kvtier.tools.replay.replay import CONCURRENCY, CONCURRENCY_MAX, GPU_NAME, ChunkSource, Replay, Tally
from kvtier.tools.replay.report import ModelPart, Report, make_report, print_report
from kvtier.tools.replay.setup import check_room, check_roots, default_config, rooted, settings_of, without_root
from kvtier.tools.replay.study import Extent, measure
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.virtual import (
    GPU_CACHE_TOKENS,
    GPU_LOAD_BYTES_PER_S,
    Prefill,
    VirtualReplay,
    default_model,
    read_bench,
    scale_model,
)
from kvtier.tools.replay.workload import GENERATED, GeneratedTrace, Workload, open_trace

SEED_MAX = (1 << 63) - 1  # The report says it, and readers of JSON take no more.
SLOTS_MAX = 65_536  # Servers. A heap has an entry for each; no cluster has so many.
PREFILL_TOKENS_PER_S_MAX = 1e9  # Ten thousand times one GPU; beyond it computing takes no time.
GPU_CACHE_BLOCKS_MAX = 1_000_000_000  # No cluster's GPUs have room for so many; a report's readers take the figure.
DEFAULT_SOURCE = "assumed: an 8B model, four NVMe SSDs"
STEPS_MAX = 1_000  # Of the bar: more would not be seen.


class Options(NamedTuple):
    """The options of one replay."""

    requests: Trace | GeneratedTrace
    extent: Extent
    config_path: str | None
    fs: str | None
    seed: int
    concurrency: int
    prefill: Prefill
    bench_path: str | None = None
    gpu_cache_blocks: int | None = None  # None: `GPU_CACHE_TOKENS` for each server.
    load_always: bool = False  # Whatever a tier has is loaded, however long it takes.
    compared: bool = True  # In virtual time: with the times without tiering, too.


class Prepared(NamedTuple):
    """One replay, ready to run, and what its report says of the engine."""

    replay: Replay | VirtualReplay
    loop_factory: Callable[[], asyncio.AbstractEventLoop]
    config: EngineConfig  # With the sizes of the real engine.
    engine: Mapping[str, Any]
    model: Sequence[ModelPart] | None = None


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
            help="The engine, in TOML or JSON; else a primary of 5 % of the unique blocks, or more for long requests, "
            "over an fs tier.",
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
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=CONCURRENCY_MAX, help="Requests open at once, a task each; not in virtual time.")
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
            help="A report of kvtier bench --json: how fast the disk under fs tiers is, in virtual time.",
        ),
    ] = None,
    load_always: Annotated[
        bool,
        typer.Option(
            "--load-always", help="Load whatever a tier has, even where computing is faster, in virtual time."
        ),
    ] = False,
) -> None:
    """Replay a trace through a whole engine, and compare every chunk that comes back with what was stored.

    Exits with 1 if any byte was wrong. Ctrl-C ends the replay with a report of what was done.
    """
    if virtual_time and fs is not None:
        raise ConfigError(f"--fs {fs}: nothing is written in virtual time; one of both options accepted")
    modelled = (
        ("--bench", bench, None),
        ("--gpu-cache-blocks", gpu_cache_blocks, None),
        ("--load-always", load_always, False),
        ("--prefill-tokens-per-s", prefill_tokens_per_s, Prefill().tokens_per_s),
        ("--slots", slots, Prefill().slots),
    )
    for option, given, default in modelled:
        if given != default and not virtual_time:
            value = "" if given is True else f" {given}"
            raise ConfigError(f"{option}{value}: accepted with --virtual-time only: nothing else is modelled")
    if virtual_time and concurrency != CONCURRENCY:
        raise ConfigError(
            f"--concurrency {concurrency}: accepted without --virtual-time only: in virtual time, --slots says how "
            "many requests are served at once"
        )
    check_outputs(json_path, plot_path)
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
        load_always,
    )
    with ExitStack() as stack:
        prepared = virtual_replay(options) if virtual_time else real_replay(options, stack)
        report = _run(prepared, options)
        console = write_json(json_path, report)
        if not report.interrupted:  # Drawing takes a second, and that long nobody waits.
            _draw(report, plot_path)
        print_report(report, console)
        if report.interrupted:
            raise typer.Exit(statuses.INTERRUPTED)
    if report.wrong_chunks:
        raise typer.Exit(statuses.DATA_WRONG)


def _draw(report: Report, plot_path: str | None) -> None:
    if plot_path is not None:
        from kvtier.tools.pictures import write_replay_picture  # An extra: see `check_picture`.

        write_replay_picture(plot_path, report)


def _measured(requests: Trace | GeneratedTrace) -> Extent:
    """Read the whole trace once: its size is needed, and a bad line is to be found before anything is made."""
    with busy(f"reading {os.path.basename(requests.path)}"):
        return measure(requests)


def _run(prepared: Prepared, options: Options) -> Report:
    """Run to the end or to Ctrl-C, and sum up what was done."""
    replay, requests = prepared.replay, options.extent.requests
    interrupted = False
    try:
        with (
            asyncio.Runner(loop_factory=prepared.loop_factory) as runner,
            replay_bar(replay.tally, requests) as progress,
        ):
            runner.run(replay.run(progress))
    except KeyboardInterrupt:  # The replay was cancelled first, and has closed its engine.
        interrupted = True
    return make_report(
        replay.tally,
        trace=os.path.basename(options.requests.path),
        seed=options.seed,
        extent=options.extent,
        config=prepared.config,
        engine=prepared.engine,
        interrupted=interrupted,
        ttft_s=replay.times_to_first_token_s,
        model=prepared.model,
    )


@contextmanager
def replay_bar(tally: Tally, requests: int) -> Generator[Callable[[], None]]:
    """Give what is to be called after each request. There is no bar where nobody watches."""
    ratio = TextColumn("hit ratio {task.fields[hit_ratio]:.4f}")
    every = max(1, requests // STEPS_MAX)
    with bar(MofNCompleteColumn(), ratio, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("replaying", total=requests, hit_ratio=0.0)

        def step() -> None:
            if tally.requests % every == 0:
                progress.update(task, completed=tally.requests, hit_ratio=tally.hit_ratio)

        yield step


def real_replay(options: Options, stack: ExitStack) -> Prepared:
    """Prepare a replay with real bytes. A temporary directory that tiers need goes away with the stack."""
    if options.config_path is None:
        config = default_config(options.extent, options.concurrency)
    else:
        config = read_config(options.config_path)
    if options.fs is not None:
        make_directory("--fs", options.fs)
        config = rooted(config, options.fs, override=True)
    else:
        check_roots(config)
        if without_root(config):
            directory = stack.enter_context(temporary_directory())
            check_room(config, options.extent, directory)
            config = rooted(config, directory, override=False)
    config = replace(config, chunk_tokens=options.requests.block_tokens)  # Hints count in tokens.
    replay = Replay(
        options.requests,
        config,
        _source(options, config.chunk_bytes),
        Tally(options.extent.requests),
        concurrency=options.concurrency,
    )
    return Prepared(replay, uvloop.new_event_loop, config, {**settings_of(config), "concurrency": options.concurrency})


def virtual_replay(options: Options) -> Prepared:
    """Prepare a replay in virtual time."""
    if options.config_path is None:
        config = default_model(options.extent, options.requests.block_tokens, options.prefill.slots)
        return modelled_replay(options, config, DEFAULT_SOURCE)
    return modelled_replay(options, read_config(options.config_path), os.path.basename(options.config_path))


def modelled_replay(options: Options, config: EngineConfig, source: str) -> Prepared:
    """Prepare a replay in virtual time of an engine's model; `source` is where its configuration comes from."""
    block_tokens = options.requests.block_tokens
    bench = None if options.bench_path is None else read_bench(options.bench_path)
    model = scale_model(weighed(config, options, block_tokens), source=source, bench=bench)
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
        compared=options.compared,
    )
    prefill = options.prefill._asdict()
    stand_ins = {tier.name: tier.type for tier in model.config.secondary_tiers}
    engine = settings_of(config) | {"runner": model.config.runner, "tiers": stand_ins, "prefill": prefill}
    parts = (
        ModelPart("prefill", prefill, "--prefill-tokens-per-s, --slots"),
        ModelPart(GPU_NAME, {"cache_blocks": gpu_cache_blocks}, _gpu_source(options)),
        ModelPart("copy to the GPU", {"load_bytes_per_s": GPU_LOAD_BYTES_PER_S}, "assumed: sixteen lanes of PCIe 4"),
        *model.parts,
    )
    return Prepared(replay, VirtualTimeLoop, config, engine, parts)


def weighed(config: EngineConfig, options: Options, block_tokens: int) -> EngineConfig:
    """Tell an engine how fast the servers compute, so that it weighs loads; a configuration that says it is kept."""
    speed = config.prefill_tokens_per_s or options.prefill.tokens_per_s
    return replace(config, prefill_tokens_per_s=None if options.load_always else speed, chunk_tokens=block_tokens)


def _gpu_source(options: Options) -> str:
    given = options.gpu_cache_blocks is not None
    return "--gpu-cache-blocks" if given else f"default: {GPU_CACHE_TOKENS:,} tokens a server"


def _source(options: Options, chunk_bytes: int) -> ChunkSource:
    """Make chunks that no other trace has: in a directory that several have used, each finds its own only."""
    first = next(iter(options.requests))
    return ChunkSource(chunk_bytes, seed=options.seed, trace=msgspec.json.encode(first))
