"""Figures of a benchmark: rows of a figure, the limit beside it, and their ratio; the table that shows them.

A ratio says how near a figure is to its limit, whatever the unit: 1 is at the limit, 0.5 is half as good. It is the
median of each round's own ratio, not the ratio of two medians: what disturbs a machine for seconds disturbs both sides
of a round, and falls out. So sides are measured in turn, round after round, in an order that changes. With the rows
goes what they were measured on, and how busy the machine was.
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
from kvtier.tools.replay.report import Distribution

FORMAT = 1  # Of the JSON. Another number is for fields that mean something else.
ROUNDS = 7
ROUNDS_MIN = 1
ROUNDS_MAX = 10_000  # The figures of all of them are kept, and one takes a tenth of a second at the least.
TIMES = frozenset({"s", "ms", "µs", "ns"})  # Units of which less is better.
SPREAD_IS = "spread: of the rounds' ratios"
UNSURE = 2.0  # Between the lowest and the highest ratio of a round: the median then says little.
UNSURE_IS = "~: the rounds' ratios differ by more than a factor of two"
UNITS_BY_CHUNK = "MB/s and ratio by chunk size; above each group its limit, in MB/s."
BUSY_LOAD = 0.5  # Of each processor, by others: from there on figures are worth less than their spread says.

Load = tuple[float, float, float]
Setting = str | int | bool | None
Measure = Callable[[], float]
"""Do the work once and return the figure: a rate, or a time."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that figures come from. Loads are the kernel's averages over 1, 5 and 15 minutes."""

    processor: str
    processors: int  # That this process may use.
    memory_bytes: int
    kernel: str
    python: str
    kvtier: str
    file_system: str | None  # Of the directory that was measured, as mounted.
    load_before: Load
    load_after: Load


def load() -> Load:
    """Return how many processes wanted a processor, on average over the last 1, 5 and 15 minutes."""
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
    """Return `<type> on <device>`: the mount that is nearest above the directory."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return mounted_at(os.path.realpath(directory), lines)


def mounted_at(path: str, mountinfo: Iterable[str]) -> str:
    """Find a path's mount among the lines of /proc/self/mountinfo: proc(5) has their fields."""
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
    """One thing to measure. `prepare` and `tidy` run before and after it, unmeasured."""

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
    """Measure each side once a round and return its figures in order of rounds.

    A first round is not counted: it touches memory, starts threads and fills caches. `step` is called after each side.
    `measured` gets the figures of each round that was completed, also if a later one raises.
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
    """Measure, and yield the rows of the completed rounds; an error, or Ctrl-C, is raised after them."""
    measured: dict[str, list[float]] = {}
    failure: BaseException | None = None
    try:
        interleaved(sides, rounds, step=step, measured=measured)
    except BaseException as error:  # noqa: BLE001  # It is raised below.
        failure = error
    if measured:
        yield from rows(measured)
    if failure is not None:
        raise failure


def steps_of(sides: int, rounds: int) -> int:
    """Return how often `interleaved` calls its `step`."""
    return sides * (rounds + 1)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One operation: medians over the rounds, in the row's unit."""

    operation: str
    chunk_bytes: int | None
    settings: Mapping[str, Setting]
    unit: str
    figure: float
    limit: float
    limit_is: str  # What was measured as the limit.
    ratio: float
    spread: tuple[float, float]  # The lowest and the highest ratio of a round.
    figure_spread: tuple[float, float]
    limit_spread: tuple[float, float]
    rounds: int
    figure_times: Distribution | None = None  # Where the figure is a quantile: all times that it is of, of all rounds.
    limit_times: Distribution | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run found."""

    command: str
    format: int = FORMAT
    machine: Machine
    seconds: float
    complete: bool = True  # False: an error or Ctrl-C ended it; the rows are those of the rounds before.
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


def row_of(pair: Pair, measured: Mapping[str, Sequence[float]], times: Mapping[str, Distribution] | None = None) -> Row:
    """Make a row of what both sides measured, round by round; `times`: of sides whose figure is a quantile."""
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
        figure_times=None if times is None else times.get(pair.figure),
        limit_times=None if times is None else times.get(pair.limit),
    )


def rows_of(pairs: Iterable[Pair], measured: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    """Make a row of each pair."""
    return (row_of(pair, measured) for pair in pairs)


def ratio_of(figure: float, limit: float, unit: str) -> float:
    """Return how near a figure is to its limit: 1 is there, less is worse."""
    return limit / figure if unit in TIMES else figure / limit


def print_figures(figures: Figures, console: Console) -> None:
    """Print the rows as a table, and under it on what they were measured."""
    table = plain_table("operation")
    for heading in ("chunk", "figure", "limit", "ratio", "spread"):
        table.add_column(heading, justify="right")
    for row in figures.rows:
        table.add_row(
            "\n".join(filter(None, (escape(row.operation), f"[dim]{escape(shown_settings(row.settings))}[/]"))),
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


def print_by_chunk(figures: Figures, console: Console) -> None:
    """Print a group of lines for each limit, with a column for each chunk size: MB/s, and their part of the limit."""
    sizes = sorted({row.chunk_bytes for row in figures.rows if row.chunk_bytes is not None})
    table = plain_table("operation", *(f">{shown_chunk(size)}" for size in sizes))
    for limit, lines in by_chunk(figures.rows).items():
        table.add_row(f"[bold]{escape(limit)}[/]", *(_limit_cell(lines, size) for size in sizes))
        for label, rows in lines.items():
            table.add_row(f"  {escape(label)}", *(_chunk_cell(rows.get(size)) for size in sizes))
    console.print(table)
    console.print()
    common = ", ".join(common_settings(figures.rows).values())
    console.print(f"{UNITS_BY_CHUNK}{f' All: {escape(common)}.' if common else ''}", highlight=False)
    for line in footnotes(figures, UNSURE_IS):
        console.print(line, highlight=False)


def by_chunk(rows: Iterable[Row]) -> dict[str, dict[str, dict[int | None, Row]]]:
    """Return rows by limit, label and chunk size."""
    found: dict[str, dict[str, dict[int | None, Row]]] = {}
    rows = list(rows)
    label = told_apart(rows)
    for row in rows:
        found.setdefault(row.limit_is, {}).setdefault(label(row), {})[row.chunk_bytes] = row
    return found


def _limit_cell(lines: Mapping[str, Mapping[int | None, Row]], size: int) -> str:
    """Return what the limit itself reached. Where it differs from line to line, there is no one figure."""
    limits = {shown(rows[size].limit) for rows in lines.values() if size in rows}
    return f"{limits.pop()}     " if len(limits) == 1 else ""


def _chunk_cell(row: Row | None) -> str:
    if row is None:
        return ""
    unsure = row.spread[1] > UNSURE * row.spread[0]
    return f"{shown(row.figure)} {row.ratio:.2f}{'~' if unsure else ' '}"


def common_settings(rows: Iterable[Row]) -> dict[str, str]:
    """Return the settings that all rows share, as words for people, by name."""
    told = [{name: _setting(name.replace("_", " "), value) for name, value in row.settings.items()} for row in rows]
    first = told[0] if told else {}
    return {
        name: words
        for name, words in first.items()
        if all(each.get(name) == words for each in told) and words != str(None)
    }


def told_apart(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return what names a row among these: its operation, and the settings in which they differ."""
    common = common_settings(rows)

    def label(row: Row) -> str:
        own = shown_settings({name: value for name, value in row.settings.items() if name not in common})
        return f"{row.operation}, {own}" if own else row.operation

    return label


