"""The suite of faults: with any fault of a remote or its network, no wrong byte and no row that stays lent."""

import asyncio
import logging
import uuid

import pytest

from tests.remote.kit import REST_S, at_rest, became, describe, found, found_one_by_one, keep, opened, put
from tests.remote.outcomes import IN_THE_STORE, ON_THE_WAY, OUTCOMES, Fault

logger = logging.getLogger(__name__)

ROWS = 16
PATIENT = {"breaker_failures": 1_000, "breaker_cooldown_s": "1ms", "answer_ttl_s": "1h"}
"""A closed breaker, and answers that stay: what was stored is loaded without being asked for."""


class Faults:
    """Every fault on one remote, which a subclass has as the fixture `remote`."""

    @pytest.mark.promise("The service is stopped, killed or unreachable")
    @pytest.mark.promise("It is full")
    @pytest.mark.parametrize("fault", list(Fault))
    async def test_a_fault_costs_hits_and_nothing_else(self, remote, fault):
        """Its outcome is the table's. Every row is reused meanwhile. Hits come back afterwards."""
        told = OUTCOMES[remote.name][fault]
        if isinstance(why := remote.lacks.get(fault, told), str):
            pytest.skip(f"{remote.name}: {why}")
        tier = remote.tier(by_proxy=fault in ON_THE_WAY, quick=fault in remote.waited_for) | {"limits": PATIENT}
        base = uuid.uuid4().int >> 72
        ours, others, more, unknown = (range(base + first, base + first + ROWS) for first in range(0, 4 * 100, 100))
        async with await opened(describe(ROWS, tier)) as engine:
            await keep(engine, ours, others)
            with remote.suffers(fault, ours[1::2]):
                loads = await became(engine, found_one_by_one(engine, ours[1::2]))
                stores = await became(engine, put(engine, more))
                assert await found(engine, unknown) == 0
                assert await at_rest(engine)
                if fault in IN_THE_STORE:
                    assert await found_one_by_one(engine, ours[::2]) == list(ours[::2])
                assert await put(engine, more) == ROWS  # Into every row: none is kept from others.
                assert await at_rest(engine)
            assert await found(engine, more) == ROWS
            await come_back(engine, ours, others)
            for numbers in (ours, others, more):  # Whoever wrote late would have written into one of these.
                await found_one_by_one(engine, numbers)
        logger.info("%s %s: %s, %s", remote.name, fault, sorted(loads), sorted(stores))
        assert_told(told, loads, stores)


def assert_told(told, loads, stores):
    assert loads, "nothing was loaded, and nothing failed"
    assert stores, "nothing was stored, and nothing failed"
    assert loads <= told.loads, f"loads: {sorted(loads)}, the table has {sorted(told.loads)}"
    assert stores <= told.stores, f"stores: {sorted(stores)}, the table has {sorted(told.stores)}"


async def come_back(engine, numbers, others):
    async with asyncio.timeout(REST_S):
        while True:
            await put(engine, numbers)
            assert await at_rest(engine)
            await put(engine, others)
            assert await at_rest(engine)
            if await found(engine, numbers) == len(numbers):
                return
