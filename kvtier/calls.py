"""The calls of one tier that are under way: refused once it is closed, waited for at its end.

Every tier needs this and it is easy to get nearly right, so it is here once. Tiers whose calls run in threads count
them in their lanes (`kvtier.lend`) instead.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress

from kvtier.backend import Abandoned
from kvtier.errors import BackendClosed


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
