"""Predicted against real load times on a real fs tier: the median of the relative errors, for each size of batch.

    python -m tests.benchmarks.load_times DIR [--chunk-kib 1024] [--batches 300]

An engine with its runner in a thread stores chunks in DIR, forgets its primary, and has batches of several sizes loaded
while others are stored. Every load is predicted when it is sent, by what the tier was seen to do until then.
"""

import argparse
import random
import statistics
import time

from kvtier.backend import OffloadKey, make_offload_key
from kvtier.config import EngineConfig
from kvtier.engine.steps import Inside, StepManager

BATCHES = (1, 2, 4, 8, 16, 32, 64)  # Chunks.
KEYS = 512
WARM_UP = 20  # Loads that are not judged.
PREFILL_TOKENS_PER_S = 1e-3  # So slow that every load is worth its time.


def key(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"))


def wait(steps: StepManager) -> None:
    while steps.has_pending_work():
        steps.end_step()
        time.sleep(0.0005)


def store(steps: StepManager, numbers: range, name: str) -> None:
    steps.on_new_request(name)
    plan = steps.prepare_store([key(number) for number in numbers], name)
    assert plan is not None
    for row in plan.rows:
        steps.region.row(row)[:8] = row.to_bytes(8, "big")
    steps.complete_store(plan.keys, name)
    steps.end_step()
    steps.on_request_finished(name)


def measured(steps: StepManager, batches: int, *, storing: bool) -> dict[int, list[float]]:
    """Load batches, and give the relative errors of what was expected of them, by size."""
    tier = Inside(steps).ledger.tiers[0]
    dice, errors = random.Random(1), {size: list[float]() for size in BATCHES}
    for number in range(batches):
        size, name = dice.choice(BATCHES), f"load {number} {storing}"
        first = dice.randrange(KEYS - size)
        steps.reset()
        steps.on_reset_flushed()
        if storing:
            store(steps, range(10_000 + number * 8, 10_008 + number * 8), f"store {number}")
        steps.on_new_request(name)
        for each in range(first, first + size):
            steps.lookup(key(each), name)
        before = tier.counters.expected_seconds, tier.counters.loaded_seconds
        wait(steps)
        expected = tier.counters.expected_seconds - before[0]
        seconds = tier.counters.loaded_seconds - before[1]
        steps.on_request_finished(name)
        if expected and number >= WARM_UP:
            errors[size].append(abs(expected - seconds) / seconds)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--chunk-kib", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=300)
    given = parser.parse_args()
    chunk_bytes = given.chunk_kib << 10
    config = EngineConfig(
        cpu_bytes_to_use=2 * KEYS * chunk_bytes,
        chunk_bytes=chunk_bytes,
        secondary_tiers=({"type": "fs", "root": given.directory, "name": "disk"},),
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
    )
    with StepManager.start(config) as steps:
        for first in range(0, KEYS, 64):
            store(steps, range(first, first + 64), f"fill {first}")
            wait(steps)
        for storing in (False, True):
            errors = measured(steps, given.batches, storing=storing)
            every = [error for size in BATCHES for error in errors[size]]
            by_size = ", ".join(f"{size}: {statistics.median(errors[size]):.2f}" for size in BATCHES if errors[size])
            beside = "beside stores" if storing else "alone"
            print(f"{beside}: median error {statistics.median(every):.3f} of {len(every)} loads; by chunks {by_size}")


if __name__ == "__main__":
    main()
