"""How coroutines wait for a stepped engine: all look again whenever something came back or was given back.

There is no queue of wishes that could go stale. What the runner sends wakes the loop, from whatever thread it comes.
"""

import asyncio
from collections.abc import Sequence

from kvtier.backend import OffloadKey
from kvtier.engine.requests import Request
from kvtier.engine.steps import SteppedManager

LEASES_EVERY_S = 0.05  # At most so often leases are looked at: a request that waits renews its own in every step.


class WakingManager(SteppedManager):
    """A stepped engine that steps by itself when something came, and wakes whoever waits for that."""

    _loop: asyncio.AbstractEventLoop | None = None
    _progress: "asyncio.Future[None] | None" = None
    _pumping = False

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use the asyncio face on this loop; `open` does so by itself."""
        self._loop = loop
        self._bridge.notify = self._wake
        self._wake()

    async def drained(self, deadline_s: float | None = None) -> bool:
        """Wait until nothing is under way; False if the deadline came first."""
        try:
            async with asyncio.timeout(self._deadline(deadline_s)):
                self.end_step()
                while self.ledger.pending:
                    await self._next_progress()
        except TimeoutError:
            return False
        return True

    # What the step protocol gives back, the asyncio face may be waiting for.

    def complete_load(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        super().complete_load(keys, request_id)
        self._stir()

    def _complete_store(self, keys: Sequence[OffloadKey], request: Request, *, success: bool) -> None:
        super()._complete_store(keys, request, success=success)
        self._stir()

    def _finish(self, request: Request) -> None:
        super()._finish(request)
        self._stir()

    def _wake(self) -> None:
        """Have the loop take what came; from any thread."""
        if not self._pumping and self._loop is not None:
            self._pumping = True
            try:
                self._loop.call_soon_threadsafe(self._pump)
            except RuntimeError:  # The loop is closed, and with it all who wait.
                self._loop = None

    def _pump(self) -> None:
        self._pumping = False  # First: what comes from here on wakes anew.
        self.end_step()
        self._stir()

    def _stir(self) -> None:
        """Let everybody who waits look again."""
        progress, self._progress = self._progress, None
        if progress is not None and not progress.done():
            progress.set_result(None)

    async def _next_progress(self, *, for_rows: bool = False) -> None:
        """Send what was decided, and wait until something came back or was given back.

        Who waits `for_rows` also looks again when leases run out: nobody gives these back.
        """
        leased = self.ledger.leases.rows
        self.end_step()
        self._check_open()
        if for_rows and self.ledger.leases.rows < leased:
            return
        if self._progress is None:
            self._progress = asyncio.get_running_loop().create_future()
        ends_at = self.ledger.leases.ends_at if for_rows else None
        timeout_s = None if ends_at is None else max(LEASES_EVERY_S, ends_at - self._clock())
        await asyncio.wait((self._progress,), timeout=timeout_s)
        self._check_open()
        self._receive()
