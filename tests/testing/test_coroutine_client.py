"""A tier whose client is asynchronous keeps the contract with `in_task`, though its transport knows no cancelling."""

import asyncio
from collections.abc import Sequence

import pytest

from kvtier.backend import (
    Abandoned,
    Backend,
    Calls,
    ChunkMissing,
    Durability,
    Fit,
    OffloadKey,
    Options,
    Outcome,
    Read,
    TierContext,
    Write,
    in_task,
)
from kvtier.testing.conformance import BackendConformance, tier_context

PIECES = 4


class Client:
    """A service's client: the loop moves a buffer piece by piece, also when nobody waits any more."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    async def get(self, key: bytes, into: memoryview) -> bool:
        found = self.held.get(key)
        if found is None:
            await asyncio.sleep(0)
            return False
        await self._moved(into, memoryview(found))
        return True

    async def put(self, key: bytes, row: memoryview) -> None:
        copy = bytearray(len(row))
        await self._moved(memoryview(copy), row)
        self.held[key] = bytes(copy)

    async def _moved(self, into: memoryview, source: memoryview) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        size = -(-len(source) // PIECES)

        def arrives(start: int) -> None:
            into[start : start + size] = source[start : start + size]
            if start + size < len(source):
                loop.call_soon(arrives, start + size)
            elif not ended.cancelled():
                ended.set_result(None)

        loop.call_soon(arrives, 0)
        await ended


class ClientBackend(Backend[Options]):
    durability = Durability.PROCESS
    options_type = Options

    def __init__(self, context: TierContext) -> None:
        self._client = Client()
        self._calls = Calls(context.name)
        self._fit = Fit(context.row_bytes)
        self._name = context.mapper.name

    @classmethod
    async def open(cls, options: Options, context: TierContext) -> "ClientBackend":
        return cls(context)

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]:
        with self._calls.one():
            return [self._fit.keys([key]) == [key] and self._name(key).encode() in self._client.held for key in keys]

    async def load(self, reads: Sequence[Read]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.load(reads, lambda fitting: in_task(self._load(fitting)))

    async def _load(self, reads: Sequence[Read]) -> list[Outcome]:
        found = await asyncio.gather(*(self._client.get(self._name(key).encode(), into) for key, into in reads))
        return [None if there else ChunkMissing(read.key.hex()) for read, there in zip(reads, found, strict=True)]

    async def store(self, writes: Sequence[Write]) -> Sequence[Outcome]:
        with self._calls.one():
            return await self._fit.store(writes, lambda fitting: in_task(self._store(fitting)))

    async def _store(self, writes: Sequence[Write]) -> list[Outcome]:
        await asyncio.gather(*(self._client.put(self._name(key).encode(), row) for key, row in writes))
        return [None] * len(writes)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        with self._calls.one():
            for key in self._fit.keys(keys):
                self._client.held.pop(self._name(key).encode(), None)

    async def aclose(self, deadline_s: float) -> Abandoned:
        return await self._calls.close(deadline_s)


class TestAClientsTier(BackendConformance):
    """The tier of the guide's recipe."""

    @pytest.fixture
    async def backend(self):
        tier = await ClientBackend.open(Options(), tier_context(self.chunk_bytes))
        yield tier
        await tier.aclose(10)
