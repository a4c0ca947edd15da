"""One tier behind a manager that is not kvtier's: jobs over rows that somebody else pins, and answers to look-ups.

What kvtier's ledger does for many tiers over its own primary, this does for one over another's. It differs in one
point: whoever asked has no quarantine, so that a job is over only when nothing uses its rows any more. Where the runner
is a process, one that has not let go of rows in time is killed for it.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.backend import OffloadKey
from kvtier.engine.events import Event, EventKind, EventLog
from kvtier.engine.inbox import Observe
from kvtier.engine.outbox import RANK_KEYS_MAX
from kvtier.engine.requests import PROMOTIONS_MAX, Position, Request, Search
from kvtier.engine.tier import NOT_TRIED, Residency, Tier, TierSpec, failures, judge, unanswered
from kvtier.engine.tier_log import TierLog
from kvtier.runner.bridge import Bridge
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Answered,
    Cascade,
    Code,
    Finished,
    Found,
    Gone,
    LocalMessage,
    Message,
    Probe,
    Promote,
    Rank,
    Returned,
    RunnerBack,
    RunnerGone,
    RunnerLost,
    Scanned,
    TierUsage,
    pack_keys,
    pack_rows,
    unpack_keys,
    unpack_rows,
)

# What is under way for a manager that is not kvtier's: its jobs, the parts they are sent in, and what became of them.
#
# A job is over only when nothing uses its rows any more: whoever gave it has no quarantine for rows that come back
# late.


class Way(Enum):
    """Which way a job's chunks go; the values are the operations' names in metrics."""

    LOAD = "load"
    STORE = "store"


class Done(NamedTuple):
    """A job that is over: the keys that moved; `whole` unless one had to and did not."""

    job_id: int
    moved: Sequence[OffloadKey]
    whole: bool
    seconds: float


class Job:
    """A job in parts of at most `action_chunks` chunks."""

    def __init__(self, job_id: int, way: Way, request: Request) -> None:
        self.job_id = job_id
        self.way = way
        self.request = request
        self.begun = time.monotonic()
        self.parts = 0
        self.moved: list[OffloadKey] = []
        self.whole = True

    @property
    def done(self) -> Done:
        return Done(self.job_id, self.moved, self.whole, time.monotonic() - self.begun if self.moved else 0.0)


class Part(NamedTuple):
    """One action under way."""

    job: Job | None  # None: a probe.
    keys: Sequence[OffloadKey]
    epoch: int


class Jobs:
    """Parts under way by action id, and the jobs that are over and were not told yet."""

    def __init__(self, tier: Tier, action_chunks: int) -> None:
        self.parts: dict[int, Part] = {}
        self.done: list[Done] = []
        self.epoch = 0  # Of the runner that takes actions now.
        self._tier = tier
        self._action_chunks = action_chunks
        self._overdue: set[int] = set()  # Parts that failed in time, and whose rows have yet to come back.
        self._ids = 0

    def begin(self, job: Job, chunks: Sequence[tuple[OffloadKey, int]]) -> Iterator[Action]:
        """Enter a job over these keys and rows, and yield its actions; one without any is over."""
        kind = Promote if job.way is Way.LOAD else Cascade
        for start in range(0, len(chunks), self._action_chunks):
            keys, rows = zip(*chunks[start : start + self._action_chunks], strict=True)
            job.parts += 1
            yield kind(self._enter(job, keys), self._tier.index, pack_keys(keys), pack_rows(rows))
        if not chunks:
            self.done.append(job.done)

    def ask(self, keys: Sequence[OffloadKey]) -> Iterator[Action]:
        """Enter probes of these keys."""
        for start in range(0, len(keys), self._action_chunks):
            some = keys[start : start + self._action_chunks]
            yield Probe(self._enter(None, some), self._tier.index, pack_keys(some))

    def take_done(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def late(self, id_: int) -> None:
        """Note that a part has failed, and that its rows are still in use."""
        self._overdue.add(id_)
        self._tier.overdue_rows += len(self.parts[id_].keys)

    def is_late(self, id_: int) -> bool:
        return id_ in self._overdue

    def leave(self, id_: int) -> Part | None:
        """Note that nothing uses a part's rows any more, and return it; the last part ends its job."""
        part = self.parts.pop(id_, None)
        if part is None:
            return None
        if id_ in self._overdue:
            self._overdue.discard(id_)
            self._tier.overdue_rows -= len(part.keys)
        if part.job is not None:
            part.job.parts -= 1
            if part.job.parts == 0:
                self.done.append(part.job.done)
        return part

    def of(self, epoch: int) -> list[tuple[int, Part]]:
        """Return what a runner has."""
        return [(id_, part) for id_, part in self.parts.items() if part.epoch == epoch]

    def _enter(self, job: Job | None, keys: Sequence[OffloadKey]) -> int:
        self._ids += 1
        self.parts[self._ids] = Part(job, keys, self.epoch)
        return self._ids


