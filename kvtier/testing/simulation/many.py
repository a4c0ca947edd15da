"""Many seeds: each to its end whatever became of the one before, in this process or over several."""

import logging
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

from kvtier.testing.simulation.scenario import Subject
from kvtier.testing.simulation.world import SimulationFailed, simulate

SEEDS_A_JOB = 50  # About a second's work: a progress bar moves, and a job costs nothing beside it.


class Tally:
    """What some seeds came to."""

    def __init__(self) -> None:
        self.seeds = 0
        self.counts: Counter[str] = Counter()
        self.virtual_s = 0.0
        self.failures: list[str] = []

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.counts.update(other.counts)
        self.virtual_s += other.virtual_s
        self.failures += other.failures


def run_seeds(seeds: range, subject: Subject) -> Tally:
    """Run some seeds, one after the other."""
    tally = Tally()
    for seed in seeds:
        tally.seeds += 1
        try:
            verdict = simulate(seed, subject)
        except SimulationFailed as error:
            tally.failures.append(str(error))
        else:
            tally.counts.update(verdict.counts)
            tally.virtual_s += verdict.virtual_s
    return tally


def tallies(pool: ProcessPoolExecutor, seeds: range, queued: int, subject: Subject) -> Iterator[Tally]:
    """Give the tallies as they come, with few jobs queued: a Ctrl-C need not wait for many."""
    batches = iter(seeds[start : start + SEEDS_A_JOB] for start in range(0, len(seeds), SEEDS_A_JOB))
    running: set[Future[Tally]] = set()
    while True:
        for batch in batches:
            running.add(pool.submit(run_seeds, batch, subject))
            if len(running) >= queued:
                break
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def quiet() -> None:
    """Leave Ctrl-C to the parent, and faults that were asked for out of the logs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
