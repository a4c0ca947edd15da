"""The step protocol beside vLLM's own CPU offloading manager: the same keys, in turn, in one process.

Run it in an environment that has vLLM (0.32), with kvtier on the path:

    PYTHONPATH=.:backends /path/to/vllm/bin/python tests/benchmarks/beside_vllm.py

Each manager is called through its own interface. Prints chunks a second, the median of the rounds, and the ratio.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from tests.benchmarks.steps import KEYS_A_REQUEST, ROWS, Steps

ROUNDS = 7


class VllmSteps:
    """What `Steps` does, on vLLM's manager."""

    def __init__(self) -> None:
        self.manager = CPUOffloadingManager(num_chunks=ROWS, cache_policy="lru")
        self.requests = 0

    def each(self, batches: list[list[Any]], call: Callable[[list[Any], ReqContext], None]) -> None:
        for keys in batches:
            self.requests += 1
            context = ReqContext(req_id=str(self.requests))
            self.manager.on_new_request(context)
            call(keys, context)
            self.manager.on_request_finished(context)
            self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def look_up(self, keys: list[Any], context: ReqContext) -> None:
        for key in keys:
            self.manager.lookup(key, context)

    def store(self, keys: list[Any], context: ReqContext) -> None:
        self.manager.complete_store(self.manager.prepare_store(keys, context).keys_to_store, context)

    def load(self, keys: list[Any], context: ReqContext) -> None:
        self.manager.touch(keys, context)
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)


def main() -> None:
    ours, theirs = Steps(), VllmSteps()
    print(f"{ROWS:,} rows, {KEYS_A_REQUEST} keys a request, median of {ROUNDS} rounds; chunks a second")
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS + 1):
        batches = ours.new_keys()
        for operation in ("store", "look_up", "load"):
            sides = [("kvtier", ours), ("vllm", theirs)]
            random.shuffle(sides)
            for name, steps in sides:
                begun = time.perf_counter()
                steps.each(batches, getattr(steps, operation))
                rate = ROWS / (time.perf_counter() - begun)
                rates.setdefault(operation, {}).setdefault(name, []).append(rate)
    for operation, sides in rates.items():
        median = {name: statistics.median(values[1:]) for name, values in sides.items()}
        spread = {name: f"{min(values[1:]):,.0f} to {max(values[1:]):,.0f}" for name, values in sides.items()}
        ratio = median["kvtier"] / median["vllm"]
        print(f"{operation:8} kvtier {median['kvtier']:>12,.0f} ({spread['kvtier']})")
        print(f"{'':8} vllm   {median['vllm']:>12,.0f} ({spread['vllm']})  ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
