"""Which eviction policy suits a workload? Compare them, and one of your own, over the same requests.

    python examples/compare_policies.py [TRACE]

TRACE is a file in Mooncake's format; without one, a workload is generated. A policy decides which resident block goes
next and nothing else, so one that behaves differently is a few lines: here, one that evicts at random.
"""

import random
import sys
from collections.abc import Callable, Sequence

from kvtier.policies import Hint, Policy, policy_class
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.workload import open_trace

CACHE_SHARE = 0.05  # Of the trace's unique blocks.


class AnyOfThem(Policy[int]):
    """Evicts whatever comes: the yardstick below which a policy does harm."""

    def __init__(self, capacity: int) -> None:
        self._keys: list[int] = []
        self._dice = random.Random(0)

    def insert(self, keys: Sequence[int]) -> None:
        self._keys += keys

    def touch(self, keys: Sequence[int]) -> None:
        pass

    def rank(self, keys: Sequence[int], hint: Hint | None = None) -> None:
        pass

    def evict(self, count: int, keep: Callable[[int], bool], incoming: Sequence[int] = ()) -> list[int] | None:
        evictable = [key for key in self._keys if not keep(key)]
        if len(evictable) < count:
            return None
        victims = self._dice.sample(evictable, count)
        self.remove(victims)
        return victims

    def remove(self, keys: Sequence[int]) -> None:
        gone = set(keys)
        self._keys = [key for key in self._keys if key not in gone]


def main(trace_name: str = "generated") -> None:
    trace = open_trace(trace_name)
    extent = measure(trace)
    capacity = extent.capacity(CACHE_SHARE)
    print(f"{extent.requests:,} requests, a cache of {capacity:,} of {extent.unique_blocks:,} blocks")
    compared: list[type[Policy[int]]] = [AnyOfThem, *map(policy_class, ("fifo", "lru", "s3fifo", "arc", "density"))]
    for cls in compared:
        hits = sum(policy_hits(trace, cls(capacity), capacity))
        print(f"{cls.__name__:>10}  hit ratio {extent.hit_ratio(hits):.4f}")
    print(f"{'everything':>10}  hit ratio {extent.hit_ratio(extent.best_hits):.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
