"""Promises of calls: concurrency, cancellation, use of buffers, and closing.

A call is cancelled after 0, 1, 2 and 5 steps of the loop. The owner reuses the buffers at once, and checks them twice.
"""

import asyncio
import gc
import random
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from blockbuster import BlockBuster, BlockBusterFunction

from kvtier.backend import Abandoned, Backend
from kvtier.errors import BackendClosed
from kvtier.testing.conformance.lender import PATIENCE_S, Lender, Promises, begun, ended, key_of, keys_of, label, steps

BATCH_CHUNKS = 16
CANCELS_MAX = 10_000
ROUNDS = 3  # An abandoned thread may have ended before the check, but hardly three times.


class Concurrency(Promises):
    async def test_stores_at_once_all_arrive(self, backend: Backend, lender: Lender) -> None:
        """Calls on different keys do not interfere."""
        batches = [keys_of(8, start=100 * index) for index in range(12)]
        await asyncio.gather(*(lender.keep(backend, keys) for keys in batches))
        told = await asyncio.gather(*(lender.recall(backend, keys) for keys in batches))
        assert told == [[label(key) for key in keys] for keys in batches]

    async def test_of_stores_of_one_key_at_once_one_whole_chunk_wins(self, backend: Backend, lender: Lender) -> None:
        """One store wins, with its whole chunk."""
        versions = range(1, 9)
        for number in range(4):
            keys = keys_of(4, start=10 * number)
            await asyncio.gather(*(lender.keep(backend, keys, version) for version in versions))
            told = await lender.recall(backend, keys)
            assert all(chunk in map(label, [key] * 8, versions) for key, chunk in zip(keys, told, strict=True)), told

    async def test_a_load_beside_a_store_or_a_delete_is_whole_or_missing(
        self, backend: Backend, lender: Lender
    ) -> None:
        """A reader gets the old chunk, the new one, or none: never half of each. A chunk is deleted as a whole."""
        keys = keys_of(4)
        whole = {"ChunkMissing", *(label(key, version) for key in keys for version in range(4))}
        for version in range(4):
            for call in (lender.keep(backend, keys), lender.keep(backend, keys, version), backend.delete(keys)):
                loads = [lender.recall(backend, keys) for _ in range(6)]
                told = await asyncio.gather(*loads[:2], _nothing(call), *loads[2:])
                assert not {chunk for chunks in told for chunk in chunks} - whole
            assert await lender.recall(backend, keys) == ["ChunkMissing"] * 4

    async def test_one_chunk_goes_into_many_buffers_at_once(self, backend: Backend, lender: Lender) -> None:
        """Concurrent loads of one key all get it."""
        await lender.keep(backend, [key_of(1)])
        told = await asyncio.gather(*(lender.recall(backend, [key_of(1)]) for _ in range(16)))
        assert told == [[label(key_of(1))]] * 16

    async def test_in_a_throng_every_chunk_is_whole(self, backend: Backend, lender: Lender) -> None:
        """Among concurrent operations on a few keys, each load returns a chunk that was stored under its key."""
        rng = random.Random(0)
        keys = keys_of(6)

        async def load(some: list[int]) -> None:
            for number, chunk in zip(
                some, await lender.recall(backend, [keys[number] for number in some]), strict=True
            ):
                assert chunk in {"ChunkMissing", *(label(keys[number], version) for version in range(40))}

        async def act(turn: int) -> None:
            some = rng.sample(range(6), 3)
            match turn % 4:
                case 0:
                    await lender.keep(backend, [keys[number] for number in some], turn)
                case 1 if turn % 8 == 1:
                    await backend.delete([keys[number] for number in some])
                case 2 if turn % 8 == 2:
                    assert len(await backend.probe(keys)) == 6
                case _:
                    await load(some)

        await asyncio.gather(*map(act, range(40)))


async def _nothing(call: Awaitable[None]) -> list[str]:
    """Run a call among loads; it returns no chunk."""
    await call
    return []


after_steps = pytest.mark.parametrize("after", [0, 1, 2, 5])


