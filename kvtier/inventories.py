"""What tiers say of themselves: what they hold, what they hold no more, and how full they are.

Every batch of keys is acknowledged, so that a scan of millions sends one at a time and never floods a step.
"""

from collections.abc import Sequence

from kvtier.bridge.messages import TierUsage
from kvtier.events import Event, EventKind, EventLog
from kvtier.keys import OffloadKey
from kvtier.outbox import Outbox
from kvtier.primary import Primary
from kvtier.tier import Tier, Whereabouts


class Inventories:
    """Enters reports into the whereabouts."""

    def __init__(self, primary: Primary, where: Whereabouts, outbox: Outbox, events: EventLog | None) -> None:
        self._primary = primary
        self._where = where
        self._outbox = outbox
        self._events = events

    def found(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Believe that the tier holds these keys, whatever it answered before."""
        self._where.add(tier, self._primary.own(keys))
        tier.forget_answers(keys)
        self._tell(EventKind.STORED, tier, keys)
        self._outbox.acknowledge(tier)

    def gone(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """Believe that the tier holds these keys no more; what is on its way there may have come before or after."""
        self._where.remove(tier, keys)
        tier.forget_answers(keys)
        tier.crossed.update(tier.storing.intersection(keys))
        self._tell(EventKind.REMOVED, tier, keys)
        self._outbox.acknowledge(tier)

    def scanned(self, tier: Tier, *, complete: bool) -> None:
        """Take the word of a tier that has one owner for what it does not hold, too."""
        tier.authoritative = tier.reports = complete

    def used(self, tier: Tier, usage: TierUsage) -> None:
        tier.chunks, tier.used_bytes = usage.chunks, usage.used_bytes
        tier.capacity_bytes, tier.reserved_bytes = usage.capacity_bytes, usage.reserved_bytes
        tier.counters.note(usage.counts)

    def _tell(self, kind: EventKind, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        if keys and self._events is not None:
            self._events.add(Event(kind, tier.spec.name, keys))
