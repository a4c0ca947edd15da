"""Hit ratios of eviction policies over a trace, cache size by cache size: no engine, no bytes, no time.

The model: a request's hits are its longest resident leading run. Then all of its blocks, or as many as the cache holds,
are used and stored: room is made first, never at the cost of a block of the request itself; what is there is touched
and what is missing inserted, tail first. Then its hint is heard. Nothing takes time, but what hints retain has its time
by the trace's clock; the cache starts cold. The classes that decide are the engine's own, so an engine with a primary
alone has exactly these hits, request by request.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import filterfalse, repeat, takewhile
from typing import Any, NamedTuple

from kvtier.config import EngineLimits
from kvtier.errors import ConfigError
from kvtier.hints import RETAIN_S_MAX, Hint
from kvtier.policies import HintedOrder, Policy, policy_class
from kvtier.tools.outputs import counted
from kvtier.tools.replay.traces import BLOCK_TOKENS, Request

OPT = "opt"
RETAINED_SHARE = EngineLimits().retained_share  # Of the cache, at most, as an engine has it that is not told otherwise.
_NEVER = 0  # As a next use: the first reference is nobody's.
_STALE_MIN = 65_536  # Fewer outdated entries than this are not worth a new heap.

Simulation = Callable[[Iterable[Request], int], Iterator[int]]
"""From requests and a cache's capacity in blocks to each request's hits."""


class Extent(NamedTuple):
    """The extent of a trace."""

    requests: int
    block_references: int
    unique_blocks: int
    best_hits: int  # Of a cache that keeps everything.
    lengths: Mapping[int, int]  # Requests by their number of blocks.

    @property
    def longest(self) -> int:
        """The blocks of the longest request."""
        return max(self.lengths, default=0)

    def longer(self, capacity: int) -> int:
        """Return how many requests have more blocks than this capacity."""
        return sum(requests for blocks, requests in self.lengths.items() if blocks > capacity)

    def capacity(self, share: float) -> int:
        """Return the size of a cache that holds this share of the unique blocks: rounded, at least one."""
        return max(1, round(share * self.unique_blocks))

    def hit_ratio(self, hits: int) -> float:
        """Return which part of the references these hits are; 0 if there are none."""
        return hits / self.block_references if self.block_references else 0.0


def measure(requests: Iterable[Request]) -> Extent:
    """Read all requests once and count what is in them."""
    seen: set[int] = set()
    lengths: Counter[int] = Counter()
    best_hits = 0
    for request in requests:
        lengths[len(request.hash_ids)] += 1
        best_hits += _leading_run(request.hash_ids, seen)
        seen.update(request.hash_ids)
    references = sum(blocks * count for blocks, count in lengths.items())
    return Extent(lengths.total(), references, len(seen), best_hits, lengths)


def too_long(extent: Extent, capacity: int, of: str) -> list[str]:
    """Say how many requests are longer than a cache: only their leading blocks can be stored or found."""
    longer = extent.longer(capacity)
    if not longer:
        return []
    return [
        f"{of} of {capacity:,} chunks is shorter than {counted(longer, 'request')} of {extent.requests:,}, the longest "
        f"of {extent.longest:,} chunks: what exceeds it is neither stored nor found; a larger one holds them"
    ]


def simulation(name: str, block_tokens: int = BLOCK_TOKENS) -> Simulation:
    """Return how a policy is simulated: `opt`, or what `policy_class` knows. Raises `ConfigError` for anything else.

    `block_tokens`: of the trace, because hints count in tokens.
    """
    if name == OPT:
        return opt_hits
    try:
        return partial(_simulate, policy_class(name), block_tokens)
    except ConfigError as error:
        if ":" in name:
            raise
        raise ConfigError(f"{error}; or {OPT!r}, the best that any could do") from error


class Cache:
    """One cache under a policy that was made for its `capacity` blocks and is still empty."""

    def __init__(self, policy: Policy[int], capacity: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._order: Policy[int] | HintedOrder[int] = policy
        self._hinted: HintedOrder[int] | None = None  # The same order, from the first hint on.
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._resident: set[int] = set()

    def leading_run(self, blocks: tuple[int, ...]) -> int:
        """Return how many blocks from the first on are resident."""
        return _leading_run(blocks, self._resident)

    def use(self, blocks: tuple[int, ...], hint: Hint | None = None, now_s: float = 0.0) -> None:
        """Use and store a request's blocks, or as many as there is room for, and do what its hint says."""
        if hint is not None and self._hinted is None:
            self._order = self._hinted = HintedOrder(self._order, int(RETAINED_SHARE * self._capacity))
        resident = self._resident
        used = blocks[: self._capacity]
        offered = frozenset(used)
        if len(offered) < len(used):  # Prefix-chained blocks cannot come twice, but not every trace is well made.
            used = tuple(dict.fromkeys(used))
        missing = list(filterfalse(resident.__contains__, used))
        present = list(filter(resident.__contains__, used)) if missing else used
        excess = len(resident) + len(missing) - self._capacity
        if excess > 0:
            self._make_room(excess, offered, missing, now_s)
        resident.update(missing)
        self._order.insert(missing)
        self._order.touch(present)
        self._end(used, hint, now_s)

    def _make_room(self, excess: int, offered: Container[int], missing: Sequence[int], now_s: float) -> None:
        if self._hinted is not None:
            retained = self._hinted.retained
            retained.expire(now_s)
            retained.let_go(max(0, excess + len(retained) - len(self._resident)))
        victims = self._order.evict(excess, offered.__contains__, missing)
        assert victims is not None  # At most `capacity` blocks are offered, and all others may go.
        self._resident.difference_update(victims)

    def _end(self, used: Sequence[int], hint: Hint | None, now_s: float) -> None:
        if self._hinted is None:
            self._order.rank(used)
            return
        self._hinted.end(used, hint)
        if hint is not None and hint.retain_s:
            self._hinted.retained.expire(now_s)
            retained = leading(used, hint, self._block_tokens)
            self._hinted.retain(retained, now_s + min(hint.retain_s, RETAIN_S_MAX), hint.priority)


