"""Loads: what look-ups want from the tiers, which of it is worth loading, and the batches that are sent.

A look-up reserves the row. At the step's end, when all that a request wants is known, its loads are weighed: see
`worth`. A load is queued once, after that. A declined one gives its row back, and the request computes.

A tier whose loads are declined shows nothing. So once a second a few declined chunks are loaded for no request, to see
whether the tier has become faster. A tier that is passed over, while another one loads, is tried with a prompt's last
chunks; the request computes these.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

from kvtier.backend import OffloadKey
from kvtier.engine.primary import Primary
from kvtier.engine.requests import NEVER, Leases, Request
from kvtier.engine.tier import Tier
from kvtier.engine.transfers import Operation, Transfer, Transfers
from kvtier.engine.worth import Choice, LoadRun, Worth
from kvtier.runner.messages import Action, Promote, pack_keys, pack_rows


class Loads:
    """All loads that are not sent yet, and every decision about them."""

    def __init__(
        self, worth: Worth, primary: Primary, leases: Leases, transfers: Transfers, tiers: Sequence[Tier], batch: int
    ) -> None:
        """`batch`: the most chunks of one action."""
        self._worth = worth
        self._primary = primary
        self._leases = leases
        self._transfers = transfers
        self._tiers = tiers
        self._batch = batch
        self.wanted: dict[Request, list[LoadRun]] = {}  # Not weighed yet, in the order of asking.
        self.queue: dict[tuple[Tier, Request | None], list[OffloadKey]] = {}
        self.trials: dict[Tier, Request] = {}  # The request whose look-up of this step tries a tier.
        self.withdrawals = 0  # Requests that must look up again, because some of what they wanted is not loaded.
        self._now = 0.0  # Of the step that is weighed,
        self._ahead: dict[Tier, int] = {}  # and its chunks that were weighed before those of the next request.

    @property
    def empty(self) -> bool:
        return not (self.wanted or self.queue)

    def keys(self) -> set[OffloadKey]:
        """Return the keys that are in flight, or about to be."""
        sent = [each.keys for each in self._transfers.in_flight.values() if each.operation is Operation.PROMOTION]
        wanted = [run.keys for runs in self.wanted.values() for run in runs]
        return set(chain(*wanted, *self.queue.values(), *sent))

    # Within a look-up.

    def want(
        self,
        key: OffloadKey,
        tier: Tier,
        request: Request,
        too_slow: Sequence[Tier] = (),
        *,
        alternatives: bool = False,
    ) -> None:
        """Load a key from a tier into the row that is reserved for it, if that is worth it at the step's end.

        `too_slow` were passed over for it. `alternatives`: a further tier has the key, or has not answered yet.
        """
        tier.breaker.take()
        if not (request.weighed and self._worth.token_s):
            self._queue_batch((key,), tier, request)
            return
        runs = self.wanted.setdefault(request, [])
        if not runs or runs[-1].tier is not tier or runs[-1].end != request.found:
            runs.append(LoadRun(tier, request.found))
        runs[-1].append(key, too_slow, alternatives=alternatives)

    def may_try(self, tier: Tier, request: Request, now: float) -> bool:
        """Return True if a request is to try a tier that is too slow; one request a step, so that few rows wait."""
        if tier not in self.trials and self._worth.trial_due(tier, now):
            self.trials[tier] = request
        return self.trials.get(tier) is request

    def decline(self, keys: Sequence[OffloadKey], tier: Tier, request: Request, now: float) -> None:
        """Decline keys of a tier: the request computes them."""
        for key in keys:
            request.search.decline(key)
        tier.counters.declined += len(keys)
        tier.counters.declined_requests += 1
        expected_s = self._worth.load_s(tier, self._ahead.get(tier, 0) + len(keys), now)
        if expected_s < math.inf:
            tier.counters.declined_seconds += expected_s

    def give_up(self, key: OffloadKey, request: Request) -> None:
        """Let a request compute a key in flight, and all later ones; the row stays with the transfer."""
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
        """Queue the loads of this step that are worth their time, and take the others back.

        A request that shares chunks with a declined one looks up again. So does one that waits for a probe's answer.
        """
        self._now = now
        withdrawn: set[OffloadKey] = set()
        for request, runs in self.wanted.items():
            if request.finished:
                self._queue_runs(runs, request)
            elif withdrawn and not withdrawn.isdisjoint(chain(request.held, request.hits)):
                withdrawn.update(self._undo(runs, request))
                self.withdrawals += 1
            else:
                withdrawn.update(self._weigh(runs, request, waits=request.retried_in == step))
        self.wanted.clear()
        self._ahead.clear()
        self.trials.clear()

    def flush(self, now: float) -> Iterator[Action]:
        """Turn queued loads into actions."""
        for (tier, request), queued in self.queue.items():
            for start in range(0, len(queued), self._batch):
                keys = queued[start : start + self._batch]
                rows = list(map(self._primary.filling.__getitem__, keys))
                id_ = self._transfers.send(Operation.PROMOTION, tier, keys, rows, request)
                if self._worth.token_s:
                    self._predict(self._transfers.in_flight[id_], now)
                tier.loading += len(keys)
                yield Promote(id_, tier.index, pack_keys(keys), pack_rows(rows))
        self.queue.clear()

    def clear(self) -> None:
        """Forget every load that is not sent: the primary is about to drop every key and pin."""
        self.wanted.clear()
        self.queue.clear()
        self.trials.clear()

    def _predict(self, load: Transfer, now: float) -> None:
        """Record the predicted duration of a load that is about to be sent."""
        tier, request, chunks = load.tier, load.request, len(load.keys)
        load.sent_at = now
        if tier.speed is None:
            return
        load.expected_s = self._worth.load_s(tier, chunks, now)
        load.size_bytes = self._worth.size_bytes(tier, chunks)
        if request is None or request.late_at == NEVER:
            load.computing_s = (tier.loading + chunks) * self._worth.chunk_s
        else:  # All that the request waits for.
            load.computing_s = self._worth.computing_s(request.late_at - now)

    def _queue_batch(self, keys: Sequence[OffloadKey], tier: Tier, request: Request | None) -> None:
        self.queue.setdefault((tier, request), []).extend(keys)
        tier.counters.promoted += len(keys)

    def _queue_runs(self, runs: Sequence[LoadRun], request: Request) -> None:
        for run in runs:
            self._queue_batch(run.keys, run.tier, request)
            self._ahead[run.tier] = self._ahead.get(run.tier, 0) + len(run.keys)

    # One request's loads.

    def _weigh(self, runs: Sequence[LoadRun], request: Request, *, waits: bool) -> Sequence[OffloadKey]:
        """Queue the loads that save a request most time; return the keys that are not loaded.

        `waits`: for a probe's answer.
        """
        choice = self._choice(runs, request)
        computes = not waits and self._worth.computes_anyway(choice, self._now)
        if computes:
            choice = Choice(runs[0].start, 0.0, 0.0)
        kept = [run for run in runs if run.start < choice.end]
        left = runs[len(kept) :]
        if left and waits:
            return self._undo(runs, request)
        if not (left or waits):
            self._try_passed(kept[-1], request, costs=True)
        self._queue_runs(kept, request)
        if choice.computing_s:
            late_at = self._now + self._worth.wait_max_s(choice.computing_s)
            request.late_at = late_at if request.late_at == NEVER else max(late_at, request.late_at)
        if not left:
            return ()
        self.withdrawals += 1
        if not computes and any(run.alternatives for run in left):
            return self._pass_over(left, request)
        return self._decline_runs(left, request)

    def _choice(self, runs: Sequence[LoadRun], request: Request) -> Choice:
        tokens = request.tokens_found(self._worth.chunk_tokens)
        if tokens is None:
            return self._worth.choose(runs, request.found, self._ahead, self._now)
        return self._worth.choose_all(runs, request.found, tokens, self._ahead, self._now)

    def _undo(self, runs: Sequence[LoadRun], request: Request) -> list[OffloadKey]:
        """Take loads back, as if they had not been looked up; return their keys."""
        gone = [key for run in runs for key in run.keys]
        for key in gone:
            request.search.undo(key)
        self._abandon(gone)
        return gone

    def _pass_over(self, runs: Sequence[LoadRun], request: Request) -> list[OffloadKey]:
        """Take loads back, and let the request look in further tiers."""
        for run in runs:
            request.search.passed |= run.tier.bit
        return self._undo(runs, request)

    def _decline_runs(self, runs: Sequence[LoadRun], request: Request) -> list[OffloadKey]:
        """Let a request compute these runs; return the keys that are not loaded."""
        self._try_passed(runs[-1], request, costs=False)
        declined: dict[Tier, list[OffloadKey]] = {}
        for run in runs:
            declined.setdefault(run.tier, []).extend(run.keys)
        gone: list[OffloadKey] = []
        for tier, keys in declined.items():
            self.decline(keys, tier, request, self._now)
            gone += keys[self._try(keys, tier, request) :]
        self._abandon(gone)
        return gone

    def _try(self, declined: Sequence[OffloadKey], tier: Tier, request: Request) -> int:
        """Load the first declined keys for no request, if it is time to try the tier; return how many."""
        if self._ahead.get(tier):
            return 0
        chunks = self._worth.trial_chunks(tier, len(declined), len(declined), self._now)
        if chunks:
            self._load_for_none(declined[:chunks], tier, request)
        return chunks

    def _try_passed(self, run: LoadRun, request: Request, *, costs: bool) -> None:
        """Take the last keys off a request's last run and load them for no request, if it is time to try another tier.

        The request computes them; at least half of the run stays. `costs`: the run is about to be loaded. Then nothing
        that the request has found may come after it, and a leading part must be of use by itself.
        """
        if not run.too_slow:
            return
        if costs and (run.end < request.found or request.tokens_found(self._worth.chunk_tokens) is not None):
            return
        for tier in run.too_slow:
            if self._ahead.get(tier):
                continue
            most = min(run.common, len(run.keys) // 2, tier.admits(self._now))
            chunks = self._worth.trial_chunks(tier, len(run.keys), most, self._now, costs=costs)
            if chunks:
                keys = run.cut(chunks)
                for key in keys:
                    request.search.decline(key)
                tier.breaker.take(chunks)
                self._load_for_none(keys, tier, request)
                return

    def _load_for_none(self, keys: Sequence[OffloadKey], tier: Tier, request: Request) -> None:
        """Load keys as a trial; the request that has looked them up does not hold their rows."""
        request.leased_hits = request.found  # The step's end leases none of them to it.
        for key in keys:
            self._leases.end(self._primary.filling[key], request)
        self._queue_batch(keys, tier, None)
        tier.counters.explored += len(keys)

    def _abandon(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._leases.end_row(self._primary.filling[key])
            self._primary.abandon(key, lent=False)
