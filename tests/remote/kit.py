"""Engines on a remote tier: chunks that identify themselves, and their outcomes by the tier's counters."""

import asyncio
import random

from kvtier.backend import BackendUnavailable
from kvtier.config import EngineConfig
from kvtier.engine.manager import TieringOffloadingManager
from tests.engine.kit import key, ledger_in, settled

CHUNK_BYTES = 65_536  # Longer than what sockets and pipes take at once.
REST_S = 120.0  # For what must happen while a fault lasts; a remote's own time-outs are seconds.


def chunk(number):
    """Return a chunk that identifies itself in each of its parts, and that each codec makes shorter."""
    return random.Random(number).randbytes(CHUNK_BYTES // 2).hex().encode()


def describe(rows, tier):
    return {
        "cpu_bytes_to_use": rows * CHUNK_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "runner": "process",
        "namespace": {"model_name": "remote"},
        "secondary_tiers": [tier],
    }


def configured(described):
    return EngineConfig.from_dict(described, where="the test's")


async def opened(described):
    async with asyncio.timeout(REST_S):
        while True:
            try:
                return await TieringOffloadingManager.open(configured(described))
            except BackendUnavailable:
                await asyncio.sleep(0.05)


async def put(engine, numbers):
    numbers = list(numbers)
    return await engine.put(list(map(key, numbers)), list(map(chunk, numbers)))


async def found(engine, numbers):
    """Fetch, compare every byte, and return the number of leading chunks that came."""
    numbers = list(numbers)
    async with engine.fetch([key(number) for number in numbers]) as rows:
        for number, row in zip(numbers, rows, strict=False):
            assert bytes(row) == chunk(number), f"chunk {number} came wrong"
        return len(rows)


async def found_one_by_one(engine, numbers):
    numbers = list(numbers)
    came = await asyncio.gather(*(found(engine, [number]) for number in numbers))
    return [number for number, one in zip(numbers, came, strict=True) if one]


async def at_rest(engine):
    """Wait for running transfers; return True if no row is lent, pinned or quarantined then."""
    return await engine.drain(REST_S) and settled(engine)


async def became(engine, call):
    """Await a call and its transfers; return the outcomes that the tier has counted meanwhile."""
    counters = ledger_in(engine).tiers[0].counters

    def totals():
        return {"loaded": counters.loaded, "stored": counters.stored, "missing": counters.misses} | counters.failed

    before = totals()
    await call
    assert await at_rest(engine)
    return {what for what, total in totals().items() if total > before.get(what, 0)}


async def keep(engine, numbers, others):
    """Store chunks that only the tier holds: others take their rows in the primary."""
    assert await put(engine, numbers) == len(numbers)
    assert await at_rest(engine)
    assert await put(engine, others) == len(others)
    assert await at_rest(engine)
