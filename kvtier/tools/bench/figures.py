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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from kvtier import __version__
from kvtier.tools.outputs import plain_table

FORMAT = 1  # Of the JSON; incremented when a field changes its meaning.
ROUNDS = 7
ROUNDS_MAX = 10_000  # All figures are kept, and a round takes at least a tenth of a second.
TIMES = frozenset({"s", "ms", "µs", "ns"})  # Units of which less is better.
BUSY_LOAD = 0.5  # Load of each processor by other processes, from which on a warning is printed.

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
    file_system: str | None  # Of the measured directory.
    load_before: Load
    load_after: Load


def load() -> Load:
    """Return the machine's load averages over the last 1, 5 and 15 minutes."""
    return os.getloadavg()


def this_machine(load_before: Load, directory: str | None = None) -> Machine:
    """Describe this machine at the end of a run that began under `load_before`."""
    return Machine(
        processor=_processor(),
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        kvtier=__version__,
        file_system=None if directory is None else _file_system(directory),
        load_before=load_before,
        load_after=load(),
    )


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(directory: str) -> str:
    """Return the type and the device of the directory's mount."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return mounted_at(os.path.realpath(directory), lines)


def mounted_at(path: str, mountinfo: Iterable[str]) -> str:
    """Return `<type> on <device>` of a path's mount; proc(5) describes the lines of /proc/self/mountinfo."""
    nearest, found = -1, "unknown"
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")  # Spaces are written \040.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= nearest:
            kind, device = after.split()[:2]
            nearest, found = len(point), f"{kind} on {device}"
    return found


class Side(NamedTuple):
    """One measurement. `prepare` and `tidy` run before and after it, and are not timed."""

    name: str
    measure: Measure
    prepare: Callable[[], None] = lambda: None
    tidy: Callable[[], None] = lambda: None


def interleaved(
    sides: list[Side],
    rounds: int,
    *,
    seed: int = 0,
    step: Callable[[], None] = lambda: None,
    measured: dict[str, list[float]] | None = None,
) -> dict[str, list[float]]:
    """Measure each side once a round and return its figures in the order of rounds.

    The first round does not count: it touches memory, starts threads and fills caches. `step` is called after each
    side. `measured` gets the figures of each completed round, also if a later one raises.
    """
    dice = random.Random(seed)
    measured = {} if measured is None else measured
    for number in range(rounds + 1):
        figures: dict[str, float] = {}
        for side in dice.sample(sides, len(sides)):
            side.prepare()
            try:
                figures[side.name] = side.measure()
            finally:
                side.tidy()
            step()
        for side in sides if number else ():
            measured.setdefault(side.name, []).append(figures[side.name])
    return measured


def rate_of(work: Callable[[], object], moved_bytes: int, clock: Callable[[], float] = time.perf_counter) -> Measure:
    """Return a measurement of the work's rate in MB/s."""

    def measure() -> float:
        begun = clock()
        work()
        return moved_bytes / 1e6 / (clock() - begun)

    return measure


def measured_rows(
    sides: list[Side],
    rounds: int,
    rows: Callable[[Mapping[str, Sequence[float]]], Iterable["Row"]],
    step: Callable[[], None],
) -> Iterator["Row"]:
    """Measure, and yield the rows of the completed rounds. An error or Ctrl-C is raised after them."""
    measured: dict[str, list[float]] = {}
    failure: BaseException | None = None
    try:
        interleaved(sides, rounds, step=step, measured=measured)
    except BaseException as error:  # noqa: BLE001  # Raised below.
        failure = error
    if measured:
        yield from rows(measured)
    if failure is not None:
        raise failure


def steps_of(sides: int, rounds: int) -> int:
    """Return the number of calls that `interleaved` makes to its `step`."""
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
    figure_spread: tuple[float, float]
    limit_spread: tuple[float, float]
    rounds: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run."""

    command: str
    format: int = FORMAT
    machine: Machine
    seconds: float
    complete: bool = True  # False if an error or Ctrl-C ended it; the rows then are those of the completed rounds.
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
    """Return the row of two measurements."""
    figures, limits = measured[pair.figure], measured[pair.limit]
    ratios = [ratio_of(figure, limit, pair.unit) for figure, limit in zip(figures, limits, strict=True)]
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
        figure_spread=(min(figures), max(figures)),
        limit_spread=(min(limits), max(limits)),
        rounds=len(ratios),
    )


def rows_of(pairs: Iterable[Pair], measured: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    return (row_of(pair, measured) for pair in pairs)


def ratio_of(figure: float, limit: float, unit: str) -> float:
    """Return the ratio of a figure to its limit: 1 is at the limit, less is worse."""
    return limit / figure if unit in TIMES else figure / limit


def print_figures(figures: Figures, console: Console) -> None:
    """Print the rows as a table, and below it the machine and how to read the table."""
    table = plain_table("operation", ">chunk", ">figure", ">limit", ">ratio", ">spread")
    for row in figures.rows:
        table.add_row(
            f"{escape(row.operation)}\n[dim]{escape(shown_settings(row.settings))}[/]",
            "" if row.chunk_bytes is None else shown_chunk(row.chunk_bytes),
            f"{shown(row.figure)} {row.unit}",
            f"{shown(row.limit)} {row.unit}\n[dim]{escape(row.limit_is)}[/]",
            f"[bold]{row.ratio:.2f}[/]",
            f"{row.spread[0]:.2f} to {row.spread[1]:.2f}",
        )
    console.print(table)
    console.print()
    for line in footnotes(figures):
        console.print(line, highlight=False)


def footnotes(figures: Figures) -> list[str]:
    """Return lines that say how to read the table, and describe the machine."""
    machine = figures.machine
    rounds = max((row.rounds for row in figures.rows), default=0)
    file_system = "" if machine.file_system is None else f", {escape(machine.file_system)}"
    lines = [
        f"Medians of {rounds} rounds in turn; ratio: 1 is at the limit, less is worse; spread: of the rounds' ratios.",
        f"{escape(machine.processor)}, {machine.processors} processors, {decimal(machine.memory_bytes)}, "
        f"{escape(machine.kernel)}, Python {machine.python}{file_system}",
        f"load of the machine {machine.load_before[0]:.2f} before, {machine.load_after[0]:.2f} after; "
        f"{figures.seconds:.0f} s",
    ]
    if not figures.complete:
        lines.append("[yellow]This run was cut short: the figures are those of the completed rounds.[/]")
    if machine.load_before[0] > BUSY_LOAD * machine.processors:
        lines.append("[yellow]The machine was busy before the run: other processes may have slowed it.[/]")
    return lines


def shown_settings(settings: Mapping[str, Setting]) -> str:
    """Format settings: `files, direct, depth 4, no fsync`."""
    return ", ".join(_setting(name.replace("_", " "), value) for name, value in settings.items() if value is not None)


def _setting(name: str, value: Setting) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:,}" if isinstance(value, int) else str(value)


def shown_chunk(size_bytes: int) -> str:
    return f"{size_bytes >> 20:,} MiB" if size_bytes % (1 << 20) == 0 else f"{size_bytes / 1_024:,.4g} KiB"


def shown(value: float) -> str:
    """Format a figure with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
