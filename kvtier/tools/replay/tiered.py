"""Hit ratios of a cache over a tier: what is written to the tier, and when, and what both are worth together.

The model is the study's, with a tier under the cache: an LRU of blocks. A request's hits are its longest leading run in
either; what of it lies in the tier comes into the cache first. Then all of its blocks are used and stored, what is due
is written, and the request ends. No write fails, and all end before the next step. Hints are said when a request
begins; the cache hears them and so does the tier, which retains and demotes as a dummy tier does. It takes the engine's
own steps in the engine's order, with the classes that decide there, so an engine over such a tier has exactly these
hits.

What an engine is told without a request (`prefetch`, `demote`, `forget`, `retain`) no trace holds, and no study knows.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Literal, NamedTuple

from kvtier.config import EngineLimits
from kvtier.engine.ledger import rows_of_share
from kvtier.engine.outbox import ADVICE_KEYS_MAX
from kvtier.engine.second_use import SEEN_A_ROW, SEEN_MIN
from kvtier.engine.tier import AT_ONCE, ON_SECOND_USE, WHEN_EVICTED
from kvtier.errors import ConfigError
from kvtier.hints import RETAIN_S_MAX, Hint
from kvtier.policies import EvictionQueue, HintedOrder, Policy, Retained, Sessions, policy_class
from kvtier.tools.replay.study import OPT, RETAINED_SHARE, Simulation, leading, measure
from kvtier.tools.replay.traces import BLOCK_TOKENS, Request, Trace
from kvtier.tools.replay.workload import GeneratedTrace

Cascade = Literal["store", "evict", "second_use"]
CASCADES: Mapping[str, Cascade] = {AT_ONCE: "store", WHEN_EVICTED: "evict", ON_SECOND_USE: "second_use"}
_LIMITS = EngineLimits()


class Served(NamedTuple):
    """What became of one request, in blocks."""

    hits: int
    written: int  # To the tier, because of it.


def cascade_named(name: str, option: str = "cascade") -> Cascade:
    """Return a cascade's name; `ConfigError`, which names the option, if there is no such cascade."""
    try:
        return CASCADES[name]
    except KeyError:
        raise ConfigError(f"{option} {name!r}: {', '.join(CASCADES)} accepted") from None


class TierOfBlocks:
    """An LRU tier. A batch is written as a whole: it makes no room at its own cost."""

    def __init__(self, capacity: int) -> None:
        self.written = 0
        self.blocks: OrderedDict[int, None] = OrderedDict()  # Least recently used first.
        self._capacity = capacity
        self._retained = Retained[int](int(RETAINED_SHARE * capacity))
        self._sessions: Sessions[int] | None = None  # From the first hint on.

    def write(self, blocks: Sequence[int], now_s: float) -> list[int]:
        """Write blocks, head first; what there is no room for is left out. Return what went for them."""
        self._retained.expire(now_s)
        batch, gone = set(blocks), list[int]()
        for block in blocks:
            if block not in self.blocks:
                if len(self.blocks) >= self._capacity:
                    victim = self._victim(batch)
                    if victim is None:
                        continue
                    self._lose(victim)
                    gone.append(victim)
                if self._sessions is not None:
                    self._sessions.came((block,))
            self.blocks[block] = None
            self.written += 1
        self.touch(blocks)
        return gone

    def touch(self, blocks: Iterable[int]) -> None:
        """Make those that are there the most recently used, tail first."""
        for block in reversed([block for block in blocks if block in self.blocks]):
            self.blocks.move_to_end(block)

    def take_hints(self) -> None:
        """Take note of sessions from now on."""
        self._sessions = Sessions()

    def end(self, blocks: Sequence[int], hint: Hint | None) -> None:
        """Renew blocks that are here, which a request has used that is over; with what was said of it."""
        for start in reversed(range(0, len(blocks), ADVICE_KEYS_MAX)):
            part = blocks[start : start + ADVICE_KEYS_MAX]
            self.touch(part)
            if self._sessions is not None:
                own = self._sessions.ended(part)
                if hint is not None and hint.over:
                    self._demote(own)

    def retain(self, blocks: Sequence[int], until_s: float, priority: int) -> None:
        """Renew blocks that are here, and pass over them until then when room is made."""
        for start in range(0, len(blocks), ADVICE_KEYS_MAX):
            part = blocks[start : start + ADVICE_KEYS_MAX]
            self.touch(part)
            self._retained.retain(part, until_s, priority)

    def _demote(self, blocks: Sequence[int]) -> None:
        self._retained.discard(blocks)
        for block in blocks:
            self.blocks.move_to_end(block, last=False)

    def _victim(self, batch: Collection[int]) -> int | None:
        """Return the least recently used block that may go; what is retained may where there is nothing else."""
        retained = self._retained
        while True:
            for block in self.blocks:
                if block not in batch and block not in retained:
                    return block
            if not retained:
                return None
            retained.let_go(1)

    def _lose(self, block: int) -> None:
        del self.blocks[block]
        self._retained.discard((block,))
        if self._sessions is not None:
            self._sessions.gone((block,))


