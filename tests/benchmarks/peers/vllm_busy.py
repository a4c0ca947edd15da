"""The scheduler's thread beside transfers, and transfers beside a busy scheduler: kvtier and vLLM (0.32) in turn.

    PYTHONPATH=.:backends PEERS/vllm/bin/python -m tests.benchmarks.peers.vllm_busy [DIR]

Both engines have 128 KiB chunks and a primary of 256 MiB over their own file tier in the same directory (kvtier's in a
runner's process, vLLM's in C), and are driven through vLLM's interface.

- p99 of a step (8 requests look up 32 ready keys each) while stores and loads are under way, beside the same engine's
  step at rest, and beside vLLM's under the same load; in wall-clock time, and in CPU time of the thread: what lies
  between the two is waiting for a core or for the interpreter.
- loads of 64 MiB while the scheduler's thread computes in Python, beside the same engine's when it waits, and beside
  vLLM's.
"""

import os
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs import io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvtier.config import EngineConfig
from kvtier.engine.steps import StepManager
from kvtier.integrations.vllm.manager import VllmManager
from kvtier.integrations.vllm.stats import TransferTimes
from kvtier.tools.bench.figures import Pair, Row, Side, interleaved, row_of
from tests.benchmarks.peers.side_by_side import arguments, give_out, new_folder, new_keys
from tests.benchmarks.peers.vllm_fs import spec_of

CHUNK_BYTES = 128 << 10
ROWS = 2_048
CHUNKS = 512
KEYS_A_REQUEST = 64
HOT_REQUESTS, HOT_KEYS = 8, 32
STORED_A_STEP, LOADED_A_STEP = 16, 8
STEPS = 400
STEP_S = 0.002  # Of the scheduler's own computing between two looks.
PAUSE_S = 0.0005