class Cancellation(Promises):
    @after_steps
    async def test_a_cancelled_load_leaves_its_buffers_alone(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """After a cancelled load has raised, the tier does not write into its buffers."""
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
        """After a cancelled store has raised, the tier does not read its buffers. Each chunk is stored or is not."""
        for number in range(ROUNDS):
            keys = keys_of(BATCH_CHUNKS, start=100 * number)
            await lender.keep(backend, keys[::2])
            writes = lender.writes(keys, version=1)
            await _cancel(backend.store(writes), after)
            await self.look_later(lender, [write.row for write in writes])
            for index, told in enumerate(await lender.recall(backend, keys)):
                old = "ChunkMissing" if index % 2 else label(keys[index])
                assert told in (old, label(keys[index], 1))

    @pytest.mark.parametrize("operation", ["load", "store"])
    async def test_a_call_cancelled_again_and_again_still_waits(
        self, backend: Backend, lender: Lender, operation: str
    ) -> None:
        """A second cancellation does not end the wait, either."""
        keys = keys_of(BATCH_CHUNKS)
        await lender.keep(backend, keys)
        if operation == "load":
            reads = lender.reads(keys)
            rows, call = [read.into for read in reads], backend.load(reads)
        else:
            writes = lender.writes(keys, version=1)
            rows, call = [write.row for write in writes], backend.store(writes)
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
    async def test_a_cancelled_probe_or_delete_leaves_a_tier_that_works(
        self, backend: Backend, lender: Lender, after: int
    ) -> None:
        """A cancelled probe changes nothing; a cancelled delete has deleted each key or not."""
        keys = keys_of(BATCH_CHUNKS)
        await lender.keep(backend, keys)
        await _cancel(backend.probe(keys), after)
        assert list(await backend.probe(keys)) == [True] * len(keys)
        await _cancel(backend.delete(keys), after)
        told = await lender.recall(backend, keys)
        assert all(chunk in (label(key), "ChunkMissing") for key, chunk in zip(keys, told, strict=True)), told
        await backend.delete(keys)
        assert list(await backend.probe(keys)) == [False] * len(keys)

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
        """Calls on the same few keys, each cancelled somewhere: no buffer is touched later, and no chunk is torn.

        A cancelled call that has raised does not count as running.
        """
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
            await self.look_later(lender, [*(write.row for write in writes), *(read.into for read in reads)])

        await asyncio.gather(*map(act, range(42)))
        for key, told in zip(keys, await lender.recall(backend, keys), strict=True):
            assert told in {"ChunkMissing", *(label(key, turn) for turn in range(42))}
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)


async def _cancel(call: Coroutine[Any, Any, Any], after: int) -> None:
    """Cancel a call after some steps, and wait for its end. A cancellation before its end must be the result."""
    task = asyncio.create_task(call)
    await steps(after)
    in_time = task.cancel()
    await ended(task)
    assert task.cancelled() or not in_time, f"cancelled after {after} steps, but it answered {task}"
    if not in_time:
        task.result()


# Calls of a tier on files that blockbuster does not watch by default.
ALSO_BLOCKING = (
    *("builtins.open", "os.open", "os.pread", "os.preadv", "os.pwrite", "os.pwritev", "os.readv", "os.writev"),
    *("os.fsync", "os.fdatasync", "os.ftruncate", "os.truncate", "os.utime"),
    *("os.posix_fallocate", "os.copy_file_range"),
)


class GoodManners(Promises):
    async def test_no_call_blocks_the_loop(self, backend: Backend, lender: Lender) -> None:
        """Work that may wait for a device or a lock runs in other threads."""
        keys = keys_of(8)
        writes, reads = lender.writes(keys), lender.reads([*keys, key_of(9)])
        with _nothing_may_block():
            await backend.store(writes)
            await backend.probe(keys)
            await backend.load(reads)
            await backend.store(writes)
            await backend.delete([*keys[:4], key_of(9)])
            await asyncio.gather(backend.store(writes), backend.load(reads), backend.delete(keys))
            await backend.aclose(PATIENCE_S)

    async def test_what_is_stored_is_a_copy(self, backend: Backend, lender: Lender) -> None:
        """The tier only reads the buffers of a store. After `store` has answered, the owner may reuse them."""
        keys = keys_of(8)
        writes = lender.writes(keys)
        assert list(await backend.store(writes)) == [None] * 8
        assert [lender.identify(write.row) for write in writes] == [label(key) for key in keys]
        for _, block in writes:
            block[:] = lender.chunk(key_of(99))
        assert await lender.recall(backend, keys) == [label(key) for key in keys]

    async def test_what_is_loaded_is_a_copy(self, backend: Backend, lender: Lender) -> None:
        """After `load` has answered, the owner may write into the buffers without changing the tier."""
        keys = keys_of(8)
        await lender.keep(backend, keys)
        reads = lender.reads(keys)
        assert list(await backend.load(reads)) == [None] * 8
        for _, into in reads:
            into[:] = lender.chunk(key_of(99))
        assert await lender.recall(backend, keys) == [label(key) for key in keys]
        await lender.keep(backend, keys, version=1)
        assert [lender.identify(read.into) for read in reads] == [label(key_of(99))] * 8

    async def test_no_buffer_is_kept_and_nothing_beside_it_is_written(self, backend: Backend, lender: Lender) -> None:
        """After a call has answered, the tier has no reference to its buffers: their memory can be unmapped.

        The rows before and after a lent one belong to other requests. A thread may need a moment to release its last
        arguments. An idle one must not keep them.
        """
        keys = keys_of(8)
        await lender.keep(backend, keys)
        assert len(await lender.recall(backend, [*keys, key_of(9)])) == 9
        await lender.keep(backend, keys, version=1)
        await asyncio.gather(*(lender.recall(backend, keys) for _ in range(4)))
        assert lender.guards_are_intact()
        gc.collect()
        for patience in range(8):
            if lender.take_back():
                return
            await asyncio.sleep(self.settle_s * 2**patience)
            gc.collect()
        assert lender.take_back(), "a view of a lent row is still in use"


