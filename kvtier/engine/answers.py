"""The ledger's answers to look-ups and stores, the sources of a look-up, and events for consumers with an index."""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.requests import Request, Search
from kvtier.engine.tier import Tier


class LookupResult(Enum):
    """A look-up's answer for one key."""

    MISS = "miss"  # Compute it.
    HIT = "hit"  # Ready in the primary, and kept there until the step ends.
    HIT_PENDING = "hit_pending"  # A load into the primary is in flight: look again.
    RETRY = "retry"  # A tier has not answered yet: look again.

    __hash__ = object.__hash__  # Members are singletons; an enum's own hash is a call in Python.


HIT, HIT_PENDING, MISS, RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY


class StorePlan(NamedTuple):
    """The plan of a store: write the chunk of `keys[i]` into row `rows[i]`."""

    keys: list[OffloadKey]
    rows: list[int]
    evicted: list[OffloadKey]


Tiers = Sequence[Tier]


def sources_of(
    key: OffloadKey,
    request: Request,
    search: Search,
    tiers: Sequence[Tier],
    holders: int,
    now: float,
    never: Callable[[Tier], bool] | None = None,
) -> tuple[Tiers, Tiers, Tiers, Tiers, Tiers]:
    """Sort the tiers that a request may load from by what is known of a key, in configured order. Changes nothing.

    Returns a plain tuple, since a named one would take a sixth of a miss's instructions:
    - having: these hold the key, and loading may be worth it;
    - too slow: these hold it, but computing is expected to be faster;
    - silent: these have not answered a probe for it;
    - late: nor have these, and the request's probe deadline is over: they count as not having it;
    - admitted: all of them, and those that lack the key.

    `holders` are the bits of the tiers that the location map names. `never` returns True for a tier of which no load
    is worth its time; None if loads are not weighed. A request probes each tier once: an answer that has expired since
    still counts for it, or answers older than a step would keep it waiting.
    """
    having: tuple[Tier, ...] = ()
    too_slow = silent = late = having
    admitted: list[Tier] = []
    asked = search.asked
    for tier in tiers:
        if not request.loads_from(tier.spec) or not tier.admits(now):
            continue
        admitted.append(tier)
        answer = tier.answer(key, holders & tier.bit, now)
        if answer is None and asked and (tier.index, key) in asked:
            if key not in tier.asking:
                answer = key in tier.answered
            elif not search.awaits_probes(now):
                answer = False
                late = (*late, tier)
        if answer:
            if never is not None and (search.passed & tier.bit or never(tier)):
                too_slow = (*too_slow, tier)
            else:
                having = (*having, tier)
        elif answer is None:
            silent = (*silent, tier)
    return having, too_slow, silent, late, admitted


class EventKind(Enum):
    STORED = "stored"
    REMOVED = "removed"
    FAILED = "failed"


class Event(NamedTuple):
    kind: EventKind
    tier: str  # "cpu" for the primary, else the tier's name.
    keys: Sequence[OffloadKey]
    reason: str = ""  # Of a failure: the code's name; of a store into the primary that was given up: "store".


class EventLog:
    """Events since the last `take`, at most `events_max`; the oldest are dropped and counted. 0: no events.

    A consumer that sees `dropped` grow has lost its place and must rebuild its index.
    """

    def __init__(self, events_max: int = 0) -> None:
        self._events_max = events_max
        self._events: deque[Event] = deque(maxlen=events_max)
        self.dropped = 0

    def add(self, kind: EventKind, tier: str, keys: Sequence[OffloadKey], reason: str = "") -> None:
        if keys and self._events_max:
            self.dropped += len(self._events) == self._events_max
            self._events.append(Event(kind, tier, keys, reason))

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events
