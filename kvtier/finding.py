"""Looking up: where a key is, and having it on its way if a tier has it.

What a request finds in a step stays until the step ends; what a waiting request found is leased to it beyond that.
"""

from collections.abc import Sequence

from kvtier.answers import HIT, HIT_PENDING, MISS, RETRY, LookupResult
from kvtier.books import Books
from kvtier.keys import OffloadKey
from kvtier.request import PROMOTIONS_MAX, Request
from kvtier.tier import Tier


class Finder(Books):
    """The part of a ledger that look-ups go through."""

    def lookup(self, key: OffloadKey, request: Request) -> LookupResult:
        """Say where a key is; one that a tier has is on its way from now on."""
        if key not in self.primary.ready:
            return self._lookup_absent(key, request)
        hits = request.hits
        if not hits:
            self._looking.append(request)
        hits.append(key)
        return HIT

    def _lookup_absent(self, key: OffloadKey, request: Request) -> LookupResult:
        if key in self.primary.filling:
            return self._wait_for(key, request)
        search = request.search
        if not (self.promoting and self.runner_up) or search.promotions.get(key, 0) >= PROMOTIONS_MAX:
            return self._miss(key, request, ())
        mask = self.where.mask.get(key, 0)
        asked: list[Tier] = []
        silent: list[Tier] = []
        for tier in self.tiers:
            if not request.loads_from(tier.spec) or not tier.admits(self._now):
                continue
            asked.append(tier)
            answer = tier.answer(key, bool(mask & tier.bit), self._now)
            if answer is None and (tier.index, key) in search.asked and key not in tier.asking:
                answer = tier.last_answer(key)  # A request asks once: else answers older than a step keep it waiting.
            if answer:
                return self._promote(key, tier, request)
            if answer is not None:
                continue
            if tier.may_ask(key):
                silent.append(tier)
            else:
                tier.counters.drop("asking", 1)
        if not silent:
            return self._miss(key, request, asked)
        for tier in silent:
            tier.ask(key)
            search.asked.add((tier.index, key))
        return RETRY

    def _wait_for(self, key: OffloadKey, request: Request) -> LookupResult:
        if not request.hits:
            self._looking.append(request)
        request.hits.append(key)
        request.waits = True
        return HIT_PENDING

    def _promote(self, key: OffloadKey, tier: Tier, request: Request) -> LookupResult:
        """Reserve and lease a row for a key that a tier has; without one it is a miss, never a wait.

        What the request found before is leased first: a prefix that exceeds the share keeps its leading part.
        """
        evicted = self._reserve((key,)) if self.leases.room(self._rows_found(request), 1) else None
        if evicted is None:
            self.counters.promotions_refused += 1
            return self._miss(key, request, ())
        self._removed(evicted)
        self._lease_hits(request)
        self.leases.take(self.primary.filling[key], request, self._now)
        search = request.search
        search.promotions[key] = search.promotions.get(key, 0) + 1
        search.sources[key] = tier.index
        self.outbox.promote(key, tier, request)
        return self._wait_for(key, request)

    def _rows_found(self, request: Request) -> list[int]:
        """Return the rows of what the request found in this step and has not leased; what failed since has none."""
        before = len(request.found)
        if request.held >= before:
            return self.primary.rows_of(request.hits[request.held - before :])
        return self.primary.rows_of([*request.found[request.held :], *request.hits])

    def _lease_hits(self, request: Request) -> None:
        for row in self._rows_found(request):
            if not self.leases.take(row, request, self._now):
                break
        request.held = len(request.found) + len(request.hits)

    def _miss(self, key: OffloadKey, request: Request, asked: Sequence[Tier]) -> LookupResult:
        missed = request.search.missed
        if key not in missed:
            missed.add(key)
            self.counters.misses += 1
            for tier in asked:
                tier.counters.misses += 1
        return MISS

    def _end_looking(self) -> None:
        """Lease the rows of requests that wait, and let go of other rows answered HIT."""
        looking = self._looking
        if self._looked:  # Room was made, and rows are held for these.
            looking[:0] = self._looked
            self._looked.clear()
            self.primary.end_step()
        for request in looking:
            if request.waits and not request.finished:
                self._lease_hits(request)
            request.forget_hits()
        looking.clear()