class Driven:
    """One engine as vLLM's scheduler drives it."""

    def __init__(self, manager: OffloadingManager) -> None:
        self.manager = manager
        self._requests = 0
        self.kept = new_keys(CHUNKS)
        for start in range(0, CHUNKS, KEYS_A_REQUEST):
            self.store(self.kept[start : start + KEYS_A_REQUEST])
            self.settle()

    def store(self, keys: Sequence[Any]) -> None:
        context = self.begin()
        plan = self.manager.prepare_store(keys, context)
        if plan is not None:
            self.manager.complete_store(plan.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.end()

    def settle(self) -> None:
        """Step until nothing is under way."""
        until = time.monotonic() + 60
        quiet = 0
        while quiet < 3 and time.monotonic() < until:
            self.end()
            time.sleep(STEP_S)
            quiet = 0 if self.manager.has_pending_work() else quiet + 1

    def forget(self) -> None:
        """Empty the primary; the tier keeps what it has."""
        self.settle()
        self.manager.reset_cache()
        self.settle()

    def load(self, between: Callable[[], None]) -> float:
        """Have every chunk come from the tier; return MB/s."""
        begun = time.perf_counter()
        parts = [self.kept[start : start + KEYS_A_REQUEST] for start in range(0, CHUNKS, KEYS_A_REQUEST)]
        waiting = [(keys, self.begin()) for keys in parts]
        while waiting:
            left = []
            for keys, context in waiting:
                results = [self.manager.lookup(key, context) for key in keys]
                assert LookupResult.MISS not in results, "a chunk that the tier had did not come"
                if all(result is LookupResult.HIT for result in results):
                    self.manager.on_request_finished(context)
                else:
                    left.append((keys, context))
            waiting = left
            self.end()
            if waiting:
                between()
        return CHUNKS * CHUNK_BYTES / 1e6 / (time.perf_counter() - begun)

    def step_p99(self, clock: Callable[[], float], *, busy: bool) -> float:
        """Return the p99 of a step's ms by this clock."""
        self.forget()
        self.load(pause)
        hot, rest = self.kept[:HOT_KEYS], cycle(self.kept[HOT_KEYS:])
        times: list[float] = []
        for _ in range(STEPS):
            if busy:
                self.store(new_keys(STORED_A_STEP))
                context = self.begin()
                for _ in range(LOADED_A_STEP):
                    self.manager.lookup(next(rest), context)
                self.manager.on_request_finished(context)
            self._use(hot)
            self.end()
            time.sleep(PAUSE_S)
            times.append(1e3 * self._timed_step(hot, clock))
        return statistics.quantiles(times, n=100, method="inclusive")[98]

    def begin(self) -> ReqContext:
        self._requests += 1
        context = ReqContext(req_id=str(self._requests))
        self.manager.on_new_request(context)
        return context

    def end(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def _use(self, hot: Sequence[Any]) -> None:
        """Load the hot keys, as who finds them would: unused they would go for room, and come again in a timed step."""
        context = self.begin()
        self.manager.prepare_load(hot, context)
        self.manager.complete_load(hot, context)
        self.manager.on_request_finished(context)

    def _timed_step(self, hot: Sequence[Any], clock: Callable[[], float]) -> float:
        begun = clock()
        contexts = [self.begin() for _ in range(HOT_REQUESTS)]
        for context in contexts:
            for key in hot:
                self.manager.lookup(key, context)
        self.end()
        for context in contexts:
            self.manager.on_request_finished(context)
        return clock() - begun


def pause() -> None:
    time.sleep(PAUSE_S)


def compute() -> None:
    until = time.perf_counter() + STEP_S
    total = 0
    while time.perf_counter() < until:
        total += sum(range(50))


def kvtier(folder: str) -> OffloadingManager:
    config = {
        "cpu_bytes_to_use": ROWS * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": "process",
        "secondary_tiers": [{"type": "fs", "root": new_folder(folder)}],
    }
    return VllmManager(StepManager.start(EngineConfig.from_dict(config)), TransferTimes())


def vllm(folder: str) -> OffloadingManager:
    assert io._HAS_FSIO_C, "vLLM's C path is not installed"
    region = SharedOffloadRegion(
        engine_id=f"bench-{uuid.uuid4()}",
        num_chunks=ROWS,
        rank=None,
        kv_bytes_per_chunk=CHUNK_BYTES,
        cpu_page_size=CHUNK_BYTES,
    )
    primary = CPUPrimaryTierOffloadingManager(ROWS, region)
    tier = FileSystemTierManager(spec_of(CHUNK_BYTES), primary.get_kv_memoryview(), "fs", new_folder(folder))
    return TieringOffloadingManager(primary, [tier])


def measure(folder: str, rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        sides: list[Side] = []
        for name, make in (("kvtier", kvtier), ("vllm", vllm)):
            manager = make(folder)
            stack.callback(manager.shutdown)
            driven = Driven(manager)
            sides += [
                *(
                    Side(f"{load}step{kind} {name}", partial(driven.step_p99, clock, busy=load == "busy "))
                    for kind, clock in (("", time.perf_counter), (" cpu", time.thread_time))
                    for load in ("", "busy ")
                ),
                Side(f"load {name}", lambda driven=driven: driven.load(pause), driven.forget),
                Side(f"busy load {name}", lambda driven=driven: driven.load(compute), driven.forget),
            ]
        measured = interleaved(sides, rounds)
    step, load = "p99 of a step beside transfers", "load, scheduler busy in Python"
    for operation, unit, figure, limit, limit_is in (
        (step, "ms", "busy step kvtier", "step kvtier", "kvtier's at rest"),
        (step, "ms", "busy step kvtier", "busy step vllm", "vLLM's beside transfers"),
        ("the same of vLLM", "ms", "busy step vllm", "step vllm", "vLLM's at rest"),
        (f"{step}, CPU time", "ms", "busy step cpu kvtier", "step cpu kvtier", "kvtier's at rest"),
        (f"{step}, CPU time", "ms", "busy step cpu kvtier", "busy step cpu vllm", "vLLM's beside transfers"),
        ("p99 of a step at rest", "ms", "step kvtier", "step vllm", "vLLM's at rest"),
        (load, "MB/s", "busy load kvtier", "load kvtier", "kvtier's, scheduler waiting"),
        (load, "MB/s", "busy load kvtier", "busy load vllm", "vLLM's in C, scheduler busy"),
        ("the same of vLLM", "MB/s", "busy load vllm", "load vllm", "vLLM's in C, scheduler waiting"),
    ):
        yield row_of(Pair(operation, CHUNK_BYTES, {}, unit, figure, limit, limit_is), measured)


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    given = arguments(__doc__)
    give_out("peers vllm_busy", given, lambda folder: measure(folder, given.rounds))


if __name__ == "__main__":
    main()
