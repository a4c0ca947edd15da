"""A ledger with tiers that the test itself plays: it sees what is sent and says what became of it."""

import string
from collections.abc import Sequence

from kvtier.backend.namespace import OffloadKey, chunk_hash, make_offload_key
from kvtier.engine.answers import EventLog, LookupResult
from kvtier.engine.ledger import Ledger, LedgerLimits, StorePlan
from kvtier.engine.prefill import PrefillSpeed
from kvtier.engine.requests import Position, Request
from kvtier.engine.tier import TierCounters, TierMatcher, TierSpec
from kvtier.policies import policy_class
from kvtier.runner.messages import (
    Acknowledge,
    Action,
    Advise,
    Answered,
    Cascade,
    Code,
    Finished,
    Found,
    Gone,
    Probe,
    Promote,
    Returned,
    Scanned,
    TierSpeed,
    pack_keys,
    pack_rows,
    unpack_keys,
)

HIT, PENDING, MISS, RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY
SECONDS = 0.25  # What every transfer here is said to have taken.


def keys_of(names: str) -> list[OffloadKey]:
    return [make_offload_key(name.encode()) for name in names]


def names_of(keys: Sequence[OffloadKey]) -> str:
    return "".join(chunk_hash(key).decode() for key in keys)


def ending_at(keys: Sequence[OffloadKey], ends: Sequence[int]) -> Position:
    """Return a request's position: where each of these keys ends."""
    return dict(zip(keys, ends, strict=True)).get


def cascades(actions: Sequence[Action]) -> list[tuple[int, str]]:
    return sorted(
        (action.tier, names_of(unpack_keys(action.keys))) for action in actions if isinstance(action, Cascade)
    )


def loads(actions: Sequence[Action]) -> dict[int, str]:
    named: dict[int, str] = {}
    for action in actions:
        if isinstance(action, Promote):
            named[action.tier] = named.get(action.tier, "") + names_of(unpack_keys(action.keys))
    return named


