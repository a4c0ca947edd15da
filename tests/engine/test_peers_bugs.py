"""Bugs that other tiered caches have had, each as a promise that this engine keeps."""

import asyncio

import pytest

from kvtier.policies import LRU
from tests.engine.kit import at_rest, found, key, now, put, under_way

pytestmark = pytest.mark.virtual_time

SLOW = {"type": "dummy", "latency_s": 1.0}


class Miser(LRU):
    """A policy that never evicts: it keeps what it has and lets nothing else in."""

    def evict(self, count, keep, incoming=()):
        return None


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
