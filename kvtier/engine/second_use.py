"""Second use: tiers that a chunk is written to when it is stored, or used, for the second time.

A key that is stored is only remembered. When it is stored again, or used while it is in the primary, it is sent.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvtier.backend import OffloadKey
from kvtier.engine.outbox import Outbox
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Request
from kvtier.engine.tier import ON_SECOND_USE, LocationMap, Tier

SEEN_A_ROW = 4  # Keys remembered for each row: a later return is no second use.
SEEN_MIN = 65_536  # Some megabytes, for a small primary.

FIRST_USE = "first_use"  # A chunk was remembered, and not sent.

Seen = OrderedDict[OffloadKey, int]
"""Keys that were stored once, the oldest first, each with the number of the request that it was first seen with."""


class SecondUse:
    """The keys that each of these tiers has seen once."""

    def __init__(self, primary: Primary, tiers: Sequence[Tier], locations: LocationMap, outbox: Outbox) -> None:
        self._primary = primary
        self._locations = locations
        self._outbox = outbox
        self._seen = {tier: Seen() for tier in tiers if tier.spec.cascade == ON_SECOND_USE}
        self._seen_max = max(SEEN_MIN, SEEN_A_ROW * primary.rows)
        self.active = bool(self._seen)

    def stored(self, keys: Sequence[OffloadKey], tier: Tier, request: Request) -> list[OffloadKey]:
        """Record keys that a request has stored; return those that are sent to the tier now."""
        seen = self._seen[tier]
        again = [key for key in keys if key in seen]
        for key in reversed(keys):  # If there are too many to remember, the first ones are kept.
            seen.setdefault(key, request.number)
            seen.move_to_end(key)
        self._trim(seen)
        if len(again) < len(keys):
            tier.counters.skip(FIRST_USE, len(keys) - len(again))
        return again

    def used(self, keys: Iterable[OffloadKey], request: Request, now: float) -> None:
        """Send keys that a request uses, if they are ready; remember the others, which are in flight."""
        ready = self._primary.ready
        for tier, seen in self._seen.items():
            if not request.stores_in(tier.spec):
                continue
            again = [key for key in keys if key in ready and not tier.last_answer(key)]
            self._outbox.cascade(dict.fromkeys(again), tier, now)
            for key in keys:
                if key not in ready:
                    seen.setdefault(key, request.number)
            self._trim(seen)

    def keep_out(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Forget keys that were first seen with a request that keeps its own out of tiers."""
        for tier, seen in self._seen.items():
            if request.keeps_out(tier.spec):
                first = [key for key in keys if seen.get(key) == request.number]
                for key in self._locations.lacking(first, tier):
                    del seen[key]

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        for seen in self._seen.values():
            for key in keys:
                seen.pop(key, None)

    def _trim(self, seen: Seen) -> None:
        for _ in range(len(seen) - self._seen_max):
            seen.popitem(last=False)
