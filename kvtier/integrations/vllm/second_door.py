"""The second door's manager: one tier behind vLLM's, which picks the rows and pins them.

It is the engine's own traffic with tiers (`Transfers`, `Outbox`, `Inbox`), over rows that are not the engine's. vLLM
has no quarantine for rows that come back late. So a job is over only when nothing uses its rows any more. A runner that
has not released rows in time is replaced: the end of its process frees them.
"""

import time
from collections.abc import Iterable, Mapping, Sequence

from kvtier.backend import OffloadKey
from kvtier.engine.answers import Event, EventLog
from kvtier.engine.inbox import Inbox, Observe
from kvtier.engine.outbox import Outbox
from kvtier.engine.requests import PROMOTIONS_MAX, Leases, Position, Request, Search
from kvtier.engine.tier import Residency, Tier, TierSpec
from kvtier.engine.tier_log import TierLog
from kvtier.engine.transfers import Operation, Transfers
from kvtier.hints import RETAIN_S_MAX, Advice, IgnoredHints, hint_of
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

Chunk = tuple[OffloadKey, int]  # A key and its row.


class Job:
    """A job of vLLM's manager, sent to the tier in parts: the keys that moved, and how long it took."""

    def __init__(self, job_id: int, operation: Operation, request: Request, wanted: int) -> None:
        """`wanted`: chunks that have to move for the job to be `whole`."""
        self.job_id = job_id
        self.operation = operation
        self.request = request
        self.moved: list[OffloadKey] = []
        self.seconds = 0.0  # Until it was over, if anything moved.
        self.parts = 0  # Whose rows are in use.
        self._wanted = wanted
        self._begun = time.monotonic()

    @property
    def whole(self) -> bool:
        """Whether all of it moved that had to."""
        return len(self.moved) == self._wanted

    def end(self) -> None:
        """Note that nothing uses the job's rows any more."""
        if self.moved:
            self.seconds = time.monotonic() - self._begun


