"""One tier behind a manager that is not kvtier's: jobs over rows that somebody else pins, and answers to look-ups.

What kvtier's ledger does for many tiers over its own primary, this does for one over another's. It differs in one
point: whoever asked has no quarantine, so that a job is over only when nothing uses its rows any more. Where the runner
is a process, one that has not let go of rows in time is killed for it.
"""

import time
from collections.abc import Sequence

from kvtier.bridge.base import Bridge
from kvtier.events import Event, EventLog
from kvtier.inbox import Observe
from kvtier.integrations.vllm.tier_jobs import Done, Job, Jobs, Way
from kvtier.integrations.vllm.tier_replies import Replies
from kvtier.keys import OffloadKey
from kvtier.request import PROMOTIONS_MAX, Position, Request, Search
from kvtier.tier import Tier, TierSpec, Whereabouts
from kvtier.tier_log import TierLog


class TierClient:
    """Calls come from one thread at a time; none waits but `drain` and `close`."""

    def __init__(
        self, bridge: Bridge, spec: TierSpec, *, action_chunks: int, observe: Observe, events: EventLog | None = None
    ) -> None:
        """Take over a bridge whose runner has this one tier open; `observe` hears how long each transfer took."""
        self.tier = Tier(0, spec)
        self._bridge = bridge
        self._events = events
        self._where = Whereabouts()
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
