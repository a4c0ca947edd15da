"""The step protocol beside vLLM's own CPU offloading manager: the same keys, in turn, in one process.

kvtier is called twice: as any engine calls it, and as vLLM's scheduler does, through vLLM's interface.

Run it in an environment that has vLLM (0.32), with kvtier on the path:

    PYTHONPATH=.:backends /path/to/vllm/bin/python tests/benchmarks/beside_vllm.py

Prints chunks a second of the thread's own time, so that a busy machine matters less, and the ratio to vLLM in the same
round: medians, and from the least to the most.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.stats import TransferTimes
from tests.benchmarks.steps import KEYS_A_REQUEST, REQUESTS_A_STEP, ROWS, Steps

ROUNDS = 15


class VllmSteps:
    """What `Steps` does, through vLLM's interface."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.manager = manager
        self.requests = 0

    def each(self, batches: list[list[Any]], call: Callable[[list[Any], ReqContext], None]) -> None:
        for keys in batches:
            self.requests += 1
            context = ReqContext(req_id=str(self.requests))
            self.manager.on_new_request(context)
            call(keys, context)
            self.manager.on_request_finished(context)
            if self.requests % REQUESTS_A_STEP == 0:
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
    ours = Steps()
    engine: Any = Steps().manager
    shim = VllmSteps(VllmManager(engine, TransferTimes()))
    theirs = VllmSteps(CPUOffloadingManager(num_chunks=ROWS, cache_policy="lru"))
    print(
        f"{ROWS:,} rows, {REQUESTS_A_STEP} requests of {KEYS_A_REQUEST} keys a step, {ROUNDS} rounds; chunks a second"
    )
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS + 1):
        batches = ours.new_keys()
        for operation in ("store", "look_up", "load"):
            sides = [("kvtier", ours), ("shim", shim), ("vllm", theirs)]
            random.shuffle(sides)
            for name, steps in sides:
                begun = time.thread_time()
                steps.each(batches, getattr(steps, operation))
                rate = ROWS / (time.thread_time() - begun)
                rates.setdefault(operation, {}).setdefault(name, []).append(rate)
    for operation, sides in rates.items():
        for name in ("vllm", "kvtier", "shim"):
            measured = sides[name][1:]
            ratios = [ours / theirs for ours, theirs in zip(measured, sides["vllm"][1:], strict=True)]
            print(f"{operation:8} {name:6} {statistics.median(measured):>12,.0f}", end="  ")
            print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
