"""`kvtier policies`: hit ratios over a trace as a table, as JSON and as a picture."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvtier.errors import ConfigError
from kvtier.tools.replay.outputs import check_picture, check_writable, replacing
from kvtier.tools.replay.study import REQUESTS_MAX, Extent, Simulation, measure, simulation
from kvtier.tools.replay.traces import Trace
from kvtier.tools.replay.workload import GENERATED, GeneratedTrace, open_trace

_PROGRESS_REQUESTS = 256  # Between two steps of the bar: some ten milliseconds.

Ratios = Mapping[str, Mapping[str, float]]
"""Policy -> size as it was given -> hit ratio."""


def policies(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help=f"A file in Mooncake's format (.jsonl, .jsonl.gz, .jsonl.zst), or {GENERATED!r}."
        ),
    ],
    policies: Annotated[
        str, typer.Option(help="Policies to compare: built-in ones, opt, or your own as module:Class.")
    ] = "fifo,lru,lfu,arc,s3fifo,opt",
    sizes: Annotated[
        str, typer.Option(help="Cache sizes, as shares of the trace's unique blocks.")
    ] = "0.01,0.05,0.10,0.25,0.50",
    limit: Annotated[int | None, typer.Option(min=1, max=REQUESTS_MAX, help="Read at most this many requests.")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a trace that cannot be true, instead of warning of it.")
    ] = False,
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="OUT", help="Write {policy: {size: hit ratio}} there.")
    ] = None,
    plot_path: Annotated[
        str | None, typer.Option("--plot", metavar="OUT", help="Draw the miss-ratio curve there: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Compare eviction policies by their hit ratios over a trace.

    A request's hits are its longest leading run of blocks that the cache holds; then all of its blocks are stored.
    """
    simulations = {name: simulation(name) for name in _listed("--policies", policies)}
    shares = {size: _share(size) for size in _listed("--sizes", sizes)}
    if json_path is not None:
        check_writable("--json", json_path)
    draw = None if plot_path is None else _drawing(plot_path)
    opened = open_trace(trace, limit=limit, strict=strict)
    extent, ratios = _compare(opened, simulations, shares)
    title = os.path.basename(opened.path)
    if json_path is not None:
        with replacing(json_path) as file:
            file.write(json.dumps(ratios, indent=1).encode() + b"\n")
    if draw is not None:
        draw(title, extent, shares, ratios)
    _show(title, extent, shares, ratios)


def _listed(option: str, text: str) -> list[str]:
    """Split at commas; each thing once."""
    listed = [part.strip() for part in text.split(",")]
    if not all(listed):
        raise ConfigError(f"{option} {text!r}: expected names or numbers with commas between them")
    return list(dict.fromkeys(listed))


def _share(size: str) -> float:
    try:
        share = float(size)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"--sizes {size!r}: expected shares of the unique blocks, above 0 and at most 1: 0.01,0.5")
    return share


def _drawing(path: str) -> Callable[[str, Extent, Mapping[str, float], Ratios], None]:
    """Return what draws the picture, after making sure that it can."""
    check_picture("--plot", path)
    from kvtier.tools.replay.pictures import write_miss_ratio_curve

    return partial(write_miss_ratio_curve, path)


def _compare(
    trace: Trace | GeneratedTrace, simulations: Mapping[str, Simulation], shares: Mapping[str, float]
) -> tuple[Extent, Ratios]:
    """Simulate every policy at every size, with a bar on stderr where somebody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=None)
        extent = measure(trace)
        progress.update(task, total=extent.requests * len(simulations) * len(shares))
        ratios: dict[str, dict[str, float]] = {name: {} for name in simulations}
        for name, simulate in simulations.items():
            for size, share in shares.items():
                progress.update(task, description=f"{name} {size}")
                hits = simulate(trace, extent.capacity(share))
                ratios[name][size] = extent.hit_ratio(sum(_watched(hits, partial(progress.advance, task))))
    return extent, ratios


def _watched(hits: Iterable[int], advance: Callable[[int], None]) -> Iterator[int]:
    for number, run in enumerate(hits, 1):
        yield run
        if number % _PROGRESS_REQUESTS == 0:
            advance(_PROGRESS_REQUESTS)


def _show(title: str, extent: Extent, shares: Mapping[str, float], ratios: Ratios) -> None:
    table = Table(title=Text(f"Hit ratios, {title}"))
    table.add_column("cache size: share\nin blocks")
    for size, share in shares.items():
        table.add_column(f"{size}\n{extent.capacity(share):,}", justify="right")
    for name, row in ratios.items():
        table.add_row(Text(name), *(f"{ratio:.4f}" for ratio in row.values()))
    console = Console()
    console.print(table)
    console.out(
        f"{extent.requests:,} requests, {extent.block_references:,} block references, "
        f"{extent.unique_blocks:,} unique blocks; best possible hit ratio {extent.hit_ratio(extent.best_hits):.4f}",
        highlight=False,
    )
