"""`kvtier policies`: hit ratios over a trace as a table, as JSON and as a picture."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TimeRemainingColumn
from rich.text import Text

from kvtier.errors import ConfigError
from kvtier.tools.commands import JsonOption, LimitOption, PlotOption, StrictOption, listed
from kvtier.tools.outputs import bar, check_outputs, counted, plain_table, write_json
from kvtier.tools.replay.study import Extent, Simulation, measure, simulation, too_long
from kvtier.tools.replay.tiered import TierUnder, cascade_named
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.workload import GENERATED, GeneratedTrace, open_trace

LISTED = "names or numbers with commas between them"
BENDS_MAX = 8  # Further sizes of a curve that is drawn. Each is a simulation of the whole trace.
BEND_MIN = 0.004  # Of the hit ratio: what a picture shows as a line, is one.
_PROGRESS_REQUESTS = 256  # Between two steps of the bar: some ten milliseconds.

POLICIES, TIERED_POLICIES = "fifo,lru,lfu,arc,s3fifo,density,opt", "fifo,lru,lfu,arc,s3fifo,density"

Ratios = Mapping[str, Mapping[str, float]]
"""Policy -> size as it was given -> hit ratio."""

Curves = Mapping[str, Mapping[float, float]]
"""Policy -> share of the unique blocks -> hit ratio."""


def policies(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst), or {GENERATED!r}."
        ),
    ],
    policies: Annotated[
        str, typer.Option(help="Policies to compare: built-in ones, opt, or your own as module:Class.")
    ] = POLICIES,
    sizes: Annotated[
        str, typer.Option(help="Cache sizes, as shares of the trace's unique blocks.")
    ] = "0.01,0.05,0.10,0.25,0.50",
    tier: Annotated[
        str | None,
        typer.Option(help="Put an LRU tier of this size under the cache, as a share of the unique blocks."),
    ] = None,
    cascades: Annotated[
        str | None, typer.Option(help="When blocks are written to it: store, evict, second_use; without it, store.")
    ] = None,
    tier_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the trace's hints call the tier, where no_store names tiers."),
    ] = None,
    limit: LimitOption = None,
    strict: StrictOption = False,
    json_path: JsonOption = None,
    plot_path: PlotOption = None,
) -> None:
    """Compare eviction policies by their hit ratios over a trace.

    A request's hits are its longest leading run of blocks that the cache holds; then all of its blocks are stored.
    """
    names = listed("--policies", policies if tier is None or policies != POLICIES else TIERED_POLICIES, str, LISTED)
    for name in names:
        simulation(name)  # What there is not is refused before the trace is read.
    shares = {size: _share("--sizes", size) for size in listed("--sizes", sizes, str, LISTED)}
    check_outputs(json_path, plot_path)
    opened = open_trace(trace, limit=limit, strict=strict)
    under = _tier(opened, tier, cascades, tier_name)
    if under is None:
        simulations = {name: simulation(name, opened.block_tokens) for name in names}
    else:
        simulations = {
            f"{name}, {cascade}": under.simulation(name, cascade) for name in names for cascade in under.cascades
        }
    extent, curves = _compare(opened, simulations, shares, bends=BENDS_MAX if plot_path is not None else 0)
    ratios = {name: {size: curve[share] for size, share in shares.items()} for name, curve in curves.items()}
    title = os.path.basename(opened.path)
    writes = None if under is None else _writes(under, extent, simulations, shares)
    console = write_json(json_path, ratios if writes is None else {"hit_ratio": ratios, "written": writes})
    if plot_path is not None:
        from kvtier.tools.pictures import write_miss_ratio_curve  # An extra: see `check_picture`.

        write_miss_ratio_curve(plot_path, title, extent, curves, shares.values(), opened.block_tokens)
    _show(f"Hit ratios, {title}", extent, shares, ratios, console)
    if writes is not None:
        console.print()
        _show("Blocks written to the tier, for each block asked for", extent, shares, writes, console)
    console.out(
        f"{counted(extent.requests, 'request')}, {counted(extent.block_references, 'block reference')}, "
        f"{counted(extent.unique_blocks, 'unique block')}; "
        f"best possible hit ratio {extent.hit_ratio(extent.best_hits):.4f}",
        highlight=False,
    )
    size, share = min(shares.items(), key=itemgetter(1))
    for warning in too_long(extent, extent.capacity(share), f"--sizes {size}: a cache"):
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)


def _tier(trace: Trace | GeneratedTrace, share: str | None, cascades: str | None, name: str | None) -> TierUnder | None:
    if share is None:
        if cascades is not None:
            raise ConfigError(f"--cascades {cascades}: accepted with --tier only: there is nothing to write to")
        if name is not None:
            raise ConfigError(f"--tier-name {name}: accepted with --tier only: there is nothing to name")
        return None
    named = listed(
        "--cascades", "store" if cascades is None else cascades, partial(cascade_named, option="--cascades"), LISTED
    )
    return TierUnder(trace, _share("--tier", share), named, name or "")


def _writes(
    under: TierUnder, extent: Extent, simulations: Mapping[str, Simulation], shares: Mapping[str, float]
) -> Ratios:
    capacities = {size: extent.capacity(share) for size, share in shares.items()}
    return {
        name: {size: extent.hit_ratio(under.written[name, capacity]) for size, capacity in capacities.items()}
        for name in simulations
    }


def _share(option: str, size: str) -> float:
    try:
        share = float(size)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"{option} {size!r}: expected shares of the unique blocks, above 0 and at most 1: 0.01,0.5")
    return share


def _compare(
    trace: Trace | GeneratedTrace, simulations: Mapping[str, Simulation], shares: Mapping[str, float], *, bends: int
) -> tuple[Extent, Curves]:
    """Simulate every policy at every size, with a bar on stderr where somebody watches.

    Each curve gets up to so many further sizes, where it bends.
    """
    with bar(TimeRemainingColumn()) as progress:
        task = progress.add_task("reading", total=None)
        extent = measure(trace)
        progress.update(task, total=extent.requests * len(simulations) * (len(shares) + bends))
        curves: dict[str, dict[float, float]] = {}
        for name, simulate in simulations.items():

            def ratio(share: float, name: str = name, simulate: Simulation = simulate) -> float:
                progress.update(task, description=f"{name} {share:.3g}")
                hits = simulate(trace, extent.capacity(share))
                return extent.hit_ratio(sum(_watched(hits, partial(progress.advance, task))))

            curves[name] = {share: ratio(share) for share in dict.fromkeys(shares.values())}
            _refine(curves[name], ratio, bends)
            progress.update(task, completed=extent.requests * len(curves) * (len(shares) + bends))
    return extent, curves


def _refine(curve: dict[float, float], ratio: Callable[[float], float], bends: int) -> None:
    """Add up to so many points to a curve, each in the middle of the interval that is most likely to be no line.

    An interval is as suspect as the steps beside it differ from its own: there the curve bends. One whose middle was
    found to be on the line is left alone.
    """
    straight: set[tuple[float, float]] = set()
    for _ in range(bends):
        shares = sorted(curve)
        found = max(
            (
                (_suspicion(curve, shares, index), index)
                for index in range(len(shares) - 1)
                if tuple(shares[index : index + 2]) not in straight
            ),
            default=(0.0, 0),
        )
        if found[0] < BEND_MIN:
            return
        low, high = shares[found[1] : found[1] + 2]
        middle = math.sqrt(low * high)  # The axis is logarithmic.
        curve[middle] = ratio(middle)
        if abs(curve[middle] - (curve[low] + curve[high]) / 2) < BEND_MIN:
            straight |= {(low, middle), (middle, high)}


def _suspicion(curve: Mapping[float, float], shares: Sequence[float], index: int) -> float:
    """Return about how far from a line an interval's middle may be: a quarter of what its ends' slopes differ by."""
    slopes = [
        (curve[high] - curve[low]) / math.log(high / low)
        for low, high in pairwise(shares[max(0, index - 1) : index + 3])
    ]
    return (max(slopes) - min(slopes)) * math.log(shares[index + 1] / shares[index]) / 4


def _watched(hits: Iterable[int], advance: Callable[[int], None]) -> Iterator[int]:
    for number, run in enumerate(hits, 1):
        yield run
        if number % _PROGRESS_REQUESTS == 0:
            advance(_PROGRESS_REQUESTS)


def _show(heading: str, extent: Extent, shares: Mapping[str, float], ratios: Ratios, console: Console) -> None:
    table = plain_table("cache size: share\nin blocks", title=heading)
    for size, share in shares.items():
        table.add_column(f"{size}\n{extent.capacity(share):,}", justify="right")
    for name, row in ratios.items():
        table.add_row(Text(name), *(f"{ratio:.4f}" for ratio in row.values()))
    console.print(table)
