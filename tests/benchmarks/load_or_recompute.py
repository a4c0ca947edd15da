"""Load or recompute over a real trace, in virtual time: what requests wait, and what hits are given up for it.

    python -m tests.benchmarks.load_or_recompute TRACE [--limit N] [--speeds 0.2,1,7] [--memory-gib 256]

Each disk is replayed twice: once the engine loads whatever a tier has, once it weighs. `slow` is a disk of 7 GB/s that
is twenty times as slow for a minute. Times to first token are given as shares of those without tiering. A disk writes
four sevenths as fast as it reads, and takes what it writes in five seconds.
"""

import argparse
import asyncio
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools.replay import simulate
from kvtier.tools.replay.traces import Trace
from tests.slow_tier import SLOWING

DISK_BYTES = 4 << 40
QUEUE_S = 5.0  # Of writes; more would only run into the tier's deadline.
STORE_SHARE = 4 / 7  # Of the rate of loads, as an NVMe SSD.
LATENCY_S, CONCURRENCY = 100e-6, 64
SLOW_AT_S, SLOW_FOR_S, SLOW_FACTOR = 200.0, 60.0, 20.0


class Case(NamedTuple):
    trace: str
    limit: int | None
    memory_bytes: int
    gb_per_s: float
    slow: bool
    weighed: bool


class Outcome(NamedTuple):
    hit_ratio: float
    p50: float  # Of the times to first token, as shares of those without tiering.
    p99: float
    declined: int
    given_up: int
    expected_s: float
    loaded_s: float
    wrong_chunks: int


def replay_of(case):
    trace, servers = Trace(case.trace, limit=case.limit), simulate.Servers()
    chunk_bytes = trace.block_tokens * simulate.KV_BYTES_PER_TOKEN
    load_bytes_per_s = int(case.gb_per_s * 1e9)
    disk = simulate.DiskSpeed(load_bytes_per_s, int(load_bytes_per_s * STORE_SHARE), LATENCY_S, CONCURRENCY)
    config = simulate.model_engine(chunk_bytes, case.memory_bytes, DISK_BYTES, disk)
    (tier,) = config.secondary_tiers
    queue_bytes = max(chunk_bytes, int(QUEUE_S * disk.store_bytes_per_s))
    tier = replace(tier, limits=replace(tier.limits, store_bytes_in_flight=queue_bytes))
    config = replace(config, secondary_tiers=(tier,))
    replay = simulate.modelled(trace, config, servers, disk, case.limit or 1, load_always=not case.weighed)
    if case.slow:
        (tier,) = replay.config.secondary_tiers
        slow = {"slow_at_s": SLOW_AT_S, "slow_for_s": SLOW_FOR_S, "slow_factor": SLOW_FACTOR}
        tier = replace(tier, type=SLOWING["type"], options={**tier.options, **slow})
        replay.config = replace(replay.config, secondary_tiers=(tier,))
    return replay


def replayed(case):
    replay = replay_of(case)
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        tally = runner.run(replay.run())
    (tier,) = replay.stats.tiers
    requests = replay.requests
    without = simulate.without_tiering_s(requests, simulate.arrivals_s(requests), replay.servers, replay.block_tokens)
    p50, p99 = np.quantile(replay.times_to_first_token_s, (0.5, 0.99)) / np.quantile(without, (0.5, 0.99))
    return Outcome(
        hit_ratio=tally.hit_ratio,
        p50=float(p50),
        p99=float(p99),
        declined=tier.declined,
        given_up=tier.given_up,
        expected_s=tier.expected_seconds,
        loaded_s=tier.loaded_seconds,
        wrong_chunks=tally.wrong_chunks,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--speeds", default="0.2,1,7,slow")
    parser.add_argument("--memory-gib", type=int, default=256)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    cases = [
        Case(given.trace, given.limit, given.memory_gib << 30, 7.0 if slow else float(speed), slow, weighed)
        for speed in given.speeds.split(",")
        for slow in [speed == "slow"]
        for weighed in (False, True)
    ]
    print("| disk | loads | hit ratio | p50 | p99 | declined | given up | expected / real s |")
    print("|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn")) as pool:
        for case, found in zip(cases, pool.map(replayed, cases), strict=True):
            name = f"{case.gb_per_s:g} GB/s" + (", slow for a minute" if case.slow else "")
            print(
                f"| {name} | {'weighed' if case.weighed else 'always'} | {found.hit_ratio:.4f} | {found.p50:.3f} | "
                f"{found.p99:.3f} | {found.declined:,} | {found.given_up:,} | "
                f"{found.expected_s:,.0f} / {found.loaded_s:,.0f} |",
                flush=True,
            )
            assert found.wrong_chunks == 0


if __name__ == "__main__":
    main()
