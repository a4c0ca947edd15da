"""Bytes of memory for each chunk that the ledger and an fs tier's index know, measured as the process's growth.

    .venv/bin/python -m tests.benchmarks.memory [--chunks 10_000_000] [--policy lru]

Each case runs in a process of its own. Keys, 36 bytes each, are counted, too. "Replaced" means filled, and then half
of the chunks replaced: a dictionary keeps holes where keys were deleted.
"""

import argparse
import gc
import os
import random
import subprocess
import sys

from kvtier.backend import make_offload_key
from kvtier.engine.ledger import Ledger, LedgerLimits
from kvtier.engine.requests import Request
from kvtier.engine.tier import TierSpec
from kvtier.policies import LRU, policy_class
from kvtier.runner.messages import Found, pack_keys
from kvtier_backends.fs.files.index import FileEntry, FileIndex

BATCH = 4_096
SIZE_BYTES = 2_101_248  # Of a chunk's file.
NOW_NS = 1_700_000_000_000_000_000
DICE = random.Random(1)


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def new_keys(count):
    return [make_offload_key(DICE.randbytes(32)) for _ in range(count)]


def into_ledger(case, chunks, policy):
    rows = chunks if "primary" in case else 1
    tier = TierSpec("tier", 0, 1.0, 3, 1.0, 64)
    ledger = Ledger(rows, policy_class(policy)(rows), [tier], LedgerLimits(1, 1, 1.0, 64))
    ledger.runner_up = False  # No cascades: the tier holds only what it reports.
    for _ in range(0, chunks + chunks // 2 * ("replaced" in case), BATCH):
        keys = new_keys(BATCH)
        if "primary" in case:
            request = Request("r")
            plan = ledger.prepare_store(keys, request)
            ledger.complete_store(plan.keys, request)
            ledger.finish(request)
        if "tier" in case:
            ledger.apply(Found(0, pack_keys(keys)))
        ledger.end_step()
    return ledger


def into_index(case, chunks, policy):
    kind = policy_class(policy)
    index = FileIndex(None if kind is LRU else kind(chunks))
    for first in range(0, chunks + chunks // 2 * ("replaced" in case), BATCH):
        entries = [FileEntry(key, SIZE_BYTES, NOW_NS + first) for key in new_keys(BATCH)]
        if "scanned" in case:
            index.scanned(entries)
            continue
        if first >= chunks:
            index.victims(BATCH)
        for entry in entries:
            index.stored(entry)
    index.scan_ended(complete=True)
    return index


CASES = {
    **dict.fromkeys(("primary", "primary, replaced", "tier", "primary and tier"), into_ledger),
    **dict.fromkeys(("files, stored", "files, scanned", "files, replaced"), into_index),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--case", choices=CASES)
    given = parser.parse_args()
    if given.case is None:
        for case in CASES:
            subprocess.run([sys.executable, "-m", "tests.benchmarks.memory", *sys.argv[1:], "--case", case], check=True)
        return
    gc.collect()
    before = resident_bytes()
    held = CASES[given.case](given.case, given.chunks, given.policy)
    gc.collect()
    bytes_each = (resident_bytes() - before) / given.chunks
    print(f"{given.policy:8} {given.case:20} {given.chunks:>12,} chunks {bytes_each:7.1f} bytes a chunk")
    del held


if __name__ == "__main__":
    main()
