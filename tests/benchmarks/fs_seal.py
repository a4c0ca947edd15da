"""What a cipher costs the fs tier: `python -m tests.benchmarks.fs_seal DIR`.

Two tiers take turns in one run, one with `xxh3` and one with `aes-256-gcm`: a batch is stored, and loaded. What is said
is the median of the rounds' ratios with its quartiles, so that a neighbour's load falls on both alike.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.fs import FsBackend, FsOptions

SECRETS = "KVTIER_BENCH_SEAL_KEYS"
KINDS: dict[str, dict[str, Any]] = {
    "xxh3": {},
    "aes-256-gcm": {"seal": "aes-256-gcm", "seal_key_env": SECRETS},
}


async def measure(root: str, layout: str, row_bytes: int, count: int, rounds: int) -> None:
    tiers: dict[str, FsBackend] = {}
    for name, seal in KINDS.items():
        options = FsOptions(root=f"{root}/{layout}-{name}", layout=layout, **seal)  # type: ignore[arg-type]
        tiers[name] = await FsBackend.open(options, tier_context(row_bytes))
    lender, keys = Lender(row_bytes), keys_of(count)
    writes, reads = lender.writes(keys), lender.reads(keys)
    taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    cpu: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name in sorted(tiers, reverse=bool(turn % 2)):
            for what, call in (("store", lambda: tiers[name].store(writes)), ("load", lambda: tiers[name].load(reads))):  # noqa: B023
                began, began_cpu = time.perf_counter(), time.process_time()
                assert not any(await call())
                if turn:  # The first makes files.
                    taken[what, name].append(time.perf_counter() - began)
                    cpu[what, name].append(time.process_time() - began_cpu)
    for what in ("store", "load"):
        ratios = [plain / aes for plain, aes in zip(taken[what, "xxh3"], taken[what, "aes-256-gcm"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rates = [f"{row_bytes * count / statistics.median(taken[what, name]) / 1e9:.2f} GB/s" for name in KINDS]
        spent = [f"{statistics.median(cpu[what, name]) * 1e3:.1f}" for name in KINDS]
        print(
            f"{layout} {row_bytes >> 10} KiB {what}: {middle:.2f} ({low:.2f} to {high:.2f}) of xxh3; "
            f"{rates[1]} beside {rates[0]}; {spent[1]} beside {spent[0]} ms of CPU"
        )
    for tier in tiers.values():
        await tier.aclose(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    os.environ[SECRETS] = "ab" * 32
    for layout in ("segments", "files"):
        with tempfile.TemporaryDirectory(dir=given.directory) as root:
            asyncio.run(measure(root, layout, given.row_bytes, given.batch, given.rounds))


if __name__ == "__main__":
    main()
