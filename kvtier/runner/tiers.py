"""A runner's tiers: opened all or none, each with its limits.

A budget limits the bytes and chunks in flight in one direction of a tier.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import NamedTuple

from kvtier.backend import Backend, EngineId, FileMapper, TierContext, backend_class
from kvtier.config import LOADS_IN_FLIGHT_MAX, EngineConfig, TierConfig, tier_options
from kvtier.errors import BackendUnavailable
from kvtier.memory import is_of_a_limit, reason

GIVEN_UP_S = 1.0  # For a cancelled opening to clean up.


class Budget:
    """Bytes and chunks that may be in flight at once, given out in order of asking.

    A transfer above the budget passes when nothing else is in flight, so that none waits for ever.
    """

    def __init__(self, bytes_max: int, chunks_max: int) -> None:
        self._bytes_max = bytes_max
        self._chunks_max = chunks_max
        self.bytes_used = 0
        self.chunks_used = 0
        self._waiting: deque[tuple[int, int, asyncio.Future[None]]] = deque()

    async def acquire(self, size_bytes: int, chunks: int) -> None:
        """Wait for a share of the budget. A cancelled call holds nothing."""
        if not self._waiting and self._fits(size_bytes, chunks):
            self._take(size_bytes, chunks)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, chunks, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(size_bytes, chunks)  # The share arrived in the tick in which the waiter was cancelled.
            else:
                self._admit()  # The next waiter may fit now.
            raise

    def release(self, size_bytes: int, chunks: int) -> None:
        self.bytes_used -= size_bytes
        self.chunks_used -= chunks
        assert self.bytes_used >= 0, self.bytes_used
        assert self.chunks_used >= 0, self.chunks_used
        self._admit()

    def _fits(self, size_bytes: int, chunks: int) -> bool:
        if self.chunks_used == 0:
            return True
        return self.bytes_used + size_bytes <= self._bytes_max and self.chunks_used + chunks <= self._chunks_max

    def _take(self, size_bytes: int, chunks: int) -> None:
        self.bytes_used += size_bytes
        self.chunks_used += chunks

    def _admit(self) -> None:
        while self._waiting:
            size_bytes, chunks, turn = self._waiting[0]
            if turn.done():  # Cancelled while it waited.
                self._waiting.popleft()
            elif self._fits(size_bytes, chunks):
                self._waiting.popleft()
                self._take(size_bytes, chunks)
                turn.set_result(None)
            else:
                return


class RunnerTier(NamedTuple):
    """One open tier with its limits."""

    name: str
    backend: Backend
    deadline_s: float
    loads: Budget
    stores: Budget


async def open_tiers(config: EngineConfig, engine: EngineId | None = None) -> list[RunnerTier]:
    """Open every tier on the running loop. If one fails, those before it are closed and its error is raised.

    `engine`: the engine whose runner this is; None: a new one.
    """
    mapper, engine = FileMapper(config.namespace), engine or EngineId.new()
    opened: list[RunnerTier] = []
    try:
        for index, tier in enumerate(config.secondary_tiers):
            context = TierContext(tier.name, mapper, config.row_bytes, config.limits.retained_share, engine)
            opening = _open_tier(index, tier, context)
            opened.append(await _in_time(opening, tier, config.limits.open_s))
    except BaseException:
        closings = [tier.backend.aclose(config.limits.close_s) for tier in opened]
        await asyncio.shield(asyncio.gather(*closings, return_exceptions=True))
        raise
    return opened


async def _in_time(opening: Coroutine[None, None, RunnerTier], tier: TierConfig, deadline_s: float) -> RunnerTier:
    """Wait at most so long for a tier to open. One that hangs is left behind, with the thread that it hangs in."""
    task = asyncio.ensure_future(opening)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GIVEN_UP_S)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=GIVEN_UP_S)
        raise BackendUnavailable(f"{tier.name}: does not open within limits.open_s = {deadline_s:g} s")
    if task.cancelled():
        raise BackendUnavailable(f"{tier.name}: its opening was cancelled from within")
    return task.result()


async def _open_tier(index: int, tier: TierConfig, context: TierContext) -> RunnerTier:
    options = tier_options(tier, f"secondary_tiers[{index}]")
    try:
        backend = await backend_class(tier.type).open(options, context)
    except Exception as error:
        if is_of_a_limit(error):
            raise BackendUnavailable(f"{tier.name}: cannot be opened: {reason(error)}") from error
        raise
    limits = tier.limits
    return RunnerTier(
        tier.name,
        backend,
        limits.deadline_s,
        Budget(limits.load_bytes_in_flight, LOADS_IN_FLIGHT_MAX),
        Budget(limits.store_bytes_in_flight, limits.store_chunks_in_flight),
    )
