"""`python -m kvtier.testing.simulation`: many seeds, over all cores, and what they met.

Exit status 1 if a seed failed, with the command that shows it again; 3 if a process was lost with its seeds; 130 after
Ctrl-C, with the report of what was run.
"""

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvtier.backend import backend_class
from kvtier.errors import ConfigError
from kvtier.policies import policy_class
from kvtier.testing.simulation.many import Tally, quiet, tallies
from kvtier.testing.simulation.scenario import Subject

FAILURES_SHOWN = 20


def main(
    seeds: Annotated[int, typer.Option(min=1, help="How many to run.")] = 1_000,
    first: Annotated[int, typer.Option(min=0, help="The first of them; the others follow it.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    tier: Annotated[str, typer.Option(help="JSON of a tier's type and options, in place of the dummy tiers.")] = "",
    durable: Annotated[bool, typer.Option(help="Expect that tier to keep its chunks over a crash.")] = False,
    policy: Annotated[str, typer.Option(help="An eviction policy in place of all: a name or module:Class.")] = "",
    json_path: Annotated[str, typer.Option("--json", help="Write the figures here.")] = "",
) -> None:
    """Run whole engines in virtual time under seeded faults, and say what they met."""
    subject = _subject(tier, policy, durable=durable)
    begun = time.monotonic()
    try:
        tally, interrupted = _run(range(first, first + seeds), jobs, subject)
    except BrokenProcessPool:
        typer.echo("A process that ran seeds was killed, or crashed: with less memory, fewer --jobs may do.", err=True)
        raise typer.Exit(3) from None
    seconds = time.monotonic() - begun
    _report(tally, seconds)
    if json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(_figures(tally, seconds), file, indent=2)
    raise typer.Exit(130 if interrupted else min(1, len(tally.failures)))


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


def _run(seeds: range, jobs: int, subject: Subject) -> tuple[Tally, bool]:
    """Run the seeds in processes; what was done before a Ctrl-C counts."""
    total = Tally()
    columns = (TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet) as pool,
    ):
        bar = progress.add_task("", total=len(seeds))
        try:
            for tally in tallies(pool, seeds, 2 * jobs, subject):
                total.add(tally)
                progress.advance(bar, tally.seeds)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            return total, True
    return total, False


def _figures(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
        "seeds": tally.seeds,
        "failures": tally.failures,
        "seconds": round(seconds, 3),
        "seeds_per_minute": round(60 * tally.seeds / seconds),
        "virtual_hours": round(tally.virtual_s / 3_600, 3),
        "counts": dict(sorted(tally.counts.items())),
    }


def _report(tally: Tally, seconds: float) -> None:
    console = Console()
    table = Table("what", "how often", title=f"{tally.seeds:,} seeds, {len(tally.failures):,} failed")
    table.columns[1].justify = "right"
    table.add_row("seeds a minute", f"{60 * tally.seeds / seconds:,.0f}")
    table.add_row("hours of virtual time", f"{tally.virtual_s / 3_600:,.1f}")
    for what, count in sorted(tally.counts.items()):
        table.add_row(what, f"{count:,}")
    console.print(table)
    for failure in tally.failures[:FAILURES_SHOWN]:
        console.print(failure, markup=False, highlight=False)


if __name__ == "__main__":
    typer.run(main)