# What comes back from one tier behind a manager that is not kvtier's, and what it changes.
#
# What kvtier's `Inbox` does for many tiers over its own rows, this does for one over another's.


GONE = frozenset({Code.MISSING, Code.CORRUPT})


class Replies:
    """Applies messages, each in one step, and queues what is to be answered."""

    def __init__(
        self, bridge: Bridge, tier: Tier, where: Residency, jobs: Jobs, observe: Observe, events: EventLog | None
    ) -> None:
        self.up = True  # There is a runner that takes actions.
        self.runners_lost = 0
        self.queued: list[Action] = []
        self._bridge = bridge
        self._tier = tier
        self._where = where
        self._jobs = jobs
        self._observe = observe
        self._events = events

    def apply(self, message: Message | LocalMessage, now: float) -> None:
        """Apply one message; one about a part that is not under way any more changes nothing."""
        match message:
            case Finished():
                self._finished(message, now)
            case Returned():
                self._returned(message)
            case Answered():
                self._answered(message, now)
            case Found():
                keys = unpack_keys(message.keys)
                self._where.add(self._tier, keys)
                self._learn_by_report(EventKind.STORED, keys)
            case Gone():
                keys = unpack_keys(message.keys)
                self._where.remove(self._tier, keys)
                self._learn_by_report(EventKind.REMOVED, keys)
                self._tier.raced.update(self._tier.storing.intersection(keys))
            case Scanned():
                self._tier.authoritative = self._tier.reports = message.complete
            case TierUsage():
                self._used(message)
            case RunnerLost():
                self.up, self._tier.authoritative = False, False
                self.runners_lost += 1
            case RunnerGone():
                self._lose(message.epoch, now)
            case RunnerBack():
                self.up, self._jobs.epoch = True, message.epoch
                self._bridge.admit(message.epoch)
            case _:
                pass  # The rest is between the bridge and its runner.

    def refuse(self, actions: Iterable[Action], now: float) -> None:
        """Settle actions that the bridge did not take: nothing was lent."""
        for action in actions:
            match action:
                case Acknowledge():
                    self.queued.append(action)
                case Rank():
                    pass  # The tier goes by what it saw itself.
                case Probe():
                    self._believe(self._jobs.parts.pop(action.id).keys, b"", now)
                case _:
                    self._settle_whole(self._jobs.parts[action.id], Code.REFUSED, now)
                    self._jobs.leave(action.id)

    def rank(self, request: Request) -> None:
        """Have the tier hear in which order a request used its chunks, once it is over and all that it stores, too."""
        if not (request.finished and request.storing == 0 and self.up):
            return
        tier, mask = self._tier, self._where.mask
        held = [key for key in request.used if mask.get(key, 0) or tier.last_answer(key)]
        for start in reversed(range(0, len(held), RANK_KEYS_MAX)):  # Tail first.
            self.queued.append(Rank(tier.index, pack_keys(held[start : start + RANK_KEYS_MAX])))

    def _finished(self, message: Finished, now: float) -> None:
        part = self._jobs.parts.get(message.id)
        if part is None or part.job is None:
            return
        self._observe(self._tier.spec.name, part.job.way.value, message.seconds)
        self._settle(part, failures(message), now, message.cause)
        if message.lent:
            self._jobs.late(message.id)
            self._bridge.replace()  # Nobody else's rows are in it.
        else:
            self._jobs.leave(message.id)

    def _returned(self, message: Returned) -> None:
        """Take rows back. What was stored too late is asked for and not believed: it may have gone since."""
        part = self._jobs.leave(message.id)
        if part is not None and part.job is not None and part.job.way is Way.STORE:
            keys = [part.keys[index] for index in unpack_rows(message.moved)]
            self._tier.forget_answers(keys)
            for key in keys:
                self._tier.unsure(key)

    def _answered(self, message: Answered, now: float) -> None:
        part = self._jobs.parts.pop(message.id, None)
        if part is None:
            return
        self._observe(self._tier.spec.name, "probe", message.seconds)
        if not message.present:
            unanswered(self._tier, message.cause, now)
        self._believe(part.keys, message.present, now)

    def _settle_whole(self, part: Part, code: Code, now: float) -> None:
        self._settle(part, dict.fromkeys(range(len(part.keys)), code), now)

    def _settle(self, part: Part, failed: Mapping[int, Code], now: float, cause: str = "") -> None:
        """Take an outcome into the part's job, the tier's breaker and what is known of where keys are."""
        assert part.job is not None, part
        job = part.job
        moved = [key for index, key in enumerate(part.keys) if index not in failed]
        for code in failed.values():
            self._tier.counters.fail(code.name.lower(), 1)
        if judge(self._tier, failed.values(), now, cause):
            self._tier.counters.transfers_failed += 1
        self._where.remove(self._tier, [part.keys[index] for index, code in failed.items() if code in GONE])
        job.moved += moved
        job.whole = job.whole and not failed
        if job.way is Way.LOAD:
            self._loaded(job, part, failed, now)
        else:
            self._stored(job, part, moved, now)

    def _loaded(self, job: Job, part: Part, failed: Mapping[int, Code], now: float) -> None:
        self._tier.loading -= len(part.keys)
        self._tier.counters.loaded += len(part.keys) - len(failed)
        for index, code in failed.items():
            job.request.search.give_up(part.keys[index])  # Or whoever asked would ask for ever.
            if code not in NOT_TRIED:
                self._tier.believe(part.keys[index], present=False, now=now)

    def _stored(self, job: Job, part: Part, moved: Sequence[OffloadKey], now: float) -> None:
        job.request.storing -= len(part.keys)
        self._where.add(self._tier, self._tier.stored(part.keys, moved, now))
        self._note(EventKind.STORED, moved)
        self.rank(job.request)

    def _lose(self, epoch: int, now: float) -> None:
        """Settle all that a runner had whose process has ended."""
        for id_, part in self._jobs.of(epoch):
            if part.job is None:
                self._believe(part.keys, b"", now)
            elif not self._jobs.is_late(id_):
                self._settle_whole(part, Code.LOST, now)
            self._jobs.leave(id_)

    def _used(self, usage: TierUsage) -> None:
        tier = self._tier
        tier.chunks, tier.used_bytes = usage.chunks, usage.used_bytes
        tier.capacity_bytes, tier.reserved_bytes = usage.capacity_bytes, usage.reserved_bytes
        tier.counters.note(usage.counts)

    def _believe(self, keys: Sequence[OffloadKey], present: bytes, now: float) -> None:
        """Believe a probe's answers, but for keys of which something newer is known; without any they are absent."""
        for index, key in enumerate(keys):
            if key in self._tier.asking:
                self._tier.believe(key, present=bool(present and present[index]), now=now)

    def _learn_by_report(self, kind: EventKind, keys: Sequence[OffloadKey]) -> None:
        self._tier.forget_answers(keys)
        self._note(kind, keys)
        self.queued.append(Acknowledge(self._tier.index))

    def _note(self, kind: EventKind, keys: Sequence[OffloadKey]) -> None:
        if keys and self._events is not None:
            self._events.add(Event(kind, self._tier.spec.name, keys))


