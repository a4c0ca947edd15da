"""Belady's OPT with bypass: the hits of a cache that knows the future. For studies only, so it is no `Policy`.

After each request it keeps, of what was resident and what the request used, the blocks with the nearest next use; a
block need not be kept at all (bypass). Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5(2), 1966. A next use is a place among all references of the trace; so of two blocks that the same
request uses next, the head is kept.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from kvtier.replay.traces import Request

_NEVER = 0  # The first reference is nobody's next use.
_STALE_MIN = 65_536  # Fewer outdated entries than this are not worth a new heap.


def opt_hits(requests: Iterable[Request], capacity: int) -> Iterator[int]:
    """Give each request's hits: its longest resident leading run, with room for `capacity` blocks.

    Takes 8 bytes of memory a reference, and time that grows with the logarithm of the capacity.
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
    for place in range(len(references) - 1, -1, -1):
        block = references[place]
        next_uses[place] = soonest[block]
        soonest[block] = place
    return next_uses


def _leading_run(blocks: Iterable[int], resident: Mapping[int, int]) -> int:
    run = 0
    for block in blocks:
        if block not in resident:
            break
        run += 1
    return run
