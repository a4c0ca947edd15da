"""Figures of a benchmark: each with the limit next to it and their ratio, and the table that shows them.

A ratio of 1 is at the limit, 0.5 is half as good, whatever the unit. It is the median of each round's own ratio: a
disturbance of a few seconds slows both sides of a round. So sides are measured in turn, round after round, in a random
order.
"""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from kvtier import __version__
from kvtier.settings import shown_bytes
from kvtier.tools.outputs import plain_table

FORMAT = 1  # Of the JSON; incremented when a field changes its meaning.
ROUNDS = 7

Load = tuple[float, float, float]
Setting = str | int | bool | None
Measure = Callable[[], float]
"""Do the work once and return the figure: a rate, or a time."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that was measured. Loads are the kernel's averages over 1, 5 and 15 minutes."""

    processor: str
    processors: int  # Available to this process.
    memory_bytes: int
    kernel: str
    python: str
    kvtier: str
    load_before: Load
    load_after: Load


def this_machine(load_before: Load) -> Machine:
    return Machine(
        processor=_processor(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        kvtier=__version__,
        load_before=load_before,
        load_after=os.getloadavg(),
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())


class Side(NamedTuple):
    """One measurement. `prepare` and `tidy` run before and after it, and are not timed."""

    name: str
    measure: Measure
    prepare: Callable[[], None] = lambda: None
    tidy: Callable[[], None] = lambda: None


def interleaved(
    sides: Sequence[Side], rounds: int, *, seed: int = 0, step: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Measure each side once a round and return its figures in the order of rounds; call `step` after each side.

    The first round does not count: it touches memory, starts threads and fills caches.
    """
    dice = random.Random(seed)
    measured: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(rounds + 1):
        for side in dice.sample(sides, len(sides)):
            side.prepare()
            try:
                measured[side.name].append(side.measure())
            finally:
                side.tidy()
            step()
    return {name: figures[1:] for name, figures in measured.items()}


def rate_of(work: Callable[[], object], moved_bytes: int, clock: Callable[[], float] = time.perf_counter) -> Measure:
    """Return a measurement of the work's rate in MB/s."""

    def measure() -> float:
        begun = clock()
        work()
        return moved_bytes / 1e6 / (clock() - begun)

    return measure


def steps_of(sides: int, rounds: int) -> int:
    return sides * (rounds + 1)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: medians over the rounds, in the row's unit."""

    operation: str
    chunk_bytes: int | None
    settings: Mapping[str, Setting]
    unit: str
    figure: float
    limit: float
    limit_is: str  # The limit in words.
    ratio: float
    spread: tuple[float, float]  # The lowest and the highest ratio of a round.
    rounds: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    format: int = FORMAT
    machine: Machine
    seconds: float
    rows: list[Row]


class Pair(NamedTuple):
    """The two measurements that make a row."""

    operation: str
    chunk_bytes: int | None
    settings: Mapping[str, Setting]
    unit: str
    figure: str  # Names of measurements.
    limit: str
    limit_is: str


def row_of(pair: Pair, measured: Mapping[str, Sequence[float]]) -> Row:
    figures, limits = measured[pair.figure], measured[pair.limit]
    upside_down = pair.unit == "ms"  # Less is better.
    ratios = [limit / figure if upside_down else figure / limit for figure, limit in zip(figures, limits, strict=True)]
    return Row(
        operation=pair.operation,
        chunk_bytes=pair.chunk_bytes,
        settings=pair.settings,
        unit=pair.unit,
        figure=statistics.median(figures),
        limit=statistics.median(limits),
        limit_is=pair.limit_is,
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        rounds=len(ratios),
    )


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