class TierClient:
    """Calls come from one thread at a time; none waits but `drain` and `close`."""

    def __init__(
        self, bridge: Bridge, spec: TierSpec, *, action_chunks: int, observe: Observe, events: EventLog | None = None
    ) -> None:
        """Take over a bridge whose runner has this one tier open; `observe` hears how long each transfer took."""
        self.tier = Tier(0, spec)
        self._bridge = bridge
        self._events = events
        self._where = Residency()
        self._jobs = Jobs(self.tier, action_chunks)
        self._replies = Replies(bridge, self.tier, self._where, self._jobs, observe, events)
        self._tier_log = TierLog([self.tier])
        self._requests: dict[str, Request] = {}

    @property
    def pending(self) -> bool:
        """A job or a question is under way."""
        return bool(self._jobs.parts) or bool(self._jobs.done) or bool(self.tier.to_ask)

    @property
    def runners_lost(self) -> int:
        return self._replies.runners_lost

    @property
    def events_dropped(self) -> int:
        return 0 if self._events is None else self._events.dropped

    # Requests, and what they ask for.

    def begin(self, request_id: str, position: Position | None = None) -> None:
        """Take note of a request, until `finish`; `position` says where a key's chunk ends in its tokens."""
        self._requests.setdefault(request_id, Request(request_id, position=position))

    def finish(self, request_id: str) -> None:
        """Forget a request; the tier hears in which order it used its chunks, once all that it stores is stored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.finished = True
            request.order_used()
            self._replies.rank(request)

    def has(self, key: OffloadKey, request_id: str) -> bool | None:
        """Say whether the tier has a key, and may be asked for it; None: it has yet to say, and is asked."""
        now = self._receive()
        search = self._request(request_id).search
        if not self._replies.up or not self.tier.admits(now) or search.promotions.get(key, 0) >= PROMOTIONS_MAX:
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
        self._replies.queued.extend(self._jobs.begin(Job(job_id, Way.LOAD, request), chunks))

    def store(self, job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int], request_id: str) -> None:
        """Begin to store these rows, but for what the tier has or is getting; what exceeds a limit is not stored.

        Raises as `load` does.
        """
        offered = _chunks(keys, rows)
        now = self._receive()
        request, tier, mask = self._request(request_id), self.tier, self._where.mask
        request.used.update(dict.fromkeys(keys))
        job = Job(job_id, Way.STORE, request)
        chunks: list[tuple[OffloadKey, int]] = []
        for key, row in offered:
            if mask.get(key, 0) or key in tier.storing:
                continue
            if reason := self._refusal(now):
                tier.counters.drop(reason, 1)
                job.whole = False
                continue
            tier.storing.add(key)
            tier.breaker.take()
            chunks.append((key, row))
        request.storing += len(chunks)
        self._replies.queued.extend(self._jobs.begin(job, chunks))

    def finished(self) -> list[Done]:
        """Return the jobs that are over and were not told yet."""
        self._receive()
        return self._jobs.take_done()

    def flush(self) -> None:
        """Send what was asked for and begun since the last call: once at the end of a step."""
        asked, self.tier.to_ask = self.tier.to_ask, []
        actions = [*self._jobs.ask(asked), *self._replies.queued]
        self._replies.queued.clear()
        if actions:
            self._replies.refuse(self._bridge.send(actions), time.monotonic())

    # The whole.

    def drain(self) -> None:
        """Block until every job is over, and its rows are unused; a runner that keeps them too long is killed."""
        self.flush()
        while any(part.job is not None for part in self._jobs.parts.values()):
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

    def _refusal(self, now: float) -> str:
        """Name the limit that a store of one more chunk would exceed; empty if none."""
        tier = self.tier
        if not self._replies.up:
            return "runner"
        if len(tier.storing) >= tier.spec.store_chunks_max:
            return "budget"
        if tier.admits(now):
            return ""
        return "overdue" if tier.overdue_rows >= tier.spec.overdue_rows_max else "breaker"

    def _receive(self) -> float:
        """Apply everything in the mailbox and return the time."""
        now = time.monotonic()
        mailbox = self._bridge.mailbox
        if mailbox or now >= self._tier_log.due:
            while mailbox:
                self._replies.apply(mailbox.popleft(), now)
            self._tier_log.look(now)
        return now


def _chunks(keys: Sequence[OffloadKey], rows: Sequence[int]) -> list[tuple[OffloadKey, int]]:
    if len(keys) != len(rows) or any(row < 0 for row in rows):
        raise ValueError(f"{len(keys)} keys with rows {list(rows)}: one row, 0 or above, is needed for each")
    return list(zip(keys, rows, strict=True))
