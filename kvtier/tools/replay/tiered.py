"""Hit ratios of a cache over a tier: what is written to the tier, and when, and what both are worth together.

The model is the study's, with a tier under the cache: an LRU of blocks. A request's hits are its longest leading run in
either; what of it lies in the tier comes into the cache first. Then all of its blocks are used and stored, what is due
is written, and the request ends. No write fails, and all end before the next step. It takes the engine's own steps in
the engine's order, with the classes that decide there, so an engine over such a tier has exactly these hits.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Literal, NamedTuple

from kvtier.config import EngineLimits
from kvtier.engine.cascades import SEEN_A_ROW, SEEN_MIN
from kvtier.engine.ledger import rows_of_share
from kvtier.engine.tier import AT_ONCE, ON_SECOND_USE, WHEN_EVICTED
from kvtier.errors import ConfigError
from kvtier.policies import Leaving, Policy, policy_class
from kvtier.tools.replay.study import OPT, Simulation, measure
from kvtier.tools.replay.traces import Request, Trace
from kvtier.tools.replay.workload import GeneratedTrace

Cascade = Literal["store", "evict", "second_use"]
CASCADES: Mapping[str, Cascade] = {AT_ONCE: "store", WHEN_EVICTED: "evict", ON_SECOND_USE: "second_use"}
_LIMITS = EngineLimits()


class Served(NamedTuple):
    """What became of one request, in blocks."""

    hits: int
    written: int  # To the tier, because of it.


def cascade_named(name: str) -> Cascade:
    """Return a cascade's name; `ConfigError` if there is no such cascade."""
    try:
        return CASCADES[name]
    except KeyError:
        raise ConfigError(f"cascade {name!r} given, {', '.join(CASCADES)} accepted") from None


