"""A secondary tier as the ledger knows it: its health, its answers, its transfers in flight, and its counters.

`LocationMap` has one bit mask a key for all tiers: a dictionary a tier would cost each chunk another hundred bytes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvtier.backend import OffloadKey
from kvtier.runner.messages import Code, TierUsage
from kvtier.runner.reports import Speed

_CAUSES = (
    "EACCES EBADF EBUSY ECONNREFUSED ECONNRESET EDQUOT EFBIG EHOSTDOWN EHOSTUNREACH EINVAL EIO EMFILE ENFILE ENODEV"
    " ENOENT ENOMEM ENOSPC ENOTCONN ENOTDIR ENXIO EPERM EPIPE EROFS ESHUTDOWN ESTALE ETIMEDOUT"
    " corrupt deadline lost no_space"
)
CAUSES = frozenset(_CAUSES.split())
"""The causes of failures in metrics; any other counts as `other`, so that the label has few values."""

TIER_AT_FAULT = frozenset({Code.FAILED, Code.UNAVAILABLE, Code.DEADLINE})
NOT_TRIED = frozenset({Code.REFUSED, Code.LOST})  # Tells nothing about the tier or the chunk.
NO_FAILURE = frozenset({Code.MISSING, Code.REFUSED})  # Has no cause that an operator could mend.
_SAY_ALL = frozenset({Code.CORRUPT, Code.NO_SPACE, Code.DEADLINE, Code.LOST})

AT_ONCE, WHEN_EVICTED, ON_SECOND_USE = "store", "evict", "second_use"
"""When a tier's chunks are written, as a configuration names it."""

PRESSURE = "pressure"  # A chunk was not written because its row was needed first.
ALL = 1 << 32  # More chunks than there can be.
ANSWERS_MAX = 65_536  # Of each kind a tier: about 10 MB. Older ones are asked for again.


class LedgerLimits(NamedTuple):
    """An engine's limits, in rows of the primary, chunks and seconds."""

    cascade_rows_max: int  # Pinned by cascades at once. Further cascades are dropped, so that stores go on.
    lease_rows_max: int  # Leased to waiting requests at once.
    lease_s: float
    action_chunks: int  # The most that one action moves.
    ahead_rows: int = 1  # Free, or chosen for eviction, ahead of demand.
    chunk_tokens: int = 1
    row_bytes: int = 1  # What a chunk takes of the primary.
    late_margin: float = 1.5  # Longest load, as a multiple of computing.
    retained_rows_max: int = 0  # Retained by hints at once.


class TierSpec(NamedTuple):
    name: str
    store_chunks_max: int  # Queued or in flight at once.
    answer_ttl_s: float
    breaker_failures: int
    breaker_cooldown_s: float
    trial_chunks: int
    asked_keys_max: int = 65_536  # In probes at once.
    overdue_rows_max: int = ALL  # Held by its hung transfers at once.
    cascade: str = AT_ONCE
    medium: str | None = None
    locality: str | None = None
    row_bytes: int = 1  # What a chunk takes of the primary.


class TierMatcher(NamedTuple):
    """Tiers of a medium, of a locality, or both. None matches any, and a tier without one is matched by all."""

    medium: str | None = None
    locality: str | None = None

    def matches(self, spec: TierSpec) -> bool:
        medium = self.medium is None or spec.medium is None or self.medium == spec.medium
        return medium and (self.locality is None or spec.locality is None or self.locality == spec.locality)


@dataclass(slots=True)
class TierCounters:
    """Totals since the start; the tables in `kvtier.engine.metrics` say what each counts."""

    hits: int = 0
    misses: int = 0
    promoted: int = 0
    loaded: int = 0
    declined: int = 0
    declined_requests: int = 0
    declined_seconds: float = 0.0
    explored: int = 0
    given_up: int = 0
    expected_seconds: float = 0.0
    loaded_seconds: float = 0.0
    stored: int = 0
    transfers_failed: int = 0
    probes_failed: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])  # By a code's name.
    causes: Counter[str] = field(default_factory=Counter[str])  # By one of `CAUSES`.
    last_cause: str = ""  # Unabridged.
    reported: Counter[str] = field(default_factory=Counter[str])  # By the tier's own name.
    dropped: Counter[str] = field(default_factory=Counter[str])  # By reason.
    skipped: Counter[str] = field(default_factory=Counter[str])  # By reason.

    def blame(self, cause: str) -> None:
        self.last_cause = cause
        self.causes[cause if cause in CAUSES else "other"] += 1


