"""The seam between a file-system tier and the way its chunks lie on the disk.

A layout decides where bytes go, knows what is there, and makes room. What is around it (the calls and their checks, the
folder, the footer and its verification, the capacity, the counters) is the same for all of them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from kvtier.backend import Occupancy, OffloadKey, Outcome, Read, Write
from kvtier_backends.fs.disk.inventory import InventoryQueue


class Left(NamedTuple):
    """What is still at it when a layout's closing deadline has passed."""

    transfers: int  # Calls whose buffers are in use.
    others: int  # Jobs without lent buffers; with any of either, descriptors must stay open.


class Layout(Protocol):
    """One tier's chunks. Belongs to the loop's thread; what does not fit is kept out before calls come here."""

    key_bytes_max: int
    """The longest key whose chunk has a place."""

    @property
    def inventory(self) -> InventoryQueue: ...

    async def probe(self, keys: Sequence[OffloadKey]) -> Sequence[bool]: ...

    async def load(self, reads: Sequence[Read]) -> tuple[list[Outcome], int]:
        """Load the chunks; return the outcomes, and how many say that the file system is away."""
        ...

    async def store(self, writes: Sequence[Write]) -> tuple[list[Outcome], int]: ...

    async def delete(self, keys: Sequence[OffloadKey]) -> None: ...

    def rank(self, keys: Sequence[OffloadKey]) -> None: ...

    def occupancy(self) -> Occupancy: ...

    def begin(self, changed: Callable[[], None]) -> None:
        """Start what runs beside the calls; `changed` is called when there is news for the inventory."""
        ...

    async def aclose(self, ends_at: float) -> Left:
        """Wait for what is under way, at most until then by the monotonic clock; no call comes any more. Idempotent."""
        ...

    async def ended(self) -> None:
        """Wait for what ran beside the calls, and raise what was wrong with it, if anything was."""
        ...


class Background:
    """A layout's tasks beside its calls."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, name: str, works: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Start a task for each."""
        self._tasks = [asyncio.create_task(work(), name=f"kvtier-{name}-{work.__name__}") for work in works]

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait for cancelled tasks, and raise what was wrong with one, if anything was."""
        await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled():
                task.result()


async def until(event: Awaitable[object], seconds: float) -> bool:
    """Wait for an event, but no longer than this; say whether it came."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event
    except TimeoutError:
        return False
    return True
