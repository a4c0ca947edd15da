"""One life of an engine: it is opened and used, and ends calmly, by being closed, or by a crash.

At rest it must owe nothing and believe of each tier what the tier says; a closing must end in time and tell everybody.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.testing.virtual_time import place
from tests.simulation.audit import AuditedManager, audit_quiet
from tests.simulation.programs import Program
from tests.simulation.scenario import Life, Scenario
from tests.simulation.scheduler import Scheduler
from tests.simulation.witness import Book, Truth

PATIENCE_S = 2_000.0  # Of virtual time: a life in which anybody still waits after that has a request that never ends.
SETTLING_S = 30.0  # Longer than any answer is believed and any breaker cools down.


@dataclass(slots=True, eq=False)
class LifeUnderWay:
    scenario: Scenario
    books: Sequence[Book]  # One a tier.
    life: Life
    number: int
    counts: Counter[str]  # What was met is added to it.

    async def run(self):
        life = self.life
        engine = await AuditedManager.open(self.scenario.config)
        engine.steps.on_give_up = self._give_up
        try:
            users = self._users(engine)
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
            engine.steps.forked()  # As good as gone: a crash closes nothing.

    def _users(self, engine):
        life = self.life
        scheduler = Scheduler(engine, life.prompts, life.pace, resets_s=life.resets_s, seed=self.scenario.seed)
        programs = [
            Program(
                engine,
                self.scenario.documents,
                matchers,
                habits,
                f"{self.scenario.seed}, life {self.number}, program {index}",
                self.counts,
            )
            for index, (habits, matchers) in enumerate(life.habits)
        ]
        return [asyncio.create_task(scheduler.run()), *(asyncio.create_task(program.run()) for program in programs)]

    async def _calm_down(self, engine):
        for _ in range(int(SETTLING_S)):
            for book in self.books:
                book.witness.calm()  # Again: a delayed call may hang later.
            await asyncio.sleep(1.0)
        assert await engine.drain(PATIENCE_S), "what is under way never ends"
        await asyncio.sleep(SETTLING_S)
        await self._rest(engine)
        audit_quiet(engine)
        self._check_beliefs(engine)
        assert await engine.aclose(PATIENCE_S) == 0, "something was left behind at rest"  # All that was owed goes now.

    async def _rest(self, engine):
        ledger = engine.steps.ledger
        for _ in range(int(PATIENCE_S)):
            engine.steps.end_step()
            assert await engine.drain(PATIENCE_S), "what is under way never ends"
            if not ledger.traffic.overdue and not ledger.writeback.queued_rows:
                return
            await asyncio.sleep(1.0)
        raise AssertionError("what is owed is written for ever")

    def _check_beliefs(self, engine):
        ledger, now = engine.steps.ledger, asyncio.get_running_loop().time()
        for tier, book in zip(ledger.tiers, self.books, strict=True):
            for key, truth in book.truth.items():
                believed = tier.answer(key, bool(ledger.locations.mask.get(key, 0) & tier.bit), now)
                wrong = (truth is Truth.PRESENT and believed is False) or (truth is Truth.GONE and believed is True)
                assert not wrong, (
                    f"{key.hex()} in {tier.spec.name} is {truth.value}, and the engine believes {believed}"
                )

    async def _close(self, engine, users):
        loop = asyncio.get_running_loop()
        begun, close_s = loop.time(), self.scenario.config.limits.close_s
        users[0].cancel()  # The scheduler: whoever steps an engine does not step on beside its shutdown.
        await asyncio.wait(users[:1])
        await engine.aclose()
        assert loop.time() - begun <= 2 * close_s + 1.0, f"closing took {loop.time() - begun} s"
        if users[1:]:
            done, left = await asyncio.wait(users[1:], timeout=PATIENCE_S)
            _raise_first(done)
            assert not left, f"not told that the engine closed: {len(left)}"

    def _count(self, engine):
        self.counts["audits"] += engine.steps.audits
        ledger = engine.steps.ledger
        self.counts["primary hits"] += ledger.counters.hits
        self.counts["promotions refused"] += ledger.counters.promotions_refused
        for tier in ledger.tiers:
            self.counts["tier hits"] += tier.counters.hits
            self.counts["breaker opened"] += tier.breaker.opened
            self.counts["cascades dropped"] += sum(tier.counters.dropped.values())
            self.counts.update({f"failed:{code}": chunks for code, chunks in tier.counters.failed.items()})

    async def _stop(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for book in self.books:
            if book.witness is not None:
                await book.witness.aclose(0)
                book.witness.count_faults()

    def _give_up(self, in_flight):
        keys = [[] for _ in self.books]
        for transfer in in_flight:
            keys[transfer.tier.index] += transfer.keys
        for book, given_up in zip(self.books, keys, strict=True):
            book.give_up(given_up)


def _raise_first(tasks):
    for task in tasks:
        error = task.exception()
        if error is not None:
            raise error
