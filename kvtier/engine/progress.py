"""Progress: how coroutines wait for room and for arrivals.

All look again whenever something came back or was given back: there is no queue of wishes that could go stale. What
the runner sends wakes the loop, from whatever thread it comes.
"""

# ruff: noqa: SLF001  Whoever waits and the steps that it waits for are one engine.
# pyright: reportPrivateUsage=false

import asyncio

from kvtier.engine.requests import NEVER, Request
from kvtier.engine.steps import StepManager

LEASES_EVERY_S = 0.05  # At most so often leases are looked at: a request that waits renews its own in every step.


class Progress:
    """Steps a kvtier engine when something came, and wakes whoever waits for that, on one loop."""

    def __init__(self, steps: StepManager, loop: asyncio.AbstractEventLoop) -> None:
        self._steps = steps
        self._loop: asyncio.AbstractEventLoop | None = loop
        self._next: asyncio.Future[None] | None = None
        self._pumping = False
        steps._bridge.notify = self._wake
        steps._given_back = self.stir
        self._wake()

    def stir(self) -> None:
        """Let everybody who waits look again."""
        progress, self._next = self._next, None
        if progress is not None and not progress.done():
            progress.set_result(None)

    async def made(self, *, for_rows: bool = False, loads_of: Request | None = None) -> None:
        """Send what was decided, and wait until something came back or was given back.

        Who waits `for_rows` also looks again when leases run out: nobody gives these back. Who waits for the loads of
        a request, or for a tier's word, looks again when they are late. Where loads were declined, all who wait look
        again at once. `EngineClosed` if the engine is closed, or was meanwhile.
        """
        steps, ledger = self._steps, self._steps._ledger
        leased, withdrawals = ledger.leases.rows, ledger.weighing.withdrawals
        looked_up_at = ledger._now
        steps.end_step()
        steps._check_open()
        if for_rows and ledger.leases.rows < leased:
            return
        if ledger.weighing.withdrawals != withdrawals:
            self.stir()
            return
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        timeout_s: float | None = None
        if for_rows and ledger.leases.ends_at is not None:
            timeout_s = max(LEASES_EVERY_S, ledger.leases.ends_at - steps._clock())
        elif loads_of is not None and (late_at := loads_of.late_after(looked_up_at)) < NEVER:
            timeout_s = max(0.0, late_at - steps._clock())
        await asyncio.wait((self._next,), timeout=timeout_s)
        steps._check_open()
        steps._receive()

    async def rest(self, deadline_s: float) -> bool:
        """Wait until nothing is under way; False if the deadline came first."""
        try:
            async with asyncio.timeout(deadline_s):
                self._steps.end_step()
                while self._steps._ledger.pending:
                    await self.made()
        except TimeoutError:
            return False
        return True

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
        self._steps.end_step()
        self.stir()