class Bench:
    """One ledger, its events, and the actions that it has sent since the last look."""

    def __init__(
        self,
        rows: int = 8,
        tiers: int | Sequence[TierSpec] = 1,
        *,
        policy: str = "lru",
        cascade_rows_max: int | None = None,
        lease_rows_max: int | None = None,
        lease_s: float = 10.0,
        action_chunks: int = 64,
        computing_s: float | None = None,
        **limits: float,
    ) -> None:
        """`computing_s`: seconds for computing a chunk of one token and one byte; None if unknown."""
        specs = [self.spec(f"tier{index}") for index in range(tiers)] if isinstance(tiers, int) else tiers
        self.events = EventLog(10_000)
        self.observed: list[tuple[str, str, float]] = []
        self.waited: list[float] = []
        self.acknowledged: list[int] = []
        self.ranked: list[tuple[int, str]] = []  # Tiers, and the keys that each heard of.
        self.ledger = Ledger(
            rows,
            policy_class(policy)(rows),
            specs,
            LedgerLimits(cascade_rows_max or rows, lease_rows_max or rows, lease_s, action_chunks, **limits),
            self.events,
            lambda *seen: self.observed.append(seen),
            PrefillSpeed(None if computing_s is None else 1 / computing_s),
            self.waited.append,
        )
        self.now = 0.0
        self.ledger.begin_step(self.now)

    @staticmethod
    def spec(name: str = "tier", **changes: object) -> TierSpec:
        described = TierSpec(
            name,
            store_chunks_max=1_000,
            answer_ttl_s=10.0,
            breaker_failures=3,
            breaker_cooldown_s=5.0,
            trial_chunks=2,
            medium="STORAGE",
        )
        return described._replace(**changes)

    def counters(self, tier: int = 0) -> TierCounters:
        return self.ledger.tiers[tier].counters

    # As the engine.

    keys = staticmethod(keys_of)

    def request(self, name="r", matchers=None, *, position=None):
        return Request(name, matchers, position=position)

    def lookup(self, names: str, request: Request | None = None) -> list[LookupResult]:
        request = request or self.request()
        return [self.ledger.lookup(key, request) for key in keys_of(names)]

    def store(self, names: str, request: Request | None = None) -> StorePlan | None:
        """Offer the keys and complete what was planned."""
        request = request or self.request()
        plan = self.ledger.prepare_store(keys_of(names), request)
        if plan is not None:
            self.ledger.complete_store(plan.keys, request)
        return plan

    def stored_alone(self, names: str) -> None:
        self.store(names, self.request("alone", [TierMatcher(medium="CPU")]))

    def stored_in_tiers(self, names: str) -> None:
        self.store(names)
        self.finish_all(self.step())

    def step(self, seconds: float = 0.0) -> list[Action]:
        """End the step and begin the next one so much later; return what was sent that is answered."""
        actions = self.ledger.end_step()
        self.acknowledged += [action.tier for action in actions if isinstance(action, Acknowledge)]
        ranks = [action for action in actions if isinstance(action, Advise) and action.kind == "rank"]
        self.ranked += [(action.tier, names_of(unpack_keys(action.keys))) for action in ranks]
        self.now += seconds
        self.ledger.begin_step(self.now)
        return [action for action in actions if not isinstance(action, Acknowledge) and action not in ranks]

    def load(self, names: str, request: Request | None = None) -> list[int]:
        rows = self.ledger.prepare_load(keys_of(names), request or self.request())
        self.ledger.complete_load(keys_of(names))
        return rows

    def reset(self) -> None:
        self.ledger.reset()
        self.ledger.promoting = True

    def row(self, name: str) -> int | None:
        return self.ledger.primary.row(*keys_of(name))

    def ready(self) -> str:
        return "".join(name for name in string.ascii_letters if keys_of(name)[0] in self.ledger.primary.ready)

    # As the tiers.

    def holds(self, names: str, tier: int = 0) -> None:
        self.ledger.apply(Found(tier, pack_keys(keys_of(names))))

    def loses(self, names: str, tier: int = 0) -> None:
        self.ledger.apply(Gone(tier, pack_keys(keys_of(names))))

    def takes(self, fixed_s: float, chunk_s: float, tier: int = 0) -> None:
        self.ledger.apply(TierSpeed(tier, fixed_s, chunk_s))

    def knows_all(self, tier: int = 0, *, complete: bool = True) -> None:
        self.ledger.apply(Scanned(tier, complete))

    def finish(self, action, failed=None, *, lent=False, seconds=SECONDS):
        failed = failed or {}
        self.ledger.apply(Finished(action.id, pack_rows(list(failed)), bytes(failed.values()), seconds, lent))

    def finish_all(self, actions: Sequence[Action], seconds: float = SECONDS) -> None:
        for action in actions:
            if isinstance(action, Promote | Cascade):
                self.finish(action, seconds=seconds)

    def fail(self, action: Action, code: Code, *, lent: bool = False) -> None:
        self.finish(action, dict.fromkeys(range(len(unpack_keys(action.keys))), code), lent=lent)

    def give_back(self, action: Action, moved: Sequence[int] = ()) -> None:
        self.ledger.apply(Returned(action.id, pack_rows(moved)))

    def answer(self, action: Action, present: bool | Sequence[bool] | None) -> None:
        """Answer a probe: the same for every key, one by one, or (None) not at all."""
        assert isinstance(action, Probe)
        if isinstance(present, bool):
            present = [present] * len(unpack_keys(action.keys))
        self.ledger.apply(Answered(action.id, bytes(map(int, present or ())), SECONDS))

    def settled(self) -> bool:
        return settled(self.ledger)


def settled(ledger: Ledger) -> bool:
    """Return True if no row is pinned, leased, filling, lent or lost, and no transfer is in flight."""
    primary, transfers = ledger.primary, ledger.traffic
    return (
        not any(map(primary.pinned, range(primary.rows)))
        and not (ledger.pending or transfers.overdue or transfers.cascade_rows)
        and not (ledger.leases.rows or primary.filling or primary.quarantined)
        and primary.rows_free + len(primary.ready) == primary.rows
        and not any(tier.loading or tier.storing or tier.asking for tier in ledger.tiers)
    )