def footnotes(figures: Figures, spread_is: str = SPREAD_IS) -> list[str]:
    """Say how to read the table, and on what it was measured."""
    machine = figures.machine
    rounds = max((row.rounds for row in figures.rows), default=0)
    lines = [
        f"Medians of {rounds} rounds in turn; ratio: 1 is at the limit, less is worse; {spread_is}.",
        f"{escape(machine.processor)}, {machine.processors} processors, {decimal(machine.memory_bytes)}, "
        f"{escape(machine.kernel)}, Python {machine.python}"
        + ("" if machine.file_system is None else f", {escape(machine.file_system)}"),
        f"load of the machine {machine.load_before[0]:.2f} before, {machine.load_after[0]:.2f} after; "
        f"{figures.seconds:.0f} s",
    ]
    if not figures.complete:
        lines.append("[yellow]This run was cut short: the figures are those of the rounds before.[/]")
    if is_busy(machine):
        lines.append("[yellow]The machine was busy before this began: others may have taken what is missing.[/]")
    return lines


def is_busy(machine: Machine) -> bool:
    """Say whether others wanted the machine when a run began."""
    return machine.load_before[0] > BUSY_LOAD * machine.processors


def shown_settings(settings: Mapping[str, Setting]) -> str:
    """Write settings for people: `files, direct, depth 4, no fsync`."""
    return ", ".join(_setting(name.replace("_", " "), value) for name, value in settings.items() if value is not None)


def _setting(name: str, value: Setting) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value:,}" if isinstance(value, int) else str(value)


def shown_chunk(size_bytes: int) -> str:
    return f"{size_bytes >> 20:,} MiB" if size_bytes % (1 << 20) == 0 else f"{size_bytes / 1_024:,.4g} KiB"


def shown(value: float) -> str:
    """Write a figure with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
