"""`kvtier replay`: a trace through a whole engine with real bytes; a table, JSON and a picture."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, contextmanager, suppress
from shutil import disk_usage
from typing import Annotated, Any

import typer
import uvloop
from msgspec.structs import replace
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.config import EngineConfig, TierConfig, TierLimits, read_config, tier_options
from kvtier.errors import ConfigError
from kvtier.settings import shown_bytes
from kvtier.tools.options import JsonOption, LimitOption, PlotOption, SeedOption, TraceArgument
from kvtier.tools.outputs import bar, busy, check_directory, check_outputs, temporary_directory
from kvtier.tools.replay.replay import CONCURRENCY, CONCURRENCY_MAX, ChunkSource, Replay, ReplayTally
from kvtier.tools.replay.report import deliver, make_report
from kvtier.tools.replay.study import Extent, measure
from kvtier.tools.replay.workload import GENERATED, AnyTrace, open_trace

CHUNK_BYTES = 16 << 10
PRIMARY_SHARE = 0.05  # Of the trace's unique blocks: small, so that many hits come from the tier below.
STORE_CHUNKS = 256  # Keeps the lanes busy. Waiting stores pin rows: more would cost hits in the primary.
FOOTER_BYTES = 4_096  # Of each chunk of an fs tier.
FOLDER_BYTES = 4_096


def replay(
    trace: TraceArgument = GENERATED,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The engine, in TOML or JSON; by default a primary of 5 % of the unique blocks, or more for long "
            "requests, over an fs tier.",
        ),
    ] = None,
    fs: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The root of all fs tiers; the chunks stay there. Without it, tiers without a root get a temporary "
            "directory.",
        ),
    ] = None,
    limit: LimitOption = None,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=CONCURRENCY_MAX, help="Requests open at once, a task each.")
    ] = CONCURRENCY,
    seed: SeedOption = 0,
) -> None:
    """Replay a trace through a whole engine, and compare every loaded chunk with the stored one.

    Exits with 1 if any byte was wrong. Ctrl-C ends the replay with a report of the finished requests.
    """
    check_outputs(json_path, plot_path)
    opened = open_trace(trace, seed=seed, limit=limit)
    extent = measured(opened)
    with ExitStack() as stack:
        engine = _engine(config, fs, extent, concurrency, stack)
        engine = replace(engine, chunk_tokens=opened.block_tokens)  # Hints count in tokens.
        source = ChunkSource.of(opened, engine.chunk_bytes, seed)
        replay = Replay(opened, engine, source, ReplayTally(extent.requests, engine.row_bytes), concurrency=concurrency)
        interrupted = run_with_bar(replay.run, replay.tally, uvloop.new_event_loop, extent.requests)
        report = make_report(
            replay.tally,
            command="kvtier replay",
            trace=os.path.basename(opened.path),
            seed=seed,
            extent=extent,
            config=engine,
            interrupted=interrupted,
        )
        if plot_path is not None and not interrupted:  # Ctrl-C takes effect at once, and drawing takes a second.
            from kvtier.tools.pictures import write_replay_picture  # An extra: see `check_outputs`.

            write_replay_picture(plot_path, report, replay.tally)
        deliver(report, json_path)


def _engine(path: str | None, fs: str | None, extent: Extent, concurrency: int, stack: ExitStack) -> EngineConfig:
    """Return the engine with a root for every fs tier. The stack removes a temporary directory."""
    config = default_config(extent, concurrency) if path is None else read_config(path)
    if fs is not None:
        _make_directory(fs)
        return rooted(config, fs, override=True)
    check_roots(config)
    if not without_root(config):
        return config
    directory = stack.enter_context(temporary_directory("kvtier-replay-"))
    check_room(config, extent, directory)
    return rooted(config, directory, override=False)


def _make_directory(path: str) -> None:
    """Create the directory of `--fs` with mode 0700, or accept an existing one. Raises `ConfigError`."""
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError) and path != ""
        why = "parent directory does not exist" if missing else getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--fs: cannot create {path!r}: {why}") from error
    check_directory("--fs", path)


def default_config(extent: Extent, concurrency: int) -> EngineConfig:
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
    return max(512, extent.capacity(PRIMARY_SHARE), open_rows)  # A short trace's primary: 8 MiB.


def check_roots(config: EngineConfig) -> None:
    """Raise `ConfigError` if an fs tier's own root does not exist."""
    for index, tier in enumerate(config.secondary_tiers):
        root = tier.options.get("root")
        if tier.type == "fs" and isinstance(root, str):
            check_directory(f"secondary_tiers[{index}].root", root)


def without_root(config: EngineConfig) -> bool:
    return any(tier.type == "fs" and "root" not in tier.options for tier in config.secondary_tiers)


def rooted(config: EngineConfig, directory: str, *, override: bool) -> EngineConfig:
    """Set the root of fs tiers, or only of those without: the directory, or a folder in it for each of several."""
    tiers = list(config.secondary_tiers)
    of_fs = [index for index, tier in enumerate(tiers) if tier.type == "fs"]
    if override and not of_fs:
        raise ConfigError(f"--fs {directory}: the configuration has no tier of type fs")
    for index in of_fs:
        if override or "root" not in tiers[index].options:
            root = directory if len(of_fs) == 1 else f"{directory}/{index}"
            tiers[index] = replace(tiers[index], options={**tiers[index].options, "root": root})
    return replace(config, secondary_tiers=tuple(tiers))


def check_room(config: EngineConfig, extent: Extent, directory: str) -> None:
    """Raise `ConfigError` if the trace's chunks would fill the disk of a temporary directory."""
    needed = 0
    for index, tier in enumerate(config.secondary_tiers):
        if tier.type == "fs" and "root" not in tier.options:
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


def measured(requests: AnyTrace) -> Extent:
    """Read the whole trace once, for its extent: a bad line is found before any work."""
    with busy(f"reading {os.path.basename(requests.path)}"):
        return measure(requests)


def run_with_bar(
    run: Callable[[Callable[[], None]], Coroutine[Any, Any, ReplayTally]],
    tally: ReplayTally,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    requests: int,
) -> bool:
    """Run a replay with a bar on stderr. Return True if Ctrl-C interrupted it; it has then closed its engine."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner, _bar(tally, requests) as progress:
            runner.run(run(progress))
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _bar(tally: ReplayTally, requests: int) -> Generator[Callable[[], None]]:
    ratio = TextColumn("hit ratio {task.fields[hit_ratio]:.4f}")
    every = max(1, requests // 1_000)  # More steps of the bar could not be seen.
    with bar(MofNCompleteColumn(), ratio, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("replaying", total=requests, hit_ratio=0.0)

        def step() -> None:
            if tally.requests % every == 0:
                progress.update(task, completed=tally.requests, hit_ratio=tally.hit_ratio)

        yield step