class BreakerState(Enum):
    CLOSED = "closed"  # The tier is used.
    OPEN = "open"  # The tier is not used until the cool-down is over.
    HALF_OPEN = "half_open"  # A few chunks are let through: their outcome decides.


CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


@dataclass(slots=True)
class Breaker:
    """A circuit breaker for a tier that only fails; pure, with the time as an argument.

    It opens after `failures_max` failed transfers in a row, and is half open `cooldown_s` later: up to `trial_chunks`
    chunks and keys may pass, and the first outcome decides. After another `cooldown_s` without one, the trial is
    renewed. An answer does not close the breaker: a disk that cannot be read may still be listed.
    """

    failures_max: int
    cooldown_s: float
    trial_chunks: int
    state: BreakerState = CLOSED
    opened: int = 0  # How often it opened.
    failures: int = 0  # In a row.
    _until: float = 0.0
    _trial_left: int = 0
    _asks_left: int = 0

    def admits(self, now: float) -> int:
        """Return how many chunks may be sent now; the sender calls `take`."""
        if self.state is CLOSED:
            return ALL
        if now >= self._until:
            self.state = HALF_OPEN
            self._trial_left = self._asks_left = self.trial_chunks
            self._until = now + self.cooldown_s
        return self._trial_left if self.state is HALF_OPEN else 0

    def take(self, chunks: int = 1) -> None:
        if self.state is HALF_OPEN:
            self._trial_left = max(0, self._trial_left - chunks)

    def admits_asking(self) -> bool:
        return self.state is not HALF_OPEN or self._asks_left > 0

    def ask(self) -> None:
        if self.state is HALF_OPEN:
            self._asks_left -= 1

    def succeeded(self) -> None:
        self.state = CLOSED
        self.failures = 0

    def trip(self, now: float) -> None:
        self.opened += self.state is not OPEN
        self.state = OPEN
        self._until = now + self.cooldown_s

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.state is HALF_OPEN or (self.state is CLOSED and self.failures >= self.failures_max):
            self.trip(now)


class Expected(Protocol):
    """A load in flight, with the prediction that its duration is compared with."""

    sent_at: float
    expected_s: float  # 0 if the tier's speed was not known.
    size_bytes: int  # Its own bytes, and those of loads before it.
    computing_s: float  # To compute its chunks instead.
    given_up: bool  # It was too late for its request.

    @property
    def request(self) -> object: ...


class LateLoad(NamedTuple):
    """A load that took longer than computing its chunks."""

    size_bytes: int
    seconds: float
    worth_bytes: int = 0  # Loads of up to this size have been faster than computing since.


class Trial(NamedTuple):
    """A load for no request, which has shown how fast a declined tier is."""

    chunks: int
    seconds: float


