import asyncio

import pytest

from kvtier.engine.tier import Breaker, BreakerState
from kvtier.runner.runner import Budget
from tests.engine.kit import under_way

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def breaker():
    """Opens after three failures in a row, for ten seconds; then two chunks try it."""
    return Breaker(failures_max=3, cooldown_s=10.0, trial_chunks=2)


def fail(breaker, times, now=0.0):
    for _ in range(times):
        breaker.failed(now)


def test_a_breaker_opens_after_so_many_failures_in_a_row(breaker):
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    breaker.take(100)  # Chunks are not counted while it is closed.
    assert breaker.admits(0.0)
    assert breaker.opened == 0
    fail(breaker, 6)  # Failures of calls in flight do not prolong the cool-down.
    assert (breaker.admits(9.9), breaker.state, breaker.opened) == (0, BreakerState.OPEN, 1)
    assert breaker.admits(10.0)


def test_after_the_cool_down_a_few_chunks_may_pass_and_their_success_closes_it(breaker):
    breaker.trip(0.0)
    assert breaker.admits(9.9) == 0
    assert breaker.admits(10.0) == 2
    breaker.take(1)
    assert (breaker.admits(10.0), breaker.state) == (1, BreakerState.HALF_OPEN)
    breaker.take(1)
    assert breaker.admits(19.9) == 0
    assert breaker.admits(20.0) == 2, "a trial without any outcome is renewed"
    breaker.failed(22.0)
    assert not breaker.admits(31.9), "a trial that fails opens it for another cool-down"
    assert (breaker.admits(32.0), breaker.opened) == (2, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("beyond", [(50, 1), (0, 2)], ids=["bytes", "chunks"])
async def test_a_budget_lets_pass_what_fits_and_makes_the_rest_wait(beyond):
    budget = Budget(bytes_max=100, chunks_max=2)
    await budget.acquire(60, 1)
    waiting = await under_way(budget.acquire(*beyond), 1)
    assert not waiting.done()
    budget.release(60, 1)
    await waiting
    assert (budget.bytes_used, budget.chunks_used) == beyond


async def test_a_budget_is_given_out_in_order_of_asking_and_a_call_above_all_of_it_passes_alone():
    budget = Budget(bytes_max=10, chunks_max=10)
    await budget.acquire(10, 1)
    order = []

    async def ask(name, size_bytes):
        await budget.acquire(size_bytes, 1)
        order.append(name)
        if name == "giant":
            assert budget.bytes_used == size_bytes
        await asyncio.sleep(1)
        budget.release(size_bytes, 1)

    async with asyncio.TaskGroup() as tasks:
        for name, size_bytes in (("large", 10), ("small", 1), ("giant", 1_000), ("another", 9)):
            tasks.create_task(ask(name, size_bytes))
        await asyncio.sleep(1)
        budget.release(10, 1)
    assert order == ["large", "small", "giant", "another"]


@pytest.mark.parametrize("arrives", [False, True], ids=["in the line", "in the tick in which its share arrives"])
async def test_a_cancelled_wait_holds_nothing_and_lets_those_behind_it_through(arrives):
    budget = Budget(bytes_max=10, chunks_max=10)
    await budget.acquire(5, 1)
    large, small = (asyncio.ensure_future(budget.acquire(size, 1)) for size in (10, 5))
    await asyncio.sleep(1)
    if arrives:
        budget.release(5, 1)
    large.cancel()
    await small
    assert large.cancelled()
    assert (budget.bytes_used, budget.chunks_used) == ((5, 1) if arrives else (10, 2))
