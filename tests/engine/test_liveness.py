"""A hung, failing or slow tier in virtual time: deadlines, schedules, counters and logs.

tests/runner has threads that really hang.
"""

import asyncio

import pytest

from tests.engine.kit import CHUNK_BYTES, FAULTY, found, key, ledger_in, now, put, under_way

pytestmark = pytest.mark.virtual_time


def faulty(limits=None, **fields):
    return {"type": FAULTY, "inner": {"type": "dummy"}, "limits": limits or {}, **fields}


@pytest.mark.parametrize(("fault", "said"), [("hang", "ran out of time"), ("unavailable", "cannot be reached")])
async def test_each_kind_of_failing_call_is_logged_once_a_minute(open_engine, caplog, fault, said):
    tier = faulty({"deadline_s": 0.5, "breaker_failures": 1_000}, script={"delete": [fault] * 100})
    engine = await open_engine(4, tier)
    begun = now()
    for number in range(100):
        engine.forget([key(number)])
        await engine.drain()
    minutes = int((now() - begun) // 60)
    assert len([line for line in caplog.messages if said in line]) == 1 + minutes
    assert ledger_in(engine).tiers[0].counters.transfers_failed == 100


async def test_waiting_for_a_budget_that_hung_loads_hold_ends_at_the_deadline(open_engine):
    limits = {"deadline_s": 5, "load_bytes_in_flight": CHUNK_BYTES, "breaker_failures": 100}
    engine = await open_engine(8, faulty(limits, script={"load": ["hang", "hang"]}), holds=range(4))
    await engine.reset()
    counts = await asyncio.gather(*(found(engine, [number]) for number in range(4)))
    assert now() <= 10.0
    assert sum(counts) <= 2


async def test_loads_do_not_wait_for_the_budget_of_stores(open_engine):
    budget = {"store_chunks_in_flight": 1, "load_bytes_in_flight": CHUNK_BYTES}
    engine = await open_engine(64, {"type": "dummy", "latency_s": 1.0, "limits": budget}, holds=[0])
    assert await engine.reset()
    assert now() == 1.0
    storing = await under_way(put(engine, range(1, 21)), 0.5)
    assert await found(engine, [0]) == 1
    assert now() == 2.5
    await storing
    assert now() == 1.0 + 19  # One at a time, the last of them not waited for.


async def test_a_busy_tiers_occupancy_is_reported_once_a_second_and_after_the_last_store(open_engine):
    engine = await open_engine(64, {"type": "dummy", "latency_s": 0.1, "concurrency": 1})
    (tier,) = ledger_in(engine).tiers
    for number in range(30):
        await put(engine, [number])
    told = set()
    while ledger_in(engine).pending:
        told.add(tier.chunks)
        await asyncio.sleep(0.05)
    assert 2 <= len(told) <= 5
    assert (tier.chunks, tier.used_bytes) == (30, 30 * CHUNK_BYTES)
