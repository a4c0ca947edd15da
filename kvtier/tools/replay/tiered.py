"""Hit ratios of a cache over a tier: the engine's own ledger decides, and a tier that takes no time answers.

A request's hits are its longest leading run in the cache or in the tier, which is an LRU of blocks. Then all of its
blocks are stored, or as many as the cache holds, and the request ends. Every transfer succeeds and ends within its
step, so an engine over a dummy tier has exactly these hits.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig, EngineLimits, TierConfig
from kvtier.engine.answers import LookupResult
from kvtier.engine.ledger import Ledger, ledger_of
from kvtier.engine.requests import Request
from kvtier.errors import ConfigError
from kvtier.memory import PAGE_BYTES
from kvtier.policies import Retained, Sessions
from kvtier.runner.messages import (
    Action,
    Advise,
    Cascade,
    Code,
    Finished,
    Gone,
    Message,
    Promote,
    Scanned,
    pack_keys,
    unpack_keys,
)
from kvtier.settings.hints import Advice
from kvtier.tools.replay.study import OPT, RETAINED_SHARE
from kvtier.tools.replay.traces import BLOCK_TOKENS, TraceRequest

DISK_NAME = "disk"  # The name of the tier, for hints whose `no_store` names tiers.
CascadeName = Literal["store", "evict", "second_use"]
CASCADES: tuple[CascadeName, ...] = get_args(CascadeName)


class Served(NamedTuple):
    """The outcome of one request, in blocks."""

    hits: int
    written: int  # To the tier, during the request.


def cascade_named(name: str, option: str) -> CascadeName:
    """Return a cascade by its name. Raises `ConfigError`, which names the option, for an unknown one."""
    for cascade in CASCADES:
        if name == cascade:
            return cascade
    raise ConfigError(f"{option} {name!r}: {', '.join(CASCADES)} accepted")


class InstantTier:
    """An LRU tier that completes every action at once, and retains and demotes as a dummy tier does."""

    def __init__(self, capacity: int) -> None:
        self.written = 0
        self.keys: OrderedDict[OffloadKey, None] = OrderedDict()  # Least recently used first.
        self._capacity = capacity
        self._retained = Retained[OffloadKey](int(RETAINED_SHARE * capacity))
        self._sessions: Sessions[OffloadKey] | None = None  # From the first hint on.

    def apply(self, actions: Sequence[Action], now_s: float) -> Iterator[Message]:
        """Apply the actions of one step, and yield the outcomes as a runner reports them.

        Advice comes first: a runner applies it on arrival, while transfers of the same step end later.
        """
        for action in sorted(actions, key=lambda action: isinstance(action, Promote | Cascade)):
            match action:
                case Advise():
                    self._advise(action.advice(), now_s)
                case Promote():
                    self._touch(unpack_keys(action.keys))
                    yield Finished.of(action.id, {}, 0.0)
                case Cascade():
                    yield from self._store(action.id, unpack_keys(action.keys), now_s)
                case _:  # An acknowledgement: nothing is probed or deleted, because the tier's contents are known.
                    pass

    def _advise(self, advice: Advice[OffloadKey], now_s: float) -> None:
        keys = [key for key in dict.fromkeys(advice.keys) if key in self.keys]
        if advice.kind == "demote":
            self._demote(keys)
            return
        self._touch(keys)
        if advice.kind == "retain":
            self._retained.retain(keys, now_s + advice.seconds, advice.priority)
        elif advice.hint is not None:
            if self._sessions is None:
                self._sessions = Sessions()
            own = self._sessions.ended(keys)
            if advice.hint.over:
                self._demote(own)

    def _touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make the keys that are present the most recently used, tail first."""
        for key in reversed(keys):
            if key in self.keys:
                self.keys.move_to_end(key)

    def _demote(self, keys: Sequence[OffloadKey]) -> None:
        self._retained.discard(keys)
        for key in keys:
            self.keys.move_to_end(key, last=False)

    def _store(self, id_: int, keys: Sequence[OffloadKey], now_s: float) -> Iterator[Message]:
        """Store a batch, which evicts none of its own keys; keys beyond the capacity are rejected."""
        self._retained.expire(now_s)
        batch, evicted, failed = set(keys), list[OffloadKey](), dict[int, Code]()
        for index, key in enumerate(keys):
            if key not in self.keys:
                if len(self.keys) >= self._capacity:
                    victim = self._victim(batch)
                    if victim is None:
                        failed[index] = Code.NO_SPACE
                        continue
                    self._evict(victim)
                    evicted.append(victim)
                if self._sessions is not None:
                    self._sessions.came((key,))
            self.keys[key] = None
            self.written += 1
        self._touch(keys)
        yield Finished.of(id_, failed, 0.0)
        if evicted:
            yield Gone(0, pack_keys(evicted))

    def _victim(self, batch: Collection[OffloadKey]) -> OffloadKey | None:
        """Return the least recently used key that may go; retained ones go if no other can."""
        while True:
            for key in self.keys:
                if key not in batch and key not in self._retained:
                    return key
            if not self._retained:
                return None
            self._retained.let_go(1)

    def _evict(self, key: OffloadKey) -> None:
        del self.keys[key]
        self._retained.discard((key,))
        if self._sessions is not None:
            self._sessions.gone((key,))


