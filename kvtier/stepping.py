"""The step protocol: what a synchronous engine calls, thousands of times a step, and never waits for.

Every call here is plain, touches memory only and crosses no thread. A step's actions leave at its end with one wake-up;
what comes back waits in the bridge's mailbox and is applied before look-ups and before anything is evicted.
"""

from collections.abc import Sequence

from kvtier.answers import HIT, LookupResult, StorePlan
from kvtier.engine import Engine
from kvtier.events import Event
from kvtier.keys import OffloadKey
from kvtier.request import Position, Request
from kvtier.tier import TierMatcher, TierSpec


class SteppedManager(Engine):
    """An engine that is called step by step.

    A request is known from `on_new_request` to `on_request_finished`, by an id of the caller's.
    """

    # Requests.

    def on_new_request(
        self,
        request_id: str,
        matchers: Sequence[TierMatcher] | None = None,
        *,
        load_matchers: Sequence[TierMatcher] | None = None,
        position: Position | None = None,
    ) -> bool:
        """Take note of a request; `matchers` limit the tiers that serve it, None means all.

        `load_matchers` limit further the tiers that it is loaded from; its chunks are stored in the others, too.
        `position` says where a key's chunk ends in the request's tokens, for engines that do not offer every key in
        prefix order: those of models with several groups, whose keys come one group after the other.

        Returns whether a tier wants all of the request's chunks, those that are present already, too.
        Raises `EngineClosed` after shutdown, and ValueError if the id is in use: by a request that has not finished,
        or whose last store has not completed.
        """
        self._check_open()
        if known := self._requests.get(request_id):
            if known.finished:
                raise ValueError(
                    f"request {request_id!r} has finished, but a store of it has not: complete it, or wait for its put"
                )
            raise ValueError(f"request {request_id!r} is known already: finish it first, or choose another id")
        self._receive()
        request = self._requests[request_id] = self.ledger.new_request(request_id, matchers, load_matchers, position)
        return self.ledger.wants_all(request)

    def on_request_finished(self, request_id: str) -> None:
        """Rank the request's keys and end its leases. Completions, and a load decided before, may still follow."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)

    # Looking up, loading, storing.

    def lookup(self, key: OffloadKey, request_id: str) -> LookupResult:
        """Say where one key is, and have it on its way if a tier has it. A HIT holds until `end_step`."""
        if self._mailbox:
            self._receive()
        try:
            request = self._requests[request_id]
        except KeyError:
            request = self._known(request_id)
        hits = request.hits
        if hits and key in self.ready:  # As the ledger would do, without a call.
            hits.append(key)
            return HIT
        return self.ledger.lookup(key, request)

    def hits(self, request_id: str) -> list[OffloadKey]:
        """Return the keys that a request found, for a caller to whom even the call of `lookup` is too much.

        While the list is not empty, a key that is in `ready` may be appended to it instead of being looked up. What
        empties it is the end of the step, a reset, and a store or a look-up, anybody's, for which room is made or was
        to be made. It is the same list for as long as the request is known.
        """
        return self._known(request_id).hits

    def source(self, key: OffloadKey, request_id: str) -> TierSpec | None:
        """Return the tier from which this request had a key promoted; None if it found it in the primary."""
        request = self._requests.get(request_id)
        index = None if request is None else request.sources.get(key)
        return None if index is None else self.ledger.tiers[index].spec

    def prepare_load(self, keys: Sequence[OffloadKey], request_id: str) -> list[int]:
        """Pin the rows of keys that were HIT in this step and return them, in order; LookupError for any other key."""
        return self.ledger.prepare_load(keys, self._request(request_id))

    def complete_load(self, keys: Sequence[OffloadKey], request_id: str) -> None:  # noqa: ARG002  # Part of the protocol.
        """Say that the engine has read these rows."""
        if self._forked:
            self._check_open()
        self.ledger.complete_load(keys)

    def touch(self, keys: Sequence[OffloadKey], request_id: str) -> None:
        """Count a use of these keys by the request; absent ones, and a second use, count nothing."""
        self.ledger.touch(keys, self._request(request_id))

    def prepare_store(self, keys: Sequence[OffloadKey], request_id: str) -> StorePlan | None:
        """Reserve rows for those of the keys that are absent: all of them, or None and nothing changed.

        Evicts none of `keys`. The caller writes the rows and then calls `complete_store` with the plan's keys.
        """
        if self._mailbox:
            self._receive()
        return self.ledger.prepare_store(keys, self._request(request_id))

    def complete_store(self, keys: Sequence[OffloadKey], request_id: str, *, success: bool = True) -> None:
        """Make written rows loadable, and have them cascade; with `success` false, give them up."""
        if self._closed and not self._forked:
            return
        self._complete_store(keys, self._request(request_id), success=success)

    def take_events(self) -> list[Event]:
        """Return what happened to chunks since the last call; nothing unless the configuration says `events`."""
        if self._mailbox or self._forked:
            self._receive()
        return [] if self._events is None else self._events.take()

    def _finish(self, request: Request) -> None:
        self.ledger.finish(request)
        self._forget(request)

    def _complete_store(self, keys: Sequence[OffloadKey], request: Request, *, success: bool) -> None:
        self.ledger.complete_store(keys, request, success=success)
        self._forget(request)

    def _known(self, request_id: str) -> Request:
        """Return a request that has begun and not finished."""
        try:
            return self._requests[request_id]
        except KeyError:
            self._check_open()
            raise LookupError(f"request {request_id!r} is unknown: call on_new_request first") from None

    def _request(self, request_id: str) -> Request:
        """Return the request; one that is over is treated as one without a past. `EngineClosed` after shutdown."""
        self._check_open()
        return self._requests.get(request_id) or self.ledger.new_request(request_id)
