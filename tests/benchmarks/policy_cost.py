"""What a policy's calls cost the scheduler's thread, policies side by side: a request, and a key of it.

    .venv/bin/python -m tests.benchmarks.policy_cost [TRACE] [--share 0.05] [--policies lru,density] [--limit N]

The model is the study's (`kvtier policies`), but with rows, as a primary has them: rows are found and given outside of
what is measured. Time is the thread's own, so that neighbours count less. All policies take part in turn, a part of the
trace each, in a process that does nothing else. Garbage collection is on.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

from kvtier.policies import NumberOrder, number_order, policy_class
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import Request
from kvtier.tools.replay.workload import GENERATED, open_trace

PART_REQUESTS = 200


class MeasuredCache:
    """A cache with rows, and the time that its policy has taken."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.capacity = capacity
        self.spent_ns: list[int] = []  # By request.
        self.keys = 0
        self._rows: dict[int, int] = {}
        self._keys: list[int | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._order: NumberOrder = number_order(policy_class(policy)(capacity), capacity, self._keys, self._rows.get)

    def use(self, blocks: Sequence[int]) -> None:
        used = list(dict.fromkeys(blocks[: self.capacity]))
        missing = [block for block in used if block not in self._rows]
        present = [self._rows[block] for block in used if block in self._rows]
        began = time.thread_time_ns()
        victims = self._order.evict(max(0, len(missing) - len(self._free)), set(present).__contains__, missing) or []
        spent = time.thread_time_ns() - began
        new = self._replace(victims, missing)
        ranked = [self._rows[block] for block in used]
        began = time.thread_time_ns()
        self._order.insert(new)
        self._order.touch(present)
        self._order.rank(ranked)
        self.spent_ns.append(spent + time.thread_time_ns() - began)
        self.keys += len(used)

    def _replace(self, victims: Sequence[int], missing: Sequence[int]) -> list[int]:
        for row in victims:
            gone = self._keys[row]
            assert gone is not None
            del self._rows[gone]
            self._free.append(row)
        new = [self._free.pop() for _ in missing]
        for block, row in zip(missing, new, strict=True):
            self._rows[block], self._keys[row] = row, block
        return new


def parts(requests: Iterator[Request]) -> Iterator[list[Request]]:
    while part := [request for request, _ in zip(requests, range(PART_REQUESTS), strict=False)]:
        yield part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", default=GENERATED)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--policies", default="lru,arc,s3fifo,lfu,density")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    trace = open_trace(options.trace, limit=options.limit)
    capacity = measure(trace).capacity(options.share)
    caches = {name: MeasuredCache(name, capacity) for name in options.policies.split(",")}
    for part in parts(iter(trace)):
        for cache in caches.values():
            for request in part:
                cache.use(request.hash_ids)
    for name, cache in caches.items():
        spent = sorted(cache.spent_ns)
        total, p99 = sum(spent) / 1e3, spent[len(spent) * 99 // 100] / 1e3
        print(
            f"{name:8} {total / len(spent):8.1f} us a request, {total / cache.keys:6.3f} us a key, "
            f"p99 {p99:,.0f} us, worst {spent[-1] / 1e3:,.0f} us"
        )


if __name__ == "__main__":
    main()
