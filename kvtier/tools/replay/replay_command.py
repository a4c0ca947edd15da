"""`kvtier replay`: a trace through a whole engine with real bytes; a table, JSON and a picture."""

import asyncio
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import typer
import uvloop
from msgspec.structs import replace
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvtier.config import EngineConfig, read_config
from kvtier.tools import statuses
from kvtier.tools.options import JsonOption, LimitOption, PlotOption, SeedOption, StrictOption, TraceArgument
from kvtier.tools.outputs import bar, busy, check_outputs, make_directory, temporary_directory, write_json
from kvtier.tools.replay.replay import CONCURRENCY, CONCURRENCY_MAX, ChunkSource, Replay, ReplayTally
from kvtier.tools.replay.report import make_report, print_report
from kvtier.tools.replay.setup import check_room, check_roots, default_config, rooted, without_root
from kvtier.tools.replay.study import Extent, measure
from kvtier.tools.replay.virtual import VirtualReplay
from kvtier.tools.replay.workload import GENERATED, AnyTrace, open_trace

STEPS_MAX = 1_000  # Of the bar: more could not be seen.


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
    strict: StrictOption = False,
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
    opened = open_trace(trace, seed=seed, limit=limit, strict=strict)
    extent = measured(opened)
    with ExitStack() as stack:
        engine = _engine(config, fs, extent, concurrency, stack)
        engine = replace(engine, chunk_tokens=opened.block_tokens)  # Hints count in tokens.
        source = ChunkSource.of(opened, engine.chunk_bytes, seed)
        replay = Replay(opened, engine, source, ReplayTally(extent.requests), concurrency=concurrency)
        interrupted = run_with_bar(replay, uvloop.new_event_loop, extent.requests)
        report = make_report(
            replay.tally,
            command="kvtier replay",
            trace=os.path.basename(opened.path),
            seed=seed,
            extent=extent,
            config=engine,
            interrupted=interrupted,
        )
        console = write_json(json_path, report)
        if plot_path is not None and not interrupted:  # Ctrl-C takes effect at once, and drawing takes a second.
            from kvtier.tools.pictures import write_replay_picture  # An extra: see `check_picture`.

            write_replay_picture(plot_path, report, replay.tally)
        print_report(report, console)
        if interrupted:
            raise typer.Exit(statuses.INTERRUPTED)
    if report.wrong_chunks:
        raise typer.Exit(statuses.DATA_WRONG)


def _engine(
    config_path: str | None, fs: str | None, extent: Extent, concurrency: int, stack: ExitStack
) -> EngineConfig:
    """Return the engine with a root for every fs tier. The stack removes a temporary directory."""
    config = default_config(extent, concurrency) if config_path is None else read_config(config_path)
    if fs is not None:
        make_directory("--fs", fs)
        return rooted(config, fs, override=True)
    check_roots(config)
    if not without_root(config):
        return config
    directory = stack.enter_context(temporary_directory())
    check_room(config, extent, directory)
    return rooted(config, directory, override=False)


def measured(requests: AnyTrace) -> Extent:
    """Read the whole trace once, for its extent: a bad line is found before any work."""
    with busy(f"reading {os.path.basename(requests.path)}"):
        return measure(requests)


def run_with_bar(
    replay: Replay | VirtualReplay, loop_factory: Callable[[], asyncio.AbstractEventLoop], requests: int
) -> bool:
    """Run a replay with a bar on stderr. Return True if Ctrl-C interrupted it; it has then closed its engine."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner, _bar(replay.tally, requests) as progress:
            runner.run(replay.run(progress))
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _bar(tally: ReplayTally, requests: int) -> Generator[Callable[[], None]]:
    """Yield a callback for finished requests that updates the bar."""
    ratio = TextColumn("hit ratio {task.fields[hit_ratio]:.4f}")
    every = max(1, requests // STEPS_MAX)
    with bar(MofNCompleteColumn(), ratio, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task("replaying", total=requests, hit_ratio=0.0)

        def step() -> None:
            if tally.requests % every == 0:
                progress.update(task, completed=tally.requests, hit_ratio=tally.hit_ratio)

        yield step
