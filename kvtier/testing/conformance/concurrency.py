"""Concurrency: any number of calls at once, and never half of a chunk."""

import asyncio
import random
from collections.abc import Awaitable

from kvtier.backend import Backend
from kvtier.testing.conformance.lender import Lender, key_of, keys_of, label
from kvtier.testing.conformance.promises import Promises


class Concurrency(Promises):
    async def test_stores_at_once_all_arrive(self, backend: Backend, lender: Lender) -> None:
        """Calls on different keys do not get in each other's way."""
        batches = [keys_of(8, start=100 * index) for index in range(12)]
        await asyncio.gather(*(lender.keep(backend, keys) for keys in batches))
        told = await asyncio.gather(*(lender.recall(backend, keys) for keys in batches))
        assert told == [[label(key) for key in keys] for keys in batches]

    async def test_of_stores_of_one_key_at_once_one_whole_chunk_wins(self, backend: Backend, lender: Lender) -> None:
        """Whoever wins, all of what is there is the winner's."""
        versions = range(1, 9)
        for number in range(4):
            keys = keys_of(4, start=10 * number)
            await asyncio.gather(*(lender.keep(backend, keys, version) for version in versions))
            told = await lender.recall(backend, keys)
            assert all(chunk in map(label, [key] * 8, versions) for key, chunk in zip(keys, told, strict=True)), told

    async def test_a_load_beside_a_store_is_old_or_new_or_missing(self, backend: Backend, lender: Lender) -> None:
        """A reader sees the chunk that was there, the one that comes, or none: never half of each."""
        keys = keys_of(4)
        await lender.keep(backend, keys)
        whole = {"BlockMissing", *(label(key, version) for key in keys for version in range(4))}
        for version in range(1, 4):
            calls = [lender.recall(backend, keys) for _ in range(6)]
            told = await asyncio.gather(*calls[:2], _nothing(lender.keep(backend, keys, version)), *calls[2:])
            assert not {chunk for chunks in told for chunk in chunks} - whole
        assert await lender.recall(backend, keys) == [label(key, 3) for key in keys]

    async def test_a_load_beside_a_delete_is_whole_or_missing(self, backend: Backend, lender: Lender) -> None:
        """What goes away goes in one piece."""
        keys = keys_of(4)
        for _ in range(3):
            await lender.keep(backend, keys)
            calls = [lender.recall(backend, keys) for _ in range(6)]
            told = await asyncio.gather(*calls[:2], _nothing(backend.delete(keys)), *calls[2:])
            assert not {chunk for chunks in told for chunk in chunks} - {"BlockMissing", *map(label, keys)}
            assert await lender.recall(backend, keys) == ["BlockMissing"] * 4

    async def test_one_chunk_goes_into_many_buffers_at_once(self, backend: Backend, lender: Lender) -> None:
        """Loads of one key at the same time all get it."""
        await lender.keep(backend, [key_of(1)])
        told = await asyncio.gather(*(lender.recall(backend, [key_of(1)]) for _ in range(16)))
        assert told == [[label(key_of(1))]] * 16

    async def test_in_a_throng_every_chunk_is_whole(self, backend: Backend, lender: Lender) -> None:
        """Every operation on the same few keys at once: each load gives a chunk that was stored under its key."""
        rng = random.Random(0)
        keys = keys_of(6)

        async def load(some: list[int]) -> None:
            for number, chunk in zip(
                some, await lender.recall(backend, [keys[number] for number in some]), strict=True
            ):
                assert chunk in {"BlockMissing", *(label(keys[number], version) for version in range(40))}

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
    """Run a call among loads, and be told no chunk by it."""
    await call
    return []
