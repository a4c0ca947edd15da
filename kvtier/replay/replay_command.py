"""`kvtier replay`: a trace through a whole engine, with real bytes or in virtual time; a table, JSON and a picture."""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Annotated

import typer
from rich.console import Console

from kvtier.errors import ConfigError
from kvtier.replay.outputs import check_picture, check_writable, replacing
from kvtier.replay.replay import CONCURRENCY, CONCURRENCY_MAX
from kvtier.replay.replay_jobs import Job, Options, real_job, virtual_job
from kvtier.replay.replay_screen import print_report, replay_bar, temporary_directory
from kvtier.replay.report import Report, make_report, report_json
from kvtier.replay.study import REQUESTS_MAX, Extent, measure
from kvtier.replay.traces import Trace
from kvtier.replay.virtual import Prefill
from kvtier.replay.workload import GENERATED, GeneratedTrace, Workload, open_trace

SEED_MAX = (1 << 63) - 1  # The report says it, and readers of JSON take no more.
SLOTS_MAX = 65_536  # Servers. A heap has an entry for each; no cluster has so many.
PREFILL_TOKENS_PER_S_MAX = (
    1e9  # Ten thousand times one GPU; beyond it computing takes no time, and nothing is compared.
)
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
    from kvtier.replay.replay_picture import write_replay_picture

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
