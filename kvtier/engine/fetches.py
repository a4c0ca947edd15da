"""How calls of the asyncio face wait: for rows, for loads, and for a turn of the loop.

Waiting requests lease at most a share of the rows. So chunks that have come are pinned, no longer leased, and leave
their share to later ones. Calls without a row stand in a line; only the first takes rows, and holds rows while it waits
for more. So no fetch waits for rows of another waiting fetch. Calls whose chunks are all in the primary pass the line.

Rows come back when the blocks of other fetches end. A task that holds rows and awaits a further fetch may wait for
itself: then no row comes back, and all calls in the line give up `lease_s` after the last one was served.
"""

# ruff: noqa: SLF001  Waiters and their steps are one engine.
# pyright: reportPrivateUsage=false

import asyncio
import logging
import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvtier.backend import OffloadKey
from kvtier.engine.answers import LookupResult
from kvtier.engine.requests import NEVER, Request, Turn
from kvtier.engine.steps import StepManager
from kvtier.errors import EngineClosed, LineLimit, Remedy, WrongLoop

LEASES_EVERY_S = 0.05  # Between looks at expiring leases: a waiting request renews its own in every step.

logger = logging.getLogger(__name__)


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
        """Begin a call: let the loop turn, unless it has since the last call, or calls in a loop stop all others."""
        self.check_loop()
        if self._called:
            await asyncio.sleep(0)
        if not self._called:
            self._called = True
            self._loop.call_soon(self._turned)

    def stir(self) -> None:
        self._stirred += 1
        progress, self._next = self._next, None
        if progress is not None and not progress.done():
            progress.set_result(None)

    async def made(self, *, for_rows: bool = False, loads_of: Request | None = None, until: float = NEVER) -> None:
        """End the step, and wait until a message came or something was released; the loop turns in any case.

        A waiter `for_rows` also looks again when leases expire, one for a request's loads when they, or its probes, are
        late; all do if the step itself released something. `until` ends the wait. Raises `EngineClosed`.
        """
        steps, ledger = self._steps, self._steps.ledger
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
        while self.clearing:
            await self.made()

    async def rest(self, deadline_s: float) -> bool:
        try:
            async with asyncio.timeout(deadline_s):
                self._steps.end_step()
                while self._steps.ledger.pending:
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
        with suppress(EngineClosed):  # In a forked child; those that `stir` wakes raise it.
            self._steps.end_step()
        self.stir()

    def _turned(self) -> None:
        self._called = False


class Fetches:
    """All calls that bring a run into the primary, and the line of those that wait for rows."""

    def __init__(self, steps: StepManager, progress: Progress) -> None:
        self._steps = steps
        self._ledger = steps.ledger
        self._progress = progress
        self._line: dict[_Fetch, float] = {}
        """Calls that wait for rows, the first one first, and since when."""
        self._served_at = -math.inf
        self._cut = 0  # Chunks, since the last line.
        self._cut_lines = LineLimit(steps._clock)

    async def arrive(self, keys: Sequence[OffloadKey], request_id: str, rows: list[int]) -> None:
        """Wait until the leading run of keys is in the primary, and pin it; its rows are added to `rows`."""
        fetch = _Fetch(keys, self._steps._known(request_id), rows)
        try:
            while not await self._advance(fetch):
                pass
        finally:
            self._leave(fetch)

    async def _advance(self, fetch: "_Fetch") -> bool:
        await self._progress.cleared()
        self._steps._receive()
        hits, waits, short = self._look(fetch)
        if not short:
            self._leave(fetch)
        elif not self._first(fetch):
            self._give_back(fetch)
            await self._wait_for_rows(fetch)
            return False
        if waits:
            self._served(fetch)
            await self._progress.made(loads_of=fetch.request)
            return False
        fetch.rows += self._steps.prepare_load(fetch.missing[:hits], fetch.request.id)
        self._steps.end_step()
        if not (fetch.missing and short):
            return True
        if hits:
            self._served(fetch)
        elif fetch.late or not self._rows_come_back(fetch):
            self._say_cut(self._ledger.cut(fetch.missing, fetch.request))
            return True
        else:
            await self._wait_for_rows(fetch)
        return False

    def _look(self, fetch: "_Fetch") -> tuple[int, bool, bool]:
        """Return how many leading keys are ready, if others are in flight, and if rows lack: it is then in the line."""
        turn = fetch.request.turn = Turn(mine=fetch.late or self._first(fetch))
        hits, waits = 0, False
        try:
            for key in fetch.missing:
                result = self._steps.lookup(key, fetch.request.id)
                if result is LookupResult.MISS or turn.short:
                    break
                if result is not LookupResult.HIT:
                    waits = True  # Go on: the rest is loaded side by side.
                elif not waits:
                    hits += 1
        finally:
            fetch.request.turn = None
        if turn.short:
            self._line.setdefault(fetch, self._steps._clock())
        return hits, waits, turn.short

    def _first(self, fetch: "_Fetch") -> bool:
        return fetch.late or next(iter(self._line), fetch) is fetch

    def _leave(self, fetch: "_Fetch") -> None:
        if self._line.pop(fetch, None) is not None:
            self._served(fetch)
            self._progress.stir()

    def _served(self, fetch: "_Fetch") -> None:
        if not fetch.late:
            self._served_at = self._steps._clock()

    async def _wait_for_rows(self, fetch: "_Fetch") -> None:
        late_at = max(self._line[fetch], self._served_at) + self._wait_max_s(fetch)
        await self._progress.made(for_rows=True, until=late_at)
        fetch.late = self._steps._clock() >= max(late_at, self._served_at + self._wait_max_s(fetch))

    def _wait_max_s(self, fetch: "_Fetch") -> float:
        """Return how long to wait while no call is served: no longer than computing the chunks."""
        return min(self._steps.config.limits.lease_s, self._ledger.loads.wait_max_s(len(fetch.missing)))

    def _rows_come_back(self, fetch: "_Fetch") -> bool:
        ledger, own = self._ledger, len(fetch.rows)
        others = ledger.rows_in_use > own or ledger.leases.rows > len(fetch.request.leased) or ledger.pending
        return others and own < ledger.rows_left(fetch.keys[:own])

    def _give_back(self, fetch: "_Fetch") -> None:
        """Release the rows of a fetch that is short and not the first: those before it may need them."""
        if fetch.rows:
            self._steps.complete_load(fetch.keys[: len(fetch.rows)], fetch.request.id)
            fetch.rows.clear()
        if fetch.request.leased:
            self._ledger.leases.end_all(fetch.request)
            self._progress.stir()
        fetch.request.waits = False  # Else the step leases its hits again, and all in line wake each other for ever.

    def _say_cut(self, chunks: int) -> None:
        self._cut += chunks
        if self._cut_lines.allows():
            logger.warning(
                "%s chunks that tiers have were not fetched: no row came back for them within lease_s (%g s); see %s",
                f"{self._cut:,}",
                self._steps.config.limits.lease_s,
                Remedy.CUT,
            )
            self._cut = 0


@dataclass(slots=True, eq=False)
class _Fetch:
    """One call: its keys in prefix order, and the rows of the leading ones, which it has pinned."""

    keys: Sequence[OffloadKey]
    request: Request
    rows: list[int]
    late: bool = False  # It has given up waiting for rows.

    @property
    def missing(self) -> Sequence[OffloadKey]:
        return self.keys[len(self.rows) :]
