"""Bytes that the owner keeps for each chunk it knows, in the primary and in a tier, measured as the process's growth.

    python -m tests.benchmarks.owner_memory --chunks 10_000_000

Each case runs in a process of its own: filled once, filled and then replaced by half as many again (dictionaries
that were deleted from keep holes), and known to be in a tier besides. The keys, 36 bytes each, are counted, too.
"""

import argparse
import gc
import os
import random
import subprocess
import sys
import time

from kvtier.backend.keys import OffloadKey, make_offload_key
from kvtier.engine.ledger import Ledger, LedgerLimits
from kvtier.engine.requests import Request
from kvtier.engine.tier import TierSpec
from kvtier.policies import policy_class
from kvtier.runner.messages import Found, pack_keys

BATCH = 4_096
CASES = ("primary", "primary, replaced", "tier", "primary and tier")


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(case: str, chunks: int, policy: str) -> None:
    """Print the bytes a chunk, and the thread's own seconds that the slowest batch of 4,096 took."""
    rng = random.Random(1)
    gc.collect()
    before = resident_bytes()
    rows = chunks if "primary" in case else 1
    tier = TierSpec("tier", 0, 1.0, 3, 1.0, 64)
    ledger = Ledger(rows, policy_class(policy)(rows), [tier], LedgerLimits(1, 1, 1.0, 64))
    ledger.runner_up = False  # Nothing cascades: what the tier has is what it reports.
    total = chunks + chunks // 2 if "replaced" in case else chunks
    slowest = 0.0
    for first in range(0, total, BATCH):
        keys = [make_offload_key(rng.randbytes(32)) for _ in range(min(BATCH, total - first))]
        begun = time.thread_time()
        enter(ledger, keys, case)
        slowest = max(slowest, time.thread_time() - begun)
    del keys
    gc.collect()
    grown = (resident_bytes() - before) / chunks
    print(f"{policy:6} {case:20} {chunks:>12,} chunks {grown:7.1f} bytes a chunk; slowest batch {slowest:.3f} s")


def enter(ledger: Ledger, keys: list[OffloadKey], case: str) -> None:
    if "primary" in case:
        request = Request("r")
        plan = ledger.prepare_store(keys, request)
        assert plan is not None
        ledger.complete_store(plan.keys, request)
        ledger.finish(request)
    if "tier" in case:
        ledger.apply(Found(0, pack_keys(keys)))
    ledger.end_step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--case", choices=CASES)
    given = parser.parse_args()
    if given.case:
        measure(given.case, given.chunks, given.policy)
        return
    for case in CASES:
        again = [sys.executable, "-m", "tests.benchmarks.owner_memory", "--case", case, "--policy", given.policy]
        subprocess.run([*again, "--chunks", str(given.chunks)], check=True)


if __name__ == "__main__":
    main()
