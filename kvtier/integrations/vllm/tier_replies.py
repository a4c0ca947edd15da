"""What comes back from one tier behind a manager that is not kvtier's, and what it changes.

What kvtier's `Inbox` does for many tiers over its own rows, this does for one over another's.
"""

from collections.abc import Iterable, Mapping, Sequence

from kvtier.bridge.base import Bridge
from kvtier.bridge.messages import (
    Acknowledge,
    Action,
    Answered,
    Code,
    Finished,
    Found,
    Gone,
    LocalMessage,
    Message,
    Probe,
    Rank,
    Returned,
    RunnerBack,
    RunnerGone,
    RunnerLost,
    Scanned,
    TierUsage,
)
from kvtier.bridge.packing import pack_keys, unpack_keys, unpack_rows
from kvtier.events import Event, EventKind, EventLog
from kvtier.inbox import Observe
from kvtier.integrations.vllm.tier_jobs import Job, Jobs, Part, Way
from kvtier.keys import OffloadKey
from kvtier.outbox import RANK_KEYS_MAX
from kvtier.request import Request
from kvtier.tier import Tier, Whereabouts
from kvtier.verdicts import NOT_TRIED, failures, judge, unanswered

GONE = frozenset({Code.MISSING, Code.CORRUPT})


class Replies:
    """Applies messages, each in one step, and queues what is to be answered."""

    def __init__(
        self, bridge: Bridge, tier: Tier, where: Whereabouts, jobs: Jobs, observe: Observe, events: EventLog | None
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
                self._tier.crossed.update(self._tier.storing.intersection(keys))
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
                self._tier.doubt(key)

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
