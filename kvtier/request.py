"""What the ledger keeps for one request, and the leases that keep a waiting request's rows from being evicted."""

from collections.abc import Iterable, Mapping, Sequence

from kvtier.keys import OffloadKey
from kvtier.primary import Primary
from kvtier.tier import TierMatcher, TierSpec

PROMOTIONS_MAX = 2  # Of one key for one request: the second may follow an eviction; a third would be a loop.


class Search:
    """What a request looked for beyond the primary. Most find all they need there, or are new: these have none."""

    __slots__ = ("asked", "missed", "promotions", "sources")

    def __init__(self) -> None:
        self.promotions: dict[OffloadKey, int] = {}
        self.sources: dict[OffloadKey, int] = {}  # Key -> index of the tier that it was promoted from.
        self.missed: set[OffloadKey] = set()
        self.asked: set[tuple[int, OffloadKey]] = set()  # Tiers, by index, that were asked for a key on its behalf.

    def give_up(self, key: OffloadKey) -> None:
        """Never promote this key again: it did not come."""
        self.promotions[key] = PROMOTIONS_MAX
        self.sources.pop(key, None)


class Request:
    """One request, from `on_new_request` until it has finished and its last store has completed."""

    __slots__ = (
        "_search",
        "finished",
        "found",
        "held",
        "hits",
        "id",
        "leased",
        "load_matchers",
        "matchers",
        "storing",
        "used",
        "waits",
    )

    def __init__(
        self,
        request_id: str,
        matchers: Sequence[TierMatcher] | None = None,
        load_matchers: Sequence[TierMatcher] | None = None,
    ) -> None:
        self.id = request_id
        self.matchers = matchers  # None: every tier.
        self.load_matchers = load_matchers  # Of those, the ones that it may be loaded from; None: each of them.
        self.used: dict[OffloadKey, None] = {}  # Keys whose one access was counted, in prefix order.
        self.hits: list[OffloadKey] = []  # Keys answered HIT or HIT_PENDING in this step, since room was last made.
        self.found: list[OffloadKey] = []  # And those before.
        self.held = 0  # How many of found and hits together, from the first on, are leased.
        self.waits = False  # One of them was HIT_PENDING.
        self.leased: set[int] = set()
        self._search: Search | None = None
        self.storing = 0  # Keys reserved and not completed.
        self.finished = False

    def allows(self, spec: TierSpec) -> bool:
        return self.matchers is None or any(matcher.matches(spec) for matcher in self.matchers)

    def loads_from(self, spec: TierSpec) -> bool:
        chosen = self.load_matchers
        return self.allows(spec) and (chosen is None or any(matcher.matches(spec) for matcher in chosen))

    def forget_hits(self) -> None:
        """Begin a step with nothing looked up."""
        self.hits.clear()
        self.found.clear()
        self.held = 0
        self.waits = False

    @property
    def search(self) -> Search:
        if self._search is None:
            self._search = Search()
        return self._search

    @property
    def sources(self) -> Mapping[OffloadKey, int]:
        """Say of promoted keys from which tier they came, by its index."""
        return {} if self._search is None else self._search.sources


class Leases:
    """Pins with a deadline, one per (row, request), on at most `rows_max` rows together."""

    def __init__(self, primary: Primary, rows_max: int, lease_s: float) -> None:
        self.rows_max = rows_max
        self.deadlines: dict[Request, float] = {}  # Of who has leases, in order: every lease is equally long.
        self._primary = primary
        self._lease_s = lease_s
        self._holders: dict[int, list[Request]] = {}

    @property
    def rows(self) -> int:
        return len(self._holders)

    @property
    def ends_at(self) -> float | None:
        """When the next request's leases end by themselves; None if there are none."""
        return next(iter(self.deadlines.values()), None)

    def room(self, rows: Iterable[int], more: int) -> bool:
        """Say whether these rows, leased or not, and so many others fit into the share."""
        return len(self._holders) + len(set(rows) - self._holders.keys()) + more <= self.rows_max

    def take(self, row: int, request: Request, now: float) -> bool:
        """Lease a row to a request; False if the share is used up."""
        if row in request.leased:
            return True
        holders = self._holders.get(row)
        if holders is None:
            if len(self._holders) >= self.rows_max:
                return False
            self._holders[row] = [request]
        else:
            holders.append(request)
        request.leased.add(row)
        self._primary.pin((row,))
        self.deadlines.setdefault(request, now + self._lease_s)
        return True

    def end(self, row: int, request: Request) -> None:
        """End one lease, if there is one."""
        if row not in request.leased:
            return
        request.leased.discard(row)
        holders = self._holders[row]
        holders.remove(request)
        if not holders:
            del self._holders[row]
        if not request.leased:
            self.deadlines.pop(request, None)
        self._primary.unpin((row,))

    def end_all(self, request: Request) -> None:
        for row in tuple(request.leased):
            self.end(row, request)

    def end_row(self, row: int) -> None:
        """End every lease of a row whose chunk did not come."""
        for request in tuple(self._holders.get(row, ())):
            self.end(row, request)

    def expire(self, now: float) -> None:
        while self.deadlines:
            request, deadline = next(iter(self.deadlines.items()))
            if deadline > now:
                return
            self.end_all(request)

    def clear(self) -> None:
        """Forget all leases without unpinning: the primary has dropped every pin."""
        for request in self.deadlines:
            request.leased.clear()
        self._holders.clear()
        self.deadlines.clear()