@contextmanager
def _nothing_may_block() -> Generator[None]:
    """Make blocking calls on the loop raise `blockbuster.BlockingError`."""
    watch = BlockBuster()
    watch.functions |= {name: BlockBusterFunction(None, name) for name in ALSO_BLOCKING}
    watch.activate()
    try:
        yield
    finally:
        watch.deactivate()


class TheEnd(Promises):
    async def test_a_closed_tier_refuses_every_call(self, backend: Backend, lender: Lender) -> None:
        """A closed tier raises `BackendClosed`, whatever it holds. `aclose` may be called again, and concurrently."""
        await lender.keep(backend, [key_of(0)])
        assert await asyncio.gather(*(backend.aclose(PATIENCE_S) for _ in range(2))) == [Abandoned(0)] * 2
        assert await backend.aclose(0) == Abandoned(0)
        keys = [key_of(0)]
        reads, writes = lender.reads(keys), lender.writes(keys)
        for call in (backend.probe(keys), backend.load(reads), backend.store(writes), backend.delete(keys)):
            with pytest.raises(BackendClosed):
                await call

    async def test_closing_waits_for_what_is_under_way_and_refuses_new_calls(
        self, backend: Backend, lender: Lender
    ) -> None:
        """Calls that began before `aclose` are answered as usual. It refuses from its first step, not from its last."""
        keys, others = keys_of(32), keys_of(32, start=100)
        await lender.keep(backend, keys)
        reads = lender.reads(keys)
        load, store = await begun(backend.load(reads)), await begun(backend.store(lender.writes(others)))
        closing = await begun(backend.aclose(PATIENCE_S))
        with pytest.raises(BackendClosed):
            await backend.load(lender.reads([key_of(0)]))
        for task in (closing, load, store):
            await ended(task)
        assert closing.result() == Abandoned(0)
        assert lender.told(reads, load.result()) == [label(key) for key in keys]
        assert list(store.result()) == [None] * 32

    async def test_closing_without_patience_says_what_it_leaves(self, backend: Backend, lender: Lender) -> None:
        """Without patience `aclose` answers at once: buffers are out of use, or their calls are counted as left.

        Calls that were left end by themselves, and the next `aclose` counts none.
        """
        keys = keys_of(32)
        await lender.keep(backend, keys)
        batches = [lender.reads(keys) for _ in range(3)]
        loads = [await begun(backend.load(reads)) for reads in batches]
        closing = asyncio.create_task(backend.aclose(0))
        await ended(closing)
        left = closing.result().transfers
        assert 0 <= left <= len(loads)
        if not left:
            await self.look_later(lender, [read.into for reads in batches for read in reads])
        for load in loads:
            await ended(load)
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)

    async def test_a_cancelled_close_can_be_called_again(self, backend: Backend, lender: Lender) -> None:
        """A cancelled `aclose` has closed the tier."""
        store = await begun(backend.store(lender.writes(keys_of(32))))
        closing = await begun(backend.aclose(PATIENCE_S))
        closing.cancel()
        await ended(closing)
        with pytest.raises(BackendClosed):
            await backend.probe([key_of(0)])
        assert await backend.aclose(PATIENCE_S) == Abandoned(0)
        await ended(store)
