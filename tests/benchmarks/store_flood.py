"""Load latency of a file-system tier while stores flood it, beside the same loads alone.

    .venv/bin/python tests/benchmarks/store_flood.py [DIR]

One request at a time looks up 8 chunks of 256 KiB and waits for them; meanwhile the engine stores as much as the tier
takes (what is more is dropped, as it always is in the step protocol). Prints p50 and p99 of the waits in ms for each
runner, alone and under the flood, by turns, and the flood's rate. Both share one device and one processor. What the
device alone makes of it is printed first: plain threads that read such files four at a time, beside plain threads that
write such files as fast as they can.
"""

import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from statistics import median

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.ledger import LookupResult
from kvtier.engine.steps import Inside, StepManager

CHUNK_BYTES = 256 << 10
CHUNKS = 512
ROWS = 512
KEYS_A_LOAD = 8
LOADS = 400
ROUNDS = 3
LANES = 4
STORED_A_STEP = 16
STEP_S = 0.0005
DURABLE = [make_offload_key(index.to_bytes(32, "big")) for index in range(CHUNKS)]


def engine(root: str) -> StepManager:
    config = {
        "cpu_bytes_to_use": ROWS * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "secondary_tiers": [
            # Of the flood, no more under way than the device can do in some hundredths of a second.
            {"type": "fs", "root": root, "limits": {"store_bytes_in_flight": 64 * CHUNK_BYTES}}
        ],
    }
    return StepManager.start(EngineConfig.from_dict(config, where="engine"))


def store(manager: StepManager, keys: list[OffloadKey]) -> None:
    """Store what there is room for; the rows' bytes are whatever lies there."""
    request = keys[0].hex()
    manager.on_new_request(request)
    plan = manager.prepare_store(keys, request)
    if plan is not None:
        manager.complete_store(plan.keys, request)
    manager.on_request_finished(request)


def wait_for(manager: StepManager, keys: list[OffloadKey], flood: "count[int] | None") -> float:
    """Look the keys up until all of them are there, storing beside it; return the seconds from the first look."""
    request = f"load {keys[0].hex()}"
    manager.on_new_request(request)
    begun = time.perf_counter()
    while True:
        results = [manager.lookup(key, request) for key in keys]
        if all(result is LookupResult.HIT for result in results):
            break
        assert LookupResult.MISS not in results, results
        if flood is not None:
            numbers = [next(flood) for _ in range(STORED_A_STEP)]
            store(manager, [make_offload_key(b"flood" + number.to_bytes(27, "big")) for number in numbers])
        manager.end_step()
        time.sleep(STEP_S)
    seconds = time.perf_counter() - begun
    manager.prepare_load(keys, request)
    manager.complete_load(keys, request)
    manager.on_request_finished(request)
    manager.end_step()
    return seconds


def measure(manager: StepManager, *, flooded: bool) -> tuple[float, float, float]:
    """Return p50 and p99 of the waits in ms, and the MB/s that were stored beside them."""
    (tier,) = Inside(manager).ledger.tiers
    flood = count(time.perf_counter_ns()) if flooded else None
    waits: list[float] = []
    begun, stored = time.perf_counter(), tier.counters.stored
    for number in range(LOADS):
        start = number * KEYS_A_LOAD % CHUNKS
        if start == 0:
            manager.reset()
            manager.on_reset_flushed()
        waits.append(wait_for(manager, DURABLE[start : start + KEYS_A_LOAD], flood))
    rate = (tier.counters.stored - stored) * CHUNK_BYTES / 1e6 / (time.perf_counter() - begun)
    waits.sort()
    return 1e3 * waits[LOADS // 2], 1e3 * waits[LOADS * 99 // 100], rate


class Raw:
    """Files of a chunk's length, read and written directly by threads that do nothing else."""

    def __init__(self, root: str) -> None:
        os.mkdir(root)
        self._root = root
        self._page = memoryview(mmap.mmap(-1, CHUNK_BYTES + 4_096))
        self._rows = [memoryview(mmap.mmap(-1, CHUNK_BYTES + 4_096)) for _ in range(KEYS_A_LOAD)]
        self._stop = threading.Event()
        for number in range(CHUNKS):
            self._write(f"{root}/{number}", self._page)

    def measure(self, writers: int) -> tuple[float, float, float]:
        """Return what `measure` does, beside so many writers."""
        self._stop.clear()
        with ThreadPoolExecutor(LANES) as readers, ThreadPoolExecutor(max(1, writers)) as others:
            floods = [others.submit(self._flood, f"{time.perf_counter_ns()}-{number}") for number in range(writers)]
            begun, waits = time.perf_counter(), [self._read(readers, number) for number in range(LOADS)]
            seconds = time.perf_counter() - begun
            self._stop.set()
            written = sum(flood.result() for flood in floods)
        waits.sort()
        return 1e3 * waits[LOADS // 2], 1e3 * waits[LOADS * 99 // 100], written * CHUNK_BYTES / 1e6 / seconds

    def _read(self, readers: ThreadPoolExecutor, number: int) -> float:
        time.sleep(STEP_S)
        start, share = number * KEYS_A_LOAD % CHUNKS, KEYS_A_LOAD // LANES
        begun = time.perf_counter()
        for _ in readers.map(lambda lane: self._read_share(start, lane * share, share), range(LANES)):
            pass
        return time.perf_counter() - begun

    def _read_share(self, start: int, first: int, count: int) -> None:
        for place in range(first, first + count):
            fd = os.open(f"{self._root}/{start + place}", os.O_RDONLY | os.O_DIRECT)
            os.preadv(fd, [self._rows[place]], 0)
            os.close(fd)

    def _flood(self, name: str) -> int:
        os.mkdir(f"{self._root}/{name}")
        for number in count():
            if self._stop.is_set():
                return number
            temporary = f"{self._root}/{name}/{number}.tmp"
            self._write(temporary, self._page)
            os.rename(temporary, temporary.removesuffix(".tmp"))
        raise AssertionError

    def _write(self, name: str, block: memoryview) -> None:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        os.pwritev(fd, [block], 0)
        os.close(fd)


def report(name: str, alone: Callable[[], tuple[float, ...]], flooded: Callable[[], tuple[float, ...]]) -> None:
    """Measure by turns, and print medians."""
    rounds = [(alone(), flooded()) for _ in range(ROUNDS)]
    quiet, loud = (list(map(median, zip(*turns, strict=True))) for turns in zip(*rounds, strict=True))
    ratios = [after[1] / before[1] for before, after in rounds]
    print(
        f"{name:28} alone p50 {quiet[0]:6.2f} p99 {quiet[1]:6.2f} ms   beside {loud[2]:5,.0f} MB/s "
        f"p50 {loud[0]:6.2f} p99 {loud[1]:6.2f} ms   p99 {median(ratios):.1f} times "
        f"({min(ratios):.1f} to {max(ratios):.1f})",
        flush=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as root:
        raw = Raw(f"{root}/raw")
        raw.measure(0)
        for writers in (1, LANES):
            report(f"plain threads, {writers} writing", partial(raw.measure, 0), partial(raw.measure, writers))
        manager = engine(f"{root}/tier")
        for start in range(0, CHUNKS, 64):
            store(manager, DURABLE[start : start + 64])
            manager.drain()
        measure(manager, flooded=False)
        report("runner", partial(measure, manager, flooded=False), partial(measure, manager, flooded=True))
        manager.close()


if __name__ == "__main__":
    main()
