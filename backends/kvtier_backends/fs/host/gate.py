"""The keeper's gate: it deals the device's width to sessions by bytes. Loads go first, up to a limit if stores wait.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a batch's start tag is its session's last finish tag or the virtual
time, whichever is later. The order is by start tag plus size, of which a quarter of the width counts at most: so small
batches wait for no queue of large ones, and a large one does not wait for its size.
"""

import asyncio
from heapq import heappop, heappush
from itertools import count

WIDTH_BYTES = 64 << 20  # In transfer at once: some milliseconds of a fast disk or of memory.
LOADS_MAX = 8  # Widths of loads that go before a store that waits.
HELD_S = 1.0  # A batch that takes longer belongs to a slow or stopped engine, and no other waits for it.


class Gate:
    """Belongs to the loop's thread."""

    def __init__(self, width_bytes: int = WIDTH_BYTES) -> None:
        self.taken_bytes = 0
        self._width_bytes = width_bytes
        self._now = [0, 0]  # Virtual time: the greatest start tag that was let through, for loads and for stores.
        self._ends: dict[tuple[int, bool], int] = {}  # Finish tag of the last batch of a session, by kind.
        self._before_bytes = 0  # Loads that stores have waited for since the last one passed.
        self._waiting: tuple[list[tuple[int, int, int, int, asyncio.Future[None]]], ...] = ([], [])  # Heaps, by place.
        self._numbers = count()

    async def enter(self, session: int, size_bytes: int, *, is_store: bool) -> "Pass":
        """Wait for the batch's turn."""
        start = max(self._now[is_store], self._ends.get((session, is_store), 0))
        self._ends[session, is_store] = start + size_bytes
        through: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = start + min(size_bytes, self._width_bytes // 4)
        heappush(self._waiting[is_store], (place, next(self._numbers), start, size_bytes, through))
        self.deal()
        try:
            await through
        except asyncio.CancelledError:
            if not through.cancelled():
                self.taken_bytes -= size_bytes
            if (session, is_store) in self._ends:
                self._ends[session, is_store] -= size_bytes
            self.deal()  # Others may have waited behind it.
            raise
        return Pass(self, size_bytes)

    def forget(self, session: int) -> None:
        for is_store in (False, True):
            self._ends.pop((session, is_store), None)

    def deal(self) -> None:
        """Let through what has room."""
        loads, stores = self._waiting
        while loads or stores:
            is_store = not loads or (bool(stores) and self._before_bytes >= LOADS_MAX * self._width_bytes)
            _, _, start, size_bytes, through = self._waiting[is_store][0]
            if not through.done():  # A done one was cancelled.
                if self.taken_bytes and self.taken_bytes + size_bytes > self._width_bytes:
                    return
                self._before_bytes = 0 if is_store or not stores else self._before_bytes + size_bytes
                self._now[is_store] = max(self._now[is_store], start)
                self.taken_bytes += size_bytes
                through.set_result(None)
            heappop(self._waiting[is_store])


class Pass:
    """A batch's part of the width, until it ends or takes too long."""

    def __init__(self, gate: Gate, size_bytes: int) -> None:
        self._gate, self._left_bytes = gate, size_bytes
        self._late = asyncio.get_running_loop().call_later(HELD_S, self.end)

    def end(self) -> None:
        """Give it back; idempotent."""
        self._late.cancel()
        self._gate.taken_bytes -= self._left_bytes
        self._left_bytes = 0
        self._gate.deal()
