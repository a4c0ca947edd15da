"""A step's hits: what its look-ups found, noted at once, held when room is made, leased when the step ends.

A look-up that hits is the most frequent call of all, so it costs one `append` to a list of its request's. All else is
put off until somebody is about to make room, or to the step's end. Most steps make none.
"""

from collections.abc import Sequence
from itertools import chain

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Leases, Request


class StepHits:
    """What each request found in this step, from its first hit to the step's end.

    Invariant: whenever room is made, the row of every key that was noted in this step is held, as long as it is ready.
    For that a request is in `_fresh` just as long as its `hits` are not empty, and in `_held` if its `held` are not.

    **Who has found a key before may skip the call**: while `request.hits` is not empty, a key that is ready may be
    appended to it instead of being noted. What empties it is `hold`, `end` and `clear`. It stays the same list.
    """

    def __init__(self, primary: Primary, leases: Leases) -> None:
        self._primary = primary
        self._leases = leases
        self._fresh: list[Request] = []  # With hits since room was last made.
        self._held: list[Request] = []  # With hits before that; a request may be in both, and here twice.

    def note(self, request: Request, key: OffloadKey) -> None:
        """Note that a request found a key, which is ready or on its way."""
        hits = request.hits
        if not hits:
            self._fresh.append(request)
        hits.append(key)

    def hold(self) -> None:
        """Hold what was found so far: somebody is about to make room."""
        for request in self._fresh:
            self._primary.hold(request.hits)
            request.held += request.hits
            request.hits.clear()
        self._held += self._fresh
        self._fresh.clear()

    def leasable(self, request: Request, more: int) -> bool:
        """Say whether all that the request found and so many other rows fit into the share of leases."""
        return self._leases.room(self._rows(request), more)

    def lease(self, request: Request, now: float) -> None:
        """Lease to a request what it found: a prefix that exceeds the share keeps its leading part."""
        for row in self._rows(request):
            if not self._leases.take(row, request, now):
                break
        request.leased_hits = len(request.held) + len(request.hits)

    def end(self, now: float) -> None:
        """Lease to requests that wait what they found, and let go of all else."""
        if not (self._fresh or self._held):
            return
        for request in chain(self._held, self._fresh):
            if request.waits and not request.finished:
                self.lease(request, now)
            request.forget_hits()
        if self._held:
            self._primary.end_step()
        self._fresh.clear()
        self._held.clear()

    def clear(self) -> None:
        """Forget all that was found: the primary is about to drop every key, and what it holds."""
        for request in chain(self._held, self._fresh):
            request.forget_hits()
        self._fresh.clear()
        self._held.clear()

    def _rows(self, request: Request) -> Sequence[int]:
        """Return the rows of what the request found and was not tried to be leased; what failed since has none."""
        held = len(request.held)
        if request.leased_hits >= held:
            return self._primary.rows_of(request.hits[request.leased_hits - held :])
        return self._primary.rows_of([*request.held[request.leased_hits :], *request.hits])
