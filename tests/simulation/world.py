"""Seeds, from nothing to the verdict: the lives of an engine in virtual time, and what must be true after them.

Each life has an event loop of its own and is audited at every step. Between two lives nothing stays but what the tiers
keep. After the last one each tier is opened once more, without faults: what it said is stored must load, byte for byte.
"""

import asyncio
import hashlib
import logging
import signal
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from kvtier.config import TierLimits
from kvtier.errors import BackendError, KVTierError
from kvtier_backends.dummy import forget_store
from tests.simulation.audit import AuditedManager
from tests.simulation.life import PATIENCE_S, LifeUnderWay
from tests.simulation.scenario import book_name, draw
from tests.simulation.turns import LongTurn, TurningLoop
from tests.simulation.witness import Truth, chunk_of, open_book

PATIENT = TierLimits(deadline_s=PATIENCE_S)  # A device as slow as it likes may show what it has.


class SimulationFailed(KVTierError):
    """Something was true that must never be. The message names the seed, and how to see it again."""


def failed(seed, error, options=""):
    again = f"python -m tests.simulation {options}--first {seed} --seeds 1"
    return SimulationFailed(f"seed {seed}: {type(error).__name__}: {error}\n  again: {again}")


class Verdict(NamedTuple):
    seed: int
    digest: str  # Of everything that was counted and of when it happened: the same seed, the same digest.
    counts: Counter[str]
    virtual_s: float

    @classmethod
    def of(cls, seed, counts, times):
        story = repr((sorted(counts.items()), times)).encode()
        return cls(seed, hashlib.sha256(story).hexdigest()[:16], counts, sum(times))


def errors_of(loop):
    """Return a list to which the loop adds what no task raises."""
    errors = []
    loop.set_exception_handler(
        lambda _, context: errors.append(context.get("exception") or AssertionError(context["message"]))
    )
    return errors


def simulate(seed):
    """Run one seed. Raises `SimulationFailed` if any promise was broken."""
    try:
        return _simulate(seed)
    except SimulationFailed as error:
        if isinstance(error.__cause__, LongTurn):
            return _simulate(seed)
        raise


def _simulate(seed):
    scenario = draw(seed)
    with ExitStack() as open_books:
        tiers = range(len(scenario.config.secondary_tiers))
        books = [open_books.enter_context(open_book(book_name(seed, index))) for index in tiers]
        world = _World(scenario, books)
        try:
            world.live()
            world.check_promises()
        except Exception as error:
            raise failed(seed, error) from error
        finally:
            world.clear()
        return world.verdict()


@dataclass
class Summary:
    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, other):
        self.seeds += other.seeds
        self.counts.update(other.counts)
        self.virtual_s += other.virtual_s
        self.failures += other.failures


def run_seeds(seeds, simulate=simulate):
    summary = Summary()
    for seed in seeds:
        summary.seeds += 1
        try:
            verdict = simulate(seed)
        except SimulationFailed as error:
            summary.failures.append(str(error))
        else:
            summary.counts.update(verdict.counts)
            summary.virtual_s += verdict.virtual_s
    return summary


def quiet():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)


class _World:
    def __init__(self, scenario, books):
        self._scenario, self._books = scenario, books
        self._counts = Counter()
        self._times = []

    def live(self):
        for number, life in enumerate(self._scenario.lives):
            for book, strict in zip(self._books, self._scenario.strict, strict=True):
                if not strict:  # The tier may have evicted anything by its own rules, with nobody watching.
                    book.report(book.keys(Truth.PRESENT), Truth.UNSURE)
            self._run(LifeUnderWay(self._scenario, self._books, life, number, self._counts).run())
            for book in self._books:
                assert not book.violations, "; ".join(book.violations)
            self._counts[f"ended by {life.ending}"] += 1

    def check_promises(self):
        """Open each tier once more, without faults, load what it said is there, and have it forget everything."""
        for index, book in enumerate(self._books):
            self._run(self._after(index, book))

    def clear(self):
        for tier in self._scenario.config.secondary_tiers:
            forget_store(tier.options["inner"]["store"])

    def verdict(self):
        for book in self._books:
            self._counts.update(book.counts)
        return Verdict.of(self._scenario.seed, self._counts, self._times)

    def _run(self, work):
        with asyncio.Runner(loop_factory=TurningLoop) as runner:
            loop = runner.get_loop()
            errors = errors_of(loop)
            try:
                runner.run(work)
            finally:
                self._times.append(loop.time())
        for error in errors:
            if not isinstance(error, BackendError):
                raise error
        if loop.complaint:
            raise LongTurn(loop.complaint)

    async def _after(self, index, book):
        async with await AuditedManager.open(self._sound_config(index)) as engine:
            promised = sorted(book.keys(Truth.PRESENT))
            came, size_bytes = 0, self._scenario.config.chunk_bytes
            for key in promised:
                async with engine.fetch([key]) as rows:
                    assert all(row == chunk_of(key, size_bytes) for row in rows), f"wrong bytes at the end: {key.hex()}"
                    came += len(rows)
            self._counts["chunks promised"] += len(promised)
            if self._scenario.strict[index]:
                assert came == len(promised), f"{len(promised) - came} of {len(promised)} promised chunks are lost"

    def _sound_config(self, index):
        tier = self._scenario.config.secondary_tiers[index]
        inner = tier.options["inner"]
        options = {key: value for key, value in inner.items() if key != "type"}
        return replace(
            self._scenario.config,
            secondary_tiers=(replace(tier, type=inner["type"], options=options, limits=PATIENT),),
            limits=replace(self._scenario.config.limits, close_s=PATIENCE_S),
            prefill_tokens_per_s=None,  # What is not worth its load is asked for all the same.
        )
