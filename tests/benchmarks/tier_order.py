"""What it is worth that a tier hears of the requests that are over: hit ratios of a model with and without.

    PYTHONPATH=.:backends python tests/benchmarks/tier_order.py

A primary over one tier, both LRU; requests of the generated workload, 16 of them served at a time and by turns, are
loaded in pieces of 64 blocks and stored in pieces of 16. The tier sees these, and not what the primary answers.
"""

import random
from collections.abc import Iterator, Sequence

from kvtier.policies import LRU
from kvtier.tools.replay.traces import Request
from kvtier.tools.replay.workload import Workload, generate

REQUESTS = 6_000
SEEDS = 2
AT_ONCE = 16
LOADED, STORED = 64, 16
SIZES = ((0.01, 0.03), (0.01, 0.05), (0.02, 0.1), (0.05, 0.2), (0.02, 0.4))  # Parts of all unique blocks.


class Level:
    """What one level of the cache holds."""

    def __init__(self, blocks: int) -> None:
        self.held: set[int] = set()
        self._blocks = blocks
        self._policy = LRU[int](blocks)

    def put(self, blocks: Sequence[int], keep: frozenset[int]) -> None:
        missing = [block for block in blocks if block not in self.held]
        excess = len(self.held) + len(missing) - self._blocks
        victims = self._policy.evict(excess, keep.__contains__, missing) if excess > 0 else []
        if victims is not None:
            self.held.difference_update(victims)
            self.held.update(missing)
            self._policy.insert(missing)

    def use(self, blocks: Sequence[int]) -> None:
        self._policy.touch([block for block in blocks if block in self.held])


def serve(request: Request, primary: Level, tier: Level, *, told: bool) -> Iterator[int]:
    """Serve a request piece by piece; yields after each, and how many blocks were hits with the first."""
    blocks = tuple(dict.fromkeys(request.hash_ids))
    keep, run = frozenset(blocks), 0
    while run < len(blocks) and (blocks[run] in primary.held or blocks[run] in tier.held):
        run += 1
    yield run
    lacking = [block for block in blocks[:run] if block not in primary.held]
    for start in range(0, len(lacking), LOADED):
        tier.use(lacking[start : start + LOADED])
        primary.put(lacking[start : start + LOADED], keep)
        yield 0
    primary.use(blocks[:run])
    for start in range(run, len(blocks), STORED):
        piece = blocks[start : start + STORED]
        primary.put(piece, keep)
        tier.put(piece, frozenset(piece))
        yield 0
    primary.use(blocks)  # For an LRU, ranking and using are one.
    if told:
        tier.use(blocks)


def hit_ratio(requests: Sequence[Request], primary_blocks: int, tier_blocks: int, *, told: bool) -> float:
    primary, tier, source = Level(primary_blocks), Level(tier_blocks), random.Random(0)
    coming, served, hits = iter(requests), list[Iterator[int]](), 0
    while True:
        while len(served) < AT_ONCE and (request := next(coming, None)) is not None:
            served.append(serve(request, primary, tier, told=told))
        if not served:
            return hits / sum(len(request.hash_ids) for request in requests)
        turn = source.choice(served)
        piece = next(turn, None)
        if piece is None:
            served.remove(turn)
        else:
            hits += piece


def main() -> None:
    for seed in range(SEEDS):
        requests = list(generate(Workload(requests=REQUESTS, seed=seed)))
        unique = len({block for request in requests for block in request.hash_ids})
        for sizes in SIZES:
            primary_blocks, tier_blocks = (int(unique * part) for part in sizes)
            alone, told = (hit_ratio(requests, primary_blocks, tier_blocks, told=told) for told in (False, True))
            print(f"seed {seed}  primary {sizes[0]:4.0%}  tier {sizes[1]:4.0%}  {alone:.4f}  told {told:.4f}")


if __name__ == "__main__":
    main()
