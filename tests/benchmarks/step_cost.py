"""What one step costs the engine's thread, as the index grows and as tiers are added.

    python -m tests.benchmarks.step_cost --chunks 10_000 1_000_000 10_000_000 --tiers 1 2 4

A step is 64 requests of 32 keys: half of them are looked up, touched and loaded (but for a few that have gone
meanwhile), half are new, stored, and cascade to every tier, each for the room of an old one. The primary is full, and
every chunk in it is known to be in the tiers. Prints milliseconds of the thread's own time: the median of the steps,
and the 99th percentile. "Cascading" is what the new chunks' way to the tiers adds: queueing, sending and settling.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.engine.ledger import Ledger, LedgerLimits, LookupResult
from kvtier.engine.requests import Request
from kvtier.engine.tier import TierMatcher, TierSpec
from kvtier.policies import LRU
from kvtier.runner.messages import Cascade, Finished, Found, pack_keys, pack_rows
from tests.benchmarks.protocol import KEYS_A_REQUEST, REQUESTS_A_STEP

BATCH = 4_096
STEPS = 200
NO_TIER = (TierMatcher(medium="none"),)


class Steps:
    """A full primary over tiers that do at once what they are told."""

    def __init__(self, chunks: int, tiers: int) -> None:
        specs = [TierSpec(f"tier{index}", 1 << 20, 1.0, 3, 1.0, 64, medium="STORAGE") for index in range(tiers)]
        self.ledger = Ledger(chunks, LRU(chunks), specs, LedgerLimits(chunks, chunks, 1.0, 64))
        self.random = random.Random(5)
        self.rows = chunks
        for first in range(0, chunks, BATCH):
            keys = self.new_keys(min(BATCH, chunks - first))
            self.store(keys, Request("filling", NO_TIER))
            for tier in self.ledger.tiers:
                self.ledger.apply(Found(tier.index, pack_keys(keys)))
            self.ledger.end_step()

    def new_keys(self, count: int) -> list[OffloadKey]:
        return [make_offload_key(self.random.randbytes(32)) for _ in range(count)]

    def old_keys(self, count: int) -> list[OffloadKey]:
        rows = self.random.sample(range(self.rows), count)
        return [key for row in rows if (key := self.ledger.primary.key(row)) is not None]

    def store(self, keys: list[OffloadKey], request: Request) -> None:
        plan = self.ledger.prepare_store(keys, request)
        assert plan is not None
        self.ledger.complete_store(plan.keys, request)

    def step(self, *, cascading: bool) -> float:
        """Take one step, and return its seconds."""
        half = KEYS_A_REQUEST // 2
        work = [(self.old_keys(half), self.new_keys(half)) for _ in range(REQUESTS_A_STEP)]
        matchers: Sequence[TierMatcher] | None = None if cascading else NO_TIER
        gc.collect(0)
        begun = time.thread_time()
        self.ledger.begin_step(time.monotonic())
        for number, (old, new) in enumerate(work):
            request = Request(str(number), matchers, NO_TIER)  # Nothing is promoted.
            found = [key for key in old if self.ledger.lookup(key, request) is LookupResult.HIT]
            self.ledger.touch(found, request)
            self.ledger.prepare_load(found, request)
            self.ledger.complete_load(found)
            self.store(new, request)
            self.ledger.finish(request)
        for action in self.ledger.end_step():
            if isinstance(action, Cascade):
                self.ledger.apply(Finished(action.id, pack_rows([]), b"", 0.0, lent=False))
        return time.thread_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--tiers", type=int, nargs="+", default=[1, 2, 3, 4])
    given = parser.parse_args()
    for chunks, tiers in [(chunks, given.tiers[0]) for chunks in given.chunks] + [
        (given.chunks[0], tiers) for tiers in given.tiers[1:]
    ]:
        steps = Steps(chunks, tiers)
        gc.freeze()  # What the index holds is no garbage; a collection would look at it all.
        alone = [steps.step(cascading=False) * 1e3 for _ in range(STEPS)]
        both = [steps.step(cascading=True) * 1e3 for _ in range(STEPS)]
        p99 = statistics.quantiles(both, n=100)[-1]
        print(f"{chunks:>12,} chunks, {tiers} tiers: {statistics.median(both):6.2f} ms a step, p99 {p99:6.2f}", end="")
        print(f"; cascading {statistics.median(both) - statistics.median(alone):5.2f}")
        gc.unfreeze()


if __name__ == "__main__":
    main()