def leading(used: Sequence[int], hint: Hint, block_tokens: int) -> Sequence[int]:
    """Return the leading part of a request's blocks that its hint says is to be retained."""
    return used if hint.tokens is None else used[: -(-hint.tokens // block_tokens)]


def policy_hits(
    requests: Iterable[Request],
    policy: Policy[int],
    capacity: int,
    hints: Iterable[Hint | None] | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[int]:
    """Give each request's hits under a policy that was made for `capacity` blocks and is still empty.

    `hints`: what is said of each request, in place of the trace's own hints.
    """
    cache = Cache(policy, capacity, block_tokens)
    told = repeat(None) if hints is None else hints
    for request, hint in zip(requests, told, strict=False):
        yield cache.leading_run(request.hash_ids)
        cache.use(request.hash_ids, request.hint if hints is None else hint, request.timestamp_ms / 1_000)


def _simulate(cls: type[Policy[Any]], block_tokens: int, requests: Iterable[Request], capacity: int) -> Iterator[int]:
    return policy_hits(requests, cls(capacity), capacity, block_tokens=block_tokens)


def opt_hits(requests: Iterable[Request], capacity: int) -> Iterator[int]:
    """Give each request's hits in a cache of `capacity` blocks that knows the future: Belady's OPT with bypass.

    After each request it keeps, of what was resident and what the request used, the blocks with the nearest next use; a
    block need not be kept at all (bypass). A next use is an index among all references of the trace; so of two blocks
    that the same request uses next, the head is kept. Takes 8 bytes of memory a reference, and time that grows with the
    logarithm of the capacity. For studies only, so it is no `Policy`. Belady, "A study of replacement algorithms for a
    virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """
    references, lengths = _flattened(requests)
    next_uses = _next_uses(references)
    resident: dict[int, int] = {}  # Block -> its next use.
    farthest: list[int] = []  # A heap of the resident blocks' next uses, negated; some entries are outdated.
    begin = 0
    for length in lengths:
        end = begin + length
        blocks = references[begin:end]
        yield _leading_run(blocks, resident)
        for block, next_use in zip(blocks, next_uses[begin:end], strict=True):
            if next_use == _NEVER:
                resident.pop(block, None)
            else:
                resident[block] = next_use
                heappush(farthest, -next_use)
        while len(resident) > capacity:
            next_use = -heappop(farthest)
            block = references[next_use]
            if resident.get(block) == next_use:
                del resident[block]
        if len(farthest) > 2 * len(resident) + _STALE_MIN:
            farthest = [-next_use for next_use in resident.values()]
            heapify(farthest)
        begin = end


def _flattened(requests: Iterable[Request]) -> "tuple[array[int], list[int]]":
    """Return all references in order, with blocks numbered from 0, and how many each request has."""
    numbers: dict[int, int] = {}
    references = array("I")
    lengths: list[int] = []
    for request in requests:
        references.extend([numbers.setdefault(block, len(numbers)) for block in request.hash_ids])
        lengths.append(len(request.hash_ids))
    return references, lengths


def _next_uses(references: "array[int]") -> "array[int]":
    next_uses = array("I", bytes(references.itemsize * len(references)))
    soonest = [_NEVER] * (max(references, default=-1) + 1)
    for index in range(len(references) - 1, -1, -1):
        block = references[index]
        next_uses[index] = soonest[block]
        soonest[block] = index
    return next_uses


def _leading_run(blocks: Iterable[int], resident: Container[int]) -> int:
    """Return how many blocks from the first on are resident."""
    return len(list(takewhile(resident.__contains__, blocks)))
