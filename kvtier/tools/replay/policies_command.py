"""`kvtier policies`: hit ratios of eviction policies over a trace, as a table and as JSON."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.text import Text

from kvtier.errors import ConfigError
from kvtier.tools.options import JsonOption, LimitOption, StrictOption, TraceArgument, listed
from kvtier.tools.outputs import bar, check_outputs, counted, plain_table, write_json
from kvtier.tools.replay.study import OPT, Extent, measure, simulation, too_long
from kvtier.tools.replay.tiered import CascadeName, Served, cascade_named, tiered_hits
from kvtier.tools.replay.workload import AnyTrace, open_trace

LISTED = "names or numbers with commas between them"
POLICIES = "fifo,lru,arc,s3fifo,density,opt"
TIERED_POLICIES = POLICIES.removesuffix(f",{OPT}")

Study = Callable[[int, int], Served]
"""From the capacities of a cache and of the tier under it, in blocks, to the totals over the trace."""

Ratios = Mapping[str, Mapping[str, float]]
"""Policy -> size as it was given -> blocks for each block reference."""


def policies(
    trace: TraceArgument,
    policies: Annotated[
        str, typer.Option(help="Policies to compare: built-in ones, opt, or your own as module:Class.")
    ] = POLICIES,
    sizes: Annotated[
        str, typer.Option(help="Cache sizes, as shares of the trace's unique blocks.")
    ] = "0.01,0.05,0.10,0.25,0.50",
    tier: Annotated[
        str | None, typer.Option(help="Put an LRU tier of this size under the cache, as a share of the unique blocks.")
    ] = None,
    cascades: Annotated[
        str | None, typer.Option(help="When blocks are written to it: store, evict, second_use; by default, store.")
    ] = None,
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
) -> None:
    """Compare eviction policies by their hit ratios over a trace.

    A request's hits are its longest leading run of blocks that the cache holds; then all of its blocks are stored.
    """
    names = listed("--policies", policies if tier is None or policies != POLICIES else TIERED_POLICIES, str, LISTED)
    for name in names:
        simulation(name)  # An unknown policy is rejected before the trace is read.
    shares = {size: _share("--sizes", size) for size in listed("--sizes", sizes, str, LISTED)}
    if tier is None and cascades is not None:
        raise ConfigError(f"--cascades {cascades}: accepted with --tier only: there is nothing to write to")
    tier_share = None if tier is None else _share("--tier", tier)
    named = listed("--cascades", cascades or "store", partial(cascade_named, option="--cascades"), LISTED)
    check_outputs(json_path)
    opened = open_trace(trace, limit=limit, strict=strict)
    studies: dict[str, Study] = {}
    for name in names:
        if tier_share is None:
            studies[name] = partial(_alone, opened, name)
        else:
            studies |= {f"{name}, {cascade}": partial(_over_tier, opened, name, cascade) for cascade in named}
    extent, totals = _compared(opened, studies, shares, tier_share)
    hits = _ratios(totals, lambda served: extent.hit_ratio(served.hits))
    written = _ratios(totals, lambda served: extent.hit_ratio(served.written))
    console = write_json(json_path, hits if tier is None else {"hit_ratio": hits, "written": written})
    _show(f"Hit ratios, {os.path.basename(opened.path)}", extent, shares, hits, console)
    if tier is not None:
        console.print()
        _show("Blocks written to the tier, for each block asked for", extent, shares, written, console)
    console.out(
        f"{counted(extent.requests, 'request')}, {counted(extent.block_references, 'block reference')}, "
        f"{counted(extent.unique_blocks, 'unique block')}; "
        f"best possible hit ratio {extent.hit_ratio(extent.best_hits):.4f}",
        highlight=False,
    )
    size, share = min(shares.items(), key=itemgetter(1))
    for warning in too_long(extent, extent.capacity(share), f"--sizes {size}: a cache"):
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)


def _share(option: str, size: str) -> float:
    try:
        share = float(size)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{option} {size!r}: expected shares of the unique blocks, above 0 and at most 1: 0.01,0.5")
    return share


def _alone(trace: AnyTrace, policy: str, capacity: int, _: int) -> Served:
    return Served(sum(simulation(policy, trace.block_tokens)(trace, capacity)), 0)


def _over_tier(trace: AnyTrace, policy: str, cascade: CascadeName, capacity: int, tier_capacity: int) -> Served:
    hits = written = 0
    for served in tiered_hits(trace, policy, capacity, tier_capacity, cascade, block_tokens=trace.block_tokens):
        hits += served.hits
        written += served.written
    return Served(hits, written)


def _compared(
    trace: AnyTrace, studies: Mapping[str, Study], shares: Mapping[str, float], tier_share: float | None
) -> tuple[Extent, dict[str, dict[str, Served]]]:
    """Run every study at every size, with a bar on stderr."""
    with bar(TimeRemainingColumn()) as progress:
        task = progress.add_task("reading", total=None)
        extent = measure(trace)
        progress.update(task, total=len(studies) * len(shares))
        tier_capacity = extent.capacity(tier_share or 0.0)
        totals: dict[str, dict[str, Served]] = {}
        for name, study in studies.items():
            totals[name] = {}
            for size, share in shares.items():
                progress.update(task, description=f"{name} {size}")
                totals[name][size] = study(extent.capacity(share), tier_capacity)
                progress.advance(task)
    return extent, totals


def _ratios(totals: Mapping[str, Mapping[str, Served]], ratio: Callable[[Served], float]) -> Ratios:
    return {name: {size: ratio(served) for size, served in row.items()} for name, row in totals.items()}


def _show(heading: str, extent: Extent, shares: Mapping[str, float], ratios: Ratios, console: Console) -> None:
    table = plain_table("cache size: share\nin blocks", title=heading)
    for size, share in shares.items():
        table.add_column(f"{size}\n{extent.capacity(share):,}", justify="right")
    for name, row in ratios.items():
        table.add_row(Text(name), *(f"{ratio:.4f}" for ratio in row.values()))
    console.print(table)
