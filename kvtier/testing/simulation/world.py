"""One seed, from nothing to the verdict: the lives of an engine in virtual time, and what must be true after them.

Each life has an event loop of its own and is audited at every step. Between two lives nothing stays but what the tiers
keep. After the last one each tier is opened once more, without faults: what it said is stored must load, byte for byte.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvtier.config import EngineConfig, TierLimits
from kvtier.errors import BackendError, KVTierError
from kvtier.keys import OffloadKey
from kvtier.testing.simulation.audit import AuditedManager, audit_quiet
from kvtier.testing.simulation.books import Book, Truth, chunk_of
from kvtier.testing.simulation.programs import Program
from kvtier.testing.simulation.scenario import Life, Scenario, Subject, book_name, draw
from kvtier.testing.simulation.scheduler import Scheduler
from kvtier.testing.simulation.witness import open_book, witnesses
from kvtier.testing.virtual_time import VirtualTimeError, VirtualTimeLoop, place

PATIENCE_S = 2_000.0  # Of virtual time: a life in which anybody still waits after that has a request that never ends.
SETTLING_S = 30.0  # Longer than any answer is believed and any breaker cools down.
PATIENT = TierLimits(deadline_s=PATIENCE_S)  # A device as slow as it likes may show what it has.

logger = logging.getLogger(__name__)


class SimulationFailed(KVTierError):
    """Something was true that must never be. The message names the seed, and how to see it again."""


class Verdict(NamedTuple):
    """What one seed came to."""

    seed: int
    digest: str  # Of everything that was counted and of when it happened: the same seed, the same digest.
    counts: Counter[str]
    virtual_s: float


def simulate(seed: int, subject: Subject | None = None) -> Verdict:
    """Run one seed. Raises `SimulationFailed` if any promise was broken."""
    scenario = draw(seed, subject or Subject())
    with ExitStack() as open_books:
        books = [open_books.enter_context(open_book(book_name(seed, index))) for index in range(_tiers(scenario))]
        world = _World(scenario, books)
        try:
            world.live()
            world.check_promises()
        except (AssertionError, VirtualTimeError) as error:
            world.clear()
            raise SimulationFailed(f"seed {seed}: {error}\n  again: {_again(seed)}") from error
        return world.verdict()


def _again(seed: int) -> str:
    return f"python -m kvtier.testing.simulation --first {seed} --seeds 1"


def _tiers(scenario: Scenario) -> int:
    return len(scenario.config.secondary_tiers)


class _World:
    """The scenario under way."""

    def __init__(self, scenario: Scenario, books: Sequence[Book]) -> None:
        self._scenario = scenario
        self._books = books
        self._counts: Counter[str] = Counter()
        self._virtual_s = 0.0
        self._times: list[float] = []

    def live(self) -> None:
        for number, life in enumerate(self._scenario.lives):
            self._restart()
            self._doubt_what_may_be_forgotten()
            self._run(self._life(life, number))
            for book in self._books:
                assert not book.violations, "; ".join(book.violations)
            self._counts[f"ended by {life.ending}"] += 1

    def check_promises(self) -> None:
        """Open each tier once more, without faults, load what it said is there, and have it forget everything."""
        self._restart()
        for index, book in enumerate(self._books):
            self._run(self._after(index, book))

    def clear(self) -> None:
        """Have the tiers of a failed seed forget everything, or it would be found in the next one's."""
        for index in range(len(self._books)):
            self._run(self._forget(index))

    def verdict(self) -> Verdict:
        for book in self._books:
            self._counts.update(book.counts)
        story = repr((sorted(self._counts.items()), self._times)).encode()
        return Verdict(self._scenario.seed, hashlib.sha256(story).hexdigest()[:16], self._counts, self._virtual_s)

    def _run(self, work: Any) -> None:
        """Run one life on a loop of its own; what its callbacks raise is raised here."""
        errors: list[BaseException] = []
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            loop = runner.get_loop()
            loop.set_exception_handler(lambda _, context: errors.extend(_errors_of(context)))
            try:
                runner.run(work)
            finally:
                self._virtual_s += loop.time()
                self._times.append(loop.time())
        if errors:
            raise errors[0]

    def _restart(self) -> None:
        """Expect nothing of tiers that keep nothing beyond their engine."""
        if not self._scenario.durable:
            for book in self._books:
                book.truth.clear()

    def _doubt_what_may_be_forgotten(self) -> None:
        """Expect what a tier may evict by its own rules to be reported anew: it may have, with nobody watching."""
        for book, strict in zip(self._books, self._scenario.strict, strict=True):
            if not strict:
                book.report(book.keys(Truth.PRESENT), Truth.DOUBTFUL)

    # One life.

    async def _life(self, life: Life, number: int) -> None:
        engine = await AuditedManager.open(self._scenario.config)
        engine.on_give_up = self._give_up
        try:
            users = self._users(engine, life, number)
            patience_s = PATIENCE_S if life.ending == "calm" else life.ends_s
            done, left = await asyncio.wait(users, timeout=patience_s, return_when=asyncio.FIRST_EXCEPTION)
            _raise_first(done)
            if life.ending == "calm":
                assert not left, f"never ends: {', '.join(place(task.get_coro()) for task in left)}"
                await self._calm_down(engine)
            elif life.ending == "close":
                await self._close(engine, users)
        finally:
            self._count(engine)
            await self._stop()

    def _users(self, engine: AuditedManager, life: Life, number: int) -> list["asyncio.Task[Any]"]:
        """Set everybody going who uses the engine in this life."""
        scheduler = Scheduler(engine, life.prompts, life.pace, resets_s=life.resets_s, seed=self._scenario.seed)
        programs = [
            Program(
                engine,
                self._scenario.documents,
                matchers,
                habits,
                f"{self._scenario.seed}, life {number}, program {index}",
                self._counts,
            )
            for index, (habits, matchers) in enumerate(life.habits)
        ]
        return [asyncio.create_task(scheduler.run()), *(asyncio.create_task(program.run()) for program in programs)]

    async def _calm_down(self, engine: AuditedManager) -> None:
        """Let nothing fail any more, wait until all is at rest, and hold the engine to account."""
        for _ in range(int(SETTLING_S)):
            for index in range(len(self._books)):
                witnesses(book_name(self._scenario.seed, index))[-1].calm()  # Again: a delayed call may hang later.
            await asyncio.sleep(1.0)
        assert await engine.drained(PATIENCE_S), "what is under way never ends"
        await asyncio.sleep(SETTLING_S)
        engine.end_step()
        audit_quiet(engine)
        self._check_beliefs(engine)
        assert await engine.aclose() == 0, "something was left behind at rest"

    def _check_beliefs(self, engine: AuditedManager) -> None:
        """Hold what the engine believes of each tier against the tier's own last words."""
        ledger, now = engine.ledger, asyncio.get_running_loop().time()
        for tier, book in zip(ledger.tiers, self._books, strict=True):
            for key, truth in book.truth.items():
                believed = tier.answer(key, bool(ledger.where.mask.get(key, 0) & tier.bit), now)
                wrong = (truth is Truth.PRESENT and believed is False) or (truth is Truth.GONE and believed is True)
                assert not wrong, (
                    f"{key.hex()} in {tier.spec.name} is {truth.value}, and the engine believes {believed}"
                )

    async def _close(self, engine: AuditedManager, users: Sequence["asyncio.Task[Any]"]) -> None:
        """Close the engine while programs use it: within its time, and nobody is left waiting."""
        loop = asyncio.get_running_loop()
        begun, close_s = loop.time(), self._scenario.config.limits.close_s
        users[0].cancel()  # The scheduler: whoever steps an engine does not step on beside its shutdown.
        await asyncio.wait(users[:1])
        await engine.aclose()
        assert loop.time() - begun <= 2 * close_s + 1.0, f"closing took {loop.time() - begun} s"
        if users[1:]:
            done, left = await asyncio.wait(users[1:], timeout=PATIENCE_S)
            _raise_first(done)
            assert not left, f"not told that the engine closed: {len(left)}"

    def _count(self, engine: AuditedManager) -> None:
        self._counts["audits"] += engine.audits
        ledger = engine.ledger
        self._counts["primary hits"] += ledger.counters.hits
        self._counts["promotions refused"] += ledger.counters.promotions_refused
        for tier in ledger.tiers:
            self._counts["tier hits"] += tier.counters.hits
            self._counts["breaker opened"] += tier.breaker.opened
            self._counts["cascades dropped"] += sum(tier.counters.dropped.values())
            self._counts.update({f"failed:{code}": chunks for code, chunks in tier.counters.failures.items()})

    async def _stop(self) -> None:
        """Stop everything where it is, as the end of a process does, and have the tiers let go of what they keep."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for index in range(len(self._books)):
            for witness in witnesses(book_name(self._scenario.seed, index))[-1:]:
                await witness.aclose(0)
                witness.count_faults()

    def _give_up(self) -> None:
        for book in self._books:
            book.give_up()

    # What must be true at the end.

    async def _after(self, index: int, book: Book) -> None:
        config = self._sound_config(index)
        async with await AuditedManager.open(config) as engine:
            promised = sorted(book.keys(Truth.PRESENT))
            came = 0
            for start in range(0, len(promised), config.rows):
                for key in promised[start : start + config.rows]:
                    came += await self._came(engine, key)
            self._counts["chunks promised"] += len(promised)
            if self._scenario.strict[index]:
                assert came == len(promised), f"{len(promised) - came} of {len(promised)} promised chunks are lost"
            await engine.delete(self._all_keys())

    async def _came(self, engine: AuditedManager, key: OffloadKey) -> bool:
        async with engine.fetch([key]) as rows:
            size_bytes = self._scenario.config.chunk_bytes
            assert all(row == chunk_of(key, size_bytes) for row in rows), f"wrong bytes at the end: {key.hex()}"
            return len(rows) == 1

    async def _forget(self, index: int) -> None:
        async with await AuditedManager.open(self._sound_config(index)) as engine:
            await engine.delete(self._all_keys())

    def _all_keys(self) -> list[OffloadKey]:
        return sorted({key for document in self._scenario.documents for key in document})

    def _sound_config(self, index: int) -> EngineConfig:
        """Describe an engine over one of the tiers, with nothing that fails."""
        tier = self._scenario.config.secondary_tiers[index]
        inner = tier.options["inner"]
        options = {key: value for key, value in inner.items() if key != "type"}
        return replace(
            self._scenario.config,
            secondary_tiers=(replace(tier, type=inner["type"], options=options, limits=PATIENT),),
            limits=replace(self._scenario.config.limits, close_s=PATIENCE_S),
        )


def _raise_first(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        error = task.exception()
        if error is not None:
            raise error


def _errors_of(context: dict[str, Any]) -> list[BaseException]:
    """Give what a loop's callback raised, but for a tier's failure that nobody heard of because of a crash."""
    error = context.get("exception")
    if isinstance(error, BackendError):
        return []
    return [error if isinstance(error, BaseException) else AssertionError(str(context.get("message")))]
