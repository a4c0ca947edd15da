"""Progress: how coroutines wait for rows and loads, and let the loop turn when they need not wait.

All waiters look again whenever a message came or something was released. A message wakes the loop from any thread.
"""

# ruff: noqa: SLF001  Waiters and their steps are one engine.
# pyright: reportPrivateUsage=false

import asyncio
import weakref
from contextlib import suppress

from kvtier.engine.requests import NEVER, Request
from kvtier.engine.steps import StepManager
from kvtier.errors import WrongLoop

LEASES_EVERY_S = 0.05  # Between looks at expiring leases: a waiting request renews its own in every step.


class Progress:
    """Steps a kvtier engine when messages came, and wakes its waiters, on one loop."""

    def __init__(self, steps: StepManager, loop: asyncio.AbstractEventLoop) -> None:
        self._steps = steps
        self._loop = loop
        self._next: asyncio.Future[None] | None = None
        self._stirred = 0
        self._pumping = False
        self._called = False  # In this turn of the loop.
        self.clearing = False  # A reset is in progress, and no call gets rows.
        wake = weakref.WeakMethod(self._wake)  # A runner outlives an engine that is dropped, and must not keep it.
        steps._bridge.notify = lambda: None if (alive := wake()) is None else alive()
        steps._given_back = self.stir
        self._wake()

    def check_loop(self) -> None:
        """Raise `WrongLoop` on another loop, or `EngineClosed` if the engine is closed."""
        if asyncio.get_running_loop() is not self._loop:
            self._steps._check_open()
            state = "closed" if self._loop.is_closed() else "another one"
            raise WrongLoop(
                f"this kvtier engine belongs to the event loop that opened it, which is {state}: open an engine on "
                "this loop"
            )

    async def turn(self) -> None:
        """Begin a call: let the loop turn, unless it has turned since the last call.

        Calls in a loop that never wait would otherwise stop all other tasks.
        """
        self.check_loop()
        if self._called:
            await asyncio.sleep(0)
        if not self._called:
            self._called = True
            self._loop.call_soon(self._turned)

    def stir(self) -> None:
        """Let all waiters look again."""
        self._stirred += 1
        progress, self._next = self._next, None
        if progress is not None and not progress.done():
            progress.set_result(None)

    async def made(self, *, for_rows: bool = False, loads_of: Request | None = None, until: float = NEVER) -> None:
        """End the step, and wait until a message came or something was released; the loop turns in any case.

        A waiter `for_rows` also looks again when leases expire. One for the loads of a request looks again when they,
        or its probes, are late. If the step itself released something, all waiters look again at once. `until` ends
        the wait. Raises `EngineClosed`.
        """
        steps, ledger = self._steps, self._steps._ledger
        leased, looked_up_at = ledger.leases.rows, ledger._now
        before = self._stirred, ledger.loads.withdrawals, ledger.prefetches.ended
        steps.end_step()
        steps._check_open()
        if before != (self._stirred, ledger.loads.withdrawals, ledger.prefetches.ended):
            self.stir()
            await asyncio.sleep(0)
        elif for_rows and ledger.leases.rows < leased:
            await asyncio.sleep(0)
        else:
            if self._next is None:
                self._next = self._loop.create_future()
            if for_rows and ledger.leases.ends_at is not None:
                until = min(until, max(steps._clock() + LEASES_EVERY_S, ledger.leases.ends_at))
            elif loads_of is not None:
                until = min(until, loads_of.late_after(looked_up_at))
            await asyncio.wait((self._next,), timeout=None if until == NEVER else max(0.0, until - steps._clock()))
        steps._check_open()
        steps._receive()

    async def cleared(self) -> None:
        """Wait for the end of a reset that has begun."""
        while self.clearing:
            await self.made()

    async def rest(self, deadline_s: float) -> bool:
        """Wait until nothing is in flight; False if the deadline came first."""
        try:
            async with asyncio.timeout(deadline_s):
                self._steps.end_step()
                while self._steps._ledger.pending:
                    await self.made()
        except TimeoutError:
            return False
        return True

    def _wake(self) -> None:
        """Let the loop take messages; called from any thread."""
        if not self._pumping:
            self._pumping = True
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._pump)

    def _pump(self) -> None:
        self._pumping = False  # First, so that messages from here on wake the loop again.
        self._steps.end_step()
        self.stir()

    def _turned(self) -> None:
        self._called = False
