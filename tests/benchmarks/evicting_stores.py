"""Stores over a tier that is written when chunks leave the primary: does any wait, or is any refused, for a write?

    python -m tests.benchmarks.evicting_stores TRACE [--limit N] [--share 0.05] [--speeds 4,1,0.25,0.05]
    python -m tests.benchmarks.evicting_stores TRACE --calls [--rounds 5]

The first replays the trace in virtual time, without tiers and over tiers of some speeds, given as multiples of what the
trace stores in a second. Requests come at their times and store 16 chunks a step, which takes 50 ms. Nothing is loaded
from a tier, so that every side is asked for the same stores. The second measures the calls of the owner's thread in
microseconds, over a dummy tier in a process of its own: without tiers, with "store" and with "evict", in turns.
"""

import argparse
import asyncio
import logging
import random
import time
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
SIDES = ("none", "store", "evict")


class Stores(NamedTuple):
    """What became of a trace's stores."""

    granted: dict[tuple[int, int], bool]  # By request and step: whether there was room at once.
    chunks: int
    written: int
    unwritten: int  # Had left before the tier could take them.
    seconds: float

    @property
    def refused(self) -> int:
        return sum(not granted for granted in self.granted.values())


def described(rows: int, cascade: str = "none", *, runner: str = "inline", **tier: Any) -> EngineConfig:
    """Describe an engine of so many rows; `none`: without tiers."""
    tiers = [{"type": "dummy", "name": "tier", "medium": "STORAGE", "cascade": cascade, **tier}]
    fields = {
        "cpu_bytes_to_use": rows * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": runner,
        "secondary_tiers": [] if cascade == "none" else tiers,
    }
    return EngineConfig.from_dict(fields, where="the benchmark's")


def keys_of(request: TraceRequest, rows: int) -> list[OffloadKey]:
    return [make_offload_key(block.to_bytes(8, "big")) for block in dict.fromkeys(request.hash_ids[:rows])]


# In virtual time.


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
    """Be one request: load what is in the primary, then compute and store the rest, some chunks a step."""
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


# On the clock.


class Calls:
    """One side, and how long its calls took."""

    def __init__(self, config: EngineConfig) -> None:
        self.steps = StepManager.start(config)
        self.prepare_us: list[float] = []
        self.step_us: list[float] = []

    def serve(self, number: int, keys: Sequence[OffloadKey]) -> None:
        """Serve a request in steps; between them the tier has all the time that it needs."""
        steps, name = self.steps, str(number)
        steps.on_new_request(name, load_matchers=NOWHERE)
        found = leading(steps, keys, name)
        for part in parts(keys[len(found) :]):
            begun = time.perf_counter()
            plan = steps.prepare_store(part, name)
            prepared = time.perf_counter()
            assert plan is not None
            steps.complete_store(plan.keys, name)
            steps.end_step()
            ended = time.perf_counter()
            self.prepare_us.append(1e6 * (prepared - begun))
            self.step_us.append(1e6 * (ended - begun))
            assert steps.drain()
        steps.on_request_finished(name)
        steps.end_step()
        assert steps.drain()


def measured(requests: Sequence[TraceRequest], rows: int, rounds: int) -> Iterator[tuple[str, Calls]]:
    """Serve the requests on every side, each request on one after the other; what the first round took is forgotten."""
    sides = {side: Calls(described(rows, side, runner="process")) for side in SIDES}
    dice = random.Random(0)
    try:
        for turn in range(1 + rounds):
            for number, request in enumerate(requests):
                keys = [make_offload_key(turn.to_bytes(4, "big") + key) for key in keys_of(request, rows)]
                for side in dice.sample(SIDES, len(SIDES)):
                    sides[side].serve(number, keys)
            if not turn:
                for calls in sides.values():
                    calls.prepare_us.clear()
                    calls.step_us.clear()
        yield from sides.items()
    finally:
        for calls in sides.values():
            calls.steps.close()


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def print_calls(requests: Sequence[TraceRequest], rows: int, rounds: int) -> None:
    print(
        "| `cascade` | prepare_store p50 µs | p99 | to none p50 | p99 | whole step p50 µs | p99 | to none p50 | p99 |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    none: list[float] = []
    for side, calls in measured(requests, rows, rounds):
        found = [quantile(values, share) for values in (calls.prepare_us, calls.step_us) for share in (0.5, 0.99)]
        none = none or found
        ratios = [value / least for value, least in zip(found, none, strict=True)]
        figures = [f"{value:.1f}" for value in found], [f"{ratio:.2f}" for ratio in ratios]
        row = [*figures[0][:2], *figures[1][:2], *figures[0][2:], *figures[1][2:]]
        print(f"| {side} | {' | '.join(row)} |", flush=True)


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
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # What goes unwritten is in the table.
    trace = open_trace(given.trace, limit=given.limit)
    rows, requests = measure(trace).capacity(given.share), list(trace)
    if given.calls:
        print_calls(requests, rows, given.rounds)
    else:
        print_stores(requests, rows, [float(speed) for speed in given.speeds.split(",")])


if __name__ == "__main__":
    main()
