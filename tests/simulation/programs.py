"""Asyncio programs that use one engine at once: they put, fetch, stream, hold, cancel, delete and reset by their seed.

Now and then one calls many times in a row, without a pause, or awaits a fetch while it holds the rows of another.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier import EngineClosed, OffloadKey, TieringOffloadingManager, TierMatcher
from tests.simulation.witness import chunk_of


def some_hint(dice):
    return dice.choice(
        (
            {"over": True},
            {"returns_in_s": dice.uniform(0, 20), "class": f"client {dice.randint(0, 9)}"},
            {"retain_s": dice.uniform(0, 20), "priority": dice.randint(0, 99), "tokens": dice.randint(0, 100)},
            {"no_store": dice.choice((True, ["tier0"], ["nowhere"]))},
            {"over": "perhaps"},
        )
    )


class Habits(NamedTuple):
    operations: int
    weights: tuple[int, int, int, int]  # Of put, fetch, delete, reset.
    cancels: float  # Share of operations that are cancelled half-way.
    hold_s: float  # The longest that it keeps what it fetched.
    pause_s: float  # The longest between two operations.
    hints: float = 0.0  # Share of operations with a hint, good or bad, and with a call about keys after them.


@dataclass(eq=False)
class Program:
    """One of them. `documents` are prefix chains; it uses leading parts of them."""

    engine: TieringOffloadingManager
    documents: Sequence[Sequence[OffloadKey]]
    matchers: Sequence[TierMatcher] | None
    habits: Habits
    name: str
    counts: Counter[str]
    number: int = 0

    def __post_init__(self):
        self._random = random.Random(self.name)
        self._hints = random.Random(f"{self.name}, hints")  # Apart: a seed is the same story but for its hints.
        self._reads = random.Random(f"{self.name}, reads")

    async def run(self):
        operations = [self._put, self._fetch, self._delete, self._reset]
        for _ in range(self.habits.operations):
            await asyncio.sleep(self._random.uniform(0, self.habits.pause_s))
            (operation,) = self._random.choices(operations, self.habits.weights)
            cancelled_after_s = None
            if self._random.random() < self.habits.cancels:
                cancelled_after_s = self._random.choice((0.0, self._random.uniform(0, 1.0)))
            try:
                await self._do(operation(), cancelled_after_s)
                if self._hints.random() < self.habits.hints:
                    await self._do(self._tell(), cancelled_after_s)
            except EngineClosed:
                self.counts["requests told that the engine closed"] += 1
                return
            self.counts["operations"] += 1
        self._finish()

    async def _do(self, work, cancelled_after_s):
        if cancelled_after_s is None:
            await work
            return
        task = asyncio.ensure_future(work)
        await asyncio.wait({task}, timeout=cancelled_after_s)
        if not task.done():
            self.counts["cancelled"] += 1
            task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _put(self):
        keys, size_bytes = self._some_keys(), self.engine.config.chunk_bytes
        put = await self.engine.put(
            keys, [chunk_of(key, size_bytes) for key in keys], request_id=self._begin(), hint=self._hint()
        )
        self._finish()
        assert 0 <= put <= len(keys)
        self.counts["chunks put"] += put

    async def _fetch(self):
        keys = self._some_keys()
        read = self._reads.choices((self._stream, self._insist, None), (2, 1, 7))[0]
        if read is not None:
            await read(keys)
        nested = self._some_keys() if self._reads.random() < 0.1 else ()
        async with self.engine.fetch(keys, request_id=self._begin(), hint=self._hint()) as rows:
            self._compare(keys, rows)
            if nested:
                async with self.engine.fetch(nested) as more:
                    self._compare(nested, more)
            await asyncio.sleep(self._random.uniform(0, self.habits.hold_s))
            self._compare(keys, rows)
            self.counts["chunks fetched"] += len(rows)
        self._finish()

    async def _stream(self, keys):
        done, leaves = 0, self._reads.random() < 0.2
        async for rows in self.engine.stream(keys):
            self._compare(keys[done:], rows)
            done += len(rows)
            self.counts["chunks streamed"] += len(rows)
            if leaves:
                return
            await asyncio.sleep(self._reads.uniform(0, self.habits.hold_s))
            self._compare(keys[done - len(rows) :], rows)

    async def _insist(self, keys):
        loop = asyncio.get_running_loop()
        calls, begun = self._reads.choice((2, 20)), loop.turns
        for _ in range(calls):
            self.counts["chunks found by insisting"] += len(await self.engine.get(keys))
        assert loop.turns - begun >= calls - 1, f"{calls} calls in {loop.turns - begun} turns of the loop"

    async def _tell(self):
        document = self._hints.choice(self.documents)
        keys = document[: self._hints.randint(0, len(document))]
        match self._hints.choice(("prefetch", "demote", "forget", "retain")):
            case "prefetch":
                self.counts["chunks prefetched"] += await self.engine.prefetch(keys)
            case "demote":
                self.counts["chunks demoted"] += self.engine.demote(keys)
            case "forget":
                self.counts["chunks forgotten"] += self.engine.forget(keys[-2:])
            case _:
                seconds, priority = self._hints.uniform(0.1, 10.0), self._hints.randint(0, 99)
                self.counts["chunks retained"] += self.engine.retain(keys, seconds, priority=priority)

    def _hint(self):
        return some_hint(self._hints) if self._hints.random() < self.habits.hints else None

    async def _delete(self):
        await self.engine.delete(self._some_keys()[-2:])

    async def _reset(self):
        await self.engine.reset()
        self.counts["resets"] += 1

    def _begin(self):
        self._finish()  # What a cancelled operation left.
        if self.matchers is None:
            return None
        self.number += 1
        self.engine.steps.on_new_request(self._request_id, self.matchers)
        return self._request_id

    def _finish(self):
        self.engine.steps.on_request_finished(self._request_id)

    @property
    def _request_id(self):
        return f"{self.name} {self.number}"

    def _some_keys(self):
        document = self._random.choice(self.documents)
        return document[: self._random.randint(1, len(document))]

    def _compare(self, keys, rows):
        for key, row in zip(keys, rows, strict=False):
            self.counts["bytes fetched"] += len(row)
            assert row == chunk_of(key, self.engine.config.chunk_bytes), f"wrong bytes: {key.hex()}"
