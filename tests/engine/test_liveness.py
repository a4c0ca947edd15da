"""A hung, failing or slow tier in virtual time: deadlines, counters and logs.

tests/runner has threads that really hang.
"""

import asyncio

import pytest

from kvtier.engine.ledger import LookupResult
from tests.engine.kit import CHUNK_BYTES, FAULTY, found, key, ledger_in, put

pytestmark = pytest.mark.virtual_time


def sample(engine, name, **labels):
    return engine.metrics.get_sample_value(name, labels)


def store(engine, numbers):
    """Store by the step protocol; return for how many keys there was room."""
    engine.on_new_request("storing")
    plan = engine.prepare_store([key(number) for number in numbers], "storing")
    if plan is not None:
        engine.complete_store(plan.keys, "storing")
    engine.on_request_finished("storing")
    engine.end_step()
    return 0 if plan is None else len(plan.keys)


@pytest.mark.parametrize(("fault", "said"), [("hang", "ran out of time"), ("unavailable", "cannot be reached")])
async def test_each_kind_of_failing_call_is_logged_once_a_minute(open_engine, caplog, fault, said):
    limits = {"deadline_s": 0.5, "breaker_failures": 1_000}
    faulty = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"delete": [fault] * 100}, "limits": limits}
    engine = await open_engine(4, faulty)
    begun = asyncio.get_running_loop().time()
    for number in range(100):
        engine.forget([key(number)])
        await engine.drain()
    minutes = int((asyncio.get_running_loop().time() - begun) // 60)
    assert len([line for line in caplog.messages if said in line]) == 1 + minutes
    assert ledger_in(engine).tiers[0].counters.transfers_failed == 100


async def test_waiting_for_a_budget_that_hung_loads_hold_ends_at_the_deadline(open_engine):
    limits = {"deadline_s": 5, "load_bytes_in_flight": CHUNK_BYTES, "breaker_failures": 100}
    tier = {"type": FAULTY, "inner": {"type": "dummy"}, "script": {"load": ["hang", "hang"]}, "limits": limits}
    engine = await open_engine(8, tier)
    await put(engine, range(4))
    await engine.reset()
    counts = await asyncio.gather(*(found(engine, [number]) for number in range(4)))
    assert asyncio.get_running_loop().time() <= 10.0
    assert sum(counts) <= 2


async def test_a_tier_slower_than_the_stores_drops_cascades_and_counts_them(open_engine):
    crawling = {
        "type": "dummy",
        "bandwidth_bytes_per_s": 4_096,
        "limits": {"store_chunks_in_flight": 2, "deadline_s": 100},
    }
    engine = await open_engine(16, crawling, limits={"cascade_share": 0.25})
    for first in range(0, 100, 4):
        assert store(engine.steps, range(first, first + 4)) == 4
        await asyncio.sleep(1.0)
    await engine.drain(1_000)
    (tier,) = ledger_in(engine).tiers
    assert tier.counters.stored + tier.counters.dropped["budget"] == 100
    assert tier.counters.stored >= 12
    assert ledger_in(engine).counters.stores_refused == 0
    assert (
        sample(engine, "kvtier_tier_dropped_total", tier=tier.spec.name, reason="budget") == 100 - tier.counters.stored
    )


async def test_hung_stores_pin_no_more_than_their_share_and_the_rest_is_dropped(open_engine):
    tier = {"type": FAULTY, "inner": {"type": "dummy"}, "faults": {"hang": 1.0}, "limits": {"breaker_failures": 1_000}}
    engine = await open_engine(16, tier, limits={"cascade_share": 0.25})
    for first in range(0, 64, 4):
        assert store(engine.steps, range(first, first + 4)) == 4
        await asyncio.sleep(100)
    assert ledger_in(engine).tiers[0].counters.dropped == {"pinned": 60}
    engine.steps.on_new_request("looking")
    assert engine.steps.lookup(key(63), "looking") is LookupResult.HIT
