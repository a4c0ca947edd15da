"""A ledger with tiers that the test itself plays: it sees what is sent and says what became of it."""

import string

from kvtier.backend.namespace import chunk_hash, make_offload_key
from kvtier.engine.answers import EventLog, LookupResult
from kvtier.engine.ledger import Ledger, LedgerLimits
from kvtier.engine.prefill import PrefillSpeed
from kvtier.engine.requests import Request
from kvtier.engine.tier import TierMatcher, TierSpec
from kvtier.policies import policy_class
from kvtier.runner import messages

HIT, PENDING, MISS, RETRY = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.RETRY
SECONDS = 0.25  # What every transfer here is said to have taken.


def keys_of(names):
    return [make_offload_key(name.encode()) for name in names]


def names_of(keys):
    return "".join(chunk_hash(key).decode() for key in keys)


def ending_at(keys, ends):
    return dict(zip(keys, ends, strict=True)).get


def cascades(actions):
    return sorted(
        (action.tier, names_of(messages.unpack_keys(action.keys)))
        for action in actions
        if isinstance(action, messages.Cascade)
    )


def loads(actions):
    named = {}
    for action in actions:
        if isinstance(action, messages.Promote):
            named[action.tier] = named.get(action.tier, "") + names_of(messages.unpack_keys(action.keys))
    return named


class Bench:
    """One ledger, its events, and the actions that it has sent since the last look."""

    def __init__(
        self, rows=8, tiers=1, *, policy="lru", cascade_rows_max=None, lease_rows_max=None, computing_s=None, **limits
    ):
        """`computing_s`: seconds for computing a chunk of one token and one byte; None if unknown."""
        specs = [self.spec(f"tier{index}") for index in range(tiers)] if isinstance(tiers, int) else tiers
        self.events = EventLog(10_000)
        self.observed = []
        self.waited = []
        self.acknowledged = []
        self.ranked = []  # Tiers, and the keys that each heard of.
        self.ledger = Ledger(
            rows,
            policy_class(policy)(rows),
            specs,
            LedgerLimits(
                cascade_rows_max or rows, lease_rows_max or rows, **{"lease_s": 10.0, "action_chunks": 64} | limits
            ),
            self.events,
            lambda *seen: self.observed.append(seen),
            PrefillSpeed(None if computing_s is None else 1 / computing_s),
            self.waited.append,
        )
        self.now = 0.0
        self.ledger.begin_step(self.now)

    @staticmethod
    def spec(name="tier", **changes):
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

    def counters(self, tier=0):
        return self.ledger.tiers[tier].counters

    keys = staticmethod(keys_of)

    def request(self, name="r", matchers=None, *, position=None):
        return Request(name, matchers, position=position)

    def lookup(self, names, request=None):
        request = request or self.request()
        return [self.ledger.lookup(key, request) for key in keys_of(names)]

    def store(self, names, request=None):
        """Offer the keys and complete what was planned."""
        request = request or self.request()
        plan = self.ledger.prepare_store(keys_of(names), request)
        if plan is not None:
            self.ledger.complete_store(plan.keys, request)
        return plan

    def stored_alone(self, names):
        self.store(names, self.request("alone", [TierMatcher(medium="CPU")]))

    def stored_in_tiers(self, names):
        self.store(names)
        self.finish_all(self.step())

    def step(self, seconds=0.0):
        """End the step and begin the next one so much later; return what was sent that is answered."""
        actions = self.ledger.end_step()
        self.acknowledged += [action.tier for action in actions if isinstance(action, messages.Acknowledge)]
        ranks = [action for action in actions if isinstance(action, messages.Advise) and action.kind == "rank"]
        self.ranked += [(action.tier, names_of(messages.unpack_keys(action.keys))) for action in ranks]
        self.now += seconds
        self.ledger.begin_step(self.now)
        return [action for action in actions if not isinstance(action, messages.Acknowledge) and action not in ranks]

    def load(self, names, request=None):
        rows = self.ledger.prepare_load(keys_of(names), request or self.request())
        self.ledger.complete_load(keys_of(names))
        return rows

    def reset(self):
        self.ledger.reset()
        self.ledger.promoting = True

    def row(self, name):
        return self.ledger.primary.row(*keys_of(name))

    def ready(self):
        return "".join(name for name in string.ascii_letters if keys_of(name)[0] in self.ledger.primary.ready)

    def holds(self, names, tier=0):
        self.ledger.apply(messages.Found(tier, messages.pack_keys(keys_of(names))))

    def loses(self, names, tier=0):
        self.ledger.apply(messages.Gone(tier, messages.pack_keys(keys_of(names))))

    def takes(self, fixed_s, chunk_s, tier=0):
        self.ledger.apply(messages.TierSpeed(tier, fixed_s, chunk_s))

    def knows_all(self, tier=0, *, complete=True):
        self.ledger.apply(messages.Scanned(tier, complete))

    def finish(self, action, failed=None, *, lent=False, seconds=SECONDS):
        failed = failed or {}
        self.ledger.apply(
            messages.Finished(action.id, messages.pack_rows(list(failed)), bytes(failed.values()), seconds, lent)
        )

    def finish_all(self, actions, seconds=SECONDS):
        for action in actions:
            if isinstance(action, messages.Promote | messages.Cascade):
                self.finish(action, seconds=seconds)

    def fail(self, action, code, *, lent=False):
        self.finish(action, dict.fromkeys(range(len(messages.unpack_keys(action.keys))), code), lent=lent)

    def give_back(self, action, moved=()):
        self.ledger.apply(messages.Returned(action.id, messages.pack_rows(moved)))

    def answer(self, action, present):
        """Answer a probe: the same for every key, one by one, or (None) not at all."""
        assert isinstance(action, messages.Probe)
        if isinstance(present, bool):
            present = [present] * len(messages.unpack_keys(action.keys))
        self.ledger.apply(messages.Answered(action.id, bytes(map(int, present or ())), SECONDS))

    def settled(self):
        return settled(self.ledger)


def settled(ledger):
    """Return True if no row is pinned, leased, filling, lent or lost, and no transfer is in flight."""
    primary, transfers = ledger.primary, ledger.traffic
    return (
        not any(map(primary.pinned, range(primary.rows)))
        and not (ledger.pending or transfers.overdue or transfers.cascade_rows)
        and not (ledger.leases.rows or primary.filling or primary.quarantined)
        and primary.rows_free + len(primary.ready) == primary.rows
        and not any(tier.loading or tier.storing or tier.asking for tier in ledger.tiers)
    )