class TierOfBlocks:
    """An LRU tier. A batch is written as a whole: it makes no room at its own cost."""

    def __init__(self, capacity: int) -> None:
        self.written = 0
        self.blocks: OrderedDict[int, None] = OrderedDict()  # Least recently used first.
        self._capacity = capacity

    def write(self, blocks: Sequence[int]) -> None:
        """Write blocks, head first; what there is no room for is left out."""
        batch = set(blocks)
        for block in blocks:
            if block not in self.blocks and len(self.blocks) >= self._capacity:
                victim = next((other for other in self.blocks if other not in batch), None)
                if victim is None:
                    continue
                del self.blocks[victim]
            self.blocks[block] = None
            self.written += 1
        self.touch(blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        """Make those that are there the most recently used, tail first."""
        for block in reversed([block for block in blocks if block in self.blocks]):
            self.blocks.move_to_end(block)


class TieredCache:
    """A cache of `capacity` blocks over a tier. The policy was made for that capacity and is still empty."""

    def __init__(self, policy: Policy[int], capacity: int, tier_capacity: int, cascade: str) -> None:
        self.tier = TierOfBlocks(tier_capacity)
        self._capacity = capacity
        self._cascade = cascade_named(cascade)
        self._batch = _LIMITS.action_chunks
        self._ahead = rows_of_share(_LIMITS.leaving_share, capacity) if cascade == WHEN_EVICTED else 0
        self._leaving = Leaving[int](policy, self._ahead)
        self._order = self._leaving if self._ahead else policy
        self._resident: set[int] = set()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._seen_max = max(SEEN_MIN, SEEN_A_ROW * capacity)
        self._due: list[int] = []  # To be written when the step ends.

    def serve(self, blocks: Sequence[int]) -> Served:
        """Look a request's blocks up, use and store as many as the cache holds, and end the request."""
        before = self.tier.written
        blocks = blocks[: self._capacity]
        run = self._run(blocks)
        used = list(dict.fromkeys(blocks))
        self._use(used, set(run))
        self._end_step()
        held = [block for block in used if block in self.tier.blocks]
        self._order.rank([block for block in used if block in self._resident])
        self._end_step(ranked=held)
        return Served(len(run), self.tier.written - before)

    def _run(self, blocks: Sequence[int]) -> list[int]:
        """Return the leading run, and have what of it lies in the tier brought into the cache."""
        found: set[int] = set()
        promoted: list[int] = []
        for block in blocks:
            if block not in self._resident:
                if block not in self.tier.blocks or not self._insert([block], found):
                    break
                promoted.append(block)
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
        if self._cascade == AT_ONCE:
            self._due += missing
        elif self._cascade == ON_SECOND_USE:
            self._due += [block for block in missing if block in self._seen]
            self._remember(missing)

    def _insert(self, blocks: Sequence[int], keep: Collection[int]) -> bool:
        """Make room for blocks, at the cost of none that is kept, and insert them; False if there is too little."""
        excess = len(self._resident) + len(blocks) - self._capacity
        if excess > 0:
            victims = self._order.evict(excess, keep.__contains__, blocks)
            if victims is None:
                return False
            self._resident.difference_update(victims)
        self._resident.update(blocks)
        self._order.insert(blocks)
        return True

    def _touch(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._order.touch(blocks)
        if self._cascade == ON_SECOND_USE:
            self._due += blocks

    def _remember(self, blocks: Sequence[int]) -> None:
        seen = self._seen
        for block in reversed(blocks):
            seen[block] = None
            seen.move_to_end(block)
        for _ in range(len(seen) - self._seen_max):
            seen.popitem(last=False)

    def _end_step(self, *, keep: Collection[int] = (), ranked: Sequence[int] = (), loaded: Sequence[int] = ()) -> None:
        """Have blocks leave ahead of demand; tell the tier what is recent, load from it, and write what is due."""
        self.tier.touch(ranked)
        if self._ahead:
            left = self._leaving.left
            missing = self._ahead - (self._capacity - len(self._resident)) - len(left)
            if missing > 0:
                idle = len(self._resident) - len(keep) - sum(block not in keep for block in left)
                self._leaving.leave(min(missing, idle), set(keep).__contains__)
            news = self._leaving.take_news()
            self.tier.touch(news)
            self._due += reversed(news)
        for start in range(0, len(loaded), self._batch):
            self.tier.touch(loaded[start : start + self._batch])
        due = [block for block in dict.fromkeys(self._due) if block not in self.tier.blocks]
        self._due.clear()
        for start in range(0, len(due), self._batch):
            batch = due[start : start + self._batch]
            self.tier.write(batch[::-1] if self._ahead else batch)


def tiered_hits(
    requests: Iterable[Request], policy: Policy[int], capacity: int, tier_capacity: int, cascade: str
) -> Iterator[Served]:
    """Give what became of each request in a new cache over a new tier."""
    cache = TieredCache(policy, capacity, tier_capacity, cascade)
    for request in requests:
        yield cache.serve(request.hash_ids)


class TierUnder:
    """A tier under caches of several sizes and policies: a share of its trace's unique blocks."""

    def __init__(self, trace: Trace | GeneratedTrace, share: float, cascades: Sequence[str]) -> None:
        self.cascades = cascades
        self.written: Counter[tuple[str, int]] = Counter()  # Simulation's name and cache's capacity -> blocks.
        self._trace = trace
        self._share = share

    def simulation(self, policy: str, cascade: str) -> Simulation:
        """Return how a policy is simulated over this tier. Raises `ConfigError` for what is no policy of an engine."""
        if policy == OPT:
            raise ConfigError(f"policy {OPT!r} given with a tier: it is known for one cache only")
        cls = policy_class(policy)

        def simulate(requests: Iterable[Request], capacity: int) -> Iterator[int]:
            for served in tiered_hits(requests, cls(capacity), capacity, self._capacity, cascade):
                self.written[f"{policy}, {cascade}", capacity] += served.written
                yield served.hits

        return simulate

    @cached_property
    def _capacity(self) -> int:
        return measure(self._trace).capacity(self._share)
