"""The step protocol beside vLLM's own CPU offloading manager: the same keys, in turn, in one process.

kvtier is called twice: as any engine calls it, and as vLLM's scheduler does, through vLLM's interface.

Run it in an environment that has vLLM (0.32), with kvtier on the path:

    PYTHONPATH=.:backends /path/to/vllm/bin/python tests/benchmarks/beside_vllm.py

Each manager is called through its own interface. Prints chunks a second, the median of the rounds, and the ratio.
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
from tests.benchmarks.steps import KEYS_A_REQUEST, ROWS, Steps

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
    print(f"{ROWS:,} rows, {KEYS_A_REQUEST} keys a request, median of {ROUNDS} rounds; chunks a second")
    rates: dict[str, dict[str, list[float]]] = {}
    for _ in range(ROUNDS + 1):
        batches = ours.new_keys()
        for operation in ("store", "look_up", "load"):
            sides = [("kvtier", ours), ("shim", shim), ("vllm", theirs)]
            random.shuffle(sides)
            for name, steps in sides:
                begun = time.perf_counter()
                steps.each(batches, getattr(steps, operation))
                rate = ROWS / (time.perf_counter() - begun)
                rates.setdefault(operation, {}).setdefault(name, []).append(rate)
    for operation, sides in rates.items():
        median = {name: statistics.median(values[1:]) for name, values in sides.items()}
        spread = {name: f"{min(values[1:]):,.0f} to {max(values[1:]):,.0f}" for name, values in sides.items()}
        for name in median:
            ratio = median[name] / median["vllm"]
            print(f"{operation:8} {name:6} {median[name]:>12,.0f} ({spread[name]})  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
