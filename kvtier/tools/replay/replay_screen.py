"""What a replay shows: a bar on stderr while it runs, tables on stdout at its end."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.tools.replay.replay import Tally
from kvtier.tools.replay.report import Quantiles, Report
from kvtier.tools.replay.setup import Scratch
from kvtier.tools.replay.virtual import Figure, ModelPart

REMOVAL_WAIT_S = 60.0  # Two hundred thousand files take twenty seconds of a disk that has nothing else to do.
STEPS_MAX = 1_000  # Of the bar: more would not be seen.


@contextmanager
def replay_bar(tally: Tally, requests: int) -> Generator[Callable[[], None]]:
    """Give what is to be called after each request. There is no bar where nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("hit ratio {task.fields[hit_ratio]:.4f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    every = max(1, requests // STEPS_MAX)
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=5, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("replaying", total=requests, hit_ratio=0.0)

        def step() -> None:
            if tally.requests % every == 0:
                progress.update(task, completed=tally.requests, hit_ratio=tally.hit_ratio)

        yield step


@contextmanager
def temporary_directory() -> Generator[str]:
    """Give a directory that is removed at the end: while one waits, or in the background if that takes long."""
    console = Console(stderr=True)
    with Scratch() as scratch:
        yield scratch.path
        with console.status(f"removing {scratch.path}"):
            removed = scratch.remove(REMOVAL_WAIT_S)
        if not removed:
            console.print(f"{scratch.path} is being removed in the background", highlight=False, soft_wrap=True)


def print_report(report: Report) -> None:
    """Print the figures as tables, and before them in a line what matters most."""
    console = Console()
    state = "[yellow]interrupted after[/]" if report.interrupted else "replayed"
    virtual = "" if report.ttft_s is None else " of virtual time"
    wrong = "[red]" if report.wrong_chunks else "[green]"
    console.print(
        f"{escape(report.trace)}: {state} {report.requests:,} requests, {report.chunk_references:,} chunk references\n"
        f"in {report.seconds:,.1f} s{virtual} ({report.requests_per_s:,.0f} requests/s)\n"
        f"hit ratio [bold]{report.hit_ratio:.4f}[/] (best possible {report.best_hit_ratio:.4f}), "
        f"{wrong}{report.wrong_chunks:,} wrong chunks[/]",
        highlight=False,
    )
    if not (report.drained or report.interrupted):
        console.print("[yellow]some of what was stored had not reached its tiers when the time for it was over[/]")
    console.print(_tier_table(report))
    console.print(_time_table("latency", report.latency_s, 1_000, "ms"))
    if report.ttft_s is not None:
        console.print(_time_table("time to first token", report.ttft_s, 1, "s"))
    if report.model is not None:
        console.print(_model_table(report.model))


def _tier_table(report: Report) -> Table:
    table = Table("tier")
    for heading in ("hits", "share", "read", "written", "dropped", "failed"):
        table.add_column(heading, justify="right")
    for name, tier in report.tiers.items():
        share = tier.hits / report.chunk_references if report.chunk_references else 0.0
        table.add_row(
            escape(name),
            f"{tier.hits:,}",
            f"{share:.4f}",
            decimal(tier.bytes_loaded),
            decimal(tier.bytes_stored),
            _reasons(tier.dropped),
            _reasons(tier.failed),
        )
    return table


def _time_table(heading: str, times: Mapping[str, Quantiles], scale: int, unit: str) -> Table:
    table = Table(heading)
    for column in (f"p50, {unit}", f"p99, {unit}", f"mean, {unit}", "samples"):
        table.add_column(column, justify="right")
    for name, taken in times.items():
        seconds = (taken.p50, taken.p99, taken.mean)
        table.add_row(escape(name), *(f"{each * scale:,.2f}" for each in seconds), f"{taken.samples:,}")
    return table


def _model_table(model: Sequence[ModelPart]) -> Table:
    table = Table("modelled", "with", "from")
    for part in model:
        figures = ", ".join(shown_figure(name, value) for name, value in part.figures.items())
        table.add_row(escape(part.what), escape(figures), escape(part.source))
    return table


def shown_figure(name: str, value: Figure) -> str:
    """Write a figure for people, by the unit that its name ends in: `store 4.0 GB/s`, `latency 0.1 ms`."""
    words = name.replace("_bytes_", "_").replace("_per_s", "").replace("_per_day", "").removesuffix("_bytes")
    per = "/s" if name.endswith("_per_s") else "/day" if name.endswith("_per_day") else ""
    if value is None:
        shown, per = "no limit", ""
    elif "_bytes" in name and isinstance(value, int | float):
        shown = decimal(int(value))
    elif name.endswith("_s") and not per:
        words, shown = name.removesuffix("_s"), f"{value * 1_000:,.4g} ms" if isinstance(value, float) else str(value)
    elif isinstance(value, int | float):
        shown = f"{value:,g}" if isinstance(value, float) else f"{value:,}"
    else:
        shown = value if isinstance(value, str) else ", ".join(value)
    return f"{words.replace('_', ' ')} {shown}{per}"


def _reasons(counts: Mapping[str, int]) -> str:
    """Give the sum, and under it what it is made of."""
    return "\n".join([f"{sum(counts.values()):,}", *(f"{reason} {chunks:,}" for reason, chunks in counts.items())])