class TierClient:
    """One tier, and what vLLM's manager has it load and store.

    Calls come from one thread at a time; none waits but `drain` and `close`.
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
        """Take over a bridge whose runner has this one tier open; `observe` hears how long each transfer took."""
        self.tier = tier = Tier(0, spec)
        self.runners_lost = 0
        self.hints_ignored = IgnoredHints()
        rows = _VllmsRows()
        self._where = Residency()
        self._transfers = Transfers(rows)
        self._outbox = Outbox(
            rows, [tier], self._where, self._transfers, cascade_rows_max=0, action_chunks=action_chunks
        )
        leases = Leases(rows, 0, 0.0)
        self._inbox = Inbox(rows, leases, [tier], self._where, self._transfers, self._outbox, events, observe)
        self._tier_log = TierLog([tier])
        self._bridge = bridge
        let_go_in_forks(bridge)  # In a child whatever is begun has failed.
        self._action_chunks = action_chunks
        self._chunk_tokens = chunk_tokens
        self._events = events
        self._up = True  # There is a runner that takes actions.
        self._requests: dict[str, Request] = {}
        self._jobs: dict[int, Job] = {}  # By the id of each of its parts whose rows are in use.
        self._begun: list[Action] = []  # Parts that were not sent yet.
        self._over: list[Job] = []  # And vLLM was not told yet.

    @property
    def pending(self) -> bool:
        """A job or a question is under way."""
        return bool(self._jobs or self._over or self._transfers.under_way or self.tier.to_ask)

    @property
    def runner_up(self) -> bool:
        return self._up

    @property
    def events_dropped(self) -> int:
        return 0 if self._events is None else self._events.dropped

    # Requests, and what they ask for.

    def begin(self, request_id: str, position: Position | None = None, hint: object = None) -> None:
        """Take note of a request, until `finish`; `position` says where a key's chunk ends in its tokens.

        `hint` is what a client sent as one. Of a request that is not to be stored here, nothing is.
        """
        if request_id not in self._requests:
            request = self._requests[request_id] = Request(request_id, position=position)
            request.hint = hint_of(hint, self.hints_ignored)

    def finish(self, request_id: str) -> None:
        """Forget a request; the tier hears in which order it used its chunks, once all its stores are over."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.finished = True
            request.order_used()
            self._rank(request)

    def has(self, key: OffloadKey, request_id: str) -> bool | None:
        """Say whether the tier has a key, and may be asked for it; None: it has yet to say, and is asked."""
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
        """Begin to fill these rows. Raises ValueError, and begins nothing, unless there is one row for each key."""
        chunks = _chunks(keys, rows)
        request, tier = self._request(request_id), self.tier
        request.used.update(dict.fromkeys(keys))
        promotions = request.search.promotions
        for key in keys:
            promotions[key] = promotions.get(key, 0) + 1
        tier.loading += len(keys)
        tier.counters.promoted += len(keys)
        self._begin(Job(job_id, Operation.PROMOTION, request, len(chunks)), chunks)

    def store(self, job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int], request_id: str) -> None:
        """Begin to store these rows, but for what the tier has or is getting; what exceeds a limit is not stored.

        Raises as `load` does.
        """
        offered = _chunks(keys, rows)
        now = self._receive()
        request, mask, storing = self._request(request_id), self._where.mask, self.tier.storing
        request.used.update(dict.fromkeys(keys))
        lacking = {key: row for key, row in offered if key not in storing and not mask.get(key, 0)}
        if request.keeps_out(self.tier.spec):
            self.tier.counters.skip("no_store", len(lacking))
            lacking = {}
        chunks = [(key, row) for key, row in lacking.items() if self._take(key, now)]
        request.storing += 1
        self._begin(Job(job_id, Operation.CASCADE, request, len(lacking)), chunks)

    def finished(self) -> list[Job]:
        """Return the jobs that are over and were not told yet."""
        self._receive()
        over, self._over = self._over, []
        return over

    def flush(self) -> None:
        """Send what was asked for and begun since the last call: once at the end of a step."""
        begun, self._begun = self._begun, []
        if actions := [*self._outbox.flush(), *begun]:
            self._refuse(self._bridge.send(actions), time.monotonic())

    # The whole.

    def drain(self) -> None:
        """Block until every job is over, and its rows are unused; a runner that keeps them too long is killed."""
        self.flush()
        while self._jobs:
            self._bridge.wait(1.0)
            self._receive()

    def take_events(self) -> list[Event]:
        self._receive()
        return [] if self._events is None else self._events.take()

    def close(self, deadline_s: float) -> int:
        """Close the tier; return how many transfers were left behind."""
        self._receive()
        self._tier_log.look(time.monotonic(), last=True)
        return self._bridge.close(deadline_s)

    # What goes out.

    def _request(self, request_id: str) -> Request:
        """Return the request; one that is not known, or over, is treated as one without a past."""
        return self._requests.get(request_id) or Request(request_id)

    def _ask(self, key: OffloadKey, search: Search) -> bool | None:
        """Have the tier asked; a request asks once: else answers older than a step would keep it waiting."""
        tier = self.tier
        if (tier.index, key) in search.asked and key not in tier.asking:
            return tier.last_answer(key)
        if not tier.may_ask(key):
            tier.counters.drop("asking", 1)
            return False
        tier.ask(key)
        search.asked.add((tier.index, key))
        return None

    def _take(self, key: OffloadKey, now: float) -> bool:
        """Say whether one more chunk may be stored, and count it; what exceeds a limit is counted as dropped."""
        tier = self.tier
        if reason := self._refusal(now):
            tier.counters.drop(reason, 1)
            return False
        tier.storing.add(key)
        tier.breaker.take()
        return True

    def _refusal(self, now: float) -> str:
        """Name the limit that a store of one more chunk would exceed; empty if none."""
        tier = self.tier
        if not self._up:
            return "runner"
        if len(tier.storing) >= tier.spec.store_chunks_max:
            return "budget"
        if tier.admits(now):
            return ""
        return "overdue" if tier.overdue_rows >= tier.spec.overdue_rows_max else "breaker"

    def _begin(self, job: Job, chunks: Sequence[Chunk]) -> None:
        """Queue a job's parts; one without any is over."""
        action = Promote if job.operation is Operation.PROMOTION else Cascade
        for start in range(0, len(chunks), self._action_chunks):
            keys, rows = zip(*chunks[start : start + self._action_chunks], strict=True)
            id_ = self._transfers.send(job.operation, self.tier, keys, rows, job.request)
            if job.operation is Operation.CASCADE:
                self._transfers.pin_cascade(rows)
            self._jobs[id_] = job
            job.parts += 1
            self._begun.append(action(id_, self.tier.index, pack_keys(keys), pack_rows(rows)))
        if not chunks:
            self._end(job)

    def _rank(self, request: Request) -> None:
        """Have the tier hear of a request that is over, stores and all, and what its hint said."""
        if not request.finished or request.storing:
            return
        hint = request.hint
        self._outbox.end(list(request.used), self.tier, hint)
        if hint is not None and hint.retain_s:
            keys = request.leading(hint.tokens, self._chunk_tokens)
            retained_s = min(hint.retain_s, RETAIN_S_MAX)
            self._outbox.advise(self.tier, Advice("retain", keys, seconds=retained_s, priority=hint.priority))

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
                self._inbox.apply(message, now)
                if message.id in self._transfers.overdue:
                    self._bridge.replace()  # Nobody else's rows are in it.
                self._let_go((message.id,))
            case Returned():
                self._inbox.apply(message, now)
                self._let_go((message.id,))
            case RunnerLost():
                self._up = False
                self.runners_lost += 1
                self._refuse_begun(now)
                self._inbox.lose(now)
            case RunnerGone():
                lent = list(self._transfers.overdue_of(message.epoch))
                self._inbox.gone(message.epoch)
                self._let_go(lent)
            case RunnerBack():
                self._refuse_begun(now)
                self._up, self._transfers.epoch = True, message.epoch
                self._bridge.admit(message.epoch)
            case _:
                self._inbox.apply(message, now)

    def _refuse_begun(self, now: float) -> None:
        """Settle what was not sent to the runner that it was begun for: the next one would get rows that are not its.

        vLLM gives the rows of a job that is over to somebody else.
        """
        begun, self._begun = self._begun, []
        self._refuse(begun, now)

    def _refuse(self, actions: Sequence[Action], now: float) -> None:
        """Settle actions that the bridge did not take."""
        self._inbox.refuse(actions, now)
        self._let_go(action.id for action in actions if not isinstance(action, Acknowledge | Advise))

    def _credit(self, message: Finished) -> None:
        """Enter what moved into the part's job."""
        job, transfer = self._jobs.get(message.id), self._transfers.under_way.get(message.id)
        if job is not None and transfer is not None:
            failed = message.failures()
            job.moved += [key for index, key in enumerate(transfer.keys) if index not in failed]

    def _let_go(self, ids: Iterable[int]) -> None:
        """Take parts from their jobs whose rows nothing uses any more; the last one ends its job."""
        for id_ in ids:
            if id_ in self._transfers.overdue:
                continue
            job = self._jobs.pop(id_, None)
            if job is not None:
                job.parts -= 1
                if not job.parts:
                    self._end(job)

    def _end(self, job: Job) -> None:
        job.end()
        self._over.append(job)
        if job.operation is Operation.CASCADE:
            job.request.storing -= 1
            self._rank(job.request)


class _VllmsRows:
    """The primary as the engine's parts see it: rows that vLLM pins until their job is over. Nothing is kept here."""

    ready: Mapping[OffloadKey, int] = {}
    filling: Mapping[OffloadKey, int] = {}

    def own(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return keys

    def pin(self, rows: Iterable[int]) -> None: ...
    def unpin(self, rows: Iterable[int]) -> None: ...
    def release(self, row: int) -> None: ...

    def publish(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        return []  # vLLM itself says what its primary holds.

    def abandon(self, key: OffloadKey, *, lent: bool) -> None: ...


def _chunks(keys: Sequence[OffloadKey], rows: Sequence[int]) -> list[Chunk]:
    if len(keys) != len(rows) or any(row < 0 for row in rows):
        raise ValueError(f"{len(keys)} keys with rows {list(rows)}: one row, 0 or above, is needed for each")
    return list(zip(keys, rows, strict=True))
