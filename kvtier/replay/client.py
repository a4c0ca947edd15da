"""What an engine does for one request, done for a trace: find the prefix, check its bytes, store what was computed."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager

from kvtier.keys import OffloadKey
from kvtier.manager import TieringOffloadingManager
from kvtier.replay.chunks import ChunkSource
from kvtier.replay.tally import Tally

PUT_BYTES_MAX = 64 << 20  # Of chunks made and handed over at once: longer prompts go in pieces, or memory would grow.


class Client:
    """One engine's user. A prompt longer than the primary counts with its leading chunks, as many as there are rows."""

    def __init__(
        self,
        manager: TieringOffloadingManager,
        source: ChunkSource,
        tally: Tally,
        *,
        clock: Callable[[], float],
        load_s_per_chunk: float = 0.0,
    ) -> None:
        """`clock` gives seconds. `load_s_per_chunk`: how long each row of a hit is read for, as if by a GPU."""
        self.manager = manager
        self.source = source
        self.tally = tally
        self._load_s_per_chunk = load_s_per_chunk
        self._put_chunks = max(1, PUT_BYTES_MAX // source.chunk_bytes)
        self._clock = clock
        self._begun = clock()
        self._numbers = 0

    @property
    def seconds(self) -> float:
        """Give the time since the client was made."""
        return self._clock() - self._begun

    @contextmanager
    def request(self) -> Generator[str]:
        """Give the id of a request that is known to the engine for as long as the block lasts."""
        self._numbers += 1
        request_id = f"replay-{self._numbers}"
        self.manager.on_new_request(request_id)
        try:
            yield request_id
        finally:
            self.manager.on_request_finished(request_id)

    async def fetch(self, keys: Sequence[OffloadKey], request_id: str) -> int:
        """Have the longest leading run brought in, compare its bytes, and return how long it is."""
        begun = self._clock()
        async with self.manager.fetch(keys, request_id=request_id) as chunks:
            self.tally.time("fetch", self._clock() - begun)
            hits = len(chunks)
            self.tally.looked_up(len(keys), hits, self.source.wrong(keys, chunks))
            if hits and self._load_s_per_chunk:
                await asyncio.sleep(hits * self._load_s_per_chunk)
        return hits

    async def put(self, keys: Sequence[OffloadKey], hits: int, request_id: str) -> None:
        """Store what was not found, waiting for room and for the tiers' budgets."""
        for piece in self._computed(keys, hits):
            chunks = self.source.chunks(piece)
            begun = self._clock()
            await self.manager.put(piece, chunks, request_id=request_id)
            self.tally.time("put", self._clock() - begun)

    def store(self, keys: Sequence[OffloadKey], hits: int, request_id: str) -> None:
        """Store what was not found as an engine does that never waits: what there is no room for is dropped."""
        manager, size = self.manager, self.source.chunk_bytes
        for piece in self._computed(keys, hits):
            plan = manager.prepare_store(piece, request_id)
            if plan is None or not plan.keys:
                continue
            for row, chunk in zip(plan.rows, self.source.chunks(plan.keys), strict=True):
                manager.region.row(row)[:size] = chunk
            manager.complete_store(plan.keys, request_id)
            manager.end_step()

    def _computed(self, keys: Sequence[OffloadKey], hits: int) -> Generator[Sequence[OffloadKey]]:
        end = min(len(keys), self.manager.config.rows)
        return (keys[start : min(start + self._put_chunks, end)] for start in range(hits, end, self._put_chunks))


@asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """Give a group of tasks that raises the first error as it is: the others follow from it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
