"""`python -m tests.simulation`: many seeds, over all cores, and what they met.

The exit status is 1 if a seed failed, with the command that shows it again. It is 3 if a process was lost with its
seeds, and 130 after Ctrl-C, with the report of the seeds that were run.
"""

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Annotated, Any

import typer
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.backend import backend_class
from kvtier.errors import ConfigError
from kvtier.policies import policy_class
from tests.simulation.scenario import Subject
from tests.simulation.world import Summary, quiet, summaries

SEEDS_MAX = 1_000_000_000  # They take a month of forty cores.
FIRST_MAX = (1 << 63) - 1 - SEEDS_MAX  # A tier takes no larger seed.
JOBS_MAX = 1_024  # More than any machine has cores for.
FAILURES_SHOWN = 20


def main(
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS_MAX, help="How many to run.")] = 1_000,
    first: Annotated[int, typer.Option(min=0, max=FIRST_MAX, help="The first of them; the others follow it.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=JOBS_MAX, help="Processes.")] = os.cpu_count() or 1,
    tier: Annotated[str, typer.Option(help="JSON of a tier's type and options, in place of the dummy tiers.")] = "",
    durable: Annotated[bool, typer.Option(help="Expect that tier to keep its chunks over a crash.")] = False,
    policy: Annotated[str, typer.Option(help="An eviction policy in place of all: a name or module:Class.")] = "",
    json_file: Annotated[
        typer.FileTextWrite | None,
        typer.Option("--json", lazy=False, help="Write the figures there; - is stdout, and the table goes to stderr."),
    ] = None,
) -> None:
    """Run whole engines in virtual time under seeded faults, and say what they met."""
    subject = _subject(tier, policy, durable=durable)
    begun = time.monotonic()
    try:
        summary, interrupted = _run(range(first, first + seeds), jobs, subject)
    except BrokenProcessPool:
        typer.echo("A process that ran seeds was killed, or crashed: with less memory, fewer --jobs may do.", err=True)
        raise typer.Exit(3) from None
    seconds = time.monotonic() - begun
    if json_file is not None:
        json_file.write(json.dumps(_figures(summary, seconds), indent=2) + "\n")
    to_stdout = json_file is not None and json_file.fileno() == sys.stdout.fileno()
    _report(summary, seconds, Console(stderr=to_stdout))
    raise typer.Exit(130 if interrupted else min(1, len(summary.failures)))


def _subject(tier: str, policy: str, *, durable: bool) -> Subject:
    """Read what is to be simulated; a mistake ends the command with status 2."""
    try:
        given: Any = json.loads(tier) if tier else None
        if given is not None:
            backend_class(given["type"])
        if policy:
            policy_class(policy)
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise typer.BadParameter(f"{error!r}") from error
    return Subject(given, policy or None, durable)


def _run(seeds: range, jobs: int, subject: Subject) -> tuple[Summary, bool]:
    """Run the seeds in processes; what was done before a Ctrl-C counts."""
    total = Summary()
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet) as pool,
    ):
        bar = progress.add_task("", total=len(seeds))
        try:
            for summary in summaries(pool, seeds, 2 * jobs, subject):
                total.add(summary)
                progress.advance(bar, summary.seeds)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return total, True
    return total, False


def _figures(summary: Summary, seconds: float) -> dict[str, Any]:
    return {
        "seeds": summary.seeds,
        "failures": summary.failures,
        "seconds": round(seconds, 3),
        "seeds_per_minute": round(60 * summary.seeds / seconds),
        "virtual_hours": round(summary.virtual_s / 3_600, 3),
        "counts": dict(sorted(summary.counts.items())),
    }


def _report(summary: Summary, seconds: float, console: Console) -> None:
    title = f"{summary.seeds:,} seeds, {len(summary.failures):,} failed"
    table = Table("what", "how often", title=title, box=HEAVY_HEAD if console.is_terminal else None)
    table.columns[1].justify = "right"
    table.add_row("seeds a minute", f"{60 * summary.seeds / seconds:,.0f}")
    table.add_row("hours of virtual time", f"{summary.virtual_s / 3_600:,.1f}")
    for what, count in sorted(summary.counts.items()):
        table.add_row(what, f"{count:,}")
    console.print(table)
    for failure in summary.failures[:FAILURES_SHOWN]:
        console.print(failure, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
