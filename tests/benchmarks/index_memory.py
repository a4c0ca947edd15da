"""What an fs tier's index takes of memory, key and eviction order included, and how long its calls take.

    PYTHONPATH=.:backends python tests/benchmarks/index_memory.py [CHUNKS] [POLICY]

Ten million chunks by default, in processes of their own: stored one by one, found by a scan, and after as many uses,
stores and evictions as there are chunks. Prints the growth of the process's resident memory by chunk.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

from kvtier.backend.keys import OffloadKey
from kvtier.policies import LRU, policy_class
from kvtier_backends.fs.files.index import FileEntry, FileIndex

NOW_NS = 1_700_000_000_000_000_000
A_SECOND = 2_000  # Chunks stored: 4 GB/s of 2 MiB each.
BATCH = 64


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held(number: int) -> FileEntry:
    key = OffloadKey((number * 0x9E3779B97F4A7C15 % 2**256).to_bytes(32, "big") + b"\0\0\0\0")
    return FileEntry(key, 2_101_248, NOW_NS + number * 10**9 // A_SECOND)


def timed(what: str, calls: int, work: Callable[[], object]) -> None:
    begun = time.perf_counter()
    work()
    print(f"    {what}: {1e6 * (time.perf_counter() - begun) / calls:.2f} us a chunk", flush=True)


def store(index: FileIndex, start: int, chunks: int) -> None:
    for number in range(start, start + chunks):
        index.stored(held(number))


def scan(index: FileIndex, chunks: int) -> None:
    for start in range(0, chunks, 4_096):
        index.scanned([held(number) for number in range(start, min(chunks, start + 4_096))])


def churn(index: FileIndex, chunks: int) -> None:
    """Use what is there, and store what makes others go, so that their number stays."""
    dice = random.Random(0)
    for start in range(chunks, 2 * chunks, BATCH):
        for _ in range(BATCH):
            index.used([held(start - 1 - dice.randrange(chunks)).key])
        index.victims(BATCH)
        store(index, start, BATCH)


def one(how: str, chunks: int, policy: str) -> None:
    index = FileIndex(None if policy_class(policy) is LRU else policy_class(policy)(chunks))
    before = resident_bytes()
    timed(how, chunks, lambda: scan(index, chunks) if how == "found" else store(index, 0, chunks))
    index.scan_ended(complete=True)
    if how == "used":
        timed("one use, one store and one eviction", chunks, lambda: churn(index, chunks))
    print(
        f"{policy}, {how}: {(resident_bytes() - before) / len(index):.0f} bytes a chunk of {len(index):,}", flush=True
    )


def main() -> None:
    chunks = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    policy = sys.argv[2] if len(sys.argv) > 2 else "lru"
    if len(sys.argv) > 3:
        one(sys.argv[3], chunks, policy)
        return
    for how in ("stored", "found", "used"):
        subprocess.run([sys.executable, __file__, str(chunks), policy, how], check=True)


if __name__ == "__main__":
    main()
