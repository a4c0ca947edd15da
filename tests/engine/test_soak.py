"""A long run of a busy engine in virtual time: occupancy and memory stay flat, and hits are what the study predicts.

A generated workload at its own arrival times, every request a task of its own that fetches its prefix, compares each
byte and puts the rest, over a primary and a tier that together hold a twentieth of what is written. The prediction is
`kvtier policies`' LRU at the size of the tier: the primary's chunks are in it, too.
"""

import asyncio
import gc
import tracemalloc
from typing import NamedTuple

import pytest

from kvtier import TieringOffloadingManager
from kvtier.policies import LRU
from kvtier.testing import virtual_time
from kvtier.tools.replay.study import measure, policy_hits
from kvtier.tools.replay.workload import Workload, generate
from tests.engine.kit import CHUNK_BYTES, describe, found, put
from tests.simulation.audit import audit, audit_quiet

TIER_SHARE, PRIMARY_SHARE = 1 / 20, 1 / 100  # Shares of the unique blocks.
SAMPLES = 20
SETTLED = SAMPLES // 4  # Samples that are passed over: the tier is filling.


class Sample(NamedTuple):
    tier_bytes: int
    rows_ready: int
    known_keys: int  # That the ledger has an entry for.
    memory_bytes: int


class Soak(NamedTuple):
    hit_ratio: float
    predicted: float
    capacity_bytes: int
    rows: int
    samples: list[Sample]


def soak(requests, block_tokens):
    """Run the workload to its end in virtual time. AssertionError for a wrong byte or anything left behind."""
    workload = list(generate(Workload(requests=requests, block_tokens=block_tokens)))
    extent = measure(workload)
    capacity, rows = extent.capacity(TIER_SHARE), extent.capacity(PRIMARY_SHARE)
    predicted = extent.hit_ratio(sum(policy_hits(workload, LRU(capacity), capacity)))
    tracemalloc.start()
    try:
        return virtual_time.run(_run(workload, rows, capacity, predicted))
    finally:
        tracemalloc.stop()


async def _run(workload, rows, capacity, predicted):
    device = {"type": "dummy", "latency_s": 0.0005, "bandwidth_bytes_per_s": 20_000 * CHUNK_BYTES}
    config = describe(rows, device | {"capacity_bytes": capacity * CHUNK_BYTES}, runner="inline")
    loop = asyncio.get_running_loop()
    hits = references = 0
    samples = []
    async with TieringOffloadingManager.open(config) as engine:

        async def serve(request):
            nonlocal hits, references
            hits += await found(engine, request.hash_ids)
            references += len(request.hash_ids)
            await put(engine, request.hash_ids)

        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(workload, 1):
                await asyncio.sleep(max(0.0, request.timestamp_ms / 1e3 - loop.time()))
                tasks.create_task(serve(request))
                if number % (len(workload) // SAMPLES) == 0:
                    samples.append(_sample(engine))
        assert await engine.drain(3_600)
        await asyncio.sleep(60)
        engine.steps.end_step()
        audit_quiet(engine)
    return Soak(hits / references, predicted, capacity * CHUNK_BYTES, rows, samples)


def _sample(engine):
    audit(engine.steps.ledger)
    gc.collect()
    ledger = engine.steps.ledger
    ready, known = len(ledger.primary.ready), len(ledger.locations.mask)
    return Sample(ledger.tiers[0].used_bytes, ready, known, tracemalloc.get_traced_memory()[0])


@pytest.fixture(scope="module")
def run(thorough):
    return soak(requests=1_000, block_tokens=1_024)


def test_hits_are_what_the_policy_study_predicts(run):
    assert run.hit_ratio == pytest.approx(run.predicted, abs=0.01)
    assert run.predicted > 0.05


def test_a_full_tier_stays_full_and_within_its_capacity(run):
    sizes = [sample.tier_bytes for sample in run.samples]
    assert max(sizes) <= run.capacity_bytes
    assert min(sizes[SETTLED:]) > 0.9 * run.capacity_bytes


def test_the_engines_memory_does_not_grow(run):
    assert run.samples[-1].memory_bytes < 1.05 * run.samples[SETTLED].memory_bytes
    rows, known = ({getattr(sample, name) for sample in run.samples[SETTLED:]} for name in ("rows_ready", "known_keys"))
    assert max(rows) <= run.rows
    assert max(known) <= 1.1 * min(known)
