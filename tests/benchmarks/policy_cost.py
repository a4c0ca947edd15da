"""What a policy's calls cost the scheduler's thread, policies side by side: a request, and a key of it.

    .venv/bin/python -m tests.benchmarks.policy_cost [TRACE] [--share 0.05] [--policies lru,density] [--limit N]

The model is the study's (`kvtier policies`), but with rows, as a primary has them: rows are found and given outside of
what is measured. Time is the thread's own. The same requests give the same work, so each policy runs them several
times, in turn with the others, and a request's least time counts: its cost without neighbours. The collector is on.
"""

import argparse
import time
from collections.abc import Sequence

from kvtier.policies import NumberOrder, number_order, policy_class
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import Request
from kvtier.tools.replay.workload import GENERATED, open_trace


class MeasuredCache:
    """A cache with rows, and the time that its policy has taken."""

    def __init__(self, policy: str, capacity: int) -> None:
        self.capacity = capacity
        self.spent_ns: list[int] = []  # By request.
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


def spent_ns(policy: str, requests: Sequence[Request], capacity: int) -> list[int]:
    cache = MeasuredCache(policy, capacity)
    for request in requests:
        cache.use(request.hash_ids)
    return cache.spent_ns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", default=GENERATED)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--policies", default="lru,arc,s3fifo,density")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    trace = open_trace(options.trace, limit=options.limit)
    capacity = measure(trace).capacity(options.share)
    requests = list(trace)
    keys = sum(min(capacity, len(set(request.hash_ids))) for request in requests)
    names = options.policies.split(",")
    least: dict[str, list[int]] = {}
    for _ in range(options.repeats):
        for name in names:
            again = spent_ns(name, requests, capacity)
            least[name] = list(map(min, least.get(name, again), again))
    print(f"{len(requests):,} requests of {keys / len(requests):.0f} keys, {capacity:,} rows")
    for name, spent in least.items():
        ordered, total = sorted(spent), sum(spent) / 1e3
        print(
            f"{name:8} {total / len(spent):8.1f} us a request, {total / keys:6.3f} us a key, "
            f"p99 {ordered[len(spent) * 99 // 100] / 1e3:,.0f} us, worst {ordered[-1] / 1e3:,.0f} us"
        )


if __name__ == "__main__":
    main()
