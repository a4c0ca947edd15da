"""Cancellation: a cancelled call comes back when its buffers are out of use, and says that it was cancelled.

Nobody can look into a tier to see what it is doing when it is cancelled, so it is tried after 0, 1, 2 and 5 steps of
the loop. The owner of the buffers then does what an engine does: it uses them for something else, at once. Then it
looks again, and again after a while.
"""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from kvtier.backend import Abandoned, Backend
from kvtier.testing.conformance.lender import Lender, keys_of, label
from kvtier.testing.conformance.promises import PATIENCE_S, Promises, begun, ended, steps

BATCH_CHUNKS = 16
CANCELS_MAX = 10_000
ROUNDS = 3  # A thread that was abandoned may happen to be done before anybody looks; hardly three times.

after_steps = pytest.mark.parametrize("after", [0, 1, 2, 5])


class Cancellation(Promises):
    @after_steps
    async def test_a_cancelled_load_leaves_its_buffers_alone(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """When a cancelled load has raised, nobody writes into its buffers any more."""
        keys = keys_of(BATCH_CHUNKS)
        await lender.keep(backend, keys)
        for _ in range(ROUNDS):
            reads = lender.reads(keys)
            await _cancel(backend.load(reads), after)
            await self.look_later(lender, [read.into for read in reads])
        assert await lender.recall(backend, keys) == [label(key) for key in keys]

    @after_steps
    async def test_a_cancelled_store_leaves_its_buffers_alone(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """When a cancelled store has raised, nobody reads its buffers any more, and each chunk is stored or is not."""
        for number in range(ROUNDS):
            keys = keys_of(BATCH_CHUNKS, start=100 * number)
            await lender.keep(backend, keys[::2])
            writes = lender.writes(keys, version=1)
            await _cancel(backend.store(writes), after)
            await self.look_later(lender, [write.block for write in writes])
            for index, told in enumerate(await lender.recall(backend, keys)):
                old = "BlockMissing" if index % 2 else label(keys[index])
                assert told in (old, label(keys[index], 1))

    @pytest.mark.parametrize("operation", ["load", "store"])
    async def test_a_call_cancelled_again_and_again_still_waits(
        self, backend: Backend, lender: Lender, operation: str
    ) -> None:
        """The second cancellation is no reason to give up waiting that the first was not."""
        keys = keys_of(BATCH_CHUNKS)
        await lender.keep(backend, keys)
        if operation == "load":
            reads = lender.reads(keys)
            rows, call = [read.into for read in reads], backend.load(reads)
        else:
            writes = lender.writes(keys, version=1)
            rows, call = [write.block for write in writes], backend.store(writes)
        task = await begun(call)
        for attempt in range(CANCELS_MAX):
            if not task.cancel():
                break
            await asyncio.sleep(0 if attempt < 10 else PATIENCE_S / CANCELS_MAX)
        await ended(task)
        await self.look_later(lender, rows)
        told = await lender.recall(backend, keys)
        assert all(chunk in (label(key), label(key, 1)) for key, chunk in zip(keys, told, strict=True)), told

    @after_steps
    async def test_a_cancelled_delete_has_deleted_each_key_or_not(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """Half a delete leaves whole chunks, and a tier that works."""
        keys = keys_of(BATCH_CHUNKS)
        await lender.keep(backend, keys)
        await _cancel(backend.delete(keys), after)
        told = await lender.recall(backend, keys)
        assert all(chunk in (label(key), "BlockMissing") for key, chunk in zip(keys, told, strict=True)), told
        await backend.delete(keys)
        assert list(await backend.probe(keys)) == [False] * len(keys)

    @after_steps
    async def test_a_cancelled_probe_leaves_a_tier_that_works(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """Whoever asked and went away has changed nothing."""
        keys = keys_of(BATCH_CHUNKS)
        await lender.keep(backend, keys)
        await _cancel(backend.probe(keys), after)
        assert list(await backend.probe(keys)) == [True] * len(keys)

    @after_steps
    async def test_a_cancelled_call_costs_the_others_nothing(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """Calls on the same keys at the same time are each answered in full when one of them is cancelled."""
        keys, others = keys_of(BATCH_CHUNKS), keys_of(BATCH_CHUNKS, start=100)
        await lender.keep(backend, keys)
        load = asyncio.create_task(lender.recall(backend, keys))
        store = asyncio.create_task(lender.keep(backend, others))
        cancelled = [backend.load(lender.reads(keys)), backend.store(lender.writes(others))]
        await asyncio.gather(*(_cancel(call, after) for call in cancelled))
        await ended(load)
        await ended(store)
        assert load.result() == [label(key) for key in keys]
        assert store.result() is None
        assert await lender.recall(backend, others) == [label(key) for key in others]

    async def test_in_a_throng_of_cancelled_calls_every_chunk_is_whole(self, backend: Backend, lender: Lender) -> None:
        """Calls on the same few keys, each cancelled somewhere: no buffer is touched later, and no chunk is torn."""
        rng = random.Random(0)
        keys = keys_of(6)
        await lender.keep(backend, keys)

        async def act(turn: int) -> None:
            some = rng.sample(keys, 3)
            writes, reads = lender.writes(some, turn), lender.reads(some)
            if turn % 7 == 0:
                call: Coroutine[Any, Any, Any] = backend.delete(some)
            else:
                call = backend.load(reads) if turn % 2 else backend.store(writes)
            await _cancel(call, after=rng.randrange(8))
            await self.look_later(lender, [*(write.block for write in writes), *(read.into for read in reads)])

        await asyncio.gather(*map(act, range(42)))
        for key, told in zip(keys, await lender.recall(backend, keys), strict=True):
            assert told in {"BlockMissing", *(label(key, turn) for turn in range(42))}

    async def test_a_tier_ends_as_usual_after_cancelled_calls(self, backend: Backend, lender: Lender) -> None:
        """A cancelled call that has raised is no call under way."""
        keys = keys_of(BATCH_CHUNKS)
        for after in (0, 1, 2, 5):
            await _cancel(backend.store(lender.writes(keys)), after)
            await _cancel(backend.load(lender.reads(keys)), after)
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)


async def _cancel(call: Coroutine[Any, Any, Any], after: int) -> None:
    """Cancel a call after so many steps, and wait until it has ended; a cancel that came in time must be its end."""
    task = asyncio.create_task(call)
    await steps(after)
    in_time = task.cancel()
    await ended(task)
    assert task.cancelled() or not in_time, f"cancelled after {after} steps, but it answered {task}"
    if not in_time:
        task.result()
