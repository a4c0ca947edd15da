"""Stores over a tier that is written when chunks leave the primary: is any refused because of a write?

    python -m tests.benchmarks.evicting_stores TRACE [--limit N] [--share 0.05] [--speeds 4,1,0.25,0.05]

The trace is replayed in virtual time, without tiers and over tiers of several speeds, given as multiples of what the
trace stores in a second. Requests come at their times and store 16 chunks a step, which takes 50 ms. Nothing is loaded
from a tier, so all sides are asked for the same stores.
"""

import argparse
import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.answers import HIT
from kvtier.engine.manager import TieringOffloadingManager
from kvtier.engine.steps import StepManager
from kvtier.engine.tier import TierMatcher
from kvtier.testing.virtual_time import VirtualTimeLoop
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.traces import TraceRequest
from kvtier.tools.replay.workload import open_trace

CHUNK_BYTES = 4_096
CHUNKS_A_STEP = 16
STEP_S = 0.05
NOWHERE = (TierMatcher(medium="none"),)


class Stores(NamedTuple):
    """The results of a trace's stores."""

    granted: dict[tuple[int, int], bool]  # By request and step: whether there was room at once.
    chunks: int
    written: int
    unwritten: int  # Left the primary before the tier could take them.
    seconds: float

    @property
    def refused(self) -> int:
        return sum(not granted for granted in self.granted.values())


def described(rows: int, cascade: str = "none", **tier: Any) -> EngineConfig:
    """Return the configuration of an engine with this many rows; `none` is without tiers."""
    tiers = [{"type": "dummy", "name": "tier", "medium": "STORAGE", "cascade": cascade, **tier}]
    fields = {
        "cpu_bytes_to_use": rows * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": "inline",
        "secondary_tiers": [] if cascade == "none" else tiers,
    }
    return EngineConfig.from_dict(fields, where="the benchmark's")


def keys_of(request: TraceRequest, rows: int) -> list[OffloadKey]:
    return [make_offload_key(block.to_bytes(8, "big")) for block in dict.fromkeys(request.hash_ids[:rows])]


def stored(requests: Iterable[TraceRequest], config: EngineConfig) -> Stores:
    """Replay requests at their times."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(_stored(requests, config))


async def _stored(requests: Iterable[TraceRequest], config: EngineConfig) -> Stores:
    granted: dict[tuple[int, int], bool] = {}
    async with TieringOffloadingManager.open(config) as manager:
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(requests):
                await asyncio.sleep(request.timestamp_ms / 1_000 - asyncio.get_running_loop().time())
                group.create_task(_serve(manager.steps, number, keys_of(request, config.rows), granted))
        seconds = asyncio.get_running_loop().time()
        stats = manager.stats()
    tiers = stats.tiers
    return Stores(
        granted,
        chunks=stats.primary.stores,
        written=sum(tier.stored for tier in tiers),
        unwritten=sum(tier.skipped.get("pressure", 0) for tier in tiers),
        seconds=seconds,
    )


async def _serve(
    steps: StepManager, number: int, keys: Sequence[OffloadKey], granted: dict[tuple[int, int], bool]
) -> None:
    """Serve one request: load its chunks from the primary, then compute and store the others, some a step."""
    name = str(number)
    steps.on_new_request(name, load_matchers=NOWHERE)
    found = leading(steps, keys, name)
    steps.prepare_load(found, name)
    steps.end_step()
    await asyncio.sleep(STEP_S)
    steps.complete_load(found, name)
    for step, part in enumerate(parts(keys[len(found) :])):
        plan = steps.prepare_store(part, name)
        granted[number, step] = plan is not None
        steps.end_step()
        await asyncio.sleep(STEP_S)
        if plan is not None:
            steps.complete_store(plan.keys, name)
    steps.on_request_finished(name)
    steps.end_step()


def leading(steps: StepManager, keys: Sequence[OffloadKey], name: str) -> list[OffloadKey]:
    found: list[OffloadKey] = []
    for key in keys:
        if steps.lookup(key, name) is not HIT:
            break
        found.append(key)
    return found


def parts(keys: Sequence[OffloadKey]) -> Iterator[Sequence[OffloadKey]]:
    return (keys[start : start + CHUNKS_A_STEP] for start in range(0, len(keys), CHUNKS_A_STEP))


def print_stores(requests: Sequence[TraceRequest], rows: int, speeds: Sequence[float]) -> None:
    without = stored(requests, described(rows))
    churn = without.chunks / without.seconds
    print(f"{rows:,} rows; {without.chunks:,} chunks stored in {without.seconds:,.0f} s without tiers")
    print("| tier | stores | refused | refused without tiers | stores refused for the tier | written | unwritten |")
    print("|---|---|---|---|---|---|---|")
    for speed in speeds:
        found = stored(requests, described(rows, "evict", bandwidth_bytes_per_s=int(speed * churn * CHUNK_BYTES)))
        more = sum(not found.granted[at] for at, granted in without.granted.items() if granted and at in found.granted)
        print(
            f"| {speed:g} | {len(found.granted):,} | {found.refused:,} | {without.refused:,} | {more:,} | "
            f"{found.written:,} | {found.unwritten:,} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file, or: generated")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--share", type=float, default=0.05, help="of the trace's unique blocks in the primary")
    parser.add_argument("--speeds", default="4,2,1,0.5,0.1")
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # The table has the unwritten chunks.
    trace = open_trace(given.trace, limit=given.limit)
    rows, requests = measure(trace).capacity(given.share), list(trace)
    print_stores(requests, rows, [float(speed) for speed in given.speeds.split(",")])


if __name__ == "__main__":
    main()
