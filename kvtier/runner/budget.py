"""A budget: bytes and chunks that may be under way at once in one direction of a tier."""

import asyncio
from collections import deque


class Budget:
    """Bytes and chunks that may be under way at once, given out in order of asking.

    What alone exceeds the budget passes when nothing else is under way, so that nothing waits for ever.
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
                self._admit()  # Whoever waited behind this one may fit now.
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
