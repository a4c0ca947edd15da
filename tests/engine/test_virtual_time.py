"""Whole engines in virtual time: schedules to the second."""

import asyncio

import pytest

from kvtier.engine.tier import BreakerState
from tests.engine.kit import CHUNK_BYTES, FAULTY, found, ledger_in, put

pytestmark = pytest.mark.virtual_time


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_loads_do_not_wait_for_the_budget_of_stores(open_engine):
    budget = {"store_chunks_in_flight": 1, "load_bytes_in_flight": CHUNK_BYTES}
    engine = await open_engine(64, {"type": "dummy", "latency_s": 1.0, "limits": budget})
    await put(engine, [0])
    assert await engine.reset()
    assert now() == 1.0
    storing = asyncio.ensure_future(put(engine, range(1, 21)))
    await asyncio.sleep(0.5)
    assert await found(engine, [0]) == 1
    assert now() == 2.5
    await storing
    assert now() == 1.0 + 19  # One at a time, the last of them not waited for.


async def test_loads_queue_for_their_budget_in_order(open_engine):
    budget = {"load_bytes_in_flight": CHUNK_BYTES}
    engine = await open_engine(8, {"type": "dummy", "latency_s": 1.0, "limits": budget}, limits={"action_chunks": 1})
    await put(engine, range(3))
    assert await engine.reset()
    begun = now()
    assert await asyncio.gather(*(found(engine, [number]) for number in range(3))) == [1, 1, 1]
    assert now() == begun + 3.0


async def test_a_breaker_opens_tries_and_closes_and_the_metrics_show_it(open_engine):
    failing = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"store": ["unavailable"] * 3}}
    engine = await open_engine(8, failing | {"limits": {"breaker_failures": 2, "breaker_cooldown_s": 60.0}})
    (tier,) = ledger_in(engine).tiers

    def state():
        shown = {
            each.value: engine.metrics.get_sample_value(
                "kvtier_tier_breaker", {"tier": tier.spec.name, "state": each.value}
            )
            for each in BreakerState
        }
        (found,) = [name for name, value in shown.items() if value]
        return found

    assert state() == "closed"
    for number in range(3):
        await put(engine, [number])
        await engine.drain()
    assert state() == "open"
    assert (tier.counters.failed, tier.counters.dropped) == ({"unavailable": 2}, {"breaker": 1})
    await asyncio.sleep(60)
    await put(engine, [3])  # The tier still fails.
    await engine.drain()
    assert state() == "open"
    await asyncio.sleep(60)
    assert tier.breaker.admits(now())
    assert state() == "half_open"
    await put(engine, [4])
    await engine.drain()
    assert (state(), tier.counters.stored, tier.breaker.opened) == ("closed", 1, 2)


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
