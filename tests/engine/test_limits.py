import asyncio

import pytest

from kvtier.engine.tier import Breaker, BreakerState
from kvtier.runner.runner import Budget

pytestmark = pytest.mark.virtual_time


@pytest.fixture
def breaker() -> Breaker:
    """Opens after three failures in a row, for ten seconds; then two chunks try it."""
    return Breaker(failures_max=3, cooldown_s=10.0, trial_chunks=2)


def fail(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.failed(now)


def test_a_breaker_opens_after_so_many_failures_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.admits(0.0)
    assert breaker.opened == 0
    breaker.failed(0.0)
    assert (breaker.admits(9.9), breaker.state, breaker.opened) == (0, BreakerState.OPEN, 1)


def test_after_the_cool_down_a_few_chunks_may_pass(breaker: Breaker) -> None:
    fail(breaker, 3)
    passed = 0
    while breaker.admits(10.0):
        breaker.take()
        passed += 1
    assert (passed, breaker.state) == (2, BreakerState.HALF_OPEN)


def test_chunks_that_pass_together_count_each_against_a_trial():
    breaker = Breaker(failures_max=1, cooldown_s=10.0, trial_chunks=5)
    breaker.failed(0.0)
    assert breaker.admits(10.0) == 5
    breaker.take(3)
    assert breaker.admits(10.0) == 2
    breaker.take(2)
    assert breaker.admits(10.0) == 0


def test_a_trial_that_succeeds_closes_it(breaker: Breaker) -> None:
    fail(breaker, 3)
    assert breaker.admits(10.0)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


def test_a_trial_that_fails_opens_it_for_another_cool_down(breaker: Breaker) -> None:
    fail(breaker, 3)
    assert breaker.admits(10.0)
    breaker.failed(12.0)
    assert not breaker.admits(21.9)
    assert breaker.admits(22.0)
    assert breaker.opened == 2


def test_a_trial_without_any_outcome_is_renewed(breaker: Breaker) -> None:
    fail(breaker, 3)
    for _ in range(2):
        assert breaker.admits(10.0)
        breaker.take()
    assert not breaker.admits(19.9)
    assert breaker.admits(20.0)


def test_failures_of_calls_in_flight_do_not_prolong_the_cool_down(breaker: Breaker) -> None:
    fail(breaker, 3)
    fail(breaker, 5, now=9.0)
    assert breaker.admits(10.0)
    assert breaker.opened == 1


def test_a_trip_opens_it_at_once(breaker: Breaker) -> None:
    breaker.trip(0.0)
    assert not breaker.admits(9.9)
    assert breaker.admits(10.0)


def test_chunks_are_not_counted_while_it_is_closed(breaker: Breaker) -> None:
    for _ in range(100):
        breaker.take()
    assert breaker.admits(0.0)


async def test_a_budget_lets_pass_what_fits_and_makes_the_rest_wait() -> None:
    budget = Budget(bytes_max=100, chunks_max=2)
    await budget.acquire(60, 1)
    too_long = asyncio.ensure_future(budget.acquire(50, 1))
    await asyncio.sleep(1)
    assert not too_long.done()
    budget.release(60, 1)
    await too_long
    await budget.acquire(50, 1)
    too_many = asyncio.ensure_future(budget.acquire(0, 1))
    await asyncio.sleep(1)
    assert (budget.bytes_used, budget.chunks_used, too_many.done()) == (100, 2, False)
    too_many.cancel()


async def test_a_budget_is_given_out_in_order_of_asking() -> None:
    budget = Budget(bytes_max=10, chunks_max=10)
    await budget.acquire(10, 1)
    order: list[str] = []

    async def ask(name: str, size_bytes: int) -> None:
        await budget.acquire(size_bytes, 1)
        order.append(name)
        await asyncio.sleep(1)
        budget.release(size_bytes, 1)

    async with asyncio.TaskGroup() as tasks:
        for name, size_bytes in (("large", 10), ("small", 1), ("another", 9)):
            tasks.create_task(ask(name, size_bytes))
        await asyncio.sleep(1)
        budget.release(10, 1)
    assert order == ["large", "small", "another"]


async def test_a_call_above_the_whole_budget_passes_alone() -> None:
    budget = Budget(bytes_max=10, chunks_max=1)
    await budget.acquire(1, 1)
    giant = asyncio.ensure_future(budget.acquire(1_000, 64))
    await asyncio.sleep(1)
    assert not giant.done()
    budget.release(1, 1)
    await giant
    next_one = asyncio.ensure_future(budget.acquire(1, 1))
    await asyncio.sleep(1)
    assert not next_one.done()
    budget.release(1_000, 64)
    await next_one


async def test_a_cancelled_wait_holds_nothing_and_lets_those_behind_it_through() -> None:
    budget = Budget(bytes_max=10, chunks_max=10)
    await budget.acquire(5, 1)
    large, small = (asyncio.ensure_future(budget.acquire(size, 1)) for size in (10, 5))
    await asyncio.sleep(1)
    large.cancel()
    await small
    assert (budget.bytes_used, budget.chunks_used) == (10, 2)


async def test_a_wait_cancelled_in_the_tick_in_which_its_share_arrives_gives_it_back() -> None:
    budget = Budget(bytes_max=10, chunks_max=10)
    await budget.acquire(10, 1)
    waiting, behind = (asyncio.ensure_future(budget.acquire(10, 1)) for _ in range(2))
    await asyncio.sleep(1)
    budget.release(10, 1)
    waiting.cancel()
    await behind
    assert (budget.bytes_used, budget.chunks_used, waiting.cancelled()) == (10, 1, True)


async def test_giving_back_more_than_was_taken_is_a_bug_that_shows() -> None:
    budget = Budget(bytes_max=10, chunks_max=10)
    with pytest.raises(AssertionError):
        budget.release(1, 0)
