"""The screen of a benchmark: a bar on stderr while it runs, a table on stdout at its end."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.tools.bench.figures import Figures, Row, Setting

BUSY_LOAD = 0.5  # Of each processor, by others: from there on figures are worth less than their spread says.


@contextmanager
def bench_bar(title: str, steps: int) -> Generator[Callable[[], None]]:
    """Give what is to be called after each measurement. There is no bar where nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=steps)
        yield lambda: progress.advance(task)


def print_figures(figures: Figures) -> None:
    """Print the rows as a table, and under it on what they were measured."""
    console = Console()
    table = Table("operation")
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
    for line in footnotes(figures):
        console.print(line, highlight=False)


def footnotes(figures: Figures) -> list[str]:
    """Say how to read the table, and on what it was measured."""
    machine = figures.machine
    rounds = max((row.rounds for row in figures.rows), default=0)
    lines = [
        f"Medians of {rounds} rounds in turn; ratio: 1 is at the limit, less is worse; spread: of the rounds' ratios.",
        f"{escape(machine.processor)}, {machine.processors} processors, {decimal(machine.memory_bytes)}, "
        f"{escape(machine.kernel)}, Python {machine.python}"
        + ("" if machine.file_system is None else f", {escape(machine.file_system)}"),
        f"load of the machine {machine.load_before[0]:.2f} before, {machine.load_after[0]:.2f} after; "
        f"{figures.seconds:.0f} s",
    ]
    if machine.load_before[0] > BUSY_LOAD * machine.processors:
        lines.append("[yellow]The machine was busy before this began: others may have taken what is missing.[/]")
    return lines


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


def label_of(row: Row) -> str:
    """Name a row in one line."""
    chunk = "" if row.chunk_bytes is None else f", {shown_chunk(row.chunk_bytes)}"
    settings = shown_settings(row.settings)
    return f"{row.operation}{chunk}" + (f" ({settings})" if settings else "")
