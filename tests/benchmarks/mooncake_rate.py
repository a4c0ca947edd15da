"""The rate of the mooncake tier beside Mooncake's own zero-copy calls: `python -m tests.benchmarks.mooncake_rate`.

Sides take turns in one run, on one machine, over its loopback, with one master and one owner; what is said is the
median of the rounds. Mooncake's own calls move the same bytes between the owner and rows, and check nothing: as one
call for the whole batch, and as two calls of half of it at once. All sides have a client of their own.
"""

import argparse
import ctypes
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from kvtier.testing.conformance import Lender, keys_of, tier_context
from kvtier_backends.mooncake import MooncakeBackend, MooncakeOptions
from kvtier_backends.mooncake.client import PoolClient, connect
from tests.mooncake.pools import Pool

KEYS = "KVTIER_BENCH_SEAL_KEYS"
PROBED = 1_000


class Own:
    """Mooncake's calls on rows themselves, so many of them at once."""

    def __init__(self, client: PoolClient, rows: Sequence[memoryview], name: str, at_once: int) -> None:
        self.client, self.at_once = client, at_once
        self.names = [f"{name}/{index}" for index in range(len(rows))]
        self.addresses = [ctypes.addressof(ctypes.c_char.from_buffer(row)) for row in rows]
        self.row_bytes = rows[0].nbytes

    async def put(self) -> None:
        self._all(self.client.put, 0)

    async def get(self) -> None:
        self._all(self.client.get, self.row_bytes)

    def _all(self, call, expected: int) -> None:
        def one(part: slice) -> None:
            codes = call(self.names[part], self.addresses[part], self.row_bytes)
            assert set(codes) == {expected}, codes

        size = len(self.names) // self.at_once
        threads = [
            threading.Thread(target=one, args=(slice(at * size, (at + 1) * size),)) for at in range(self.at_once)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Tier:
    """The tier, as a runner calls it."""

    def __init__(self, tier: MooncakeBackend, lender: Lender, count: int) -> None:
        self.tier = tier
        keys = keys_of(count)
        self.writes, self.reads = lender.writes(keys), lender.reads(keys)

    async def put(self) -> None:
        failed = [outcome for outcome in await self.tier.store(self.writes) if outcome is not None]
        assert not failed, failed

    async def get(self) -> None:
        failed = [outcome for outcome in await self.tier.load(self.reads) if outcome is not None]
        assert not failed, failed


async def measure(pool: Pool, row_bytes: int, count: int, rounds: int, lanes: int) -> None:
    os.environ[KEYS] = "ab" * 32
    lender = Lender(row_bytes)
    options = {
        "tier": MooncakeOptions(master=pool.address, prefix="a/", lanes=lanes),
        "tier, aes-256-gcm": MooncakeOptions(
            master=pool.address, prefix="b/", lanes=lanes, seal="aes-256-gcm", seal_key_env=KEYS
        ),
    }
    own = connect(options["tier"], "own")
    tiers = {name: await MooncakeBackend.open(given, tier_context(row_bytes)) for name, given in options.items()}
    sides: dict[str, Own | Tier] = {
        "own, one call": Own(own, lender.rows(count), "one", 1),
        "own, two calls": Own(own, lender.rows(count), "two", 2),
        **{name: Tier(tier, lender, count) for name, tier in tiers.items()},
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):  # The first is not counted.
        for what in ("put", "get"):
            for name, side in sides.items():
                spent, began = time.process_time(), time.perf_counter()
                await getattr(side, what)()
                if turn:
                    seconds.setdefault((name, what), []).append(time.perf_counter() - began)
                    cpu.setdefault((name, what), []).append(time.process_time() - spent)
    for (name, what), taken in seconds.items():
        ratios = [statistics.median(one) / statistics.median(taken) for one in _own(seconds, what)]
        best = [min(one) / min(taken) for one in _own(seconds, what)]
        print(
            f"{what} {name:18} median {row_bytes * count / statistics.median(taken) / 1e9:5.2f} GB/s, "
            f"{ratios[0]:4.2f} of one call, {ratios[1]:4.2f} of two; best {row_bytes * count / min(taken) / 1e9:5.2f} "
            f"GB/s, {best[0]:4.2f}, {best[1]:4.2f}; {statistics.median(cpu[name, what]) * 1e3:5.1f} ms of CPU"
        )
    await probes(tiers["tier"], rounds)
    for tier in tiers.values():
        await tier.aclose(10)
    own.close()


def _own(seconds: dict[tuple[str, str], list[float]], what: str) -> list[list[float]]:
    return [seconds[name, what] for name in ("own, one call", "own, two calls")]


async def probes(tier: MooncakeBackend, rounds: int) -> None:
    keys, taken = keys_of(PROBED, start=10_000), []
    for _ in range(rounds):
        began = time.perf_counter()
        await tier.probe(keys)
        taken.append(time.perf_counter() - began)
    print(f"probe of {PROBED:,} keys: median {statistics.median(taken) * 1e3:.2f} ms, best {min(taken) * 1e3:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row-bytes", type=int, default=2 << 20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lanes", type=int, default=MooncakeOptions().lanes)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(Path(folder), lease_s=30)
        try:
            pool.add_owner(1 << 30)
            uvloop.run(measure(pool, given.row_bytes, given.batch, given.rounds, given.lanes))
        finally:
            pool.close()


if __name__ == "__main__":
    main()
