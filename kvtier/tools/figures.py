"""Figures of a benchmark: each with the limit next to it and their ratio, and the table that shows them.

A ratio of rates is at the limit at 1. It is the median of the rounds' own ratios, as a disturbance slows both sides of
a round; sides are measured in turn, in a random order.
"""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from kvtier import __version__
from kvtier.settings import shown_bytes
from kvtier.tools.outputs import busy, plain_table, write_json

ROUNDS = 7

Load = tuple[float, float, float]
Setting = str | int | bool | None
Measure = Callable[[], float]
"""Does the work once; returns its rate."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that was measured. Loads are the kernel's averages over 1, 5 and 15 minutes."""

    processor: str  # Model.
    processors: int  # Processors available to this process.
    memory_bytes: int  # Memory of the machine.
    kernel: str  # Version.
    python: str  # Version.
    kvtier: str  # Version.
    load_before: Load  # Load before the measurement.
    load_after: Load  # Load after it.


def this_machine(load_before: Load) -> Machine:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        processors = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        processor = next(processors, platform.machine())
    return Machine(
        processor=processor,
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        kvtier=__version__,
        load_before=load_before,
        load_after=os.getloadavg(),
    )


class Side(NamedTuple):
    """One measurement. `prepare` and `tidy` run before and after it, and are not timed."""

    name: str
    measure: Measure
    prepare: Callable[[], None] = lambda: None
    tidy: Callable[[], None] = lambda: None


def interleaved(sides: Sequence[Side], rounds: int) -> dict[str, list[float]]:
    """Measure each side once a round; return figures by round, without the first: it starts threads, fills caches."""
    dice = random.Random(0)
    measured: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(rounds + 1):
        for side in dice.sample(sides, len(sides)):
            side.prepare()
            try:
                measured[side.name].append(side.measure())
            finally:
                side.tidy()
    return {name: figures[1:] for name, figures in measured.items()}


def rate_of(work: Callable[[], object], amount: int, clock: Callable[[], float] = time.perf_counter) -> Measure:
    """Return a measurement of the work's rate, in millions a second: of bytes, MB/s."""

    def measure() -> float:
        begun = clock()
        work()
        return amount / 1e6 / (clock() - begun)

    return measure


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: medians over the rounds, in the row's unit."""

    operation: str  # What was measured.
    chunk_bytes: int | None  # Size of a chunk; null if it has none.
    settings: Mapping[str, Setting]  # The tier's settings.
    unit: str  # Unit of `figure` and `limit`.
    figure: float  # kvtier's rate.
    limit: float  # Rate of the plain operation.
    limit_is: str  # The plain operation in words.
    ratio: float  # `figure` as a share of `limit`.
    spread: tuple[float, float]  # The lowest and the highest ratio of a round.
    rounds: int  # Rounds measured.


def row_of(
    operation: str,
    figures: Sequence[float],
    limits: Sequence[float],
    limit_is: str,
    settings: Mapping[str, Setting],
    *,
    chunk_bytes: int | None = None,
    unit: str = "MB/s",
) -> Row:
    """Return the row of one side's rates, of each round, beside those of its limit."""
    ratios = [figure / limit for figure, limit in zip(figures, limits, strict=True)]
    return Row(
        operation=operation,
        chunk_bytes=chunk_bytes,
        settings=settings,
        unit=unit,
        figure=statistics.median(figures),
        limit=statistics.median(limits),
        limit_is=limit_is,
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        rounds=len(ratios),
    )


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    command: str  # `kvtier bench` or `kvtier selftest`.
    format: int = 1  # Number of the format. It changes with the meaning of a field.
    machine: Machine  # The machine.
    seconds: float  # Duration.
    rows: list[Row]  # The measurements.


def run_bench(command: str, work: Callable[[], Iterable[Row]], json_path: str | None) -> None:
    """Measure, print and write the figures."""
    before, begun = os.getloadavg(), time.perf_counter()
    with busy(command):
        rows = list(work())
    seconds = time.perf_counter() - begun
    figures = Figures(command=command, machine=this_machine(before), seconds=seconds, rows=rows)
    print_figures(figures, write_json(json_path, figures))


def print_figures(figures: Figures, console: Console) -> None:
    """Print the rows as a table, and below it the machine and how to read the table."""
    table = plain_table("operation", ">chunk", ">figure", ">limit", ">ratio", ">spread")
    for row in figures.rows:
        settings = ", ".join(f"{name} {value}" for name, value in row.settings.items())
        table.add_row(
            f"{escape(row.operation)}\n[dim]{escape(settings)}[/]",
            "" if row.chunk_bytes is None else shown_bytes(row.chunk_bytes),
            f"{_shown(row.figure)} {row.unit}",
            f"{_shown(row.limit)} {row.unit}\n[dim]{escape(row.limit_is)}[/]",
            f"[bold]{row.ratio:.2f}[/]",
            f"{row.spread[0]:.2f} to {row.spread[1]:.2f}",
        )
    console.print(table)
    console.print()
    machine, rounds = figures.machine, max((row.rounds for row in figures.rows), default=0)
    for line in (
        f"Medians of {rounds} rounds in turn; ratio: 1 is at the limit, less is worse; spread: of the rounds' ratios.",
        f"{escape(machine.processor)}, {machine.processors} processors, {decimal(machine.memory_bytes)}, "
        f"{escape(machine.kernel)}, Python {machine.python}",
        f"load of the machine {machine.load_before[0]:.2f} before, {machine.load_after[0]:.2f} after; "
        f"{figures.seconds:.0f} s",
    ):
        console.print(line, highlight=False)


def _shown(value: float) -> str:
    """Format a figure with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
