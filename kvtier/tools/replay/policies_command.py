"""`kvtier policies`: hit ratios of eviction policies over a trace, as a table and as JSON."""

import os
from operator import itemgetter
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.text import Text

from kvtier.tools.options import JsonOption, LimitOption, TraceArgument, listed, parse_share, parsed
from kvtier.tools.outputs import bar, check_outputs, counted, plain_table, write_json
from kvtier.tools.replay.study import measure, simulation, too_long
from kvtier.tools.replay.workload import open_trace

LISTED = "names or numbers with commas between them"
SHARES = "shares of the unique blocks, above 0 and at most 1: 0.01,0.5"
POLICIES = "fifo,lru,arc,s3fifo,density,opt"


def policies(
    trace: TraceArgument,
    policies: Annotated[
        str, typer.Option(help="Policies to compare: built-in ones, opt, or your own as module:Class.")
    ] = POLICIES,
    sizes: Annotated[
        str, typer.Option(help="Cache sizes, as shares of the trace's unique blocks.")
    ] = "0.01,0.05,0.10,0.25,0.50",
    limit: LimitOption = None,
    json_path: JsonOption = None,
) -> None:
    """Compare eviction policies by their hit ratios over a trace.

    A request's hits are its longest leading run of blocks that the cache holds; then all of its blocks are stored.
    """
    names = listed("--policies", policies, str, LISTED)
    for name in names:
        simulation(name)  # An unknown policy is rejected before the trace is read.
    shares = {size: parsed("--sizes", size, parse_share, SHARES) for size in listed("--sizes", sizes, str, LISTED)}
    check_outputs(json_path)
    opened = open_trace(trace, limit=limit)
    ratios: dict[str, dict[str, float]] = {name: {} for name in names}  # By policy and by size, as they were given.
    with bar(TimeRemainingColumn()) as progress:
        task = progress.add_task("reading", total=None)
        extent = measure(opened)
        progress.update(task, total=len(names) * len(shares))
        for name in names:
            for size, share in shares.items():
                progress.update(task, description=f"{name} {size}")
                hits = sum(simulation(name, opened.block_tokens)(opened, extent.capacity(share)))
                ratios[name][size] = extent.hit_ratio(hits)
                progress.advance(task)
    console = write_json(json_path, ratios)
    console.out(f"Hit ratios, {os.path.basename(opened.path)}", highlight=False)
    table = plain_table("cache size: share\nin blocks")
    for size, share in shares.items():
        table.add_column(f"{size}\n{extent.capacity(share):,}", justify="right")
    for name, row in ratios.items():
        table.add_row(Text(name), *(f"{ratio:.4f}" for ratio in row.values()))
    console.print(table)
    console.out(
        f"{counted(extent.requests, 'request')}, {counted(extent.block_references, 'block reference')}, "
        f"{counted(extent.unique_blocks, 'unique block')}; "
        f"best possible hit ratio {extent.hit_ratio(extent.best_hits):.4f}",
        highlight=False,
    )
    size, share = min(shares.items(), key=itemgetter(1))
    for warning in too_long(extent, extent.capacity(share), f"--sizes {size}: a cache"):
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)
