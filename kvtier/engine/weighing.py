"""Weighing: what a tier has is loaded, or the request computes it.

`worth` computes what a load is worth, and changes no request, row or load. This module does what follows from it. It
takes back loads and their rows, tells requests what they compute, gives up what is late, and has tiers tried.

A request is weighed at the step's end, when all that it promotes is known. Only a tier from which no load is worth its
time, however long, is declined within the look-up.
"""

import math
from collections.abc import Sequence
from itertools import chain

from kvtier.backend import OffloadKey
from kvtier.engine.outbox import Outbox, Run, Transfer, chunks_before
from kvtier.engine.primary import Primary
from kvtier.engine.requests import NEVER, Leases, Request
from kvtier.engine.tier import Tier
from kvtier.engine.worth import EXPLORED_CHUNKS, Choice, Worth


class Weighing:
    """Decides for each request which of its loads are sent, and takes back the others."""

    def __init__(self, worth: Worth, primary: Primary, leases: Leases, outbox: Outbox, tiers: Sequence[Tier]) -> None:
        self._worth = worth
        self._primary = primary
        self._leases = leases
        self._outbox = outbox
        self._tiers = tiers
        self.withdrawals = 0  # Requests that must look up again, for what they found is not sent for.
        self._now = 0.0  # Of the step that is weighed,
        self._queued: dict[Tier, int] = {}  # and its chunks that go before those of the next request.

    # Within a look-up.

    def may_try(self, tier: Tier, request: Request, now: float, step: int) -> bool:
        """Say whether to queue loads that are worth nothing: at the step's end, some of them are explored.

        Of one request a step, so that not all have their rows reserved for it.
        """
        if request not in self._outbox.runs:
            if tier.tried_in == step or not self._worth.may_explore(tier, now):
                return False
            tier.tried_in = step
        return True

    def decline_at_once(self, key: OffloadKey, tier: Tier, request: Request, now: float) -> None:
        """Decline a key of a tier from which no load is worth its time, however long."""
        self._decline((key,), tier, request, self._worth.load_s(tier, 1, now))

    def give_up(self, key: OffloadKey, request: Request) -> None:
        """Have a request compute a key that is on its way, and what comes after it; its row stays with the transfer."""
        if request.declined(key):
            return
        search, source = request.search, request.sources.get(key)
        if source is not None and not search.gave_up:
            search.gave_up = True
            self._tiers[source].give_up(request)
        search.decline(key)
        for row in tuple(request.leased):
            if self._primary.key(row) in self._primary.filling:
                self._leases.end(row, request)

    # At the step's end.

    def weigh(self, now: float, step: int) -> None:
        """Take back those of this step's loads that are not worth their time.

        A request that shares chunks with one that was declined, or waits for a tier's word, is weighed when it has
        looked up again.
        """
        self._now, self._queued = now, {}
        withdrawn: set[OffloadKey] = set()
        reassigned = False
        for request, found in self._outbox.runs.items():
            if request.finished:
                continue
            if withdrawn and not withdrawn.isdisjoint(chain(request.held, request.hits)):
                withdrawn.update(self._undo(request, found, found[0].start))
                self.withdrawals += 1
                continue
            runs, moved = found, False
            if any(run.others for run in found):
                runs, moved = self._worth.soonest(found, self._tiers, self._queued, now)
            if moved:
                self._outbox.reassign(request, runs)
                reassigned = True
            withdrawn.update(self._weigh_one(request, runs, waits=request.retried_in == step))
        if reassigned:
            self._outbox.order_loads()
        self._outbox.runs.clear()

    def expect(self, now: float, load: Transfer) -> None:
        """Note how long a load that is about to be sent is expected to take."""
        load.sent_at = now
        if load.tier.speed is not None:
            load.expected_s = self._worth.load_s(load.tier, len(load.keys), now)
            load.sizes = self._worth.sizes(load.tier, len(load.keys))
            load.computing_s = self._computing_s(now, load)

    def _computing_s(self, now: float, load: Transfer) -> float:
        """Return what the request would take to compute what it waits for; if none waits, what is loaded until then."""
        request = load.request
        if request is None or request.late_at == NEVER:
            return (load.tier.loading + len(load.keys)) * self._worth.chunk_s
        return self._worth.computing_s(request.late_at - now)

    # One request's loads.

    def _weigh_one(self, request: Request, runs: Sequence[Run], *, waits: bool) -> Sequence[OffloadKey]:
        """Let a request have the loads that save it most time; return the keys that are not on their way any more.

        `waits`: for a tier's word.
        """
        choice = self._choice(request, runs)
        computes = not waits and self._worth.computes_anyway(choice, self._now)
        if computes:
            choice = Choice(runs[0].start, 0.0, 0.0)
        gone: Sequence[OffloadKey] = ()
        if choice.end < runs[-1].end:
            if waits:
                return self._undo(request, runs, runs[0].start)
            # A tier that has yet to say what it has may be faster.
            passes = not computes and any(run.unasked for run in runs if run.end > choice.end)
            gone = (self._pass_over if passes else self._decline_from)(request, runs, choice.end)
            self.withdrawals += 1
        elif runs[-1].others and not waits:
            self._explore_beside(request, runs)
        if choice.computing_s:
            for tier, chunks in chunks_before(runs, choice.end).items():
                self._queued[tier] = self._queued.get(tier, 0) + chunks
            late_at = self._now + self._worth.patience_s(choice.computing_s)
            request.late_at = late_at if request.late_at == NEVER else max(late_at, request.late_at)
        return gone

    def _choice(self, request: Request, runs: Sequence[Run]) -> Choice:
        tokens = request.tokens_found(self._worth.chunk_tokens)
        if tokens is None:
            return self._worth.choose(runs, request.found, self._queued, self._now)
        return self._worth.choose_all(runs, request.found, tokens, self._queued, self._now)

    def _undo(self, request: Request, runs: Sequence[Run], end: int) -> list[OffloadKey]:
        """Take back a request's loads from this place on, as if it had not looked up; return their keys."""
        gone: list[OffloadKey] = []
        for tier, kept in chunks_before(runs, end).items():
            gone += self._outbox.withdraw(tier, request, kept)
        for key in gone:
            request.search.undo(key)
        self._abandon(gone)
        return gone

    def _pass_over(self, request: Request, runs: Sequence[Run], end: int) -> list[OffloadKey]:
        """Take loads back, and have the request look in other tiers than those that have shown them."""
        for run in runs:
            if run.end > end:
                request.search.passed |= run.tier.bit | run.others
        return self._undo(request, runs, end)

    def _decline_from(self, request: Request, runs: Sequence[Run], end: int) -> list[OffloadKey]:
        """Have a request compute from this place on; return the keys that are not on their way any more."""
        left = [run for run in runs if run.end > end]
        gone: list[OffloadKey] = []
        for tier, kept in chunks_before(runs, end).items():
            keys = self._outbox.withdraw(tier, request, kept)
            if keys:
                chunks = self._queued.get(tier, 0) + len(keys)
                self._decline(keys, tier, request, self._worth.load_s(tier, chunks, self._now))
                gone += keys if kept else self._explore_declined(keys, tier, left, request)
        self._abandon(gone)
        return gone

    def _abandon(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._leases.end_row(self._primary.filling[key])
            self._primary.abandon(key, lent=False)

    def _decline(self, keys: Sequence[OffloadKey], tier: Tier, request: Request, expected_s: float) -> None:
        """Have a request compute these keys of a tier, whose load is expected to take so long."""
        for key in keys:
            request.search.decline(key)
        tier.counters.declined += len(keys)
        tier.counters.declined_requests += 1
        if expected_s < math.inf:  # Or nothing is known of the tier yet.
            tier.counters.declined_seconds += expected_s

    # What is loaded for nobody, to see how fast a tier is.

    def _explore_declined(
        self, keys: list[OffloadKey], tier: Tier, runs: Sequence[Run], request: Request
    ) -> list[OffloadKey]:
        """Have the first of the keys that were to come from a tier loaded for nobody; return the others.

        From that tier, or from another one that has its first run, too: whichever it is time for.
        """
        run = next(run for run in runs if run.tier is tier)
        for each in self._of_bits(tier.bit | run.others):
            most = len(keys) if each is tier else min(run.end - run.start, each.admits(self._now))
            if most and (chunks := self._worth.explores(each, len(keys), self._queued, self._now)):
                chunks = min(chunks, most)
                self._explore(keys[:chunks], each, request)
                return keys[chunks:]
        return keys

    def _explore_beside(self, request: Request, runs: Sequence[Run]) -> None:
        """Have the last chunks of a prompt loaded for nobody from a tier that has them and was not heard of for long.

        The request computes them meanwhile. What it found behind them would have to be computed, too: then it is none.
        """
        run = runs[-1]
        if run.end < request.found or run.end - run.start <= EXPLORED_CHUNKS:
            return
        if request.tokens_found(self._worth.chunk_tokens) is not None:  # A leading part is of no use by itself.
            return
        for tier in self._of_bits(run.others):
            if tier.admits(self._now) >= EXPLORED_CHUNKS and self._worth.explores_beside(tier, self._queued, self._now):
                run.end -= EXPLORED_CHUNKS
                keys = self._outbox.withdraw(run.tier, request, chunks_before(runs, run.end)[run.tier])
                for key in keys:
                    request.search.decline(key)
                self._explore(keys, tier, request)
                return

    def _explore(self, keys: Sequence[OffloadKey], tier: Tier, request: Request) -> None:
        """Have these reserved keys loaded for nobody, to see how fast the tier is."""
        request.leased_hits = request.found  # At the step's end, too, it leases none of them.
        for key in keys:
            self._leases.end(self._primary.filling[key], request)
        self._outbox.explore(keys, tier)

    def _of_bits(self, bits: int) -> list[Tier]:
        return [tier for tier in self._tiers if tier.bit & bits]
