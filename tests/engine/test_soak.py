"""A long run of a busy engine in virtual time: its memory stays flat.

A generated workload at its own arrival times, every request a task of its own that fetches its prefix, compares each
byte and puts the rest, over a primary and a tier that together hold a twentieth of what is written.
"""

import asyncio
import gc
import tracemalloc
from typing import NamedTuple

from kvtier import TieringOffloadingManager
from kvtier.testing import virtual_time
from kvtier.tools.replay.study import measure
from kvtier.tools.replay.workload import Workload, generate
from tests.engine.kit import CHUNK_BYTES, describe, found, put
from tests.simulation.audit import audit, audit_quiet

TIER_SHARE, PRIMARY_SHARE = 1 / 20, 1 / 100  # Shares of the unique blocks.
SAMPLES = 20
SETTLED = SAMPLES // 4  # Samples that are passed over: the tier is filling.


class Sample(NamedTuple):
    rows_ready: int
    known_keys: int  # That the ledger has an entry for.
    memory_bytes: int


def soak(requests, block_tokens):
    """Run the workload in virtual time; return the rows and samples. AssertionError for wrong bytes or leftovers."""
    workload = list(generate(Workload(requests=requests, block_tokens=block_tokens)))
    extent = measure(workload)
    rows = extent.capacity(PRIMARY_SHARE)
    tracemalloc.start()
    try:
        return rows, virtual_time.run(_run(workload, rows, extent.capacity(TIER_SHARE)))
    finally:
        tracemalloc.stop()


async def _run(workload, rows, capacity):
    device = {"type": "dummy", "latency_s": 0.0005, "bandwidth_bytes_per_s": 20_000 * CHUNK_BYTES}
    config = describe(rows, device | {"capacity_bytes": capacity * CHUNK_BYTES}, runner="inline")
    loop = asyncio.get_running_loop()
    samples = []
    async with TieringOffloadingManager.open(config) as engine:

        async def serve(request):
            await found(engine, request.hash_ids)
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
    return samples


def _sample(engine):
    audit(engine.steps.ledger)
    gc.collect()
    ledger = engine.steps.ledger
    ready, known = len(ledger.primary.ready), len(ledger.locations.mask)
    return Sample(ready, known, tracemalloc.get_traced_memory()[0])


def test_the_engines_memory_does_not_grow(thorough):
    rows, samples = soak(requests=1_000, block_tokens=1_024)
    settled = samples[SETTLED:]
    assert settled[-1].memory_bytes < 1.05 * settled[0].memory_bytes
    assert max(sample.rows_ready for sample in settled) <= rows
    known = [sample.known_keys for sample in settled]
    assert max(known) <= 1.1 * min(known)
