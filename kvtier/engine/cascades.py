"""The cascades that wait: of tiers that are written on a chunk's second use, or when it leaves the primary.

A tier with `cascade = "store"` is none of them: the outbox sends it everything at once. Every tier is fed from the
primary, and each decides for itself; what one of them evicts goes to no other.

`evict`: a row is owed to a tier until it was sent there. Some rows have left the primary's order ahead of demand: what
is owed of them is sent, as far as the tier's limits allow, and while it is under way they are pinned as in any cascade.
So a store finds rows that wait for nothing. It never waits: what is still owed when its row is needed goes unwritten.
What a session that is over leaves is withheld, unless somebody wants it again: written last, it would be the newest
there.

`second_use`: a key that is stored is only remembered; when it is stored again, or used while it is in the primary, it
is sent.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from kvtier.backend import OffloadKey
from kvtier.engine.outbox import Outbox
from kvtier.engine.primary import Primary
from kvtier.engine.requests import Request
from kvtier.engine.tier import ON_SECOND_USE, PRESSURE, WHEN_EVICTED, Residency, Tier, TierSpec
from kvtier.hints import Advice

SEEN_A_ROW = 4  # Keys remembered for each row: what returns later than that is no second use.
SEEN_MIN = 65_536  # Some megabytes, for a small primary.
DUE_A_ROW = 2  # Entries of what is due for each row, at most: more are of rows that came back and left again.

FIRST_USE = "first_use"  # Remembered, and not sent.
CLOSED = "closed"  # The end's deadline came first.
RESET = "reset"  # What the primary held was to be forgotten.
NO_STORE = "no_store"  # A hint said so.
OVER = "over"  # Its session is, and nobody has used it since.

_NOBODY = 0  # As a request's number: who stored a chunk in its tier is not known.
_KEPT_OUT = -1  # In its place: the request that stored a chunk keeps its own out of the tier.

Debt = tuple[OffloadKey, int, bool]
"""A key, the bits of the tiers that its chunk was owed to, and whether it was withheld."""
Seen = OrderedDict[OffloadKey, int]
"""Keys that were stored once, longest ago first, each with the number of the request that it was first seen with."""


class Cascades:
    """What is owed to tiers that are written later, and what was seen once."""

    def __init__(
        self,
        primary: Primary,
        tiers: Sequence[Tier],
        residency: Residency,
        outbox: Outbox,
        *,
        leaving_rows: int,
        action_chunks: int,
    ) -> None:
        """`leaving_rows`: that are free, or have left the primary's order, ahead of demand."""
        self._primary = primary
        self._residency = residency
        self._outbox = outbox
        self._action_chunks = action_chunks
        self._evict = [tier for tier in tiers if tier.spec.cascade == WHEN_EVICTED]
        self._second_use = [tier for tier in tiers if tier.spec.cascade == ON_SECOND_USE]
        self.owes = bool(self._evict)
        self.remembers = bool(self._second_use)
        self._seen = {tier: Seen() for tier in self._second_use}
        self._seen_max = max(SEEN_MIN, SEEN_A_ROW * primary.rows)
        self._owed = [0] * primary.rows if self.owes else []  # Bits of the tiers that a row's chunk is owed to.
        self._owed_for = {tier: [_NOBODY] * primary.rows for tier in self._evict}
        """For whose sake each row's chunk is owed, or was, or is again: the number of the request that brought it."""
        self.demoted: set[int] = set()
        """Rows that were demoted, until they are `wanted` again: written last, they still go first."""
        self.withheld: set[int] = set()
        """Rows of sessions that are over, until they are `wanted` again: what is owed of these is not sent."""
        self._unwritten: list[Debt] = []  # What went in this step, and was owed.
        self._leaving_rows = self._wanted = leaving_rows
        self._due = {tier: deque[int]() for tier in self._evict}  # Rows that left, first ones first.
        self._ending = False

    # What happens to chunks.

    def due(self, keys: Sequence[OffloadKey], tier: Tier, request: Request) -> list[OffloadKey]:
        """Take note that a request has stored keys for a tier; return those that are sent to it at once."""
        if tier.spec.cascade == WHEN_EVICTED:
            rows = list(map(self._primary.ready.__getitem__, keys))
            owed, owed_for, bit, number = self._owed, self._owed_for[tier], tier.bit, request.number
            for row in rows:
                owed[row] |= bit
                owed_for[row] = number
            if self._ending:
                self._have_due(rows, tier)
            return []
        seen = self._seen[tier]
        again = [key for key in keys if key in seen]
        for key in reversed(keys):  # Of more than can be remembered the beginning is.
            seen.setdefault(key, request.number)
            seen.move_to_end(key)
        self._forget(seen)
        if len(again) < len(keys):
            tier.counters.skip(FIRST_USE, len(keys) - len(again))
        return again

    def used(self, keys: Iterable[OffloadKey], request: Request, now: float) -> None:
        """Take note that a request uses keys that the primary has, or is about to have."""
        ready = self._primary.ready
        for tier in self._second_use:
            if not request.stores_in(tier.spec):
                continue
            seen = self._seen[tier]
            again = [key for key in keys if key in ready and not tier.last_answer(key)]
            self._outbox.cascade(dict.fromkeys(again), tier, now)
            for key in keys:
                if key not in ready:
                    seen.setdefault(key, request.number)
            self._forget(seen)

    def _forget(self, seen: Seen) -> None:
        """Forget what was seen longest ago, beyond what may be remembered."""
        for _ in range(len(seen) - self._seen_max):
            seen.popitem(last=False)

    def promoted(self, key: OffloadKey, source: TierSpec, request: Request) -> None:
        """Take note that a chunk comes from one tier; the others are owed it, as if it had been stored."""
        row = self._primary.filling[key]
        for tier, owed_for in self._owed_for.items():
            owed_for[row] = _NOBODY
            if tier.spec is not source and request.stores_in(tier.spec):
                self._owed[row] |= tier.bit
                owed_for[row] = request.number

    def wanted(self, rows: Sequence[int]) -> None:
        """Take note that somebody uses rows again, or will, by what was said of them: they are as any other."""
        if self.withheld:
            self.withheld.difference_update(rows)
        if self.demoted:
            self.demoted.difference_update(rows)

    def not_due(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        """Take note that a tier is owed nothing of keys, nor if it loses them, as long as they are in the primary."""
        if tier.spec.cascade == WHEN_EVICTED:
            owed_for = self._owed_for[tier]
            for row in self._primary.rows_of(keys):
                self._owed[row] &= ~tier.bit
                owed_for[row] = _KEPT_OUT

    def keep_out(self, keys: Sequence[OffloadKey], request: Request) -> None:
        """Take note that a request that has used keys keeps its own out of tiers, as its client says at its end.

        What is owed for its sake is not written, and not owed again. What was first seen with it counts as never seen.
        """
        row_of = self._primary.row
        rows = [(key, row) for key in keys if (row := row_of(key)) is not None]
        for tier, owed_for in self._owed_for.items():
            if request.keeps_out(tier.spec):
                mine = [each for each in rows if owed_for[each[1]] == request.number]
                tier.counters.skip(NO_STORE, self._write_off(mine, tier))
                for _, row in mine:
                    owed_for[row] = _KEPT_OUT
        for tier in self._second_use:
            if request.keeps_out(tier.spec):
                seen = self._seen[tier]
                self._unsee(self._lacking([key for key in keys if seen.get(key) == request.number], tier), tier)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Take note that keys are to be forgotten everywhere: so, too, that they were seen.

        What something still holds is written to no tier meanwhile.
        """
        for tier in self._second_use:
            self._unsee(keys, tier)
        for tier in self._evict:
            self.not_due(keys, tier)

    def _unsee(self, keys: Iterable[OffloadKey], tier: Tier) -> None:
        seen = self._seen[tier]
        for key in keys:
            seen.pop(key, None)

    def _write_off(self, chunks: Iterable[tuple[OffloadKey, int]], tier: Tier) -> int:
        """Owe a tier these chunks no more; return how many of them it lacks."""
        owed, bit = self._owed, tier.bit
        unpaid = [(key, row) for key, row in chunks if owed[row] & bit]
        for _, row in unpaid:
            owed[row] &= ~bit
        return len(self._lacking([key for key, _ in unpaid], tier))

    def lost(self, tier: Tier, keys: Iterable[OffloadKey]) -> None:
        """Take note that a tier holds chunks no more: what the primary has of them is owed to it again.

        That is for the same request's sake as before. What is kept out of the tier is not owed.
        """
        if tier.spec.cascade == WHEN_EVICTED:
            owed_for = self._owed_for[tier]
            for row in map(self._primary.ready.get, keys):
                if row is not None and owed_for[row] != _KEPT_OUT:
                    self._owed[row] |= tier.bit

    def unsent(self, keys: Sequence[OffloadKey], tier: Tier) -> None:
        """Take note that a runner was lost with stores of these keys: at the end they are due once more.

        Before the end they are not: a chunk that kills who writes it would kill one runner after the other.
        """
        if self._ending and tier.spec.cascade == WHEN_EVICTED:
            self.lost(tier, keys)
            self._have_due(self._owed_of(self._primary.rows_of(keys), tier), tier)

    def reserved(self, evicted: Sequence[OffloadKey]) -> None:
        """Take note that rows have other keys now: what was owed of the evicted ones is not written any more.

        This is on the way of every store. Where tiers keep up, nothing is owed; else the step's end counts what was.
        """
        owed, rows = self._owed, self._primary.reserved_rows
        bits = list(map(owed.__getitem__, rows))
        if any(bits):
            self._unwritten += zip(reversed(evicted), bits, map(self.withheld.__contains__, rows), strict=False)
            for row in rows:
                owed[row] = 0
        self.wanted(rows)

    # A step, and the end.

    def step(self, now: float, *, runner_up: bool) -> None:
        """Have rows leave the order ahead of demand, and send what is owed of those that have left."""
        primary, leaving = self._primary, self._primary.leaving
        assert leaving is not None
        self._count_unwritten()
        missing = self._wanted - primary.rows_free - len(leaving.left)
        if missing > 0 or leaving.aside:
            primary.leave(missing)
        self._wanted = self._leaving_rows
        news = leaving.take_news()
        keys = primary.keys_of(news)
        for tier, due in self._due.items():
            if news and not self._ending:
                self._have_due(self._owed_of(reversed(news), tier), tier)
            if not runner_up:
                continue
            if keys:  # What the tier has of them is as recent there as what it is sent.
                self._outbox.advise(tier, Advice("rank", keys))
            if due:
                self._send(tier, due, now)

    def want(self, rows: int) -> None:
        """Have the next step make so many rows leave the order, if they may: somebody waits for them."""
        self._wanted = max(self._wanted, rows)

    def room(self, rows: int) -> bool:
        """Say whether so many rows can be had without losing what would be written soon."""
        primary, leaving = self._primary, self._primary.leaving
        if leaving is None or not any(tier.storing for tier in self._evict):
            return True
        missing, owed, withheld = rows - primary.rows_free, self._owed, self.withheld
        idle = (row for row in leaving.left if not (primary.pinned(row) or (owed[row] and row not in withheld)))
        return missing <= 0 or len(list(islice(idle, missing))) == missing

    @property
    def due_rows(self) -> int:
        """How many rows wait to be sent, as soon as their tiers' limits allow."""
        return sum(map(len, self._due.values()))

    def end(self) -> None:
        """Have all that is owed sent from now on, in the order in which it was stored."""
        self._ending = True
        for tier, due in self._due.items():
            due.clear()
            due.extend(self._owed_of(self._primary.ready.values(), tier))

    def give_up(self, reason: str) -> int:
        """Count what is still owed as not written; return how many chunks were to be."""
        self._count_unwritten()
        owed, withheld = self._owed, self.withheld
        given_up = [(key, row) for key, row in self._primary.ready.items() if owed[row]] if self.owes else []
        skipped = self._skip([(key, owed[row], row in withheld) for key, row in given_up], reason)
        for _, row in given_up:
            owed[row] = 0
        return skipped

    def clear(self) -> None:
        """Forget what is owed: the primary is about to drop every key."""
        self.give_up(RESET)
        for due in self._due.values():
            due.clear()
        self.withheld.clear()
        self.demoted.clear()

    def _have_due(self, rows: Sequence[int], tier: Tier) -> None:
        """Have rows sent after those that are due; while a tier takes nothing, some are due again and again."""
        due = self._due[tier]
        if len(due) + len(rows) > DUE_A_ROW * self._primary.rows:
            again = set(rows)
            still = dict.fromkeys(row for row in self._owed_of(due, tier) if row not in again)
            due.clear()
            due.extend(still)
        due.extend(rows)

    def _send(self, tier: Tier, due: deque[int], now: float) -> None:
        places, keys = self._outbox.places(tier, now), list[OffloadKey]()
        while due and len(keys) < places:
            keys += self._sendable(_taken(due, places - len(keys)), tier)
        size, head_first = self._action_chunks, 1 if self._ending else -1
        for start in range(0, len(keys), size):  # Head first within an action, as a tier expects it.
            self._outbox.store(keys[start : start + size][::head_first], tier)
        row_of = self._primary.ready.__getitem__
        if self.demoted and (demoted := [key for key in keys[::head_first] if row_of(key) in self.demoted]):
            self._outbox.advise(tier, Advice("demote", demoted))

    def _sendable(self, rows: Iterable[int], tier: Tier) -> Sequence[OffloadKey]:
        """Return the keys that a tier is owed of these rows and lacks, in order; it is owed nothing of them any more.

        What was used again, or has gone, is not due.
        """
        primary, owed, unpaid = self._primary, self._owed, ~tier.bit
        assert primary.leaving is not None
        each = dict.fromkeys(rows)  # One that left, came back and left again is due twice.
        here = primary.ready_rows(each) if self._ending else filter(primary.leaving.left.__contains__, each)
        paid = self._owed_of(here, tier)
        for row in paid:
            owed[row] &= unpaid
        return self._lacking(primary.keys_of(paid), tier)

    def _owed_of(self, rows: Iterable[int], tier: Tier) -> list[int]:
        """Return those of the rows that are owed to a tier, but for what is withheld."""
        owed, bit, withheld = self._owed, tier.bit, self.withheld
        if withheld:
            return [row for row in rows if owed[row] & bit and row not in withheld]
        return [row for row in rows if owed[row] & bit]

    def _lacking(self, keys: Sequence[OffloadKey], tier: Tier) -> Sequence[OffloadKey]:
        """Return those of the keys that a tier neither has, as far as is known, nor is getting."""
        mask, bit, storing, answered = self._residency.mask, tier.bit, tier.storing, tier.answered
        if mask.keys().isdisjoint(keys) and storing.isdisjoint(keys) and answered.isdisjoint(keys):
            return keys  # As most are that leave.
        return [key for key in keys if not (mask.get(key, 0) & bit or key in storing or key in answered)]

    def _count_unwritten(self) -> None:
        """Count what went since the last step's end, and was owed."""
        if self._unwritten:
            self._skip(self._unwritten, PRESSURE)
            self._unwritten.clear()

    def _skip(self, debts: Sequence[Debt], reason: str) -> int:
        """Count for each tier what it was owed and lacks.

        What was withheld has a reason of its own. Return how many others there were.
        """
        skipped = 0
        for tier in self._evict:
            for over in (False, True):
                owed = [key for key, bits, withheld in debts if bits & tier.bit and withheld is over]
                if lacked := len(self._lacking(owed, tier)):
                    tier.counters.skip(OVER if over else reason, lacked)
                    skipped += 0 if over else lacked
        return skipped


def _taken(due: deque[int], count: int) -> list[int]:
    """Take so many of the first rows that are due, or all."""
    if count < len(due):
        return [due.popleft() for _ in range(count)]
    rows = list(due)
    due.clear()
    return rows
