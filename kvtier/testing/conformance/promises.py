"""What every group of promises stands on."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from kvtier.testing.conformance.lender import Lender, key_of, label

PATIENCE_S = 30.0  # Real seconds until a call that does not end is called a failure; honest ones need a thousandth.
OWNER = key_of(1 << 40)  # Whose chunk the owner puts into rows that came back.


@pytest.mark.asyncio
class Promises:
    """Base of all groups; a subclass of a group provides the fixture `backend`."""

    chunk_bytes: ClassVar[int] = 16_384
    """Length of every row that is lent: `TierContext.row_bytes` of the tier under test."""

    settle_s: ClassVar[float] = 0.02
    """How long a test gives what should have ended to show that it has not."""

    @pytest.fixture
    def lender(self) -> Iterator[Lender]:
        """Rows and chunks for one test."""
        lender = Lender(self.chunk_bytes)
        yield lender
        lender.take_back()

    async def look_later(self, lender: Lender, rows: Sequence[memoryview]) -> None:
        """Use rows that came back for something else, as an engine does, and look whether somebody else still does."""
        for row in rows:
            row[:] = lender.chunk(OWNER)
        for _ in range(2):
            assert [lender.identify(row) for row in rows] == [label(OWNER)] * len(rows)
            await asyncio.sleep(self.settle_s)
        assert [lender.identify(row) for row in rows] == [label(OWNER)] * len(rows)


async def steps(count: int) -> None:
    """Let everybody else run for so many iterations of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task has ended, however it did; one that does not is a failure."""
    done, _ = await asyncio.wait({task}, timeout=PATIENCE_S)
    assert done, f"the call has not ended after {PATIENCE_S:g} s"
    if not task.cancelled():
        task.exception()  # Or asyncio would complain of an error that nobody looked at, if the test does not.


async def begun(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a call, and let it take its first step."""
    task = asyncio.create_task(call)
    await steps(1)
    return task
