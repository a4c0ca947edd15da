"""Load latency of a file-system tier while stores flood it, beside the same loads alone.

    .venv/bin/python tests/benchmarks/store_flood.py [DIR]

One request at a time looks up 8 chunks of 256 KiB and waits for them; meanwhile the engine stores as much as the tier
takes (what is more is dropped, as it always is in the step protocol). Prints p50 and p99 of the waits in ms for each
runner, alone and under the flood, and the flood's rate. Both share one device and one processor: what this shows is
how much of the device's own slowing down reaches a load, and that no load waits in a queue of stores.
"""

import sys
import tempfile
import time
from itertools import count

from kvtier.config import EngineConfig, decode
from kvtier.keys import OffloadKey, make_offload_key
from kvtier.ledger import LookupResult
from kvtier.manager import TieringOffloadingManager

CHUNK_BYTES = 256 << 10
CHUNKS = 512
ROWS = 512
KEYS_A_LOAD = 8
LOADS = 400
STORED_A_STEP = 16
STEP_S = 0.0005
DURABLE = [make_offload_key(index.to_bytes(32, "big")) for index in range(CHUNKS)]


def engine(runner: str, root: str) -> TieringOffloadingManager:
    config = {
        "cpu_bytes_to_use": ROWS * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": runner,
        "secondary_tiers": [
            # Of the flood, no more under way than the device can do in some hundredths of a second.
            {"type": "fs", "root": root, "limits": {"store_bytes_in_flight": 64 * CHUNK_BYTES}}
        ],
    }
    return TieringOffloadingManager.start(decode(EngineConfig, config, where="engine"))


def store(manager: TieringOffloadingManager, keys: list[OffloadKey]) -> None:
    """Store what there is room for; the rows' bytes are whatever lies there."""
    request = keys[0].hex()
    manager.on_new_request(request)
    plan = manager.prepare_store(keys, request)
    if plan is not None:
        manager.complete_store(plan.keys, request)
    manager.on_request_finished(request)


def wait_for(manager: TieringOffloadingManager, keys: list[OffloadKey], flood: "count[int] | None") -> float:
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


def measure(manager: TieringOffloadingManager, *, flooded: bool) -> tuple[float, float, float]:
    """Return p50 and p99 of the waits in ms, and the MB/s that were stored beside them."""
    (tier,) = manager.ledger.tiers
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


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as root:
        for runner in ("thread", "process"):
            manager = engine(runner, f"{root}/{runner}")
            for start in range(0, CHUNKS, 64):
                store(manager, DURABLE[start : start + 64])
                manager.drain()
            measure(manager, flooded=False)
            for flooded in (False, True):
                p50_ms, p99_ms, rate = measure(manager, flooded=flooded)
                name = f"beside stores of {rate:,.0f} MB/s" if flooded else "alone"
                print(f"{runner:8} p50 {p50_ms:7.2f} ms  p99 {p99_ms:7.2f} ms  {name}")
            manager.shutdown()


if __name__ == "__main__":
    main()
