"""The second door's manager: one tier behind vLLM's manager, which picks the rows and pins them.

It is the engine's own `Traffic` with tiers, over rows that are vLLM's. vLLM has no
quarantine for rows that come back late, so a job ends only when nothing uses its rows any more. A runner that has not
released rows in time is replaced: the end of its process frees them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from kvtier.backend import OffloadKey
from kvtier.engine.answers import Event, EventLog
from kvtier.engine.metrics import TierLog
from kvtier.engine.requests import PROMOTIONS_MAX, Leases, Position, Request, Search
from kvtier.engine.tier import LedgerLimits, Tier, TierSpec
from kvtier.engine.traffic import Observe, Operation, Traffic
from kvtier.memory import let_go_in_forks
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Advise,
    Cascade,
    Finished,
    LocalMessage,
    Message,
    Promote,
    Returned,
    RunnerBack,
    RunnerGone,
    RunnerLost,
    pack_keys,
    pack_rows,
)
from kvtier.settings.hints import RETAIN_S_MAX, Advice, IgnoredHints, hint_of

Chunk = tuple[OffloadKey, int]  # A key and its row.


class DoorJob:
    """A job of vLLM's manager, sent to the tier in parts."""

    def __init__(self, job_id: int, operation: Operation, request: Request, wanted: int) -> None:
        self.job_id = job_id
        self.operation = operation
        self.request = request
        self.moved: list[OffloadKey] = []
        self.seconds = 0.0  # Until its end, if anything moved.
        self.parts = 0  # Parts whose rows are in use.
        self._wanted = wanted  # Chunks that must move for the job to be `whole`.
        self._begun = time.monotonic()

    @property
    def whole(self) -> bool:
        return len(self.moved) == self._wanted

    def end(self) -> None:
        if self.moved:
            self.seconds = time.monotonic() - self._begun


