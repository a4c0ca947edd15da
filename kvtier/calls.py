"""The calls of one tier: those under way are counted, and what no tier could hold is kept out of a batch.

Every tier needs this and it is easy to get nearly right, so it is here once. Tiers whose calls run in threads count
them in their lanes (`kvtier.lend`) instead.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from kvtier.backend import Abandoned, Outcome, Read, Write
from kvtier.errors import BackendClosed, BlockMissing, NoSpace
from kvtier.keys import GROUP_BYTES, OffloadKey

KEY_BYTES_SHOWN = 68  # In a message; a key that is refused may be as long as it likes.

Chunk = TypeVar("Chunk", Read, Write)


class Calls:
    """How many calls hold lent buffers. Belongs to one event loop."""

    def __init__(self, tier_name: str) -> None:
        self._tier_name = tier_name
        self._under_way = 0
        self._ended = asyncio.Event()
        self._ended.set()
        self.closed = False

    @contextmanager
    def one(self) -> Generator[None]:
        """Count a call for as long as the block lasts; raises `BackendClosed` once closed."""
        if self.closed:
            raise BackendClosed(f"tier {self._tier_name}: called after it was closed")
        self._under_way += 1
        self._ended.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._ended.set()

    async def close(self, deadline_s: float) -> Abandoned:
        """Refuse new calls at once, wait at most `deadline_s` for those under way, and say how many are left."""
        self.closed = True
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._ended.wait()
        return Abandoned(self._under_way)


class Fit:
    """What a tier can hold. Whatever does not fit is answered for by itself, and its siblings move without it.

    A batch in which everything fits, as in every batch of an engine's, is passed on as it is.
    """

    def __init__(self, row_bytes: int, key_bytes_max: int = sys.maxsize) -> None:
        """Hold rows of this length, under keys that have a group and are at most so long."""
        self._row_bytes = row_bytes
        self._key_bytes_max = key_bytes_max

    async def probe(
        self, keys: Sequence[OffloadKey], call: Callable[[Sequence[OffloadKey]], Awaitable[Sequence[bool]]]
    ) -> Sequence[bool]:
        """Ask for the keys that fit; of the others there is nothing."""
        fitting = self.keys(keys)
        answers = await call(fitting)
        if fitting is keys:
            return answers
        told = iter(answers)
        return [self._takes(key) and next(told) for key in keys]

    async def load(
        self, reads: Sequence[Read], call: Callable[[Sequence[Read]], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        """Load what fits; there is no chunk for anything else."""
        return await self._move(reads, call, BlockMissing)

    async def store(
        self, writes: Sequence[Write], call: Callable[[Sequence[Write]], Awaitable[Sequence[Outcome]]]
    ) -> Sequence[Outcome]:
        """Store what fits; there is no room for anything else, ever, which is no fault of the tier's."""
        return await self._move(writes, call, NoSpace)

    def keys(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that fit."""
        return keys if all(map(self._takes, keys)) else list(filter(self._takes, keys))

    async def _move(
        self,
        batch: Sequence[Chunk],
        call: Callable[[Sequence[Chunk]], Awaitable[Sequence[Outcome]]],
        refused: type[BlockMissing | NoSpace],
    ) -> Sequence[Outcome]:
        row_bytes, most = self._row_bytes, self._key_bytes_max
        unfit = {
            place: self._why(key, buffer)
            for place, (key, buffer) in enumerate(batch)
            if buffer.nbytes != row_bytes or not GROUP_BYTES <= len(key) <= most
        }
        if not unfit:
            return await call(batch)
        moved = iter(await call([chunk for place, chunk in enumerate(batch) if place not in unfit]))
        return [refused(unfit[place]) if place in unfit else next(moved) for place in range(len(batch))]

    def _takes(self, key: OffloadKey) -> bool:
        return GROUP_BYTES <= len(key) <= self._key_bytes_max

    def _why(self, key: OffloadKey, buffer: memoryview) -> str:
        name = key[:KEY_BYTES_SHOWN].hex()
        if not self._takes(key):
            most = "" if self._key_bytes_max == sys.maxsize else f" to {self._key_bytes_max:,}"
            return f"{name}: a key of {len(key):,} bytes, {GROUP_BYTES}{most or ' or more'} accepted"
        return f"{name}: a buffer of {buffer.nbytes:,} bytes, rows of {self._row_bytes:,} accepted"
