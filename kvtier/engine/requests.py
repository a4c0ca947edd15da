"""Requests: the ledger's record of each, the leases of rows to waiting requests, and a step's hits.

A look-up that hits is the most frequent call, so it is one `append`. The rest waits for an eviction, or the step's end.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from kvtier.backend import OffloadKey, of_one_group
from kvtier.engine.primary import Primary, Rows
from kvtier.engine.tier import TierMatcher, TierSpec
from kvtier.settings.hints import Hint

Position = Callable[[OffloadKey], int | None]
"""The place where a key's chunk ends in its request's tokens; None if unknown."""
Waited = Callable[[float], None]
"""Called with the seconds for which a request has waited for loads."""

PROMOTIONS_MAX = 2  # Of one key for one request: the second may follow an eviction; a third would be a loop.
DECLINED = PROMOTIONS_MAX + 1  # In place of a count: the request computes the key.
NEVER = math.inf  # As a time.

_numbers = count(1)


@dataclass(slots=True, eq=False)
class Search:
    """A request's search in the tiers. Most requests find all in the primary, or are new: these have none."""

    promotions: dict[OffloadKey, int] = field(init=False)
    sources: dict[OffloadKey, int] = field(init=False)  # Key -> index of the tier that it was promoted from.
    missed: set[OffloadKey] = field(init=False)
    asked: set[tuple[int, OffloadKey]] = field(init=False)  # Tiers, by index, that were probed for a key for it.
    gave_up: bool = False  # A load was late.
    passed: int = 0  # Bits of the tiers that are too slow for it, while others may be faster.
    answer_at: float = 0.0  # When their answers are expected.
    probe_deadline: float = NEVER

    def __post_init__(self) -> None:
        self.promotions, self.sources, self.missed, self.asked = {}, {}, set(), set()

    def await_probe(self, now: float, latency_s: float, wait_max_s: float) -> None:
        """Wait for one more probe, and `wait_max_s` longer; `latency_s` is how long the tier's last probe took."""
        begun = self.probe_deadline == NEVER or self.probe_deadline <= now
        self.probe_deadline = (now if begun else self.probe_deadline) + wait_max_s
        self.answer_at = now + latency_s if begun else max(self.answer_at, now + latency_s)

    def awaits_probes(self, now: float) -> bool:
        return max(now, self.answer_at) < self.probe_deadline

    def end_probes(self, now: float) -> None:
        self.probe_deadline = min(now, self.probe_deadline)

    def probes_late_after(self, now: float) -> float:
        """Return when the request gives up its probes; `now`, once, if the answer is expected too late."""
        if not now < self.probe_deadline < NEVER:
            return NEVER
        if not self.awaits_probes(now):
            self.probe_deadline = now
        return self.probe_deadline

    def give_up(self, key: OffloadKey) -> None:
        """Never promote this key again: its load has failed."""
        self.promotions[key] = PROMOTIONS_MAX
        self.sources.pop(key, None)

    def decline(self, key: OffloadKey) -> None:
        """Let the request compute this key, even if a load is in flight."""
        self.promotions[key] = DECLINED
        self.sources.pop(key, None)

    def undo(self, key: OffloadKey) -> None:
        """Take back a promotion that is not sent."""
        self.promotions[key] -= 1
        self.sources.pop(key, None)


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    mine: bool  # It may take rows now.
    short: bool = False  # It found too few.


