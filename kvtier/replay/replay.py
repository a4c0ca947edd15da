"""Replays a trace through an engine as fast as it goes, with real bytes: every chunk that comes back is compared."""

import asyncio
import time
from collections.abc import Callable, Iterable

from kvtier.config import EngineConfig
from kvtier.limits import Budget
from kvtier.manager import TieringOffloadingManager
from kvtier.replay.chunks import ChunkSource
from kvtier.replay.client import PUT_BYTES_MAX, Client, task_group
from kvtier.replay.order import Order, Turn
from kvtier.replay.tally import Tally
from kvtier.replay.traces import Request

CONCURRENCY = 8
CONCURRENCY_MAX = (
    4_096  # Requests, a task each. Engines run some hundreds at once; the bytes have a limit of their own.
)
OPEN_BYTES_MAX = 256 << 20  # Made for all open requests together, beside the primary.
INTERRUPTED_CLOSE_S = 0.1  # Twice this, for transfers and for the tiers: whoever interrupts waits for a second at most.


class Replay:
    """One pass of requests through one engine. `tally` may be read at any time, and after a cancelled run, too."""

    times_to_first_token_s: None = None  # Requests do not come at their own times here.

    def __init__(
        self,
        requests: Iterable[Request],
        config: EngineConfig,
        source: ChunkSource,
        tally: Tally,
        *,
        concurrency: int = CONCURRENCY,
    ) -> None:
        """`concurrency`: the most requests open at once."""
        self.tally = tally
        self._requests = iter(requests)
        self._config = config
        self._source = source
        self._concurrency = concurrency

    async def run(self, progress: Callable[[], None] = lambda: None) -> Tally:
        """Replay all requests, calling `progress` after each, and wait until what they stored has reached the tiers.

        Cancelled, it closes the engine in under a second and leaves what was counted in `tally`.
        """
        manager = await TieringOffloadingManager.open(self._config, observer=self.tally.observe)
        close_s = None
        try:
            client = Client(manager, self._source, self.tally, clock=time.perf_counter)  # uvloop's ticks in ms.
            try:
                await self._replay(client, progress)
                self.tally.drained = await manager.drained(_drain_s(self._config))
            finally:
                self.tally.sample(manager.ledger, client.seconds)
        except asyncio.CancelledError:
            close_s = INTERRUPTED_CLOSE_S
            raise
        finally:
            await manager.aclose(close_s)
        return self.tally

    async def _replay(self, client: Client, progress: Callable[[], None]) -> None:
        order = Order()
        room = Budget(OPEN_BYTES_MAX, _open_chunks_max(client.manager))
        async with task_group() as group:
            for _ in range(self._concurrency):
                group.create_task(self._work(client, order, room, progress))

    async def _work(self, client: Client, order: Order, room: Budget, progress: Callable[[], None]) -> None:
        """Take the next request, serve it, and so on. What is taken is in the order at once: nothing waits between."""
        for request in self._requests:
            turn = order.admit(request.hash_ids)
            chunks = len(request.hash_ids)
            size_bytes = min(chunks * self._source.chunk_bytes, PUT_BYTES_MAX)
            await room.acquire(size_bytes, chunks)
            try:
                await order.wait(turn)
                await self._serve(client, order, turn)
            finally:
                room.release(size_bytes, chunks)
                order.leave(turn)
            self.tally.finished(client.manager.ledger, client.seconds)
            progress()

    async def _serve(self, client: Client, order: Order, turn: Turn) -> None:
        keys = list(map(self._source.key, turn.block_ids))
        with client.request() as request_id:
            hits = await client.fetch(keys, request_id)
            order.looked_up(turn, hits)
            await client.put(keys, hits, request_id)


def _open_chunks_max(manager: TieringOffloadingManager) -> int:
    """Return how many rows open requests can hold for sure: none is then refused one that cascades or leases hold."""
    limits, rows = manager.config.limits, manager.config.rows
    return max(1, int(min(limits.lease_share, 1 - limits.cascade_share) * rows))


def _drain_s(config: EngineConfig) -> float:
    """Return when all must have ended: each transfer waits for budget and then for the tier, at most so long."""
    return 1.0 + 2 * max((tier.limits.deadline_s for tier in config.secondary_tiers), default=0.0)
