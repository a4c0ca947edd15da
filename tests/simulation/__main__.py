"""`python -m tests.simulation`: many seeds, over all cores, and what they met.

The exit status is 1 if a seed failed, with the command that shows it again, and 130 after Ctrl-C, with the report of
the seeds that were run.
"""

import os
import time
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.simulation.host import simulate as simulate_host
from tests.simulation.world import Summary, quiet, run_seeds, simulate

SEEDS_MAX = 10_000_000  # They take some hours of forty cores.
FIRST_MAX = (1 << 63) - 1 - SEEDS_MAX  # A tier takes no larger seed.
SEEDS_A_JOB = 50  # About a second's work: a progress bar moves, and a job costs nothing beside it.
FAILURES_SHOWN = 20


def main(
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS_MAX, help="How many to run.")] = 1_000,
    first: Annotated[int, typer.Option(min=0, max=FIRST_MAX, help="The first of them; the others follow it.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
    hosts: Annotated[bool, typer.Option("--hosts", help="Several engines each, sharing a pool.")] = False,
) -> None:
    """Run whole engines, or hosts of several, in virtual time under seeded faults, and print what they met."""
    begun, total, console = time.monotonic(), Summary(), Console()
    work = partial(run_seeds, simulate=simulate_host if hosts else simulate)
    starts = range(first, first + seeds, SEEDS_A_JOB)
    batches = [range(start, min(start + SEEDS_A_JOB, first + seeds)) for start in starts]
    with get_context("spawn").Pool(jobs, quiet) as pool, suppress(KeyboardInterrupt):
        for summary in track(pool.imap_unordered(work, batches), "seeds", len(batches), console=Console(stderr=True)):
            total.add(summary)
    table = Table("what", "how often", title=f"{total.seeds:,} seeds, {len(total.failures):,} failed")
    table.columns[1].justify = "right"
    table.add_row("seeds a minute", f"{60 * total.seeds / (time.monotonic() - begun):,.0f}")
    table.add_row("hours of virtual time", f"{total.virtual_s / 3_600:,.1f}")
    for what, count in sorted(total.counts.items()):
        table.add_row(what, f"{count:,}")
    console.print(table)
    for failure in total.failures[:FAILURES_SHOWN]:
        console.print(failure, markup=False, highlight=False)
    raise typer.Exit(130 if total.seeds < seeds else min(1, len(total.failures)))


if __name__ == "__main__":
    typer.run(main)
