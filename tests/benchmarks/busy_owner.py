"""Loads of 128 KiB chunks from a file system while the engine's thread is busy in Python, beside an idle one.

    .venv/bin/python tests/benchmarks/busy_owner.py [DIR]

64 MiB a round, O_DIRECT where DIR has it, each case in turn; prints MB/s (median and spread of the rounds) and, for
each runner, the share of its idle rate that is left when the engine's thread never stops computing.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from kvtier.config import EngineConfig, decode
from kvtier.keys import make_offload_key
from kvtier.ledger import LookupResult
from kvtier.manager import TieringOffloadingManager

CHUNKS = 512
CHUNK_BYTES = 128 << 10
KEYS_A_REQUEST = 64
STEP_S = 0.002  # Of the engine's own computing, between two looks at what has come.
ROUNDS = 9
KEYS = [make_offload_key(index.to_bytes(32, "big")) for index in range(CHUNKS)]


def engine(runner: str, root: str) -> TieringOffloadingManager:
    config = {
        "cpu_bytes_to_use": 2 * CHUNKS * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": runner,
        "secondary_tiers": [{"type": "fs", "root": root}],
    }
    return TieringOffloadingManager.start(decode(EngineConfig, config, where="engine"))


def store(manager: TieringOffloadingManager) -> None:
    manager.on_new_request("store")
    plan = manager.prepare_store(KEYS, "store")
    assert plan is not None
    for index, row in enumerate(plan.rows):
        manager.region.row(row)[:] = index.to_bytes(4, "big") * (CHUNK_BYTES // 4)
    manager.complete_store(plan.keys, "store")
    manager.on_request_finished("store")
    assert manager.drain()


def load(manager: TieringOffloadingManager, between: Callable[[TieringOffloadingManager], None]) -> float:
    """Promote every chunk into an empty primary; return MB/s."""
    manager.reset()
    manager.on_reset_flushed()
    begun = time.perf_counter()
    requests = [str(start) for start in range(0, CHUNKS, KEYS_A_REQUEST)]
    for request in requests:
        manager.on_new_request(request)
        for key in KEYS[int(request) : int(request) + KEYS_A_REQUEST]:
            assert manager.lookup(key, request) is LookupResult.HIT_PENDING
    manager.end_step()
    while manager.has_pending_work():
        between(manager)
        manager.end_step()
    seconds = time.perf_counter() - begun
    for request in requests:
        keys = KEYS[int(request) : int(request) + KEYS_A_REQUEST]
        assert all(manager.lookup(key, request) is LookupResult.HIT for key in keys)
        manager.on_request_finished(request)
    manager.end_step()
    return CHUNKS * CHUNK_BYTES / 1e6 / seconds


def compute(manager: TieringOffloadingManager) -> None:
    until = time.perf_counter() + STEP_S
    total = 0
    while time.perf_counter() < until:
        total += sum(range(50))


def wait(manager: TieringOffloadingManager) -> None:
    manager.drain(STEP_S)


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as root:
        managers = {runner: engine(runner, f"{root}/{runner}") for runner in ("process", "thread")}
        rates: dict[tuple[str, str], list[float]] = {}
        for manager in managers.values():
            store(manager)
        for _ in range(ROUNDS + 1):
            for runner, manager in managers.items():
                for name, between in (("idle", wait), ("busy", compute)):
                    rates.setdefault((runner, name), []).append(load(manager, between))
        for manager in managers.values():
            manager.shutdown()
    median = {case: statistics.median(values[1:]) for case, values in rates.items()}
    for (runner, name), values in rates.items():
        share = median[runner, name] / median[runner, "idle"]
        spread = f"{min(values[1:]):,.0f} to {max(values[1:]):,.0f}"
        print(f"{runner:8} {name:5} {median[runner, name]:7,.0f} MB/s ({spread})  {share:.2f} of idle")


if __name__ == "__main__":
    main()
