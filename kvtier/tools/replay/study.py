"""Hit ratios of eviction policies over a trace, for one cache: no engine, no bytes, no time.

A request's hits are its longest resident leading run. Then all of its blocks are stored, or as many as the cache holds:
blocks of other requests are evicted first, resident blocks are touched and missing ones inserted, tail first. Its hint
applies last. Retentions expire by the trace's clock, and the cache starts cold. The classes that decide are the
engine's own, so an engine with a primary alone has exactly these hits, request by request.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import filterfalse, repeat, takewhile
from typing import Any, NamedTuple

from kvtier.config import EngineLimits
from kvtier.errors import ConfigError
from kvtier.policies import HintedOrder, Policy, policy_class
from kvtier.settings.hints import RETAIN_S_MAX, Hint
from kvtier.tools.outputs import counted
from kvtier.tools.replay.traces import BLOCK_TOKENS, TraceRequest

OPT = "opt"
RETAINED_SHARE = EngineLimits().retained_share  # Of the cache, at most: the engine's default.
_NEVER = 0  # No next use: the first reference is not the next use of any.
_STALE_MIN = 65_536  # Outdated entries; fewer are not worth a new heap.

Simulation = Callable[[Iterable[TraceRequest], int], Iterator[int]]
"""Maps requests and a cache's capacity in blocks to the hits of each request."""


class Extent(NamedTuple):
    requests: int
    block_references: int
    unique_blocks: int
    best_hits: int  # Of a cache that keeps everything.
    lengths: Mapping[int, int]  # Requests by their number of blocks.

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def capacity(self, share: float) -> int:
        """Return this share of the unique blocks, rounded, at least one."""
        return max(1, round(share * self.unique_blocks))

    def hit_ratio(self, hits: int) -> float:
        """Return the hits as a share of the references; 0 without references."""
        return hits / self.block_references if self.block_references else 0.0


def measure(requests: Iterable[TraceRequest]) -> Extent:
    """Read all requests once, and count them and their blocks."""
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
    """Return a warning if requests are longer than a cache: only their leading blocks can be stored or found."""
    if not (longer := sum(requests for blocks, requests in extent.lengths.items() if blocks > capacity)):
        return []
    return [
        f"{of} of {capacity:,} chunks is shorter than {counted(longer, 'request')} of {extent.requests:,}, the longest "
        f"of {extent.longest:,} chunks: what exceeds it is neither stored nor found; a larger one holds them"
    ]


def simulation(name: str, block_tokens: int = BLOCK_TOKENS) -> Simulation:
    """Return the simulation of `opt` or a `policy_class`, or raise `ConfigError`. Hints count in `block_tokens`."""
    if name == OPT:
        return opt_hits
    try:
        policy: Any = policy_class(name)
    except ConfigError as error:
        if ":" in name:
            raise
        raise ConfigError(f"{error}; or {OPT!r}, the best that any could do") from error
    return lambda requests, capacity: policy_hits(requests, policy(capacity), capacity, block_tokens=block_tokens)


class Cache:
    """One cache under an empty policy of the same `capacity`."""

    def __init__(self, policy: Policy[int], capacity: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self._order: Policy[int] | HintedOrder[int] = policy
        self._hinted: HintedOrder[int] | None = None  # The same order, from the first hint on.
        self._capacity = capacity
        self._block_tokens = block_tokens
        self._resident: set[int] = set()

    def leading_run(self, blocks: tuple[int, ...]) -> int:
        return _leading_run(blocks, self._resident)

    def use(self, blocks: tuple[int, ...], hint: Hint | None = None, now_s: float = 0.0) -> None:
        """Store a request's blocks, up to the capacity, and apply its hint."""
        if hint is not None and self._hinted is None:
            order: Any = self._order  # Any: to pyright, a class variable does not match a protocol's property.
            self._order = self._hinted = HintedOrder(order, int(RETAINED_SHARE * self._capacity))
        resident = self._resident
        used = blocks[: self._capacity]
        offered = frozenset(used)
        if len(offered) < len(used):  # Prefix-chained blocks are distinct, but not every trace is well formed.
            used = tuple(dict.fromkeys(used))
        missing = list(filterfalse(resident.__contains__, used))
        present = list(filter(resident.__contains__, used)) if missing else used
        if (excess := len(resident) + len(missing) - self._capacity) > 0:
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
        assert victims is not None  # At most `capacity` blocks are offered; all others may be evicted.
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
    return used if hint.tokens is None else used[: -(-hint.tokens // block_tokens)]


def policy_hits(
    requests: Iterable[TraceRequest],
    policy: Policy[int],
    capacity: int,
    hints: Iterable[Hint | None] | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[int]:
    """Yield the hits of each request for an empty policy of `capacity`; `hints` replace those of the trace."""
    cache = Cache(policy, capacity, block_tokens)
    for request, hint in zip(requests, repeat(None) if hints is None else hints, strict=False):
        yield cache.leading_run(request.hash_ids)
        cache.use(request.hash_ids, request.hint if hints is None else hint, request.timestamp_ms / 1_000)


def opt_hits(requests: Iterable[TraceRequest], capacity: int) -> Iterator[int]:
    """Yield the hits of each request in a cache of `capacity` blocks that knows the future: Belady's OPT with bypass.

    After each request it keeps the blocks with the nearest next use, among the resident ones and the request's own; of
    two that the same request uses next, the head. It takes 8 bytes of memory a reference. Belady, "A study of
    replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
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


def _flattened(requests: Iterable[TraceRequest]) -> "tuple[array[int], list[int]]":
    """Return all references in order, with blocks numbered from 0, and the number of references of each request."""
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
    return len(list(takewhile(resident.__contains__, blocks)))
