"""The requests of one call to a bucket: one for each chunk, concurrently, until one deadline.

Requests are coroutines of obstore's, which has its own threads. A request that takes too long is cancelled, and
obstore gives up the memory that it was lent. A row is free when its memoryview can be released.

Every request is idempotent. obstore's own retries leave out a connection that ends before the answer. So they are off,
and this module retries.
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvtier.backend import in_task
from kvtier_backends.object.bucket import STORE_ERRORS, Trouble, TroubleKind, trouble_of

RELEASE_S = 0.0005  # Interval of checks that a row is free: obstore does not report it.
WAITS_S = (0.05, 0.2)  # Before the second and the third try. More tries only add to a store's load.

A = TypeVar("A")
C = TypeVar("C")

OF_ONE_CHUNK = frozenset({TroubleKind.MISSING, TroubleKind.FULL, TroubleKind.NAME})
"""Trouble with one chunk, not with the whole bucket."""

AGAIN = frozenset({TroubleKind.AWAY, TroubleKind.SLOW})
"""Trouble that may pass before the next try."""


class Turns:
    """A limit to the requests in flight, of all calls together; first come, first served."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self._count = count
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(count)

    async def each(self, chunks: Sequence[C], ask: Callable[[C], Awaitable[A]]) -> list[A | Trouble]:
        """Ask for each chunk, and return all answers at the last one or at the deadline.

        No request is in flight afterwards, cancelled or not.
        """
        late = Trouble(TroubleKind.AWAY, f"not answered within {self._timeout_s:g} s", errno.ETIMEDOUT)
        answers: list[A | Trouble] = [late] * len(chunks)
        left = iter(range(len(chunks)))

        async def serve() -> None:
            for index in left:
                async with self._free:
                    answers[index] = await _answer(ask, chunks[index])

        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as group:
                for _ in range(min(self._count, len(chunks))):
                    group.create_task(serve())
        return answers


async def _answer(ask: Callable[[C], Awaitable[A]], chunk: C) -> A | Trouble:
    """Ask up to three times, and return the answer or the last trouble."""
    waits = iter(WAITS_S)
    while True:
        try:
            return await ask(chunk)
        except STORE_ERRORS as error:
            trouble = trouble_of(error)
        wait_s = next(waits, None)
        if wait_s is None or trouble.kind not in AGAIN:
            return trouble
        await asyncio.sleep(wait_s)


def all_away(answers: Sequence[object]) -> Trouble | None:
    """Return the trouble with the whole bucket, if every request met one."""
    troubles = [answer for answer in answers if isinstance(answer, Trouble) and answer.kind not in OF_ONE_CHUNK]
    return troubles[0] if troubles and len(troubles) == len(answers) else None


async def released(view: memoryview) -> None:
    """Wait until a view of a buffer is out of use, however often the call is cancelled."""
    try:
        view.release()
    except BufferError:
        await in_task(_released(view))


async def _released(view: memoryview) -> None:
    while True:
        await asyncio.sleep(RELEASE_S)
        with suppress(BufferError):
            return view.release()
