"""`kvtier simulate`: a trace through a model of an engine in virtual time; times to first token."""

import os
from typing import Annotated

import typer

from kvtier.config import read_config
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools import statuses
from kvtier.tools.options import (
    DiskSpeedOption,
    GpuCacheOption,
    JsonOption,
    LimitOption,
    LoadAlwaysOption,
    PrefillOption,
    SeedOption,
    SlotsOption,
    StrictOption,
    TraceArgument,
)
from kvtier.tools.outputs import check_outputs, write_json
from kvtier.tools.replay.model import KV_BYTES_PER_TOKEN, SSDS_RATES, disk_speed, model_engine
from kvtier.tools.replay.replay_command import measured, run_with_bar
from kvtier.tools.replay.report import make_report, print_report
from kvtier.tools.replay.setup import primary_rows
from kvtier.tools.replay.virtual import (
    GPU_CACHE_TOKENS,
    PREFILL_TOKENS_PER_S,
    SLOTS,
    Servers,
    arrivals_s,
    modelled,
    without_tiering_s,
)
from kvtier.tools.replay.workload import GENERATED, open_trace

WITH_TIERING, WITHOUT_TIERING = "with_tiering", "without_tiering"


def simulate(
    trace: TraceArgument = GENERATED,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The engine, in TOML or JSON; by default chunks of an 8B model in a primary of 5 % of the unique "
            "blocks, or more for long requests, over a disk without a limit.",
        ),
    ] = None,
    prefill_tokens_per_s: PrefillOption = PREFILL_TOKENS_PER_S,
    slots: SlotsOption = SLOTS,
    gpu_cache_tokens: GpuCacheOption = GPU_CACHE_TOKENS,
    disk_rates: DiskSpeedOption = SSDS_RATES,
    load_always: LoadAlwaysOption = False,
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    """Replay a trace at its own times in virtual time, against models of the tiers, and report first tokens.

    Ctrl-C ends the replay with a report of the finished requests.
    """
    check_outputs(json_path)
    disk = disk_speed("--disk-speed", disk_rates)
    opened = open_trace(trace, seed=seed, limit=limit, strict=strict)
    extent = measured(opened)
    servers = Servers(prefill_tokens_per_s, slots, gpu_cache_tokens)
    if config is None:
        chunk_bytes = opened.block_tokens * KV_BYTES_PER_TOKEN
        engine = model_engine(chunk_bytes, primary_rows(extent, slots) * chunk_bytes, None, disk)
    else:
        engine = read_config(config)
    model, replay = modelled(opened, engine, servers, disk, extent.requests, load_always=load_always, seed=seed)
    interrupted = run_with_bar(replay, VirtualTimeLoop, extent.requests)
    times = {WITH_TIERING: replay.times_to_first_token_s}
    if not interrupted:
        times[WITHOUT_TIERING] = without_tiering_s(opened, arrivals_s(opened), servers, opened.block_tokens)
    report = make_report(
        replay.tally,
        command="kvtier simulate",
        trace=os.path.basename(opened.path),
        seed=seed,
        extent=extent,
        config=engine,
        interrupted=interrupted,
        ttft_s=times,
        model={**servers.figures(), **model.figures},
    )
    print_report(report, write_json(json_path, report))
    if interrupted:
        raise typer.Exit(statuses.INTERRUPTED)
    if report.wrong_chunks:
        raise typer.Exit(statuses.DATA_WRONG)
