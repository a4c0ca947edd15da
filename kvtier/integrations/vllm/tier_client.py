"""One tier behind a manager that is not kvtier's: jobs over rows that somebody else pins, and answers to look-ups.

What kvtier's ledger does for many tiers over its own primary, this does for one over another's. It differs in one
point: whoever asked has no quarantine, so that a job is over only when nothing uses its rows any more. Where the runner
is a process, one that has not let go of rows in time is killed for it.
"""

import time
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import (
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
from kvtier.events import Event, EventKind, EventLog
from kvtier.keys import OffloadKey
from kvtier.tier import Tier, TierSpec, Whereabouts

AT_FAULT = frozenset({Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE})
NOT_TRIED = frozenset({Code.REFUSED, Code.LOST})
GONE = frozenset({Code.MISSING, Code.CORRUPT})


class Way(Enum):
    """Which way a job's chunks go."""

    LOAD = "load"
    STORE = "store"


class Done(NamedTuple):
    """A job that is over: the keys that moved, of all of them."""

    job_id: int
    moved: Sequence[OffloadKey]
    whole: bool
    seconds: float


class _Job:
    """A job in parts of at most `action_chunks` chunks."""

    def __init__(self, job_id: int, way: Way, begun: float) -> None:
        self.job_id = job_id
        self.way = way
        self.begun = begun
        self.parts = 0
        self.moved: list[OffloadKey] = []
        self.whole = True


class _Part(NamedTuple):
    job: _Job | None  # None: a probe.
    keys: Sequence[OffloadKey]
    epoch: int


class TierClient:
    """All calls belong to one thread; none waits but `drain` and `close`."""

    def __init__(self, bridge: Bridge, spec: TierSpec, *, action_chunks: int, events: EventLog | None = None) -> None:
        """Take over a bridge whose runner has this one tier open."""
        self.tier = Tier(0, spec)
        self.runners_lost = 0
        self._bridge = bridge
        self._action_chunks = action_chunks
        self._events = events
        self._where = Whereabouts()
        self._parts: dict[int, _Part] = {}
        self._overdue: set[int] = set()  # Parts that failed in time, and whose rows have yet to come back.
        self._ids = 0
        self._epoch = 0
        self._up = True
        self._queued: list[Action] = []
        self._done: list[Done] = []

    @property
    def pending(self) -> bool:
        """A job or a question is under way."""
        return bool(self._parts) or bool(self._done) or bool(self.tier.to_ask)

    # Asking.

    def has(self, key: OffloadKey) -> bool | None:
        """Say whether the tier has a key; None: it has yet to say, and is asked."""
        now = self._receive()
        if not self._up or not self.tier.admits(now):
            return False
        answer = self.tier.answer(key, bool(self._where.mask.get(key, 0)), now)
        if answer is None:
            self.tier.ask(key)
        return answer

    # Moving.

    def load(self, job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Begin to fill these rows."""
        self.tier.loading += len(keys)
        self.tier.counters.promoted += len(keys)
        self._begin(_Job(job_id, Way.LOAD, time.monotonic()), keys, rows)

    def store(self, job_id: int, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        """Begin to store these rows; what the tier has already is not stored again."""
        now = self._receive()
        job = _Job(job_id, Way.STORE, time.monotonic())
        wanted = [(key, row) for key, row in zip(keys, rows, strict=True) if not self._where.mask.get(key, 0)]
        if not wanted:
            self._done.append(Done(job_id, keys, True, 0.0))
            return
        if reason := self._refusal(len(wanted), now):
            self.tier.counters.drop(reason, len(wanted))
            self._done.append(Done(job_id, (), False, 0.0))
            return
        self.tier.storing.update(key for key, _ in wanted)
        self._begin(job, [key for key, _ in wanted], [row for _, row in wanted])

    def finished(self) -> list[Done]:
        """Return the jobs that are over and were not told yet."""
        self._receive()
        done, self._done = self._done, []
        return done

    def flush(self) -> None:
        """Send what was asked for and begun since the last call: once at the end of a step."""
        queued, self.tier.to_ask = self.tier.to_ask, []
        for keys in self._batches(queued):
            self._queued.append(Probe(self._enter(None, keys), 0, pack_keys(keys)))
        actions, self._queued = self._queued, []
        if actions:
            self._refuse(self._bridge.send(actions))

    # The whole.

    def drain(self) -> None:
        """Block until every job is over, and its rows are unused; a runner that keeps them too long is killed."""
        self.flush()
        while any(part.job is not None for part in self._parts.values()):
            self._bridge.wait(1.0)
            self._receive()

    def take_events(self) -> list[Event]:
        self._receive()
        return [] if self._events is None else self._events.take()

    def close(self, deadline_s: float) -> int:
        """Close the tier; return how many transfers were left behind."""
        return self._bridge.close(deadline_s)

    def _refusal(self, chunks: int, now: float) -> str:
        if not self._up:
            return "runner"
        if len(self.tier.storing) + chunks > self.tier.spec.store_chunks_max:
            return "budget"
        return "" if self.tier.admits(now) else "breaker"

    def _begin(self, job: _Job, keys: Sequence[OffloadKey], rows: Sequence[int]) -> None:
        for start in range(0, len(keys), self._action_chunks):
            some = keys[start : start + self._action_chunks]
            for _ in some:
                self.tier.breaker.take()
            packed = pack_rows(rows[start : start + self._action_chunks])
            job.parts += 1
            kind = Promote if job.way is Way.LOAD else Cascade
            self._queued.append(kind(self._enter(job, some), 0, pack_keys(some), packed))

    def _enter(self, job: _Job | None, keys: Sequence[OffloadKey]) -> int:
        self._ids += 1
        self._parts[self._ids] = _Part(job, keys, self._epoch)
        return self._ids

    def _batches(self, keys: list[OffloadKey]) -> Iterable[list[OffloadKey]]:
        return (keys[start : start + self._action_chunks] for start in range(0, len(keys), self._action_chunks))

    # What comes back.

    def _receive(self) -> float:
        """Apply everything in the mailbox and return the time."""
        now = time.monotonic()
        mailbox = self._bridge.mailbox
        while mailbox:
            self._apply(mailbox.popleft(), now)
        return now

    def _apply(self, message: Message | LocalMessage, now: float) -> None:
        match message:
            case Finished():
                codes = map(Code, message.codes)
                self._settle(message.id, dict(zip(unpack_rows(message.failed), codes, strict=True)), now)
                if message.lent and message.id in self._parts:
                    self._overdue.add(message.id)
                    self._bridge.replace()  # Nobody else's rows are in it.
                else:
                    self._leave(message.id)
            case Returned():
                self._leave(message.id)
            case Answered():
                self._learn(message, now)
            case Found():
                self._found(unpack_keys(message.keys))
            case Gone():
                self._gone(unpack_keys(message.keys))
            case Scanned():
                self.tier.authoritative = self.tier.reports = message.complete
            case TierUsage():
                self.tier.chunks, self.tier.used_bytes = message.chunks, message.used_bytes
                self.tier.capacity_bytes = message.capacity_bytes
                self.tier.counters.note(message.counts)
            case RunnerLost():
                self._up, self.tier.authoritative = False, False
                self.runners_lost += 1
            case RunnerGone():
                self._lose(message.epoch, now)
            case RunnerBack():
                self._up, self._epoch = True, message.epoch
                self._bridge.admit(message.epoch)
            case _:
                pass  # The rest is between the bridge and its runner.

    def _settle(self, id_: int, failed: dict[int, Code], now: float) -> None:
        """Take an outcome into the part's job, the tier's breaker and what is known of where keys are."""
        part = self._parts.get(id_)
        if part is None or part.job is None:
            return
        tier, job = self.tier, part.job
        moved = [key for index, key in enumerate(part.keys) if index not in failed]
        for index, code in failed.items():
            tier.counters.fail(code.name.lower(), 1)
            if job.way is Way.LOAD and code not in NOT_TRIED:
                tier.believe(part.keys[index], present=False, now=now)
            if code in GONE:
                self._where.remove(tier, (part.keys[index],))
        if not AT_FAULT.isdisjoint(failed.values()):
            tier.counters.transfers_failed += 1
            tier.breaker.failed(now)
        elif NOT_TRIED.isdisjoint(failed.values()):
            tier.breaker.succeeded()
        job.moved += moved
        job.whole = job.whole and not failed
        if job.way is Way.LOAD:
            tier.loading -= len(part.keys)
            tier.counters.loaded += len(moved)
        else:
            self._stored(part, moved, now)

    def _stored(self, part: _Part, moved: Sequence[OffloadKey], now: float) -> None:
        tier = self.tier
        tier.storing.difference_update(part.keys)
        tier.counters.stored += len(moved)
        crossed = tier.crossed.intersection(part.keys)  # The tier said meanwhile that it has them no more.
        tier.crossed -= crossed
        for key in moved:
            if key in crossed:
                tier.doubt(key)
            elif tier.reports:
                tier.forget_answer(key)
            else:
                tier.believe(key, present=True, now=now)
        if tier.reports:
            self._where.add(tier, [key for key in moved if key not in crossed])
        self._note(EventKind.STORED, moved)

    def _leave(self, id_: int) -> None:
        """Take note that nothing uses a part's rows; the last part ends its job."""
        part = self._parts.pop(id_, None)
        self._overdue.discard(id_)
        if part is None or part.job is None:
            return
        part.job.parts -= 1
        if part.job.parts == 0:
            job = part.job
            self._done.append(Done(job.job_id, job.moved, job.whole, time.monotonic() - job.begun))

    def _lose(self, epoch: int, now: float) -> None:
        """Settle all that a runner had whose process has ended."""
        for id_, part in [(id_, part) for id_, part in self._parts.items() if part.epoch == epoch]:
            if part.job is None:
                self._parts.pop(id_)
                self._believe(part.keys, b"", now)
            else:
                if id_ not in self._overdue:
                    self._settle(id_, dict.fromkeys(range(len(part.keys)), Code.LOST), now)
                self._leave(id_)

    def _refuse(self, actions: Sequence[Action]) -> None:
        """Settle actions that the bridge did not take: nothing was lent."""
        now = time.monotonic()
        for action in actions:
            if isinstance(action, Acknowledge | Rank):
                self._queued.append(action)
            elif isinstance(action, Probe):
                self._believe(self._parts.pop(action.id).keys, b"", now)
            else:
                self._settle(action.id, dict.fromkeys(range(len(self._parts[action.id].keys)), Code.REFUSED), now)
                self._leave(action.id)

    def _learn(self, message: Answered, now: float) -> None:
        part = self._parts.pop(message.id, None)
        if part is None:
            return
        if not message.present:
            self.tier.breaker.failed(now)
        self._believe(part.keys, message.present, now)

    def _believe(self, keys: Sequence[OffloadKey], present: bytes, now: float) -> None:
        """Believe a probe's answers, but for keys of which something newer is known; without any they are absent."""
        for index, key in enumerate(keys):
            if key in self.tier.asking:
                self.tier.believe(key, present=bool(present and present[index]), now=now)

    def _found(self, keys: Sequence[OffloadKey]) -> None:
        self._where.add(self.tier, keys)
        self._learn_by_report(EventKind.STORED, keys)

    def _gone(self, keys: Sequence[OffloadKey]) -> None:
        self._where.remove(self.tier, keys)
        self.tier.crossed.update(self.tier.storing.intersection(keys))
        self._learn_by_report(EventKind.REMOVED, keys)

    def _learn_by_report(self, kind: EventKind, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.tier.forget_answer(key)
        self._note(kind, keys)
        self._queued.append(Acknowledge(0))

    def _note(self, kind: EventKind, keys: Sequence[OffloadKey]) -> None:
        if keys and self._events is not None:
            self._events.add(Event(kind, self.tier.spec.name, keys))
