"""The ledger's answers to look-ups and stores, and its events.

Events report what happened to chunks, for consumers with their own index (a router, an LLM engine's event stream).
"""

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.backend import OffloadKey


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
        """Add an event, if there are keys."""
        if keys and self._events_max:
            self.dropped += len(self._events) == self._events_max
            self._events.append(Event(kind, tier, keys, reason))

    def take(self) -> list[Event]:
        """Return the events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events
