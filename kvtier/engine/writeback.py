"""Tiers that a chunk is written to later than when it is stored: when it leaves the primary, or on its second use.

*Write-back* (`cascade = "evict"`): a row is *dirty* for a tier until its chunk was sent there. Rows that are evicted
next are *cleaned* ahead of demand: their chunks are sent, within the tier's limits, and are pinned until that is done.
A store never waits: a row that is needed while it is dirty is evicted, and its chunk goes unwritten. Rows of a session
that is over are not cleaned, unless they are used again: written last, they would be the newest in the tier.

*Second use* (`cascade = "second_use"`): a key is only remembered until it is stored again, or used in the primary.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Request
from kvtier.engine.tier import ON_SECOND_USE, PRESSURE, WHEN_EVICTED, LedgerLimits, Tier, TierSpec
from kvtier.engine.traffic import Traffic
from kvtier.settings.hints import Advice

QUEUED_A_ROW = 2  # Entries to be cleaned for each row, at most: more are of rows that came back and were chosen again.

# Reasons for which a chunk is not written, besides `PRESSURE`.
CLOSED = "closed"  # close() reached its deadline.
RESET = "reset"  # The primary was cleared.
NO_STORE = "no_store"  # A hint keeps it out.
OVER = "over"  # Its session is over, and no other has used it since.

FIRST_USE = "first_use"  # A chunk was remembered, and not sent.

SEEN_A_ROW = 4  # Keys remembered for each row: a later return is no second use.
SEEN_MIN = 65_536  # Some megabytes, for a small primary.

_NO_WRITER = 0  # As a request's number: unknown.
_KEPT_OUT = -1  # In place of the writer: the chunk is kept out of the tier.

Dirty = tuple[OffloadKey, int, bool]
"""A key, the bits of the tiers that its row was dirty for, and whether its session was over."""


class WriteBack:
    """Which rows are dirty for which tiers, and which are cleaned next."""

    def __init__(self, primary: Primary, tiers: Sequence[Tier], traffic: Traffic, limits: LedgerLimits) -> None:
        self._primary = primary
        self._locations = traffic.locations
        self._traffic = traffic
        self._action_chunks = limits.action_chunks
        self._tiers = [tier for tier in tiers if tier.spec.cascade == WHEN_EVICTED]
        self.active = bool(self._tiers)
        self._dirty = [0] * primary.rows if self.active else []  # Bits of the tiers that a row is dirty for.
        self._writers = {tier: [_NO_WRITER] * primary.rows for tier in self._tiers}
        """Number of the request that brought each row's chunk."""
        self.demoted: set[int] = set()  # Rows that are cleaned, and demoted in the tier, until they are used again.
        self.over: set[int] = set()  # Rows of sessions that are over, until they are used again: not cleaned.
        self._lost: list[Dirty] = []  # Evicted in this step.
        self._ahead_rows = self._wanted_rows = limits.ahead_rows  # Free, or chosen for eviction, ahead of demand.
        self._queues = {tier: deque[int]() for tier in self._tiers}  # Rows to be cleaned, in order.
        self._ending = False

    def written(self, keys: Sequence[OffloadKey], tier: Tier, request: Request) -> None:
        rows = list(map(self._primary.ready.__getitem__, keys))
        dirty, writers, bit, number = self._dirty, self._writers[tier], tier.bit, request.number
        for row in rows:
            dirty[row] |= bit
            writers[row] = number
        if self._ending:
            self._enqueue(rows, tier)

    def promoted(self, key: OffloadKey, source: TierSpec, request: Request) -> None:
        row = self._primary.filling[key]
        for tier, writers in self._writers.items():
            writers[row] = _NO_WRITER
            if tier.spec is not source and request.stores_in(tier.spec):
                self._dirty[row] |= tier.bit
                writers[row] = request.number

    def used(self, rows: Sequence[int]) -> None:
        """Clean rows again that were demoted, or whose session was over."""
        if self.over:
            self.over.difference_update(rows)
        if self.demoted:
            self.demoted.difference_update(rows)

    def keep_out(self, keys: Collection[OffloadKey], tier: Tier) -> None:
        """Make the rows of keys clean for a tier, as long as they are in the primary, even if the tier loses them."""
        if tier in self._writers:
            writers = self._writers[tier]
            for row in self._primary.rows_of(keys):
                self._dirty[row] &= ~tier.bit
                writers[row] = _KEPT_OUT

    def keep_out_own(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Keep out of tiers the keys that a request has brought, as its client says at its end."""
        row_of = self._primary.row
        rows = [(key, row) for key in keys if (row := row_of(key)) is not None]
        for tier, writers in self._writers.items():
            if request.keeps_out(tier.spec):
                own = {key: row for key, row in rows if writers[row] == request.number}
                dirty = [key for key, row in own.items() if self._dirty[row] & tier.bit]
                tier.counters.skipped[NO_STORE] += len(self._locations.lacking(dirty, tier))
                self.keep_out(own, tier)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        for tier in self._tiers:
            self.keep_out(keys, tier)

    def lost(self, tier: Tier, keys: Iterable[OffloadKey]) -> None:
        if tier in self._writers:
            writers = self._writers[tier]
            for row in map(self._primary.ready.get, keys):
                if row is not None and writers[row] != _KEPT_OUT:
                    self._dirty[row] |= tier.bit

    def interrupted(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        """At the end, clean lost stores' rows again; not before: a chunk may kill one runner after the other."""
        if self._ending and tier in self._writers:
            self.lost(tier, keys)
            self._enqueue(self._dirty_for(tier, self._primary.rows_of(keys)), tier)

    def evicting(self, evicted: Sequence[OffloadKey]) -> None:
        """Record that rows have other keys now; chunks that were dirty are not written any more, and counted later."""
        dirty, rows = self._dirty, self._primary.reserved_rows
        bits = list(map(dirty.__getitem__, rows))
        if any(bits):
            self._lost += zip(reversed(evicted), bits, map(self.over.__contains__, rows), strict=False)
            for row in rows:
                dirty[row] = 0
        self.used(rows)

    def clean_ahead(self, now: float, *, runner_up: bool) -> None:
        """Choose rows for eviction ahead of demand, and send the dirty ones."""
        primary, ahead = self._primary, self._primary.ahead
        assert ahead is not None
        self._count_lost()
        missing = self._wanted_rows - primary.rows_free - len(ahead)
        if missing > 0 or ahead.aside:
            primary.choose_ahead(missing)
        self._wanted_rows = self._ahead_rows
        chosen = ahead.take_news()
        keys = primary.keys_of(chosen)
        for tier, queue in self._queues.items():
            if chosen and not self._ending:
                self._enqueue(self._dirty_for(tier, reversed(chosen)), tier)
            if not runner_up:
                continue
            if keys:  # Chunks that the tier has of them are as recent there as those that it is sent.
                self._traffic.advise(tier, Advice("rank", keys))
            if queue:
                self._send(tier, queue, now)

    def want(self, rows: int) -> None:
        self._wanted_rows = max(self._wanted_rows, rows)

    def room(self, rows: int) -> bool:
        """Return True if so many rows can be evicted without losing a chunk that would be written soon."""
        primary, ahead = self._primary, self._primary.ahead
        if ahead is None or not any(tier.storing for tier in self._tiers):
            return True
        missing, dirty, over = rows - primary.rows_free, self._dirty, self.over
        clean = (row for row in ahead if not (primary.pinned(row) or (dirty[row] and row not in over)))
        return missing <= 0 or len(list(islice(clean, missing))) == missing

    @property
    def queued_rows(self) -> int:
        return sum(map(len, self._queues.values()))

    def end(self) -> None:
        """Clean all rows from now on, in the order in which they were stored."""
        self._ending = True
        for tier, queue in self._queues.items():
            queue.clear()
            queue.extend(self._dirty_for(tier, self._primary.ready.values()))

    def give_up(self, reason: str) -> int:
        """Count dirty rows as not written; return how many would have been."""
        if not self.active:
            return 0
        self._count_lost()
        dirty, over, ready = self._dirty, self.over, self._primary.ready
        skipped = self._skip([(key, dirty[row], row in over) for key, row in ready.items() if dirty[row]], reason)
        self._dirty = [0] * len(dirty)
        return skipped

    def clear(self) -> None:
        """Forget all rows: the primary is about to drop every key."""
        self.give_up(RESET)
        for queue in self._queues.values():
            queue.clear()
        self.over.clear()
        self.demoted.clear()

    def _enqueue(self, rows: Sequence[int], tier: Tier) -> None:
        queue = self._queues[tier]
        if len(queue) + len(rows) > QUEUED_A_ROW * self._primary.rows:  # A tier that takes nothing: rows come again.
            again = set(rows)
            still = dict.fromkeys(row for row in self._dirty_for(tier, queue) if row not in again)
            queue.clear()
            queue.extend(still)
        queue.extend(rows)

    def _send(self, tier: Tier, queue: deque[int], now: float) -> None:
        places, keys = self._traffic.places(tier, now), list[OffloadKey]()
        while queue and len(keys) < places:
            keys += self._cleaned([queue.popleft() for _ in range(min(places - len(keys), len(queue)))], tier)
        size, head_first = self._action_chunks, 1 if self._ending else -1
        for start in range(0, len(keys), size):  # Head first within an action, as a tier expects it.
            self._traffic.store(keys[start : start + size][::head_first], tier)
        row_of = self._primary.ready.__getitem__
        if self.demoted and (demoted := [key for key in keys[::head_first] if row_of(key) in self.demoted]):
            self._traffic.advise(tier, Advice("demote", demoted))

    def _cleaned(self, rows: Iterable[int], tier: Tier) -> Sequence[OffloadKey]:
        """Make rows clean, except those used again or gone; return the keys that the tier lacks, in order."""
        primary, dirty, others = self._primary, self._dirty, ~tier.bit
        assert primary.ahead is not None
        each = dict.fromkeys(rows)  # A row that came back and was chosen again stands twice in the queue.
        cleaned = self._dirty_for(tier, primary.ready_rows(each) if self._ending else primary.ahead.among(each))
        for row in cleaned:
            dirty[row] &= others
        return self._locations.lacking(primary.keys_of(cleaned), tier)

    def _dirty_for(self, tier: Tier, rows: Iterable[int]) -> list[int]:
        dirty, bit, over = self._dirty, tier.bit, self.over
        if over:
            return [row for row in rows if dirty[row] & bit and row not in over]
        return [row for row in rows if dirty[row] & bit]

    def _count_lost(self) -> None:
        if self._lost:
            self._skip(self._lost, PRESSURE)
            self._lost.clear()

    def _skip(self, chunks: Sequence[Dirty], reason: str) -> int:
        """Count for each tier the dirty chunks that it lacks; return how many were of sessions that go on."""
        skipped = 0
        for tier in self._tiers:
            for over in (False, True):
                keys = [key for key, bits, was_over in chunks if bits & tier.bit and was_over is over]
                if lacked := len(self._locations.lacking(keys, tier)):
                    tier.counters.skipped[OVER if over else reason] += lacked
                    skipped += 0 if over else lacked
        return skipped


Seen = OrderedDict[OffloadKey, int]
"""Keys that were stored once, the oldest first, each with the number of the request that it was first seen with."""


class SecondUse:
    def __init__(self, primary: Primary, tiers: Sequence[Tier], traffic: Traffic) -> None:
        self._primary = primary
        self._locations = traffic.locations
        self._traffic = traffic
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
            tier.counters.skipped[FIRST_USE] += len(keys) - len(again)
        return again

    def used(self, keys: Iterable[OffloadKey], request: Request, now: float) -> None:
        """Send keys that a request uses, if they are ready; remember the others, which are in flight."""
        ready = self._primary.ready
        for tier, seen in self._seen.items():
            if not request.stores_in(tier.spec):
                continue
            again = [key for key in keys if key in ready and key not in tier.answered]
            self._traffic.cascade(dict.fromkeys(again), tier, now)
            for key in keys:
                if key not in ready:
                    seen.setdefault(key, request.number)
            self._trim(seen)

    def keep_out(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Forget keys that were first seen with a request that keeps its own out of tiers."""
        for tier, seen in self._seen.items():
            if request.keeps_out(tier.spec):
                for key in self._locations.lacking([key for key in keys if seen.get(key) == request.number], tier):
                    del seen[key]

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        for seen in self._seen.values():
            for key in keys:
                seen.pop(key, None)

    def _trim(self, seen: Seen) -> None:
        for _ in range(len(seen) - self._seen_max):
            seen.popitem(last=False)