class TieredStudy:
    """A ledger of `capacity` rows over a tier of `tier_capacity` blocks; both are empty."""

    def __init__(
        self, policy: str, capacity: int, tier_capacity: int, cascade: CascadeName, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self.tier = InstantTier(tier_capacity)
        self._capacity = capacity
        self._ledger = _ledger(policy, capacity, cascade, block_tokens)
        self._now_s = 0.0
        self._requests = 0
        self._ledger.begin_step(0.0)
        self._ledger.apply(Scanned(0, True))

    def serve(self, request: TraceRequest) -> Served:
        """Look a request's blocks up, load the hits, store the others, and end the request with its hint."""
        ledger, before = self._ledger, self.tier.written
        self._now_s = request.timestamp_ms / 1_000
        self._settle()
        self._requests += 1
        keys = [make_offload_key(b"%d" % block) for block in request.hash_ids[: self._capacity]]
        served = Request(str(self._requests))
        if request.hint is not None:
            ledger.hint(served, request.hint)
        hits = self._found(keys, served)
        ledger.prepare_load(keys[:hits], served)
        ledger.complete_load(keys[:hits])
        plan = ledger.prepare_store(keys, served)
        assert plan is not None  # At most `capacity` keys are offered, and nothing holds another row.
        ledger.complete_store(plan.keys, served)
        self._settle()
        ledger.finish(served)
        self._settle()
        return Served(hits, self.tier.written - before)

    def _found(self, keys: Sequence[OffloadKey], served: Request) -> int:
        """Return the length of the leading run, after its part in the tier has been loaded."""
        while True:
            waits, hits = False, 0
            for key in keys:
                answer = self._ledger.lookup(key, served)
                if answer is LookupResult.MISS:
                    break
                hits += 1
                waits = waits or answer is LookupResult.HIT_PENDING
            if not waits:
                return hits
            self._settle()

    def _settle(self) -> None:
        """Run steps until nothing is queued or in flight."""
        ledger = self._ledger
        while True:
            ledger.begin_step(self._now_s)
            actions = ledger.end_step()
            for message in self.tier.apply(actions, self._now_s):
                ledger.apply(message)
            if not ledger.pending:
                return


def _ledger(policy: str, capacity: int, cascade: CascadeName, block_tokens: int) -> Ledger:
    config = EngineConfig(
        cpu_bytes_to_use=capacity * PAGE_BYTES,
        chunk_bytes=PAGE_BYTES,
        eviction_policy=policy,
        runner="inline",
        chunk_tokens=block_tokens,
        limits=EngineLimits(lease_share=1.0, cascade_share=1.0),
        secondary_tiers=(TierConfig(type="dummy", name=DISK_NAME, cascade=cascade),),
    )
    return ledger_of(config, None, _unobserved)


def _unobserved(tier: str, operation: str, seconds: float) -> None:
    """Ignore the duration of a transfer: it is always 0."""


def tiered_hits(
    requests: Iterable[TraceRequest],
    policy: str,
    capacity: int,
    tier_capacity: int,
    cascade: CascadeName,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[Served]:
    """Serve each request by a new ledger over a new tier, and yield the outcomes.

    Raises `ConfigError` for a policy that engines do not have.
    """
    if policy == OPT:
        raise ConfigError(f"policy {OPT!r} given with a tier: it is known for one cache only")
    return map(TieredStudy(policy, capacity, tier_capacity, cascade, block_tokens).serve, requests)