class Tier:
    def __init__(self, index: int, spec: TierSpec) -> None:
        self.index = index
        self.bit = 1 << index
        self.spec = spec
        self.at_once = spec.cascade == AT_ONCE
        self.breaker = Breaker(spec.breaker_failures, spec.breaker_cooldown_s, spec.trial_chunks)
        self.counters = TierCounters()
        self.authoritative = False  # A key that is not on record is absent.
        self.reports = True  # It reports removals, so that the record stays true.
        self.overdue_rows = 0  # Lent to transfers that missed their deadline.
        self.loading = 0  # Chunks in flight.
        self.loads: dict[int, Expected] = {}  # The same by the action's id, in the order of sending.
        self.speed: Speed | None = None  # As the runner last saw it.
        self.late: LateLoad | None = None  # Until a load of its kind is faster than computing.
        self.probe_latency_s = 0.0  # Of its last probe.
        self.heard_at = 0.0  # When a load last ended.
        self.tried_at = 0.0  # When a trial last began or ended, or a load that shows as much as one.
        self.trial: Trial | None = None  # The last one that has ended.
        self.storing: set[OffloadKey] = set()  # Queued or in flight.
        self.raced: set[OffloadKey] = set()  # Those reported removed meanwhile: before the store, or after it?
        self.asking: set[OffloadKey] = set()  # In probes, queued or in flight, without newer news.
        self.to_ask: list[OffloadKey] = []
        self.chunks = 0
        self.used_bytes = 0
        self.capacity_bytes: int | None = None
        self.reserved_bytes = 0
        self._present_until: dict[OffloadKey, float] = {}
        self._absent_until: dict[OffloadKey, float] = {}
        self._unsure: dict[OffloadKey, None] = {}  # Probed even though the tier reports what it holds.
        self._doubted: dict[OffloadKey, None] = {}  # Present by the last answer, but a later call has failed.
        self._undeleted: dict[OffloadKey, None] = {}  # Deletes that no runner has done.

    def admits(self, now: float) -> int:
        """Return how many chunks may go to or from the tier now: few in a trial, and hung transfers keep their rows."""
        if self.overdue_rows >= self.spec.overdue_rows_max:
            return 0
        return ALL if self.breaker.state is CLOSED else self.breaker.admits(now)  # Inlined: runs for every look-up.

    @property
    def hangs(self) -> bool:
        return self.overdue_rows >= self.spec.overdue_rows_max

    def slowdown(self, size_bytes: int, now: float) -> float:
        """Return how many times slower than its speed the tier is now for a load of this size.

        The oldest load in flight shows it. After one slower than computing, the tier counts as that slow for loads of
        up to its size, until others show that it is not.
        """
        first, late, lag = next(iter(self.loads.values()), None), self.late, 1.0
        if late is not None and self.speed is not None and size_bytes > late.worth_bytes:
            lag = max(1.0, late.seconds / self.speed.seconds(late.size_bytes))
        if first is None or not first.expected_s:
            return lag
        return max(lag, (now - max(first.sent_at, self.heard_at)) / first.expected_s)

    def give_up(self, request: object) -> None:
        self.counters.given_up += 1
        for load in self.loads.values():
            load.given_up = load.given_up or load.request is request

    def compare(self, load: Expected, seconds: float) -> None:
        """Compare a load's duration with computing its chunks.

        One surprise changes the speed little. But a load slower than computing is remembered until one of its kind is
        faster. Few chunks show only that loads of up to their size are worth it.
        """
        size_bytes, late = load.size_bytes, self.late
        if load.given_up or (load.request is not None and seconds > load.computing_s):
            self.late = LateLoad(size_bytes, seconds)
        elif late is not None and seconds <= load.computing_s:
            alike = size_bytes * 4 >= late.size_bytes  # Loads of a quarter of the bytes count as of the same kind.
            self.late = None if alike else late._replace(worth_bytes=max(size_bytes, late.worth_bytes))

    def hear(self, load: Expected, now: float) -> None:
        """Record that a load has ended. One that is known to be worth it does not postpone a trial of larger ones."""
        self.heard_at = now
        if load.request is None or self.late is None or load.size_bytes > self.late.worth_bytes:
            self.tried_at = now

    def answer(self, key: OffloadKey, known: int, now: float) -> bool | None:
        """Return whether the tier has the key; None if it must be probed. `known` is 0 unless it is on record."""
        if self._absent_until and self._absent_until.get(key, 0.0) > now:
            return False
        if known:
            return True
        if self.authoritative and key not in self._unsure:
            return False
        return True if self._present_until.get(key, 0.0) > now else None

    @property
    def answered(self) -> KeysView[OffloadKey]:
        """The keys that the tier has by its last answer, however old; forgotten ones count as absent."""
        return self._present_until.keys()

    def believe(self, key: OffloadKey, *, present: bool, now: float) -> bool:
        """Remember an answer for `answer_ttl_s`; it overrides any other. Return True if the last was the contrary."""
        self.asking.discard(key)
        fresh, stale = self._present_until, self._absent_until
        if not present:
            fresh, stale = stale, fresh
        turned = stale.pop(key, None) is not None
        if key in self._doubted:
            del self._doubted[key]
            turned = not present
        fresh.pop(key, None)  # So that the order of insertion is the order of age.
        fresh[key] = now + self.spec.answer_ttl_s
        if len(fresh) > ANSWERS_MAX:  # Inlined: runs for every stored chunk.
            del fresh[next(iter(fresh))]
        return turned

    def doubt(self, key: OffloadKey, now: float) -> None:
        """Count the key as absent for `answer_ttl_s` without an answer of the tier."""
        if self.believe(key, present=False, now=now):
            _remember(self._doubted, key)

    def unsure(self, key: OffloadKey) -> None:
        """Probe the key from now on, until it is stored again or known to be gone."""
        _remember(self._unsure, key)

    def forget_answers(self, keys: Iterable[OffloadKey]) -> None:
        """Forget answers for these keys, also those in flight: something newer is known."""
        self.asking.difference_update(keys)
        for answers in (self._unsure, self._doubted, self._absent_until, self._present_until):
            if answers:  # Most are empty.
                for key in keys:
                    answers.pop(key, None)

    def keep_undeleted(self, keys: Iterable[OffloadKey]) -> None:
        """Remember keys whose delete may not have been tried, for the next runner."""
        self._undeleted.update(dict.fromkeys(keys))
        while len(self._undeleted) > 4_096:  # Keys; their actions are far fewer than a bridge takes in a step.
            del self._undeleted[next(iter(self._undeleted))]

    def take_undeleted(self) -> Collection[OffloadKey]:
        """Take the keys of `keep_undeleted` that have not been stored again."""
        undeleted, self._undeleted = self._undeleted, {}
        return undeleted

    def stored(self, sent: Sequence[OffloadKey], moved: Sequence[OffloadKey], now: float) -> Sequence[OffloadKey]:
        """Record the end of a store; return the keys to put on the location map.

        A tier that reports removals is believed until it does. Chunks of another one are remembered like an answer.
        """
        self.storing.difference_update(sent)
        self.counters.stored += len(moved)
        if self._undeleted:
            for key in moved:
                self._undeleted.pop(key, None)
        sure = self._settle_raced(sent, moved) if self.raced else moved
        if self.reports:
            self.forget_answers(sure)
            return sure
        for key in sure:
            self.believe(key, present=True, now=now)
        return ()

    def may_ask(self, key: OffloadKey) -> bool:
        """Return True if the key is being probed, or may be: within the limit, and a breaker's trial."""
        return key in self.asking or (len(self.asking) < self.spec.asked_keys_max and self.breaker.admits_asking())

    def ask(self, key: OffloadKey) -> None:
        if key not in self.asking:
            self.asking.add(key)
            self.breaker.ask()
            self.to_ask.append(key)

    def judge(self, codes: Collection[Code], now: float, cause: str = "") -> bool:
        """Tell the breaker how a transfer ended; True if by the tier's fault. Counts `cause`, else the worst code."""
        if codes and not NO_FAILURE.issuperset(codes):
            worst = max(code for code in codes if code not in NO_FAILURE)
            self.counters.blame(cause or (worst.name.lower() if worst in _SAY_ALL else "other"))
        if not TIER_AT_FAULT.isdisjoint(codes):
            self.breaker.failed(now)
            return True
        if NOT_TRIED.isdisjoint(codes):
            self.breaker.succeeded()
        return False

    def unanswered(self, cause: str, now: float) -> None:
        self.counters.probes_failed += 1
        self.counters.blame(cause or "other")
        self.breaker.failed(now)

    def use(self, usage: TierUsage) -> None:
        self.chunks, self.used_bytes = usage.chunks, usage.used_bytes
        self.capacity_bytes, self.reserved_bytes = usage.capacity_bytes, usage.reserved_bytes
        self.counters.reported.update(usage.counts)

    def _settle_raced(self, sent: Sequence[OffloadKey], moved: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        raced = self.raced.intersection(sent)
        self.raced -= raced
        for key in moved:
            if key in raced:
                self.unsure(key)
        return [key for key in moved if key not in raced]


def _remember(answers: dict[OffloadKey, None], key: OffloadKey) -> None:
    answers[key] = None
    if len(answers) > ANSWERS_MAX:
        del answers[next(iter(answers))]


class LocationMap:
    def __init__(self) -> None:
        self.mask: dict[OffloadKey, int] = {}

    def add(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        mask, bit = self.mask, tier.bit
        for key in keys:
            mask[key] = mask.get(key, 0) | bit

    def lacking(self, keys: Sequence[OffloadKey], tier: Tier) -> Sequence[OffloadKey]:
        """Return those of the keys that a tier neither holds, as far as is known, nor is getting."""
        mask, bit, storing, answered = self.mask, tier.bit, tier.storing, tier.answered
        if mask.keys().isdisjoint(keys) and storing.isdisjoint(keys) and answered.isdisjoint(keys):
            return keys  # Most that leave the primary.
        return [key for key in keys if not (mask.get(key, 0) & bit or key in storing or key in answered)]

    def remove(self, tier: Tier, keys: Sequence[OffloadKey]) -> None:
        mask, bit = self.mask, tier.bit
        for key in keys:
            if left := mask.get(key, 0) & ~bit:
                mask[key] = left
            else:
                mask.pop(key, None)
