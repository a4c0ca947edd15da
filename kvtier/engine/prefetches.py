"""Prefetches: chunks that are brought into the primary before a request looks them up.

A prefetch is a request that looks up its own keys, a window at a time, until the longest leading run that any tier has
is in the primary. It leases within the share of leases, and undoes earlier demotions of its keys.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from kvtier.backend import OffloadKey
from kvtier.engine.answers import HIT, MISS, LookupResult
from kvtier.engine.loads import Loads
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Leases, Request
from kvtier.engine.writeback import WriteBack

WINDOW_KEYS = 256  # From the first that is not ready: looked up in every step, some hundred microseconds.
AT_ONCE = 4
WAITING_MAX = 1_024  # Further ones are not begun.


@dataclass(slots=True, eq=False)
class Prefetch:
    """One call: the keys in prefix order, and how many leading ones are ready."""

    keys: Sequence[OffloadKey]
    here: int = 0
    over: bool = False
    request: Request = field(default_factory=lambda: Request("prefetch", weighed=False))


@dataclass(slots=True, eq=False)
class Prefetches:
    _primary: Primary
    _writeback: WriteBack
    _leases: Leases
    _loads: Loads
    _lookup: Callable[[OffloadKey, Request], LookupResult]
    waiting: deque[Prefetch] = field(default_factory=deque[Prefetch])  # The oldest first.
    ended: int = 0  # While this grows, the next step goes on without a message.

    def begin(self, keys: Sequence[OffloadKey]) -> Prefetch:
        """Begin a prefetch with the next step; one above the limit is over at once."""
        prefetch = Prefetch(keys)
        if len(self.waiting) < WAITING_MAX:
            self.waiting.append(prefetch)
        else:
            prefetch.over = True
        if self._primary.takes_hints:
            rows = self._primary.rows_of(dict.fromkeys(keys))
            self._primary.spare(rows)
            self._writeback.used(rows)
        return prefetch

    def give_up(self, prefetch: Prefetch) -> None:
        if not prefetch.over:
            self.waiting.remove(prefetch)
            self._end(prefetch)

    def step(self) -> None:
        """Continue the oldest ones; called before a step's hits are leased."""
        stored = self._primary.filling.keys() - self._loads.keys()
        for prefetch in list(islice(self.waiting, AT_ONCE)):
            self._look(prefetch, stored)
            if prefetch.here >= len(prefetch.keys):
                self.waiting.remove(prefetch)
                self._end(prefetch)

    def clear(self) -> None:
        """End all prefetches: the primary is about to drop every key."""
        while self.waiting:
            self.give_up(self.waiting[0])

    def _look(self, prefetch: Prefetch, stored: Collection[OffloadKey]) -> None:
        """Look up keys to the window's end. Those being `stored` count as ready: it is unknown when they will be."""
        request, waits = prefetch.request, False
        for place in range(prefetch.here, len(prefetch.keys)):
            key = prefetch.keys[place]
            result = HIT if key in stored else self._lookup(key, request)
            if result is MISS:
                prefetch.keys = prefetch.keys[:place]
                return
            waits = waits or result is not HIT
            if not waits:
                prefetch.here = place + 1
            elif place + 1 - prefetch.here >= WINDOW_KEYS:
                return

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.over = True
        self.ended += 1
        prefetch.request.finished = True
        self._leases.end_all(prefetch.request)
        rows = self._primary.rows_of(dict.fromkeys(prefetch.keys[: prefetch.here]))
        self._primary.rank(rows)
        self._writeback.used(rows)