class TierClient:
    """One tier, which loads and stores for vLLM's manager.

    Calls come from one thread at a time; only `drain` and `close` wait.
    """

    def __init__(
        self,
        bridge: Bridge,
        spec: TierSpec,
        *,
        action_chunks: int,
        observe: Observe,
        events: EventLog | None = None,
        chunk_tokens: int = 1,
    ) -> None:
        """Own a bridge whose runner has this one tier open; `observe` is called with each transfer's duration."""
        self.tier = tier = Tier(0, spec)
        self.runners_lost = 0
        self.hints_ignored = IgnoredHints()
        self.events = events or EventLog()
        rows = _VllmsRows()
        limits = LedgerLimits(0, 0, 0.0, action_chunks)
        self._traffic = Traffic(rows, Leases(rows, 0, 0.0), [tier], limits, self.events, observe)
        self._where = self._traffic.locations
        self._tier_log = TierLog([tier])
        self._bridge = bridge
        let_go_in_forks(bridge)  # In a forked child every call fails.
        self._action_chunks = action_chunks
        self._chunk_tokens = chunk_tokens
        self._up = True  # There is a runner that takes actions.
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, DoorJob] = {}  # By the ids of parts whose rows are in use.
        self._begun: list[Action] = []  # Parts to be sent by `flush`.
        self._over: list[DoorJob] = []  # Ended, and not yet reported to vLLM.

    @property
    def pending(self) -> bool:
        """True while a job or a probe is in flight."""
        return bool(self._jobs or self._over or self._traffic.in_flight or self.tier.to_ask)

    @property
    def runner_up(self) -> bool:
        return self._up

    # Requests, and what they ask for.

    def begin(self, request_id: str, position: Position | None = None, hint: object = None) -> None:
        """Track a request until `finish`; `position` returns the end of a key's chunk in its tokens.

        `hint` is as the client sent it.
        """
        if request_id not in self._requests:
            request = self._requests[request_id] = Request(request_id, position=position)
            request.hint = hint_of(hint, self.hints_ignored)

    def finish(self, request_id: str) -> None:
        """Forget a request; the tier learns the order in which it used its chunks, once all its stores have ended."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.finished = True
            request.order_used()
            self._rank(request)

    def has(self, key: OffloadKey, request_id: str) -> bool | None:
        """Return True if the tier has a key and admits a load; None if it has not answered the probe yet."""
        now = self._receive()
        search = self._request(request_id).search
        if not self._up or not self.tier.admits(now) or search.promotions.get(key, 0) >= PROMOTIONS_MAX:
            return False
        answer = self.tier.answer(key, bool(self._where.mask.get(key, 0)), now)
        if answer is None:
            answer = self._ask(key, search)
        if answer:
            self.tier.breaker.take()
        elif answer is not None and key not in search.missed:
            search.missed.add(key)
            self.tier.counters.misses += 1
        return answer

    # Moving.

    def load(self, job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int], request_id: str) -> None:
        """Begin to fill these rows. Raises ValueError and begins nothing unless there is one row for each key."""
        chunks = _chunks(keys, rows)
        request, tier = self._request(request_id), self.tier
        request.used.update(dict.fromkeys(keys))
        promotions = request.search.promotions
        for key in keys:
            promotions[key] = promotions.get(key, 0) + 1
        tier.loading += len(keys)
        tier.counters.promoted += len(keys)
        self._begin(DoorJob(job_id, Operation.PROMOTION, request, len(chunks)), chunks)

    def store(self, job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int], request_id: str) -> None:
        """Begin to store these rows, except chunks that the tier has or is storing, and those above a limit.

        Raises as `load` does.
        """
        offered = _chunks(keys, rows)
        now = self._receive()
        request, mask, storing = self._request(request_id), self._where.mask, self.tier.storing
        request.used.update(dict.fromkeys(keys))
        lacking = {key: row for key, row in offered if key not in storing and not mask.get(key, 0)}
        if request.keeps_out(self.tier.spec):
            self.tier.counters.skipped["no_store"] += len(lacking)
            lacking = {}
        chunks = [(key, row) for key, row in lacking.items() if self._take(key, now)]
        request.storing += 1
        self._begin(DoorJob(job_id, Operation.CASCADE, request, len(lacking)), chunks)

    def finished(self) -> list[DoorJob]:
        """Return the jobs that have ended since the last call."""
        self._receive()
        over, self._over = self._over, []
        return over

    def flush(self) -> None:
        """Send the probes and parts since the last call; called once at the end of a step."""
        begun, self._begun = self._begun, []
        if actions := [*self._traffic.flush(), *begun]:
            self._refuse(self._bridge.send(actions), time.monotonic())

    # The whole.

    def drain(self) -> None:
        """Block until every job has ended and its rows are unused; a runner that keeps them too long is killed."""
        self.flush()
        while self._jobs:
            self._bridge.wait(1.0)
            self._receive()

    def take_events(self) -> list[Event]:
        self._receive()
        return self.events.take()

    def close(self, deadline_s: float) -> int:
        """Close the tier; return the number of transfers that were left behind."""
        self._receive()
        self._tier_log.look(time.monotonic(), last=True)
        return self._bridge.close(deadline_s)

    # What goes out.

    def _request(self, request_id: str) -> Request:
        """Return the request; an unknown or finished one is treated as new."""
        return self._requests.get(request_id) or Request(request_id)

    def _ask(self, key: OffloadKey, search: Search) -> bool | None:
        """Queue a probe, one a request: with answers older than a step it would otherwise wait for ever."""
        tier = self.tier
        if (tier.index, key) in search.asked and key not in tier.asking:
            return key in tier.answered
        if not tier.may_ask(key):
            tier.counters.dropped["asking"] += 1
            return False
        tier.ask(key)
        search.asked.add((tier.index, key))
        return None

    def _take(self, key: OffloadKey, now: float) -> bool:
        """Return True if one more chunk may be stored, and count it: as being stored, or as dropped."""
        tier = self.tier
        if reason := self._refusal(now):
            tier.counters.dropped[reason] += 1
            return False
        tier.storing.add(key)
        tier.breaker.take()
        return True

    def _refusal(self, now: float) -> str:
        """Return the limit that a store of one more chunk would exceed; empty if none."""
        tier = self.tier
        if not self._up:
            return "runner"
        if len(tier.storing) >= tier.spec.store_chunks_max:
            return "budget"
        if tier.admits(now):
            return ""
        return "overdue" if tier.hangs else "breaker"

    def _begin(self, job: DoorJob, chunks: Sequence[Chunk]) -> None:
        """Queue a job's parts; a job without any ends at once."""
        action = Promote if job.operation is Operation.PROMOTION else Cascade
        for start in range(0, len(chunks), self._action_chunks):
            keys, rows = zip(*chunks[start : start + self._action_chunks], strict=True)
            id_ = self._traffic.send(job.operation, self.tier, keys, rows, job.request)
            if job.operation is Operation.CASCADE:
                self._traffic.pin_cascade(rows)
            self._jobs[id_] = job
            job.parts += 1
            self._begun.append(action(id_, self.tier.index, pack_keys(keys), pack_rows(rows)))
        if not chunks:
            self._end(job)

    def _rank(self, request: Request) -> None:
        """Advise the tier of a finished request, once its stores have ended, and of its hint."""
        if not request.finished or request.storing:
            return
        hint = request.hint
        self._traffic.end(list(request.used), self.tier, hint)
        if hint is not None and hint.retain_s:
            keys = request.leading(hint.tokens, self._chunk_tokens)
            retained_s = min(hint.retain_s, RETAIN_S_MAX)
            self._traffic.advise(self.tier, Advice("retain", keys, seconds=retained_s, priority=hint.priority))

    # What comes back.

    def _receive(self) -> float:
        """Apply everything in the mailbox and return the time."""
        now = time.monotonic()
        mailbox = self._bridge.mailbox
        if mailbox or now >= self._tier_log.due:
            while mailbox:
                self._apply(mailbox.popleft(), now)
            self._tier_log.look(now)
        return now

    def _apply(self, message: Message | LocalMessage, now: float) -> None:
        match message:
            case Finished():
                self._credit(message)
                self._traffic.apply(message, now)
                if message.id in self._traffic.overdue:
                    self._bridge.replace()  # The runner serves this tier alone.
                self._let_go((message.id,))
            case Returned():
                self._traffic.apply(message, now)
                self._let_go((message.id,))
            case RunnerLost():
                self._up = False
                self.runners_lost += 1
                self._refuse_begun(now)
                self._traffic.lose(now)
            case RunnerGone():
                self._let_go(self._traffic.gone(message.epoch))
            case RunnerBack():
                self._refuse_begun(now)
                self._up, self._traffic.epoch = True, message.epoch
                self._bridge.admit(message.epoch)
            case _:
                self._traffic.apply(message, now)

    def _refuse_begun(self, now: float) -> None:
        """Settle parts that were never sent to the runner they were begun for.

        vLLM reuses the rows of a job that has ended, so the next runner must not get them.
        """
        begun, self._begun = self._begun, []
        self._refuse(begun, now)

    def _refuse(self, actions: Sequence[Action], now: float) -> None:
        """Settle actions that the bridge did not take."""
        self._traffic.refuse(actions, now)
        self._let_go(action.id for action in actions if not isinstance(action, Acknowledge | Advise))

    def _credit(self, message: Finished) -> None:
        """Add the keys that moved to the part's job."""
        job, transfer = self._jobs.get(message.id), self._traffic.in_flight.get(message.id)
        if job is not None and transfer is not None:
            failed = message.failures()
            job.moved += [key for index, key in enumerate(transfer.keys) if index not in failed]

    def _let_go(self, ids: Iterable[int]) -> None:
        """Take parts whose rows are unused from their jobs; the last one ends its job."""
        for id_ in ids:
            if id_ in self._traffic.overdue:
                continue
            job = self._jobs.pop(id_, None)
            if job is not None:
                job.parts -= 1
                if not job.parts:
                    self._end(job)

    def _end(self, job: DoorJob) -> None:
        job.end()
        self._over.append(job)
        if job.operation is Operation.CASCADE:
            job.request.storing -= 1
            self._rank(job.request)


class _VllmsRows:
    """A primary without state: rows are vLLM's, which pins them until their job ends."""

    ready: Mapping[OffloadKey, int] = {}
    filling: Mapping[OffloadKey, int] = {}

    def own(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return keys

    def pin(self, rows: Iterable[int]) -> None: ...
    def unpin(self, rows: Iterable[int]) -> None: ...
    def release(self, row: int) -> None: ...

    def publish(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        return []  # vLLM announces its own primary's chunks.

    def abandon(self, key: OffloadKey, *, lent: bool) -> None: ...


def _chunks(keys: Sequence[OffloadKey], rows: Sequence[int]) -> list[Chunk]:
    if len(keys) != len(rows) or any(row < 0 for row in rows):
        raise ValueError(f"{len(keys)} keys with rows {list(rows)}: one row, 0 or above, is needed for each")
    return list(zip(keys, rows, strict=True))