class Request:
    """One request, from `on_new_request` until it has finished and its last store has completed."""

    __slots__ = (
        "_search",
        "finished",
        "held",
        "hint",
        "hits",
        "id",
        "late_at",
        "leased",
        "leased_hits",
        "load_matchers",
        "matchers",
        "number",
        "position",
        "retried_in",
        "storing",
        "told",
        "turn",
        "used",
        "waiting_since",
        "waits",
        "weighed",
    )

    def __init__(
        self,
        request_id: str,
        matchers: Sequence[TierMatcher] | None = None,
        load_matchers: Sequence[TierMatcher] | None = None,
        position: Position | None = None,
        *,
        weighed: bool = True,
    ) -> None:
        self.id = request_id
        self.number = next(_numbers)  # An id may come again.
        self.weighed = weighed  # Its loads are weighed against computing; a prefetch's are not.
        self.matchers = matchers  # None: every tier.
        self.load_matchers = load_matchers  # A further limit on the tiers that it is loaded from; None: no limit.
        self.position = position  # None: keys are used in prefix order.
        self.hint: Hint | None = None
        self.used: dict[OffloadKey, None] = {}  # Keys whose one access was counted, in prefix order.
        self.hits: list[OffloadKey] = []  # Keys answered HIT or HIT_PENDING in this step, since the last eviction.
        self.held: list[OffloadKey] = []  # Those before it.
        self.leased_hits = 0  # How many of both, from the first on, were leased, or exceeded the share.
        self.waits = False  # One of them was HIT_PENDING.
        self.waiting_since: float | None = None  # The end of the first step with a HIT_PENDING.
        self.retried_in = 0  # The last step in which it was answered RETRY.
        self.late_at = NEVER  # When it gives up its loads.
        self.leased: set[int] = set()
        self._search: Search | None = None
        self.turn: Turn | None = None  # Set while a call looks up that waits for rows; without it, no row is a miss.
        self.storing = 0  # Keys reserved and not completed.
        self.finished = False
        self.told = 0  # How many used keys were ranked at its end.

    @property
    def found(self) -> int:
        return len(self.held) + len(self.hits)

    def tokens_found(self, chunk_tokens: int) -> int | None:
        """Return the tokens of this step's hits, where all or none are needed; None if each stands for a chunk."""
        if self.position is None:
            return None
        first, last = (self.held or self.hits)[0], (self.hits or self.held)[-1]
        several = not of_one_group((first, last))
        if several:  # Later groups may need a window only.
            found = [*self.held, *self.hits]
            last = found[bisect_left(found, True, key=lambda key: not of_one_group((first, key))) - 1]
        begin, end = self.position(first), self.position(last)
        if begin is None or end is None:
            return None
        if begin > end:  # Looked up from the end: a window, for which all before it was computed.
            return begin
        return end - begin + chunk_tokens if several else None

    def tokens_of(self, keys: Sequence[OffloadKey], chunk_tokens: int) -> int:
        """Return how many tokens these keys span, in any order of groups: all groups stand for the same tokens."""
        if self.position is not None and keys:
            ends = map(self.position, (keys[0], keys[-1]) if of_one_group(keys) else keys)
            known = [end for end in ends if end is not None]
            if known:
                return max(known) - min(known) + chunk_tokens
        return len(keys) * chunk_tokens

    def declined(self, key: OffloadKey) -> bool:
        return self._search is not None and self._search.promotions.get(key) == DECLINED

    def allows(self, spec: TierSpec) -> bool:
        return self.matchers is None or any(matcher.matches(spec) for matcher in self.matchers)

    def loads_from(self, spec: TierSpec) -> bool:
        chosen = self.load_matchers
        if chosen is None and self.matchers is None:
            return True
        return self.allows(spec) and (chosen is None or any(matcher.matches(spec) for matcher in chosen))

    def keeps_out(self, spec: TierSpec) -> bool:
        """Return True if the request's hint keeps its chunks out of a tier."""
        return self.hint is not None and self.hint.keeps_out(spec.name)

    def stores_in(self, spec: TierSpec) -> bool:
        return self.allows(spec) and not self.keeps_out(spec)

    def leading(self, tokens: int | None, chunk_tokens: int) -> list[OffloadKey]:
        """Return the used keys of chunks that begin within the leading tokens; None: all of them."""
        used = list(self.used)
        if tokens is None:
            return used
        if (position := self.position) is None:
            return used[: -(-tokens // chunk_tokens)]
        return [key for key in used if (end := position(key)) is not None and end - chunk_tokens < tokens]

    @property
    def last_used(self) -> OffloadKey | None:
        return next(reversed(self.used)) if self.used else None

    def in_prefix_order(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys of one call head first: those of a model's groups come one group after the other."""
        return keys if self.position is None or of_one_group(keys) else by_position(keys, self.position)

    def use(self, keys: Sequence[OffloadKey]) -> bool:
        """Record the use of keys, in prefix order; return True if they continue the keys used before."""
        used, last = self.used, self.last_used
        continues = last is None or not keys or keys[0] not in used
        if continues and last is not None and keys and self.position is not None:
            before, begin = self.position(last), self.position(keys[0])
            continues = before is None or begin is None or before <= begin
        used.update(dict.fromkeys(keys))
        if not continues:
            self.order_used()
        return continues

    def order_used(self) -> None:
        if self.position is not None:
            self.used = dict.fromkeys(by_position(list(self.used), self.position))

    def forget_hits(self) -> None:
        self.hits.clear()
        if self.held:
            self.held.clear()
        self.leased_hits = 0
        self.waits = False

    @property
    def search(self) -> Search:
        if self._search is None:
            self._search = Search()
        return self._search

    @property
    def sources(self) -> Mapping[OffloadKey, int]:
        """The tiers that promoted keys came from, by index."""
        return {} if self._search is None else self._search.sources

    def late_after(self, now: float) -> float:
        """Return when the request next gives up a load or a probe."""
        probes_late_at = NEVER if self._search is None else self._search.probes_late_after(now)
        return min(probes_late_at, self.late_at if self.late_at > now else NEVER)


class Leases:
    """Pins with a deadline, one per (row, request), on at most `rows_max` rows together."""

    def __init__(self, primary: Rows, rows_max: int, lease_s: float) -> None:
        self.rows_max = rows_max
        self.deadlines: dict[Request, float] = {}  # In order: every lease is equally long.
        self._primary = primary
        self._lease_s = lease_s
        self._holders: dict[int, list[Request]] = {}

    @property
    def rows(self) -> int:
        return len(self._holders)

    @property
    def ends_at(self) -> float | None:
        """When the next request's leases expire; None if there are none."""
        return next(iter(self.deadlines.values()), None)

    def room(self, rows: Iterable[int], more: int) -> bool:
        """Return True if these rows, leased or not, and `more` others fit into the share."""
        others = set(rows).difference(self._holders)  # With a view of the keys, Python would walk all of them.
        return len(self._holders) + len(others) + more <= self.rows_max

    def take(self, row: int, request: Request, now: float) -> bool:
        """Lease a row to a request; False if the share is used up."""
        if row in request.leased:
            return True
        if row not in self._holders and len(self._holders) >= self.rows_max:
            return False
        self._holders.setdefault(row, []).append(request)
        request.leased.add(row)
        self._primary.pin((row,))
        self.deadlines.setdefault(request, now + self._lease_s)
        return True

    def end(self, row: int, request: Request) -> None:
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

    def abandon(self, keys: Sequence[OffloadKey]) -> None:
        """Free the rows of filling keys that nothing will fill, and end their leases."""
        for key in keys:
            self.end_row(self._primary.filling[key])
            self._primary.abandon(key, lent=False)

    def end_row(self, row: int) -> None:
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


class StepHits:
    """The hits of a step, by request.

    Invariant: at every eviction, the row of each hit of this step is held, as long as it is ready. So a request is in
    `_fresh` while its `hits` are not empty, and in `_held` if its `held` are not, or if it waited and has missed.

    **A caller may skip `add` if the request has a hit already.** While `request.hits` is not empty, a ready key may be
    appended to it instead. `hold`, `end` and `clear` empty the list. It stays the same list.
    """

    def __init__(self, primary: Primary, leases: Leases, waited: Waited | None = None) -> None:
        self._primary = primary
        self._leases = leases
        self._waited = waited
        self._fresh: list[Request] = []  # With hits since the last eviction.
        self._held: list[Request] = []  # With hits before that, or a miss; a request may be in both, and here twice.

    def add(self, request: Request, key: OffloadKey) -> None:
        """Record a hit on a key that is ready or in flight."""
        if not (hits := request.hits):
            self._fresh.append(request)
        hits.append(key)

    def add_miss(self, request: Request) -> None:
        """Record a miss of a waiting request: its wait is over, unless another load is in flight."""
        if not self._held or self._held[-1] is not request:
            self._held.append(request)

    def hold(self) -> None:
        """Pin this step's hits before an eviction."""
        for request in self._fresh:
            self._primary.hold(request.hits)
            request.held += request.hits
            request.hits.clear()
        self._held += self._fresh
        self._fresh.clear()

    def lease(self, request: Request, now: float) -> None:
        """Lease a request its hits: a prefix that exceeds the share keeps its leading part."""
        for row in self.rows(request):
            if not self._leases.take(row, request, now):
                break
        request.leased_hits = len(request.held) + len(request.hits)

    def end(self, now: float, wait_max_s: float | None = None) -> None:
        """Lease waiting requests their hits, for `wait_max_s` a chunk (None: for ever), and release all others."""
        found: Iterable[Request] = self._fresh
        if self._held:  # Rows may be held for these. Each request counts once: its hits are forgotten below.
            found = dict.fromkeys(chain(self._held, self._fresh))
            self._held.clear()
            self._primary.end_step()
        for request in found:
            if request.waits and not request.finished:
                self.lease(request, now)
                if request.waiting_since is None and request.weighed:  # A prefetch is not waited for.
                    request.waiting_since = now
                if wait_max_s is not None and request.weighed and request.late_at == NEVER:
                    request.late_at = now + wait_max_s * request.found
            else:
                request.late_at = NEVER
                if request.waiting_since is not None:
                    self.end_wait(request, now)
            request.forget_hits()
        self._fresh.clear()

    def end_wait(self, request: Request, now: float) -> None:
        since, request.waiting_since = request.waiting_since, None
        if since is not None and self._waited is not None:
            self._waited(now - since)

    def clear(self) -> None:
        """Forget all hits: the primary is about to drop every key."""
        for request in chain(self._held, self._fresh):
            request.forget_hits()
        self._fresh.clear()
        self._held.clear()

    def rows(self, request: Request) -> Sequence[int]:
        """Return the rows of hits that no lease was tried for; a key whose load has failed has none."""
        held = len(request.held)
        if request.leased_hits >= held:
            return self._primary.rows_of(request.hits[request.leased_hits - held :])
        return self._primary.rows_of([*request.held[request.leased_hits :], *request.hits])


def by_position(keys: Sequence[OffloadKey], position: Position) -> Sequence[OffloadKey]:
    """Sort keys by where their chunks end; they stay as they are if that is unknown for one."""
    ends = [(end, index) for index, key in enumerate(keys) if (end := position(key)) is not None]
    return [keys[index] for _, index in sorted(ends)] if len(ends) == len(keys) else keys
