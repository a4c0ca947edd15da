"""Loads: what look-ups want from the tiers, which of it is worth loading, and the batches that are sent.

A look-up reserves the row. At the step's end a request's loads are weighed, each predicted by its tier's speed, for its
own bytes and those queued ahead of it. Tiers load side by side, so the slowest one decides when the leading part is
there. The rest is declined: it gives its rows back, and the request computes it.

A tier whose loads are declined shows nothing. So once a second a few declined chunks are loaded for no request, to see
whether it has become faster. Where another tier is preferred, these are a prompt's last chunks, computed as well.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.prefill import EXPLORE_SHARE, PrefillSpeed
from kvtier.engine.primary import Primary
from kvtier.engine.requests import NEVER, Leases, Request
from kvtier.engine.tier import LedgerLimits, Tier
from kvtier.engine.traffic import Operation, Traffic, Transfer
from kvtier.runner.messages import Action, Promote, pack_keys, pack_rows

TRIAL_CHUNKS = 2  # Of the first trial of a declined tier,
TRIAL_GROWTH = 4  # and times as many in the next one, while that takes less than computing the declined chunks.
TRIAL_EVERY_S = 1.0


@dataclass(slots=True, eq=False)
class LoadRun:
    tier: Tier
    start: int  # Place of the first key among all that the request has found in the step.
    keys: list[OffloadKey] = field(default_factory=list[OffloadKey])
    alternatives: bool = False  # A further tier has some of it, or has not answered yet.
    too_slow: Sequence[Tier] = ()  # Were passed over for its last keys,
    common: int = 0  # for this many of them.

    def append(self, key: OffloadKey, too_slow: Sequence[Tier], *, alternatives: bool) -> None:
        self.keys.append(key)
        self.alternatives = self.alternatives or alternatives
        if too_slow != self.too_slow:
            self.too_slow, self.common = too_slow, 0
        self.common += 1

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


class Choice(NamedTuple):
    """The leading part that is worth its load."""

    end: int  # A place among the keys that the request has found in the step.
    seconds: float  # Predicted for its load; 0 if unknown, or if nothing is loaded.
    computing_s: float  # Predicted for computing it.


@dataclass(slots=True, eq=False)
class Loads:
    """All loads that are not sent yet, and every decision about them."""

    _prefill: PrefillSpeed
    _primary: Primary
    _leases: Leases
    _traffic: Traffic
    _tiers: Sequence[Tier]
    _limits: LedgerLimits
    token_s: float = 0.0  # Seconds to compute one token, in this step; 0 while unknown: loads are not weighed.
    wanted: dict[Request, list[LoadRun]] = field(default_factory=dict[Request, list[LoadRun]])
    """Not weighed yet, in the order of asking."""
    queue: dict[tuple[Tier, Request | None], list[OffloadKey]] = field(
        default_factory=dict[tuple[Tier, Request | None], list[OffloadKey]]
    )
    trials: dict[Tier, Request] = field(default_factory=dict[Tier, Request])
    """The request whose look-up of this step tries a tier."""
    withdrawals: int = 0  # Requests that must look up again, because some of what they wanted is not loaded.
    _now: float = 0.0  # Of the step that is weighed,
    _ahead: dict[Tier, int] = field(default_factory=dict[Tier, int])  # and its chunks that are weighed so far.

    def __post_init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        speed = self._prefill.tokens_per_s
        self.token_s = 0.0 if speed is None else 1.0 / speed

    def wait_max_s(self, chunks: int) -> float:
        """Return how long to wait for chunks: as long as computing them takes, with the margin; NEVER if unknown."""
        return chunks * self._chunk_s * self._limits.late_margin if self.token_s else NEVER

    @property
    def _chunk_s(self) -> float:
        return self._limits.chunk_tokens * self.token_s

    @property
    def empty(self) -> bool:
        return not (self.wanted or self.queue)

    def keys(self) -> set[OffloadKey]:
        sent = [each.keys for each in self._traffic.in_flight.values() if each.operation is Operation.PROMOTION]
        wanted = [run.keys for runs in self.wanted.values() for run in runs]
        return set(chain(*wanted, *self.queue.values(), *sent))

    def never(self, tier: Tier) -> bool:
        """Return True if each chunk of this tier takes longer to load than to compute, however many there are."""
        speed = tier.speed
        return speed is not None and speed.s_per_byte * self._limits.row_bytes >= self._chunk_s

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
        if not (request.weighed and self.token_s):
            self._queue_batch((key,), tier, request)
            return
        runs = self.wanted.setdefault(request, [])
        if not runs or runs[-1].tier is not tier or runs[-1].end != request.found:
            runs.append(LoadRun(tier, request.found))
        runs[-1].append(key, too_slow, alternatives=alternatives)

    def may_try(self, tier: Tier, request: Request, now: float) -> bool:
        """Return True if a request is to try a tier that is too slow; one request a step, so that few rows wait."""
        if tier not in self.trials and _trial_due(tier, now):
            self.trials[tier] = request
        return self.trials.get(tier) is request

    def decline(self, keys: Sequence[OffloadKey], tier: Tier, request: Request, now: float) -> None:
        for key in keys:
            request.search.decline(key)
        tier.counters.declined += len(keys)
        tier.counters.declined_requests += 1
        if (expected_s := self._load_s(tier, self._ahead.get(tier, 0) + len(keys), now)) < math.inf:
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
        for (tier, request), queued in self.queue.items():
            for start in range(0, len(queued), self._limits.action_chunks):
                keys = queued[start : start + self._limits.action_chunks]
                rows = list(map(self._primary.filling.__getitem__, keys))
                id_ = self._traffic.send(Operation.PROMOTION, tier, keys, rows, request)
                if self.token_s:
                    self._predict(self._traffic.in_flight[id_], now)
                tier.loading += len(keys)
                yield Promote(id_, tier.index, pack_keys(keys), pack_rows(rows))
        self.queue.clear()

    def clear(self) -> None:
        """Forget every load that is not sent: the primary is about to drop every key and pin."""
        self.wanted.clear()
        self.queue.clear()
        self.trials.clear()

    def _predict(self, load: Transfer, now: float) -> None:
        tier, request, chunks = load.tier, load.request, len(load.keys)
        load.sent_at = now
        if tier.speed is None:
            return
        load.expected_s = self._load_s(tier, chunks, now)
        load.size_bytes = (tier.loading + chunks) * self._limits.row_bytes
        if request is None or request.late_at == NEVER:
            load.computing_s = (tier.loading + chunks) * self._chunk_s
        else:  # All that the request waits for.
            load.computing_s = (request.late_at - now) / self._limits.late_margin

    def _queue_batch(self, keys: Sequence[OffloadKey], tier: Tier, request: Request | None) -> None:
        self.queue.setdefault((tier, request), []).extend(keys)
        tier.counters.promoted += len(keys)

    def _queue_runs(self, runs: Sequence[LoadRun], request: Request) -> None:
        for run in runs:
            self._queue_batch(run.keys, run.tier, request)
            self._ahead[run.tier] = self._ahead.get(run.tier, 0) + len(run.keys)

    def _weigh(self, runs: Sequence[LoadRun], request: Request, *, waits: bool) -> Sequence[OffloadKey]:
        """Queue the loads that save a request most time; return the keys not loaded. `waits`: for a probe's answer."""
        choice = self._choose(runs, request)
        computes = False  # To measure the prefill speed.
        if choice.seconds and not waits:
            tokens, lost_s = choice.computing_s / self.token_s, choice.computing_s - choice.seconds
            computes = self._prefill.explores(tokens, lost_s, self._now)
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
            late_at = self._now + self._limits.late_margin * choice.computing_s
            request.late_at = late_at if request.late_at == NEVER else max(late_at, request.late_at)
        if not left:
            return ()
        self.withdrawals += 1
        if not computes and any(run.alternatives for run in left):
            for run in left:  # The request looks in further tiers.
                request.search.passed |= run.tier.bit
            return self._undo(left, request)
        return self._decline_runs(left, request)

    def _choose(self, runs: Sequence[LoadRun], request: Request) -> Choice:
        """Choose the leading runs of a request whose load saves most time; the keys between them are in the primary.

        All or nothing, where a leading part is of no use by itself: for models with several groups.
        """
        first, tokens = runs[0].start, request.tokens_found(self._limits.chunk_tokens)
        best = nothing = Choice(first, 0.0, 0.0)
        chunks, slowest_s = dict(self._ahead), 0.0
        for run, end in zip(runs, [*(run.start for run in runs[1:]), request.found], strict=True):
            chunks[run.tier] = chunks.get(run.tier, 0) + len(run.keys)
            slowest_s = max(slowest_s, self._load_s(run.tier, chunks[run.tier], self._now))
            computing_s = (end - first) * self._chunk_s
            if computing_s - slowest_s > best.computing_s - best.seconds:
                best = Choice(end, slowest_s, computing_s)
        if tokens is None:
            return best
        computing_s = tokens * self.token_s
        return Choice(request.found, slowest_s, computing_s) if slowest_s < computing_s else nothing

    def _load_s(self, tier: Tier, chunks: int, now: float) -> float:
        """Predict a load's time, behind those in flight. A tier without a speed loads for one request first."""
        if tier.speed is None:
            return math.inf if tier.loading else 0.0
        size_bytes = (tier.loading + chunks) * self._limits.row_bytes
        return tier.speed.seconds(size_bytes) * tier.slowdown(size_bytes, now)

    def _undo(self, runs: Sequence[LoadRun], request: Request) -> list[OffloadKey]:
        """Take loads back, as if they had not been looked up; return their keys."""
        gone = [key for run in runs for key in run.keys]
        for key in gone:
            request.search.undo(key)
        self._leases.abandon(gone)
        return gone

    def _decline_runs(self, runs: Sequence[LoadRun], request: Request) -> list[OffloadKey]:
        self._try_passed(runs[-1], request, costs=False)
        declined: dict[Tier, list[OffloadKey]] = {}
        for run in runs:
            declined.setdefault(run.tier, []).extend(run.keys)
        gone: list[OffloadKey] = []
        for tier, keys in declined.items():
            self.decline(keys, tier, request, self._now)
            chunks = 0 if self._ahead.get(tier) else self._trial_chunks(tier, len(keys), len(keys))
            if chunks:
                self._load_for_none(keys[:chunks], tier, request)
            gone += keys[chunks:]
        self._leases.abandon(gone)
        return gone

    def _try_passed(self, run: LoadRun, request: Request, *, costs: bool) -> None:
        """Take the last keys off a request's last run and load them for no request, if it is time to try another tier.

        The request computes them; at least half of the run stays. `costs`: the run is about to be loaded. Then nothing
        that the request has found may come after it, and a leading part must be of use by itself.
        """
        if not run.too_slow:
            return
        if costs and (run.end < request.found or request.tokens_found(self._limits.chunk_tokens) is not None):
            return
        for tier in run.too_slow:
            if self._ahead.get(tier):
                continue
            most = min(run.common, len(run.keys) // 2, tier.admits(self._now))
            if chunks := self._trial_chunks(tier, len(run.keys), most, costs=costs):
                keys = run.keys[-chunks:]
                del run.keys[-chunks:]
                for key in keys:
                    request.search.decline(key)
                tier.breaker.take(chunks)
                self._load_for_none(keys, tier, request)
                return

    def _trial_chunks(self, tier: Tier, wanted: int, most: int, *, costs: bool = False) -> int:
        """Return how many chunks to load from a tier as a trial, up to `most`; 0 if none is due.

        `wanted`: the chunks that a request would load from it. Few chunks show what a call costs, and many what their
        bytes cost. A tier on which many are a burden gets fewer. `costs`: the request computes them, although another
        tier would load them. Then trials wait, so that they take a small share of the time.
        """
        if not _trial_due(tier, self._now):
            return 0
        last, chunks = tier.trial, TRIAL_CHUNKS
        if last is not None and last.seconds < wanted * self._chunk_s:
            chunks = TRIAL_GROWTH * last.chunks
        chunks = min(chunks, most)
        if costs and self._now - tier.tried_at < chunks * self._chunk_s / EXPLORE_SHARE:
            return 0
        if chunks:
            tier.trial, tier.tried_at = None, self._now
        return chunks

    def _load_for_none(self, keys: Sequence[OffloadKey], tier: Tier, request: Request) -> None:
        """Load keys as a trial; the request that has looked them up does not hold their rows."""
        request.leased_hits = request.found  # The step's end leases none of them to it.
        for key in keys:
            self._leases.end(self._primary.filling[key], request)
        self._queue_batch(keys, tier, None)
        tier.counters.explored += len(keys)


def _trial_due(tier: Tier, now: float) -> bool:
    return not tier.loading and now - tier.tried_at >= TRIAL_EVERY_S
