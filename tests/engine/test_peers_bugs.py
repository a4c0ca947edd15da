"""Bugs that other tiered caches have had, each as a promise that this engine keeps."""

import asyncio

import pytest

from kvtier.engine.ledger import LookupResult
from kvtier.policies import LRU
from tests.engine.kit import FAULTY, at_rest, found, key, ledger_in, now, put, under_way

pytestmark = pytest.mark.virtual_time

SLOW = {"type": "dummy", "latency_s": 1.0}
BUILT_IN = ("arc", "density", "fifo", "lru", "s3fifo")


class Miser(LRU):
    """A policy that never evicts: it keeps what it has and lets nothing else in."""

    def evict(self, count, keep, incoming=()):
        return None


@pytest.mark.parametrize("policy", BUILT_IN)
async def test_a_promoted_chunk_is_not_the_next_victim(open_engine, policy):
    """Insertion with recency zero: what just came is the first to go, and is evicted before it is used."""
    engine = await open_engine(4, SLOW, eviction_policy=policy, holds=[1])
    await put(engine, range(10, 14))
    await engine.drain()
    engine.steps.on_new_request("waiting")
    assert engine.steps.lookup(key(1), "waiting") is LookupResult.HIT_PENDING
    await engine.drain()
    await put(engine, [20])
    assert engine.steps.lookup(key(1), "waiting") is LookupResult.HIT


async def test_a_tier_that_always_says_present_and_never_has_it_ends_no_request_in_a_loop(open_engine):
    engine = await open_engine(2, {"type": FAULTY, "inner": {"type": "dummy"}, "faults": {"missing": 1.0}})
    for round_ in range(5):
        await put(engine, [1])
        await put(engine, [10 + 2 * round_, 11 + 2 * round_])
        await engine.drain()
        assert await found(engine, [1]) == 0
    assert ledger_in(engine).tiers[0].counters.promoted == 5


@pytest.mark.promise("A policy never evicts")
async def test_a_policy_that_never_evicts_stops_no_request(open_engine):
    engine = await open_engine(2, SLOW, eviction_policy=f"{__name__}:Miser")
    async with asyncio.timeout(60):
        assert await put(engine, [1, 2]) == 2
        assert await put(engine, [3, 4]) == 0
        assert await found(engine, [1, 2]) == 2
        assert await found(engine, [3, 4]) == 0
    assert await at_rest(engine)


async def test_seed_22829_a_delete_waits_for_a_forgotten_request_no_longer_than_its_lease(open_engine):
    engine = await open_engine(2, SLOW, limits={"lease_s": 10}, holds=[1])
    await engine.reset()
    engine.steps.on_new_request("forgotten")
    fetching = await under_way(engine.fetch([key(1)], request_id="forgotten").__aenter__(), 0.5)
    fetching.cancel()
    begun = now()
    async with asyncio.timeout(60):
        await engine.delete([key(1)])
    assert now() - begun <= 12
