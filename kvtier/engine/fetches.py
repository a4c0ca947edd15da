"""Fetches: how a call of the asyncio face waits until the leading run of its keys is in the primary.

Waiting requests lease at most a share of the rows. So chunks that have come are pinned and leased no more, and leave
their share to later ones. Calls without a row stand in a line. Only the first in the line takes rows, and only it holds
rows while it waits for more. So no fetch waits for rows of another waiting fetch. Calls that find all their chunks in
the primary pass the line.

Rows come back when the blocks of other fetches end. A task that holds rows and awaits a further fetch may wait for
itself: then no row comes back, and all calls in the line give up `lease_s` after the last one was served.
"""

# ruff: noqa: SLF001  Waiters and their steps are one engine.
# pyright: reportPrivateUsage=false

import logging
import math
from collections.abc import Sequence

from kvtier.backend import OffloadKey
from kvtier.engine.answers import LookupResult
from kvtier.engine.progress import Progress
from kvtier.engine.requests import Request, Turn
from kvtier.engine.steps import StepManager
from kvtier.errors import LineLimit, Remedy

logger = logging.getLogger(__name__)


class Fetches:
    """All calls that bring a run into the primary, and the line of those that wait for rows."""

    def __init__(self, steps: StepManager, progress: Progress) -> None:
        self._steps = steps
        self._ledger = steps._ledger
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
        """Look up, pin the hits, and wait for more, with a turn of the loop; True if the run is over."""
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
        """Return how many leading keys are ready, whether others are in flight, and whether there were too few rows.

        A fetch that is short has its place in the line from now on.
        """
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

    # The line.

    def _first(self, fetch: "_Fetch") -> bool:
        """Return True if no other call waits for rows before this one, or if this one gives up."""
        return fetch.late or next(iter(self._line), fetch) is fetch

    def _leave(self, fetch: "_Fetch") -> None:
        if self._line.pop(fetch, None) is not None:
            self._served(fetch)
            self._progress.stir()

    def _served(self, fetch: "_Fetch") -> None:
        if not fetch.late:
            self._served_at = self._steps._clock()

    async def _wait_for_rows(self, fetch: "_Fetch") -> None:
        """Wait until rows were released, or this call is late."""
        late_at = max(self._line[fetch], self._served_at) + self._wait_max_s(fetch)
        await self._progress.made(for_rows=True, until=late_at)
        fetch.late = self._steps._clock() >= max(late_at, self._served_at + self._wait_max_s(fetch))

    def _wait_max_s(self, fetch: "_Fetch") -> float:
        """Return how long to wait while no call is served: no longer than computing the chunks."""
        return min(self._steps.config.limits.lease_s, self._ledger.wait_max_s(len(fetch.missing)))

    def _rows_come_back(self, fetch: "_Fetch") -> bool:
        """Return True if others hold rows that will be free."""
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


class _Fetch:
    """One call: its keys in prefix order, and the rows of the leading ones, which it has pinned."""

    __slots__ = ("keys", "late", "request", "rows")

    def __init__(self, keys: Sequence[OffloadKey], request: Request, rows: list[int]) -> None:
        self.keys = keys
        self.request = request
        self.rows = rows
        self.late = False  # It has given up waiting for rows.

    @property
    def missing(self) -> Sequence[OffloadKey]:
        return self.keys[len(self.rows) :]
