"""`python -m tests.simulation`: many seeds, over all cores, and what they met.

The exit status is 1 if a seed failed, with the command that shows it again, and 130 after Ctrl-C, with the report of
the seeds that were run.
"""

import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tests.simulation.world import Summary, quiet, run_seeds

SEEDS_MAX = 1_000_000_000  # They take a month of forty cores.
FIRST_MAX = (1 << 63) - 1 - SEEDS_MAX  # A tier takes no larger seed.
SEEDS_A_JOB = 50  # About a second's work: a progress bar moves, and a job costs nothing beside it.
FAILURES_SHOWN = 20


def main(
    seeds: Annotated[int, typer.Option(min=1, max=SEEDS_MAX, help="How many to run.")] = 1_000,
    first: Annotated[int, typer.Option(min=0, max=FIRST_MAX, help="The first of them; the others follow it.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Run whole engines in virtual time under seeded faults, and print what they met."""
    begun, total, interrupted = time.monotonic(), Summary(), False
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=quiet) as pool,
    ):
        bar = progress.add_task("seeds", total=seeds)
        batches = (
            range(start, min(start + SEEDS_A_JOB, first + seeds)) for start in range(first, first + seeds, SEEDS_A_JOB)
        )
        running: set[Future[Summary]] = set()
        try:
            while running or not total.seeds:
                for batch in batches:
                    running.add(pool.submit(run_seeds, batch))
                    if len(running) >= 2 * jobs:  # Few, so that a Ctrl-C does not wait for many.
                        break
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    total.add(future.result())
                progress.update(bar, completed=total.seeds)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            interrupted = True
    _report(total, time.monotonic() - begun)
    raise typer.Exit(130 if interrupted else min(1, len(total.failures)))


def _report(summary: Summary, seconds: float) -> None:
    console = Console()
    table = Table("what", "how often", title=f"{summary.seeds:,} seeds, {len(summary.failures):,} failed")
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
