"""The page of benchmarks: each limit with what comes near to it, on which machine, and how sure the figures are."""

from collections.abc import Iterator, Mapping

from matplotlib.figure import Figure
from rich.filesize import decimal

from kvtier.tools.bench.figures import (
    Figures,
    Row,
    beside_each_other,
    by_chunk,
    common_settings,
    is_busy,
    shown,
    shown_chunk,
)
from kvtier.tools.pictures import draw_distributions, limit_panels, one_panel
from kvtier.tools.replay.report import Distribution
from kvtier.tools.report.page import Page, Picture, Section, Table, change, headings, picture, side_by_side

TIMES_MAX = 12  # Pictures of times: two for each tier.
READING = (
    "Every figure stands beside a limit of the same machine, measured in turn in the same run.",
    "The ratio says how near the figure comes: at 1 the limit is reached, less is worse, whatever the unit.",
    "The spread is that of the rounds' ratios, from the lowest to the highest.",
)

BUSY = "The machine was busy before this began. Others may have taken what is missing."

Runs = Mapping[str, Figures]


def bench_page(runs: Runs) -> Page:
    """Return the page of one benchmark's run, or of several beside each other, by their names."""
    first = next(iter(runs.values()))
    alone = len(runs) == 1
    title = first.command if alone else f"{first.command}: {len(runs)} runs"
    subtitle = (
        f"{first.machine.processor}, written by kvtier {first.machine.kvtier}"
        if alone
        else "Changes in brackets are against the first run. Marked rows are not the same in all runs."
    )
    return Page(title, subtitle, [_machine(runs), *_limits(runs), *_times(runs)])


def _machine(runs: Runs) -> Section:
    common = ", ".join(common_settings([row for each in runs.values() for row in each.rows]).values())
    return Section(
        "At a glance",
        words=[*READING, *([f"In all rows: {common}."] if common else [])],
        warnings=[f"{f'{name}: ' if name else ''}{BUSY}" for name, each in runs.items() if is_busy(each.machine)],
        tables=[side_by_side({name: _facts(each) for name, each in runs.items()}, wordy=True)],
    )


def _facts(figures: Figures) -> dict[str, str]:
    machine = figures.machine
    return {
        "processor": machine.processor,
        "processors": f"{machine.processors}",
        "memory": decimal(machine.memory_bytes),
        "kernel": machine.kernel,
        "Python": machine.python,
        "kvtier": machine.kvtier,
        **({} if machine.file_system is None else {"file system": machine.file_system}),
        "load before, 1 minute": f"{machine.load_before[0]:.2f}",
        "load after, 1 minute": f"{machine.load_after[0]:.2f}",
        "rounds": f"{max((row.rounds for row in figures.rows), default=0)}",
        "time that it took": f"{figures.seconds:,.0f} s",
    }


def _limits(runs: Runs) -> Iterator[Section]:
    tables = _alone(next(iter(runs.values()))) if len(runs) == 1 else _compared(runs)
    for limit, figure in limit_panels(runs):
        caption = "Parts of the limit, with the figures themselves beside the bars. Thin lines are the spread."
        yield Section(f"Beside {limit}", pictures=[picture(caption, figure)], tables=[tables[limit]], wide=True)


def _times(runs: Runs) -> Iterator[Section]:
    """Draw the times of which figures are quantiles, where there are such."""
    pictures = list[Picture]()
    for limit, lines in beside_each_other(runs).items():
        for line, rows in lines.items():
            taken = {name: row.figure_times for name, row in rows.items()}
            if len(runs) == 1:
                (row,) = rows.values()
                taken = {"the figure": row.figure_times, "its limit": row.limit_times}
            if any(taken.values()) and len(pictures) < TIMES_MAX:
                pictures.append(picture(f"{line}, beside {limit}", _drawn(taken)))
    if pictures:
        yield Section(
            "How long things took",
            words=["Each line shows which share of the times was no longer than so many milliseconds, in all rounds."],
            pictures=pictures,
        )


def _drawn(taken: Mapping[str, Distribution | None]) -> Figure:
    return one_panel(lambda axes: draw_distributions(axes, taken))


def _alone(figures: Figures) -> dict[str, Table]:
    """Return a table for each limit, with a column for each chunk size."""
    found: dict[str, Table] = {}
    for limit, lines in by_chunk(figures.rows).items():
        sizes = sorted({size for rows in lines.values() for size in rows if size is not None})
        columns: list[int | None] = [*sizes, *([None] if any(None in rows for rows in lines.values()) else [])]
        rows = [[label, *(_cell(rows.get(size)) for size in columns)] for label, rows in lines.items()]
        names = ["any" if size is None else shown_chunk(size) for size in columns]
        found[limit] = Table(["operation", *names], rows)
    return found


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return (
        f"{shown(row.figure)} {row.unit}\nof {shown(row.limit)}: {row.ratio:.2f}\n"
        f"({row.spread[0]:.2f} to {row.spread[1]:.2f})"
    )


def _compared(runs: Runs) -> dict[str, Table]:
    """Return a table for each limit, with a column for each run, and how its figures differ from the first's."""
    return {
        limit: Table(
            ["operation", *headings(runs)],
            [
                [line, *(_beside(rows.get(name), next(iter(rows.values()))) for name in runs)]
                for line, rows in lines.items()
            ],
        )
        for limit, lines in beside_each_other(runs).items()
    }


def _beside(row: Row | None, first: Row) -> str:
    if row is None:
        return ""
    return (
        f"{shown(row.figure)} {row.unit}{change(row.figure, first.figure)}\n"
        f"ratio {row.ratio:.2f} ({row.spread[0]:.2f} to {row.spread[1]:.2f})"
    )