class TieredCache:
    """A cache of `capacity` blocks over a tier. The policy was made for that capacity and is still empty.

    `tier_name`: what hints call the tier that nothing of a request is to go to. Empty: they do not name it.
    """

    def __init__(
        self,
        policy: Policy[int],
        capacity: int,
        tier_capacity: int,
        cascade: str,
        *,
        block_tokens: int = BLOCK_TOKENS,
        tier_name: str = "",
    ) -> None:
        self.tier = TierOfBlocks(tier_capacity)
        self._tier_name = tier_name
        self._block_tokens = block_tokens
        self._capacity = capacity
        self._cascade = cascade_named(cascade)
        self._batch = _LIMITS.action_chunks
        self._ahead = rows_of_share(_LIMITS.leaving_share, capacity) if cascade == WHEN_EVICTED else 0
        self._leaving = EvictionQueue[int](policy, self._ahead)
        self._order: Policy[int] | EvictionQueue[int] | HintedOrder[int] = self._leaving if self._ahead else policy
        self._hinted: HintedOrder[int] | None = None  # The order, or the one behind the queue, from the first hint on.
        self._resident: set[int] = set()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._seen_max = max(SEEN_MIN, SEEN_A_ROW * capacity)
        self._owed: set[int] = set()  # To be written when they leave.
        self._not_due: set[int] = set()  # Stored by requests that keep their own out of the tier: never owed.
        self._withheld: set[int] = set()  # Of sessions that are over: what is owed of these is not written.
        self._due: list[int] = []  # To be written when the step ends.
        self._kept_out = False  # Whether the request's blocks are to stay out of the tier.
        self._now_s = 0.0

    def serve(self, blocks: Sequence[int], hint: Hint | None = None, now_s: float = 0.0) -> Served:
        """Look a request's blocks up, use and store as many as the cache holds, end the request, and heed its hint."""
        before = self.tier.written
        self._now_s = now_s
        self._hear(hint)
        blocks = blocks[: self._capacity]
        run = self._run(blocks)
        used = list(dict.fromkeys(blocks))
        self._use(used, set(run))
        self._end_step()
        if used:
            self._end(used, hint)
        self._end_step()
        return Served(len(run), self.tier.written - before)

    def _hear(self, hint: Hint | None) -> None:
        self._kept_out = hint is not None and hint.keeps_out(self._tier_name)
        if hint is None or self._hinted is not None:
            return
        retained_max = int(RETAINED_SHARE * self._capacity)
        if self._ahead:
            self._hinted = self._leaving.take_hints(retained_max)
        else:
            self._order = self._hinted = HintedOrder(self._order, retained_max)
        self.tier.take_hints()

    def _run(self, blocks: Sequence[int]) -> list[int]:
        """Return the leading run, and have what of it lies in the tier brought into the cache."""
        found: set[int] = set()
        leased: set[int] = set()
        promoted: list[int] = []
        waiting: list[int] = []  # Found since a block was last brought in: leased with the next one.
        for block in blocks:
            waiting.append(block)
            if block not in self._resident:
                if block not in self.tier.blocks or not self._insert([block], found, leased):
                    break
                promoted.append(block)
                leased.update(waiting)
                waiting.clear()
            found.add(block)
        if promoted:
            self._end_step(keep=found, loaded=promoted)
        self._touch(list(dict.fromkeys(takewhile(found.__contains__, blocks))))
        return list(takewhile(found.__contains__, blocks))

    def _use(self, used: Sequence[int], run: Collection[int]) -> None:
        missing = [block for block in used if block not in self._resident]
        present = [block for block in used if block in self._resident]
        if missing:
            self._insert(missing, set(present))
        fresh = [block for block in present if block not in run]
        if fresh:
            self._touch(fresh)
        if fresh or (missing and run):
            self._order.rank(used)
        if self._kept_out:
            self._not_due.update(missing)
        elif self._cascade == AT_ONCE:
            self._due += missing
        elif self._cascade == WHEN_EVICTED:
            self._owed.update(missing)
        else:
            self._due += [block for block in missing if block in self._seen]
            self._remember(missing)

    def _insert(self, blocks: Sequence[int], keep: Collection[int], leased: Collection[int] = frozenset()) -> bool:
        """Make room for blocks, at the cost of none that is kept, and insert them; False if there is too little.

        `leased`: of those that are kept, the ones that the request waits with.
        """
        excess = len(self._resident) + len(blocks) - self._capacity
        if excess > 0:
            victims = self._victims(excess, keep, leased, blocks)
            if victims is None:
                return False
            self._resident.difference_update(victims)
            self._owed.difference_update(victims)
            self._not_due.difference_update(victims)
            self._withheld.difference_update(victims)
        self._resident.update(blocks)
        self._order.insert(blocks)
        return True

    def _victims(
        self, count: int, keep: Collection[int], leased: Collection[int], incoming: Sequence[int]
    ) -> list[int] | None:
        idle = len(self._resident) - len(leased)
        if self._hinted is not None:
            retained = self._hinted.retained
            retained.expire(self._now_s)
            if idle - len(retained) < count <= idle:
                retained.let_go(count - idle + sum(block not in leased for block in retained))
        return None if count > idle else self._order.evict(count, keep.__contains__, incoming)

    def _touch(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._order.touch(blocks)
            self._withheld.difference_update(blocks)
        if self._cascade == ON_SECOND_USE and not self._kept_out:
            self._due += blocks

    def _remember(self, blocks: Sequence[int]) -> None:
        seen = self._seen
        for block in reversed(blocks):
            seen[block] = None
            seen.move_to_end(block)
        for _ in range(len(seen) - self._seen_max):
            seen.popitem(last=False)

    def _end(self, used: Sequence[int], hint: Hint | None) -> None:
        """Renew what a request has used, here and in the tier, and have both heed what was said of it."""
        if self._hinted is None:
            self._order.rank(used)
        else:
            self._leaving.come_back(used)
            self._withheld.update(self._hinted.end(used, hint))
        self.tier.end(self._in_tier(used), hint)
        if self._hinted is not None and hint is not None and hint.retain_s:
            retained = leading(used, hint, self._block_tokens)
            until_s = self._now_s + min(hint.retain_s, RETAIN_S_MAX)
            self._hinted.retained.expire(self._now_s)
            self._hinted.retain(retained, until_s, hint.priority)
            self._withheld.difference_update(retained)
            self.tier.retain(self._in_tier(retained), until_s, hint.priority)

    def _in_tier(self, blocks: Sequence[int]) -> list[int]:
        return [block for block in blocks if block in self.tier.blocks]

    def _end_step(self, *, keep: Collection[int] = (), loaded: Sequence[int] = ()) -> None:
        """Have blocks leave ahead of demand; tell the tier what is recent, load from it, and write what is due."""
        if self._ahead:
            self._leave(keep)
        for start in range(0, len(loaded), self._batch):
            self.tier.touch(loaded[start : start + self._batch])
        due = [block for block in dict.fromkeys(self._due) if block not in self.tier.blocks]
        self._due.clear()
        for start in range(0, len(due), self._batch):
            batch = due[start : start + self._batch]
            gone = self.tier.write(batch[::-1] if self._ahead else batch, self._now_s)
            if self._ahead:
                self._owed.update(self._resident.intersection(gone) - self._not_due)

    def _leave(self, keep: Collection[int]) -> None:
        left = set(self._leaving)
        missing = self._ahead - (self._capacity - len(self._resident)) - len(left)
        idle = len(self._resident) - len(keep) - sum(block not in keep for block in left)
        self._leaving.reconsider(set(keep).__contains__)
        if missing > 0 and idle > 0:
            self._leaving.choose(min(missing, idle), set(keep).__contains__)
        news = self._leaving.take_news()
        self.tier.touch(news)
        due = [block for block in reversed(news) if block in self._owed and block not in self._withheld]
        self._owed.difference_update(due)
        self._due += due


def tiered_hits(
    requests: Iterable[Request],
    policy: Policy[int],
    capacity: int,
    tier_capacity: int,
    cascade: str,
    *,
    block_tokens: int = BLOCK_TOKENS,
    tier_name: str = "",
) -> Iterator[Served]:
    """Give what became of each request in a new cache over a new tier."""
    cache = TieredCache(policy, capacity, tier_capacity, cascade, block_tokens=block_tokens, tier_name=tier_name)
    for request in requests:
        yield cache.serve(request.hash_ids, request.hint, request.timestamp_ms / 1_000)


class TierUnder:
    """A tier under caches of several sizes and policies: a share of its trace's unique blocks.

    `name`: what hints call the tier that nothing of a request is to go to. Empty: they do not name it.
    """

    def __init__(self, trace: Trace | GeneratedTrace, share: float, cascades: Sequence[str], name: str = "") -> None:
        self.cascades = cascades
        self.written: Counter[tuple[str, int]] = Counter()  # Simulation's name and cache's capacity -> blocks.
        self._trace = trace
        self._share = share
        self._name = name

    def simulation(self, policy: str, cascade: str) -> Simulation:
        """Return how a policy is simulated over this tier. Raises `ConfigError` for what is no policy of an engine."""
        if policy == OPT:
            raise ConfigError(f"policy {OPT!r} given with a tier: it is known for one cache only")
        cls = policy_class(policy)

        def simulate(requests: Iterable[Request], capacity: int) -> Iterator[int]:
            for served in tiered_hits(
                requests,
                cls(capacity),
                capacity,
                self._capacity,
                cascade,
                block_tokens=self._trace.block_tokens,
                tier_name=self._name,
            ):
                self.written[f"{policy}, {cascade}", capacity] += served.written
                yield served.hits

        return simulate

    @cached_property
    def _capacity(self) -> int:
        return measure(self._trace).capacity(self._share)
